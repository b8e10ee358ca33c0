#include "hcp/layout_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace hybridcp::cli {

namespace {

constexpr double kWidth = 960, kMargin = 24;
constexpr double kLaneLeft = 108, kLaneWidth = 552;
constexpr double kBarLeft = 680, kBarWidth = 140;
constexpr double kRowHeight = 22, kRowGap = 4;
constexpr double kLetterWidth = 6.6;       // of the font size below, about
constexpr std::size_t kMaxPieces = 3000;   // drawn one by one
constexpr std::int64_t kMaxColumns = 552;  // instead, when there are more
constexpr std::int64_t kMaxCells = 20000;  // columns of all ranks together
constexpr const char* kInk = "#1f2933";
constexpr const char* kFaint = "#6b7785";

struct Hue {
    const char* even_document;
    const char* odd_document;
};
constexpr std::array<Hue, 8> kHues{{{"#8ecbf5", "#5aa9e0"},
                                    {"#fbd08a", "#f2ab3c"},
                                    {"#9ddfa6", "#62bf70"},
                                    {"#e3b6ee", "#c584d8"},
                                    {"#f3e38c", "#dcc443"},
                                    {"#f7b3ae", "#e8827b"},
                                    {"#8fe0db", "#4cbfb8"},
                                    {"#c3bdf2", "#978de0"}}};

const char* color_of(int rank, bool odd_document) {
    const Hue& hue = kHues[static_cast<std::size_t>(rank) % kHues.size()];
    return odd_document ? hue.odd_document : hue.even_document;
}

struct Box {
    double x = 0, y = 0, width = 0, height = 0;
};

std::string rect(const Box& box, const std::string& style) {
    return fmt::format(R"(<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" {}/>)"
                       "\n",
                       box.x, box.y, box.width, box.height, style);
}

/// `text` holds no character that XML knows.
std::string label(double x, double y, const std::string& text, const std::string& style = "") {
    return fmt::format(R"(<text x="{:.2f}" y="{:.2f}" {}>{}</text>)"
                       "\n",
                       x, y, style, text);
}

class Drawing {
  public:
    explicit Drawing(const LayoutSurvey& survey) : survey_(survey) {}

    [[nodiscard]] std::string draw() {
        body_ += label(kMargin, y_ + 16, describe(survey_), R"(font-size="16" font-weight="600")");
        y_ += 40;
        for (const KindSurvey& kind : survey_.kinds) {
            add_kind(kind);
        }
        if (!survey_.conversions.empty()) {
            add_conversions();
        }
        const double height = y_ + kMargin;
        return fmt::format(
                   R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" )"
                   R"(height="{1}" font-family="sans-serif" font-size="12" fill="{2}">)"
                   "\n",
                   kWidth, height, kInk) +
               rect({0, 0, kWidth, height}, R"(fill="white")") + body_ + "</svg>\n";
    }

  private:
    [[nodiscard]] double x_of(std::int64_t flat) const {
        return kLaneLeft + kLaneWidth * static_cast<double>(flat) /
                               static_cast<double>(std::max<std::int64_t>(survey_.num_tokens, 1));
    }

    void add_documents() {
        double free_from = 0;
        bool odd = true;
        for (std::size_t doc = 0; doc < survey_.request.document_lengths.size(); ++doc) {
            const double begin = x_of(survey_.document_offsets[doc]);
            const double end = x_of(survey_.document_offsets[doc + 1]);
            odd = odd == (end <= begin);
            if (end <= begin || (end - begin < 1 && begin < free_from)) {
                continue;  // empty, or nearer to its neighbours than the eye can tell
            }
            free_from = begin + 1;
            body_ += rect({begin, y_, end - begin, kRowHeight},
                          fmt::format(R"(fill="{}" stroke="white" stroke-width="{}")",
                                      odd ? "#cbd2d9" : "#e4e8ec", end - begin > 6 ? 1 : 0));
            for (const std::string& name :
                 {fmt::format("document {}: {} tokens", doc,
                              with_commas(survey_.request.document_lengths[doc])),
                  fmt::format("document {}", doc), fmt::format("{}", doc)}) {
                if (kLetterWidth * static_cast<double>(name.size() + 1) < end - begin) {
                    body_ += label((begin + end) / 2, y_ + 15, name, R"(text-anchor="middle")");
                    break;
                }
            }
        }
    }

    [[nodiscard]] double y_of(int rank) const { return y_ + (kRowHeight + kRowGap) * rank; }

    void add_pieces(const KindSurvey& kind) {
        for (const ChunkPiece& piece : kind.pieces) {
            const double width = x_of(piece.end) - x_of(piece.begin);
            body_ +=
                rect({x_of(piece.begin), y_of(piece.rank), width, kRowHeight},
                     fmt::format(R"(fill="{}" stroke="white" stroke-width="{}")",
                                 color_of(piece.rank, piece.odd_document), width > 3 ? 0.8 : 0));
            const std::string name = fmt::format("{}", piece.chunk);
            if (width > kLetterWidth * static_cast<double>(name.size()) + 4) {
                body_ += label(x_of(piece.begin) + width / 2, y_of(piece.rank) + 15, name,
                               R"(text-anchor="middle")");
            }
        }
    }

    void add_columns(const KindSurvey& kind) {
        const std::int64_t num_columns =
            std::min(kMaxColumns, kMaxCells / survey_.request.num_ranks);
        const auto cells = cells_of_ranks(kind, num_columns);
        const double width = kLaneWidth / static_cast<double>(num_columns);
        for (int rank = 0; rank < survey_.request.num_ranks; ++rank) {
            double x = kLaneLeft;
            for (const Cell& cell : cells[static_cast<std::size_t>(rank)]) {
                if (cell.share > 0.0) {
                    body_ += rect({x, y_of(rank), width, kRowHeight},
                                  fmt::format(R"(fill="{}" fill-opacity="{:.2f}")",
                                              color_of(rank, true), cell.share));
                }
                x += width;
            }
        }
    }

    [[nodiscard]] double work_scale() const {
        return kBarWidth /
               static_cast<double>(std::max<std::int64_t>(survey_.max_causal_work(), 1));
    }

    void add_work(const KindSurvey& kind, int rank) {
        const std::int64_t work = kind.causal_work[static_cast<std::size_t>(rank)];
        body_ += rect(
            {kBarLeft, y_of(rank) + 3, work_scale() * static_cast<double>(work), kRowHeight - 6},
            fmt::format(R"(fill="{}")", color_of(rank, true)));
        body_ +=
            label(kWidth - kMargin, y_of(rank) + 15, with_commas(work), R"(text-anchor="end")");
    }

    void add_mean(const KindSurvey& kind) {
        const auto most = static_cast<double>(
            *std::max_element(kind.causal_work.begin(), kind.causal_work.end()));
        const double x = kBarLeft + work_scale() * most / kind.max_over_mean;
        body_ +=
            fmt::format(R"(<line x1="{0:.2f}" x2="{0:.2f}" y1="{1:.2f}" y2="{2:.2f}" stroke="{3}" )"
                        R"(stroke-dasharray="3 3"/>)"
                        "\n",
                        x, y_, y_of(survey_.request.num_ranks) - kRowGap, kInk);
    }

    void add_kind(const KindSurvey& kind) {
        body_ += label(kMargin, y_ + 15, to_string(kind.layout.kind()), R"(font-weight="600")");
        body_ += label(kBarLeft, y_ + 15, "causal work (keys that its tokens see)",
                       fmt::format(R"(fill="{}")", kFaint));
        add_documents();
        y_ += kRowHeight + 2 * kRowGap;
        for (int rank = 0; rank < survey_.request.num_ranks; ++rank) {
            body_ += label(kMargin, y_of(rank) + 15, fmt::format("rank {}", rank));
            body_ += rect({kLaneLeft, y_of(rank), kLaneWidth, kRowHeight}, R"(fill="#f5f7f9")");
            add_work(kind, rank);
        }
        add_mean(kind);
        kind.pieces.size() <= kMaxPieces ? add_pieces(kind) : add_columns(kind);
        y_ = y_of(survey_.request.num_ranks);
        body_ +=
            label(kWidth - kMargin, y_ + 12, fmt::format("max/mean {:.4f}", kind.max_over_mean),
                  R"(text-anchor="end" font-weight="600")");
        y_ += 40;
    }

    void add_conversions() {
        body_ += label(kMargin, y_ + 15, "rows sent", R"(font-weight="600")");
        for (std::size_t i = 0; i < survey_.conversions.size(); ++i) {
            const ConversionSurvey& conversion = survey_.conversions[i];
            body_ += label(
                kLaneLeft + 300 * static_cast<double>(i), y_ + 15,
                fmt::format("{} to {}: {}", to_string(conversion.from), to_string(conversion.to),
                            share_sent(conversion, survey_.num_tokens)),
                R"(font-weight="600")");
        }
        y_ += kRowHeight + kRowGap;
        for (int rank = 0; rank < survey_.request.num_ranks; ++rank) {
            body_ += label(kMargin, y_ + 15, fmt::format("rank {}", rank));
            for (std::size_t i = 0; i < survey_.conversions.size(); ++i) {
                body_ += label(kLaneLeft + 300 * static_cast<double>(i), y_ + 15,
                               sends_of(survey_.conversions[i], rank));
            }
            y_ += kRowHeight;
        }
    }

    const LayoutSurvey& survey_;
    std::string body_;
    double y_ = kMargin;
};

}  // namespace

std::string layout_svg(const LayoutSurvey& survey) {
    return Drawing(survey).draw();
}

}  // namespace hybridcp::cli

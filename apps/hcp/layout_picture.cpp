#include "hcp/layout_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

namespace hybridcp::cli {

namespace {

constexpr std::size_t kLabelWidth = 11;  // "contiguous "
constexpr std::size_t kBarWidth = 12;
constexpr std::size_t kConversionWidth = 32;
constexpr std::string_view kWorkTitle = "causal work";
constexpr std::string_view kChunkSigns =
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

// Of the 256 colours: light enough for black letters, and one to be seen on dark and light
// terminals.
struct Hue {
    int even_document;
    int odd_document;
    int letter;
};
constexpr std::array<Hue, 8> kHues{{{117, 75, 33},
                                    {222, 214, 172},
                                    {120, 77, 35},
                                    {219, 176, 133},
                                    {228, 220, 142},
                                    {217, 210, 167},
                                    {123, 80, 37},
                                    {189, 147, 98}}};

const Hue& hue_of(int rank) {
    return kHues[static_cast<std::size_t>(rank) % kHues.size()];
}

class Picture {
  public:
    Picture(const LayoutSurvey& survey, const PictureOptions& options)
        : survey_(survey),
          color_(options.color),
          number_width_(std::max<std::size_t>(with_commas(survey.max_causal_work()).size(),
                                              kWorkTitle.size())),
          num_cells_(options.width -
                     static_cast<std::int64_t>(kLabelWidth + 2 + kBarWidth + 1 + number_width_)) {
        if (survey.num_tokens > 0 && survey.num_tokens < num_cells_) {
            num_cells_ -= num_cells_ % survey.num_tokens;  // a token is as wide as any other
        }
    }

    [[nodiscard]] std::string draw() const {
        std::string text = bold(describe(survey_)) + "\n" + legend();
        for (const KindSurvey& kind : survey_.kinds) {
            text += "\n" + kind_block(kind);
        }
        return text + (survey_.conversions.empty() ? "" : "\n" + conversions());
    }

  private:
    [[nodiscard]] std::string styled(const std::string& codes, const std::string& text) const {
        return color_ && !text.empty() ? "\x1b[" + codes + "m" + text + "\x1b[0m" : text;
    }
    [[nodiscard]] std::string bold(const std::string& text) const { return styled("1", text); }
    /// Black on the colour of a rank.
    [[nodiscard]] static std::string paint(int rank, bool odd_document) {
        const Hue& hue = hue_of(rank);
        return fmt::format("38;5;16;48;5;{}", odd_document ? hue.odd_document : hue.even_document);
    }

    [[nodiscard]] std::string legend() const {
        if (survey_.num_tokens == 0) {
            return "";
        }
        const double tokens =
            static_cast<double>(survey_.num_tokens) / static_cast<double>(num_cells_);
        const std::string scale =
            tokens < 1.0 ? fmt::format("a token is {} columns", std::lround(1.0 / tokens))
            : tokens < 100.0
                ? fmt::format("a column is {:.3g} tokens", tokens)
                : fmt::format("a column is {} tokens", with_commas(std::lround(tokens)));
        return fmt::format(
            "{}; causal work: how many keys the tokens of a rank see\n"
            "{}: the chunk that fills a column; +: less than half of it\n",
            scale, used_signs());
    }

    /// "0-7", "0-9a-v", ...
    [[nodiscard]] std::string used_signs() const {
        const auto num_chunks = 2 * static_cast<std::size_t>(survey_.request.num_ranks);
        const char last = kChunkSigns[std::min(num_chunks, kChunkSigns.size()) - 1];
        return num_chunks <= 10                   ? fmt::format("0-{}", last)
               : num_chunks <= 36                 ? fmt::format("0-9a-{}", last)
               : num_chunks <= kChunkSigns.size() ? fmt::format("0-9a-zA-{}", last)
                                                  : "0-9a-zA-Z#";
    }

    /// Where each document begins, with as much of its number and length as there is room for.
    [[nodiscard]] std::string document_line() const {
        std::string line(static_cast<std::size_t>(num_cells_), ' ');
        std::size_t free_from = 0;
        const auto column = [&](std::int64_t flat) {
            return static_cast<std::size_t>(flat * num_cells_ / survey_.num_tokens);
        };
        for (std::size_t doc = 0; doc < survey_.request.document_lengths.size(); ++doc) {
            const std::int64_t length = survey_.request.document_lengths[doc];
            if (length == 0) {
                continue;
            }
            const std::size_t begin = column(survey_.document_offsets[doc]);
            const std::size_t end = column(survey_.document_offsets[doc + 1]);
            if (begin < free_from) {
                continue;
            }
            line[begin] = '|';
            free_from = begin + 1;
            for (const std::string& name :
                 {fmt::format("document {}: {}", doc, with_commas(length)),
                  fmt::format("{}: {}", doc, with_commas(length)), fmt::format("{}", doc)}) {
                if (free_from + name.size() <= end) {
                    line.replace(free_from, name.size(), name);
                    break;
                }
            }
        }
        return line;
    }

    /// The sign of a cell and its style, as ANSI codes.
    [[nodiscard]] static std::pair<char, std::string> sign_of(int rank, const Cell& cell) {
        if (cell.share == 0.0) {
            return {'.', "2"};
        }
        if (cell.share < 0.5) {
            return {'+', fmt::format("38;5;{}", hue_of(rank).letter)};
        }
        const auto chunk = static_cast<std::size_t>(cell.chunk);
        return {chunk < kChunkSigns.size() ? kChunkSigns[chunk] : '#',
                paint(rank, cell.odd_document)};
    }

    [[nodiscard]] std::string lane(int rank, const std::vector<Cell>& cells) const {
        std::string text;
        std::string run;  // of one style
        std::string run_codes;
        for (const Cell& cell : cells) {
            const auto [sign, codes] = sign_of(rank, cell);
            if (codes != run_codes) {
                text += styled(run_codes, run);
                run.clear();
                run_codes = codes;
            }
            run += sign;
        }
        return text + styled(run_codes, run);
    }

    [[nodiscard]] std::string bar(int rank, std::int64_t work) const {
        const auto most = static_cast<double>(survey_.max_causal_work());
        const double share = most > 0.0 ? static_cast<double>(work) / most : 0.0;
        const auto length = static_cast<std::size_t>(std::lround(share * kBarWidth));
        return styled(paint(rank, false), std::string(length, color_ ? ' ' : '=')) +
               std::string(kBarWidth - length, ' ');
    }

    [[nodiscard]] std::string kind_block(const KindSurvey& kind) const {
        const std::string name = to_string(kind.layout.kind());
        std::string text = bold(fmt::format("{:<{}}", name, kLabelWidth));
        text += fmt::format("{}  {:>{}}\n", survey_.num_tokens > 0 ? document_line() : "",
                            kWorkTitle, kBarWidth + 1 + number_width_);
        const auto cells = cells_of_ranks(kind, num_cells_);
        for (int rank = 0; rank < kind.layout.num_ranks(); ++rank) {
            const auto index = static_cast<std::size_t>(rank);
            text += fmt::format("{:<{}}", fmt::format("rank {}", rank), kLabelWidth);
            text += lane(rank, cells[index]);
            text += fmt::format("  {} {:>{}}\n", bar(rank, kind.causal_work[index]),
                                with_commas(kind.causal_work[index]), number_width_);
        }
        const std::string ratio = fmt::format("max/mean {:.4f}", kind.max_over_mean);
        const std::size_t width =
            kLabelWidth + (survey_.num_tokens > 0 ? 1 : 0) * static_cast<std::size_t>(num_cells_) +
            2 + kBarWidth + 1 + number_width_;
        return text + fmt::format("{:>{}}\n", ratio, width);
    }

    [[nodiscard]] std::string conversions() const {
        const auto line = [&](const std::string& label, const auto& value) {
            std::string text = fmt::format("{:<{}}", label, kLabelWidth);
            for (const ConversionSurvey& conversion : survey_.conversions) {
                text += fmt::format("{:>{}}", value(conversion), kConversionWidth);
            }
            return text + "\n";
        };
        std::string text = bold(line("rows sent", [](const ConversionSurvey& conversion) {
            return fmt::format("{} -> {}", to_string(conversion.from), to_string(conversion.to));
        }));
        for (int rank = 0; rank < survey_.request.num_ranks; ++rank) {
            text += line(fmt::format("rank {}", rank), [&](const ConversionSurvey& conversion) {
                return sends_of(conversion, rank);
            });
        }
        return text + line("all", [&](const ConversionSurvey& conversion) {
                   return share_sent(conversion, survey_.num_tokens);
               });
    }

    const LayoutSurvey& survey_;
    bool color_;
    std::size_t number_width_;
    std::int64_t num_cells_;
};

}  // namespace

std::string layout_picture(const LayoutSurvey& survey, const PictureOptions& options) {
    return Picture(survey, options).draw();
}

}  // namespace hybridcp::cli

#include "hcp/layout_survey.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "layout/causal_work.h"
#include "layout/chunks.h"

namespace hybridcp::cli {

namespace {

std::string counted(std::int64_t number, const char* what) {
    return fmt::format("{} {}{}", with_commas(number), what, number == 1 ? "" : "s");
}

Layout make_layout(const SurveyRequest& request, LayoutKind kind) {
    return Layout::make({.kind = kind,
                         .cut = request.cut,
                         .num_ranks = request.num_ranks,
                         .document_lengths = request.document_lengths});
}

// Where the chunks that a document takes part in begin and end, in the flat order.
std::vector<std::int64_t> chunk_boundaries_at(const Layout& layout, std::int64_t doc) {
    if (layout.cut() == LayoutCut::kRow) {
        return chunk_boundaries(layout.num_tokens(), layout.num_ranks(), 0);
    }
    const auto index = static_cast<std::size_t>(doc);
    const std::int64_t offset = layout.document_offsets()[index];
    std::vector<std::int64_t> boundaries =
        chunk_boundaries(layout.document_lengths()[index], layout.num_ranks(), offset);
    for (std::int64_t& boundary : boundaries) {
        boundary += offset;
    }
    return boundaries;
}

std::vector<ChunkPiece> cut_into_pieces(const Layout& layout) {
    std::vector<ChunkPiece> pieces;
    bool odd_document = true;
    for (std::int64_t doc = 0; doc < layout.num_documents(); ++doc) {
        const std::int64_t offset = layout.document_offsets()[static_cast<std::size_t>(doc)];
        const std::vector<std::int64_t> boundaries = chunk_boundaries_at(layout, doc);
        std::size_t chunk = 0;
        odd_document = odd_document == layout.chain(doc).empty();
        for (const Segment& segment : layout.chain(doc)) {
            const std::int64_t segment_end = offset + segment.end;
            for (std::int64_t begin = offset + segment.begin; begin < segment_end;) {
                while (boundaries[chunk + 1] <= begin) {
                    ++chunk;
                }
                const std::int64_t end = std::min(segment_end, boundaries[chunk + 1]);
                pieces.push_back({.begin = begin,
                                  .end = end,
                                  .chunk = static_cast<int>(chunk),
                                  .rank = segment.rank,
                                  .odd_document = odd_document});
                begin = end;
            }
        }
    }
    return pieces;
}

KindSurvey survey_kind(const SurveyRequest& request, LayoutKind kind) {
    KindSurvey survey{.layout = make_layout(request, kind), .pieces = {}, .causal_work = {}};
    survey.pieces = cut_into_pieces(survey.layout);
    for (int rank = 0; rank < request.num_ranks; ++rank) {
        survey.causal_work.push_back(causal_work(survey.layout, rank));
    }
    const std::vector<std::int64_t>& work = survey.causal_work;
    const auto sum =
        static_cast<double>(std::accumulate(work.begin(), work.end(), std::int64_t{0}));
    if (sum > 0.0) {
        const auto most = static_cast<double>(*std::max_element(work.begin(), work.end()));
        survey.max_over_mean = most * request.num_ranks / sum;
    }
    return survey;
}

nlohmann::json kind_to_json(const KindSurvey& survey) {
    nlohmann::json ranks = nlohmann::json::array();
    for (int rank = 0; rank < survey.layout.num_ranks(); ++rank) {
        nlohmann::json segments = nlohmann::json::array();
        for (const Segment& segment : survey.layout.segments(rank)) {
            segments.push_back({{"document", segment.doc},
                                {"begin", segment.begin},
                                {"end", segment.end},
                                {"chain_position", segment.chain_pos}});
        }
        ranks.push_back({{"rank", rank},
                         {"tokens", survey.layout.num_local_tokens(rank)},
                         {"causal_work", survey.causal_work[static_cast<std::size_t>(rank)]},
                         {"segments", segments}});
    }
    return {{"kind", to_string(survey.layout.kind())},
            {"causal_work_max_over_mean", survey.max_over_mean},
            {"ranks", ranks}};
}

nlohmann::json conversion_to_json(const ConversionSurvey& survey) {
    nlohmann::json ranks = nlohmann::json::array();
    for (const Route& route : survey.routes) {
        nlohmann::json sends = nlohmann::json::array();
        for (const RowMessage& send : route.sends) {
            sends.push_back({{"peer", send.peer}, {"rows", send.num_rows}});
        }
        ranks.push_back({{"rank", ranks.size()}, {"sends", sends}});
    }
    return {{"from", to_string(survey.from)},
            {"to", to_string(survey.to)},
            {"max_peers", survey.routes.front().max_peers},
            {"ranks", ranks}};
}

}  // namespace

std::int64_t LayoutSurvey::max_causal_work() const {
    std::int64_t most = 0;
    for (const KindSurvey& kind : kinds) {
        most = std::max(most, *std::max_element(kind.causal_work.begin(), kind.causal_work.end()));
    }
    return most;
}

LayoutSurvey survey_layouts(SurveyRequest request) {
    LayoutSurvey survey;
    survey.request = std::move(request);
    for (const LayoutKind kind : survey.request.kinds) {
        survey.kinds.push_back(survey_kind(survey.request, kind));
    }
    for (const auto& [from, to] : survey.request.conversions) {
        const Layout source = make_layout(survey.request, from);
        const Layout target = make_layout(survey.request, to);
        ConversionSurvey& conversion = survey.conversions.emplace_back();
        conversion.from = from;
        conversion.to = to;
        for (int rank = 0; rank < survey.request.num_ranks; ++rank) {
            conversion.routes.push_back(make_route(source, target, rank));
        }
    }
    const Layout& any = survey.kinds.front().layout;
    survey.num_tokens = any.num_tokens();
    survey.document_offsets = any.document_offsets();
    return survey;
}

nlohmann::json to_json(const LayoutSurvey& survey) {
    nlohmann::json layouts = nlohmann::json::array();
    for (const KindSurvey& kind : survey.kinds) {
        layouts.push_back(kind_to_json(kind));
    }
    nlohmann::json conversions = nlohmann::json::array();
    for (const ConversionSurvey& conversion : survey.conversions) {
        conversions.push_back(conversion_to_json(conversion));
    }
    return {{"ranks", survey.request.num_ranks},
            {"cut", to_string(survey.request.cut)},
            {"document_lengths", survey.request.document_lengths},
            {"tokens", survey.num_tokens},
            {"layouts", layouts},
            {"conversions", conversions}};
}

std::vector<std::vector<Cell>> cells_of_ranks(const KindSurvey& kind, std::int64_t num_cells) {
    const std::int64_t num_tokens = kind.layout.num_tokens();
    std::vector<std::vector<Cell>> cells(
        static_cast<std::size_t>(kind.layout.num_ranks()),
        std::vector<Cell>(static_cast<std::size_t>(num_tokens == 0 ? 0 : num_cells)));
    for (const ChunkPiece& piece : kind.pieces) {
        // Cells and tokens on one scale of num_tokens * num_cells units.
        const std::int64_t begin = piece.begin * num_cells;
        const std::int64_t end = piece.end * num_cells;
        for (std::int64_t index = begin / num_tokens; index * num_tokens < end; ++index) {
            const std::int64_t units =
                std::min(end, (index + 1) * num_tokens) - std::max(begin, index * num_tokens);
            Cell& cell =
                cells[static_cast<std::size_t>(piece.rank)][static_cast<std::size_t>(index)];
            const double share = static_cast<double>(units) / static_cast<double>(num_tokens);
            cell.share += share;
            if (share > cell.largest_share) {
                cell.largest_share = share;
                cell.chunk = piece.chunk;
                cell.odd_document = piece.odd_document;
            }
        }
    }
    return cells;
}

std::string with_commas(std::int64_t number) {
    std::string digits = fmt::format("{}", number);
    for (auto at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > 0; at -= 3) {
        digits.insert(static_cast<std::size_t>(at), 1, ',');
    }
    return digits;
}

std::string sends_of(const ConversionSurvey& conversion, int rank) {
    std::vector<std::string> sends;
    for (const RowMessage& send : conversion.routes[static_cast<std::size_t>(rank)].sends) {
        sends.push_back(fmt::format("{} to {}", with_commas(send.num_rows), send.peer));
    }
    return sends.empty() ? "-" : fmt::format("{}", fmt::join(sends, ", "));
}

std::string share_sent(const ConversionSurvey& conversion, std::int64_t num_tokens) {
    std::int64_t num_rows = 0;
    std::int64_t num_messages = 0;
    for (const Route& route : conversion.routes) {
        for (const RowMessage& send : route.sends) {
            num_rows += send.num_rows;
            ++num_messages;
        }
    }
    const double share =
        num_tokens == 0 ? 0.0 : static_cast<double>(num_rows) / static_cast<double>(num_tokens);
    return fmt::format("{:.1f}% in {}", 100.0 * share, counted(num_messages, "message"));
}

std::string describe(const LayoutSurvey& survey) {
    return fmt::format(
        "{}, {}, {}; {} chunks a {}", counted(survey.request.num_ranks, "rank"),
        counted(static_cast<std::int64_t>(survey.request.document_lengths.size()), "document"),
        counted(survey.num_tokens, "token"), 2 * survey.request.num_ranks,
        to_string(survey.request.cut));
}

}  // namespace hybridcp::cli

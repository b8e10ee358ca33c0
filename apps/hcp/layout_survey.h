// What `hcp inspect layout` shows, as numbers: who holds what, how much causal attention that is,
// and what a conversion moves. The pictures and the JSON are made of it.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "hybridcp/layout.h"
#include "layout/route.h"

namespace hybridcp::cli {

struct SurveyRequest {
    std::vector<LayoutKind> kinds;
    /// From, to; each kind need not be among `kinds`.
    std::vector<std::pair<LayoutKind, LayoutKind>> conversions;
    LayoutCut cut = LayoutCut::kDocument;
    int num_ranks = 1;
    std::vector<std::int64_t> document_lengths;
};

/// A chunk's tokens of one document, in the flat order.
struct ChunkPiece {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    int chunk = 0;
    int rank = 0;
    bool odd_document = false;  // of those that have tokens: neighbours differ
};

struct KindSurvey {
    Layout layout;
    std::vector<ChunkPiece> pieces;         // in the flat order
    std::vector<std::int64_t> causal_work;  // of each rank
    double max_over_mean = 1.0;             // of the causal work
};

struct ConversionSurvey {
    LayoutKind from = LayoutKind::kZigzag;
    LayoutKind to = LayoutKind::kFolded;
    std::vector<Route> routes;  // of each rank
};

struct LayoutSurvey {
    SurveyRequest request;
    std::int64_t num_tokens = 0;
    std::vector<std::int64_t> document_offsets;
    std::vector<KindSurvey> kinds;
    std::vector<ConversionSurvey> conversions;

    [[nodiscard]] std::int64_t max_causal_work() const;  // over kinds and ranks
};

/// Errors: those of Layout::make and causal_work.
[[nodiscard]] LayoutSurvey survey_layouts(SurveyRequest request);
[[nodiscard]] nlohmann::json to_json(const LayoutSurvey& survey);

/// What a rank holds of one of `num_cells` equal parts of the flat order.
struct Cell {
    double share = 0.0;          // of the cell's tokens
    double largest_share = 0.0;  // that of one piece: of this chunk and document
    int chunk = 0;
    bool odd_document = false;
};
/// [num_ranks][num_cells]. With fewer tokens than cells a token takes several.
[[nodiscard]] std::vector<std::vector<Cell>> cells_of_ranks(const KindSurvey& kind,
                                                            std::int64_t num_cells);

/// 1234567 as 1,234,567.
[[nodiscard]] std::string with_commas(std::int64_t number);
/// "1,024 to 3, 1,024 to 1" (ranks), or "-" when the rank keeps all its rows.
[[nodiscard]] std::string sends_of(const ConversionSurvey& conversion, int rank);
/// "50.0% in 4 messages": the rows that change their rank.
[[nodiscard]] std::string share_sent(const ConversionSurvey& conversion, std::int64_t num_tokens);
/// "4 ranks, 3 documents, 5,113 tokens; 8 chunks a document".
[[nodiscard]] std::string describe(const LayoutSurvey& survey);

}  // namespace hybridcp::cli

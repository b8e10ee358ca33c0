// `hcp inspect layout`: which rank holds which tokens, how much work that is, and what conversions
// move, as a picture in the terminal, an SVG or JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hybridcp::cli {

struct InspectLayoutOptions {
    std::string recipe_path = {};  // gives ranks, cut, kinds and the documents of the first batch
    std::vector<std::string> overrides = {};
    // Without a recipe: ranks, and documents or a length.
    std::optional<int> num_ranks = std::nullopt;
    std::vector<std::int64_t> document_lengths = {};
    std::optional<std::int64_t> sequence_length = std::nullopt;
    std::optional<std::string> cut = std::nullopt;
    std::vector<std::string> kinds = {};  // empty: the recipe's, or all
    std::string color = "auto";           // auto | always | never
    std::optional<int> width = std::nullopt;
    std::string svg_path = {};
    std::string json_path = {};
};

/// Returns the exit status. Errors: UsageError for what contradicts itself or cannot be drawn;
/// those of the recipe and its data; FormatError when a file cannot be written.
[[nodiscard]] int inspect_layout(const InspectLayoutOptions& options);

}  // namespace hybridcp::cli

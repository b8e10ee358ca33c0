// In which layout each layer's mixer runs, and where the stream is converted on the way: for people
// and for tests; HybridModel::forward does it.
#pragma once

#include <cstdint>
#include <string>

#include "hybridcp/model.h"

namespace hybridcp {

/// Conversions of `hidden` in one forward pass (as many in backward); 0 on one rank.
[[nodiscard]] std::int64_t num_conversions(const ModelConfig& config, const Parallel& parallel);

/// One line: a letter a layer for the layout of its mixer, a bar where the stream is converted;
/// empty where nothing is. For example
/// "layouts: z zigzag, f folded, | conversion: |fff|z|fff|z: 4 conversions of hidden a pass".
[[nodiscard]] std::string describe_layouts(const ModelConfig& config, const Parallel& parallel);

}  // namespace hybridcp

// What a rank updates, clips and saves of the model's parameters: all of each, or under sharding a
// run of its elements.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "hybridcp/model.h"

namespace hybridcp {

/// Elements [begin, begin + value.numel()) of one parameter in its flat order.
struct ParameterPiece {
    std::string name;                      // of the parameter
    std::vector<std::int64_t> shape = {};  // of the whole parameter
    std::int64_t begin = 0;
    at::Tensor value;  // fp32: the parameter itself, or a flat run of it; .grad is its gradient

    /// Weight decay acts on parameters of two or more dims (convolution included).
    [[nodiscard]] bool decays() const { return shape.size() >= 2; }
    [[nodiscard]] std::int64_t end() const { return begin + value.numel(); }
};

/// Each parameter as one piece that shares its storage and gradient.
[[nodiscard]] std::vector<ParameterPiece> whole_pieces(
    const std::vector<NamedParameter>& parameters);

}  // namespace hybridcp

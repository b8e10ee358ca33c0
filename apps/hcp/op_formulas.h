// What `verify op` runs for each operator but the delta rule: the kernel, between the names that
// the golden files use. Every function is differentiable in its inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "hcp/golden_case.h"

namespace hybridcp::cli {

using NamedTensors = std::map<std::string, at::Tensor>;

struct OpFormula {
    std::vector<std::string> inputs;   // differentiable; those that the file lacks are left out
    std::string indexed_inputs = {};   // and NAME.0, NAME.1, ..., as many as the file has
    std::vector<std::string> outputs;  // compared where the file has them
    std::vector<std::string> others;   // integers, and tensors that are compared elsewhere
    bool has_bf16_bar = false;
    std::int64_t head_dim = -1;  // of bf16 comparisons per head; -1: no heads
    std::function<NamedTensors(const NamedTensors&, const OpCase&)> run;
};

/// Every operator of the golden data but gdn, by name.
[[nodiscard]] const std::map<std::string, OpFormula>& op_formulas();

}  // namespace hybridcp::cli

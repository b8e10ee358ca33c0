// `hcp bench conv|norm|gated_norm|rotary|swiglu|cross_entropy`: an operator that is bound by
// memory, verified against its formula in fp64, then timed forward and backward, by backend and by
// turns, next to what a copy of memory reaches. docs/benchmarks.md says what is counted.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace hybridcp::cli {

struct BenchOpOptions {
    std::string op;
    std::int64_t tokens = 8192;
    std::int64_t width = 0;  // channels, features or vocabulary; 0: the operator's own
    std::vector<std::string> dtypes{"bf16", "fp32"};
    std::vector<std::string> backends;  // empty: all
    std::vector<std::string> isas;      // of backends with kernels per ISA; empty: the selected
    int threads = 1;
    int repeats = 10;
    std::string report_path;
};

using Tensors = std::vector<at::Tensor>;

/// One operator on inputs of one size.
struct OpProblem {
    Tensors inputs;  // all differentiable
    std::vector<std::string> names;
    std::function<at::Tensor(const Tensors&)> kernel;
    std::function<at::Tensor(const Tensors&)> formula;  // in the dtype of what it is given
    /// At the least: every large tensor that a pass needs read or written once.
    double forward_bytes = 0.0, backward_bytes = 0.0;
    /// Matrix products inside the kernel, to be timed alone and taken off; may be empty.
    std::function<void()> forward_products = {}, backward_products = {};
};

/// The operators' names, as the command line has them.
[[nodiscard]] std::vector<std::string> bench_op_names();

/// width 0: the operator's own. Errors: UsageError for a width that it cannot have.
[[nodiscard]] OpProblem make_op_problem(const std::string& op,
                                        std::int64_t tokens,
                                        std::int64_t width,
                                        at::ScalarType dtype);

[[nodiscard]] int bench_op(const BenchOpOptions& options);

}  // namespace hybridcp::cli

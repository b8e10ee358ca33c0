// `hcp verify op`: one operator on golden cases, outputs and the gradient of every input.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "hcp/golden_case.h"
#include "hcp/report.h"

namespace hybridcp::cli {

struct VerifyOpOptions {
    std::string op;
    std::vector<std::string> files;
    std::string backend = "eager";  // eager | fused | reference (fp64)
    std::string dtype = "fp32";     // fp32 | bf16; with reference only fp32
    std::string device = "cpu";
    std::int64_t chunk_size = 64;  // gdn, eager
    std::string report_path = {};
};

/// Returns the exit status. Errors: UsageError for an unknown operator, backend, dtype or device.
[[nodiscard]] int verify_op(const VerifyOpOptions& options);

/// The options of one run once checked.
struct OpRun {
    bool reference = false;
    bool fused = false;
    bool bf16 = false;
    at::ScalarType dtype = at::kFloat;  // of the computation: kDouble, kFloat or kBFloat16
    at::Device device = at::kCPU;
    std::int64_t chunk_size = 64;
};

/// The delta rule, by way of its backend contract (verify_gdn.cpp).
void compare_gdn(const OpCase& op_case, const OpRun& run, Report& report);

/// Bar of every comparison of the fp64 reference: the rounding of the stored fp32 values, and room
/// for it.
inline constexpr double kReferenceBar = 1e-6;

}  // namespace hybridcp::cli

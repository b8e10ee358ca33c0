// What the tests of the gated delta rule share: golden cases, generated inputs, a comparison by
// head.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kernels/gdn/gdn.h"

namespace hybridcp::test {

using Tensors = std::map<std::string, at::Tensor>;

/// One problem with upstream gradients; a document is a segment.
struct GdnCase {
    std::string name;
    GdnInputs inputs;
    std::vector<std::int64_t> offsets;
    GdnOptions options;
    at::Tensor S_start;  // undefined for zeros
    at::Tensor d_o;
    at::Tensor dS_end;  // undefined for zeros
    Tensors expected;   // named as in run_all
};

/// Names of the golden cases that are present, and one of them with its expected tensors.
[[nodiscard]] std::vector<std::string> golden_case_names();
[[nodiscard]] GdnCase golden_case(const std::string& name);
/// Segment summaries of a golden case: `seg.cuts`, `seg.M` and so on, and `cu_seqlens`.
[[nodiscard]] Tensors golden_segments(const std::string& name);

struct GdnShape {
    std::vector<std::int64_t> offsets;
    std::int64_t num_tokens;
    std::int64_t key_heads;
    std::int64_t value_heads;
    std::int64_t key_dim;
    std::int64_t value_dim;
};
/// Random inputs with gates from very slow to fast, a random start state and upstream gradients, in
/// fp32.
[[nodiscard]] GdnCase generated_case(const GdnShape& shape, std::uint64_t seed);
/// The same case with q, k, v, beta and d_o rounded to `type` (g and the states stay as they are).
[[nodiscard]] GdnCase with_dtype(const GdnCase& gdn_case, at::ScalarType type);

/// In bf16, K = V = 128, without padding.
[[nodiscard]] GdnCase bf16_case(const std::vector<std::int64_t>& offsets,
                                std::int64_t key_heads,
                                std::int64_t value_heads,
                                std::uint64_t seed);

/// Outputs and gradients of a case: o, S_end, dq, dk, dv, dg, dbeta, dS_start.
[[nodiscard]] Tensors run_all(GdnBackend backend, const GdnCase& gdn_case);
[[nodiscard]] Tensors run_all(GdnCall& call, const GdnCase& gdn_case);

/// Moves the rows of dq and dk that belong to zero and tiny q and k (edge_values) out to tensors of
/// their own: they are hundreds of times larger than the others and would hide them.
void split_extreme_rows(const GdnCase& gdn_case, Tensors& tensors);

/// max over heads (dim 1) of |x - reference| / |reference|; infinite if x is not finite. A head
/// whose reference is below 1e-4 of the largest head's may be off by 1e-6 of that one.
[[nodiscard]] double worst_head_error(const at::Tensor& x, const at::Tensor& reference);

/// The same of values that fp32 can hold with all digits (smaller ones count as zero), and over all
/// heads together for rows of a few tokens: a head's would be a few numbers, of which some cancel
/// to nothing.
[[nodiscard]] double generated_error(const at::Tensor& x, const at::Tensor& reference);

/// Fails the current test if a tensor of `expected` is missing in `actual` or off by more than its
/// bar.
void expect_close(const Tensors& actual,
                  const Tensors& expected,
                  const std::map<std::string, double>& bars,
                  double default_bar);

}  // namespace hybridcp::test

// All tokens of all ranks on every rank: what attention by gathered keys and the mode gather_hidden
// exchange.
#pragma once

#include <string>

#include "ops/context_parallel.h"

namespace hybridcp {

struct TokenGatherOptions {
    std::string op;                     // the name under which the exchange is counted
    at::ScalarType dtype = at::kFloat;  // of the result
};

/// [T_local, ...] of each rank -> [T, ...] in flat order. Rows travel in their own dtype.
/// Differentiable: gradients of other ranks' rows go to them and are summed there in fp32, in rank
/// order.
/// Comm: forward one all-gather, shards padded to the longest: (P-1)*T_max rows; backward one
/// all-to-all: T - T_local rows, in `dtype`.
[[nodiscard]] at::Tensor gather_tokens(const Sharded& local,
                                       const TokenGatherOptions& options,
                                       const CpContext& context);

/// Its two passes without autograd, for functions that gather again in their backward pass.
[[nodiscard]] at::Tensor gather_rows(const at::Tensor& local,
                                     const TokenGatherOptions& options,
                                     const CpContext& context);
/// Each rank's gradient [T, ...] of all rows -> their sum over the ranks, of the local rows
/// [T_local, ...]; `options.dtype` is that of the result.
[[nodiscard]] at::Tensor sum_gathered(const at::Tensor& gradient,
                                      const TokenGatherOptions& options,
                                      const CpContext& context);

}  // namespace hybridcp

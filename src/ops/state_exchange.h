// The boundary states of linear attention: each local segment's start state from the segments
// before it, and the gradient of each end state from those after it, by one of two strategies that
// give the same numbers. Legend: N local segments, Hv value heads, K/V head dims.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "kernels/gdn/gdn.h"
#include "ops/context_parallel.h"

namespace hybridcp {

struct StateShape {
    std::int64_t heads = 0;
    std::int64_t key_dim = 0;
    std::int64_t value_dim = 0;
    at::TensorOptions options;  // fp32 (fp64 under the reference backend), device
};

/// One layer's exchange in one pass. It keeps the matrices M that backward needs (they are its only
/// state), so that a recomputed forward pass needs no communication.
class StateExchanger {
  public:
    virtual ~StateExchanger() = default;
    /// `summarize` computes (S, M) of the local segments; it is called after receives are posted,
    /// and not at all where no other segment needs them. Returns S_start [N, Hv, K, V]; undefined
    /// when every segment starts from zero.
    [[nodiscard]] virtual at::Tensor start_states(const std::function<GdnSummary()>& summarize) = 0;
    /// `summarize` computes dS of the local segments' own outputs. Returns dS_end [N, Hv, K, V], or
    /// undefined for zeros.
    [[nodiscard]] virtual at::Tensor end_gradients(
        const std::function<at::Tensor()>& summarize) = 0;
    /// Waits for what is still being sent; called after the local output is computed.
    virtual void finish() = 0;
};

/// Serial chain: one message of S per chain link, its gradient back; the serial part per hop is M S
/// + S.
[[nodiscard]] std::unique_ptr<StateExchanger> make_p2p_exchanger(const CpContext& context,
                                                                 const StateShape& shape);
/// All summaries gathered once, folded locally.
[[nodiscard]] std::unique_ptr<StateExchanger> make_all_gather_exchanger(const CpContext& context,
                                                                        const StateShape& shape);

}  // namespace hybridcp

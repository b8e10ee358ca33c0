// The boundary states of linear attention: each local segment's start state from the segments
// before it, and the gradient of each end state from those after it, by one of three strategies
// that give the same numbers. Legend: N local segments, Hv value heads, K/V head dims.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "kernels/gdn/gdn.h"
#include "ops/context_parallel.h"

namespace hybridcp {

struct StateShape {
    std::int64_t heads = 0;
    std::int64_t key_dim = 0;
    std::int64_t value_dim = 0;
    at::TensorOptions options;  // fp32 (fp64 under the reference backend), device

    [[nodiscard]] std::vector<std::int64_t> of(std::int64_t count) const {
        return {count, heads, key_dim, value_dim};
    }
};

/// The local segments as an exchanger sees them.
struct SegmentMaps {
    /// (S, M) of the local segments.
    std::function<GdnSummary()> summarize;
    /// GdnCall::independent(): [N * Hv], or null where the backend does not tell (on all ranks).
    const std::vector<bool>* independent = nullptr;

    /// Whether no head's end state depends on the segment's start state.
    [[nodiscard]] bool all_independent(std::int64_t segment, std::int64_t heads) const;
};

/// One layer's exchange in one pass. It keeps the matrices M that backward needs (they are its only
/// state), so that a recomputed forward pass needs no communication.
class StateExchanger {
  public:
    virtual ~StateExchanger() = default;
    /// `maps.summarize` is called after receives are posted, and not at all where no other segment
    /// needs it. Returns S_start [N, Hv, K, V]; undefined when every segment starts from zero.
    [[nodiscard]] virtual at::Tensor start_states(const SegmentMaps& maps) = 0;
    /// `summarize` computes dS of the local segments' own outputs. Returns dS_end [N, Hv, K, V], or
    /// undefined for zeros.
    [[nodiscard]] virtual at::Tensor end_gradients(
        const std::function<at::Tensor()>& summarize) = 0;
    /// Waits for what is still being sent; called after the local output is computed.
    virtual void finish() = 0;
};

/// Serial chain: one message of S per chain link, its gradient back; the serial part per hop is M S
/// + S. A segment whose heads are all independent of its start passes its S on without waiting.
[[nodiscard]] std::unique_ptr<StateExchanger> make_p2p_exchanger(const CpContext& context,
                                                                 const StateShape& shape);
/// All summaries gathered once, folded locally.
[[nodiscard]] std::unique_ptr<StateExchanger> make_all_gather_exchanger(const CpContext& context,
                                                                        const StateShape& shape);
/// Windows of summaries, doubled in each of ceil(log2 n) rounds for a chain of n segments.
[[nodiscard]] std::unique_ptr<StateExchanger> make_scan_exchanger(const CpContext& context,
                                                                  const StateShape& shape);

/// Heads whose end state does not depend on the start state, of all segments that take part in the
/// plan's prefix gather: ranks learn from it which M travel. `none` where no rank can tell.
class IndependentHeads {
  public:
    IndependentHeads() = default;
    /// Comm: one all-gather of a byte a slot and head, unless `maps.independent` is null.
    IndependentHeads(const SegmentMaps& maps, const CpContext& context, std::int64_t heads);

    /// By value head; empty when all depend.
    using Heads = std::vector<bool>;
    [[nodiscard]] Heads of(const SummaryGather::Slot& slot) const;

  private:
    std::int64_t heads_ = 0;
    std::int64_t slots_per_rank_ = 0;
    std::vector<bool> flags_;  // [P, slots, Hv]; empty: none
};

/// The M of heads that are not independent travel, the others are zero. M [Hv, K, K] -> flat
/// [open heads * K * K], and back.
[[nodiscard]] std::int64_t num_open(const IndependentHeads::Heads& independent, std::int64_t heads);
[[nodiscard]] at::Tensor pack_open(const at::Tensor& M, const IndependentHeads::Heads& independent);
[[nodiscard]] at::Tensor unpack_open(const at::Tensor& flat,
                                     const IndependentHeads::Heads& independent,
                                     const StateShape& shape);

}  // namespace hybridcp

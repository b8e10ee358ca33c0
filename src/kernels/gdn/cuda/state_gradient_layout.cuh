#pragma once

// The backward walk: parameters, roles of the warpgroups, shared memory (docs/gdn-cuda.md).

#include "kernels/gdn/cuda/ring.cuh"
#include "kernels/gdn/cuda/transposed_state.cuh"
#include "kernels/gdn/cuda/walk_range.cuh"

namespace hybridcp::gdn::cuda {

struct StateGradientParams {
    device::TensorMap q, k, d_o;  // boxes of 64 columns, 1 head, 64 tokens
    GateInputs gates;
    Shape shape;
    const Chunk* chunks;
    const Piece* pieces;
    const float *q_norms, *k_norms;  // [key_heads, tokens]
    const uint8_t* inverses;         // kInverseBytes a head and chunk
    const float* d_end;              // [segments, heads, K, V] or null for zeros
    float* d_start;                  // the same, or null
    // Per head and chunk; null for a summary, which walks the chunks that matter from zeros.
    uint8_t* d_states;      // kStateBytes: gradient of the state after the chunk
    uint8_t* d_new_values;  // kRowsBytes: Z
    bool may_truncate;      // of a piece's entry state
    float summary_floor;    // sum of log gates beyond which a summary does not look
};

struct StateGradientLayout {
    static constexpr uint32_t kThreads = 384;
    static constexpr uint32_t kStateGroup = 0, kAuxiliaryGroup = 1;  // the third brings and stores
    static constexpr int kStateRegisters = 240, kAuxiliaryRegisters = 208, kProducerRegisters = 56;

    static constexpr int kRowStages = 3, kInverseStages = 2, kGradientStages = 3,
                         kProductStages = 2, kGateStages = 4;
    static constexpr uint32_t kRowStageBytes = 4 * kPanelBytes;      // K, then Q
    static constexpr uint32_t kProductStageBytes = 3 * kPanelBytes;  // -W, then P
    static constexpr uint32_t kQueries = 2 * kPanelBytes, kScores = 2 * kPanelBytes;

    static constexpr uint32_t kRows = 0;
    static constexpr uint32_t kInverses = kRows + kRowStages * kRowStageBytes;
    static constexpr uint32_t kGradients = kInverses + kInverseStages * kPanelBytes;
    static constexpr uint32_t kProducts = kGradients + kGradientStages * kPanelBytes;
    static constexpr uint32_t kStateCopy = kProducts + kProductStages * kProductStageBytes;
    static constexpr uint32_t kGates = kStateCopy + 2 * kPanelBytes;
    // Arrays of 64 floats in a gate stage, and the decay of the whole chunk behind them.
    static constexpr uint32_t kArrayBytes = 256;
    static constexpr uint32_t kSum = 0, kRowFactor = 1, kColumnFactors = 2, kQueryFactor = 5,
                              kKeyFactor = 6, kReadFactor = 7, kOutputFactor = 8, kWriteFactor = 9;
    static constexpr uint32_t kChunkDecay = 10 * kArrayBytes;
    static constexpr uint32_t kGateStageBytes = kChunkDecay + 16;
    static constexpr uint32_t kBarriers = kGates + kGateStages * kGateStageBytes;
    static constexpr uint32_t kBarrierBytes =
        16 *
        (kRowStages + kInverseStages + 2 * kGradientStages + kProductStages + kGateStages + 1 + 1);
    static constexpr uint32_t kSharedBytes = kBarriers + kBarrierBytes;
    static_assert(kSharedBytes <= 232448);
};

/// Addresses and barriers of one block.
struct StateGradientShared {
    using Layout = StateGradientLayout;
    uint32_t base;
    Ring<Layout::kRowStages> rows;
    Ring<Layout::kInverseStages> inverses;
    Ring<Layout::kGradientStages> gradients;   // dO comes, Z leaves from the same place
    Ring<Layout::kGradientStages> new_values;  // Z is complete
    Ring<Layout::kProductStages> products;
    Ring<Layout::kGateStages> gates;
    Ring<1> state_copy;
    uint32_t row_landing, gradient_landing;  // for tiles that are cleared first

    HCP_DEVICE StateGradientShared() : base(device::shared_base()) {
        uint32_t at = base + Layout::kBarriers;
        const auto take = [&at](auto& ring) {
            ring.barriers = at;
            at += ring.kBytes;
        };
        take(rows);
        take(inverses);
        take(gradients);
        take(new_values);
        take(products);
        take(gates);
        take(state_copy);
        row_landing = at;
        gradient_landing = at + 8;
    }
    HCP_DEVICE void init() const {
        rows.init(1, 8);
        inverses.init(1, 4);
        gradients.init(1, 1);
        new_values.init(4, 1);
        products.init(4, 4);
        gates.init(1, 8);
        state_copy.init(4, 1);
        device::mbarrier_init(row_landing, 1);
        device::mbarrier_init(gradient_landing, 1);
        device::fence_mbarrier_init();
    }
    [[nodiscard]] HCP_DEVICE uint32_t keys(int32_t use) const {
        return base + Layout::kRows + rows.stage(use) * Layout::kRowStageBytes;
    }
    [[nodiscard]] HCP_DEVICE uint32_t queries(int32_t use) const {
        return keys(use) + Layout::kQueries;
    }
    [[nodiscard]] HCP_DEVICE uint32_t inverse(int32_t use) const {
        return base + Layout::kInverses + inverses.stage(use) * kPanelBytes;
    }
    [[nodiscard]] HCP_DEVICE uint32_t gradient(int32_t use) const {
        return base + Layout::kGradients + gradients.stage(use) * kPanelBytes;
    }
    [[nodiscard]] HCP_DEVICE uint32_t writes(int32_t use) const {
        return base + Layout::kProducts + products.stage(use) * Layout::kProductStageBytes;
    }
    [[nodiscard]] HCP_DEVICE uint32_t scores(int32_t use) const {
        return writes(use) + Layout::kScores;
    }
    [[nodiscard]] HCP_DEVICE uint32_t state() const { return base + Layout::kStateCopy; }
    [[nodiscard]] HCP_DEVICE uint32_t gate(int32_t use, uint32_t array) const {
        return base + Layout::kGates + gates.stage(use) * Layout::kGateStageBytes +
               array * Layout::kArrayBytes;
    }
};

/// What a block works on.
struct StateGradientItem {
    int32_t head, key_head;
    uint32_t half;  // of V's columns
    Piece piece;
    WalkOrder order;
    WalkRange range;
    int32_t first_token, end_token;  // of the segment
    [[nodiscard]] HCP_DEVICE int32_t uses() const { return range.end - range.first; }
    [[nodiscard]] HCP_DEVICE bool is_kept(int32_t use) const {
        return range.first + use >= range.main;
    }
    [[nodiscard]] HCP_DEVICE int32_t index_at(int32_t use) const {
        return order.chunk_at(range.first + use);
    }
    /// Without a load: those of producers must not wait for each other.
    [[nodiscard]] HCP_DEVICE Chunk chunk_at(int32_t use) const {
        const int32_t token = first_token + kChunkTokens * (index_at(use) - order.first_chunk);
        const int32_t left = end_token - token;
        return {token, left < kChunkTokens ? left : kChunkTokens};
    }
};

}  // namespace hybridcp::gdn::cuda

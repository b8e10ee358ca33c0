#pragma once

// The backward walk: parameters, roles of the warpgroups, shared memory (docs/gdn-cuda.md).

#include "kernels/gdn/cuda/head_scale.cuh"
#include "kernels/gdn/cuda/panel_rows.cuh"
#include "kernels/gdn/cuda/ring.cuh"
#include "kernels/gdn/cuda/transposed_state.cuh"
#include "kernels/gdn/cuda/walk_range.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

struct StateGradientParams {
    device::TensorMap q, k, d_o;  // boxes of 64 columns, 1 head, 64 tokens
    GateInputs gates;
    Shape shape;
    const Chunk* chunks;
    const Piece* pieces;
    const float *q_norms, *k_norms;  // [key_heads, tokens]
    const uint8_t* inverses;         // kInverseBytes a head and chunk
    const uint32_t* largest;         // [heads]: of dO and dS_end (magnitudes.cuh)
    const float* d_end;              // [segments, heads, K, V] or null for zeros
    float* d_start;                  // the same, or null
    // Per head and chunk; null for a summary, which walks the chunks that matter from zeros.
    // Both divided by 2^(the head's exponent).
    uint8_t* d_states;       // kStateBytes: gradient of the state after the chunk
    TokenRows d_new_values;  // Z
    Progress progress;       // null for a summary
    bool may_truncate;       // of a piece's entry state
    float summary_floor;     // sum of log gates beyond which a summary does not look
};

/// A cluster of two blocks, each with a half of V's columns: rows are loaded once for both, and the
/// blocks take turns with what does not depend on the state: chunk i's products come from block i
/// mod 2.
struct StateGradientLayout {
    static constexpr uint32_t kCluster = 2, kThreads = 512;
    // The fourth warpgroup brings and stores.
    static constexpr uint32_t kStateGroup = 0, kUpdateGroup = 1, kWriteGroup = 2;
    static constexpr uint32_t kUpdateBarrier = 1, kWriteBarrier = 2;
    static constexpr int kStateRegisters = 216, kUpdateRegisters = 136, kWriteRegisters = 112,
                         kProducerRegisters = 48;

    // Products and gates: even, since the blocks take turns.
    static constexpr int kKeyStages = 4, kQueryStages = 1, kGradientStages = 4, kProductStages = 2,
                         kGateStages = 4;
    static constexpr uint32_t kTileBytes = 2 * kPanelBytes;  // 64 rows of 128 columns

    static constexpr uint32_t kKeys = 0;
    static constexpr uint32_t kQueries = kKeys + kKeyStages * kTileBytes;
    static constexpr uint32_t kInverse = kQueries + kQueryStages * kTileBytes;
    static constexpr uint32_t kGradients = kInverse + kInverseBytes;
    static constexpr uint32_t kScores = kGradients + kGradientStages * kPanelBytes;
    static constexpr uint32_t kWrites = kScores + kProductStages * kPanelBytes;
    static constexpr uint32_t kUpdates = kWrites + kProductStages * kTileBytes;
    static constexpr uint32_t kState = kUpdates + kProductStages * kTileBytes;
    static constexpr uint32_t kGates = kState + kTileBytes;
    // Arrays of 64 floats in a gate stage, and the decay of the whole chunk behind them, in two
    // factors. All but the key factor, r_k itself, belong to rows as operands (head_scale.cuh).
    static constexpr uint32_t kArrayBytes = 256;
    static constexpr uint32_t kSum = 0, kRowFactor = 1, kColumnFactors = 2, kQueryFactor = 5,
                              kKeyFactor = 6, kReadFactor = 7, kOutputFactor = 8, kWriteFactor = 9;
    static constexpr uint32_t kChunkDecay = 10 * kArrayBytes, kChunkShift = kChunkDecay + 4;
    static constexpr uint32_t kGateStageBytes = kChunkDecay + 16;
    static constexpr uint32_t kBarriers = kGates + kGateStages * kGateStageBytes;
    static constexpr uint32_t kRingStages =
        kKeyStages + kQueryStages + kGradientStages + 3 * kProductStages + kGateStages + 1;
    static constexpr uint32_t kSharedBytes = kBarriers + 16 * kRingStages + 8 * kKeyStages + 32;
    static_assert(kSharedBytes <= 232448);
};

/// Addresses and barriers of one block.
struct StateGradientShared {
    using Layout = StateGradientLayout;
    uint32_t base, rank;
    Ring<Layout::kKeyStages> keys_ring;
    uint32_t keys_ready;                        // a barrier a stage: K is fp16
    Ring<Layout::kQueryStages> queries_ring;    // of this block's chunks, see query_use
    Ring<Layout::kGradientStages> gradients;    // dO comes, Z leaves from the same place
    Ring<Layout::kProductStages> scores_ring;   // P of kept chunks, see score_use
    Ring<Layout::kProductStages> writes_ring;   // -W
    Ring<Layout::kProductStages> updates_ring;  // U
    Ring<Layout::kGateStages> gates;
    Ring<1> results;        // dH' in its place, and Z of the chunk before in the place of its dO
    uint32_t inverse_full;  // T of this block's chunks
    uint32_t key_landing, query_landing, gradient_landing;  // for tiles that are cleared first

    HCP_DEVICE StateGradientShared() : base(device::shared_base()), rank(device::cluster_rank()) {
        uint32_t at = base + Layout::kBarriers;
        const auto take = [&at](auto& ring) {
            ring.barriers = at;
            at += ring.kBytes;
        };
        take(keys_ring);
        take(queries_ring);
        take(gradients);
        take(scores_ring);
        take(writes_ring);
        take(updates_ring);
        take(gates);
        take(results);
        inverse_full = at;
        key_landing = at + 8;
        query_landing = at + 16;
        gradient_landing = at + 24;
        keys_ready = at + 32;
    }
    HCP_DEVICE void init() const {
        constexpr uint32_t kWarp = device::warp_arrivals(1), kRole = 4 * kWarp;
        keys_ring.init(kWarp, 4 * kRole);  // both chains and the auxiliary groups of one block
        queries_ring.init(kWarp, kRole);
        gradients.init(kWarp, kRole);
        results.init(kRole, 1);
        for (const auto& ring : {scores_ring, writes_ring, updates_ring}) {
            for (int32_t use = 0; use < Layout::kProductStages; ++use) {
                device::mbarrier_init(ring.full(use), owns(use) ? device::kWarpgroupArrivals : 1);
                device::mbarrier_init(ring.empty(use), 2 * kRole);
            }
        }
        for (int32_t use = 0; use < Layout::kGateStages; ++use) {
            device::mbarrier_init(gates.full(use), kWarp);
            device::mbarrier_init(gates.empty(use), (owns(use) ? 3 : kFp16 ? 2 : 1) * kRole);
        }
        for (uint32_t stage = 0; stage < Layout::kKeyStages; ++stage) {
            device::mbarrier_init(keys_ready + 8 * stage, kRole);
        }
        for (const uint32_t barrier :
             {inverse_full, key_landing, query_landing, gradient_landing}) {
            device::mbarrier_init(barrier, 1);
        }
        device::fence_mbarrier_init();
    }
    /// Whether this block makes the chunk's products.
    [[nodiscard]] HCP_DEVICE bool owns(int32_t use) const {
        return (static_cast<uint32_t>(use) & 1) == rank;
    }
    [[nodiscard]] HCP_DEVICE uint32_t keys(int32_t use) const {
        return base + Layout::kKeys + keys_ring.stage(use) * Layout::kTileBytes;
    }
    [[nodiscard]] HCP_DEVICE uint32_t key_ready(int32_t use) const {
        return keys_ready + 8 * keys_ring.stage(use);
    }
    /// Until it is an operand.
    HCP_DEVICE void wait_keys(int32_t use) const {
        device::mbarrier_wait(kFp16 ? key_ready(use) : keys_ring.full(use), keys_ring.parity(use));
    }
    /// The number of one of this block's chunks among them.
    [[nodiscard]] static HCP_DEVICE int32_t query_use(int32_t use) { return use >> 1; }
    [[nodiscard]] HCP_DEVICE uint32_t queries(int32_t use) const {
        return base + Layout::kQueries + queries_ring.stage(query_use(use)) * Layout::kTileBytes;
    }
    [[nodiscard]] HCP_DEVICE uint32_t inverse() const { return base + Layout::kInverse; }
    [[nodiscard]] HCP_DEVICE uint32_t gradient(int32_t use) const {
        return base + Layout::kGradients + gradients.stage(use) * kPanelBytes;
    }
    [[nodiscard]] HCP_DEVICE uint32_t scores(int32_t use) const {
        return base + Layout::kScores + scores_ring.stage(use) * kPanelBytes;
    }
    [[nodiscard]] HCP_DEVICE uint32_t writes(int32_t use) const {
        return base + Layout::kWrites + writes_ring.stage(use) * Layout::kTileBytes;
    }
    [[nodiscard]] HCP_DEVICE uint32_t updates(int32_t use) const {
        return base + Layout::kUpdates + updates_ring.stage(use) * Layout::kTileBytes;
    }
    /// dH', until it is stored.
    [[nodiscard]] HCP_DEVICE uint32_t state() const { return base + Layout::kState; }
    [[nodiscard]] HCP_DEVICE uint32_t gate(int32_t use, uint32_t array) const {
        return base + Layout::kGates + gates.stage(use) * Layout::kGateStageBytes +
               array * Layout::kArrayBytes;
    }
};

/// A warp at a stage of both blocks: one lane each.
template <int Stages>
HCP_DEVICE void arrive_empty_at_both(const Ring<Stages>& ring, int32_t use) {
    const uint32_t lane = device::lane_index();
    if constexpr (device::kRacecheck) {
        ring.arrive_empty_at(use, 0);
        ring.arrive_empty_at(use, 1);
    } else if (lane < StateGradientLayout::kCluster) {
        ring.arrive_empty_at(use, lane);
    }
}

/// What a cluster works on. Chunks of the walk are counted from 0, in its order.
struct StateGradientItem {
    int32_t segment, head, key_head;
    int32_t first_token, end_token;  // of the segment
    int32_t first_chunk;             // of the segment, among all
    int32_t begin;                   // the segment's chunk that the walk begins with
    int32_t uses, first_kept;        // chunks; the first of which dH' and Z are kept
    bool from_boundary, to_start;    // begins and ends where the segment does

    /// The first chunk whose P is made, of both blocks' the same number: the first kept one or the
    /// one before.
    [[nodiscard]] HCP_DEVICE int32_t first_score() const { return first_kept & ~1; }
    [[nodiscard]] HCP_DEVICE int32_t score_use(int32_t use) const { return use - first_score(); }
    [[nodiscard]] HCP_DEVICE int32_t index_at(int32_t use) const {
        return first_chunk + begin - use;
    }
    /// Without a load: those of producers must not wait for each other.
    [[nodiscard]] HCP_DEVICE Chunk chunk_at(int32_t use) const {
        const int32_t token = first_token + kChunkTokens * (begin - use);
        const int32_t left = end_token - token;
        return {token, left < kChunkTokens ? left : kChunkTokens};
    }
};

/// All threads of the block call. Broadcast, so that the compiler sees that all lanes have it.
HCP_DEVICE StateGradientItem find_item(const StateGradientParams& p, uint32_t scratch) {
    const auto cluster =
        static_cast<int32_t>(device::block_index() / StateGradientLayout::kCluster);
    const int32_t head = cluster % p.shape.value_heads;
    const Piece piece = load_piece(p.pieces + cluster / p.shape.value_heads);
    const WalkOrder order = {p.chunks, piece.first_chunk, piece.chunks, true};
    const WalkRange range =
        p.d_states == nullptr
            ? find_summary_range(order, piece, p.gates, head, p.summary_floor, scratch)
            : find_walk_range(order, piece, p.gates, head, p.may_truncate, scratch);
    const Chunk first = device::load_global(p.chunks + piece.first_chunk);
    const Chunk last = device::load_global(p.chunks + piece.first_chunk + piece.chunks - 1);
    const auto same = [](int32_t value) { return device::shuffle(value, 0); };
    return {.segment = same(piece.segment),
            .head = same(head),
            .key_head = same(head / p.shape.group()),
            .first_token = same(first.token),
            .end_token = same(last.token + last.tokens),
            .first_chunk = same(piece.first_chunk),
            .begin = same(piece.chunks - 1 - range.first),
            .uses = same(range.end - range.first),
            .first_kept = same(range.main - range.first),
            .from_boundary = same(range.from_boundary ? 1 : 0) != 0,
            .to_start = same(range.end == order.count ? 1 : 0) != 0};
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS

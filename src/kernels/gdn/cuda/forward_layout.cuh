#pragma once

// Parameters, configurations and shared memory of the forward kernel (forward.cuh).

#include "kernels/gdn/cuda/head_scale.cuh"
#include "kernels/gdn/cuda/panel_rows.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

/// Null or empty where the configuration does not use it.
struct ForwardParams {
    device::TensorMap q, k, v;  // [tokens, heads, 128] in boxes of 64 tokens x 64 columns
    GateInputs gates;
    Shape shape;
    const Chunk* chunks;
    const Piece* pieces;
    int32_t num_pieces;
    bool may_truncate;          // keys of at most unit length and beta in [0, 2]
    const uint32_t* largest;    // [heads]: of v and start states (magnitudes.cuh), for fp16
    const float* start_states;  // [segments, heads, K, V]; null: zeros
    float* end_states;          // the same; null: not wanted

    // kOutput
    TokenRows o;
    float* q_norms;  // [key heads, tokens]: rsqrt(|x|^2 + 1e-6); null: not wanted
    float* k_norms;

    // kOutput leaves checkpoints, if not null; kRemake walks runs and begins with them.
    Checkpoints checkpoints;
    const Run* runs;
    int32_t num_runs;

    // kKeep and kRemake: what backward needs of each chunk (tables.h). kRemake does not write
    // end_states.
    uint16_t* states;                // before each chunk, divided by 2^(the head's exponent)
    TokenRows errors[kErrorPlaces];  // E, the same
    uint16_t* inverses;              // T
    uint8_t* kept;  // [heads, num_chunks]: whether kKeep did it; or null for kRemake: none

    // kSummary: end_states gets S
    float* transitions;   // M, [segments, heads, K, K]
    float summary_floor;  // sum of log gates beyond which a summary does not look
};

enum class ForwardMode {
    kOutput,   // o and end states
    kKeep,     // the same, and what backward needs of each chunk
    kRemake,   // the latter alone
    kSummary,  // end states from zeros (S), and from the identity with v = 0 (M)
};

/// One block has a half of V's columns: a state warpgroup (64 columns), auxiliary warpgroups for
/// what depends on K alone - one, or two in turn - and with outputs one for Q, and a producer.
template <ForwardMode Mode>
struct ForwardConfig {
    static constexpr bool kOutput = Mode == ForwardMode::kOutput || Mode == ForwardMode::kKeep;
    static constexpr bool kKeep = Mode == ForwardMode::kKeep;
    static constexpr bool kRemake = Mode == ForwardMode::kRemake;
    static constexpr bool kSummary = Mode == ForwardMode::kSummary;
    static constexpr int kCluster = 2;
    static constexpr int kKeyWarpgroups = kSummary ? 2 : 1;
    static constexpr int kAuxiliaryWarpgroups = kKeyWarpgroups + (kOutput ? 1 : 0);
    static constexpr int kThreads = 128 * (2 + kAuxiliaryWarpgroups);
    static constexpr int kStateRegisters = kRemake ? 240 : 216;
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
    static constexpr int kAuxiliaryRegisters = kRemake ? 208 : kLaunchRegisters;
    static constexpr int kProducerRegisters = 40;
    // A block has what it was launched with: an increase beyond that waits for ever.
    static_assert(kStateRegisters + kAuxiliaryWarpgroups * kAuxiliaryRegisters +
                      kProducerRegisters <=
                  kLaunchRegisters * (2 + kAuxiliaryWarpgroups));

    // Stages. Even numbers: the blocks of a cluster take turns with chunks.
    static constexpr int kKeys = kOutput ? 4 : 6;
    static constexpr int kQueries = kOutput ? 4 : 0;
    static constexpr int kValues = kRemake ? 4 : 2;
    static_assert(kKeys >= kValues);  // how far V is loaded behind K, without outputs
    static constexpr int kUpdates = 2;
    static constexpr int kUpdatesFree = 4;  // barriers that say a stage of updates is free again
    static constexpr int kGates = kOutput ? 4 : 6;
    static constexpr int kStaged = kOutput ? 1 : kRemake ? 2 : 0;

    static constexpr uint32_t kTileBytes = 2 * kPanelBytes;  // K or Q of a chunk
    // A stage of updates: X, gamma r_k; Y, scale gamma r_q. Each pair is one copy to the other
    // block.
    static constexpr uint32_t kStateUpdateBytes = kTileBytes + 256;
    static constexpr uint32_t kOutputUpdateBytes = kPanelBytes + 256;
    static constexpr uint32_t kOutputUpdate = kTileBytes + 1024;
    static constexpr uint32_t kUpdateStride = kOutputUpdate + (kOutput ? kPanelBytes + 1024 : 0);
    static constexpr uint32_t kUpdateEnd =
        kOutput ? kOutputUpdate + kOutputUpdateBytes : kUpdateStride;
    static constexpr uint32_t kStagedBytes = kOutput ? kPanelBytes : kTileBytes;  // O or the state

    static constexpr uint32_t kKeysAt = 0;
    static constexpr uint32_t kQueriesAt = kKeysAt + kKeys * kTileBytes;
    static constexpr uint32_t kValuesAt = kQueriesAt + kQueries * kTileBytes;
    static constexpr uint32_t kStagedAt = kValuesAt + kValues * kPanelBytes;
    static constexpr uint32_t kUpdatesAt = kStagedAt + kStaged * kStagedBytes;
    static constexpr uint32_t kInverseAt = kUpdatesAt + (kUpdates - 1) * kUpdateStride + kUpdateEnd;
    static constexpr uint32_t kInverseTilesBytes = 13568;  // of a key warpgroup
    static constexpr uint32_t kNormsAt = kInverseAt + kKeyWarpgroups * kInverseTilesBytes;
    static constexpr uint32_t kNormsBytes = 2 * 256;  // the same
    static constexpr uint32_t kGatesAt = kNormsAt + kKeyWarpgroups * kNormsBytes;
    static constexpr uint32_t kGateBytes = 2064;
    static constexpr uint32_t kBarriersAt = kGatesAt + kGates * kGateBytes;

    static constexpr int kKeyFull = 0;
    static constexpr int kKeyEmpty = kKeyFull + kKeys;
    static constexpr int kQueryFull = kKeyEmpty + kKeys;
    static constexpr int kQueryEmpty = kQueryFull + kQueries;
    static constexpr int kValueFull = kQueryEmpty + kQueries;
    static constexpr int kValueEmpty = kValueFull + kValues;
    static constexpr int kUpdateFull = kValueEmpty + kValues;
    static constexpr int kUpdateEmpty = kUpdateFull + kUpdates;
    static constexpr int kGateFull = kUpdateEmpty + kUpdatesFree;
    static constexpr int kGateEmpty = kGateFull + kGates;
    static constexpr int kStagedFull = kGateEmpty + kGates;
    static constexpr int kStagedEmpty = kStagedFull + kStaged;
    static constexpr int kLanding = kStagedEmpty + kStaged;  // of short K, Q and V
    static constexpr int kBetween = kLanding + 3;            // arrive_between, for racecheck
    static constexpr int kBarriers = kBetween + (device::kRacecheck && kOutput ? 3 : 0);
    static constexpr uint32_t kSharedBytes = (kBarriersAt + 8 * kBarriers + 15) / 16 * 16;
    static_assert(kSharedBytes <= 232448);
};

using OutputConfig = ForwardConfig<ForwardMode::kOutput>;
using KeepConfig = ForwardConfig<ForwardMode::kKeep>;
using RemakeConfig = ForwardConfig<ForwardMode::kRemake>;
using SummaryConfig = ForwardConfig<ForwardMode::kSummary>;

/// What the gate warp leaves of a chunk, in floats from the start of a stage.
enum GateField : uint32_t {
    kSumField = 0,     // b
    kGammaField = 64,  // e^b
    kBetaField = 128,
    kRestField = 192,  // e^{B - b}
    // Gam_ij = row_i column_j for tokens of different blocks of 16; both are at most 1.
    kRowField = 256,     // e^{b_i - b_m}, m the first token of i's block
    kColumnField = 320,  // e^{b_m - b_j}, for the blocks 1 to 3 of i, 64 floats each
    kDecayField = 512,   // e^B
};

/// Addresses in shared memory; i counts the chunks that the kernel walks, from 0.
template <class Config>
struct ForwardShared {
    uint32_t base;
    uint32_t rank;

    /// Counts are never negative, which the compiler does not see.
    template <int Stages>
    HCP_DEVICE static uint32_t stage(int i) {
        return static_cast<uint32_t>(i) % Stages;
    }
    template <int Stages>
    HCP_DEVICE static uint32_t parity(int i) {
        return static_cast<uint32_t>(i) / Stages & 1;
    }
    HCP_DEVICE uint32_t keys(int i) const {
        return base + Config::kKeysAt + stage<Config::kKeys>(i) * Config::kTileBytes;
    }
    HCP_DEVICE uint32_t queries(int i) const {
        return base + Config::kQueriesAt + stage<Config::kQueries>(i) * Config::kTileBytes;
    }
    HCP_DEVICE uint32_t values(int i) const {
        return base + Config::kValuesAt + stage<Config::kValues>(i) * kPanelBytes;
    }
    HCP_DEVICE uint32_t staged(int m) const {
        return base + Config::kStagedAt + stage<Config::kStaged>(m) * Config::kStagedBytes;
    }
    HCP_DEVICE uint32_t update(int i) const {
        return base + Config::kUpdatesAt + stage<Config::kUpdates>(i) * Config::kUpdateStride;
    }
    HCP_DEVICE uint32_t gates(int i) const {
        return base + Config::kGatesAt + stage<Config::kGates>(i) * Config::kGateBytes;
    }
    HCP_DEVICE uint32_t inverse(uint32_t key_warpgroup) const {
        return base + Config::kInverseAt + key_warpgroup * Config::kInverseTilesBytes;
    }
    /// r_k and e^{B - b} r_k of the key warpgroup's latest chunk, 64 floats each.
    HCP_DEVICE uint32_t norms(uint32_t key_warpgroup) const {
        return base + Config::kNormsAt + key_warpgroup * Config::kNormsBytes;
    }
    HCP_DEVICE uint32_t barrier(int index) const { return base + Config::kBarriersAt + 8 * index; }
    /// That of a ring's stage for its i-th filling.
    template <int First, int Stages>
    HCP_DEVICE uint32_t barrier(int i) const {
        return base + Config::kBarriersAt + 8 * (First + stage<Stages>(i));
    }

    /// Waits for the i-th filling of a ring's stage.
    template <int First, int Stages>
    HCP_DEVICE void wait_full(int i) const {
        device::mbarrier_wait(barrier<First, Stages>(i), parity<Stages>(i));
    }
    /// Waits until the i-th filling may begin; for producers.
    template <int First, int Stages>
    HCP_DEVICE void wait_empty(int i) const {
        constexpr uint32_t kSleepNs = 20;
        device::mbarrier_wait_sleeping(barrier<First, Stages>(i), parity<Stages>(i) ^ 1, kSleepNs);
    }
    /// The same for Q, whose m-th filling is of chunk i: where i is the same for all threads, so
    /// are the addresses of products.
    HCP_DEVICE void wait_queries_full(int i, int m) const {
        device::mbarrier_wait(barrier<Config::kQueryFull, Config::kQueries>(i),
                              parity<Config::kQueries>(m));
    }
    HCP_DEVICE void wait_queries_empty(int i, int m) const {
        constexpr uint32_t kSleepNs = 20;
        device::mbarrier_wait_sleeping(barrier<Config::kQueryEmpty, Config::kQueries>(i),
                                       parity<Config::kQueries>(m) ^ 1, kSleepNs);
    }
    /// Whether this block makes X and Y of the chunk.
    HCP_DEVICE bool owns(int i) const { return stage<2>(i) == rank; }
};

/// A lane's arrival at the same barrier of both blocks.
HCP_DEVICE void arrive_at_both(uint32_t barrier) {
    device::mbarrier_arrive_cluster(device::map_shared(barrier, 0));
    device::mbarrier_arrive_cluster(device::map_shared(barrier, 1));
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS

#pragma once

// What the gradients kernel is launched with, and what lies where in its shared memory
// (gradients.cuh).

#include "kernels/gdn/cuda/gates.cuh"
#include "kernels/gdn/cuda/head_scale.cuh"
#include "kernels/gdn/cuda/panel_rows.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

/// Images: see problem.cuh. dq, dk, dv are contiguous [tokens, heads, 128] in bf16.
struct GradientsParams {
    device::TensorMap k, q;  // [64, tokens, 2 x key heads], boxes of {64, 64, 2}: both panels
    device::TensorMap d_o;   // the same, of value heads; unread without has_d_o
    TokenRows dv;            // the same; holds Z before
    device::TensorMap errors[kErrorPlaces];  // the same, of E (tables.h)
    Shape shape;
    bool has_d_o;  // without it dO is 0
    GateInputs gates;
    const float *r_k, *r_q;                 // [key heads, tokens]; unread without use_qk_l2norm
    const Chunk* chunks;                    // [num_chunks]
    Progress progress;                      // of the state gradient
    const uint8_t* inverse;                 // kInverseBytes
    const uint8_t *state, *state_gradient;  // kStateBytes: before the chunk, after the chunk
    const uint32_t *largest, *largest_gradients;  // [value heads]: of v and S, of dO and dS
    uint16_t *dq, *dk;
    float *dg, *dbeta;  // [tokens, value heads], strides in elements
    int64_t dg_token_stride, dg_head_stride, dbeta_token_stride, dbeta_head_stride;
};

namespace gradients {

/// What the loading warp brings, each with a full and an empty mbarrier.
enum Tile : uint32_t {
    kInverse,
    kErrors,           // E
    kValueGradients,   // Z; dV on its way out
    kStateGradient,    // dH'
    kState,            // H
    kOutputGradients,  // dO
    kKeys,
    kQueries,
    kTiles
};

constexpr uint32_t tile_bytes(uint32_t tile) {
    const bool is_state = tile == kState || tile == kStateGradient;
    return tile == kInverse ? kInverseBytes : is_state ? kStateBytes : kRowsBytes;
}
/// Warps that release a tile: a warpgroup has four, one stores dV.
constexpr uint32_t tile_readers(uint32_t tile) {
    const bool by_two = tile == kState || tile == kQueries;
    return tile == kValueGradients ? 1 : tile == kKeys ? 12 : by_two ? 8 : 4;
}

/// Before the states lie T, E and Z, after them dO, K and Q.
constexpr uint32_t tile_offset(uint32_t tile) {
    const uint32_t rows_before = tile == kInverse         ? 0
                                 : tile <= kStateGradient ? tile - kErrors
                                 : tile == kState         ? 2
                                                          : tile - kOutputGradients + 2;
    const uint32_t states_before = tile <= kStateGradient ? 0 : tile == kState ? 1 : 2;
    return (tile == kInverse ? 0 : kInverseBytes) + rows_before * kRowsBytes +
           states_before * kStateBytes;
}

/// Made here for each value head: D and dR. For each key head: r_q dP, summed over its value heads,
/// and dN r_k below the diagonal with its transpose above it (gradients_pairs.cuh).
constexpr uint32_t kSolved = tile_offset(kTiles);
constexpr uint32_t kAdjoint = kSolved + kRowsBytes;
constexpr uint32_t kReadPairs = kAdjoint + kRowsBytes;
constexpr uint32_t kErasePairs = kReadPairs + kPanelBytes;

/// q^ k^T and k^ k^T below the diagonal in fp32, for all value heads: of each warp's lanes those
/// values that they use, in blocks of 16 x 16.
constexpr uint32_t kBlockBytes = 1024, kBlocks = 10;
constexpr uint32_t kReadProducts = kErasePairs + kPanelBytes;
constexpr uint32_t kEraseProducts = kReadProducts + kBlocks * kBlockBytes;
/// Blocks of the warps before this one, which has warp + 1.
constexpr uint32_t blocks_before(uint32_t warp) {
    return warp * (warp + 1) / 2;
}

/// Vectors over the chunk's tokens, in two slots that turns use alternately.
enum Vector : uint32_t { kSum, kBeta, kGamma, kToEnd, kKeyNorm, kQueryNorm, kVectors };
constexpr uint32_t kVectorBytes = kChunkTokens * 4;
constexpr uint32_t kItem = kVectors * kVectorBytes;  // first token, tokens, key head
constexpr uint32_t kDecay = kItem + 12;              // e^B
/// Powers of two of the turn's head: 2^(e_h + e_g), 2^e_g, and 2^-e_g twice in bf16.
constexpr uint32_t kPowers = kItem + 16;
constexpr uint32_t kPower = kPowers, kGradientPower = kPowers + 4, kGradientDown = kPowers + 8;
constexpr uint32_t kSlotBytes = kPowers + 16;
constexpr uint32_t kSlots = kEraseProducts + kBlocks * kBlockBytes;

/// Sums for dg. Columns: of N by warp, erasures then reads.
constexpr uint32_t kSums = kSlots + 2 * kSlotBytes;
constexpr uint32_t kThroughReads = kSums;                      // i + row sums of N1
constexpr uint32_t kThroughErasures = kSums + kVectorBytes;    // e
constexpr uint32_t kThroughPairs = kSums + 2 * kVectorBytes;   // row sums of N2
constexpr uint32_t kThroughWrites = kSums + 3 * kVectorBytes;  // z
constexpr uint32_t kThroughState = kSums + 4 * kVectorBytes;   // <dH', H>, by warp
constexpr uint32_t kColumnSums = kThroughState + 16;           // 8 vectors

/// Phases end once a turn; those of K, Q and of pairs once an item.
enum Barrier : uint32_t {
    kFull,
    kEmpty = kFull + kTiles,
    kLanded = kEmpty + kTiles,  // loads of a short chunk
    kSolvingLanded,             // the same of E and Z
    kGatesFull,
    kGatesEmpty = kGatesFull + 2,
    kValueGradientsReady = kGatesEmpty + 2,
    kSolvedReady,
    kSolvedEmpty,
    kAdjointReady,
    kAdjointEmpty,
    kReadPairsReady,
    kReadPairsEmpty,
    kErasePairsReady,
    kErasePairsEmpty,
    kSumsFull,
    kSumsEmpty,
    kItemFull,
    kBarriers = kItemFull + 4
};
/// The numbers of the items that a block has taken, for as many as its warps are apart at most.
constexpr uint32_t kItemStages = kBarriers - kItemFull;
constexpr uint32_t kItemNumbers = kColumnSums + 8 * kVectorBytes;
constexpr uint32_t kBarrierSpace = kItemNumbers + 4 * kItemStages;
constexpr uint32_t kSharedBytes = (kBarrierSpace + 8 * kBarriers + 15) & ~15U;
static_assert(kSolved % 1024 == 0 && kBarrierSpace % 8 == 0 && kSharedBytes <= 232448);

/// The warpgroups that multiply, by what they leave (gradients_item.cuh).
enum Role : uint32_t { kValuesRole, kKeysRole, kQueriesRole };

/// Named barriers of a warpgroup: Z has been read by all its warps; so have dP and dN; all have
/// made fp16 of dO.
constexpr uint32_t kValueGradientsRead = 1, kPairsRead = 2, kConverted = 3;
constexpr uint32_t kWorkingThreads = 384;

}  // namespace gradients
}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS

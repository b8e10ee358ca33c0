#pragma once

// What the gradients kernel is launched with, and what lies where in its shared memory
// (gradients.cuh).

#include "kernels/gdn/cuda/gates.cuh"

namespace hybridcp::gdn::cuda {

/// Images: see problem.cuh. dq, dk, dv are contiguous [tokens, heads, 128] in bf16.
struct GradientsParams {
    device::TensorMap k, q;  // [128, key heads, tokens], boxes of {64, 1, 64}
    device::TensorMap d_o;   // [128, value heads, tokens], the same boxes; unread without has_d_o
    Shape shape;
    bool has_d_o;  // without it dO is 0
    GateInputs gates;
    const float *r_k, *r_q;                 // [key heads, tokens]; unread without use_qk_l2norm
    const Chunk* chunks;                    // [num_chunks]
    const uint8_t *e, *z;                   // kRowsBytes each
    const uint8_t* inverse;                 // kInverseBytes
    const uint8_t *state, *state_gradient;  // kStateBytes: before the chunk, after the chunk
    uint16_t *dq, *dk, *dv;
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
/// Warps that release a tile: a warpgroup has four.
constexpr uint32_t tile_readers(uint32_t tile) {
    const bool by_two = tile == kInverse || tile == kErrors;
    const bool by_all = tile == kState || tile == kKeys || tile == kQueries;
    return by_all ? 12 : by_two ? 8 : 4;
}

constexpr uint32_t tile_offset(uint32_t tile) {
    uint32_t offset = 0;
    for (uint32_t i = 0; i < tile; ++i) {
        offset += tile_bytes(i);
    }
    return offset;
}

/// Made here: D (two panels), r_q dP and r_k dN (tokens x tokens). When all products are done the
/// same space holds the head's part of dq^.
constexpr uint32_t kSolved = tile_offset(kTiles);
constexpr uint32_t kReadPairs = kSolved + kRowsBytes;
constexpr uint32_t kErasePairs = kReadPairs + kPanelBytes;
constexpr uint32_t kQueryPart = kSolved;
/// The head's part of dk^.
constexpr uint32_t kKeyPart = kErasePairs + kPanelBytes;
constexpr uint32_t kPartBytes = kChunkTokens * kHeadDim * 4;

/// Vectors over the chunk's tokens, in two slots that chunks use in turn.
enum Vector : uint32_t { kSum, kBeta, kGamma, kToEnd, kKeyNorm, kQueryNorm, kVectors };
constexpr uint32_t kVectorBytes = kChunkTokens * 4;
constexpr uint32_t kSlotBytes = kVectors * kVectorBytes;
constexpr uint32_t kSlots = kKeyPart + kPartBytes;

/// Sums for dg. Columns: of N by warp, reads then erasures.
constexpr uint32_t kSums = kSlots + 2 * kSlotBytes;
constexpr uint32_t kThroughReads = kSums;                           // i + row sums of N1
constexpr uint32_t kThroughErasures = kSums + kVectorBytes;         // e + row sums of N2
constexpr uint32_t kThroughWrites = kSums + 2 * kVectorBytes;       // z
constexpr uint32_t kColumnSums = kSums + 3 * kVectorBytes;          // 8 vectors
constexpr uint32_t kThroughState = kColumnSums + 8 * kVectorBytes;  // <dH', H>, by warp

enum Barrier : uint32_t {
    kFull,
    kEmpty = kFull + kTiles,
    kLanded = kEmpty + kTiles,  // loads of a short chunk
    kGatesFull,
    kGatesEmpty = kGatesFull + 2,
    kSolvedReady = kGatesEmpty + 2,
    kReadPairsReady,
    kErasePairsReady,
    kSumsFull,
    kSumsEmpty,
    kPartsFull,
    kPartsEmpty,
    kBarriers
};
constexpr uint32_t kBarrierSpace = kThroughState + 16;
constexpr uint32_t kSharedBytes = kBarrierSpace + 8 * kBarriers;
static_assert(kSolved % 1024 == 0 && kBarrierSpace % 8 == 0 && kSharedBytes <= 232448);

/// Named barriers: the three warpgroups that work; the four warps that read Z.
constexpr uint32_t kProductsDone = 1, kValueGradientsRead = 2;
constexpr uint32_t kWorkingThreads = 384;

}  // namespace gradients
}  // namespace hybridcp::gdn::cuda

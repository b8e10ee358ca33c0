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
/// Warps that release a tile: a warpgroup has four, two store dV.
constexpr uint32_t tile_readers(uint32_t tile) {
    const bool by_two = tile == kInverse || tile == kErrors || tile == kQueries;
    const bool by_all = tile == kState || tile == kKeys;
    return tile == kValueGradients ? 2 : by_all ? 12 : by_two ? 8 : 4;
}

constexpr uint32_t tile_offset(uint32_t tile) {
    uint32_t offset = 0;
    for (uint32_t i = 0; i < tile; ++i) {
        offset += tile_bytes(i);
    }
    return offset;
}

/// Made here: D (two panels), r_q dP and r_k dN (tokens x tokens). When all products are done the
/// same space holds the part of dk^ that comes from what the chunk writes.
constexpr uint32_t kSolved = tile_offset(kTiles);
constexpr uint32_t kReadPairs = kSolved + kRowsBytes;
constexpr uint32_t kErasePairs = kReadPairs + kPanelBytes;
constexpr uint32_t kWritesPart = kSolved;

/// What the group's other blocks send of dq^ and dk^, by warp (gradients_group.cuh).
enum Sum : uint32_t { kQuerySum, kKeySum };
constexpr uint32_t kReceived = kErasePairs + kPanelBytes;
constexpr uint32_t kReceivedWarpBytes = 4608, kReceivedBytes = 4 * kReceivedWarpBytes;

/// Vectors over the chunk's tokens, in two slots that chunks use in turn.
enum Vector : uint32_t { kSum, kBeta, kGamma, kToEnd, kKeyNorm, kQueryNorm, kVectors };
constexpr uint32_t kVectorBytes = kChunkTokens * 4;
constexpr uint32_t kItem = kVectors * kVectorBytes;  // first token, tokens, key head
constexpr uint32_t kSlotBytes = kItem + 16;
constexpr uint32_t kSlots = kReceived + 2 * kReceivedBytes;

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
    kValueGradientsReady = kGatesEmpty + 2,
    kSolvedReady,
    kReadPairsReady,
    kErasePairsReady,
    kSumsFull,
    kSumsEmpty,
    kWritesPartFull,
    kWritesPartEmpty,
    kReceivedFull,  // by sum and warp
    kReceivedEmpty = kReceivedFull + 8,
    kBarriers = kReceivedEmpty + 8
};
constexpr uint32_t kBarrierSpace = kThroughState + 16;
constexpr uint32_t kSharedBytes = (kBarrierSpace + 8 * kBarriers + 15) & ~15U;
static_assert(kSolved % 1024 == 0 && kBarrierSpace % 8 == 0 && kSharedBytes <= 232448);

/// Named barriers of a warpgroup: the one that makes D has done its products; Z has been read.
constexpr uint32_t kWritesDone = 1, kValueGradientsRead = 2;
constexpr uint32_t kWorkingThreads = 384;

}  // namespace gradients
}  // namespace hybridcp::gdn::cuda

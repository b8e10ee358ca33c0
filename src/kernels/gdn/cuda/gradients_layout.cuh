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

/// This block among those of its cluster, and its chunks.
struct Block {
    uint32_t shared;
    uint32_t group, rank;
    uint32_t first_item, item_step, num_items;

    HCP_DEVICE uint32_t tile(Tile tile) const { return shared + tile_offset(tile); }
    HCP_DEVICE uint32_t barrier(uint32_t barrier) const {
        return shared + kBarrierSpace + 8 * barrier;
    }
    HCP_DEVICE uint32_t full(uint32_t tile) const { return barrier(kFull + tile); }
    HCP_DEVICE uint32_t empty(uint32_t tile) const { return barrier(kEmpty + tile); }
    HCP_DEVICE uint32_t slot(uint32_t turn) const {
        return shared + kSlots + (turn & 1) * kSlotBytes;
    }
};

/// One chunk of one key head; `turn` counts those of this block.
struct Item {
    uint32_t turn;
    int32_t chunk, key_head, head;
    Chunk span;
    HCP_DEVICE uint32_t parity() const { return turn & 1; }
    HCP_DEVICE int64_t image(const Shape& shape) const {
        return int64_t{head} * shape.num_chunks + chunk;
    }
};

/// Key heads first: blocks that run at once read whole rows of q and k.
HCP_DEVICE Item item_of(const GradientsParams& p,
                        const Block& block,
                        uint32_t item,
                        uint32_t turn) {
    Item found;
    const auto key_heads = static_cast<uint32_t>(p.shape.key_heads);
    found.turn = turn;
    found.chunk = static_cast<int32_t>(item / key_heads);
    found.key_head = static_cast<int32_t>(item % key_heads);
    found.head = static_cast<int32_t>(item % key_heads * block.group + block.rank);
    found.span = device::load_global(p.chunks + found.chunk);
    return found;
}

HCP_DEVICE void wait_full(const Block& block, const Item& item, Tile tile) {
    device::mbarrier_wait(block.full(tile), item.parity());
}

/// Counts this warp in at a barrier, after all its lanes.
HCP_DEVICE void arrive_warp(const Block& block, uint32_t barrier) {
    device::sync_warp();
    if (device::lane_index() == 0) {
        device::mbarrier_arrive(block.barrier(barrier));
    }
}
/// The same for what wgmma will read.
HCP_DEVICE void publish_warp(const Block& block, uint32_t barrier) {
    device::fence_proxy_async();
    arrive_warp(block, barrier);
}
HCP_DEVICE void release(const Block& block, Tile tile) {
    arrive_warp(block, uint32_t{kEmpty} + tile);
}

HCP_DEVICE void wait_gates(const Block& block, const Item& item) {
    device::mbarrier_wait(block.barrier(kGatesFull + item.parity()), (item.turn >> 1) & 1);
}

}  // namespace gradients
}  // namespace hybridcp::gdn::cuda

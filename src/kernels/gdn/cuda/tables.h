#pragma once

// What the Hopper kernels of Gated DeltaNet share with their host code: sizes, the tables of a
// launch and the layouts of what they leave in global memory for each other (docs/gdn-cuda.md).
// Chunks are 64 tokens of one segment, the last of a segment may be shorter; heads are value heads,
// head h reads key head h / group. States are kept transposed: 128 rows of V, 128 columns of K.

#include "kernels/cuda/device/types.cuh"

namespace hybridcp::gdn::cuda {

constexpr int kChunkTokens = 64;
/// CudaLimits (backends.h) says what for.
constexpr int kChunksOfTwoSummaryParts = 160;
constexpr int kHeadDim = 128;  // K and V

/// A tile of 64 rows of 128 bytes with the 128-byte swizzle: element (row, column) of 2 bytes at
/// swizzle_128(128 row + 2 column).
constexpr uint32_t kPanelBytes = 8192;
/// Per head and chunk, at (head * num_chunks + chunk) * bytes:
/// T = (I + tril(diag(beta) K K^T o Gam, -1))^-1, fp16: its blocks of 16 x 16 up to the diagonal,
/// rows of 32 bytes, whose halves are swapped where bit 2 of the row is set (bank conflicts).
constexpr uint32_t kInverseBlockBytes = 512;
constexpr uint32_t kInverseBytes = 10 * kInverseBlockBytes;
HCP_DEVICE constexpr uint32_t inverse_block(uint32_t block_row, uint32_t block_column) {
    return kInverseBlockBytes * (block_row * (block_row + 1) / 2 + block_column);
}
/// A half of a row of a block.
HCP_DEVICE constexpr uint32_t inverse_row(uint32_t row, uint32_t half) {
    return 32 * row + 16 * (half ^ (row >> 2 & 1));
}
/// Tokens x V in the kernels' type of operands, two panels: V columns 0 to 63, then 64 to 127.
constexpr uint32_t kRowsBytes = 2 * kPanelBytes;
/// E and Z in the same type lie as rows of tokens where other results come later: Z where dv does,
/// E of a key head's first value head where dq, of its second where dk does, and of others in rows
/// of their own, [tokens, key heads * (group - 2), 128].
constexpr int kErrorPlaces = 3;
struct ErrorPlace {
    int32_t index, head;

    HCP_DEVICE ErrorPlace(int32_t key_head, int32_t member, int32_t group)
        : index(member < 2 ? member : 2),
          head(member < 2 ? key_head : key_head * (group - 2) + member - 2) {}
};
/// A transposed state in the same, four panels of V rows x K columns: (V 0.., K 0..), (V 0..,
/// K 64..), (V 64.., K 0..), (V 64.., K 64..).
constexpr uint32_t kStateBytes = 4 * kPanelBytes;

struct Chunk {
    int32_t token;   // first
    int32_t tokens;  // 1 to 64
};

/// A segment is cut into pieces that run at once; a piece but the first makes its entry state by
/// walking chunks before it.
struct Piece {
    int32_t segment;
    int32_t first_chunk;  // of the segment
    int32_t chunks;       // of the segment
    int32_t index;        // of this piece in its segment
    int32_t pieces;       // of the segment
};

/// For summaries a segment may be cut into parts, whose own are at slots that follow one another.
struct Join {
    int32_t segment, first_slot, parts;
};

/// By which the gradients kernel follows the state gradient, which it may overlap: `ready` of each
/// head and chunk counts the halves of V's columns whose dH' and Z are there, `items` those that
/// its blocks have taken. The state gradient zeroes it.
struct Progress {
    uint32_t* items;
    uint32_t* ready;  // [heads, num_chunks]
};
constexpr uint32_t kHalves = 2;

/// Gates and writing strengths: [tokens, heads] with any strides, in elements.
struct GateInputs {
    const float* g;
    int64_t g_token_stride, g_head_stride;
    const void* beta;  // bf16 or fp32
    int64_t beta_token_stride, beta_head_stride;
    bool beta_is_bf16;
};

struct Shape {
    int32_t tokens, key_heads, value_heads, num_chunks;
    float scale;
    bool use_qk_l2norm;
    /// Heads in memory, of which a launch may have a part: of dq and dk; of dv and states. 0: all
    /// are its own.
    int32_t key_heads_in_memory = 0, value_heads_in_memory = 0;

    HCP_DEVICE constexpr int32_t group() const { return value_heads / key_heads; }
    HCP_DEVICE int64_t key_row() const {
        return int64_t{kHeadDim} * (key_heads_in_memory > 0 ? key_heads_in_memory : key_heads);
    }
    HCP_DEVICE int64_t value_row() const {
        return int64_t{kHeadDim} *
               (value_heads_in_memory > 0 ? value_heads_in_memory : value_heads);
    }
    /// Of a head of a segment, in elements; the same for S and M.
    HCP_DEVICE int64_t state_offset(int32_t segment, int32_t head) const {
        return (segment * value_row() + int64_t{kHeadDim} * head) * kHeadDim;
    }
};

}  // namespace hybridcp::gdn::cuda

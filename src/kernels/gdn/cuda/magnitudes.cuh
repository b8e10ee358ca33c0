#pragma once

// The largest magnitude of each value head in rows of tokens and in states, from which backward
// takes the head's powers of two. Rows beyond the segments, infinities and NaN do not count.
// Launch: blocks of kThreads. A block takes whole rows of up to 16 neighbouring heads, token by
// token, so that what it reads at once lies together; the last ones take a state each.

#include <cmath>

#include "kernels/gdn/cuda/head_scale.cuh"
#include "kernels/gdn/cuda/walk_range.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

struct MagnitudesParams {
    const uint16_t* rows;  // bf16 [tokens, heads, 128]
    int64_t token_stride, head_stride;
    const float* states;  // [segments, heads, K, V] or null
    Shape shape;
    const Chunk* chunks;
    const Piece* pieces;
    int32_t num_pieces;
    uint32_t* largest;  // [heads], bits of fp32; not smaller than it is
};

/// How rows are dealt out: a thread has 16 bytes of a row of one head.
struct RowsOfBlock {
    static constexpr int32_t kRows = 16;  // at once
    static constexpr int32_t kSteps = 64, kStepsAtOnce = 8;
    int32_t heads, tokens;  // of a step
    int32_t head_blocks, token_blocks;

    explicit constexpr RowsOfBlock(const Shape& shape)
        : heads(shape.value_heads < kRows ? shape.value_heads : kRows),
          tokens(kRows / heads),
          head_blocks((shape.value_heads + heads - 1) / heads),
          token_blocks((shape.tokens + tokens * kSteps - 1) / (tokens * kSteps)) {}
    [[nodiscard]] constexpr int32_t blocks() const { return head_blocks * token_blocks; }
};

class Magnitudes {
  public:
    static constexpr uint32_t kThreads = 16 * RowsOfBlock::kRows;

    static int64_t blocks(const MagnitudesParams& p) {
        const int64_t states = p.states != nullptr ? p.num_pieces : 0;
        return RowsOfBlock(p.shape).blocks() + states * p.shape.value_heads;
    }

    HCP_DEVICE void take_rows(const MagnitudesParams& p, int32_t block) {
        const RowsOfBlock rows(p.shape);
        const auto thread = static_cast<int32_t>(device::thread_index()), row = thread / 16;
        const int32_t head = block % rows.head_blocks * rows.heads + row % rows.heads;
        const bool has_row = row < rows.heads * rows.tokens && head < p.shape.value_heads;
        const int32_t first =
            block / rows.head_blocks * rows.tokens * RowsOfBlock::kSteps + row / rows.heads;
        const Chunk last = device::load_global(p.chunks + p.shape.num_chunks - 1);
        const int32_t end = has_row ? last.token + last.tokens : 0;
        const uint16_t* from = p.rows + (has_row ? head : 0) * p.head_stride + thread % 16 * 8;
#pragma unroll 1
        for (int32_t i = 0; i < RowsOfBlock::kSteps; i += RowsOfBlock::kStepsAtOnce) {
            add_rows(p, from, first + i * rows.tokens, rows.tokens, end);
        }
        leave(p.largest + head, 16);
    }
    HCP_DEVICE void take_state(const MagnitudesParams& p, int32_t index) {
        const int32_t head = index % p.shape.value_heads;
        const Piece piece = load_piece(p.pieces + index / p.shape.value_heads);
        if (piece.index > 0) {
            return;
        }
        const auto* from = reinterpret_cast<const device::Float4*>(
            p.states + p.shape.state_offset(piece.segment, head));
#pragma unroll
        for (uint32_t i = 0; i < kHeadDim * kHeadDim / 4 / kThreads; ++i) {
            const auto four = device::load_global(from + kThreads * i + device::thread_index());
            largest_.add(four.x);
            largest_.add(four.y);
            largest_.add(four.z);
            largest_.add(four.w);
        }
        leave(p.largest + head, 32);
    }

  private:
    using Words = device::Word4[RowsOfBlock::kStepsAtOnce];

    HCP_DEVICE void add_rows(
        const MagnitudesParams& p, const uint16_t* from, int32_t first, int32_t step, int32_t end) {
        Words words;
#pragma unroll
        for (int32_t i = 0; i < RowsOfBlock::kStepsAtOnce; ++i) {
            const int32_t token = first + i * step;
            const int32_t there = token < p.shape.tokens ? token : p.shape.tokens - 1;
            words[i] = device::load_global(
                reinterpret_cast<const device::Word4*>(from + there * p.token_stride));
        }
        uint32_t largest = 0;
#pragma unroll
        for (int32_t i = 0; i < RowsOfBlock::kStepsAtOnce; ++i) {
            const device::Word4& w = words[i];
            const uint32_t of_row =
                device::larger_bf16(device::larger_bf16(w.x, w.y), device::larger_bf16(w.z, w.w));
            largest = device::larger_bf16(largest, first + i * step < end ? of_row : 0);
        }
        const device::Float2 both = device::unpack_bf16(largest & 0x7fff7fffU);
        if (both.x < INFINITY && both.y < INFINITY) {
            largest_.add(both.x);
            largest_.add(both.y);
        } else {
            add_one_by_one(words, first, step, end);
        }
    }
    HCP_DEVICE void add_one_by_one(const Words& words, int32_t first, int32_t step, int32_t end) {
#pragma unroll
        for (int32_t i = 0; i < RowsOfBlock::kStepsAtOnce; ++i) {
            for (const uint32_t word : {words[i].x, words[i].y, words[i].z, words[i].w}) {
                const device::Float2 x = device::unpack_bf16(first + i * step < end ? word : 0);
                largest_.add(x.x);
                largest_.add(x.y);
            }
        }
    }
    /// For each `lanes` of the warp.
    HCP_DEVICE void leave(uint32_t* to, uint32_t lanes) const {
        const uint32_t bits = largest_.of_lanes(lanes);
        if (device::lane_index() % lanes == 0 && bits > 0) {
            device::atomic_max_global(to, bits);
        }
    }

    Largest largest_;
};

HCP_DEVICE void magnitudes_kernel(const MagnitudesParams& p) {
    const auto block = static_cast<int32_t>(device::block_index());
    const int32_t of_rows = RowsOfBlock(p.shape).blocks();
    if (block < of_rows) {
        Magnitudes().take_rows(p, block);
    } else {
        Magnitudes().take_state(p, block - of_rows);
    }
}

#ifdef __CUDACC__
__global__ void __launch_bounds__(Magnitudes::kThreads)
    magnitudes(const __grid_constant__ MagnitudesParams p) {
    magnitudes_kernel(p);
}
#endif

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS

#pragma once

// Rows of tokens in global memory, [tokens, heads, 128], that kernels store and load as panels of a
// chunk's rows and 64 columns. The last chunk of a segment may have fewer rows: those behind them
// in memory belong to the next segment.

#include "kernels/gdn/cuda/problem.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

struct TokenRows {
    device::TensorMap map;  // boxes of 64 columns, 1 head, 64 tokens; or tiles of both panels
    uint16_t* data;
    int64_t token_stride, head_stride;  // in elements
};

/// Rows of a short chunk, by a warp.
HCP_DEVICE void store_short_panel(
    const TokenRows& to, uint32_t panel, Chunk chunk, int32_t head, int32_t half) {
    uint16_t* first = to.data + chunk.token * to.token_stride + head * to.head_stride + 64 * half;
#pragma unroll 1
    for (auto piece = static_cast<int32_t>(device::lane_index()); piece < chunk.tokens * 8;
         piece += 32) {
        const int32_t row = piece / 8, column = piece % 8 * 8;
        const uint32_t at =
            panel + device::swizzle_128(static_cast<uint32_t>(row * 128 + column * 2));
        device::store_global(
            reinterpret_cast<device::Word4*>(first + row * to.token_stride + column),
            device::load_shared<device::Word4>(at));
    }
    device::fence_proxy_async();  // the panel may be loaded again
}
/// By a warp; a whole chunk's rows leave with the copies that its lane 0 commits next.
HCP_DEVICE void store_panel(
    const TokenRows& to, uint32_t panel, Chunk chunk, int32_t head, int32_t half) {
    if (chunk.tokens < kChunkTokens) {
        store_short_panel(to, panel, chunk, head, half);
    } else if (device::lane_index() == 0) {
        device::tensor_store(&to.map, panel, {64 * half, head, chunk.token});
    }
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS

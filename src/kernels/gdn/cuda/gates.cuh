#pragma once

// The gates of one chunk, by one warp: lane l has tokens 2 l and 2 l + 1.

#include <cstring>

#include "kernels/gdn/cuda/problem.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

/// Below this log decay a gate is a full reset: e^-88 is 0 next to 1 in fp32, and sums stay finite.
constexpr float kLogDecayFloor = -88.0F;
constexpr float kLog2E = 1.44269504F;

struct ChunkGates {
    float sum[2];     // of log2 decays from the first token to this one, this one included
    float beta[2];    // 0 for tokens beyond the chunk
    float all;        // of the chunk
    bool floored[2];  // g was at the floor or beyond it: its gradient is 0
};

/// What the lane's tokens say, as loaded: scan_gates does the rest, so that loads can run ahead. A
/// conversion next to a load would wait for it.
struct RawGates {
    float g[2];
    uint32_t beta[2];  // bits, of a bf16 in the low half
    bool beta_is_bf16;
};

HCP_DEVICE float beta_of(uint32_t bits, bool is_bf16) {
    const uint32_t whole = is_bf16 ? bits << 16 : bits;
    float beta;
    std::memcpy(&beta, &whole, sizeof beta);
    return beta;
}

HCP_DEVICE RawGates load_gates(const GateInputs& in, Chunk chunk, int32_t head) {
    RawGates raw = {{0.0F, 0.0F}, {0, 0}, in.beta_is_bf16};
    const auto row = static_cast<int32_t>(2 * device::lane_index());
    const int64_t token = int64_t{chunk.token} + row;
    const float* g = in.g + token * in.g_token_stride + head * in.g_head_stride;
    const int64_t beta = token * in.beta_token_stride + head * in.beta_head_stride;
    for (int i = 0; i < 2; ++i) {
        if (row + i < chunk.tokens) {
            raw.g[i] = device::load_global(g + i * in.g_token_stride);
            const int64_t at = beta + i * in.beta_token_stride;
            if (in.beta_is_bf16) {
                raw.beta[i] = device::load_global(static_cast<const uint16_t*>(in.beta) + at);
            } else {
                raw.beta[i] = device::load_global(static_cast<const uint32_t*>(in.beta) + at);
            }
        }
    }
    return raw;
}

/// Brings what load_gates will load into the L2 cache.
HCP_DEVICE void prefetch_gates(const GateInputs& in, Chunk chunk, int32_t head) {
    const auto row = static_cast<int32_t>(2 * device::lane_index());
    const int64_t token = int64_t{chunk.token} + row;
    const float* g = in.g + token * in.g_token_stride + head * in.g_head_stride;
    const int64_t beta = token * in.beta_token_stride + head * in.beta_head_stride;
    for (int i = 0; i < 2; ++i) {
        if (row + i < chunk.tokens) {
            device::prefetch_global(g + i * in.g_token_stride);
            const int64_t at = (beta + i * in.beta_token_stride) * (in.beta_is_bf16 ? 2 : 4);
            device::prefetch_global(static_cast<const uint8_t*>(in.beta) + at);
        }
    }
}

/// All 32 lanes call. Tokens beyond the chunk do not decay.
HCP_DEVICE ChunkGates scan_gates(const RawGates& raw) {
    ChunkGates gates;
    float log2_decay[2];
    for (int i = 0; i < 2; ++i) {
        gates.floored[i] = raw.g[i] <= kLogDecayFloor;
        log2_decay[i] = (gates.floored[i] ? kLogDecayFloor : raw.g[i]) * kLog2E;
        gates.beta[i] = beta_of(raw.beta[i], raw.beta_is_bf16);
    }
    float sum = log2_decay[0] + log2_decay[1];
#pragma unroll
    for (uint32_t distance = 1; distance < 32; distance <<= 1) {
        const float before = device::shuffle_up(sum, distance);
        if (device::lane_index() >= distance) {
            sum += before;
        }
    }
    gates.sum[0] = sum - log2_decay[1];
    gates.sum[1] = sum;
    gates.all = device::shuffle(sum, 31);
    return gates;
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS

#pragma once

// The gates of one chunk, by one warp: lane l has tokens 2 l and 2 l + 1.

#include <cstring>

#include "kernels/gdn/cuda/problem.cuh"

namespace hybridcp::gdn::cuda {

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

/// Where a lane's gates of a chunk lie: its first token's.
struct GateCursor {
    const float* g;
    const uint8_t* beta;

    HCP_DEVICE GateCursor(const GateInputs& in, int32_t first_token, int32_t head) {
        const int64_t token = int64_t{first_token} + 2 * device::lane_index();
        g = in.g + token * in.g_token_stride + head * in.g_head_stride;
        beta = static_cast<const uint8_t*>(in.beta) +
               (token * in.beta_token_stride + head * in.beta_head_stride) * beta_bytes(in);
    }
    HCP_DEVICE static int32_t beta_bytes(const GateInputs& in) { return in.beta_is_bf16 ? 2 : 4; }

    HCP_DEVICE void advance(const GateInputs& in, int32_t tokens) {
        g += tokens * in.g_token_stride;
        beta += tokens * in.beta_token_stride * beta_bytes(in);
    }
    /// Of a chunk of `tokens`.
    HCP_DEVICE RawGates load(const GateInputs& in, int32_t tokens) const {
        RawGates raw = {{0.0F, 0.0F}, {0, 0}, in.beta_is_bf16};
        for (int i = 0; i < 2; ++i) {
            if (static_cast<int32_t>(2 * device::lane_index()) + i < tokens) {
                raw.g[i] = device::load_global(g + i * in.g_token_stride);
                const uint8_t* at = beta + i * in.beta_token_stride * beta_bytes(in);
                raw.beta[i] = in.beta_is_bf16
                                  ? device::load_global(reinterpret_cast<const uint16_t*>(at))
                                  : device::load_global(reinterpret_cast<const uint32_t*>(at));
            }
        }
        return raw;
    }
    /// Brings what load will load into the L2 cache.
    HCP_DEVICE void prefetch(const GateInputs& in, int32_t tokens) const {
        for (int i = 0; i < 2; ++i) {
            if (static_cast<int32_t>(2 * device::lane_index()) + i < tokens) {
                device::prefetch_global(g + i * in.g_token_stride);
                device::prefetch_global(beta + i * in.beta_token_stride * beta_bytes(in));
            }
        }
    }
};

HCP_DEVICE RawGates load_gates(const GateInputs& in, Chunk chunk, int32_t head) {
    return GateCursor(in, chunk.token, head).load(in, chunk.tokens);
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

}  // namespace hybridcp::gdn::cuda

// Times of other implementations, measured on one H200 (driver 580.159, torch 2.11.0) by the method
// of docs/benchmarks.md: FLA is flash-linear-attention 0.6.0 with Triton 3.7.1, FlashQLA 0.1.3 with
// TileLang 0.1.15; bf16, K = V = 128, q/k normalisation inside.
#include <array>

#include "hcp/bench_gdn_cuda.h"

namespace hybridcp::cli {

namespace {

constexpr std::int64_t kKilo = 1024;

constexpr std::array kPeerTimes{
    GdnPeerTime{"FLA", 16, 32, 8 * kKilo, "ls16", 0.649, 0.507, 1.623, 0},
    GdnPeerTime{"FlashQLA", 16, 32, 8 * kKilo, "ls16", 0.621, 0.341, 1.082, 0.58},
    GdnPeerTime{"FLA", 16, 32, 32 * kKilo, "ls16", 2.022, 0, 6.372, 0},
    GdnPeerTime{"FlashQLA", 16, 32, 32 * kKilo, "ls16", 0.826, 0.814, 2.408, 0},
    GdnPeerTime{"FLA", 16, 32, 32 * kKilo, "zero25", 2.014, 0, 6.332, 0},
    GdnPeerTime{"FlashQLA", 16, 32, 32 * kKilo, "zero25", 1.386, 0, 2.754, 0},
    GdnPeerTime{"FLA", 16, 32, 32 * kKilo, "qwen", 2.015, 0, 6.295, 0},
    GdnPeerTime{"FlashQLA", 16, 32, 32 * kKilo, "qwen", 0.944, 0, 2.525, 0},
    GdnPeerTime{"FLA", 16, 32, 128 * kKilo, "ls16", 8.123, 0, 25.33, 0},
    GdnPeerTime{"FlashQLA", 16, 32, 128 * kKilo, "ls16", 3.023, 0, 9.235, 0},
    GdnPeerTime{"FLA", 16, 64, 8 * kKilo, "ls16", 1.064, 0.853, 2.819, 0},
    GdnPeerTime{"FlashQLA", 16, 64, 8 * kKilo, "ls16", 0.589, 0.435, 1.300, 0},
    GdnPeerTime{"FLA", 16, 64, 32 * kKilo, "ls16", 3.527, 0, 11.30, 0},
    GdnPeerTime{"FlashQLA", 16, 64, 32 * kKilo, "ls16", 1.666, 0, 4.229, 0},
    GdnPeerTime{"FLA", 16, 64, 128 * kKilo, "ls16", 14.36, 0, 0, 0},
    GdnPeerTime{"FlashQLA", 16, 64, 128 * kKilo, "ls16", 6.535, 0, 0, 0},
    GdnPeerTime{"FLA", 16, 16, 8 * kKilo, "ls16", 1.003, 0.353, 1.579, 0},
    GdnPeerTime{"FlashQLA", 16, 16, 8 * kKilo, "ls16", 0.457, 0.186, 0.883, 0},
    GdnPeerTime{"FLA", 16, 16, 32 * kKilo, "ls16", 1.373, 0, 3.520, 0},
    GdnPeerTime{"FlashQLA", 16, 16, 32 * kKilo, "ls16", 0.758, 0.523, 1.419, 0},
    GdnPeerTime{"FLA", 16, 16, 128 * kKilo, "ls16", 5.386, 0, 0, 0},
    GdnPeerTime{"FlashQLA", 16, 16, 128 * kKilo, "ls16", 1.816, 0, 0, 0},
    GdnPeerTime{"FLA", 2, 8, 32 * kKilo, "ls16", 0.989, 0, 2.724, 0},
    GdnPeerTime{"FlashQLA", 2, 8, 32 * kKilo, "ls16", 0.446, 0.265, 1.025, 0.63},
    GdnPeerTime{"FLA", 4, 8, 32 * kKilo, "ls16", 0.930, 0, 2.804, 0},
    GdnPeerTime{"FlashQLA", 4, 8, 32 * kKilo, "ls16", 0.465, 0.283, 0.717, 0.70},
};

}  // namespace

std::vector<GdnPeerTime> gdn_peer_times(std::int64_t key_heads,
                                        std::int64_t value_heads,
                                        std::int64_t tokens,
                                        const std::string& gates) {
    std::vector<GdnPeerTime> found;
    for (const GdnPeerTime& time : kPeerTimes) {
        if (time.key_heads == key_heads && time.value_heads == value_heads &&
            time.tokens == tokens && time.gates == gates) {
            found.push_back(time);
        }
    }
    return found;
}

}  // namespace hybridcp::cli

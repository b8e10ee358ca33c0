// `hcp bench gdn --device cuda`: milliseconds of whole passes on a GPU, launched and replayed as a
// graph, with what peers take on an H200 and what the GPU's limits allow (docs/benchmarks.md).
#pragma once

#include "hcp/bench_gdn.h"
#include "hcp/bench_peers.h"

namespace hybridcp::cli {

/// Times `variants` after they were verified, and Transformers' op where `hugging_face` is not
/// null. Returns what --report writes.
[[nodiscard]] nlohmann::json bench_gdn_on_cuda(const BenchGdnOptions& options,
                                               const std::vector<GdnVariant>& variants,
                                               HuggingFacePeer* hugging_face);
[[nodiscard]] std::string bench_gdn_cuda_table(const nlohmann::json& results);

/// A published or measured time of another implementation at one shape, on an H200, in
/// milliseconds; graph replay is 0 where it was not measured.
struct GdnPeerTime {
    const char* peer;
    std::int64_t key_heads, value_heads, tokens;
    const char* gates;
    double forward_ms, forward_graph_ms, backward_ms, backward_graph_ms;
};
[[nodiscard]] std::vector<GdnPeerTime> gdn_peer_times(std::int64_t key_heads,
                                                      std::int64_t value_heads,
                                                      std::int64_t tokens,
                                                      const std::string& gates);

}  // namespace hybridcp::cli

// What `hcp bench gdn` compares with besides our own backends.
#pragma once

#include <sys/types.h>

#include <cstdio>
#include <string>

#include "hcp/bench_gdn.h"

namespace hybridcp::cli {

/// Transformers' torch_chunk_gated_delta_rule in a Python process of its own, which runs one
/// forward and backward pass when asked to, so that it can be timed by turns with others.
class HuggingFacePeer {
  public:
    /// Starts `python`. Errors: UsageError that says what to install when Python or a package is
    /// missing.
    HuggingFacePeer(const std::string& python, int threads);
    ~HuggingFacePeer();
    HuggingFacePeer(const HuggingFacePeer&) = delete;
    HuggingFacePeer& operator=(const HuggingFacePeer&) = delete;

    [[nodiscard]] std::string versions() const { return versions_; }
    /// Makes the inputs, and warms up.
    void set_up(const BenchGdnOptions& options, std::int64_t tokens, const std::string& dtype);
    /// Errors: CommError when the process has failed.
    [[nodiscard]] LaneTimes run();

  private:
    nlohmann::json ask(const nlohmann::json& request);
    void stop();

    std::string python_;
    std::string versions_;
    pid_t pid_ = -1;
    std::FILE* to_ = nullptr;
    std::FILE* from_ = nullptr;
};

/// The matrix products of a chunkwise forward and backward pass, alone, by ATen's brgemm, with the
/// packing of their right operands: no kernel of these products can be faster than that by means of
/// brgemm. Operands stay in the cache. Scaled to `tokens`.
/// Errors: UsageError when brgemm does not take the dtype on this CPU.
[[nodiscard]] Lane brgemm_lane(const BenchGdnOptions& options,
                               std::int64_t chunk,
                               std::int64_t tokens,
                               at::ScalarType dtype);

}  // namespace hybridcp::cli

#pragma once

// Segments as the Hopper kernels want them: tables of chunks and pieces on the device.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/gdn/cuda/host_tables.h"
#include "kernels/gdn/gdn.h"

namespace hybridcp::gdn {

struct SegmentTables {
    at::Tensor memory;  // int32 on the device: the tables below, one after another
    at::Device device = at::kCUDA;
    std::int64_t value_heads = 0, chunks_of_two_summary_parts = 0;
    double kept_share = 0.0;
    std::int32_t num_chunks = 0, num_pieces = 0, num_whole_segments = 0, num_runs = 0;
    std::int32_t num_summary_parts = 0;
    std::int32_t num_checkpoints = 0;  // of a head
    cuda::RunCut cut{};
    std::vector<std::int64_t> empty_segments;
    std::int32_t num_joins = 0, num_slots = 0;

    [[nodiscard]] const cuda::Chunk* chunks() const {
        return reinterpret_cast<const cuda::Chunk*>(memory.data_ptr<std::int32_t>());
    }
    [[nodiscard]] const cuda::Piece* pieces() const {
        return reinterpret_cast<const cuda::Piece*>(chunks() + num_chunks);
    }
    [[nodiscard]] const cuda::Piece* whole_segments() const { return pieces() + num_pieces; }
    [[nodiscard]] const cuda::Piece* summary_parts() const {
        return whole_segments() + num_whole_segments;
    }
    [[nodiscard]] const cuda::Run* runs() const {
        return reinterpret_cast<const cuda::Run*>(summary_parts() + num_summary_parts);
    }
    [[nodiscard]] const cuda::Join* joins() const {
        return reinterpret_cast<const cuda::Join*>(runs() + num_runs);
    }
    [[nodiscard]] const std::int32_t* first_checkpoints() const {
        return reinterpret_cast<const std::int32_t*>(joins() + num_joins);
    }
};

/// Made once for a set of segments and kept with it.
[[nodiscard]] std::shared_ptr<const SegmentTables> segment_tables(
    const GdnSegments& segments,
    const at::Device& device,
    std::int64_t value_heads,
    std::int64_t chunks_of_two_summary_parts,
    double kept_share = 0.0);

}  // namespace hybridcp::gdn

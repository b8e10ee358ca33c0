// Packed tokens cut into chunks for batched work. Chunks never cross a segment; the last one of a
// segment may be short and is filled up with zero rows. Chunks are laid out step-major: step s
// holds chunk s of every segment that has one, and segments are ordered by their number of chunks,
// longest first. So the serial loop over steps finds the chunks of a step, and the segments that
// are still running, as one contiguous range each.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace hybridcp::gdn {

class ChunkLayout {
  public:
    struct Step {
        std::int64_t first_chunk = 0;
        std::int64_t num_chunks = 0;   // = segments running at this step
        std::int64_t num_running = 0;  // segments that run on to the next step
    };

    /// `options` gives the device of the index tensors.
    ChunkLayout(const std::vector<std::int64_t>& offsets,
                std::int64_t num_tokens,
                std::int64_t chunk_size,
                const at::TensorOptions& options);

    [[nodiscard]] std::int64_t num_chunks() const { return num_chunks_; }
    [[nodiscard]] std::int64_t chunk_size() const { return chunk_size_; }
    [[nodiscard]] std::int64_t num_segments() const { return num_segments_; }
    [[nodiscard]] const std::vector<Step>& steps() const { return steps_; }
    /// The segment, in the caller's order, at a place of the layout, and its number of chunks.
    [[nodiscard]] std::int64_t segment_at(std::int64_t place) const {
        return order_[static_cast<std::size_t>(place)];
    }
    [[nodiscard]] std::int64_t chunks_at(std::int64_t place) const;
    /// The chunk of a place at a step that it has.
    [[nodiscard]] std::int64_t row(std::int64_t step, std::int64_t place) const {
        return steps_[static_cast<std::size_t>(step)].first_chunk + place;
    }

    /// x [T, H, ...] to a contiguous [chunks * H, C, ...] of dtype `type`; rows without a token are
    /// 0.
    [[nodiscard]] at::Tensor to_chunks(const at::Tensor& x, at::ScalarType type) const;
    /// The reverse for x [chunks * H, C, ...]; tokens outside all segments are 0.
    [[nodiscard]] at::Tensor to_tokens(const at::Tensor& x,
                                       std::int64_t num_heads,
                                       at::ScalarType type) const;

    /// x [chunks * H, ...] by step, without a copy.
    [[nodiscard]] std::vector<at::Tensor> split_steps(const at::Tensor& x) const;

    /// States [N, H, ...] of dtype `type` as contiguous [N * H, ...], segments in the layout's
    /// order.
    [[nodiscard]] at::Tensor to_step_order(const at::Tensor& states, at::ScalarType type) const;
    /// The reverse: [N * H, ...] to [N, H, ...] in the caller's order.
    [[nodiscard]] at::Tensor to_segment_order(const at::Tensor& states,
                                              std::int64_t num_heads) const;

  private:
    void order_segments(const std::vector<std::int64_t>& offsets, const at::TensorOptions& options);
    void index_tokens(const std::vector<std::int64_t>& offsets, const at::TensorOptions& options);

    std::int64_t num_tokens_ = 0;
    std::int64_t chunk_size_ = 0;
    std::int64_t num_segments_ = 0;
    std::int64_t num_chunks_ = 0;
    bool identity_ = false;            // chunk rows are the tokens as they stand
    std::vector<std::int64_t> order_;  // place in the layout -> segment
    std::vector<Step> steps_;
    at::Tensor order_index_;    // [N] place -> segment
    at::Tensor inverse_order_;  // [N] segment -> place
    at::Tensor token_of_row_;   // [chunks * C]; an arbitrary token for empty rows
    at::Tensor empty_rows_;     // rows of token_of_row_ without a token
    at::Tensor row_of_token_;   // [tokens in segments]
};

}  // namespace hybridcp::gdn

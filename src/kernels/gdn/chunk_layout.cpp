#include "kernels/gdn/chunk_layout.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

namespace hybridcp::gdn {
namespace {

at::Tensor index_tensor(const std::vector<std::int64_t>& values, const at::TensorOptions& options) {
    return at::tensor(values, at::kLong).to(options.device());
}

}  // namespace

ChunkLayout::ChunkLayout(const std::vector<std::int64_t>& offsets,
                         std::int64_t num_tokens,
                         std::int64_t chunk_size,
                         const at::TensorOptions& options)
    : num_tokens_(num_tokens),
      chunk_size_(chunk_size),
      num_segments_(static_cast<std::int64_t>(offsets.size()) - 1) {
    order_segments(offsets, options);
    identity_ = num_segments_ == 1 && offsets[1] == num_tokens && num_tokens % chunk_size == 0;
    if (!identity_) {
        index_tokens(offsets, options);
    }
}

void ChunkLayout::order_segments(const std::vector<std::int64_t>& offsets,
                                 const at::TensorOptions& options) {
    const auto chunks_of = [&](std::int64_t segment) {
        const auto i = static_cast<std::size_t>(segment);
        return (offsets[i + 1] - offsets[i] + chunk_size_ - 1) / chunk_size_;
    };
    order_.resize(static_cast<std::size_t>(num_segments_));
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(),
                     [&](std::int64_t a, std::int64_t b) { return chunks_of(a) > chunks_of(b); });
    const std::int64_t num_steps = order_.empty() ? 0 : chunks_of(order_.front());
    std::int64_t running = num_segments_;
    for (std::int64_t s = 0; s <= num_steps; ++s) {
        while (running > 0 && chunks_of(order_[static_cast<std::size_t>(running - 1)]) <= s) {
            --running;
        }
        if (!steps_.empty()) {
            steps_.back().num_running = running;
        }
        if (s < num_steps) {
            steps_.push_back({.first_chunk = num_chunks_, .num_chunks = running});
            num_chunks_ += running;
        }
    }
    std::vector<std::int64_t> inverse(order_.size());
    for (std::size_t place = 0; place < order_.size(); ++place) {
        inverse[static_cast<std::size_t>(order_[place])] = static_cast<std::int64_t>(place);
    }
    order_index_ = index_tensor(order_, options);
    inverse_order_ = index_tensor(inverse, options);
}

void ChunkLayout::index_tokens(const std::vector<std::int64_t>& offsets,
                               const at::TensorOptions& options) {
    std::vector<std::int64_t> token_of_row;
    std::vector<std::int64_t> empty_rows;
    std::vector<std::int64_t> row_of_token(static_cast<std::size_t>(offsets.back()));
    token_of_row.reserve(static_cast<std::size_t>(num_chunks_ * chunk_size_));
    for (std::size_t s = 0; s < steps_.size(); ++s) {
        for (std::int64_t place = 0; place < steps_[s].num_chunks; ++place) {
            const auto segment = static_cast<std::size_t>(order_[static_cast<std::size_t>(place)]);
            const std::int64_t begin =
                offsets[segment] + static_cast<std::int64_t>(s) * chunk_size_;
            for (std::int64_t token = begin; token < begin + chunk_size_; ++token) {
                const auto row = static_cast<std::int64_t>(token_of_row.size());
                if (token < offsets[segment + 1]) {
                    row_of_token[static_cast<std::size_t>(token)] = row;
                    token_of_row.push_back(token);
                } else {
                    empty_rows.push_back(row);
                    token_of_row.push_back(begin);
                }
            }
        }
    }
    token_of_row_ = index_tensor(token_of_row, options);
    empty_rows_ = index_tensor(empty_rows, options);
    row_of_token_ = index_tensor(row_of_token, options);
}

std::int64_t ChunkLayout::chunks_at(std::int64_t place) const {
    const auto end = std::partition_point(steps_.begin(), steps_.end(), [place](const Step& step) {
        return step.num_chunks > place;
    });
    return end - steps_.begin();
}

at::Tensor ChunkLayout::to_chunks(const at::Tensor& x, at::ScalarType type) const {
    at::Tensor rows = x;  // [chunks * C, H, ...]
    if (!identity_) {
        rows = x.index_select(0, token_of_row_);
        if (empty_rows_.numel() > 0) {
            rows.index_fill_(0, empty_rows_, 0);
        }
    }
    const at::Tensor by_head = rows.unflatten(0, {num_chunks_, chunk_size_}).transpose(1, 2);
    at::Tensor chunks = at::empty(by_head.sizes(), x.options().dtype(type));
    chunks.copy_(by_head);
    return chunks.flatten(0, 1);
}

at::Tensor ChunkLayout::to_tokens(const at::Tensor& x,
                                  std::int64_t num_heads,
                                  at::ScalarType type) const {
    const at::Tensor by_token = x.unflatten(0, {num_chunks_, num_heads}).transpose(1, 2);
    at::Tensor rows = at::empty(by_token.sizes(), x.options().dtype(type));
    rows.copy_(by_token);
    rows = rows.flatten(0, 1);
    if (identity_) {
        return rows;
    }
    rows = rows.index_select(0, row_of_token_);
    const std::int64_t num_padding = num_tokens_ - rows.size(0);
    if (num_padding == 0) {
        return rows;
    }
    std::vector<std::int64_t> padding_shape = rows.sizes().vec();
    padding_shape[0] = num_padding;
    return at::cat({rows, at::zeros(padding_shape, rows.options())});
}

std::vector<at::Tensor> ChunkLayout::split_steps(const at::Tensor& x) const {
    if (steps_.empty()) {
        return {};
    }
    const std::int64_t heads = x.size(0) / num_chunks_;
    std::vector<std::int64_t> sizes;
    for (const Step& step : steps_) {
        sizes.push_back(step.num_chunks * heads);
    }
    return x.split_with_sizes(sizes);
}

at::Tensor ChunkLayout::to_step_order(const at::Tensor& states, at::ScalarType type) const {
    return states.to(type).index_select(0, order_index_).flatten(0, 1);
}

at::Tensor ChunkLayout::to_segment_order(const at::Tensor& states, std::int64_t num_heads) const {
    return states.unflatten(0, {num_segments_, num_heads}).index_select(0, inverse_order_);
}

}  // namespace hybridcp::gdn

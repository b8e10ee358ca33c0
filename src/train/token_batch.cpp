#include "train/token_batch.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "hybridcp/error.h"

namespace hybridcp {

namespace {

std::vector<std::int64_t> lengths_or_full(const std::vector<std::int64_t>& valid_lengths,
                                          std::int64_t num_rows,
                                          std::int64_t row_length) {
    if (valid_lengths.empty()) {
        return std::vector<std::int64_t>(static_cast<std::size_t>(num_rows), row_length);
    }
    HCP_CHECK_EQ(static_cast<std::int64_t>(valid_lengths.size()), num_rows,
                 "one valid length a row");
    for (const std::int64_t length : valid_lengths) {
        HCP_CHECK(length >= 0 && length <= row_length, "valid length {} of a row of {} tokens",
                  length, row_length);
    }
    return valid_lengths;
}

}  // namespace

TokenBatch batch_from_rows(const at::Tensor& token_ids,
                           const at::Tensor& targets,
                           const std::vector<std::int64_t>& valid_lengths) {
    HCP_CHECK_EQ(token_ids.dim(), 2, "dims of token ids, which are [rows, tokens]");
    HCP_CHECK(token_ids.sizes() == targets.sizes(), "targets of another shape than token ids");
    TokenBatch batch;
    batch.document_lengths = lengths_or_full(valid_lengths, token_ids.size(0), token_ids.size(1));
    std::vector<at::Tensor> ids{at::empty({0}, at::kLong)};
    std::vector<at::Tensor> labels{at::empty({0}, at::kLong)};
    for (std::int64_t row = 0; row < token_ids.size(0); ++row) {
        const std::int64_t length = batch.document_lengths[static_cast<std::size_t>(row)];
        ids.push_back(token_ids[row].narrow(0, 0, length).to(at::kLong));
        labels.push_back(targets[row].narrow(0, 0, length).to(at::kLong));
    }
    batch.token_ids = at::cat(ids);
    batch.targets = at::cat(labels);
    return batch;
}

at::Tensor rows_from_flat(const at::Tensor& flat,
                          const std::vector<std::int64_t>& valid_lengths,
                          std::int64_t row_length) {
    const auto num_rows = static_cast<std::int64_t>(valid_lengths.size());
    std::vector<std::int64_t> shape{num_rows, row_length};
    shape.insert(shape.end(), flat.sizes().begin() + 1, flat.sizes().end());
    at::Tensor rows = at::zeros(shape, flat.options());
    std::int64_t offset = 0;
    for (std::int64_t row = 0; row < num_rows; ++row) {
        const std::int64_t length = valid_lengths[static_cast<std::size_t>(row)];
        HCP_CHECK_LE(length, row_length, "valid length of row {}", row);
        rows[row].narrow(0, 0, length).copy_(flat.narrow(0, offset, length));
        offset += length;
    }
    HCP_CHECK_EQ(offset, flat.size(0), "tokens of the flat tensor, from the valid lengths");
    return rows;
}

at::Tensor gather_flat(const at::Tensor& local, const Layout& layout, Group& cp_group) {
    HCP_CHECK_EQ(local.size(0), layout.num_local_tokens(cp_group.rank()), "local tokens");
    std::int64_t padded = 0;
    for (int rank = 0; rank < layout.num_ranks(); ++rank) {
        padded = std::max(padded, layout.num_local_tokens(rank));
    }
    std::vector<std::int64_t> shape = local.sizes().vec();
    shape[0] = padded;
    at::Tensor mine = at::zeros(shape, local.options());
    mine.narrow(0, 0, local.size(0)).copy_(local);
    const at::Tensor all = cp_group.all_gather("gather_flat", mine);  // [P, padded, ...]
    shape[0] = layout.num_tokens();
    at::Tensor flat = at::empty(shape, local.options());
    for (int rank = 0; rank < layout.num_ranks(); ++rank) {
        const at::Tensor indices = at::tensor(layout.flat_indices(rank), at::kLong);
        flat.index_copy_(0, indices.to(local.device()), all[rank].narrow(0, 0, indices.numel()));
    }
    return flat;
}

}  // namespace hybridcp

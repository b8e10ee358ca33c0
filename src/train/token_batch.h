// The tokens of a batch in the flat order, before they are cut over ranks, and the ways from rows
// and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "hybridcp/group.h"
#include "hybridcp/layout.h"

namespace hybridcp {

/// A batch in the flat order (documents one after another; padding is not in it), before sharding
/// over cp.
struct TokenBatch {
    std::vector<std::int64_t> document_lengths;
    at::Tensor token_ids;  // [T] int64
    at::Tensor targets;    // [T] int64, already shifted, -100 ignored
};

/// Rows with a valid length each become documents; what lies beyond is padding and is dropped.
/// token_ids, targets [B, T]; valid_lengths [B] or empty for T each.
[[nodiscard]] TokenBatch batch_from_rows(const at::Tensor& token_ids,
                                         const at::Tensor& targets,
                                         const std::vector<std::int64_t>& valid_lengths = {});
/// The reverse for a flat [T, ...] tensor: [B, T_row, ...], exactly zero on padding.
[[nodiscard]] at::Tensor rows_from_flat(const at::Tensor& flat,
                                        const std::vector<std::int64_t>& valid_lengths,
                                        std::int64_t row_length);
/// A local [T_local, ...] tensor of each cp rank -> [T, ...] in the flat order, on every rank.
[[nodiscard]] at::Tensor gather_flat(const at::Tensor& local,
                                     const Layout& layout,
                                     Group& cp_group);

}  // namespace hybridcp

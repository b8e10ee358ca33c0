// Rows of a tensor [T, ...] packed for a message and added where they arrive, by the runs of
// layout/rows.h. `at_row` says which side of a run the tensor is: &RowRun::source or
// &RowRun::target.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "layout/rows.h"

namespace hybridcp {

/// Uninitialised rows like those of a tensor.
[[nodiscard]] at::Tensor empty_rows(const at::Tensor& like, std::int64_t count);

/// The rows of `runs`, one run after another, contiguous; a view where `from` has them so.
[[nodiscard]] at::Tensor pack_rows(const at::Tensor& from,
                                   const std::vector<RowRun>& runs,
                                   std::int64_t RowRun::* at_row);

/// Adds a packed message to the rows where it belongs: runs may name a row more than once.
void add_rows(at::Tensor& into,
              const at::Tensor& message,
              const std::vector<RowRun>& runs,
              std::int64_t RowRun::* at_row);

}  // namespace hybridcp

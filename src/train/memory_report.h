// What the first step's tensors took, of the rank that took most.
#pragma once

#include <string>

#include "hybridcp/group.h"
#include "train/tensor_memory.h"

namespace hybridcp {

struct MemoryReport {
    int rank = 0;
    int num_ranks = 1;
    MemoryRecord record;
};

/// The record of the rank with the largest peak, on every rank. Comm: one all-gather (op "memory").
[[nodiscard]] MemoryReport largest_memory(const MemoryRecord& record, Group& world);

/// "1.234 GB"; four digits.
[[nodiscard]] std::string bytes_text(std::int64_t bytes);
/// Plain lines for the user: the peak, then each class's bytes at that moment and its own peak,
/// largest first.
[[nodiscard]] std::string to_table(const MemoryReport& report);

}  // namespace hybridcp

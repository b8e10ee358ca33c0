#pragma once

#include <cstddef>
#include <vector>

#include "simt/device_memory.h"

namespace hybridcp::simt {

[[nodiscard]] uint32_t box_bytes(const TensorMap& map);
/// The box as it lies in shared memory at `offset`, zeros outside the tensor.
[[nodiscard]] std::vector<std::byte> read_box(const TensorMap& map,
                                              device::TensorPosition position,
                                              uint32_t offset);
/// Writes what lies inside the tensor.
void write_box(const TensorMap& map,
               device::TensorPosition position,
               uint32_t offset,
               const std::vector<std::byte>& data);

}  // namespace hybridcp::simt

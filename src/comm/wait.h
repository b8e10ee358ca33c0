// What a Group's point-to-point calls and its collectives share.
#pragma once

#include <cstdint>
#include <string>

#include "hybridcp/group.h"

namespace hybridcp {

struct Group::Wait {
    std::string op;
    std::int64_t bytes = 0;
    int peer = -1;  // -1: a collective
    bool is_send = false;
};

[[nodiscard]] inline std::int64_t num_bytes(const at::Tensor& tensor) {
    return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

}  // namespace hybridcp

// What a Group's point-to-point calls and its collectives share.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <string>

#include <functional>
#include <vector>

#include "hybridcp/group.h"

namespace hybridcp {

struct Group::Wait {
    std::string op;
    std::int64_t bytes = 0;
    int peer = -1;  // -1: a collective
    bool is_send = false;
};

struct Pending::Transfer {
    Group* group = nullptr;
    c10::intrusive_ptr<c10d::Work> work;  // null: nothing to wait for
    std::vector<at::Tensor> tensors;      // kept alive while it is in flight
    Group::Wait what;
    std::function<void()> then = nullptr;  // once it is done
};

[[nodiscard]] inline std::int64_t num_bytes(const at::Tensor& tensor) {
    return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

}  // namespace hybridcp

// Chooses and connects the c10d backend of a group; the only place that knows Gloo and NCCL.
#pragma once

#include <exception>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "hybridcp/group.h"

namespace hybridcp {

/// The device whose tensors a group moves: options.device, for CUDA with the current index when it
/// names none. Errors: UsageError for a device that is neither cpu nor cuda, or cuda in a build
/// without it.
[[nodiscard]] at::Device group_device(const GroupOptions& options);

/// Connects the ranks of a group. Gloo listens on GLOO_SOCKET_IFNAME if that is set, on the
/// loopback when MASTER_ADDR is unset or local, else on the address of this host's name. Errors:
/// whatever the backend throws when a rank does not come.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> make_backend(
    const c10::intrusive_ptr<c10d::Store>& store, const GroupOptions& options);

/// What an exception of c10d or Gloo says, in one line and without where in their sources it was
/// thrown.
[[nodiscard]] std::string cause_of(const std::exception& error);

}  // namespace hybridcp

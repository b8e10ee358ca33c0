// Work outside the collectives (files, set-up) that must succeed or fail on all ranks together: an
// error on one rank becomes an error on every rank, instead of a wait that times out.
#pragma once

#include <functional>
#include <string>

#include "train/mesh.h"

namespace hybridcp {

/// Runs `work` on rank 0 alone. Errors: what it throws, the same type and message on every rank.
void on_rank_zero(const Mesh& mesh, const std::string& op, const std::function<void()>& work);

/// Runs `work` on every rank. Errors: its own on a rank where it throws; UsageError elsewhere.
void on_every_rank(const Mesh& mesh, const std::string& op, const std::function<void()>& work);

}  // namespace hybridcp

// Work outside the collectives (files, set-up) that must succeed or fail on all ranks together: an
// error on one rank becomes an error on every rank, instead of a wait that times out.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "train/mesh.h"

namespace hybridcp {

/// Runs `work` on rank 0 alone. Errors: what it throws, the same type and message on every rank.
void on_rank_zero(const Mesh& mesh, const std::string& op, const std::function<void()>& work);

/// Runs `work`, which exchanges nothing, on every rank. Errors: the lowest failing rank's, the same
/// type and message on every rank.
void on_every_rank(const Mesh& mesh, const std::string& op, const std::function<void()>& work);

/// Every rank's text, on every rank, by ascending rank.
[[nodiscard]] std::vector<std::string> gather_text(const Mesh& mesh,
                                                   const std::string& op,
                                                   const std::string& text);

}  // namespace hybridcp

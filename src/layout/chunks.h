// How what is cut (a document, or the flat row) falls into 2P chunks, and which rank holds which:
// the whole difference between the kinds of layout.
#pragma once

#include <cstdint>
#include <vector>

#include "hybridcp/layout.h"

namespace hybridcp {

/// The rank of each of the 2P chunks, in causal order; every rank holds one even and one odd chunk.
[[nodiscard]] std::vector<int> chunk_ranks(LayoutKind kind, int num_ranks);

/// Where the 2P chunks of `length` tokens begin and end, whatever the kind. [2P + 1]
/// Sizes differ by at most one token. What does not divide is handed out one token a chunk, to the
/// even chunks in turn, then to the odd ones, and round again; `offset` tokens were handed out
/// before. So documents that follow each other take turns, and of all their tokens together each
/// rank holds its P-th part, rounded down or up.
[[nodiscard]] std::vector<std::int64_t> chunk_boundaries(std::int64_t length,
                                                         int num_ranks,
                                                         std::int64_t offset);

}  // namespace hybridcp

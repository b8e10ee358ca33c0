// Moving tokens from one layout to another: a bijection of rows, computed once per batch. Its
// inverse is the route between the same layouts the other way round.
#pragma once

#include <cstdint>
#include <vector>

#include "hybridcp/layout.h"
#include "layout/rows.h"

namespace hybridcp {

/// What one rank sends, receives and keeps.
struct Route {
    std::vector<RowMessage> sends;     // at most one per peer, by ascending peer
    std::vector<RowMessage> receives;  // likewise
    std::vector<RowRun> kept;          // rows that this rank holds in both layouts
    std::int64_t num_source_rows = 0;
    std::int64_t num_target_rows = 0;
    /// The most peers that any rank talks to: 0 when nothing moves anywhere, 1 when every rank has
    /// at most one partner (zigzag to folded), so that messages need no collective.
    int max_peers = 0;
};

/// Errors: UsageError when the layouts differ in ranks or document lengths.
[[nodiscard]] Route make_route(const Layout& from, const Layout& to, int rank);

}  // namespace hybridcp

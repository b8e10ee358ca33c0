#include "layout/route.h"

#include <algorithm>
#include <set>

#include "hybridcp/error.h"

namespace hybridcp {

namespace {

// Calls visit(sender, receiver, run) for each run, by document, then in causal order, so that both
// ends of a message list its runs alike.
template <typename Visit>
void for_each_run(const Layout& from, const Layout& to, Visit visit) {
    for (std::int64_t doc = 0; doc < from.num_documents(); ++doc) {
        auto target = to.chain(doc).begin();
        for (const Segment& source : from.chain(doc)) {
            for (std::int64_t begin = source.begin; begin < source.end;) {
                while (target->end <= begin) {
                    ++target;
                }
                const std::int64_t end = std::min(source.end, target->end);
                visit(source.rank, target->rank,
                      RowRun{.source = source.local_begin + (begin - source.begin),
                             .target = target->local_begin + (begin - target->begin),
                             .count = end - begin});
                begin = end;
            }
        }
    }
}

}  // namespace

Route make_route(const Layout& from, const Layout& to, int rank) {
    HCP_CHECK(
        from.num_ranks() == to.num_ranks() && from.document_lengths() == to.document_lengths(),
        "route: both layouts must be of the same documents and ranks");
    Route route;
    route.num_source_rows = from.num_local_tokens(rank);
    route.num_target_rows = to.num_local_tokens(rank);
    RowMessages sends;
    RowMessages receives;
    std::vector<std::set<int>> peers(static_cast<std::size_t>(from.num_ranks()));
    for_each_run(from, to, [&](int sender, int receiver, const RowRun& run) {
        if (sender == receiver) {
            if (sender == rank) {
                append_run(route.kept, run);
            }
            return;
        }
        peers[static_cast<std::size_t>(sender)].insert(receiver);
        peers[static_cast<std::size_t>(receiver)].insert(sender);
        if (sender == rank) {
            sends.append(receiver, run);
        } else if (receiver == rank) {
            receives.append(sender, run);
        }
    });
    route.sends = sends.take();
    route.receives = receives.take();
    for (const std::set<int>& partners : peers) {
        route.max_peers = std::max(route.max_peers, static_cast<int>(partners.size()));
    }
    return route;
}

}  // namespace hybridcp

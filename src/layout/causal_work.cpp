#include "layout/causal_work.h"

#include "hybridcp/error.h"

namespace hybridcp {

namespace {
std::int64_t work_before(std::int64_t position) {
    return position % 2 == 0 ? position / 2 * (position + 1) : (position + 1) / 2 * position;
}
}  // namespace

std::int64_t causal_work(const Layout& layout, int rank) {
    HCP_CHECK_LE(layout.num_tokens(), kMaxCausalTokens,
                 "causal work: cut the batch into several of fewer tokens");
    std::int64_t work = 0;
    for (const Segment& segment : layout.segments(rank)) {
        work += work_before(segment.end) - work_before(segment.begin);
    }
    return work;
}

}  // namespace hybridcp

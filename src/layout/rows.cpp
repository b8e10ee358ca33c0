#include "layout/rows.h"

#include <utility>

namespace hybridcp {

void append_run(std::vector<RowRun>& runs, const RowRun& run) {
    if (!runs.empty() && runs.back().source + runs.back().count == run.source &&
        runs.back().target + runs.back().count == run.target) {
        runs.back().count += run.count;
    } else {
        runs.push_back(run);
    }
}

void RowMessages::append(int peer, const RowRun& run) {
    RowMessage& message = by_peer_[peer];
    message.peer = peer;
    message.num_rows += run.count;
    append_run(message.runs, run);
}

std::vector<RowMessage> RowMessages::take() {
    std::vector<RowMessage> messages;
    messages.reserve(by_peer_.size());
    for (auto& [peer, message] : by_peer_) {
        messages.push_back(std::move(message));
    }
    by_peer_.clear();
    return messages;
}

}  // namespace hybridcp

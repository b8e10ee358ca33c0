// The serial chain. Receives are posted before the summary is computed; then, by ascending chain
// position, a segment's start state arrives, its end state M S + S leaves. Sends are waited for
// after the local output is computed.

#include <algorithm>

#include "hybridcp/error.h"
#include "ops/state_exchange.h"

namespace hybridcp {

namespace {

/// One message of the chain. `order` ascends in the direction of the pass.
struct Link {
    std::int64_t order = 0;
    int peer = 0;
    std::vector<std::int64_t> segments;
    at::Tensor index;   // of the segments
    at::Tensor buffer;  // of a receive, [n, Hv, K, V]
    Pending pending;
    bool posted = false;
};

/// The messages of one pass. On every pair of ranks both ends post sends and receives in one and
/// the same order, that of the chain: a backend that runs a pair's transfers one after another
/// (NCCL) would else wait for ever in a layout whose chain comes back.
class ChainTraffic {
  public:
    ChainTraffic(Group& group, const StateShape& shape) : group_(group), shape_(shape) {}

    void add(const std::vector<StateMessage>& messages,
             const std::vector<at::Tensor>& indices,
             bool is_send,
             bool reverse) {
        std::vector<Link>& links = is_send ? sends_ : receives_;
        for (std::size_t i = 0; i < messages.size(); ++i) {
            Link link;
            link.order = reverse ? -messages[i].chain_pos : messages[i].chain_pos;
            link.peer = messages[i].peer;
            link.segments = messages[i].segments;
            link.index = indices[i];
            links.push_back(std::move(link));
        }
        if (reverse) {  // they are listed by ascending chain position
            std::reverse(links.begin(), links.end());
        }
    }

    [[nodiscard]] bool any_receive() const { return !receives_.empty(); }
    [[nodiscard]] bool any_send() const { return !sends_.empty(); }

    void post_receives() {
        for (Link& receive : receives_) {
            if (!receive.posted && !waits_for_send(receive)) {
                receive.buffer = at::empty(
                    shape_.of(static_cast<std::int64_t>(receive.segments.size())), shape_.options);
                receive.pending = group_.receive("gdn_state", receive.buffer, receive.peer);
                receive.posted = true;
            }
        }
    }

    /// Waits for the messages of `order` and puts them into `states` [N, Hv, K, V].
    void arrive(std::int64_t order, at::Tensor& states) {
        for (; next_receive_ < receives_.size() && receives_[next_receive_].order == order;
             ++next_receive_) {
            Link& receive = receives_[next_receive_];
            HCP_CHECK(receive.posted, "gdn_state: a message is waited for before it is posted");
            receive.pending.wait();
            states.index_copy_(0, receive.index, receive.buffer);
        }
    }

    /// Sends the rows of `states` that go with messages up to `order`, then posts what that allows.
    void send(std::int64_t order, const at::Tensor& states) {
        for (Link& link : sends_) {
            if (!link.posted && link.order <= order) {
                post_send(link, states);
            }
        }
        post_receives();
    }

    /// Sends, before their turn, the messages all of whose segments are in `ready`.
    void send_ready(const std::vector<bool>& ready, const at::Tensor& states) {
        std::vector<int> held_back;  // peers with an earlier message that is not ready
        for (Link& link : sends_) {
            const bool leaves =
                std::find(held_back.begin(), held_back.end(), link.peer) == held_back.end() &&
                !waits_for_receive(link) &&
                std::all_of(link.segments.begin(), link.segments.end(), [&](std::int64_t segment) {
                    return ready[static_cast<std::size_t>(segment)];
                });
            if (leaves) {
                post_send(link, states);
            } else {
                held_back.push_back(link.peer);
            }
        }
        post_receives();
    }

    void finish() {
        for (Link& link : sends_) {
            link.pending.wait();
        }
        sends_.clear();
    }

  private:
    void post_send(Link& link, const at::Tensor& states) {
        link.pending = group_.send("gdn_state", states.index_select(0, link.index), link.peer);
        link.posted = true;
    }
    /// At the same order the lower rank sends first.
    [[nodiscard]] bool waits_for_send(const Link& receive) const {
        return std::any_of(sends_.begin(), sends_.end(), [&](const Link& send) {
            return !send.posted && send.peer == receive.peer &&
                   (send.order < receive.order ||
                    (send.order == receive.order && group_.rank() < send.peer));
        });
    }
    [[nodiscard]] bool waits_for_receive(const Link& send) const {
        return std::any_of(receives_.begin(), receives_.end(), [&](const Link& receive) {
            return !receive.posted && receive.peer == send.peer &&
                   (receive.order < send.order ||
                    (receive.order == send.order && send.peer < group_.rank()));
        });
    }

    Group& group_;
    const StateShape& shape_;
    std::vector<Link> sends_, receives_;  // by ascending order
    std::size_t next_receive_ = 0;
};

class P2pExchanger : public StateExchanger {
  public:
    P2pExchanger(const CpContext& context, const StateShape& shape)
        : group_(*context.group),
          plan_(context.plan->states),
          indices_(context.plan->state_indices),
          shape_(shape) {
        has_local_link_ =
            std::any_of(plan_.local_predecessor.begin(), plan_.local_predecessor.end(),
                        [](std::int64_t before) { return before >= 0; });
    }

    at::Tensor start_states(const SegmentMaps& maps) override {
        traffic_ = std::make_unique<ChainTraffic>(group_, shape_);
        traffic_->add(plan_.sends, indices_.sends, /*is_send=*/true, /*reverse=*/false);
        traffic_->add(plan_.receives, indices_.receives, /*is_send=*/false, /*reverse=*/false);
        if (!traffic_->any_receive() && !traffic_->any_send() && !has_local_link_) {
            return {};
        }
        traffic_->post_receives();
        GdnSummary summary;
        if (traffic_->any_send() || has_local_link_) {
            summary = maps.summarize();
            M_ = summary.M;
        }
        at::Tensor S_start = at::zeros(shape_.of(num_segments()), shape_.options);
        at::Tensor S_end = summary.S;
        if (traffic_->any_send()) {
            traffic_->send_ready(ready_segments(maps), S_end);
        }
        for (std::int64_t pos = 0; pos < plan_.max_chain_length; ++pos) {
            traffic_->arrive(pos - 1, S_start);
            for (std::size_t i = 0; has_local_link_ && i < plan_.chain_pos.size(); ++i) {
                if (plan_.chain_pos[i] == pos && plan_.local_predecessor[i] >= 0) {
                    S_start[static_cast<std::int64_t>(i)].copy_(S_end[plan_.local_predecessor[i]]);
                }
            }
            const at::Tensor& continued = indices_.continued[static_cast<std::size_t>(pos)];
            if (continued.defined() && pos > 0) {
                S_end.index_add_(
                    0, continued,
                    at::matmul(M_.index_select(0, continued), S_start.index_select(0, continued)));
            }
            traffic_->send(pos, S_end);
        }
        return S_start;
    }

    at::Tensor end_gradients(const std::function<at::Tensor()>& summarize) override {
        // Gradients come from the successors, the last in the chain first.
        traffic_ = std::make_unique<ChainTraffic>(group_, shape_);
        traffic_->add(plan_.receives, indices_.receives, /*is_send=*/true, /*reverse=*/true);
        traffic_->add(plan_.sends, indices_.sends, /*is_send=*/false, /*reverse=*/true);
        if (!traffic_->any_receive() && !traffic_->any_send() && !has_local_link_) {
            return {};
        }
        traffic_->post_receives();
        at::Tensor dS_end = at::zeros(shape_.of(num_segments()), shape_.options);
        at::Tensor dS_start = summarize();
        for (std::int64_t pos = plan_.max_chain_length - 1; pos >= 0; --pos) {
            traffic_->arrive(-pos, dS_end);
            for (std::size_t i = 0; has_local_link_ && i < plan_.chain_pos.size(); ++i) {
                const std::int64_t before = plan_.local_predecessor[i];
                if (before >= 0 && plan_.chain_pos[static_cast<std::size_t>(before)] == pos) {
                    dS_end[before].copy_(dS_start[static_cast<std::int64_t>(i)]);
                }
            }
            const at::Tensor& preceded = indices_.preceded[static_cast<std::size_t>(pos)];
            // Without M no local segment has a successor, so dS_end is zero.
            if (preceded.defined() && M_.defined()) {
                dS_start.index_add_(0, preceded,
                                    at::matmul(M_.index_select(0, preceded).transpose(-1, -2),
                                               dS_end.index_select(0, preceded)));
            }
            traffic_->send(1 - pos, dS_start);
        }
        return dS_end;
    }

    void finish() override {
        if (traffic_) {
            traffic_->finish();
            traffic_.reset();  // and what was received with it
        }
    }

  private:
    [[nodiscard]] std::int64_t num_segments() const {
        return static_cast<std::int64_t>(plan_.chain_pos.size());
    }

    /// Segments whose end state is known from the summary alone: the first of a chain, and those
    /// that forget their start.
    [[nodiscard]] std::vector<bool> ready_segments(const SegmentMaps& maps) const {
        std::vector<bool> ready;
        for (std::int64_t i = 0; i < num_segments(); ++i) {
            ready.push_back(plan_.chain_pos[static_cast<std::size_t>(i)] == 0 ||
                            maps.all_independent(i, shape_.heads));
        }
        return ready;
    }

    Group& group_;
    const StateExchange& plan_;
    const StateIndices& indices_;
    StateShape shape_;
    bool has_local_link_ = false;
    at::Tensor M_;  // [N, Hv, K, K], where a local segment has a successor
    std::unique_ptr<ChainTraffic> traffic_;
};

}  // namespace

std::unique_ptr<StateExchanger> make_p2p_exchanger(const CpContext& context,
                                                   const StateShape& shape) {
    return std::make_unique<P2pExchanger>(context, shape);
}

}  // namespace hybridcp

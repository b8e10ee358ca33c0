// The serial chain. Receives are posted before the summary is computed; then, by ascending chain
// position, a segment's start state arrives, its end state M S + S leaves. Sends are waited for
// after the local output is computed.

#include "hybridcp/error.h"
#include "ops/state_exchange.h"

namespace hybridcp {

namespace {

at::Tensor index_of(const std::vector<std::int64_t>& segments, const at::Device& device) {
    return at::tensor(segments, at::TensorOptions().dtype(at::kLong)).to(device);
}

class P2pExchanger : public StateExchanger {
  public:
    P2pExchanger(const CpContext& context, const StateShape& shape)
        : group_(*context.group), plan_(context.plan->states), shape_(shape) {
        for (std::size_t i = 0; i < plan_.local_predecessor.size(); ++i) {
            has_local_link_ = has_local_link_ || plan_.local_predecessor[i] >= 0;
        }
    }

    at::Tensor start_states(const std::function<GdnSummary()>& summarize) override {
        std::vector<Incoming> incoming = post(plan_.receives);
        GdnSummary summary;
        if (!plan_.sends.empty() || has_local_link_) {
            summary = summarize();
            M_ = summary.M;
        }
        if (incoming.empty() && !has_local_link_ && plan_.sends.empty()) {
            return {};
        }
        at::Tensor S_start = zeros();  // [N, Hv, K, V]
        at::Tensor S_end = summary.S;
        auto next_receive = incoming.begin();
        auto next_send = plan_.sends.begin();
        for (std::int64_t pos = 0; pos < plan_.max_chain_length; ++pos) {
            for (; next_receive != incoming.end() && next_receive->chain_pos == pos - 1;
                 ++next_receive) {
                next_receive->arrive(S_start);
            }
            for (std::size_t i = 0; has_local_link_ && i < plan_.chain_pos.size(); ++i) {
                if (plan_.chain_pos[i] == pos && plan_.local_predecessor[i] >= 0) {
                    S_start[static_cast<std::int64_t>(i)].copy_(S_end[plan_.local_predecessor[i]]);
                }
            }
            const std::vector<std::int64_t> continued = at_pos(pos, plan_.has_successor);
            if (continued.empty()) {
                continue;
            }
            const at::Tensor index = index_of(continued, shape_.options.device());
            const at::Tensor ends = pos == 0 ? S_end.index_select(0, index)
                                             : S_end.index_select(0, index) +
                                                   at::matmul(M_.index_select(0, index),
                                                              S_start.index_select(0, index));
            S_end = S_end.index_copy(0, index, ends);
            for (; next_send != plan_.sends.end() && next_send->chain_pos == pos; ++next_send) {
                send(S_end, *next_send);
            }
        }
        return S_start;
    }

    at::Tensor end_gradients(const std::function<at::Tensor()>& summarize) override {
        // Gradients come from the successors, the last in the chain first: receives are posted in
        // the order in which a peer sends.
        std::vector<Incoming> incoming = post({plan_.sends.rbegin(), plan_.sends.rend()});
        if (incoming.empty() && !has_local_link_ && plan_.receives.empty()) {
            return {};
        }
        at::Tensor dS_end = zeros();
        at::Tensor dS_start = summarize();
        auto next_receive = incoming.begin();
        auto next_send = plan_.receives.rbegin();
        for (std::int64_t pos = plan_.max_chain_length - 1; pos >= 0; --pos) {
            for (; next_receive != incoming.end() && next_receive->chain_pos == pos;
                 ++next_receive) {
                next_receive->arrive(dS_end);
            }
            for (std::size_t i = 0; has_local_link_ && i < plan_.chain_pos.size(); ++i) {
                const std::int64_t before = plan_.local_predecessor[i];
                if (before >= 0 && plan_.chain_pos[static_cast<std::size_t>(before)] == pos) {
                    dS_end[before].copy_(dS_start[static_cast<std::int64_t>(i)]);
                }
            }
            const std::vector<std::int64_t> preceded = at_pos(pos, plan_.has_predecessor);
            if (preceded.empty()) {
                continue;
            }
            if (M_.defined()) {  // without it no local segment has a successor, so dS_end is zero
                const at::Tensor index = index_of(preceded, shape_.options.device());
                const at::Tensor starts = dS_start.index_select(0, index) +
                                          at::matmul(M_.index_select(0, index).transpose(-1, -2),
                                                     dS_end.index_select(0, index));
                dS_start = dS_start.index_copy(0, index, starts);
            }
            for (; next_send != plan_.receives.rend() && next_send->chain_pos == pos - 1;
                 ++next_send) {
                send(dS_start, *next_send);
            }
        }
        return dS_end;
    }

    void finish() override {
        for (Pending& pending : sending_) {
            pending.wait();
        }
        sending_.clear();
    }

  private:
    struct Incoming {
        std::int64_t chain_pos = 0;
        at::Tensor buffer;    // [n, Hv, K, V]
        at::Tensor segments;  // [n]
        Pending pending;

        void arrive(at::Tensor& states) {
            pending.wait();
            states.index_copy_(0, segments, buffer);
        }
    };

    at::Tensor zeros() const {
        const auto segments = static_cast<std::int64_t>(plan_.chain_pos.size());
        return at::zeros({segments, shape_.heads, shape_.key_dim, shape_.value_dim},
                         shape_.options);
    }

    std::vector<Incoming> post(const std::vector<StateMessage>& messages) {
        std::vector<Incoming> incoming;
        for (const StateMessage& message : messages) {
            const auto count = static_cast<std::int64_t>(message.segments.size());
            Incoming entry{
                .chain_pos = message.chain_pos,
                .buffer = at::empty({count, shape_.heads, shape_.key_dim, shape_.value_dim},
                                    shape_.options),
                .segments = index_of(message.segments, shape_.options.device()),
                .pending = {}};
            entry.pending = group_.receive("gdn_state", entry.buffer, message.peer);
            incoming.push_back(std::move(entry));
        }
        return incoming;
    }

    void send(const at::Tensor& states, const StateMessage& message) {
        const at::Tensor packed =
            states.index_select(0, index_of(message.segments, shape_.options.device()));
        sending_.push_back(group_.send("gdn_state", packed, message.peer));
    }

    std::vector<std::int64_t> at_pos(std::int64_t pos, const std::vector<bool>& wanted) const {
        std::vector<std::int64_t> segments;
        for (std::size_t i = 0; i < plan_.chain_pos.size(); ++i) {
            if (plan_.chain_pos[i] == pos && wanted[i]) {
                segments.push_back(static_cast<std::int64_t>(i));
            }
        }
        return segments;
    }

    Group& group_;
    const StateExchange& plan_;
    StateShape shape_;
    bool has_local_link_ = false;
    at::Tensor M_;  // [N, Hv, K, K], where a local segment has a successor
    std::vector<Pending> sending_;
};

}  // namespace

std::unique_ptr<StateExchanger> make_p2p_exchanger(const CpContext& context,
                                                   const StateShape& shape) {
    return std::make_unique<P2pExchanger>(context, shape);
}

}  // namespace hybridcp

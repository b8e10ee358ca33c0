// The log-depth scan. Each local segment holds the window of the segments before it in the pass (in
// backward: after it) as an affine map (A, B): end = A start + B. Per round it passes on that
// window with itself at the end, and puts the one that it gets before its own. Once a window
// reaches the start of its chain, or forgets what lies before it, A no longer matters and does not
// travel.

#include <algorithm>

#include "ops/state_exchange.h"

namespace hybridcp {

namespace {

using Heads = IndependentHeads::Heads;

/// An affine map of states, or the identity while both are undefined.
struct Map {
    at::Tensor A;  // [Hv, K, K]; undefined too where the window reaches the start of the chain
    at::Tensor B;  // [Hv, K, V]
    bool from_start = false;
};

/// later after earlier.
Map compose(const Map& later, const Map& earlier) {
    if (!later.B.defined()) {
        return earlier;
    }
    if (!earlier.B.defined()) {
        return later;
    }
    Map both{
        .A = {}, .B = at::matmul(later.A, earlier.B) + later.B, .from_start = earlier.from_start};
    if (!earlier.from_start) {
        both.A = at::matmul(later.A, earlier.A);
    }
    return both;
}

/// Which segments a window consists of, by their independent heads: in a pass, `around` lists the
/// segments before (after) one, nearest first.
Heads independent_in(const std::vector<Heads>& around, std::int64_t length, const Heads& own) {
    Heads result = own;
    for (std::int64_t i = 0; i < length && i < static_cast<std::int64_t>(around.size()); ++i) {
        const Heads& other = around[static_cast<std::size_t>(i)];
        result.resize(std::max(result.size(), other.size()));
        for (std::size_t head = 0; head < other.size(); ++head) {
            result[head] = result[head] || other[head];
        }
    }
    return result;
}

/// One direction of the scan.
class ScanPass {
  public:
    struct Inputs {
        const ScanSchedule& schedule;
        std::vector<Map> own;                    // of each local segment
        std::vector<std::vector<Heads>> around;  // of each: the segments before it, nearest first
        std::vector<Heads> independent;          // of each
    };

    ScanPass(Group& group, const StateShape& shape, std::string op, Inputs inputs)
        : group_(group), shape_(shape), op_(std::move(op)), in_(std::move(inputs)) {}

    /// The map of all segments before each one.
    std::vector<Map> run() {
        std::vector<Map> before(in_.own.size());
        for (const ScanSchedule::Round& round : in_.schedule.rounds) {
            step(round, before);
        }
        return before;
    }

  private:
    void step(const ScanSchedule::Round& round, std::vector<Map>& before) {
        std::vector<Message> sends;
        std::vector<Message> receives;
        for (const ScanSchedule::Message& message : round.sends) {
            sends.push_back({.tensor = pack(message, before), .peer = message.peer});
        }
        for (const ScanSchedule::Message& message : round.receives) {
            receives.push_back(
                {.tensor = at::empty({message_size(message, /*sent=*/false)}, shape_.options),
                 .peer = message.peer});
        }
        std::vector<Pending> pending = group_.exchange(op_, sends, receives);
        std::vector<std::pair<std::int64_t, Map>> arrived;
        for (const ScanSchedule::Link& link : round.local) {
            arrived.emplace_back(link.to.segment, inclusive(link.from, before));
        }
        for (std::size_t i = 0; i < receives.size(); ++i) {
            pending[i].wait();
            unpack(round.receives[i], receives[i].tensor, arrived);
        }
        for (const auto& [segment, map] : arrived) {
            Map& own = before[static_cast<std::size_t>(segment)];
            own = compose(own, map);
        }
        for (std::size_t i = receives.size(); i < pending.size(); ++i) {
            pending[i].wait();
        }
    }

    /// A segment's window with itself at the end.
    [[nodiscard]] Map inclusive(const ScanSchedule::Window& window,
                                const std::vector<Map>& before) const {
        const auto i = static_cast<std::size_t>(window.segment);
        Map map = compose(in_.own[i], before[i]);
        map.from_start = window.from_start;
        return map;
    }

    [[nodiscard]] Heads heads_of(const ScanSchedule::Window& window, bool sent) const {
        const auto i = static_cast<std::size_t>(window.segment);
        return sent ? independent_in(in_.around[i], window.length - 1, in_.independent[i])
                    : independent_in(skip(in_.around[i], window), window.length, {});
    }

    /// The received window ends `distance` before the receiver; lengths are full (= distance)
    /// except for windows that reach the start of the chain, whose heads are not needed.
    static std::vector<Heads> skip(const std::vector<Heads>& around,
                                   const ScanSchedule::Window& window) {
        const auto first =
            std::min<std::size_t>(around.size(), static_cast<std::size_t>(window.length) - 1);
        return {around.begin() + static_cast<std::ptrdiff_t>(first), around.end()};
    }

    [[nodiscard]] std::int64_t message_size(const ScanSchedule::Message& message, bool sent) const {
        std::int64_t size = 0;
        for (const ScanSchedule::Window& window : message.windows) {
            size += B_size() + A_size(window, sent);
        }
        return size;
    }
    [[nodiscard]] std::int64_t B_size() const {
        return shape_.heads * shape_.key_dim * shape_.value_dim;
    }
    [[nodiscard]] std::int64_t A_size(const ScanSchedule::Window& window, bool sent) const {
        return window.from_start ? 0
                                 : num_open(heads_of(window, sent), shape_.heads) * shape_.key_dim *
                                       shape_.key_dim;
    }

    [[nodiscard]] at::Tensor pack(const ScanSchedule::Message& message,
                                  const std::vector<Map>& before) const {
        std::vector<at::Tensor> pieces;
        for (const ScanSchedule::Window& window : message.windows) {
            const Map map = inclusive(window, before);
            pieces.push_back(map.B.reshape({-1}));
            if (!window.from_start) {
                pieces.push_back(pack_open(map.A, heads_of(window, /*sent=*/true)));
            }
        }
        return at::cat(pieces);
    }

    void unpack(const ScanSchedule::Message& message,
                const at::Tensor& flat,
                std::vector<std::pair<std::int64_t, Map>>& arrived) const {
        std::int64_t offset = 0;
        const auto take = [&](std::int64_t size) {
            offset += size;
            return flat.narrow(0, offset - size, size);
        };
        for (const ScanSchedule::Window& window : message.windows) {
            Map map{.A = {},
                    .B = take(B_size()).view({shape_.heads, shape_.key_dim, shape_.value_dim}),
                    .from_start = window.from_start};
            if (!window.from_start) {
                const std::int64_t size = A_size(window, /*sent=*/false);
                map.A = unpack_open(take(size), heads_of(window, /*sent=*/false), shape_);
            }
            arrived.emplace_back(window.segment, map);
        }
    }

    Group& group_;
    const StateShape& shape_;
    std::string op_;
    Inputs in_;
};

class ScanExchanger : public StateExchanger {
  public:
    ScanExchanger(const CpContext& context, const StateShape& shape)
        : context_(context), plan_(*context.plan), shape_(shape) {}

    at::Tensor start_states(const SegmentMaps& maps) override {
        if (plan_.prefix.slots_per_rank == 0) {  // no document lies on more than one rank
            return {};
        }
        independent_ = IndependentHeads(maps, context_, shape_.heads);
        const bool has_work = !plan_.prefix.local_segments.empty();
        const GdnSummary summary = has_work ? maps.summarize() : GdnSummary{};
        M_ = summary.M;
        ScanPass::Inputs inputs{
            .schedule = plan_.forward_scan, .own = {}, .around = {}, .independent = {}};
        for (std::size_t i = 0; i < num_segments(); ++i) {
            const auto segment = static_cast<std::int64_t>(i);
            inputs.own.push_back(has_work ? Map{.A = summary.M[segment], .B = summary.S[segment]}
                                          : Map{});
            const auto& before = plan_.prefix.predecessors[i];
            std::vector<Heads> nearest_first;
            for (auto slot = before.rbegin(); slot != before.rend(); ++slot) {
                nearest_first.push_back(independent_.of(*slot));
            }
            inputs.around.push_back(std::move(nearest_first));
            inputs.independent.push_back(own_heads(segment));
        }
        return boundary(ScanPass(*context_.group, shape_, "gdn_scan", std::move(inputs)).run());
    }

    at::Tensor end_gradients(const std::function<at::Tensor()>& summarize) override {
        if (plan_.suffix.slots_per_rank == 0) {
            return {};
        }
        const bool has_work = !plan_.suffix.local_segments.empty();
        const at::Tensor dS = has_work ? summarize() : at::Tensor();
        ScanPass::Inputs inputs{
            .schedule = plan_.reverse_scan, .own = {}, .around = {}, .independent = {}};
        for (std::size_t i = 0; i < num_segments(); ++i) {
            const auto segment = static_cast<std::int64_t>(i);
            Map own;
            if (has_work) {
                // Without M this rank holds only last segments of chains, which start the pass.
                own = {.A = M_.defined() ? M_[segment].transpose(-1, -2) : at::Tensor(),
                       .B = dS[segment]};
            }
            inputs.own.push_back(own);
            std::vector<Heads> nearest_first;
            for (const SummaryGather::Slot& slot : plan_.prefix.successors[i]) {
                nearest_first.push_back(independent_.of(slot));
            }
            inputs.around.push_back(std::move(nearest_first));
            inputs.independent.push_back(own_heads(segment));
        }
        return boundary(
            ScanPass(*context_.group, shape_, "gdn_gradient_scan", std::move(inputs)).run());
    }

    void finish() override {}

  private:
    [[nodiscard]] std::size_t num_segments() const { return plan_.states.chain_pos.size(); }

    /// The flags that were gathered for a local segment; none for the last of a chain, whose M
    /// nobody needs.
    [[nodiscard]] Heads own_heads(std::int64_t segment) const {
        const auto& slots = plan_.prefix.local_segments;
        const auto found = std::find(slots.begin(), slots.end(), segment);
        return found == slots.end() ? Heads{}
                                    : independent_.of({plan_.rank, found - slots.begin()});
    }

    [[nodiscard]] at::Tensor boundary(const std::vector<Map>& maps) const {
        at::Tensor states =
            at::zeros(shape_.of(static_cast<std::int64_t>(maps.size())), shape_.options);
        for (std::size_t i = 0; i < maps.size(); ++i) {
            if (maps[i].B.defined()) {
                states[static_cast<std::int64_t>(i)].copy_(maps[i].B);
            }
        }
        return states;
    }

    CpContext context_;
    const BatchPlan& plan_;
    StateShape shape_;
    IndependentHeads independent_;
    at::Tensor M_;  // [N, Hv, K, K], where a local segment has a successor
};

}  // namespace

std::unique_ptr<StateExchanger> make_scan_exchanger(const CpContext& context,
                                                    const StateShape& shape) {
    return std::make_unique<ScanExchanger>(context, shape);
}

}  // namespace hybridcp

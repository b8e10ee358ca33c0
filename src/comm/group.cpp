#include "hybridcp/group.h"

#include <limits>
#include <numeric>
#include <thread>
#include <utility>

#include <c10/core/Allocator.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/backend.h"
#include "comm/liveness.h"
#include "comm/wait.h"
#include "hybridcp/error.h"

namespace hybridcp {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

/// A worker of Gloo lets go of a work just after its end, and may so be the one that frees a
/// buffer, which no recorder of memory sees: where one counts, the work is waited for to be ours
/// alone.
void let_worker_go(const c10::intrusive_ptr<c10d::Work>& work) {
    const Clock::time_point start = Clock::now();
    while (c10::memoryProfilingEnabled() && work.use_count() > 1 && seconds_since(start) < 1.0) {
        std::this_thread::yield();
    }
}

}  // namespace

void Recorder::add(const std::string& op, std::int64_t messages, std::int64_t bytes) {
    OpTraffic& traffic = traffic_[op];
    traffic.messages += messages;
    traffic.bytes += bytes;
}

void Recorder::add_seconds(const std::string& op, double seconds) {
    traffic_[op].seconds += seconds;
}

void Recorder::add_cpu_seconds(const std::string& op, double seconds) {
    traffic_[op].cpu_seconds += seconds;
}

void Recorder::add_share(const std::string& name, std::int64_t part, std::int64_t whole) {
    auto& [counted, all] = shares_[name];
    counted += part;
    all += whole;
}

std::optional<double> Recorder::share(const std::string& name) const {
    const auto found = shares_.find(name);
    if (found == shares_.end() || found->second.second == 0) {
        return std::nullopt;
    }
    return static_cast<double>(found->second.first) / static_cast<double>(found->second.second);
}

OpTraffic Recorder::of(const std::string& op) const {
    const auto found = traffic_.find(op);
    return found == traffic_.end() ? OpTraffic{} : found->second;
}

Pending::Pending() = default;
Pending::~Pending() = default;
Pending::Pending(Pending&& other) noexcept = default;
Pending& Pending::operator=(Pending&& other) noexcept = default;

void Pending::wait() {
    HCP_CHECK(transfer_ != nullptr, "a transfer can be waited for once, after it was posted");
    const std::unique_ptr<Transfer> transfer = std::move(transfer_);
    if (transfer->work) {
        transfer->group->wait(transfer->work, transfer->what);
    }
    if (transfer->then) {
        transfer->then();
    }
}

Group::Group(GroupOptions options)
    : options_(std::move(options)),
      device_(group_device(options_)),
      next_send_tag_(static_cast<std::size_t>(options_.size), 0),
      next_receive_tag_(static_cast<std::size_t>(options_.size), 0) {}

Group::~Group() = default;

std::shared_ptr<Group> Group::make(c10::intrusive_ptr<c10d::Store> store, GroupOptions options) {
    HCP_CHECK_GE(options.size, 1, "group '{}': the size must be positive", options.name);
    HCP_CHECK(options.rank >= 0 && options.rank < options.size,
              "group '{}': rank {} of {} does not exist", options.name, options.rank, options.size);
    HCP_CHECK(options.timeout.count() > 0, "group '{}': the timeout must be positive",
              options.name);
    if (options.global_ranks.empty()) {
        options.global_ranks.resize(static_cast<std::size_t>(options.size));
        std::iota(options.global_ranks.begin(), options.global_ranks.end(), 0);
    }
    HCP_CHECK_EQ(options.global_ranks.size(), static_cast<std::size_t>(options.size),
                 "group '{}': one global rank per member is needed", options.name);
    const std::shared_ptr<Group> group(new Group(std::move(options)));
    if (group->size() == 1) {
        return group;
    }
    HCP_CHECK(store != nullptr, "group '{}': {} ranks need a store", group->options_.name,
              group->size());
    const Clock::time_point start = Clock::now();
    try {
        group->backend_ = make_backend(store, group->options_);
    } catch (const std::exception& error) {
        group->fail({.op = fmt::format("connecting group '{}'", group->options_.name)},
                    seconds_since(start), cause_of(error));
    }
    return group;
}

int Group::peer_name(int peer) const {
    return options_.global_ranks[static_cast<std::size_t>(peer)];
}

void Group::fail(const Wait& what, double seconds, const std::string& cause) {
    std::string message = what.op;
    if (step_ >= 0) {
        message += fmt::format(" at step {}", step_);
    }
    message += fmt::format(": rank {} waited {:.1f} s for {} bytes ", peer_name(rank()), seconds,
                           what.bytes);
    message += what.peer < 0
                   ? fmt::format("among the {} ranks of group '{}'", size(), options_.name)
                   : fmt::format("{} rank {}", what.is_send ? "to" : "from", peer_name(what.peer));
    message += ": " + cause;
    if (options_.liveness != nullptr) {
        const std::vector<int> silent = options_.liveness->silent_ranks(kLivenessPatience);
        if (silent.size() == 1) {
            message += fmt::format("; rank {} no longer answers", silent.front());
        } else if (!silent.empty()) {
            message += fmt::format("; ranks {} no longer answer", fmt::join(silent, ", "));
        }
    }
    throw CommError(message);
}

void Group::wait(const c10::intrusive_ptr<c10d::Work>& work, const Wait& what) {
    const Clock::time_point start = Clock::now();
    try {
        // On CUDA a wait without a timeout only orders streams; NCCL's watchdog bounds the transfer
        // itself.
        const bool done = device_.is_cuda() ? work->wait() : work->wait(options_.timeout);
        recorder_.add_seconds(what.op, seconds_since(start));
        if (done) {
            if (!device_.is_cuda()) {
                let_worker_go(work);
            }
            return;
        }
    } catch (const std::exception& error) {
        recorder_.add_seconds(what.op, seconds_since(start));
        fail(what, seconds_since(start), cause_of(error));
    }
    fail(what, seconds_since(start), "the transfer was aborted");
}

void Group::check(const std::string& op, const Message& message) const {
    HCP_CHECK(message.peer >= 0 && message.peer < size() && message.peer != rank(),
              "{}: rank {} has no peer {} in a group of {}", op, rank(), message.peer, size());
    HCP_CHECK(message.tensor.is_contiguous() && message.tensor.device() == device_,
              "{}: the tensor must be contiguous and on {}", op, device_.str());
    HCP_CHECK(message.tensor.numel() > 0, "{}: an empty message to or from rank {}: do not post it",
              op, message.peer);
}

Pending Group::post(const std::string& op, const Message& message, bool is_send) {
    const int peer = message.peer;
    auto& tags = is_send ? next_send_tag_ : next_receive_tag_;
    int& next_tag = tags[static_cast<std::size_t>(peer)];
    const int tag = next_tag;
    next_tag = next_tag == std::numeric_limits<int>::max() ? 0 : next_tag + 1;

    auto transfer = std::make_unique<Pending::Transfer>();
    transfer->group = this;
    transfer->tensors = {message.tensor.detach()};
    transfer->what = {
        .op = op, .bytes = num_bytes(message.tensor), .peer = peer, .is_send = is_send};
    try {
        transfer->work = is_send ? backend_->send(transfer->tensors, peer, tag)
                                 : backend_->recv(transfer->tensors, peer, tag);
    } catch (const std::exception& error) {
        fail(transfer->what, 0.0, cause_of(error));
    }
    if (is_send) {
        recorder_.add(op, 1, transfer->what.bytes);
    }
    Pending pending;
    pending.transfer_ = std::move(transfer);
    return pending;
}

Pending Group::send(const std::string& op, const at::Tensor& tensor, int peer) {
    const Message message{.tensor = tensor, .peer = peer};
    check(op, message);
    return post(op, message, /*is_send=*/true);
}

Pending Group::receive(const std::string& op, const at::Tensor& into, int peer) {
    const Message message{.tensor = into, .peer = peer};
    check(op, message);
    return post(op, message, /*is_send=*/false);
}

std::vector<Pending> Group::exchange(const std::string& op,
                                     const std::vector<Message>& sends,
                                     const std::vector<Message>& receives) {
    for (const std::vector<Message>* messages : {&sends, &receives}) {
        for (const Message& message : *messages) {
            check(op, message);
        }
    }
    std::vector<Pending> pending;
    if (sends.empty() && receives.empty()) {
        return pending;
    }
    const bool grouped = backend_->supportsCoalescing();  // NCCL; Gloo starts each by itself
    if (grouped) {
        backend_->startCoalescing();
    }
    for (const Message& message : receives) {
        pending.push_back(post(op, message, /*is_send=*/false));
    }
    for (const Message& message : sends) {
        pending.push_back(post(op, message, /*is_send=*/true));
    }
    if (grouped) {
        c10::intrusive_ptr<c10d::Work> work;
        try {
            work =
                backend_->endCoalescing();  // starts them; the works of the single calls are void
        } catch (const std::exception& error) {
            fail(pending.front().transfer_->what, 0.0, cause_of(error));
        }
        for (Pending& transfer : pending) {
            transfer.transfer_->work = work;
        }
    }
    return pending;
}

}  // namespace hybridcp

#include "hybridcp/group.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/backend.h"
#include "comm/liveness.h"
#include "hybridcp/error.h"

namespace hybridcp {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

std::int64_t num_bytes(const at::Tensor& tensor) {
    return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

// The same memory as one row of bytes, so that every dtype and row shape travels alike.
at::Tensor as_bytes(const at::Tensor& tensor) {
    return tensor.detach().view(-1).view(at::kByte);
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

OpTraffic Recorder::of(const std::string& op) const {
    const auto found = traffic_.find(op);
    return found == traffic_.end() ? OpTraffic{} : found->second;
}

struct Group::Wait {
    std::string op;
    std::int64_t bytes = 0;
    int peer = -1;  // -1: a collective
    bool is_send = false;
};

struct Pending::Transfer {
    Group* group = nullptr;
    c10::intrusive_ptr<c10d::Work> work;
    at::Tensor tensor;
    Group::Wait what;
};

Pending::Pending() = default;
Pending::~Pending() = default;
Pending::Pending(Pending&& other) noexcept = default;
Pending& Pending::operator=(Pending&& other) noexcept = default;

void Pending::wait() {
    HCP_CHECK(transfer_ != nullptr, "a transfer can be waited for once, after it was posted");
    const std::unique_ptr<Transfer> transfer = std::move(transfer_);
    transfer->group->wait(transfer->work, transfer->what);
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
            return;
        }
    } catch (const std::exception& error) {
        recorder_.add_seconds(what.op, seconds_since(start));
        fail(what, seconds_since(start), cause_of(error));
    }
    fail(what, seconds_since(start), "the transfer was aborted");
}

Pending Group::post(const std::string& op, const at::Tensor& tensor, int peer, bool is_send) {
    HCP_CHECK(peer >= 0 && peer < size() && peer != rank(),
              "{}: rank {} has no peer {} in a group of {}", op, rank(), peer, size());
    HCP_CHECK(tensor.is_contiguous() && tensor.device() == device_,
              "{}: the tensor must be contiguous and on {}", op, device_.str());
    HCP_CHECK(tensor.numel() > 0, "{}: an empty message to or from rank {}: do not post it", op,
              peer);
    auto& tags = is_send ? next_send_tag_ : next_receive_tag_;
    int& next_tag = tags[static_cast<std::size_t>(peer)];
    const int tag = next_tag;
    next_tag = next_tag == std::numeric_limits<int>::max() ? 0 : next_tag + 1;

    auto transfer = std::make_unique<Pending::Transfer>();
    transfer->group = this;
    transfer->tensor = tensor.detach();
    transfer->what = {.op = op, .bytes = num_bytes(tensor), .peer = peer, .is_send = is_send};
    std::vector<at::Tensor> tensors{transfer->tensor};
    try {
        transfer->work =
            is_send ? backend_->send(tensors, peer, tag) : backend_->recv(tensors, peer, tag);
    } catch (const std::exception& error) {
        fail(transfer->what, 0.0, cause_of(error));
    }
    Pending pending;
    pending.transfer_ = std::move(transfer);
    return pending;
}

Pending Group::send(const std::string& op, const at::Tensor& tensor, int peer) {
    Pending pending = post(op, tensor, peer, /*is_send=*/true);
    recorder_.add(op, 1, num_bytes(tensor));
    return pending;
}

Pending Group::receive(const std::string& op, const at::Tensor& into, int peer) {
    return post(op, into, peer, /*is_send=*/false);
}

template <typename Start>
void Group::collective(const std::string& op, std::int64_t bytes, const Start& start) {
    const Wait what{.op = op, .bytes = bytes};
    recorder_.add(op, 1, bytes);
    c10::intrusive_ptr<c10d::Work> work;
    try {
        work = start();
    } catch (const std::exception& error) {
        fail(what, 0.0, cause_of(error));
    }
    wait(work, what);
}

at::Tensor Group::all_gather(const std::string& op, const at::Tensor& local) {
    std::vector<std::int64_t> shape = local.sizes().vec();
    shape.insert(shape.begin(), size());
    const at::Tensor source = local.detach().contiguous();
    if (size() == 1) {
        return source.clone().view(shape);
    }
    at::Tensor gathered = at::empty(shape, source.options());
    if (source.numel() > 0) {
        at::Tensor into = as_bytes(gathered);
        at::Tensor from = as_bytes(source);
        collective(op, (size() - 1) * num_bytes(source),
                   [&] { return backend_->_allgather_base(into, from); });
    }
    return gathered;
}

at::Tensor Group::all_to_all(const std::string& op,
                             const at::Tensor& rows,
                             const std::vector<std::int64_t>& send_rows,
                             const std::vector<std::int64_t>& receive_rows) {
    const auto me = static_cast<std::size_t>(rank());
    const auto sum = [](const std::vector<std::int64_t>& counts) {
        return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    };
    HCP_CHECK(send_rows.size() == options_.global_ranks.size() &&
                  receive_rows.size() == options_.global_ranks.size(),
              "{}: one count per rank is needed", op);
    HCP_CHECK(rows.dim() >= 1 && rows.size(0) == sum(send_rows),
              "{}: the rows to send must be those that the counts name", op);
    HCP_CHECK_EQ(send_rows[me], receive_rows[me],
                 "{}: rows that stay must be as many on both sides", op);
    const at::Tensor source = rows.detach().contiguous();
    if (size() == 1) {
        return source.clone();
    }
    std::vector<std::int64_t> shape = rows.sizes().vec();
    shape[0] = sum(receive_rows);
    at::Tensor received = at::empty(shape, source.options());
    const std::int64_t row_numel =
        std::accumulate(shape.begin() + 1, shape.end(), std::int64_t{1}, std::multiplies<>());
    const std::int64_t row_bytes = row_numel * static_cast<std::int64_t>(source.element_size());
    const auto in_bytes = [&](std::vector<std::int64_t> counts) {
        for (std::int64_t& count : counts) {
            HCP_CHECK_GE(count, 0, "{}: counts of rows must not be negative", op);
            count *= row_bytes;
        }
        return counts;
    };
    std::vector<std::int64_t> send_bytes = in_bytes(send_rows);
    std::vector<std::int64_t> receive_bytes = in_bytes(receive_rows);
    at::Tensor into = as_bytes(received);
    at::Tensor from = as_bytes(source);
    collective(op, num_bytes(source) - send_bytes[me],
               [&] { return backend_->alltoall_base(into, from, receive_bytes, send_bytes); });
    return received;
}

void Group::all_reduce(const std::string& op, at::Tensor& tensor, bool maximum) {
    HCP_CHECK(tensor.is_contiguous(), "{}: the tensor must be contiguous", op);
    if (size() == 1 || tensor.numel() == 0) {
        return;
    }
    c10d::AllreduceOptions how;
    how.reduceOp = maximum ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
    std::vector<at::Tensor> tensors{tensor.detach()};
    collective(op, 2 * (size() - 1) * num_bytes(tensor) / size(),
               [&] { return backend_->allreduce(tensors, how); });
}

void Group::all_reduce_sum(const std::string& op, at::Tensor& tensor) {
    all_reduce(op, tensor, /*maximum=*/false);
}

void Group::all_reduce_max(const std::string& op, at::Tensor& tensor) {
    all_reduce(op, tensor, /*maximum=*/true);
}

void Group::broadcast(const std::string& op, at::Tensor& tensor, int root) {
    HCP_CHECK(root >= 0 && root < size(), "{}: root {} of {} does not exist", op, root, size());
    HCP_CHECK(tensor.is_contiguous(), "{}: the tensor must be contiguous", op);
    if (size() == 1 || tensor.numel() == 0) {
        return;
    }
    c10d::BroadcastOptions how;
    how.rootRank = root;
    std::vector<at::Tensor> tensors{as_bytes(tensor)};
    collective(op, rank() == root ? (size() - 1) * num_bytes(tensor) : 0,
               [&] { return backend_->broadcast(tensors, how); });
}

void Group::barrier(const std::string& op) {
    if (size() == 1) {
        return;
    }
    // A reduction whose result reaches the host: on every device, nobody returns before everybody
    // has come.
    at::Tensor token = at::zeros({1}, at::TensorOptions(device_).dtype(at::kLong));
    std::vector<at::Tensor> tensors{token};
    collective(op, 0, [&] { return backend_->allreduce(tensors); });
    HCP_CHECK_EQ(token.item<std::int64_t>(), 0, "{}: the barrier's token changed", op);
}

void Group::agree(std::uint64_t hash, const std::string& what) {
    if (size() == 1) {
        return;
    }
    const at::Tensor local = at::full({1}, static_cast<std::int64_t>(hash), at::kLong).to(device_);
    const at::Tensor gathered = all_gather("agree", local).to(at::kCPU);
    const auto* hashes = gathered.const_data_ptr<std::int64_t>();
    const auto* end = hashes + size();
    // What most ranks have is right, so that the one that is wrong is the one that is named.
    const std::int64_t common = *std::max_element(hashes, end, [&](std::int64_t a, std::int64_t b) {
        return std::count(hashes, end, a) < std::count(hashes, end, b);
    });
    std::vector<int> different;
    for (int member = 0; member < size(); ++member) {
        if (hashes[member] != common) {
            different.push_back(peer_name(member));
        }
    }
    if (!different.empty()) {
        throw UsageError(
            fmt::format("the ranks do not agree on {}: rank{} {} differ{} from the other {} in "
                        "group '{}': start all "
                        "ranks with the same recipe and data",
                        what, different.size() == 1 ? "" : "s", fmt::join(different, ", "),
                        different.size() == 1 ? "s" : "",
                        size() - static_cast<int>(different.size()), options_.name));
    }
}

}  // namespace hybridcp

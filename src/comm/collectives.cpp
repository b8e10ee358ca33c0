// Group's collectives: all that more than two ranks take part in.

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/backend.h"
#include "comm/wait.h"
#include "core/memory_class.h"
#include "hybridcp/error.h"

namespace hybridcp {

namespace {

// The same memory as one row of bytes, so that every dtype and row shape travels alike.
at::Tensor as_bytes(const at::Tensor& tensor) {
    return tensor.detach().view(-1).view(at::kByte);
}

}  // namespace

template <typename Start>
Pending Group::start_collective(const std::string& op, std::int64_t bytes, const Start& start) {
    auto transfer = std::make_unique<Pending::Transfer>();
    transfer->group = this;
    transfer->what = {.op = op, .bytes = bytes};
    recorder_.add(op, 1, bytes);
    try {
        transfer->work = start();
    } catch (const std::exception& error) {
        fail(transfer->what, 0.0, cause_of(error));
    }
    Pending pending;
    pending.transfer_ = std::move(transfer);
    return pending;
}

template <typename Start>
void Group::collective(const std::string& op, std::int64_t bytes, const Start& start) {
    start_collective(op, bytes, start).wait();
}

Pending Group::done() {
    Pending pending;
    pending.transfer_ = std::make_unique<Pending::Transfer>();
    return pending;
}

at::Tensor Group::all_gather(const std::string& op, const at::Tensor& local) {
    const MemoryScope scope(MemoryClass::kExchange);
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

Pending Group::start_all_gather(const std::string& op,
                                const at::Tensor& local,
                                const at::Tensor& into) {
    HCP_CHECK(local.is_contiguous() && into.is_contiguous() &&
                  into.numel() == size() * local.numel() && into.dtype() == local.dtype(),
              "{}: the result must be contiguous and hold {} tensors like the local one", op,
              size());
    if (size() == 1 || local.numel() == 0) {
        into.detach().view(-1).copy_(local.detach().view(-1));
        return done();
    }
    at::Tensor target = as_bytes(into);
    at::Tensor source = as_bytes(local);
    Pending pending = start_collective(op, (size() - 1) * num_bytes(local),
                                       [&] { return backend_->_allgather_base(target, source); });
    pending.transfer_->tensors = {target, source};
    return pending;
}

Pending Group::start_reduce_scatter(const std::string& op,
                                    const at::Tensor& parts,
                                    const at::Tensor& sum) {
    HCP_CHECK(parts.is_contiguous() && sum.is_contiguous() && parts.size(0) == size() &&
                  parts.numel() == size() * sum.numel() && parts.dtype() == at::kFloat &&
                  sum.dtype() == at::kFloat,
              "{}: the parts must be fp32, contiguous, and one like the sum for each rank", op);
    if (size() == 1 || sum.numel() == 0) {
        sum.detach().view(-1).add_(parts.detach().view(-1));
        return done();
    }
    const std::int64_t bytes = (size() - 1) * num_bytes(sum);
    at::Tensor source = parts.detach();
    if (device_.is_cuda()) {
        at::Tensor mine = at::empty_like(sum.detach());
        Pending pending = start_collective(
            op, bytes, [&] { return backend_->_reduce_scatter_base(mine, source); });
        pending.transfer_->tensors = {source, mine};
        pending.transfer_->then = [sum = sum.detach(), mine] { sum.add_(mine); };
        return pending;
    }
    // Gloo's own reduce-scatter is an all-reduce of everything.
    at::Tensor received = at::empty_like(source);
    at::Tensor into = as_bytes(received);
    at::Tensor from = as_bytes(source);
    std::vector<std::int64_t> counts(static_cast<std::size_t>(size()), num_bytes(sum));
    Pending pending = start_collective(
        op, bytes, [&] { return backend_->alltoall_base(into, from, counts, counts); });
    pending.transfer_->tensors = {into, from};
    pending.transfer_->then = [sum = sum.detach(), received] { sum.add_(received.sum(0)); };
    return pending;
}

at::Tensor Group::all_to_all(const std::string& op,
                             const at::Tensor& rows,
                             const std::vector<std::int64_t>& send_rows,
                             const std::vector<std::int64_t>& receive_rows) {
    const MemoryScope scope(MemoryClass::kExchange);
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
    collective(op, num_bytes(tensor) * 2 * (size() - 1) / size(),
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

#include "train/flat_shard.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/memory_class.h"
#include "hybridcp/error.h"

namespace hybridcp {

namespace {

constexpr std::int64_t kAlignment = 16;  // elements

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

/// The slots with their begins, one after another. Returns the end.
std::int64_t place(std::vector<FlatSlot>& slots) {
    std::int64_t end = 0;
    for (FlatSlot& slot : slots) {
        slot.begin = round_up(end, kAlignment);
        slot.count = std::accumulate(slot.shape.begin(), slot.shape.end(), std::int64_t{1},
                                     std::multiplies<>());
        end = slot.begin + slot.count;
    }
    return end;
}

// The memory of a tensor comes and goes under its views, which autograd has saved: tensor and views
// keep their identity and their version.
void give_memory(const at::Tensor& tensor) {
    const MemoryScope scope(MemoryClass::kParameters);
    const c10::Storage& storage = tensor.storage();
    const auto size_bytes = static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(c10::GetAllocator(tensor.device().type())->allocate(size_bytes));
    impl->set_nbytes(size_bytes);
}

void take_memory(const at::Tensor& tensor) {
    c10::StorageImpl* impl = tensor.storage().unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
    impl->set_nbytes(0);
}

}  // namespace

FlatShard::FlatShard(const std::vector<FlatSlot>& parameters, const Options& options)
    : options_(options), slots_(parameters) {
    const std::int64_t num_ranks = options.ranks->size();
    part_numel_ = (place(slots_) + num_ranks - 1) / num_ranks;
    const at::TensorOptions on_device(options.device);
    const MemoryScope scope(MemoryClass::kParameters);
    values_ = at::zeros({part_numel_}, on_device.dtype(at::kFloat));
    {
        const MemoryScope gradient_scope(MemoryClass::kGradients);
        gradients_ = at::zeros_like(values_);
    }
    whole_ = at::empty({num_ranks * part_numel_}, on_device.dtype(options.gather_dtype));
    make_leaves();
    make_pieces();
    release();
}

void FlatShard::make_leaves() {
    for (const FlatSlot& slot : slots_) {
        // variable_data: a version of its own, so that filling the whole does not spoil what
        // autograd has saved.
        const at::Tensor leaf =
            whole_.variable_data().narrow(0, slot.begin, slot.count).view(slot.shape).detach();
        leaf.requires_grad_(true);
        leaf.set_grad_dtype(at::kFloat);
        leaves_.push_back({slot.name, leaf});
    }
}

void FlatShard::make_pieces() {
    const std::int64_t part_begin = options_.ranks->rank() * part_numel_;
    const std::int64_t part_end = part_begin + part_numel_;
    for (const FlatSlot& slot : slots_) {
        const std::int64_t begin = std::max(slot.begin, part_begin);
        const std::int64_t end = std::min(slot.begin + slot.count, part_end);
        if (begin >= end) {
            continue;
        }
        ParameterPiece piece{.name = slot.name,
                             .shape = slot.shape,
                             .begin = begin - slot.begin,
                             .value = values_.narrow(0, begin - part_begin, end - begin).detach()};
        piece.value.mutable_grad() = gradients_.narrow(0, begin - part_begin, end - begin);
        pieces_.push_back(std::move(piece));
    }
}

void FlatShard::start_gather() {
    if (whole_.storage().nbytes() > 0) {
        return;
    }
    const MemoryScope scope(MemoryClass::kParameters);
    give_memory(whole_);
    // In place: the part stands where it will be in the whole.
    const at::Tensor part =
        whole_.narrow(0, options_.ranks->rank() * part_numel_, part_numel_).copy_(values_);
    gather_ = std::make_unique<Pending>(
        options_.ranks->start_all_gather("parameter_gather", part, whole_));
}

void FlatShard::finish_gather() {
    start_gather();
    if (gather_) {
        const std::unique_ptr<Pending> gather = std::move(gather_);
        gather->wait();
    }
}

void FlatShard::release() {
    if (gather_) {
        finish_gather();  // nothing may write into memory that is given back
    }
    take_memory(whole_);
}

void FlatShard::start_reduce() {
    const at::NoGradGuard no_grad;
    const MemoryScope scope(MemoryClass::kGradients);
    at::Tensor parts = at::empty({whole_.numel()}, gradients_.options());
    std::int64_t end = 0;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        const FlatSlot& slot = slots_[i];
        parts.narrow(0, end, slot.begin - end).zero_();
        end = slot.begin + slot.count;
        at::Tensor target = parts.narrow(0, slot.begin, slot.count);
        at::Tensor& grad = leaves_[i].value.mutable_grad();
        if (grad.defined()) {
            target.copy_(grad.reshape({-1}));
            grad.reset();
        } else {
            target.zero_();
        }
    }
    parts.narrow(0, end, parts.numel() - end).zero_();
    finish_reduce();
    reduce_ = std::make_unique<Pending>(options_.ranks->start_reduce_scatter(
        "gradient_scatter", parts.view({options_.ranks->size(), part_numel_}), gradients_));
}

void FlatShard::finish_reduce() {
    if (reduce_) {
        const at::NoGradGuard no_grad;
        const MemoryScope scope(MemoryClass::kGradients);
        const std::unique_ptr<Pending> reduce = std::move(reduce_);
        reduce->wait();
    }
}

}  // namespace hybridcp

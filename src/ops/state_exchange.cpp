#include "ops/state_exchange.h"

#include <algorithm>

namespace hybridcp {

namespace {

/// The heads that are not independent. Only host-side flags exist, so this is a CPU tensor.
at::Tensor open_index(const IndependentHeads::Heads& independent) {
    std::vector<std::int64_t> open;
    for (std::size_t head = 0; head < independent.size(); ++head) {
        if (!independent[head]) {
            open.push_back(static_cast<std::int64_t>(head));
        }
    }
    return at::tensor(open, at::kLong);
}

bool any(const std::vector<bool>& flags) {
    return std::find(flags.begin(), flags.end(), true) != flags.end();
}

}  // namespace

bool SegmentMaps::all_independent(std::int64_t segment, std::int64_t heads) const {
    if (independent == nullptr) {
        return false;
    }
    const auto first = independent->begin() + segment * heads;
    return std::all_of(first, first + heads, [](bool flag) { return flag; });
}

IndependentHeads::IndependentHeads(const SegmentMaps& maps,
                                   const CpContext& context,
                                   std::int64_t heads)
    : heads_(heads), slots_per_rank_(context.plan->prefix.slots_per_rank) {
    if (maps.independent == nullptr || slots_per_rank_ == 0) {
        return;
    }
    at::Tensor own = at::zeros({slots_per_rank_, heads}, at::kByte);
    std::uint8_t* flag = own.mutable_data_ptr<std::uint8_t>();
    for (const std::int64_t segment : context.plan->prefix.local_segments) {
        for (std::int64_t head = 0; head < heads; ++head) {
            *flag++ =
                maps.independent->at(static_cast<std::size_t>(segment * heads + head)) ? 1 : 0;
        }
    }
    const at::Tensor all = context.group->all_gather("gdn_independent", own);
    const std::uint8_t* flags = all.const_data_ptr<std::uint8_t>();
    flags_.assign(flags, flags + all.numel());
    if (!any(flags_)) {
        flags_.clear();
    }
}

IndependentHeads::Heads IndependentHeads::of(const SummaryGather::Slot& slot) const {
    if (flags_.empty()) {
        return {};
    }
    const auto first = flags_.begin() + (slot.rank * slots_per_rank_ + slot.slot) * heads_;
    Heads heads(first, first + heads_);
    return any(heads) ? heads : Heads{};
}

std::int64_t num_open(const IndependentHeads::Heads& independent, std::int64_t heads) {
    return heads - std::count(independent.begin(), independent.end(), true);
}

at::Tensor pack_open(const at::Tensor& M, const IndependentHeads::Heads& independent) {
    return (independent.empty() ? M : M.index_select(0, open_index(independent))).reshape({-1});
}

at::Tensor unpack_open(const at::Tensor& flat,
                       const IndependentHeads::Heads& independent,
                       const StateShape& shape) {
    const std::int64_t K = shape.key_dim;
    if (independent.empty()) {
        return flat.view({shape.heads, K, K});
    }
    return at::zeros({shape.heads, K, K}, shape.options)
        .index_copy_(0, open_index(independent), flat.view({-1, K, K}));
}

}  // namespace hybridcp

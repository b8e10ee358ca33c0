#include "ops/head_exchange.h"

#include <algorithm>

#include "core/memory_class.h"
#include "hybridcp/error.h"
#include "ops/autograd.h"

namespace hybridcp {

namespace {

/// One exchange's constants, shared by its forward and backward.
struct Exchange : torch::CustomClassHolder {
    std::vector<HeadShards> shards;  // per tensor
    std::string op;
    CpContext context;
    std::vector<std::int64_t> head_dims;  // D_i
    std::vector<at::ScalarType> dtypes;
};

std::int64_t num_heads(const HeadShards& shards) {
    std::int64_t end = 0;
    for (const HeadRange& range : shards) {
        end = std::max(end, range.begin + range.count);
    }
    return end;
}

/// Tensors of one dtype travel in one message; the groups are in order of first appearance on every
/// rank alike.
std::vector<std::vector<std::size_t>> group_by_dtype(const std::vector<at::ScalarType>& dtypes) {
    std::vector<std::vector<std::size_t>> groups;
    for (std::size_t i = 0; i < dtypes.size(); ++i) {
        const auto same = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
            return dtypes[group.front()] == dtypes[i];
        });
        if (same == groups.end()) {
            groups.push_back({i});
        } else {
            same->push_back(i);
        }
    }
    return groups;
}

/// The pieces in one row; they are freed, since what they hold is as large.
at::Tensor cat_flat(std::vector<at::Tensor>& pieces, const at::Tensor& like) {
    at::Tensor row = pieces.empty() ? at::empty({0}, like.options()) : at::cat(pieces);
    pieces.clear();
    return row;
}

/// Elements that a rank's tokens times a rank's heads amount to, over the tensors of one message.
std::int64_t num_elements(const Exchange& exchange,
                          const std::vector<std::size_t>& group,
                          std::int64_t num_tokens,
                          std::size_t head_rank) {
    std::int64_t total = 0;
    for (const std::size_t i : group) {
        total += num_tokens * exchange.shards[i][head_rank].count * exchange.head_dims[i];
    }
    return total;
}

/// Sequence shards to head shards, for the tensors of one dtype.
void scatter_group(const Exchange& exchange,
                   const std::vector<std::size_t>& group,
                   const variable_list& inputs,
                   variable_list& outputs) {
    const BatchPlan& plan = *exchange.context.plan;
    Group& ranks = *exchange.context.group;
    const auto me = static_cast<std::size_t>(ranks.rank());
    std::vector<at::Tensor> pieces;
    std::vector<std::int64_t> send_counts;
    std::vector<std::int64_t> receive_counts;
    for (std::size_t r = 0; r < static_cast<std::size_t>(ranks.size()); ++r) {
        for (const std::size_t i : group) {
            const HeadRange& range = exchange.shards[i][r];
            pieces.push_back(inputs[i].narrow(1, range.begin, range.count).reshape({-1}));
        }
        send_counts.push_back(num_elements(exchange, group, plan.num_local_tokens(), r));
        receive_counts.push_back(num_elements(exchange, group, plan.tokens_per_rank[r], me));
    }
    const at::Tensor received = ranks.all_to_all(
        exchange.op, cat_flat(pieces, inputs[group.front()]), send_counts, receive_counts);
    std::vector<std::vector<at::Tensor>> by_tensor(group.size());
    std::int64_t offset = 0;
    for (const std::int64_t num_tokens : plan.tokens_per_rank) {
        for (std::size_t j = 0; j < group.size(); ++j) {
            const std::int64_t heads = exchange.shards[group[j]][me].count;
            const std::int64_t dim = exchange.head_dims[group[j]];
            const std::int64_t count = num_tokens * heads * dim;
            by_tensor[j].push_back(
                received.narrow(0, offset, count).view({num_tokens, heads, dim}));
            offset += count;
        }
    }
    for (std::size_t j = 0; j < group.size(); ++j) {
        at::Tensor rank_major = at::cat(by_tensor[j]);  // [T, count, D]
        outputs[group[j]] = plan.rank_major_to_flat.defined()
                                ? rank_major.index_select(0, plan.rank_major_to_flat)
                                : rank_major;
    }
}

/// Head shards to sequence shards, for the tensors of one dtype.
void gather_group(const Exchange& exchange,
                  const std::vector<std::size_t>& group,
                  const variable_list& inputs,
                  variable_list& outputs) {
    const BatchPlan& plan = *exchange.context.plan;
    Group& ranks = *exchange.context.group;
    const auto me = static_cast<std::size_t>(ranks.rank());
    std::vector<at::Tensor> rank_major;
    for (const std::size_t i : group) {
        rank_major.push_back(plan.flat_to_rank_major.defined()
                                 ? inputs[i].index_select(0, plan.flat_to_rank_major)
                                 : inputs[i]);
    }
    std::vector<at::Tensor> pieces;
    std::vector<std::int64_t> send_counts;
    std::vector<std::int64_t> receive_counts;
    std::int64_t first_token = 0;
    for (std::size_t r = 0; r < static_cast<std::size_t>(ranks.size()); ++r) {
        for (const at::Tensor& tensor : rank_major) {
            pieces.push_back(tensor.narrow(0, first_token, plan.tokens_per_rank[r]).reshape({-1}));
        }
        first_token += plan.tokens_per_rank[r];
        send_counts.push_back(num_elements(exchange, group, plan.tokens_per_rank[r], me));
        receive_counts.push_back(num_elements(exchange, group, plan.num_local_tokens(), r));
    }
    const at::Tensor received = ranks.all_to_all(
        exchange.op, cat_flat(pieces, inputs[group.front()]), send_counts, receive_counts);
    for (const std::size_t i : group) {
        outputs[i] = at::zeros(
            {plan.num_local_tokens(), num_heads(exchange.shards[i]), exchange.head_dims[i]},
            received.options());
    }
    std::int64_t offset = 0;
    for (std::size_t r = 0; r < static_cast<std::size_t>(ranks.size()); ++r) {
        for (const std::size_t i : group) {
            const HeadRange& range = exchange.shards[i][r];
            const std::int64_t count =
                plan.num_local_tokens() * range.count * exchange.head_dims[i];
            outputs[i].narrow(1, range.begin, range.count) +=
                received.narrow(0, offset, count)
                    .view({plan.num_local_tokens(), range.count, exchange.head_dims[i]});
            offset += count;
        }
    }
}

enum class Direction { kScatter, kGather };

variable_list run(const Exchange& exchange, Direction direction, const variable_list& inputs) {
    const MemoryScope scope(MemoryClass::kExchange);
    variable_list outputs(inputs.size());
    for (const std::vector<std::size_t>& group : group_by_dtype(exchange.dtypes)) {
        if (direction == Direction::kScatter) {
            scatter_group(exchange, group, inputs, outputs);
        } else {
            gather_group(exchange, group, inputs, outputs);
        }
    }
    return outputs;
}

template <Direction kDirection>
struct HeadExchangeFunction : Function<HeadExchangeFunction<kDirection>> {
    static variable_list forward(AutogradContext* ctx,
                                 const c10::intrusive_ptr<Exchange>& exchange,
                                 at::TensorList inputs) {  // a vector would not be seen by apply()
        ctx->saved_data["exchange"] = c10::IValue::make_capsule(exchange);
        return run(*exchange, kDirection, inputs.vec());
    }
    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
        const auto holder = ctx->saved_data["exchange"].toCapsule();
        const auto& exchange = static_cast<const Exchange&>(*holder);
        constexpr Direction kReverse =
            kDirection == Direction::kScatter ? Direction::kGather : Direction::kScatter;
        variable_list results = run(exchange, kReverse, gradients);
        results.insert(results.begin(), Variable());  // of the exchange itself
        return results;
    }
};

template <Direction kDirection>
std::vector<at::Tensor> apply(const std::vector<at::Tensor>& tensors,
                              const std::vector<HeadShards>& shards,
                              const std::string& op,
                              const CpContext& context) {
    HCP_CHECK_EQ(tensors.size(), shards.size(), "{}: head shards of each tensor", op);
    auto exchange = c10::make_intrusive<Exchange>();
    exchange->shards = shards;
    exchange->op = op;
    exchange->context = context;
    for (const at::Tensor& tensor : tensors) {
        HCP_CHECK_EQ(tensor.dim(), 3, "{}: tensors are [tokens, heads, dim]", op);
        exchange->head_dims.push_back(tensor.size(2));
        exchange->dtypes.push_back(tensor.scalar_type());
    }
    return HeadExchangeFunction<kDirection>::apply(exchange, at::TensorList(tensors));
}

}  // namespace

HeadShards split_heads(std::int64_t total_heads, int num_ranks) {
    HCP_CHECK_EQ(total_heads % num_ranks, 0, "ulysses splits {} heads over {} ranks", total_heads,
                 num_ranks);
    const std::int64_t count = total_heads / num_ranks;
    HeadShards shards;
    for (int r = 0; r < num_ranks; ++r) {
        shards.push_back({.begin = r * count, .count = count});
    }
    return shards;
}

HeadShards shared_heads(const HeadShards& query_shards, std::int64_t group_size) {
    HeadShards shards;
    for (const HeadRange& range : query_shards) {
        const std::int64_t begin = range.begin / group_size;
        const std::int64_t last = (range.begin + range.count - 1) / group_size;
        shards.push_back({.begin = begin, .count = last - begin + 1});
    }
    return shards;
}

at::Tensor shared_head_index(const HeadShards& query_shards,
                             const HeadShards& shared_shards,
                             int rank,
                             const HeadGrouping& grouping) {
    const HeadRange& query = query_shards[static_cast<std::size_t>(rank)];
    const HeadRange& shared = shared_shards[static_cast<std::size_t>(rank)];
    bool plain = query.count % shared.count == 0;
    for (std::int64_t h = 0; plain && h < query.count; ++h) {
        plain = (query.begin + h) / grouping.group_size - shared.begin ==
                h / (query.count / shared.count);
    }
    if (plain) {
        return {};
    }
    const auto options = at::TensorOptions(grouping.device).dtype(at::kLong);
    return at::arange(query.begin, query.begin + query.count, options)
        .floor_divide_(grouping.group_size)
        .sub_(shared.begin);
}

std::vector<at::Tensor> scatter_heads(const std::vector<at::Tensor>& tensors,
                                      const std::vector<HeadShards>& shards,
                                      const std::string& op,
                                      const CpContext& context) {
    return apply<Direction::kScatter>(tensors, shards, op, context);
}

std::vector<at::Tensor> gather_heads(const std::vector<at::Tensor>& tensors,
                                     const std::vector<HeadShards>& shards,
                                     const std::string& op,
                                     const CpContext& context) {
    return apply<Direction::kGather>(tensors, shards, op, context);
}

}  // namespace hybridcp

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "plan/memory_plan.h"

namespace hybridcp::plan {

namespace {

struct Change {
    bool applies = false;
    std::string words;  // as the recipe writes it
    std::function<void(MemoryPlanInput&)> make;
};

void shard_over_all(MemoryPlanInput& input) {
    input.sharded = true;
    input.shard_size = input.dp * input.cp;
}

void double_cp(MemoryPlanInput& input) {
    const bool over_all = input.sharded && input.shard_size == input.dp * input.cp;
    input.cp *= 2;
    if (over_all) {
        shard_over_all(input);
    }
}

void halve_rows(MemoryPlanInput& input) {
    input.rows = (input.rows + 1) / 2;
    input.micro_batches *= 2;
}

std::vector<Change> changes_of_ranks(const MemoryPlanInput& input) {
    const std::int64_t num_ranks = input.dp * input.cp;
    return {
        {num_ranks > 1 && !input.sharded, "train.accelerator.fsdp=true", shard_over_all},
        {input.sharded && input.shard_size < num_ranks, "train.accelerator.fsdp_shard_size=null",
         shard_over_all},
        {input.sharded && input.prefetch, "train.accelerator.fsdp_prefetch=false",
         [](MemoryPlanInput& changed) { changed.prefetch = false; }},
        {true, "train.accelerator.cp=" + std::to_string(2 * input.cp) + " (twice the ranks)",
         double_cp},
        {input.cp > 1 && input.linear_mode == LinearMode::kGatherHidden,
         "train.accelerator.linear_attention_cp_mode=p2p",
         [](MemoryPlanInput& changed) { changed.linear_mode = LinearMode::kP2p; }},
        {input.cp > 1 && input.full_mode == FullMode::kAllGather,
         "train.accelerator.full_attention_cp_mode=ring",
         [](MemoryPlanInput& changed) { changed.full_mode = FullMode::kRing; }},
    };
}

std::vector<Change> changes_of_a_rank(const MemoryPlanInput& input) {
    return {
        {input.checkpointing == Checkpointing::kNone, "train.activation_checkpoint=selective",
         [](MemoryPlanInput& changed) { changed.checkpointing = Checkpointing::kSelective; }},
        {input.checkpointing != Checkpointing::kFull, "train.activation_checkpoint=full",
         [](MemoryPlanInput& changed) { changed.checkpointing = Checkpointing::kFull; }},
        {input.rows > 1, "train.micro_batch_size=" + std::to_string((input.rows + 1) / 2),
         halve_rows},
        {!input.fused_gdn && !input.on_cuda, "train.accelerator.linear_attention_gdn_backend=fused",
         [](MemoryPlanInput& changed) { changed.fused_gdn = true; }},
        {input.element_bytes > 2, "model.dtype=bf16",
         [](MemoryPlanInput& changed) { changed.element_bytes = 2; }},
    };
}

}  // namespace

std::vector<Advice> memory_advice(const MemoryPlanInput& input) {
    const std::int64_t now_bytes = plan_memory(input).total_bytes;
    std::vector<Change> changes = changes_of_ranks(input);
    std::ranges::move(changes_of_a_rank(input), std::back_inserter(changes));
    std::vector<Advice> advice;
    for (const Change& change : changes) {
        if (!change.applies) {
            continue;
        }
        MemoryPlanInput changed = input;
        change.make(changed);
        const std::int64_t total_bytes = plan_memory(changed).total_bytes;
        if (total_bytes < now_bytes) {
            advice.push_back({.change = change.words, .total_bytes = total_bytes});
        }
    }
    std::ranges::sort(advice, {}, &Advice::total_bytes);
    return advice;
}

}  // namespace hybridcp::plan

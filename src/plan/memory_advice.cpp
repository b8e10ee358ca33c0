#include <algorithm>

#include "plan/memory_plan.h"

namespace hybridcp::plan {

namespace {

class Advisor {
  public:
    explicit Advisor(const MemoryPlanInput& input)
        : input_(input), now_bytes_(plan_memory(input).total_bytes) {}

    template <typename Change>
    void consider(const std::string& words, const Change& change) {
        MemoryPlanInput changed = input_;
        change(changed);
        const std::int64_t total_bytes = plan_memory(changed).total_bytes;
        if (total_bytes < now_bytes_) {
            advice_.push_back({.change = words, .total_bytes = total_bytes});
        }
    }

    [[nodiscard]] std::vector<Advice> sorted() {
        std::stable_sort(advice_.begin(), advice_.end(), [](const Advice& a, const Advice& b) {
            return a.total_bytes < b.total_bytes;
        });
        return advice_;
    }

  private:
    const MemoryPlanInput& input_;
    std::int64_t now_bytes_;
    std::vector<Advice> advice_;
};

}  // namespace

std::vector<Advice> memory_advice(const MemoryPlanInput& input) {
    Advisor advisor(input);
    const std::int64_t num_ranks = input.dp * input.cp;
    if (num_ranks > 1 && (!input.sharded || input.shard_size < num_ranks)) {
        advisor.consider(input.sharded ? "train.accelerator.fsdp_shard_size=null"
                                       : "train.accelerator.fsdp=true",
                         [&](MemoryPlanInput& changed) {
                             changed.sharded = true;
                             changed.shard_size = num_ranks;
                         });
    }
    if (input.sharded && input.prefetch) {
        advisor.consider("train.accelerator.fsdp_prefetch=false",
                         [](MemoryPlanInput& changed) { changed.prefetch = false; });
    }
    if (input.checkpointing == Checkpointing::kNone) {
        advisor.consider("train.activation_checkpoint=selective", [](MemoryPlanInput& changed) {
            changed.checkpointing = Checkpointing::kSelective;
        });
    }
    if (input.checkpointing != Checkpointing::kFull) {
        advisor.consider("train.activation_checkpoint=full", [](MemoryPlanInput& changed) {
            changed.checkpointing = Checkpointing::kFull;
        });
    }
    advisor.consider("train.accelerator.cp=" + std::to_string(2 * input.cp) + " (twice the ranks)",
                     [](MemoryPlanInput& changed) {
                         changed.shard_size *=
                             changed.sharded && changed.shard_size == changed.dp * changed.cp ? 2
                                                                                              : 1;
                         changed.cp *= 2;
                     });
    if (input.rows > 1) {
        advisor.consider("train.micro_batch_size=" + std::to_string((input.rows + 1) / 2),
                         [](MemoryPlanInput& changed) {
                             changed.rows = (changed.rows + 1) / 2;
                             changed.micro_batches *= 2;
                         });
    }
    if (!input.fused_gdn && !input.on_cuda) {
        advisor.consider("train.accelerator.linear_attention_gdn_backend=fused",
                         [](MemoryPlanInput& changed) { changed.fused_gdn = true; });
    }
    if (input.cp > 1 && input.linear_mode == LinearMode::kGatherHidden) {
        advisor.consider("train.accelerator.linear_attention_cp_mode=p2p",
                         [](MemoryPlanInput& changed) { changed.linear_mode = LinearMode::kP2p; });
    }
    if (input.cp > 1 && input.full_mode == FullMode::kAllGather) {
        advisor.consider("train.accelerator.full_attention_cp_mode=ring",
                         [](MemoryPlanInput& changed) { changed.full_mode = FullMode::kRing; });
    }
    if (input.element_bytes == 4) {
        advisor.consider("model.dtype=bf16",
                         [](MemoryPlanInput& changed) { changed.element_bytes = 2; });
    }
    return advisor.sorted();
}

}  // namespace hybridcp::plan

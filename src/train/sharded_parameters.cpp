#include "train/sharded_parameters.h"

#include <algorithm>
#include <map>

#include "hybridcp/error.h"
#include "model/checkpoint_names.h"

namespace hybridcp {

bool is_gathered_narrow(const ParameterShape& parameter) {
    return parameter.shape.size() >= 2 && parameter.name != kEmbeddingName &&
           !parameter.name.ends_with("conv1d.weight") &&
           !parameter.name.ends_with("mlp.gate.weight") &&
           !parameter.name.ends_with("shared_expert_gate.weight");
}

std::int64_t unit_of_parameter(const std::string& name, std::int64_t num_layers) {
    if (name == kEmbeddingName) {
        return 0;
    }
    return layer_of_parameter(name).value_or(num_layers) + 1;
}

ShardedParameters::ShardedParameters(const ModelConfig& config, const ShardingOptions& options)
    : options_(options), tied_(config.tie_word_embeddings) {
    using Slots = std::map<at::ScalarType, std::vector<FlatSlot>>;
    std::vector<Slots> slots(static_cast<std::size_t>(config.num_layers()) + 2);
    for (const ParameterShape& parameter : parameter_shapes(config)) {
        names_.push_back(parameter.name);
        const at::ScalarType dtype =
            is_gathered_narrow(parameter) ? options.compute_dtype : at::kFloat;
        const std::int64_t unit = unit_of_parameter(parameter.name, config.num_layers());
        slots[static_cast<std::size_t>(unit)][dtype].push_back(
            {.name = parameter.name, .shape = parameter.shape});
    }
    for (const Slots& unit_slots : slots) {
        Unit& unit = units_.emplace_back();
        for (const auto& [dtype, parameters] : unit_slots) {
            unit.push_back(std::make_unique<FlatShard>(
                parameters,
                FlatShard::Options{
                    .gather_dtype = dtype, .device = options.device, .ranks = options.shards}));
            const auto& pieces = unit.back()->pieces();
            pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
        }
    }
}

std::vector<NamedParameter> ShardedParameters::leaves() const {
    std::map<std::string, at::Tensor> by_name;
    for (const Unit& unit : units_) {
        for (const auto& shard : unit) {
            for (const NamedParameter& leaf : shard->leaves()) {
                by_name.emplace(leaf.name, leaf.value);
            }
        }
    }
    std::vector<NamedParameter> leaves;
    for (const std::string& name : names_) {
        leaves.push_back({name, by_name.at(name)});
    }
    return leaves;
}

std::vector<const FlatShard*> ShardedParameters::flat_shards() const {
    std::vector<const FlatShard*> shards;
    for (const Unit& unit : units_) {
        for (const auto& shard : unit) {
            shards.push_back(shard.get());
        }
    }
    return shards;
}

std::vector<FlatShard*> ShardedParameters::shards_of(std::int64_t unit) const {
    std::vector<FlatShard*> shards;
    const auto add = [&](std::int64_t index) {
        for (const auto& shard : units_[static_cast<std::size_t>(index)]) {
            shards.push_back(shard.get());
        }
    };
    add(unit);
    if (tied_ && unit == num_units() - 1) {
        add(0);  // the head's matrix
    }
    return shards;
}

void ShardedParameters::fetch(std::int64_t unit, std::int64_t next) {
    for (FlatShard* shard : shards_of(unit)) {
        shard->start_gather();
    }
    for (FlatShard* shard : shards_of(unit)) {
        shard->finish_gather();
    }
    if (options_.prefetch && next >= 0 && next < num_units()) {
        for (FlatShard* shard : shards_of(next)) {
            shard->start_gather();
        }
    }
}

void ShardedParameters::before_forward(std::int64_t unit) {
    fetch(unit, unit + 1);
}

void ShardedParameters::after_forward(std::int64_t unit) {
    if (unit == num_units() - 1) {
        return;  // its backward pass is next
    }
    for (FlatShard* shard : shards_of(unit)) {
        shard->release();
    }
}

void ShardedParameters::before_backward(std::int64_t unit) {
    fetch(unit, std::max<std::int64_t>(unit - 1, 1));  // the embedding's backward reads no weights
}

void ShardedParameters::after_backward(std::int64_t unit) {
    finish_reductions();
    for (FlatShard* shard : shards_of(unit)) {
        shard->release();
    }
    // A tied head's gradient is in the embedding's leaf once the embedding's is added: it goes
    // then.
    for (const auto& shard : units_[static_cast<std::size_t>(unit)]) {
        shard->start_reduce();
        reducing_.push_back(shard.get());
    }
}

void ShardedParameters::finish_reductions() {
    for (FlatShard* shard : reducing_) {
        shard->finish_reduce();
    }
    reducing_.clear();
}

void ShardedParameters::start_step() {
    for (const Unit& unit : units_) {
        for (const auto& shard : unit) {
            shard->gradients().zero_();
        }
    }
}

void ShardedParameters::finish_backward() {
    after_backward(0);
    finish_reductions();
}

void ShardedParameters::release() {
    for (const Unit& unit : units_) {
        for (const auto& shard : unit) {
            shard->release();
        }
    }
}

void ShardedParameters::finish_step() {
    finish_reductions();
    release();
    for (const Unit& unit : units_) {
        for (const auto& shard : unit) {
            if (options_.replicas->size() > 1) {
                at::Tensor gradients = shard->gradients();
                options_.replicas->all_reduce_sum("gradient_replicas", gradients);
            }
        }
    }
}

void ShardedParameters::for_each_whole(const std::function<void(const NamedParameter&)>& body) {
    for (std::int64_t unit = 0; unit < num_units(); ++unit) {
        for (const auto& shard : units_[static_cast<std::size_t>(unit)]) {
            shard->finish_gather();
            for (const NamedParameter& leaf : shard->leaves()) {
                body(leaf);
            }
            shard->release();
        }
    }
}

}  // namespace hybridcp

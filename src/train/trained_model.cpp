#include "train/trained_model.h"

#include "core/memory_class.h"

namespace hybridcp {

TrainedModel::TrainedModel(const TrainedModelOptions& options,
                           const ParameterSource& source,
                           const Mesh& mesh)
    : mesh_(mesh) {
    const MemoryScope scope(MemoryClass::kParameters);
    std::vector<NamedParameter> leaves;
    if (options.sharded) {
        shards_ = std::make_unique<ShardedParameters>(
            options.config, ShardingOptions{.compute_dtype = options.compute_dtype,
                                            .device = mesh.device,
                                            .shards = mesh.shards.get(),
                                            .replicas = mesh.replicas.get(),
                                            .prefetch = options.prefetch});
        for (const ParameterPiece& piece : shards_->pieces()) {
            source.read({.name = piece.name, .shape = piece.shape}, piece.begin, piece.value);
        }
        leaves = shards_->leaves();
    } else {
        leaves = read_parameters(source, options.config, mesh.device);
    }
    model_ = std::make_unique<HybridModel>(options.config, leaves, options.compute_dtype);
    model_->gdn_chunk_size = options.gdn_chunk_size;
    model_->activation_checkpoint = options.activation_checkpoint;
    model_->residency = shards_.get();
    optimizer_ = std::make_unique<AdamW>(shards_ ? shards_->pieces() : whole_pieces(leaves),
                                         options.optimizer);
}

StepLoss TrainedModel::forward_backward(const std::vector<TokenBatch>& micro_batches,
                                        const Parallel& parallel) {
    return hybridcp::forward_backward(*model_, micro_batches, parallel, mesh_, shards_.get());
}

StepLoss TrainedModel::forward_only(const std::vector<TokenBatch>& micro_batches,
                                    const Parallel& parallel) {
    return hybridcp::forward_only(*model_, micro_batches, parallel, mesh_, shards_.get());
}

void TrainedModel::for_each_parameter(const std::function<void(const NamedParameter&)>& body) {
    if (shards_) {
        shards_->for_each_whole(body);
        return;
    }
    for (const NamedParameter& parameter : model_->parameters()) {
        body(parameter);
    }
}

double TrainedModel::update(double learning_rate, double max_grad_norm) {
    const double norm =
        clip_gradients(pieces(), max_grad_norm, shards_ ? mesh_.shards.get() : nullptr);
    optimizer_->step(learning_rate);
    return norm;
}

}  // namespace hybridcp

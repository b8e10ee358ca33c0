// A model together with what training keeps of it on this rank: whole parameters on every rank, or
// a part of each (sharded_parameters.h); gradients; optimizer.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "hybridcp/model.h"
#include "model/parameter_source.h"
#include "train/mesh.h"
#include "train/optimizer.h"
#include "train/sharded_parameters.h"
#include "train/step.h"

namespace hybridcp {

struct TrainedModelOptions {
    ModelConfig config;
    at::ScalarType compute_dtype = at::kFloat;
    std::int64_t gdn_chunk_size = 64;
    ActivationCheckpoint activation_checkpoint = ActivationCheckpoint::kNone;
    AdamWOptions optimizer = {};
    bool sharded = false;  // over mesh.shards
    bool prefetch = true;  // of sharded parameters
};

class TrainedModel {
  public:
    /// Reads what this rank keeps. The mesh must outlive it. Errors: FormatError from the source.
    TrainedModel(const TrainedModelOptions& options,
                 const ParameterSource& source,
                 const Mesh& mesh);

    [[nodiscard]] const HybridModel& model() const { return *model_; }
    /// Null without sharding.
    [[nodiscard]] ShardedParameters* shards() const { return shards_.get(); }
    [[nodiscard]] AdamW& optimizer() { return *optimizer_; }
    [[nodiscard]] const AdamW& optimizer() const { return *optimizer_; }
    /// What this rank updates and saves.
    [[nodiscard]] const std::vector<ParameterPiece>& pieces() const { return optimizer_->pieces(); }

    /// step.h; afterwards the pieces have the gradient of the whole step.
    [[nodiscard]] StepLoss forward_backward(const std::vector<TokenBatch>& micro_batches,
                                            const Parallel& parallel);
    [[nodiscard]] StepLoss forward_only(const std::vector<TokenBatch>& micro_batches,
                                        const Parallel& parallel);
    /// Calls body with every parameter whole, sharded ones in the dtype in which they are gathered,
    /// valid during the call. Comm: sharded parameters are gathered unit by unit, on every rank.
    void for_each_parameter(const std::function<void(const NamedParameter&)>& body);
    /// Clips, then updates. Returns the gradient norm before. Comm: optimizer.h.
    double update(double learning_rate, double max_grad_norm);

  private:
    const Mesh& mesh_;
    std::unique_ptr<ShardedParameters> shards_;
    std::unique_ptr<HybridModel> model_;
    std::unique_ptr<AdamW> optimizer_;
};

}  // namespace hybridcp

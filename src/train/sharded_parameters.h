// Fully sharded parameters: every rank of a shard group keeps 1/P of each parameter's fp32 value,
// gradient and optimizer state. A unit (embedding, block, head) is gathered before its forward and
// backward pass, the next one while it computes, and freed afterwards; its gradients are summed to
// the ranks that keep them while the next unit's backward pass computes. docs/sharding.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "hybridcp/group.h"
#include "hybridcp/model.h"
#include "hybridcp/parameter_residency.h"
#include "train/flat_shard.h"

namespace hybridcp {

/// Whether a parameter is gathered in the compute dtype, to which it is rounded at use; everything
/// else stays in fp32.
[[nodiscard]] bool is_gathered_narrow(const ParameterShape& parameter);
/// parameter_residency.h.
[[nodiscard]] std::int64_t unit_of_parameter(const std::string& name, std::int64_t num_layers);

struct ShardingOptions {
    at::ScalarType compute_dtype = at::kFloat;
    at::Device device = at::kCPU;
    Group* shards = nullptr;    // the ranks among which parameters are cut
    Group* replicas = nullptr;  // the ranks that keep the same part
    bool prefetch = true;       // gather the next unit ahead of its use
};

class ShardedParameters final : public ParameterResidency {
  public:
    /// Values are zero until they are written into pieces(). The groups must outlive it.
    ShardedParameters(const ModelConfig& config, const ShardingOptions& options);

    /// The leaves that a HybridModel of the configuration is made of, in parameter_shapes order:
    /// matrices in the compute dtype; A_log, dt_bias, norms, convolutions, routers and the
    /// embedding in fp32. Their memory is there while their unit is. Gradients are fp32.
    [[nodiscard]] std::vector<NamedParameter> leaves() const;
    /// This rank's runs of the parameters, fp32; .grad holds the reduced gradient after
    /// finish_step.
    [[nodiscard]] const std::vector<ParameterPiece>& pieces() const { return pieces_; }

    /// Of all units, in their order.
    [[nodiscard]] std::vector<const FlatShard*> flat_shards() const;

    /// Gradients become zero.
    void start_step();
    /// Reduces what the backward pass of one micro-batch has left (the embedding's gradient).
    void finish_backward();
    /// Waits for all gradients and sums them over the replicas; frees every unit. Comm: one
    /// all-reduce of each unit's part (op "gradient_replicas").
    void finish_step();

    /// Frees every unit, after a forward pass without backward.
    void release();

    /// Calls body(name, whole value in the gather dtype) for every parameter, unit after unit.
    /// Comm: as a forward pass. Every rank must call it.
    void for_each_whole(const std::function<void(const NamedParameter&)>& body);

    void before_forward(std::int64_t unit) override;
    void after_forward(std::int64_t unit) override;
    void before_backward(std::int64_t unit) override;
    void after_backward(std::int64_t unit) override;

  private:
    using Unit = std::vector<std::unique_ptr<FlatShard>>;  // one for each gather dtype
    [[nodiscard]] std::int64_t num_units() const {
        return static_cast<std::int64_t>(units_.size());
    }
    [[nodiscard]] std::vector<FlatShard*> shards_of(std::int64_t unit) const;
    void fetch(std::int64_t unit, std::int64_t next);
    void finish_reductions();

    ShardingOptions options_;
    std::vector<std::string> names_;  // in parameter_shapes order
    std::vector<Unit> units_;
    bool tied_ = false;
    std::vector<ParameterPiece> pieces_;
    std::vector<FlatShard*> reducing_;
};

}  // namespace hybridcp

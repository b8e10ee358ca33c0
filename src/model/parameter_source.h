// Where the values of parameters come from, read by runs of elements, so that a rank that keeps a
// part of each reads no more.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "hybridcp/model.h"

namespace hybridcp {

class ParameterSource {
  public:
    virtual ~ParameterSource() = default;
    /// Writes elements [begin, begin + n) of a parameter in its flat order into `into` [n], fp32 on
    /// any device. Errors: FormatError naming file and tensor.
    virtual void read(const ParameterShape& parameter,
                      std::int64_t begin,
                      const at::Tensor& into) const = 0;
};

/// One parameter whole: fp32 on `device`.
[[nodiscard]] at::Tensor read_parameter(const ParameterSource& source,
                                        const ParameterShape& parameter,
                                        const at::Device& device);
/// Every parameter of the configuration, as whole fp32 leaves.
[[nodiscard]] std::vector<NamedParameter> read_parameters(const ParameterSource& source,
                                                          const ModelConfig& config,
                                                          const at::Device& device);

/// The weights of a Hugging Face folder (load_parameters says which). Reading a run touches its
/// bytes alone and needs a few MiB besides. `skipped`: a line for the user about tensors that are
/// not used. Errors: FormatError, as load_parameters.
[[nodiscard]] std::unique_ptr<ParameterSource> stored_parameters(const std::string& folder,
                                                                 const ModelConfig& config,
                                                                 std::string* skipped = nullptr);

/// Random initialisation as Hugging Face does it, the same on every rank for the same seed.
[[nodiscard]] std::unique_ptr<ParameterSource> random_parameters(const ModelConfig& config,
                                                                 std::uint64_t seed);

/// Writes a Hugging Face folder as save_model does, from a source, one parameter at a time.
void save_parameters(const ParameterSource& source,
                     const ModelConfig& config,
                     const std::string& folder,
                     at::ScalarType dtype,
                     std::int64_t max_shard_bytes = kMaxShardBytes);

}  // namespace hybridcp

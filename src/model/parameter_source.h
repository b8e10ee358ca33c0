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
    /// Elements [begin, begin + count) of a parameter in its flat order: [count] fp32 on the CPU.
    /// Errors: FormatError naming file and tensor.
    [[nodiscard]] virtual at::Tensor read(const ParameterShape& parameter,
                                          std::int64_t begin,
                                          std::int64_t count) const = 0;
};

/// Every parameter of the configuration, as whole fp32 leaves.
[[nodiscard]] std::vector<NamedParameter> read_parameters(const ParameterSource& source,
                                                          const ModelConfig& config,
                                                          const at::Device& device);

/// The weights of a Hugging Face folder (load_parameters says which), memory-mapped. `skipped`: a
/// line for the user about tensors that are not used. Errors: FormatError, as load_parameters.
[[nodiscard]] std::unique_ptr<ParameterSource> stored_parameters(const std::string& folder,
                                                                 const ModelConfig& config,
                                                                 std::string* skipped = nullptr);

/// Random initialisation as Hugging Face does it, the same on every rank for the same seed.
[[nodiscard]] std::unique_ptr<ParameterSource> random_parameters(const ModelConfig& config,
                                                                 std::uint64_t seed);

}  // namespace hybridcp

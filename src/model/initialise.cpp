// Random initialisation as Hugging Face does it for Qwen3.5. Each parameter has a generator of its
// own, seeded by the run's seed and its name, so its values depend neither on the other parameters
// nor on the rank.
#include <ATen/CPUGeneratorImpl.h>

#include "hybridcp/model.h"
#include "model/parameter_source.h"

namespace hybridcp {

namespace {

// FNV-1a over the name, then one splitmix64 round to spread the seed's bits.
std::uint64_t seed_of_parameter(std::uint64_t seed, const std::string& name) {
    std::uint64_t hash = 0xcbf29ce484222325ULL;
    for (const char character : name) {
        hash = (hash ^ static_cast<std::uint8_t>(character)) * 0x100000001b3ULL;
    }
    hash += seed * 0x9e3779b97f4a7c15ULL;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9ULL;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebULL;
    return hash ^ (hash >> 31);
}

void fill_parameter(at::Tensor& value,
                    const std::string& name,
                    double initializer_range,
                    std::uint64_t seed) {
    at::Generator generator = at::detail::createCPUGenerator(seed_of_parameter(seed, name));
    if (name.ends_with(".dt_bias") || name.ends_with("linear_attn.norm.weight")) {
        value.fill_(1.0);
    } else if (name.ends_with("norm.weight")) {  // zero-centred: the factor is 1 + w
        value.zero_();
    } else if (name.ends_with(".A_log")) {
        value.uniform_(0.01, 16.0, generator).log_();
    } else {
        value.normal_(0.0, initializer_range, generator);
    }
}

class RandomParameters final : public ParameterSource {
  public:
    RandomParameters(double initializer_range, std::uint64_t seed)
        : initializer_range_(initializer_range), seed_(seed) {}

    void read(const ParameterShape& parameter,
              std::int64_t begin,
              const at::Tensor& into) const override {
        // All of it, since each value follows from those before.
        at::Tensor value = at::empty(parameter.shape, at::TensorOptions().dtype(at::kFloat));
        fill_parameter(value, parameter.name, initializer_range_, seed_);
        into.copy_(value.view({-1}).narrow(0, begin, into.numel()));
    }

  private:
    double initializer_range_;
    std::uint64_t seed_;
};

}  // namespace

std::unique_ptr<ParameterSource> random_parameters(const ModelConfig& config, std::uint64_t seed) {
    return std::make_unique<RandomParameters>(config.initializer_range, seed);
}

at::Tensor read_parameter(const ParameterSource& source,
                          const ParameterShape& parameter,
                          const at::Device& device) {
    at::Tensor value = at::empty(parameter.shape, at::TensorOptions(device).dtype(at::kFloat));
    source.read(parameter, 0, value.view({-1}));
    return value;
}

std::vector<NamedParameter> read_parameters(const ParameterSource& source,
                                            const ModelConfig& config,
                                            const at::Device& device) {
    std::vector<NamedParameter> parameters;
    for (const ParameterShape& parameter : parameter_shapes(config)) {
        const at::Tensor value = read_parameter(source, parameter, device);
        parameters.push_back({parameter.name, value.requires_grad_(true)});
    }
    return parameters;
}

HybridModel HybridModel::random(const ModelConfig& config,
                                std::uint64_t seed,
                                at::ScalarType compute_dtype,
                                const at::Device& device) {
    return {config, read_parameters(*random_parameters(config, seed), config, device),
            compute_dtype};
}

}  // namespace hybridcp

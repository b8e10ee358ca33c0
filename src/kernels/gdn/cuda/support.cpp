#include "kernels/gdn/cuda/support.h"

#include <fmt/format.h>

#include <limits>

#include "hybridcp/error.h"
#include "kernels/gdn/cuda/launch.h"

namespace hybridcp::gdn::cuda {

namespace {
constexpr std::int64_t kLargestGroup = 8;  // blocks of a cluster
}  // namespace

void check_support(const Problem& problem) {
    const auto refuse = [](const std::string& what) {
        throw UsageError("gdn: the fused backend on cuda " + what + "; choose backend eager");
    };
    if (problem.inputs.q.scalar_type() != at::kBFloat16) {
        refuse(
            fmt::format("takes bfloat16, not {}", c10::toString(problem.inputs.q.scalar_type())));
    }
    if (problem.key_dim() > kHeadDim || problem.value_dim() > kHeadDim) {
        refuse(fmt::format("takes head dims up to {}, not K = {} and V = {}", kHeadDim,
                           problem.key_dim(), problem.value_dim()));
    }
    if (problem.value_heads() / problem.key_heads() > kLargestGroup) {
        refuse(fmt::format("takes up to {} value heads a key head, not {}", kLargestGroup,
                           problem.value_heads() / problem.key_heads()));
    }
    if (problem.num_tokens() > std::numeric_limits<std::int32_t>::max()) {
        refuse(fmt::format("takes fewer than 2^31 tokens, not {}", problem.num_tokens()));
    }
    DeviceTraits device{};
    const char* error = read_device_traits(problem.inputs.q.device().index(), device);
    HCP_CHECK(error == nullptr, "gdn: device on cuda: {}", error);
    if (device.major != 9 || device.minor != 0) {
        refuse(fmt::format("runs on compute capability 9.0 (Hopper), not {}.{}", device.major,
                           device.minor));
    }
}

}  // namespace hybridcp::gdn::cuda

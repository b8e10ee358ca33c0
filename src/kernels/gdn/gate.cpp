#include "kernels/gdn/gate.h"

#include <fmt/ranges.h>

#include "hybridcp/error.h"

namespace hybridcp {

at::Tensor gdn_log_decay(const at::Tensor& a, const at::Tensor& A_log, const at::Tensor& dt_bias) {
    if (a.dim() == 0 || A_log.dim() != 1 || A_log.size(0) != a.size(-1) ||
        A_log.sizes() != dt_bias.sizes()) {
        throw UsageError(
            fmt::format("gdn gate: a [{}], A_log [{}] and dt_bias [{}] do not fit; they must be "
                        "[..., Hv], [Hv] and [Hv]",
                        fmt::join(a.sizes(), ", "), fmt::join(A_log.sizes(), ", "),
                        fmt::join(dt_bias.sizes(), ", ")));
    }
    const at::ScalarType type = a.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor step = at::softplus(a.to(type) + dt_bias.to(type), 1, 20);
    return -at::exp(A_log.to(type)) * step;
}

at::Tensor gdn_beta(const at::Tensor& b) {
    return at::sigmoid(b);
}

}  // namespace hybridcp

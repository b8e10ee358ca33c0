// The fused backend in all the forms that can run here: every instruction set of this machine, and
// the bf16 arithmetic of those that it lacks, written out in plain C++.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/gdn_support.h"

namespace hybridcp::test {

struct FusedVariant {
    std::string name;
    std::function<std::shared_ptr<GdnCall>(const GdnCase&)> make_call;
};

/// One for each available instruction set.
[[nodiscard]] std::vector<FusedVariant> fused_variants();
/// These and the emulated bf16 dot products and tiles, which take bf16 inputs. Without AVX2 the
/// emulated ones are missing.
[[nodiscard]] std::vector<FusedVariant> fused_bf16_variants();

}  // namespace hybridcp::test

#include "kernels/gdn_fused_variants.h"

#include "kernels/gdn/backends.h"
#include "kernels/gdn/fused/fused_kernels.h"
#include "kernels/simd/isa.h"

#if defined(HCP_EMULATED_KERNELS)
namespace hybridcp::emulated_bf16 {
const GdnKernelSet& gdn_kernels();
}
namespace hybridcp::emulated_tiles {
const GdnKernelSet& gdn_kernels();
}
#endif

namespace hybridcp::test {

std::vector<FusedVariant> fused_variants() {
    std::vector<FusedVariant> variants;
    for (const Isa isa : available_isas()) {
        variants.push_back({isa_name(isa), [isa](const GdnCase& gdn_case) {
                                const ForcedIsa forced(isa);
                                return make_gdn_call(GdnBackend::kFused, gdn_case.inputs,
                                                     gdn_case.offsets, gdn_case.options);
                            }});
    }
    return variants;
}

std::vector<FusedVariant> fused_bf16_variants() {
    std::vector<FusedVariant> variants = fused_variants();
#if defined(HCP_EMULATED_KERNELS)
    if (isa_available(Isa::kAvx2)) {
        for (const auto& [name, kernels] :
             {std::pair{"emulated_bf16", &emulated_bf16::gdn_kernels},
              std::pair{"emulated_tiles", &emulated_tiles::gdn_kernels}}) {
            variants.push_back(
                {name, [make_kernels = kernels](const GdnCase& gdn_case) {
                     return gdn::make_fused_call(
                         gdn::make_problem(gdn_case.inputs, gdn_case.offsets, gdn_case.options),
                         make_kernels());
                 }});
        }
    }
#endif
    return variants;
}

}  // namespace hybridcp::test

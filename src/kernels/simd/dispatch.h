// From an Isa to the kernels compiled for it. HCP_DECLARE_KERNELS(Table, name) declares, for a
// struct of function pointers that every file of hcp_isa_sources defines as
//     namespace hybridcp::HCP_ISA { const Table& name() { ... } }
// the lookup `const Table& name(Isa)`.
#pragma once

#include "kernels/simd/isa.h"

#if defined(__x86_64__)
#define HCP_DECLARE_KERNELS(Table, name)    \
    namespace portable {                    \
    const Table& name();                    \
    }                                       \
    namespace avx2 {                        \
    const Table& name();                    \
    }                                       \
    namespace avx512 {                      \
    const Table& name();                    \
    }                                       \
    namespace avx512_bf16 {                 \
    const Table& name();                    \
    }                                       \
    namespace amx_bf16 {                    \
    const Table& name();                    \
    }                                       \
    inline const Table& name(Isa isa) {     \
        switch (isa) {                      \
            case Isa::kPortable:            \
                return portable::name();    \
            case Isa::kAvx2:                \
                return avx2::name();        \
            case Isa::kAvx512:              \
                return avx512::name();      \
            case Isa::kAvx512Bf16:          \
                return avx512_bf16::name(); \
            case Isa::kAmxBf16:             \
                return amx_bf16::name();    \
        }                                   \
        return portable::name();            \
    }
#else
#define HCP_DECLARE_KERNELS(Table, name)    \
    namespace portable {                    \
    const Table& name();                    \
    }                                       \
    inline const Table& name(Isa /*isa*/) { \
        return portable::name();            \
    }
#endif

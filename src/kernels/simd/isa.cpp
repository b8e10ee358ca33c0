#include "kernels/simd/isa.h"

#include <fmt/format.h>

#include <array>
#include <cstdlib>

#if __has_include(<omp.h>)
#include <omp.h>
#define HCP_HAS_THREADS 1
#else
#define HCP_HAS_THREADS 0
#endif

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "hybridcp/error.h"

namespace hybridcp {
namespace {

constexpr std::array kAllIsas{Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16,
                              Isa::kAmxBf16};

thread_local int forced_isa = -1;

#if defined(__x86_64__)
constexpr long kRequestTilePermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr long kTileData = 18;                   // XFEATURE_XTILEDATA

/// Linux hands out the tile registers on request only, per process.
bool request_amx_tiles() {
#if defined(__linux__)
    return syscall(SYS_arch_prctl, kRequestTilePermission, kTileData) == 0;
#else
    return false;
#endif
}

bool detect(Isa isa) {
    __builtin_cpu_init();
    switch (isa) {
        case Isa::kPortable:
            return true;
        case Isa::kAvx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        case Isa::kAvx512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                   detect(Isa::kAvx2);
        case Isa::kAvx512Bf16:
            return __builtin_cpu_supports("avx512bf16") && detect(Isa::kAvx512);
        case Isa::kAmxBf16:
            return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                   detect(Isa::kAvx512Bf16) && request_amx_tiles();
    }
    return false;
}
#else
bool detect(Isa isa) {
    return isa == Isa::kPortable;
}
#endif

std::string available_names() {
    std::string names;
    for (const Isa isa : available_isas()) {
        names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
    }
    return names;
}

void require_available(Isa isa) {
    if (!isa_available(isa)) {
        throw UsageError(
            fmt::format("instruction set {} was asked for, but this CPU or this build does not "
                        "have it; available are {}",
                        isa_name(isa), available_names()));
    }
}

Isa default_isa() {
    static const int kEnvironmentIsa = [] {
        const char* name = std::getenv("HYBRIDCP_ISA");
        if (name == nullptr || *name == '\0') {
            return static_cast<int>(available_isas().back());
        }
        const Isa isa = parse_isa(name);
        require_available(isa);
        return static_cast<int>(isa);
    }();
    return static_cast<Isa>(kEnvironmentIsa);
}

}  // namespace

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::kPortable:
            return "portable";
        case Isa::kAvx2:
            return "avx2";
        case Isa::kAvx512:
            return "avx512";
        case Isa::kAvx512Bf16:
            return "avx512_bf16";
        case Isa::kAmxBf16:
            return "amx_bf16";
    }
    return "unknown";
}

bool isa_available(Isa isa) {
    static const std::array<bool, kAllIsas.size()> kAvailable = [] {
        std::array<bool, kAllIsas.size()> result{};
        for (const Isa each : kAllIsas) {
            result[static_cast<std::size_t>(each)] = detect(each);
        }
        return result;
    }();
    return kAvailable[static_cast<std::size_t>(isa)];
}

std::vector<Isa> available_isas() {
    std::vector<Isa> isas;
    for (const Isa isa : kAllIsas) {
        if (isa_available(isa)) {
            isas.push_back(isa);
        }
    }
    return isas;
}

Isa parse_isa(const std::string& name) {
    for (const Isa isa : kAllIsas) {
        if (name == isa_name(isa)) {
            return isa;
        }
    }
    throw UsageError(
        fmt::format("instruction set '{}' is not known; choose portable, avx2, avx512, avx512_bf16 "
                    "or amx_bf16 (available here: {})",
                    name, available_names()));
}

Isa selected_isa() {
    return forced_isa >= 0 ? static_cast<Isa>(forced_isa) : default_isa();
}

ForcedIsa::ForcedIsa(Isa isa) : previous_(forced_isa) {
    require_available(isa);
    forced_isa = static_cast<int>(isa);
}

ForcedIsa::~ForcedIsa() {
    forced_isa = previous_;
}

int max_threads() {
#if HCP_HAS_THREADS
    return omp_in_parallel() != 0 ? 1 : omp_get_max_threads();
#else
    return 1;
#endif
}

void parallel_tasks(std::int64_t num_tasks,
                    void (*body)(void* context, std::int64_t task, int thread),
                    void* context) {
#if HCP_HAS_THREADS
    if (num_tasks > 1 && max_threads() > 1) {
#pragma omp parallel for schedule(dynamic, 1)
        for (std::int64_t task = 0; task < num_tasks; ++task) {
            body(context, task, omp_get_thread_num());
        }
        return;
    }
#endif
    for (std::int64_t task = 0; task < num_tasks; ++task) {
        body(context, task, 0);
    }
}

}  // namespace hybridcp

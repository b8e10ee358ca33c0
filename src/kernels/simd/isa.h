// Which instruction set the fused CPU kernels use. A kernel is one template, compiled once per
// instruction set in a file of its own (src/kernels/CMakeLists.txt, hcp_isa_sources); the file that
// is called is chosen here, at run time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hybridcp {

/// Ordered: each one can do what those before it can.
enum class Isa : std::int8_t {
    kPortable,    // plain C++, vectors of 16 bytes
    kAvx2,        // AVX2 and FMA
    kAvx512,      // AVX-512 F, BW, DQ, VL
    kAvx512Bf16,  // and dot products of bf16 pairs: bf16 inputs are multiplied as bf16
    kAmxBf16,     // and AMX tiles of bf16
};

[[nodiscard]] const char* isa_name(Isa isa);

/// Whether this build and this CPU (and its operating system) have it.
[[nodiscard]] bool isa_available(Isa isa);

/// All that are available, best last.
[[nodiscard]] std::vector<Isa> available_isas();

/// What kernels run on: the one forced by force_isa on this thread, else by the environment
/// variable HYBRIDCP_ISA, else the best one. Errors: UsageError when a forced one is unknown or not
/// available; the message lists those that are.
[[nodiscard]] Isa selected_isa();

/// Errors: UsageError for an unknown name.
[[nodiscard]] Isa parse_isa(const std::string& name);

/// Forces an instruction set for calls from this thread while it lives; they nest.
class ForcedIsa {
  public:
    explicit ForcedIsa(Isa isa);
    ~ForcedIsa();
    ForcedIsa(const ForcedIsa&) = delete;
    ForcedIsa& operator=(const ForcedIsa&) = delete;

  private:
    int previous_;
};

/// Runs body(context, task, thread) for each task in 0 .. num_tasks-1 on the threads that ATen
/// uses (at::set_num_threads), in any order; thread < max_threads(). A task must not depend on the
/// thread. The body must not throw.
void parallel_tasks(std::int64_t num_tasks,
                    void (*body)(void* context, std::int64_t task, int thread),
                    void* context);
[[nodiscard]] int max_threads();

/// The same for a callable.
template <typename Body>
void parallel_tasks(std::int64_t num_tasks, Body&& body) {
    parallel_tasks(
        num_tasks,
        [](void* context, std::int64_t task, int thread) {
            (*static_cast<std::remove_reference_t<Body>*>(context))(task, thread);
        },
        &body);
}

}  // namespace hybridcp

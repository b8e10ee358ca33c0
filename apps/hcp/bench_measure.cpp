#include "hcp/bench_measure.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <fstream>
#include <limits>
#include <utility>

#include "hybridcp/error.h"
#include "kernels/simd/peak_kernels.h"

namespace hybridcp::cli {

std::string cpu_name() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        if (line.rfind("model name", 0) == 0) {
            return line.substr(line.find(':') + 2);
        }
    }
    return "unknown CPU";
}

namespace {

double clock_us(int clock) {
    timespec time{};
    ::clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

}  // namespace

Stopwatch::Stopwatch(int threads)
    : clock_(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC),
      start_us_(clock_us(clock_)) {}

double Stopwatch::lap_us() {
    const double now = clock_us(clock_);
    return now - std::exchange(start_us_, now);
}

double median(std::vector<double> values) {
    if (values.empty()) {
        return std::numeric_limits<double>::quiet_NaN();
    }
    std::sort(values.begin(), values.end());
    const std::size_t middle = values.size() / 2;
    return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

double smallest(const std::vector<double>& values) {
    return values.empty() ? std::numeric_limits<double>::quiet_NaN()
                          : *std::min_element(values.begin(), values.end());
}

void check_word(const std::string& flag,
                const std::string& word,
                const std::vector<std::string>& known) {
    if (std::find(known.begin(), known.end(), word) == known.end()) {
        throw UsageError(fmt::format("{}: '{}' is not known: did you mean {}? (known: {})", flag,
                                     word, nearest_word(word, known), fmt::join(known, ", ")));
    }
}

at::ScalarType parse_bench_dtype(const std::string& command, const std::string& name) {
    check_word(command + " --dtype", name, {"fp32", "bf16"});
    return name == "bf16" ? at::kBFloat16 : at::kFloat;
}

std::vector<Isa> parse_bench_isas(const std::string& flag, const std::vector<std::string>& names) {
    std::vector<Isa> isas;
    for (const std::string& name : names) {
        if (name == "all") {
            return available_isas();
        }
        check_word(flag, name, {"all", "portable", "avx2", "avx512", "avx512_bf16", "amx_bf16"});
        isas.push_back(parse_isa(name));
        const ForcedIsa refuses_what_is_missing(isas.back());
    }
    return isas.empty() ? std::vector<Isa>{selected_isa()} : isas;
}

bool print_verdict(const std::vector<Report>& reports) {
    std::size_t num_rows = 0;
    bool passed = true;
    for (const Report& report : reports) {
        num_rows += report.rows().size();
        if (!report.passed()) {
            fmt::print("{}\n", report.table());
            passed = false;
        }
    }
    fmt::print("{}: {} comparisons with the fp64 reference in {} tables\n",
               passed ? "verified" : "NOT verified", num_rows, reports.size());
    std::fflush(stdout);
    return passed;
}

double measure_peak_flops(Isa isa, at::ScalarType dtype) {
    const PeakKernels& kernels = peak_kernels(isa);
    const auto loop =
        dtype == at::kBFloat16 && kernels.bf16 != nullptr ? kernels.bf16 : kernels.fp32;
    constexpr double kLongEnoughUs = 20e3;
    float sum = 0.0F;
    for (std::int64_t rounds = 1 << 14;; rounds *= 2) {
        Stopwatch watch(1);
        const auto operations = static_cast<double>(loop(rounds, &sum));
        const double us = watch.lap_us();
        if (us >= kLongEnoughUs) {
            HCP_CHECK(!std::isnan(sum), "a peak loop computed nonsense");  // and so was computed
            return operations / (us * 1e-6);
        }
    }
}

double measure_copy_bandwidth() {
    constexpr std::size_t kBlockBytes = std::size_t{4} << 20;
    constexpr std::size_t kBlocks = 64;
    constexpr int kRepeats = 3;
    static const std::vector<char> from(kBlocks * kBlockBytes, 1);
    static std::vector<char> to(kBlocks * kBlockBytes, 2);
    std::vector<double> us;
    for (int i = 0; i < kRepeats; ++i) {
        Stopwatch watch(max_threads());
        parallel_tasks(static_cast<std::int64_t>(kBlocks), [&](std::int64_t block, int /*thread*/) {
            const std::size_t at = static_cast<std::size_t>(block) * kBlockBytes;
            std::memcpy(to.data() + at, from.data() + at, kBlockBytes);
        });
        us.push_back(watch.lap_us());
    }
    return 2.0 * static_cast<double>(kBlocks * kBlockBytes) / (median(us) * 1e-6);
}

}  // namespace hybridcp::cli

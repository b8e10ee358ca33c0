// What the `hcp bench` commands of single operators share: the machine's name and measured limits,
// medians, and the words of their options.
#pragma once

#include <ATen/core/ScalarType.h>

#include <string>
#include <vector>

#include "hcp/report.h"
#include "kernels/simd/isa.h"

namespace hybridcp::cli {

[[nodiscard]] std::string cpu_name();

/// Microseconds since it was made, or since the last lap. With one thread they are that thread's
/// CPU time: other work on the machine does not count. With more, elapsed time.
class Stopwatch {
  public:
    explicit Stopwatch(int threads);
    [[nodiscard]] double lap_us();

  private:
    int clock_;
    double start_us_;
};

/// Of an even number of values, the mean of the two in the middle; NaN without values.
[[nodiscard]] double median(std::vector<double> values);
[[nodiscard]] double smallest(const std::vector<double>& values);

/// fp32 | bf16. Errors: UsageError, naming the nearest.
[[nodiscard]] at::ScalarType parse_bench_dtype(const std::string& command, const std::string& name);

/// Errors: UsageError for a word that is not one of `known`, naming the nearest.
void check_word(const std::string& flag,
                const std::string& word,
                const std::vector<std::string>& known);

/// By name; "all" is what this CPU has, and none the selected one. Errors: UsageError for one that
/// is not known or that this CPU lacks.
[[nodiscard]] std::vector<Isa> parse_bench_isas(const std::string& flag,
                                                const std::vector<std::string>& names);

/// Prints the tables of what is off, and a line that sums up; true when nothing is.
[[nodiscard]] bool print_verdict(const std::vector<Report>& reports);

/// Floating-point operations a second of one core, measured now in about 20 ms: multiply-adds of
/// `dtype` on registers, with bf16 operands where the instruction set multiplies them, else fp32.
[[nodiscard]] double measure_peak_flops(Isa isa, at::ScalarType dtype);

/// Bytes read and written a second by a copy much larger than the caches, on the threads that ATen
/// uses.
[[nodiscard]] double measure_copy_bandwidth();

}  // namespace hybridcp::cli

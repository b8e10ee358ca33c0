// What a person sees of a run: on a terminal one line that is redrawn, with a bar and the time
// left; elsewhere plain lines. Only rank 0 has one.
#pragma once

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <string>

#include "train/metrics.h"

namespace hybridcp {

struct ProgressOptions {
    std::int64_t first_step = 0;  // finished before this run
    std::int64_t total_steps = 0;
    std::int64_t every = 1;  // steps between plain lines
    bool is_terminal = false;
};

class Progress {
  public:
    /// `out` outlives it.
    Progress(std::ostream& out, ProgressOptions options);

    void show(const StepMetrics& metrics);
    /// A line of its own, above the bar.
    void note(const std::string& text);
    /// Leaves the bar as it stands.
    void finish();

  private:
    [[nodiscard]] std::string describe(const StepMetrics& metrics) const;

    std::ostream& out_;
    ProgressOptions options_;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
    bool bar_is_open_ = false;
};

/// 75 -> "1:15", 3675 -> "1:01:15".
[[nodiscard]] std::string format_duration(double seconds);

}  // namespace hybridcp

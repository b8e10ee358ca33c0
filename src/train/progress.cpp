#include "train/progress.h"

#include <algorithm>
#include <cmath>
#include <ostream>

namespace hybridcp {

namespace {
constexpr std::int64_t kBarWidth = 20;
constexpr const char* kClearLine = "\r\x1b[K";
}  // namespace

std::string format_duration(double seconds) {
    const auto whole = static_cast<std::int64_t>(std::llround(std::max(0.0, seconds)));
    if (whole >= 3600) {
        return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
    }
    return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

Progress::Progress(std::ostream& out, ProgressOptions options) : out_(out), options_(options) {}

std::string Progress::describe(const StepMetrics& metrics) const {
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    const auto done = static_cast<double>(metrics.step - options_.first_step);
    const double left =
        seconds / std::max(done, 1.0) * static_cast<double>(options_.total_steps - metrics.step);
    std::string text =
        fmt::format("step {}/{}  loss {:.4f}", metrics.step, options_.total_steps, metrics.loss);
    if (metrics.aux_loss) {
        text += fmt::format("  aux {:.3f}", *metrics.aux_loss);
    }
    if (metrics.bits_per_byte) {
        text += fmt::format("  {:.3f} bits/byte", *metrics.bits_per_byte);
    }
    if (metrics.validation_loss) {
        text += fmt::format("  validation {:.4f}", *metrics.validation_loss);
    }
    return text + fmt::format("  grad {:.3f}  lr {:.2e}  {:.0f} tokens/s  ETA {}",
                              metrics.grad_norm, metrics.learning_rate, metrics.tokens_per_second(),
                              format_duration(left));
}

void Progress::show(const StepMetrics& metrics) {
    const bool is_last = metrics.step == options_.total_steps;
    if (options_.is_terminal) {
        const std::int64_t filled =
            kBarWidth * metrics.step / std::max<std::int64_t>(options_.total_steps, 1);
        out_ << kClearLine << '[' << std::string(static_cast<std::size_t>(filled), '#')
             << std::string(static_cast<std::size_t>(kBarWidth - filled), '.') << "] "
             << describe(metrics) << std::flush;
        bar_is_open_ = true;
    } else if (is_last || metrics.validation_loss || metrics.step % options_.every == 0) {
        out_ << describe(metrics) << '\n' << std::flush;
    }
}

void Progress::note(const std::string& text) {
    out_ << (bar_is_open_ ? kClearLine : "") << text << '\n' << std::flush;
    bar_is_open_ = false;
}

void Progress::finish() {
    if (bar_is_open_) {
        out_ << '\n' << std::flush;
        bar_is_open_ = false;
    }
}

}  // namespace hybridcp

// What is recorded of each step, one JSON object a line in DIR/metrics.jsonl. The file is also
// where the loss curve is drawn from, so a resumed run continues both.
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <optional>
#include <string>

#include "core/folder_lock.h"
#include "hybridcp/group.h"
#include "train/loss_curve.h"
#include "train/memory_report.h"

namespace hybridcp {

struct StepMetrics {
    std::int64_t step = 0;  // finished updates, from 1
    double loss = 0.0;
    std::optional<double> ce_loss = std::nullopt;  // the two parts of it, of a model with experts
    std::optional<double> aux_loss = std::nullopt;
    std::optional<double> bits_per_byte = std::nullopt;  // ce_loss / ln 2, with the byte tokenizer
    double grad_norm = 0.0;                              // before clipping
    double learning_rate = 0.0;
    std::int64_t num_tokens = 0;  // of all ranks
    std::int64_t num_labels = 0;
    int num_ranks = 1;
    double step_seconds = 0.0;
    double data_seconds = 0.0;
    double forward_backward_seconds = 0.0;  // communication included
    double optimizer_seconds = 0.0;
    std::map<std::string, OpTraffic> traffic = {};  // of this rank
    /// Of this rank's segments and value heads, those whose state at the end does not depend on
    /// that at the start (docs/cost-model.md).
    std::optional<double> forgetting_heads = std::nullopt;
    std::optional<double> validation_loss = std::nullopt;
    std::optional<MemoryReport> tensors = std::nullopt;  // of a run's first step

    [[nodiscard]] double tokens_per_second() const;
    [[nodiscard]] double comm_wait_seconds() const;
};

/// Resident memory of this process and its peak, from /proc/self/status; zero where there is none.
struct MemoryUse {
    std::int64_t resident_bytes = 0;
    std::int64_t peak_bytes = 0;
};
[[nodiscard]] MemoryUse memory_use();

/// One line of the file, without its end.
[[nodiscard]] std::string to_json_line(const StepMetrics& metrics, const MemoryUse& memory);

class MetricsFile {
  public:
    /// Opens DIR/metrics.jsonl (made if need be), keeping the lines of steps up to `last_step`:
    /// later ones, and a torn last line, come from a run that got further than its checkpoint.
    /// Errors: FormatError naming the path.
    MetricsFile(const std::string& dir, std::int64_t last_step);

    void write(const StepMetrics& metrics);
    [[nodiscard]] const std::string& path() const { return path_; }
    /// The curve so far, those steps before a resume included.
    [[nodiscard]] const LossCurve& curve() const { return curve_; }

  private:
    std::optional<FolderLock> lock_;  // of the folder: two runs would mix their lines
    std::string path_;
    std::ofstream stream_;
    LossCurve curve_;
};

}  // namespace hybridcp

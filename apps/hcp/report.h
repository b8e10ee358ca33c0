// The table that every `verify` command prints: one row a tensor, its error, the bar and the
// verdict; and the same as JSON.
#pragma once

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <vector>

namespace hybridcp::cli {

struct ReportRow {
    std::string tensor;
    std::string measure;  // rel-L2 | abs | relative | bf16 steps
    double error = 0.0;   // NaN fails
    double bar = 0.0;
    std::string where = {};  // the worst head or element
    /// The error of the same tensor on one rank: more than twice it, and more than a quarter of the
    /// bar, fails.
    std::optional<double> one_rank_error = std::nullopt;

    [[nodiscard]] bool passed() const;
};

class Report {
  public:
    /// title: what was compared and how, e.g. "gdn cp4.safetensors (plain), eager fp32 on cpu".
    explicit Report(std::string title) : title_(std::move(title)) {}

    void add(ReportRow row) { rows_.push_back(std::move(row)); }
    /// A line under the table for a number that has no bar.
    void add_note(std::string note) { notes_.push_back(std::move(note)); }
    /// Goes into the JSON alone, under `key`.
    void attach(const std::string& key, nlohmann::json value);

    [[nodiscard]] const std::string& title() const { return title_; }
    [[nodiscard]] const std::vector<ReportRow>& rows() const { return rows_; }
    /// False for a report without rows: nothing was compared.
    [[nodiscard]] bool passed() const;
    [[nodiscard]] std::string table() const;
    [[nodiscard]] nlohmann::json to_json() const;

  private:
    std::string title_;
    std::vector<ReportRow> rows_;
    std::vector<std::string> notes_;
    nlohmann::json attachments_ = nlohmann::json::object();
};

/// Prints the tables and a last line that sums them up, writes JSON to `json_path` unless it is
/// empty, and returns the exit status: 0 if all passed, else 1. Errors: FormatError when the JSON
/// cannot be written.
[[nodiscard]] int finish_reports(const std::vector<Report>& reports, const std::string& json_path);

}  // namespace hybridcp::cli

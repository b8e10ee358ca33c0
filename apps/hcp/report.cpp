#include "hcp/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "core/files.h"

namespace hybridcp::cli {

namespace {

// JSON has no NaN and no infinity.
nlohmann::json number(double value) {
    if (std::isfinite(value)) {
        return value;
    }
    return fmt::format("{}", value);
}

std::string scientific(double value) {
    return value == 0.0 ? "0" : fmt::format("{:.1e}", value);
}

}  // namespace

bool ReportRow::passed() const {
    const bool within_bar = error <= bar;
    return within_bar && (!one_rank_error || error <= std::max(2.0 * *one_rank_error, 0.25 * bar));
}

bool Report::passed() const {
    return !rows_.empty() &&
           std::all_of(rows_.begin(), rows_.end(), [](const ReportRow& r) { return r.passed(); });
}

std::string Report::table() const {
    std::size_t tensor_width = 6;
    bool against_one_rank = false;
    bool has_where = false;
    for (const ReportRow& row : rows_) {
        tensor_width = std::max(tensor_width, row.tensor.size());
        against_one_rank = against_one_rank || row.one_rank_error.has_value();
        has_where = has_where || !row.where.empty();
    }
    const auto line = [&](const std::string& tensor, const std::string& measure,
                          const std::string& error, const std::string& one_rank,
                          const std::string& bar, const std::string& rest) {
        std::string text =
            fmt::format("  {:<{}}  {:<10}  {:>8}", tensor, tensor_width, measure, error);
        if (against_one_rank) {
            text += fmt::format("  {:>8}", one_rank);
        }
        return text + fmt::format("  {:>8}  {}\n", bar, rest);
    };
    std::string text = title_ + "\n";
    text += line("tensor", "measure", "error", "one rank", "bar",
                 has_where ? "verdict  worst at" : "verdict");
    for (const ReportRow& row : rows_) {
        std::string rest = row.passed() ? "ok" : "FAILED";
        if (!row.where.empty()) {
            rest = fmt::format("{:<7}  {}", rest, row.where);
        }
        text += line(row.tensor, row.measure, scientific(row.error),
                     row.one_rank_error ? scientific(*row.one_rank_error) : "-",
                     scientific(row.bar), rest);
    }
    for (const std::string& note : notes_) {
        text += "  " + note + "\n";
    }
    return text;
}

nlohmann::json Report::to_json() const {
    nlohmann::json rows = nlohmann::json::array();
    for (const ReportRow& row : rows_) {
        nlohmann::json entry = {{"tensor", row.tensor},
                                {"measure", row.measure},
                                {"error", number(row.error)},
                                {"bar", number(row.bar)},
                                {"passed", row.passed()}};
        if (!row.where.empty()) {
            entry["worst_at"] = row.where;
        }
        if (row.one_rank_error) {
            entry["one_rank_error"] = number(*row.one_rank_error);
        }
        rows.push_back(std::move(entry));
    }
    nlohmann::json document = attachments_;
    document.update({{"title", title_}, {"passed", passed()}, {"rows", rows}, {"notes", notes_}});
    return document;
}

void Report::attach(const std::string& key, nlohmann::json value) {
    attachments_[key] = std::move(value);
}

int finish_reports(const std::vector<Report>& reports, const std::string& json_path) {
    nlohmann::json all = nlohmann::json::array();
    std::size_t num_rows = 0;
    std::size_t num_failed = 0;
    double closest = 0.0;
    std::string closest_name;
    bool passed = !reports.empty();
    for (const Report& report : reports) {
        fmt::print("{}\n", report.table());
        all.push_back(report.to_json());
        passed = passed && report.passed();
        for (const ReportRow& row : report.rows()) {
            ++num_rows;
            num_failed += row.passed() ? 0 : 1;
            const double share = row.bar > 0.0 ? row.error / row.bar : 0.0;
            if (!(share <= closest)) {
                closest = share;
                closest_name = row.tensor;
            }
        }
    }
    if (!json_path.empty()) {
        const nlohmann::json document = {{"passed", passed}, {"reports", all}};
        write_file_atomically(json_path, document.dump(2) + "\n");
    }
    if (passed) {
        fmt::print("verified: {} comparisons in {} tables, all within their bars", num_rows,
                   reports.size());
        if (!closest_name.empty()) {
            fmt::print(" (closest: {} at {:.0f}% of its bar)", closest_name, 100.0 * closest);
        }
        fmt::print("\n");
    } else {
        fmt::print("NOT verified: {} of {} comparisons failed\n", num_failed, num_rows);
    }
    std::fflush(stdout);
    return passed ? 0 : 1;
}

}  // namespace hybridcp::cli

#include "train/memory_report.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace hybridcp {

MemoryReport largest_memory(const MemoryRecord& record, Group& world) {
    constexpr auto kClasses = static_cast<std::int64_t>(kNumMemoryClasses);
    std::vector<std::int64_t> words{record.peak_bytes};
    words.insert(words.end(), record.at_peak_bytes.begin(), record.at_peak_bytes.end());
    words.insert(words.end(), record.class_peak_bytes.begin(), record.class_peak_bytes.end());
    const at::Tensor all =
        world.all_gather("memory", at::tensor(words, at::kLong).to(world.device())).to(at::kCPU);
    const auto* rows = all.const_data_ptr<std::int64_t>();
    MemoryReport report{.num_ranks = world.size(), .record = {}};
    for (int rank = 0; rank < world.size(); ++rank) {
        const std::int64_t* row = rows + rank * (1 + 2 * kClasses);
        if (*row > report.record.peak_bytes) {
            report.rank = rank;
            report.record.peak_bytes = *row;
            std::copy_n(row + 1, kClasses, report.record.at_peak_bytes.begin());
            std::copy_n(row + 1 + kClasses, kClasses, report.record.class_peak_bytes.begin());
        }
    }
    return report;
}

std::string bytes_text(std::int64_t bytes) {
    const auto value = static_cast<double>(bytes);
    return value >= 1e9   ? fmt::format("{:.2f} GB", value / 1e9)
           : value >= 1e6 ? fmt::format("{:.2f} MB", value / 1e6)
                          : fmt::format("{:.2f} kB", value / 1e3);
}

std::string to_table(const MemoryReport& report) {
    const MemoryRecord& record = report.record;
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < kNumMemoryClasses; ++i) {
        if (record.class_peak_bytes.at(i) > 0) {
            order.push_back(i);
        }
    }
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return record.at_peak_bytes.at(a) > record.at_peak_bytes.at(b);
    });
    std::string text = fmt::format(
        "memory of tensors in the first step: {} at the peak{}\n  {:<24}{:>12}{:>12}",
        bytes_text(record.peak_bytes),
        report.num_ranks > 1
            ? fmt::format(", on rank {}, where it is largest of {}", report.rank, report.num_ranks)
            : "",
        "", "at the peak", "own peak");
    for (const std::size_t i : order) {
        text += fmt::format("\n  {:<24}{:>12}{:>12}", name_of(static_cast<MemoryClass>(i)),
                            bytes_text(record.at_peak_bytes.at(i)),
                            bytes_text(record.class_peak_bytes.at(i)));
    }
    return text;
}

}  // namespace hybridcp

#include "train/metrics.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <sstream>

#include <nlohmann/json.hpp>

#include "core/files.h"
#include "hybridcp/error.h"

namespace hybridcp {

double StepMetrics::tokens_per_second() const {
    return step_seconds > 0.0 ? static_cast<double>(num_tokens) / step_seconds : 0.0;
}

double StepMetrics::comm_wait_seconds() const {
    double seconds = 0.0;
    for (const auto& [op, moved] : traffic) {
        seconds += moved.seconds;
    }
    return seconds;
}

MemoryUse memory_use() {
    MemoryUse memory;
    std::ifstream stream("/proc/self/status");
    std::string line;
    while (std::getline(stream, line)) {
        std::istringstream words(line);
        std::string name;
        std::int64_t kibibytes = 0;
        words >> name >> kibibytes;
        if (name == "VmRSS:") {
            memory.resident_bytes = kibibytes * 1024;
        } else if (name == "VmHWM:") {
            memory.peak_bytes = kibibytes * 1024;
        }
    }
    return memory;
}

std::string to_json_line(const StepMetrics& metrics, const MemoryUse& memory) {
    nlohmann::ordered_json line;
    line["step"] = metrics.step;
    line["loss"] = metrics.loss;
    const auto add_if_known = [&](const char* key, const std::optional<double>& value) {
        if (value) {
            line[key] = *value;
        }
    };
    add_if_known("ce_loss", metrics.ce_loss);
    add_if_known("aux_loss", metrics.aux_loss);
    add_if_known("bits_per_byte", metrics.bits_per_byte);
    add_if_known("validation_loss", metrics.validation_loss);
    add_if_known("gdn_forgetting_heads", metrics.forgetting_heads);
    line["grad_norm"] = metrics.grad_norm;
    line["learning_rate"] = metrics.learning_rate;
    line["tokens"] = metrics.num_tokens;
    line["labels"] = metrics.num_labels;
    line["tokens_per_second"] = metrics.tokens_per_second();
    line["tokens_per_second_per_rank"] = metrics.tokens_per_second() / metrics.num_ranks;
    line["seconds"] = {{"step", metrics.step_seconds},
                       {"data", metrics.data_seconds},
                       {"forward_backward", metrics.forward_backward_seconds},
                       {"optimizer", metrics.optimizer_seconds},
                       {"comm_wait", metrics.comm_wait_seconds()}};
    line["comm"] = nlohmann::ordered_json::object();
    for (const auto& [op, moved] : metrics.traffic) {
        line["comm"][op] = {
            {"messages", moved.messages}, {"bytes", moved.bytes}, {"seconds", moved.seconds}};
    }
    line["memory"] = {{"resident_bytes", memory.resident_bytes}, {"peak_bytes", memory.peak_bytes}};
    if (metrics.tensors) {
        const MemoryRecord& record = metrics.tensors->record;
        auto& tensors = line["memory"]["tensors"];
        tensors = {{"rank", metrics.tensors->rank}, {"peak_bytes", record.peak_bytes}};
        for (std::size_t i = 0; i < kNumMemoryClasses; ++i) {
            const std::string key(key_of(static_cast<MemoryClass>(i)));
            tensors["at_peak_bytes"][key] = record.at_peak_bytes.at(i);
            tensors["class_peak_bytes"][key] = record.class_peak_bytes.at(i);
        }
    }
    return line.dump();
}

MetricsFile::MetricsFile(const std::string& dir, std::int64_t last_step)
    : path_((std::filesystem::path(dir) / "metrics.jsonl").string()) {
    std::error_code error;
    std::filesystem::create_directories(dir, error);
    if (error) {
        throw FormatError(fmt::format("log.dir: cannot create {}: {}", dir, error.message()));
    }
    lock_.emplace(dir, "metrics.lock");
    std::string kept;
    if (last_step > 0 && std::filesystem::exists(path_)) {
        std::istringstream lines(read_file(path_));
        std::string text;
        while (std::getline(lines, text)) {
            const nlohmann::json line = nlohmann::json::parse(text, nullptr, false);
            if (!line.is_object() || !line.value("step", nlohmann::json()).is_number_integer() ||
                !line.value("loss", nlohmann::json()).is_number() ||
                line["step"].get<std::int64_t>() > last_step) {
                continue;
            }
            const auto step = line["step"].get<std::int64_t>();
            curve_.training.push_back({step, line["loss"].get<double>()});
            if (line.value("validation_loss", nlohmann::json()).is_number()) {
                curve_.validation.push_back({step, line["validation_loss"].get<double>()});
            }
            kept += text + "\n";
        }
    }
    write_file_atomically(path_, kept);
    stream_.open(path_, std::ios::app);
}

void MetricsFile::write(const StepMetrics& metrics) {
    stream_ << to_json_line(metrics, memory_use()) << '\n' << std::flush;
    if (!stream_) {
        throw FormatError(fmt::format("cannot write {}: {}", path_, std::strerror(errno)));
    }
    curve_.training.push_back({metrics.step, metrics.loss});
    if (metrics.validation_loss) {
        curve_.validation.push_back({metrics.step, *metrics.validation_loss});
    }
}

}  // namespace hybridcp

#include "hcp/inspect_checkpoint.h"

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <functional>
#include <numeric>

#include "hybridcp/error.h"
#include "train/checkpoint_folders.h"
#include "train/checkpoint_reader.h"

namespace hybridcp::cli {

namespace {

std::string size_text(std::uint64_t size_bytes) {
    if (size_bytes < 10'000) {
        return fmt::format("{} B", size_bytes);
    }
    return size_bytes < 10'000'000
               ? fmt::format("{:.1f} kB", static_cast<double>(size_bytes) / 1e3)
               : fmt::format("{:.1f} MB", static_cast<double>(size_bytes) / 1e6);
}

std::int64_t num_elements(const Manifest& manifest) {
    std::int64_t total = 0;
    for (const auto& [name, parameter] : manifest.parameters) {
        total += std::accumulate(parameter.shape.begin(), parameter.shape.end(), std::int64_t{1},
                                 std::multiplies<>());
    }
    return total;
}

struct FileVerdict {
    std::int64_t num_damaged = 0;  // of its checks
    std::string first = {};
};

/// Each file with what is damaged in it.
std::map<std::string, FileVerdict> check_files(const CheckpointReader& reader) {
    std::map<std::string, FileVerdict> verdicts;
    for (const CheckpointReader::Check& check : reader.checks()) {
        FileVerdict& verdict = verdicts[check.file];
        // Within a file that is cut or has another header no tensor can be judged.
        if (!verdict.first.empty() && verdict.num_damaged == 0) {
            continue;
        }
        if (const auto damage = reader.damage(check)) {
            verdict.num_damaged += check.tensor.empty() ? 0 : 1;
            verdict.first = verdict.first.empty() ? *damage : verdict.first;
        }
    }
    return verdicts;
}

void print_state(const CheckpointReader& reader) {
    const Manifest& manifest = reader.manifest();
    fmt::print("  parameters  {} tensors, {} elements (value, exp_avg, exp_avg_sq in fp32)\n",
               manifest.parameters.size(), num_elements(manifest));
    try {
        const TrainState state = reader.state();
        fmt::print("  data        {} rows consumed, seed {}; {}\n", state.consumed_rows, state.seed,
                   state.data_fingerprint);
        fmt::print("  saved by    {}\n", state.topology);
    } catch (const Error&) {
        fmt::print("  saved by    unknown: {} is damaged\n", kStateFile);
    }
}

/// True when it is complete.
bool print_checkpoint(const std::string& folder) {
    fmt::print("{}\n", folder);
    try {
        const CheckpointReader reader(folder);
        fmt::print("  step        {}\n", reader.manifest().step);
        print_state(reader);
        bool complete = true;
        std::uint64_t total_bytes = 0;
        const auto verdicts = check_files(reader);
        for (const auto& [name, file] : reader.manifest().files) {
            const FileVerdict& verdict = verdicts.at(name);
            complete = complete && verdict.first.empty();
            total_bytes += file.size_bytes;
            fmt::print("  {:<32}  {:>10}  {}\n", name, size_text(file.size_bytes),
                       verdict.first.empty() ? "ok" : "DAMAGED");
            if (!verdict.first.empty()) {
                fmt::print("      {}{}\n", verdict.first,
                           verdict.num_damaged > 1
                               ? fmt::format(" (and {} tensors more)", verdict.num_damaged - 1)
                               : "");
            }
        }
        fmt::print("  {:<32}  {:>10}  {}\n\n", "together", size_text(total_bytes),
                   complete ? "complete" : "cannot be loaded");
        return complete;
    } catch (const Error& error) {
        fmt::print("  {}\n\n", error.what());
        return false;
    }
}

}  // namespace

int inspect_checkpoint(const InspectCheckpointOptions& options) {
    namespace fs = std::filesystem;
    std::map<std::int64_t, std::string> folders = list_checkpoints(options.folder);
    if (fs::exists(fs::path(options.folder) / kManifestFile)) {
        folders = {{0, options.folder}};
    }
    if (folders.empty()) {
        throw FormatError(
            fmt::format("{} is no checkpoint and holds none (step-*)", options.folder));
    }
    bool complete = true;
    for (const auto& [step, folder] : folders) {
        complete = print_checkpoint(folder) && complete;
    }
    std::fflush(stdout);
    return complete ? 0 : 1;
}

}  // namespace hybridcp::cli

// The table of contents of a checkpoint: its files, and which run of which parameter stands in
// which of them. docs/checkpoints.md has a picture.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace hybridcp {

/// What is kept of each element.
enum class PieceKind { kValue, kExpAvg, kExpAvgSq };
inline constexpr std::array kPieceKinds{PieceKind::kValue, PieceKind::kExpAvg,
                                        PieceKind::kExpAvgSq};

/// Elements [begin, begin + count) of a parameter, as three fp32 tensors of one file.
struct StoredRun {
    std::string file;
    std::int64_t begin = 0;
    std::int64_t count = 0;
    std::array<std::uint64_t, kPieceKinds.size()> xxh64 = {};  // of each kind's bytes
    [[nodiscard]] std::int64_t end() const { return begin + count; }
};

struct StoredParameter {
    std::vector<std::int64_t> shape = {};
    std::vector<StoredRun> runs = {};  // by ascending begin: no gap, no overlap
};

struct StoredFile {
    std::uint64_t size_bytes = 0;
    std::uint64_t checked_bytes = 0;  // all, or a part's header: its tensors have their own sums
    std::uint64_t xxh64 = 0;          // of the checked bytes
};

struct Manifest {
    std::int64_t step = 0;
    std::map<std::string, StoredFile> files = {};
    std::map<std::string, StoredParameter> parameters = {};
};

inline constexpr const char* kManifestFile = "manifest.json";
inline constexpr const char* kStateFile = "state.json";
inline constexpr const char* kConfigFile = "config.json";

/// The name of a run's tensor in its file, e.g. "exp_avg.model.norm.weight@512".
[[nodiscard]] std::string stored_tensor_name(PieceKind kind,
                                             const std::string& parameter,
                                             std::int64_t begin);

/// JSON with a checksum of its own. Errors: CheckError when the runs of a parameter leave a gap or
/// overlap.
[[nodiscard]] std::string manifest_text(Manifest manifest);
/// Errors: FormatError naming what is damaged or missing.
[[nodiscard]] Manifest read_manifest(const std::string& folder);

/// What one rank has written, as text for rank 0.
[[nodiscard]] std::string report_text(const Manifest& part);
/// Adds what a rank has written.
void add_report(const std::string& report, Manifest& manifest);

}  // namespace hybridcp

#include "train/checkpoint_manifest.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/checksum.h"
#include "core/files.h"
#include "hybridcp/error.h"

namespace hybridcp {

namespace {

using Json = nlohmann::json;
constexpr std::int64_t kVersion = 2;

const char* kind_name(PieceKind kind) {
    return kind == PieceKind::kValue    ? "value"
           : kind == PieceKind::kExpAvg ? "exp_avg"
                                        : "exp_avg_sq";
}

std::uint64_t parse_checksum(const Json& value) {
    const auto text = value.get<std::string>();
    std::uint64_t checksum = 0;
    const auto [end, error] =
        std::from_chars(text.data(), text.data() + text.size(), checksum, /*base=*/16);
    if (error != std::errc{} || end != text.data() + text.size()) {
        throw FormatError(fmt::format("'{}' is no checksum", text));
    }
    return checksum;
}

Json run_to_json(const StoredRun& run) {
    Json json{{"file", run.file}, {"begin", run.begin}, {"count", run.count}};
    for (const PieceKind kind : kPieceKinds) {
        json[kind_name(kind)] = checksum_text(run.xxh64[static_cast<std::size_t>(kind)]);
    }
    return json;
}

StoredRun run_from_json(const Json& json) {
    StoredRun run{.file = json.at("file"), .begin = json.at("begin"), .count = json.at("count")};
    for (const PieceKind kind : kPieceKinds) {
        run.xxh64[static_cast<std::size_t>(kind)] = parse_checksum(json.at(kind_name(kind)));
    }
    return run;
}

Json to_json(const Manifest& manifest) {
    Json files = Json::object();
    for (const auto& [name, file] : manifest.files) {
        files[name] = {{"bytes", file.size_bytes},
                       {"checked_bytes", file.checked_bytes},
                       {"xxh64", checksum_text(file.xxh64)}};
    }
    Json parameters = Json::object();
    for (const auto& [name, parameter] : manifest.parameters) {
        Json runs = Json::array();
        for (const StoredRun& run : parameter.runs) {
            runs.push_back(run_to_json(run));
        }
        parameters[name] = {{"shape", parameter.shape}, {"runs", runs}};
    }
    return {{"step", manifest.step}, {"files", files}, {"parameters", parameters}};
}

Manifest from_json(const Json& json) {
    Manifest manifest{.step = json.at("step")};
    for (const auto& [name, file] : json.at("files").items()) {
        manifest.files[name] = {.size_bytes = file.at("bytes"),
                                .checked_bytes = file.at("checked_bytes"),
                                .xxh64 = parse_checksum(file.at("xxh64"))};
    }
    for (const auto& [name, parameter] : json.at("parameters").items()) {
        StoredParameter& stored = manifest.parameters[name];
        stored.shape = parameter.at("shape").get<std::vector<std::int64_t>>();
        for (const Json& run : parameter.at("runs")) {
            stored.runs.push_back(run_from_json(run));
        }
    }
    return manifest;
}

/// Says what is wrong with the runs of a parameter; empty when they cover it once.
std::string wrong_cover(const StoredParameter& parameter) {
    std::int64_t end = 0;
    for (const StoredRun& run : parameter.runs) {
        if (run.begin != end || run.count < 0) {
            return fmt::format("elements {} to {} in {}, {} expected", run.begin, run.end(),
                               run.file, end);
        }
        end = run.end();
    }
    const auto count = std::accumulate(parameter.shape.begin(), parameter.shape.end(),
                                       std::int64_t{1}, std::multiplies<>());
    return end == count ? "" : fmt::format("{} of {} elements", end, count);
}

}  // namespace

std::string stored_tensor_name(PieceKind kind, const std::string& parameter, std::int64_t begin) {
    return fmt::format("{}.{}@{}", kind_name(kind), parameter, begin);
}

std::string manifest_text(Manifest manifest) {
    for (auto& [name, parameter] : manifest.parameters) {
        std::sort(parameter.runs.begin(), parameter.runs.end(),
                  [](const StoredRun& a, const StoredRun& b) { return a.begin < b.begin; });
        if (const std::string wrong = wrong_cover(parameter); !wrong.empty()) {
            throw CheckError(
                fmt::format("the ranks have not written all of {} once: {}", name, wrong));
        }
    }
    const Json content = to_json(manifest);
    const std::string text = content.dump();
    const Json json{{"version", kVersion},
                    {"xxh64", checksum_text(xxh64(text.data(), text.size()))},
                    {"content", content}};
    return json.dump(1) + "\n";
}

Manifest read_manifest(const std::string& folder) {
    const std::string path = folder + "/" + kManifestFile;
    if (!path_exists(path)) {
        throw FormatError(
            fmt::format("{}: no {}: not a checkpoint, or not finished", folder, kManifestFile));
    }
    try {
        const Json json = Json::parse(read_file(path));
        if (!json.is_object() || !json.contains("version") || !json.contains("content")) {
            throw FormatError("not the manifest of a checkpoint");
        }
        if (json.at("version") != kVersion) {
            throw FormatError(fmt::format("version {}, this program reads version {}",
                                          json.at("version").dump(), kVersion));
        }
        // Equal text for equal content: keys are sorted, and numbers are integers.
        const std::string text = json.at("content").dump();
        if (xxh64(text.data(), text.size()) != parse_checksum(json.at("xxh64"))) {
            throw FormatError("its content does not have its checksum");
        }
        Manifest manifest = from_json(json.at("content"));
        for (const auto& [name, parameter] : manifest.parameters) {
            if (const std::string wrong = wrong_cover(parameter); !wrong.empty()) {
                throw FormatError(fmt::format("{}: {}", name, wrong));
            }
        }
        return manifest;
    } catch (const Json::exception& error) {
        throw FormatError(fmt::format("{}: damaged ({})", path, error.what()));
    } catch (const Error& error) {
        throw FormatError(fmt::format("{}: {}", path, error.what()));
    }
}

std::string report_text(const Manifest& part) {
    return to_json(part).dump();
}

void add_report(const std::string& report, Manifest& manifest) {
    const Manifest part = from_json(Json::parse(report));
    manifest.files.insert(part.files.begin(), part.files.end());
    for (const auto& [name, parameter] : part.parameters) {
        StoredParameter& whole = manifest.parameters[name];
        whole.shape = parameter.shape;
        whole.runs.insert(whole.runs.end(), parameter.runs.begin(), parameter.runs.end());
    }
}

}  // namespace hybridcp

#include "hcp/golden_case.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "core/files.h"
#include "hybridcp/error.h"

namespace hybridcp::cli {

nlohmann::json read_json(const std::string& path) {
    const std::string text = read_file(path);
    nlohmann::json document = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (document.is_discarded()) {
        throw FormatError(fmt::format("{} is not valid JSON: fetch the file again", path));
    }
    return document;
}

OpCase::OpCase(const std::string& op, const std::string& path) : file_(path) {
    const std::filesystem::path file_path(path);
    manifest_path_ = (file_path.parent_path() / "manifest.json").string();
    const nlohmann::json manifest = read_json(manifest_path_);
    const std::string made_for = manifest.value("op", "");
    if (made_for != op) {
        throw UsageError(fmt::format("{} holds cases of '{}', not of '{}': say hcp verify op {} {}",
                                     manifest_path_, made_for, op, made_for, path));
    }
    const std::string name = file_path.stem().string();
    if (!manifest.contains("cases") || !manifest["cases"].contains(name)) {
        throw FormatError(
            fmt::format("{} has no case '{}' for {}: the manifest says which bars hold",
                        manifest_path_, name, path));
    }
    options_ = manifest["cases"][name];
}

const nlohmann::json& OpCase::option(const std::string& key) const {
    if (!options_.contains(key)) {
        throw FormatError(fmt::format("{} lacks '{}' for {}", manifest_path_, key, path()));
    }
    return options_[key];
}

std::vector<std::int64_t> OpCase::document_offsets(std::int64_t batch, std::int64_t length) const {
    if (has("cu_seqlens")) {
        return to_integers(read("cu_seqlens"));
    }
    std::vector<std::int64_t> offsets;
    for (std::int64_t row = 0; row <= batch; ++row) {
        offsets.push_back(row * length);
    }
    return offsets;
}

void OpCase::check_names(const std::vector<std::string>& known) const {
    for (const auto& [name, entry] : file_.entries()) {
        if (std::find(known.begin(), known.end(), name) == known.end()) {
            throw FormatError(fmt::format(
                "{} holds a tensor '{}' that is not known: is the file newer?", path(), name));
        }
    }
}

std::vector<std::int64_t> to_integers(const at::Tensor& tensor) {
    const at::Tensor wide = tensor.to(at::kCPU, at::kLong).contiguous();
    const auto* data = wide.const_data_ptr<std::int64_t>();
    return {data, data + wide.numel()};
}

}  // namespace hybridcp::cli

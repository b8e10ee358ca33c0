// One case of the golden data: a safetensors file and its entry in the manifest.json beside it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/safetensors.h"

namespace hybridcp::cli {

/// Reads a manifest. Errors: FormatError naming the file when it is missing or no JSON.
[[nodiscard]] nlohmann::json read_json(const std::string& path);

/// One operator case, ops/OP/CASE.safetensors.
class OpCase {
  public:
    /// Errors: FormatError naming the file, when it or its manifest entry is missing or of another
    /// operator.
    OpCase(const std::string& op, const std::string& path);

    [[nodiscard]] const std::string& path() const { return file_.path(); }
    [[nodiscard]] bool has(const std::string& name) const { return file_.contains(name); }
    [[nodiscard]] at::Tensor read(const std::string& name) const { return file_.read(name); }
    /// The manifest's entry for `key`. Errors: FormatError naming file and key.
    [[nodiscard]] const nlohmann::json& option(const std::string& key) const;
    /// Where the rows of a [B, T] batch or the documents of cu_seqlens begin in the flat order; one
    /// more for the end.
    [[nodiscard]] std::vector<std::int64_t> document_offsets(std::int64_t batch,
                                                             std::int64_t length) const;
    /// Errors: FormatError when the file holds a tensor that is not in `known`.
    void check_names(const std::vector<std::string>& known) const;

  private:
    SafetensorsFile file_;
    std::string manifest_path_;
    nlohmann::json options_;
};

/// An I32 or I64 tensor as integers.
[[nodiscard]] std::vector<std::int64_t> to_integers(const at::Tensor& tensor);

}  // namespace hybridcp::cli

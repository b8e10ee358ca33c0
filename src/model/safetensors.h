// Reading and writing the safetensors format (8-byte header length, JSON header, raw little-endian
// data).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace hybridcp {

/// One file, memory-mapped: tensors are read when asked for.
class SafetensorsFile {
  public:
    /// Errors: FormatError naming the file when it is missing, truncated, or its header is not
    /// valid.
    explicit SafetensorsFile(std::string path);
    ~SafetensorsFile();
    SafetensorsFile(const SafetensorsFile&) = delete;
    SafetensorsFile& operator=(const SafetensorsFile&) = delete;

    struct Entry {
        at::ScalarType dtype = at::kFloat;
        std::vector<std::int64_t> shape;
        std::uint64_t begin = 0;  // bytes from the start of the data
        std::uint64_t end = 0;
    };
    [[nodiscard]] const std::string& path() const { return path_; }
    [[nodiscard]] const std::map<std::string, Entry>& entries() const { return entries_; }
    [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }
    [[nodiscard]] bool contains(const std::string& name) const { return entries_.count(name) != 0; }
    /// A copy in the stored dtype. Errors: FormatError naming file and tensor.
    [[nodiscard]] at::Tensor read(const std::string& name) const;

  private:
    void parse_header();
    void check_ranges() const;

    std::string path_;
    std::map<std::string, Entry> entries_;
    std::map<std::string, std::string> metadata_;
    const std::uint8_t* bytes_ = nullptr;
    std::uint64_t size_bytes_ = 0;
    std::uint64_t data_offset_ = 0;
};

/// Writes tensors (any device; fp64, fp32, bf16, fp16, int64, int32, uint8, bool) to `path`, which
/// is complete or absent (core/files.h). Errors: FormatError naming the path and the system's
/// reason.
void write_safetensors(const std::string& path,
                       const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace hybridcp

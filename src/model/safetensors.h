// Reading and writing the safetensors format (8-byte header length, JSON header, raw little-endian
// data).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/files.h"

namespace hybridcp {

/// One file, open for reading: only what is asked for is read.
class SafetensorsFile {
  public:
    /// Errors: FormatError naming the file when it is missing, truncated, or its header is not
    /// valid.
    explicit SafetensorsFile(std::string path);

    struct Entry {
        at::ScalarType dtype = at::kFloat;
        std::vector<std::int64_t> shape;
        std::uint64_t begin = 0;  // bytes from the start of the data
        std::uint64_t end = 0;
    };
    [[nodiscard]] const std::string& path() const { return file_.path(); }
    [[nodiscard]] std::uint64_t size_bytes() const { return file_.size_bytes(); }
    /// Bytes before the data.
    [[nodiscard]] std::uint64_t header_bytes() const { return data_offset_; }
    [[nodiscard]] const std::map<std::string, Entry>& entries() const { return entries_; }
    [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }
    [[nodiscard]] bool contains(const std::string& name) const { return entries_.count(name) != 0; }
    /// A copy in the stored dtype. Errors: FormatError naming file and tensor.
    [[nodiscard]] at::Tensor read(const std::string& name) const;
    /// Elements [begin, begin + n) of a tensor in its flat order, converted into `into` [n] (any
    /// floating-point dtype and device), a few MiB at a time. Errors: as read.
    void read_run(const std::string& name, std::int64_t begin, const at::Tensor& into) const;
    /// XXH64 of a tensor's bytes. Errors: as read.
    [[nodiscard]] std::uint64_t checksum(const std::string& name) const;

  private:
    [[nodiscard]] const Entry& entry(const std::string& name) const;
    void parse_header();
    void check_ranges() const;

    InputFile file_;
    std::map<std::string, Entry> entries_;
    std::map<std::string, std::string> metadata_;
    std::uint64_t data_offset_ = 0;
};

/// What a file has been written with. Each byte is in the header or in one tensor.
struct SafetensorsSums {
    std::uint64_t size_bytes = 0;
    std::uint64_t header_bytes = 0;
    std::uint64_t header_xxh64 = 0;
    std::map<std::string, std::uint64_t> tensor_xxh64 = {};
};

struct TensorOutline {
    std::string name;
    at::ScalarType dtype = at::kFloat;
    std::vector<std::int64_t> shape = {};
};

/// Writes tensors (fp64, fp32, bf16, fp16, int64, int32, uint8, bool) to `path`, which is complete
/// or absent (core/files.h). `value_of(i)` gives the i-th one (any device, of the outline's dtype
/// and shape) when its turn comes, each once, those of larger elements first. Errors: FormatError
/// naming the path and the system's reason.
SafetensorsSums write_safetensors(const std::string& path,
                                  const std::vector<TensorOutline>& tensors,
                                  const std::function<at::Tensor(std::size_t)>& value_of,
                                  const std::map<std::string, std::string>& metadata = {});
/// The same from tensors that are there already.
SafetensorsSums write_safetensors(const std::string& path,
                                  const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                                  const std::map<std::string, std::string>& metadata = {});

}  // namespace hybridcp

#include "model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/files.h"
#include "hybridcp/error.h"

namespace hybridcp {

namespace {

struct DtypeName {
    const char* name;
    at::ScalarType dtype;
};
constexpr std::array<DtypeName, 8> kDtypeNames{{{"F64", at::kDouble},
                                                {"F32", at::kFloat},
                                                {"BF16", at::kBFloat16},
                                                {"F16", at::kHalf},
                                                {"I64", at::kLong},
                                                {"I32", at::kInt},
                                                {"U8", at::kByte},
                                                {"BOOL", at::kBool}}};

at::ScalarType dtype_from_name(const std::string& name, const std::string& where) {
    for (const DtypeName& entry : kDtypeNames) {
        if (name == entry.name) {
            return entry.dtype;
        }
    }
    throw FormatError(fmt::format("{}: dtype {} is not supported (F64, F32, BF16, F16, I64, I32, U8 and BOOL are)",
                                  where, name));
}

std::string dtype_name(at::ScalarType dtype) {
    for (const DtypeName& entry : kDtypeNames) {
        if (dtype == entry.dtype) {
            return entry.name;
        }
    }
    throw FormatError(fmt::format("safetensors cannot hold dtype {}", at::toString(dtype)));
}

std::uint64_t size_bytes_of(const SafetensorsFile::Entry& entry) {
    std::uint64_t size_bytes = at::elementSize(entry.dtype);
    for (const std::int64_t extent : entry.shape) {
        size_bytes *= static_cast<std::uint64_t>(extent);
    }
    return size_bytes;
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)) {
    const int descriptor = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status {};
    if (descriptor < 0 || ::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
        const std::string reason = descriptor < 0 ? std::strerror(errno) : "not a regular file";
        if (descriptor >= 0) {
            ::close(descriptor);
        }
        throw FormatError(fmt::format("cannot read {}: {}", path_, reason));
    }
    size_bytes_ = static_cast<std::uint64_t>(status.st_size);
    void* mapped = size_bytes_ == 0 ? MAP_FAILED : ::mmap(nullptr, size_bytes_, PROT_READ, MAP_PRIVATE, descriptor, 0);
    ::close(descriptor);
    if (mapped == MAP_FAILED) {
        throw FormatError(fmt::format("{}: an empty file is not safetensors", path_));
    }
    bytes_ = static_cast<const std::uint8_t*>(mapped);
    try {
        parse_header();
    } catch (const nlohmann::json::exception& error) {
        ::munmap(mapped, size_bytes_);
        throw FormatError(fmt::format("{}: the header is not valid JSON ({})", path_, error.what()));
    } catch (...) {
        ::munmap(mapped, size_bytes_);
        throw;
    }
}

void SafetensorsFile::parse_header() {
    std::uint64_t header_bytes = 0;
    if (size_bytes_ >= sizeof header_bytes) {
        std::memcpy(&header_bytes, bytes_, sizeof header_bytes);
    }
    if (size_bytes_ < sizeof header_bytes || header_bytes > size_bytes_ - sizeof header_bytes) {
        throw FormatError(fmt::format("{}: truncated, or not a safetensors file: the header needs {} bytes, the file has {}",
                                      path_, header_bytes, size_bytes_));
    }
    data_offset_ = sizeof header_bytes + header_bytes;
    const char* text = reinterpret_cast<const char*>(bytes_) + sizeof header_bytes;
    const nlohmann::json header = nlohmann::json::parse(text, text + header_bytes);
    for (const auto& [name, value] : header.items()) {
        if (name == "__metadata__") {
            metadata_ = value.get<std::map<std::string, std::string>>();
            continue;
        }
        const std::string where = fmt::format("{}: tensor {}", path_, name);
        Entry entry{dtype_from_name(value.at("dtype").get<std::string>(), where),
                    value.at("shape").get<std::vector<std::int64_t>>(),
                    value.at("data_offsets").at(0).get<std::uint64_t>(),
                    value.at("data_offsets").at(1).get<std::uint64_t>()};
        if (entry.end < entry.begin || entry.end - entry.begin != size_bytes_of(entry)) {
            throw FormatError(fmt::format("{}: its data range of {} bytes does not fit its shape and dtype ({} bytes)",
                                          where, entry.end - entry.begin, size_bytes_of(entry)));
        }
        if (entry.end > size_bytes_ - data_offset_) {
            throw FormatError(fmt::format("{}: the file is truncated: the data ends at byte {}, the file has {}", where,
                                          data_offset_ + entry.end, size_bytes_));
        }
        entries_.emplace(name, std::move(entry));
    }
}

SafetensorsFile::~SafetensorsFile() { ::munmap(const_cast<std::uint8_t*>(bytes_), size_bytes_); }

at::Tensor SafetensorsFile::read(const std::string& name) const {
    const auto found = entries_.find(name);
    if (found == entries_.end()) {
        throw FormatError(fmt::format("{}: has no tensor {}", path_, name));
    }
    const Entry& entry = found->second;
    at::Tensor tensor = at::empty(entry.shape, at::TensorOptions().dtype(entry.dtype));
    if (entry.end > entry.begin) {
        std::memcpy(tensor.data_ptr(), bytes_ + data_offset_ + entry.begin, entry.end - entry.begin);
    }
    return tensor;
}

void write_safetensors(const std::string& path,
                       const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata) {
    nlohmann::json header = nlohmann::json::object();
    if (!metadata.empty()) {
        header["__metadata__"] = metadata;
    }
    std::uint64_t offset = 0;
    for (const auto& [name, tensor] : tensors) {
        const std::uint64_t size_bytes = tensor.nbytes();
        header[name] = {{"dtype", dtype_name(tensor.scalar_type())},
                        {"shape", tensor.sizes().vec()},
                        {"data_offsets", {offset, offset + size_bytes}}};
        offset += size_bytes;
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');  // the data starts on 8 bytes
    const std::uint64_t header_bytes = text.size();
    AtomicFile file(path);
    file.write(&header_bytes, sizeof header_bytes);
    file.write(text.data(), text.size());
    for (const auto& [name, tensor] : tensors) {
        const at::Tensor host = tensor.detach().to(at::kCPU).contiguous();
        file.write(host.data_ptr(), host.nbytes());
    }
    file.commit();
}

}  // namespace hybridcp

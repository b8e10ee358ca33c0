#include "model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
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

constexpr std::uint64_t kLargestHeaderBytes = 100'000'000;  // the format's own limit

at::ScalarType dtype_from_name(const std::string& name, const std::string& where) {
    for (const DtypeName& entry : kDtypeNames) {
        if (name == entry.name) {
            return entry.dtype;
        }
    }
    throw FormatError(fmt::format(
        "{}: dtype {} is not supported (F64, F32, BF16, F16, I64, I32, U8 and BOOL are)", where,
        name));
}

std::string dtype_name(at::ScalarType dtype) {
    for (const DtypeName& entry : kDtypeNames) {
        if (dtype == entry.dtype) {
            return entry.name;
        }
    }
    throw FormatError(fmt::format("safetensors cannot hold dtype {}", at::toString(dtype)));
}

using Json = nlohmann::json;
using Entry = SafetensorsFile::Entry;

// Extents of zero count as one, so that no stride of an empty tensor overflows either.
std::uint64_t checked_size_bytes(const Entry& entry, const std::string& where) {
    std::uint64_t size_bytes = at::elementSize(entry.dtype);
    bool empty = false;
    for (const std::int64_t extent : entry.shape) {
        empty = empty || extent == 0;
        if (__builtin_mul_overflow(size_bytes,
                                   static_cast<std::uint64_t>(std::max<std::int64_t>(extent, 1)),
                                   &size_bytes) ||
            size_bytes > std::numeric_limits<std::int64_t>::max()) {
            throw FormatError(
                fmt::format("{}: shape [{}] is too large", where, fmt::join(entry.shape, ", ")));
        }
    }
    return empty ? 0 : size_bytes;
}

// nlohmann converts negative and fractional numbers without a word.
std::uint64_t checked_unsigned(const Json& value, const char* key, const std::string& where) {
    if (!value.is_number_unsigned() ||
        value.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max()) {
        throw FormatError(
            fmt::format("{}: {} holds a value that is not an integer >= 0", where, key));
    }
    return value.get<std::uint64_t>();
}

Entry parse_entry(const Json& value, const std::string& where) {
    Entry entry;
    entry.dtype = dtype_from_name(value.at("dtype").get<std::string>(), where);
    const Json& shape = value.at("shape");
    const Json& offsets = value.at("data_offsets");
    if (!shape.is_array() || !offsets.is_array() || offsets.size() != 2) {
        throw FormatError(fmt::format("{}: needs a list 'shape' and two 'data_offsets'", where));
    }
    for (const Json& extent : shape) {
        entry.shape.push_back(static_cast<std::int64_t>(checked_unsigned(extent, "shape", where)));
    }
    entry.begin = checked_unsigned(offsets[0], "data_offsets", where);
    entry.end = checked_unsigned(offsets[1], "data_offsets", where);
    const std::uint64_t size_bytes = checked_size_bytes(entry, where);
    if (entry.end < entry.begin || entry.end - entry.begin != size_bytes) {
        throw FormatError(
            fmt::format("{}: its data range [{}, {}) does not fit its shape and dtype ({} bytes)",
                        where, entry.begin, entry.end, size_bytes));
    }
    return entry;
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)) {
    const int descriptor = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status{};
    if (descriptor < 0 || ::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
        const std::string reason = descriptor < 0 ? std::strerror(errno) : "not a regular file";
        if (descriptor >= 0) {
            ::close(descriptor);
        }
        throw FormatError(fmt::format("cannot read {}: {}", path_, reason));
    }
    size_bytes_ = static_cast<std::uint64_t>(status.st_size);
    void* mapped = size_bytes_ == 0
                       ? MAP_FAILED
                       : ::mmap(nullptr, size_bytes_, PROT_READ, MAP_PRIVATE, descriptor, 0);
    ::close(descriptor);
    if (mapped == MAP_FAILED) {
        throw FormatError(fmt::format("{}: an empty file is not safetensors", path_));
    }
    bytes_ = static_cast<const std::uint8_t*>(mapped);
    try {
        parse_header();
    } catch (const Json::exception& error) {
        ::munmap(mapped, size_bytes_);
        throw FormatError(
            fmt::format("{}: the header is not valid JSON ({})", path_, error.what()));
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
    if (size_bytes_ < sizeof header_bytes || header_bytes > size_bytes_ - sizeof header_bytes ||
        header_bytes > kLargestHeaderBytes) {
        throw FormatError(fmt::format(
            "{}: truncated, or not a safetensors file: the header needs {} bytes, the file has {}",
            path_, header_bytes, size_bytes_));
    }
    data_offset_ = sizeof header_bytes + header_bytes;
    const char* text = reinterpret_cast<const char*>(bytes_) + sizeof header_bytes;
    const Json header = Json::parse(text, text + header_bytes);
    if (!header.is_object()) {
        throw FormatError(fmt::format("{}: the header must be a JSON object", path_));
    }
    for (const auto& [name, value] : header.items()) {
        if (name == "__metadata__") {
            metadata_ = value.get<std::map<std::string, std::string>>();
        } else {
            entries_.emplace(name, parse_entry(value, fmt::format("{}: tensor {}", path_, name)));
        }
    }
    check_ranges();
}

// The format wants the data covered exactly: a gap, an overlap or a rest means a damaged header or
// file.
void SafetensorsFile::check_ranges() const {
    std::vector<std::pair<const Entry*, const std::string*>> ordered;
    for (const auto& [name, entry] : entries_) {
        ordered.emplace_back(&entry, &name);
    }
    std::sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) {
        return std::pair(a.first->begin, a.first->end) < std::pair(b.first->begin, b.first->end);
    });
    const std::uint64_t data_bytes = size_bytes_ - data_offset_;
    std::uint64_t covered_bytes = 0;
    for (const auto& [entry, name] : ordered) {
        if (entry->end > data_bytes) {
            throw FormatError(
                fmt::format("{}: truncated: tensor {} ends at byte {}, the file has {}", path_,
                            *name, data_offset_ + entry->end, size_bytes_));
        }
        if (entry->begin != covered_bytes) {
            throw FormatError(
                fmt::format("{}: tensor {} {} (its data begins at {}, {} expected)", path_, *name,
                            entry->begin < covered_bytes ? "overlaps another" : "leaves a gap",
                            entry->begin, covered_bytes));
        }
        covered_bytes = entry->end;
    }
    if (covered_bytes != data_bytes) {
        throw FormatError(
            fmt::format("{}: {} bytes after the last tensor", path_, data_bytes - covered_bytes));
    }
}

SafetensorsFile::~SafetensorsFile() {
    ::munmap(const_cast<std::uint8_t*>(bytes_), size_bytes_);
}

at::Tensor SafetensorsFile::read(const std::string& name) const {
    const auto found = entries_.find(name);
    if (found == entries_.end()) {
        throw FormatError(fmt::format("{}: has no tensor {}", path_, name));
    }
    const Entry& entry = found->second;
    at::Tensor tensor = at::empty(entry.shape, at::TensorOptions().dtype(entry.dtype));
    if (entry.end > entry.begin) {
        std::memcpy(tensor.data_ptr(), bytes_ + data_offset_ + entry.begin,
                    entry.end - entry.begin);
    }
    return tensor;
}

void write_safetensors(const std::string& path,
                       const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata) {
    // Larger elements first: then every tensor is aligned, as readers that map the file like it.
    std::vector<const std::pair<std::string, at::Tensor>*> ordered;
    for (const auto& named : tensors) {
        ordered.push_back(&named);
    }
    std::stable_sort(ordered.begin(), ordered.end(), [](const auto* a, const auto* b) {
        return a->second.element_size() > b->second.element_size();
    });
    Json header = Json::object();
    if (!metadata.empty()) {
        header["__metadata__"] = metadata;
    }
    std::uint64_t offset = 0;
    for (const auto* named : ordered) {
        const auto& [name, tensor] = *named;
        if (name == "__metadata__" || header.contains(name)) {
            throw FormatError(fmt::format(
                "cannot write {}: tensor name {} is reserved or used twice", path, name));
        }
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
    for (const auto* named : ordered) {
        const at::Tensor host = named->second.detach().to(at::kCPU).contiguous();
        file.write(host.data_ptr(), host.nbytes());
    }
    file.commit();
}

}  // namespace hybridcp

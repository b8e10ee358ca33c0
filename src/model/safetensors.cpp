#include "model/safetensors.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/checksum.h"
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

constexpr std::uint64_t kLargestHeaderBytes = 100'000'000;      // the format's own limit
constexpr std::int64_t kPieceElements = std::int64_t{1} << 20;  // of a run that is read

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

SafetensorsFile::SafetensorsFile(std::string path) : file_(std::move(path)) {
    if (size_bytes() == 0) {
        throw FormatError(fmt::format("{}: an empty file is not safetensors", file_.path()));
    }
    try {
        parse_header();
    } catch (const Json::exception& error) {
        throw FormatError(
            fmt::format("{}: the header is not valid JSON ({})", file_.path(), error.what()));
    }
}

void SafetensorsFile::parse_header() {
    std::uint64_t text_bytes = 0;
    const bool has_length = size_bytes() >= sizeof text_bytes;
    if (has_length) {
        file_.read(0, &text_bytes, sizeof text_bytes);
    }
    if (!has_length || text_bytes > size_bytes() - sizeof text_bytes ||
        text_bytes > kLargestHeaderBytes) {
        throw FormatError(fmt::format(
            "{}: truncated, or not a safetensors file: the header needs {} bytes, the file has {}",
            path(), text_bytes, size_bytes()));
    }
    data_offset_ = sizeof text_bytes + text_bytes;
    std::string text(static_cast<std::size_t>(text_bytes), '\0');
    file_.read(sizeof text_bytes, text.data(), text.size());
    const Json header = Json::parse(text);
    if (!header.is_object()) {
        throw FormatError(fmt::format("{}: the header must be a JSON object", path()));
    }
    for (const auto& [name, value] : header.items()) {
        if (name == "__metadata__") {
            metadata_ = value.get<std::map<std::string, std::string>>();
        } else {
            entries_.emplace(name, parse_entry(value, fmt::format("{}: tensor {}", path(), name)));
        }
    }
    check_ranges();
}

void SafetensorsFile::check_ranges() const {
    std::vector<std::pair<const Entry*, const std::string*>> ordered;
    for (const auto& [name, entry] : entries_) {
        ordered.emplace_back(&entry, &name);
    }
    std::sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) {
        return std::pair(a.first->begin, a.first->end) < std::pair(b.first->begin, b.first->end);
    });
    const std::uint64_t data_bytes = size_bytes() - data_offset_;
    std::uint64_t covered_bytes = 0;
    for (const auto& [entry, name] : ordered) {
        if (entry->end > data_bytes) {
            throw FormatError(
                fmt::format("{}: truncated: tensor {} ends at byte {}, the file has {}", path(),
                            *name, data_offset_ + entry->end, size_bytes()));
        }
        if (entry->begin != covered_bytes) {
            throw FormatError(
                fmt::format("{}: tensor {} {} (its data begins at {}, {} expected)", path(), *name,
                            entry->begin < covered_bytes ? "overlaps another" : "leaves a gap",
                            entry->begin, covered_bytes));
        }
        covered_bytes = entry->end;
    }
    if (covered_bytes != data_bytes) {
        throw FormatError(
            fmt::format("{}: {} bytes after the last tensor", path(), data_bytes - covered_bytes));
    }
}

const Entry& SafetensorsFile::entry(const std::string& name) const {
    const auto found = entries_.find(name);
    if (found == entries_.end()) {
        throw FormatError(fmt::format("{}: has no tensor {}", path(), name));
    }
    return found->second;
}

at::Tensor SafetensorsFile::read(const std::string& name) const {
    const Entry& stored = entry(name);
    at::Tensor tensor = at::empty(stored.shape, at::TensorOptions().dtype(stored.dtype));
    file_.read(data_offset_ + stored.begin, tensor.data_ptr(), stored.end - stored.begin);
    return tensor;
}

void SafetensorsFile::read_run(const std::string& name,
                               std::int64_t begin,
                               const at::Tensor& into) const {
    const Entry& stored = entry(name);
    const auto element_bytes = static_cast<std::int64_t>(at::elementSize(stored.dtype));
    const auto stored_count = static_cast<std::int64_t>(stored.end - stored.begin) / element_bytes;
    HCP_CHECK(begin >= 0 && into.dim() == 1 && begin <= stored_count - into.numel(),
              "{}: elements {} to {} of {} ({} stored)", path(), begin, begin + into.numel(), name,
              stored_count);
    const auto first =
        data_offset_ + stored.begin + static_cast<std::uint64_t>(begin * element_bytes);
    if (into.scalar_type() == stored.dtype && into.device().is_cpu() && into.is_contiguous()) {
        file_.read(first, into.data_ptr(), into.nbytes());
        return;
    }
    const at::NoGradGuard no_grad;
    const std::int64_t piece = std::min(into.numel(), kPieceElements);
    const at::Tensor buffer = at::empty({piece}, at::TensorOptions().dtype(stored.dtype));
    for (std::int64_t done = 0; done < into.numel(); done += piece) {
        const std::int64_t count = std::min(piece, into.numel() - done);
        file_.read(first + static_cast<std::uint64_t>(done * element_bytes), buffer.data_ptr(),
                   static_cast<std::size_t>(count * element_bytes));
        into.narrow(0, done, count).copy_(buffer.narrow(0, 0, count));
    }
}

std::uint64_t SafetensorsFile::checksum(const std::string& name) const {
    const Entry& stored = entry(name);
    return file_.checksum(data_offset_ + stored.begin, stored.end - stored.begin);
}

namespace {

std::string make_header(const std::string& path,
                        const std::vector<TensorOutline>& tensors,
                        const std::vector<std::size_t>& order,
                        const std::map<std::string, std::string>& metadata) {
    Json header = Json::object();
    if (!metadata.empty()) {
        header["__metadata__"] = metadata;
    }
    std::uint64_t offset = 0;
    for (const std::size_t i : order) {
        const auto& [name, dtype, shape] = tensors[i];
        if (name == "__metadata__" || header.contains(name)) {
            throw FormatError(fmt::format(
                "cannot write {}: tensor name {} is reserved or used twice", path, name));
        }
        const auto count =
            std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
        const std::uint64_t end =
            offset + static_cast<std::uint64_t>(count) * at::elementSize(dtype);
        header[name] = {
            {"dtype", dtype_name(dtype)}, {"shape", shape}, {"data_offsets", {offset, end}}};
        offset = end;
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');  // the data starts on 8 bytes
    const std::uint64_t text_bytes = text.size();
    return std::string(reinterpret_cast<const char*>(&text_bytes), sizeof text_bytes) + text;
}

}  // namespace

SafetensorsSums write_safetensors(const std::string& path,
                                  const std::vector<TensorOutline>& tensors,
                                  const std::function<at::Tensor(std::size_t)>& value_of,
                                  const std::map<std::string, std::string>& metadata) {
    // Larger elements first: then every tensor is aligned, as readers that map the file like it.
    std::vector<std::size_t> order(tensors.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return at::elementSize(tensors[a].dtype) > at::elementSize(tensors[b].dtype);
    });
    const std::string header = make_header(path, tensors, order, metadata);
    SafetensorsSums sums{.size_bytes = header.size(),
                         .header_bytes = header.size(),
                         .header_xxh64 = xxh64(header.data(), header.size())};
    AtomicFile file(path);
    file.write(header.data(), header.size());
    for (const std::size_t i : order) {
        const at::Tensor host = value_of(i).detach().to(at::kCPU).contiguous();
        HCP_CHECK(host.scalar_type() == tensors[i].dtype &&
                      host.sizes() == at::IntArrayRef(tensors[i].shape),
                  "{}: tensor {} differs from its outline", path, tensors[i].name);
        file.write(host.data_ptr(), host.nbytes());
        sums.tensor_xxh64[tensors[i].name] = xxh64(host.data_ptr(), host.nbytes());
        sums.size_bytes += host.nbytes();
    }
    file.commit();
    return sums;
}

SafetensorsSums write_safetensors(const std::string& path,
                                  const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                                  const std::map<std::string, std::string>& metadata) {
    std::vector<TensorOutline> outlines;
    outlines.reserve(tensors.size());
    for (const auto& [name, value] : tensors) {
        outlines.push_back({name, value.scalar_type(), value.sizes().vec()});
    }
    return write_safetensors(
        path, outlines, [&](std::size_t i) { return tensors[i].second; }, metadata);
}

}  // namespace hybridcp

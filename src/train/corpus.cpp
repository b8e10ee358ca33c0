#include "train/corpus.h"

#include <fcntl.h>
#include <glob.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include "core/files.h"
#include "hybridcp/error.h"

namespace hybridcp {

namespace {

/// Files that a pattern names, sorted by name, so that every rank and every run has the same order.
std::vector<std::string> matching_files(const std::string& pattern) {
    std::error_code none;
    if (std::filesystem::is_regular_file(pattern, none)) {
        return {pattern};  // its name may hold characters of patterns
    }
    std::vector<std::string> paths;
    glob_t found{};
    if (::glob(pattern.c_str(), 0, nullptr, &found) == 0) {
        paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    }
    ::globfree(&found);
    std::erase_if(paths,
                  [](const std::string& path) { return std::filesystem::is_directory(path); });
    std::sort(paths.begin(), paths.end());
    return paths;
}

std::int64_t file_size_bytes(const std::string& path) {
    std::error_code error;
    const auto size = std::filesystem::file_size(path, error);
    if (error) {
        throw FormatError(fmt::format("cannot read {}: {}", path, error.message()));
    }
    return static_cast<std::int64_t>(size);
}

void read_range(const std::string& path,
                std::int64_t offset_bytes,
                char* into,
                std::int64_t size_bytes) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    ssize_t count = descriptor < 0 ? -1 : 1;
    while (size_bytes > 0 && count > 0) {
        count = ::pread(descriptor, into, static_cast<std::size_t>(size_bytes), offset_bytes);
        if (count < 0 && errno == EINTR) {
            count = 1;
            continue;
        }
        into += std::max<ssize_t>(count, 0);
        offset_bytes += std::max<ssize_t>(count, 0);
        size_bytes -= std::max<ssize_t>(count, 0);
    }
    const int reason = errno;
    if (descriptor >= 0) {
        ::close(descriptor);
    }
    if (count < 0) {
        throw FormatError(fmt::format("cannot read {}: {}", path, std::strerror(reason)));
    }
    if (size_bytes > 0) {
        throw FormatError(fmt::format("{} is shorter than it was when the run started", path));
    }
}

std::string text_of_line(const std::string& line, const std::string& where) {
    const nlohmann::json value = nlohmann::json::parse(line, nullptr, false);
    if (value.is_discarded()) {
        throw FormatError(fmt::format("{}: not valid JSON", where));
    }
    if (!value.is_object() || !value.contains("text") || !value["text"].is_string()) {
        throw FormatError(fmt::format("{}: no field \"text\" with a string", where));
    }
    return value["text"].get<std::string>();
}
}  // namespace

Corpus::Corpus(const std::vector<std::string>& patterns, const std::string& key) {
    if (patterns.empty()) {
        throw UsageError(
            fmt::format("{} is empty: name at least one text, .jsonl or .bin file", key));
    }
    for (const std::string& pattern : patterns) {
        const std::vector<std::string> paths = matching_files(pattern);
        if (paths.empty()) {
            throw UsageError(fmt::format("{}: no file matches '{}' (of a folder, write folder/*)",
                                         key, pattern));
        }
        for (const std::string& path : paths) {
            add_file(path);
        }
    }
    const auto is_token_file = [](const File& file) {
        return file.kind == Kind::kTokens16 || file.kind == Kind::kTokens32;
    };
    const auto num_token_files = std::count_if(files_.begin(), files_.end(), is_token_file);
    if (num_token_files != 0 && num_token_files != static_cast<std::int64_t>(files_.size())) {
        throw UsageError(fmt::format("{}: text and token files together; use one kind", key));
    }
    is_bytes_ = num_token_files == 0;
    vocab_size_ = is_bytes_ ? kByteVocabulary : vocab_size_;
    for (const Document& document : documents_) {
        offsets_.push_back(offsets_.back() + document.num_tokens);
    }
    const auto num_ends = is_bytes_ ? static_cast<std::int64_t>(documents_.size()) : 0;
    if (num_tokens() <= num_ends) {
        throw UsageError(fmt::format("{}: the files hold no token", key));
    }
}

void Corpus::add_file(const std::string& path) {
    const std::size_t file = files_.size();
    const std::string extension = std::filesystem::path(path).extension().string();
    if (extension == ".jsonl") {
        files_.push_back({path, Kind::kJsonLines});
        add_json_lines(file);
    } else if (extension == ".bin") {
        files_.push_back({path, Kind::kTokens16});
        add_tokens(file);
    } else {
        const std::int64_t size_bytes = file_size_bytes(path);
        files_.push_back({path, Kind::kText});
        documents_.push_back({file, 0, size_bytes, size_bytes + 1});
    }
}

void Corpus::add_json_lines(std::size_t file) {
    const std::string& path = files_[file].path;
    std::ifstream stream(path, std::ios::binary);
    if (!stream) {
        throw FormatError(fmt::format("cannot read {}: {}", path, std::strerror(errno)));
    }
    std::string line;
    std::int64_t offset_bytes = 0;
    for (std::int64_t number = 1; std::getline(stream, line); ++number) {
        const auto size_bytes = static_cast<std::int64_t>(line.size());
        if (line.find_first_not_of(" \t\r") != std::string::npos) {
            const std::string text = text_of_line(line, fmt::format("{}:{}", path, number));
            documents_.push_back(
                {file, offset_bytes, size_bytes, static_cast<std::int64_t>(text.size()) + 1});
        }
        offset_bytes += size_bytes + 1;
    }
}

void Corpus::add_tokens(std::size_t file) {
    const std::string& path = files_[file].path;
    const std::string side_path = std::filesystem::path(path).replace_extension(".json").string();
    const nlohmann::json side = nlohmann::json::parse(read_file(side_path), nullptr, false);
    if (!side.is_object() || !side.contains("dtype") ||
        (side["dtype"] != "uint16" && side["dtype"] != "uint32")) {
        throw FormatError(
            fmt::format("{}: must be JSON with \"dtype\": \"uint16\" or \"uint32\"", side_path));
    }
    const bool is_wide = side["dtype"] == "uint32";
    const std::int64_t width_bytes = is_wide ? 4 : 2;
    files_[file].kind = is_wide ? Kind::kTokens32 : Kind::kTokens16;
    const std::int64_t size_bytes = file_size_bytes(path);
    if (size_bytes % width_bytes != 0) {
        throw FormatError(fmt::format("{}: {} bytes are not a whole number of {}-byte tokens", path,
                                      size_bytes, width_bytes));
    }
    const std::int64_t num_tokens = size_bytes / width_bytes;
    std::vector<std::int64_t> offsets{0, num_tokens};
    try {
        offsets = side.value("document_offsets", offsets);
        vocab_size_ = std::max(vocab_size_, side.value("vocab_size", std::int64_t{0}));
    } catch (const nlohmann::json::exception&) {
        throw FormatError(fmt::format(
            "{}: document_offsets must be a list of whole numbers, and vocab_size a whole number",
            side_path));
    }
    if (offsets.empty() || offsets.front() != 0 || offsets.back() != num_tokens ||
        !std::is_sorted(offsets.begin(), offsets.end())) {
        throw FormatError(
            fmt::format("{}: document_offsets must ascend from 0 to {}, the tokens of {}",
                        side_path, num_tokens, path));
    }
    for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
        const std::int64_t length = offsets[i + 1] - offsets[i];
        documents_.push_back({file, offsets[i] * width_bytes, length * width_bytes, length});
    }
}

std::string Corpus::read_text(const Document& document,
                              std::int64_t begin,
                              std::int64_t end) const {
    const File& file = files_[document.file];
    if (file.kind == Kind::kText) {
        std::string text(static_cast<std::size_t>(end - begin), '\0');
        read_range(file.path, begin, text.data(), end - begin);
        return text;
    }
    std::string line(static_cast<std::size_t>(document.size_bytes), '\0');
    read_range(file.path, document.offset_bytes, line.data(), document.size_bytes);
    const std::string text = text_of_line(line, file.path);
    if (static_cast<std::int64_t>(text.size()) + 1 != document.num_tokens) {
        throw FormatError(fmt::format("{} has changed since the run started", file.path));
    }
    return text.substr(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
}

void Corpus::read_tokens(const Document& document,
                         std::int64_t begin,
                         std::int64_t end,
                         std::vector<std::int64_t>& into) const {
    const File& file = files_[document.file];
    const std::int64_t width_bytes = file.kind == Kind::kTokens16 ? 2 : 4;
    std::string bytes(static_cast<std::size_t>((end - begin) * width_bytes), '\0');
    read_range(file.path, document.offset_bytes + begin * width_bytes, bytes.data(),
               (end - begin) * width_bytes);
    const auto width = static_cast<std::size_t>(width_bytes);
    for (std::size_t i = 0; i < bytes.size(); i += width) {
        std::int64_t token = 0;
        for (std::size_t byte = width; byte-- > 0;) {
            token = token << 8 | static_cast<unsigned char>(bytes[i + byte]);
        }
        if (vocab_size_ > 0 && token >= vocab_size_) {
            throw FormatError(fmt::format(
                "{}: token {} at {} is outside the vocabulary of {}", file.path, token,
                document.offset_bytes / width_bytes + begin + static_cast<std::int64_t>(i / width),
                vocab_size_));
        }
        into.push_back(token);
    }
}

void Corpus::read(std::int64_t document_idx,
                  std::int64_t begin,
                  std::int64_t end,
                  std::vector<std::int64_t>& into) const {
    const Document& document = documents_.at(static_cast<std::size_t>(document_idx));
    HCP_CHECK(0 <= begin && begin <= end && end <= document.num_tokens,
              "tokens [{}, {}) of a document of {}", begin, end, document.num_tokens);
    if (!is_bytes_) {
        read_tokens(document, begin, end, into);
        return;
    }
    const std::int64_t num_bytes = document.num_tokens - 1;
    if (begin < std::min(end, num_bytes)) {
        for (const char c : read_text(document, begin, std::min(end, num_bytes))) {
            into.push_back(static_cast<unsigned char>(c));
        }
    }
    if (begin < end && end == document.num_tokens) {
        into.push_back(kEndOfDocument);
    }
}

}  // namespace hybridcp

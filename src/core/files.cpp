#include "core/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "core/checksum.h"
#include "hybridcp/error.h"

namespace hybridcp {

namespace {
constexpr std::uint64_t kPieceBytes = std::uint64_t{1} << 20;  // of a file that is summed

std::string parent_folder(const std::string& path) {
    const std::filesystem::path parent = std::filesystem::path(path).parent_path();
    return parent.empty() ? "." : parent.string();
}
}  // namespace

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)), temporary_path_(fmt::format("{}.{}.tmp", path_, ::getpid())) {
    descriptor_ = ::open(temporary_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (descriptor_ < 0) {
        fail("create");
    }
}

AtomicFile::~AtomicFile() {
    if (descriptor_ >= 0) {
        ::close(descriptor_);
        ::unlink(temporary_path_.c_str());
    }
}

void AtomicFile::fail(const char* action) const {
    throw FormatError(fmt::format("cannot {} {}: {}", action, path_, std::strerror(errno)));
}

void AtomicFile::write(const void* data, std::size_t size_bytes) {
    const char* cursor = static_cast<const char*>(data);
    while (size_bytes > 0) {
        const ssize_t written = ::write(descriptor_, cursor, size_bytes);
        if (written < 0) {
            if (errno == EINTR) {
                continue;
            }
            fail("write");
        }
        cursor += written;
        size_bytes -= static_cast<std::size_t>(written);
    }
}

void AtomicFile::commit() {
    if (::fsync(descriptor_) != 0) {
        fail("sync");
    }
    if (::rename(temporary_path_.c_str(), path_.c_str()) != 0) {
        fail("rename into");
    }
    ::close(descriptor_);
    descriptor_ = -1;
    sync_folder(parent_folder(path_));
}

void write_file_atomically(const std::string& path, std::string_view content) {
    AtomicFile file(path);
    file.write(content.data(), content.size());
    file.commit();
}

std::string read_file(const std::string& path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    std::string content;
    std::vector<char> piece(std::size_t{1} << 16);
    ssize_t count = descriptor < 0 ? -1 : 1;
    while (count > 0) {
        do {
            count = ::read(descriptor, piece.data(), piece.size());
        } while (count < 0 && errno == EINTR);
        content.append(piece.data(), static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
    }
    const int reason = errno;
    if (descriptor >= 0) {
        ::close(descriptor);
    }
    if (count < 0) {  // a folder opens, but cannot be read
        throw FormatError(fmt::format("cannot read {}: {}", path, std::strerror(reason)));
    }
    return content;
}

bool path_exists(const std::string& path) {
    std::error_code error;
    const bool exists = std::filesystem::exists(path, error);
    if (error) {
        throw FormatError(fmt::format("cannot look at {}: {}", path, error.message()));
    }
    return exists;
}

void sync_folder(const std::string& folder) {
    const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool synced = descriptor >= 0 && ::fsync(descriptor) == 0;
    const int reason = errno;
    if (descriptor >= 0) {
        ::close(descriptor);
    }
    if (!synced && reason != EINVAL && reason != ENOTSUP) {
        throw FormatError(fmt::format("cannot sync {}: {}", folder, std::strerror(reason)));
    }
}

InputFile::InputFile(std::string path) : path_(std::move(path)) {
    // Opening a pipe that nobody writes would wait for ever; of files the flag changes nothing.
    descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status{};
    if (descriptor_ < 0 || ::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
        const std::string reason = descriptor_ < 0 ? std::strerror(errno) : "not a regular file";
        if (descriptor_ >= 0) {
            ::close(descriptor_);
        }
        throw FormatError(fmt::format("cannot read {}: {}", path_, reason));
    }
    size_bytes_ = static_cast<std::uint64_t>(status.st_size);
}

InputFile::~InputFile() {
    ::close(descriptor_);
}

void InputFile::read(std::uint64_t offset, void* into, std::size_t size_bytes) const {
    char* cursor = static_cast<char*>(into);
    while (size_bytes > 0) {
        const ssize_t count = ::pread(descriptor_, cursor, size_bytes, static_cast<off_t>(offset));
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count <= 0) {
            throw FormatError(
                fmt::format("cannot read {} at byte {}: {}", path_, offset,
                            count == 0 ? "the file ends there" : std::strerror(errno)));
        }
        cursor += count;
        offset += static_cast<std::uint64_t>(count);
        size_bytes -= static_cast<std::size_t>(count);
    }
}

std::uint64_t InputFile::checksum(std::uint64_t offset, std::uint64_t size_bytes) const {
    std::vector<char> buffer(static_cast<std::size_t>(std::min(size_bytes, kPieceBytes)));
    Xxh64 sum;
    while (size_bytes > 0) {
        const auto count = static_cast<std::size_t>(std::min(size_bytes, kPieceBytes));
        read(offset, buffer.data(), count);
        sum.update(buffer.data(), count);
        offset += count;
        size_bytes -= count;
    }
    return sum.digest();
}

}  // namespace hybridcp

#include "core/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "hybridcp/error.h"

namespace hybridcp {

namespace {
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
    std::ifstream stream(path, std::ios::binary);
    if (!stream) {
        throw FormatError(fmt::format("cannot read {}: {}", path, std::strerror(errno)));
    }
    std::ostringstream content;
    content << stream.rdbuf();
    return content.str();
}

void sync_folder(const std::string& folder) {
    const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor >= 0) {
        ::fsync(descriptor);
        ::close(descriptor);
    }
}

}  // namespace hybridcp

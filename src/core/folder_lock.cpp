#include "core/folder_lock.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "hybridcp/error.h"

namespace hybridcp {

namespace {

std::string describe_this_process() {
    std::array<char, 256> host{};
    (void)::gethostname(host.data(), host.size() - 1);
    return fmt::format("process {} on {}, started {:%Y-%m-%d %H:%M:%S} UTC", ::getpid(),
                       host.data(), fmt::gmtime(std::time(nullptr)));
}

std::string read_start(int descriptor) {
    std::array<char, 512> text{};
    const ssize_t count = ::pread(descriptor, text.data(), text.size(), 0);
    return {text.data(), static_cast<std::size_t>(count > 0 ? count : 0)};
}

}  // namespace

// The file stays when the lock goes: were it removed, two processes could lock two files of its
// name.
FolderLock::FolderLock(const std::string& folder, const std::string& name) {
    const std::string path = folder + "/" + name;
    descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (descriptor_ < 0) {
        throw FormatError(fmt::format("cannot create {}: {}", path, std::strerror(errno)));
    }
    if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
        const int reason = errno;
        const std::string holder = read_start(descriptor_);
        ::close(descriptor_);
        if (reason != EWOULDBLOCK) {
            throw FormatError(
                fmt::format("cannot lock {}: {}: use a folder on a file system with "
                            "locks (for Lustre: mounted with -o flock)",
                            path, std::strerror(reason)));
        }
        throw UsageError(
            fmt::format("{} is in use by another run ({}): wait for it, stop it, or "
                        "use another folder",
                        folder, holder.empty() ? "which has just begun" : holder));
    }
    const std::string holder = describe_this_process();
    if (::ftruncate(descriptor_, 0) != 0 || ::pwrite(descriptor_, holder.data(), holder.size(),
                                                     0) != static_cast<ssize_t>(holder.size())) {
        const int reason = errno;
        ::close(descriptor_);
        throw FormatError(fmt::format("cannot write {}: {}", path, std::strerror(reason)));
    }
}

FolderLock::~FolderLock() {
    (void)::ftruncate(descriptor_, 0);
    ::close(descriptor_);
}

}  // namespace hybridcp

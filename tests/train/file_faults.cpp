#include "train/file_faults.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

namespace hybridcp::testing {

namespace {

constexpr unsigned kPatienceSeconds = 60;

/// Shared by parent and child.
struct Shared {
    std::atomic<std::int64_t> count = 0;
    std::atomic<bool> named_unsynced = false;
    char error[4096] = {};
};

std::atomic<Shared*> armed = nullptr;
Fault armed_fault = Fault::kNone;
std::int64_t armed_target = 0;

// What a power loss could take: by descriptor, and the names that files have got.
std::array<std::atomic<bool>, 1024> written;
std::atomic<bool> name_given = false;

enum class Action { kPass, kFail, kFailHalfWay, kKillHalfWay };

/// What the next operation does, and errno when it fails.
Action next_action(bool needs_space) {
    Shared* shared = armed.load();
    if (shared == nullptr) {
        return Action::kPass;
    }
    const std::int64_t number = shared->count.fetch_add(1);
    const bool is_target = number == armed_target;
    switch (armed_fault) {
        case Fault::kKill:
            if (is_target) {
                kill(getpid(), SIGKILL);
            }
            return Action::kPass;
        case Fault::kKillHalfWay:
            return is_target ? Action::kKillHalfWay : Action::kPass;
        case Fault::kNoSpace:
            errno = ENOSPC;
            return number >= armed_target && needs_space
                       ? (is_target ? Action::kFailHalfWay : Action::kFail)
                       : Action::kPass;
        case Fault::kIoError:
            errno = EIO;
            return is_target ? Action::kFail : Action::kPass;
        case Fault::kNone:
            break;
    }
    return Action::kPass;
}

/// False: the operation has failed.
bool may_go_on(bool needs_space) {
    const Action action = next_action(needs_space);
    if (action == Action::kKillHalfWay) {
        kill(getpid(), SIGKILL);
    }
    return action == Action::kPass;
}

bool is_file(int descriptor) {
    struct stat status{};
    return fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
}

void note_synced(int descriptor) {
    if (is_file(descriptor)) {
        written.at(static_cast<std::size_t>(descriptor)) = false;
    } else {
        name_given = false;
    }
}

void note_named(const char* path) {
    struct stat status{};
    Shared* shared = armed.load();
    if (shared == nullptr || stat(path, &status) != 0) {
        return;
    }
    if (S_ISDIR(status.st_mode)) {
        const bool unsynced =
            name_given || std::any_of(written.begin(), written.end(),
                                      [](const auto& flag) { return flag.load(); });
        shared->named_unsynced = shared->named_unsynced || unsynced;
    }
    name_given = true;
}

template <typename Function>
Function* original(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

ChildResult run_with_fault(Fault fault, std::int64_t target, const std::function<void()>& work) {
    void* memory =
        mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    auto* shared = new (memory) Shared;
    const pid_t child = fork();
    if (child == 0) {
        alarm(kPatienceSeconds);
        armed_fault = fault;
        armed_target = target;
        armed = shared;
        try {
            work();
        } catch (const std::exception& error) {
            std::snprintf(shared->error, sizeof shared->error, "%s", error.what());
        }
        armed = nullptr;
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    ChildResult result{.was_killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL,
                       .error = shared->error,
                       .num_operations = shared->count,
                       .named_unsynced = shared->named_unsynced};
    if (!result.was_killed && (!WIFEXITED(status) || WEXITSTATUS(status) != 0)) {
        result.error = "the process ended by status " + std::to_string(status);
    }
    munmap(memory, sizeof(Shared));
    return result;
}

}  // namespace hybridcp::testing

using hybridcp::testing::Action;
using hybridcp::testing::is_file;
using hybridcp::testing::may_go_on;
using hybridcp::testing::next_action;
using hybridcp::testing::note_named;
using hybridcp::testing::note_synced;
using hybridcp::testing::original;
using hybridcp::testing::written;

extern "C" {

ssize_t write(int descriptor, const void* data, size_t size) {
    static auto* const call = original<ssize_t(int, const void*, size_t)>("write");
    if (!is_file(descriptor)) {
        return call(descriptor, data, size);
    }
    written.at(static_cast<std::size_t>(descriptor)) = true;
    const Action action = next_action(true);
    if (action == Action::kFailHalfWay || action == Action::kKillHalfWay) {
        const int reason = errno;
        (void)!call(descriptor, data, size / 2);
        errno = reason;
        if (action == Action::kKillHalfWay) {
            kill(getpid(), SIGKILL);
        }
    }
    return action == Action::kPass ? call(descriptor, data, size) : -1;
}

int open(const char* path, int flags, ...) {
    static auto* const call = original<int(const char*, int, ...)>("open");
    mode_t mode = 0;
    if ((flags & O_CREAT) != 0) {
        va_list arguments;
        va_start(arguments, flags);
        mode = va_arg(arguments, mode_t);
        va_end(arguments);
        if (!may_go_on(true)) {
            return -1;
        }
    }
    return call(path, flags, mode);
}

int fsync(int descriptor) {
    static auto* const call = original<int(int)>("fsync");
    if (!may_go_on(true)) {
        return -1;
    }
    note_synced(descriptor);
    return call(descriptor);
}

int rename(const char* from, const char* to) noexcept {
    static auto* const call = original<int(const char*, const char*)>("rename");
    if (!may_go_on(false)) {
        return -1;
    }
    note_named(from);
    return call(from, to);
}

int mkdir(const char* path, mode_t mode) noexcept {
    static auto* const call = original<int(const char*, mode_t)>("mkdir");
    return may_go_on(true) ? call(path, mode) : -1;
}

int unlink(const char* path) noexcept {
    static auto* const call = original<int(const char*)>("unlink");
    return may_go_on(false) ? call(path) : -1;
}

int unlinkat(int folder, const char* path, int flags) noexcept {
    static auto* const call = original<int(int, const char*, int)>("unlinkat");
    return may_go_on(false) ? call(folder, path, flags) : -1;
}

int remove(const char* path) noexcept {
    static auto* const call = original<int(const char*)>("remove");
    return may_go_on(false) ? call(path) : -1;
}
}

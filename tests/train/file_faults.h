// Faults of file operations, as the system would have them: this test program has its own open,
// write, fsync, rename, mkdir, unlink and the like in front of libc's, for all code in the process.
// They count, and at an operation that the test names they end the process or fail.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace hybridcp::testing {

enum class Fault {
    kNone,
    kKill,         // SIGKILL before the operation
    kKillHalfWay,  // after half of the bytes of a write; before any other operation
    kNoSpace,      // it and every later one that needs space fails, a write after half of its bytes
    kIoError,      // it fails, and no other
};

struct ChildResult {
    bool was_killed = false;
    std::string error = {};           // what it threw; empty for none
    std::int64_t num_operations = 0;  // that change files
    // A folder got its name while a file written before, or the folder of a file that got its name
    // before, was not synced: a power loss could show the name without what it promises.
    bool named_unsynced = false;
};

/// Runs `work` in a forked process with a fault at operation `target`. Call it where this process
/// has one thread.
ChildResult run_with_fault(Fault fault, std::int64_t target, const std::function<void()>& work);

}  // namespace hybridcp::testing

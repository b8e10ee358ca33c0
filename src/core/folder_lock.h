// One process at a time in a folder. The lock is the kernel's (flock) on a file of the folder: it
// ends with its process, however that dies, so a file that a dead run left behind locks nothing.
#pragma once

#include <string>

namespace hybridcp {

class FolderLock {
  public:
    /// Locks FOLDER/NAME, and writes host, process and time into it. Errors: UsageError naming who
    /// holds it; FormatError when the file cannot be written, or the file system has no locks.
    FolderLock(const std::string& folder, const std::string& name);
    ~FolderLock();
    FolderLock(const FolderLock&) = delete;
    FolderLock& operator=(const FolderLock&) = delete;

  private:
    int descriptor_ = -1;
};

}  // namespace hybridcp

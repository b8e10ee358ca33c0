// Files that are either complete or absent: written under a temporary name in the same folder,
// synced, renamed.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace hybridcp {

/// A file being written. commit() makes it appear under its name; without commit the temporary file
/// is removed. Errors: FormatError naming the path and the system's reason (no space, no
/// permission, no such folder).
class AtomicFile {
  public:
    explicit AtomicFile(std::string path);
    ~AtomicFile();
    AtomicFile(const AtomicFile&) = delete;
    AtomicFile& operator=(const AtomicFile&) = delete;
    void write(const void* data, std::size_t size_bytes);
    void commit();

  private:
    [[noreturn]] void fail(const char* action) const;
    std::string path_;
    std::string temporary_path_;
    int descriptor_ = -1;
};

void write_file_atomically(const std::string& path, std::string_view content);
/// Errors: FormatError naming the path and the system's reason.
[[nodiscard]] std::string read_file(const std::string& path);
/// Flushes a folder's entries to disk, so that a rename in it survives a crash.
void sync_folder(const std::string& folder);

}  // namespace hybridcp

// Files that are either complete or absent: written under a temporary name in the same folder,
// synced, renamed. Files are read by ranges, never mapped: mapped pages count as resident memory,
// and one that is cut short under a map ends the process.
#pragma once

#include <cstddef>
#include <cstdint>
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

/// An open file. Reading is safe from several threads.
class InputFile {
  public:
    /// Errors: FormatError naming the path and the system's reason.
    explicit InputFile(std::string path);
    ~InputFile();
    InputFile(const InputFile&) = delete;
    InputFile& operator=(const InputFile&) = delete;

    [[nodiscard]] const std::string& path() const { return path_; }
    [[nodiscard]] std::uint64_t size_bytes() const { return size_bytes_; }
    /// Bytes [offset, offset + size_bytes). Errors: FormatError when the file ends before, or
    /// cannot be read.
    void read(std::uint64_t offset, void* into, std::size_t size_bytes) const;
    /// XXH64 of these bytes, read in pieces. Errors: as read.
    [[nodiscard]] std::uint64_t checksum(std::uint64_t offset, std::uint64_t size_bytes) const;

  private:
    std::string path_;
    int descriptor_ = -1;
    std::uint64_t size_bytes_ = 0;
};

/// Errors: FormatError naming a path that cannot be looked at, which is not one that is absent.
[[nodiscard]] bool path_exists(const std::string& path);

void write_file_atomically(const std::string& path, std::string_view content);
/// Errors: FormatError naming the path and the system's reason.
[[nodiscard]] std::string read_file(const std::string& path);
/// Flushes a folder's entries to disk, so that a rename in it survives a crash. Errors: FormatError
/// naming the folder; a file system that cannot sync folders is none.
void sync_folder(const std::string& folder);

}  // namespace hybridcp

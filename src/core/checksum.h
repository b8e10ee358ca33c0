// XXH64, the 64-bit checksum of xxHash (seed 0): a thread sums several GB/s, so that a disk, not
// the checksum, sets the pace of a save.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace hybridcp {

class Xxh64 {
  public:
    Xxh64();
    ~Xxh64();
    Xxh64(const Xxh64&) = delete;
    Xxh64& operator=(const Xxh64&) = delete;

    void update(const void* data, std::size_t size_bytes);
    /// Of all bytes so far.
    [[nodiscard]] std::uint64_t digest() const;

  private:
    struct State;  // the library's
    std::unique_ptr<State> state_;
};

[[nodiscard]] std::uint64_t xxh64(const void* data, std::size_t size_bytes);
/// 16 hexadecimal digits, as xxhsum prints them.
[[nodiscard]] std::string checksum_text(std::uint64_t checksum);

}  // namespace hybridcp

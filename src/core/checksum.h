// XXH64, the 64-bit checksum of Collet's xxHash (seed 0): one rank's thread sums several GB/s, so
// that a disk, not the checksum, sets the pace of a save.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace hybridcp {

class Xxh64 {
  public:
    void update(const void* data, std::size_t size_bytes);
    /// Of all bytes so far.
    [[nodiscard]] std::uint64_t digest() const;

  private:
    static constexpr std::size_t kStripeBytes = 32;
    void take_stripe(const std::uint8_t* stripe);

    std::array<std::uint64_t, 4> lanes_{0x60EA27EEADC0B5D6ULL, 0xC2B2AE3D27D4EB4FULL, 0,
                                        0x61C8864E7A143579ULL};
    std::array<std::uint8_t, kStripeBytes> rest_{};  // bytes that do not fill a stripe yet
    std::size_t rest_bytes_ = 0;
    std::uint64_t size_bytes_ = 0;
};

[[nodiscard]] std::uint64_t xxh64(const void* data, std::size_t size_bytes);
/// 16 hexadecimal digits, as xxhsum prints them.
[[nodiscard]] std::string checksum_text(std::uint64_t checksum);

}  // namespace hybridcp

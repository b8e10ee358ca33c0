#include "core/checksum.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace hybridcp {

namespace {

static_assert(std::endian::native == std::endian::little, "XXH64 reads little-endian words");

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9ULL;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63ULL;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5ULL;

template <typename Word>
std::uint64_t load(const std::uint8_t* bytes) {
    Word word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

std::uint64_t mix(std::uint64_t lane, std::uint64_t word) {
    return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

}  // namespace

void Xxh64::take_stripe(const std::uint8_t* stripe) {
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
        lanes_[i] = mix(lanes_[i], load<std::uint64_t>(stripe + 8 * i));
    }
}

void Xxh64::update(const void* data, std::size_t size_bytes) {
    const auto* bytes = static_cast<const std::uint8_t*>(data);
    size_bytes_ += size_bytes;
    if (rest_bytes_ > 0) {
        const std::size_t taken = std::min(size_bytes, kStripeBytes - rest_bytes_);
        std::memcpy(rest_.data() + rest_bytes_, bytes, taken);
        rest_bytes_ += taken;
        bytes += taken;
        size_bytes -= taken;
        if (rest_bytes_ < kStripeBytes) {
            return;
        }
        take_stripe(rest_.data());
        rest_bytes_ = 0;
    }
    for (; size_bytes >= kStripeBytes; bytes += kStripeBytes, size_bytes -= kStripeBytes) {
        take_stripe(bytes);
    }
    if (size_bytes > 0) {
        std::memcpy(rest_.data(), bytes, size_bytes);
        rest_bytes_ = size_bytes;
    }
}

std::uint64_t Xxh64::digest() const {
    std::uint64_t hash = kPrime5;
    if (size_bytes_ >= kStripeBytes) {
        hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) +
               std::rotl(lanes_[3], 18);
        for (const std::uint64_t lane : lanes_) {
            hash = (hash ^ mix(0, lane)) * kPrime1 + kPrime4;
        }
    }
    hash += size_bytes_;
    const std::uint8_t* bytes = rest_.data();
    const std::uint8_t* end = bytes + rest_bytes_;
    for (; end - bytes >= 8; bytes += 8) {
        hash = std::rotl(hash ^ mix(0, load<std::uint64_t>(bytes)), 27) * kPrime1 + kPrime4;
    }
    for (; end - bytes >= 4; bytes += 4) {
        hash = std::rotl(hash ^ load<std::uint32_t>(bytes) * kPrime1, 23) * kPrime2 + kPrime3;
    }
    for (; bytes < end; ++bytes) {
        hash = std::rotl(hash ^ *bytes * kPrime5, 11) * kPrime1;
    }
    hash = (hash ^ (hash >> 33)) * kPrime2;
    hash = (hash ^ (hash >> 29)) * kPrime3;
    return hash ^ (hash >> 32);
}

std::uint64_t xxh64(const void* data, std::size_t size_bytes) {
    Xxh64 sum;
    sum.update(data, size_bytes);
    return sum.digest();
}

std::string checksum_text(std::uint64_t checksum) {
    return fmt::format("{:016x}", checksum);
}

}  // namespace hybridcp

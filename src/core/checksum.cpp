#include "core/checksum.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL  // the header alone: nothing to link
#include <xxhash.h>

namespace hybridcp {

struct Xxh64::State {
    XXH64_state_t value;
};

Xxh64::Xxh64() : state_(std::make_unique<State>()) {
    XXH64_reset(&state_->value, 0);
}

Xxh64::~Xxh64() = default;

void Xxh64::update(const void* data, std::size_t size_bytes) {
    if (size_bytes > 0) {
        XXH64_update(&state_->value, data, size_bytes);
    }
}

std::uint64_t Xxh64::digest() const {
    return XXH64_digest(&state_->value);
}

std::uint64_t xxh64(const void* data, std::size_t size_bytes) {
    return XXH64(data, size_bytes, 0);
}

std::string checksum_text(std::uint64_t checksum) {
    return fmt::format("{:016x}", checksum);
}

}  // namespace hybridcp

#pragma once

#include <cstdint>

namespace hybridcp::simt {

/// The emulator's own statement of the 128-byte swizzle: 16-byte piece p of 128-byte row r lies at
/// p ^ (r % 8). Shared memory starts at a multiple of 1,024, so offsets serve as addresses.
[[nodiscard]] inline uint32_t swizzle_128(uint32_t offset) {
    const uint32_t row = offset / 128 % 8;
    const uint32_t piece = offset / 16 % 8;
    return offset - piece * 16 + (piece ^ row) * 16;
}

}  // namespace hybridcp::simt

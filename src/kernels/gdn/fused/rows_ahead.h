// Rows of the caller's tensors that the next chunk reads or writes: tokens lie too far apart for
// the hardware to guess. They are asked for one at a time, between blocks of products, which hides
// the wait; a whole chunk's rows at once would fill the queue of misses and stop everything behind.
#pragma once

#include <cstdint>

#include "kernels/simd/vector.h"

namespace hybridcp::HCP_ISA {

class RowsAhead {
  public:
    /// Rows [count, dim] at `rows`, behind those added before; more than kMost are dropped.
    template <typename T>
    void add(const T* rows, std::int64_t stride, int count, int dim) {
        constexpr auto size = static_cast<std::int64_t>(sizeof(T));
        if (count > 0 && num_pieces_ < kMost) {
            pieces_[num_pieces_++] = {.row = reinterpret_cast<const char*>(rows),
                                      .stride_bytes = stride * size,
                                      .row_bytes = dim * size,
                                      .count = count};
        }
    }

    /// Backward's updates of states miss the first-level cache themselves: blocks of products that
    /// are less deep than a head dim ask for half as many rows there.
    void spare_short_blocks() { spares_short_blocks_ = true; }

    /// In a block of products of that depth: asks for the next `rows` rows.
    HCP_INLINE void ask_in_block(int rows, int depth) {
        static constexpr int kDeep = 128;
        for (int n = spares_short_blocks_ && depth < kDeep ? rows / 2 : 0; n < rows; ++n) {
            ask();
        }
    }

    /// Asks for the next row.
    HCP_INLINE void ask() {
        if (first_ < num_pieces_) {
            Piece& piece = pieces_[first_];
            for (std::int64_t at = 0; at < piece.row_bytes; at += 64) {
                __builtin_prefetch(piece.row + at);
            }
            piece.row += piece.stride_bytes;
            --piece.count;
            first_ += piece.count == 0 ? 1 : 0;
        }
    }

    /// Asks for all that is left and forgets it.
    void finish() {
        while (first_ < num_pieces_) {
            ask();
        }
        first_ = num_pieces_ = 0;
    }

  private:
    struct Piece {
        const char* row = nullptr;
        std::int64_t stride_bytes = 0, row_bytes = 0;
        int count = 0;
    };
    static constexpr int kMost = 256;
    Piece pieces_[kMost];
    int first_ = 0, num_pieces_ = 0;
    bool spares_short_blocks_ = false;
};

}  // namespace hybridcp::HCP_ISA

// Solves with chunks of more rows than a panel, on tiles: triangles of a panel in fp32 as solve.h
// has them, and what lies below them as a product. Its operands are split in two bf16 each, since
// what the solve cancels would leave little of eight bits.
#pragma once

#include "kernels/gdn/fused/solve.h"
#include "kernels/gdn/fused/transposed_packs.h"

namespace hybridcp::HCP_ISA {

/// What rounding x to bf16 leaves.
HCP_INLINE Vec rounded_off(Vec x) {
    return x - widened(to_bf16(x));
}

/// I + L of a chunk, and scratch for the product below its first panel.
template <typename Engine>
struct BlockSystem {
    using Element = typename Engine::Element;
    static constexpr bool kHasBlocks = Engine::kChunk > kPanel;
    // Of the product, in units: the factors' high, high and low parts meet high, low and high ones.
    static constexpr int kPart = kPanel / Engine::kPerUnit;
    static constexpr int kDepth = 3 * kPart;
    static constexpr int kSolved = 2 * kPart;
    static constexpr int kRow = kDepth + 32;  // of factors, in units

    const float* system;  // [rows, rows], system_row apart
    int system_row, rows;
    std::uint32_t* factors;  // -L or -L^T below the first panel: left operand
    std::uint32_t* solved;   // the solved rows of a panel: right operand
    RowsAhead& ahead;

    static std::int64_t factor_units() { return kHasBlocks ? kPanel * kRow : 0; }
    static std::int64_t solved_units(int columns) { return kHasBlocks ? kSolved * columns : 0; }

    [[nodiscard]] HCP_INLINE bool has_blocks() const { return kHasBlocks && rows > kPanel; }
    [[nodiscard]] HCP_INLINE const float* below() const { return system + kPanel * system_row; }
    [[nodiscard]] HCP_INLINE int first_rows() const { return rows < kPanel ? rows : kPanel; }

    /// Before solve_blocks, and before what products read of it is needed: tiles wait for stores.
    void pack_factors() const {
        for (int i = 0; has_blocks() && i < kPanel; ++i) {
            const float* row = below() + i * system_row;
            auto* to = reinterpret_cast<Element*>(factors + i * kRow);
            for (int j = 0; j < kPanel; j += 2 * kLanes) {
                const Vec high[2] = {-load(row + j), -load(row + j + kLanes)};
                const Vec low[2] = {rounded_off(high[0]), rounded_off(high[1])};
                store_elements<Engine>(to + j, high);
                store_elements<Engine>(to + kPanel + j, high);
                store_elements<Engine>(to + 2 * kPanel + j, low);
            }
        }
    }
    /// Before solve_blocks_transposed.
    void pack_factors_transposed() const {
        if (!has_blocks()) {
            return;
        }
        const auto pack = [&](int part, auto row_of) {
            transpose_units(
                kPart, kPanel,
                [&](int u, int r) {
                    const float* from = below() + u * Engine::kPerUnit * system_row + r;
                    return pair_units(row_of(-load(from)), row_of(-load(from + system_row)));
                },
                [&](int r, int u, VecUint v) {
                    store_units(factors + r * kRow + part * kPart + u, v);
                });
        };
        pack(0, [](Vec x) { return x; });
        pack(1, [](Vec x) { return x; });
        pack(2, [](Vec x) { return rounded_off(x); });
    }
    /// Rows i and i + 1 of the panel that was solved first, two vectors each from column j on.
    HCP_INLINE void keep(int i, int j, const Vec* first, const Vec* second) const {
        std::uint32_t* to = unit_of_row<Engine>(solved, kSolved * kPanel, i, j);
        const Vec low[2] = {rounded_off(first[0]), rounded_off(first[1])};
        const Vec next_low[2] = {rounded_off(second[0]), rounded_off(second[1])};
        store_row_pair<Engine>(to, first, second);
        store_row_pair<Engine>(to + kPart * kPanel, low, next_low);
    }
    /// x, the other panel of rows, plus the factors times what was kept.
    HCP_INLINE void add(float* x, int x_row, int columns) const {
        if constexpr (kHasBlocks) {
            Engine::template multiply_to<true>(
                {.left =
                     {.units = factors, .row_stride = kRow, .unit_stride = 1, .panel_stride = 0},
                 .right = {solved, kSolved * kPanel},
                 .rows = kPanel,
                 .columns = columns,
                 .ahead = ahead},
                [](int) { return DepthRange{0, kDepth}; }, x, x_row, kSolved);
        }
    }
};

/// As solve().
template <typename Engine, typename Done>
HCP_INLINE void solve_blocks(
    const BlockSystem<Engine>& of, float* x, int x_row, int columns, Done done) {
    static_assert(Engine::kChunk <= 2 * kPanel);
    solve(of.system, of.system_row, x, x_row, of.first_rows(), columns,
          [&](int i, int j, const Vec* row, const Vec* next) {
              if (of.has_blocks()) {
                  of.keep(i, j, row, next);
              }
              done(i, j, row, next);
          });
    if (of.has_blocks()) {
        x += kPanel * x_row;
        of.add(x, x_row, columns);
        solve(
            of.below() + kPanel, of.system_row, x, x_row, kPanel, columns,
            [&](int i, int j, const Vec* row, const Vec* next) { done(i + kPanel, j, row, next); });
    }
}

/// As solve_transposed().
template <typename Engine, typename Done>
HCP_INLINE void solve_blocks_transposed(
    const BlockSystem<Engine>& of, float* x, int x_row, int columns, Done done) {
    if (of.has_blocks()) {
        solve_transposed(of.below() + kPanel, of.system_row, x + kPanel * x_row, x_row, kPanel,
                         columns, [&](int i, int j, const Vec* row, const Vec* next) {
                             of.keep(i, j, row, next);
                             done(i + kPanel, j, row, next);
                         });
        of.add(x, x_row, columns);
    }
    solve_transposed(of.system, of.system_row, x, x_row, of.first_rows(), columns, done);
}

}  // namespace hybridcp::HCP_ISA

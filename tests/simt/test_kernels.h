#pragma once

// What the emulator's tests share: bf16 matrices of small whole numbers, whose products and sums
// are exact.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/device.cuh"
#include "simt/launch.h"

namespace hybridcp::simt {

/// A number from -4 to 4 that depends on both indices.
[[nodiscard]] inline float small_number(uint32_t row, uint32_t column) {
    return static_cast<float>((row * 7 + column * 13 + row * column % 11) % 9) - 4.0F;
}

struct Matrix {
    Matrix(uint32_t row_count, uint32_t column_count)
        : rows(row_count), columns(column_count), bits(std::size_t{row_count} * column_count) {}
    [[nodiscard]] static Matrix numbered(uint32_t rows, uint32_t columns) {
        Matrix matrix(rows, columns);
        for (uint32_t row = 0; row < rows; ++row) {
            for (uint32_t column = 0; column < columns; ++column) {
                matrix.bits[std::size_t{row} * columns + column] =
                    bf16_bits(small_number(row, column));
            }
        }
        return matrix;
    }
    [[nodiscard]] float at(uint32_t row, uint32_t column) const {
        return bf16_value(bits[std::size_t{row} * columns + column]);
    }
    /// The same numbers.
    [[nodiscard]] Matrix in_f16() const {
        Matrix matrix(rows, columns);
        std::ranges::transform(bits, matrix.bits.begin(),
                               [](uint16_t x) { return f16_bits(bf16_value(x)); });
        return matrix;
    }
    /// Boxes of 64 columns and `box_rows` rows.
    [[nodiscard]] TensorMap map(uint32_t box_rows) {
        return {.data = reinterpret_cast<std::byte*>(bits.data()),
                .extent = {columns, 1, rows},
                .stride_bytes = {uint64_t{columns} * 2, uint64_t{columns} * 2},
                .box = {64, 1, box_rows}};
    }

    uint32_t rows, columns;
    std::vector<uint16_t> bits;
};

/// The message of the fault that the launch ends in; empty if it ends well.
[[nodiscard]] inline std::string fault_of(const LaunchOptions& options,
                                          const std::function<void()>& kernel) {
    try {
        launch(options, kernel);
    } catch (const Fault& fault) {
        return fault.what();
    }
    return "";
}

}  // namespace hybridcp::simt

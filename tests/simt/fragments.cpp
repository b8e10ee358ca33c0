// ldmatrix, stmatrix, movmatrix and mma.sync: fragments as PTX ISA lays them out ("Warp-level
// matrix instructions").

#include <algorithm>

#include "simt/collective.h"
#include "simt/device_matrices.h"
#include "simt/places.h"

namespace hybridcp::device {

using simt::at;
using simt::Engine;

namespace {

constexpr uint32_t kRowBytes = 16;
using Matrix8 = std::array<std::array<uint16_t, 8>, 8>;

struct MatrixOperands {
    uint32_t* words;
    uint32_t count;
    bool transposed;
    uint32_t address;
};
using MatrixLanes = std::array<MatrixOperands*, simt::kWarpThreads>;

void check_same(const MatrixLanes& lanes, const simt::Origin& origin) {
    for (const MatrixOperands* lane : lanes) {
        if (lane->count != lanes[0]->count || lane->transposed != lanes[0]->transposed) {
            simt::fault(origin, "diverges: its lanes move matrices of different forms");
        }
    }
}

// Elements (row, column) of the matrix that a lane holds in the low and high half of its word.
std::array<std::array<uint32_t, 2>, 2> elements_of(uint32_t lane, bool transposed) {
    const uint32_t g = lane / 4;
    const uint32_t q = lane % 4;
    if (transposed) {
        return {{{2 * q, g}, {2 * q + 1, g}}};
    }
    return {{{g, 2 * q}, {g, 2 * q + 1}}};
}

uint32_t word_of(const Matrix8& matrix, uint32_t lane, bool transposed) {
    const auto elements = elements_of(lane, transposed);
    return matrix[elements[0][0]][elements[0][1]] | uint32_t{matrix[elements[1][0]][elements[1][1]]}
                                                        << 16;
}

void put_word(Matrix8& matrix, uint32_t lane, bool transposed, uint32_t word) {
    const auto elements = elements_of(lane, transposed);
    matrix[elements[0][0]][elements[0][1]] = static_cast<uint16_t>(word);
    matrix[elements[1][0]][elements[1][1]] = static_cast<uint16_t>(word >> 16);
}

// The row addresses that count are those of the first lanes; the message names the lane.
simt::Place row_place(const MatrixOperands& row) {
    return simt::own_place(row.address, kRowBytes, kRowBytes);
}

template <float (*Value)(uint16_t)>
void mma(float* d, const uint32_t* a, const uint32_t* b) {
    struct Operands {
        float* d;
        const uint32_t* a;
        const uint32_t* b;
    } mine{d, a, b};
    simt::warp_collective(mine, [](const auto& lanes) {
        float A[16][16];
        float B[16][8];
        for (uint32_t lane = 0; lane < simt::kWarpThreads; ++lane) {
            const uint32_t g = lane / 4;
            const uint32_t q = lane % 4;
            for (uint32_t i = 0; i < 8; ++i) {  // 16-bit halves of A's words
                const auto bits = static_cast<uint16_t>(lanes[lane]->a[i / 2] >> 16 * (i % 2));
                A[g + 8 * (i / 2 % 2)][2 * q + i % 2 + 8 * (i / 4)] = Value(bits);
            }
            for (uint32_t i = 0; i < 4; ++i) {
                const auto bits = static_cast<uint16_t>(lanes[lane]->b[i / 2] >> 16 * (i % 2));
                B[2 * q + i % 2 + 8 * (i / 2)][g] = Value(bits);
            }
        }
        for (uint32_t lane = 0; lane < simt::kWarpThreads; ++lane) {
            for (uint32_t i = 0; i < 4; ++i) {
                const uint32_t row = lane / 4 + 8 * (i / 2);
                const uint32_t column = 2 * (lane % 4) + i % 2;
                float sum = 0;
                for (uint32_t k = 0; k < 16; ++k) {
                    sum += A[row][k] * B[k][column];
                }
                lanes[lane]->d[i] += sum;
            }
        }
    });
}

}  // namespace

void load_matrices(
    uint32_t* to, uint32_t count, bool transposed, uint32_t address, const Site& site) {
    const auto& origin = at("load_matrix", site);
    MatrixOperands mine{to, count, transposed, address};
    simt::warp_collective(mine, [&](const MatrixLanes& lanes) {
        check_same(lanes, origin);
        for (uint32_t i = 0; i < count; ++i) {
            Matrix8 matrix;
            for (uint32_t row = 0; row < 8; ++row) {
                const simt::Place place = row_place(*lanes[8 * i + row]);
                place.block->memory.read(place.offset, matrix[row].data(), kRowBytes, origin);
            }
            for (uint32_t lane = 0; lane < simt::kWarpThreads; ++lane) {
                lanes[lane]->words[i] = word_of(matrix, lane, transposed);
            }
        }
    });
}

void store_matrices(
    const uint32_t* from, uint32_t count, bool transposed, uint32_t address, const Site& site) {
    const auto& origin = at("store_matrix", site);
    uint32_t words[4] = {};
    std::copy_n(from, count, words);
    MatrixOperands mine{words, count, transposed, address};
    simt::warp_collective(mine, [&](const MatrixLanes& lanes) {
        check_same(lanes, origin);
        for (uint32_t i = 0; i < count; ++i) {
            Matrix8 matrix;
            for (uint32_t lane = 0; lane < simt::kWarpThreads; ++lane) {
                put_word(matrix, lane, transposed, lanes[lane]->words[i]);
            }
            for (uint32_t row = 0; row < 8; ++row) {
                const simt::Place place = row_place(*lanes[8 * i + row]);
                // Each row comes from several lanes; the first of them stands for all as its
                // writer.
                simt::Origin writer = origin;
                writer.thread = origin.thread->warp->lanes[transposed ? row / 2 : 4 * row];
                place.block->memory.write(place.offset, matrix[row].data(), kRowBytes, writer);
            }
        }
    });
}

uint32_t transpose_matrix(uint32_t from, const Site& site) {
    at("transpose_matrix", site);
    uint32_t word = from;
    simt::warp_collective(word, [](const auto& lanes) {
        Matrix8 matrix;
        for (uint32_t lane = 0; lane < simt::kWarpThreads; ++lane) {
            put_word(matrix, lane, false, *lanes[lane]);
        }
        for (uint32_t lane = 0; lane < simt::kWarpThreads; ++lane) {
            *lanes[lane] = word_of(matrix, lane, true);
        }
    });
    return word;
}

void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const Site& site) {
    at("mma_bf16", site);
    mma<simt::bf16_value>(d, a, b);
}

void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const Site& site) {
    at("mma_f16", site);
    mma<simt::f16_value>(d, a, b);
}

}  // namespace hybridcp::device

// wgmma: operands and sums as PTX ISA lays them out ("Asynchronous warpgroup-level matrix
// instructions").

#include <algorithm>
#include <limits>

#include "simt/collective.h"
#include "simt/device_matrices.h"
#include "simt/places.h"
#include "simt/swizzle.h"

namespace hybridcp::simt {
namespace {

constexpr uint32_t kWarpRows = 16;
constexpr uint32_t kDepth = 16;  // K of one product
constexpr uint32_t kPieceBytes = 16;
constexpr uint32_t kPieceElements = 8;

// Row and column of value i of a lane in the 16 x columns sums of a warp.
uint32_t place_of(uint32_t lane, uint32_t i, uint32_t columns) {
    const uint32_t row = lane / 4 + 8 * (i / 2 % 2);
    return row * columns + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
}

OperandTile decode(uint64_t descriptor, bool k_major, bool f16, const Origin& origin) {
    static constexpr uint64_t kField = 0x3fff;
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) {
        fault(origin, "has a descriptor of another form than the 128-byte swizzle without offset");
    }
    OperandTile tile{.start = static_cast<uint32_t>(descriptor & kField) << 4,
                     .leading = static_cast<uint32_t>(descriptor >> 16 & kField) << 4,
                     .stride = static_cast<uint32_t>(descriptor >> 32 & kField) << 4,
                     .k_major = k_major,
                     .f16 = f16};
    if (tile.start < kSharedStart) {
        fault(origin, "has a descriptor whose address is below shared memory");
    }
    tile.start -= kSharedStart;
    return tile;
}

// Calls visit(offset of 16 bytes, first index along M or N, first k) for the pieces of rows (of A
// or of B^T) first to first + rows - 1.
template <class Visit>
void for_each_piece(const OperandTile& tile, uint32_t first, uint32_t rows, Visit visit) {
    if (tile.k_major) {
        for (uint32_t i = first; i < first + rows; ++i) {
            for (uint32_t k = 0; k < kDepth; k += kPieceElements) {
                visit(swizzle_128(tile.start + i / 8 * tile.stride + i % 8 * 128 + k * 2), i, k);
            }
        }
        return;
    }
    for (uint32_t k = 0; k < kDepth; ++k) {
        for (uint32_t i = first; i < first + rows; i += kPieceElements) {
            visit(swizzle_128(tile.start + i / 64 * tile.leading + i % 64 * 2 +
                              k / 8 * tile.stride + k % 8 * 128),
                  i, k);
        }
    }
}

float value_of(uint16_t bits, bool f16) {
    return f16 ? f16_value(bits) : bf16_value(bits);
}

// The operand as [k][row - first].
std::vector<float> read_operand(const SharedMemory& memory,
                                const OperandTile& tile,
                                uint32_t first,
                                uint32_t rows,
                                const Origin& origin) {
    std::vector<float> values(std::size_t{kDepth} * rows);
    for_each_piece(tile, first, rows, [&](uint32_t offset, uint32_t i, uint32_t k) {
        std::array<uint16_t, kPieceElements> bits;
        memory.read_async(offset, bits.data(), kPieceBytes, origin);
        for (uint32_t e = 0; e < kPieceElements; ++e) {
            const uint32_t row = i - first + (tile.k_major ? 0 : e);
            values[(k + (tile.k_major ? e : 0)) * rows + row] = value_of(bits[e], tile.f16);
        }
    });
    return values;
}

void check_bounds(const SharedMemory& memory,
                  const OperandTile& tile,
                  uint32_t first,
                  uint32_t rows,
                  const Origin& origin) {
    for_each_piece(tile, first, rows, [&](uint32_t offset, uint32_t, uint32_t) {
        if (offset + kPieceBytes > memory.bytes()) {
            fault(origin, "is out of bounds: an operand reaches " + shared_text(offset));
        }
    });
}

// Calls visit(tile, first row, rows) for the operands in shared memory.
template <class Visit>
void for_each_tile(const Warp& warp, const Product& product, Visit visit) {
    if (!product.a_in_registers) {
        visit(product.a_tile, warp.index % 4 * kWarpRows, kWarpRows);
    }
    visit(product.b_tile, 0U, product.sums->columns);
}

std::vector<float> fragment_a(const std::array<const uint32_t*, kWarpThreads>& words, bool f16) {
    std::vector<float> values(std::size_t{kDepth} * kWarpRows);
    for (uint32_t lane = 0; lane < kWarpThreads; ++lane) {
        for (uint32_t i = 0; i < 8; ++i) {
            const uint32_t row = lane / 4 + 8 * (i / 2 % 2);
            const uint32_t k = 2 * (lane % 4) + i % 2 + 8 * (i / 4);
            values[k * kWarpRows + row] =
                value_of(static_cast<uint16_t>(words[lane][i / 2] >> 16 * (i % 2)), f16);
        }
    }
    return values;
}

void compute(const Warp& warp, Product& product) {
    const SharedMemory& memory = warp.block->memory;
    Sums& sums = *product.sums;
    const std::vector<float> a =
        product.a_in_registers ? product.a
                               : read_operand(memory, product.a_tile, warp.index % 4 * kWarpRows,
                                              kWarpRows, product.origin);
    const std::vector<float> b =
        read_operand(memory, product.b_tile, 0, sums.columns, product.origin);
    if (!product.add) {
        std::fill(sums.values.begin(), sums.values.end(), 0.0F);
    }
    for (uint32_t row = 0; row < kWarpRows; ++row) {
        float* const to = &sums.values[std::size_t{row} * sums.columns];
        for (uint32_t k = 0; k < kDepth; ++k) {
            const float factor = a[k * kWarpRows + row];
            const float* const from = &b[std::size_t{k} * sums.columns];
            for (uint32_t column = 0; column < sums.columns; ++column) {
                to[column] += factor * from[column];
            }
        }
    }
    product.done = true;
    --sums.unfinished;
}

}  // namespace

std::shared_ptr<Sums> WarpProducts::sums_for(const std::array<float*, 32>& registers,
                                             uint32_t columns) {
    for (const Product& product : queue_) {
        if (product.sums->registers[0] == registers[0]) {
            return product.sums;
        }
    }
    auto sums = std::make_shared<Sums>();
    sums->columns = columns;
    sums->registers = registers;
    sums->values.resize(std::size_t{kWarpRows} * columns);
    for (uint32_t lane = 0; lane < kWarpThreads; ++lane) {
        for (uint32_t i = 0; i < columns / 2; ++i) {
            sums->values[place_of(lane, i, columns)] = registers[lane][i];
            registers[lane][i] = std::numeric_limits<float>::quiet_NaN();
        }
    }
    return sums;
}

void WarpProducts::issue(Warp& warp, Product product) {
    if (!fenced_) {
        fault(product.origin, "has no wgmma_fence since the last wgmma_wait");
    }
    SharedMemory& memory = warp.block->memory;
    for_each_tile(warp, product, [&](const OperandTile& tile, uint32_t first, uint32_t rows) {
        check_bounds(memory, tile, first, rows, product.origin);
        for_each_piece(tile, first, rows, [&](uint32_t offset, uint32_t, uint32_t) {
            memory.begin_read_async(offset, kPieceBytes, product.origin);
        });
    });
    ++product.sums->unfinished;
    product.group = open_group_;
    queue_.push_back(std::move(product));
}

bool WarpProducts::run_one(Warp& warp) {
    if (!has_work()) {
        return false;
    }
    compute(warp, queue_[next_++]);
    return true;
}

void WarpProducts::wait(Warp& warp, uint32_t pending) {
    fenced_ = false;
    const Access now = access_now(Engine::current().thread().origin);
    SharedMemory& memory = warp.block->memory;
    while (!queue_.empty() && queue_.front().group + pending < open_group_) {
        if (next_ == 0) {
            (void)run_one(warp);
        }
        const Product product = std::move(queue_.front());
        queue_.pop_front();
        --next_;
        for_each_tile(warp, product, [&](const OperandTile& tile, uint32_t first, uint32_t rows) {
            for_each_piece(tile, first, rows, [&](uint32_t offset, uint32_t, uint32_t) {
                memory.end_read_async(offset, kPieceBytes, now);
            });
        });
        const Sums& sums = *product.sums;
        const bool last = std::none_of(queue_.begin(), queue_.end(), [&](const Product& other) {
            return other.sums == product.sums;
        });
        for (uint32_t lane = 0; last && lane < kWarpThreads; ++lane) {
            for (uint32_t i = 0; i < sums.columns / 2; ++i) {
                sums.registers[lane][i] = sums.values[place_of(lane, i, sums.columns)];
            }
        }
    }
}

}  // namespace hybridcp::simt

namespace hybridcp::device {

using simt::at;
using simt::Engine;

namespace {

simt::Warp& own_warp() {
    return *Engine::current().thread().warp;
}

// The warps of a warpgroup must issue the same products: each compares with the first that came to
// this one.
void check_warpgroup(const ProductOperands& operands, const simt::Origin& origin) {
    simt::Warp& warp = own_warp();
    if (warp.block->warps.size() % 4 != 0) {
        simt::fault(origin, "needs blocks of whole warpgroups, 128 threads each");
    }
    const uint64_t form =
        operands.columns | uint64_t{operands.a != nullptr} << 8 | uint64_t{operands.add} << 9 |
        static_cast<uint64_t>(operands.a_major) << 10 |
        static_cast<uint64_t>(operands.b_major) << 11 | uint64_t{operands.f16} << 12;
    const uint64_t what =
        form ^ operands.a_tile * 0x9e3779b97f4a7c15ULL ^ operands.b_tile * 0xbf58476d1ce4e5b9ULL;
    auto& log = warp.block->product_log[warp.index / 4];
    const std::size_t mine = warp.products.next_in_log();
    if (mine == log.size()) {
        log.push_back(what);
    } else if (log[mine] != what) {
        simt::fault(origin, "diverges: another warp of the warpgroup issued another product here");
    }
}

}  // namespace

void wgmma_fence(const Site& site) {
    at("wgmma_fence", site);
    int nothing = 0;
    simt::warp_collective(nothing, [](const auto&) { own_warp().products.fence(); });
}

void wgmma_commit(const Site& site) {
    at("wgmma_commit", site);
    int nothing = 0;
    simt::warp_collective(nothing, [](const auto&) { own_warp().products.commit(); });
}

void wait_for_products(uint32_t pending, const Site& site) {
    at("wgmma_wait", site);
    simt::warp_collective(
        pending, [](const auto& lanes) { own_warp().products.wait(own_warp(), *lanes[0]); });
}

void start_product(ProductOperands operands, const Site& site) {
    const auto& origin = at("wgmma", site);
    simt::warp_collective(operands, [&](const auto& lanes) {
        std::array<float*, simt::kWarpThreads> registers{};
        std::array<const uint32_t*, simt::kWarpThreads> words{};
        for (uint32_t lane = 0; lane < simt::kWarpThreads; ++lane) {
            const ProductOperands& other = *lanes[lane];
            if (other.columns != operands.columns || other.a_tile != operands.a_tile ||
                other.b_tile != operands.b_tile || other.add != operands.add ||
                other.f16 != operands.f16 || (other.a == nullptr) != (operands.a == nullptr)) {
                simt::fault(origin, "diverges: its lanes issue different products");
            }
            registers[lane] = other.d;
            words[lane] = other.a;
        }
        check_warpgroup(operands, origin);
        simt::Product product;
        product.origin = origin;
        product.add = operands.add;
        product.a_in_registers = operands.a != nullptr;
        if (product.a_in_registers) {
            product.a = simt::fragment_a(words, operands.f16);
        } else {
            product.a_tile =
                simt::decode(operands.a_tile, operands.a_major == Major::kK, operands.f16, origin);
        }
        product.b_tile =
            simt::decode(operands.b_tile, operands.b_major == Major::kK, operands.f16, origin);
        simt::WarpProducts& products = own_warp().products;
        product.sums = products.sums_for(registers, operands.columns);
        products.issue(own_warp(), std::move(product));
    });
}

}  // namespace hybridcp::device

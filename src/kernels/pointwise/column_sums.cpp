#include "kernels/pointwise/column_sums.h"

#include "kernels/pointwise/lanes.h"

namespace hybridcp::HCP_ISA {
namespace {

// Columns of one pass over the rows: their sums stay in the first-level cache.
constexpr std::int64_t kColumns = 1024;

void add_columns(const float* partials, std::int64_t count, std::int64_t width, float* sums) {
    for (std::int64_t begin = 0; begin < width; begin += kColumns) {
        const std::int64_t columns = width - begin < kColumns ? width - begin : kColumns;
        float* out = sums + begin;
        for_each_vector(columns, [&](std::int64_t c, auto lanes) { store(out + c, Vec{}, lanes); });
        for (std::int64_t row = 0; row < count; ++row) {
            const float* in = partials + row * width + begin;
            for_each_vector(columns, [&](std::int64_t c, auto lanes) {
                store(out + c, load(out + c, lanes) + load(in + c, lanes), lanes);
            });
        }
    }
}

constexpr ColumnSums kColumnSums{.add = add_columns};

}  // namespace

const ColumnSums& column_sums() {
    return kColumnSums;
}

}  // namespace hybridcp::HCP_ISA

#include <ATen/ATen.h>
#include <ATen/native/CPUBlas.h>

#include "hcp/bench_measure.h"
#include "hcp/bench_peers.h"
#include "hcp/compare.h"
#include "hybridcp/error.h"

namespace hybridcp::cli {

namespace {

/// [rows x depth] times [depth x columns]. The right operand is packed anew unless it is that of
/// the product before.
struct Product {
    std::int64_t rows, columns, depth;
    bool same_right = false;
};

struct Products {
    std::vector<Product> per_key_head, per_value_head;
};

/// As docs/kernels.md writes them: C rows of a chunk, head dims K and V.
Products forward_products(std::int64_t C, std::int64_t K, std::int64_t V) {
    return {.per_key_head = {{C, C, K}, {C, C, K, true}},  // K K^T, Q K^T
            .per_value_head = {{C, V, K},
                               {C, V, K, true},  // K H, Q H
                               {C, V, C},        // T R
                               {C, V, C},
                               {K, V, C}}};  // P D, K^T D'
}

Products backward_products(std::int64_t C, std::int64_t K, std::int64_t V) {
    return {.per_key_head = {{C, C, K},
                             {C, C, K, true},  // K K^T, Q K^T
                             {C, K, C},
                             {C, K, C, true},  // dP K, (dN + dN^T) K
                             {C, K, C}},       // dP^T Q
            .per_value_head = {{C, V, C},
                               {K, V, C, true},  // P^T dO, Q^T dO
                               {C, V, K},
                               {C, V, K},  // K dH', K H
                               {C, V, C},
                               {C, V, C},  // T R, T^T dD
                               {C, C, V},
                               {C, C, V, true},  // dO D^T, dR D^T
                               {C, K, V},        // D dH'^T
                               {C, K, V},
                               {C, K, V, true},  // dE H^T, dO H^T
                               {K, V, C}}};      // K^T dE
}

template <typename T>
class ProductRunner {
  public:
    ProductRunner(std::int64_t largest, at::ScalarType dtype) : dtype_(dtype) {
        left_ = at::randn({largest, largest}).to(dtype);
        right_ = at::randn({largest, largest}).to(dtype);
        packed_ = at::empty({largest, largest}, left_.options());
        result_ = at::empty({largest, largest}, at::kFloat);
        packs_ = at::native::cpublas::could_pack(dtype);
    }

    void run(const std::vector<Product>& products) const {
        for (const Product& p : products) {
            // Packed operands have at most 64 columns.
            const std::int64_t most = packs_ ? 64 : p.columns;
            for (std::int64_t from = 0; from < p.columns; from += most) {
                multiply(p, from, std::min(most, p.columns - from));
            }
        }
    }
    /// rel-L2 of one product against fp64.
    [[nodiscard]] double error(const Product& p) const {
        run({p});
        const auto matrix = [](const at::Tensor& x, std::int64_t rows, std::int64_t columns) {
            return x.flatten().narrow(0, 0, rows * columns).view({rows, columns}).to(at::kDouble);
        };
        const at::Tensor expected =
            at::mm(matrix(left_, p.rows, p.depth), matrix(right_, p.depth, p.columns));
        return relative_l2(matrix(result_, p.rows, p.columns), expected).error;
    }
    ~ProductRunner() { at::native::cpublas::brgemm_release(packs_); }
    ProductRunner(const ProductRunner&) = delete;
    ProductRunner& operator=(const ProductRunner&) = delete;

  private:
    /// The product's columns [from, from + columns).
    void multiply(const Product& p, std::int64_t from, std::int64_t columns) const {
        const T* right = right_.const_data_ptr<T>() + from;
        std::int64_t right_stride = p.columns;
        if (packs_) {
            T* packed = packed_.mutable_data_ptr<T>() + from * p.depth;
            if (!p.same_right) {
                at::native::cpublas::pack(p.depth, columns, p.columns, columns, dtype_, dtype_,
                                          right, packed);
            }
            right = packed;
            right_stride = columns;
        }
        at::native::cpublas::brgemm(p.rows, columns, p.depth, p.depth, right_stride, p.columns,
                                    /*add_C=*/false, left_.const_data_ptr<T>(), right,
                                    result_.mutable_data_ptr<float>() + from, packs_);
    }

    at::ScalarType dtype_;
    at::Tensor left_, right_, packed_, result_;
    bool packs_ = false;
};

/// Microseconds per token and value head.
template <typename T>
double time_products(const ProductRunner<T>& runner,
                     const Products& products,
                     std::int64_t group,
                     std::int64_t chunk) {
    constexpr int kKeyHeads = 200;  // some milliseconds in all
    Stopwatch watch(1);
    for (int i = 0; i < kKeyHeads; ++i) {
        runner.run(products.per_key_head);
        for (std::int64_t head = 0; head < group; ++head) {
            runner.run(products.per_value_head);
        }
    }
    return watch.lap_us() / static_cast<double>(kKeyHeads * group * chunk);
}

template <typename T>
Lane make_lane(const BenchGdnOptions& options,
               std::int64_t chunk,
               std::int64_t tokens,
               at::ScalarType dtype) {
    const std::int64_t largest = std::max({options.key_dim, options.value_dim, chunk});
    const auto runner = std::make_shared<ProductRunner<T>>(largest, dtype);
    const Products forward = forward_products(chunk, options.key_dim, options.value_dim);
    try {
        constexpr double kBar = 1e-5;  // fp32 sums of exact products
        for (const auto* products : {&forward.per_key_head, &forward.per_value_head}) {
            const double error = runner->error(products->front());
            if (!(error <= kBar)) {
                throw NumericsError(fmt::format("bench gdn --peer brgemm: off by {:.1e}", error));
            }
        }
    } catch (const c10::Error& error) {
        throw UsageError(fmt::format("bench gdn --peer brgemm: not for {} on this CPU: {}",
                                     c10::toString(dtype), error.what_without_backtrace()));
    }
    const Products backward = backward_products(chunk, options.key_dim, options.value_dim);
    const std::int64_t group = options.value_heads / options.key_heads;
    const auto count = static_cast<double>(tokens * options.value_heads);
    return {.name = fmt::format("brgemm C={} (bound)", chunk),
            .run =
                [=] {
                    LaneTimes times;
                    times.us["forward"] = count * time_products(*runner, forward, group, chunk);
                    times.us["backward"] = count * time_products(*runner, backward, group, chunk);
                    return times;
                },
            .isa = available_isas().back(),
            .repeats = options.repeats};
}

}  // namespace

Lane brgemm_lane(const BenchGdnOptions& options,
                 std::int64_t chunk,
                 std::int64_t tokens,
                 at::ScalarType dtype) {
    return dtype == at::kBFloat16 ? make_lane<at::BFloat16>(options, chunk, tokens, dtype)
                                  : make_lane<float>(options, chunk, tokens, dtype);
}

}  // namespace hybridcp::cli

#include "kernels/conv/causal_conv.h"

#include <ATen/OpMathType.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "hybridcp/error.h"
#include "kernels/conv/fused_conv.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Elements of one block of rows: its fp32 temporaries stay in the second-level cache.
constexpr std::int64_t kBlockElements = std::int64_t{1} << 17;

/// Where the rows of packed segments lie in one buffer that has W-1 rows of history before each
/// segment. An output row r of the buffer is the convolution of its rows r .. r+W-1; those that mix
/// two segments are never read.
class PaddedRows {
  public:
    PaddedRows(const std::vector<std::int64_t>& offsets,
               std::int64_t history,
               const at::Device& device)
        : history_(history), num_tokens_(offsets.back()) {
        num_segments_ = static_cast<std::int64_t>(offsets.size()) - 1;
        if (num_segments_ == 1) {
            return;  // the rows are two ranges: no index is needed
        }
        std::vector<std::int64_t> tokens, halos;
        tokens.reserve(static_cast<std::size_t>(num_tokens_));
        for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
            const std::int64_t begin = offsets[i] + static_cast<std::int64_t>(i) * history;
            for (std::int64_t row = 0; row < history; ++row) {
                halos.push_back(begin + row);
            }
            for (std::int64_t row = 0; row < offsets[i + 1] - offsets[i]; ++row) {
                tokens.push_back(begin + history + row);
            }
        }
        token_rows_ = at::tensor(tokens, at::kLong).to(device);
        halo_rows_ = at::tensor(halos, at::kLong).to(device);
    }

    [[nodiscard]] std::int64_t num_rows() const { return num_tokens_ + num_segments_ * history_; }
    /// Rows of the output that are computed; the last tokens of the buffer are no output's first
    /// row.
    [[nodiscard]] std::int64_t num_output_rows() const {
        return std::max<std::int64_t>(num_rows() - history_, 0);
    }

    /// x [T, C], halo [N, W-1, C] or undefined -> [num_rows, C].
    [[nodiscard]] at::Tensor pad(const at::Tensor& x, const at::Tensor& halo) const {
        const at::Tensor tokens = x.narrow(0, 0, num_tokens_);
        const at::Tensor history =
            halo.defined() ? halo.reshape({-1, x.size(1)})
                           : at::zeros({num_segments_ * history_, x.size(1)}, x.options());
        if (num_segments_ == 1) {
            return at::cat({history.to(x.scalar_type()), tokens});
        }
        at::Tensor padded = at::empty({num_rows(), x.size(1)}, x.options());
        padded.index_copy_(0, halo_rows_, history.to(x.scalar_type()));
        padded.index_copy_(0, token_rows_, tokens);
        return padded;
    }

    /// The rows of the tokens, as they lie in a buffer of outputs.
    [[nodiscard]] at::Tensor take_outputs(const at::Tensor& outputs) const {
        return num_segments_ == 1 ? outputs : outputs.index_select(0, token_rows_ - history_);
    }

    /// The transpose of take_outputs.
    [[nodiscard]] at::Tensor put_outputs(const at::Tensor& values) const {
        const at::Tensor tokens = values.narrow(0, 0, num_tokens_);
        if (num_segments_ == 1) {
            return tokens;
        }
        return at::zeros({num_output_rows(), values.size(1)}, values.options())
            .index_copy_(0, token_rows_ - history_, tokens);
    }

    [[nodiscard]] at::Tensor take_tokens(const at::Tensor& padded) const {
        return num_segments_ == 1 ? padded.narrow(0, history_, num_tokens_)
                                  : padded.index_select(0, token_rows_);
    }

    [[nodiscard]] at::Tensor take_halo(const at::Tensor& padded) const {
        const at::Tensor rows =
            num_segments_ == 1 ? padded.narrow(0, 0, history_) : padded.index_select(0, halo_rows_);
        return rows.reshape({num_segments_, history_, padded.size(1)});
    }

  private:
    std::int64_t history_ = 0;
    std::int64_t num_tokens_ = 0;
    std::int64_t num_segments_ = 0;
    at::Tensor token_rows_;
    at::Tensor halo_rows_;
};

/// sum_j taps[j] rows[r + j] for each output row r. rows [R + W-1, C], taps [W, C] -> [R, C].
at::Tensor correlate(const at::Tensor& rows, const at::Tensor& taps) {
    const std::int64_t num_outputs = rows.size(0) - taps.size(0) + 1;
    at::Tensor sum = rows.narrow(0, 0, num_outputs) * taps[0];
    for (std::int64_t j = 1; j < taps.size(0); ++j) {
        sum.addcmul_(rows.narrow(0, j, num_outputs), taps[j]);
    }
    return sum;
}

struct CausalConvSilu : torch::autograd::Function<CausalConvSilu> {
    static at::Tensor forward(AutogradContext* context,
                              const at::Tensor& x,
                              const at::Tensor& weight,
                              const std::optional<at::Tensor>& optional_halo,
                              const std::vector<std::int64_t>& segment_offsets) {
        const at::Tensor halo = optional_halo.value_or(at::Tensor());
        context->save_for_backward({x, weight, halo});
        context->saved_data["segment_offsets"] = segment_offsets;
        const PaddedRows layout(segment_offsets, weight.size(1) - 1, x.device());
        const at::ScalarType dtype = at::toOpMathType(x.scalar_type());
        const at::Tensor padded = layout.pad(x, halo);
        const at::Tensor taps = weight.to(dtype).t().contiguous();  // [W, C]
        at::Tensor outputs = at::empty({layout.num_output_rows(), x.size(1)}, x.options());
        for_each_block(outputs, [&](std::int64_t begin, std::int64_t rows) {
            const at::Tensor block = padded.narrow(0, begin, rows + taps.size(0) - 1).to(dtype);
            at::Tensor convolved = correlate(block, taps);
            outputs.narrow(0, begin, rows).copy_(at::silu_(convolved));
        });
        const at::Tensor y = layout.take_outputs(outputs);
        return y.size(0) == x.size(0)
                   ? y
                   : at::cat({y, at::zeros({x.size(0) - y.size(0), x.size(1)}, x.options())});
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const variable_list saved = context->get_saved_variables();
        const at::Tensor &x = saved[0], &weight = saved[1], &halo = saved[2];
        const std::int64_t history = weight.size(1) - 1;
        const PaddedRows layout(context->saved_data["segment_offsets"].toIntVector(), history,
                                x.device());
        const at::ScalarType dtype = at::toOpMathType(x.scalar_type());
        const at::Tensor padded = layout.pad(x, halo);
        const at::Tensor dy = layout.put_outputs(gradients[0]);
        const at::Tensor taps = weight.to(dtype).t().contiguous();
        at::Tensor d_padded = at::zeros(padded.sizes(), padded.options().dtype(dtype));
        at::Tensor d_taps = at::zeros(taps.sizes(), taps.options());
        for_each_block(dy, [&](std::int64_t begin, std::int64_t rows) {
            const at::Tensor block = padded.narrow(0, begin, rows + history).to(dtype);
            const at::Tensor d_convolved =
                at::silu_backward(dy.narrow(0, begin, rows).to(dtype), correlate(block, taps));
            for (std::int64_t j = 0; j <= history; ++j) {
                d_padded.narrow(0, begin + j, rows).addcmul_(d_convolved, taps[j]);
                d_taps[j].add_((d_convolved * block.narrow(0, j, rows)).sum(0));
            }
        });
        at::Tensor dx = layout.take_tokens(d_padded).to(x.scalar_type());
        if (dx.size(0) != x.size(0)) {
            dx = at::cat({dx, at::zeros({x.size(0) - dx.size(0), x.size(1)}, x.options())});
        }
        const at::Tensor d_halo =
            halo.defined() ? layout.take_halo(d_padded).to(halo.scalar_type()) : at::Tensor();
        return {dx, d_taps.t().to(weight.scalar_type()), d_halo, at::Tensor()};
    }

  private:
    template <typename Body>
    static void for_each_block(const at::Tensor& outputs, const Body& body) {
        const std::int64_t step =
            std::max<std::int64_t>(kBlockElements / std::max<std::int64_t>(outputs.size(1), 1), 16);
        for (std::int64_t begin = 0; begin < outputs.size(0); begin += step) {
            body(begin, std::min(step, outputs.size(0) - begin));
        }
    }
};

}  // namespace

at::Tensor causal_conv_silu(const at::Tensor& x,
                            const at::Tensor& weight,
                            const at::Tensor& halo,
                            const std::vector<std::int64_t>& segment_offsets) {
    HCP_CHECK(
        x.dim() == 2 && weight.dim() == 2 && weight.size(0) == x.size(1) && weight.size(1) >= 1,
        "causal_conv_silu: x must be [T, C] and weight [C, W], got {} and {}",
        fmt::join(x.sizes(), "x"), fmt::join(weight.sizes(), "x"));
    HCP_CHECK(!segment_offsets.empty() && segment_offsets.front() == 0 &&
                  segment_offsets.back() <= x.size(0) &&
                  std::is_sorted(segment_offsets.begin(), segment_offsets.end()),
              "causal_conv_silu: segment offsets must start at 0, not decrease and end at most at "
              "T = {}, got [{}]",
              x.size(0), fmt::join(segment_offsets, ", "));
    const std::vector<std::int64_t> halo_shape{
        static_cast<std::int64_t>(segment_offsets.size()) - 1, weight.size(1) - 1, x.size(1)};
    HCP_CHECK(!halo.defined() || halo.sizes() == at::IntArrayRef(halo_shape),
              "causal_conv_silu: halo must be [N, W-1, C] = {}, got {}", fmt::join(halo_shape, "x"),
              fmt::join(halo.sizes(), "x"));
    // Autograd takes an absent input as an empty optional, not as an undefined tensor.
    const std::optional<at::Tensor> optional_halo =
        halo.defined() ? std::optional(halo) : std::nullopt;
    if (takes_fused_conv(x, weight)) {
        return fused_conv_silu(x, weight, optional_halo, segment_offsets);
    }
    return CausalConvSilu::apply(x, weight, optional_halo, segment_offsets);
}

}  // namespace hybridcp

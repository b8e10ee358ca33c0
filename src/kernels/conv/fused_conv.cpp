#include "kernels/conv/fused_conv.h"

#include "kernels/conv/conv_kernels.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/simd/dispatch.h"

namespace hybridcp {

HCP_DECLARE_KERNELS(ConvKernels, conv_kernels)

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Tokens of a block. At its end backward computes W-1 convolutions once more, and it leaves one row
// of sums for the weight.
constexpr std::int64_t kBlockTokens = 256;

/// The arguments of a call in the form of the kernels; holds what they point to.
class Call {
  public:
    Call(const at::Tensor& x,
         const at::Tensor& weight,
         const at::Tensor& halo,
         const std::vector<std::int64_t>& offsets)
        : offsets_(offsets),
          x_(as_rows(x)),
          taps_(weight.to(at::kFloat).t().contiguous()),
          halo_(halo.defined() ? halo.to(x.scalar_type()).contiguous() : halo) {
        inputs = {.element = element_of(x),
                  .num_taps = weight.size(1),
                  .channels = weight.size(0),
                  .offsets = offsets_.data(),
                  .num_segments = static_cast<std::int64_t>(offsets_.size()) - 1,
                  .x = read_rows(x_),
                  .halo = halo_.defined() ? halo_.const_data_ptr() : nullptr,
                  .taps = taps_.const_data_ptr<float>()};
    }

    /// Calls body(block, index of its block of tokens, thread) on the threads of ATen.
    template <typename Body>
    void for_each_conv_block(const Body& body) const {
        const std::int64_t columns = count_blocks(inputs.channels, kConvChannels);
        const std::int64_t num_tokens = offsets_.back();
        parallel_tasks(num_token_blocks() * columns, [&](std::int64_t task, int thread) {
            const std::int64_t row = task / columns;
            const std::int64_t token = row * kBlockTokens;
            const std::int64_t channel = task % columns * kConvChannels;
            const auto next = std::upper_bound(offsets_.begin(), offsets_.end(), token);
            body(
                ConvBlock{.tokens = {token, std::min(token + kBlockTokens, num_tokens)},
                          .channels = {channel, std::min(channel + kConvChannels, inputs.channels)},
                          .first_segment = next - offsets_.begin() - 1},
                row, thread);
        });
    }

    [[nodiscard]] std::int64_t num_token_blocks() const {
        return count_blocks(offsets_.back(), kBlockTokens);
    }

    ConvInputs inputs{};

  private:
    std::vector<std::int64_t> offsets_;
    at::Tensor x_;
    at::Tensor taps_;
    at::Tensor halo_;
};

/// Like x, with zeros behind the last segment.
at::Tensor empty_but_padding(const at::Tensor& x, std::int64_t num_tokens) {
    at::Tensor y = at::empty(x.sizes(), x.options());
    if (num_tokens < x.size(0)) {
        y.narrow(0, num_tokens, x.size(0) - num_tokens).zero_();
    }
    return y;
}

struct FusedConvSilu : torch::autograd::Function<FusedConvSilu> {
    static at::Tensor forward(AutogradContext* context,
                              const at::Tensor& x,
                              const at::Tensor& weight,
                              const std::optional<at::Tensor>& optional_halo,
                              const std::vector<std::int64_t>& offsets) {
        const at::Tensor halo = optional_halo.value_or(at::Tensor());
        context->save_for_backward({x, weight, halo});
        context->saved_data["segment_offsets"] = offsets;
        const Call call(x, weight, halo, offsets);
        at::Tensor y = empty_but_padding(x, offsets.back());
        const Rows rows = write_rows(y);
        const ConvKernels& kernels = conv_kernels(selected_isa());
        call.for_each_conv_block([&](const ConvBlock& block, std::int64_t /*row*/, int /*thread*/) {
            kernels.forward(call.inputs, rows, block);
        });
        return y;
    }

    static variable_list backward(AutogradContext* context, variable_list upstream) {
        const variable_list saved = context->get_saved_variables();
        const at::Tensor &x = saved[0], &weight = saved[1], &halo = saved[2];
        const std::vector<std::int64_t> offsets =
            context->saved_data["segment_offsets"].toIntVector();
        const Call call(x, weight, halo, offsets);
        const at::TensorOptions wide = x.options().dtype(at::kFloat);
        const at::Tensor dy = as_rows(upstream[0]);
        at::Tensor dx = empty_but_padding(x, offsets.back());
        at::Tensor d_halo = halo.defined() ? at::zeros(halo.sizes(), wide) : at::Tensor();
        at::Tensor partials =
            at::empty({call.num_token_blocks(), weight.size(1), weight.size(0)}, wide);
        at::Tensor rings = at::empty({max_threads(), weight.size(1) * kConvChannels}, wide);
        const ConvGradients all{.dy = read_rows(dy),
                                .dx = write_rows(dx),
                                .d_halo = halo.defined() ? d_halo.data_ptr<float>() : nullptr,
                                .d_taps = partials.data_ptr<float>(),
                                .ring = rings.data_ptr<float>()};
        const ConvKernels& kernels = conv_kernels(selected_isa());
        call.for_each_conv_block([&](const ConvBlock& block, std::int64_t row, int thread) {
            ConvGradients mine = all;
            mine.d_taps += row * partials.stride(0);
            mine.ring += thread * rings.stride(0);
            kernels.backward(call.inputs, mine, block);
        });
        return {dx, sum_partials(partials).t().to(weight.scalar_type()),
                halo.defined() ? d_halo.to(halo.scalar_type()) : d_halo, at::Tensor()};
    }
};

}  // namespace

bool takes_fused_conv(const at::Tensor& x, const at::Tensor& weight) {
    return takes_fused({x}) && weight.is_cpu() && weight.size(1) <= kConvMostTaps;
}

at::Tensor fused_conv_silu(const at::Tensor& x,
                           const at::Tensor& weight,
                           const std::optional<at::Tensor>& halo,
                           const std::vector<std::int64_t>& segment_offsets) {
    return FusedConvSilu::apply(x, weight, halo, segment_offsets);
}

}  // namespace hybridcp

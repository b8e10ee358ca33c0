#include "ops/sharded_run.h"

#include <gtest/gtest.h>

#include <numeric>

#include "rank_threads.h"

namespace hybridcp::testing {

namespace {

std::vector<at::Tensor> leaves(const OpInputs& inputs, const BatchPlan& plan) {
    std::vector<at::Tensor> result;
    for (const at::Tensor& tensor : inputs.tokens) {
        result.push_back(tensor.index_select(0, plan.flat_indices).requires_grad_(true));
    }
    for (const at::Tensor& weight : inputs.weights) {
        result.push_back(weight.detach().clone().requires_grad_(true));
    }
    return result;
}

struct LocalResult {
    at::Tensor output;
    std::vector<at::Tensor> gradients;
};

LocalResult run_once(const OpInputs& inputs, const Op& op, const CpContext& context) {
    const std::vector<at::Tensor> local = leaves(inputs, *context.plan);
    const at::Tensor output = op(local, context);
    const at::Tensor d_output = inputs.d_output.index_select(0, context.plan->flat_indices);
    (output * d_output).sum().backward();
    LocalResult result{.output = output.detach(), .gradients = {}};
    for (const at::Tensor& leaf : local) {
        result.gradients.push_back(leaf.grad().defined() ? leaf.grad() : at::zeros_like(leaf));
    }
    return result;
}

void expect_same_bits(const LocalResult& a, const LocalResult& b) {
    EXPECT_TRUE(at::equal(a.output, b.output)) << "the output changed from one pass to the next";
    for (std::size_t i = 0; i < a.gradients.size(); ++i) {
        EXPECT_TRUE(at::equal(a.gradients[i], b.gradients[i])) << "gradient " << i << " changed";
    }
}

}  // namespace

ShardedRun run_sharded(const Layout& layout,
                       const Parallel& parallel,
                       const OpInputs& inputs,
                       const Op& op,
                       int repeats) {
    ShardedRun run;
    run.traffic.resize(static_cast<std::size_t>(layout.num_ranks()));
    run.output = at::zeros_like(inputs.d_output);
    for (const at::Tensor& tensor : inputs.tokens) {
        run.gradients.push_back(at::full_like(tensor, std::nan("")));
    }
    for (const at::Tensor& weight : inputs.weights) {
        run.gradients.push_back(at::zeros_like(weight));
    }
    std::vector<LocalResult> results(run.traffic.size());
    std::vector<at::Tensor> indices(run.traffic.size());
    run_ranks(layout.num_ranks(), [&](Group& group) {
        const BatchPlan plan = make_batch_plan(layout, group.rank(), kConvWidth, at::kCPU);
        const CpContext context{.group = &group, .plan = &plan, .parallel = parallel};
        LocalResult local = run_once(inputs, op, context);
        for (int i = 1; i < repeats; ++i) {
            expect_same_bits(run_once(inputs, op, context), local);
        }
        const auto rank = static_cast<std::size_t>(group.rank());
        run.traffic[rank] = group.recorder();
        indices[rank] = plan.flat_indices;
        results[rank] = std::move(local);
    });
    for (std::size_t rank = 0; rank < results.size(); ++rank) {
        const LocalResult& local = results[rank];
        run.output.index_copy_(0, indices[rank], local.output);
        for (std::size_t i = 0; i < local.gradients.size(); ++i) {
            if (i < inputs.tokens.size()) {
                run.gradients[i].index_copy_(0, indices[rank], local.gradients[i]);
            } else {
                run.gradients[i] += local.gradients[i];
            }
        }
    }
    return run;
}

double relative_error(const at::Tensor& a, const at::Tensor& b) {
    if (b.numel() == 0) {
        return 0.0;
    }
    const double reference = b.to(at::kDouble).norm().item<double>();
    const double difference = (a.to(at::kDouble) - b.to(at::kDouble)).norm().item<double>();
    return reference == 0.0 ? difference : difference / reference;
}

double worst_head_error(const at::Tensor& a, const at::Tensor& b) {
    double largest_norm = 0.0;
    for (std::int64_t h = 0; h < b.size(1); ++h) {
        largest_norm = std::max(largest_norm, b.select(1, h).to(at::kDouble).norm().item<double>());
    }
    double worst = 0.0;
    for (std::int64_t h = 0; h < b.size(1); ++h) {
        const at::Tensor reference = b.select(1, h).to(at::kDouble);
        const double difference =
            (a.select(1, h).to(at::kDouble) - reference).norm().item<double>();
        const double norm = reference.norm().item<double>();
        const double allowed_absolute = 1e-6 * largest_norm;
        if (std::isnan(difference)) {
            return difference;
        }
        if (difference > allowed_absolute) {
            worst = std::max(worst, (difference - allowed_absolute) / std::max(norm, 1e-300));
        }
    }
    return worst;
}

Layout make_layout(const LayoutCase& layout_case, int num_ranks) {
    LayoutOptions options{.kind = layout_case.kind,
                          .cut = layout_case.cut,
                          .num_ranks = num_ranks,
                          .document_lengths = layout_case.document_lengths,
                          .shard_lengths = {}};
    if (!layout_case.shard_weights.empty()) {
        const std::int64_t total =
            std::accumulate(layout_case.document_lengths.begin(),
                            layout_case.document_lengths.end(), std::int64_t{0});
        std::int64_t weight_sum = 0;
        for (int r = 0; r < num_ranks; ++r) {
            weight_sum +=
                layout_case
                    .shard_weights[static_cast<std::size_t>(r) % layout_case.shard_weights.size()];
        }
        std::int64_t given = 0;
        for (int r = 0; r < num_ranks; ++r) {
            const std::int64_t weight =
                layout_case
                    .shard_weights[static_cast<std::size_t>(r) % layout_case.shard_weights.size()];
            const std::int64_t size = r + 1 == num_ranks
                                          ? total - given
                                          : std::min(total - given, total * weight / weight_sum);
            options.shard_lengths.push_back(size);
            given += size;
        }
    }
    return Layout::make(options);
}

std::vector<LayoutCase> layout_cases() {
    const auto row = LayoutCut::kRow;
    const std::vector<LayoutCase> contiguous{
        {.name = "one_token", .document_lengths = {1}},
        {.name = "t63", .document_lengths = {63}},
        {.name = "t65_row", .document_lengths = {65}, .cut = row},
        {.name = "t300", .document_lengths = {300}},
        {.name = "two_rows", .document_lengths = {70, 70}},
        {.name = "packed", .document_lengths = {5, 0, 100, 1, 1, 130, 20, 0}},
        {.name = "packed_row", .document_lengths = {0, 5, 0, 100, 1, 1, 130, 20, 0}, .cut = row},
        {.name = "uneven", .document_lengths = {170}, .cut = row, .shard_weights = {5, 0, 1, 17}},
        {.name = "uneven_packed",
         .document_lengths = {3, 90, 2, 60},
         .cut = row,
         .shard_weights = {1, 9, 0, 0, 30}},
        {.name = "tiny_shards", .document_lengths = {9, 2}, .cut = row},
        {.name = "shorter_than_ranks", .document_lengths = {2, 3}},
        {.name = "last_ranks_empty",
         .document_lengths = {90},
         .cut = row,
         .shard_weights = {80, 1}},
    };
    std::vector<LayoutCase> cases = contiguous;
    for (LayoutCase layout_case : contiguous) {
        for (const LayoutKind kind : {LayoutKind::kZigzag, LayoutKind::kFolded}) {
            if (layout_case.shard_weights.empty()) {
                layout_case.kind = kind;
                cases.push_back(layout_case);
                cases.back().name += "_" + to_string(kind);
            }
        }
    }
    return cases;
}

}  // namespace hybridcp::testing

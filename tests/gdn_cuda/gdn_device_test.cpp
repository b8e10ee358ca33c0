// The Hopper backend on a GPU (built with HCP_CUDA; tools/gpu_check.sh): generated problems against
// the fp64 recurrence, and what must hold exactly. Long sequences: gdn_device_long_test.cpp.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "gdn_cuda/gpu_call.h"
#include "hybridcp/error.h"
#include "kernels/gdn_fused_check.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

/// Of what forward keeps for backward: nothing, a part or all, by turns.
double share_of_turn(std::size_t turn) {
    return static_cast<double>(turn % 3) * 0.5;
}

Tensors on_cpu(const Tensors& tensors) {
    Tensors moved;
    for (const auto& [name, x] : tensors) {
        moved[name] = x.cpu();
    }
    return moved;
}

void expect_identical(const Tensors& actual, const Tensors& expected) {
    for (const auto& [name, x] : expected) {
        EXPECT_TRUE(at::equal(actual.at(name), x)) << name;
    }
}

constexpr int kShards = 14;

class GdnOnGpu : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Shards, GdnOnGpu, ::testing::Range(0, kShards));

TEST_P(GdnOnGpu, GeneratedCases) {
    const auto cases = fused_cases({{128, 128}, {128, 128}, {40, 100}, {64, 64}});
    BarCount count;
    for (std::size_t n = static_cast<std::size_t>(GetParam()); n < cases.size(); n += kShards) {
        const GdnCase& c = cases[n].gdn_case;
        if (cases[n].regime->bf16 && c.d_o.defined() && c.options.scale != 0.0) {
            check_bf16(cases[n], {gpu_variant(share_of_turn(n / kShards))}, count,
                       {.emulations = cuda_emulations(), .beyond_bf16 = true});
        }
    }
    RecordProperty("comparisons", count.all);
    fmt::print("{} comparisons, {} of them above the bar in the emulation\n", count.all,
               count.above);
}

// Operands in fp16, and a segment that is too long for them.
TEST(GdnOnGpuExact, RepeatsAreIdentical) {
    for (const std::vector<std::int64_t>& offsets :
         {std::vector<std::int64_t>{0, 1000, 1000, 1900}, {0, 4100, 4500}}) {
        GdnCase gdn_case = on_gpu(bf16_case(offsets, 4, 8, 5));
        gdn_case.inputs.g.slice(1, 0, 2).mul_(1e-3);  // two heads remember all of their segments
        const Tensors first = run_all(*make_gpu_call(gdn_case), gdn_case);
        for (std::size_t repeat = 0; repeat < 1000; ++repeat) {
            gdn_case.options.kept_share = share_of_turn(repeat);
            const Tensors again = run_all(*make_gpu_call(gdn_case), gdn_case);
            for (const auto& [name, x] : first) {
                ASSERT_TRUE(at::equal(again.at(name), x)) << name << ", repeat " << repeat;
            }
        }
    }
}

TEST(GdnOnGpuExact, StridesPaddingAndStreams) {
    const GdnCase plain = bf16_case({0, 130, 299}, 2, 4, 6);
    const Tensors expected = on_cpu(run_all(*make_gpu_call(on_gpu(plain)), on_gpu(plain)));
    const GdnCase wide = on_gpu(strided(plain));
    expect_identical(on_cpu(run_all(*make_gpu_call(wide), wide)), expected);
    const GdnCase a = on_gpu(plain);
    Tensors results[2];
    c10::cuda::device_synchronize();
    for (auto& result : results) {
        const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
        result = run_all(*make_gpu_call(a), a);
    }
    c10::cuda::device_synchronize();
    expect_identical(on_cpu(results[0]), expected);
    expect_identical(on_cpu(results[1]), expected);
}

TEST(GdnOnGpuExact, GraphsReplayOnNewContents) {
    const GdnCase first = on_gpu(bf16_case({0, 300}, 2, 4, 7));
    const GdnCase second = on_gpu(bf16_case({0, 300}, 2, 4, 8));
    GdnCase live = first;
    GdnInputs& in = live.inputs;
    for (Tensor* x :
         {&in.q, &in.k, &in.v, &in.g, &in.beta, &live.d_o, &live.S_start, &live.dS_end}) {
        *x = x->clone();
    }
    const GdnSegments segments(live.offsets);
    const auto run = [&] {
        return run_all(*make_gdn_call(GdnBackend::kFused, in, segments, live.options), live);
    };
    (void)run();
    at::cuda::CUDAGraph graph;
    Tensors captured;
    {
        const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
        c10::cuda::device_synchronize();
        graph.capture_begin();
        captured = run();
        graph.capture_end();
    }
    for (const GdnCase* problem : {&second, &first}) {
        in.q.copy_(problem->inputs.q);
        in.k.copy_(problem->inputs.k);
        in.v.copy_(problem->inputs.v);
        in.g.copy_(problem->inputs.g);
        in.beta.copy_(problem->inputs.beta);
        live.d_o.copy_(problem->d_o);
        live.S_start.copy_(problem->S_start);
        live.dS_end.copy_(problem->dS_end);
        graph.replay();
        c10::cuda::device_synchronize();
        expect_identical(captured, run_all(*make_gpu_call(*problem), *problem));
    }
}

/// Pieces of a head that forgets in one half alone reach back differently far. In fp16, whose bars
/// show it.
TEST(GdnOnGpuExact, UnevenGates) {
    const GdnCase c = uneven_case(2100);  // two pieces
    const Tensors expected = run_all(GdnBackend::kReference, with_dtype(c, at::kDouble));
    for (const double share : {0.0, 0.5, 1.0}) {
        SCOPED_TRACE(fmt::format("share {}", share));
        const auto call = gpu_variant(share, {.fp16_tokens = 4096}).make_call(c);
        expect_close(run_all(*call, c), expected, {{"dbeta", 5e-3}, {"dg", 4e-3}}, 3e-3);
    }
}

/// A sequence cut anywhere and chained by (S, M) is the whole.
TEST(GdnOnGpuSummaries, ChainToTheWhole) {
    for (const double decay : {0.0, -0.05, -2.0, -30.0}) {
        for (const std::int64_t cut : {64, 100, 1, 1023}) {
            GdnCase whole = bf16_case({0, 1024}, 2, 4, 9);
            whole.inputs.g.fill_(decay);
            const Tensors expected = run_all(*gpu_variant().make_call(whole), whole);
            GdnCase parts = whole;
            parts.offsets = {0, cut, 1024};
            const auto call = gpu_variant().make_call(parts);
            const GdnSummary summary = call->summary();
            const Tensor middle = at::matmul(summary.M[0], whole.S_start[0]) + summary.S[0];
            const GdnOutput output = call->forward(at::stack({whole.S_start[0], middle}));
            const Tensor dS = call->gradient_summary(whole.d_o);
            const Tensor d_middle = at::matmul(summary.M[1].mT(), whole.dS_end[0]) + dS[1];
            const GdnGradients gradients =
                call->backward(whole.d_o, at::stack({d_middle, whole.dS_end[0]}));
            SCOPED_TRACE(fmt::format("decay {}, cut {}", decay, cut));
            constexpr double kChained = 3e-3;
            const Tensors actual = {{"o", output.o},
                                    {"S_end", output.S_end.narrow(0, 1, 1)},
                                    {"dq", gradients.dq},
                                    {"dk", gradients.dk},
                                    {"dv", gradients.dv},
                                    {"dbeta", gradients.dbeta},
                                    {"dS_start", gradients.dS_start.narrow(0, 0, 1)}};
            for (const auto& [name, x] : actual) {
                EXPECT_LE(worst_head_error(x, expected.at(name)), kChained) << name;
            }
        }
    }
}

TEST(GdnOnGpuSummaries, OfParts) {
    for (const std::int64_t chunks_of_two : {1000, 8, 4}) {  // one part, two, four
        for (const std::int64_t fp16_tokens : {1, 2048}) {   // bf16, fp16
            SCOPED_TRACE(fmt::format("{} chunks, {} tokens", chunks_of_two, fp16_tokens));
            check_uneven_summaries(gpu_variant(
                1.0, {.chunks_of_two_summary_parts = chunks_of_two, .fp16_tokens = fp16_tokens}));
        }
    }
}

TEST(GdnOnGpuRefusals, NameWhatIsNotTaken) {
    const auto message = [](const GdnCase& gdn_case) -> std::string {
        try {
            (void)make_gpu_call(on_gpu(gdn_case));
        } catch (const UsageError& error) {
            return error.what();
        }
        return "";
    };
    const GdnCase good = bf16_case({0, 10}, 1, 2, 1);
    EXPECT_NE(message(with_dtype(good, at::kFloat)).find("bfloat16"), std::string::npos);
    EXPECT_NE(message(with_dtype(generated_case({{0, 10}, 10, 1, 2, 64, 256}, 1), at::kBFloat16))
                  .find("head dims up to 128"),
              std::string::npos);
    EXPECT_NE(message(bf16_case({0, 10}, 1, 9, 1)).find("up to 8 value heads"), std::string::npos);
}

}  // namespace
}  // namespace hybridcp::test

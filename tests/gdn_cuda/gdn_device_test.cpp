// The Hopper backend on a GPU (built with HCP_CUDA; tools/gpu_check.sh): generated problems against
// the fp64 recurrence, long sequences, and what must hold exactly.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <thread>

#include "hybridcp/error.h"
#include "kernels/gdn/backends.h"
#include "kernels/gdn_fused_check.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

Tensor on_gpu(const Tensor& x) {
    if (!x.defined()) {
        return x;
    }
    // Strides are part of a case.
    const Tensor storage = at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kCUDA));
    storage.copy_(x);
    return storage;
}

GdnCase on_gpu(const GdnCase& gdn_case) {
    GdnCase moved = gdn_case;
    GdnInputs& in = moved.inputs;
    for (Tensor* x :
         {&in.q, &in.k, &in.v, &in.g, &in.beta, &moved.S_start, &moved.d_o, &moved.dS_end}) {
        *x = on_gpu(*x);
    }
    in.g = in.g.to(at::kFloat);
    return moved;
}

std::shared_ptr<GdnCall> make_gpu_call(const GdnCase& on_device) {
    return make_gdn_call(GdnBackend::kFused, on_device.inputs, on_device.offsets,
                         on_device.options);
}
std::shared_ptr<GdnCall> make_gpu_call(const GdnCase& on_device, const gdn::CudaLimits& limits) {
    return gdn::make_cuda_call(
        gdn::make_problem(on_device.inputs, on_device.offsets, on_device.options), limits);
}

/// A call on the GPU whose arguments and results are on the CPU.
class GpuCall final : public GdnCall {
  public:
    explicit GpuCall(std::shared_ptr<GdnCall> call) : call_(std::move(call)) {}
    [[nodiscard]] const std::vector<bool>* independent() const override {
        return call_->independent();
    }
    [[nodiscard]] GdnSummary summary() override {
        const GdnSummary result = call_->summary();
        return {result.S.cpu(), result.M.cpu()};
    }
    [[nodiscard]] GdnOutput forward(const Tensor& S_start) override {
        const GdnOutput result = call_->forward(on_gpu(S_start));
        return {result.o.cpu(), result.S_end.cpu()};
    }
    [[nodiscard]] Tensor gradient_summary(const Tensor& d_o) override {
        return call_->gradient_summary(on_gpu(d_o)).cpu();
    }
    void release_intermediates() override { call_->release_intermediates(); }
    [[nodiscard]] GdnGradients backward(const Tensor& d_o, const Tensor& dS_end) override {
        const GdnGradients x = call_->backward(on_gpu(d_o), on_gpu(dS_end));
        return {x.dq.cpu(), x.dk.cpu(), x.dv.cpu(), x.dg.cpu(), x.dbeta.cpu(), x.dS_start.cpu()};
    }

  private:
    std::shared_ptr<GdnCall> call_;
};

std::vector<FusedVariant> gpu_variant(double kept_share = 1.0) {
    return {{"cuda", [=](const GdnCase& gdn_case) -> std::shared_ptr<GdnCall> {
                 GdnCase c = gdn_case;
                 c.options.kept_share = kept_share;
                 return std::make_shared<GpuCall>(make_gpu_call(on_gpu(c)));
             }}};
}
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
            check_bf16(cases[n], gpu_variant(share_of_turn(n / kShards)), count,
                       {.emulations = cuda_emulations(), .beyond_bf16 = true});
        }
    }
    RecordProperty("comparisons", count.all);
    fmt::print("{} comparisons, {} of them above the bar in the emulation\n", count.all,
               count.above);
}

/// One head of a long sequence in fp64, piece by piece: S forward, dS backward.
Tensors long_reference(const GdnCase& gdn_case, std::int64_t head) {
    constexpr std::int64_t kPiece = 512;
    const GdnInputs& in = gdn_case.inputs;
    const std::int64_t tokens = in.q.size(0), group = in.v.size(1) / in.q.size(1);
    const auto part = [&](const Tensor& x, std::int64_t which, std::int64_t begin) {
        return x.narrow(0, begin, std::min(kPiece, tokens - begin))
            .narrow(1, which, 1)
            .to(at::kDouble);
    };
    const auto call_at = [&](std::int64_t begin) {
        return make_gdn_call(
            GdnBackend::kReference,
            {part(in.q, head / group, begin), part(in.k, head / group, begin),
             part(in.v, head, begin), part(in.g, head, begin), part(in.beta, head, begin)},
            GdnSegments({0, std::min(kPiece, tokens - begin)}), gdn_case.options);
    };
    // A call holds every state of its tokens, so those of one piece at a time: made again backward.
    std::vector<Tensor> o, starts;
    Tensor state = gdn_case.S_start.narrow(1, head, 1).to(at::kDouble);
    for (std::int64_t begin = 0; begin < tokens; begin += kPiece) {
        starts.push_back(state);
        const GdnOutput output = call_at(begin)->forward(state);
        o.push_back(output.o);
        state = output.S_end;
    }
    Tensors result{{"o", at::cat(o)}, {"S_end", state}};
    Tensor d_state = gdn_case.dS_end.narrow(1, head, 1).to(at::kDouble);
    const std::size_t pieces = starts.size();
    std::vector<Tensor> dv(pieces), dg(pieces), dbeta(pieces), dq(pieces), dk(pieces);
    for (std::size_t i = pieces; i-- > 0;) {
        const std::int64_t begin = static_cast<std::int64_t>(i) * kPiece;
        const auto call = call_at(begin);
        (void)call->forward(starts[i]);
        const GdnGradients x = call->backward(part(gdn_case.d_o, head, begin), d_state);
        d_state = x.dS_start;
        dv[i] = x.dv;
        dg[i] = x.dg;
        dbeta[i] = x.dbeta;
        dq[i] = x.dq;
        dk[i] = x.dk;
    }
    result["dS_start"] = d_state;
    result["dv"] = at::cat(dv);
    result["dg"] = at::cat(dg);
    result["dbeta"] = at::cat(dbeta);
    result["dq"] = at::cat(dq);  // of this value head alone
    result["dk"] = at::cat(dk);
    return result;
}

void check_long(std::int64_t tokens, const std::string& gates) {
    SCOPED_TRACE(fmt::format("{} tokens, gates {}", tokens, gates));
    GdnCase gdn_case = bf16_case({0, tokens}, 8, 16, 3);
    gdn_case.inputs.g = at::log_sigmoid(at::randn(gdn_case.inputs.g.sizes())) / 16;
    if (gates == "zero25") {
        gdn_case.inputs.g.narrow(1, 0, 4).zero_();
    }
    const Tensors actual = run_all(*gpu_variant(0.4)[0].make_call(gdn_case), gdn_case);
    // Both value heads of two key heads, so that dq and dk are whole.
    std::vector<Tensors> heads(4);
    const std::vector<std::int64_t> chosen = {0, 1, 14, 15};
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < chosen.size(); ++i) {
        threads.emplace_back([&, i] { heads[i] = long_reference(gdn_case, chosen[i]); });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    const std::map<std::string, double> bars{{"dk", 6e-3}, {"dbeta", 6e-3}, {"dg", 8e-3}};
    for (std::size_t i = 0; i < chosen.size(); ++i) {
        for (const auto& [name, reference] : heads[i]) {
            const bool by_key_head = name == "dq" || name == "dk";
            if (by_key_head && i % 2 == 1) {
                continue;
            }
            const Tensor expected = by_key_head ? reference + heads[i + 1].at(name) : reference;
            const std::int64_t head = by_key_head ? chosen[i] / 2 : chosen[i];
            const auto bar = bars.find(name);
            EXPECT_LE(worst_head_error(actual.at(name).narrow(1, head, 1), expected),
                      bar == bars.end() ? 5e-3 : bar->second)
                << name << " of head " << head;
        }
    }
}

TEST(GdnOnGpuLong, Tokens8K) {
    check_long(8192, "ls16");
    check_long(8192 - 37, "zero25");
}
TEST(GdnOnGpuLong, Tokens32K) {
    check_long(32768, "ls16");
    check_long(32768, "zero25");
}
TEST(GdnOnGpuLong, Tokens128K) {
    check_long(131072 + 1, "ls16");
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

/// A sequence cut anywhere and chained by (S, M) is the whole.
TEST(GdnOnGpuSummaries, ChainToTheWhole) {
    for (const double decay : {0.0, -0.05, -2.0, -30.0}) {
        for (const std::int64_t cut : {64, 100, 1, 1023}) {
            GdnCase whole = bf16_case({0, 1024}, 2, 4, 9);
            whole.inputs.g.fill_(decay);
            const Tensors expected = run_all(*gpu_variant()[0].make_call(whole), whole);
            GdnCase parts = whole;
            parts.offsets = {0, cut, 1024};
            const auto call = gpu_variant()[0].make_call(parts);
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
    for (const std::int64_t chunks_of_two : {160, 8, 4}) {  // one part, two, four
        for (const std::int64_t fp16_tokens : {1, 2048}) {  // bf16, fp16
            SCOPED_TRACE(fmt::format("{} chunks, {} tokens", chunks_of_two, fp16_tokens));
            const gdn::CudaLimits limits{.chunks_of_two_summary_parts = chunks_of_two,
                                         .fp16_tokens = fp16_tokens};
            check_uneven_summaries({"cuda", [&](const GdnCase& c) {
                                        return std::make_shared<GpuCall>(
                                            make_gpu_call(on_gpu(c), limits));
                                    }});
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

// Long sequences on a GPU against the fp64 recurrence, of some heads.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <thread>

#include "gdn_cuda/gpu_call.h"
#include "kernels/gdn_support.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

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
    const Tensors actual = run_all(*gpu_variant(0.4).make_call(gdn_case), gdn_case);
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

}  // namespace
}  // namespace hybridcp::test

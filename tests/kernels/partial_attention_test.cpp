#include "kernels/attention/partial_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "hybridcp/error.h"
#include "kernels/comparison.h"

namespace hybridcp {
namespace {

using namespace testing;

constexpr double kScale = 0.3;
constexpr std::int64_t kQueryHeads = 4;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kDim = 16;

/// A run of a document's keys, and the blocks of all queries that see some of them: the run's own
/// queries and those after it.
struct Part {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::vector<AttentionBlock> blocks;
};

std::vector<Part> cut_keys(const std::vector<std::int64_t>& cuts, std::uint32_t seed) {
    std::vector<Part> parts;
    const std::int64_t num_tokens = cuts.back();
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        Part& part = parts.emplace_back(Part{cuts[i], cuts[i + 1], {}});
        const std::int64_t num_keys = part.end - part.begin;
        part.blocks.push_back({part.begin, part.end, 0, num_keys});
        if (part.end < num_tokens) {
            part.blocks.push_back({part.end, num_tokens, 0, num_keys, false});
        }
    }
    std::shuffle(parts.begin(), parts.end(), std::mt19937(seed));
    return parts;
}

struct Tensors {
    at::Tensor q, k, v, d_o;
};

Tensors make_tensors(std::int64_t num_tokens, at::ScalarType dtype) {
    return {random_normal({num_tokens, kQueryHeads, kDim}, 1).to(dtype),
            random_normal({num_tokens, kKvHeads, kDim}, 2).to(dtype),
            random_normal({num_tokens, kKvHeads, kDim}, 3).to(dtype),
            random_normal({num_tokens, kQueryHeads, kDim}, 4).to(dtype)};
}

struct Result {
    AttentionOutput output;
    std::vector<at::Tensor> gradients;  // of q, k, v
};

/// One call over all keys, in fp64.
Result whole(const Tensors& x) {
    const std::vector<at::Tensor> inputs{leaf(x.q.to(at::kDouble)), leaf(x.k.to(at::kDouble)),
                                         leaf(x.v.to(at::kDouble))};
    const std::int64_t T = x.q.size(0);
    const AttentionOutput output =
        causal_attention(inputs[0], inputs[1], inputs[2], {{0, T, 0, T}}, kScale);
    return {output, gradients_of(output.o, x.d_o.to(at::kDouble), inputs)};
}

/// Keys and values of a part as a ring holds them: side by side, hence not contiguous.
AttentionPart make_part(const Tensors& x, const Part& part) {
    const at::Tensor kv = at::stack({x.k, x.v}, 1).slice(0, part.begin, part.end);
    return {.q = x.q,
            .k = kv.select(1, 0),
            .v = kv.select(1, 1),
            .blocks = part.blocks,
            .scale = kScale};
}

Result in_parts(const Tensors& x, const std::vector<Part>& parts) {
    AttentionOutput sum = attention_to_no_keys(x.q);
    for (const Part& part : parts) {
        attend(make_part(x, part), sum);
    }
    const AttentionRows rows = make_attention_rows(sum, x.d_o);
    const at::Tensor dq = at::zeros_like(sum.o);
    const at::Tensor d_kv = at::zeros({x.k.size(0), 2, kKvHeads, kDim}, sum.o.options());
    for (const Part& part : parts) {
        const at::Tensor rows_kv = d_kv.slice(0, part.begin, part.end);
        attend_backward(make_part(x, part), rows,
                        {.dq = dq, .dk = rows_kv.select(1, 0), .dv = rows_kv.select(1, 1)});
    }
    return {sum, {dq, d_kv.select(1, 0), d_kv.select(1, 1)}};
}

const std::vector<std::vector<std::int64_t>>& cases() {
    static const std::vector<std::vector<std::int64_t>> all{
        {0, 1}, {0, 1, 2}, {0, 65}, {0, 7, 8, 40, 65}, {0, 100, 101, 350, 600}};
    return all;
}

TEST(PartialAttention, PartsInAnyOrderEqualOneCall) {
    for (std::uint32_t seed = 0; const std::vector<std::int64_t>& cuts : cases()) {
        SCOPED_TRACE(::testing::PrintToString(cuts));
        for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
            const Tensors x = make_tensors(cuts.back(), dtype);
            const Result expected = whole(x);
            const at::ScalarType sums = dtype == at::kDouble ? at::kDouble : at::kFloat;
            const Result result = in_parts(x, cut_keys(cuts, ++seed));
            const bool exact = dtype == at::kDouble;
            EXPECT_EQ(result.output.o.scalar_type(), sums);
            EXPECT_LE(relative_l2(result.output.o, expected.output.o), exact ? 1e-13 : kOutputBar);
            EXPECT_LE(relative_l2(result.output.lse, expected.output.lse), exact ? 1e-13 : 1e-6);
            for (std::size_t i = 0; i < 3; ++i) {
                EXPECT_LE(relative_l2(result.gradients[i], expected.gradients[i]),
                          exact ? 1e-12 : kGradientBar)
                    << "gradient " << "qkv"[i] << " " << dtype;
            }
        }
    }
}

TEST(PartialAttention, TheFirstPartIsTakenOverBitForBit) {
    const Tensors x = make_tensors(65, at::kFloat);
    const std::vector<AttentionBlock> blocks{{0, 40, 0, 40}, {50, 65, 10, 40, false}};
    AttentionOutput sum = attention_to_no_keys(x.q);
    attend({.q = x.q, .k = x.k, .v = x.v, .blocks = blocks, .scale = kScale}, sum);
    const AttentionOutput whole = causal_attention(x.q, x.k, x.v, blocks, kScale);
    EXPECT_TRUE(sum.o.equal(whole.o));
    EXPECT_TRUE(sum.lse.equal(whole.lse));  // -inf for queries without keys
    // and a part without blocks changes nothing
    attend({.q = x.q, .k = x.k.narrow(0, 0, 0), .v = x.v.narrow(0, 0, 0), .blocks = {}}, sum);
    EXPECT_TRUE(sum.o.equal(whole.o));
}

TEST(PartialAttention, PartsOfVeryDifferentWeightStayFinite) {
    Tensors x = make_tensors(60, at::kFloat);
    x.k.narrow(0, 20, 20).mul_(300);  // scores of hundreds between two parts of ordinary ones
    const std::vector<Part> parts = cut_keys({0, 20, 40, 60}, 2);
    const Result expected = whole(x);
    const Result result = in_parts(x, parts);
    EXPECT_LE(relative_l2(result.output.lse, expected.output.lse), 1e-6);
    EXPECT_LE(relative_l2(result.output.o, expected.output.o), 1e-3);  // fp32 scores of 1000
    for (const at::Tensor& gradient : result.gradients) {
        EXPECT_TRUE(gradient.isfinite().all().item<bool>());
    }
}

TEST(PartialAttention, RefusesWhatDoesNotFit) {
    const Tensors x = make_tensors(4, at::kFloat);
    AttentionOutput sum = attention_to_no_keys(x.q);
    const auto refuses = [&](const at::Tensor& k, const std::vector<AttentionBlock>& blocks) {
        EXPECT_THROW(attend({.q = x.q, .k = k, .v = k, .blocks = blocks}, sum), UsageError);
    };
    refuses(x.k.to(at::kBFloat16), {});
    refuses(x.k, {{0, 4, 0, 5, false}});
    refuses(x.k, {{0, 4, 1, 1, false}});
    refuses(x.k, {{0, 3, 0, 4, false}, {2, 4, 0, 4, false}});
}

}  // namespace
}  // namespace hybridcp

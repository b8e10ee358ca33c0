#include "kernels/attention/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <tuple>

#include "hybridcp/error.h"
#include "kernels/comparison.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/rotary/rotary.h"

namespace hybridcp {
namespace {

using namespace testing;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<AttentionBlock> documents(const std::vector<std::int64_t>& offsets) {
    std::vector<AttentionBlock> blocks;
    for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
        blocks.push_back({offsets[i], offsets[i + 1], offsets[i], offsets[i + 1]});
    }
    return blocks;
}

/// The definition in fp64: one explicit mask over all queries and keys, KV heads repeated, rows
/// without keys zero.
AttentionOutput naive_attention(const at::Tensor& q,
                                const at::Tensor& k,
                                const at::Tensor& v,
                                const std::vector<AttentionBlock>& blocks,
                                double scale) {
    at::Tensor visible = at::zeros({q.size(0), k.size(0)}, at::kBool);
    for (const AttentionBlock& block : blocks) {
        for (std::int64_t row = block.q_begin; row < block.q_end; ++row) {
            const std::int64_t end = block.kv_end - (block.causal ? block.q_end - 1 - row : 0);
            visible[row].narrow(0, block.kv_begin, end - block.kv_begin).fill_(true);
        }
    }
    const std::int64_t group = q.size(1) / k.size(1);
    const at::Tensor keys = k.repeat_interleave(group, 1), values = v.repeat_interleave(group, 1);
    const at::Tensor hidden = visible.logical_not().unsqueeze(0);
    const at::Tensor scores =
        (at::einsum("qhd,khd->hqk", {q, keys}) * scale).masked_fill(hidden, -kInfinity);
    const at::Tensor weights = at::where(hidden, at::zeros_like(scores), scores.softmax(2));
    return {at::einsum("hqk,khd->qhd", {weights, values}), scores.logsumexp(2).t()};
}

struct Case {
    std::string name;
    std::int64_t num_queries, num_keys, q_heads, kv_heads, dim;
    std::vector<AttentionBlock> blocks;
};

const std::vector<Case>& cases() {
    static const std::vector<Case> all{
        {"no_tokens", 0, 0, 2, 1, 8, {}},
        {"one_token", 1, 1, 2, 1, 8, documents({0, 1})},
        {"two", 2, 2, 2, 2, 8, documents({0, 2})},
        {"three", 3, 3, 3, 1, 5, documents({0, 3})},
        {"t63", 63, 63, 4, 2, 16, documents({0, 63})},
        {"t65", 65, 65, 4, 2, 16, documents({0, 65})},
        {"several_tiles", 600, 600, 4, 2, 16, documents({0, 600})},
        {"packed_with_empties", 140, 140, 6, 2, 16, documents({0, 0, 1, 3, 3, 66, 131, 131, 140})},
        {"padding_behind", 20, 20, 2, 1, 8, documents({0, 5, 12})},
        {"suffix_of_queries", 7, 65, 4, 2, 16, {{0, 7, 0, 65}}},
        {"one_query_many_keys", 1, 65, 4, 1, 16, {{0, 1, 0, 65}}},
        {"no_queries_some_keys", 3, 9, 4, 1, 16, {{0, 0, 0, 5}, {0, 3, 5, 9}}},
        {"two_blocks_share_keys", 300, 900, 2, 1, 16, {{0, 20, 0, 40}, {20, 300, 0, 900}}},
        {"out_of_order", 9, 12, 2, 2, 8, {{4, 9, 0, 6}, {0, 2, 6, 12}}},
        {"all_keys_visible", 300, 70, 4, 2, 16, {{0, 290, 3, 60, false}, {290, 300, 0, 70}}},
        {"many_queries_one_key", 400, 3, 4, 1, 16, {{0, 400, 1, 2, false}}},
    };
    return all;
}

struct Tensors {
    at::Tensor q, k, v, d_o;
};

Tensors make_tensors(const Case& c, at::ScalarType dtype) {
    return {random_normal({c.num_queries, c.q_heads, c.dim}, 1).to(dtype),
            random_normal({c.num_keys, c.kv_heads, c.dim}, 2).to(dtype),
            random_normal({c.num_keys, c.kv_heads, c.dim}, 3).to(dtype),
            random_normal({c.num_queries, c.q_heads, c.dim}, 4).to(dtype)};
}

/// |x - reference| in units of the bar, where rows that the reference has at -inf must be -inf too.
void expect_same_lse(const at::Tensor& lse, const at::Tensor& reference, double bar) {
    const at::Tensor none = reference.eq(-kInfinity);
    EXPECT_TRUE(lse.eq(-kInfinity).equal(none));
    EXPECT_LE(relative_l2(lse.masked_fill(none, 0), reference.masked_fill(none, 0)), bar);
}

void expect_equals_definition(const Case& c,
                              at::ScalarType dtype,
                              double output_bar,
                              double gradient_bar) {
    SCOPED_TRACE(c.name);
    const Tensors x = make_tensors(c, dtype);
    const double scale = 1 / std::sqrt(static_cast<double>(c.dim));
    const std::vector<at::Tensor> wide{leaf(x.q.to(at::kDouble)), leaf(x.k.to(at::kDouble)),
                                       leaf(x.v.to(at::kDouble))};
    const AttentionOutput reference = naive_attention(wide[0], wide[1], wide[2], c.blocks, scale);
    const auto expected = gradients_of(reference.o, x.d_o.to(at::kDouble), wide);
    const std::vector<at::Tensor> inputs{leaf(x.q), leaf(x.k), leaf(x.v)};
    const AttentionOutput output =
        causal_attention(inputs[0], inputs[1], inputs[2], c.blocks, scale);
    EXPECT_EQ(output.o.scalar_type(), dtype);
    EXPECT_FALSE(output.lse.requires_grad());
    EXPECT_LE(relative_l2(output.o, reference.o), output_bar);
    expect_same_lse(output.lse, reference.lse.detach(), dtype == at::kDouble ? 1e-12 : 1e-6);
    const auto gradients = gradients_of(output.o, x.d_o, inputs);
    for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(gradients[i].scalar_type(), dtype);
        EXPECT_LE(relative_l2(gradients[i], expected[i]), gradient_bar) << "gradient " << "qkv"[i];
    }
}

TEST(Attention, EqualsTheDefinition) {
    for (const Case& c : cases()) {
        expect_equals_definition(c, at::kFloat, kOutputBar, kGradientBar);
        expect_equals_definition(c, at::kDouble, 1e-13, 1e-12);
        expect_equals_definition(c, at::kBFloat16, kBf16Bar, kBf16Bar);
    }
}

TEST(Attention, GoldenGatedAttention) {
    for (const std::string name : {"b2", "t1", "varlen"}) {
        SCOPED_TRACE(name);
        const SafetensorsFile file = open_golden("gated_attention/" + name);
        const at::Tensor qg = leaf(file.read("qg")), k = leaf(file.read("k")),
                         v = leaf(file.read("v"));
        const at::Tensor q_norm = leaf(file.read("q_norm")), k_norm = leaf(file.read("k_norm"));
        const std::int64_t rows = qg.size(0), length = qg.size(1), tokens = rows * length;
        const std::int64_t dim = k.size(3);
        std::vector<std::int64_t> offsets;
        if (file.contains("cu_seqlens")) {
            const at::Tensor cuts = file.read("cu_seqlens").to(at::kLong);
            offsets.assign(cuts.data_ptr<std::int64_t>(),
                           cuts.data_ptr<std::int64_t>() + cuts.numel());
        } else {
            for (std::int64_t row = 0; row <= rows; ++row) {
                offsets.push_back(row * length);
            }
        }
        const RotaryTables tables = make_rotary_tables(file.read("position_ids").reshape({tokens}),
                                                       dim / 4, 1e4, at::kFloat);
        const at::Tensor query_gate = qg.reshape({tokens, -1, 2 * dim});
        const at::Tensor q = apply_partial_rotary(
            rms_norm_zero_centered(query_gate.narrow(2, 0, dim), q_norm, 1e-6), tables);
        const at::Tensor keys = apply_partial_rotary(
            rms_norm_zero_centered(k.reshape({tokens, -1, dim}), k_norm, 1e-6), tables);
        const AttentionOutput output =
            causal_attention(q, keys, v.reshape({tokens, -1, dim}), documents(offsets),
                             1 / std::sqrt(static_cast<double>(dim)));
        const at::Tensor o =
            (output.o * query_gate.narrow(2, dim, dim).sigmoid()).reshape({rows, length, -1});
        EXPECT_LE(relative_l2(output.o.reshape(o.sizes()), file.read("o_ungated")), kOutputBar);
        EXPECT_LE(relative_l2(o, file.read("o")), kOutputBar);
        EXPECT_LE(relative_l2(output.lse.reshape({rows, length, -1}), file.read("lse")),
                  kOutputBar);
        const std::vector<std::string> names{"dqg", "dk", "dv", "dq_norm", "dk_norm"};
        const auto gradients = gradients_of(o, file.read("do"), {qg, k, v, q_norm, k_norm});
        for (std::size_t i = 0; i < names.size(); ++i) {
            const at::Tensor expected = file.read(names[i]);
            if (expected.norm().item<double>() > 1e-5) {
                EXPECT_LE(relative_l2(gradients[i], expected), kGradientBar) << names[i];
            } else {  // one key: the softmax is constant
                EXPECT_LE(gradients[i].abs().max().item<double>(), 1e-6) << names[i];
            }
        }
    }
}

TEST(Attention, GradientsByDifferences) {
    const std::vector<AttentionBlock> blocks{{0, 3, 0, 5}, {3, 4, 5, 6}, {4, 6, 0, 6}};
    expect_gradients_by_differences(
        [&](const std::vector<at::Tensor>& x) {
            return causal_attention(x[0], x[1], x[2], blocks, 0.4).o;
        },
        {random_normal({7, 4, 6}, 1), random_normal({6, 2, 6}, 2), random_normal({6, 2, 6}, 3)});
}

TEST(Attention, QueriesOutsideEveryBlockAreZeroInBothDirections) {
    const at::Tensor q = leaf(random_normal({5, 2, 4}, 1, at::kFloat));
    const at::Tensor k = leaf(random_normal({5, 1, 4}, 2, at::kFloat));
    const AttentionOutput output = causal_attention(q, k, k, {{1, 3, 1, 3}}, 0.5);
    const auto gradients = gradients_of(output.o, at::ones_like(output.o), {q, k});
    for (const std::int64_t row : {0, 3, 4}) {
        EXPECT_TRUE(output.o[row].eq(0).all().item<bool>());
        EXPECT_TRUE(output.lse[row].eq(-kInfinity).all().item<bool>());
        EXPECT_TRUE(gradients[0][row].eq(0).all().item<bool>());
        EXPECT_TRUE(gradients[1][row].eq(0).all().item<bool>());
    }
    EXPECT_TRUE(output.lse[1].isfinite().all().item<bool>());
}

TEST(Attention, LargeScoresStayFinite) {
    const at::Tensor q = leaf(random_normal({65, 2, 8}, 1, at::kFloat) * 100);
    const at::Tensor k = leaf(random_normal({65, 1, 8}, 2, at::kFloat) * 100);
    const at::Tensor v = leaf(random_normal({65, 1, 8}, 3, at::kFloat));
    const AttentionOutput output = causal_attention(q, k, v, documents({0, 65}), 1);
    const AttentionOutput reference = naive_attention(q.to(at::kDouble), k.to(at::kDouble),
                                                      v.to(at::kDouble), documents({0, 65}), 1);
    EXPECT_LE(relative_l2(output.lse, reference.lse), 1e-6);
    for (const at::Tensor& gradient : gradients_of(output.o, at::ones_like(output.o), {q, k, v})) {
        EXPECT_TRUE(gradient.isfinite().all().item<bool>());
    }
}

TEST(Attention, InputsAreNotWrittenAndRunsHaveTheSameBits) {
    const Case& c = cases()[6];
    const Tensors x = make_tensors(c, at::kFloat);
    const Tensors copy = make_tensors(c, at::kFloat);
    const auto run = [&] {
        const std::vector<at::Tensor> inputs{leaf(x.q), leaf(x.k), leaf(x.v)};
        std::vector<at::Tensor> results = gradients_of(
            causal_attention(inputs[0], inputs[1], inputs[2], c.blocks, 0.25).o, x.d_o, inputs);
        results.push_back(causal_attention(x.q, x.k, x.v, c.blocks, 0.25).o);
        return results;
    };
    const auto first = run(), second = run();
    for (std::size_t i = 0; i < first.size(); ++i) {
        EXPECT_TRUE(first[i].equal(second[i]));
    }
    EXPECT_TRUE(x.q.equal(copy.q) && x.k.equal(copy.k) && x.v.equal(copy.v) &&
                x.d_o.equal(copy.d_o));
    // a single KV head makes the grouped rows a view of q: it must not be scaled in place
    const at::Tensor q = random_normal({4, 2, 8}, 5, at::kFloat), q_copy = q.clone();
    const at::Tensor k = random_normal({4, 1, 8}, 6, at::kFloat);
    (void)causal_attention(q, k, k, documents({0, 4}), 0.25);
    EXPECT_TRUE(q.equal(q_copy));
}

TEST(Attention, RefusesWhatDoesNotFit) {
    const at::Tensor q = at::zeros({4, 3, 8}), k = at::zeros({4, 2, 8}), k1 = at::zeros({4, 1, 8});
    EXPECT_THROW((void)causal_attention(q, k, k, {}, 1), UsageError);
    EXPECT_THROW((void)causal_attention(q, k1, at::zeros({5, 1, 8}), {}, 1), UsageError);
    EXPECT_THROW((void)causal_attention(q, k1.to(at::kBFloat16), k1, {}, 1), UsageError);
    EXPECT_THROW((void)causal_attention(q, k1, k1, {{0, 4, 0, 3}}, 1), UsageError);
    EXPECT_THROW((void)causal_attention(q, k1, k1, {{0, 4, 0, 5}}, 1), UsageError);
    EXPECT_THROW((void)causal_attention(q, k1, k1, {{2, 1, 0, 4}}, 1), UsageError);
    EXPECT_THROW((void)causal_attention(q, k1, k1, {{0, 3, 0, 4}, {2, 4, 0, 4}}, 1), UsageError);
    EXPECT_THROW((void)causal_attention(q, k1, k1, {{0, 4, 2, 2, false}}, 1), UsageError);
}

}  // namespace
}  // namespace hybridcp

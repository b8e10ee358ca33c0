#include "kernels/gdn_fused_cases.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <limits>

namespace hybridcp::test {
namespace {

using at::Tensor;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Lengths {
    std::vector<std::int64_t> offsets;
    std::int64_t padding = 0;
};

/// [T, H] of 0 and 1, about one in `period`.
Tensor one_in(const Tensor& like, std::int64_t period) {
    const Tensor index = at::arange(like.numel(), at::kLong).view(like.sizes());
    return (index * 7919 + 13).remainder(1009).remainder(period) == 0;
}

void gates(GdnCase& c, double g) {
    c.inputs.g.fill_(g);
}

void correlated_keys(GdnCase& c) {
    // Normalised rows of uniform numbers in 0 .. 1 have a cosine of 0.75.
    c.inputs.k.abs_().remainder_(1);
    c.inputs.q.abs_().remainder_(1);
}

/// beta = 1 makes the true dg almost zero: every second head has another one, for a scale.
void identical_keys(GdnCase& c) {
    c.inputs.k.fill_(1);
    c.inputs.beta.fill_(1);
    for (std::int64_t head = 1; head < c.inputs.beta.size(1); head += 2) {
        c.inputs.beta.select(1, head).fill_(0.5);
    }
}

void heads_that_differ(GdnCase& c) {
    const std::vector<double> values = {0.0, -21.0, -2.0, -0.01};
    for (std::int64_t head = 0; head < c.inputs.g.size(1); ++head) {
        c.inputs.g.select(1, head).fill_(values[static_cast<std::size_t>(head) % values.size()]);
    }
}

void zero_rows(GdnCase& c) {
    for (Tensor* x : {&c.inputs.q, &c.inputs.k}) {
        x->masked_fill_(one_in(x->select(2, 0), 3).unsqueeze(-1), 0);
    }
}

void long_keys(GdnCase& c) {
    c.options.use_qk_l2norm = false;
    Tensor& k = c.inputs.k;
    const Tensor length = 3 + 3 * at::sigmoid(k.select(2, 0).unsqueeze(-1));
    k = k / k.norm(2, -1, true).clamp_min(1e-3) * length;
    c.inputs.g -= 4;
}

void mixed_gates(GdnCase& c) {
    gates(c, 0);
    c.inputs.g.masked_fill_(one_in(c.inputs.g, 3), -30);
}

void one_reset(GdnCase& c) {
    for (std::size_t i = 0; i + 1 < c.offsets.size(); ++i) {
        if (c.offsets[i] < c.offsets[i + 1]) {
            const std::int64_t token = (c.offsets[i] + c.offsets[i + 1]) / 2;
            c.inputs.g[token][token % c.inputs.g.size(1)] = -kInfinity;
        }
    }
}

/// A variation of everything else; their count is coprime to the sizes of the other tables. Without
/// outputs, one number of a head that decays at once would be its whole dg: left out.
constexpr std::size_t kVariations = 7;
void vary(GdnCase& c, bool decays_at_once, std::size_t variation) {
    switch (decays_at_once && (variation == 4 || variation == 5) ? 0 : variation) {
        case 1:
            c = strided(c);
            break;
        case 2:
            c.S_start = Tensor();
            break;
        case 3:
            c.dS_end = Tensor();
            break;
        case 4:
            c.d_o = Tensor();
            break;
        case 5:
            c.options.scale = 0.0;
            break;
        case 6:
            c = strided(c);
            c.S_start = c.dS_end = Tensor();
            c.options.scale = 1.5;
            break;
        default:
            break;
    }
}

FusedCase make_case(const Lengths& lengths,
                    std::int64_t group,
                    HeadDims dims,
                    const GdnRegime& regime,
                    std::size_t seed) {
    const auto [K, V] = dims;
    const std::int64_t T = lengths.offsets.back() + lengths.padding;
    std::int64_t key_heads = group * K * V > 64 * 64 ? 1 : 2;
    if (T <= 3) {
        key_heads = 8;  // few numbers a head: the more heads
    } else if (group == 1 && !regime.correlated) {
        key_heads = 1;
    }
    GdnCase gdn_case =
        generated_case({lengths.offsets, T, key_heads, group * key_heads, K, V}, seed);
    regime.apply(gdn_case);
    gdn_case.name =
        fmt::format("#{} {}, offsets {} of {}, {} key heads, group {}, K {}, V {}", seed,
                    regime.name, fmt::join(lengths.offsets, ","), T, key_heads, group, K, V);
    return {gdn_case, &regime};
}

}  // namespace

const std::vector<GdnRegime>& gdn_regimes() {
    static const std::vector<GdnRegime> regimes = {
        {"mild", [](GdnCase&) {}},
        {"no decay", [](GdnCase& c) { gates(c, 0); }},
        {"-21 a token", [](GdnCase& c) { gates(c, -21); }, false, true, true},
        {"0 and -30", mixed_gates, false, true, true},
        {"one -inf", one_reset},
        {"alpha 1e-12", [](GdnCase& c) { gates(c, std::log(1e-12)); }, false, true, true},
        {"-50 a token", [](GdnCase& c) { gates(c, -50); }, false, true, true},
        {"above 0", [](GdnCase& c) { c.inputs.g = c.inputs.beta * 1e-3; }},
        {"beta 0", [](GdnCase& c) { c.inputs.beta.zero_(); }},
        {"beta 0 or 1", [](GdnCase& c) { c.inputs.beta.round_(); }},
        {"beta 1", [](GdnCase& c) { c.inputs.beta.fill_(1); }},
        {"beta 2", [](GdnCase& c) { c.inputs.beta.fill_(2); }},
        {"zero rows", zero_rows},
        {"long keys", long_keys, false, false, true},
        {"correlated keys", correlated_keys, true},
        {"identical keys", identical_keys, true, false},
        {"heads that differ", heads_that_differ, false, true, true},
    };
    return regimes;
}

std::vector<FusedCase> fused_cases() {
    static const std::vector<HeadDims> dims = {{32, 32},  {64, 64}, {128, 128}, {32, 64},
                                               {128, 64}, {40, 24}, {24, 100},  {100, 40},
                                               {16, 16},  {5, 7},   {64, 32}};
    return fused_cases(dims);
}

std::vector<FusedCase> fused_cases(const std::vector<HeadDims>& dims) {
    static const std::vector<Lengths> lengths = {{{0, 0}, 0},
                                                 {{0, 1}, 0},
                                                 {{0, 2}, 1},
                                                 {{0, 15}, 0},
                                                 {{0, 31}, 3},
                                                 {{0, 32}, 0},
                                                 {{0, 33}, 0},
                                                 {{0, 63}, 0},
                                                 {{0, 64}, 0},
                                                 {{0, 65}, 40},
                                                 {{0, 127}, 0},
                                                 {{0, 0, 40, 73}, 0},
                                                 {{0, 17, 17, 17, 80}, 13},
                                                 {{0, 33, 66, 66, 66}, 0},
                                                 {{0, 1, 3, 34, 66, 99}, 2},
                                                 {{0, 96}, 1}};
    static const std::vector<std::int64_t> groups = {1, 2, 3, 4, 8};
    const auto& regimes = gdn_regimes();
    // The sizes 16, 11, 5, 17 and 7 have no common factors, so that the remainders of the case's
    // number meet in all pairs within 17 * 16 cases.
    constexpr std::size_t kCases = 306;
    std::vector<FusedCase> cases;
    for (std::size_t n = 0; n < kCases; ++n) {
        cases.push_back(make_case(lengths[n % lengths.size()], groups[n % groups.size()],
                                  dims[n % dims.size()], regimes[n % regimes.size()], n));
        vary(cases.back().gdn_case, cases.back().regime->decays_at_once, n % kVariations);
    }
    return cases;
}

std::vector<FusedCase> long_fused_cases() {
    const auto regime = [](const std::string& name) -> const GdnRegime& {
        return *std::find_if(gdn_regimes().begin(), gdn_regimes().end(),
                             [&](const GdnRegime& r) { return r.name == name; });
    };
    const Lengths checkpoints{{0, 255, 511, 768, 1025}, 0};  // one less, as many, one more
    return {
        make_case({{0, 1000}}, 2, {64, 64}, regime("mild"), 1),
        make_case(checkpoints, 2, {32, 64}, regime("mild"), 2),
        make_case(checkpoints, 2, {64, 32}, regime("0 and -30"), 3),
        make_case(checkpoints, 4, {32, 32}, regime("heads that differ"), 4),
        make_case(checkpoints, 1, {32, 32}, regime("no decay"), 5),
        make_case({{0, 4097}}, 1, {32, 32}, regime("mild"), 6),
        make_case({{0, 70}}, 1, {256, 256}, regime("mild"), 7),
        make_case({{0, 33}}, 64, {16, 16}, regime("mild"), 8),
        make_case({{0, 70}}, 2, {12, 1}, regime("mild"), 9),
        make_case({{0, 300}, 20}, 1, {33, 129}, regime("beta 2"), 10),
    };
}

GdnCase strided(const GdnCase& gdn_case) {
    const GdnInputs& in = gdn_case.inputs;
    GdnCase result = gdn_case;
    const std::int64_t keys = in.q.size(1) * in.q.size(2);
    const std::int64_t values = in.v.size(1) * in.v.size(2);
    const Tensor packed = at::cat({at::full({in.q.size(0), 3}, 1e30, in.q.options()),
                                   in.q.flatten(1), in.k.flatten(1), in.v.flatten(1)},
                                  1);
    result.inputs.q = packed.narrow(1, 3, keys).view(in.q.sizes());
    result.inputs.k = packed.narrow(1, 3 + keys, keys).view(in.k.sizes());
    result.inputs.v = packed.narrow(1, 3 + 2 * keys, values).view(in.v.sizes());
    result.inputs.g = in.g.t().contiguous().t();
    result.inputs.beta = at::stack({in.beta, in.beta}, -1).select(-1, 1);
    if (gdn_case.d_o.defined()) {
        const Tensor wide = at::cat({gdn_case.d_o, at::full_like(gdn_case.d_o, 1e30)}, 1);
        result.d_o = wide.narrow(1, 0, in.v.size(1));
    }
    for (Tensor* state : {&result.S_start, &result.dS_end}) {
        if (state->defined()) {
            *state = state->mT().contiguous().mT();
        }
    }
    return result;
}

double fused_fp32_bar(const FusedCase& problem) {
    constexpr std::int64_t kTokens = 32;
    const GdnCase& gdn_case = problem.gdn_case;
    if (problem.regime->correlated) {
        return 1e-5;
    }
    const Tensor g = gdn_case.inputs.g.masked_fill(gdn_case.inputs.g.isinf(), 0);
    for (std::size_t i = 0; i + 1 < gdn_case.offsets.size(); ++i) {
        const std::int64_t end = gdn_case.offsets[i + 1];
        for (std::int64_t begin = gdn_case.offsets[i]; begin < end; begin += kTokens) {
            const Tensor sums = g.narrow(0, begin, std::min(kTokens, end - begin)).sum(0);
            if (sums.min().item<double>() < -100) {
                return 1e-4;
            }
        }
    }
    return 1e-5;
}

}  // namespace hybridcp::test

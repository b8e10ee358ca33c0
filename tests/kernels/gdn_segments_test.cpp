// Segment summaries: a document cut into segments, each summarised alone, must compose to the
// whole; against the golden `seg.*` tensors and on generated cuts inside chunks.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/gdn_support.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

/// A case whose documents are cut into pieces, and the pieces' summaries and states.
struct Chain {
    std::vector<std::int64_t> offsets;  // of the pieces: the cuts and the document starts together
    std::vector<bool> starts_document;  // by piece
    GdnSummary summary;
    GdnOutput output;
    Tensor dS_local;
    GdnGradients gradients;
    Tensor S_start;  // what the chain gave each piece
    Tensor dS_end;
};

/// Runs all pieces as segments of one call; their start states and end gradients come from the
/// summaries.
Chain run_chain(GdnBackend backend,
                const GdnCase& gdn_case,
                const std::vector<std::int64_t>& cuts) {
    Chain chain;
    std::set_union(cuts.begin(), cuts.end(), gdn_case.offsets.begin(), gdn_case.offsets.end(),
                   std::back_inserter(chain.offsets));
    const std::size_t pieces = chain.offsets.size() - 1;
    const auto document_of = [&](std::size_t piece) {
        const auto after = std::upper_bound(gdn_case.offsets.begin(), gdn_case.offsets.end(),
                                            chain.offsets[piece]);
        return after - gdn_case.offsets.begin() - 1;
    };
    for (std::size_t p = 0; p < pieces; ++p) {
        chain.starts_document.push_back(
            std::binary_search(gdn_case.offsets.begin(), gdn_case.offsets.end(), chain.offsets[p]));
    }
    const auto call = make_gdn_call(backend, gdn_case.inputs, chain.offsets, gdn_case.options);
    chain.summary = call->summary();
    const auto& [S, M] = chain.summary;
    const auto given = [&](const Tensor& states, std::size_t piece) {
        return states.defined() ? states[document_of(piece)].to(S.scalar_type())
                                : at::zeros_like(S[0]);
    };
    std::vector<Tensor> starts(pieces);
    for (std::size_t p = 0; p < pieces; ++p) {
        const auto before = static_cast<std::int64_t>(p) - 1;
        starts[p] = chain.starts_document[p] ? given(gdn_case.S_start, p)
                                             : at::matmul(M[before], starts[p - 1]) + S[before];
    }
    chain.S_start = at::stack(starts);
    chain.output = call->forward(chain.S_start);
    chain.dS_local = call->gradient_summary(gdn_case.d_o);
    std::vector<Tensor> ends(pieces);
    for (std::size_t p = pieces; p-- > 0;) {
        const auto after = static_cast<std::int64_t>(p) + 1;
        ends[p] = p + 1 == pieces || chain.starts_document[p + 1]
                      ? given(gdn_case.dS_end, p)
                      : at::matmul(M[after].mT(), ends[p + 1]) + chain.dS_local[after];
    }
    chain.dS_end = at::stack(ends);
    chain.gradients = call->backward(gdn_case.d_o, chain.dS_end);
    return chain;
}

/// Outputs of the chain where they are those of whole documents.
Tensors of_documents(const Chain& chain) {
    Tensors result = {{"o", chain.output.o},      {"dq", chain.gradients.dq},
                      {"dk", chain.gradients.dk}, {"dv", chain.gradients.dv},
                      {"dg", chain.gradients.dg}, {"dbeta", chain.gradients.dbeta}};
    std::vector<Tensor> ends;
    std::vector<Tensor> starts;
    for (std::size_t p = 0; p < chain.starts_document.size(); ++p) {
        const auto n = static_cast<std::int64_t>(p);
        if (chain.starts_document[p]) {
            starts.push_back(chain.gradients.dS_start[n]);
        }
        if (p + 1 == chain.starts_document.size() || chain.starts_document[p + 1]) {
            ends.push_back(chain.output.S_end[n]);
        }
    }
    result["S_end"] = at::stack(ends);
    result["dS_start"] = at::stack(starts);
    return result;
}

/// The summaries of a chain that are exact identities: the states that the pieces reach, and their
/// gradients.
void expect_consistent(const Chain& chain, double bar) {
    const auto& [S, M] = chain.summary;
    EXPECT_LE(worst_head_error(at::matmul(M, chain.S_start) + S, chain.output.S_end), bar);
    EXPECT_LE(worst_head_error(at::matmul(M.mT(), chain.dS_end) + chain.dS_local,
                               chain.gradients.dS_start),
              bar);
}

/// Summaries of the golden segments from those of the pieces: a document start (the first token
/// included) resets, unless the case continues given states.
Tensors golden_summaries(const Chain& chain,
                         const std::vector<std::int64_t>& cuts,
                         bool continues) {
    std::map<std::string, std::vector<Tensor>> lists;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        const auto piece_at = [&](std::int64_t offset) {
            return std::lower_bound(chain.offsets.begin(), chain.offsets.end(), offset) -
                   chain.offsets.begin();
        };
        const std::int64_t first = piece_at(cuts[i]);
        const std::int64_t last = piece_at(cuts[i + 1]) - 1;
        const bool resets_first =
            chain.starts_document[static_cast<std::size_t>(first)] && !continues;
        const bool resets = first != last || resets_first;
        const auto zero_if = [](bool zero, const Tensor& x) {
            return zero ? at::zeros_like(x) : x;
        };
        lists["seg.M"].push_back(zero_if(resets, chain.summary.M[first]));
        lists["seg.S_local"].push_back(chain.summary.S[last]);
        lists["seg.S_end"].push_back(chain.output.S_end[last]);
        lists["seg.dS_local"].push_back(zero_if(resets_first, chain.dS_local[first]));
        lists["seg.dS_start"].push_back(zero_if(resets_first, chain.gradients.dS_start[first]));
    }
    Tensors result;
    for (const auto& [name, list] : lists) {
        result[name] = at::stack(list);
    }
    return result;
}

/// Segment by segment and head by head: the error must be small in each, not over all segments
/// together.
void expect_close_by_segment(const Tensors& actual, const Tensors& expected, double bar) {
    for (const auto& [name, reference] : expected) {
        for (std::int64_t i = 0; i < reference.size(0); ++i) {
            EXPECT_LE(worst_head_error(actual.at(name).narrow(0, i, 1), reference.narrow(0, i, 1)),
                      bar)
                << name << i;
        }
    }
}

class GdnSegments : public testing::TestWithParam<std::string> {};

TEST_P(GdnSegments, GoldenSummaries) {
    const GdnCase gdn_case = golden_case(GetParam());
    Tensors expected = golden_segments(GetParam());
    const Tensor cut_tensor = expected.at("seg.cuts").to(at::kLong);
    const std::vector<std::int64_t> cuts(cut_tensor.data_ptr<std::int64_t>(),
                                         cut_tensor.data_ptr<std::int64_t>() + cut_tensor.numel());
    expected.erase("seg.cuts");
    for (const auto& [backend, bar] :
         {std::pair{GdnBackend::kReference, 1e-6}, std::pair{GdnBackend::kEager, 1e-5},
          std::pair{GdnBackend::kFused, 1e-5}}) {
        const Chain chain = run_chain(backend, gdn_case, cuts);
        expect_close_by_segment(golden_summaries(chain, cuts, gdn_case.S_start.defined()), expected,
                                bar);
        expect_close(of_documents(chain), gdn_case.expected, {}, bar);
        expect_consistent(chain, bar);
    }
}

INSTANTIATE_TEST_SUITE_P(Cases,
                         GdnSegments,
                         testing::Values("cp4", "cp4_varlen"),
                         [](const auto& param) { return param.param; });

TEST(GdnSegmentChain, CutsInsideChunksComposeToTheWhole) {
    const GdnCase gdn_case = generated_case({{0, 100, 230}, 230, 2, 6, 16, 24}, 21);
    const Tensors whole = run_all(GdnBackend::kReference, gdn_case);
    const std::vector<std::vector<std::int64_t>> cut_lists = {
        {0, 230}, {0, 50, 230}, {0, 1, 65, 66, 101, 150, 229, 230}, {0, 64, 128, 192, 230}};
    for (const auto& cuts : cut_lists) {
        for (const GdnBackend backend :
             {GdnBackend::kReference, GdnBackend::kEager, GdnBackend::kFused}) {
            const double bar = backend == GdnBackend::kReference ? 1e-6 : 1e-5;
            const Chain chain = run_chain(backend, gdn_case, cuts);
            expect_consistent(chain, bar);
            expect_close(of_documents(chain), whole, {}, bar);
        }
    }
}

TEST(GdnSegmentChain, SummariesMatchReference) {
    const GdnCase gdn_case = generated_case({{0, 0, 1, 64, 64, 200, 231}, 235, 2, 4, 16, 24}, 22);
    const auto run = [&](GdnBackend backend) -> Tensors {
        const auto call =
            make_gdn_call(backend, gdn_case.inputs, gdn_case.offsets, gdn_case.options);
        const auto [S, M] = call->summary();
        (void)call->forward(gdn_case.S_start);
        return {{"S", S}, {"M", M}, {"dS", call->gradient_summary(gdn_case.d_o)}};
    };
    const Tensors eager = run(GdnBackend::kEager);
    expect_close_by_segment(eager, run(GdnBackend::kReference), 1e-5);
    for (const std::int64_t empty : {0, 3}) {  // maps a state to itself
        const Tensor one = at::eye(16).expand({4, 16, 16});
        EXPECT_TRUE(at::equal(eager.at("M")[empty], one));
        EXPECT_EQ(eager.at("S")[empty].count_nonzero().item<std::int64_t>(), 0);
        EXPECT_EQ(eager.at("dS")[empty].count_nonzero().item<std::int64_t>(), 0);
    }
}

TEST(GdnSegmentChain, StrongDecayMakesTheMapExactlyZero) {
    GdnCase gdn_case = generated_case({{0, 130}, 130, 1, 2, 16, 16}, 23);
    gdn_case.inputs.g.select(1, 0).fill_(-2.0);
    const auto call =
        make_gdn_call(GdnBackend::kEager, gdn_case.inputs, gdn_case.offsets, gdn_case.options);
    const Tensor M = call->summary().M[0];
    EXPECT_EQ(M[0].count_nonzero().item<std::int64_t>(), 0);
    EXPECT_GT(M[1].count_nonzero().item<std::int64_t>(), 0);
    EXPECT_TRUE(M.isfinite().all().item<bool>());
}

}  // namespace
}  // namespace hybridcp::test

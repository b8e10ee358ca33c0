#include "kernels/gdn_support.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>

#include "model/safetensors.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

std::string golden_path(const std::string& name) {
    return std::string(HCP_GOLDEN_DIR) + "/ops/gdn/" + name + ".safetensors";
}

std::vector<std::int64_t> int_list(const Tensor& x) {
    const Tensor wide = x.to(at::kLong).contiguous();
    return {wide.data_ptr<std::int64_t>(), wide.data_ptr<std::int64_t>() + wide.numel()};
}

}  // namespace

std::vector<std::string> golden_case_names() {
    std::vector<std::string> names;
    for (const auto& entry :
         std::filesystem::directory_iterator(std::string(HCP_GOLDEN_DIR) + "/ops/gdn")) {
        if (entry.path().extension() == ".safetensors") {
            names.push_back(entry.path().stem());
        }
    }
    std::sort(names.begin(), names.end());
    return names;
}

GdnCase golden_case(const std::string& name) {
    const SafetensorsFile file(golden_path(name));
    const auto read = [&](const std::string& key) {
        return file.contains(key) ? file.read(key) : Tensor();
    };
    const auto rows = [&](const std::string& key) { return read(key).flatten(0, 1); };
    GdnCase result;
    result.name = name;
    result.inputs = {
        .q = rows("q"), .k = rows("k"), .v = rows("v"), .g = rows("g"), .beta = rows("beta")};
    if (file.contains("cu_seqlens")) {
        result.offsets = int_list(file.read("cu_seqlens"));
    } else {
        const Tensor q = file.read("q");
        for (std::int64_t row = 0; row <= q.size(0); ++row) {
            result.offsets.push_back(row * q.size(1));
        }
    }
    result.options.use_qk_l2norm = name != "no_l2norm";
    result.S_start = read("h0");
    result.d_o = rows("do");
    result.dS_end = read("dht");
    for (const char* key : {"o", "dq", "dk", "dv", "dg", "dbeta"}) {
        result.expected[key] = rows(key);
    }
    result.expected["S_end"] = read("ht");
    if (file.contains("dh0")) {
        result.expected["dS_start"] = read("dh0");
    }
    return result;
}

Tensors golden_segments(const std::string& name) {
    const SafetensorsFile file(golden_path(name));
    Tensors result;
    for (const auto& [key, entry] : file.entries()) {
        if (key.rfind("seg.", 0) == 0) {
            result[key] = file.read(key);
        }
    }
    return result;
}

GdnCase generated_case(const GdnShape& shape, std::uint64_t seed) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    const auto random = [&](at::IntArrayRef size) {
        return at::randn(size, generator, at::kFloat);
    };
    const std::int64_t T = shape.num_tokens;
    const auto N = static_cast<std::int64_t>(shape.offsets.size()) - 1;
    GdnCase result;
    result.name = "generated";
    result.offsets = shape.offsets;
    result.inputs = {.q = random({T, shape.key_heads, shape.key_dim}),
                     .k = random({T, shape.key_heads, shape.key_dim}),
                     .v = random({T, shape.value_heads, shape.value_dim}),
                     .g = -at::exp(random({T, shape.value_heads}) * 1.5 - 2.5),
                     .beta = at::sigmoid(random({T, shape.value_heads}))};
    result.S_start = random({N, shape.value_heads, shape.key_dim, shape.value_dim}) * 0.5;
    result.d_o = random(result.inputs.v.sizes());
    result.dS_end = random(result.S_start.sizes()) * 0.5;
    return result;
}

GdnCase with_dtype(const GdnCase& gdn_case, at::ScalarType type) {
    GdnCase result = gdn_case;
    for (Tensor* x :
         {&result.inputs.q, &result.inputs.k, &result.inputs.v, &result.inputs.beta, &result.d_o}) {
        *x = x->defined() ? x->to(type) : *x;
    }
    return result;
}

GdnCase bf16_case(const std::vector<std::int64_t>& offsets,
                  std::int64_t key_heads,
                  std::int64_t value_heads,
                  std::uint64_t seed) {
    return with_dtype(
        generated_case({offsets, offsets.back(), key_heads, value_heads, 128, 128}, seed),
        at::kBFloat16);
}

Tensors run_all(GdnBackend backend, const GdnCase& gdn_case) {
    return run_all(*make_gdn_call(backend, gdn_case.inputs, gdn_case.offsets, gdn_case.options),
                   gdn_case);
}

Tensors run_all(GdnCall& call, const GdnCase& gdn_case) {
    const GdnOutput output = call.forward(gdn_case.S_start);
    const GdnGradients gradients = call.backward(gdn_case.d_o, gdn_case.dS_end);
    return {{"o", output.o},
            {"S_end", output.S_end},
            {"dq", gradients.dq},
            {"dk", gradients.dk},
            {"dv", gradients.dv},
            {"dg", gradients.dg},
            {"dbeta", gradients.dbeta},
            {"dS_start", gradients.dS_start}};
}

void split_extreme_rows(const GdnCase& gdn_case, Tensors& tensors) {
    for (const auto& [name, x] :
         {std::pair{"dq", gdn_case.inputs.q}, std::pair{"dk", gdn_case.inputs.k}}) {
        if (x.numel() == 0) {
            continue;
        }
        const Tensor norms = x.to(at::kDouble).norm(2, -1).amax(1);  // [T]
        const Tensor rows = (norms < 0.02 * norms.max()).nonzero().squeeze(1);
        if (rows.numel() > 0) {
            Tensor& gradient = tensors.at(name);
            tensors[std::string(name) + " of tiny rows"] = gradient.index_select(0, rows);
            gradient = gradient.index_fill(0, rows, 0);
        }
    }
}

double worst_head_error(const Tensor& x, const Tensor& reference) {
    if (x.sizes() != reference.sizes()) {
        return std::numeric_limits<double>::infinity();
    }
    if (x.numel() == 0) {
        return 0;
    }
    const auto norms = [](const Tensor& y) {
        return y.to(at::kDouble).transpose(0, 1).flatten(1).norm(2, 1);
    };
    const Tensor expected = norms(reference);
    const Tensor error = norms(x.to(at::kDouble) - reference.to(at::kDouble));
    const double largest = expected.max().item<double>();
    double worst = 0;
    for (std::int64_t head = 0; head < expected.size(0); ++head) {
        const double norm = expected[head].item<double>();
        double off = error[head].item<double>();
        if (norm < 1e-4 * largest) {
            off = std::max(0.0, off - 1e-6 * largest);
        }
        const double relative = off == 0 ? 0 : off / norm;
        worst = relative <= worst ? worst : relative;  // NaN is worse than any number
        if (!(relative <= std::numeric_limits<double>::max())) {
            return std::numeric_limits<double>::infinity();
        }
    }
    return worst;
}

double generated_error(const Tensor& x, const Tensor& reference) {
    const auto prepared = [](const Tensor& y) {
        const Tensor wide = y.to(at::kDouble);
        const Tensor normal = wide.masked_fill(wide.abs() < 1e-30, 0);
        const bool few = y.dim() < 4 && y.size(0) <= 3;  // no state
        return few ? normal.reshape({-1, 1}) : normal;
    };
    return worst_head_error(prepared(x), prepared(reference));
}

void expect_close(const Tensors& actual,
                  const Tensors& expected,
                  const std::map<std::string, double>& bars,
                  double default_bar) {
    for (const auto& [name, reference] : expected) {
        const auto found = actual.find(name);
        if (found == actual.end()) {
            ADD_FAILURE() << name << " is missing";
            continue;
        }
        const auto bar = bars.find(name);
        EXPECT_LE(worst_head_error(found->second, reference),
                  bar == bars.end() ? default_bar : bar->second)
            << name;
    }
}

}  // namespace hybridcp::test

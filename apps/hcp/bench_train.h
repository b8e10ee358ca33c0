// `hcp bench train`: the recipe's whole training step (forward, backward, gradients over the ranks,
// clipping, update) with whole and with sharded parameters, against each other by turns.
#pragma once

#include <string>
#include <vector>

namespace hybridcp::cli {

struct BenchTrainOptions {
    std::string recipe_path;
    std::vector<std::string> overrides;
    std::vector<std::string> variants{"whole", "sharded", "sharded-no-prefetch"};
    int warm_up = 2;
    int repeats = 10;
    std::string report_path;
};

/// One rank. Every variant's losses and gradient norms are compared with the first one's before
/// anything is timed. Errors: UsageError for an unknown variant; NumericsError for one that is off.
[[nodiscard]] int bench_train(const BenchTrainOptions& options);

}  // namespace hybridcp::cli

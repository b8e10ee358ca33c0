// Where a training step's time goes on one rank: self time of every ATen operation, sampled by
// libtorch's own record-function callbacks, over a few steps of a recipe. See bench/results for
// what came out.
//   step_profile RECIPE.yaml [key.path=value ...]

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <mutex>

#include "hybridcp/error.h"
#include "train/trainer.h"

namespace hybridcp {
namespace {

struct OpTime {
    std::string name;
    double self_seconds = 0.0;
    std::int64_t calls = 0;
};

using Clock = std::chrono::steady_clock;

/// Operations in progress on this thread, innermost last: the time of an inner one is not its
/// caller's own.
struct Frame : at::ObserverContext {
    Clock::time_point start = Clock::now();
    double inner_seconds = 0.0;
    Frame* caller = nullptr;
};
thread_local Frame* innermost = nullptr;

std::map<std::string, OpTime>& totals() {
    static std::map<std::string, OpTime> by_name;
    return by_name;
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& /*function*/) {
    auto frame = std::make_unique<Frame>();
    frame->caller = innermost;
    innermost = frame.get();
    return frame;
}

void on_end(const at::RecordFunction& function, at::ObserverContext* context) {
    auto* frame = static_cast<Frame*>(context);
    const double seconds = std::chrono::duration<double>(Clock::now() - frame->start).count();
    innermost = frame->caller;
    if (innermost != nullptr) {
        innermost->inner_seconds += seconds;
    }
    OpTime& total = totals()[function.name()];
    total.self_seconds += seconds - frame->inner_seconds;
    ++total.calls;
}

void print_table(double step_seconds, std::int64_t num_steps) {
    std::vector<OpTime> rows;
    double sum = 0.0;
    for (auto& [name, total] : totals()) {
        total.name = name;
        sum += total.self_seconds;
        rows.push_back(total);
    }
    std::sort(rows.begin(), rows.end(),
              [](const OpTime& a, const OpTime& b) { return a.self_seconds > b.self_seconds; });
    const auto steps = static_cast<double>(num_steps);
    fmt::print("{:.1f} ms a step, {:.1f} ms of it in operations\n", 1e3 * step_seconds / steps,
               1e3 * sum / steps);
    for (std::size_t i = 0; i < rows.size() && i < 24; ++i) {
        fmt::print("{:5.1f} %  {:8.1f} ms  {:6} calls  {}\n", 100 * rows[i].self_seconds / sum,
                   1e3 * rows[i].self_seconds / steps, rows[i].calls / num_steps, rows[i].name);
    }
}

int run(const std::vector<std::string>& arguments) {
    constexpr std::int64_t kWarmUpSteps = 3;
    Recipe recipe = load_recipe(arguments.at(0), {arguments.begin() + 1, arguments.end()});
    recipe.train.accelerator.cp = 1;
    recipe.train.accelerator.dp = 1;
    const std::string folder =
        (std::filesystem::temp_directory_path() / fmt::format("hcp-profile-{}", getpid())).string();
    recipe.checkpoint = {.dir = folder, .every = 0, .keep = 1, .resume = "never"};
    recipe.log.dir = std::nullopt;
    double seconds = 0.0;
    std::int64_t num_steps = 0;
    at::CallbackHandle handle = 0;
    const TrainOptions options{.on_step = [&](const StepMetrics& metrics) {
        if (metrics.step > kWarmUpSteps) {
            seconds += metrics.step_seconds;
            ++num_steps;
        } else if (metrics.step == kWarmUpSteps) {
            handle = at::addGlobalCallback(at::RecordFunctionCallback(on_start, on_end));
        }
    }};
    (void)run_training(recipe, make_mesh({}, {.device = recipe.train.accelerator.device}), options);
    at::removeCallback(handle);
    std::filesystem::remove_all(folder);
    print_table(seconds, num_steps);
    return 0;
}

}  // namespace
}  // namespace hybridcp

int main(int argc, char** argv) {
    try {
        return hybridcp::run(std::vector<std::string>(argv + 1, argv + argc));
    } catch (const std::exception& error) {
        fmt::print(stderr, "step_profile: {}\n", error.what());
        return 2;
    }
}

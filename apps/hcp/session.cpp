#include "hcp/session.h"

#include <ATen/ATen.h>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <thread>

#include "hcp/launcher.h"
#include "hybridcp/error.h"

namespace hybridcp::cli {

namespace {
const std::string kVerdictKey = "hcp/verdict";
const std::string kDepartedKey = "hcp/departed";
constexpr std::chrono::milliseconds kPollInterval{100};
constexpr std::chrono::seconds kDeparturePatience{10};
}  // namespace

Session::Session(const LaunchEnvironment& environment,
                 const ParallelOptions& options,
                 std::chrono::milliseconds timeout)
    : environment_(environment), store_(connect_store(environment, timeout)) {
    if (environment.world_size > 1) {
        liveness_ = std::make_shared<Liveness>(store_, environment.rank, environment.world_size);
    }
    mesh_ = make_mesh(store_, {.rank = environment.rank,
                               .world_size = environment.world_size,
                               .dp = options.dp,
                               .cp = options.cp,
                               .shard_size = shard_size(options),
                               .device = options.device,
                               .timeout = timeout,
                               .liveness = liveness_});
}

std::string Session::text_of_rank_0(const std::string& key, const std::string& text) {
    if (rank() == 0) {
        store_->set("hcp/" + key, text);
        return text;
    }
    return store_->get_to_str("hcp/" + key);  // waits for it
}

int Session::conclude(const std::function<int()>& judge) {
    if (rank() != 0) {
        return share(0);
    }
    try {
        return share(judge());
    } catch (const CommError&) {
        throw;  // the others have their own
    } catch (const Error& error) {
        (void)share(error.exit_status());
        throw;
    } catch (const std::exception&) {
        (void)share(1);
        throw;
    }
}

// Through the store, not a collective: rank 0 may take hours (a run on one rank), and a store that
// is gone is noticed.
int Session::share(int status) {
    if (num_ranks() == 1) {
        return status;
    }
    if (rank() == 0) {
        store_->set(kVerdictKey, std::vector<std::uint8_t>{static_cast<std::uint8_t>(status)});
    } else {
        try {
            while (!store_->check({kVerdictKey}) && !store_->check({kRankFailedKey})) {
                std::this_thread::sleep_for(kPollInterval);
            }
            if (!store_->check({kVerdictKey})) {
                throw CommError("a rank has failed");
            }
            status = store_->get(kVerdictKey).at(0);
        } catch (const std::exception&) {
            throw CommError(fmt::format("rank {}: rank 0 ended without a verdict", rank()));
        }
    }
    (void)store_->add(kDepartedKey, 1);
    wait_for_others();
    liveness_->finish();
    return status;
}

// Rank 0 may host the store: it leaves last, but does not wait for a rank that died.
void Session::wait_for_others() {
    const auto deadline = std::chrono::steady_clock::now() + kDeparturePatience;
    while (rank() == 0 && store_->add(kDepartedKey, 0) < num_ranks() &&
           std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(kPollInterval);
    }
}

void select_device(const std::string& device, const LaunchEnvironment& environment) {
    if (device == "cpu") {
        return;
    }
    if (device != "cuda") {
        throw UsageError(
            fmt::format("train.accelerator.device '{}': cpu and cuda are known", device));
    }
    if (!at::hasCUDA()) {
        throw UsageError("device cuda: this build or this machine has no CUDA; device cpu works");
    }
    const c10::impl::VirtualGuardImpl guard(at::kCUDA);
    const int index = environment.local_rank % guard.deviceCount();
    guard.setDevice(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index)));
}

Mesh one_rank_mesh(const std::string& device) {
    return make_mesh(nullptr, {.rank = 0, .world_size = 1, .dp = 1, .cp = 1, .device = device});
}

Recipe recipe_from_overrides(const OverrideRequest& request) {
    std::vector<std::string> overrides;
    if (!request.dtype.empty()) {
        overrides.push_back("model.dtype=" + request.dtype);
    }
    overrides.insert(overrides.end(), request.overrides.begin(), request.overrides.end());
    Recipe recipe = parse_recipe(request.base, request.command, overrides);
    const bool has_cp = std::any_of(
        overrides.begin(), overrides.end(),
        [](const std::string& text) { return text.rfind("train.accelerator.cp=", 0) == 0; });
    ParallelOptions& accelerator = recipe.train.accelerator;
    if (!has_cp && request.num_ranks % accelerator.dp == 0) {
        accelerator.cp = request.num_ranks / accelerator.dp;
    }
    return recipe;
}

at::ScalarType compute_dtype(const Recipe& recipe) {
    return recipe.model.dtype == "bf16" ? at::kBFloat16 : at::kFloat;
}

std::string describe_run(const Recipe& recipe) {
    const ParallelOptions& options = recipe.train.accelerator;
    const int num_ranks = options.dp * options.cp;
    std::string text = fmt::format("{} on {}, {} rank{}", recipe.model.dtype, options.device,
                                   num_ranks, num_ranks == 1 ? "" : "s");
    if (num_ranks > 1) {
        text += fmt::format(" (dp {}, cp {}; linear attention {}, full attention {})", options.dp,
                            options.cp, options.linear_attention_cp_mode,
                            options.full_attention_cp_mode);
    }
    return text;
}

}  // namespace hybridcp::cli

// One rank of process_test: reduces until it is told to stop after N rounds, or until a wait fails.
// Prints "ready" after the first round and the error's message at the end; exit status 0 done, 3
// CommError.
#include <cstdio>
#include <cstdlib>

#include "comm/launch_environment.h"
#include "comm/liveness.h"
#include "hybridcp/error.h"
#include "hybridcp/group.h"

int main(int argc, char** argv) {
    using namespace hybridcp;
    const int num_rounds = argc > 1 ? std::atoi(argv[1]) : 0;
    const int timeout_seconds = argc > 2 ? std::atoi(argv[2]) : 0;
    quiet_backend_logs();
    try {
        const LaunchEnvironment environment = read_launch_environment();
        const auto store = connect_store(environment, std::chrono::seconds(20));
        const auto liveness =
            std::make_shared<Liveness>(store, environment.rank, environment.world_size);
        const auto group = Group::make(store, {.rank = environment.rank,
                                               .size = environment.world_size,
                                               .timeout = std::chrono::seconds(timeout_seconds),
                                               .liveness = liveness});
        for (int round = 0; round < num_rounds; ++round) {
            group->set_step(round);
            at::Tensor sum = at::full({100000}, environment.rank + 1);
            group->all_reduce_sum("gradients", sum);
            const int expected = environment.world_size * (environment.world_size + 1) / 2;
            HCP_CHECK_EQ(sum.max().item<float>(), static_cast<float>(expected), "wrong sum");
            if (round == 0) {
                std::puts("ready");
                std::fflush(stdout);
            }
        }
        group->barrier("end");
        liveness->finish();
    } catch (const CommError& error) {
        std::puts(error.what());
        return 3;
    } catch (const std::exception& error) {
        std::puts(error.what());
        return 1;
    }
    return 0;
}

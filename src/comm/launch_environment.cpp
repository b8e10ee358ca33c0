#include "comm/launch_environment.h"

#include <charconv>
#include <cstdlib>

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/backend.h"
#include "hybridcp/error.h"

namespace hybridcp {

namespace {

constexpr int kMaxRanks = 1 << 20;
constexpr int kMaxPort = 65535;

bool is_set(const std::string& name) {
    return std::getenv(name.c_str()) != nullptr;
}

std::string text_variable(const std::string& name, const std::string& source) {
    const char* text = std::getenv(name.c_str());
    if (text == nullptr || *text == '\0') {
        throw UsageError(fmt::format(
            "launch environment ({}): {} is not set: every rank needs it, or use hcp --nproc N",
            source, name));
    }
    return text;
}

// The value of `name`, an integer in [first, last].
int integer_variable(const std::string& name, const std::string& source, int first, int last) {
    const std::string text = text_variable(name, source);
    int value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stop != end || value < first || value > last) {
        throw UsageError(
            fmt::format("launch environment ({}): {} is '{}': it must be an integer from {} to {}",
                        source, name, text, first, last));
    }
    return value;
}

struct Names {
    std::string source;
    std::string rank;
    std::string world_size;
    std::string local_rank;
};

LaunchEnvironment read_variables(const Names& names) {
    LaunchEnvironment environment;
    environment.source = names.source;
    environment.world_size = integer_variable(names.world_size, names.source, 1, kMaxRanks);
    const int last = environment.world_size - 1;
    environment.rank = integer_variable(names.rank, names.source, 0, last);
    environment.local_rank = integer_variable(names.local_rank, names.source, 0, last);
    if (environment.world_size > 1 || is_set("MASTER_PORT")) {
        environment.master_addr = text_variable("MASTER_ADDR", names.source);
        environment.master_port = integer_variable("MASTER_PORT", names.source, 1, kMaxPort);
    }
    return environment;
}

}  // namespace

LaunchEnvironment read_launch_environment() {
    if (is_set("RANK") || is_set("WORLD_SIZE")) {
        LaunchEnvironment environment =
            read_variables({"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"});
        const char* agent_store = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
        environment.store_is_external =
            agent_store != nullptr && std::string(agent_store) == "True";
        if (is_set("TORCHELASTIC_RESTART_COUNT")) {
            environment.attempt =
                integer_variable("TORCHELASTIC_RESTART_COUNT", "torchrun", 0, kMaxRanks);
        }
        return environment;
    }
    if (is_set("SLURM_PROCID")) {
        return read_variables({"slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"});
    }
    if (is_set("OMPI_COMM_WORLD_RANK")) {
        return read_variables({"openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK"});
    }
    return {};
}

c10::intrusive_ptr<c10d::Store> connect_store(const LaunchEnvironment& environment,
                                              std::chrono::milliseconds timeout) {
    if (environment.world_size == 1 && environment.master_port == 0) {
        return c10::make_intrusive<c10d::HashStore>();
    }
    const bool hosts = environment.rank == 0 && !environment.store_is_external;
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(environment.master_port);
    options.isServer = hosts;
    options.waitWorkers = false;  // ranks meet when they form their first group
    options.timeout = timeout;
    try {
        c10::intrusive_ptr<c10d::Store> store =
            c10::make_intrusive<c10d::TCPStore>(environment.master_addr, options);
        if (environment.attempt > 0) {
            store = c10::make_intrusive<c10d::PrefixStore>(
                fmt::format("attempt_{}", environment.attempt), store);
        }
        return store;
    } catch (const std::exception& error) {
        throw CommError(
            fmt::format("rank {} cannot {} the store at MASTER_ADDR:MASTER_PORT = {}:{}: {}",
                        environment.rank, hosts ? "host" : "reach", environment.master_addr,
                        environment.master_port, cause_of(error)));
    }
}

c10::intrusive_ptr<c10d::Store> host_store(int& port) {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    try {
        auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
        port = store->getPort();
        return store;
    } catch (const std::exception& error) {
        throw CommError(fmt::format("cannot host a store on a local port: {}", cause_of(error)));
    }
}

void quiet_backend_logs() {
    if (!is_set("TORCH_CPP_LOG_LEVEL")) {
        FLAGS_caffe2_log_level = c10::GLOG_FATAL;
    }
}

}  // namespace hybridcp

#include "comm/backend.h"

#include <pthread.h>
#include <sched.h>

#include <cstdlib>
#include <exception>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#ifdef HCP_CUDA
#define USE_C10D_NCCL
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include "hybridcp/error.h"

namespace hybridcp {

namespace {

std::shared_ptr<gloo::transport::Device> gloo_device() {
    using c10d::ProcessGroupGloo;
    if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"); interface != nullptr) {
        return ProcessGroupGloo::createDeviceForInterface(interface);
    }
    const char* master = std::getenv("MASTER_ADDR");
    const std::string address = master == nullptr ? "127.0.0.1" : master;
    if (address == "localhost" || address == "::1" || address.starts_with("127.")) {
        return ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
    }
    return ProcessGroupGloo::createDefaultDevice();
}

// Whether more ranks were started on this machine (torchrun's variable) than it has cores for.
bool ranks_share_cores() {
    const char* local_ranks = std::getenv("LOCAL_WORLD_SIZE");
    cpu_set_t cores;
    CPU_ZERO(&cores);
    return local_ranks != nullptr && sched_getaffinity(0, sizeof(cores), &cores) == 0 &&
           std::atoi(local_ranks) > CPU_COUNT(&cores);
}

// Gloo's loop thread polls without a pause while another thread holds the lock of a connection,
// say one that writes to it and had to give up its core: with 8 ranks on 2 cores that was a third
// of all CPU time. Where ranks share cores it therefore runs only on what they leave. A thread
// inherits its policy, and giving up an idle one takes a privilege: hence a thread that makes it.
std::shared_ptr<gloo::transport::Device> gloo_device_for_ranks() {
    if (!ranks_share_cores()) {
        return gloo_device();
    }
    std::shared_ptr<gloo::transport::Device> device;
    std::exception_ptr failure;
    std::thread maker([&] {
        const sched_param priority{};
        (void)pthread_setschedparam(pthread_self(), SCHED_IDLE, &priority);
        try {
            device = gloo_device();
        } catch (...) {
            failure = std::current_exception();
        }
    });
    maker.join();
    if (failure) {
        std::rethrow_exception(failure);
    }
    return device;
}

// The first line of a message, without the "[file:line] " that Gloo puts before it.
std::string one_line(const std::string& message) {
    std::string line = message.substr(0, message.find('\n'));
    if (line.starts_with("[") && line.find("] ") != std::string::npos) {
        line = line.substr(line.find("] ") + 2);
    }
    return line;
}

}  // namespace

at::Device group_device(const GroupOptions& options) {
    if (options.device == "cpu") {
        return at::Device(at::kCPU);
    }
    if (options.device != "cuda" && !options.device.starts_with("cuda:")) {
        throw UsageError(fmt::format("group '{}': unknown device '{}': use cpu or cuda",
                                     options.name, options.device));
    }
#ifdef HCP_CUDA
    const at::Device device(options.device);
    return device.has_index() ? device : at::Device(at::kCUDA, c10::cuda::current_device());
#else
    throw UsageError("this build has no CUDA: configure with HCP_CUDA=ON, or device: cpu");
#endif
}

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                               const GroupOptions& options) {
    auto group_store = c10::make_intrusive<c10d::PrefixStore>("group/" + options.name, store);
#ifdef HCP_CUDA
    if (group_device(options).is_cuda()) {
        auto nccl_options = c10d::ProcessGroupNCCL::Options::create();
        nccl_options->timeout = options.timeout;
        return c10::make_intrusive<c10d::ProcessGroupNCCL>(group_store, options.rank, options.size,
                                                           nccl_options);
    }
#endif
    auto gloo_options = c10d::ProcessGroupGloo::Options::create(options.timeout);
    gloo_options->devices.push_back(gloo_device_for_ranks());
    return c10::make_intrusive<c10d::ProcessGroupGloo>(group_store, options.rank, options.size,
                                                       gloo_options);
}

std::string cause_of(const std::exception& error) {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    return one_line(torch_error != nullptr ? torch_error->msg() : error.what());
}

}  // namespace hybridcp

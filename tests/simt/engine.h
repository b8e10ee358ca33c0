#pragma once

// The machine: threads are fibers, a random choice of the next warp is the scheduler, and
// asynchronous work (products of wgmma, copies) happens between turns. One engine runs one launch,
// cluster after cluster.

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "simt/barriers.h"
#include "simt/fiber.h"
#include "simt/launch.h"
#include "simt/order.h"
#include "simt/shared_memory.h"
#include "simt/warp_products.h"

namespace hybridcp::simt {

constexpr uint32_t kWarpThreads = 32;
/// Where dynamic shared memory starts in the address window of a block.
constexpr uint32_t kSharedStart = 1024;
/// Addresses of the cluster carry the block's rank + 1 above this bit.
constexpr uint32_t kRankShift = 24;

struct Warp;
struct Block;
struct StoreGroup;

struct Thread {
    [[nodiscard]] uint32_t lane_bit() const { return 1U << index % 32; }
    Fiber fiber;
    Block* block = nullptr;
    Warp* warp = nullptr;
    uint32_t index = 0;  // in the block
    bool exited = false;
    const Waitable* waits_for = nullptr;
    uint32_t parity = 0;  // of the mbarrier it waits for
    Origin origin;        // of the primitive it is in
    Clock clock;
    std::vector<uint32_t> proxy_fences;  // the times of its fence_proxy_async
    uint32_t init_fences = 0;
    int64_t cluster_generation = -1;                  // of the cluster barrier it arrived at
    std::vector<std::shared_ptr<StoreGroup>> stores;  // the last one is open
};

struct Warp {
    Block* block = nullptr;
    uint32_t index = 0;
    std::array<Thread*, kWarpThreads> lanes{};
    uint32_t runnable = 0xffffffffU;  // lanes, as bits
    Collective collective;
    WarpProducts products;
};

struct Block {
    explicit Block(uint32_t shared_bytes) : memory(shared_bytes) {}
    SharedMemory memory;
    uint32_t index = 0, index_y = 0, rank = 0;
    uint32_t live_threads = 0;
    std::array<NamedBarrier, 16> barriers;
    std::map<uint32_t, Mbarrier> mbarriers;  // by offset
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    Times reached;  // when threads of other blocks last reached into this one
    std::vector<std::vector<uint64_t>>
        product_log;  // of each warpgroup, what its warps must agree on
};

using AsyncWork = std::function<void()>;

class Engine {
  public:
    Engine(const LaunchOptions& options, const std::function<void()>& kernel);
    void run();

    [[nodiscard]] static Engine& current();
    [[nodiscard]] Thread& thread() const { return *running_; }
    [[nodiscard]] const LaunchOptions& options() const { return options_; }
    /// Reports a rank outside the cluster, and a block that has exited.
    [[nodiscard]] Block& block_of_rank(uint32_t rank, const Origin& origin);
    [[nodiscard]] ClusterBarrier& cluster_barrier() { return cluster_barrier_; }
    [[nodiscard]] uint64_t turns() const { return steps_; }
    [[nodiscard]] std::size_t threads() const { return stacks_.count(); }
    [[nodiscard]] uint32_t live_threads() const { return live_threads_; }

    /// Stops the running thread until notify(what); the caller tests its condition again.
    void wait(const Waitable& what);
    void notify(const Waitable& what);
    /// Lets another warp run first, once in `chance` times.
    void maybe_yield(uint32_t chance);
    [[nodiscard]] bool one_in(uint32_t chance) { return random_() % chance == 0; }
    void start(AsyncWork work) { work_.push_back(std::move(work)); }

  private:
    friend void thread_entry();
    void make_cluster(uint32_t first_block, uint32_t block_y);
    void run_cluster();
    void turn();
    void run_warp(Warp& warp);
    void change_habits();
    [[nodiscard]] bool run_async_work();
    [[nodiscard]] Warp* pick_warp();
    void thread_body();
    void leave_thread();
    void check_end() const;
    void check_reached(const Block& block) const;
    [[nodiscard]] std::string no_progress(const std::string& why) const;

    LaunchOptions options_;
    const std::function<void()>& kernel_;
    std::mt19937_64 random_;
    StackPool stacks_;
    Fiber scheduler_;
    Thread* running_ = nullptr;
    std::vector<std::unique_ptr<Block>> blocks_;  // of the cluster
    std::vector<Warp*> warps_;
    ClusterBarrier cluster_barrier_;
    std::vector<AsyncWork> work_;
    uint32_t live_threads_ = 0;
    uint64_t steps_ = 0;
    uint64_t favoured_ = 0;  // warps that go first, as bits
    uint32_t async_chance_ =
        1;  // asynchronous work happens once in so many turns; 0: when nothing else can
    std::string failure_;
};

[[noreturn]] void fault(const Origin& origin, const std::string& what);
[[nodiscard]] std::string thread_text(const Thread& thread);
[[nodiscard]] std::string site_text(const Origin& origin);
[[nodiscard]] std::string shared_text(uint32_t offset);

}  // namespace hybridcp::simt

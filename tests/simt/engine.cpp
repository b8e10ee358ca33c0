#include "simt/engine.h"

#include <utility>

namespace hybridcp::simt {
namespace {

thread_local Engine* current_engine = nullptr;
// Turns between changes of who goes first and how late asynchronous work comes.
constexpr uint64_t kHabitTurns = 256;

}  // namespace

void thread_entry() {
    Engine& engine = Engine::current();
    engine.running_->fiber.entered();
    engine.thread_body();
}

Engine& Engine::current() {
    return *current_engine;
}

Engine::Engine(const LaunchOptions& options, const std::function<void()>& kernel)
    : options_(options),
      kernel_(kernel),
      random_(options.seed),
      stacks_(static_cast<std::size_t>(options.threads) * options.cluster) {}

void Engine::run() {
    Engine* const before = std::exchange(current_engine, this);
    for (uint32_t y = 0; y < options_.blocks_y && failure_.empty(); ++y) {
        for (uint32_t x = 0; x < options_.blocks && failure_.empty(); x += options_.cluster) {
            make_cluster(x, y);
            run_cluster();
        }
    }
    current_engine = before;
    if (!failure_.empty()) {
        throw Fault(failure_);
    }
}

void Engine::make_cluster(uint32_t first_block, uint32_t block_y) {
    blocks_.clear();
    warps_.clear();
    work_.clear();
    live_threads_ = 0;
    cluster_barrier_.start(threads());
    for (uint32_t rank = 0; rank < options_.cluster; ++rank) {
        auto block = std::make_unique<Block>(options_.shared_bytes);
        block->index = first_block + rank;
        block->index_y = block_y;
        block->rank = rank;
        block->live_threads = options_.threads;
        block->reached.resize(threads());
        block->threads = std::vector<Thread>(options_.threads);
        block->warps = std::vector<Warp>(options_.threads / kWarpThreads);
        block->product_log.resize((block->warps.size() + 3) / 4);
        for (uint32_t i = 0; i < options_.threads; ++i) {
            Thread& thread = block->threads[i];
            Warp& warp = block->warps[i / kWarpThreads];
            thread.block = block.get();
            thread.warp = &warp;
            thread.index = i;
            thread.clock.id = live_threads_;
            thread.fiber.prepare(stacks_.stack(live_threads_++), thread_entry);
            warp.block = block.get();
            warp.index = i / kWarpThreads;
            warp.lanes[i % kWarpThreads] = &thread;
        }
        for (NamedBarrier& barrier : block->barriers) {
            barrier.start(threads());
        }
        for (Warp& warp : block->warps) {
            warp.collective.start(threads());
            warps_.push_back(&warp);
        }
        blocks_.push_back(std::move(block));
    }
}

void Engine::run_cluster() {
    try {
        while (live_threads_ > 0 && failure_.empty()) {
            turn();
        }
        while (failure_.empty() && run_async_work()) {
        }
        if (failure_.empty()) {
            check_end();
        }
    } catch (const Fault& failure) {
        failure_ = failure.what();
    }
}

void Engine::turn() {
    if (steps_ % kHabitTurns == 0) {
        change_habits();
    }
    if (++steps_ > options_.most_steps) {
        throw Fault(no_progress("too many turns without an end"));
    }
    if (async_chance_ != 0 && one_in(async_chance_)) {
        (void)run_async_work();
    }
    if (Warp* warp = pick_warp()) {
        run_warp(*warp);
    } else if (!run_async_work()) {
        throw Fault(no_progress("no thread can make progress"));
    }
}

// Who goes first for a while: nobody, a few warps, all but a few, or one block.
void Engine::change_habits() {
    const uint64_t bits = random_();
    switch (random_() % 4) {
        case 0:
            favoured_ = 0;
            break;
        case 1:
            favoured_ = bits & random_();
            break;
        case 2:
            favoured_ = bits | random_() | random_();
            break;
        default:
            favoured_ = 0;
            for (std::size_t i = 0; i < warps_.size(); ++i) {
                const bool chosen = warps_[i]->block->rank == bits % options_.cluster;
                favoured_ |= uint64_t{chosen} << i % 64;
            }
    }
    static constexpr std::array<uint32_t, 4> kChances = {0, 1, 4, 32};
    async_chance_ = kChances[random_() % kChances.size()];
}

Warp* Engine::pick_warp() {
    std::array<Warp*, 2> chosen{};
    std::array<uint32_t, 2> seen{};
    for (std::size_t i = 0; i < warps_.size(); ++i) {
        if (warps_[i]->runnable == 0) {
            continue;
        }
        const std::size_t order = (favoured_ >> (i % 64) & 1) != 0 ? 0 : 1;
        if (one_in(++seen[order])) {
            chosen[order] = warps_[i];
        }
    }
    return chosen[0] != nullptr ? chosen[0] : chosen[1];
}

void Engine::run_warp(Warp& warp) {
    const auto first = static_cast<uint32_t>(random_() % kWarpThreads);
    const uint32_t ready = warp.runnable;
    for (uint32_t i = 0; i < kWarpThreads && failure_.empty(); ++i) {
        const uint32_t lane = (first + i) % kWarpThreads;
        if ((ready >> lane & 1) != 0) {
            running_ = warp.lanes[lane];
            scheduler_.switch_to(running_->fiber);
            running_ = nullptr;
        }
    }
}

bool Engine::run_async_work() {
    std::size_t candidates = work_.size();
    Warp* warp = nullptr;
    for (Warp* other : warps_) {
        if (other->products.has_work() && one_in(static_cast<uint32_t>(++candidates))) {
            warp = other;
        }
    }
    if (warp != nullptr) {
        return warp->products.run_one(*warp);
    }
    if (work_.empty()) {
        return false;
    }
    std::swap(work_[random_() % work_.size()], work_.back());
    const AsyncWork work = std::move(work_.back());
    work_.pop_back();
    work();
    return true;
}

void Engine::thread_body() {
    try {
        kernel_();
    } catch (const Fault& failure) {
        failure_ = failure.what();
    } catch (const std::exception& failure) {
        failure_ = thread_text(*running_) + ": exception: " + failure.what();
    }
    Thread& self = *running_;
    self.warp->runnable &= ~self.lane_bit();
    self.exited = true;
    --self.block->live_threads;
    cluster_barrier_.leave(self, --live_threads_);
    leave_thread();
}

void Engine::leave_thread() {
    Thread& self = *running_;
    self.fiber.switch_to(scheduler_);
}

void Engine::wait(const Waitable& what) {
    Thread& self = *running_;
    self.warp->runnable &= ~self.lane_bit();
    self.waits_for = &what;
    leave_thread();
    self.waits_for = nullptr;
}

void Engine::notify(const Waitable& what) {
    for (Warp* warp : warps_) {
        for (Thread* thread : warp->lanes) {
            if (thread->waits_for == &what) {
                warp->runnable |= thread->lane_bit();
            }
        }
    }
}

void Engine::maybe_yield(uint32_t chance) {
    if (one_in(chance)) {
        leave_thread();
    }
}

Block& Engine::block_of_rank(uint32_t rank, const Origin& origin) {
    if (rank >= blocks_.size()) {
        fault(origin, "names block " + std::to_string(rank) + " of a cluster of " +
                          std::to_string(blocks_.size()));
    }
    Block& block = *blocks_[rank];
    if (block.live_threads == 0) {
        fault(origin, "reaches block " + std::to_string(block.index) + ", which has exited");
    }
    if (&block != origin.thread->block) {
        block.reached[origin.thread->clock.id] = origin.thread->clock.time;
    }
    return block;
}

void launch(const LaunchOptions& options, const std::function<void()>& kernel) {
    static constexpr uint32_t kMostShared = 227 * 1024;
    static constexpr uint32_t kMostThreads = 1024;
    if (options.threads == 0 || options.threads % kWarpThreads != 0 ||
        options.threads > kMostThreads) {
        throw Fault("launch: threads a block: a multiple of 32 up to 1024");
    }
    if (options.cluster == 0 || options.cluster > 16 || options.blocks % options.cluster != 0) {
        throw Fault("launch: blocks must be a multiple of the cluster, of 1 to 16 blocks");
    }
    if (options.shared_bytes > kMostShared || options.shared_bytes % 16 != 0) {
        throw Fault("launch: shared memory: a multiple of 16 up to 232448 bytes");
    }
    Engine(options, kernel).run();
}

}  // namespace hybridcp::simt

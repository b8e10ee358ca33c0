#include "comm/liveness.h"

#include <condition_variable>
#include <mutex>
#include <string>

#include "hybridcp/error.h"

namespace hybridcp {

namespace {

constexpr std::chrono::seconds kBeat{1};
constexpr std::chrono::seconds kStorePatience{3};  // for an answer of the store
// Added once to the counter of a rank whose silence has a good reason: more than all beats of any
// job.
constexpr std::int64_t kSettled = std::int64_t{1} << 40;

std::string counter_key(int rank) {
    return "liveness/" + std::to_string(rank);
}

}  // namespace

// All traffic with the store is the thread's, so nobody else can hang on it. Guarded by mutex, but
// for the store.
struct Liveness::Shared {
    c10::intrusive_ptr<c10d::Store> store;
    int rank = 0;
    int world_size = 1;
    std::mutex mutex;
    std::condition_variable wake;      // the thread: there is something to do
    std::condition_variable answered;  // the callers: something was done
    bool stop = false;
    bool settle = false;   // wanted
    bool settled = false;  // done
    bool read = false;     // wanted; counters are new when it is false again
    bool ended = false;    // the thread has left
    std::vector<std::int64_t> counters;
};

Liveness::Liveness(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size)
    : rank_(rank), shared_(std::make_shared<Shared>()) {
    HCP_CHECK(store != nullptr && rank >= 0 && rank < world_size,
              "liveness: a store is needed, and a rank in [0, {})", world_size);
    shared_->store = store->clone();
    shared_->rank = rank;
    shared_->world_size = world_size;
    thread_ = std::thread([shared = shared_] { beat(shared); });
}

Liveness::~Liveness() {
    bool ended = false;
    {
        std::unique_lock lock(shared_->mutex);
        shared_->stop = true;
        shared_->wake.notify_all();
        ended = shared_->answered.wait_for(lock, kStorePatience, [&] { return shared_->ended; });
    }
    if (ended) {
        thread_.join();
    } else {
        thread_.detach();
    }
}

void Liveness::beat(const std::shared_ptr<Shared>& shared) {
    std::unique_lock lock(shared->mutex);
    try {
        while (!shared->stop) {
            const bool settle = shared->settle && !shared->settled;
            const bool read = shared->read;
            std::vector<std::int64_t> counters;
            lock.unlock();
            shared->store->add(counter_key(shared->rank), settle ? kSettled : 1);
            for (int rank = 0; read && rank < shared->world_size; ++rank) {
                counters.push_back(shared->store->add(counter_key(rank), 0));
            }
            lock.lock();
            shared->settled = shared->settled || settle;
            if (read) {
                shared->counters = std::move(counters);
                shared->read = false;
            }
            shared->answered.notify_all();
            shared->wake.wait_for(lock, kBeat, [&] {
                return shared->stop || shared->read || shared->settle != shared->settled;
            });
        }
    } catch (const std::exception&) {  // the store is gone: so is the job, and its waits will fail
        if (!lock.owns_lock()) {
            lock.lock();
        }
    }
    shared->store.reset();
    shared->ended = true;
    shared->answered.notify_all();
}

bool Liveness::settle() {
    std::unique_lock lock(shared_->mutex);
    shared_->settle = true;
    shared_->wake.notify_all();
    return shared_->answered.wait_for(lock, kStorePatience,
                                      [&] { return shared_->settled || shared_->ended; });
}

void Liveness::finish() {
    (void)settle();
}

std::vector<std::int64_t> Liveness::read_counters() {
    std::unique_lock lock(shared_->mutex);
    shared_->read = true;
    shared_->wake.notify_all();
    shared_->answered.wait_for(lock, kStorePatience,
                               [&] { return !shared_->read || shared_->ended; });
    return shared_->read ? std::vector<std::int64_t>{} : shared_->counters;
}

std::vector<int> Liveness::silent_ranks(std::chrono::milliseconds patience) {
    if (!settle()) {
        return {};
    }
    const std::vector<std::int64_t> before = read_counters();
    std::this_thread::sleep_for(patience);
    const std::vector<std::int64_t> after = read_counters();
    std::vector<int> silent;
    for (std::size_t rank = 0; rank < before.size() && rank < after.size(); ++rank) {
        if (static_cast<int>(rank) != rank_ && after[rank] == before[rank] &&
            after[rank] < kSettled) {
            silent.push_back(static_cast<int>(rank));
        }
    }
    return silent;
}

}  // namespace hybridcp

// A group of ranks that exchange tensors: a thin layer over c10d's Gloo (CPU) and NCCL (CUDA) that
// adds what a training system needs: every wait has a timeout and its error names op, step, peer
// and bytes; every exchange is counted per op name; ranks can compare a hash before they talk. See
// docs/errors.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "hybridcp/recorder.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace hybridcp {

/// Says which ranks of the job no longer answer; Group appends it to the message of a failed wait.
class Liveness;

struct GroupOptions {
    int rank = 0;
    int size = 1;
    std::chrono::milliseconds timeout{std::chrono::minutes(10)};
    std::string name = "world";  // prefix of the store's keys, and the group's name in messages
    std::string device = "cpu";  // cpu: Gloo; cuda: NCCL, in a build with HCP_CUDA
    std::vector<int> global_ranks = {};  // of each member, for messages; empty: 0..size-1
    std::shared_ptr<Liveness> liveness = nullptr;
};

/// What goes to a peer, or where what comes from it is put.
struct Message {
    at::Tensor tensor;
    int peer = 0;
};

/// A transfer in flight. It keeps its tensor alive; the group must outlive it. wait() may be called
/// once.
class Pending {
  public:
    Pending();
    ~Pending();
    Pending(Pending&& other) noexcept;
    Pending& operator=(Pending&& other) noexcept;

    /// Errors: CommError on timeout or when the peer is gone.
    void wait();

  private:
    friend class Group;
    struct Transfer;
    std::unique_ptr<Transfer> transfer_;
};

class Group {
  public:
    /// Connects the ranks through `store`. A group of one needs no store and moves nothing.
    [[nodiscard]] static std::shared_ptr<Group> make(c10::intrusive_ptr<c10d::Store> store,
                                                     GroupOptions options);
    ~Group();
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    [[nodiscard]] int rank() const { return options_.rank; }
    [[nodiscard]] int size() const { return options_.size; }
    /// Where the tensors are that it exchanges.
    [[nodiscard]] at::Device device() const { return device_; }
    [[nodiscard]] Recorder& recorder() { return recorder_; }
    /// The training step that messages name; -1 outside one.
    void set_step(std::int64_t step) { step_ = step; }

    // Point to point. The k-th send to a peer meets that peer's k-th receive from here, so both
    // sides must agree on the order per pair; posting never blocks. Tensors are contiguous, of
    // equal size and dtype on both sides.
    [[nodiscard]] Pending send(const std::string& op, const at::Tensor& tensor, int peer);
    [[nodiscard]] Pending receive(const std::string& op, const at::Tensor& into, int peer);

    /// Posts all at once, and returns the receives, then the sends. Ranks that swap messages must
    /// post them so: NCCL finishes one message of a pair before the next, so two that receive first
    /// would wait for ever. Its messages meet those of an exchange of the peer, in the same order.
    [[nodiscard]] std::vector<Pending> exchange(const std::string& op,
                                                const std::vector<Message>& sends,
                                                const std::vector<Message>& receives);

    /// Every rank's tensor, equal shapes: returns [P, ...].
    [[nodiscard]] at::Tensor all_gather(const std::string& op, const at::Tensor& local);
    /// Moves rows (dim 0): send_rows[r] of them to rank r, receive_rows[r] from it; returns the
    /// received rows, by ascending rank. A row may have any shape and dtype; counts may be zero.
    [[nodiscard]] at::Tensor all_to_all(const std::string& op,
                                        const at::Tensor& rows,
                                        const std::vector<std::int64_t>& send_rows,
                                        const std::vector<std::int64_t>& receive_rows);
    /// all_gather into `into` [P, ...], which is valid after wait(). Collectives that are in flight
    /// together must be started in the same order on all ranks.
    [[nodiscard]] Pending start_all_gather(const std::string& op,
                                           const at::Tensor& local,
                                           const at::Tensor& into);
    /// Adds to `sum` [...] fp32, in wait(), the sum over ranks of their parts[rank()]; the same
    /// bits whatever the timing. parts [P, ...] fp32 must not change until then.
    [[nodiscard]] Pending start_reduce_scatter(const std::string& op,
                                               const at::Tensor& parts,
                                               const at::Tensor& sum);
    /// In place.
    void all_reduce_sum(const std::string& op, at::Tensor& tensor);
    void all_reduce_max(const std::string& op, at::Tensor& tensor);
    void broadcast(const std::string& op, at::Tensor& tensor, int root);
    void barrier(const std::string& op);

    /// Compares `hash` on all ranks. Errors: UsageError on every rank, naming `what` and the ranks
    /// that differ.
    void agree(std::uint64_t hash, const std::string& what);

  private:
    friend class Pending;
    struct Wait;  // what an error message says about a wait
    explicit Group(GroupOptions options);
    [[nodiscard]] int peer_name(int peer) const;
    void check(const std::string& op, const Message& message) const;
    [[nodiscard]] Pending post(const std::string& op, const Message& message, bool is_send);
    void wait(const c10::intrusive_ptr<c10d::Work>& work, const Wait& what);
    [[nodiscard]] static Pending done();  // nothing to wait for
    template <typename Start>
    [[nodiscard]] Pending start_collective(const std::string& op,
                                           std::int64_t bytes,
                                           const Start& start);
    template <typename Start>
    void collective(const std::string& op, std::int64_t bytes, const Start& start);
    void all_reduce(const std::string& op, at::Tensor& tensor, bool maximum);
    [[noreturn]] void fail(const Wait& what, double seconds, const std::string& cause);

    GroupOptions options_;
    at::Device device_;
    c10::intrusive_ptr<c10d::Backend> backend_;
    Recorder recorder_;
    std::int64_t step_ = -1;
    std::vector<int> next_send_tag_;
    std::vector<int> next_receive_tag_;
};

}  // namespace hybridcp

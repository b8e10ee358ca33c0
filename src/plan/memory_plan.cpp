#include "plan/memory_plan.h"

#include <algorithm>
#include <utility>

#include "plan/block_memory.h"
#include "plan/state_memory.h"

namespace hybridcp::plan {

namespace {

constexpr std::int64_t kLossRows = 1024;   // of a chunk of logits
constexpr std::int64_t kLossWords = 8192;  // whose weight gradient is formed at once

struct Block {
    std::unique_ptr<Half> mixer, feed_forward;
    Held input, mixed;  // where a pass is repeated
};

class Step {
  public:
    explicit Step(const MemoryPlanInput& in)
        : in_(in), book_{.ledger = ledger_, .in = in}, state_(ledger_, in) {}

    [[nodiscard]] PeakMemory run() {
        // The third micro-batch is as the second.
        for (std::int64_t i = 0; i < std::min<std::int64_t>(in_.micro_batches, 2); ++i) {
            book_.gradients_exist = i > 0 && !in_.sharded;
            forward();
            loss();
            backward();
        }
        finish();
        return ledger_.peak();
    }

  private:
    [[nodiscard]] std::int64_t stream_numel() const { return book_.tokens() * in_.model.hidden; }
    [[nodiscard]] Held stream_like() const {
        return book_.take(MemoryClass::kStream, kWide * stream_numel());
    }
    /// Token ids, targets, positions and the indices of the batch's plan.
    [[nodiscard]] Held make_batch() const {
        return book_.take(MemoryClass::kOther, std::int64_t{48} * book_.tokens());
    }

    [[nodiscard]] bool is_converted(std::size_t layer) const {
        return in_.converts && layer < in_.model.layers.size() &&
               in_.model.layers[layer] == Mixer::kLinearAttention;
    }
    /// Between the layers before and after, where their layouts differ.
    void convert(std::size_t before, std::size_t after, Held& stream) const {
        const bool was = before < in_.model.layers.size() && is_converted(before);
        if (was != is_converted(after)) {
            const std::int64_t bytes = kWide * stream_numel();
            Held into = book_.take(MemoryClass::kExchange, bytes);
            book_.touch(MemoryClass::kExchange, 2 * bytes);  // packed to be sent, and received
            stream = std::move(into);
        }
    }

    void forward() {
        ledger_.begin("forward pass");
        batch_ = make_batch();
        state_.fetch(0, 1);
        {
            Held rows;
            if (book_.is_narrow()) {
                rows = book_.take(MemoryClass::kStream,
                                  (in_.element_bytes + (in_.sharded ? 0 : kWide)) * stream_numel());
            }
            stream_ = stream_like();
        }
        state_.release(0);
        const std::int64_t angles = book_.tokens() * in_.model.rotary_dim;
        {
            const Held exact = book_.take(MemoryClass::kOther, std::int64_t{16} * angles);
            tables_ = book_.take(MemoryClass::kOther, 2 * in_.element_bytes * angles);
        }
        blocks_.resize(in_.model.layers.size());
        for (std::size_t i = 0; i < blocks_.size(); ++i) {
            convert(i - 1, i, stream_);
            block_forward(i);
        }
        convert(blocks_.size() - 1, blocks_.size(), stream_);
        state_.fetch(state_.last_unit(), -1);
        {
            const Held wide = book_.take(MemoryClass::kOther, kWide * stream_numel());
            normed_ = book_.is_narrow()
                          ? book_.take(MemoryClass::kOther, in_.element_bytes * stream_numel())
                          : wide;
        }
    }

    void block_forward(std::size_t i) {
        const auto unit = static_cast<std::int64_t>(i) + 1;
        Block& block = blocks_[i];
        block.mixer = make_mixer_half(book_, in_.model.layers[i]);
        block.feed_forward = make_feed_forward_half(book_);
        state_.fetch(unit, unit + 1);
        Held mixed = block.mixer->forward(stream_);
        Held out = block.feed_forward->forward(mixed);
        if (in_.checkpointing == Checkpointing::kFull) {
            block.input = stream_;
            block.mixer->forget();
            block.feed_forward->forget();
        } else if (in_.checkpointing == Checkpointing::kSelective) {
            block.mixed = mixed;
            block.feed_forward->forget();
        }
        mixed.reset();
        stream_ = std::move(out);
        state_.release(unit);
    }

    void loss() {
        ledger_.begin("loss");
        const std::int64_t V = in_.model.vocabulary, d = in_.model.hidden;
        const std::int64_t rows = std::min(kLossRows, book_.tokens());
        d_normed_ = book_.take(MemoryClass::kLogits, in_.element_bytes * stream_numel());
        // A tied head is the embedding, which is fp32 when it is sharded too.
        const Held weight = in_.model.tied && book_.is_narrow()
                                ? book_.take(MemoryClass::kLogits, in_.element_bytes * V * d)
                                : book_.cast_weight(MemoryClass::kLogits, V * d);
        head_gradient_ = book_.take(MemoryClass::kGradients, kWide * V * d);
        const Held logits = book_.take(MemoryClass::kLogits, in_.element_bytes * rows * V);
        if (book_.is_narrow()) {
            const std::int64_t words = std::min(kLossWords, V);
            // The chunk in fp32, where no kernel reads bf16; then a slice of it at a time.
            const Held wide = book_.take(MemoryClass::kLogits, in_.on_cuda ? kWide * rows * V : 0);
            book_.touch(MemoryClass::kLogits, kWide * (rows * (words + d)));
        }
    }

    void backward() {
        ledger_.begin("backward pass of the head");
        if (!in_.sharded || !in_.model.tied) {  // else autograd keeps it until the embedding's
            keep_gradient(std::exchange(head_gradient_, Held()));
        }
        state_.fetch(state_.last_unit(), state_.last_unit() - 1);
        Held d_stream = head_backward();
        state_.reduce(state_.last_unit(), book_.gradients);
        convert(blocks_.size(), blocks_.size() - 1, d_stream);
        for (std::size_t i = blocks_.size(); i-- > 0;) {
            const bool linear = in_.model.layers[i] == Mixer::kLinearAttention;
            ledger_.begin("backward pass of block " + std::to_string(i) +
                          (linear ? ", linear attention" : ", full attention"));
            block_backward(i, d_stream);
            convert(i, i - 1, d_stream);
        }
        ledger_.begin("backward pass of the embedding");
        book_.add_gradient(in_.model.vocabulary * in_.model.hidden);
        head_gradient_.reset();
        d_stream.reset();
        normed_.reset();
        state_.reduce(0, book_.gradients);
        state_.finish_reductions();
    }

    /// A gradient that is the first of its leaf stays; a later one is added and freed.
    void keep_gradient(Held gradient) {
        if (!book_.gradients_exist) {
            book_.gradients.push_back(std::move(gradient));
        }
    }

    [[nodiscard]] Held head_backward() {
        Held wide =
            book_.is_narrow() ? book_.take(MemoryClass::kOther, kWide * stream_numel()) : d_normed_;
        Held d_stream = book_.take(MemoryClass::kOther, kWide * stream_numel());
        d_normed_.reset();
        wide.reset();
        stream_.reset();
        return d_stream;
    }

    void block_backward(std::size_t i, Held& d_stream) {
        const auto unit = static_cast<std::int64_t>(i) + 1;
        Block& block = blocks_[i];
        state_.fetch(unit, std::max<std::int64_t>(unit - 1, 1));
        if (in_.checkpointing == Checkpointing::kFull) {
            Held mixed = block.mixer->forward(block.input);
            (void)block.feed_forward->forward(mixed);
        } else if (in_.checkpointing == Checkpointing::kSelective) {
            (void)block.feed_forward->forward(block.mixed);
        }
        // A segment holds the gradient that it is given.
        const bool is_segment = in_.sharded || in_.checkpointing == Checkpointing::kFull;
        const Held of_block = is_segment ? d_stream : Held();
        {
            const Held of_half = in_.checkpointing == Checkpointing::kSelective ? d_stream : Held();
            d_stream = block.feed_forward->backward(std::move(d_stream));
        }
        d_stream = block.mixer->backward(std::move(d_stream));
        block = Block();
        state_.reduce(unit, book_.gradients);
    }

    void finish() {
        ledger_.begin("sum of gradients over the ranks");
        state_.finish_reductions();
        state_.release_all();
        batch_.reset();
        tables_.reset();
        if (!in_.sharded && in_.dp * in_.cp > 1) {
            state_.reduce_buckets();
        }
        ledger_.begin("norm of the gradients");
        book_.touch(MemoryClass::kOther, 8 * state_.largest());  // in fp64
        ledger_.begin("optimizer");
        book_.touch(MemoryClass::kOptimizer, kWide * state_.largest());
    }

    const MemoryPlanInput& in_;
    MemoryLedger ledger_;
    Book book_;
    State state_;
    std::vector<Block> blocks_;
    Held batch_, tables_, stream_, normed_, d_normed_, head_gradient_;
};

}  // namespace

PeakMemory plan_memory(const MemoryPlanInput& input) {
    return Step(input).run();
}

}  // namespace hybridcp::plan

// The feed-forward half, dense or with experts, and what halves have in common.
#include <utility>

#include "plan/block_memory.h"

namespace hybridcp::plan {

Held Book::cast_weight(MemoryClass memory_class, std::int64_t numel) const {
    return is_narrow() && !in.sharded ? take(memory_class, numel * in.element_bytes) : Held();
}

void Book::add_gradient(std::int64_t numel) {
    Held gradient = take(MemoryClass::kGradients, kWide * numel);
    if (!gradients_exist) {
        gradients.push_back(std::move(gradient));
    }
}

Held Book::project(MemoryClass memory_class,
                   std::int64_t tokens,
                   std::int64_t numel_in,
                   std::int64_t numel_out) const {
    const Held weight = cast_weight(memory_class, numel_in * numel_out);
    return take(memory_class, tokens * numel_out * in.element_bytes);
}

void Book::weight_gradient(MemoryClass memory_class,
                           std::int64_t tokens,
                           std::int64_t numel_in,
                           std::int64_t numel_out) {
    Held wide;
    if (is_narrow() && !in.on_cuda) {
        wide = take(memory_class, kWide * tokens * (numel_in + numel_out));
    }
    add_gradient(numel_in * numel_out);
}

Held Book::project_backward(MemoryClass memory_class,
                            std::int64_t tokens,
                            std::int64_t numel_in,
                            std::int64_t numel_out) {
    Held d_x;
    {
        const Held weight = cast_weight(memory_class, numel_in * numel_out);
        d_x = take(memory_class, tokens * numel_in * in.element_bytes);
    }
    weight_gradient(memory_class, tokens, numel_in, numel_out);
    return d_x;
}

Held Book::norm(MemoryClass memory_class) const {
    const Held wide = take(memory_class, kWide * tokens() * in.model.hidden);
    return is_narrow() ? take(memory_class, in.element_bytes * tokens() * in.model.hidden) : wide;
}

Held Book::norm_backward(MemoryClass memory_class, Held d_x, const Held& residual) const {
    const std::int64_t bytes = kWide * tokens() * in.model.hidden;
    if (is_narrow()) {
        d_x = take(memory_class, bytes);
    }
    const Held d_stream = take(memory_class, bytes);
    d_x.reset();
    return residual.use_count() > 1 ? take(memory_class, bytes) : residual;
}

Held Book::add_to_stream() const {
    const std::int64_t numel = tokens() * in.model.hidden;
    Held wide;
    if (is_narrow() && !in.on_cuda) {  // ATen widens the term first
        wide = take(MemoryClass::kStream, kWide * numel);
    }
    return take(MemoryClass::kStream, kWide * numel);
}

Held Book::narrow_gradient(MemoryClass memory_class, const Held& d_out) const {
    return is_narrow() ? take(memory_class, in.element_bytes * tokens() * in.model.hidden) : d_out;
}

namespace {

constexpr MemoryClass kClass = MemoryClass::kFeedForward;

/// down(silu(gate x) * up x), [T, width] inside.
class Swiglu {
  public:
    Swiglu(Book& book, std::int64_t width) : book_(book), width_(width) {}

    [[nodiscard]] Held forward() {
        const std::int64_t d = book_.in.model.hidden;
        gate_ = book_.project(kClass, book_.tokens(), d, width_);
        up_ = book_.project(kClass, book_.tokens(), d, width_);
        const Held activated = inner();
        return book_.project(kClass, book_.tokens(), width_, d);
    }

    [[nodiscard]] Held backward() {
        const std::int64_t d = book_.in.model.hidden, tokens = book_.tokens();
        Held d_x;
        {
            Held d_up;
            {
                const Held weight = book_.cast_weight(kClass, d * width_);
                d_up = inner();  // of the activations first, then in place
            }
            const Held d_gate = inner(), activated = inner();
            book_.weight_gradient(kClass, tokens, width_, d);
            {
                const Held weight = book_.cast_weight(kClass, d * width_);
                d_x = book_.take(kClass, book_.in.element_bytes * tokens * d);
            }
            book_.weight_gradient(kClass, tokens, d, width_);
            book_.weight_gradient(kClass, tokens, d, width_);
        }
        forget();
        return d_x;
    }

    void forget() {
        gate_.reset();
        up_.reset();
    }

  private:
    [[nodiscard]] Held inner() const {
        return book_.take(kClass, book_.in.element_bytes * book_.tokens() * width_);
    }
    Book& book_;
    std::int64_t width_;
    Held gate_, up_;
};

class DenseHalf final : public Half {
  public:
    explicit DenseHalf(Book& book) : book_(book), swiglu_(book, book.in.model.intermediate) {}

    Held forward(const Held& stream) override {
        stream_ = stream;
        inverse_ = book_.take(kClass, kWide * book_.tokens());
        x_ = book_.norm(kClass);
        const Held y = swiglu_.forward();
        return book_.add_to_stream();
    }

    void forget() override {
        swiglu_.forget();
        stream_.reset();
        inverse_.reset();
        x_.reset();
    }

    Held backward(Held d_out) override {
        Held dy = book_.narrow_gradient(kClass, d_out);
        Held d_x = swiglu_.backward();
        dy.reset();
        x_.reset();
        Held d_stream = book_.norm_backward(kClass, std::move(d_x), d_out);
        forget();
        return d_stream;
    }

  private:
    Book& book_;
    Swiglu swiglu_;
    Held stream_, x_, inverse_;
};

class ExpertsHalf final : public Half {
  public:
    explicit ExpertsHalf(Book& book) : book_(book), shared_(book, model().shared_expert_size) {}

    Held forward(const Held& stream) override {
        const std::int64_t T = book_.tokens(), e = book_.in.element_bytes, d = model().hidden;
        stream_ = stream;
        small_ = book_.take(kClass, kWide * T);
        x_ = book_.norm(kClass);
        router_logits_ = book_.take(kClass, e * T * model().experts);
        {
            const Held probabilities = book_.take(kClass, 2 * kWide * T * model().experts);
        }
        // Chosen experts, weights (twice), order, tokens and the pairs' weights.
        routing_ = book_.take(kClass, pairs() * (8 + kWide + e + 8 + 8 + kWide));
        shared_y_ = shared_.forward();
        {
            hidden_ = book_.take(kClass, e * pairs() * 2 * model().expert_size);
            const Held sum = book_.take(kClass, kWide * T * d);
            const Held one_expert =
                book_.take(kClass, expert_rows() * (d + model().expert_size) * (e + kWide));
        }
        const Held routed = book_.take(kClass, e * T * d);
        const Held share = book_.take(kClass, e * T * d);
        const Held y = book_.take(kClass, e * T * d);
        return book_.add_to_stream();
    }

    void forget() override {
        shared_.forget();
        for (Held* held :
             {&stream_, &small_, &x_, &router_logits_, &routing_, &shared_y_, &hidden_}) {
            held->reset();
        }
    }

    Held backward(Held d_out) override {
        const std::int64_t T = book_.tokens(), e = book_.in.element_bytes, d = model().hidden;
        Held dy = book_.narrow_gradient(kClass, d_out);
        Held d_shared = book_.take(kClass, e * T * d);
        book_.touch(kClass, e * T * d);  // of the shared expert's share, before it is summed
        shared_y_.reset();
        Held d_x = experts_backward();
        dy.reset();
        book_.touch(kClass, e * T * d);  // through the shared expert's gate
        (void)shared_.backward();
        d_shared.reset();
        {
            const std::int64_t of_routing = kWide * T * model().experts;
            const Held d_logits =
                book_.take(kClass, (model().has_balance_loss ? 4 : 1) * of_routing);
            const Held through = book_.project_backward(kClass, T, d, model().experts);
        }
        router_logits_.reset();
        routing_.reset();
        x_.reset();
        Held d_stream = book_.norm_backward(kClass, std::move(d_x), d_out);
        forget();
        return d_stream;
    }

  private:
    [[nodiscard]] const ModelSizes& model() const { return book_.in.model; }
    [[nodiscard]] std::int64_t pairs() const { return book_.tokens() * model().experts_per_token; }
    [[nodiscard]] std::int64_t expert_rows() const {  // when all have as many
        return (pairs() + model().experts - 1) / model().experts;
    }

    [[nodiscard]] Held experts_backward() {
        const std::int64_t T = book_.tokens(), d = model().hidden, width = model().expert_size;
        Held d_x;
        {
            const Held wide = book_.take(kClass, kWide * T * d);
            const Held d_weights = book_.take(kClass, kWide * pairs());
            book_.add_gradient(model().experts * 2 * width * d);
            book_.add_gradient(model().experts * width * d);
            // The activations, their gradients and products of one expert.
            book_.touch(kClass,
                        expert_rows() * (8 * width + 3 * d) * kWide + 3 * kWide * width * d);
            d_x = book_.is_narrow() ? book_.take(kClass, book_.in.element_bytes * T * d) : wide;
        }
        hidden_.reset();
        return d_x;
    }

    Book& book_;
    Swiglu shared_;
    Held stream_, small_, x_, router_logits_, routing_, shared_y_, hidden_;
};

}  // namespace

std::unique_ptr<Half> make_feed_forward_half(Book& book) {
    if (book.in.model.experts > 0) {
        return std::make_unique<ExpertsHalf>(book);
    }
    return std::make_unique<DenseHalf>(book);
}

}  // namespace hybridcp::plan

// The mixer half: linear attention here, full attention in full_attention_memory.cpp. Legend: Hk/Hv
// key and value heads, K/V their dims, N segments, C convolution channels.
#include <algorithm>
#include <utility>

#include "plan/full_attention_memory.h"

namespace hybridcp::plan {

namespace {

constexpr MemoryClass kClass = MemoryClass::kLinearAttention;
// Of the fused backend.
constexpr std::int64_t kCheckpointTokens = 256;

class LinearHalf final : public Half {
  public:
    explicit LinearHalf(Book& book) : book_(book), in_(book.in), m_(book.in.model) {}

    Held forward(const Held& stream) override {
        stream_ = stream;
        inverse_ = book_.take(kClass, kWide * book_.tokens());
        x_ = book_.norm(kClass);
        if (gathers()) {
            const Held gathered = exchange(e() * tokens() * m_.hidden);
            book_.touch(MemoryClass::kExchange, e() * tokens() * m_.hidden);
            x_ = gathered;
        }
        qkv_ = project(channels());
        z_ = project(value_width());
        const Held b = project(m_.value_heads), a = project(m_.value_heads);
        convolve();
        // Sum, softplus and g in fp32 (a widened too), beta in the compute dtype.
        gates_ = book_.take(kClass, tokens() * m_.value_heads * (3 * kWide + e()));
        run_gdn();
        {
            inverse_heads_ = book_.take(kClass, kWide * tokens() * m_.value_heads);
            gated_ = book_.take(kClass, e() * tokens() * value_width());
        }
        Held y = book_.project(kClass, tokens(), value_width(), m_.hidden);
        if (gathers()) {
            y = book_.take(kClass, e() * book_.tokens() * m_.hidden);
        }
        if (scatters()) {  // the recurrence keeps what it got of all tokens instead
            convolved_.reset();
        }
        has_tape_ = true;
        return book_.add_to_stream();
    }

    void forget() override {
        for (Held* held : {&stream_, &inverse_, &x_, &qkv_, &z_, &convolved_, &gates_, &shards_,
                           &factors_, &states_, &o_, &inverse_heads_, &gated_}) {
            held->reset();
        }
    }

    Held backward(Held d_out) override {
        Held dy = book_.narrow_gradient(kClass, d_out);
        if (gathers()) {
            dy = book_.take(kClass, e() * tokens() * m_.hidden);
        }
        Held d_gated = book_.project_backward(kClass, tokens(), value_width(), m_.hidden);
        dy.reset();
        gated_.reset();
        Held d_o = book_.take(kClass, e() * tokens() * value_width());
        Held d_z = book_.take(kClass, e() * tokens() * value_width());
        d_gated.reset();
        inverse_heads_.reset();
        o_.reset();
        Held d_qkv = gdn_backward(std::move(d_o));
        gates_.reset();
        d_qkv = convolve_backward(std::move(d_qkv));
        Held d_x = book_.project_backward(kClass, tokens(), m_.hidden, 2 * m_.value_heads);
        book_.touch(kClass, e() * tokens() * m_.hidden);
        (void)book_.project_backward(kClass, tokens(), m_.hidden, value_width());
        d_z.reset();
        z_.reset();
        (void)book_.project_backward(kClass, tokens(), m_.hidden, channels());
        d_qkv.reset();
        x_.reset();
        if (gathers()) {
            const Held sent = exchange(2 * e() * tokens() * m_.hidden);
            d_x = exchange(e() * book_.tokens() * m_.hidden);
        }
        Held d_stream = book_.norm_backward(kClass, std::move(d_x), d_out);
        forget();
        tape_.clear();
        has_tape_ = false;
        return d_stream;
    }

  private:
    [[nodiscard]] std::int64_t e() const { return in_.element_bytes; }
    [[nodiscard]] bool gathers() const {
        return in_.cp > 1 && in_.linear_mode == LinearMode::kGatherHidden;
    }
    [[nodiscard]] bool scatters() const {
        return in_.cp > 1 && in_.linear_mode == LinearMode::kUlysses;
    }
    [[nodiscard]] bool passes_states() const { return in_.cp > 1 && !gathers() && !scatters(); }
    /// Of the layer's input and output.
    [[nodiscard]] std::int64_t tokens() const {
        return gathers() ? book_.all_tokens() : book_.tokens();
    }
    /// Of the recurrence, with so many of the heads.
    [[nodiscard]] std::int64_t gdn_tokens() const {
        return scatters() ? book_.all_tokens() : tokens();
    }
    [[nodiscard]] std::int64_t head_shards() const { return scatters() ? in_.cp : 1; }
    [[nodiscard]] std::int64_t gdn_key_heads() const {
        return std::max<std::int64_t>(m_.key_heads / head_shards(), 1);
    }
    [[nodiscard]] std::int64_t gdn_value_heads() const { return m_.value_heads / head_shards(); }
    [[nodiscard]] std::int64_t segments() const {
        return in_.rows * (in_.cp > 1 && !gathers() && !scatters() ? in_.chunks_per_row : 1);
    }
    [[nodiscard]] std::int64_t key_width() const { return m_.key_heads * m_.key_dim; }
    [[nodiscard]] std::int64_t value_width() const { return m_.value_heads * m_.value_dim; }
    [[nodiscard]] std::int64_t channels() const { return 2 * key_width() + value_width(); }
    [[nodiscard]] std::int64_t state_bytes(std::int64_t columns) const {
        return kWide * gdn_value_heads() * m_.key_dim * columns;
    }
    [[nodiscard]] Held exchange(std::int64_t bytes) const {
        return book_.take(MemoryClass::kExchange, bytes);
    }
    [[nodiscard]] Held project(std::int64_t width) const {
        return book_.project(kClass, tokens(), m_.hidden, width);
    }

    void convolve() {
        if (in_.cp > 1 && !gathers() && !has_tape_) {
            tape_.push_back(exchange(e() * segments() * (m_.conv_width - 1) * channels()));
        }
        convolved_ = book_.take(kClass, e() * tokens() * channels());
    }

    [[nodiscard]] Held convolve_backward(Held d_convolved) {
        const Held d_rows = book_.take(kClass, e() * tokens() * channels());
        // Sums of the taps' gradients, one for each block of tokens.
        book_.touch(kClass, kWide * (tokens() / 256 + 1) * m_.conv_width * channels());
        book_.add_gradient(channels() * m_.conv_width);
        qkv_.reset();
        convolved_.reset();
        d_convolved.reset();
        if (in_.cp > 1 && !gathers()) {  // what comes back for the halos is added to all rows
            const Held halo = exchange(e() * tokens() * channels());
        }
        return d_rows;
    }

    /// What q, k, v, g and beta take together.
    [[nodiscard]] std::int64_t head_bytes() const {
        return tokens() * (e() * channels() + m_.value_heads * (kWide + e()));
    }

    void run_gdn() {
        if (scatters()) {  // what comes, and that in order, as pieces and one row of them before
            const Held received = exchange(head_bytes());
            shards_ = exchange(head_bytes());
        }
        if (passes_states() && !has_tape_) {
            // M and S_start stay; summaries come and go.
            const std::int64_t others =
                in_.linear_mode == LinearMode::kAllGather ? in_.cp * segments() : 0;
            tape_.push_back(book_.take(kClass, segments() * state_bytes(m_.key_dim)));
            tape_.push_back(exchange(segments() * state_bytes(m_.value_dim)));
            tape_.push_back(exchange(others * state_bytes(m_.key_dim + m_.value_dim)));
        }
        if (in_.fused_gdn) {
            const std::int64_t new_values = kWide * gdn_tokens() * gdn_value_heads() * m_.value_dim;
            // K K^T, Q K^T and two norms of a token.
            const std::int64_t records = kWide * rows_in_chunks(in_.fused_chunk) * gdn_key_heads() *
                                         (2 * in_.fused_chunk + 2);
            states_ = book_.take(kClass,
                                 checkpoints() * state_bytes(m_.value_dim) + new_values + records);
        } else {
            eager_forward();
            if (!has_tape_) {  // backward, if it is not next, makes them again
                factors_.reset();
                states_.reset();
            }
        }
        book_.touch(kClass, segments() * state_bytes(m_.value_dim));
        o_ = book_.take(kClass, e() * tokens() * value_width());
        if (scatters()) {
            book_.touch(MemoryClass::kExchange, 2 * e() * tokens() * value_width());
        }
    }

    [[nodiscard]] std::int64_t checkpoints() const {
        const std::int64_t longest = gdn_tokens() / segments();
        return segments() * (std::max<std::int64_t>(longest - 1, 0) / kCheckpointTokens);
    }
    [[nodiscard]] std::int64_t rows_in_chunks(std::int64_t chunk) const {
        const std::int64_t longest = (gdn_tokens() + segments() - 1) / segments();
        return segments() * ((longest + chunk - 1) / chunk) * chunk;
    }
    /// Rows of the chunks of the eager backend.
    [[nodiscard]] std::int64_t chunk_rows() const { return rows_in_chunks(in_.gdn_chunk); }
    [[nodiscard]] std::int64_t eager_states_bytes() const {
        return (chunk_rows() / in_.gdn_chunk + segments()) * state_bytes(m_.value_dim);
    }
    /// So many numbers for each row and value head.
    [[nodiscard]] std::int64_t of_rows(std::int64_t numbers) const {
        return kWide * chunk_rows() * gdn_value_heads() * numbers;
    }
    [[nodiscard]] std::int64_t of_key_rows(std::int64_t numbers) const {
        return kWide * chunk_rows() * gdn_key_heads() * numbers;
    }

    void eager_forward() {
        const std::int64_t K = m_.key_dim, V = m_.value_dim, C = in_.gdn_chunk;
        // q, k and their products; gates; decay and system; q_read, k_write, k_erase.
        factors_ = book_.take(kClass, of_key_rows(2 * K + 2 * C + 2) + of_rows(3 + 2 * C + 3 * K));
        book_.touch(kClass, of_rows(K));  // of the solve
        states_ = book_.take(kClass, eager_states_bytes() + of_rows(V));
        book_.touch(kClass, of_rows(V + C));  // scores and o
    }

    [[nodiscard]] Held gdn_backward(Held d_o) {
        if (scatters()) {
            book_.touch(MemoryClass::kExchange, 2 * e() * tokens() * value_width());
        }
        Held d_qkv = book_.take(kClass, e() * tokens() * channels());
        const Held d_gates = book_.take(kClass, 2 * kWide * gdn_tokens() * gdn_value_heads());
        if (!in_.fused_gdn && !factors_) {
            eager_forward();
        }
        if (passes_states()) {
            book_.touch(MemoryClass::kExchange, 2 * segments() * state_bytes(m_.value_dim));
        }
        {
            const std::int64_t K = m_.key_dim, V = m_.value_dim, C = in_.gdn_chunk;
            // Fewer key heads and segments than threads need up to 2.3 MB a thread and value head
            // of a key head more (K = V = 128): kernels/gdn/fused/window_jobs.h.
            const Held inner =
                in_.fused_gdn
                    ? book_.take(kClass, segments() * state_bytes(V))
                    : book_.take(kClass, eager_states_bytes() + of_rows(3 * V + 3 * K + 5 * C) +
                                             of_key_rows(2 * C + 2 * K));
        }
        factors_.reset();
        states_.reset();
        tape_.clear();
        d_o.reset();
        if (scatters()) {
            book_.touch(MemoryClass::kExchange, 2 * head_bytes());
            shards_.reset();
        }
        // Those of q, k and v become one row.
        Held joined = book_.take(kClass, e() * tokens() * channels());
        d_qkv.reset();
        return joined;
    }

    Book& book_;
    const MemoryPlanInput& in_;
    const ModelSizes& m_;
    Held stream_, inverse_, x_, qkv_, z_, convolved_, gates_, shards_, factors_, states_, o_,
        inverse_heads_, gated_;
    std::vector<Held> tape_;
    bool has_tape_ = false;
};

}  // namespace

std::unique_ptr<Half> make_mixer_half(Book& book, Mixer mixer) {
    if (mixer == Mixer::kFullAttention) {
        return make_full_attention_half(book);
    }
    return std::make_unique<LinearHalf>(book);
}

}  // namespace hybridcp::plan

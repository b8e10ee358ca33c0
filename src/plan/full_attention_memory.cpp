// The full-attention mixer. Legend: Hq/Hkv query and KV heads, D head dim.
#include "plan/full_attention_memory.h"

#include <algorithm>
#include <utility>

namespace hybridcp::plan {

namespace {

constexpr MemoryClass kClass = MemoryClass::kFullAttention;
// As kernels/attention/tiles.cpp cuts.
constexpr std::int64_t kTileScores = std::int64_t{1} << 19;
constexpr std::int64_t kMinTileRows = 32;
constexpr std::int64_t kMaxTileRows = 256;

class FullHalf final : public Half {
  public:
    explicit FullHalf(Book& book) : book_(book), in_(book.in), m_(book.in.model) {}

    Held forward(const Held& stream) override {
        stream_ = stream;
        inverse_ = book_.take(kClass, kWide * T() * (1 + m_.query_heads + m_.kv_heads));
        x_ = book_.norm(kClass);
        query_and_gate_ = book_.project(kClass, T(), m_.hidden, 2 * query_width());
        k_projected_ = book_.project(kClass, T(), m_.hidden, kv_width());
        v_ = book_.project(kClass, T(), m_.hidden, kv_width());
        {
            const Held normed = as_queries();
            q_ = as_queries();
        }
        {
            const Held normed = as_keys();
            k_ = as_keys();
        }
        attend();
        opened_ = as_queries();
        gated_ = as_queries();
        const Held y = book_.project(kClass, T(), query_width(), m_.hidden);
        has_tape_ = true;
        return book_.add_to_stream();
    }

    void forget() override {
        for (Held* held : {&stream_, &inverse_, &x_, &query_and_gate_, &k_projected_, &v_, &q_, &k_,
                           &shards_, &o_, &opened_, &gated_}) {
            held->reset();
        }
    }

    Held backward(Held d_out) override {
        Held dy = book_.narrow_gradient(kClass, d_out);
        Held d_gated = book_.project_backward(kClass, T(), query_width(), m_.hidden);
        dy.reset();
        gated_.reset();
        Held d_o = as_queries(), d_opened = as_queries();
        d_gated.reset();
        Held d_gate = as_queries();
        d_opened.reset();
        opened_.reset();
        o_.reset();
        attend_backward();
        d_o.reset();
        tape_.clear();
        rotate_and_normalise_backward();
        q_.reset();
        k_.reset();
        Held d_query = as_queries(), d_k = as_keys(), d_v = as_keys();
        Held d_x = book_.project_backward(kClass, T(), m_.hidden, kv_width());
        d_v.reset();
        v_.reset();
        (void)book_.project_backward(kClass, T(), m_.hidden, kv_width());
        d_k.reset();
        k_projected_.reset();
        Held d_joined = book_.take(kClass, 2 * e() * T() * query_width());
        d_query.reset();
        d_gate.reset();
        query_and_gate_.reset();
        (void)book_.project_backward(kClass, T(), m_.hidden, 2 * query_width());
        d_joined.reset();
        x_.reset();
        Held d_stream = book_.norm_backward(kClass, std::move(d_x), d_out);
        forget();
        has_tape_ = false;
        return d_stream;
    }

  private:
    [[nodiscard]] std::int64_t e() const { return in_.element_bytes; }
    [[nodiscard]] std::int64_t T() const { return book_.tokens(); }
    [[nodiscard]] std::int64_t query_width() const { return m_.query_heads * m_.head_dim; }
    [[nodiscard]] std::int64_t kv_width() const { return m_.kv_heads * m_.head_dim; }
    [[nodiscard]] Held as_queries() const { return book_.take(kClass, e() * T() * query_width()); }
    [[nodiscard]] Held as_keys() const { return book_.take(kClass, e() * T() * kv_width()); }
    [[nodiscard]] bool is_mode(FullMode mode) const { return in_.cp > 1 && in_.full_mode == mode; }

    /// What one tile of `heads` heads over `keys` keys takes.
    [[nodiscard]] std::int64_t tile_bytes(std::int64_t heads, std::int64_t keys) const {
        const std::int64_t rows =
            std::min(std::clamp(kTileScores / std::max<std::int64_t>(heads * keys, 1), kMinTileRows,
                                kMaxTileRows),
                     keys);
        // Scores and weights (in backward, their gradients), and a few rows of queries.
        return kWide * heads * rows * (2 * keys + 3 * m_.head_dim);
    }
    [[nodiscard]] std::int64_t heads_here() const {
        return is_mode(FullMode::kUlysses) ? std::max<std::int64_t>(m_.query_heads / in_.cp, 1)
                                           : m_.query_heads;
    }
    /// Keys of a document that a query of this rank can see at once.
    [[nodiscard]] std::int64_t keys_at_once() const {
        return is_mode(FullMode::kRing) ? (in_.row_tokens + in_.cp - 1) / in_.cp : in_.row_tokens;
    }
    /// q, k and v of the head shard, or of all heads on this rank's tokens.
    [[nodiscard]] std::int64_t qkv_bytes() const {
        return e() * T() * (query_width() + 2 * kv_width());
    }
    [[nodiscard]] std::int64_t gathered_bytes() const {
        return 2 * kWide * book_.all_tokens() * kv_width();
    }
    /// Keys and values in fp32 for the products, as they are in a bf16 model.
    [[nodiscard]] Held widened_keys() const {
        const bool is_wide = !book_.is_narrow() || is_mode(FullMode::kAllGather);
        return is_wide ? Held() : book_.take(kClass, 2 * kWide * T() * kv_width());
    }

    /// Gathered attention computes in fp32 whatever the dtype.
    [[nodiscard]] Held widened_rows(std::int64_t count) const {
        return book_.is_narrow() && is_mode(FullMode::kAllGather)
                   ? book_.take(kClass, count * kWide * T() * query_width())
                   : Held();
    }

    void attend() {
        if (is_mode(FullMode::kUlysses)) {  // this exchange is repeated in a second pass
            const Held received = exchange(qkv_bytes());
            shards_ = exchange(qkv_bytes());
            q_.reset();
            k_.reset();
            v_.reset();
        }
        if (has_tape_) {
            o_ = tape_.empty() ? Held() : tape_.front();
        } else {
            first_attention();
        }
        if (is_mode(FullMode::kUlysses)) {
            book_.touch(MemoryClass::kExchange, 2 * e() * T() * query_width());
            o_ = as_queries();
        }
    }

    void first_attention() {
        Held gathered;
        if (is_mode(FullMode::kAllGather)) {
            gathered = exchange(gathered_bytes());
            book_.touch(MemoryClass::kExchange, gathered_bytes() * e() / kWide);
        }
        Held held;
        if (is_mode(FullMode::kRing)) {  // one that is computed with, one that comes
            held = exchange(4 * e() * T() * kv_width());
            sum_ = book_.take(kClass, kWide * T() * query_width());
        }
        {
            const Held widened = widened_keys(), wide_rows = widened_rows(2);  // q and o
            const Held tiles = book_.take(kClass, tile_bytes(heads_here(), keys_at_once()));
            o_ = as_queries();
            tape_.push_back(o_);
        }
        const std::int64_t lse = kWide * T() * m_.query_heads;
        if (is_mode(FullMode::kRing)) {
            tape_.push_back(book_.take(kClass, lse));
            if (book_.is_narrow()) {
                tape_.push_back(as_queries());  // what rounding o has taken away
            }
            sum_.reset();
        } else {
            book_.touch(kClass, lse);
        }
    }

    void attend_backward() {
        if (is_mode(FullMode::kUlysses)) {
            book_.touch(MemoryClass::kExchange, 2 * e() * T() * query_width());
        }
        Held gathered, ring;
        if (is_mode(FullMode::kAllGather)) {
            gathered = exchange(gathered_bytes());
        }
        if (is_mode(FullMode::kRing)) {
            ring = exchange((4 * e() + 6 * kWide) * T() * kv_width());
        }
        const Held widened = widened_keys(),
                   wide_rows = widened_rows(3);  // q, d_o, dq before it is rounded
        const Held d_q =
            book_.take(kClass, (is_mode(FullMode::kRing) ? kWide : e()) * T() * query_width());
        const std::int64_t key_tokens = is_mode(FullMode::kAllGather) ? book_.all_tokens() : T();
        const Held d_keys = book_.take(kClass, 2 * kWide * key_tokens * kv_width());
        book_.touch(kClass, tile_bytes(heads_here(), keys_at_once()));
        if (is_mode(FullMode::kAllGather)) {
            book_.touch(MemoryClass::kExchange, 2 * gathered_bytes());
        }
        if (is_mode(FullMode::kUlysses)) {
            book_.touch(MemoryClass::kExchange, 2 * qkv_bytes());
        }
        shards_.reset();
    }

    void rotate_and_normalise_backward() const {
        book_.touch(kClass, 2 * e() * T() * query_width());
    }

    [[nodiscard]] Held exchange(std::int64_t bytes) const {
        return book_.take(MemoryClass::kExchange, bytes);
    }

    Book& book_;
    const MemoryPlanInput& in_;
    const ModelSizes& m_;
    Held stream_, inverse_, x_, query_and_gate_, k_projected_, v_, q_, k_, shards_, o_, opened_,
        gated_, sum_;
    std::vector<Held> tape_;
    bool has_tape_ = false;
};

}  // namespace

std::unique_ptr<Half> make_full_attention_half(Book& book) {
    return std::make_unique<FullHalf>(book);
}

}  // namespace hybridcp::plan

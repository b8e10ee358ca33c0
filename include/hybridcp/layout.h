// Which rank owns which tokens. A Layout is a value: integers only, the same on every rank, and the
// one definition that loader, positions, labels, convolution, Gated DeltaNet, attention and loss
// all read. Words: a *document* is a causal sequence (a row of a batch is one); a *segment* is a
// run of one document's tokens that one rank holds; a document's *chain* is its segments in causal
// order. See docs/layouts.md.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace hybridcp {

/// Who holds which of the 2P chunks, cut as evenly as their number allows, that follow each other
/// in time. Contiguous: rank r holds 2r and 2r+1. Zigzag: r and 2P-1-r, so causal attention is
/// balanced. Folded: two neighbouring chunks, ranks in the order 0 2 4 ... 5 3 1; from zigzag to
/// folded, half a shard goes to rank r xor 1 and the rest stays (docs/layouts.md).
enum class LayoutKind { kContiguous, kZigzag, kFolded };
/// What is cut: each document, or the flat row of all of them.
enum class LayoutCut { kDocument, kRow };

[[nodiscard]] std::string to_string(LayoutKind kind);
[[nodiscard]] std::string to_string(LayoutCut cut);

/// A run of tokens [begin, end) of document `doc` held by `rank`, which starts at `local_begin` in
/// that rank's local order. `chain_pos` counts the document's segments from 0; empty segments are
/// not listed.
struct Segment {
    std::int64_t doc = 0;
    std::int64_t begin = 0;
    std::int64_t end = 0;
    int rank = 0;
    std::int64_t local_begin = 0;
    std::int64_t chain_pos = 0;

    [[nodiscard]] std::int64_t size() const { return end - begin; }
    bool operator==(const Segment&) const = default;
};

/// What a sharded tensor carries and an op compares: equal tags, equal layouts.
struct LayoutTag {
    LayoutKind kind = LayoutKind::kContiguous;
    LayoutCut cut = LayoutCut::kDocument;
    std::uint64_t hash = 0;
    bool operator==(const LayoutTag&) const = default;
};
[[nodiscard]] std::string to_string(const LayoutTag& tag);

struct LayoutOptions {
    LayoutKind kind = LayoutKind::kContiguous;
    LayoutCut cut = LayoutCut::kDocument;
    int num_ranks = 1;
    std::vector<std::int64_t> document_lengths;  // tokens; zero is allowed
    /// With kContiguous and kRow only: the tokens of each rank, any sizes that add up; empty: as
    /// even as possible.
    std::vector<std::int64_t> shard_lengths = {};
};

class Layout {
  public:
    /// Builds the layout. Errors: UsageError for a negative length, num_ranks < 1, or shard lengths
    /// that do not add up.
    [[nodiscard]] static Layout make(const LayoutOptions& options);

    /// Builds a layout from the chain of each document: pieces (begin, end, rank) in causal order;
    /// the other fields of Segment are computed, empty pieces dropped. make() ends here, whatever
    /// the kind. Errors: UsageError unless the pieces of each document cover it exactly and name
    /// ranks that exist.
    [[nodiscard]] static Layout from_chains(const LayoutOptions& options,
                                            std::vector<std::vector<Segment>> chains);

    [[nodiscard]] LayoutKind kind() const { return options_.kind; }
    [[nodiscard]] LayoutCut cut() const { return options_.cut; }
    [[nodiscard]] int num_ranks() const { return options_.num_ranks; }
    [[nodiscard]] std::int64_t num_documents() const;
    [[nodiscard]] std::int64_t num_tokens() const { return num_tokens_; }
    [[nodiscard]] const std::vector<std::int64_t>& document_lengths() const {
        return options_.document_lengths;
    }
    /// Offset of each document in the flat order (documents one after another), [num_documents +
    /// 1].
    [[nodiscard]] const std::vector<std::int64_t>& document_offsets() const {
        return document_offsets_;
    }

    [[nodiscard]] std::int64_t num_local_tokens(int rank) const;
    /// The segments of a rank in its local order.
    [[nodiscard]] std::span<const Segment> segments(int rank) const;
    /// The segments of a document in causal order.
    [[nodiscard]] std::span<const Segment> chain(std::int64_t doc) const;

    /// For each local token of a rank: its index in the flat order. [num_local_tokens]
    [[nodiscard]] std::vector<std::int64_t> flat_indices(int rank) const;
    /// For each local token of a rank: its position in its document. [num_local_tokens]
    [[nodiscard]] std::vector<std::int64_t> positions(int rank) const;
    /// Equal on ranks whose layouts are equal; compared before they communicate.
    [[nodiscard]] std::uint64_t hash() const;
    [[nodiscard]] LayoutTag tag() const { return {kind(), cut(), hash()}; }

  private:
    LayoutOptions options_;
    std::int64_t num_tokens_ = 0;
    std::vector<std::int64_t> document_offsets_;
    std::vector<std::vector<Segment>> segments_by_rank_;
    std::vector<std::vector<Segment>> chain_by_document_;
};

}  // namespace hybridcp

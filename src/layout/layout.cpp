#include "hybridcp/layout.h"

#include <algorithm>
#include <numeric>

#include "hybridcp/error.h"
#include "layout/chunks.h"

namespace hybridcp {

namespace {

void check_options(const LayoutOptions& options) {
    HCP_CHECK_GE(options.num_ranks, 1, "layout: the number of ranks must be positive");
    for (const std::int64_t length : options.document_lengths) {
        HCP_CHECK_GE(length, 0, "layout: document lengths must not be negative");
    }
    if (options.shard_lengths.empty()) {
        return;
    }
    HCP_CHECK(
        options.kind == LayoutKind::kContiguous && options.cut == LayoutCut::kRow,
        "layout: shard lengths need the contiguous layout with cut 'row', this is {} with cut {}",
        to_string(options.kind), to_string(options.cut));
    HCP_CHECK_EQ(options.shard_lengths.size(), static_cast<std::size_t>(options.num_ranks),
                 "layout: one shard length per rank is needed");
    for (const std::int64_t length : options.shard_lengths) {
        HCP_CHECK_GE(length, 0, "layout: shard lengths must not be negative");
    }
    const auto sum = [](const std::vector<std::int64_t>& lengths) {
        return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    };
    HCP_CHECK_EQ(sum(options.shard_lengths), sum(options.document_lengths),
                 "layout: the shard lengths must add up to the number of tokens");
}

// What is cut falls into pieces that begin and end at `boundaries`, held by `ranks`.
struct Pieces {
    std::vector<std::int64_t> boundaries;
    std::vector<int> ranks;
};

Pieces shards_as_given(const std::vector<std::int64_t>& shard_lengths) {
    Pieces pieces{.boundaries = std::vector<std::int64_t>(shard_lengths.size() + 1, 0),
                  .ranks = std::vector<int>(shard_lengths.size())};
    std::partial_sum(shard_lengths.begin(), shard_lengths.end(), pieces.boundaries.begin() + 1);
    std::iota(pieces.ranks.begin(), pieces.ranks.end(), 0);
    return pieces;
}

Pieces chunks_of(const LayoutOptions& options, std::int64_t length, std::int64_t offset) {
    return {.boundaries = chunk_boundaries(length, options.num_ranks, offset),
            .ranks = chunk_ranks(options.kind, options.num_ranks)};
}

// The part of the pieces that lies in a document of `length` tokens from `offset` on; neighbouring
// pieces of one rank are one segment.
std::vector<Segment> cut_chain(std::int64_t offset, std::int64_t length, const Pieces& pieces) {
    std::vector<Segment> chain;
    for (std::size_t i = 0; i < pieces.ranks.size(); ++i) {
        const auto to_document = [&](std::int64_t position) {
            return std::clamp(position - offset, std::int64_t{0}, length);
        };
        const Segment segment{.begin = to_document(pieces.boundaries[i]),
                              .end = to_document(pieces.boundaries[i + 1]),
                              .rank = pieces.ranks[i]};
        if (segment.begin == segment.end) {
            continue;
        }
        if (!chain.empty() && chain.back().rank == segment.rank) {
            chain.back().end = segment.end;
        } else {
            chain.push_back(segment);
        }
    }
    return chain;
}

}  // namespace

std::string to_string(LayoutKind kind) {
    switch (kind) {
        case LayoutKind::kContiguous:
            return "contiguous";
        case LayoutKind::kZigzag:
            return "zigzag";
        case LayoutKind::kFolded:
            return "folded";
    }
    throw UsageError("layout: unknown kind");
}

std::string to_string(LayoutCut cut) {
    return cut == LayoutCut::kDocument ? "document" : "row";
}

std::string to_string(const LayoutTag& tag) {
    return fmt::format("{}, cut by {}", to_string(tag.kind), to_string(tag.cut));
}

Layout Layout::make(const LayoutOptions& options) {
    check_options(options);
    const std::int64_t num_tokens = std::accumulate(
        options.document_lengths.begin(), options.document_lengths.end(), std::int64_t{0});
    const Pieces row = options.shard_lengths.empty() ? chunks_of(options, num_tokens, 0)
                                                     : shards_as_given(options.shard_lengths);
    std::vector<std::vector<Segment>> chains;
    std::int64_t offset = 0;
    for (const std::int64_t length : options.document_lengths) {
        chains.push_back(options.cut == LayoutCut::kDocument
                             ? cut_chain(0, length, chunks_of(options, length, offset))
                             : cut_chain(offset, length, row));
        offset += length;
    }
    return from_chains(options, std::move(chains));
}

Layout Layout::from_chains(const LayoutOptions& options, std::vector<std::vector<Segment>> chains) {
    check_options(options);
    HCP_CHECK_EQ(chains.size(), options.document_lengths.size(),
                 "layout: one chain per document is needed");
    Layout layout;
    layout.options_ = options;
    layout.document_offsets_.push_back(0);
    layout.segments_by_rank_.resize(static_cast<std::size_t>(options.num_ranks));
    std::vector<std::int64_t> local_end(static_cast<std::size_t>(options.num_ranks), 0);
    for (std::size_t doc = 0; doc < chains.size(); ++doc) {
        std::vector<Segment>& chain = chains[doc];
        std::erase_if(chain, [](const Segment& piece) { return piece.begin == piece.end; });
        std::int64_t covered = 0;
        for (std::size_t pos = 0; pos < chain.size(); ++pos) {
            Segment& segment = chain[pos];
            HCP_CHECK(segment.rank >= 0 && segment.rank < options.num_ranks,
                      "layout: document {} names rank {} of {}", doc, segment.rank,
                      options.num_ranks);
            HCP_CHECK(segment.begin == covered && segment.end > covered,
                      "layout: document {}: piece {} is [{}, {}) and should start at {}", doc, pos,
                      segment.begin, segment.end, covered);
            covered = segment.end;
            const auto rank = static_cast<std::size_t>(segment.rank);
            segment.doc = static_cast<std::int64_t>(doc);
            segment.chain_pos = static_cast<std::int64_t>(pos);
            segment.local_begin = local_end[rank];
            local_end[rank] += segment.size();
            layout.segments_by_rank_[rank].push_back(segment);
        }
        HCP_CHECK_EQ(covered, options.document_lengths[doc],
                     "layout: the pieces of document {} must cover it", doc);
        layout.num_tokens_ += covered;
        layout.document_offsets_.push_back(layout.num_tokens_);
    }
    layout.chain_by_document_ = std::move(chains);
    return layout;
}

std::int64_t Layout::num_documents() const {
    return static_cast<std::int64_t>(options_.document_lengths.size());
}

std::int64_t Layout::num_local_tokens(int rank) const {
    const std::span<const Segment> own = segments(rank);
    return own.empty() ? 0 : own.back().local_begin + own.back().size();
}

std::span<const Segment> Layout::segments(int rank) const {
    HCP_CHECK(rank >= 0 && rank < num_ranks(), "layout: rank {} of {} does not exist", rank,
              num_ranks());
    return segments_by_rank_[static_cast<std::size_t>(rank)];
}

std::span<const Segment> Layout::chain(std::int64_t doc) const {
    HCP_CHECK(doc >= 0 && doc < num_documents(), "layout: document {} of {} does not exist", doc,
              num_documents());
    return chain_by_document_[static_cast<std::size_t>(doc)];
}

std::vector<std::int64_t> Layout::flat_indices(int rank) const {
    std::vector<std::int64_t> indices;
    for (const Segment& segment : segments(rank)) {
        const std::int64_t offset = document_offsets_[static_cast<std::size_t>(segment.doc)];
        for (std::int64_t pos = segment.begin; pos < segment.end; ++pos) {
            indices.push_back(offset + pos);
        }
    }
    return indices;
}

std::vector<std::int64_t> Layout::positions(int rank) const {
    std::vector<std::int64_t> positions;
    for (const Segment& segment : segments(rank)) {
        for (std::int64_t pos = segment.begin; pos < segment.end; ++pos) {
            positions.push_back(pos);
        }
    }
    return positions;
}

// FNV-1a over every integer that defines the layout, each preceded by what varies in number.
std::uint64_t Layout::hash() const {
    std::uint64_t hash = 14695981039346656037ULL;
    const auto mix = [&hash](std::int64_t value) {
        for (int byte = 0; byte < 8; ++byte) {
            hash ^= (static_cast<std::uint64_t>(value) >> (8 * byte)) & 0xFFU;
            hash *= 1099511628211ULL;
        }
    };
    mix(static_cast<std::int64_t>(kind()));
    mix(static_cast<std::int64_t>(cut()));
    mix(num_ranks());
    mix(num_documents());
    for (const std::vector<Segment>& chain : chain_by_document_) {
        mix(static_cast<std::int64_t>(chain.size()));
        for (const Segment& segment : chain) {
            mix(segment.rank);
            mix(segment.begin);
            mix(segment.end);
        }
    }
    return hash;
}

}  // namespace hybridcp

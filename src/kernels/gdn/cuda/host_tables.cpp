#include "kernels/gdn/cuda/host_tables.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>

namespace hybridcp::gdn {
namespace {

/// A piece makes its entry state by walking back; shorter ones would do little else.
constexpr std::int64_t kLeastChunksOfPiece = 16;

std::int64_t num_pieces(std::int64_t chunks, std::int64_t chunks_of_share) {
    const std::int64_t most = std::max<std::int64_t>(chunks / kLeastChunksOfPiece, 1);
    return std::clamp<std::int64_t>(chunks / std::max<std::int64_t>(chunks_of_share, 1), 1, most);
}

/// Shorter runs would cost forward more than a hundredth of its time.
constexpr std::int64_t kLeastChunksOfRun = 8;
/// What a run takes before its first chunk, in chunks.
constexpr std::int64_t kChunksToFill = 3;
constexpr std::int64_t kMostSummaryParts = 4;
/// With so many runs for each cluster those of any length balance.
constexpr std::int64_t kMostWaves = 8;

std::int64_t divide_up(std::int64_t x, std::int64_t by) {
    return (x + by - 1) / by;
}

/// Where the runs of `segments`, longest first, are walked: each head's run by one cluster.
struct RunSchedule {
    const std::vector<cuda::Piece>& segments;
    std::int64_t heads, clusters;

    [[nodiscard]] std::int64_t walks(std::int64_t most_chunks) const {
        std::int64_t count = 0;
        for (const cuda::Piece& segment : segments) {
            count += heads * divide_up(segment.chunks, most_chunks);
        }
        return count;
    }
    /// When the last run ends, in chunks, if each starts as soon as a cluster is free.
    [[nodiscard]] std::int64_t steps(std::int64_t most_chunks) const {
        std::vector<std::int64_t> lengths;
        for (const cuda::Piece& segment : segments) {
            const std::int64_t runs = divide_up(segment.chunks, most_chunks);
            const std::int64_t last = segment.chunks - (runs - 1) * most_chunks;
            lengths.insert(lengths.end(), static_cast<std::size_t>((runs - 1) * heads),
                           most_chunks + kChunksToFill);
            lengths.insert(lengths.end(), static_cast<std::size_t>(heads), last + kChunksToFill);
        }
        std::sort(lengths.begin(), lengths.end(), std::greater<>());
        std::priority_queue<std::int64_t, std::vector<std::int64_t>, std::greater<>> ends(
            std::greater<>(), std::vector<std::int64_t>(static_cast<std::size_t>(clusters), 0));
        std::int64_t last = 0;
        for (const std::int64_t length : lengths) {
            const std::int64_t end = ends.top() + length;
            ends.pop();
            ends.push(end);
            last = std::max(last, end);
        }
        return last;
    }
    /// The shortest runs that are no more than `waves` for each cluster; if there are none, runs of
    /// a cluster's share.
    [[nodiscard]] std::int64_t chunks_for(std::int64_t waves) const {
        std::int64_t all = 0;
        for (const cuda::Piece& segment : segments) {
            all += heads * segment.chunks;
        }
        const std::int64_t share = std::max(divide_up(all, clusters * waves), kLeastChunksOfRun);
        std::int64_t enough = std::max<std::int64_t>(segments.front().chunks, share);
        if (walks(enough) > clusters * waves) {
            return share;
        }
        for (std::int64_t least = share; least < enough;) {
            const std::int64_t middle = (least + enough) / 2;
            if (walks(middle) > clusters * waves) {
                least = middle + 1;
            } else {
                enough = middle;
            }
        }
        return enough;
    }
    /// Most chunks of a run, so that the last one ends early: the segments' last runs are shorter,
    /// so somewhat longer runs may balance better.
    [[nodiscard]] std::int64_t best_chunks() const {
        std::int64_t best = chunks_for(1);
        if (walks(best) > clusters * kMostWaves) {
            return best;
        }
        std::int64_t least = steps(best);
        for (std::int64_t waves = 1; waves <= kMostWaves; ++waves) {
            const std::int64_t shortest = chunks_for(waves);
            const std::int64_t step = std::max<std::int64_t>(shortest / 64, 1);
            for (std::int64_t more = 0; more <= shortest / 6; more += step) {
                const std::int64_t time = steps(shortest + more);
                if (time < least) {
                    best = shortest + more;
                    least = time;
                }
            }
        }
        return best;
    }
};

void add_chunks(HostTables& tables, const std::vector<std::int64_t>& offsets) {
    for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
        const auto first = static_cast<std::int32_t>(tables.chunks.size());
        for (std::int64_t token = offsets[i]; token < offsets[i + 1]; token += cuda::kChunkTokens) {
            const std::int64_t left = offsets[i + 1] - token;
            tables.chunks.push_back({.token = static_cast<std::int32_t>(token),
                                     .tokens = static_cast<std::int32_t>(
                                         std::min<std::int64_t>(left, cuda::kChunkTokens))});
        }
        const auto count = static_cast<std::int32_t>(tables.chunks.size()) - first;
        if (count == 0) {
            tables.empty_segments.push_back(static_cast<std::int64_t>(i));
        } else {
            tables.whole_segments.push_back({.segment = static_cast<std::int32_t>(i),
                                             .first_chunk = first,
                                             .chunks = count,
                                             .index = 0,
                                             .pieces = 1});
        }
    }
    std::stable_sort(
        tables.whole_segments.begin(), tables.whole_segments.end(),
        [](const cuda::Piece& a, const cuda::Piece& b) { return a.chunks > b.chunks; });
}

/// Cuts each segment into as many as `count` says, longest first.
template <typename Count>
std::vector<cuda::Piece> cut(const std::vector<cuda::Piece>& segments, Count count) {
    std::vector<cuda::Piece> pieces;
    for (cuda::Piece piece : segments) {
        piece.pieces = static_cast<std::int32_t>(count(piece.chunks));
        for (piece.index = 0; piece.index < piece.pieces; ++piece.index) {
            pieces.push_back(piece);
        }
    }
    std::stable_sort(pieces.begin(), pieces.end(), [](const cuda::Piece& a, const cuda::Piece& b) {
        return a.chunks / a.pieces > b.chunks / b.pieces;
    });
    return pieces;
}

/// Those of a head class that begin in the segment.
void add_runs_of(HostTables& tables, const cuda::Piece& segment, std::int32_t head_class) {
    const std::int32_t count = tables.cut.run_from(segment.chunks, head_class);
    for (std::int32_t index = 0; index < count; ++index) {
        tables.runs.push_back({.segment = segment.segment,
                               .first_chunk = segment.first_chunk,
                               .chunks = segment.chunks,
                               .index = index,
                               .head_class = head_class});
    }
}
/// How many chunks of a run are made again.
std::int32_t unkept_chunks(const cuda::RunCut& cut, const cuda::Run& run) {
    const std::int32_t begin = cut.start(run.index, run.head_class);
    const std::int32_t next = cut.start(run.index + 1, run.head_class);
    return std::max(std::min(next - cut.kept, run.chunks) - begin, 0);
}

void add_runs(HostTables& tables,
              std::size_t segments,
              std::int64_t value_heads,
              std::int64_t clusters,
              double kept_share) {
    tables.first_checkpoints.assign(segments, 0);
    if (tables.whole_segments.empty()) {
        return;
    }
    const std::int64_t length =
        RunSchedule{tables.whole_segments, value_heads, clusters}.best_chunks();
    const double kept = std::round(kept_share * static_cast<double>(length));
    tables.cut = {static_cast<std::int32_t>(length), static_cast<std::int32_t>(kept)};
    for (const cuda::Piece& segment : tables.whole_segments) {
        tables.first_checkpoints[static_cast<std::size_t>(segment.segment)] =
            tables.num_checkpoints;
        for (std::int32_t head_class = 0; head_class < cuda::kHeadClasses; ++head_class) {
            add_runs_of(tables, segment, head_class);
        }
        tables.num_checkpoints += tables.cut.run_from(segment.chunks, cuda::kHeadClasses - 1) - 1;
    }
    std::stable_sort(tables.runs.begin(), tables.runs.end(),
                     [&](const cuda::Run& a, const cuda::Run& b) {
                         return unkept_chunks(tables.cut, a) > unkept_chunks(tables.cut, b);
                     });
}

/// As many parts as fill the clusters, two for each head of which a quarter forgets nothing.
void add_summary_parts(HostTables& tables,
                       std::size_t segments,
                       std::int64_t value_heads,
                       std::int64_t clusters,
                       std::int64_t chunks_of_two) {
    std::int64_t walks = 0;
    for (const cuda::Piece& segment : tables.whole_segments) {
        walks += segment.chunks >= chunks_of_two ? (value_heads + 1) / 2 : 0;
    }
    const std::int64_t most =
        std::clamp<std::int64_t>(clusters / std::max<std::int64_t>(walks, 1), 1, kMostSummaryParts);
    tables.num_slots = static_cast<std::int32_t>(segments);
    for (const cuda::Piece& segment : tables.whole_segments) {
        const auto parts = static_cast<std::int32_t>(
            std::clamp<std::int64_t>(2 * segment.chunks / chunks_of_two, 1, most));
        const auto start = [&](std::int32_t part) {
            return static_cast<std::int32_t>(std::int64_t{part} * segment.chunks / parts);
        };
        for (std::int32_t part = 0; part < parts; ++part) {
            cuda::Piece piece = segment;
            piece.segment = parts > 1 ? tables.num_slots + part : segment.segment;
            piece.first_chunk += start(part);
            piece.chunks = start(part + 1) - start(part);
            piece.index = start(part);
            piece.pieces = segment.chunks;
            tables.summary_parts.push_back(piece);
        }
        if (parts > 1) {
            tables.joins.push_back(
                {.segment = segment.segment, .first_slot = tables.num_slots, .parts = parts});
            tables.num_slots += parts;
        }
    }
    std::stable_sort(
        tables.summary_parts.begin(), tables.summary_parts.end(),
        [](const cuda::Piece& a, const cuda::Piece& b) { return a.chunks > b.chunks; });
}

}  // namespace

HostTables make_host_tables(const std::vector<std::int64_t>& offsets,
                            std::int64_t value_heads,
                            int multiprocessors,
                            std::int64_t chunks_of_two_summary_parts,
                            double kept_share) {
    HostTables tables;
    add_chunks(tables, offsets);
    const std::int64_t share = divide_up(
        static_cast<std::int64_t>(tables.chunks.size()) * 2 * value_heads, multiprocessors);
    tables.pieces =
        cut(tables.whole_segments, [&](std::int64_t chunks) { return num_pieces(chunks, share); });
    const std::int64_t clusters = std::max(multiprocessors / 2, 1);
    add_runs(tables, offsets.size() - 1, value_heads, clusters, kept_share);
    add_summary_parts(tables, offsets.size() - 1, value_heads, clusters,
                      chunks_of_two_summary_parts);
    return tables;
}

}  // namespace hybridcp::gdn

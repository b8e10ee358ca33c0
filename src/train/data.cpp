#include "train/data.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>

#include "hybridcp/error.h"
#include "kernels/loss/cross_entropy.h"

namespace hybridcp {

namespace {
/// splitmix64's finaliser: every input bit reaches every output bit.
std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

void append_piece(
    const Corpus& corpus, std::int64_t document, std::int64_t begin, std::int64_t end, Row& row) {
    const std::size_t first = row.token_ids.size();
    corpus.read(document, begin, end, row.token_ids);
    row.document_lengths.push_back(end - begin);
    for (std::size_t i = first + 1; i < row.token_ids.size(); ++i) {
        row.targets.push_back(row.token_ids[i]);
    }
    row.targets.push_back(kIgnoredTarget);
}
}  // namespace

std::int64_t num_rows(const Corpus& corpus, std::int64_t sequence_length, bool packing) {
    return packing ? (corpus.num_tokens() + sequence_length - 1) / sequence_length
                   : corpus.num_documents();
}

Row make_row(const Corpus& corpus, std::int64_t sequence_length, bool packing, std::int64_t index) {
    const std::int64_t rows = num_rows(corpus, sequence_length, packing);
    HCP_CHECK(0 <= index && index < rows, "row {} of {}", index, rows);
    const std::vector<std::int64_t>& offsets = corpus.offsets();
    Row row;
    if (!packing) {
        const auto document = static_cast<std::size_t>(index);
        const std::int64_t length = offsets[document + 1] - offsets[document];
        if (length > 0) {
            append_piece(corpus, index, 0, std::min(length, sequence_length), row);
        }
        return row;
    }
    const std::int64_t begin = index * sequence_length;
    const std::int64_t end = std::min(begin + sequence_length, corpus.num_tokens());
    // The last document that starts at or before `begin`.
    auto document = static_cast<std::size_t>(
        std::upper_bound(offsets.begin(), offsets.end(), begin) - offsets.begin() - 1);
    for (std::int64_t position = begin; position < end; ++document) {
        const std::int64_t piece_end = std::min(offsets[document + 1], end);
        if (piece_end > position) {
            append_piece(corpus, static_cast<std::int64_t>(document), position - offsets[document],
                         piece_end - offsets[document], row);
        }
        position = piece_end;
    }
    return row;
}

std::uint64_t permuted_index(std::uint64_t index, std::uint64_t size, std::uint64_t key) {
    HCP_CHECK(index < size, "index {} of {}", index, size);
    const int half_bits = std::max(1, (static_cast<int>(std::bit_width(size - 1)) + 1) / 2);
    const std::uint64_t mask = (std::uint64_t{1} << half_bits) - 1;
    do {
        std::uint64_t left = index >> half_bits;
        std::uint64_t right = index & mask;
        for (std::uint64_t round = 0; round < 6; ++round) {
            const std::uint64_t word = mix(right ^ mix(key + 0x9e3779b97f4a7c15ULL * (round + 1)));
            const std::uint64_t next = (left ^ word) & mask;
            left = right;
            right = next;
        }
        index = left << half_bits | right;
    } while (index >= size);
    return index;
}

std::int64_t RowOrder::row_of_sample(std::int64_t sample) const {
    HCP_CHECK_GE(sample, 0, "sample");
    HCP_CHECK_GE(num_rows, 1, "rows of the data");
    const auto size = static_cast<std::uint64_t>(num_rows);
    const auto epoch = static_cast<std::uint64_t>(sample) / size;
    return static_cast<std::int64_t>(
        permuted_index(static_cast<std::uint64_t>(sample) % size, size, mix(seed + 1) + epoch));
}

std::vector<TokenBatch> make_batches(const std::vector<Row>& rows, std::int64_t rows_per_batch) {
    std::vector<TokenBatch> batches;
    for (std::size_t begin = 0; begin < rows.size();
         begin += static_cast<std::size_t>(rows_per_batch)) {
        const std::size_t end =
            std::min(rows.size(), begin + static_cast<std::size_t>(rows_per_batch));
        TokenBatch batch;
        std::vector<std::int64_t> token_ids;
        std::vector<std::int64_t> targets;
        for (std::size_t i = begin; i < end; ++i) {
            const auto append = [](std::vector<std::int64_t>& to,
                                   const std::vector<std::int64_t>& from) {
                to.insert(to.end(), from.begin(), from.end());
            };
            append(batch.document_lengths, rows[i].document_lengths);
            append(token_ids, rows[i].token_ids);
            append(targets, rows[i].targets);
        }
        batch.token_ids = at::tensor(token_ids, at::kLong);
        batch.targets = at::tensor(targets, at::kLong);
        batches.push_back(std::move(batch));
    }
    return batches;
}

RowLoader::RowLoader(const std::vector<std::string>& patterns,
                     const std::string& key,
                     RowLoaderOptions options)
    : corpus_(patterns, key),
      options_(options),
      order_{.num_rows = hybridcp::num_rows(corpus_, options.sequence_length, options.packing),
             .seed = options.seed} {
    if (corpus_.vocab_size() > options.vocab_size) {
        throw UsageError(fmt::format("{}: its tokens need a vocabulary of {}, the model has {}",
                                     key, corpus_.vocab_size(), options.vocab_size));
    }
}

Row RowLoader::sample(std::int64_t sample) const {
    const std::int64_t index = order_.row_of_sample(sample);
    Row row = make_row(corpus_, options_.sequence_length, options_.packing, index);
    for (const std::int64_t token : row.token_ids) {
        if (token >= options_.vocab_size) {
            throw FormatError(
                fmt::format("row {} of the data has token {}, the model's vocabulary is {}", index,
                            token, options_.vocab_size));
        }
    }
    return row;
}

std::string RowLoader::fingerprint() const {
    return fmt::format("{} documents, {} tokens, sequence_length {}, packing {}, seed {}",
                       corpus_.num_documents(), corpus_.num_tokens(), options_.sequence_length,
                       options_.packing, options_.seed);
}

}  // namespace hybridcp

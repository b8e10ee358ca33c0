// Rows of training text in a deterministic, seekable order: sample s of a run is a pure function of
// the files, the recipe and s, so the state of the loader is one number, and any dp split sees the
// same rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "train/corpus.h"
#include "train/step.h"

namespace hybridcp {

/// One row: documents (or pieces of them) one after another, at most sequence_length tokens.
struct Row {
    std::vector<std::int64_t> document_lengths;
    std::vector<std::int64_t> token_ids;
    /// The next token of the same document in the same row; -100 for the last one.
    std::vector<std::int64_t> targets;
};

/// Row `index` of a corpus. With packing, row r is tokens [r L, (r+1) L) of the stream of all
/// documents, cut at document ends: a document that does not fit goes on in the next row as a fresh
/// one. Without, row r is document r, cut to L tokens.
[[nodiscard]] std::int64_t num_rows(const Corpus& corpus,
                                    std::int64_t sequence_length,
                                    bool packing);
[[nodiscard]] Row make_row(const Corpus& corpus,
                           std::int64_t sequence_length,
                           bool packing,
                           std::int64_t index);

/// The place of `index` in a pseudo-random order of 0..size-1 that `key` chooses: a bijection in
/// O(1) memory (a Feistel network over the next power of four, walked until it falls inside).
[[nodiscard]] std::uint64_t permuted_index(std::uint64_t index,
                                           std::uint64_t size,
                                           std::uint64_t key);

struct RowOrder {
    std::int64_t num_rows = 0;
    std::uint64_t seed = 0;
    /// The row of sample 0, 1, 2, ...: every epoch holds each row once, in an order of its own.
    [[nodiscard]] std::int64_t row_of_sample(std::int64_t sample) const;
};

/// The rows of several micro-batches, `rows_per_batch` each (the last may be smaller). No row: no
/// batch.
[[nodiscard]] std::vector<TokenBatch> make_batches(const std::vector<Row>& rows,
                                                   std::int64_t rows_per_batch);

struct RowLoaderOptions {
    std::int64_t sequence_length = 4096;
    bool packing = true;
    std::uint64_t seed = 0;
    std::int64_t vocab_size = 0;  // the model's
};

/// The samples of a run, read from a corpus.
class RowLoader {
  public:
    /// `key` is the recipe's, for messages. Errors: those of Corpus; UsageError when the tokens do
    /// not fit the model's vocabulary.
    RowLoader(const std::vector<std::string>& patterns,
              const std::string& key,
              RowLoaderOptions options);

    [[nodiscard]] const Corpus& corpus() const { return corpus_; }
    [[nodiscard]] std::int64_t num_rows() const { return order_.num_rows; }
    [[nodiscard]] Row sample(std::int64_t sample) const;
    /// What the order of rows depends on, in words; a run resumes where it stopped only when it is
    /// the same.
    [[nodiscard]] std::string fingerprint() const;

  private:
    Corpus corpus_;
    RowLoaderOptions options_;
    RowOrder order_;
};

}  // namespace hybridcp

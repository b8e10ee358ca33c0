// The documents of the training text: which files there are, how many tokens each document has, and
// any run of a document's tokens. Only lengths are kept in memory; contents are read when asked
// for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hybridcp {

/// The byte tokenizer: a byte is its own id, and every document ends with one more token.
inline constexpr std::int64_t kEndOfDocument = 256;
inline constexpr std::int64_t kByteVocabulary = 257;

/// Files and globs become documents: a text file is one; so is each line of a .jsonl file (its
/// `text` field); a token file NAME.bin (flat little-endian) has NAME.json beside it: {"dtype":
/// "uint16" | "uint32"} and optionally "vocab_size" and "document_offsets": [0, ..., number of
/// tokens], without which the file is one document.
class Corpus {
  public:
    /// `key` is the recipe's, for messages. Errors: UsageError for a pattern without files, or text
    /// and token files together; FormatError naming file (and line).
    Corpus(const std::vector<std::string>& patterns, const std::string& key);

    [[nodiscard]] std::int64_t num_documents() const {
        return static_cast<std::int64_t>(documents_.size());
    }
    [[nodiscard]] std::int64_t num_tokens() const { return offsets_.back(); }
    /// Offset of each document in the stream of all of them, [num_documents + 1].
    [[nodiscard]] const std::vector<std::int64_t>& offsets() const { return offsets_; }
    [[nodiscard]] bool is_bytes() const { return is_bytes_; }
    /// Token ids are below it; 0 when no file says so.
    [[nodiscard]] std::int64_t vocab_size() const { return vocab_size_; }

    /// Appends tokens [begin, end) of a document. Errors: FormatError when the file has changed
    /// since.
    void read(std::int64_t document,
              std::int64_t begin,
              std::int64_t end,
              std::vector<std::int64_t>& into) const;

  private:
    enum class Kind { kText, kJsonLines, kTokens16, kTokens32 };
    struct File {
        std::string path;
        Kind kind;
    };
    struct Document {
        std::size_t file;
        std::int64_t offset_bytes;
        std::int64_t size_bytes;
        std::int64_t num_tokens;
    };
    void add_file(const std::string& path);
    void add_json_lines(std::size_t file);
    void add_tokens(std::size_t file);
    [[nodiscard]] std::string read_text(const Document& document,
                                        std::int64_t begin,
                                        std::int64_t end) const;
    void read_tokens(const Document& document,
                     std::int64_t begin,
                     std::int64_t end,
                     std::vector<std::int64_t>& into) const;

    std::vector<File> files_;
    std::vector<Document> documents_;
    std::vector<std::int64_t> offsets_{0};
    bool is_bytes_ = true;
    std::int64_t vocab_size_ = 0;
};

}  // namespace hybridcp

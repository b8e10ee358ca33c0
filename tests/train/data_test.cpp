#include "train/data.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "hybridcp/error.h"
#include "mesh_threads.h"

namespace hybridcp {
namespace {

using testing::message_of;
using testing::TemporaryFolder;
using Tokens = std::vector<std::int64_t>;

Tokens bytes_and_end(const std::string& text) {
    Tokens tokens;
    for (const char c : text) {
        tokens.push_back(static_cast<unsigned char>(c));
    }
    tokens.push_back(256);
    return tokens;
}

/// Rows by the definition, one token at a time: place every token of every document, break rows at
/// `length` tokens and pieces at document ends and row ends.
std::vector<Row> brute_force_rows(const std::vector<Tokens>& documents, std::int64_t length) {
    std::vector<Row> rows;
    std::int64_t filled = length;
    for (const Tokens& document : documents) {
        bool piece_is_open = false;
        for (const std::int64_t token : document) {
            if (filled == length) {
                rows.emplace_back();
                filled = 0;
                piece_is_open = false;
            }
            Row& row = rows.back();
            if (piece_is_open) {
                row.targets.back() = token;
                ++row.document_lengths.back();
            } else {
                row.document_lengths.push_back(1);
                piece_is_open = true;
            }
            row.token_ids.push_back(token);
            row.targets.push_back(-100);
            ++filled;
        }
    }
    return rows;
}

void expect_equal(const Row& row, const Row& expected) {
    EXPECT_EQ(row.document_lengths, expected.document_lengths);
    EXPECT_EQ(row.token_ids, expected.token_ids);
    EXPECT_EQ(row.targets, expected.targets);
}

TEST(Data, PackedRowsAreThoseOfTheDefinition) {
    const TemporaryFolder folder;
    const std::vector<std::string> texts{"hello", "", std::string(130, 'x'), "\xff\x00\x80", "ab"};
    std::vector<Tokens> documents;
    for (std::size_t i = 0; i < texts.size(); ++i) {
        folder.write("t" + std::to_string(i) + ".txt", texts[i]);
        documents.push_back(bytes_and_end(texts[i]));
    }
    const Corpus corpus({folder / "*.txt"}, "data.path");
    for (const std::int64_t length : {1, 2, 3, 5, 7, 63, 64, 65, 1000}) {
        const auto expected = brute_force_rows(documents, length);
        ASSERT_EQ(num_rows(corpus, length, true), static_cast<std::int64_t>(expected.size()))
            << length;
        for (std::size_t r = 0; r < expected.size(); ++r) {
            SCOPED_TRACE(fmt::format("row {} of {} tokens", r, length));
            expect_equal(make_row(corpus, length, true, static_cast<std::int64_t>(r)), expected[r]);
        }
    }
}

TEST(Data, WithoutPackingARowIsADocumentCutToLength) {
    const TemporaryFolder folder;
    const Corpus corpus({folder.write("a.txt", "abcdef"), folder.write("b.txt", "x")}, "data.path");
    ASSERT_EQ(num_rows(corpus, 4, false), 2);
    expect_equal(make_row(corpus, 4, false, 0), {{4}, {'a', 'b', 'c', 'd'}, {'b', 'c', 'd', -100}});
    expect_equal(make_row(corpus, 4, false, 1), {{2}, {'x', 256}, {256, -100}});
}

TEST(Data, JsonLinesAndTokenFilesAreDocuments) {
    const TemporaryFolder folder;
    const Corpus lines(
        {folder.write("a.jsonl", "{\"text\": \"h\\u00e9\"}\n\n{\"n\": 1, \"text\": \"b\"}")},
        "data.path");
    expect_equal(make_row(lines, 9, true, 0),
                 {{4, 2}, {'h', 0xc3, 0xa9, 256, 'b', 256}, {0xc3, 0xa9, 256, -100, 256, -100}});

    const std::string words{1, 0, 2, 1, 3, 0, 4, 0};  // 1, 258, 3, 4 as uint16
    folder.write(
        "t.json",
        "{\"dtype\": \"uint16\", \"vocab_size\": 300, \"document_offsets\": [0, 3, 3, 4]}");
    const Corpus tokens({folder.write("t.bin", words)}, "data.path");
    EXPECT_EQ(tokens.num_documents(), 3);
    EXPECT_EQ(tokens.vocab_size(), 300);
    EXPECT_FALSE(tokens.is_bytes());
    expect_equal(make_row(tokens, 8, true, 0), {{3, 1}, {1, 258, 3, 4}, {258, 3, -100, -100}});

    folder.write("w.json", "{\"dtype\": \"uint32\"}");
    const Corpus wide({folder.write("w.bin", std::string{1, 0, 1, 0, 2, 0, 0, 0})}, "data.path");
    expect_equal(make_row(wide, 8, true, 0), {{2}, {65537, 2}, {2, -100}});
}

TEST(Data, ErrorsNameFileAndLine) {
    const TemporaryFolder folder;
    const auto open = [](const std::string& path) {
        return message_of([&] { const Corpus corpus({path}, "data.path"); });
    };
    EXPECT_NE(open(folder / "none*").find("data.path: no file matches"), std::string::npos);
    EXPECT_NE(message_of([] { const Corpus corpus({}, "data.path"); }).find("data.path is empty"),
              std::string::npos);
    const std::string lines = folder.write("a.jsonl", "{\"text\": \"a\"}\n{\"text\": 3}\n");
    EXPECT_EQ(open(lines), lines + ":2: no field \"text\" with a string");
    const std::string broken = folder.write("b.jsonl", "{\"text\": \n");
    EXPECT_EQ(open(broken), broken + ":1: not valid JSON");
    const std::string bin = folder.write("t.bin", "abc");
    EXPECT_NE(open(bin).find("t.json"), std::string::npos);
    folder.write("t.json", "{\"dtype\": \"uint16\"}");
    EXPECT_NE(open(bin).find("3 bytes are not a whole number of 2-byte tokens"), std::string::npos);
    folder.write("t.bin", "abcd");
    folder.write("t.json", "{\"dtype\": \"uint16\", \"document_offsets\": [0, 3]}");
    EXPECT_NE(open(bin).find("must ascend from 0 to 2"), std::string::npos);
    folder.write("t.json", "{\"dtype\": \"uint16\", \"vocab_size\": 10}");
    EXPECT_NE(message_of([&] {
                  const Corpus corpus({bin}, "data.path");
                  (void)make_row(corpus, 4, true, 0);
              }).find("token 25185 at 0 is outside the vocabulary of 10"),
              std::string::npos);
    const std::string text = folder.write("c.txt", "some text");
    const Corpus corpus({text}, "data.path");
    folder.write("c.txt", "some");
    EXPECT_NE(message_of([&] { (void)make_row(corpus, 20, true, 0); }).find("shorter than it was"),
              std::string::npos);
    EXPECT_NE(message_of([&] {
                  const RowLoader loader({text}, "data.path", {.vocab_size = 100});
              }).find("need a vocabulary of 257"),
              std::string::npos);
}

TEST(Order, EveryEpochHoldsEachRowOnceInItsOwnOrder) {
    for (const std::int64_t rows : {1, 2, 3, 4, 5, 17, 64, 65, 1000}) {
        const RowOrder order{.num_rows = rows, .seed = 7};
        std::vector<Tokens> epochs;
        for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
            Tokens seen;
            for (std::int64_t i = 0; i < rows; ++i) {
                seen.push_back(order.row_of_sample(epoch * rows + i));
            }
            epochs.push_back(seen);
            const std::set<std::int64_t> distinct(seen.begin(), seen.end());
            EXPECT_EQ(static_cast<std::int64_t>(distinct.size()), rows);
            EXPECT_GE(*distinct.begin(), 0);
            EXPECT_LT(*distinct.rbegin(), rows);
        }
        if (rows >= 17) {
            Tokens ascending(static_cast<std::size_t>(rows));
            std::iota(ascending.begin(), ascending.end(), 0);
            EXPECT_NE(epochs[0], ascending);
            EXPECT_NE(epochs[0], epochs[1]);
            EXPECT_NE(epochs[0][0] - epochs[0][1], epochs[1][0] - epochs[1][1]);
            const RowOrder other{.num_rows = rows, .seed = 8};
            Tokens seen;
            for (std::int64_t i = 0; i < rows; ++i) {
                seen.push_back(other.row_of_sample(i));
            }
            EXPECT_NE(epochs[0], seen);
        }
    }
}

TEST(Order, NeighboursDoNotStayTogether) {
    const RowOrder order{.num_rows = 4096, .seed = 0};
    std::int64_t neighbours = 0;
    for (std::int64_t i = 0; i + 1 < 4096; ++i) {
        neighbours += std::abs(order.row_of_sample(i) - order.row_of_sample(i + 1)) == 1 ? 1 : 0;
    }
    EXPECT_LE(neighbours, 16);  // 2 expected of a random order
}

TEST(Batches, RowsFollowOneAnotherWithTheirDocuments) {
    const std::vector<Row> rows{
        {{2, 1}, {1, 2, 3}, {2, -100, -100}}, {{1}, {4}, {-100}}, {{2}, {5, 6}, {6, -100}}};
    const auto batches = make_batches(rows, 2);
    ASSERT_EQ(batches.size(), 2U);
    EXPECT_EQ(batches[0].document_lengths, (Tokens{2, 1, 1}));
    EXPECT_TRUE(at::equal(batches[0].token_ids, at::tensor({1, 2, 3, 4}, at::kLong)));
    EXPECT_EQ(batches[1].document_lengths, (Tokens{2}));
    EXPECT_TRUE(at::equal(batches[1].targets, at::tensor({6, -100}, at::kLong)));
    EXPECT_TRUE(make_batches({}, 2).empty());
}

}  // namespace
}  // namespace hybridcp

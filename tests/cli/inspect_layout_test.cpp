// `hcp inspect layout`: the picture, the SVG, the numbers, and what it refuses.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>

#include "cli/process.h"

namespace hybridcp::testing {
namespace {

Outcome inspect(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"inspect", "layout"});
    return run_hcp(arguments);
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines{""};
    for (const char c : text) {
        if (c == '\n') {
            lines.emplace_back();
        } else {
            lines.back() += c;
        }
    }
    return lines;
}

TEST(InspectLayout, DrawsRanksChunksDocumentsAndWork) {
    // Rank 0 sees 1 + 2 + 7 + 8 keys in document 0, and 1 in document 2; bars have one scale.
    const Outcome outcome =
        inspect({"--ranks", "2", "--documents", "8,0,2", "--kind", "zigzag,folded"});
    EXPECT_EQ(outcome.status, 0);
    EXPECT_EQ(outcome.output,
              R"(2 ranks, 3 documents, 10 tokens; 4 chunks a document
a token is 4 columns; causal work: how many keys the tokens of a rank see
0-3: the chunk that fills a column; +: less than half of it

zigzag     |document 0: 8                  |2: 2                  causal work
rank 0     00000000................333333330000....  ========              19
rank 1     ........1111111122222222............2222  =========             20
                                                              max/mean 1.0256

folded     |document 0: 8                  |2: 2                  causal work
rank 0     0000000011111111................0000....  =====                 11
rank 1     ................2222222233333333....2222  ============          28
                                                              max/mean 1.4359

rows sent                  zigzag -> folded            zigzag -> contiguous
rank 0                               2 to 1                          2 to 1
rank 1                               2 to 0                          2 to 0
all                     40.0% in 2 messages             40.0% in 2 messages
)");
}

TEST(InspectLayout, FitsTheWidth) {
    const std::vector<std::vector<std::string>> cases = {
        {"--ranks", "1", "--documents", "0"},
        {"--ranks", "4", "--documents", "4096,1000,0,17"},
        {"--ranks", "16", "--sequence-length", "1048576"},
        {"--ranks", "40", "--documents", "100000,5,1,1,70000"},
        {"--ranks", "3", "--sequence-length", "2"}};
    for (const std::vector<std::string>& arguments : cases) {
        for (const std::size_t width : {80U, 100U, 200U}) {
            std::vector<std::string> words = arguments;
            if (width != 80) {  // the default, where the output is no terminal
                words.insert(words.end(), {"--width", std::to_string(width)});
            }
            const Outcome outcome = inspect(words);
            EXPECT_EQ(outcome.status, 0) << outcome.output;
            for (const std::string& line : lines_of(outcome.output)) {
                EXPECT_LE(line.size(), width) << line;
            }
        }
    }
}

// Every column of a lane that a chunk fills is filled on one rank.
TEST(InspectLayout, LanesPartitionTheRow) {
    const Outcome outcome =
        inspect({"--ranks", "3", "--documents", "12,3,4", "--cut", "row", "--kind", "zigzag"});
    std::vector<std::string> lanes;
    for (const std::string& line : lines_of(outcome.output)) {
        if (line.rfind("rank ", 0) == 0 && lanes.size() < 3) {
            lanes.push_back(line.substr(11, line.find("  ", 11) - 11));
        }
    }
    ASSERT_EQ(lanes.size(), 3U) << outcome.output;
    ASSERT_EQ(lanes[0].size() % 19, 0U);  // tokens of equal width
    for (std::size_t column = 0; column < lanes[0].size(); ++column) {
        int owners = 0;
        for (const std::string& lane : lanes) {
            owners += lane.at(column) == '.' ? 0 : 1;
        }
        EXPECT_EQ(owners, 1) << "column " << column << "\n" << outcome.output;
    }
}

TEST(InspectLayout, ColoursOnlyWhenAsked) {
    const std::vector<std::string> arguments = {"--ranks", "4", "--documents", "4096,1000,0,17"};
    const std::string plain = inspect(arguments).output;
    EXPECT_EQ(plain.find('\x1b'), std::string::npos);
    std::vector<std::string> words = arguments;
    words.insert(words.end(), {"--color", "always"});
    const std::string coloured = inspect(words).output;
    EXPECT_NE(coloured.find("\x1b[38;5;16;48;5;"), std::string::npos);
    // Without its escapes it is the same picture; bars are coloured blanks.
    std::string letters = std::regex_replace(coloured, std::regex("\x1b\\[[0-9;]*m"), "");
    std::string bars_as_blanks = plain;
    std::ranges::replace(bars_as_blanks, '=', ' ');
    EXPECT_EQ(letters, bars_as_blanks);
}

TEST(InspectLayout, WritesTheNumbersAsJson) {
    const ScratchFolder folder;
    const std::string path = folder / "layout.json";
    ASSERT_EQ(inspect({"--ranks", "4", "--documents", "4096,1000,0,17", "--json", path}).status, 0);
    const nlohmann::json document = nlohmann::json::parse(read_text(path));
    EXPECT_EQ(document.at("ranks"), 4);
    EXPECT_EQ(document.at("tokens"), 5113);
    EXPECT_EQ(document.at("cut"), "document");
    EXPECT_EQ(document.at("document_lengths"), (std::vector{4096, 1000, 0, 17}));
    ASSERT_EQ(document.at("layouts").size(), 3U);
    for (const nlohmann::json& layout : document.at("layouts")) {
        std::int64_t tokens = 0;
        std::int64_t work = 0;
        for (const nlohmann::json& rank : layout.at("ranks")) {
            tokens += rank.at("tokens").get<std::int64_t>();
            work += rank.at("causal_work").get<std::int64_t>();
            std::int64_t in_segments = 0;
            for (const nlohmann::json& segment : rank.at("segments")) {
                in_segments +=
                    segment.at("end").get<std::int64_t>() - segment.at("begin").get<std::int64_t>();
            }
            EXPECT_EQ(in_segments, rank.at("tokens"));
        }
        EXPECT_EQ(tokens, 5113);
        EXPECT_EQ(work, 4096 * 4097 / 2 + 1000 * 1001 / 2 + 17 * 18 / 2);
        const auto ratio = layout.at("causal_work_max_over_mean").get<double>();
        EXPECT_EQ(ratio < 1.01, layout.at("kind") == "zigzag") << layout.at("kind") << ratio;
    }
    ASSERT_EQ(document.at("conversions").size(), 2U);
    const nlohmann::json& swap = document.at("conversions")[0];
    EXPECT_EQ(swap.at("to"), "folded");
    EXPECT_EQ(swap.at("max_peers"), 1);
    const nlohmann::json expected = {{{"peer", 0}, {"rows", 639}}};
    EXPECT_EQ(swap.at("ranks")[1].at("sends"), expected);
}

TEST(InspectLayout, WritesTheSvgCompleteOrNotAtAll) {
    const ScratchFolder folder;
    const std::string path = folder / "layout.svg";
    ASSERT_EQ(inspect({"--ranks", "4", "--documents", "4096,1000,0,17", "--svg", path}).status, 0);
    const std::string svg = read_text(path);
    EXPECT_EQ(svg.rfind("<svg ", 0), 0U);
    EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
    EXPECT_EQ(count(svg, "<text"), count(svg, "</text>"));
    for (const char* text :
         {">document 0: 4,096 tokens<", ">rank 3<", ">zigzag<", ">3,889,465<", ">max/mean 1.0000<",
          ">zigzag to folded: 50.0% in 4 messages<", ">639 to 0, 639 to 3<"}) {
        EXPECT_NE(svg.find(text), std::string::npos) << text;
    }
    // Thousands of pieces become columns: the file stays small.
    std::string documents = "3";
    for (int i = 0; i < 1500; ++i) {
        documents += ",5,40";
    }
    ASSERT_EQ(inspect({"--ranks", "8", "--documents", documents, "--svg", path}).status, 0);
    EXPECT_LT(read_text(path).size(), 4U << 20U);

    const std::string before = read_text(path);
    EXPECT_EQ(inspect({"--ranks", "0", "--documents", "4", "--svg", path}).status, 2);
    EXPECT_EQ(read_text(path), before);
    const Outcome refused =
        inspect({"--ranks", "2", "--documents", "4", "--svg", folder / "none/layout.svg"});
    EXPECT_EQ(refused.status, 2);
    EXPECT_EQ(count(refused.output, "\n"), 1U) << refused.output;
}

TEST(InspectLayout, ReadsARecipeAndItsFirstBatch) {
    const ScratchFolder folder;
    write_text(folder / "text.txt", std::string(99, 'x'));  // and one token for its end
    write_text(folder / "recipe.yaml",
               "data: {path: " + (folder / "text.txt") +
                   ", sequence_length: 60}\n"
                   "train: {global_batch_size: 2, micro_batch_size: 2, accelerator: {cp: 2, "
                   "sequence_layout: zigzag, linear_attention_layout: convert}}\n");
    const std::string path = folder / "layout.json";
    const Outcome outcome = inspect({folder / "recipe.yaml", "--json", path});
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    const nlohmann::json document = nlohmann::json::parse(read_text(path));
    auto lengths = document.at("document_lengths").get<std::vector<int>>();
    std::ranges::sort(lengths);  // the order is the seed's
    EXPECT_EQ(lengths, (std::vector{40, 60}));
    ASSERT_EQ(document.at("layouts").size(), 2U);
    EXPECT_EQ(document.at("layouts")[0].at("kind"), "zigzag");
    EXPECT_EQ(document.at("layouts")[1].at("kind"), "folded");
    EXPECT_EQ(document.at("conversions").size(), 1U);

    const Outcome other =
        inspect({folder / "recipe.yaml", "train.accelerator.cp=3",
                 "train.accelerator.sequence_layout=contiguous", "train.accelerator.layout_cut=row",
                 "train.accelerator.linear_attention_layout=native"});
    EXPECT_EQ(other.output.rfind("3 ranks, 2 documents, 100 tokens; 6 chunks a row\n", 0), 0U)
        << other.output;
    EXPECT_EQ(count(other.output, "max/mean"), 1U) << other.output;
}

TEST(InspectLayout, RefusesInOneLine) {
    const ScratchFolder folder;
    write_text(folder / "recipe.yaml", "train: {accelerator: {sequence_layout: zigzig}}\n");
    const std::string recipe = folder / "recipe.yaml";
    const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
        {{}, "--ranks is missing"},
        {{"--ranks", "4"}, "--documents or --sequence-length"},
        {{"--ranks", "4", "--documents", "4", "--sequence-length", "4"}, "either"},
        {{"--ranks", "0", "--documents", "4"}, "0 ranks"},
        {{"--ranks", "257", "--documents", "4"}, "257 ranks"},
        {{"--ranks", "two", "--documents", "4"}, "--ranks"},
        {{"--ranks", "2", "--documents", "4,x"}, "--documents"},
        {{"--ranks", "2", "--documents", "4,-1"}, "-1 tokens"},
        {{"--ranks", "2", "--documents", "4000000000,4000000000"}, "4,294,967,295"},
        {{"--ranks", "2", "--documents", "4", "--kind", "zigzug"}, "did you mean zigzag?"},
        {{"--ranks", "2", "--documents", "4", "--cut", "rows"}, "did you mean row?"},
        {{"--ranks", "2", "--documents", "4", "--color", "yes"}, "--color"},
        {{"--ranks", "2", "--documents", "4", "--width", "10"}, "--width"},
        {{recipe, "--ranks", "4"}, "train.accelerator.cp=N"},
        {{recipe, "--cut", "row"}, "layout_cut"},
        {{recipe, "--documents", "4"}, "data.path"},
        {{recipe, "--sequence-length", "4"}, "data.sequence_length"},
        {{recipe}, "did you mean zigzag?"},
        {{folder / "none.yaml"}, "none.yaml"}};
    for (const auto& [arguments, mentions] : cases) {
        const Outcome outcome = inspect(arguments);
        EXPECT_EQ(outcome.status, 2) << outcome.output;
        EXPECT_EQ(outcome.output.rfind("hcp: ", 0), 0U) << outcome.output;
        EXPECT_EQ(count(outcome.output, "\n"), 1U) << outcome.output;
        EXPECT_NE(outcome.output.find(mentions), std::string::npos) << outcome.output;
    }
}

}  // namespace
}  // namespace hybridcp::testing

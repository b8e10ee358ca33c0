#include "train/metrics.h"

#include <gtest/gtest.h>

#include <limits>
#include <sstream>

#include "hybridcp/error.h"
#include "mesh_threads.h"
#include "train/progress.h"

namespace hybridcp {
namespace {

using testing::TemporaryFolder;

TEST(Metrics, AResumedRunKeepsTheLinesUpToItsCheckpoint) {
    const TemporaryFolder folder;
    {
        MetricsFile file(folder / "log", 0);
        for (std::int64_t step = 1; step <= 5; ++step) {
            file.write({.step = step,
                        .loss = 10.0 - static_cast<double>(step),
                        .validation_loss = step == 2 ? std::optional(7.5) : std::nullopt});
        }
    }
    {
        const MetricsFile file(folder / "log", 3);
        ASSERT_EQ(file.curve().training.size(), 3U);
        EXPECT_EQ(file.curve().training.back().step, 3);
        EXPECT_EQ(file.curve().training.back().loss, 7.0);
        ASSERT_EQ(file.curve().validation.size(), 1U);
        EXPECT_EQ(file.curve().validation.front().loss, 7.5);
        EXPECT_THROW(MetricsFile(folder / "log", 0), UsageError) << "two runs";
    }
    const MetricsFile anew(folder / "log", 0);
    EXPECT_TRUE(anew.curve().training.empty());
}

TEST(Metrics, RatesCountAllRanks) {
    StepMetrics metrics{.num_tokens = 4096, .num_ranks = 4, .step_seconds = 2.0};
    metrics.traffic["a"] = {.messages = 2, .bytes = 10, .seconds = 0.25};
    metrics.traffic["b"] = {.messages = 1, .bytes = 5, .seconds = 0.5};
    EXPECT_EQ(metrics.tokens_per_second(), 2048.0);
    EXPECT_EQ(metrics.comm_wait_seconds(), 0.75);
    const std::string line = to_json_line(metrics, {});
    EXPECT_NE(line.find("\"tokens_per_second_per_rank\":512.0"), std::string::npos) << line;
    EXPECT_NE(line.find("\"a\":{\"messages\":2,\"bytes\":10,\"seconds\":0.25}"), std::string::npos);
    EXPECT_GT(memory_use().peak_bytes, memory_use().resident_bytes / 2);
}

TEST(LossCurve, TicksAreRoundAndInside) {
    EXPECT_EQ(axis_ticks(0, 100, 5), (std::vector<double>{0, 20, 40, 60, 80, 100}));
    EXPECT_EQ(axis_ticks(1, 8, 8).size(), 8U);
    EXPECT_EQ(axis_ticks(2.1, 2.9, 4),
              (std::vector<double>{2.2, 2.4000000000000004, 2.6, 2.8000000000000003}));
}

TEST(LossCurve, DrawsOnlyFinitePointsInsideTheFrame) {
    LossCurve curve;
    for (std::int64_t step = 1; step <= 5000; ++step) {
        curve.training.push_back({step, 5.0 / static_cast<double>(step) + 1.0});
    }
    curve.training.push_back({5001, std::numeric_limits<double>::quiet_NaN()});
    curve.validation = {{100, 3.0}, {200, 2.0}};
    const std::string svg = loss_curve_svg(curve, "a<b & c");
    EXPECT_EQ(svg.find("nan"), std::string::npos);
    EXPECT_NE(svg.find("a&lt;b &amp; c"), std::string::npos);
    const std::size_t points = svg.find("points=\"");
    const std::string line = svg.substr(points + 8, svg.find('"', points + 8) - points - 8);
    std::istringstream stream(line);
    double x = 0, y = 0, last_x = 0;
    char comma = 0;
    std::size_t count = 0;
    while (stream >> x >> comma >> y) {
        EXPECT_GT(x, last_x);
        EXPECT_GE(x, 70);
        EXPECT_LE(x, 780);
        EXPECT_GE(y, 40);
        EXPECT_LE(y, 400);
        last_x = x;
        ++count;
    }
    EXPECT_GT(count, 1000U);
    EXPECT_LE(count, 2000U);
    EXPECT_NE(loss_curve_svg({}, "empty").find("</svg>"), std::string::npos);
}

TEST(Progress, PlainLinesComeEveryFewStepsAndABarOnATerminal) {
    std::ostringstream plain;
    Progress lines(plain, {.total_steps = 5, .every = 2});
    std::ostringstream terminal;
    Progress bar(terminal, {.total_steps = 5, .is_terminal = true});
    for (std::int64_t step = 1; step <= 5; ++step) {
        lines.show({.step = step, .loss = 1.5});
        bar.show({.step = step, .loss = 1.5});
    }
    bar.note("a note");
    EXPECT_EQ(plain.str().find("step 1/5"), std::string::npos);
    EXPECT_NE(plain.str().find("step 2/5  loss 1.5000"), std::string::npos);
    EXPECT_NE(plain.str().find("step 5/5"), std::string::npos);
    EXPECT_EQ(plain.str().find('\r'), std::string::npos);
    EXPECT_NE(terminal.str().find("[########............] step 2/5"), std::string::npos);
    EXPECT_NE(terminal.str().find("\r\x1b[Ka note\n"), std::string::npos);
    EXPECT_EQ(format_duration(75), "1:15");
    EXPECT_EQ(format_duration(3675.4), "1:01:15");
}

}  // namespace
}  // namespace hybridcp

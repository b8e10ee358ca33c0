#include "hcp/inspect_layout.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>

#include "core/files.h"
#include "hcp/layout_picture.h"
#include "hcp/layout_survey.h"
#include "hcp/layout_svg.h"
#include "hcp/terminal.h"
#include "hybridcp/error.h"
#include "layout/causal_work.h"
#include "train/data.h"
#include "train/model_setup.h"
#include "train/recipe.h"

namespace hybridcp::cli {

namespace {

constexpr std::array kKinds{LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kFolded};
constexpr std::array kCuts{LayoutCut::kDocument, LayoutCut::kRow};
constexpr int kMaxRanks = 256;
constexpr int kDefaultWidth = 80;

/// The value of `known` that is written `word`. Errors: UsageError naming `what` and the nearest.
template <typename Value, std::size_t Size>
Value parse_word(const std::string& what,
                 const std::string& word,
                 const std::array<Value, Size>& known) {
    std::vector<std::string> words;
    for (const Value value : known) {
        words.push_back(to_string(value));
        if (words.back() == word) {
            return value;
        }
    }
    throw UsageError(
        fmt::format("{}: {} is unknown; did you mean {}?", what, word, nearest_word(word, words)));
}

/// Errors: UsageError for a flag whose value the recipe gives.
void refuse_beside_recipe(const InspectLayoutOptions& options) {
    const auto refuse = [](const char* flag, const char* key) {
        throw UsageError(
            fmt::format("{} would contradict the recipe: leave it out, or override {}", flag, key));
    };
    if (options.num_ranks) {
        refuse("--ranks", "train.accelerator.cp=N");
    }
    if (options.cut) {
        refuse("--cut", "train.accelerator.layout_cut=document|row");
    }
    if (!options.document_lengths.empty()) {
        refuse("--documents", "data.path=FILES");
    }
    if (options.sequence_length) {
        refuse("--sequence-length", "data.sequence_length=N");
    }
}

/// The documents of the first forward pass of the first dp rank.
std::vector<std::int64_t> first_documents(const Recipe& recipe) {
    const RowLoader loader(recipe.data.path, "data.path",
                           {.sequence_length = recipe.data.sequence_length,
                            .packing = recipe.data.packing,
                            .seed = static_cast<std::uint64_t>(recipe.train.seed),
                            .vocab_size = recipe_model_config(recipe.model).vocab_size});
    std::vector<std::int64_t> lengths;
    for (std::int64_t row = 0; row < recipe.train.micro_batch_size; ++row) {
        const std::vector<std::int64_t> documents = loader.sample(row).document_lengths;
        lengths.insert(lengths.end(), documents.begin(), documents.end());
    }
    return lengths;
}

SurveyRequest request_of_recipe(const InspectLayoutOptions& options) {
    refuse_beside_recipe(options);
    const Recipe recipe = load_recipe(options.recipe_path, options.overrides);
    const ParallelOptions& accelerator = recipe.train.accelerator;
    SurveyRequest request;
    request.num_ranks = accelerator.cp;
    request.cut = parse_word("layout_cut", accelerator.layout_cut, kCuts);
    const LayoutKind stream = parse_word("sequence_layout", accelerator.sequence_layout, kKinds);
    request.kinds.push_back(stream);
    if (accelerator.linear_attention_layout == "convert") {
        const LayoutKind linear = parse_word("convert_to", accelerator.convert_to, kKinds);
        if (linear != stream) {
            request.kinds.push_back(linear);
            request.conversions.emplace_back(stream, linear);
        }
    }
    request.document_lengths = first_documents(recipe);
    return request;
}

SurveyRequest request_of_flags(const InspectLayoutOptions& options) {
    if (!options.num_ranks) {
        throw UsageError("--ranks is missing (or a recipe, which gives the number of ranks)");
    }
    if (options.document_lengths.empty() == !options.sequence_length) {
        throw UsageError("give either --documents or --sequence-length (or a recipe)");
    }
    SurveyRequest request;
    request.num_ranks = *options.num_ranks;
    request.cut = options.cut ? parse_word("--cut", *options.cut, kCuts) : LayoutCut::kDocument;
    request.kinds.assign(kKinds.begin(), kKinds.end());
    request.document_lengths =
        options.sequence_length ? std::vector{*options.sequence_length} : options.document_lengths;
    return request;
}

void check_sizes(const SurveyRequest& request) {
    if (request.num_ranks < 1 || request.num_ranks > kMaxRanks) {
        throw UsageError(fmt::format("{} ranks cannot be drawn: from 1 to {} can",
                                     request.num_ranks, kMaxRanks));
    }
    std::int64_t room = kMaxCausalTokens;
    for (const std::int64_t length : request.document_lengths) {
        if (length < 0) {
            throw UsageError(fmt::format("a document of {} tokens: lengths are 0 or more", length));
        }
        if (length > room) {
            throw UsageError(fmt::format("more than {} tokens: their causal work cannot be counted",
                                         with_commas(kMaxCausalTokens)));
        }
        room -= length;
    }
}

SurveyRequest make_request(const InspectLayoutOptions& options) {
    SurveyRequest request =
        options.recipe_path.empty() ? request_of_flags(options) : request_of_recipe(options);
    check_sizes(request);
    if (!options.kinds.empty()) {
        request.kinds.clear();
        for (const std::string& word : options.kinds) {
            const LayoutKind kind = parse_word("--kind", word, kKinds);
            if (std::ranges::find(request.kinds, kind) == request.kinds.end()) {
                request.kinds.push_back(kind);
            }
        }
    }
    const bool has_zigzag =
        std::ranges::find(request.kinds, LayoutKind::kZigzag) != request.kinds.end();
    if (request.conversions.empty() && has_zigzag) {
        request.conversions = {{LayoutKind::kZigzag, LayoutKind::kFolded},
                               {LayoutKind::kZigzag, LayoutKind::kContiguous}};
    }
    return request;
}

int picture_width(const std::optional<int>& asked) {
    if (asked) {
        if (*asked < kMinPictureWidth || *asked > kMaxPictureWidth) {
            throw UsageError(fmt::format("--width: {} is not from {} to {}", *asked,
                                         kMinPictureWidth, kMaxPictureWidth));
        }
        return *asked;
    }
    winsize size = {};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) {
        return kDefaultWidth;
    }
    return std::clamp(static_cast<int>(size.ws_col), kMinPictureWidth, kMaxPictureWidth);
}

}  // namespace

int inspect_layout(const InspectLayoutOptions& options) {
    const PictureOptions picture{.width = picture_width(options.width),
                                 .color = wants_color(options.color)};
    const LayoutSurvey survey = survey_layouts(make_request(options));
    if (!options.svg_path.empty()) {
        write_file_atomically(options.svg_path, layout_svg(survey));
    }
    if (!options.json_path.empty()) {
        write_file_atomically(options.json_path, to_json(survey).dump(2) + "\n");
    }
    fmt::print("{}", layout_picture(survey, picture));
    std::fflush(stdout);
    return 0;
}

}  // namespace hybridcp::cli

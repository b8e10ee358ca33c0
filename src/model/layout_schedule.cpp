#include "model/layout_schedule.h"

#include <fmt/format.h>

namespace hybridcp {

namespace {

struct Walk {
    std::string picture;
    std::int64_t conversions = 0;
};

char letter(LayoutKind kind) {
    return to_string(kind).front();
}

Walk walk_layers(const ModelConfig& config, const Parallel& parallel) {
    Walk walk;
    const bool converts = parallel.cp > 1 && parallel.linear_layout_kind != parallel.layout_kind;
    LayoutKind stream = parallel.layout_kind;
    const auto convert = [&] {
        walk.picture += '|';
        ++walk.conversions;
    };
    for (const LayerType type : config.layer_types) {
        const LayoutKind mixer = converts && type == LayerType::kLinearAttention
                                     ? parallel.linear_layout_kind
                                     : parallel.layout_kind;
        if (parallel.elide_conversions && mixer != stream) {
            stream = mixer;
            convert();
        }
        if (mixer != stream) {
            convert();
        }
        walk.picture += letter(mixer);
        if (mixer != stream) {
            convert();
        }
    }
    if (stream != parallel.layout_kind) {
        convert();
    }
    return walk;
}

}  // namespace

std::int64_t num_conversions(const ModelConfig& config, const Parallel& parallel) {
    return walk_layers(config, parallel).conversions;
}

std::string describe_layouts(const ModelConfig& config, const Parallel& parallel) {
    const Walk walk = walk_layers(config, parallel);
    if (walk.conversions == 0) {
        return "";
    }
    return fmt::format("layouts: {} {}, {} {}, | conversion: {}: {} conversions of hidden a pass",
                       letter(parallel.layout_kind), to_string(parallel.layout_kind),
                       letter(parallel.linear_layout_kind), to_string(parallel.linear_layout_kind),
                       walk.picture, walk.conversions);
}

}  // namespace hybridcp

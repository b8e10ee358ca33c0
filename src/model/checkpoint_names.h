// What the names in a Hugging Face checkpoint mean for the text tower.
#pragma once

#include <cstdint>
#include <string>

namespace hybridcp {

enum class CheckpointPart { kText, kVision, kMultiTokenPrediction };

struct CheckpointName {
    CheckpointPart part = CheckpointPart::kText;
    std::string parameter;  // kText only: the name with prefix `model.`, as parameter_shapes has it
};

/// `model.visual.*` is vision, `mtp.*` multi-token prediction, everything else text; the released
/// multimodal prefix `model.language_model.` becomes `model.`.
[[nodiscard]] CheckpointName parse_checkpoint_name(const std::string& name);

/// Name of a parameter of one decoder layer, e.g. (3, "mlp.up_proj.weight").
[[nodiscard]] std::string layer_parameter_name(std::int64_t layer, const std::string& suffix);

inline constexpr const char* kEmbeddingName = "model.embed_tokens.weight";
inline constexpr const char* kFinalNormName = "model.norm.weight";
inline constexpr const char* kHeadName = "lm_head.weight";

}  // namespace hybridcp

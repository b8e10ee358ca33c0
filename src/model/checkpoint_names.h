// What the names in a Hugging Face checkpoint mean for the text tower.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace hybridcp {

enum class CheckpointPart { kText, kVision, kMultiTokenPrediction };

enum class ExpertPart { kGate, kUp, kDown };
/// One projection of one expert, which is a part of a fused parameter.
struct ExpertPiece {
    std::int64_t expert = 0;
    ExpertPart part = ExpertPart::kGate;
};

struct CheckpointName {
    CheckpointPart part = CheckpointPart::kText;
    // kText only: the name with prefix `model.`, as parameter_shapes has it
    std::string parameter = {};
    std::optional<ExpertPiece> expert = std::nullopt;  // when stored one by one
};

/// `model.visual.*` is vision, `mtp.*` multi-token prediction, everything else text; the released
/// multimodal prefix `model.language_model.` becomes `model.`. Experts that are stored one by one,
/// `mlp.experts.E.gate_proj.weight` and so on, belong to `mlp.experts.gate_up_proj` or `down_proj`.
[[nodiscard]] CheckpointName parse_checkpoint_name(const std::string& name);

/// The name under which a piece of a fused parameter is stored, e.g.
/// ("model.layers.3.mlp.experts.down_proj", {7, kDown}) ->
/// "model.layers.3.mlp.experts.7.down_proj.weight".
[[nodiscard]] std::string single_expert_name(const std::string& parameter,
                                             const ExpertPiece& piece);

/// Name of a parameter of one decoder layer, e.g. (3, "mlp.up_proj.weight").
[[nodiscard]] std::string layer_parameter_name(std::int64_t layer, const std::string& suffix);

/// The layer of such a name; nothing for the embedding, the final norm and the head.
[[nodiscard]] std::optional<std::int64_t> layer_of_parameter(const std::string& name);

inline constexpr const char* kEmbeddingName = "model.embed_tokens.weight";
inline constexpr const char* kFinalNormName = "model.norm.weight";
inline constexpr const char* kHeadName = "lm_head.weight";

}  // namespace hybridcp

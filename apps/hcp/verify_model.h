// `hcp verify model`: a Hugging Face folder's forward and backward pass on one batch, over any
// ranks, against recorded numbers (those of Transformers).
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace hybridcp::cli {

struct VerifyModelOptions {
    std::string model_folder;
    std::string batch_path;     // input_ids, targets; cu_seqlens for a packed row
    std::string expected_path;  // loss, loss_per_token, hidden.I, hidden.norm, logits, grad.NAME
    std::vector<std::string> overrides = {};
    std::string dtype = {};  // empty: model.dtype of the overrides, else fp32
    // Of a model with experts; none: model.router_aux_loss_coef of the overrides, else the case's
    // in the manifest beside the model, else config.json's.
    std::optional<double> router_aux_loss_coef = std::nullopt;
    std::string report_path = {};
    bool against_one_rank =
        false;  // compute on rank 0 alone too, and bound the ratio of the errors
};

/// Returns the exit status, the same on every rank. Errors: as the library's.
[[nodiscard]] int verify_model(const VerifyModelOptions& options);

}  // namespace hybridcp::cli

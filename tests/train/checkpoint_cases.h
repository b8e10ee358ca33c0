// What the tests of checkpoints share: a small model with moments that are not zero, as ranks keep
// it, and its bits.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <string>
#include <vector>

#include "mesh_threads.h"
#include "train/checkpoint.h"
#include "train/trained_model.h"

namespace hybridcp::testing {

inline const std::string kModelFolder = std::string(HCP_GOLDEN_DIR) + "/models/dense_tiny";

inline TrainedModel make_trained(const ModelConfig& config,
                                 const Mesh& mesh,
                                 bool sharded,
                                 std::uint64_t seed = 1) {
    return {{.config = config, .sharded = sharded}, *random_parameters(config, seed), mesh};
}

/// Gradients that are functions of name and position, then an update: the same bits on any ranks.
inline void update_once(AdamW& optimizer, double factor) {
    for (const ParameterPiece& piece : optimizer.pieces()) {
        at::Tensor value = piece.value;
        const double phase = factor * static_cast<double>(piece.name.size());
        value.mutable_grad() = (at::arange(piece.begin, piece.end(), at::kDouble) * 0.37 + phase)
                                   .sin()
                                   .to(at::kFloat)
                                   .view_as(value);
    }
    optimizer.step(0.01);
}

/// Value, first and second moment of every parameter, whole.
using Bits = std::map<std::string, std::vector<at::Tensor>>;

inline Bits bits_of(const AdamW& optimizer) {
    Bits bits;
    for (std::size_t i = 0; i < optimizer.pieces().size(); ++i) {
        const ParameterPiece& piece = optimizer.pieces()[i];
        bits[piece.name] = {piece.value.detach().clone(), optimizer.exp_avg()[i].clone(),
                            optimizer.exp_avg_sq()[i].clone()};
    }
    return bits;
}

inline bool equal_bits(const Bits& a, const Bits& b) {
    if (a.size() != b.size()) {
        return false;
    }
    for (const auto& [name, tensors] : a) {
        const auto found = b.find(name);
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            if (found == b.end() || !at::equal(tensors[i], found->second[i])) {
                return false;
            }
        }
    }
    return true;
}

/// How ranks keep a model.
struct Keeping {
    int dp = 1;
    int cp = 1;
    int shard_size = 1;  // above 1: sharded
};

}  // namespace hybridcp::testing

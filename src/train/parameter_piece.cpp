#include "train/parameter_piece.h"

namespace hybridcp {

std::vector<ParameterPiece> whole_pieces(const std::vector<NamedParameter>& parameters) {
    std::vector<ParameterPiece> pieces;
    for (const NamedParameter& parameter : parameters) {
        pieces.push_back({.name = parameter.name,
                          .shape = parameter.value.sizes().vec(),
                          .value = parameter.value});
    }
    return pieces;
}

}  // namespace hybridcp

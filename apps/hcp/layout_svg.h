// A survey of layouts as an SVG picture: the terminal's picture (layout_picture.h) to scale.
#pragma once

#include <string>

#include "hcp/layout_survey.h"

namespace hybridcp::cli {

/// A document 960 wide, as high as its ranks need. Many small pieces are drawn as columns whose
/// opacity is the share that the rank holds.
[[nodiscard]] std::string layout_svg(const LayoutSurvey& survey);

}  // namespace hybridcp::cli

// A survey of layouts as text for a terminal: a line a rank along the flat order, documents above,
// causal work beside it, and what conversions send.
#pragma once

#include <string>

#include "hcp/layout_survey.h"

namespace hybridcp::cli {

struct PictureOptions {
    int width = 80;  // columns, from kMinPictureWidth to kMaxPictureWidth
    bool color = false;
};
inline constexpr int kMinPictureWidth = 60;
inline constexpr int kMaxPictureWidth = 400;

/// ASCII, and with `color` ANSI escapes: a hue a rank, two shades for documents in turn.
[[nodiscard]] std::string layout_picture(const LayoutSurvey& survey, const PictureOptions& options);

}  // namespace hybridcp::cli

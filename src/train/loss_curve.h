// The loss over the steps as a picture (SVG), for a run's folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hybridcp {

struct LossPoint {
    std::int64_t step = 0;
    double loss = 0.0;
};

struct LossCurve {
    std::vector<LossPoint> training;
    std::vector<LossPoint> validation;
};

/// An SVG document of 800 x 450 with axes, ticks and one line a curve; a curve of more than 2,000
/// points is drawn as the mean of neighbours. Points that are not finite are left out.
[[nodiscard]] std::string loss_curve_svg(const LossCurve& curve, const std::string& title);

/// Tick positions (1, 2 or 5 times a power of ten apart) inside [low, high], about `count` of them.
[[nodiscard]] std::vector<double> axis_ticks(double low, double high, int count);

}  // namespace hybridcp

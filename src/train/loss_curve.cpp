#include "train/loss_curve.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace hybridcp {

namespace {
constexpr double kWidth = 800, kHeight = 450;
constexpr double kLeft = 70, kRight = 20, kTop = 40, kBottom = 50;
constexpr std::size_t kMaxPoints = 2000;

struct Point {
    double step = 0;
    double loss = 0;
};

std::vector<Point> drawn_points(const std::vector<LossPoint>& points) {
    const std::size_t group = (points.size() + kMaxPoints - 1) / kMaxPoints;
    std::vector<Point> drawn;
    for (std::size_t begin = 0; begin < points.size(); begin += group) {
        Point mean;
        double count = 0;
        for (std::size_t i = begin; i < std::min(points.size(), begin + group); ++i) {
            if (std::isfinite(points[i].loss)) {
                mean.step += static_cast<double>(points[i].step);
                mean.loss += points[i].loss;
                ++count;
            }
        }
        if (count > 0) {
            drawn.push_back({mean.step / count, mean.loss / count});
        }
    }
    return drawn;
}

/// Maps data to the picture, and knows the ranges of both axes.
class Frame {
  public:
    explicit Frame(const std::vector<const std::vector<Point>*>& curves) {
        for (const auto* curve : curves) {
            for (const Point& point : *curve) {
                low_x_ = std::min(low_x_, point.step);
                high_x_ = std::max(high_x_, point.step);
                low_y_ = std::min(low_y_, point.loss);
                high_y_ = std::max(high_y_, point.loss);
            }
        }
        if (low_x_ > high_x_) {  // no point at all
            low_x_ = low_y_ = 0;
            high_x_ = high_y_ = 1;
        }
        const double margin = std::max(0.05 * (high_y_ - low_y_), 1e-6 * std::abs(high_y_) + 1e-9);
        low_y_ -= margin;
        high_y_ += margin;
        high_x_ = std::max(high_x_, low_x_ + 1);
    }

    [[nodiscard]] double x(double step) const {
        return kLeft + (step - low_x_) / (high_x_ - low_x_) * (kWidth - kLeft - kRight);
    }
    [[nodiscard]] double y(double loss) const {
        return kHeight - kBottom -
               (loss - low_y_) / (high_y_ - low_y_) * (kHeight - kTop - kBottom);
    }

    [[nodiscard]] std::string axes() const {
        std::string svg = fmt::format(
            "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"#444\"/>\n",
            kLeft, kTop, kWidth - kLeft - kRight, kHeight - kTop - kBottom);
        for (const double tick : axis_ticks(low_x_, high_x_, 8)) {
            svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:g}</text>\n",
                               x(tick), kHeight - kBottom + 18, tick);
        }
        for (const double tick : axis_ticks(low_y_, high_y_, 6)) {
            svg += fmt::format(
                "<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#ddd\"/>\n"
                "<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:g}</text>\n",
                kLeft, kWidth - kRight, y(tick), y(tick), kLeft - 8, y(tick) + 4, tick);
        }
        svg += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">step</text>\n",
                           (kLeft + kWidth - kRight) / 2, kHeight - 10);
        svg += fmt::format(
            "<text x=\"16\" y=\"{0}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {0})\">loss "
            "(nats per token)</text>\n",
            (kTop + kHeight - kBottom) / 2);
        return svg;
    }

    [[nodiscard]] std::string line(const std::vector<Point>& points, const char* color) const {
        std::string svg = "<polyline fill=\"none\" stroke-width=\"1.5\" stroke=\"";
        svg += color;
        svg += "\" points=\"";
        for (const Point& point : points) {
            svg += fmt::format("{:.1f},{:.1f} ", x(point.step), y(point.loss));
        }
        return svg + "\"/>\n";
    }

  private:
    double low_x_ = INFINITY, high_x_ = -INFINITY;
    double low_y_ = INFINITY, high_y_ = -INFINITY;
};

std::string escape(const std::string& text) {
    std::string escaped;
    for (const char c : text) {
        escaped += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
    }
    return escaped;
}

std::string legend(double x, const char* color, const char* text) {
    return fmt::format(
        "<line x1=\"{}\" x2=\"{}\" y1=\"{}\" y2=\"{}\" stroke=\"{}\" stroke-width=\"3\"/>"
        "<text x=\"{}\" y=\"{}\">{}</text>\n",
        x, x + 24, kTop + 16, kTop + 16, color, x + 30, kTop + 20, text);
}
}  // namespace

std::vector<double> axis_ticks(double low, double high, int count) {
    const double rough = (high - low) / count;
    const double power = std::pow(10.0, std::floor(std::log10(rough)));
    const double spacing = power * (rough <= power       ? 1
                                    : rough <= 2 * power ? 2
                                    : rough <= 5 * power ? 5
                                                         : 10);
    std::vector<double> ticks;
    for (double n = std::ceil(low / spacing); n * spacing <= high; ++n) {
        ticks.push_back(n * spacing);
    }
    return ticks;
}

std::string loss_curve_svg(const LossCurve& curve, const std::string& title) {
    const std::vector<Point> training = drawn_points(curve.training);
    const std::vector<Point> validation = drawn_points(curve.validation);
    const Frame frame({&training, &validation});
    std::string svg = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
        "height=\"{1}\" "
        "font-family=\"sans-serif\" font-size=\"12\">\n"
        "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n"
        "<text x=\"{2}\" y=\"24\" font-size=\"15\">{3}</text>\n",
        kWidth, kHeight, kLeft, escape(title));
    svg += frame.axes();
    svg += frame.line(training, "#1f77b4");
    svg += legend(kWidth - 260, "#1f77b4", "training");
    if (!validation.empty()) {
        svg += frame.line(validation, "#d62728");
        svg += legend(kWidth - 150, "#d62728", "validation");
    }
    return svg + "</svg>\n";
}

}  // namespace hybridcp

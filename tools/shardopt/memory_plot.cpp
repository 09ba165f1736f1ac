// SPDX-License-Identifier: Apache-2.0
#include "memory_plot.hpp"

#include "format.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tool {

namespace {

using shardopt::MemoryPlan;

/// What is stacked, from the bottom up. Colours that people tell apart who see few (Okabe and Ito 2008).
struct Part {
  const char* name;
  const char* colour;
  std::int64_t MemoryPlan::*bytes;
};
constexpr std::array<Part, 4> parts{{{"parameters", "#0072b2", &MemoryPlan::parameter_bytes},
                                     {"gradients", "#56b4e9", &MemoryPlan::gradient_bytes},
                                     {"masters", "#e69f00", &MemoryPlan::master_bytes},
                                     {"states", "#d55e00", &MemoryPlan::state_bytes}}};

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else if (c == '>') {
      result += "&gt;";
    } else if (c == '"') {
      result += "&quot;";
    } else if (static_cast<unsigned char>(c) >= 0x20) {
      result += c;
    }
  }
  return result;
}

/// The axis of bytes: which unit, how far, in which steps.
struct Axis {
  double factor = 1;  ///< bytes of one unit
  const char* unit = "B";
  double step = 1;  ///< in units
  int steps = 1;

  explicit Axis(std::int64_t most_bytes) {
    constexpr std::array<const char*, 6> units{"B", "kB", "MB", "GB", "TB", "PB"};
    std::size_t k = 0;
    const auto most = (std::max)(1.0, static_cast<double>(most_bytes));
    for (; most / factor >= 1000 && k + 1 < units.size(); ++k) factor *= 1000;
    unit = units[k];
    const double wanted = most / factor / 5;
    const double power = std::pow(10.0, std::floor(std::log10(wanted)));
    for (const double m : {1.0, 2.0, 5.0, 10.0}) {
      step = m * power;
      if (step >= wanted) break;
    }
    steps = static_cast<int>(std::ceil(most / factor / step * 1.02));
  }

  [[nodiscard]] double most() const { return step * steps; }
  [[nodiscard]] std::string label(int k) const { return print("%.10g", step * k); }
};

/// Draws panels beside and below each other.
class Plot {
 public:
  Plot(const std::string& title, const std::vector<PlotPanel>& panels)
      : panels_(panels), axis_(most_bytes(panels)), columns_((std::min)(panels.size(), std::size_t{3})) {
    for (const PlotPanel& panel : panels)
      bars_width_ = (std::max)(bars_width_, 46.0 * static_cast<double>(panel.plans.size()) + 14);
    bars_width_ = (std::max)(bars_width_, 230.0);
    const double rows = std::ceil(static_cast<double>(panels.size()) / static_cast<double>(columns_));
    const double width = (std::max)(left + panel_width() * static_cast<double>(columns_),
                                    2 * left + 10.5 * static_cast<double>(title.size()));
    const double height = top + rows * panel_height + 16;
    svg_ = print(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f "
               "%.0f\" ",
               width, height, width, height) +
           "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"#222\">\n";
    svg_ += "<title>" + escaped(title) + "</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n";
    text(left, 28, title, "font-size=\"17\" font-weight=\"bold\"");
    legend();
  }

  [[nodiscard]] std::string draw() && {
    for (std::size_t k = 0; k < panels_.size(); ++k) {
      const double x = left + panel_width() * static_cast<double>(k % columns_);
      const double y = top + panel_height * static_cast<double>(k / columns_);
      panel(panels_[k], x, y);
    }
    return svg_ + "</svg>\n";
  }

 private:
  static constexpr double left = 20;
  static constexpr double top = 76;
  static constexpr double axis_width = 62;  ///< numbers and the label of the axis of bytes
  static constexpr double bars_height = 250;
  static constexpr double panel_height = bars_height + 94;

  [[nodiscard]] double panel_width() const { return axis_width + bars_width_ + 24; }

  [[nodiscard]] static std::int64_t most_bytes(const std::vector<PlotPanel>& panels) {
    std::int64_t most = 0;
    for (const PlotPanel& panel : panels) {
      for (const MemoryPlan& plan : panel.plans) most = (std::max)(most, plan.model_bytes());
    }
    return most;
  }

  void text(double x, double y, const std::string& what, const std::string& attributes = "") {
    svg_ += print("<text x=\"%.1f\" y=\"%.1f\" ", x, y) + attributes + ">" + escaped(what) + "</text>\n";
  }

  void line(double x1, double y1, double x2, double y2, const char* colour) {
    svg_ += print("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n", x1, y1, x2, y2,
                  colour);
  }

  void rectangle(double x, double y, double width, double height, const char* colour,
                 const std::string& tip) {
    svg_ += print("<rect x=\"%.1f\" y=\"%.2f\" width=\"%.1f\" height=\"%.2f\" fill=\"%s\">", x, y, width,
                  height, colour) +
            "<title>" + escaped(tip) + "</title></rect>\n";
  }

  void legend() {
    double x = left;
    for (const Part& part : parts) {
      rectangle(x, 43, 13, 13, part.colour, part.name);
      text(x + 19, 54, part.name);
      x += 30 + 7.0 * static_cast<double>(std::string(part.name).size()) + 14;
    }
  }

  void panel(const PlotPanel& panel, double x, double y) {
    const double bars = x + axis_width;
    const double bottom = y + 26 + bars_height;
    const double scale = bars_height / (axis_.most() * axis_.factor);
    text(bars, y + 12, panel.title, "font-size=\"13\" font-weight=\"bold\"");
    for (int k = 0; k <= axis_.steps; ++k) {
      const double at = bottom - axis_.step * k * axis_.factor * scale;
      line(bars, at, bars + bars_width_, at, k == 0 ? "#222" : "#ddd");
      text(bars - 6, at + 4, axis_.label(k), "text-anchor=\"end\"");
    }
    const double middle = bottom - bars_height / 2;
    text(x + 12, middle, std::string("memory of one rank (") + axis_.unit + ")",
         print("text-anchor=\"middle\" transform=\"rotate(-90 %.1f %.1f)\"", x + 12, middle));
    text(bars + bars_width_ / 2, bottom + 40, "ranks that share the optimizer state (world size)",
         "text-anchor=\"middle\"");
    const double slot = (bars_width_ - 14) / static_cast<double>(panel.plans.size());
    for (std::size_t k = 0; k < panel.plans.size(); ++k)
      bar(panel.plans[k], bars + 7 + slot * static_cast<double>(k), slot, bottom, scale);
  }

  void bar(const MemoryPlan& plan, double x, double slot, double bottom, double scale) {
    const double width = (std::min)(slot * 0.72, 44.0);
    const double begin = x + (slot - width) / 2;
    double at = bottom;
    for (const Part& part : parts) {
      const double height = static_cast<double>(plan.*part.bytes) * scale;
      if (height <= 0) continue;
      at -= height;
      rectangle(begin, at, width, height, part.colour,
                std::string(part.name) + ": " + bytes_text(plan.*part.bytes));
    }
    const double total = static_cast<double>(plan.model_bytes()) / axis_.factor;
    text(x + slot / 2, at - 5,
         print("%.*f",
               total < 9.995   ? 2
               : total < 99.95 ? 1
                               : 0,
               total),
         "text-anchor=\"middle\" font-size=\"11\"");
    text(x + slot / 2, bottom + 17, with_commas(plan.world), "text-anchor=\"middle\"");
  }

  const std::vector<PlotPanel>& panels_;
  Axis axis_;
  std::size_t columns_;
  double bars_width_ = 0;
  std::string svg_;
};

}  // namespace

std::string memory_plot(const std::string& title, const std::vector<PlotPanel>& panels) {
  return Plot(title, panels).draw();
}

}  // namespace tool

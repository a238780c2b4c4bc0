// Shapes of a convolution: its numbers, its maps in memory, and what its taps see along an axis.

#pragma once

#include "cpu.h"

namespace fst {

// Elements (n, channel, place) of a tensor (N, C, H, W), contiguous or channels_last.
struct Map {
  int64_t channels, places, channel_stride, place_stride;

  Map(int64_t channels, int64_t places, bool last)
      : channels(channels),
        places(places),
        channel_stride(last ? 1 : places),
        place_stride(last ? channels : 1) {}
  int64_t image_stride() const { return channels * places; }
  // Of channel 0; `row` counts the places of all images.
  int64_t offset(int64_t row) const {
    if (channel_stride == 1) return row * channels;
    return row + row / places * (channels - 1) * places;
  }
};

// Numbers of a convolution, in the order in which fst/ops/cpp passes them.
struct Geometry {
  int64_t images, height, width, rows, columns;  // input map, output map
  int64_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;

  struct Position {
    int32_t image, row, column;
  };

  explicit Geometry(const int64_t* numbers) { std::memcpy(this, numbers, sizeof(*this)); }

  Position position(int32_t index) const {
    const auto of_image = static_cast<int32_t>(rows * columns);
    const auto of_row = static_cast<int32_t>(columns);
    const int32_t image = index / of_image, inside = index - image * of_image;
    return {image, inside / of_row, inside % of_row};
  }
  int64_t taps() const { return kernel_h * kernel_w; }
  int64_t positions() const { return rows * columns; }  // of an image
  int64_t span_h() const { return (kernel_h - 1) * dilation_h + 1; }
  int64_t span_w() const { return (kernel_w - 1) * dilation_w + 1; }

  // Whether the output map is that of the input map, and the maps and the weight can be indexed
  // with. in, out: channels of a group.
  bool holds(int64_t in, int64_t out, int64_t groups, int64_t most_taps = INT32_MAX) const {
    if (!within(1, INT32_MAX, {images, rows, columns, in, out, groups}) ||
        !within(1, INT32_MAX, {stride_h, stride_w, dilation_h, dilation_w}) ||
        !within(1, most_taps, {kernel_h, kernel_w}) ||
        !within(0, INT32_MAX, {height, width, padding_h, padding_w})) {
      return false;
    }
    const int64_t padded_h = height + 2 * padding_h, padded_w = width + 2 * padding_w;
    return span_h() <= padded_h && rows == (padded_h - span_h()) / stride_h + 1 &&
           span_w() <= padded_w && columns == (padded_w - span_w()) / stride_w + 1 &&
           fits(INT32_MAX, {images, rows, columns}) && fits(INT32_MAX, {images, height, width}) &&
           fits(INT32_MAX, {in, out, groups, kernel_h, kernel_w});
  }
};
static_assert(sizeof(Geometry) == 13 * sizeof(int64_t));

// Of the kernel's taps along one axis. Coordinate x of the result and tap t see coordinate at(x, t)
// of the source. x = phase(t) + j * phases() sees j * step() + shift(t).
struct Axis {
  bool backward;  // the result is dX, its source dY; else the result is Y, its source X
  int64_t taps, stride, padding, dilation, result, source;

  int64_t phases() const { return backward ? stride : 1; }
  int64_t step() const { return backward ? 1 : stride; }
  int64_t count() const { return ceil_div(result, phases()); }  // of j
  int64_t phase(int64_t t) const {
    const int64_t rest = (t * dilation - padding) % stride;
    return backward ? (rest + stride) % stride : 0;
  }
  int64_t shift(int64_t t) const {
    return backward ? (phase(t) + padding - t * dilation) / stride : t * dilation - padding;
  }
  bool sees(int64_t phase_of_x) const {  // by any tap
    for (int64_t t = 0; t < taps; ++t) {
      if (phase(t) == phase_of_x) return true;
    }
    return false;
  }
  // -1 where there is none.
  int64_t at(int64_t x, int64_t t) const {
    int64_t found = backward ? x + padding - t * dilation : x * stride - padding + t * dilation;
    if (found < 0 || (backward && found % stride)) return -1;
    found /= backward ? stride : 1;
    return found < source ? found : -1;
  }
};

// Whether these are positions below `end`, in order.
inline bool ascending(const int32_t* index, int64_t count, int64_t end) {
  bool bad = index[0] < 0 || index[count - 1] >= end;
  for (int64_t k = 1; k < count; ++k) bad |= index[k] < index[k - 1];
  return !bad;
}

inline Axis axis_of_rows(const Geometry& g, bool backward) {
  return {backward,
          g.kernel_h,
          g.stride_h,
          g.padding_h,
          g.dilation_h,
          backward ? g.height : g.rows,
          backward ? g.rows : g.height};
}
inline Axis axis_of_columns(const Geometry& g, bool backward) {
  return {backward,
          g.kernel_w,
          g.stride_w,
          g.padding_w,
          g.dilation_w,
          backward ? g.width : g.columns,
          backward ? g.columns : g.width};
}

}  // namespace fst

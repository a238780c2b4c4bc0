// What the products by zeros of the maps share: rows that a strip sees, and blocks of channels.

#pragma once

#include "conv_shape.h"
#include "simd.h"

namespace fst::maps {

constexpr int64_t MOST_TAPS = 31;  // of a kernel along an axis
constexpr int MOST_VECTORS = 8;    // of sums in registers; the operand of a product is in memory

// Rows of the source that some rows of a map see, image by image: each has a slot.
struct Slots {
  int64_t count = 0;

  // of_row[i] + h is the slot of the source's row h for row first + i; row[slot] counts the rows of
  // all images, -1 where nothing sees it. Without pointers: counts.
  Slots(const Axis& axis, int64_t first, int64_t last, int32_t* of_row, int64_t* row) {
    for (int64_t begin = first; begin < last;) {
      const int64_t image = begin / axis.result;
      const int64_t end = std::min(last, (image + 1) * axis.result);
      int64_t low = axis.source, high = 0;
      const auto each = [&](auto function) {
        for (int64_t x = begin; x < end; ++x) {
          for (int64_t t = 0; t < axis.taps; ++t) {
            const int64_t h = axis.at(x % axis.result, t);
            if (h >= 0) function(h);
          }
        }
      };
      each([&](int64_t h) { low = std::min(low, h), high = std::max(high, h + 1); });
      const int64_t rows = std::max<int64_t>(high - low, 0);
      if (row) {
        std::fill_n(row + count, rows, int64_t{-1});
        each([&](int64_t h) { row[count + h - low] = image * axis.source + h; });
        for (int64_t x = begin; x < end; ++x) {
          of_row[x - first] = static_cast<int32_t>(count - low);
        }
      }
      count += rows;
      begin = end;
    }
  }

  static int64_t most(const Axis& axis, int64_t rows, int64_t length) {
    int64_t found = 0;
    for (int64_t first = 0; first < rows; first += length) {
      const int64_t last = std::min(rows, first + length);
      found = std::max(found, Slots(axis, first, last, nullptr, nullptr).count);
    }
    return found;
  }
};

// Channels in equal blocks of at most MOST_VECTORS vectors.
struct Blocks {
  int64_t channels, vectors, count;

  explicit Blocks(int64_t channels)
      : channels(channels),
        vectors(ceil_div(channels, V)),
        count(ceil_div(vectors, MOST_VECTORS)) {}
  int64_t first(int64_t b) const { return vectors * b / count * V; }
  int64_t width(int64_t b) const { return first(b + 1) - first(b); }  // whole vectors
  int64_t valid(int64_t b) const { return std::min(width(b), channels - first(b)); }
  int64_t padded() const { return vectors * V; }
};

// Calls with a number of vectors as a constant.
template <int MOST = MOST_VECTORS, class Function>
void with_block(int64_t vectors, const Function& function) {
  if constexpr (MOST > 0) {
    if (vectors == MOST) return function(std::integral_constant<int, MOST>{});
    with_block<MOST - 1>(vectors, function);
  }
}

}  // namespace fst::maps

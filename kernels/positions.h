// What the kernels over lists of positions share: register tiles, packing, and checks of a list.

#pragma once

#include "conv_shape.h"
#include "simd.h"

namespace fst {

// Register tiles: at most MR broadcast numbers by NV vectors.
#if defined(__AVX512F__)
constexpr int MR = 8, NV = 2;
#elif defined(__AVX2__)
constexpr int MR = 4, NV = 3;
#else
constexpr int MR = 4, NV = 2;
#endif
constexpr int NR = V * NV;

constexpr int64_t FETCHED = 32;  // offsets from here to the one whose channels are fetched

// Numbers of a padded batch; no index into it, and no size made from it, overflows 64 bits.
constexpr double MOST_NUMBERS = 0x1p48;

// Calls function(format) in the format of `kind`, for positions of a list.
template <class Function>
Status on_list(const int32_t* index, int64_t count, const Geometry& g, int64_t kind, int64_t in,
               int64_t out, int64_t groups, const Function& function) {
  const int64_t padded_h = g.height + 2 * g.padding_h, padded_w = g.width + 2 * g.padding_w;
  if (count < 1 || !g.holds(in, out, groups) ||
      !fits(MOST_NUMBERS, {g.images, padded_h, padded_w, groups, std::max(in, out)})) {
    return BAD_NUMBERS;
  }
  if (!ascending(index, count, g.images * g.positions())) return NOT_ASCENDING;
  return with_format(kind, function);
}

// Calls with a number of vectors as a constant.
template <class Function>
void with_vectors(int64_t vectors, const Function& function) {
  if (vectors == 1) return function(std::integral_constant<int, 1>{});
  if (vectors == 2) return function(std::integral_constant<int, 2>{});
  if constexpr (NV > 2) function(std::integral_constant<int, NV>{});
}

// Channels of places of a map side by side: to[i][c] = (from[offset[i] + c * step] - mean[c]) *
// scale[i] for c < valid; 0 from there to WIDE, and where the offset is negative. What lies `ahead`
// is fetched for a later call; where that is 0, what lies at later offsets.
template <class T, int WIDE>
void pack(const typename T::Int* from, const int64_t* offset, int64_t count, int64_t step,
          int64_t valid, int64_t ahead, const float* mean, const float* scale, float* to) {
  float less[WIDE] = {};
  for (int64_t c = 0; mean && c < valid; ++c) less[c] = mean[c];
  for (int64_t i = 0; i < count; ++i, to += WIDE) {
    const typename T::Int* x = from + offset[i];
    const float factor = scale ? scale[i] : 1.0f;
    const typename T::Int* later =
        ahead ? x + ahead : from + offset[std::min(i + FETCHED, count - 1)];
    for (int c = 0; c < WIDE; c += 64 / sizeof(*x)) __builtin_prefetch(later + c);
    if (offset[i] < 0) {
      std::fill_n(to, WIDE, 0.0f);
    } else if (valid == WIDE && step == 1) {
      for (int c = 0; c < WIDE; ++c) to[c] = (T::wide(x[c]) - less[c]) * factor;
    } else if (valid == WIDE) {
      for (int c = 0; c < WIDE; ++c) to[c] = (T::wide(x[c * step]) - less[c]) * factor;
    } else {
      for (int c = 0; c < valid; ++c) to[c] = (T::wide(x[c * step]) - less[c]) * factor;
      std::fill(to + valid, to + WIDE, 0.0f);
    }
  }
}

}  // namespace fst

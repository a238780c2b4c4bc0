// The weight gradient by zeros of one of its operands: what the positions of the chosen map see of
// the dense one, and chunks of positions that see the same taps (sparse_maps_grad_weight.cpp).

#pragma once

#include <numeric>
#include <utility>

#include "sparse_maps.h"
#include "sparse_weight.h"

namespace fst::maps {

constexpr int64_t CHUNK = 512;  // positions at most

// What a coordinate of the chosen map sees: taps of ranks [first, last), the first one `partner`.
struct View {
  int64_t place, first, last, partner;

  std::pair<int64_t, int64_t> taps() const { return {first, last}; }
};

// The views of an axis; those of the same taps follow each other. Ranks order the taps by phase and
// by what they see: taps that a coordinate sees have ranks in a row and are `apart` pixels apart.
struct Views : Axis {
  int64_t rank[MOST_TAPS], apart, together;  // taps of a phase, at least
  Memory<View> all;
  View *begin, *end;

  explicit Views(const Axis& axis) : Axis(axis), all(result), begin(all.data), end(begin) {
    const int64_t common = std::gcd(dilation, phases());
    apart = dilation / common;
    together = std::max<int64_t>(taps * common / phases(), 1);
    for (int64_t t = 0; t < taps; ++t) {
      const std::pair own(phase(t), shift(t));
      rank[t] = 0;
      for (int64_t u = 0; u < taps; ++u) rank[t] += std::pair(phase(u), shift(u)) < own;
    }
    for (int64_t x = 0; begin && x < result; ++x) {
      View view{x, taps, 0, source};
      for (int64_t t = 0; t < taps; ++t) {
        if (at(x, t) < 0) continue;
        view.first = std::min(view.first, rank[t]);
        view.last = std::max(view.last, rank[t] + 1);
        view.partner = std::min(view.partner, at(x, t));
      }
      if (view.first < view.last) *end++ = view;
    }
    std::stable_sort(begin, end, [](const View& a, const View& b) { return a.taps() < b.taps(); });
  }

  // Of the output's positions, where the chosen map is X.
  Axis of_output() const {
    Axis axis = *this;
    std::swap(axis.source, axis.result);
    axis.backward = false;
    return axis;
  }

  // Calls function(first, last) for the views of the same taps.
  template <class Function>
  void each(const Function& function) const {
    for (const View *first = begin, *last = begin; first < end; first = last) {
      while (last < end && last->taps() == first->taps()) ++last;
      function(first, last);
    }
  }
};

// Positions of the chosen map that see the same taps.
struct Chunk {
  const View *down, *across;
  Run* runs;              // of its lists
  int64_t count, origin;  // pixel of the packed dense map from which on places count
  int32_t position[CHUNK];
  int32_t place[CHUNK];  // of the first partner, in UNITs

  int64_t high() const { return down->last - down->first; }
  int64_t wide() const { return across->last - across->first; }
};

}  // namespace fst::maps

// The weight gradient by zeros of one of its operands: positions of the chosen map in chunks, their
// partners in the dense map, and the inner loop (sparse_maps_grad_weight.cpp).

#pragma once

#include "sparse_maps.h"

namespace fst::maps {

constexpr int64_t CHUNK = 64;  // positions: bits of a mask
constexpr int TOGETHER = 3;    // neighbouring taps whose sums are at most MOST_SUMS vectors
constexpr int MOST_SUMS = 12;

// Of each tap t: sums[t * of_tap] += value[i] * row place[i] + t * apart of `rows`, for the bits i
// of the mask.
template <int N, int TAPS>
void accumulate_masked(const float* value, uint64_t mask, const int32_t* place, int64_t apart,
                       const float* rows, float* sums, int64_t of_tap) {
  constexpr int SETS = N * TAPS < 6 ? 2 : 1;  // of sums, where few would wait for each other
  vec sum[SETS][TAPS][N];
#pragma GCC unroll 8
  for (int t = 0; t < TAPS; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      sum[0][t][v] = *reinterpret_cast<const vec*>(sums + t * of_tap + v * V);
      if (SETS > 1) sum[SETS - 1][t][v] = vec{};
    }
  }
  // Addresses that wait for loads would hold back the loads of rows: places are read one ahead.
  int i = __builtin_ctzll(mask);
  int64_t at = place[i];
  const auto add = [&](vec(*set)[N]) __attribute__((always_inline)) {
    const float x = value[i], *row = rows + at * (N * V);
    mask &= mask - 1;
    i = __builtin_ctzll(mask | uint64_t{1} << (CHUNK - 1));
    at = place[i];
#pragma GCC unroll 8
    for (int t = 0; t < TAPS; ++t, row += apart * (N * V)) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) set[t][v] += x * *reinterpret_cast<const vec*>(row + v * V);
    }
  };
  while (mask) {
    add(sum[0]);
    if (SETS > 1 && mask) add(sum[SETS - 1]);
  }
#pragma GCC unroll 8
  for (int t = 0; t < TAPS; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      if (SETS > 1) sum[0][t][v] += sum[SETS - 1][t][v];
      *reinterpret_cast<vec*>(sums + t * of_tap + v * V) = sum[0][t][v];
    }
  }
}

struct Chunk {
  int64_t count;
  int32_t row[CHUNK], column[CHUNK];  // of all images
  float scale[CHUNK];
};

struct Tap {
  uint64_t mask;
  int32_t place[CHUNK];  // of the partner, in pixels of the packed dense map
};

// Adds what a chunk's channels and neighbouring taps give to `deep` rows of dW of each tap, of so
// many vectors. Where taps see the same positions, their partners are equally far apart.
inline void add_chunk(int64_t vectors, int64_t deep, const float* values, const uint64_t* masks,
                      const Tap* taps, int64_t count, const float* packed, float* result) {
  const int64_t of_tap = deep * vectors * V;
  const auto add = [&](auto n, auto together, const Tap& tap, int64_t apart, float* sums) {
    for (int64_t c = 0; tap.mask && c < deep; ++c, sums += n * V) {
      const uint64_t mask = masks[c] & tap.mask;
      if (mask) {
        accumulate_masked<n, together>(values + c * CHUNK, mask, tap.place, apart, packed, sums,
                                       of_tap);
      }
    }
  };
  with_block(vectors, [&](auto n) {
    if constexpr (n * TOGETHER <= MOST_SUMS) {
      const uint64_t mask = taps->mask;
      if (count == TOGETHER && mask && mask == taps[1].mask && mask == taps[2].mask) {
        const int i = __builtin_ctzll(mask);
        const int64_t apart = taps[1].place[i] - taps[0].place[i];
        return add(n, std::integral_constant<int, TOGETHER>{}, *taps, apart, result);
      }
    }
    for (int64_t t = 0; t < count; ++t) {
      add(n, std::integral_constant<int, 1>{}, taps[t], 0, result + t * of_tap);
    }
  });
}

// Positions that are multiplied: all, or those of a list.
struct Positions {
  bool of_input;         // they are chosen in X, else in dY
  const int32_t* index;  // of the list
  int64_t count;
  const float* factors;  // of each output position, 0 where it is not in the list; null: all 1
  int64_t images;
  Axis rows, columns;  // of the chosen map; their source is the dense one

  int64_t taps() const { return rows.taps * columns.taps; }
  int64_t total() const { return images * rows.result; }

  // Positions of rows [first, last); how many chunks.
  int64_t find_chunks(int64_t first, int64_t last, Chunk* chunks) const {
    int64_t used = 0;
    bool open = false;
    const auto append = [&](int64_t row, int64_t column, float scale) {
      if (!open || chunks[used - 1].count == CHUNK) chunks[used++].count = 0;
      open = true;
      Chunk& last_one = chunks[used - 1];
      last_one.row[last_one.count] = static_cast<int32_t>(row);
      last_one.column[last_one.count] = static_cast<int32_t>(column);
      last_one.scale[last_one.count++] = scale;
    };
    if (factors && !of_input) {
      const int32_t* end = index + count;
      const int32_t* k = std::lower_bound(index, end, first * columns.result);
      for (; k < end && *k < last * columns.result; ++k) {
        if (k > index && k[0] == k[-1]) continue;  // its factor is the sum
        append(*k / columns.result, *k % columns.result, factors[*k]);
      }
      return used;
    }
    const auto outside = [&](int64_t x) {
      for (int64_t t = 0; t < columns.taps; ++t) {
        if (columns.at(x, t) < 0) return true;
      }
      return false;
    };
    int64_t low = 0, high = columns.result;  // columns that every tap sees have chunks of their own
    while (low < high && outside(low)) ++low;
    while (low < high && outside(high - 1)) --high;
    for (int64_t down = 0; down < std::min(rows.phases(), rows.result); ++down) {
      for (int64_t right = 0; right < std::min(columns.phases(), columns.result); ++right) {
        if (!rows.sees(down) || !columns.sees(right)) continue;
        for (const bool edge : {false, true}) {
          open = false;
          for (int64_t row = first; row < last; ++row) {
            if (row % rows.result % rows.phases() != down) continue;
            for (int64_t x = right; x < columns.result; x += columns.phases()) {
              if ((x < low || x >= high) == edge) append(row, x, 1.0f);
            }
          }
        }
      }
    }
    return used;
  }

  void find_partners(const Chunk& chunk, int64_t first, const int32_t* of_row, Tap* found) const {
    for (int64_t t = 0; t < taps(); ++t) found[t].mask = 0;
    for (int64_t k = 0; k < chunk.count; ++k) {
      int64_t across[MOST_TAPS];
      for (int64_t s = 0; s < columns.taps; ++s) across[s] = columns.at(chunk.column[k], s);
      const int64_t image = chunk.row[k] / rows.result;
      for (int64_t r = 0; r < rows.taps; ++r) {
        const int64_t h = rows.at(chunk.row[k] % rows.result, r);
        if (h < 0) continue;
        const int64_t slot = of_row[chunk.row[k] - first] + h;
        for (int64_t s = 0; s < columns.taps; ++s) {
          const int64_t w = across[s], position = (image * rows.source + h) * columns.source + w;
          if (w < 0 || (factors && of_input && factors[position] == 0)) continue;
          Tap& tap = found[r * columns.taps + s];
          tap.mask |= uint64_t{1} << k;
          tap.place[k] = static_cast<int32_t>(slot * columns.source + w);
        }
      }
    }
  }
};

}  // namespace fst::maps

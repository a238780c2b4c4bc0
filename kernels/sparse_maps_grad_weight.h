// The weight gradient by zeros of one of its operands: positions of the chosen map in chunks, their
// partners in the dense map, and the inner loop (sparse_maps_grad_weight.cpp).

#pragma once

#include "sparse_maps.h"

namespace fst::maps {

constexpr int64_t CHUNK = 64;  // positions: bits of a mask

// sums += value[i] * row place[i] of `rows`, for the bits i of the mask.
template <int N>
void accumulate_masked(const float* value, uint64_t mask, const int32_t* place, const float* rows,
                       float* sums) {
  constexpr int SETS = N < 6 ? 2 : 1;  // of sums, where few would wait for each other
  vec sum[SETS][N];
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) {
    sum[0][v] = *reinterpret_cast<const vec*>(sums + v * V);
    if (SETS > 1) sum[SETS - 1][v] = vec{};
  }
  // Addresses that wait for loads would hold back the loads of rows: places are read one ahead.
  int i = __builtin_ctzll(mask);
  int64_t at = place[i];
  const auto add = [&](vec* set) __attribute__((always_inline)) {
    const float x = value[i], *row = rows + at * (N * V);
    mask &= mask - 1;
    i = __builtin_ctzll(mask | uint64_t{1} << (CHUNK - 1));
    at = place[i];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) set[v] += x * *reinterpret_cast<const vec*>(row + v * V);
  };
  while (mask) {
    add(sum[0]);
    if (SETS > 1 && mask) add(sum[SETS - 1]);
  }
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) {
    if (SETS > 1) sum[0][v] += sum[SETS - 1][v];
    *reinterpret_cast<vec*>(sums + v * V) = sum[0][v];
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

// Adds what a chunk's channels and one tap give to `deep` rows of dW, of so many vectors.
inline void add_chunk(int64_t vectors, int64_t deep, const float* values, const uint64_t* masks,
                      const Tap& tap, const float* packed, float* result) {
  with_block(vectors, [&](auto n) {
    for (int64_t c = 0; tap.mask && c < deep; ++c) {
      const uint64_t mask = masks[c] & tap.mask;
      if (mask)
        accumulate_masked<n>(values + c * CHUNK, mask, tap.place, packed, result + c * n * V);
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
    for (int64_t down = 0; down < std::min(rows.phases(), rows.result); ++down) {
      for (int64_t right = 0; right < std::min(columns.phases(), columns.result); ++right) {
        if (!rows.sees(down) || !columns.sees(right)) continue;
        open = false;
        for (int64_t row = first; row < last; ++row) {
          if (row % rows.result % rows.phases() != down) continue;
          for (int64_t x = right; x < columns.result; x += columns.phases()) append(row, x, 1.0f);
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

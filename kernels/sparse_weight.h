// Products of a convolution that leave out the zeros of the weight: shapes, and lists of what is
// not zero.
//
//     Y[n][co][p][q] = sum over ci, r, s of W[co][ci][r][s] * X[n][ci][p * sh + r * dh - ph][..]
//     dX[n][ci][h][w] = sum over co, r, s of W[co][ci][r][s] * dY[n][co][(h + ph - r * dh) / sh]..
//
// Both are one product of a source and a result. Along each axis, result index phase + phases * u
// sees source index u * stride + shift(phase, tap). Y has one phase and the convolution's stride;
// dX has as many phases as the stride, of which each sees some of the taps, and a stride of 1.
//
// A tile of the result, `high` rows of `wide` vectors, stays in registers. The source that it sees
// is packed (X below), so that each non-zero of the weight is a value and an offset:
//
//     tile[i][j] += value * X[window + offset + i rows + j vectors]
//
// A vector runs over V images or, where images are few, over parts of them: the result's grid is
// divided into equal parts, whose sources overlap. Taps, strides and edges are the same for all.
//
//     X [group, block][row][channel of the block][column][part]
//
// Rows of the same remainder by the stride lie side by side, and so do columns: all loads of a tile
// follow each other. 1x1 kernels without padding take all pixels of a batch as one row ('flat'),
// whose vectors run over V pixels that follow each other.

#pragma once

#include "conv_shape.h"
#include "simd.h"

namespace fst {

constexpr int TILE = V == 16 ? 28 : V == 8 ? 14 : 12;  // vectors in registers beside two others
constexpr int SMALL = 7;       // vectors of a tile that are too few for two units of multiply-adds
constexpr int HIGHEST = 4;     // rows of a tile
constexpr int MOST_TAPS = 16;  // of an axis; the most of a stride too
constexpr int64_t LEAST_BLOCK = 4, MOST_BLOCK = 32, MOST_FLAT_BLOCK = 64;  // channels
constexpr int64_t MOST_SUM = 512;  // numbers that are added one by one: sums of sums are more exact
constexpr double RUN_CYCLES = 30, PACK_CYCLES = 5;  // beside the vectors' loads and products
constexpr double SUM_CYCLES = 4;          // of a vector of a run, which is loaded, added and stored
constexpr int64_t MOST_SPAN = 65536 * 8;  // of a window along an axis; farther ones fit no offset
constexpr int64_t MOST_PACKED = 1 << 26;  // numbers of X of one thread
constexpr int64_t LINE = 64;              // bytes of a line of the cache

enum Lanes { AUTOMATIC, IMAGES, PIXELS };  // PIXELS: parts of images where that fills more lanes

// Weights that are not zero, and where what they multiply lies in a tile's window of X. Offsets of
// 16 bits save memory. Whatever a list holds, they reach no further than REACH from the window,
// so much lies behind each X.
constexpr int64_t UNIT = 8;  // bytes, which an address of x86 multiplies by
constexpr int64_t REACH = 65536 * UNIT + TILE * V * 4;

// Shifts that share rows or columns of X: those of the same remainder by the stride.
struct Classes {
  int count = 0;
  int64_t stride = 1, least[MOST_TAPS], most[MOST_TAPS];

  int find(int64_t shift) const {
    for (int k = 0; k < count; ++k) {
      if ((shift - least[k]) % stride == 0) return k;
    }
    return count;
  }
  explicit Classes(const Axis& axis) : stride(axis.step()) {
    for (int64_t tap = 0; tap < axis.taps; ++tap) {
      const int64_t shift = axis.shift(tap);
      const int k = find(shift);
      if (k == count) least[k] = most[k] = shift, ++count;
      least[k] = std::min(least[k], shift);
      most[k] = std::max(most[k], shift);
    }
  }
  int64_t span(int k) const { return (most[k] - least[k]) / stride; }
  int64_t longest() const {
    int64_t found = 0;
    for (int k = 0; k < count; ++k) found = std::max(found, span(k));
    return found;
  }
};

struct Shape {
  int64_t images, sources, results, groups;  // channels of a group
  Axis rows, columns;
  bool backward;
};

// How a product is cut. Neither memory formats nor threads change it, so that lists can be kept.
struct Plan : Shape {
  bool flat;
  Classes down, across;
  int64_t parts_down, parts_across;          // of an image
  int64_t high, wide;                        // rows and vectors of a tile
  int64_t line;                              // vectors of a row of X
  int64_t kept;                              // rows of X of each class
  int64_t block, blocks;                     // channels, and how many blocks a group has
  int64_t of_row, channel_stride, of_block;  // numbers of X

  static bool is_flat(const Shape& s) {
    return s.rows.taps == 1 && s.columns.taps == 1 && s.rows.stride == 1 && s.columns.stride == 1 &&
           s.rows.padding == 0 && s.columns.padding == 0;
  }

  Plan(const Shape& s, int64_t lanes)
      : Shape(s),
        flat(lanes != IMAGES && is_flat(s)),
        down(s.rows),
        across(s.columns) {
    parts_down = parts_across = 1;
    if (flat) {
      columns.source = columns.result = images * rows.result * columns.result;
      rows.source = rows.result = images = 1;
    } else if (lanes != IMAGES) {
      divide();
    }
    double least = 0;
    int64_t best_high = 1, best_wide = 1;
    const int64_t most = std::min<int64_t>(length(), TILE);
    for (int64_t width = most; width >= 1; --width) {
      const int64_t highest = std::min<int64_t>(TILE / width, HIGHEST);
      for (int64_t rows_of = std::min(highest, height()); rows_of >= 1; --rows_of) {
        const double found = cut(rows_of, width);
        if (least == 0 || found < least) least = found, best_high = rows_of, best_wide = width;
      }
    }
    cut(best_high, best_wide);
    const int64_t window = high + down.longest();
    kept = window > high ? window + 2 * high : window;
    channel_stride = line * V;
    of_row = block * channel_stride;
    of_block = down.count * kept * of_row;
  }

  // Parts that leave the fewest lanes empty; of such ones, those whose sources overlap least.
  void divide() {
    int64_t least = 0, least_seen = 0;
    for (int64_t i = std::min<int64_t>(V, rows.count()); i >= 1; --i) {
      for (int64_t j = std::min<int64_t>(V / i, columns.count()); j >= 1; --j) {
        const int64_t h = ceil_div(rows.count(), i), w = ceil_div(columns.count(), j);
        const int64_t strips = ceil_div(images * i * j, V), found = strips * h * w;
        const int64_t seen = strips * (h + down.longest()) * (w + across.longest());
        if (least == 0 || found < least || (found == least && seen < least_seen)) {
          least = found, least_seen = seen, parts_down = i, parts_across = j;
        }
      }
    }
  }

  // Chooses a tile, and blocks of channels whose part of X stays in the first cache. Returns about
  // how many cycles it takes for each channel of the source and of the result, half of the weight
  // being zero.
  double cut(int64_t rows_of, int64_t width) {
    high = rows_of, wide = width;
    line = across.count * wide;
    for (int k = 0; k < across.count; ++k) line += across.span(k);
    int64_t packed = 0, seen = 0;  // vectors of a channel that are new in a tile, and all
    for (int k = 0; k < down.count; ++k) {
      packed += high * line;
      seen += (high + down.span(k)) * line;
    }
    const int64_t bytes = seen * V * 4;
    const int64_t least = std::clamp<int64_t>(65536 * UNIT / bytes, 1, LEAST_BLOCK);
    const int64_t most =
        flat ? MOST_FLAT_BLOCK : std::clamp<int64_t>(MOST_SUM / taps(), least, MOST_BLOCK);
    // Squares of V channels are packed at once: whole ones are worth a little more than the cache.
    // Sums of flat products are short, so that they and the lists need a part of the cache.
    const int64_t squares = ceil_div(FIRST_CACHE / bytes, V) * V;
    const int64_t enough = FIRST_CACHE / 6 * 7;
    const bool whole = V == 16 && !flat && squares * bytes <= enough;
    const int64_t room = flat ? FIRST_CACHE / 4 * 3 : FIRST_CACHE;
    const int64_t fitting = std::clamp(whole ? squares : room / bytes, least, most);
    block = ceil_div(sources, ceil_div(sources, fitting));
    if (flat && block > V) block = block / V * V;
    blocks = ceil_div(sources, block);
    const double tiles = static_cast<double>(ceil_div(height(), high)) * strips();
    const double vectors = static_cast<double>(height()) * length();
    const double runs = static_cast<double>(phases()) / block;
    // What does not fit the first cache comes from the second one at half of the speed.
    const double outside = std::max(0.0, 1 - static_cast<double>(enough) / (block * bytes));
    return vectors * (0.25 * taps() * (1 + outside) + SUM_CYCLES * runs) +
           tiles * (0.5 * taps() + RUN_CYCLES * runs +
                    PACK_CYCLES * packed / static_cast<double>(results));
  }

  int64_t numbers() const { return groups * blocks * of_block; }
  int64_t phases() const { return rows.phases() * columns.phases(); }
  int64_t taps() const { return rows.taps * columns.taps; }
  int64_t weights() const { return groups * sources * results * taps(); }
  int64_t runs() const { return groups * blocks * phases() * results; }
  int64_t channels_of(int64_t b) const { return std::min(block, sources - b * block); }
  int64_t strips() const { return ceil_div(length(), wide); }
  // Of a part, in rows and vectors.
  int64_t height() const { return ceil_div(rows.count(), parts_down); }
  int64_t length() const { return ceil_div(columns.count(), flat ? V : parts_across); }
  int64_t parts() const { return images * parts_down * parts_across; }

  // From a window's start to what a tap multiplies, in units.
  int64_t offset(int64_t channel, int64_t r, int64_t s) const {
    const int64_t shift_h = rows.shift(r), shift_w = columns.shift(s);
    const int k = down.find(shift_h), l = across.find(shift_w);
    const int64_t row = k * kept + (shift_h - down.least[k]) / down.stride;
    return (channel * channel_stride + row * of_row + column(l) +
            (shift_w - across.least[l]) / across.stride * V) *
           4 / UNIT;
  }
  // Where the columns of a class begin.
  int64_t column(int l) const {
    int64_t at = 0;
    for (int k = 0; k < l; ++k) at += wide + across.span(k);
    return at * V;
  }
};

// Lists of a weight: for each (group, block, phase, result) a run of entries.
struct Run {
  int64_t begin, end;
};
constexpr int64_t HEAD = 8;  // numbers of int64 before the runs, which say what they are for
constexpr int64_t TAIL = 4;  // offsets behind the last ones, which products read ahead

inline void describe(const Plan& p, int64_t* head) {
  const int64_t numbers[HEAD] = {p.of_row, p.channel_stride, p.runs(), p.weights(),
                                 p.block,  p.kept,           p.line,   p.taps() * 2 + p.backward};
  std::memcpy(head, numbers, sizeof(numbers));
}
inline int64_t list_bytes(const Plan& p) {
  const int64_t numbers = HEAD * 8 + p.runs() * static_cast<int64_t>(sizeof(Run)) +
                          p.weights() * 6 + TAIL * static_cast<int64_t>(sizeof(uint16_t));
  return (numbers + 7) / 8 * 8;
}
inline Entries entries_of(const Plan& p, Run* runs) {
  float* values = reinterpret_cast<float*>(runs + p.runs());
  return {values, reinterpret_cast<uint16_t*>(values + p.weights())};
}

// Calls with the plan of a product, unless its numbers are no convolution that fits.
// numbers: Geometry's; input and output channels of a group, groups; whether dX is wanted; Lanes.
template <class Function>
Status with_plan(const int64_t* numbers, const Function& function) {
  const Geometry g(numbers);
  const int64_t* rest = numbers + sizeof(g) / sizeof(*numbers);
  const int64_t in = rest[0], out = rest[1], groups = rest[2];
  const bool backward = rest[3] != 0;
  if (!g.holds(in, out, groups, MOST_TAPS) || !within(1, MOST_TAPS, {g.stride_h, g.stride_w}) ||
      !within(1, MOST_SPAN, {g.span_h(), g.span_w()}) || !within(AUTOMATIC, PIXELS, {rest[4]})) {
    return BAD_NUMBERS;
  }
  const Shape shape{g.images, backward ? out : in,       backward ? in : out,
                    groups,   axis_of_rows(g, backward), axis_of_columns(g, backward),
                    backward};
  const Plan plan(shape, rest[4]);
  if (plan.of_block * 4 > 65536 * UNIT || plan.numbers() > MOST_PACKED) {
    return BAD_NUMBERS;
  }
  return function(plan);
}

// Lines of the source that are fetched while runs are summed: those of all places of some rows.
struct Lines {
  const char* from;
  const int64_t *rows, *places;  // where rows begin, and places of a row, in elements
  int64_t count, of_row;         // rows, places of a row
  int64_t element, bytes;        // of an element, of a place
  int64_t of_run, place, at;     // how many a run fetches; what is next

  int64_t all() const { return count * of_row * ceil_div(bytes, LINE); }
  void fetch() {
    for (int64_t i = 0; i < of_run && count > 0; ++i) {
      __builtin_prefetch(from + (*rows + places[place]) * element + at, 0, 2);
      at += LINE;
      if (at < bytes) continue;
      at = 0;
      if (++place == of_row) place = 0, ++rows, --count;
    }
  }
};

// For each run, one tile of y after the other: y[i * row + j vectors] += sum over the run's entries
// of value * x[offset + i * pitch + j vectors]. `fresh`: y holds nothing.
using Accumulate = void (*)(const Run*, int64_t, Entries, const float* x, int64_t pitch, bool fresh,
                            float* y, int64_t of_row, int64_t of_tile, Lines&);

// small: the largest tile has at most SMALL vectors.
Accumulate find_accumulate(int64_t high, int64_t wide, bool small);

}  // namespace fst

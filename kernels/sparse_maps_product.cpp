// Products of maps that have zeros with a weight:
//     Y[n][co][p][q] = bias[co] + sum over ci, tap of W[co][ci][tap] * X[n][ci][pixel of tap]
//     dX[n][ci][h][w] = sum over co, tap of W[co][ci][tap] * dY[n][co][position of tap]
//
// Here X, or dY, is the source. Its zeros are left out: each pixel's channels are compressed once
// into a list of values and offsets. The sums of a pixel of the result are vectors of channels in
// registers, and each value of the list adds a row of the weight to them. Lists of pixels that the
// taps of a row of the kernel see lie one behind the other, and so are one list. For a strip of
// rows of the result, which may span images:
//
//     list [source channels / depth][slot of a source row][pixel: value, offset]
//     W    [group][block][source channels / depth][kh][taps of a row][depth][block's channels]
//     sums [row][pixel][block's channels]
//
// `depth` is chosen so that W of a row's taps stays in the first cache. In dX with a stride, pixels
// of dX see different taps, by phases: taps of a row are ordered by phase, then by what they see.

#include "sparse_maps.h"

namespace {

using namespace fst;
using namespace fst::maps;

constexpr int64_t STRIP = 512;      // pixels of the result, if rows are not longer
constexpr int64_t FEWEST_ROWS = 4;  // of a strip: its first and last see rows of other strips

alignas(64) constexpr int32_t LANES[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// sums += values[i] * rows of w at offsets[i] - shift, modulo 65536, from i to end. Four
// offsets behind the last are read too.
template <int N>
void accumulate(Entries list, int64_t i, int64_t end, const float* w, int64_t shift, float* sums) {
  constexpr int SETS = N < 6 ? 2 : 1;  // of sums, where few would wait for each other
  vec sum[SETS][N];
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) {
    sum[0][v] = *reinterpret_cast<const vec*>(sums + v * V);
    if (SETS > 1) sum[SETS - 1][v] = vec{};
  }
  const auto add = [&](vec* set, vec number, uint64_t at) __attribute__((always_inline)) {
    const float* row = w + static_cast<uint16_t>(at - shift) * (N * V);
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) set[v] += number * *reinterpret_cast<const vec*>(row + v * V);
  };
  // Addresses that wait for loads would hold back the loads of w: offsets are read four ahead.
  uint64_t next = four_offsets(list.offsets + i);
  for (; i + 4 <= end; i += 4) {
    const uint64_t offsets = next;
    next = four_offsets(list.offsets + i + 4);
    const Four values(list.values + i);
    add(sum[0], values.at<0>(), offsets);
    add(sum[SETS - 1], values.at<1>(), offsets >> 16);
    add(sum[0], values.at<2>(), offsets >> 32);
    add(sum[SETS - 1], values.at<3>(), offsets >> 48);
  }
  for (; i < end; ++i, next >>= 16) add(sum[0], list.values[i] - vec{}, next);
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) {
    if (SETS > 1) sum[0][v] += sum[SETS - 1][v];
    *reinterpret_cast<vec*>(sums + v * V) = sum[0][v];
  }
}

// Neighbouring taps of a row of the kernel that see neighbouring pixels of the source.
struct Run {
  int64_t phase, shift, slot, count;
};

struct Runs {
  int64_t count = 0, longest = 0;
  int64_t order[MOST_TAPS];  // taps by their slots
  Run run[MOST_TAPS];

  explicit Runs(const Axis& axis) {
    for (int64_t t = 0; t < axis.taps; ++t) order[t] = t;
    std::sort(order, order + axis.taps, [&](int64_t a, int64_t b) {
      const int64_t less = axis.phase(a) - axis.phase(b);
      return less ? less < 0 : axis.shift(a) < axis.shift(b);
    });
    for (int64_t slot = 0; slot < axis.taps; ++slot) {
      const int64_t phase = axis.phase(order[slot]), shift = axis.shift(order[slot]);
      Run* last = run + count - 1;
      if (count && last->phase == phase && last->shift + last->count == shift) {
        ++last->count;
      } else {
        run[count++] = {phase, shift, slot, 1};
      }
      longest = std::max(longest, run[count - 1].count);
    }
  }
};

// Lists of a row of pixels: pixel w has start[w] to start[w + 1]. Offsets are counted modulo 65536:
// a run of taps sees less.
struct Row {
  Entries list;
  int32_t* start;
};

// Adds what a run of taps gives to a row of the result.
template <int N>
__attribute__((noinline)) void add_row(const Axis& columns, int64_t depth, const Run& run,
                                       const Row& row, const float* w, float* sums) {
  int64_t first = run.shift;
  for (int64_t x = run.phase; x < columns.result; x += columns.phases(), first += columns.step()) {
    const int64_t low = std::max<int64_t>(first, 0);
    const int64_t high = std::min(first + run.count, columns.source);
    if (low >= high) continue;
    const int64_t begin = row.start[low], end = row.start[high];
    if (begin < end) accumulate<N>(row.list, begin, end, w, first * depth, sums + x * (N * V));
  }
}

// A thread's lists and sums of a strip.
struct Own {
  Entries list;
  int32_t* start;
  float *sums, *pixels;
  int32_t* of_row;
  int64_t* row;  // of each slot
  int64_t slots;
};

template <class T>
struct MapsProduct {
  using Int = typename T::Int;
  const Int *source, *weight, *bias;
  bool backward, maps_last, weight_last;
  int64_t images, in, out, groups;  // channels of a group of the convolution
  Axis rows, columns;
  Runs runs;
  int64_t deep, wide;  // channels of a group of the source, of the result
  Blocks blocks;
  int64_t depth, depths;
  Map of_source, of_result;

  MapsProduct(const void* source, const void* weight, const void* bias, bool backward,
              const Geometry& g, int64_t in, int64_t out, int64_t groups, const int64_t* layouts)
      : source(static_cast<const Int*>(source)),
        weight(static_cast<const Int*>(weight)),
        bias(static_cast<const Int*>(bias)),
        backward(backward),
        maps_last(layouts[0]),
        weight_last(layouts[1]),
        images(g.images),
        in(in),
        out(out),
        groups(groups),
        rows(axis_of_rows(g, backward)),
        columns(axis_of_columns(g, backward)),
        runs(columns),
        deep(backward ? out : in),
        wide(backward ? in : out),
        blocks(wide),
        of_source(groups * deep, rows.source * columns.source, maps_last),
        of_result(groups * wide, rows.result * columns.result, maps_last) {
    const int64_t channel_stride = runs.longest * std::min<int64_t>(blocks.vectors, MOST_VECTORS) *
                                   V * static_cast<int64_t>(sizeof(float));
    const int64_t most = std::max<int64_t>(FIRST_CACHE / channel_stride / V, 1) * V;
    depth = ceil_div(ceil_div(deep, ceil_div(deep, most)), V) * V;
    depths = ceil_div(deep, depth);
  }

  int64_t taps() const { return rows.taps * columns.taps; }
  int64_t of_row() const { return columns.source * depth + V; }  // of a list
  int64_t list_numbers(int64_t slots) const { return depths * slots * of_row(); }
  int64_t packed_numbers() const { return groups * depths * depth * taps() * blocks.padded(); }
  // Where W of a block, a piece of the source's channels and a row of the kernel begins.
  int64_t packed(int64_t group, int64_t block, int64_t piece, int64_t r) const {
    const int64_t channels = group * blocks.padded() + blocks.first(block);
    const int64_t before = piece * rows.taps + r;
    return channels * depths * depth * taps() + before * columns.taps * depth * blocks.width(block);
  }

  void pack_weight(int64_t unit, float* all) const {
    const int64_t r = unit % rows.taps, piece = unit / rows.taps % depths;
    const int64_t block = unit / (rows.taps * depths) % blocks.count;
    const int64_t group = unit / (rows.taps * depths * blocks.count);
    const int64_t of_in = weight_last ? 1 : taps(), of_out = in * taps();
    const int64_t of_deep = backward ? of_out : of_in, of_wide = backward ? of_in : of_out;
    const int64_t width = blocks.width(block), valid = blocks.valid(block);
    const int64_t count = std::min(depth, deep - piece * depth);
    float* to = all + packed(group, block, piece, r);
    for (int64_t slot = 0; slot < columns.taps; ++slot, to += depth * width) {
      const int64_t tap = r * columns.taps + runs.order[slot];
      const Int* from = weight + group * out * of_out + piece * depth * of_deep +
                        blocks.first(block) * of_wide + tap * (weight_last ? in : 1);
      if (of_deep == 1) {
        transpose<T, Single>([&](int64_t i) { return from + i * of_wide; }, valid, count,
                             reinterpret_cast<int32_t*>(to), width);
      }
      for (int64_t c = 0; c < count; ++c) {
        if (of_deep != 1 && of_wide == 1) {
          copy<T, Single>(from + c * of_deep, valid, reinterpret_cast<int32_t*>(to + c * width));
        } else if (of_deep != 1) {
          for (int64_t n = 0; n < valid; ++n) {
            to[c * width + n] = T::wide(from[c * of_deep + n * of_wide]);
          }
        }
        std::fill(to + c * width + valid, to + (c + 1) * width, 0.0f);
      }
    }
  }

  // Pixels of a row of the source side by side, `depth` channels each, with zeros behind them.
  void fetch(int64_t row, int64_t channel, int64_t count, float* pixels) const {
    const Int* from = source + of_source.offset(row * columns.source);
    from += channel * of_source.channel_stride;
    for (int64_t w = 0; w < columns.source; ++w) {
      float* to = pixels + w * depth;
      if (of_source.channel_stride == 1) {
        copy<T, Single>(from + w * of_source.place_stride, count, reinterpret_cast<int32_t*>(to));
      }
      std::fill(to + count, to + depth, 0.0f);
    }
    if (of_source.channel_stride != 1) {
      transpose<T, Single>([&](int64_t i) { return from + i * of_source.channel_stride; }, count,
                           columns.source, reinterpret_cast<int32_t*>(pixels), depth);
    }
  }

  Row lists(int64_t list, const Own& own) const {
    return {{own.list.values + list * of_row(), own.list.offsets + list * of_row()},
            own.start + list * (columns.source + 1)};
  }

  bool seen(int64_t column) const {  // by any pixel of the result
    if (backward || columns.stride <= columns.taps) return true;
    for (int64_t t = 0; t < columns.taps; ++t) {
      const int64_t away = column - columns.shift(t);
      if (away >= 0 && away % columns.stride == 0) return true;
    }
    return false;
  }

  void compress_row(int64_t slot, int64_t group, const Own& own) const {
    const int64_t row = own.row[slot];
    for (int64_t piece = 0; row >= 0 && piece < depths; ++piece) {
      const int64_t first = group * deep + piece * depth;
      const int64_t count = std::min(depth, deep - piece * depth);
      const float* pixels = own.pixels;
      int64_t pitch = depth;
      if (sizeof(Int) == 4 && of_source.channel_stride == 1 && count % V == 0) {
        pitch = of_source.place_stride;
        pixels = reinterpret_cast<const float*>(source) + first;
        pixels += of_source.offset(row * columns.source);
      } else {
        fetch(row, first, count, own.pixels);
      }
      const int64_t list = piece * own.slots + slot;
      const auto [entries, start] = lists(list, own);
      int64_t found = 0;
      for (int64_t w = 0; w < columns.source; ++w, pixels += pitch) {
        start[w] = static_cast<int32_t>(found);
        for (int64_t c = 0; seen(w) && c < count; c += V) {
          const vec x = *reinterpret_cast<const vec*>(pixels + c);
          const ints lanes = *reinterpret_cast<const ints*>(LANES);
          const ints offsets = lanes + static_cast<int32_t>(w * depth + c);
          found += append_kept(x, offsets, nonzeros(x), entries, found);
        }
      }
      start[columns.source] = static_cast<int32_t>(found);
    }
  }

  // Rows [first, last) of all images, one block of channels.
  void add_block(int64_t first, int64_t last, int64_t group, int64_t block, const float* packed_w,
                 const Own& own) const {
    const int64_t width = blocks.width(block), of_sums = columns.result * width;
    float start[MOST_VECTORS * V] = {};
    const Int* from = bias + group * wide + blocks.first(block);
    for (int64_t n = 0; bias && n < blocks.valid(block); ++n) start[n] = T::wide(from[n]);
    for (int64_t i = 0; i < (last - first) * columns.result; ++i) {
      std::copy_n(start, width, own.sums + i * width);
    }
    with_block(width / V, [&](auto vectors) {
      for (int64_t piece = 0; piece < depths; ++piece) {
        for (int64_t r = 0; r < rows.taps; ++r) {
          const float* w = packed_w + packed(group, block, piece, r);
          for (int64_t i = 0; i < runs.count; ++i) {
            const Run& run = runs.run[i];
            for (int64_t y = first; y < last; ++y) {
              const int64_t h = rows.at(y % rows.result, r);
              if (h < 0) continue;
              const Row row = lists(piece * own.slots + own.of_row[y - first] + h, own);
              add_row<vectors>(columns, depth, run, row, w + run.slot * depth * width,
                               own.sums + (y - first) * of_sums);
            }
          }
        }
      }
    });
  }

  void write(int64_t first, int64_t last, int64_t group, int64_t block, const float* sums,
             Int* result) const {
    const int64_t width = blocks.width(block), valid = blocks.valid(block);
    for (int64_t y = first; y < last; ++y, sums += columns.result * width) {
      Int* to = result + of_result.offset(y * columns.result) +
                (group * wide + blocks.first(block)) * of_result.channel_stride;
      if (of_result.channel_stride != 1) {
        const auto row = [&](int64_t i) {
          return reinterpret_cast<const int32_t*>(sums + i * width);
        };
        transpose<Single, T>(row, columns.result, valid, to, of_result.channel_stride);
      }
      for (int64_t x = 0; of_result.channel_stride == 1 && x < columns.result; ++x) {
        copy<Single, T>(reinterpret_cast<const int32_t*>(sums + x * width), valid,
                        to + x * of_result.place_stride);
      }
    }
  }

  Status run(int64_t threads, Int* result) const {
    if (columns.source * depth > INT32_MAX) return BAD_NUMBERS;
    const int64_t total = images * rows.result;
    const int64_t shared = ceil_div(total, 4 * threads);  // a strip's rows, to have four per thread
    const int64_t wanted = std::max(ceil_div(STRIP, columns.result), FEWEST_ROWS);
    const int64_t length = ceil_div(total, ceil_div(total, std::min(wanted, shared)));
    const int64_t strips = ceil_div(total, length);
    const int64_t splits = std::clamp<int64_t>(threads / (strips * groups), 1, blocks.count);
    const int64_t slots = Slots::most(rows, total, length);
    const int64_t widest = ceil_div(blocks.vectors, blocks.count) * V;
    const int64_t lists = depths * slots, starts = lists * (columns.source + 1);
    const int64_t sums = length * columns.result * widest, pixels = columns.source * depth;
    Memory<float> weights(packed_numbers()), values(threads * list_numbers(slots));
    Memory<uint16_t> offsets(threads * list_numbers(slots));
    Memory<int32_t> begins(threads * starts);
    Memory<float> all_sums(threads * sums), all_pixels(threads * pixels);
    Memory<int32_t> of_rows(threads * length);
    Memory<int64_t> slot_rows(threads * slots);
    if (!weights.data || !values.data || !offsets.data || !begins.data || !all_sums.data ||
        !all_pixels.data || !of_rows.data || !slot_rows.data) {
      return NO_MEMORY;
    }
    int64_t next = 0;
    in_parallel(threads, [&](Team team) {
      const int64_t units = groups * blocks.count * depths * rows.taps;
      for (int64_t i = team.first(units); i < team.last(units); ++i) pack_weight(i, weights.data);
      team.wait();
      Own own{{values.data + team.rank * list_numbers(slots),
               offsets.data + team.rank * list_numbers(slots)},
              begins.data + team.rank * starts,
              all_sums.data + team.rank * sums,
              all_pixels.data + team.rank * pixels,
              of_rows.data + team.rank * length,
              slot_rows.data + team.rank * slots,
              0};
      while (true) {
        const int64_t task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        if (task >= strips * groups * splits) break;
        const Team share{static_cast<int>(task % splits), static_cast<int>(splits)};
        const int64_t group = task / splits % groups, strip = task / (splits * groups);
        const int64_t first = strip * length, last = std::min(total, first + length);
        own.slots = Slots(rows, first, last, own.of_row, own.row).count;
        for (int64_t slot = 0; slot < own.slots; ++slot) compress_row(slot, group, own);
        for (int64_t b = share.first(blocks.count); b < share.last(blocks.count); ++b) {
          add_block(first, last, group, b, weights.data, own);
          write(first, last, group, b, own.sums, result);
        }
      }
    });
    return DONE;
  }
};

}  // namespace

// Shapes: weight (groups * out, in, kh, kw). Forward: source (images, groups * in, height, width),
// bias (groups * out) or null, result (images, groups * out, rows, columns). Backward: source and
// result change places, without a bias. `layouts`: whether source and result, and weight, are
// channels_last.
FST_EXPORT int fst_maps_product(const void* source, const void* weight, const void* bias,
                                int64_t kind, int64_t backward, const int64_t* geometry, int64_t in,
                                int64_t out, int64_t groups, const int64_t* layouts, void* result,
                                int64_t threads) {
  const Geometry g(geometry);
  if (!g.holds(in, out, groups, MOST_TAPS)) return BAD_NUMBERS;
  return with_format(kind, [&](auto format) {
    using T = decltype(format);
    const MapsProduct<T> task(source, weight, bias, backward, g, in, out, groups, layouts);
    return task.run(threads, static_cast<typename T::Int*>(result));
  });
}
FST_ARGUMENTS(fst_maps_product)

// How many of `count` numbers are not zero, and of how many: of every `every`-th block of 4096.
FST_EXPORT int fst_count_nonzeros(const void* numbers, int64_t kind, int64_t count, int64_t every,
                                  int64_t* result, int64_t threads) {
  constexpr int64_t BLOCK = 4096;
  if (count < 0 || every < 1) return BAD_NUMBERS;
  const int64_t blocks = ceil_div(ceil_div(count, BLOCK), every);
  result[0] = result[1] = 0;
  return with_format(kind, [&](auto format) {
    using T = decltype(format);
    in_parallel(std::min(threads, ceil_div(blocks, 16)), [&](Team team) {
      int64_t found = 0, looked_at = 0;
      for (int64_t b = team.first(blocks); b < team.last(blocks); ++b) {
        const auto* x = static_cast<const typename T::Int*>(numbers) + b * every * BLOCK;
        const int64_t size = std::min(BLOCK, count - b * every * BLOCK);
        int32_t some = 0;
#pragma omp simd reduction(+ : some)
        for (int64_t i = 0; i < size; ++i) some += (x[i] & T::MAGNITUDE) != 0;
        found += some, looked_at += size;
      }
      __atomic_fetch_add(result, found, __ATOMIC_RELAXED);
      __atomic_fetch_add(result + 1, looked_at, __ATOMIC_RELAXED);
    });
    return DONE;
  });
}
FST_ARGUMENTS(fst_count_nonzeros)

// The weight gradient over a list of output positions:
//     dW[co][ci][tap] = sum over k of weight[k] * dY[source[k]][co] * (X - mean)[window k][tap][ci]
//                       + sums[co][tap] * mean[ci]
//
// Positions are the slow axis of both operands, so products of channels are outer products, and
// nothing is transposed: for each position k a tile of MR input channels by NR output channels
// in registers takes NV loads of dY and MR broadcasts of X. Packed in chunks of the list:
//
//     Y [Cout / NR][k][NR]       rows of dY, times their weights
//     X [Cin / MR][pixel][MR]      rows of the image that the chunk's windows see, with their
//                                      padding: the taps of a position are pixels at distances that
//                                      all positions share. 1x1 kernels: the list's pixels alone
//     C [Cout / NR][Cin / MR][tap][MR][NR]
//
// Few input channels would leave most of a tile empty. There the numbers that a row of the kernel
// sees lie side by side, and a tile takes MR of these:
//
//     X [group][pixel][Cin]
//     C [Cout / NR][kw * Cin / MR][kh][MR][NR]
//
// Threads share the tiles of C, or each takes a part of the list with a C of its own where the list
// is long or there are few tiles.

#include "positions.h"

namespace {

using namespace fst;

constexpr int64_t CHUNK = 512;         // positions that are packed at a time
constexpr int64_t STRETCH = 128;       // positions whose Y stays in the first cache for all taps
constexpr int64_t AHEAD = 48;          // positions from here to what is fetched
constexpr int64_t LARGE = 1 << 19;     // numbers of C from which it is seldom read: longer chunks
constexpr int64_t MOST_X = 1 << 22;    // numbers of a packed X, where positions are rare
constexpr int64_t MOST_Y = 1 << 17;    // numbers of Y that stay in the second cache
constexpr int64_t MOST_OWN = 4 << 20;  // numbers of all C where each thread has its own
constexpr int64_t SIDE_BY_SIDE = 32;   // pixels of few channels that are packed at a time
constexpr int TILE = MR * NR;

// c[m][n] += sum over k of x[at[k]][m] * y[k][n]; `fresh`: c holds nothing yet. `at` goes on for
// AHEAD more.
template <int N>
void accumulate(const float* __restrict x, const int64_t* __restrict at, const float* __restrict y,
                int64_t count, bool fresh, float* __restrict c) {
  vec sum[MR][N];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 3
    for (int v = 0; v < N; ++v) sum[m][v] = vec{};
  }
  for (int64_t k = 0; k < count; ++k) {
    const float* row = x + at[k];
    __builtin_prefetch(x + at[k + AHEAD]);  // rare positions lie too far apart for the processor
    vec column[N];
    for (int v = 0; v < N; ++v) column[v] = *reinterpret_cast<const vec*>(y + (k * N + v) * V);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 3
      for (int v = 0; v < N; ++v) sum[m][v] += row[m] * column[v];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 3
    for (int v = 0; v < N; ++v) {
      vec* place = reinterpret_cast<vec*>(c + (m * N + v) * V);
      *place = fresh ? sum[m][v] : *place + sum[m][v];
    }
  }
}

struct List {
  const int32_t* index;
  const float* weight;
  const int32_t* source;
  int64_t count;
};

struct Chunk {
  int64_t begin, end;  // of the list
  int64_t row, rows;   // of all images with their padding, one below the other
};

template <class T>
struct GradWeight {
  using Int = typename T::Int;
  const Int *grad_output, *input;
  const float *mean, *sums;
  List list;
  Geometry g;
  int64_t in, out, groups;  // channels of a group
  Map of_input, of_output;

  // Whether a tile's rows run over the columns of the kernel too, which saves tiles.
  bool joined() const {
    return g.dilation_w == 1 && ceil_div(g.kernel_w * in, MR) < g.kernel_w * ceil_div(in, MR);
  }
  int64_t row_length() const { return joined() ? g.kernel_w * in : in; }
  int64_t row_tiles() const { return ceil_div(row_length(), MR); }
  int64_t column_tiles() const { return ceil_div(out, NR); }
  int64_t tiles() const { return groups * row_tiles() * column_tiles(); }
  int64_t taps() const { return joined() ? g.kernel_h : g.taps(); }            // of a tile
  int64_t planes() const { return joined() ? groups : groups * row_tiles(); }  // of X
  int64_t of_pixel() const { return joined() ? in : MR; }                      // numbers in a plane
  bool gathered() const { return g.taps() == 1; }
  int64_t numbers() const { return tiles() * taps() * TILE; }
  int64_t longest() const { return numbers() > LARGE ? 4 * CHUNK : CHUNK; }
  int64_t rows_of_image() const { return (g.rows - 1) * g.stride_h + g.span_h(); }
  int64_t columns_of_row() const { return (g.columns - 1) * g.stride_w + g.span_w(); }
  int64_t pixels(const Chunk& chunk) const {
    return gathered() ? chunk.end - chunk.begin : chunk.rows * columns_of_row();
  }

  int64_t row_of(int64_t k) const {
    const auto at = g.position(list.index[k]);
    return at.image * rows_of_image() + at.row * g.stride_h;
  }

  // From list entry `begin` on: equal shares of at most CHUNK positions.
  Chunk chunk(int64_t begin, int64_t end) const {
    Chunk found{begin, begin, 0, 0};
    if (begin >= end) return found;
    int64_t count = ceil_div(end - begin, ceil_div(end - begin, longest()));
    found.row = row_of(begin);
    do {
      found.end = begin + count;
      found.rows = row_of(found.end - 1) + g.span_h() - found.row;
      count /= 2;
    } while (count && pixels(found) * planes() * of_pixel() > MOST_X);
    return found;
  }

  // Pixels of one group, whose first channel this is.
  void pack_few(const int64_t* offset, int64_t count, int64_t channel, float* x) const {
    if (in <= MR && groups == 1 && of_input.channel_stride == 1 && !gathered()) {
      return pack_side_by_side(offset, count, x);
    }
    const Int* from = input + channel * of_input.channel_stride;
    for (int64_t c = 0; c < in; ++c, ++x, from += of_input.channel_stride) {
      const float less = mean ? mean[channel + c] : 0.0f;
      for (int64_t i = 0; i < count; ++i) {
        x[i * in] = offset[i] < 0 ? 0.0f : T::wide(from[offset[i]]) - less;
      }
    }
  }

  // A row of a padded image whose numbers all lie side by side.
  void pack_side_by_side(const int64_t* offset, int64_t count, float* x) const {
    int64_t first = 0, last = count;
    while (first < last && offset[first] < 0) ++first;
    while (last > first && offset[last - 1] < 0) --last;
    std::fill_n(x, first * in, 0.0f);
    std::fill_n(x + last * in, (count - last) * in, 0.0f);
    if (first == last) return;
    const Int* from = input + offset[first];
    x += first * in;
    const int64_t end = (last - first) * in;
    float less[SIDE_BY_SIDE * MR] = {};
    const int64_t length = SIDE_BY_SIDE * in;
    for (int64_t i = 0; mean && i < length; ++i) less[i] = mean[i % in];
    for (int64_t i = 0; i < end; i += length) {
      const int64_t some = std::min(length, end - i);
#pragma omp simd
      for (int64_t j = 0; j < some; ++j) x[i + j] = T::wide(from[i + j]) - less[j];
    }
  }

  void pack_pixels(const int64_t* offset, int64_t count, int64_t ahead, int64_t plane,
                   float* x) const {
    for (int64_t i = 0; joined() && i < groups; ++i, x += plane) {
      pack_few(offset, count, i * in, x);
    }
    for (int64_t i = 0; !joined() && i < planes(); ++i, x += plane) {
      const int64_t first = i % row_tiles() * MR, channel = i / row_tiles() * in + first;
      pack<T, MR>(input + channel * of_input.channel_stride, offset, count, of_input.channel_stride,
                  std::min<int64_t>(MR, in - first), ahead, mean ? mean + channel : nullptr,
                  nullptr, x);
    }
  }

  // Where these columns of a row of a padded image lie; -1 outside of the image.
  void find(int64_t image, int64_t row, int64_t column, int64_t count, int64_t* offset) const {
    const int64_t h = row - g.padding_h, w = column - g.padding_w;
    const int64_t begin = of_input.offset((image * g.height + h) * g.width);
    const bool outside = h < 0 || h >= g.height;
    for (int64_t i = 0; i < count; ++i) {
      const bool left_out = outside || w + i < 0 || w + i >= g.width;
      offset[i] = left_out ? -1 : begin + (w + i) * of_input.place_stride;
    }
  }

  void pack_rows(const Chunk& chunk, Team team, int64_t plane, int64_t* offset, float* x) const {
    const int64_t width = columns_of_row();
    for (int64_t r = team.first(chunk.rows); r < team.last(chunk.rows); ++r) {
      const int64_t row = chunk.row + r;
      find(row / rows_of_image(), row % rows_of_image(), 0, width, offset);
      pack_pixels(offset, width, g.width * of_input.place_stride, plane,
                  x + r * width * of_pixel());
    }
  }

  void pack_list(const Chunk& chunk, Team team, int64_t plane, int64_t* offset, int64_t* at,
                 float* x, float* y) const {
    const int64_t count = chunk.end - chunk.begin, first = team.first(count);
    const int64_t own = team.last(count) - first;
    for (int64_t i = 0; i < own; ++i) {
      const auto of = g.position(list.index[chunk.begin + first + i]);
      const int64_t row = of.row * g.stride_h, column = of.column * g.stride_w;
      if (gathered()) {
        at[first + i] = (first + i) * of_pixel();
        find(of.image, row, column, 1, offset + i);
      } else {
        const int64_t below = of.image * rows_of_image() + row - chunk.row;
        at[first + i] = (below * columns_of_row() + column) * of_pixel();
      }
    }
    if (first + own == count) std::fill_n(at + count, AHEAD, at[count - 1]);
    if (gathered()) pack_pixels(offset, own, 0, plane, x + first * of_pixel());
    const int32_t* source = list.source ? list.source : list.index;
    for (int64_t i = 0; i < own; ++i) {
      offset[i] = of_output.offset(source[chunk.begin + first + i]);
    }
    for (int64_t i = 0; i < groups * column_tiles(); ++i) {
      const int64_t begin = i % column_tiles() * NR;
      const int64_t channel = i / column_tiles() * out + begin;
      const int64_t valid = std::min<int64_t>(NR, out - begin);
      with_vectors(ceil_div(valid, V), [&](auto vectors) {
        pack<T, vectors * V>(grad_output + channel * of_output.channel_stride, offset, own,
                             of_output.channel_stride, valid, 0, nullptr,
                             list.weight + chunk.begin + first,
                             y + i * longest() * NR + first * vectors * V);
      });
    }
  }

  void multiply(int64_t tile, int64_t count, int64_t plane, const int64_t* at, const float* x,
                const float* y, bool fresh, float* c) const {
    const int64_t width = gathered() ? 0 : columns_of_row();
    const int64_t across = joined() ? 1 : g.kernel_w;  // taps of a row
    const int64_t group = tile / (row_tiles() * column_tiles());
    const int64_t column = tile / row_tiles() % column_tiles();
    const int64_t row = tile % row_tiles();
    x += joined() ? group * plane + row * MR : (group * row_tiles() + row) * plane;
    y += tile / row_tiles() * longest() * NR;
    with_vectors(ceil_div(std::min<int64_t>(NR, out - column * NR), V), [&](auto vectors) {
      for (int64_t k = 0; k < count; k += STRETCH) {
        for (int64_t t = 0; t < taps(); ++t) {
          const int64_t away = t / across * g.dilation_h * width + t % across * g.dilation_w;
          accumulate<vectors>(x + away * of_pixel(), at + k, y + k * vectors * V,
                              std::min(STRETCH, count - k), fresh && k == 0, c + t * TILE);
        }
      }
    });
  }

  // Tiles [tile, tile + count) of one column into dW (Cout, Cin / groups, kh, kw).
  void write(int64_t tile, int64_t count, const float* c, bool last, Int* result) const {
    const int64_t column = tile / row_tiles() % column_tiles() * NR;
    const int64_t row = tile % row_tiles() * MR;
    const int64_t rows = std::min(row_length() - row, count * MR);
    const int64_t group = tile / (row_tiles() * column_tiles());
    const int64_t valid = std::min<int64_t>(NR, out - column), wide = ceil_div(valid, V) * V;
    const int64_t channel_stride = last ? 1 : g.taps(), of_tap = last ? in : 1;
    for (int64_t m = 0; m < rows; m += MR) {
      const int64_t some = std::min<int64_t>(MR, rows - m);
      for (int64_t t = 0; t < taps(); ++t) {
        for (int64_t n = 0; n < valid; ++n) {
          const float* from = c + (m / MR * taps() + t) * TILE + n;
          const int64_t channel = group * out + column + n;
          Int* to = result + channel * in * g.taps();
          const float* sum = sums ? sums + channel * g.taps() : nullptr;
          const float* less = sum ? mean + group * in : nullptr;
          if (joined()) {
            for (int64_t i = 0; i < some; ++i) {
              const int64_t at = row + m + i, tap = t * g.kernel_w + at / in;
              const float share = sum ? sum[tap] * less[at % in] : 0.0f;
              to[at % in * channel_stride + tap * of_tap] = T::narrow(from[i * wide] + share);
            }
          } else {
            to += (row + m) * channel_stride + t * of_tap;
            for (int64_t i = 0; i < some; ++i) {
              const float share = sum ? sum[t] * less[row + m + i] : 0.0f;
              to[i * channel_stride] = T::narrow(from[i * wide] + share);
            }
          }
        }
      }
    }
  }

  Status run(int64_t threads, bool last, Int* result) const {
    const int64_t size = taps() * TILE, own = list.count / threads;
    const bool alone =
        own && (tiles() < 2 * threads || (own >= CHUNK && numbers() * threads <= MOST_OWN));
    const int64_t sets = alone ? threads : 1;
    int64_t most = 0, longest_chunk = 0;
    for (int64_t set = 0; set < sets; ++set) {
      const Team share{static_cast<int>(set), static_cast<int>(sets)};
      Chunk next = chunk(share.first(list.count), share.last(list.count));
      for (; next.end > next.begin; next = chunk(next.end, share.last(list.count))) {
        most = std::max(most, pixels(next));
        longest_chunk = std::max(longest_chunk, next.end - next.begin);
      }
    }
    // What one chunk gives is written at once.
    const bool once = sets == 1 && chunk(0, list.count).end == list.count;
    const int64_t plane = most * of_pixel();
    const int64_t size_x = planes() * plane + MR;  // the last tile of a row reads past its end
    const int64_t size_y = groups * column_tiles() * longest() * NR;
    // A task: some columns of tiles, whose Y stays in the second cache, by some rows, which are
    // neighbours, since their results share lines of the cache.
    const int64_t fitting = MOST_Y / (longest_chunk * NR);
    const int64_t columns = std::clamp<int64_t>(fitting, 1, column_tiles());
    const int64_t together = std::clamp<int64_t>(tiles() / (8 * threads * columns), 1, 8);
    const int64_t across = ceil_div(column_tiles(), columns),
                  down = ceil_div(row_tiles(), together);
    const int64_t tasks = groups * across * down;
    const int64_t size_c = once ? threads * columns * together * size : numbers();
    const int64_t entries = std::max(longest(), columns_of_row());
    Memory<float> xs(sets * size_x), ys(sets * size_y), cs(sets * size_c);
    Memory<int64_t> ats(sets * (longest() + AHEAD));
    Memory<int64_t> offsets(threads * entries);
    if (!xs.data || !ys.data || !cs.data || !ats.data || !offsets.data) return NO_MEMORY;
    int64_t shared = 0;
    in_parallel(threads, [&](Team team) {
      const Team crew = alone ? Team{0, 1} : team;
      int64_t* offset = offsets.data + team.rank * entries;
      for (int64_t set = alone ? team.rank : 0; set < sets; set += alone ? team.size : 1) {
        const Team share{static_cast<int>(set), static_cast<int>(sets)};
        float *x = xs.data + set * size_x, *y = ys.data + set * size_y;
        int64_t* at = ats.data + set * (longest() + AHEAD);
        int64_t mine = 0, *next_task = alone ? &mine : &shared, first_task = 0;
        const int64_t begin = share.first(list.count), end = share.last(list.count);
        Chunk next = chunk(begin, end);
        for (; next.end > next.begin; next = chunk(next.end, end)) {
          if (!gathered()) pack_rows(next, crew, plane, offset, x);
          pack_list(next, crew, plane, offset, at, x, y);
          crew.wait();
          while (true) {
            const int64_t task = __atomic_fetch_add(next_task, 1, __ATOMIC_RELAXED) - first_task;
            if (task >= tasks) break;
            const int64_t group = task / (across * down), row = task % down * together;
            const int64_t column = task / down % across * columns;
            const int64_t rows = std::min(together, row_tiles() - row);
            const int64_t past = std::min(column + columns, column_tiles());
            float* c = cs.data + (once ? team.rank * columns * together : set * tiles()) * size;
            const auto tile = [&](int64_t j) {
              return (group * column_tiles() + j) * row_tiles() + row;
            };
            const auto place = [&](int64_t j) {
              return c + (once ? (j - column) * together : tile(j)) * size;
            };
            for (int64_t i = 0; i < rows; ++i) {
              for (int64_t j = column; j < past; ++j) {
                multiply(tile(j) + i, next.end - next.begin, plane, at, x, y, next.begin == begin,
                         place(j) + i * size);
              }
            }
            for (int64_t j = column; once && j < past; ++j) {
              write(tile(j), rows, place(j), last, result);
            }
          }
          first_task += tasks + crew.size;  // each thread took one number too many
          crew.wait();
        }
      }
      if (once) return;
      if (alone) team.wait();
      for (int64_t tile = team.first(tiles()); tile < team.last(tiles()); ++tile) {
        float* sum = cs.data + tile * size;
        for (int64_t set = 1; set < sets; ++set) {
          const float* other = cs.data + set * numbers() + tile * size;
          for (int64_t i = 0; i < size; ++i) sum[i] += other[i];
        }
        write(tile, 1, sum, last, result);
      }
    });
    return DONE;
  }
};

}  // namespace

// Shapes: input (images, groups * in, height, width); grad_output (.., groups * out, places of its
// own map, of which all images together have `places_of_all`); `source` (count) and `mean`
// (groups * in) may be null, `sums` (groups * out, kh * kw) too, and is where `mean` is; result
// (groups * out, in, kh, kw). `layouts`: whether input, grad_output, result are channels_last.
FST_EXPORT int fst_list_grad_weight(const void* grad_output, const void* input, int64_t kind,
                                    const int32_t* index, const float* weight,
                                    const int32_t* source, int64_t count, int64_t places,
                                    int64_t places_of_all, const float* mean, const float* sums,
                                    const int64_t* geometry, int64_t in, int64_t out,
                                    int64_t groups, const int64_t* layouts, void* result,
                                    int64_t threads) {
  if (places < 1 || places_of_all % places) return BAD_NUMBERS;
  if (source) {
    const auto [low, high] = std::minmax_element(source, source + count);
    if (count < 1 || *low < 0 || *high >= places_of_all) return BAD_NUMBERS;
  }
  const Geometry g(geometry);
  if (!source && (places != g.positions() || places_of_all != g.images * places)) {
    return BAD_NUMBERS;
  }
  return on_list(index, count, g, kind, in, out, groups, [&](auto format) {
    using T = decltype(format);
    using Int = typename T::Int;
    const GradWeight<T> task{static_cast<const Int*>(grad_output),
                             static_cast<const Int*>(input),
                             mean,
                             sums,
                             {index, weight, source, count},
                             g,
                             in,
                             out,
                             groups,
                             Map(groups * in, g.height * g.width, layouts[0]),
                             Map(groups * out, places, layouts[1])};
    return task.run(threads, layouts[2], static_cast<Int*>(result));
  });
}
FST_ARGUMENTS(fst_list_grad_weight)

// The input gradient from a list of output positions: W^T dY[index[k]] * weight[k], added to the
// input at the taps of position k.
//
// A tile of DEEP positions by NR input channels in registers sums over the output channels, for
// each tap, and is added to the rows of dX that the tap sees. Packed:
//
//     Y [k / DEEP][Cout / V][DEEP][V]   a chunk of one task's positions, times their weights
//     W [Cout][NR]                   for one tile of channels and one tap, when its turn comes
//
// A task owns some images, and a part of the channels where images are few, so that no two threads
// add to the same number. dX is summed where it lies if it is float32 and channels_last with whole
// vectors of channels, else beside it in float32.

#include "positions.h"

namespace {

using namespace fst;

constexpr int64_t CHUNK = 512;           // positions that are packed at a time
constexpr int64_t AHEAD = 8;             // positions from the one that is packed to what is fetched
constexpr int DEEP = V == 16 ? 12 : MR;  // rows of a tile

// to[m][0:N*V] += sum over c of y[c / V][m][c % V] * w[c][0:N*V], for each row m that is not null.
template <int N>
void accumulate(const float* __restrict y, const float* __restrict w, int64_t channels,
                float* const* to) {
  for (int m = 0; m < DEEP; ++m) {
    for (int v = 0; to[m] && v < N; ++v) __builtin_prefetch(to[m] + v * V, 1);
  }
  vec sum[DEEP][N];
#pragma GCC unroll 16
  for (int m = 0; m < DEEP; ++m) {
#pragma GCC unroll 3
    for (int v = 0; v < N; ++v) sum[m][v] = vec{};
  }
  for (int64_t block = 0; block < channels; block += V, y += DEEP * V) {
    const float* past = y + std::min<int64_t>(V, channels - block);
    for (const float* row = y; row < past; ++row, w += N * V) {
      vec column[N];
      for (int v = 0; v < N; ++v) column[v] = *reinterpret_cast<const vec*>(w + v * V);
#pragma GCC unroll 16
      for (int m = 0; m < DEEP; ++m) {
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) sum[m][v] += row[m * V] * column[v];
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < DEEP; ++m) {
    if (!to[m]) continue;
#pragma GCC unroll 3
    for (int v = 0; v < N; ++v) *reinterpret_cast<vec*>(to[m] + v * V) += sum[m][v];
  }
}

template <class T>
struct GradInput {
  using Int = typename T::Int;
  const Int *grad_output, *weight;
  bool weight_last;
  const int32_t* index;
  const float* scale;
  int64_t count;
  Geometry g;
  int64_t in, out, groups;  // channels of a group
  Map of_input, of_output;

  int64_t column_tiles() const { return ceil_div(in, NR); }
  int64_t tiles() const { return groups * column_tiles(); }
  int64_t places() const { return g.height * g.width; }
  int64_t wide_out() const { return ceil_div(out, V) * V; }
  int64_t valid(int64_t tile) const {
    return std::min<int64_t>(NR, in - tile % column_tiles() * NR);
  }
  bool direct() const { return sizeof(Int) == 4 && of_input.channel_stride == 1 && in % V == 0; }
  // Channels of a place where dX is summed: groups begin with whole vectors.
  int64_t pitch() const { return groups * ceil_div(in, V) * V; }
  int64_t channel_of(int64_t tile) const {
    return tile / column_tiles() * ceil_div(in, V) * V + tile % column_tiles() * NR;
  }

  // [Cout][width of the tile]
  void pack_weight(int64_t tap, int64_t tile, float* to) const {
    const int64_t taps = g.taps(), channel_stride = weight_last ? 1 : taps, some = valid(tile);
    const int64_t wide = ceil_div(some, V) * V, row = taps * in;
    const Int* from = weight + tile / column_tiles() * out * row +
                      tile % column_tiles() * NR * channel_stride + tap * (weight_last ? in : 1);
    for (int64_t c = 0; c < out; ++c, from += row, to += wide) {
      if (weight_last) {
        for (int64_t i = 0; i < some; ++i) to[i] = T::wide(from[i]);
      } else {
        for (int64_t i = 0; i < some; ++i) to[i] = T::wide(from[i * taps]);
      }
      std::fill(to + some, to + wide, 0.0f);
    }
  }

  // Positions [begin, end) of the list, of one group's channels.
  void pack_positions(int64_t begin, int64_t end, int64_t group, float* packed) const {
    const Int* from = grad_output + group * out * of_output.channel_stride;
    const int64_t step = of_output.channel_stride;
    for (int64_t k = begin; k < ceil_div(end - begin, DEEP) * DEEP + begin; ++k) {
      const int64_t place = k - begin;
      float* __restrict to = packed + place / DEEP * DEEP * wide_out() + place % DEEP * V;
      const Int* row = k < end ? from + of_output.offset(index[k]) : nullptr;
      const Int* later = k + AHEAD < end ? from + of_output.offset(index[k + AHEAD]) : row;
      const float factor = k < end ? scale[k] : 0.0f;
      for (int64_t c = 0; c < out; c += V, to += DEEP * V) {
        const int64_t some = std::min<int64_t>(V, out - c);
        if (!row) {
          std::fill_n(to, V, 0.0f);
        } else if (step == 1 && some == V) {
          __builtin_prefetch(later + c);
          for (int i = 0; i < V; ++i) to[i] = T::wide(row[c + i]) * factor;
        } else {
          for (int64_t i = 0; i < some; ++i) to[i] = T::wide(row[(c + i) * step]) * factor;
        }
      }
    }
  }

  // Where in dX the first tap of a position lies, in rows and columns that may be outside.
  struct Place {
    int64_t row, column;
    float* image;
  };

  void find(int64_t begin, int64_t end, int64_t image, float* sums, Place* at) const {
    for (int64_t k = begin; k < end; ++k) {
      const auto of = g.position(index[k]);
      at[k - begin] = {of.row * g.stride_h - g.padding_h, of.column * g.stride_w - g.padding_w,
                       sums + (of.image - image) * places() * pitch()};
    }
  }

  // Adds the list's part that lies in some images to tiles [first, last).
  void add(int64_t begin, int64_t end, int64_t image, int64_t first, int64_t last, float* w,
           float* y, Place* at, float* sums) const {
    const int64_t chunks = ceil_div(end - begin, CHUNK);
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t chunk = begin + (end - begin) * i / chunks;
      const int64_t past = begin + (end - begin) * (i + 1) / chunks;
      find(chunk, past, image, sums, at);
      for (int64_t tile = first; tile < last; ++tile) {
        if (tile == first || tile % column_tiles() == 0) {
          pack_positions(chunk, past, tile / column_tiles(), y);
        }
        for (int64_t t = 0; t < g.taps(); ++t) {
          pack_weight(t, tile, w);
          with_vectors(ceil_div(valid(tile), V), [&](auto vectors) {
            add_tile<vectors>(past - chunk, t, at, channel_of(tile), w, y);
          });
        }
      }
    }
  }

  template <int N>
  void add_tile(int64_t positions, int64_t tap, const Place* at, int64_t channel, const float* w,
                const float* y) const {
    const int64_t down = tap / g.kernel_w * g.dilation_h;
    const int64_t right = tap % g.kernel_w * g.dilation_w;
    for (int64_t k = 0; k < positions; k += DEEP) {
      float* to[DEEP] = {};
      for (int64_t m = 0; m < std::min<int64_t>(DEEP, positions - k); ++m) {
        const int64_t h = at[k + m].row + down, v = at[k + m].column + right;
        if (h < 0 || h >= g.height || v < 0 || v >= g.width) continue;
        to[m] = at[k + m].image + (h * g.width + v) * pitch() + channel;
      }
      accumulate<N>(y + k * wide_out(), w, out, to);
    }
  }

  // Sums of images [image, past), tiles [first, last), in the layout of dX.
  void write(int64_t image, int64_t past, int64_t first, int64_t last, const float* sums,
             Int* result) const {
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t some = valid(tile), step = of_input.channel_stride,
                    across = of_input.place_stride;
      const int64_t channel = tile / column_tiles() * in + tile % column_tiles() * NR;
      for (int64_t n = image; n < past; ++n) {
        const float* from = sums + (n - image) * places() * pitch() + channel_of(tile);
        Int* to = result + of_input.offset(n * places()) + channel * step;
        for (int64_t i = 0; i < places(); i += V) {
          const int64_t end = std::min<int64_t>(i + V, places());
          for (int64_t c = 0; c < some; ++c) {
            for (int64_t k = i; k < end; ++k) {
              to[k * across + c * step] = T::narrow(from[k * pitch() + c]);
            }
          }
        }
      }
    }
  }

  Status run(int64_t threads, Int* result) const {
    // Images of a task: a chunk of positions, but as many tasks as threads, in equal rounds. Where
    // there is more to pack of the weights than of dY, tasks share the channels instead.
    const bool heavy = g.taps() * in * groups > count;
    const int64_t wanted = heavy ? g.images : ceil_div(g.images * CHUNK, count);
    const int64_t rounds = ceil_div(ceil_div(g.images, wanted), threads);
    const int64_t most_splits = std::min(threads, tiles());
    const int64_t tasks = heavy ? ceil_div(threads, most_splits) : rounds * threads;
    const int64_t images = ceil_div(g.images, std::min(g.images, tasks));
    const int64_t parcels = ceil_div(g.images, images);
    const int64_t splits = std::clamp<int64_t>(threads / parcels, 1, most_splits);
    const int64_t size_sums = direct() ? 0 : images * places() * pitch();
    const int64_t size_y = ceil_div(CHUNK, DEEP) * DEEP * wide_out();
    Memory<float> ws(threads * out * NR), ys(threads * size_y), beside(threads * size_sums);
    Memory<Place> ats(threads * CHUNK);
    if (!ws.data || !ys.data || !beside.data || !ats.data) return NO_MEMORY;
    int64_t next = 0;
    in_parallel(threads, [&](Team team) {
      while (true) {
        const int64_t task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        if (task >= parcels * splits) break;
        const Team share{static_cast<int>(task % splits), static_cast<int>(splits)};
        const int64_t first = share.first(tiles()), last = share.last(tiles());
        const int64_t image = task / splits * images;
        const int64_t past = std::min(g.images, image + images);
        float* sums = beside.data + team.rank * size_sums;
        if (direct()) sums = reinterpret_cast<float*>(result) + image * places() * pitch();
        const int64_t low = channel_of(first);
        const int64_t high = channel_of(last - 1) + ceil_div(valid(last - 1), V) * V;
        const bool all = high - low == pitch();
        const int64_t rows = all ? 1 : (past - image) * places();
        const int64_t size = all ? (past - image) * places() * pitch() : high - low;
        for (int64_t row = 0; row < rows; ++row) {
          std::memset(sums + row * pitch() + low, 0, size * sizeof(float));
        }
        const auto* begin = std::lower_bound(index, index + count, image * g.positions());
        const auto* end = std::lower_bound(begin, index + count, past * g.positions());
        add(begin - index, end - index, image, first, last, ws.data + team.rank * out * NR,
            ys.data + team.rank * size_y, ats.data + team.rank * CHUNK, sums);
        if (!direct()) write(image, past, first, last, sums, result);
      }
    });
    return DONE;
  }
};

}  // namespace

// Shapes: grad_output (images, groups * out, rows, columns); weight (groups * out, in, kh, kw);
// result (images, groups * in, height, width). `layouts`: whether grad_output and result, and
// weight, are channels_last.
FST_EXPORT int fst_list_grad_input(const void* grad_output, const void* weight, int64_t kind,
                                   const int32_t* index, const float* scale, int64_t count,
                                   const int64_t* geometry, int64_t in, int64_t out, int64_t groups,
                                   const int64_t* layouts, void* result, int64_t threads) {
  const Geometry g(geometry);
  return on_list(index, count, g, kind, in, out, groups, [&](auto format) {
    using T = decltype(format);
    using Int = typename T::Int;
    const GradInput<T> task{static_cast<const Int*>(grad_output),
                            static_cast<const Int*>(weight),
                            layouts[1] != 0,
                            index,
                            scale,
                            count,
                            g,
                            in,
                            out,
                            groups,
                            Map(groups * in, g.height * g.width, layouts[0]),
                            Map(groups * out, g.positions(), layouts[0])};
    return task.run(threads, static_cast<Int*>(result));
  });
}
FST_ARGUMENTS(fst_list_grad_input)

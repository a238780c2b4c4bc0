// A depthwise convolution of channels_last maps, with the 1x1 convolutions before and behind it.
//
//     Z[n][c][p][q] = f(bias[c] + sum over r, s of W[r][s][c] * X[n][c][p * sh + r * dh - ph][..])
//
// X is a map in memory, or the product of one by a 1x1 weight, without the weight's zeros: its rows
// are then made when they are first seen, and kept in a ring of two blocks of rows. Z is written to
// memory, or some rows of it are multiplied by another 1x1 weight. What lies between the products
// stays in the second cache.

#include <optional>

#include "sparse_weight_product.h"

namespace {

using namespace fst;

constexpr int TOGETHER = 4;  // pixels that share a load of the weight

// A 1x1 product beside the depthwise one; null lists: there is none.
struct Side {
  const int64_t* numbers;
  void* lists;
  int64_t bytes;
  const float* bias;
  int64_t activation;
};

struct Taps {
  const float* weight;  // (kernel_h, kernel_w, channels)
  const float* bias;    // (channels), or null
  int64_t activation, channels;
};

template <class T>
struct Depthwise {
  using Int = typename T::Int;
  Geometry g;
  Taps taps;

  // Rows of the source, null outside of the map, and those that only the next row will see.
  struct Rows {
    const Int* of[MOST_TAPS];
    const Int* ahead;
    int64_t count_ahead;
  };

  // J pixels of a row, from the q-th on; [first, last): taps of a row that lie inside the map. Not
  // inline: all that the inner loop steps by has a register.
  template <int J>
  __attribute__((noinline)) void add_taps(const Rows& rows, int64_t q, int64_t first, int64_t last,
                                          Int* to) const {
    const int64_t channels = taps.channels, step = g.stride_w * channels;
    const int64_t right = g.dilation_w * channels, line = LINE / static_cast<int64_t>(sizeof(Int));
    const int64_t at = (q * g.stride_w - g.padding_w + first * g.dilation_w) * channels;
    to += q * channels;
    for (int64_t begin = 0; begin < channels; begin += V) {
      const int64_t c = std::min(begin, channels - V);  // the last ones overlap
      for (int64_t r = 0; begin % line == 0 && r < rows.count_ahead; ++r) {
        const Int* ahead = rows.ahead + (r * g.width + q * g.stride_w) * channels + c;
        for (int64_t j = 0; j < J * g.stride_w; ++j) __builtin_prefetch(ahead + j * channels, 0, 2);
      }
      vec sum[J];
      const vec bias = taps.bias ? *reinterpret_cast<const vec*>(taps.bias + c) : vec{};
#pragma GCC unroll 8
      for (int j = 0; j < J; ++j) sum[j] = bias;
      const float* weights = taps.weight + first * channels + c;
      for (int64_t r = 0; r < g.kernel_h; ++r, weights += g.kernel_w * channels) {
        if (!rows.of[r]) continue;
        const Int* x = rows.of[r] + at + c;
        const float* weight = weights;
        for (int64_t s = first; s < last; ++s, weight += channels, x += right) {
          const vec value = *reinterpret_cast<const vec*>(weight);
#pragma GCC unroll 8
          for (int j = 0; j < J; ++j) sum[j] += value * load<T>(x + j * step);
        }
      }
      activate_all<J>(sum, taps.activation);
#pragma GCC unroll 8
      for (int j = 0; j < J; ++j) store<T>(sum[j], to + j * channels + c);
    }
  }

  void add_row(const Rows& rows, Int* to) const {
    const int64_t stride = g.stride_w, room = g.width - g.span_w() + g.padding_w;
    const int64_t begin = std::min(g.columns, ceil_div(g.padding_w, stride));
    const int64_t end = std::max(begin, room < 0 ? 0 : std::min(g.columns, room / stride + 1));
    const auto at_edge = [&](int64_t q) {
      const int64_t left = q * stride - g.padding_w;
      const int64_t first = left < 0 ? ceil_div(-left, g.dilation_w) : 0;
      const int64_t inside = g.width > left ? ceil_div(g.width - left, g.dilation_w) : 0;
      add_taps<1>(rows, q, first, std::min(g.kernel_w, inside), to);
    };
    int64_t q = 0;
    for (; q < begin; ++q) at_edge(q);
    for (; q + TOGETHER <= end; q += TOGETHER) add_taps<TOGETHER>(rows, q, 0, g.kernel_w, to);
    for (; q < end; ++q) add_taps<1>(rows, q, 0, g.kernel_w, to);
    for (; q < g.columns; ++q) at_edge(q);
  }
};

template <class T>
struct Chain {
  using Int = typename T::Int;
  using Sides = std::optional<Product<T>>;
  Depthwise<T> depthwise;
  Sides before, after;
  int64_t made, used;  // rows of the source that are made at once, of Z that are used at once
  const Int *source, *residual;
  Int* result;

  // A thread's memory: the ring, and rows of Z.
  struct Worker {
    const Chain& chain;
    const Geometry& g;
    const int64_t channels;
    Sides before, after;
    typename Product<T>::Strip strip_before, strip_after;
    Int *ring, *z;
    int64_t next;  // row of the source that is not made

    Int* ring_row(int64_t row) const { return ring + row % (2 * chain.made) * g.width * channels; }

    const Int* source_row(int64_t image, int64_t row) {
      if (row < 0 || row >= g.height) return nullptr;
      const int64_t place = image * g.height * g.width;
      if (!before) return chain.source + (place + row * g.width) * channels;
      for (; next <= row; next += chain.made) {
        const int64_t pixels = std::min(chain.made, g.height - next) * g.width;
        const Int* from = chain.source + (place + next * g.width) * before->channels();
        before->run_pixels(strip_before, from, pixels, nullptr, ring_row(next));
      }
      return ring_row(row);
    }

    // Rows [begin, end) of an image of the result.
    void run(int64_t image, int64_t begin, int64_t end) {
      const int64_t first = std::max<int64_t>(begin * g.stride_h - g.padding_h, 0);
      next = first / chain.made * chain.made;
      for (int64_t p = begin; p < end; p += chain.used) {
        const int64_t count = std::min(chain.used, end - p);
        const int64_t place = (image * g.rows + p) * g.columns;
        Int* to = after ? z : chain.result + place * channels;
        for (int64_t i = 0; i < count; ++i) {
          const int64_t top = (p + i) * g.stride_h - g.padding_h;
          typename Depthwise<T>::Rows rows{};
          for (int64_t r = 0; r < g.kernel_h; ++r) {
            rows.of[r] = source_row(image, top + r * g.dilation_h);
          }
          const int64_t below = std::max<int64_t>(top + g.span_h(), 0);
          if (!before && below < g.height) {
            rows.ahead = source_row(image, below);
            rows.count_ahead = std::min(g.stride_h, g.height - below);
          }
          chain.depthwise.add_row(rows, to + i * g.columns * channels);
        }
        if (!after) continue;
        const int64_t out = after->p.groups * after->p.results;
        const Int* added = chain.residual ? chain.residual + place * out : nullptr;
        after->run_pixels(strip_after, z, count * g.columns, added, chain.result + place * out);
      }
    }
  };

  Status run(int64_t threads) const {
    using Strips = typename Product<T>::Strips;
    const Geometry& g = depthwise.g;
    const int64_t channels = depthwise.taps.channels;
    const bool even = g.images >= TASKS * threads || g.images % threads == 0;
    const int64_t pieces = even ? 1 : std::min(threads, g.rows);
    const int64_t size_ring = before ? 2 * made * g.width * channels : 0;
    const int64_t size_z = after ? used * g.columns * channels : 0;
    std::optional<Strips> memory_before, memory_after;
    if (before) memory_before.emplace(*before, threads);
    if (after) memory_after.emplace(*after, threads);
    Memory<Int> maps(threads * (size_ring + size_z));
    if (!maps.data || (before && !memory_before->there()) || (after && !memory_after->there())) {
      return NO_MEMORY;
    }
    int64_t next = 0;
    in_parallel(threads, [&](Team team) {
      Int* own = maps.data + team.rank * (size_ring + size_z);
      Worker worker{*this, g, channels, before, after, {}, {}, own, own + size_ring, 0};
      if (before) worker.strip_before = memory_before->of(team.rank);
      if (after) worker.strip_after = memory_after->of(team.rank);
      while (true) {
        const int64_t task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        if (task >= g.images * pieces) break;
        const int64_t piece = task % pieces;
        worker.run(task / pieces, g.rows * piece / pieces, g.rows * (piece + 1) / pieces);
      }
    });
    return DONE;
  }
};

// The product of a side, whose addresses are given later: rows of maps with so many columns.
template <class T>
Status make(const Side& side, int64_t columns, std::optional<Product<T>>* made) {
  if (!side.lists) return DONE;
  if (side.activation < 0 || side.activation >= ACTIVATIONS) return BAD_NUMBERS;
  return with_plan(side.numbers, [&](const Plan& plan) {
    auto* head = static_cast<int64_t*>(side.lists);
    const bool is_one = side.numbers[0] == 1 && side.numbers[2] == columns;
    if (!is_one || !plan.flat || plan.backward || !belong(plan, head, side.bytes)) {
      return BAD_NUMBERS;
    }
    Run* runs = reinterpret_cast<Run*>(head + HEAD);
    const int64_t places = plan.columns.result;
    const int64_t sources = plan.groups * plan.sources, results = plan.groups * plan.results;
    made->emplace(Product<T>{nullptr,
                             nullptr,
                             plan,
                             runs,
                             entries_of(plan, runs),
                             {side.bias, nullptr, side.activation},
                             Map(sources, places, true),
                             Map(results, places, true)});
    return DONE;
  });
}

}  // namespace

// Z, or the product of Z by the 1x1 weight behind; all maps are channels_last. geometry, channels:
// of the depthwise convolution. before, behind: numbers, lists and bytes as fst_zeros_product takes
// them, of one image with as many rows as are made or used at once; null lists: there is no such
// product. biases are of float32, or null; residual is as the product behind, or null.
FST_EXPORT int fst_depthwise(const void* source, int64_t kind, const int64_t* geometry,
                             int64_t channels, const float* weight, const float* bias,
                             int64_t activation, const int64_t* before, void* lists_before,
                             int64_t bytes_before, const float* bias_before,
                             int64_t activation_before, const int64_t* behind, void* lists_behind,
                             int64_t bytes_behind, const float* bias_behind,
                             int64_t activation_behind, const void* residual, void* result,
                             int64_t threads) {
  const Geometry g(geometry);
  if (!within(0, ACTIVATIONS - 1, {activation}) || channels < V ||
      !g.holds(channels, 1, 1, MOST_TAPS) || (residual && !lists_behind)) {
    return BAD_NUMBERS;
  }
  return with_format(kind, [&](auto format) {
    using T = decltype(format);
    using Int = typename T::Int;
    std::optional<Product<T>> first, last;
    Status status =
        make({before, lists_before, bytes_before, bias_before, activation_before}, g.width, &first);
    if (status != DONE) return status;
    status = make({behind, lists_behind, bytes_behind, bias_behind, activation_behind}, g.columns,
                  &last);
    if (status != DONE) return status;
    const int64_t made = first ? before[1] : 1, used = last ? behind[1] : 1;
    const bool fits = (!first || first->p.groups * first->p.results == channels) &&
                      (!last || last->channels() == channels) &&
                      // what a row of the result sees lies in two blocks
                      (!first || made >= std::min(g.span_h() - 1, g.height));
    if (!fits) return BAD_NUMBERS;
    return Chain<T>{{g, {weight, bias, activation, channels}},
                    first,
                    last,
                    made,
                    used,
                    static_cast<const Int*>(source),
                    static_cast<const Int*>(residual),
                    static_cast<Int*>(result)}
        .run(threads);
  });
}
FST_ARGUMENTS(fst_depthwise)

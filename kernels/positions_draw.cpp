// Which output positions a backward pass takes: their scores from dY, and a systematic draw.

#include "conv_shape.h"

namespace {

using namespace fst;

constexpr int64_t BLOCK = 2048;       // scores whose sum is taken at a time, in any thread
constexpr int64_t SIDE_BY_SIDE = 64;  // positions whose sums are kept for each channel, at least
constexpr int64_t ONE = int64_t{1} << 31;  // probability 1

// The ends of the taps' ranges along one axis cut the output map into segments.
struct Segments {
  int64_t taps, length;
  Memory<int64_t> low, high, cuts;  // range of each tap; starts of segments, and the end
  int64_t count = 0;

  explicit Segments(const Axis& axis)
      : taps(axis.taps),
        length(axis.result),
        low(taps),
        high(taps),
        cuts(2 * taps + 2) {
    if (!usable()) return;
    int64_t* end = cuts.data;
    *end++ = 0;
    *end++ = length;
    for (int64_t t = 0; t < taps; ++t) {
      const int64_t before = -axis.shift(t), end_of_map = axis.source + before;
      low.data[t] = before > 0 ? std::min(ceil_div(before, axis.stride), length) : 0;
      high.data[t] = end_of_map > 0 ? ceil_div(end_of_map, axis.stride) : 0;
      high.data[t] = std::clamp(high.data[t], low.data[t], length);
      *end++ = low.data[t];
      *end++ = high.data[t];
    }
    std::sort(cuts.data, end);
    count = std::unique(cuts.data, end) - cuts.data - 1;
  }
  bool usable() const { return low.data && high.data && cuts.data; }
  bool sees(int64_t tap, int64_t segment) const {
    return low.data[tap] <= cuts.data[segment] && cuts.data[segment] < high.data[tap];
  }
};

// Squares of a row of positions side by side, and sums of its segments: [segment][channel].
template <class T, bool SUMS>
void add_last(const typename T::Int* y, int64_t channels, const int64_t* cuts, int64_t segments,
              float* squares, float* __restrict sums) {
  for (int64_t s = 0; s < segments; ++s, sums += channels) {
    for (int64_t q = cuts[s]; q < cuts[s + 1]; ++q) {
      const typename T::Int* from = y + q * channels;
      float square = 0;
#pragma omp simd reduction(+ : square)
      for (int64_t c = 0; c < channels; ++c) {
        const float value = T::wide(from[c]);
        square += value * value;
        if (SUMS) sums[c] += value;
      }
      squares[q] = square;
    }
  }
}

// The same where positions of a channel lie side by side: `count` of them, and sums of each.
template <class T, bool SUMS>
void add_first(const typename T::Int* y, Map map, int64_t count, int64_t most,
               float* __restrict squares, float* __restrict sums) {
  std::fill_n(squares, count, 0.0f);
  for (int64_t c = 0; c < map.channels; ++c, y += map.places, sums += most) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const float value = T::wide(y[i]);
      squares[i] += value * value;
      if (SUMS) sums[i] += value;
    }
  }
}

// One thread's rows of the output maps, segment by segment; `sums` [rows][columns][channels].
template <class T, bool SUMS>
void measure(const typename T::Int* y, Map map, int64_t images, const Segments& rows,
             const Segments& columns, Team team, float* scores, float* partial, int64_t size,
             double* sums) {
  const int64_t width = columns.length, channels = map.channels;
  const int64_t first = team.first(images * rows.length), last = team.last(images * rows.length);
  const bool inner = map.channel_stride == 1;
  const int64_t step = inner ? 1 : SIDE_BY_SIDE / width + 1;  // rows at a time
  for (int64_t s = 0; s < rows.count; ++s, sums += columns.count * channels) {
    int64_t added = 0;
    const auto flush = [&] {
      for (int64_t i = 0; inner && i < size; ++i) sums[i] += partial[i];
      for (int64_t i = 0; !inner && i < channels * step; ++i) {
        for (int64_t r = 0; r < columns.count; ++r) {
          double sum = 0;
          for (int64_t q = columns.cuts.data[r]; q < columns.cuts.data[r + 1]; ++q) {
            sum += partial[i * width + q];
          }
          sums[r * channels + i / step] += sum;
        }
      }
      std::fill_n(partial, size, 0.0f);
      added = 0;
    };
    for (int64_t image = first / rows.length; image * rows.length < last; ++image) {
      const int64_t begin = std::max(rows.cuts.data[s], first - image * rows.length);
      const int64_t end = std::min(rows.cuts.data[s + 1], last - image * rows.length);
      for (int64_t p = begin; p < end; p += step) {
        const int64_t row = (image * rows.length + p) * width;
        const int64_t count = std::min(step, end - p) * width;
        const typename T::Int* from = y + map.offset(row);
        float* squares = scores + row;
        if (inner) {
          add_last<T, SUMS>(from, channels, columns.cuts.data, columns.count, squares, partial);
        } else {
          add_first<T, SUMS>(from, map, count, step * width, squares, partial);
        }
        for (int64_t i = 0; i < count; ++i) squares[i] = std::sqrt(squares[i]);
        if (SUMS && (added += inner ? width : 1) >= 32) flush();
      }
    }
    if (SUMS && added) flush();
  }
}

// What is known of a block of scores.
struct Block {
  double sum;      // of those that are not sure
  int64_t sure;    // positions that are kept for certain
  double largest;  // of those that are not sure
};

}  // namespace

// Norms of dY (images, channels, rows, columns) over its channels into `scores`, and, unless `sums`
// is null, its sums over the positions that see the image through each tap: (channels, taps).
FST_EXPORT int fst_measure_positions(const void* grad_output, int64_t kind, int64_t channels,
                                     int64_t last, const int64_t* geometry, float* scores,
                                     float* sums, int64_t threads) {
  const Geometry g(geometry);
  if (!g.holds(channels, 1, 1)) return BAD_NUMBERS;
  const Segments rows(axis_of_rows(g, false)), columns(axis_of_columns(g, false));
  const int64_t of_rows = columns.count * channels, all = sums ? rows.count * of_rows : 0;
  const Map map(channels, g.positions(), last);
  const int64_t side_by_side = (SIDE_BY_SIDE / g.columns + 1) * g.columns;
  const int64_t size = map.channel_stride == 1 ? of_rows : side_by_side * channels;
  threads = std::min(threads, ceil_div(g.images * g.positions() * channels, 16384));
  Memory<float> partial(threads * size);
  Memory<double> totals(threads * all);
  if (!rows.usable() || !columns.usable() || !partial.data || !totals.data) return NO_MEMORY;
  std::fill_n(partial.data, threads * size, 0.0f);
  std::fill_n(totals.data, threads * all, 0.0);
  const Status status = with_format(kind, [&](auto format) {
    using T = decltype(format);
    const auto run = sums ? measure<T, true> : measure<T, false>;
    in_parallel(threads, [&](Team team) {
      run(static_cast<const typename T::Int*>(grad_output), map, g.images, rows, columns, team,
          scores, partial.data + team.rank * size, size, totals.data + team.rank * all);
    });
    return DONE;
  });
  if (!sums) return status;
  for (int64_t i = 0; i < all; ++i) {
    for (int64_t rank = 1; rank < threads; ++rank) totals.data[i] += totals.data[rank * all + i];
  }
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t t = 0; t < g.taps(); ++t) {
      double sum = 0;
      for (int64_t s = 0; s < rows.count; ++s) {
        for (int64_t r = 0; r < columns.count && rows.sees(t / g.kernel_w, s); ++r) {
          if (columns.sees(t % g.kernel_w, r)) sum += totals.data[s * of_rows + r * channels + c];
        }
      }
      sums[c * g.taps() + t] = static_cast<float>(sum);
    }
  }
  return status;
}
FST_ARGUMENTS(fst_measure_positions)

// Exactly n of `count` positions, ascending, and the reciprocals of their probabilities, by a
// systematic draw with probabilities proportional to the scores (0 < n < count; start in [0, 1)).
FST_EXPORT int fst_draw_positions(const float* scores, int64_t count, int64_t n,
                                  const double* start, int32_t* index, float* weight,
                                  int64_t threads) {
  if (!within(1, INT32_MAX, {n, count}) || n >= count || !(*start >= 0 && *start < 1)) {
    return BAD_NUMBERS;
  }
  const int64_t blocks = ceil_div(count, BLOCK);
  Memory<double> values(count);  // a score that is not sure, or -1
  Memory<Block> now(blocks), then(blocks);
  if (!values.data || !now.data || !then.data) return NO_MEMORY;
  double* s = values.data;
  in_parallel(std::min(threads, ceil_div(count, 4 * BLOCK)), [&](Team team) {
    const int64_t first = team.first(blocks), last = team.last(blocks);
    Block *old = then.data, *fresh = now.data;
    const auto total = [&](const Block* of, int64_t end) {
      Block sum{0, 0, 0};
      for (int64_t b = 0; b < end; ++b) sum.sum += of[b].sum, sum.sure += of[b].sure;
      return sum;
    };
    // What `change` makes of a block's values: -1 is sure; and the sums of the others.
    const auto sweep = [&](int64_t b, const auto& change) {
      const int64_t length = std::min(BLOCK, count - b * BLOCK);
      double *value = s + b * BLOCK, sum = 0, largest = 0;
      int64_t sure = 0;
#pragma omp simd reduction(+ : sum, sure) reduction(max : largest)
      for (int64_t i = 0; i < length; ++i) {
        const double changed = change(value[i]);
        value[i] = changed;
        sure += changed < 0;
        sum += changed < 0 ? 0 : changed;
        largest = changed > largest ? changed : largest;
      }
      return Block{sum, sure, largest};
    };
    for (int64_t b = first; b < last; ++b) {
      for (int64_t i = b * BLOCK; i < std::min(count, (b + 1) * BLOCK); ++i) s[i] = scores[i];
      fresh[b] = sweep(b, [](double x) { return x < INFINITY ? x : -1.0; });
    }
    team.wait();
    Block all = total(fresh, blocks);
    if (all.sure >= n) {
      for (int64_t i = 0, j = 0; team.rank == 0 && j < n; ++i) {
        if (s[i] < 0) index[j] = static_cast<int32_t>(i), weight[j++] = 1;
      }
      return;
    }
    const double mean = all.sum / static_cast<double>(count - all.sure);
    const double some = mean > 0 ? 1 : 0, more = mean > 0 ? mean * 0x1p-20 : 1;
    std::swap(old, fresh);
    for (int64_t b = first; b < last; ++b) {
      fresh[b] = sweep(b, [=](double x) { return x < 0 ? -1.0 : x * some + more; });
    }
    team.wait();
    for (int64_t sure = -1; true;) {
      all = total(fresh, blocks);
      if (all.sure == sure) break;
      sure = all.sure;
      std::swap(old, fresh);
      const double left = static_cast<double>(n - sure), rest = all.sum;
      for (int64_t b = first; b < last; ++b) {
        fresh[b] = old[b];
        if (old[b].largest * left < rest) continue;
        fresh[b] = sweep(b, [=](double x) { return x * left >= rest ? -1.0 : x; });
      }
      team.wait();
    }
    int64_t ending = blocks;  // behind the last block with a position that is not sure
    while (fresh[ending - 1].sum == 0) --ending;
    const int64_t goal = (n - all.sure) * ONE, begin = static_cast<int64_t>(*start * ONE);
    const double scale = static_cast<double>(goal) / all.sum;
    const auto reached = [&](int64_t b, double sum) {
      return b >= ending ? goal : std::min(goal, static_cast<int64_t>(sum * scale));
    };
    Block before = total(fresh, first);
    for (int64_t b = first; b < last; ++b) {
      const int64_t end = std::min(count, (b + 1) * BLOCK);
      const int64_t upper = reached(b + 1, before.sum + fresh[b].sum);
      int64_t done = reached(b, before.sum), unsure = end - b * BLOCK - fresh[b].sure;
      const int64_t drawn = (done + before.sure * ONE - begin + ONE - 1) >> 31;
      double sum = before.sum;
      int64_t sure = before.sure, shares[BLOCK + 2], k = 0;
      int32_t found[BLOCK + 2];
      for (int64_t i = b * BLOCK; i < end; ++i) {
        const bool is_sure = s[i] < 0;
        sure += is_sure, unsure -= !is_sure;
        sum += is_sure ? 0 : s[i];
        const int64_t next = unsure ? std::min(upper, static_cast<int64_t>(sum * scale)) : upper;
        const int64_t past = ((next + sure * ONE - begin + ONE - 1) >> 31) - drawn;
        // Nearly always no pointer or one: the place behind the last one may be written in vain.
        do {
          found[k] = static_cast<int32_t>(i);
          shares[k] = is_sure ? ONE : next - done;
          k += k < past;
        } while (k < past);
        done = next;
      }
      for (int64_t j = 0; j < k; ++j) {
        index[drawn + j] = found[j];
        weight[drawn + j] =
            static_cast<float>(static_cast<double>(ONE) / static_cast<double>(shares[j]));
      }
      before.sum += fresh[b].sum, before.sure += fresh[b].sure;
    }
  });
  return DONE;
}
FST_ARGUMENTS(fst_draw_positions)

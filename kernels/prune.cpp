// N:M pruning on a CPU: weights along both of their axes, and grad_output along its channels.
//
// Each value is read from memory once. Results do not depend on the number of threads.

#include "prune.h"

namespace {

using namespace fst;

constexpr int64_t GRAIN = 32768;  // elements that are worth a thread
constexpr int64_t CACHED = 4096;  // elements pruned at a time, before their norms are taken
constexpr int64_t CHANNELS = 64;  // of a thread's part, at least, where channels are contiguous

// Adds |x| and |y| of some positions to the sums of each channel.
template <class T>
void add_norms(const Part<T, T>& whole, int64_t first, int64_t count, double* before, double* after,
               float* sums) {
  if (whole.channel_inner()) {
    std::fill_n(sums, 2 * whole.channels, 0.0f);
    float* __restrict of_x = sums;
    float* __restrict of_y = of_x + whole.channels;
    for (int64_t i = 0; i < count; ++i) {
      const auto part = whole.at(0, first + i);
      for (int64_t c = 0; c < whole.channels; ++c) of_x[c] += std::abs(T::wide(part.x[c]));
      for (int64_t c = 0; c < whole.channels; ++c) of_y[c] += std::abs(T::wide(part.y[c]));
    }
    for (int64_t c = 0; c < whole.channels; ++c) before[c] += of_x[c], after[c] += of_y[c];
    return;
  }
  for (int64_t c = 0; c < whole.channels; ++c) {
    const auto part = whole.at(c, first);
    float of_x = 0, of_y = 0;
#pragma omp simd reduction(+ : of_x, of_y)
    for (int64_t i = 0; i < count; ++i) {
      of_x += std::abs(T::wide(part.x[i]));
      of_y += std::abs(T::wide(part.y[i]));
    }
    before[c] += of_x;
    after[c] += of_y;
  }
}

template <class T>
void scale(const Part<T, T>& whole, const double* before, const double* after, float* factors) {
  const bool inner = whole.channel_inner();
  for (int64_t c = 0; c < whole.channels; ++c) {
    factors[c] = ratio(static_cast<float>(before[c]), static_cast<float>(after[c]));
  }
  for (int64_t i = 0; i < (inner ? whole.positions : whole.channels); ++i) {
    const auto part = inner ? whole.at(0, i) : whole.at(i, 0);
    typename T::Int* __restrict y = part.y;
    const int64_t length = inner ? whole.channels : whole.positions;
    const float* __restrict by_channel = factors;
    const float one = factors[inner ? 0 : i];
    for (int64_t k = 0; k < length; ++k) {
      y[k] = T::narrow(T::wide(y[k]) * (inner ? by_channel[k] : one));
    }
  }
}

template <class T>
Status prune_samples(const void* x, void* y, int64_t samples, int64_t channels, int64_t positions,
                     const int64_t* from, const int64_t* to, Rule rule, int64_t groups,
                     bool by_sample, int64_t threads) {
  using Int = typename T::Int;
  Part<T, T> all{
      static_cast<const Int*>(x), static_cast<Int*>(y), nullptr,       channels, positions,
      channels / groups,          {from[1], from[2]},   {to[1], to[2]}};
  // A thread takes a sample's channels, or as few of them as keep all threads busy.
  const int64_t span = rule.span();
  int64_t width = channels;
  if (all.per % span == 0) {
    const int64_t least = all.channel_inner() ? ceil_div(CHANNELS, span) * span : span;
    const int64_t slabs = all.channel_inner() ? 4 * threads / samples : channels;
    width = std::max(least, channels / std::max<int64_t>(slabs, 1) / span * span);
    all.per = span;
  }
  const int64_t slabs = ceil_div(channels, width), tasks = samples * slabs;
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, width * positions));
  threads = std::min(threads, ceil_div(tasks, grain));
  const int64_t own = by_sample ? width : 0;
  Memory<double> norms(threads * 2 * own);
  Memory<float> sums(threads * 2 * own);
  if (!norms.data || !sums.data) return NO_MEMORY;
  in_parallel(threads, [&](Team team) {
    double *before = norms.data + team.rank * 2 * own, *after = before + own;
    float* sum = sums.data + team.rank * 2 * own;
    for (int64_t i = team.first(tasks); i < team.last(tasks); ++i) {
      const int64_t sample = i / slabs, channel = i % slabs * width;
      auto part = all.at(channel, 0);
      part.x += sample * from[0];
      part.y += sample * to[0];
      part.channels = std::min(width, channels - channel);
      Rule own_rule = rule;
      own_rule.place = sample * positions;
      own_rule.run = channel / span;
      std::fill_n(before, 2 * own, 0.0);
      // The same for all numbers of threads, because sums of a block are rounded.
      const int64_t rows = std::clamp<int64_t>(CACHED / channels, 1, LANES);
      const int64_t step = part.channel_inner() ? rows : CACHED / 4;
      for (int64_t p = 0; p < positions; p += step) {
        const int64_t count = std::min(step, positions - p);
        prune(part, p, count, own_rule);
        if (by_sample) add_norms(part, p, count, before, after, sum);
      }
      if (by_sample) scale(part, before, after, sum);
    }
  });
  return DONE;
}

template <class T, class R>
void prune_rows(const void* weight, int64_t rows, int64_t channels, int64_t taps, bool last,
                int64_t groups, Rule along, Rule across, void* output, void* kept, void* grad_input,
                int64_t threads) {
  const int64_t size = channels * taps;
  const int64_t m = across.n ? across.m : std::max<int64_t>(1, CACHED / size);
  const bool inner = last && taps > 1;
  const Strides steps = inner ? Strides{1, channels} : Strides{taps, 1};
  const int64_t blocks = ceil_div(rows, m), tasks = groups * blocks;
  const auto* x = static_cast<const typename T::Int*>(weight);
  auto* y = static_cast<typename R::Int*>(output);
  auto* z = static_cast<typename R::Int*>(grad_input);
  auto* mask = static_cast<uint8_t*>(kept);
  // A thread reads the rows of a group, and they are still in its cache for the second direction.
  const int64_t grain = std::max<int64_t>(1, GRAIN / (m * size));
  in_parallel(std::min(threads, ceil_div(tasks, grain)), [&](Team team) {
    for (int64_t i = team.first(tasks); i < team.last(tasks); ++i) {
      const int64_t inside = i % blocks * m, row = i / blocks * rows + inside;
      const int64_t count = std::min(m, rows - inside);
      if (along.n) {
        const int64_t at = row * size, deep = inner ? channels : count * channels;
        const Part<T, R> part{x + at,   y + at, mask + at, deep, count * size / deep,
                              channels, steps,  steps};
        prune(part, 0, part.positions, along);
      }
      if (across.n) {
        const Strides down{size, 1};
        const Part<T, R> part{x + row * size, z + row * size, nullptr, count,
                              size,           count,          down,    down};
        prune(part, 0, size, across);
      }
    }
  });
}

bool is_pattern(int64_t n, int64_t m) { return 0 <= n && n <= m && m <= MOST_M; }

// target[i] += factor * weight[i] where the mask is zero. A choice between two sums would be a
// branch, which a processor guesses wrongly half of the time.
void add_where_zero(const float* __restrict weight, const uint8_t* __restrict mask,
                    float* __restrict target, int64_t count, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float pull = factor * weight[i];
    target[i] += mask[i] ? 0.0f : pull;
  }
}

}  // namespace

// Numbers of a call, as fst/ops/backends/prune_cpp.py orders them.
struct OfMaps {
  int64_t kind, samples, channels, positions;
  int64_t from[3], to[3];  // distances of samples, channels and positions, in elements
  int64_t n, m, by_group, by_sample, groups;
};

struct OfWeight {
  int64_t kind, result, rows, channels, taps, last, groups;
  int64_t n_output, m_output, n_grad_input, m_grad_input;
};

// grad_output x (samples, channels, positions) into y. `seed` is null unless the choice is random.
FST_EXPORT int fst_prune_grad_output(const void* x, void* y, const OfMaps* of, const int64_t* seed,
                                     int64_t threads) {
  if (of->n < 1 || !is_pattern(of->n, of->m) || (seed && of->m > MOST_DRAWN_M) ||
      !within(1, INT64_MAX, {of->samples, of->channels, of->positions, of->groups}) ||
      of->channels % of->groups) {
    return BAD_NUMBERS;
  }
  Rule rule{static_cast<int>(of->n), static_cast<int>(of->m)};
  rule.by_group = of->by_group;
  rule.seed = seed;
  return with_format(of->kind, [&](auto format) {
    return prune_samples<decltype(format)>(x, y, of->samples, of->channels, of->positions, of->from,
                                           of->to, rule, of->groups, of->by_sample, threads);
  });
}
FST_ARGUMENTS(fst_prune_grad_output)

// weight (groups * rows, channels, taps) into S(W) with its mask and S(W^T), where n is not 0.
FST_EXPORT int fst_prune_weight(const void* weight, const OfWeight* of, void* output, void* mask,
                                void* grad_input, int64_t threads) {
  const auto [kind, result, rows, channels, taps, last, groups, n_output, m_output, n_grad_input,
              m_grad_input] = *of;
  if ((kind != result && kind != SINGLE) || !is_pattern(n_output, m_output) ||
      !is_pattern(n_grad_input, m_grad_input) ||
      !within(1, INT64_MAX, {rows, channels, taps, groups}) || (n_output && !(output && mask)) ||
      (n_grad_input && !grad_input)) {
    return BAD_NUMBERS;
  }
  const Rule along{static_cast<int>(n_output), static_cast<int>(m_output)};
  const Rule across{static_cast<int>(n_grad_input), static_cast<int>(m_grad_input)};
  const auto run = [&](auto from, auto to) {
    prune_rows<decltype(from), decltype(to)>(weight, of->rows, of->channels, of->taps, of->last,
                                             of->groups, along, across, output, mask, grad_input,
                                             threads);
    return DONE;
  };
  if (kind == result) return with_format(kind, [&](auto format) { return run(format, format); });
  return with_format(result, [&](auto format) { return run(Single{}, format); });
}
FST_ARGUMENTS(fst_prune_weight)

// target += factor * (W - S(W)), of `count` floats in one order; the mask says what S(W) has.
FST_EXPORT int fst_add_residual(const float* weight, const uint8_t* mask, float* target,
                                int64_t count, const double* factor, int64_t threads) {
  if (count < 1) return BAD_NUMBERS;
  const float by = static_cast<float>(*factor);
  in_parallel(std::min(threads, ceil_div(count, GRAIN)), [&](Team team) {
    const int64_t first = team.first(count);
    add_where_zero(weight + first, mask + first, target + first, team.last(count) - first, by);
  });
  return DONE;
}
FST_ARGUMENTS(fst_add_residual)

// Which sources this library was compiled from.
FST_EXPORT uint32_t fst_sources() { return FST_SOURCES; }

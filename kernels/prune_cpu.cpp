// N:M pruning on a CPU: weights along both of their axes, and grad_output along its channels.
//
// Each value is read from memory once. Results do not depend on the number of threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "prune_cpu.h"

namespace {

using namespace fst;

constexpr int64_t GRAIN = 32768;  // elements that are worth a thread
constexpr int64_t CACHED = 4096;  // elements pruned before their norms are taken
constexpr int64_t CHANNELS = 64;  // of a thread's part, at least, where channels are contiguous

// Adds |x| and |y| of some positions to the sums of each channel.
template <class T>
void add_norms(const Part<T, T>& whole, int64_t first, int64_t count, double* before,
               double* after, std::vector<float>& sums) {
  if (whole.channel_inner()) {
    sums.assign(2 * whole.channels, 0);
    float* __restrict of_x = sums.data();
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
void scale(const Part<T, T>& whole, const double* before, const double* after) {
  const bool inner = whole.channel_inner();
  std::vector<float> factors(whole.channels);
  for (int64_t c = 0; c < whole.channels; ++c) {
    factors[c] = ratio(static_cast<float>(before[c]), static_cast<float>(after[c]));
  }
  for (int64_t i = 0; i < (inner ? whole.positions : whole.channels); ++i) {
    const auto part = inner ? whole.at(0, i) : whole.at(i, 0);
    typename T::Int* __restrict y = part.y;
    const int64_t length = inner ? whole.channels : whole.positions;
    const float* __restrict by_channel = factors.data();
    const float one = factors[inner ? 0 : i];
    for (int64_t k = 0; k < length; ++k) {
      y[k] = T::narrow(T::wide(y[k]) * (inner ? by_channel[k] : one));
    }
  }
}

template <class T>
void prune_samples(const at::Tensor& x, const at::Tensor& y, Rule rule, int64_t groups,
                   bool by_sample) {
  using Int = typename T::Int;
  const int64_t samples = x.size(0), channels = x.size(1), positions = x.size(2) * x.size(3);
  const bool column = x.size(3) == 1;
  const Strides from{x.stride(1), x.stride(column ? 2 : 3)};
  const Strides to{y.stride(1), y.stride(column ? 2 : 3)};
  Part<T, T> all{static_cast<const Int*>(x.const_data_ptr()), static_cast<Int*>(y.data_ptr()),
                 nullptr, channels, positions, channels / groups, from, to};
  // A thread takes a sample's channels, or as few of them as keep all threads busy.
  const int64_t span = rule.span();
  int64_t width = channels;
  if (all.per % span == 0) {
    const int64_t least = all.channel_inner() ? (CHANNELS + span - 1) / span * span : span;
    const int64_t parts = all.channel_inner() ? 4 * at::get_num_threads() / samples : channels;
    width = std::max(least, channels / std::max<int64_t>(parts, 1) / span * span);
    all.per = span;
  }
  const int64_t slabs = (channels + width - 1) / width;
  const int64_t size = std::max<int64_t>(1, width * positions);
  const int64_t grain = std::max<int64_t>(1, GRAIN / size);
  at::parallel_for(0, samples * slabs, grain, [&](int64_t i, int64_t end) {
    std::vector<double> before, after;
    std::vector<float> sums;
    for (; i < end; ++i) {
      const int64_t sample = i / slabs, channel = i % slabs * width;
      auto part = all.at(channel, 0);
      part.x += sample * x.stride(0);
      part.y += sample * y.stride(0);
      part.channels = std::min(width, channels - channel);
      Rule own = rule;
      own.place = sample * positions;
      own.run = channel / span;
      before.assign(part.channels, 0);
      after.assign(part.channels, 0);
      // The same for all numbers of threads, because sums of a block are rounded.
      const int64_t rows = std::clamp<int64_t>(CACHED / channels, 1, LANES);
      const int64_t step = part.channel_inner() ? rows : CACHED / 4;
      for (int64_t p = 0; p < positions; p += step) {
        const int64_t count = std::min(step, positions - p);
        prune(part, p, count, own);
        if (by_sample) add_norms(part, p, count, before.data(), after.data(), sums);
      }
      if (by_sample) scale(part, before.data(), after.data());
    }
  });
}

// Whether channels or positions are contiguous, and rows of positions follow each other.
bool fits(const at::Tensor& x) {
  const bool rows = x.size(2) == 1 || x.size(3) == 1 || x.stride(2) == x.size(3) * x.stride(3);
  const bool column = x.size(3) == 1;
  return rows && (x.stride(1) == 1 || x.stride(column ? 2 : 3) == 1);
}

at::Tensor prune_grad_output(const at::Tensor& x, int64_t n, int64_t m, std::string_view rule,
                             std::string_view rescale, int64_t groups,
                             const std::optional<at::Tensor>& seed) {
  const auto y = at::empty_like(x);
  TORCH_CHECK_VALUE(x.dim() == 4 && fits(x) && fits(y), "grad_output ", x.sizes(), " with strides ",
                    x.strides(), " must be (N, C, P, Q), contiguous or channels_last.");
  TORCH_CHECK_VALUE(1 <= n && n <= m && m <= MOST_M, "n=", n, ", m=", m, ": 1 <= n <= m <= 8.");
  TORCH_CHECK_VALUE(groups >= 1 && x.size(1) % groups == 0, "groups=", groups, " must divide ",
                    x.size(1), " channels.");
  Rule chosen{static_cast<int>(n), static_cast<int>(m)};
  if (rule == "random") {
    TORCH_CHECK_VALUE(seed && seed->scalar_type() == at::kLong && seed->numel() == 1,
                      "rule='random' needs seed=, one int64.");
    chosen.seed = seed->const_data_ptr<int64_t>();
  }
  const bool rescaled = rule == "magnitude_rescaled";
  chosen.by_group = rescaled && rescale == "group";
  const bool by_sample = rescaled && rescale == "sample_channel";
  if (x.numel() == 0) return y;
  switch (x.scalar_type()) {
    case at::kFloat: prune_samples<Single>(x, y, chosen, groups, by_sample); break;
    case at::kBFloat16: prune_samples<Brain>(x, y, chosen, groups, by_sample); break;
    case at::kHalf: prune_samples<Half>(x, y, chosen, groups, by_sample); break;
    default: TORCH_CHECK_TYPE(false, "grad_output has dtype ", x.scalar_type());
  }
  return y;
}

template <class T, class R>
void prune_rows(const at::Tensor& w, int64_t groups, Rule along, Rule across, const at::Tensor& y,
                const at::Tensor& mask, const at::Tensor& z) {
  using In = typename T::Int;
  using Out = typename R::Int;
  const int64_t rows = w.size(0) / groups, channels = w.size(1), taps = w.size(2) * w.size(3);
  const int64_t size = channels * taps, m = std::max(across.m, 1);
  const bool last = w.stride(1) == 1 && taps > 1;
  const Strides steps = last ? Strides{1, channels} : Strides{taps, 1};
  const int64_t blocks = (rows + m - 1) / m;
  const auto* x = static_cast<const In*>(w.const_data_ptr());
  // A thread reads the rows of a group, and they are still in its cache for the second direction.
  const int64_t grain = std::max<int64_t>(1, GRAIN / (m * size));
  at::parallel_for(0, groups * blocks, grain, [&](int64_t i, int64_t end) {
    for (; i < end; ++i) {
      const int64_t inside = i % blocks * m, row = i / blocks * rows + inside;
      const int64_t count = std::min(m, rows - inside);
      for (int64_t k = row; along.n && k < row + count; ++k) {
        const Part<T, R> part{x + k * size, static_cast<Out*>(y.data_ptr()) + k * size,
                              static_cast<uint8_t*>(mask.data_ptr()) + k * size,
                              channels, taps, channels, steps, steps};
        prune(part, 0, taps, along);
      }
      if (across.n) {
        const Strides down{size, 1};
        const Part<T, R> part{x + row * size, static_cast<Out*>(z.data_ptr()) + row * size, nullptr,
                              count, size, count, down, down};
        prune(part, 0, size, across);
      }
    }
  });
}

std::vector<at::Tensor> prune_weight(const at::Tensor& w, int64_t groups, int64_t n_output,
                                     int64_t m_output, int64_t n_grad_input, int64_t m_grad_input,
                                     at::ScalarType dtype) {
  const auto last = at::MemoryFormat::ChannelsLast;
  const bool dense = w.dim() == 4 && (w.is_contiguous() || w.is_contiguous(last));
  TORCH_CHECK_VALUE(dense, "weight ", w.sizes(), " with strides ", w.strides(),
                    " must be (Cout, Cin/groups, kh, kw), contiguous or channels_last.");
  TORCH_CHECK_VALUE(groups >= 1 && w.size(0) % groups == 0, "groups=", groups, " must divide ",
                    w.size(0), " channels.");
  for (const auto& [n, m] : {std::pair{n_output, m_output}, {n_grad_input, m_grad_input}}) {
    TORCH_CHECK_VALUE(0 <= n && n <= m && m <= MOST_M, "n=", n, ", m=", m, ": 0 <= n <= m <= 8.");
  }
  const Rule along{static_cast<int>(n_output), static_cast<int>(m_output)};
  const Rule across{static_cast<int>(n_grad_input), static_cast<int>(m_grad_input)};
  at::Tensor y, mask, z;
  std::vector<at::Tensor> results;
  if (along.n) results.push_back(y = at::empty_like(w, dtype));
  if (across.n) results.push_back(z = at::empty_like(w, dtype));
  if (along.n) results.push_back(mask = at::empty_like(w, at::kBool));
  const auto run = [&](auto from, auto to) {
    prune_rows<decltype(from), decltype(to)>(w, groups, along, across, y, mask, z);
  };
  const auto kind = w.scalar_type();
  if (w.numel() == 0) return results;
  if (kind == at::kFloat && dtype == at::kFloat) run(Single{}, Single{});
  else if (kind == at::kFloat && dtype == at::kBFloat16) run(Single{}, Brain{});
  else if (kind == at::kFloat && dtype == at::kHalf) run(Single{}, Half{});
  else if (kind == at::kBFloat16 && dtype == at::kBFloat16) run(Brain{}, Brain{});
  else if (kind == at::kHalf && dtype == at::kHalf) run(Half{}, Half{});
  else TORCH_CHECK_TYPE(false, "weight has dtype ", kind, ", the result ", dtype);
  return results;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fst, library) {
  library.def(
      "prune_grad_output_cpp(Tensor grad_output, int n, int m, str rule, str rescale, int groups, "
      "Tensor? seed) -> Tensor");
  library.def(
      "prune_weight_cpp(Tensor weight, int groups, int n_output, int m_output, int n_grad_input, "
      "int m_grad_input, ScalarType dtype) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(fst, CPU, library) {
  library.impl("prune_grad_output_cpp", prune_grad_output);
  library.impl("prune_weight_cpp", prune_weight);
}

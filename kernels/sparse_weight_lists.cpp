// Lists of the numbers of a weight that are not zero (sparse_weight.h).
//
// Weights of a run are laid side by side as floats, with the offsets of such a run beside them, and
// each is written where the last non-zero ended: no branches, and no counting before. Each thread
// has a range of results, whose runs begin where they would if nothing before were zero.

#include "sparse_weight.h"

namespace {

using namespace fst;

// Tap and offset of the weights of a phase's runs, in order.
struct Phase {
  int64_t taps = 0;
  int64_t tap[MOST_TAPS * MOST_TAPS];
};

// Appends what is not zero and returns how much it is. Up to `room` numbers of `to` are written,
// `count` or more. A lane of `odd` becomes NaN if a number is infinite or NaN.
template <class T>
int64_t append_nonzeros(const typename T::Int* values, const uint16_t* offsets, int64_t count,
                        Entries to, int64_t room, vec& odd) {
  int64_t found = 0, i = 0;
  const auto append = [&](int64_t from, int64_t done) {  // V numbers, but for the first `done`
    const vec x = load<T>(values + from);
    odd += x * 0.0f;
    const uint32_t kept = nonzeros(x) >> done << done;
    const shorts all = *reinterpret_cast<const shorts*>(offsets + from);
    found += append_kept(x, __builtin_convertvector(all, ints), kept, to, found);
  };
  for (; i + V <= count; i += V) append(i, 0);
  if (i < count && count >= V && found + V <= room) {
    append(count - V, i - (count - V));
    return found;
  }
  for (; i < count; ++i) {
    to.values[found] = T::wide(values[i]);
    to.offsets[found] = offsets[i];
    odd[0] += T::wide(values[i]) * 0.0f;
    found += (values[i] & T::MAGNITUDE) != 0;
  }
  return found;
}

template <class T>
struct Lists {
  using Int = typename T::Int;
  const Int* weight;
  Plan p;
  int64_t result_stride, channel_stride, tap_stride, group_stride;  // steps in the weight

  Lists(const Int* weight, bool last, const Plan& plan) : weight(weight), p(plan) {
    const int64_t taps = p.taps(), inner = p.backward ? p.results : p.sources;
    const int64_t outer = inner * taps, inside = last ? 1 : taps;
    result_stride = p.backward ? inside : outer;
    channel_stride = p.backward ? outer : inside;
    tap_stride = last ? inner : 1;
    group_stride = outer * (p.backward ? p.sources : p.results);
  }

  bool by_channel() const { return tap_stride == 1 && p.taps() > 1; }

  // Whether the weights of a run lie side by side.
  bool is_whole(const Phase& phase) const {
    return by_channel() ? channel_stride == p.taps() && phase.taps == p.taps()
                        : channel_stride == 1 && phase.taps == 1;
  }

  // Results whose weights lie side by side are read V at a time.
  int64_t together() const { return result_stride == 1 ? V : 1; }

  // V weights side by side, of which `count` are needed.
  vec load_row(const Int* from, int64_t count) const {
    return from + V <= weight + p.weights() ? load<T>(from) : load_some<T>(from, count);
  }

  // Weights of `count` runs as to[run][place]. Whole vectors are written.
  void gather(const Phase& phase, const Int* from, int64_t channels, int64_t count, int64_t length,
              float* to) const {
    const bool squares = channel_stride != 1 && result_stride == 1 && count == V && !by_channel();
    for (int64_t t = 0; squares && t < phase.taps; ++t) {
      const Int* place = from + phase.tap[t] * tap_stride;
      for (int64_t c = 0; c < channels; c += V) {
        vec square[V] = {};
        for (int64_t i = 0; i < std::min<int64_t>(V, channels - c); ++i) {
          square[i] = load<T>(place + (c + i) * channel_stride);
        }
        transpose(square);
        for (int i = 0; i < V; ++i) {
          *reinterpret_cast<vec*>(to + i * length + t * channels + c) = square[i];
        }
      }
    }
    for (int64_t i = 0; !squares && i < count; ++i, from += result_stride, to += length) {
      for (int64_t t = 0; t < phase.taps; ++t) {
        const Int* x = from + phase.tap[t] * tap_stride;
        float* y = to + (by_channel() ? t : t * channels);
        const int64_t step = by_channel() ? phase.taps : 1;
        if (channel_stride == 1 && step == 1) {
          for (int64_t c = 0; c < channels; c += V) {
            *reinterpret_cast<vec*>(y + c) = load_row(x + c, channels - c);
            __builtin_prefetch(x + c + result_stride);
          }
        } else {
          for (int64_t c = 0; c < channels; ++c) y[c * step] = T::wide(x[c * channel_stride]);
        }
      }
    }
  }

  // Reads weights of some results in the order of memory, so that the processor fetches them ahead.
  void read_ahead(const Phase& phase, const Int* from, int64_t channels, int64_t results) const {
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t t = 0; t < phase.taps; ++t) {
        const volatile Int* row = from + c * channel_stride + phase.tap[t] * tap_stride;
        for (int64_t k = 0; k < results; k += LINE / sizeof(Int)) static_cast<void>(row[k]);
      }
    }
  }

  void find_phases(Phase* phases) const {
    const int64_t across = p.columns.phases();
    for (int64_t f = 0; f < p.phases(); ++f) {
      for (int64_t i = 0; i < p.taps(); ++i) {
        const int64_t r = i / p.columns.taps, k = i % p.columns.taps;
        // Odd rows from right to left: each tap's window overlaps the one before as much as can be.
        const int64_t s = r % 2 && !by_channel() ? p.columns.taps - 1 - k : k;
        const int64_t tap = r * p.columns.taps + s;
        if (p.rows.phase(r) == f / across && p.columns.phase(s) == f % across) {
          phases[f].tap[phases[f].taps++] = tap;
        }
      }
    }
  }

  void find_offsets(const Phase& phase, int64_t channels, uint16_t* offsets) const {
    const int64_t width = p.columns.taps;
    for (int64_t t = 0; t < phase.taps; ++t) {
      const int64_t tap = phase.tap[t];
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t at = by_channel() ? c * phase.taps + t : t * channels + c;
        offsets[at] = static_cast<uint16_t>(p.offset(c, tap / width, tap % width));
      }
    }
  }

  Status run(int64_t threads, int64_t* lists) const {
    describe(p, lists);
    Run* runs = reinterpret_cast<Run*>(lists + HEAD);
    const Entries entries = entries_of(p, runs);
    const int64_t length = p.block * p.taps(), step = together();
    const int64_t pitch = length + V;  // of gathered rows
    const int64_t units = p.blocks * p.phases(), across = ceil_div(p.results, step);
    Memory<Phase> phases(p.phases());
    Memory<uint16_t> offsets(2 * p.phases() * length);  // of full blocks, of the last block
    Memory<float> rows(threads * V * pitch);
    Memory<int64_t> ends(threads * 2 * units);
    if (!phases.data || !offsets.data || !rows.data || !ends.data) return NO_MEMORY;
    std::fill_n(phases.data, p.phases(), Phase());
    find_phases(phases.data);
    for (int64_t f = 0; f < 2 * p.phases(); ++f) {
      const int64_t b = f < p.phases() ? 0 : p.blocks - 1;
      find_offsets(phases.data[f % p.phases()], p.channels_of(b), offsets.data + f * length);
    }
    bool finite = true;
    in_parallel(threads, [&](Team team) {
      vec odd{};
      float* values = rows.data + team.rank * V * pitch;
      const int64_t begin = team.first(across) * step;
      const int64_t end = std::min(team.last(across) * step, p.results);
      for (int64_t g = 0; g < p.groups; ++g) {
        // Where a full list would have this thread's runs of each block and phase, and their end.
        int64_t *at = ends.data + team.rank * 2 * units, *limit = at + units;
        int64_t place = g * p.sources * p.results * p.taps();
        for (int64_t u = 0; u < units; ++u) {
          const int64_t size = p.channels_of(u / p.phases()) * phases.data[u % p.phases()].taps;
          at[u] = place + begin * size;
          limit[u] = place + end * size;
          place += p.results * size;
        }
        const auto first = [&](int64_t u, int64_t result) {
          return weight + g * group_stride + result * result_stride +
                 u / p.phases() * p.block * channel_stride;
        };
        const auto list = [&](int64_t u, int64_t result) {
          const int64_t b = u / p.phases(), f = u % p.phases(), channels = p.channels_of(b);
          const Phase& phase = phases.data[f];
          const int64_t size = channels * phase.taps, count = std::min(step, p.results - result);
          const uint16_t* own = offsets.data + ((b == p.blocks - 1) * p.phases() + f) * length;
          const Int* from = first(u, result);
          if (!is_whole(phase)) gather(phase, from, channels, count, pitch, values);
          for (int64_t i = 0; i < count; ++i) {
            const Entries to{entries.values + at[u], entries.offsets + at[u]};
            const auto* row = reinterpret_cast<const int32_t*>(values + i * pitch);
            const int64_t room = limit[u] - at[u];
            const int64_t some =
                is_whole(phase)
                    ? append_nonzeros<T>(from + i * result_stride, own, size, to, room, odd)
                    : append_nonzeros<Single>(row, own, size, to, room, odd);
            runs[(g * units + u) * p.results + result + i] = {at[u], at[u] + some};
            at[u] += some;
            // Where the runs after these will be: few of the many streams are in the caches.
            const Entries next{to.values + count * some, to.offsets + count * some};
            for (int64_t k = 0; k <= some; k += LINE / sizeof(float)) {
              __builtin_prefetch(next.values + k, 1);
              if (k % (LINE / sizeof(uint16_t)) == 0) __builtin_prefetch(next.offsets + k, 1);
            }
          }
        };
        // In the order in which the weight lies in memory.
        if (p.backward) {
          for (int64_t u = 0; u < units; ++u) {
            if (V == 16 && step == V && p.taps() > 1) {  // each line of many rows is used once
              read_ahead(phases.data[u % p.phases()], first(u, begin),
                         p.channels_of(u / p.phases()), end - begin);
            }
            for (int64_t result = begin; result < end; result += step) list(u, result);
          }
        } else {
          for (int64_t result = begin; result < end; result += step) {
            for (int64_t u = 0; u < units; ++u) list(u, result);
          }
        }
      }
      for (int i = 0; i < V; ++i) {
        if (odd[i] != 0.0f) __atomic_store_n(&finite, false, __ATOMIC_RELAXED);
      }
    });
    return p.backward && !finite ? NOT_FINITE : DONE;
  }
};

}  // namespace

// Bytes of the lists of a product. numbers: with_plan's.
FST_EXPORT int fst_zeros_lists_size(const int64_t* numbers, int64_t* bytes, int64_t) {
  return with_plan(numbers, [&](const Plan& plan) {
    *bytes = list_bytes(plan);
    return DONE;
  });
}
FST_ARGUMENTS(fst_zeros_lists_size)

// weight (groups * out, in, kh, kw), channels_last or not, whose zeros are left out. lists: of as
// many bytes as fst_zeros_lists_size says. For dX it must be finite: products multiply it by zeros
// where its taps meet no output.
FST_EXPORT int fst_zeros_lists(const void* weight, int64_t kind, int64_t last,
                               const int64_t* numbers, void* lists, int64_t bytes,
                               int64_t threads) {
  return with_plan(numbers, [&](const Plan& plan) {
    if (bytes < list_bytes(plan)) return BAD_NUMBERS;
    return with_format(kind, [&](auto format) {
      using T = decltype(format);
      const Lists<T> task(static_cast<const typename T::Int*>(weight), last, plan);
      return task.run(threads, static_cast<int64_t*>(lists));
    });
  });
}
FST_ARGUMENTS(fst_zeros_lists)

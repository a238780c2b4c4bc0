// Lists of the numbers of a weight that are not zero (zeros_weight.h).
//
// Weights of a run are laid side by side as floats, with the offsets of such a run beside them, and
// each is written where the last non-zero ended: no branches, and no counting before. Each thread
// has a range of results, whose runs begin where they would if nothing before were zero.

#include "vectors.h"
#include "zeros_weight.h"

namespace {

using namespace fst;

#if defined(__AVX2__) && !defined(__AVX512F__)
struct Places {
  uint64_t of[256] = {};

  constexpr Places() {
    for (int kept = 0; kept < 256; ++kept) {
      int found = 0;
      for (uint64_t i = 0; i < 8; ++i) {
        if (kept >> i & 1) of[kept] |= i << 8 * found++;
      }
    }
  }
};
constexpr Places PLACES;
#endif

// Tap and offset of the weights of a phase's runs, in order.
struct Phase {
  int64_t taps = 0;
  int64_t tap[MOST_TAPS * MOST_TAPS];
};

// Appends what is not zero and returns how much it is. Zeros are told by their bits, whatever the
// processor does with subnormal numbers. Up to `room` numbers of `to` are written, `count` or more.
template <class T>
int64_t compress(const typename T::Int* values, const uint16_t* offsets, int64_t count, Entries to,
                 int64_t room) {
  int64_t found = 0, i = 0;
#if defined(__AVX512F__)
  const auto append = [&](int64_t from, int64_t done) {  // V numbers, but for the first `done`
    const __m512i bits = _mm512_castps_si512(reinterpret_cast<__m512>(load<T>(values + from)));
    const auto wanted = static_cast<__mmask16>(0xFFFF << done);
    const __mmask16 kept =
        _mm512_mask_test_epi32_mask(wanted, bits, _mm512_set1_epi32(Single::MAGNITUDE));
    const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(offsets + from));
    const __m512i own = _mm512_maskz_compress_epi32(kept, _mm512_maskz_cvtepu16_epi32(0xFFFF, all));
    _mm512_storeu_si512(to.values + found, _mm512_maskz_compress_epi32(kept, bits));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.offsets + found),
                        _mm512_maskz_cvtepi32_epi16(0xFFFF, own));
    found += __builtin_popcount(kept);
  };
#elif defined(__AVX2__)
  const auto append = [&](int64_t from, int64_t done) {  // V numbers, but for the first `done`
    const __m256i bits = _mm256_castps_si256(reinterpret_cast<__m256>(load<T>(values + from)));
    const __m256i zero = _mm256_cmpeq_epi32(_mm256_add_epi32(bits, bits), __m256i{});
    const int kept = ~_mm256_movemask_ps(_mm256_castsi256_ps(zero)) & 0xFF << done & 0xFF;
    // Places of the bits of `kept` in eight bytes, then in eight pairs of bytes.
    const __m128i places = _mm_cvtsi64_si128(static_cast<int64_t>(PLACES.of[kept]));
    const __m128i doubled = _mm_add_epi8(places, places);
    const __m128i pairs =
        _mm_add_epi8(_mm_unpacklo_epi8(doubled, doubled), _mm_set1_epi16(256));
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(offsets + from));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.values + found),
                        _mm256_permutevar8x32_epi32(bits, _mm256_cvtepu8_epi32(places)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to.offsets + found), _mm_shuffle_epi8(all, pairs));
    found += __builtin_popcount(kept);
  };
#endif
#if defined(__AVX2__)
  for (; i + V <= count; i += V) append(i, 0);
  if (i < count && count >= V && found + V <= room) {
    append(count - V, i - (count - V));
    return found;
  }
#endif
  for (; i < count; ++i) {
    to.values[found] = T::wide(values[i]);
    to.offsets[found] = offsets[i];
    found += (values[i] & T::MAGNITUDE) != 0;
  }
  return found;
}

template <class T>
struct Lists {
  using Int = typename T::Int;
  const Int* weight;
  Plan p;
  int64_t of_result, of_channel, of_tap, of_group;  // steps in the weight

  Lists(const Int* weight, bool last, const Plan& plan) : weight(weight), p(plan) {
    const int64_t taps = p.taps(), inner = p.backward ? p.results : p.sources;
    const int64_t outer = inner * taps, inside = last ? 1 : taps;
    of_result = p.backward ? inside : outer;
    of_channel = p.backward ? outer : inside;
    of_tap = last ? inner : 1;
    of_group = outer * (p.backward ? p.sources : p.results);
  }

  bool by_channel() const { return of_tap == 1 && p.taps() > 1; }

  // Whether the weights of a run lie side by side.
  bool is_whole(const Phase& phase) const {
    return by_channel() ? of_channel == p.taps() && phase.taps == p.taps()
                        : of_channel == 1 && phase.taps == 1;
  }

  // Results whose weights lie side by side are read V at a time.
  int64_t together() const { return of_result == 1 ? V : 1; }

  // Weights of `count` runs as to[run][place].
  void gather(const Phase& phase, const Int* from, int64_t channels, int64_t count, int64_t length,
              float* to) const {
    if (of_result == 1 && count == V) {
      for (int64_t t = 0; t < phase.taps; ++t) {
        const Int* place = from + phase.tap[t] * of_tap;
        int64_t c = 0;
        for (; channels >= V && c < channels && !by_channel(); c += V) {
          c = std::min(c, channels - V);  // the last square may overlap the one before
          vec square[V];
          for (int i = 0; i < V; ++i) square[i] = load<T>(place + (c + i) * of_channel);
          turn(square);
          for (int i = 0; i < V; ++i) {
            *reinterpret_cast<vec*>(to + i * length + t * channels + c) = square[i];
          }
        }
        for (; c < channels; ++c) {
          const int64_t at = by_channel() ? c * phase.taps + t : t * channels + c;
          for (int i = 0; i < V; ++i) to[i * length + at] = T::wide(place[c * of_channel + i]);
        }
      }
      return;
    }
    const bool whole = phase.taps == p.taps();
    for (int64_t i = 0; i < count; ++i, from += of_result, to += length) {
      for (int64_t c = 0; by_channel() && c < channels; ++c) {
        const Int* x = from + c * of_channel;
        float* y = to + c * phase.taps;
        for (int64_t t = 0; t < phase.taps && whole; ++t) y[t] = T::wide(x[t]);
        for (int64_t t = 0; t < phase.taps && !whole; ++t) y[t] = T::wide(x[phase.tap[t]]);
      }
      for (int64_t t = 0; t < phase.taps && !by_channel(); ++t) {
        const Int* x = from + phase.tap[t] * of_tap;
        float* y = to + t * channels;
        int64_t c = 0;
        for (; of_channel == 1 && channels >= V && c < channels; c += V) {
          c = std::min(c, channels - V);  // the last vector may overlap the one before
          *reinterpret_cast<vec*>(y + c) = load<T>(x + c);
        }
        for (; c < channels; ++c) y[c] = T::wide(x[c * of_channel]);
      }
    }
  }

  void find_phases(Phase* phases) const {
    const int64_t across = p.columns.phases();
    for (int64_t f = 0; f < p.phases(); ++f) {
      for (int64_t tap = 0; tap < p.taps(); ++tap) {
        const int64_t r = tap / p.columns.kernel, s = tap % p.columns.kernel;
        if (p.rows.sees(f / across, r) && p.columns.sees(f % across, s)) {
          phases[f].tap[phases[f].taps++] = tap;
        }
      }
    }
  }

  void find_offsets(int64_t f, const Phase& phase, int64_t channels, uint16_t* offsets) const {
    const int64_t across = p.columns.phases(), width = p.columns.kernel;
    for (int64_t t = 0; t < phase.taps; ++t) {
      const int64_t tap = phase.tap[t];
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t at = by_channel() ? c * phase.taps + t : t * channels + c;
        offsets[at] = static_cast<uint16_t>(
            p.offset(c, f / across, f % across, tap / width, tap % width));
      }
    }
  }

  Status run(int64_t threads, int64_t* lists) const {
    describe(p, lists);
    Run* runs = reinterpret_cast<Run*>(lists + HEAD);
    const Entries entries = entries_of(p, runs);
    const int64_t length = p.block * p.taps(), step = together();
    const int64_t units = p.blocks * p.phases(), across = parts(p.results, step);
    Memory<Phase> phases(p.phases());
    Memory<uint16_t> offsets(2 * p.phases() * length);  // of full blocks, of the last block
    Memory<float> rows(threads * V * length);
    Memory<int64_t> ends(threads * 2 * units);
    if (!phases.data || !offsets.data || !rows.data || !ends.data) return NO_MEMORY;
    std::fill_n(phases.data, p.phases(), Phase());
    find_phases(phases.data);
    for (int64_t f = 0; f < 2 * p.phases(); ++f) {
      const int64_t b = f < p.phases() ? 0 : p.blocks - 1;
      find_offsets(f % p.phases(), phases.data[f % p.phases()], p.channels_of(b),
                   offsets.data + f * length);
    }
    in_parallel(threads, [&](Team team) {
      float* values = rows.data + team.rank * V * length;
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
        const auto list = [&](int64_t u, int64_t result) {
          const int64_t b = u / p.phases(), f = u % p.phases(), channels = p.channels_of(b);
          const Phase& phase = phases.data[f];
          const int64_t size = channels * phase.taps, count = std::min(step, p.results - result);
          const uint16_t* own = offsets.data + ((b == p.blocks - 1) * p.phases() + f) * length;
          const Int* from =
              weight + g * of_group + result * of_result + b * p.block * of_channel;
          if (!is_whole(phase)) gather(phase, from, channels, count, length, values);
          for (int64_t i = 0; i < count; ++i) {
            const Entries to{entries.values + at[u], entries.offsets + at[u]};
            const auto* row = reinterpret_cast<const int32_t*>(values + i * length);
            const int64_t room = limit[u] - at[u];
            const int64_t some =
                is_whole(phase) ? compress<T>(from + i * of_result, own, size, to, room)
                                : compress<Single>(row, own, size, to, room);
            runs[(g * units + u) * p.results + result + i] = {at[u], at[u] + some};
            at[u] += some;
          }
        };
        // In the order in which the weight lies in memory.
        if (p.backward) {
          for (int64_t u = 0; u < units; ++u) {
            for (int64_t result = begin; result < end; result += step) list(u, result);
          }
        } else {
          for (int64_t result = begin; result < end; result += step) {
            for (int64_t u = 0; u < units; ++u) list(u, result);
          }
        }
      }
    });
    return DONE;
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

// weight (groups * out, in, kh, kw), channels_last or not, of which zeros are left out. lists: of so
// many bytes as fst_zeros_lists_size says.
FST_EXPORT int fst_zeros_lists(const void* weight, int64_t kind, int64_t last,
                               const int64_t* numbers, void* lists, int64_t bytes,
                               int64_t threads) {
  return with_plan(numbers, [&](const Plan& plan) {
    Status status = BAD_NUMBERS;
    if (bytes < list_bytes(plan)) return status;
    with_format(kind, [&](auto format) {
      using T = decltype(format);
      const Lists<T> task(static_cast<const typename T::Int*>(weight), last, plan);
      status = task.run(threads, static_cast<int64_t*>(lists));
    });
    return status;
  });
}
FST_ARGUMENTS(fst_zeros_lists)

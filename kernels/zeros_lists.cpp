// Lists of the numbers of a weight that are not zero (zeros_weight.h).
//
// Weights of a run are laid side by side as floats, with the offsets of such a run beside them, and
// each is written where the last non-zero ended: no branches, and no counting before. Each thread
// fills a range of runs, from where its first run would begin if nothing were zero.

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

constexpr int64_t AHEAD = 4;  // results from what is read to what is fetched

// Tap and offset of the weights of a phase's runs, in order.
struct Phase {
  int64_t taps = 0;
  int64_t tap[MOST_TAPS * MOST_TAPS];
};

// Appends what is not zero and returns how much it is. Zeros are told by their bits, whatever the
// processor does with subnormal numbers. Up to `count` numbers of `to` are written.
int64_t compress(const float* values, const uint16_t* offsets, int64_t count, Entries to) {
  int64_t found = 0, i = 0;
#if defined(__AVX512F__)
  for (; i + V <= count; i += V) {
    const __m512i bits = _mm512_loadu_si512(values + i);
    const __mmask16 kept = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(Single::MAGNITUDE));
    const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(offsets + i));
    const __m512i own = _mm512_maskz_compress_epi32(kept, _mm512_maskz_cvtepu16_epi32(0xFFFF, all));
    _mm512_storeu_si512(to.values + found, _mm512_maskz_compress_epi32(kept, bits));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.offsets + found),
                        _mm512_maskz_cvtepi32_epi16(0xFFFF, own));
    found += __builtin_popcount(kept);
  }
#elif defined(__AVX2__)
  for (; i + V <= count; i += V) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i));
    const __m256i zero = _mm256_cmpeq_epi32(_mm256_add_epi32(bits, bits), __m256i{});
    const int kept = ~_mm256_movemask_ps(_mm256_castsi256_ps(zero)) & 0xFF;
    // Places of the bits of `kept` in eight bytes, then in eight pairs of bytes.
    const __m128i places = _mm_cvtsi64_si128(static_cast<int64_t>(PLACES.of[kept]));
    const __m128i twice = _mm_unpacklo_epi8(_mm_add_epi8(places, places), _mm_add_epi8(places, places));
    const __m128i pairs = _mm_add_epi8(twice, _mm_set1_epi16(256));
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(offsets + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.values + found),
                        _mm256_permutevar8x32_epi32(bits, _mm256_cvtepu8_epi32(places)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to.offsets + found), _mm_shuffle_epi8(all, pairs));
    found += __builtin_popcount(kept);
  }
#endif
  for (; i < count; ++i) {
    to.values[found] = values[i];
    to.offsets[found] = offsets[i];
    found += (Single::narrow(values[i]) & Single::MAGNITUDE) != 0;
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
  // Results whose weights lie side by side are read V at a time.
  int64_t together() const { return of_result == 1 ? V : 1; }

  // Weights of `count` runs as to[run][place].
  void gather(const Phase& phase, const Int* from, int64_t channels, int64_t count, int64_t length,
              float* to) const {
    if (of_result == 1 && count == V) {
      for (int64_t t = 0; t < phase.taps; ++t) {
        const Int* place = from + phase.tap[t] * of_tap;
        int64_t c = 0;
        for (; c + V <= channels && !by_channel(); c += V) {
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
    for (int64_t i = 0; i < count; ++i, from += of_result, to += length) {
      if (by_channel()) {
        const bool whole = phase.taps == p.taps();
        const int64_t runs = whole && of_channel == p.taps() ? 1 : channels;
        const int64_t size = channels / runs * phase.taps;
        for (int64_t c = 0; c < runs; ++c) {
          const Int* x = from + c * of_channel;
          float* y = to + c * size;
          if (whole) {
            for (int64_t t = 0; t < size; ++t) y[t] = T::wide(x[t]);
          } else {
            for (int64_t t = 0; t < size; ++t) y[t] = T::wide(x[phase.tap[t]]);
          }
        }
        continue;
      }
      for (int64_t t = 0; t < phase.taps; ++t) {
        const Int* x = from + phase.tap[t] * of_tap;
        float* y = to + t * channels;
        if (of_channel == 1) {
          __builtin_prefetch(x + AHEAD * of_result);
          __builtin_prefetch(x + AHEAD * of_result + channels - 1);
          int64_t c = 0;
          for (; c + V <= channels; c += V) *reinterpret_cast<vec*>(y + c) = load<T>(x + c);
          for (; c < channels; ++c) y[c] = T::wide(x[c]);
        } else {
          for (int64_t c = 0; c < channels; ++c) y[c] = T::wide(x[c * of_channel]);
        }
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
    Memory<Phase> phases(p.phases());
    Memory<uint16_t> offsets(2 * p.phases() * length);  // of full blocks, of the last block
    Memory<float> rows(threads * V * length);
    if (!phases.data || !offsets.data || !rows.data) return NO_MEMORY;
    std::fill_n(phases.data, p.phases(), Phase());
    find_phases(phases.data);
    for (int64_t f = 0; f < 2 * p.phases(); ++f) {
      const int64_t b = f < p.phases() ? 0 : p.blocks - 1;
      find_offsets(f % p.phases(), phases.data[f % p.phases()], p.channels_of(b),
                   offsets.data + f * length);
    }
    const int64_t units = p.runs() / p.results, across = parts(p.results, step);
    in_parallel(threads, [&](Team team) {
      float* values = rows.data + team.rank * V * length;
      // Runs of this thread: of whole units of `step` results.
      const int64_t first = team.first(units * across), last = team.last(units * across);
      int64_t at = -1;
      for (int64_t k = first; k < last; ++k) {
        const int64_t unit = k / across, result = k % across * step;
        const int64_t f = unit % p.phases(), b = unit / p.phases() % p.blocks;
        const int64_t group = unit / p.phases() / p.blocks, channels = p.channels_of(b);
        const Phase& phase = phases.data[f];
        const int64_t size = channels * phase.taps;
        const int64_t count = std::min(step, p.results - result);
        if (at < 0) {  // where a full list would have this run
          at = (group * p.sources + b * p.block) * p.results * p.taps() + result * size;
          for (int64_t e = 0; e < f; ++e) at += p.results * channels * phases.data[e].taps;
        }
        const uint16_t* own = offsets.data + ((b == p.blocks - 1) * p.phases() + f) * length;
        const Int* from = weight + group * of_group + result * of_result +
                          b * p.block * of_channel;
        gather(phase, from, channels, count, length, values);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t some = compress(values + i * length, own, size,
                                        {entries.values + at, entries.offsets + at});
          runs[unit * p.results + result + i] = {at, at + some};
          at += some;
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

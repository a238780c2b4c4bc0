// What the products by zeros of the maps share: geometry of one axis, blocks of channels,
// transpositions, and non-zeros of a vector.

#pragma once

#include <utility>

#include "cpu.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fst::maps {

constexpr int64_t MOST_TAPS = 31;  // of a kernel along an axis
constexpr int MOST_VECTORS = 8;    // of sums in registers; the operand of a product is in memory

// Of the kernel's taps along one axis. A map's coordinate x and tap t see the coordinate `at(x, t)`
// of the source. x = phase(t) + j * phases sees j * step + shift(t).
struct Axis {
  bool backward;  // x is of the convolution's input, its source of the output; else the opposite
  int64_t taps, stride, padding, dilation, size, source;

  int64_t phases() const { return backward ? stride : 1; }
  int64_t step() const { return backward ? 1 : stride; }
  int64_t phase(int64_t t) const {
    const int64_t rest = (t * dilation - padding) % stride;
    return backward ? (rest + stride) % stride : 0;
  }
  int64_t shift(int64_t t) const {
    return backward ? (phase(t) + padding - t * dilation) / stride : t * dilation - padding;
  }
  // -1 where there is none.
  int64_t at(int64_t x, int64_t t) const {
    int64_t found = backward ? x + padding - t * dilation : x * stride - padding + t * dilation;
    if (found < 0 || (backward && found % stride)) return -1;
    found /= backward ? stride : 1;
    return found < source ? found : -1;
  }
  // Of the phases, how many are looked at, and how many a tap can see.
  int64_t first_phases() const { return std::min(phases(), size); }
  int64_t seen_phases() const { return std::min(phases(), taps); }
  bool sees(int64_t phase_of_x) const {
    for (int64_t t = 0; t < taps; ++t) {
      if (phase(t) == phase_of_x) return true;
    }
    return false;
  }
};

inline Axis axis_of_rows(const Geometry& g, bool backward) {
  return {backward, g.kernel_h, g.stride_h, g.padding_h, g.dilation_h,
          backward ? g.height : g.rows, backward ? g.rows : g.height};
}
inline Axis axis_of_columns(const Geometry& g, bool backward) {
  return {backward, g.kernel_w, g.stride_w, g.padding_w, g.dilation_w,
          backward ? g.width : g.columns, backward ? g.columns : g.width};
}

// Whether no product of these numbers overflows, and the output map is that of the convolution.
inline bool usable(const Geometry& g, int64_t in, int64_t out, int64_t groups) {
  const auto axis = [](int64_t size, int64_t map, int64_t taps, int64_t stride, int64_t padding,
                       int64_t dilation) {
    constexpr int64_t most = INT32_MAX;
    const bool bad = size < 1 || size > most || taps < 1 || taps > MOST_TAPS || stride < 1 ||
                     stride > most || padding < 0 || padding > most || dilation < 1 ||
                     dilation > most;
    const int64_t rest = bad ? -1 : size + 2 * padding - (taps - 1) * dilation - 1;
    return rest >= 0 && map == rest / stride + 1;
  };
  const auto fits = [](int64_t a, int64_t b, int64_t c, int64_t d) {
    int64_t product = INT32_MAX;
    for (int64_t x : {a, b, c, d}) product = x < 1 ? 0 : product / x;
    return product > 0;
  };
  return axis(g.height, g.rows, g.kernel_h, g.stride_h, g.padding_h, g.dilation_h) &&
         axis(g.width, g.columns, g.kernel_w, g.stride_w, g.padding_w, g.dilation_w) &&
         fits(g.images, g.height, g.width, 1) && fits(g.images, g.rows, g.columns, 1) &&
         fits(in, out, groups, g.taps());
}

// Rows of the source that some rows of a map see, image by image: each has a slot.
struct Slots {
  int64_t count = 0;

  // of_row[i] + h is the slot of the source's row h for row first + i; row[slot] counts the rows of
  // all images, -1 where nothing sees it. Without pointers: counts.
  Slots(const Axis& axis, int64_t first, int64_t last, int32_t* of_row, int64_t* row) {
    for (int64_t begin = first; begin < last;) {
      const int64_t image = begin / axis.size;
      const int64_t end = std::min(last, (image + 1) * axis.size);
      int64_t low = axis.source, high = 0;
      const auto each = [&](auto function) {
        for (int64_t x = begin; x < end; ++x) {
          for (int64_t t = 0; t < axis.taps; ++t) {
            const int64_t h = axis.at(x % axis.size, t);
            if (h >= 0) function(h);
          }
        }
      };
      each([&](int64_t h) { low = std::min(low, h), high = std::max(high, h + 1); });
      const int64_t rows = std::max<int64_t>(high - low, 0);
      if (row) {
        std::fill_n(row + count, rows, int64_t{-1});
        each([&](int64_t h) { row[count + h - low] = image * axis.source + h; });
        for (int64_t x = begin; x < end; ++x) {
          of_row[x - first] = static_cast<int32_t>(count - low);
        }
      }
      count += rows;
      begin = end;
    }
  }

  static int64_t most(const Axis& axis, int64_t rows, int64_t length) {
    int64_t found = 0;
    for (int64_t first = 0; first < rows; first += length) {
      const int64_t last = std::min(rows, first + length);
      found = std::max(found, Slots(axis, first, last, nullptr, nullptr).count);
    }
    return found;
  }
};

// Channels in equal blocks of at most MOST_VECTORS vectors.
struct Blocks {
  int64_t channels, vectors, count;

  explicit Blocks(int64_t channels)
      : channels(channels), vectors(parts(channels, V)), count(parts(vectors, MOST_VECTORS)) {}
  int64_t first(int64_t b) const { return vectors * b / count * V; }
  int64_t width(int64_t b) const { return first(b + 1) - first(b); }  // whole vectors
  int64_t valid(int64_t b) const { return std::min(width(b), channels - first(b)); }
  int64_t padded() const { return vectors * V; }
};

// Calls with a number of vectors as a constant.
template <int MOST = MOST_VECTORS, class Function>
void with_block(int64_t vectors, const Function& function) {
  if constexpr (MOST > 0) {
    if (vectors == MOST) return function(std::integral_constant<int, MOST>{});
    with_block<MOST - 1>(vectors, function);
  }
}

template <class T>
vec load(const typename T::Int* from) {
  if constexpr (sizeof(*from) == 4) return *reinterpret_cast<const vec*>(from);
  float wide[V];
  for (int i = 0; i < V; ++i) wide[i] = T::wide(from[i]);
  return *reinterpret_cast<const vec*>(wide);
}

template <class T>
void store(typename T::Int* to, vec x) {
  if constexpr (sizeof(*to) == 4) {
    *reinterpret_cast<vec*>(to) = x;
  } else {
    float wide[V];
    *reinterpret_cast<vec*>(wide) = x;
    for (int i = 0; i < V; ++i) to[i] = T::narrow(wide[i]);
  }
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define FST_SHUFFLES
#endif
#endif

#if defined(FST_SHUFFLES)
template <int STEP, int... L>
void exchange(vec& x, vec& y, std::integer_sequence<int, L...>) {
  const vec low = __builtin_shufflevector(x, y, (L & STEP ? V + L - STEP : L)...);
  y = __builtin_shufflevector(x, y, (L & STEP ? V + L : L + STEP)...);
  x = low;
}

template <int STEP = V / 2>
void transpose(vec* x) {
#pragma GCC unroll 16
  for (int i = 0; i < V; ++i) {
    if (!(i & STEP)) exchange<STEP>(x[i], x[i + STEP], std::make_integer_sequence<int, V>{});
  }
  if constexpr (STEP > 1) transpose<STEP / 2>(x);
}
#endif

#if defined(FST_SHUFFLES)
// Of V rows: to[j * pitch + k] = from[k][j].
template <class From, class To>
__attribute__((noinline)) void transpose(const typename From::Int* const* from, int64_t columns,
                                         typename To::Int* to, int64_t pitch) {
  int64_t j = 0;
  for (; j + V <= columns; j += V) {
    vec x[V];
#pragma GCC unroll 16
    for (int k = 0; k < V; ++k) x[k] = load<From>(from[k] + j);
    transpose(x);
#pragma GCC unroll 16
    for (int k = 0; k < V; ++k) store<To>(to + (j + k) * pitch, x[k]);
  }
  for (; j < columns; ++j) {
    for (int k = 0; k < V; ++k) to[j * pitch + k] = To::narrow(From::wide(from[k][j]));
  }
}
#endif

// to[j * pitch + i] = row(i)[j] for i < rows, j < columns.
template <class From, class To, class Row>
void transpose(const Row& row, int64_t rows, int64_t columns, typename To::Int* to,
               int64_t pitch) {
  int64_t i = 0;
#if defined(FST_SHUFFLES)
  for (; i + V <= rows; i += V) {
    const typename From::Int* from[V];
    for (int k = 0; k < V; ++k) from[k] = row(i + k);
    transpose<From, To>(from, columns, to + i, pitch);
  }
#endif
  for (; i < rows; ++i) {
    const typename From::Int* from = row(i);
    for (int64_t j = 0; j < columns; ++j) to[j * pitch + i] = To::narrow(From::wide(from[j]));
  }
}

template <class From, class To>
void copy(const typename From::Int* from, int64_t count, typename To::Int* to) {
  int64_t i = 0;
  for (; i + V <= count; i += V) store<To>(to + i, load<From>(from + i));
  for (; i < count; ++i) to[i] = To::narrow(From::wide(from[i]));
}

// A bit for each number of a vector that is not zero: NaN is none.
inline uint64_t nonzeros(vec x) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ);
#elif defined(__AVX2__)
  return static_cast<uint64_t>(
      _mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_UQ)));
#else
  uint64_t bits = 0;
  for (int i = 0; i < V; ++i) bits |= static_cast<uint64_t>(x[i] != 0.0f) << i;
  return bits;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Of each mask of eight numbers: the places of its bits, then anything.
struct Permutations {
  alignas(64) uint8_t place[256][8] = {};
  constexpr Permutations() {
    for (int mask = 0; mask < 256; ++mask) {
      for (int i = 0, k = 0; i < 8; ++i) {
        if (mask >> i & 1) place[mask][k++] = static_cast<uint8_t>(i);
      }
    }
  }
};
inline constexpr Permutations PERMUTATIONS{};
#endif

// Numbers of a vector that are not zero, one behind the other, and where they stand, from `at` on;
// how many. Whole vectors are written.
inline int64_t compress(vec x, int64_t at, float* value, int32_t* place) {
  const uint64_t bits = nonzeros(x);
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask16>(bits);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(at)));
  _mm512_storeu_ps(value, _mm512_maskz_compress_ps(mask, x));
  _mm512_storeu_si512(place, _mm512_maskz_compress_epi32(mask, places));
#elif defined(__AVX2__)
  const __m256i order = _mm256_cvtepu8_epi32(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(PERMUTATIONS.place[bits])));
  const __m256i places = _mm256_add_epi32(order, _mm256_set1_epi32(static_cast<int>(at)));
  _mm256_storeu_ps(value, _mm256_permutevar8x32_ps(x, order));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), places);
#else
  for (int i = 0, k = 0; i < V; ++i) {
    value[k] = x[i], place[k] = static_cast<int32_t>(at + i);
    k += static_cast<int>(bits >> i & 1);
  }
#endif
  return __builtin_popcountll(bits);
}

}  // namespace fst::maps

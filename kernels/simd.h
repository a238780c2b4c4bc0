// Vectors of V floats: from and to the formats of elements, transposed, and without their zeros.

#pragma once

#include "cpu.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fst {

#if defined(__AVX512F__)
constexpr int V = 16;
#elif defined(__AVX2__)
constexpr int V = 8;
#else
constexpr int V = 4;
#endif
typedef float vec __attribute__((vector_size(4 * V), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * V), aligned(4), may_alias));
typedef uint16_t shorts __attribute__((vector_size(2 * V), aligned(2), may_alias));

inline vec as_floats(ints x) { return reinterpret_cast<vec>(x); }
inline ints as_ints(vec x) { return reinterpret_cast<ints>(x); }

template <class T>
vec load(const typename T::Int* x) {
  if constexpr (std::is_same_v<T, Single>) {
    return *reinterpret_cast<const vec*>(x);
#if defined(__AVX512F__)
  } else if constexpr (std::is_same_v<T, Half>) {
    return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
#elif defined(__F16C__)
  } else if constexpr (std::is_same_v<T, Half>) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#endif
  } else {
    vec result;
    for (int i = 0; i < V; ++i) result[i] = T::wide(x[i]);
    return result;
  }
}

template <class T>
void store(vec value, typename T::Int* x) {
  if constexpr (std::is_same_v<T, Single>) {
    *reinterpret_cast<vec*>(x) = value;
#if defined(__AVX512F__)
  } else if constexpr (std::is_same_v<T, Half>) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), _mm512_maskz_cvtps_ph(0xFFFF, value, 0));
#elif defined(__F16C__)
  } else if constexpr (std::is_same_v<T, Half>) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(x), _mm256_cvtps_ph(value, 0));
#endif
  } else {
    float numbers[V];
    std::memcpy(numbers, &value, sizeof(numbers));
    for (int i = 0; i < V; ++i) x[i] = T::narrow(numbers[i]);
  }
}

// Of the first `count` numbers, with zeros behind them.
template <class T>
vec load_some(const typename T::Int* x, int64_t count) {
  typename T::Int numbers[V] = {};
  std::copy_n(x, count, numbers);
  return load<T>(numbers);
}

template <class From, class To>
void copy(const typename From::Int* from, int64_t count, typename To::Int* to) {
  int64_t i = 0;
  for (; i + V <= count; i += V) store<To>(load<From>(from + i), to + i);
  for (; i < count; ++i) to[i] = To::narrow(From::wide(from[i]));
}

// x[i][j] = x[j][i]
inline void transpose(vec* x) {
#if defined(__AVX512F__)
  __m512 t[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[i], x[i + 1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(x[i], x[i + 1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(x[i + 2], x[i + 3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(x[i + 2], x[i + 3]));
    t[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    t[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    t[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    t[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = _mm512_shuffle_f32x4(t[i], t[4 + i], 0x44);
    const __m512 b = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0x44);
    const __m512 c = _mm512_shuffle_f32x4(t[i], t[4 + i], 0xEE);
    const __m512 d = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0xEE);
    x[i] = _mm512_shuffle_f32x4(a, b, 0x88);
    x[4 + i] = _mm512_shuffle_f32x4(a, b, 0xDD);
    x[8 + i] = _mm512_shuffle_f32x4(c, d, 0x88);
    x[12 + i] = _mm512_shuffle_f32x4(c, d, 0xDD);
  }
#elif defined(__AVX2__)
  __m256 t[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    x[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    x[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xEE);
    x[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    x[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) x[i] = t[i];
#else
  float numbers[V][V], turned[V][V];
  std::memcpy(numbers, x, sizeof(numbers));
  for (int i = 0; i < V; ++i) {
    for (int j = 0; j < V; ++j) turned[i][j] = numbers[j][i];
  }
  std::memcpy(static_cast<void*>(x), turned, sizeof(turned));
#endif
}

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
    for (int k = 0; k < V; ++k) store<To>(x[k], to + (j + k) * pitch);
  }
  for (; j < columns; ++j) {
    for (int k = 0; k < V; ++k) to[j * pitch + k] = To::narrow(From::wide(from[k][j]));
  }
}

// to[j * pitch + i] = row(i)[j] for i < rows, j < columns.
template <class From, class To, class Row>
void transpose(const Row& row, int64_t rows, int64_t columns, typename To::Int* to, int64_t pitch) {
  int64_t i = 0;
  for (; i + V <= rows; i += V) {
    const typename From::Int* from[V];
    for (int k = 0; k < V; ++k) from[k] = row(i + k);
    transpose<From, To>(from, columns, to + i, pitch);
  }
  for (; i < rows; ++i) {
    const typename From::Int* from = row(i);
    for (int64_t j = 0; j < columns; ++j) to[j * pitch + i] = To::narrow(From::wide(from[j]));
  }
}

// A bit for each number that is not zero: NaN is not. By their bits, whatever the processor does
// with subnormal numbers.
inline uint32_t nonzeros(vec x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(_mm512_castps_si512(x), _mm512_set1_epi32(Single::MAGNITUDE));
#elif defined(__AVX2__)
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i zero = _mm256_cmpeq_epi32(_mm256_add_epi32(bits, bits), _mm256_setzero_si256());
  return ~_mm256_movemask_ps(_mm256_castsi256_ps(zero)) & 0xFF;
#else
  uint32_t bits = 0;
  for (int i = 0; i < V; ++i) bits |= uint32_t{(as_ints(x)[i] & Single::MAGNITUDE) != 0} << i;
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

// The numbers of a mask one behind the other, then anything.
inline vec compress(vec x, uint32_t mask) {
#if defined(__AVX512F__)
  return _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), x);
#elif defined(__AVX2__)
  const auto* places = reinterpret_cast<const __m128i*>(PERMUTATIONS.place[mask]);
  return _mm256_permutevar8x32_ps(x, _mm256_cvtepu8_epi32(_mm_loadl_epi64(places)));
#else
  vec found{};
  for (int i = 0, k = 0; i < V; ++i) {
    found[k] = x[i];
    k += mask >> i & 1;
  }
  return found;
#endif
}
inline ints compress(ints x, uint32_t mask) { return as_ints(compress(as_floats(x), mask)); }

// Lists of numbers that are not zero, and where what they multiply lies.
struct Entries {
  float* values;
  uint16_t* offsets;
};

// Writes the numbers of a mask from `at` on, V entries in all; how many they are.
inline int64_t append_kept(vec x, ints offsets, uint32_t kept, Entries to, int64_t at) {
  *reinterpret_cast<vec*>(to.values + at) = compress(x, kept);
  *reinterpret_cast<shorts*>(to.offsets + at) =
      __builtin_convertvector(compress(offsets, kept), shorts);
  return __builtin_popcount(kept);
}

// Four values of a list, each of them in all lanes: one load for four, as loads limit the products.
struct Four {
#if defined(__AVX512F__)
  __m512 values;

  explicit Four(const float* from) : values(_mm512_broadcast_f32x4(_mm_loadu_ps(from))) {}
  template <int I>
  vec at() const {
    return _mm512_permute_ps(values, I * 0x55);
  }
#elif defined(__AVX2__)
  __m256 values;

  explicit Four(const float* from)
      : values(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(from))) {}
  template <int I>
  vec at() const {
    return _mm256_permute_ps(values, I * 0x55);
  }
#else
  const float* values;

  explicit Four(const float* from) : values(from) {}
  template <int I>
  vec at() const {
    return values[I] - vec{};
  }
#endif
};

inline uint64_t four_offsets(const uint16_t* offsets) {
  uint64_t four;
  std::memcpy(&four, offsets, sizeof(four));
  return four;
}

}  // namespace fst

// Vectors of V floats from and to the formats of elements, and squares of V by V turned.

#pragma once

#include "cpu.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fst {

typedef int32_t ints __attribute__((vector_size(4 * V), may_alias));

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

// to[i][j] = from[j][i]
inline void turn(vec* x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
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
#elif defined(__AVX512F__)
  // Four times: vector i beside vector i + 8, number by number.
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  __m512 t[16];
#pragma GCC unroll 2
  for (int twice = 0; twice < 2; ++twice) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = _mm512_permutex2var_ps(x[i], low, x[i + 8]);
      t[2 * i + 1] = _mm512_permutex2var_ps(x[i], high, x[i + 8]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      x[2 * i] = _mm512_permutex2var_ps(t[i], low, t[i + 8]);
      x[2 * i + 1] = _mm512_permutex2var_ps(t[i], high, t[i + 8]);
    }
  }
#else
  float numbers[V][V], turned[V][V];
  std::memcpy(numbers, x, sizeof(numbers));
  for (int i = 0; i < V; ++i) {
    for (int j = 0; j < V; ++j) turned[i][j] = numbers[j][i];
  }
  std::memcpy(static_cast<void*>(x), turned, sizeof(turned));
#endif
}

// e^x with an error of about one rounding.
inline vec exponential(vec x) {
  x = x > 88.0f ? vec{} + 88.0f : x;
  x = x < -87.0f ? vec{} - 87.0f : x;
  const vec shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const vec n = shifted - 12582912.0f;
  const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vec sum = vec{} + 1.9875691500e-4f;
  sum = sum * r + 1.3981999507e-3f;
  sum = sum * r + 8.3334519073e-3f;
  sum = sum * r + 4.1665795894e-2f;
  sum = sum * r + 1.6666665459e-1f;
  sum = sum * r + 5.0000001201e-1f;
  sum = sum * r * r + r + 1.0f;
  return sum * as_floats((as_ints(shifted) << 23) + (127 << 23));
}

enum Activation { NO_ACTIVATION, RELU, RELU6, SILU, HARDSWISH, ACTIVATIONS };

// NaN stays NaN.
inline vec activate(vec x, int64_t activation) {
  const vec zero = vec{}, six = zero + 6.0f;
  if (activation == RELU || activation == RELU6) x = x < zero ? zero : x;
  if (activation == RELU6) x = x > six ? six : x;
  if (activation == SILU) x = x / (1.0f + exponential(-x));
  if (activation == HARDSWISH) {
    vec gate = x + 3.0f;
    gate = gate < zero ? zero : gate;
    x = x * (gate > six ? six : gate) / 6.0f;
  }
  return x;
}

// Activates some vectors; the activation is a constant in each loop.
template <int COUNT>
inline __attribute__((always_inline)) void activate_all(vec* x, int64_t activation) {
  const auto all = [&](auto known) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) x[i] = activate(x[i], known.value);
  };
  if (activation == RELU) all(std::integral_constant<int64_t, RELU>{});
  if (activation == RELU6) all(std::integral_constant<int64_t, RELU6>{});
  if (activation == SILU) all(std::integral_constant<int64_t, SILU>{});
  if (activation == HARDSWISH) all(std::integral_constant<int64_t, HARDSWISH>{});
}

}  // namespace fst

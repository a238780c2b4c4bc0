// Activations of vectors, applied while a result is written.

#pragma once

#include "simd.h"

namespace fst {

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

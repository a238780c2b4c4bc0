// N:M choice on a CPU: which values of a group are kept, for the compiler to vectorise.
//
// Values are handled as the bits of floating point numbers. Groups of 2, 4 or 8 whose places follow
// each other (`consecutive`) or lie in planes (`planes`) are chosen in registers; all others, and
// random and group-wise rescaled ones, 64 at a time (`lanes`).

#pragma once

#include "simd.h"

namespace fst {

constexpr int MOST_M = 32;
constexpr int MOST_DRAWN_M = 8;      // of random draws: their words serve so many places
constexpr int64_t LANES = 64;        // groups that `lanes` handles at a time
constexpr int BLOCK = 16;            // elements of one or two vectors
constexpr int MOST = 32, LEAST = 8;  // positions of `planes`
constexpr int KERNEL = 9;            // weights of a 3x3 kernel, which lie side by side

template <class T, class R>
typename R::Int cast(typename T::Int x) {
  if constexpr (std::is_same_v<T, R>) {
    return x;
  } else {
    return R::narrow(T::wide(x));
  }
}

struct Strides {
  int64_t channel, position;
};

// Channels and positions that one thread prunes.
template <class T, class R>
struct Part {
  const typename T::Int* x;
  typename R::Int* y;
  uint8_t* mask;  // with the strides of y, or null
  int64_t channels, positions;
  int64_t per;  // channels of a convolution group, in which groups of M start anew
  Strides from, to;

  bool channel_inner() const { return from.channel == 1 && to.channel == 1 && channels > 1; }

  // Channels of KERNEL positions, one after the other.
  bool is_kernels() const {
    return from.position == 1 && to.position == 1 && from.channel == KERNEL && to.channel == KERNEL;
  }

  Part at(int64_t channel, int64_t position) const {
    Part moved = *this;
    const int64_t there = channel * to.channel + position * to.position;
    moved.x += channel * from.channel + position * from.position;
    moved.y += there;
    moved.mask = mask ? mask + there : nullptr;
    return moved;
  }
};

struct Rule {
  int n, m;
  bool by_group = false;          // every group keeps its own L1 norm
  const int64_t* seed = nullptr;  // of random draws
  int64_t place = 0, run = 0;     // of a part's first position and channel, for the draws

  // Channels that share the four words of a draw, as in the Triton kernel.
  int64_t span() const { return seed && (m & (m - 1)) == 0 ? 8 : m; }
};

// Which of M places are kept: those that fewer than n beat. Of equal ones the first wins.
//
// Groups whose places follow each other: each value meets its group's others within one vector.
template <class Int, int M>
void compare_neighbours(const Int* keys, Int* beaten, int64_t length) {
  constexpr int BYTES = std::max<int>(4 * V, M * sizeof(Int)), COUNT = BYTES / sizeof(Int);
  typedef Int Vector __attribute__((vector_size(BYTES), aligned(sizeof(Int)), may_alias));
  for (int64_t i = 0; i < length; i += COUNT) {
    const Vector key = *reinterpret_cast<const Vector*>(keys + i);
    Vector count{};
#pragma GCC unroll 8
    for (int d = 1; d < M; ++d) {
      Vector partner, wins_ties;
#pragma GCC unroll 32
      for (int k = 0; k < COUNT; ++k) {
        partner[k] = static_cast<Int>(k ^ d);
        wins_ties[k] = (k ^ d) < k ? -1 : 0;
      }
      count -= __builtin_shuffle(key, partner) > key + wins_ties;
    }
    *reinterpret_cast<Vector*>(beaten + i) = count;
  }
}

// Groups that follow each other, of M channels of TAPS positions each: an element meets those of
// up to M - 1 channels before and behind it, as far as they are of its group.
template <class Int, int M, int TAPS>
struct Partners {
  static constexpr int PERIOD = M * TAPS;
  Int are[2 * M - 1][PERIOD + BLOCK];
  constexpr Partners() : are() {
    for (int d = 1 - M; d < M; ++d) {
      for (int i = 0; i < PERIOD + BLOCK; ++i) {
        const int channel = i / TAPS % M + d;
        are[d + M - 1][i] = channel >= 0 && channel < M;
      }
    }
  }
};

// Writes values that lie side by side, and which of them were kept.
template <class T, class R>
inline __attribute__((always_inline)) void write(const typename T::Int* __restrict x,
                                                 typename R::Int* __restrict y,
                                                 uint8_t* __restrict mask,
                                                 const typename T::Int* beaten, int64_t count,
                                                 typename T::Int n) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const auto value = cast<T, R>(x[i]);
    y[i] = beaten[i] < n ? value : R::dropped(value);
  }
  if (!mask) return;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) mask[i] = beaten[i] < n;
}

// A shorter group may be the last one.
template <class T, class R, int M, int TAPS>
void consecutive(const Part<T, R>& part, int64_t elements, int n) {
  using Int = typename T::Int;
  static constexpr Partners<Int, M, TAPS> partners;
  constexpr int CHUNK = TAPS == 1 ? 256 : 8 * M * TAPS;
  constexpr int EDGE = std::max(BLOCK, (M - 1) * TAPS);
  alignas(64) Int keys[EDGE + CHUNK + BLOCK + EDGE], beaten[CHUNK + BLOCK];
  std::fill_n(keys, EDGE, Int{0});
  for (int64_t start = 0; start < elements; start += CHUNK) {
    const Int* x = part.x + start;
    const int64_t length = std::min<int64_t>(CHUNK, elements - start);
    for (int64_t i = 0; i < length; ++i) keys[EDGE + i] = T::magnitude(x[i]);
    std::fill_n(keys + EDGE + length, BLOCK + EDGE, Int{0});  // what is not there beats nothing
    if constexpr (TAPS == 1) compare_neighbours<Int, M>(keys + EDGE, beaten, length);
    for (int64_t block = 0; TAPS > 1 && block < length; block += BLOCK) {
      const Int* key = keys + EDGE + block;
      const int64_t place = block % partners.PERIOD;
#pragma omp simd
      for (int i = 0; i < BLOCK; ++i) {
        Int count = 0;
#pragma GCC unroll 8
        for (int d = 1; d < M; ++d) {
          count +=
              partners.are[M - 1 + d][place + i] & static_cast<Int>(key[i + d * TAPS] > key[i]);
          count +=
              partners.are[M - 1 - d][place + i] & static_cast<Int>(key[i - d * TAPS] >= key[i]);
        }
        beaten[block + i] = count;
      }
    }
    uint8_t* mask = part.mask ? part.mask + start : nullptr;
    write<T, R>(x, part.y + start, mask, beaten, length, static_cast<Int>(n));
  }
}

// Groups whose places lie in M planes: COUNT of them side by side.
template <class T, class R, int M, int COUNT>
void planes(const Part<T, R>& part, int n) {
  using Int = typename T::Int;
  alignas(64) Int beaten[M][COUNT];
  const Int* x = part.x;
  const int64_t step = part.from.channel;
#pragma omp simd
  for (int i = 0; i < COUNT; ++i) {
    Int key[M], count[M];
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) {
      key[j] = T::magnitude(x[j * step + i]);
      count[j] = j;
#pragma GCC unroll 8
      for (int k = 0; k < j; ++k) {
        const Int later_wins = key[j] > key[k];
        count[k] += later_wins;
        count[j] -= later_wins;
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) beaten[j][i] = count[j];
  }
  for (int j = 0; j < M; ++j) {
    const int64_t to = j * part.to.channel;
    uint8_t* mask = part.mask ? part.mask + to : nullptr;
    write<T, R>(x + j * step, part.y + to, mask, beaten[j], COUNT, static_cast<Int>(n));
  }
}

// At least 8 positions: 32 at a time, and what these leave over 8 at a time, some of them twice.
template <class T, class R, int M>
void all_planes(const Part<T, R>& part, int64_t count, int n) {
  int64_t i = 0;
  for (; i + MOST <= count; i += MOST) planes<T, R, M, MOST>(part.at(0, i), n);
  for (; i < count; i += LEAST) planes<T, R, M, LEAST>(part.at(0, std::min(i, count - LEAST)), n);
}

// Calls with M as a constant; false where no such code is compiled.
template <class Function>
bool with_constant(int m, Function function) {
  switch (m) {
    case 2:
      function(std::integral_constant<int, 2>{});
      return true;
    case 4:
      function(std::integral_constant<int, 4>{});
      return true;
    case 8:
      function(std::integral_constant<int, 8>{});
      return true;
    default:
      return false;
  }
}

using Words = uint32_t[4][LANES];

// Philox4x32-10 of the counters (place, run, 0, 0).
inline void draw(Words& words, int64_t count, const Rule& rule, int64_t place, int64_t run) {
  const uint64_t seed = static_cast<uint64_t>(*rule.seed);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t a = static_cast<uint32_t>(place + i), b = static_cast<uint32_t>(run), c = 0, d = 0;
    uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const uint64_t first = uint64_t{0xD2511F53} * a, second = uint64_t{0xCD9E8D57} * c;
      a = static_cast<uint32_t>(second >> 32) ^ b ^ low;
      c = static_cast<uint32_t>(first >> 32) ^ d ^ high;
      b = static_cast<uint32_t>(second);
      d = static_cast<uint32_t>(first);
      low += 0x9E3779B9;
      high += 0xBB67AE85;
    }
    words[0][i] = a;
    words[1][i] = b;
    words[2][i] = c;
    words[3][i] = d;
  }
}

// How many of a group beat each place, whatever the values are: fewer than n those of a random
// n-subset. Of r places that are left, w of them wanted, the next is kept with probability w / r.
template <class Int>
void sampled(Int (*beaten)[LANES], Words& words, int64_t count, int m, int n, int word) {
  uint32_t wanted[LANES], fraction[LANES];
  std::fill_n(wanted, count, static_cast<uint32_t>(n));
  for (int j = 0; j < m; ++j) {
    if (j % 4 == 0) std::copy_n(words[word + j / 4], count, fraction);
    const uint32_t left = static_cast<uint32_t>(m - j);
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t product = uint64_t{fraction[i]} * left;
      const bool keep = static_cast<uint32_t>(product >> 32) < wanted[i];
      fraction[i] = static_cast<uint32_t>(product);
      wanted[i] -= keep;
      beaten[j][i] = keep ? 0 : static_cast<Int>(MOST_DRAWN_M);
    }
  }
}

template <class Int>
void compared(Int (*beaten)[LANES], Int (*key)[LANES], int64_t count, int m) {
  for (int j = 0; j < m; ++j) {
    std::fill_n(beaten[j], count, static_cast<Int>(j));
    for (int k = 0; k < j; ++k) {
      for (int64_t i = 0; i < count; ++i) {
        const Int later_wins = key[j][i] > key[k][i];
        beaten[k][i] += later_wins;
        beaten[j][i] -= later_wins;
      }
    }
  }
}

inline float ratio(float before, float after) { return after > 0 ? before / after : 1.0f; }

// One group of m channels at up to 64 positions.
template <class T, class R>
void lanes(const Part<T, R>& part, int64_t count, int m, const Rule& rule, Words& words, int word) {
  using Int = typename T::Int;
  Int key[MOST_M][LANES], beaten[MOST_M][LANES];
  const auto [x_channel, x_position] = part.from;
  const auto [y_channel, y_position] = part.to;
  const int n = std::min(rule.n, m);
  if (rule.seed) {
    sampled(beaten, words, count, m, n, word);
  } else {
    for (int j = 0; j < m; ++j) {
      const Int* x = part.x + j * x_channel;
      for (int64_t i = 0; i < count; ++i) key[j][i] = T::magnitude(x[i * x_position]);
    }
    compared(beaten, key, count, m);
  }
  float before[LANES] = {}, after[LANES] = {};
  for (int j = 0; j < m; ++j) {
    const Int* x = part.x + j * x_channel;
    typename R::Int* y = part.y + j * y_channel;
    for (int64_t i = 0; i < count; ++i) {
      const typename R::Int value = cast<T, R>(x[i * x_position]);
      const bool kept = beaten[j][i] < n;
      y[i * y_position] = kept ? value : R::dropped(value);
      if (part.mask) part.mask[j * y_channel + i * y_position] = kept;
      if (rule.by_group) {
        before[i] += std::abs(R::wide(value));
        after[i] += std::abs(R::wide(y[i * y_position]));
      }
    }
  }
  for (int j = 0; rule.by_group && j < m; ++j) {
    typename R::Int* y = part.y + j * y_channel;
    for (int64_t i = 0; i < count; ++i) {
      const float scale = ratio(before[i], after[i]);
      y[i * y_position] = R::narrow(R::wide(y[i * y_position]) * scale);
    }
  }
}

// Prune `count` positions of a part, from `first` on.
template <class T, class R>
void prune(const Part<T, R>& whole, int64_t first, int64_t count, const Rule& rule) {
  const bool quick = !rule.seed && !rule.by_group;
  // Whole groups may go on from one convolution group, and from one position, to the next.
  const bool even = whole.per % rule.m == 0;
  if (quick && whole.channel_inner()) {
    const int64_t row = even ? whole.channels : whole.per;
    const bool dense = whole.from.position == whole.channels && whole.to.position == whole.channels;
    const int64_t rows = even && dense ? 1 : count, elements = row * (even && dense ? count : 1);
    const auto all = [&](auto m) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t c = 0; c < whole.channels; c += row) {
          consecutive<T, R, m, 1>(whole.at(c, first + i), elements, rule.n);
        }
      }
    };
    if (with_constant(rule.m, all)) return;
  }
  if (quick && count == KERNEL && whole.is_kernels()) {
    const int64_t row = even ? whole.channels : whole.per;
    const auto all = [&](auto m) {
      for (int64_t c = 0; c < whole.channels; c += row) {
        consecutive<T, R, m, KERNEL>(whole.at(c, first), row * KERNEL, rule.n);
      }
    };
    if (with_constant(rule.m, all)) return;
  }
  const bool flat = quick && whole.from.position == 1 && whole.to.position == 1;
  const int64_t step = flat ? count : LANES, span = rule.span();
  Words words;
  for (int64_t start = 0; start < count; start += step) {
    const int64_t length = std::min(step, count - start);
    int64_t run = rule.run;
    for (int64_t edge = 0; edge < whole.channels; edge += whole.per) {
      for (int64_t channel = 0; channel < whole.per; channel += span, ++run) {
        if (rule.seed) draw(words, length, rule, rule.place + first + start, run);
        const int64_t end = std::min(channel + span, whole.per);
        for (int64_t c = channel, word = 0; c < end; c += rule.m, word += (rule.m + 3) / 4) {
          const int m = static_cast<int>(std::min<int64_t>(rule.m, end - c));
          const auto part = whole.at(edge + c, first + start);
          const auto all = [&](auto size) {
            all_planes<T, R, size>(part, length, std::min(rule.n, m));
          };
          if (flat && length >= LEAST && with_constant(m, all)) continue;
          for (int64_t i = 0; i < length; i += LANES) {
            lanes(part.at(0, i), std::min(LANES, length - i), m, rule, words, word);
          }
        }
      }
    }
  }
}

}  // namespace fst

// What the kernels for CPUs share: numbers of 16 and 32 bits, vectors, threads, memory.
//
// The kernels are functions of pointers and sizes (`extern "C"`), which need no header of torch.
// The same sources are compiled into one library for each set of instructions, of which a process
// loads one (setup.py, fst/ops/cpp).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#define FST_EXPORT extern "C" __attribute__((visibility("default")))

// Of the OpenMP runtime that torch has loaded. Nothing links it, so there is no second pool.
// GNU's and LLVM's runtimes both have these functions, whatever compiler is used here.
extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
void GOMP_barrier();
int omp_get_thread_num();
int omp_get_num_threads();
}

namespace fst {

enum Status { DONE, NO_MEMORY, NOT_ASCENDING, BAD_NUMBERS };
enum Kind { SINGLE, BRAIN, HALF };  // of elements, as fst/ops/cpp numbers them

// Numbers are handled as their bits.
template <class Int_, Int_ INFINITE_, Int_ NAN_>
struct Format {
  using Int = Int_;
  static constexpr Int INFINITE = INFINITE_, NOT_A_NUMBER = NAN_;
  static constexpr Int MAGNITUDE = sizeof(Int) == 4 ? 0x7FFFFFFF : 0x7FFF;

  // In the order of the absolute values; NaN counts as infinity.
  static Int magnitude(Int x) { return std::min<Int>(x & MAGNITUDE, INFINITE); }

  // x * 0, which leaves infinities and NaN visible.
  static Int dropped(Int x) {
    return (x & MAGNITUDE) >= INFINITE ? NOT_A_NUMBER : static_cast<Int>(x & ~MAGNITUDE);
  }
};

struct Single : Format<int32_t, 0x7F800000, 0x7FC00000> {
  static float wide(Int x) {
    float value;
    std::memcpy(&value, &x, sizeof(value));
    return value;
  }
  static Int narrow(float value) {
    Int x;
    std::memcpy(&x, &value, sizeof(x));
    return x;
  }
};

// Both 16-bit formats round to the nearest, ties to even.
struct Brain : Format<int16_t, 0x7F80, 0x7FC0> {
  static float wide(Int x) { return Single::wide(static_cast<int32_t>(x) * 65536); }
  static Int narrow(float value) {
    const uint32_t bits = static_cast<uint32_t>(Single::narrow(value));
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return value != value ? NOT_A_NUMBER : static_cast<Int>(rounded);
  }
};

struct Half : Format<int16_t, 0x7C00, 0x7E00> {
  static float wide(Int x) {
    const int32_t sign = (x < 0 ? INT32_MIN : 0), rest = x & 0x7FFF;
    const float scaled = Single::wide(rest << 13) * 0x1p112f;  // right for subnormal numbers too
    const int32_t infinite = rest >= INFINITE ? 0x7F800000 : 0;
    return Single::wide(Single::narrow(scaled) | infinite | sign);
  }
  static Int narrow(float value) {
    const int32_t bits = Single::narrow(value), sign = bits >> 16 & ~0x7FFF;
    const float size = Single::wide(bits & 0x7FFFFFFF);
    // Of subnormal results the addition rounds, of normal ones the carry of the dropped bits.
    const int32_t tiny = Single::narrow(size + 0.5f) - Single::narrow(0.5f);
    const int32_t number = Single::narrow(size), odd = number >> 13 & 1;
    const int32_t normal = (number - (112 << 23) + 0xFFF + odd) >> 13;
    int32_t result = size < 0x1p-14f ? tiny : normal;
    result = size >= 65520.0f ? INFINITE : result;
    return static_cast<Int>((size != size ? NOT_A_NUMBER : result) | sign);
  }
};

// Calls with the format of a kind of elements.
template <class Function>
void with_format(int64_t kind, Function function) {
  if (kind == SINGLE) function(Single{});
  if (kind == BRAIN) function(Brain{});
  if (kind == HALF) function(Half{});
}

// Registers: a vector of V floats; tiles of at most ROWS broadcast numbers by VECTORS vectors.
#if defined(__AVX512F__)
constexpr int V = 16, ROWS = 8, VECTORS = 2;
#elif defined(__AVX2__)
constexpr int V = 8, ROWS = 4, VECTORS = 3;
#else
constexpr int V = 4, ROWS = 4, VECTORS = 2;
#endif
constexpr int WIDTH = V * VECTORS;
typedef float vec __attribute__((vector_size(4 * V), aligned(4), may_alias));

inline int64_t parts(int64_t whole, int64_t size) { return (whole + size - 1) / size; }

// The threads that run one call.
struct Team {
  int rank, size;

  void wait() const {
    if (size > 1) GOMP_barrier();
  }
  // This thread's share of [0, count).
  int64_t first(int64_t count) const { return count * rank / size; }
  int64_t last(int64_t count) const { return count * (rank + 1) / size; }
};

// Calls function(team) in up to that many threads.
template <class Function>
void in_parallel(int64_t threads, const Function& function) {
  if (threads <= 1) return function(Team{0, 1});
  GOMP_parallel(
      [](void* data) {
        (*static_cast<const Function*>(data))(Team{omp_get_thread_num(), omp_get_num_threads()});
      },
      const_cast<Function*>(&function), static_cast<unsigned>(threads), 0);
}

// Memory that is freed with this object; null where there is none.
template <class T>
struct Memory {
  T* data;

  explicit Memory(int64_t count)
      : data(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 127) / 64 * 64))) {}
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
};

// Elements (n, channel, place) of a tensor (N, C, H, W), contiguous or channels_last.
struct Map {
  int64_t channels, places, of_channel, of_place;

  Map(int64_t channels, int64_t places, bool last)
      : channels(channels), places(places), of_channel(last ? 1 : places),
        of_place(last ? channels : 1) {}
  // Of channel 0; `row` counts the places of all images.
  int64_t offset(int64_t row) const {
    if (of_channel == 1) return row * channels;
    return row + row / places * (channels - 1) * places;
  }
};

// Numbers of a convolution, in the order in which fst/ops/cpp passes them.
struct Geometry {
  int64_t images, height, width, rows, columns;  // input map, output map
  int64_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;

  struct Position {
    int32_t image, row, column;
  };

  Position position(int32_t index) const {
    const auto of_image = static_cast<int32_t>(rows * columns);
    const auto of_row = static_cast<int32_t>(columns);
    const int32_t image = index / of_image, inside = index - image * of_image;
    return {image, inside / of_row, inside % of_row};
  }
  int64_t taps() const { return kernel_h * kernel_w; }
  int64_t positions() const { return rows * columns; }  // of an image
  int64_t span_h() const { return (kernel_h - 1) * dilation_h + 1; }
  int64_t span_w() const { return (kernel_w - 1) * dilation_w + 1; }
};

inline bool ascending(const int32_t* index, int64_t count, int64_t end) {
  bool bad = index[0] < 0 || index[count - 1] >= end;
  for (int64_t k = 1; k < count; ++k) bad |= index[k] < index[k - 1];
  return !bad;
}

// Calls function(format, geometry) for a list of its positions, in the format of `kind`.
template <class Function>
Status on_list(const int32_t* index, int64_t count, const int64_t* geometry, int64_t kind,
               Function function) {
  Geometry g;
  std::memcpy(&g, geometry, sizeof(g));
  if (!ascending(index, count, g.images * g.positions())) return NOT_ASCENDING;
  Status status = DONE;
  with_format(kind, [&](auto format) { status = function(format, g); });
  return status;
}

// Calls with a number of vectors as a constant.
template <class Function>
void with_vectors(int64_t vectors, const Function& function) {
  if (vectors == 1) return function(std::integral_constant<int, 1>{});
  if (vectors == 2) return function(std::integral_constant<int, 2>{});
  if constexpr (VECTORS > 2) function(std::integral_constant<int, VECTORS>{});
}

// Channels of places of a map side by side: to[i][c] = (from[offset[i] + c * step] - mean[c]) *
// scale[i] for c < valid; 0 from there to WIDE, and where the offset is negative. What lies `ahead`
// is fetched for a later call.
template <class T, int WIDE>
void pack(const typename T::Int* from, const int64_t* offset, int64_t count, int64_t step,
          int64_t valid, int64_t ahead, const float* mean, const float* scale, float* to) {
  float less[WIDE] = {};
  for (int64_t c = 0; mean && c < valid; ++c) less[c] = mean[c];
  for (int64_t i = 0; i < count; ++i, to += WIDE) {
    const typename T::Int* x = from + offset[i];
    const float factor = scale ? scale[i] : 1.0f;
    __builtin_prefetch(x + ahead);
    if (offset[i] < 0) {
      std::fill_n(to, WIDE, 0.0f);
    } else if (valid == WIDE && step == 1) {
      for (int c = 0; c < WIDE; ++c) to[c] = (T::wide(x[c]) - less[c]) * factor;
    } else if (valid == WIDE) {
      for (int c = 0; c < WIDE; ++c) to[c] = (T::wide(x[c * step]) - less[c]) * factor;
    } else {
      for (int c = 0; c < valid; ++c) to[c] = (T::wide(x[c * step]) - less[c]) * factor;
      std::fill(to + valid, to + WIDE, 0.0f);
    }
  }
}

}  // namespace fst

// What the kernels for CPUs share: numbers of 16 and 32 bits, threads, memory.
//
// The kernels are functions of pointers and sizes (`extern "C"`), which need no header of torch.
// The same sources are compiled into one library for each set of instructions, of which a process
// loads one (setup.py, fst/ops/cpp).

#pragma once

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#define FST_EXPORT extern "C" __attribute__((visibility("default")))
// Exports the kinds of a function's arguments, from which fst/ops/cpp makes its call.
#define FST_ARGUMENTS(function) \
  FST_EXPORT const char* function##_arguments() { return fst::arguments(&function); }

// Of the OpenMP runtime that torch has loaded. Nothing links it, so there is no second pool.
// GNU's and LLVM's runtimes both have these functions, whatever compiler is used here.
extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
void GOMP_barrier();
int omp_get_thread_num();
int omp_get_num_threads();
}

namespace fst {

// One letter for each argument of a function: p pointer, i integer.
template <class... A>
const char* arguments(int (*)(A...)) {
  static_assert(((std::is_pointer_v<A> || std::is_same_v<A, int64_t>) && ...));
  static const char text[] = {(std::is_pointer_v<A> ? 'p' : 'i')..., 0};
  return text;
}

enum Status { DONE, NO_MEMORY, NOT_ASCENDING, BAD_NUMBERS, NOT_FINITE };
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

// Calls with the format of a kind of elements; BAD_NUMBERS where there is none.
template <class Function>
Status with_format(int64_t kind, const Function& function) {
  if (kind == SINGLE) return function(Single{});
  if (kind == BRAIN) return function(Brain{});
  if (kind == HALF) return function(Half{});
  return BAD_NUMBERS;
}

inline bool within(int64_t least, int64_t most, std::initializer_list<int64_t> numbers) {
  return std::all_of(numbers.begin(), numbers.end(),
                     [=](int64_t number) { return least <= number && number <= most; });
}

// Whether a product of numbers from 0 on is at most so much.
inline bool fits(double most, std::initializer_list<int64_t> factors) {
  for (const int64_t factor : factors) most /= static_cast<double>(factor);
  return most >= 1;
}

// Bytes of the first data cache: what an inner loop reads again and again should fit into it.
inline const int64_t FIRST_CACHE = [] {
  int64_t bytes = 0;
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
#endif
  return bytes > 0 ? bytes : int64_t{32768};
}();

inline int64_t ceil_div(int64_t whole, int64_t size) { return (whole + size - 1) / size; }

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

}  // namespace fst

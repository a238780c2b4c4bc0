// Y and dX of a convolution from lists of what is not zero in the weight (sparse_weight_product.h).

#include "sparse_weight_product.h"

namespace fst {
namespace {

constexpr int64_t AHEAD = 512;  // entries of lists, which may come from memory

// SETS of sums take turns: entries of a small tile would wait for the sums of those before.
template <int SETS, int HIGH, int WIDE>
void accumulate_runs(const Run* run, int64_t runs, Entries list, const float* x, int64_t pitch,
                     bool fresh, float* y, int64_t of_row, int64_t of_tile, Lines& lines) {
  for (const Run* last = run + runs; run < last; ++run, y += of_tile) {
    lines.fetch();
    alignas(LINE) vec sums[SETS][HIGH][WIDE];
#pragma GCC unroll 2
    for (auto& sum : sums) {
#pragma GCC unroll 32
      for (int i = 0; i < HIGH; ++i) {
#pragma GCC unroll 32
        for (int j = 0; j < WIDE; ++j) sum[i][j] = vec{};
      }
    }
    const auto add = [&](vec value, uint16_t offset, auto& sum) __attribute__((always_inline)) {
      const char* row = reinterpret_cast<const char*>(x) + offset * UNIT;
#pragma GCC unroll 32
      for (int i = 0; i < HIGH; ++i) {
        const vec* from = reinterpret_cast<const vec*>(row + i * pitch);
#pragma GCC unroll 32
        for (int j = 0; j < WIDE; ++j) sum[i][j] += value * from[j];
      }
    };
    // Addresses that wait for loads would hold back the loads of x: offsets are read four ahead.
    int64_t k = run->begin;
    uint64_t next = four_offsets(list.offsets + k);
    for (; k + 4 <= run->end; k += 4) {
      const uint64_t offsets = next;
      if (HIGH * WIDE <= TILE / 2) {  // of a small tile lists are read fast
        __builtin_prefetch(list.values + k + AHEAD);
        __builtin_prefetch(list.offsets + k + AHEAD);
      }
      next = four_offsets(list.offsets + k + 4);
      const Four values(list.values + k);
      add(values.at<0>(), static_cast<uint16_t>(offsets), sums[0]);
      add(values.at<1>(), static_cast<uint16_t>(offsets >> 16), sums[SETS - 1]);
      add(values.at<2>(), static_cast<uint16_t>(offsets >> 32), sums[0]);
      add(values.at<3>(), static_cast<uint16_t>(offsets >> 48), sums[SETS - 1]);
    }
    for (; k < run->end; ++k, next >>= 16) {
      add(list.values[k] - vec{}, static_cast<uint16_t>(next), sums[0]);
    }
#pragma GCC unroll 32
    for (int i = 0; i < HIGH; ++i) {
#pragma GCC unroll 32
      for (int j = 0; j < WIDE; ++j) {
        vec& place = *reinterpret_cast<vec*>(y + i * of_row + j * V);
        const vec sum = SETS > 1 ? sums[0][i][j] + sums[1][i][j] : sums[0][i][j];
        place = fresh ? sum : place + sum;
      }
    }
  }
}

template <int SETS, int HIGH, int... WIDE>
Accumulate of_width(int64_t wide, std::integer_sequence<int, WIDE...>) {
  static constexpr Accumulate all[] = {accumulate_runs<SETS, HIGH, WIDE + 1>...};
  return all[wide - 1];
}

template <int SETS, int MOST>
Accumulate of_size(int64_t high, int64_t wide) {
  if (high == 1) return of_width<SETS, 1>(wide, std::make_integer_sequence<int, MOST>());
  if (high == 2) return of_width<SETS, 2>(wide, std::make_integer_sequence<int, MOST / 2>());
  if (high == 3) return of_width<SETS, 3>(wide, std::make_integer_sequence<int, MOST / 3>());
  return of_width<SETS, 4>(wide, std::make_integer_sequence<int, MOST / 4>());
}

}  // namespace

Accumulate find_accumulate(int64_t high, int64_t wide, bool small) {
  return small ? of_size<2, SMALL>(high, wide) : of_size<1, TILE>(high, wide);
}

}  // namespace fst

using namespace fst;

// Y or dX, in the kind of the source. Shapes: source (images, groups * in, height, width) or, for
// dX, (images, groups * out, rows, columns); result the other; residual as the result; bias
// (channels of the result). bias and residual may be null. layouts: whether source, result (and
// residual) are channels_last. lists: fst_zeros_lists's of the same numbers.
FST_EXPORT int fst_zeros_product(const void* source, int64_t kind, const int64_t* layouts,
                                 const int64_t* numbers, void* lists, int64_t bytes,
                                 const float* bias, const void* residual, int64_t activation,
                                 void* result, int64_t threads) {
  if (activation < 0 || activation >= ACTIVATIONS) return BAD_NUMBERS;
  return with_plan(numbers, [&](Plan plan) {
    auto* head = static_cast<int64_t*>(lists);
    if (!belong(plan, head, bytes)) return BAD_NUMBERS;
    const bool from_last = layouts[0] != 0, to_last = layouts[1] != 0;
    if (plan.flat && !(from_last && to_last)) {  // images do not follow each other without a gap
      plan.images = numbers[0];
      plan.columns.source = plan.columns.result = numbers[1] * numbers[2];
    }
    const Map from(plan.groups * plan.sources, plan.rows.source * plan.columns.source, from_last);
    const Map to(plan.groups * plan.results, plan.rows.result * plan.columns.result, to_last);
    return with_format(kind, [&](auto format) {
      using T = decltype(format);
      using Int = typename T::Int;
      Run* runs = reinterpret_cast<Run*>(head + HEAD);
      const Product<T> task{
          static_cast<const Int*>(source), static_cast<Int*>(result),    plan, runs,
          entries_of(plan, runs),          {bias, residual, activation}, from, to};
      return task.run(threads);
    });
  });
}
FST_ARGUMENTS(fst_zeros_product)

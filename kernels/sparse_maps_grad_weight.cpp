// The weight gradient by zeros of one of its operands:
//     dW[co][ci][tap] = sum over output positions k of weight[k] * dY[k][co] * X[pixel k, tap][ci]
//
// One of the maps, X or dY, is read for its zeros: `chosen`; the other one is `dense`. Of up to 64
// positions of the chosen map, each channel has a mask of its non-zeros. A tap has a mask too: of
// positions whose partner in the dense map exists, and is in the list where there is one. For each
// channel and tap the sums of a row of dW are vectors of channels of the dense map in registers, to
// which each bit of both masks adds a row of the dense map. For a strip of rows of the chosen map:
//
//     chosen  [chunk][channel][64]                             and masks [chunk][channel]
//     dense   [block of channels][slot of a row][pixel][block's channels]
//     dW      [block of channels][tap][channel of the chosen map][block's channels]
//
// Where X is chosen and the stride is more than 1, a chunk has pixels of one phase, which see the
// same taps. Neighbouring taps that see the same positions are added together where their sums fit.
// `threads` are sets of members: each set has a part of the chosen map and a dW of its own, and its
// members share the blocks.
//
// With a mean m of X, the list's dW is of X - m inside of the image, plus sums * m. Where X is
// chosen, its zeros stay: sum of s * dY * (X - m) = sum of s * dY * X - (sum of s * dY) * m, for
// each tap over the positions that see the image through it.

#include "sparse_maps_grad_weight.h"

namespace {

using namespace fst;
using namespace fst::maps;

constexpr int64_t STRIP = 512;  // positions of a strip, if rows are not longer
constexpr int64_t FEWEST_ROWS = 4;
constexpr int64_t MOST_OWN = 24 << 20;  // numbers of dW of all sets

template <class T>
struct MapsGradWeight : Positions {
  using Int = typename T::Int;
  const Int *chosen, *dense;
  const float *mean, *sums;
  int64_t in, out, groups;
  int64_t deep, wide;  // channels of a group of the chosen map, of the dense one
  Blocks blocks;
  Map of_chosen, of_dense;

  int64_t numbers() const { return groups * blocks.padded() * taps() * deep; }
  int64_t of_block(int64_t group, int64_t block) const {
    return (group * blocks.padded() + blocks.first(block)) * taps() * deep;
  }

  // A thread's memory of a strip.
  struct Own {
    Chunk* chunks;
    Tap* taps;
    float *values, *packed;
    uint64_t* masks;
    int32_t* of_row;
    int64_t* row;  // of each slot
    int64_t slots;
  };

  // Values and masks of a chunk's channels.
  void read_chosen(const Chunk& chunk, int64_t group, float* values, uint64_t* masks) const {
    const Int* from = chosen + group * deep * of_chosen.channel_stride;
    int64_t offset[CHUNK];
    for (int64_t k = 0; k < chunk.count; ++k) {
      const int64_t row = chunk.row[k];
      offset[k] = of_chosen.offset(row * columns.result) + chunk.column[k] * of_chosen.place_stride;
    }
    if (chunk.count < CHUNK) std::fill_n(values, deep * CHUNK, 0.0f);
    if (of_chosen.channel_stride == 1) {
      transpose<T, Single>([&](int64_t k) { return from + offset[k]; }, chunk.count, deep,
                           reinterpret_cast<int32_t*>(values), CHUNK);
    }
    for (int64_t c = 0; c < deep; ++c, values += CHUNK) {
      if (of_chosen.channel_stride != 1) {
        for (int64_t k = 0; k < chunk.count; ++k) {
          values[k] = T::wide(from[offset[k] + c * of_chosen.channel_stride]);
        }
      }
      for (int64_t k = 0; factors && !of_input && k < chunk.count; ++k) values[k] *= chunk.scale[k];
      uint64_t mask = 0;
#pragma GCC unroll 16
      for (int v = 0; v < CHUNK / V; ++v) {
        mask |= uint64_t{nonzeros(*reinterpret_cast<const vec*>(values + v * V))} << v * V;
      }
      masks[c] = mask;
    }
  }

  // A row of the dense map, one block of channels.
  void pack_dense(int64_t row, int64_t group, int64_t block, float* to) const {
    const int64_t width = blocks.width(block), valid = blocks.valid(block);
    const int64_t channel = group * wide + blocks.first(block), length = columns.source;
    const int64_t place = row * length;
    const Int* from = dense + of_dense.offset(place) + channel * of_dense.channel_stride;
    if (of_dense.channel_stride != 1) {
      if (valid < width) std::fill_n(to, length * width, 0.0f);
      transpose<T, Single>([&](int64_t i) { return from + i * of_dense.channel_stride; }, valid,
                           length, reinterpret_cast<int32_t*>(to), width);
    }
    for (int64_t w = 0; w < length; ++w, to += width) {
      const float scale = factors && of_input ? factors[place + w] : 1.0f;
      if (scale == 0) continue;  // never read
      if (of_dense.channel_stride == 1) {
        copy<T, Single>(from + w * of_dense.place_stride, valid, reinterpret_cast<int32_t*>(to));
        std::fill(to + valid, to + width, 0.0f);
      }
      if (factors && of_input) {
        for (int64_t c = 0; c < width; ++c) to[c] *= scale;
      } else if (mean && !of_input) {
        for (int64_t c = 0; c < valid; ++c) to[c] -= mean[channel + c];
      }
    }
  }

  // Rows [first, last) of the chosen map, some blocks of channels, to dW of a set.
  void add_strip(int64_t first, int64_t last, Team member, Own& own, float* result) const {
    const int64_t chunks = find_chunks(first, last, own.chunks);
    if (!chunks) return;
    own.slots = Slots(rows, first, last, own.of_row, own.row).count;
    for (int64_t i = 0; i < chunks; ++i) {
      find_partners(own.chunks[i], first, own.of_row, own.taps + i * taps());
    }
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t i = 0; i < chunks; ++i) {
        read_chosen(own.chunks[i], group, own.values + i * deep * CHUNK, own.masks + i * deep);
      }
      for (int64_t b = member.first(blocks.count); b < member.last(blocks.count); ++b) {
        const int64_t width = blocks.width(b);
        for (int64_t slot = 0; slot < own.slots; ++slot) {
          float* to = own.packed + slot * columns.source * width;
          if (own.row[slot] >= 0) pack_dense(own.row[slot], group, b, to);
        }
        float* of_tap = result + of_block(group, b);
        for (int64_t t = 0, some; t < taps(); t += some, of_tap += some * deep * width) {
          some = std::min<int64_t>(TOGETHER, columns.taps - t % columns.taps);
          for (int64_t i = 0; i < chunks; ++i) {
            add_chunk(width / V, deep, own.values + i * deep * CHUNK, own.masks + i * deep,
                      own.taps + i * taps() + t, some, own.packed, of_tap);
          }
        }
      }
    }
  }

  // Sums of dY over a part of the list: positions that see the image through every tap apart.
  void add_sums(Team team, double* inside, double* of_tap) const {
    const int64_t channels = groups * out, step = of_dense.channel_stride;
    const auto of_output = [](Axis axis) {
      std::swap(axis.source, axis.result);
      axis.backward = false;
      return axis;
    };
    const Axis down = of_output(rows), right = of_output(columns);
    std::fill_n(inside, channels * (1 + taps()), 0.0);
    const auto add = [&](int64_t k, double* to) {
      const Int* from = dense + of_dense.offset(index[k]);
      const float scale = factors[index[k]];
      for (int64_t c = 0; c < channels; ++c) to[c] += T::wide(from[c * step]) * scale;
    };
    for (int64_t k = team.first(count); k < team.last(count); ++k) {
      if (k > 0 && index[k] == index[k - 1]) continue;
      const int64_t p = index[k] / columns.source % rows.source, q = index[k] % columns.source;
      bool whole = true;
      for (int64_t r = 0; r < rows.taps; ++r) whole &= down.at(p, r) >= 0;
      for (int64_t s = 0; s < columns.taps; ++s) whole &= right.at(q, s) >= 0;
      if (whole) add(k, inside);
      for (int64_t t = 0; !whole && t < taps(); ++t) {
        const bool seen = down.at(p, t / columns.taps) >= 0 && right.at(q, t % columns.taps) >= 0;
        if (seen) add(k, of_tap + t * channels);
      }
    }
  }

  // One tap of one block: the sum of all sets, and the share of the mean.
  void write(int64_t unit, int64_t sets, float* all, int64_t parts_of_sums, const double* shares,
             bool last, Int* result) const {
    const int64_t t = unit % taps(), b = unit / taps() % blocks.count;
    const int64_t group = unit / (taps() * blocks.count), channels = groups * out;
    const int64_t width = blocks.width(b), valid = blocks.valid(b);
    float* sum = all + of_block(group, b) + t * deep * width;
    for (int64_t set = 1; set < sets; ++set) {
      const float* more = sum + set * numbers();
      for (int64_t i = 0; i < deep * width; ++i) sum[i] += more[i];
    }
    const auto share = [&](int64_t channel) {  // what a mean is multiplied by
      double found = sums ? sums[channel * taps() + t] : 0;
      for (int64_t i = 0; of_input && factors && i < parts_of_sums; ++i) {
        const double* own = shares + i * channels * (1 + taps());
        found -= own[channel] + own[(1 + t) * channels + channel];
      }
      return static_cast<float>(found);
    };
    const int64_t first = group * wide + blocks.first(b);
    if (mean && of_input) {
      float of_out[MOST_VECTORS * V];
      for (int64_t n = 0; n < valid; ++n) of_out[n] = share(first + n);
      for (int64_t c = 0; c < deep; ++c) {
        for (int64_t n = 0; n < valid; ++n) sum[c * width + n] += of_out[n] * mean[group * in + c];
      }
    } else if (mean) {
      for (int64_t c = 0; c < deep; ++c) {
        const float of_out = share(group * out + c);
        for (int64_t n = 0; n < valid; ++n) sum[c * width + n] += of_out * mean[first + n];
      }
    }
    const int64_t of_in = last ? 1 : taps(), of_out = in * taps();
    const int64_t of_deep = of_input ? of_in : of_out, of_wide = of_input ? of_out : of_in;
    Int* to = result + group * out * of_out + blocks.first(b) * of_wide + t * (last ? in : 1);
    const auto row = [&](int64_t c) { return reinterpret_cast<const int32_t*>(sum + c * width); };
    if (of_deep == 1) transpose<Single, T>(row, deep, valid, to, of_wide);
    for (int64_t c = 0; of_deep != 1 && c < deep; ++c, to += of_deep) {
      if (of_wide == 1) {
        copy<Single, T>(row(c), valid, to);
      } else {
        for (int64_t n = 0; n < valid; ++n) to[n * of_wide] = T::narrow(sum[c * width + n]);
      }
    }
  }

  Status run(int64_t threads, bool last, Int* result) const {
    int64_t members = 1;
    while (members < threads && threads / members * numbers() > MOST_OWN) ++members;
    members = std::min(members, blocks.count);
    const int64_t sets = std::clamp<int64_t>(threads / members, 1, total());
    const int64_t wanted = std::max(ceil_div(STRIP, columns.result), FEWEST_ROWS);
    const int64_t length = std::min(wanted, ceil_div(total(), sets));
    const int64_t most = length * columns.result;
    const int64_t chunks = ceil_div(most, CHUNK) + 2 * std::min(rows.phases(), rows.taps) *
                                                       std::min(columns.phases(), columns.taps);
    int64_t slots = 0;
    for (int64_t set = 0; set < sets; ++set) {
      const Team share{static_cast<int>(set), static_cast<int>(sets)};
      for (int64_t row = share.first(total()); row < share.last(total()); row += length) {
        const int64_t end = std::min(row + length, share.last(total()));
        slots = std::max(slots, Slots(rows, row, end, nullptr, nullptr).count);
      }
    }
    const int64_t widest = ceil_div(blocks.vectors, blocks.count) * V;
    const int64_t dense_numbers = slots * columns.source * widest;
    if (slots * columns.source > INT32_MAX) return BAD_NUMBERS;
    const int64_t of_sums = mean && of_input && factors ? groups * out * (1 + taps()) : 0;
    Memory<float> all(sets * numbers()), values(threads * chunks * deep * CHUNK);
    Memory<float> packed(threads * dense_numbers);
    Memory<uint64_t> masks(threads * chunks * deep);
    Memory<Chunk> all_chunks(threads * chunks);
    Memory<Tap> all_taps(threads * chunks * taps());
    Memory<int32_t> of_rows(threads * length);
    Memory<int64_t> slot_rows(threads * slots);
    Memory<double> shares(threads * of_sums);
    if (!all.data || !values.data || !packed.data || !masks.data || !all_chunks.data ||
        !all_taps.data || !of_rows.data || !slot_rows.data || !shares.data) {
      return NO_MEMORY;
    }
    in_parallel(threads, [&](Team team) {
      Own own{all_chunks.data + team.rank * chunks,
              all_taps.data + team.rank * chunks * taps(),
              values.data + team.rank * chunks * deep * CHUNK,
              packed.data + team.rank * dense_numbers,
              masks.data + team.rank * chunks * deep,
              of_rows.data + team.rank * length,
              slot_rows.data + team.rank * slots,
              0};
      for (int64_t i = team.rank; i < sets * members; i += team.size) {
        const Team share{static_cast<int>(i / members), static_cast<int>(sets)};
        const Team member{static_cast<int>(i % members), static_cast<int>(members)};
        float* to = all.data + share.rank * numbers();
        for (int64_t b = member.first(blocks.count); b < member.last(blocks.count); ++b) {
          for (int64_t group = 0; group < groups; ++group) {
            std::fill_n(to + of_block(group, b), blocks.width(b) * taps() * deep, 0.0f);
          }
        }
        for (int64_t row = share.first(total()); row < share.last(total()); row += length) {
          add_strip(row, std::min(row + length, share.last(total())), member, own, to);
        }
      }
      double* own_shares = shares.data + team.rank * of_sums;
      if (of_sums) add_sums(team, own_shares, own_shares + groups * out);
      team.wait();
      const int64_t units = groups * blocks.count * taps();
      for (int64_t i = team.first(units); i < team.last(units); ++i) {
        write(i, sets, all.data, team.size, shares.data, last, result);
      }
    });
    return DONE;
  }
};

}  // namespace

// Shapes: grad_output (images, groups * out, rows, columns); input (images, groups * in, height,
// width); index and weight (count) of the list, or null; mean (groups * in) and sums (groups * out,
// kh * kw), with a list, or null; result (groups * out, in, kh, kw). `of_input`: X's zeros are left
// out, not those of dY. `layouts`: whether input, grad_output, result are channels_last.
FST_EXPORT int fst_maps_grad_weight(const void* grad_output, const void* input, int64_t kind,
                                    int64_t of_input, const int32_t* index, const float* weight,
                                    int64_t count, const float* mean, const float* sums,
                                    const int64_t* geometry, int64_t in, int64_t out,
                                    int64_t groups, const int64_t* layouts, void* result,
                                    int64_t threads) {
  const Geometry g(geometry);
  if (!g.holds(in, out, groups, MOST_TAPS)) return BAD_NUMBERS;
  const int64_t all = g.images * g.positions();
  if (index && (count < 1 || !ascending(index, count, all))) return NOT_ASCENDING;
  Memory<float> factors(index ? all : 0);
  if (!factors.data) return NO_MEMORY;
  if (index) std::fill_n(factors.data, all, 0.0f);
  for (int64_t k = 0; index && k < count; ++k) factors.data[index[k]] += weight[k];
  return with_format(kind, [&](auto format) {
    using T = decltype(format);
    using Int = typename T::Int;
    const auto* x = static_cast<const Int*>(input);
    const auto* dy = static_cast<const Int*>(grad_output);
    const Map of_x(groups * in, g.height * g.width, layouts[0]);
    const Map of_dy(groups * out, g.positions(), layouts[1]);
    const bool by_x = of_input != 0;
    const Positions positions{by_x,
                              index,
                              count,
                              index ? factors.data : nullptr,
                              g.images,
                              axis_of_rows(g, by_x),
                              axis_of_columns(g, by_x)};
    const MapsGradWeight<T> task{positions,
                                 by_x ? x : dy,
                                 by_x ? dy : x,
                                 mean,
                                 mean ? sums : nullptr,
                                 in,
                                 out,
                                 groups,
                                 by_x ? in : out,
                                 by_x ? out : in,
                                 Blocks(by_x ? out : in),
                                 by_x ? of_x : of_dy,
                                 by_x ? of_dy : of_x};
    return task.run(threads, layouts[2], static_cast<Int*>(result));
  });
}
FST_ARGUMENTS(fst_maps_grad_weight)

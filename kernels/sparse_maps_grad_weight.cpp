// The weight gradient by zeros of one of its operands:
//     dW[co][ci][tap] = sum over output positions k of weight[k] * dY[k][co] * X[pixel k, tap][ci]
//
// One of the maps, X or dY, is read for its zeros: `chosen`; the other one is `dense`. Positions of
// the chosen map that see the same taps are in chunks, so that no tap needs a border. Each channel
// of a chunk has a list of what is not zero, and of the places in the dense map that the first tap
// sees. What the other taps see is equally far away: for several of them and some channels of the
// dense map the sums, numbers of dW, stay in registers (sparse_weight.cpp). For a strip of rows of
// the chosen map:
//
//     dense   [block of channels][slot of a row][pixel][block's channels]
//     dW      [block of channels][channel of the chosen map][tap][block's channels]
//
// Where X's zeros are left out at the positions of a list, dY is packed at these alone, a chunk is
// some of them, and each tap has lists of what it sees from there.
//
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

constexpr int64_t STRIP = 1024, FEWEST_ROWS = 4;  // positions and rows of a strip, at least
constexpr int64_t SLICE = 64;                     // channels whose numbers are listed at a time
constexpr int64_t AHEAD = 8;                      // positions of a list until one is fetched
constexpr int64_t OF_LIST = 256;                  // positions of a list in a strip, about
constexpr int64_t MOST_OWN = 24 << 20;            // numbers of dW of all sets

template <class T>
struct MapsGradWeight {
  using Int = typename T::Int;
  const Int *chosen, *dense;
  bool of_input;          // the chosen map is X, else dY
  const int32_t* listed;  // positions of the list, each of them once
  int64_t count;
  const float* factors;  // of each output position, 0 where it is not in the list; null: all 1
  const float *mean, *sums;
  int64_t images, in, out, groups;
  int64_t deep, wide;           // channels of a group of the chosen map, of the dense one
  const Views &rows, &columns;  // of the chosen map; their source is the dense one
  Map of_chosen, of_dense;
  bool alone;                    // positions are those of the list, and taps have their own lists
  int64_t most_high, most_wide;  // taps of a tile
  int64_t width, blocks;         // channels of a block; how many blocks
  int64_t most_positions;        // of a chunk

  int64_t taps() const { return rows.taps * columns.taps; }
  int64_t lists() const { return alone ? taps() : 1; }  // of a chunk and channel
  int64_t channels() const { return alone ? std::min(SLICE, deep) : deep; }  // that have lists
  int64_t total() const { return alone ? count : images * rows.result; }
  int64_t pitch() const { return most_positions + V; }  // of a channel's numbers
  int64_t numbers() const { return groups * blocks * width * taps() * deep; }
  float* of_block(float* all, int64_t group, int64_t block) const {
    return all + (group * blocks + block) * width * taps() * deep;
  }

  // Blocks of as many vectors as the sums of a position's taps allow in registers.
  void cut() {
    alone = factors && of_input;
    most_high = alone ? 1 : HIGHEST;
    most_wide = alone || columns.apart != 1 ? 1 : TILE;
    const int64_t sums = std::min(rows.together, most_high) * std::min(columns.together, most_wide);
    const int64_t vectors = ceil_div(wide, V);
    const auto loads = [&](int64_t n) { return ceil_div(vectors, n) * (n * sums + 1); };
    int64_t best = 1;
    for (int64_t n = 2; n <= std::min<int64_t>(TILE / sums, MOST_VECTORS); ++n) {
      if (loads(n) <= loads(best)) best = n;
    }
    width = best * V;
    blocks = ceil_div(vectors, best);
    // What the positions of a chunk see, and those of the rows beside them.
    const int64_t all = images * rows.result * columns.result / (rows.phases() * columns.phases());
    const int64_t positions = factors ? count : all;
    const int64_t pixels = alone ? count : images * rows.source * columns.source;
    const int64_t bytes = FIRST_CACHE / 10 * (alone ? 10 : rows.together > 1 ? 5 : 8);
    const int64_t fitting = bytes * positions / (std::max<int64_t>(pixels, 1) * width * 4);
    most_positions = std::clamp<int64_t>(fitting / V * V, V, CHUNK);
  }
  int64_t valid(int64_t block) const { return std::min(width, wide - block * width); }

  // A thread's memory of a strip.
  struct Own {
    Chunk* chunks;
    Run* runs;
    Entries entries;
    float *values, *packed;
    int32_t* of_row;
    int64_t *row, *seen;  // of each slot; of each tap, by the positions of a list
  };

  // Positions of rows [first, last); how many chunks.
  int64_t find_chunks(int64_t first, int64_t last, const Own& own) const {
    int64_t used = 0;
    rows.each([&](const View* down, const View* lowest) {
      columns.each([&](const View* across, const View* rightmost) {
        Chunk* chunk = nullptr;
        for (int64_t image = first / rows.result; image * rows.result < last; ++image) {
          for (const View* r = down; r < lowest; ++r) {
            const int64_t row = image * rows.result + r->place;
            if (row < first || row >= last) continue;
            const int64_t slot = own.of_row[row - first] + r->partner;
            for (const View* s = across; s < rightmost; ++s) {
              const int64_t position = row * columns.result + s->place;
              if (factors && !of_input && factors[position] == 0) continue;
              const int64_t pixel = slot * columns.source + s->partner;
              int64_t place = chunk ? (pixel - chunk->origin) * (width * 4 / UNIT) : 0;
              if (!chunk || chunk->count == most_positions || place > UINT16_MAX) {
                chunk = own.chunks + used;
                chunk->runs = own.runs + used++ * deep;
                chunk->down = down, chunk->across = across;
                chunk->count = place = 0, chunk->origin = pixel;
              }
              chunk->position[chunk->count] = static_cast<int32_t>(position);
              chunk->place[chunk->count++] = static_cast<int32_t>(place);
            }
          }
        }
      });
    });
    return used;
  }

  // Numbers of some channels of the chosen map at these places, a row of `pitch` for each; zeros
  // where a place is negative.
  void read_chosen(const int64_t* offset, int64_t count, int64_t first, int64_t some,
                   float* values) const {
    static const Int zeros[SLICE] = {};
    const Int* from = chosen + first * of_chosen.channel_stride;
    if (of_chosen.channel_stride == 1) {
      const auto row = [&](int64_t k) { return offset[k] < 0 ? zeros : from + offset[k]; };
      transpose<T, Single>(row, count, some, reinterpret_cast<int32_t*>(values), pitch());
    }
    for (int64_t c = 0; c < some; ++c, values += pitch()) {
      for (int64_t k = 0; of_chosen.channel_stride != 1 && k < count; ++k) {
        const int64_t at = offset[k] + c * of_chosen.channel_stride;
        values[k] = offset[k] < 0 ? 0.0f : T::wide(from[at]);
      }
      std::fill_n(values + count, V, 0.0f);
    }
  }

  // Appends the lists of some channels of a chunk to `used` entries; how many there are then.
  int64_t append_lists(const Chunk& chunk, int64_t some, Run* run, const Own& own,
                       int64_t used) const {
    for (int64_t c = 0; c < some; ++c, ++run) {
      run->begin = used;
      for (int64_t k = 0; k < chunk.count; k += V) {
        const vec x = *reinterpret_cast<const vec*>(own.values + c * pitch() + k);
        const ints places = *reinterpret_cast<const ints*>(chunk.place + k);
        used += append_kept(x, places, nonzeros(x), own.entries, used);
      }
      run->end = used;
    }
    return used;
  }

  // Appends the lists of all channels of a chunk.
  int64_t list_chunk(const Chunk& chunk, int64_t group, const Own& own, int64_t used) const {
    int64_t offset[CHUNK];
    for (int64_t k = 0; k < chunk.count; ++k) {
      const int64_t column = chunk.position[k] % columns.result;
      offset[k] = of_chosen.offset(chunk.position[k] - column) + column * of_chosen.place_stride;
    }
    for (int64_t first = 0; first < deep; first += SLICE) {
      const int64_t some = std::min(SLICE, deep - first);
      read_chosen(offset, chunk.count, group * deep + first, some, own.values);
      for (int64_t c = 0; factors && c < some; ++c) {
        for (int64_t k = 0; k < chunk.count; ++k) {
          own.values[c * pitch() + k] *= factors[chunk.position[k]];
        }
      }
      used = append_lists(chunk, some, chunk.runs + first, own, used);
    }
    return used;
  }

  // Adds what a chunk's lists give to a block of dW.
  void add_chunk(const Chunk& chunk, const Own& own, float* result) const {
    const int64_t high = chunk.high(), across = chunk.wide(), n = width / V;
    Lines none{};
    for (int64_t s = 0, beside; s < across; s += beside) {
      beside = std::min({most_wide, across - s, TILE / n});
      for (int64_t r = 0, below; r < high; r += below) {
        below = std::min({most_high, high - r, TILE / (beside * n)});
        const int64_t pixel = chunk.origin + r * rows.apart * columns.source + s * columns.apart;
        const int64_t tap = (chunk.down->first + r) * columns.taps + chunk.across->first + s;
        find_accumulate(below, beside * n, false)(
            chunk.runs, deep, own.entries, own.packed + pixel * width,
            rows.apart * columns.source * width * 4, false, result + tap * width,
            columns.taps * width, taps() * width, none);
      }
    }
  }

  static void fetch(const Int* x, int64_t count) {
    for (int64_t c = 0; c < count; c += LINE / sizeof(Int)) __builtin_prefetch(x + c);
  }

  // A row of the dense map, one block of channels.
  void pack_dense(int64_t row, int64_t group, int64_t block, float* to) const {
    const int64_t valid = this->valid(block), length = columns.source;
    const int64_t channel = group * wide + block * width;
    const int64_t place = row * length;
    const Int* from = dense + of_dense.offset(place) + channel * of_dense.channel_stride;
    if (of_dense.channel_stride != 1) {
      if (valid < width) std::fill_n(to, length * width, 0.0f);
      transpose<T, Single>([&](int64_t i) { return from + i * of_dense.channel_stride; }, valid,
                           length, reinterpret_cast<int32_t*>(to), width);
    }
    for (int64_t w = 0; w < length; ++w, to += width) {
      if (of_dense.channel_stride == 1) {
        fetch(from + (w + 8 * AHEAD) * of_dense.place_stride, valid);
        copy<T, Single>(from + w * of_dense.place_stride, valid, reinterpret_cast<int32_t*>(to));
        std::fill(to + valid, to + width, 0.0f);
      }
      for (int64_t c = 0; mean && !of_input && c < valid; ++c) to[c] -= mean[channel + c];
    }
  }

  // dY at positions [first, last) of the list times their factors, one block of channels.
  void pack_listed(int64_t first, int64_t last, int64_t group, int64_t block, float* to) const {
    const int64_t valid = this->valid(block), step = of_dense.channel_stride;
    const int64_t channel = group * wide + block * width;
    const auto at = [&](int64_t k) { return dense + of_dense.offset(listed[k]) + channel * step; };
    for (int64_t k = first; k < last; ++k, to += width) {
      const Int *from = at(k), *ahead = at(std::min(k + AHEAD, last - 1));
      const float factor = factors[listed[k]];
      if (step == 1) {
        fetch(ahead, valid);
        for (int64_t c = 0; c < valid; ++c) to[c] = T::wide(from[c]) * factor;
      } else {
        for (int64_t c = 0; c < valid; ++c) to[c] = T::wide(from[c * step]) * factor;
      }
      std::fill(to + valid, to + width, 0.0f);
    }
  }

  // Chunks of positions [first, last) of the list, and for each tap where it sees X, -1 outside;
  // how many.
  int64_t find_listed(int64_t first, int64_t last, const Own& own) const {
    const Axis down = rows.of_output(), right = columns.of_output();
    int64_t used = 0;
    for (int64_t i = 0; i < last - first; ++i) {
      if (i % most_positions == 0) {
        Chunk& chunk = own.chunks[used];
        chunk.runs = own.runs + used++ * lists() * channels();
        chunk.count = std::min(most_positions, last - first - i), chunk.origin = i;
      }
      own.chunks[used - 1].place[i % most_positions] =
          static_cast<int32_t>(i % most_positions * (width * 4 / UNIT));
      const int64_t row = listed[first + i] / columns.source, image = row / rows.source;
      for (int64_t r = 0, at = i; r < rows.taps; ++r) {
        const int64_t h = down.at(row - image * rows.source, r);
        for (int64_t s = 0; s < columns.taps; ++s, at += last - first) {
          const int64_t w = right.at(listed[first + i] - row * columns.source, s);
          const int64_t line = (image * rows.result + h) * columns.result;
          const bool outside = h < 0 || w < 0;
          own.seen[at] = outside ? -1 : of_chosen.offset(line) + w * of_chosen.place_stride;
        }
      }
    }
    return used;
  }

  // Positions [first, last) of the list, some blocks of channels, to dW of a set.
  void add_listed(int64_t first, int64_t last, Team member, const Own& own, float* result) const {
    const Accumulate accumulate = find_accumulate(1, width / V, width / V <= SMALL);
    const int64_t chunks = find_listed(first, last, own), size = (last - first) * width;
    // A slice's channels: lists of all taps and chunks, and their sums, stay in the second cache.
    const auto each = [&](int64_t channel, auto function) {
      const int64_t some = std::min(channels(), deep - channel);
      for (int64_t i = 0; i < chunks; ++i) {
        for (int64_t t = 0; t < taps(); ++t) {
          function(own.chunks[i], t, some, own.chunks[i].runs + t * channels());
        }
      }
    };
    for (int64_t group = 0; group < groups; ++group) {
      float* packed = own.packed;
      for (int64_t b = member.first(blocks); b < member.last(blocks); ++b, packed += size) {
        pack_listed(first, last, group, b, packed);
      }
      for (int64_t channel = 0; channel < deep; channel += channels()) {
        int64_t used = 0;
        each(channel, [&](const Chunk& chunk, int64_t t, int64_t some, Run* runs) {
          const int64_t* seen = own.seen + t * (last - first) + chunk.origin;
          read_chosen(seen, chunk.count, group * deep + channel, some, own.values);
          used = append_lists(chunk, some, runs, own, used);
        });
        packed = own.packed;
        for (int64_t b = member.first(blocks); b < member.last(blocks); ++b, packed += size) {
          float* sums = of_block(result, group, b) + channel * taps() * width;
          each(channel, [&](const Chunk& chunk, int64_t t, int64_t some, const Run* runs) {
            Lines none{};
            const int64_t r = rows.rank[t / columns.taps], s = columns.rank[t % columns.taps];
            accumulate(runs, some, own.entries, packed + chunk.origin * width, 0, false,
                       sums + (r * columns.taps + s) * width, 0, taps() * width, none);
          });
        }
      }
    }
  }

  // Rows [first, last) of the chosen map, some blocks of channels, to dW of a set.
  void add_strip(int64_t first, int64_t last, Team member, const Own& own, float* result) const {
    const int64_t slots = Slots(rows, first, last, own.of_row, own.row).count;
    const int64_t chunks = find_chunks(first, last, own);
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t i = 0, used = 0; i < chunks; ++i) {
        used = list_chunk(own.chunks[i], group, own, used);
      }
      for (int64_t b = member.first(blocks); b < member.last(blocks); ++b) {
        for (int64_t slot = 0; slot < slots; ++slot) {
          float* to = own.packed + slot * columns.source * width;
          if (own.row[slot] >= 0) pack_dense(own.row[slot], group, b, to);
        }
        for (int64_t i = 0; i < chunks; ++i) {
          add_chunk(own.chunks[i], own, of_block(result, group, b));
        }
      }
    }
  }

  // Sums of dY over a part of the list: positions that see the image through every tap apart.
  void add_sums(Team team, double* inside, double* of_tap) const {
    const int64_t channels = groups * out, step = of_dense.channel_stride;
    const Axis down = rows.of_output(), right = columns.of_output();
    std::fill_n(inside, channels * (1 + taps()), 0.0);
    const auto add = [&](int64_t k, double* to) {
      const Int* from = dense + of_dense.offset(listed[k]);
      const float scale = factors[listed[k]];
      for (int64_t c = 0; c < channels; ++c) to[c] += T::wide(from[c * step]) * scale;
    };
    for (int64_t k = team.first(count); k < team.last(count); ++k) {
      const int64_t p = listed[k] / columns.source % rows.source, q = listed[k] % columns.source;
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
    const int64_t t = unit % taps(), b = unit / taps() % blocks;
    const int64_t group = unit / (taps() * blocks), channels = groups * out;
    const int64_t valid = this->valid(b), step = taps() * width;
    const int64_t r = rows.rank[t / columns.taps], s = columns.rank[t % columns.taps];
    float* sum = of_block(all, group, b) + (r * columns.taps + s) * width;
    for (int64_t set = 1; set < sets; ++set) {
      const float* more = sum + set * numbers();
      for (int64_t c = 0; c < deep; ++c) {
        for (int64_t n = 0; n < width; ++n) sum[c * step + n] += more[c * step + n];
      }
    }
    const auto share = [&](int64_t channel) {  // what a mean is multiplied by
      double found = sums ? sums[channel * taps() + t] : 0;
      for (int64_t i = 0; of_input && factors && i < parts_of_sums; ++i) {
        const double* own = shares + i * channels * (1 + taps());
        found -= own[channel] + own[(1 + t) * channels + channel];
      }
      return static_cast<float>(found);
    };
    const int64_t first = group * wide + b * width;
    if (mean && of_input) {
      float of_out[MOST_VECTORS * V];
      for (int64_t n = 0; n < valid; ++n) of_out[n] = share(first + n);
      for (int64_t c = 0; c < deep; ++c) {
        for (int64_t n = 0; n < valid; ++n) sum[c * step + n] += of_out[n] * mean[group * in + c];
      }
    } else if (mean) {
      for (int64_t c = 0; c < deep; ++c) {
        const float of_out = share(group * out + c);
        for (int64_t n = 0; n < valid; ++n) sum[c * step + n] += of_out * mean[first + n];
      }
    }
    const int64_t of_in = last ? 1 : taps(), of_out = in * taps();
    const int64_t of_deep = of_input ? of_in : of_out, of_wide = of_input ? of_out : of_in;
    Int* to = result + group * out * of_out + b * width * of_wide + t * (last ? in : 1);
    const auto row = [&](int64_t c) { return reinterpret_cast<const int32_t*>(sum + c * step); };
    if (of_deep == 1) transpose<Single, T>(row, deep, valid, to, of_wide);
    for (int64_t c = 0; of_deep != 1 && c < deep; ++c, to += of_deep) {
      if (of_wide == 1) {
        copy<Single, T>(row(c), valid, to);
      } else {
        for (int64_t n = 0; n < valid; ++n) to[n * of_wide] = T::narrow(sum[c * step + n]);
      }
    }
  }

  Status run(int64_t threads, bool last, Int* result) const {
    int64_t members = 1;
    while (members < threads && threads / members * numbers() > MOST_OWN) ++members;
    members = std::min(members, blocks);
    const int64_t sets = std::clamp<int64_t>(threads / members, 1, std::max<int64_t>(total(), 1));
    const int64_t wanted = std::max(ceil_div(STRIP, columns.result), FEWEST_ROWS);
    const int64_t of_list = ceil_div(OF_LIST, most_positions) * most_positions;
    const int64_t length =
        std::min(alone ? of_list : wanted, ceil_div(std::max<int64_t>(total(), 1), sets));
    const int64_t most = alone ? length : length * columns.result;
    int64_t slots = 0;
    for (int64_t set = 0; !alone && set < sets; ++set) {
      const Team share{static_cast<int>(set), static_cast<int>(sets)};
      for (int64_t row = share.first(total()); row < share.last(total()); row += length) {
        const int64_t end = std::min(row + length, share.last(total()));
        slots = std::max(slots, Slots(rows, row, end, nullptr, nullptr).count);
      }
    }
    if (slots * columns.source > INT32_MAX) return BAD_NUMBERS;
    const int64_t dense_numbers = (alone ? length * blocks : slots * columns.source) * width;
    const int64_t of_class = 1 + dense_numbers * 4 / (UINT16_MAX * UNIT);
    int64_t chunks = ceil_div(most, most_positions);
    rows.each([&](auto...) { columns.each([&](auto...) { chunks += alone ? 0 : of_class; }); });
    const int64_t most_entries = (most * channels() * lists() + V + TAIL + 31) / 32 * 32;
    const int64_t of_values = SLICE * pitch(), of_runs = chunks * lists() * channels();
    const int64_t of_sums = mean && of_input && factors ? groups * out * (1 + taps()) : 0;
    Memory<float> all(sets * numbers()), values(threads * (most_entries + of_values));
    Memory<uint16_t> offsets(threads * most_entries);
    Memory<float> packed(threads * dense_numbers);
    Memory<Run> runs(threads * of_runs);
    Memory<Chunk> all_chunks(threads * chunks);
    Memory<int32_t> of_rows(threads * length);
    Memory<int64_t> slot_rows(threads * slots), seen(alone ? threads * length * taps() : 0);
    Memory<double> shares(threads * of_sums);
    if (!all.data || !values.data || !offsets.data || !packed.data || !runs.data ||
        !all_chunks.data || !of_rows.data || !slot_rows.data || !seen.data || !shares.data) {
      return NO_MEMORY;
    }
    in_parallel(threads, [&](Team team) {
      float* own_values = values.data + team.rank * (most_entries + of_values);
      Own own{all_chunks.data + team.rank * chunks,
              runs.data + team.rank * of_runs,
              {own_values + of_values, offsets.data + team.rank * most_entries},
              own_values,
              packed.data + team.rank * dense_numbers,
              of_rows.data + team.rank * length,
              slot_rows.data + team.rank * slots,
              seen.data + (alone ? team.rank * length * taps() : 0)};
      for (int64_t i = team.rank; i < sets * members; i += team.size) {
        const Team share{static_cast<int>(i / members), static_cast<int>(sets)};
        const Team member{static_cast<int>(i % members), static_cast<int>(members)};
        float* to = all.data + share.rank * numbers();
        for (int64_t b = member.first(blocks); b < member.last(blocks); ++b) {
          for (int64_t group = 0; group < groups; ++group) {
            std::fill_n(of_block(to, group, b), width * taps() * deep, 0.0f);
          }
        }
        for (int64_t begin = share.first(total()); begin < share.last(total()); begin += length) {
          const int64_t end = std::min(begin + length, share.last(total()));
          alone ? add_listed(begin, end, member, own, to) : add_strip(begin, end, member, own, to);
        }
      }
      double* own_shares = shares.data + team.rank * of_sums;
      if (of_sums) add_sums(team, own_shares, own_shares + groups * out);
      team.wait();
      const int64_t units = groups * blocks * taps();
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
  if (!g.holds(in, out, groups, maps::MOST_TAPS)) return BAD_NUMBERS;
  const int64_t all = g.images * g.positions();
  if (index && (count < 1 || !ascending(index, count, all))) return NOT_ASCENDING;
  Memory<float> factors(index ? all : 0);
  Memory<int32_t> listed(index ? count : 0);
  if (!factors.data || !listed.data) return NO_MEMORY;
  if (index) std::fill_n(factors.data, all, 0.0f);
  for (int64_t k = 0; index && k < count; ++k) factors.data[index[k]] += weight[k];
  int32_t* end = index ? std::unique_copy(index, index + count, listed.data) : listed.data;
  end = std::remove_if(listed.data, end, [&](int32_t k) { return factors.data[k] == 0; });
  return with_format(kind, [&](auto format) {
    using T = decltype(format);
    using Int = typename T::Int;
    const auto* x = static_cast<const Int*>(input);
    const auto* dy = static_cast<const Int*>(grad_output);
    const Map of_x(groups * in, g.height * g.width, layouts[0]);
    const Map of_dy(groups * out, g.positions(), layouts[1]);
    const bool by_x = of_input != 0;
    const Views rows(axis_of_rows(g, by_x)), columns(axis_of_columns(g, by_x));
    if (!rows.all.data || !columns.all.data) return NO_MEMORY;
    MapsGradWeight<T> task{by_x ? x : dy,
                           by_x ? dy : x,
                           by_x,
                           listed.data,
                           end - listed.data,
                           index ? factors.data : nullptr,
                           mean,
                           mean ? sums : nullptr,
                           g.images,
                           in,
                           out,
                           groups,
                           by_x ? in : out,
                           by_x ? out : in,
                           rows,
                           columns,
                           by_x ? of_x : of_dy,
                           by_x ? of_dy : of_x};
    task.cut();
    return task.run(threads, layouts[2], static_cast<Int*>(result));
  });
}
FST_ARGUMENTS(fst_maps_grad_weight)

// A product of a convolution from lists of what is not zero in the weight (sparse_weight.h).
//
// A task is a strip of V parts of images, or of pixels in a row, as wide as a tile. It goes down the
// strip: rows of the source are packed once each, tiles are summed block by block of channels, and
// are transposed into the layout of the result, where bias, residual and activation are applied.

#pragma once

#include "activation.h"
#include "sparse_weight.h"

namespace fst {

constexpr int64_t TASKS = 4;  // at least, for each thread

struct Epilogue {
  const float* bias;
  const void* residual;
  int64_t activation;
};

template <class T>
struct Product {
  using Int = typename T::Int;
  const Int* from;
  Int* to;
  Plan p;
  const Run* runs;
  Entries entries;
  Epilogue epilogue;
  Map source, result;

  // Of an image, in the units of the result's grid.
  struct Part {
    int64_t image, row, column;
  };

  // One thread's memory, and what it has packed of a strip.
  struct Strip {
    float *x, *y;
    int64_t *places, *inside;  // of lanes of the source, or -1; those of a row at an edge
    int64_t* columns;          // of vectors of X
    int64_t part, column;      // of lane 0 (flat: its image); first column, in vectors
    Part parts[V];             // of lanes
    int64_t origin, packed;    // the row that lies first in X; all rows before `packed` are there
    int64_t* rows;             // of the source, that are packed next
    Lines lines;               // of them
  };

  int64_t numbers_y() const { return p.phases() * p.groups * p.results * p.high * p.wide * V; }
  int64_t lanes() const { return p.flat ? 1 : V; }  // parts of a strip
  int64_t step() const { return p.flat ? V : 1; }   // columns from a vector to the next
  int64_t channels() const { return p.groups * p.sources; }

  // Where each lane of each vector of a row lies in a row of the source.
  void find_places(Strip& strip) const {
    for (int64_t i = 0; i < V; ++i) {
      const int64_t part = strip.part + i, down = part / p.parts_across;
      strip.parts[i] = p.flat ? Part{strip.part, 0, i}
                              : Part{down / p.parts_down, down % p.parts_down * p.height(),
                                     part % p.parts_across * p.length()};
    }
    int64_t at = 0;
    for (int k = 0; k < p.across.count; ++k) {
      for (int64_t i = 0; i < p.wide + p.across.span(k); ++i, ++at) {
        strip.columns[at] = p.column(k) + i * V;
        for (int64_t lane = 0; lane < V; ++lane) {
          const Part& part = strip.parts[lane];
          const int64_t row = part.row * p.down.stride;
          const int64_t column =
              (part.column + (strip.column + i) * step()) * p.across.stride + p.across.least[k];
          const bool there = part.image < p.images && column >= 0 && column < p.columns.source;
          strip.places[at * V + lane] =
              there ? part.image * source.image_stride() +
                          (row * p.columns.source + column) * source.place_stride
                    : -1;
        }
      }
    }
  }

  // The same for a row of the first part; null if it lies outside of all parts' images.
  const int64_t* places_of(const Strip& strip, int64_t row) const {
    const int64_t step = p.height() * p.down.stride, most = (p.parts_down - 1) * step;
    if (row + most < 0 || row >= p.rows.source) return nullptr;
    if (row >= 0 && row + most < p.rows.source) return strip.places;
    for (int64_t i = 0; i < p.line * V; ++i) {
      const int64_t own = row + strip.parts[i % V].row * p.down.stride;
      strip.inside[i] = own < 0 || own >= p.rows.source ? -1 : strip.places[i];
    }
    return strip.inside;
  }

  // A row of the source, or zeros, as row `slot` of X.
  void pack_row(const Strip& strip, int64_t row, int64_t slot) const {
    const int64_t* places = places_of(strip, row);
    const Int* begin = from + row * p.columns.source * source.place_stride;
    for (int64_t g = 0; g < p.groups; ++g) {
      pack_channels(strip, places, begin + g * p.sources * source.channel_stride, p.sources,
                    strip.x + g * p.blocks * p.of_block + slot * p.of_row);
    }
  }

  // Channels of a group from x on; two vectors of 16 at a time, which fill lines of the cache.
  void pack_channels(const Strip& strip, const int64_t* places, const Int* x, int64_t count,
                     float* y) const {
    const int64_t step = std::max(V, 16);
    for (int64_t at = 0; at < p.line; at += 2) {
      for (int64_t c = 0; c < count; c += step) {
        for (int64_t i = at; i < std::min(at + 2, p.line); ++i) {
          const int64_t* place = places ? places + i * V : nullptr;
          for (int64_t d = c; d < std::min(c + step, count); d += V) {
            pack_square(x, place, d, std::min<int64_t>(V, count - d), y + strip.columns[i]);
          }
        }
      }
    }
  }

  void pack_square(const Int* x, const int64_t* place, int64_t c, int64_t count, float* y) const {
    const int64_t wrap = p.of_block - p.block * p.channel_stride;  // from a block to the next
    int64_t left = p.block - c % p.block;                          // channels of this block
    y += c / p.block * p.of_block + c % p.block * p.channel_stride;
    const auto put_next = [&](vec value) {
      *reinterpret_cast<vec*>(y) = value;
      y += p.channel_stride;
      if (--left == 0) y += wrap, left = p.block;
    };
    if (!place) {
      for (int64_t i = 0; i < count; ++i) put_next(vec{});
      return;
    }
    x += c * source.channel_stride;
    const Int* end = from + p.images * p.rows.source * p.columns.source * channels();
    int64_t least = place[0], most = place[0];
    for (int i = 1; i < V; ++i) least = std::min(least, place[i]), most = std::max(most, place[i]);
    const bool all = least >= 0;
    if (source.channel_stride == 1 && most + V <= end - x) {  // what is read beyond is not kept
      vec square[V];
      if (all) {
        for (int i = 0; i < V; ++i) square[i] = load<T>(x + place[i]);
      } else {
        for (int i = 0; i < V; ++i) square[i] = place[i] < 0 ? vec{} : load<T>(x + place[i]);
      }
      transpose(square);
      for (int64_t i = 0; i < count; ++i) put_next(square[i]);
      return;
    }
    const bool together = all && p.flat && place[V - 1] - place[0] == V - 1;
    for (int64_t i = 0; i < count; ++i, x += source.channel_stride) {
      vec value = vec{};
      if (together) {
        value = load<T>(x + place[0]);
      } else {
        for (int j = 0; j < V; ++j) value[j] = place[j] < 0 ? 0.0f : T::wide(x[place[j]]);
      }
      put_next(value);
    }
  }

  // Packs what rows [row, row + high) of the result's grid see.
  void advance(Strip& strip, int64_t row, int64_t high) const {
    const int64_t rows = p.kept * p.of_row;  // numbers of a class
    if (row - strip.origin + high + p.down.longest() > p.kept) {
      for (int64_t i = 0; i < p.numbers() / rows; ++i) {
        const int64_t stay = strip.packed + p.down.span(i % p.down.count) - row;
        float* plane = strip.x + i * rows;
        if (stay > 0) {
          std::memmove(plane, plane + (row - strip.origin) * p.of_row,
                       stay * p.of_row * sizeof(float));
        }
      }
      strip.origin = row;
    }
    for (int k = 0; k < p.down.count; ++k) {
      const int64_t span = p.down.span(k);
      const int64_t begin = strip.packed < 0 ? row : strip.packed + span;
      for (int64_t i = begin; i < row + high + span; ++i) {
        pack_row(strip, i * p.down.stride + p.down.least[k], k * p.kept + i - strip.origin);
      }
    }
    strip.packed = row + high;
  }

  // The first `bytes` of all places of some rows, where channels lie side by side.
  Lines lines_of(const Strip& strip, int64_t rows, int64_t channels) const {
    if (source.channel_stride != 1) rows = 0;
    const auto* begin = reinterpret_cast<const char*>(from);
    const int64_t element = sizeof(Int), bytes = channels * element;
    return {begin, strip.rows, strip.places, rows, p.line * V, element, bytes, 0, 0, 0};
  }

  // The rows that `advance` will pack for the next tile.
  void look_ahead(Strip& strip) const {
    int64_t count = 0;
    for (int k = 0; k < p.down.count; ++k) {
      for (int64_t i = 0; i < p.high; ++i) {
        const int64_t row = (strip.packed + p.down.span(k) + i) * p.down.stride + p.down.least[k];
        if (!places_of(strip, row)) continue;
        strip.rows[count++] = row * p.columns.source * source.place_stride;
      }
    }
    strip.lines = lines_of(strip, count, channels());
  }

  // Sums of channels [first, last) of the result. Pixels in one row are packed block by block.
  void multiply(Strip& strip, int64_t row, int64_t high, int64_t wide, int64_t first,
                int64_t last) const {
    const int64_t all = p.groups * p.results, size = p.high * p.wide * V;
    const Accumulate accumulate = find_accumulate(high, wide, p.high * p.wide <= SMALL);
    for (int64_t g = first / p.results; g * p.results < last; ++g) {
      const int64_t begin = std::max(first, g * p.results);
      const int64_t end = std::min(last, (g + 1) * p.results);
      for (int64_t b = 0; b < p.blocks; ++b) {
        const float* x = strip.x;
        if (p.flat) {
          const int64_t channel = g * p.sources + b * p.block;
          pack_channels(strip, strip.places, from + channel * source.channel_stride,
                        p.channels_of(b), strip.x);
          strip.rows[0] = channel + p.block;
          strip.lines = lines_of(strip, b + 1 < p.blocks, p.block);
        } else {
          x += (row - strip.origin) * p.of_row + (g * p.blocks + b) * p.of_block;
        }
        const bool ahead = p.flat || (b + 1 == p.blocks && end == last);
        Lines none{}, &lines = ahead ? strip.lines : none;
        lines.of_run = ceil_div(lines.all(), p.phases() * (end - begin));
        for (int64_t f = 0; f < p.phases(); ++f) {
          const Run* run = runs + ((g * p.blocks + b) * p.phases() + f - g) * p.results;
          accumulate(run + begin, end - begin, entries, x, p.of_row * 4, b == 0,
                     strip.y + (f * all + begin) * size, wide * V, size, lines);
        }
      }
    }
  }

  // One vector of the result: its lanes go to places `at`, unless these are negative.
  void put(vec sum, float bias, const int64_t* at) const {
    const Int* residual = static_cast<const Int*>(epilogue.residual);
    vec value = sum + bias;
    if (residual) {
      for (int i = 0; i < V; ++i) value[i] += at[i] < 0 ? 0.0f : T::wide(residual[at[i]]);
    }
    Int numbers[V];
    store<T>(activate(value, epilogue.activation), numbers);
    for (int i = 0; i < V; ++i) {
      if (at[i] >= 0) to[at[i]] = numbers[i];
    }
  }

  // V vectors of V channels; each lane's channels go to a place.
  void store_square(vec* square, const float* bias, const int64_t* place, int64_t channel) const {
    const Int* residual = static_cast<const Int*>(epilogue.residual);
    const vec more = bias ? *reinterpret_cast<const vec*>(bias + channel) : vec{};
    transpose(square);
    for (int i = 0; i < V; ++i) square[i] += more;
    for (int i = 0; residual && i < V; ++i) {
      if (place[i] >= 0) square[i] += load<T>(residual + place[i] + channel);
    }
    activate_all<V>(square, epilogue.activation);
    for (int i = 0; i < V; ++i) {
      if (place[i] >= 0) store<T>(square[i], to + place[i] + channel);
    }
  }

  void write(const Strip& strip, int64_t row, int64_t high, int64_t wide, int64_t first,
             int64_t last) const {
    const int64_t across = p.columns.phases(), down = p.rows.phases();
    const int64_t size = p.high * p.wide * V, all = p.groups * p.results;
    for (int64_t f = 0; f < p.phases(); ++f) {
      for (int64_t t = 0; t < high * wide; ++t) {
        int64_t place[V];
        bool any = false;
        for (int64_t i = 0; i < V; ++i) {
          const Part& part = strip.parts[i];
          const int64_t h = f / across + down * (part.row + row + t / wide);
          const int64_t column = part.column + (strip.column + t % wide) * step();
          const int64_t w = f % across + across * column;
          const bool there = h < p.rows.result && w < p.columns.result && part.image < p.images;
          any |= there;
          place[i] = there ? part.image * result.image_stride() +
                                 (h * p.columns.result + w) * result.place_stride
                           : -1;
        }
        if (!any) continue;
        const float* y = strip.y + f * all * size + t * V;
        int64_t c = first;
        for (; result.channel_stride == 1 && c + V <= last; c += V) {
          vec square[V];
          for (int i = 0; i < V; ++i) {
            square[i] = *reinterpret_cast<const vec*>(y + (c + i) * size);
          }
          store_square(square, epilogue.bias, place, c);
        }
        for (; c < last; ++c) {
          int64_t at[V];
          for (int i = 0; i < V; ++i) {
            at[i] = place[i] < 0 ? -1 : place[i] + c * result.channel_stride;
          }
          put(*reinterpret_cast<const vec*>(y + c * size), epilogue.bias ? epilogue.bias[c] : 0.0f,
              at);
        }
      }
    }
  }

  // Rows [begin, end) of a strip, channels [first, last) of the result.
  void run_strip(Strip& strip, int64_t begin, int64_t end, int64_t first, int64_t last) const {
    const int64_t wide = std::min(p.wide, p.length() - strip.column);
    find_places(strip);
    strip.origin = begin, strip.packed = -1;
    for (int64_t row = begin; row < end; row += p.high) {
      const int64_t high = std::min(p.high, end - row);
      if (!p.flat) advance(strip, row, high), look_ahead(strip);
      multiply(strip, row, high, wide, first, last);
      write(strip, row, high, wide, first, last);
    }
  }

  // The memory of some threads' strips.
  struct Strips {
    int64_t line, size_x, size_y, size_places;
    Memory<float> numbers;
    Memory<int64_t> places;

    Strips(const Product& of, int64_t threads)
        : line(of.p.line),
          size_x(ceil_div((of.p.flat ? of.p.of_block : of.p.numbers()) + REACH / 4, 16) * 16),
          size_y(ceil_div(of.numbers_y(), 16) * 16),
          size_places(line * (2 * V + 1) + of.p.down.count * of.p.high),
          numbers(threads * (size_x + size_y)),
          places(threads * size_places) {}
    bool there() const { return numbers.data && places.data; }
    Strip of(int64_t rank) const {
      Strip strip{};
      strip.x = numbers.data + rank * (size_x + size_y);
      strip.y = strip.x + size_x;
      strip.columns = places.data + rank * size_places;
      strip.places = strip.columns + line;
      strip.inside = strip.places + line * V;
      strip.rows = strip.inside + line * V;
      return strip;
    }
  };

  Status run(int64_t threads) const {
    const int64_t strips = p.strips(), height = p.height(), tiles = ceil_div(height, p.high);
    const int64_t units = ceil_div(p.parts(), lanes()) * strips, all = p.groups * p.results;
    // Parts of a strip repeat the rows that both see, parts of the channels repeat all packing.
    const bool even = units >= TASKS * threads || units % threads == 0;
    const int64_t pieces = even ? 1 : std::min(tiles, ceil_div(TASKS * threads, units));
    const int64_t splits = std::clamp<int64_t>(threads / (units * pieces), 1, ceil_div(all, V));
    // Strips that follow each other fetch for each other.
    const int64_t together = std::max<int64_t>(units / (2 * TASKS * threads), 1);
    const int64_t tasks = ceil_div(units, together) * pieces * splits;
    const Strips memory(*this, threads);
    if (!memory.there()) return NO_MEMORY;
    int64_t next = 0;
    in_parallel(threads, [&](Team team) {
      Strip strip = memory.of(team.rank);
      while (true) {
        const int64_t task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        if (task >= tasks) break;
        const int64_t split = task % splits, piece = task / splits % pieces;
        const int64_t unit = task / splits / pieces * together;
        for (int64_t i = unit; i < std::min(unit + together, units); ++i) {
          strip.part = i / strips * lanes();
          strip.column = i % strips * p.wide;
          run_strip(strip, tiles * piece / pieces * p.high,
                    std::min(height, tiles * (piece + 1) / pieces * p.high), all * split / splits,
                    all * (split + 1) / splits);
        }
      }
    });
    return DONE;
  }

  // A 1x1 product of so many pixels that follow each other, by one thread.
  void run_pixels(Strip& strip, const Int* source, int64_t pixels, const Int* residual,
                  Int* result) {
    from = source, to = result, epilogue.residual = residual;
    p.columns.source = p.columns.result = pixels;
    for (int64_t i = 0; i < p.strips(); ++i) {
      strip.column = i * p.wide;
      run_strip(strip, 0, 1, 0, p.groups * p.results);
    }
  }
};

// Whether lists of that many bytes are those of a plan, with all runs inside.
inline bool belong(const Plan& plan, const int64_t* lists, int64_t bytes) {
  int64_t head[HEAD];
  describe(plan, head);
  if (bytes < list_bytes(plan) || std::memcmp(head, lists, sizeof(head)) != 0) return false;
  const Run* runs = reinterpret_cast<const Run*>(lists + HEAD);
  bool bad = false;
  for (int64_t k = 0; k < plan.runs(); ++k) {
    bad |= runs[k].begin < 0 || runs[k].end < runs[k].begin || runs[k].end > plan.weights();
  }
  return !bad;
}

}  // namespace fst

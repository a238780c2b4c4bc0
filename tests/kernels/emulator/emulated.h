// Runs CUDA kernels on a CPU, for tests: every thread of a block is a fiber.
//
// A fiber runs until an instruction needs others (a barrier of the block, or a warp's ldmatrix or
// mma.sp); the last one to arrive computes for all. The order in which fibers and warps run is
// random; the stream is its seed. Shared memory starts as NaN. Asynchronous copies are done when they are waited for, not before,
// and not at all where nobody waits, so that a missing wait or barrier shows as a wrong result.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#define UNROLL
#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)

using std::max;
using std::min;

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline dim3 threadIdx(0), blockIdx(0);

namespace emulator {

struct Copy {
    void *to;
    const void *from;
    bool inside;
};

// What a lane brings to an instruction of its warp, and takes home.
struct Exchange {
    const void *address;
    uint32_t *loaded;
    float *d;
    uint4 a;
    const uint32_t *b;
    uint32_t metadata;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    std::vector<std::vector<Copy>> groups; // committed copies, oldest first
    std::vector<Copy> open;
    Exchange exchange;
    int barriers = 0, instructions = 0; // passed
    bool done = false;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<uint8_t> shared;
    std::vector<int> arrived_in_warp;
    int arrived = 0, barriers = 0;
    std::vector<int> instructions; // completed by each warp
    ucontext_t scheduler;
    std::function<void()> kernel;
    std::string failure;
};

inline Block *block = nullptr;

struct Range {
    const void *begin;
    int64_t bytes;
};
inline std::vector<Range> readable; // what asynchronous copies may read

inline Fiber &fiber() { return block->fibers[threadIdx.x]; }

inline void yield() {
    Fiber &me = fiber();
    swapcontext(&me.context, &block->scheduler);
}

inline void entry() {
    try {
        block->kernel();
    } catch (const std::exception &error) {
        block->failure = error.what();
    }
    fiber().done = true;
    yield();
}

// Waits for the 32 lanes of the warp; the last one runs `together`.
inline void with_warp(const std::function<void(Fiber *)> &together) {
    const int warp = threadIdx.x / 32;
    const int turn = fiber().instructions++;
    if (++block->arrived_in_warp[warp] == 32) {
        block->arrived_in_warp[warp] = 0;
        together(&block->fibers[warp * 32]);
        ++block->instructions[warp];
    }
    while (block->instructions[warp] <= turn) yield();
}

inline void check_shared(const void *address, size_t bytes) {
    const auto *at = static_cast<const uint8_t *>(address);
    const auto *begin = block->shared.data();
    if (at < begin || at + bytes > begin + block->shared.size() || (at - begin) % 16)
        throw std::runtime_error("an access outside shared memory, or not aligned to 16 bytes");
}

template <typename... Parameters, typename... Arguments>
int run(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, unsigned seed,
        const Arguments &...arguments) {
    std::mt19937 random(seed);
    std::vector<int> lanes(32);
    for (int i = 0; i < 32; ++i) lanes[i] = i;
    Block here;
    block = &here;
    here.kernel = [&] { kernel(arguments...); };
    here.fibers.resize(threads);
    for (auto &f : here.fibers) f.stack.resize(64 * 1024);
    for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
                // 16-byte alignment comes from the allocator; 0xff is NaN in every format
                here.shared.assign(shared, 0xff);
                here.arrived = here.barriers = 0;
                here.arrived_in_warp.assign(threads / 32, 0);
                here.instructions.assign(threads / 32, 0);
                for (auto &f : here.fibers) {
                    f.groups.clear();
                    f.open.clear();
                    f.barriers = f.instructions = 0;
                    f.done = false;
                    getcontext(&f.context);
                    f.context.uc_stack.ss_sp = f.stack.data();
                    f.context.uc_stack.ss_size = f.stack.size();
                    f.context.uc_link = &here.scheduler;
                    makecontext(&f.context, entry, 0);
                }
                // A warp runs ahead of the others for as long as it can, or for a random while.
                for (int left = threads, turns = 0; left > 0; ++turns) {
                    if (turns > 10'000'000) throw std::runtime_error("the block does not end");
                    const int warp = random() % (threads / 32);
                    std::shuffle(lanes.begin(), lanes.end(), random);
                    for (int slices = 1 + random() % 64, before = INT_MIN; slices > 0; --slices) {
                        const int progress = here.instructions[warp] + here.barriers - left;
                        if (progress == before) break;
                        before = progress;
                        for (const int lane : lanes) {
                            Fiber &f = here.fibers[warp * 32 + lane];
                            if (f.done) continue;
                            threadIdx.x = warp * 32 + lane;
                            swapcontext(&here.scheduler, &f.context);
                            left -= f.done;
                            if (!here.failure.empty()) throw std::runtime_error(here.failure);
                        }
                    }
                }
            }
    block = nullptr;
    return 0;
}

} // namespace emulator

inline void __syncthreads() {
    using namespace emulator;
    const int turn = fiber().barriers++;
    if (++block->arrived == static_cast<int>(block->fibers.size())) {
        block->arrived = 0;
        ++block->barriers;
    }
    while (block->barriers <= turn) yield();
}

inline void copy_async(void *shared, const void *global, bool inside) {
    emulator::check_shared(shared, 16);
    const auto *from = static_cast<const uint8_t *>(global);
    const bool known = std::any_of(
        emulator::readable.begin(), emulator::readable.end(), [from](const auto &range) {
            const auto *begin = static_cast<const uint8_t *>(range.begin);
            return from >= begin && from + 16 <= begin + range.bytes;
        });
    if (!known || reinterpret_cast<uintptr_t>(global) % 16)
        throw std::runtime_error("a copy from outside of the tensors, or not aligned to 16 bytes");
    emulator::fiber().open.push_back({shared, global, inside});
}
inline void commit_copies() {
    auto &f = emulator::fiber();
    f.groups.push_back(std::move(f.open));
    f.open.clear();
}
template <int LEFT> void wait_for_copies() {
    auto &groups = emulator::fiber().groups;
    while (static_cast<int>(groups.size()) > LEFT) {
        for (const auto &copy : groups.front())
            if (copy.inside)
                std::memcpy(copy.to, copy.from, 16);
            else
                std::memset(copy.to, 0, 16);
        groups.erase(groups.begin());
    }
}

inline void load_matrices(uint32_t (&to)[4], const void *shared) {
    emulator::check_shared(shared, 16);
    auto &mine = emulator::fiber().exchange;
    mine.address = shared;
    mine.loaded = to;
    emulator::with_warp([](emulator::Fiber *lanes) {
        for (int matrix = 0; matrix < 4; ++matrix)
            for (int lane = 0; lane < 32; ++lane) {
                const auto *row = static_cast<const uint8_t *>(
                    lanes[matrix * 8 + lane / 4].exchange.address);
                std::memcpy(&lanes[lane].exchange.loaded[matrix], row + lane % 4 * 4, 4);
            }
    });
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

struct Half {
    static uint16_t bits(float x) {
        const uint32_t all = bits_of(x), sign = all >> 16 & 0x8000, size = all & 0x7fffffff;
        if (x != x) return 0x7fff;
        if (size >= 0x477ff000) return sign | 0x7c00; // rounds to infinity
        if (size < 0x38800000)                        // subnormal: multiples of 2^-24
            return sign | static_cast<uint32_t>(std::nearbyint(std::ldexp(std::fabs(x), 24)));
        return sign | ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10);
    }
    static float number(uint16_t bits) {
        const int exponent = bits >> 10 & 31, fraction = bits & 1023;
        const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                           : exponent     ? std::ldexp(1024.f + fraction, exponent - 25)
                                          : std::ldexp(static_cast<float>(fraction), -24);
        return bits & 0x8000 ? -size : size;
    }
};
struct Bfloat {
    static uint16_t bits(float x) {
        const uint32_t bits = bits_of(x);
        if (x != x) return 0x7fff;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    static float number(uint16_t bits) {
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float x;
        std::memcpy(&x, &wide, 4);
        return x;
    }
};

// PTX ISA, mma.sp.m16n8k32 of 16-bit operands: which lane holds which element.
template <typename Scalar, int SELECTOR>
void multiply_sparse(float (&d)[4], const uint4 &a, const uint32_t (&b)[4], uint32_t metadata) {
    auto &mine = emulator::fiber().exchange;
    mine.d = d;
    mine.a = a;
    mine.b = b;
    mine.metadata = metadata;
    emulator::with_warp([](emulator::Fiber *lanes) {
        const auto half = [](uint32_t word, int which) {
            return Scalar::number(static_cast<uint16_t>(word >> 16 * which));
        };
        float weights[16][16], images[32][8];
        int at[16][16];
        for (int row = 0; row < 16; ++row)
            for (int group = 0; group < 8; ++group) {
                const int quad = row % 8 * 4;
                const uint32_t word =
                    lanes[quad + 2 * SELECTOR + group / 4].exchange.metadata;
                const uint32_t kept = word >> (row / 8 * 16 + group % 4 * 4) & 15;
                if ((kept & 3) >= kept >> 2)
                    throw std::runtime_error("metadata " + std::to_string(kept) + " is illegal");
                const uint4 &from = lanes[quad + group % 4].exchange.a;
                const uint32_t registers[4] = {from.x, from.y, from.z, from.w};
                const uint32_t pair = registers[row / 8 + group / 4 * 2];
                for (int i = 0; i < 2; ++i) {
                    weights[row][group * 2 + i] = half(pair, i);
                    at[row][group * 2 + i] = group * 4 + (kept >> 2 * i & 3);
                }
            }
        for (int k = 0; k < 32; ++k)
            for (int column = 0; column < 8; ++column)
                images[k][column] =
                    half(lanes[column * 4 + k % 8 / 2].exchange.b[k / 8], k % 2);
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
                float sum = lanes[lane].exchange.d[i];
                for (int k = 0; k < 16; ++k) sum += weights[row][k] * images[at[row][k]][column];
                lanes[lane].exchange.d[i] = sum;
            }
    });
}

inline uint8_t *shared_memory() { return emulator::block->shared.data(); }

// Bytes of shared memory that a block may ask for, and the error that waits to be read.
inline int most_shared = INT_MAX, last_error = 0;
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 8;

template <typename Kernel> int cudaFuncSetAttribute(Kernel, int, int bytes) {
    if (bytes > most_shared) last_error = 1; // cudaErrorInvalidValue
    return bytes > most_shared;
}
inline int cudaGetLastError() {
    const int error = last_error;
    last_error = 0;
    return error;
}

template <typename... Parameters, typename... Arguments>
void start(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, void *stream,
           const Arguments &...arguments) {
    const auto seed = static_cast<unsigned>(reinterpret_cast<uintptr_t>(stream));
    last_error = emulator::run(kernel, grid, threads, shared, seed, arguments...);
}

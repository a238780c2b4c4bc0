// y[position, row] = sum over taps and k of W[row, tap, k] · x[position of the tap, k]
//
// Implicit GEMM: rows of the packed 2:4 weight by positions, NHWC, accumulated in float32. A block of
// eight warps computes ROWS by POSITIONS; each warp 64 rows, so that one 16-byte load gives a lane
// its metadata of four instructions. Steps of 64 k pass through a ring of STAGES in shared memory.
#pragma once

#include "device.h"
#include "sparse24.h"

constexpr int THREADS = 256, WARPS = 8;
constexpr int OUTSIDE = -16384; // a row so far away that no tap leads back

constexpr int ROWS = 128, POSITIONS = 128, STAGES = 3;
constexpr int BLOCKS = ROWS / BLOCK;
constexpr int WARP_POSITIONS = POSITIONS / (WARPS / BLOCKS); // of each warp
constexpr int VALUES = BLOCKS * BLOCK * BLOCK / 2 * 2, METADATA = BLOCKS * 128 * 4; // bytes
constexpr int STAGE = VALUES + METADATA + POSITIONS * BLOCK * 2;
constexpr int SHARED = STAGES * STAGE;
constexpr int PITCH = ROWS + 8; // of the result
static_assert(WARP_POSITIONS % 8 == 0 && POSITIONS % 32 == 0);
static_assert(POSITIONS * PITCH * 2 <= SHARED);
static_assert(SHARED <= 99 * 1024, "a block has no more on sm_86, sm_89 and sm_120");

// Rows of 128 bytes; 16-byte pieces change places so that eight rows are read without conflicts.
__device__ __forceinline__ int swizzled(int row, int piece) {
    return row * 128 + ((piece ^ (row & 7)) << 4);
}

// Where a position reads and writes.
struct Place {
    int sample, row, column;
    __device__ Place(int position, const Lattice &lattice) {
        column = position % lattice.columns;
        row = position / lattice.columns % lattice.rows;
        sample = position / lattice.columns / lattice.rows;
    }
};

template <typename Scalar>
__global__ void __launch_bounds__(THREADS, 2)
    convolve(const __grid_constant__ Convolution p, const uint16_t *__restrict__ x,
             const uint16_t *__restrict__ values, const uint32_t *__restrict__ metadata,
             const uint16_t *__restrict__ bias, uint16_t *__restrict__ y) {
    constexpr int LOADS = POSITIONS * 8 / THREADS, EIGHTS = WARP_POSITIONS / 8;
    uint8_t *shared = shared_memory();
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int warp_block = warp % BLOCKS, warp_position = warp / BLOCKS * WARP_POSITIONS;
    const int row_tiles = ceiling(p.rows, ROWS);
    const int row_tile = blockIdx.x % row_tiles, first = blockIdx.x / row_tiles * POSITIONS;
    const int group = blockIdx.z / p.lattices;
    const Lattice &lattice = p.lattice[blockIdx.z % p.lattices];
    const int positions = p.samples * lattice.rows * lattice.columns;
    if (first >= positions) return;

    // Each thread copies the same 8 channels of LOADS positions in every step.
    const int piece = thread % 8;
    int start[LOADS], where[LOADS]; // position read by a tap at (0, 0); its row and column
    UNROLL for (int i = 0; i < LOADS; ++i) {
        const int position = first + thread / 8 + i * (THREADS / 8);
        const Place place(position, lattice);
        const int row = place.row * p.step_rows, column = place.column * p.step_columns;
        start[i] = (place.sample * p.in_rows + row) * p.in_columns + column;
        where[i] = (position < positions ? row : OUTSIDE) * 65536 + column;
    }

    int next_tap = 0, next_block = 0; // of the next copies
    const auto copy = [&](int stage) {
        uint8_t *to = shared + stage * STAGE;
        const Tap &tap = p.tap[lattice.first_tap + next_tap];
        UNROLL for (int i = 0; i < BLOCKS; ++i) {
            // The last tile may have less than ROWS rows: what it computes beyond is not stored.
            const int block = min(row_tile * BLOCKS + i, p.row_blocks - 1);
            const int64_t from = ((static_cast<int64_t>(group) * p.row_blocks + block) * p.taps +
                                  tap.packed) * p.k_blocks + next_block;
            copy_async(to + i * 4096 + thread * 16, values + from * 2048 + thread * 8, true);
            if (thread < 32)
                copy_async(to + VALUES + i * 512 + thread * 16,
                           metadata + from * 128 + thread * 4, true);
        }
        const int channel = next_block * BLOCK + piece * 8;
        const int64_t first_channel = group * p.depth + channel;
        const int shift = tap.row * p.in_columns + tap.column;
        UNROLL for (int i = 0; i < LOADS; ++i) {
            const int r = (where[i] >> 16) + tap.row, c = (where[i] & 65535) + tap.column;
            const bool inside = static_cast<unsigned>(r) < static_cast<unsigned>(p.in_rows) &&
                                static_cast<unsigned>(c) < static_cast<unsigned>(p.in_columns) &&
                                channel < p.depth;
            const int64_t from = static_cast<int64_t>(start[i] + shift) * p.in_channels;
            copy_async(to + VALUES + METADATA +
                           swizzled(thread / 8 + i * (THREADS / 8), piece),
                       x + (inside ? from + first_channel : 0), inside);
        }
        if (++next_block == p.k_blocks) {
            next_block = 0;
            ++next_tap;
        }
    };

    float sums[4][EIGHTS][4] = {};
    const int steps = lattice.taps * p.k_blocks;
    UNROLL for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (stage < steps) copy(stage);
        commit_copies();
    }
    int stage = 0;
    for (int step = 0; step < steps; ++step) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) copy(stage == 0 ? STAGES - 1 : stage - 1);
        commit_copies();
        const uint8_t *from = shared + stage * STAGE;
        const auto *a = reinterpret_cast<const uint4 *>(from + warp_block * 4096) + lane;
        const uint4 kept =
            reinterpret_cast<const uint4 *>(from + VALUES + warp_block * 512)[lane];
        const uint8_t *b = from + VALUES + METADATA;
        const auto multiply = [&](auto half) {
            constexpr int HALF = decltype(half)::value;
            uint32_t images[EIGHTS][4];
            UNROLL for (int j = 0; j < EIGHTS; ++j) load_matrices(
                images[j], b + swizzled(warp_position + j * 8 + lane % 8, HALF * 4 + lane / 8));
            UNROLL for (int i = 0; i < 4; ++i) {
                const uint4 weights = a[(HALF * 4 + i) * 32];
                const uint32_t word = i == 0 ? kept.x : i == 1 ? kept.y : i == 2 ? kept.z : kept.w;
                UNROLL for (int j = 0; j < EIGHTS; ++j)
                    multiply_sparse<Scalar, HALF>(sums[i][j], weights, images[j], word);
            }
        };
        multiply(Number<0>());
        multiply(Number<1>());
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    wait_for_copies<0>();
    __syncthreads();

    // Through shared memory, so that a position's rows are written side by side.
    auto *result = reinterpret_cast<uint16_t *>(shared);
    const int first_row = row_tile * ROWS;
    UNROLL for (int i = 0; i < 4; ++i) UNROLL for (int half = 0; half < 2; ++half) {
        const int r = warp_block * BLOCK + i * 16 + half * 8 + lane / 4;
        const bool has_bias = bias != nullptr && first_row + r < p.rows;
        const float added = has_bias ? Scalar::number(bias[group * p.rows + first_row + r]) : 0.f;
        UNROLL for (int j = 0; j < EIGHTS; ++j) UNROLL for (int k = 0; k < 2; ++k) {
            const int position = warp_position + j * 8 + lane % 4 * 2 + k;
            result[position * PITCH + r] = Scalar::bits(sums[i][j][half * 2 + k] + added);
        }
    }
    __syncthreads();
    for (int i = thread; i < POSITIONS * ROWS / 8; i += THREADS) {
        const int position = i / (ROWS / 8), r = i % (ROWS / 8) * 8;
        if (first + position >= positions || first_row + r >= p.rows) continue;
        const Place place(first + position, lattice);
        const int64_t at =
            (static_cast<int64_t>(place.sample) * p.out_rows + lattice.row +
             place.row * p.out_step_rows) * p.out_columns + lattice.column +
            place.column * p.out_step_columns;
        *reinterpret_cast<uint4 *>(y + at * p.out_channels + group * p.rows + first_row + r) =
            *reinterpret_cast<const uint4 *>(result + position * PITCH + r);
    }
}

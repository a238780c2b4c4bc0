// Packs the weights of a whole network in one launch: layout.py says what into.
//
// A block of threads reads 64 output by 64 input channels of one tap once, and writes them as a
// block of S(W) and as one of S(Wᵀ).
#pragma once

#include "device.h"
#include "sparse24.h"

constexpr int PACK_THREADS = 256, PACK_PITCH = BLOCK + 1;

__device__ __forceinline__ float weight_at(const PackJob &job, int64_t offset) {
    if (job.kind == 2) return static_cast<const float *>(job.weight)[offset];
    const uint16_t bits = static_cast<const uint16_t *>(job.weight)[offset];
    return job.kind == 1 ? Bfloat::number(bits) : Half::number(bits);
}

// |x| as an integer of the same order; NaN counts as infinity.
__device__ __forceinline__ uint32_t magnitude(float x) {
    return min(bits_of(x) & 0x7fffffffu, 0x7f800000u);
}

// The two kept of four: first index | second index << 2. A value is kept that wins two of three
// comparisons; the lower index wins a tie.
__device__ __forceinline__ uint32_t two_of_four(const float (&x)[4]) {
    uint32_t size[4], first = 4, second = 4;
    UNROLL for (int i = 0; i < 4; ++i) size[i] = magnitude(x[i]);
    UNROLL for (int i = 0; i < 4; ++i) {
        int won = 0;
        UNROLL for (int j = 0; j < 4; ++j) won += j < i ? size[i] > size[j] : size[i] >= size[j];
        if (won < 3) continue; // itself included
        if (first == 4)
            first = i;
        else
            second = i;
    }
    return first | second << 2;
}

// x[i] without an array in memory.
__device__ __forceinline__ float at(const float (&x)[4], uint32_t i) {
    return i == 0 ? x[0] : i == 1 ? x[1] : i == 2 ? x[2] : x[3];
}

// Rows by k: the tile itself, or transposed.
template <bool TRANSPOSED> struct Matrix {
    const float *tile;
    __device__ __forceinline__ uint32_t choose(int row, int group, float (&x)[4]) const {
        UNROLL for (int i = 0; i < 4; ++i) {
            const int k = group * 4 + i;
            x[i] = TRANSPOSED ? tile[k * PACK_PITCH + row] : tile[row * PACK_PITCH + k];
        }
        return two_of_four(x);
    }
};

template <typename Scalar, bool TRANSPOSED>
__device__ __forceinline__ void write_block(const float *tile, int64_t block, uint16_t *values,
                                            uint32_t *metadata) {
    const Matrix<TRANSPOSED> matrix{tile};
    const int lane = threadIdx.x % 32, part = threadIdx.x / 32; // part: half of k, tile of 16 rows
    float x[4];
    uint32_t registers[4];
    UNROLL for (int i = 0; i < 4; ++i) {
        const int row = part % 4 * 16 + i % 2 * 8 + lane / 4, group = lane % 4 + i / 2 * 4;
        const uint32_t kept = matrix.choose(row, part / 4 * 8 + group, x);
        const uint32_t low = Scalar::bits(at(x, kept & 3)), high = Scalar::bits(at(x, kept >> 2));
        registers[i] = low | high << 16;
    }
    reinterpret_cast<uint4 *>(values + block * 2048)[threadIdx.x] =
        make_uint4(registers[0], registers[1], registers[2], registers[3]);
    if (threadIdx.x >= 128) return;
    const int owner = threadIdx.x / 4, rows = threadIdx.x % 4; // lane, tile of 16 rows
    uint32_t word = 0;
    UNROLL for (int i = 0; i < 8; ++i) {
        const int row = rows * 16 + i / 4 * 8 + owner / 4, group = owner % 4 * 4 + i % 4;
        word |= matrix.choose(row, group, x) << (4 * i);
    }
    metadata[block * 128 + threadIdx.x] = word;
}

template <typename Scalar>
__global__ void __launch_bounds__(PACK_THREADS)
    pack(const __grid_constant__ PackJobs jobs) {
    auto *tile = reinterpret_cast<float *>(shared_memory());
    const int here = blockIdx.x;
    int low = 0;
    for (int high = jobs.count; high - low > 1;) {
        const int middle = (low + high) / 2;
        if (jobs.job[middle].first_block <= here)
            low = middle;
        else
            high = middle;
    }
    const PackJob &job = jobs.job[low];
    const int taps = job.taps, rows = job.rows, columns = job.columns;
    const int row_blocks = ceiling(rows, BLOCK), column_blocks = ceiling(columns, BLOCK);
    int rest = here - job.first_block;
    const int column_block = rest % column_blocks;
    const int tap = (rest /= column_blocks) % taps;
    const int row_block = (rest /= taps) % row_blocks, group = rest / row_blocks;

    const int64_t start = static_cast<int64_t>(group) * rows * job.stride_row + tap * job.stride_tap;
    for (int i = threadIdx.x; i < BLOCK * BLOCK; i += PACK_THREADS) {
        const int64_t row = row_block * BLOCK + i / BLOCK, column = column_block * BLOCK + i % BLOCK;
        const bool inside = row < rows && column < columns;
        const int64_t offset = start + row * job.stride_row + column * job.stride_column;
        tile[i / BLOCK * PACK_PITCH + i % BLOCK] = inside ? weight_at(job, offset) : 0.f;
    }
    __syncthreads();
    if (job.values != nullptr) {
        const int64_t block =
            ((static_cast<int64_t>(group) * row_blocks + row_block) * taps + tap) * column_blocks;
        write_block<Scalar, false>(tile, block + column_block, job.values, job.metadata);
    }
    if (job.values_transposed != nullptr) {
        const int64_t block =
            ((static_cast<int64_t>(group) * column_blocks + column_block) * taps + taps - 1 - tap) *
            row_blocks;
        write_block<Scalar, true>(tile, block + row_block, job.values_transposed,
                                  job.metadata_transposed);
    }
}

// Throughput of tensor core instructions and of copies: what a sparse kernel could reach at best.
// Prints one JSON object. Build: nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a (sm_80
// leaves wgmma out). Operands are random bf16; only the rate is measured, not the products.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>

#include "wgmma_sm90a.h"

#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t error = (call);                                                                \
        if (error != cudaSuccess) {                                                                \
            std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));                    \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (0)

constexpr int kSteps = 4096;
constexpr uint32_t kMetadata = 0x4e9dc8e4; // legal nibbles only: 4, 8, 9, 12, 13, 14

__device__ uint32_t random_pair(uint32_t seed) {
    seed ^= seed >> 16;
    seed *= 0x7feb352du;
    seed ^= seed >> 15;
    seed *= 0x846ca68bu;
    seed ^= seed >> 16;
    return (seed & 0x80ff80ffu) | 0x3e003e00u; // two bf16 of magnitude 0.125 to 0.5
}

__global__ void mma_dense(float *sink, int steps) {
    float d[8][4] = {};
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; ++i)
        a[i] = random_pair(threadIdx.x * 7 + i);
    for (int i = 0; i < 2; ++i)
        b[i] = random_pair(threadIdx.x * 13 + i);
    for (int step = 0; step < steps; ++step)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                         "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                         : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    float total = 0;
    for (int i = 0; i < 8; ++i)
        total += d[i][0] + d[i][1] + d[i][2] + d[i][3];
    sink[blockIdx.x * blockDim.x + threadIdx.x] = total;
}

__global__ void mma_sparse(float *sink, int steps) {
    float d[8][4] = {};
    uint32_t a[4], b[4];
    for (int i = 0; i < 4; ++i) {
        a[i] = random_pair(threadIdx.x * 7 + i);
        b[i] = random_pair(threadIdx.x * 13 + i);
    }
    for (int step = 0; step < steps; ++step)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 "
                         "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, "
                         "{%0, %1, %2, %3}, %12, 0x0;"
                         : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]),
                           "r"(b[2]), "r"(b[3]), "r"(kMetadata));
    float total = 0;
    for (int i = 0; i < 8; ++i)
        total += d[i][0] + d[i][1] + d[i][2] + d[i][3];
    sink[blockIdx.x * blockDim.x + threadIdx.x] = total;
}

__global__ void copy_vectors(const uint4 *from, uint4 *to, int64_t count) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
         i += step)
        to[i] = from[i];
}

// A: 64 rows of each warpgroup, B: 256 rows, both 128 logical k, in 128-byte swizzled rows of 64.
constexpr int kRowBytes = 128, kTileA = 64 * kRowBytes, kTileB = 256 * kRowBytes;
constexpr int kSharedBytes = 2 * 2 * kTileA + 2 * kTileB + 1024;
enum Form { kDense, kSparse, kSparseRegisters };

__device__ uint64_t descriptor(uint32_t address) {
    return (static_cast<uint64_t>(address & 0x3ffff) >> 4) | (uint64_t{1} << 16) |
           (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
}

template <Form form> __global__ void __launch_bounds__(256, 1) warpgroup_mma(float *sink, int steps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char shared[];
    const uint32_t start = (static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + 1023) & ~1023u;
    const uint32_t skip = start - static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    auto *words = reinterpret_cast<uint32_t *>(shared + skip);
    for (int i = threadIdx.x; i < (kSharedBytes - 1024) / 4; i += blockDim.x)
        words[i] = random_pair(i + blockIdx.x * 977);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const uint32_t a = start + threadIdx.x / 128 * 2 * kTileA, b = start + 4 * kTileA;
    uint32_t fragment[4];
    for (int i = 0; i < 4; ++i)
        fragment[i] = random_pair(threadIdx.x * 7 + i);
    float d[128] = {};
    for (int step = 0; step < steps; ++step) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (form == kDense)
                wgmma_dense(d, descriptor(a + i * 32), descriptor(b + i * 32));
            else {
                const uint64_t rows = descriptor(b + i / 2 * kTileB + i % 2 * 64);
                if (form == kSparse)
                    wgmma_sparse(d, descriptor(a + i * 32), rows, kMetadata);
                else
                    wgmma_sparse_registers(d, fragment, rows, kMetadata);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
    }
    float total = 0;
    for (int i = 0; i < 128; ++i)
        total += d[i];
    sink[blockIdx.x * blockDim.x + threadIdx.x] = total;
#endif
}

template <typename Run> double median_ms(Run run) {
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < 13; ++i) {
        CHECK(cudaEventRecord(begin));
        run();
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        float ms = 0;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3)
            times.push_back(ms);
    }
    CHECK(cudaGetLastError());
    std::sort(times.begin(), times.end());
    return (times[4] + times[5]) / 2;
}

// Logical operations: a sparse instruction counts the products it skips, too.
void report(const char *name, double ms, double operations) {
    std::printf("  \"%s\": {\"ms\": %.4f, \"tflops\": %.1f},\n", name, ms, operations / ms / 1e9);
}

int main() {
    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    const int sms = device.multiProcessorCount, blocks = 2 * sms, threads = 512;
    float *sink;
    CHECK(cudaMalloc(&sink, sizeof(float) * blocks * threads));
    std::printf("{\n  \"device\": \"%s\",\n  \"multiprocessors\": %d,\n", device.name, sms);

    const double instructions = 8.0 * kSteps * blocks * threads / 32;
    report("mma.sync m16n8k16 bf16", median_ms([&] { mma_dense<<<blocks, threads>>>(sink, kSteps); }),
           instructions * 2 * 16 * 8 * 16);
    report("mma.sp m16n8k32 bf16", median_ms([&] { mma_sparse<<<blocks, threads>>>(sink, kSteps); }),
           instructions * 2 * 16 * 8 * 32);
    if (device.major == 9) {
        const double groups = 4.0 * kSteps * sms * 2;
        const auto run = [&](const char *name, auto kernel, int k) {
            CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       kSharedBytes));
            report(name, median_ms([&] { kernel<<<sms, 256, kSharedBytes>>>(sink, kSteps); }),
                   groups * 2 * 64 * 256 * k);
        };
        run("wgmma m64n256k16 bf16", warpgroup_mma<kDense>, 16);
        run("wgmma.sp m64n256k32 bf16, A in shared memory", warpgroup_mma<kSparse>, 32);
        run("wgmma.sp m64n256k32 bf16, A in registers", warpgroup_mma<kSparseRegisters>, 32);
    }

    const int64_t bytes = int64_t{1} << 30;
    char *from, *to;
    CHECK(cudaMalloc(&from, bytes));
    CHECK(cudaMalloc(&to, bytes));
    CHECK(cudaMemset(from, 1, bytes));
    const double memcpy_ms =
        median_ms([&] { CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice)); });
    const double kernel_ms = median_ms([&] {
        copy_vectors<<<16 * sms, 256>>>(reinterpret_cast<const uint4 *>(from),
                                        reinterpret_cast<uint4 *>(to), bytes / 16);
    });
    std::printf("  \"cudaMemcpy TB/s\": %.3f,\n  \"copy kernel TB/s\": %.3f\n}\n",
                2 * bytes / memcpy_ms / 1e9, 2 * bytes / kernel_ms / 1e9);
    return 0;
}

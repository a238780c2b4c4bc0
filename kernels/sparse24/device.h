// What the kernels are made of: instructions of a GPU, or their emulation on a CPU by the tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

template <int N> using Number = std::integral_constant<int, N>;

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define UNROLL _Pragma("unroll")

// 16 bytes from global to shared memory, zeros where `inside` is false.
__device__ __forceinline__ void copy_async(void *shared, const void *global, bool inside) {
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(global),
                 "r"(inside ? 16 : 0));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;\n"); }
template <int LEFT> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(LEFT) : "memory");
}

// Four 8x8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void *shared) {
    const auto from = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

struct Half {
    static constexpr bool is_bfloat = false;
    static __device__ __forceinline__ uint16_t bits(float x) {
        return __half_as_ushort(__float2half_rn(x));
    }
    static __device__ __forceinline__ float number(uint16_t x) {
        return __half2float(__ushort_as_half(x));
    }
};
struct Bfloat {
    static constexpr bool is_bfloat = true;
    static __device__ __forceinline__ uint16_t bits(float x) {
        return __bfloat16_as_ushort(__float2bfloat16_rn(x));
    }
    static __device__ __forceinline__ float number(uint16_t x) {
        return __bfloat162float(__ushort_as_bfloat16(x));
    }
};

#define FST_MMA_SP(TYPE)                                                                           \
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." TYPE "." TYPE       \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;\n"  \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                  \
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "r"(b[2]),        \
                   "r"(b[3]), "r"(metadata), "n"(SELECTOR))

// d (16x8) += A (16x32, 2:4) · B (32x8). SELECTOR: which lanes of four hold the metadata.
template <typename Scalar, int SELECTOR>
__device__ __forceinline__ void multiply_sparse(float (&d)[4], const uint4 &a,
                                                const uint32_t (&b)[4], uint32_t metadata) {
    if constexpr (Scalar::is_bfloat)
        FST_MMA_SP("bf16");
    else
        FST_MMA_SP("f16");
}

__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }

__device__ __forceinline__ uint8_t *shared_memory() {
    extern __shared__ __align__(128) uint8_t bytes[];
    return bytes;
}

template <typename... Parameters, typename... Arguments>
void start(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, void *stream,
           const Arguments &...arguments) {
    kernel<<<grid, threads, shared, static_cast<cudaStream_t>(stream)>>>(arguments...);
}

#else
#include "emulated.h"
#endif

// Launches on `stream`; returns the error code, 0 for none. No error is left for others to find.
template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, void *stream,
           const Arguments &...arguments) {
    if (shared > 48 * 1024 &&
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared))
        return cudaGetLastError();
    start(kernel, grid, threads, shared, stream, arguments...);
    return cudaGetLastError();
}

template <typename Integer> __host__ __device__ __forceinline__ Integer ceiling(Integer a, int b) {
    return (a + b - 1) / b;
}

// The design of SDGP's published pruning kernel, as a baseline to measure against: one thread for
// each group of M channels, which loads its group element by element, bubble-sorts it by magnitude
// and clears all but the N largest. Written from the description alone; runs on sm_80 and later.
//
// Neighbouring threads take neighbouring groups where channels are contiguous (channels_last), so
// that loads are M elements apart, and neighbouring positions otherwise.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "prune_baseline.h"

namespace {

template <typename T> __device__ float magnitude(T value) {
    float size = fabsf(static_cast<float>(value));
    return size != size ? INFINITY : size;
}

template <typename T, int M>
__global__ void prune_groups(const T *x, T *out, PruneBaseline p) {
    const int64_t total = p.samples * p.positions * p.groups;
    const int64_t thread = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    if (thread >= total)
        return;
    int64_t group, place;
    if (p.channel_stride == 1) {
        group = thread % p.groups;
        place = thread / p.groups;
    } else {
        place = thread % p.positions + thread / (p.positions * p.groups) * p.positions;
        group = thread / p.positions % p.groups;
    }
    const int64_t offset = place / p.positions * p.sample_stride +
                           place % p.positions * p.position_stride + group * M * p.channel_stride;
    const int size = min(static_cast<int64_t>(M), p.channels - group * M);

    float sizes[M];
    int order[M];
    for (int j = 0; j < M; ++j) {
        sizes[j] = j < size ? magnitude(x[offset + j * p.channel_stride]) : -1.0f;
        order[j] = j;
    }
    for (int last = M - 1; last > 0; --last)
        for (int j = 0; j < last; ++j)
            if (sizes[j] < sizes[j + 1]) {
                const float s = sizes[j];
                sizes[j] = sizes[j + 1];
                sizes[j + 1] = s;
                const int o = order[j];
                order[j] = order[j + 1];
                order[j + 1] = o;
            }
    for (int rank = 0; rank < M; ++rank) {
        if (order[rank] >= size)
            continue;
        const int64_t at = offset + order[rank] * p.channel_stride;
        const float value = static_cast<float>(x[at]);
        out[at] = static_cast<T>(rank < p.n ? value : value * 0.0f);
    }
}

template <typename T, int M>
void launch(const void *x, void *out, const PruneBaseline &p, cudaStream_t stream) {
    constexpr int threads = 256;
    const int64_t total = p.samples * p.positions * p.groups;
    const auto blocks = static_cast<unsigned>((total + threads - 1) / threads);
    if (blocks > 0)
        prune_groups<T, M><<<blocks, threads, 0, stream>>>(static_cast<const T *>(x),
                                                           static_cast<T *>(out), p);
}

template <typename T>
bool launch_for(int m, const void *x, void *out, const PruneBaseline &p, cudaStream_t stream) {
    switch (m) {
    case 4: launch<T, 4>(x, out, p, stream); return true;
    case 8: launch<T, 8>(x, out, p, stream); return true;
    default: return false;
    }
}

} // namespace

bool prune_baseline(int kind, int m, const void *x, void *out, const PruneBaseline &p,
                    cudaStream_t stream) {
    switch (kind) {
    case 0: return launch_for<__half>(m, x, out, p, stream);
    case 1: return launch_for<__nv_bfloat16>(m, x, out, p, stream);
    case 2: return launch_for<float>(m, x, out, p, stream);
    default: return false;
    }
}

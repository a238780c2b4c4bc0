// Arguments of the baseline pruning kernel; sizes and strides in elements.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

struct PruneBaseline {
    int64_t samples, channels, positions, groups;
    int64_t sample_stride, channel_stride, position_stride;
    int n;
};

// kind: 0 float16, 1 bfloat16, 2 float32. Returns false where kind or m has no instance.
bool prune_baseline(int kind, int m, const void *x, void *out, const PruneBaseline &p,
                    cudaStream_t stream);

// Arguments of the 2:4 kernels, and their host functions. Sizes and offsets are in elements.
#pragma once

#include <cstdint>

constexpr int BLOCK = 64; // rows, and k, of a block of packed weights
constexpr int MOST_TAPS = 64, MOST_LATTICES = 16;

struct Lattice {
    int row, column;   // of the result's first position
    int rows, columns; // positions
    int first_tap, taps;
};

struct Tap {
    int row, column; // of what the first position reads
    int packed;      // number of the tap in the packed weight
};

// See plan.py, which fills this in.
struct Convolution {
    int samples, in_rows, in_columns, in_channels, out_rows, out_columns, out_channels;
    int groups, depth, rows;                    // of a group: channels read and written
    int row_blocks, k_blocks, taps, lattices;   // of a group's packed weight
    int step_rows, step_columns;                // between neighbours of a lattice, where they read
    int out_step_rows, out_step_columns;        // and where they are written
    Lattice lattice[MOST_LATTICES];
    Tap tap[MOST_TAPS];
};

// A weight to pack, or two directions of it.
struct PackJob {
    const void *weight;
    uint16_t *values, *values_transposed; // of S(W) and of S(Wᵀ); either may be null
    uint32_t *metadata, *metadata_transposed;
    int64_t stride_row, stride_column, stride_tap;
    int groups, rows, columns, taps; // rows and columns of a group
    int kind;                        // 0 float16, 1 bfloat16, 2 float32
    int first_block;                 // blocks of threads for the jobs before this one
};

// One launch: as many weights as fit the 4 KiB of a kernel's parameters.
constexpr int MOST_JOBS = 44;
struct PackJobs {
    int count;
    PackJob job[MOST_JOBS];
};

// Both return 0 or a CUDA error.
int convolve_sparse24(bool is_bfloat, const Convolution &p, const void *x, const void *values,
                      const void *metadata, const void *bias, void *y, void *stream);
// Fills in first_block of each job.
int pack_sparse24(bool is_bfloat, PackJobs &jobs, void *stream);

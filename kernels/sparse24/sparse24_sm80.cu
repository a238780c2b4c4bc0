// The kernels' instances and their launches.

#include "convolve.h"
#include "pack.h"

int convolve_sparse24(bool is_bfloat, const Convolution &p, const void *x, const void *values,
                      const void *metadata, const void *bias, void *y, void *stream) {
    int64_t most = 0;
    for (int i = 0; i < p.lattices; ++i)
        most = std::max(most, static_cast<int64_t>(p.lattice[i].rows) * p.lattice[i].columns);
    const int64_t blocks = ceiling(most * p.samples, POSITIONS) * ceiling(p.rows, ROWS);
    if (blocks == 0) return 0;
    const dim3 grid(blocks, 1, p.groups * p.lattices);
    const auto kernel = is_bfloat ? convolve<Bfloat> : convolve<Half>;
    return launch(kernel, grid, THREADS, SHARED, stream, p, static_cast<const uint16_t *>(x),
                  static_cast<const uint16_t *>(values), static_cast<const uint32_t *>(metadata),
                  static_cast<const uint16_t *>(bias), static_cast<uint16_t *>(y));
}

int pack_sparse24(bool is_bfloat, PackJobs &jobs, void *stream) {
    int64_t blocks = 0;
    for (int i = 0; i < jobs.count; ++i) {
        PackJob &job = jobs.job[i];
        job.first_block = static_cast<int>(blocks);
        blocks += static_cast<int64_t>(job.groups) * job.taps * ceiling(job.rows, BLOCK) *
                  ceiling(job.columns, BLOCK);
    }
    if (blocks == 0) return 0;
    const auto kernel = is_bfloat ? pack<Bfloat> : pack<Half>;
    const int shared = BLOCK * PACK_PITCH * sizeof(float);
    return launch(kernel, dim3(blocks), PACK_THREADS, shared, stream, jobs);
}

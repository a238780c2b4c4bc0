// The kernels on a CPU, behind a C interface for ctypes.

#include "sparse24_sm80.cu"

namespace {
char message[256];

template <typename Function> int guarded(Function function) {
    try {
        message[0] = 0;
        return function();
    } catch (const std::exception &error) {
        std::strncpy(message, error.what(), sizeof message - 1);
        return -2;
    }
}
} // namespace

extern "C" {
const char *failure() { return message; }

// As if a GPU had no more shared memory for a block.
void limit_shared(int bytes) { most_shared = bytes; }
int unread_error() { return last_error; }

int sizes(int which) {
    const int all[] = {sizeof(Convolution), sizeof(PackJob), MOST_JOBS, SHARED};
    return all[which];
}

// bytes: of x, values and metadata.
int emulate_convolve(int is_bfloat, const int *numbers, const int64_t *bytes, const void *x,
                     const void *values, const void *metadata, const void *bias, void *y,
                     void *seed) {
    Convolution p;
    std::memcpy(&p, numbers, sizeof p);
    emulator::readable = {{x, bytes[0]}, {values, bytes[1]}, {metadata, bytes[2]}};
    return guarded([&] {
        return convolve_sparse24(is_bfloat != 0, p, x, values, metadata, bias, y, seed);
    });
}

int emulate_pack(int is_bfloat, const PackJob *jobs, int count, void *seed) {
    PackJobs all{count, {}};
    std::copy(jobs, jobs + count, all.job);
    return guarded([&] { return pack_sparse24(is_bfloat != 0, all, seed); });
}
}

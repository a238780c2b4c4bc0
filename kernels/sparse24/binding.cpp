// Binding of the 2:4 kernels to PyTorch.

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

#include <cstring>
#include <vector>

#include "sparse24.h"

namespace {

bool is_bfloat(at::ScalarType type) {
    TORCH_CHECK(type == at::kBFloat16 || type == at::kHalf,
                "the 2:4 kernels compute in float16 or bfloat16, not ", type);
    return type == at::kBFloat16;
}

void check(int code) {
    TORCH_CHECK(code == 0, "CUDA error ", code, ": ",
                cudaGetErrorString(static_cast<cudaError_t>(code)));
}

// numbers: the members of Convolution; x and y are channels_last.
void convolve(at::Tensor y, const at::Tensor &x, const at::Tensor &values,
              const at::Tensor &metadata, const std::optional<at::Tensor> &bias,
              const std::vector<int> &numbers) {
    Convolution p;
    TORCH_CHECK(numbers.size() * sizeof(int) == sizeof p, numbers.size(), " numbers");
    std::memcpy(&p, numbers.data(), sizeof p);
    for (const auto *t : {&x, static_cast<const at::Tensor *>(&y)})
        TORCH_CHECK(t->is_cuda() && t->is_contiguous(at::MemoryFormat::ChannelsLast) &&
                        reinterpret_cast<uintptr_t>(t->const_data_ptr()) % 16 == 0,
                    "images must be aligned CUDA tensors in channels_last");
    for (const auto &t : {y, values}) TORCH_CHECK(t.scalar_type() == x.scalar_type(), "dtypes differ");
    const c10::cuda::CUDAGuard guard(x.device());
    check(convolve_sparse24(
        is_bfloat(x.scalar_type()), p, x.const_data_ptr(), values.const_data_ptr(),
        metadata.const_data_ptr(), bias ? bias->const_data_ptr() : nullptr, y.mutable_data_ptr(),
        c10::cuda::getCurrentCUDAStream().stream()));
}

int kind_of(at::ScalarType type) {
    if (type == at::kFloat) return 2;
    return is_bfloat(type);
}

// Weights are (Cout, Cin/groups, kh, kw) with uniform strides over the taps. values and metadata
// hold a tensor for each weight, or are empty; so do those of the transposed weights.
void pack(const std::vector<at::Tensor> &weights, const std::vector<int64_t> &groups,
          const std::vector<at::Tensor> &values, const std::vector<at::Tensor> &metadata,
          const std::vector<at::Tensor> &values_transposed,
          const std::vector<at::Tensor> &metadata_transposed) {
    const auto &results = values.empty() ? values_transposed : values;
    TORCH_CHECK(!results.empty(), "nothing to write");
    const c10::cuda::CUDAGuard guard(weights.front().device());
    const bool to_bfloat = is_bfloat(results.front().scalar_type());
    void *stream = c10::cuda::getCurrentCUDAStream().stream();
    for (size_t first = 0; first < weights.size(); first += MOST_JOBS) {
        PackJobs jobs{};
        for (size_t i = first; i < weights.size() && jobs.count < MOST_JOBS; ++i) {
            const auto &w = weights[i];
            TORCH_CHECK(w.is_cuda() && w.dim() == 4 &&
                            (w.size(2) == 1 || w.stride(2) == w.size(3) * w.stride(3)),
                        "weights must be 4-D CUDA tensors whose taps follow each other");
            const auto data = [i](const std::vector<at::Tensor> &tensors) {
                return tensors.empty() ? nullptr : tensors[i].mutable_data_ptr();
            };
            const int64_t tap = w.size(3) > 1 ? w.stride(3) : w.stride(2);
            jobs.job[jobs.count++] = {w.const_data_ptr(),
                                      static_cast<uint16_t *>(data(values)),
                                      static_cast<uint16_t *>(data(values_transposed)),
                                      static_cast<uint32_t *>(data(metadata)),
                                      static_cast<uint32_t *>(data(metadata_transposed)),
                                      w.stride(0),
                                      w.stride(1),
                                      tap,
                                      static_cast<int>(groups[i]),
                                      static_cast<int>(w.size(0) / groups[i]),
                                      static_cast<int>(w.size(1)),
                                      static_cast<int>(w.size(2) * w.size(3)),
                                      kind_of(w.scalar_type()),
                                      0};
        }
        check(pack_sparse24(to_bfloat, jobs, stream));
    }
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("convolve", &convolve);
    module.def("pack", &pack);
}

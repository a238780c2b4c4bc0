// Binding of the baseline pruning kernel to PyTorch.

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

#include "prune_baseline.h"

at::Tensor prune(const at::Tensor &x, int64_t n, int64_t m) {
    TORCH_CHECK(x.is_cuda() && x.dim() == 4, "x must be a 4-D CUDA tensor");
    const bool inner = x.is_contiguous(at::MemoryFormat::ChannelsLast);
    TORCH_CHECK(inner || x.is_contiguous(), "x must be contiguous or channels_last");
    const c10::cuda::CUDAGuard guard(x.device());
    auto out = at::empty_like(x);
    const int64_t channels = x.size(1), positions = x.size(2) * x.size(3);
    const PruneBaseline p{x.size(0),
                          channels,
                          positions,
                          (channels + m - 1) / m,
                          channels * positions,
                          inner ? 1 : positions,
                          inner ? channels : 1,
                          static_cast<int>(n)};
    const int kind = x.scalar_type() == at::kHalf       ? 0
                     : x.scalar_type() == at::kBFloat16 ? 1
                     : x.scalar_type() == at::kFloat    ? 2
                                                        : -1;
    const bool known = prune_baseline(kind, static_cast<int>(m), x.const_data_ptr(),
                                      out.mutable_data_ptr(), p,
                                      c10::cuda::getCurrentCUDAStream());
    TORCH_CHECK(known, "m=", m, " and dtype ", x.scalar_type(),
                " have no instance: m is 4 or 8; float16, bfloat16, float32");
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("prune", &prune); }

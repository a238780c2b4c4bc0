"""Which programs can use the zeros of a 2:4 weight, by the rules that their authors state.

None of these programs is run by FST's tests: there is no GPU. Sources:

- TensorRT: no sparse kernels for grouped convolutions (github.com/NVIDIA/TensorRT/issues/4054); it
  times sparse against dense kernels, and the sparse ones win from about 256 input and output
  channels on, where a 3×3 kernel counts its channels nine times (issues 3849 and 4065).
- torch: `torch.sparse.to_sparse_semi_structured` takes 2-D CUDA tensors, so weights of linear
  layers; in half precision rows and columns must be multiples of 32 and 64 (CUTLASS) or of 16
  (cuSPARSELt): `_DTYPE_SHAPE_CONSTRAINTS` in torch/sparse/semi_structured.py of torch 2.11.
- OpenVINO: `CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE` packs weights of matrix multiplications alone,
  of models quantised to int8, with Intel AMX, channels in multiples of 64, and a share of zeros
  above the rate that is set (docs.openvino.ai, "CPU device", "Sparse weights decompression").
"""

from __future__ import annotations

import math

LARGE = 256  # channels from which TensorRT's sparse kernels win, says NVIDIA
NOT_2_4 = "no: not 2:4"


def tensorrt(shape: tuple[int, ...], groups: int, is_2_4: bool) -> str:
    """What TensorRT does with a weight (Cout, Cin/groups, ...)."""
    if groups > 1:
        return "no: grouped"
    if not is_2_4:
        return NOT_2_4
    is_large = shape[0] >= LARGE and math.prod(shape[1:]) >= LARGE
    return "eligible" if is_large else "eligible, but small"


def torch_semi_structured(shape: tuple[int, ...], is_2_4: bool) -> str:
    """What `torch.sparse.to_sparse_semi_structured` does with a weight in half precision."""
    if len(shape) != 2:
        return "no: linear layers only"
    if not is_2_4:
        return NOT_2_4
    rows, columns = shape
    if rows % 32 == 0 and columns % 64 == 0:
        return "CUTLASS, cuSPARSELt"
    if rows % 16 == 0 and columns % 16 == 0:
        return "cuSPARSELt"
    return "no: not multiples of 16"


def openvino(shape: tuple[int, ...], density: float) -> str:
    """What OpenVINO's CPU plugin does with a weight."""
    if len(shape) != 2:
        return "no: linear layers only"
    if density == 1:
        return "no: no zeros"
    if shape[0] % 64 or shape[1] % 64:
        return "no: not multiples of 64"
    return f"{100 * (1 - density):.0f} % zeros, if int8 on AMX"

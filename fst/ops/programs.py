"""The operations of a convolution, and the programs that compute them."""

from __future__ import annotations

from fst.backends import sources
from fst.backends.registry import Backend, register_backend, register_operation
from fst.ops import cpp, sparse24


def _nothing_missing() -> str:
    return ""


def _register(operation: str, name: str, computes: str, *, accelerated: bool | None = None) -> None:
    """A program of PyTorch's operators: verified, and never missing."""
    register_backend(Backend(operation, name, computes, True, _nothing_missing, accelerated))


for _operation, _computes in {
    "prune_weight": "S(W) and S(Wᵀ)",
    "prune_grad_output": "N:M pruning of grad_output along the channels (SDGP) or positions",
    "prune_columns": "N:M pruning of the input's columns along the positions (FST, S(Xᵀ))",
    "fold_grad_output": "pair and block sums of grad_output (FST, Eq. 10)",
    "grad_weight": "the weight gradient over kept positions",
    "output": "the output GEMM with 2:4 weights",
    "grad_input": "the grad_input GEMM with 2:4 weights",
}.items():
    register_operation(_operation, _computes)
    if _operation != "grad_weight":
        _register(_operation, "torch", "PyTorch's own operators")

_register("grad_weight", "strided", "the library's kernel with a doubled stride")
_register(
    "grad_weight",
    "transposed",
    "the same on transposed images, so that the stride is vertical",
)
_register("grad_weight", "gemm", "one matrix product with the columns of the kept positions")
_register(
    "grad_weight",
    "product",
    "one matrix product on views of both maps: 1x1 kernels and linear layers",
)
_register(
    "grad_weight",
    "in_place",
    "the same as strided; 1x1 kernels read the kept half of the input where it lies",
)
_register(
    "grad_weight",
    "masked",
    "the library's dense kernel, on sums with zeros at the dropped positions",
    accelerated=False,
)

for _operation, _computes in {
    "prune_weight": "all weights in one or few launches, each read once",
    "prune_grad_output": "one read, one write; rescaling reads twice",
    "fold_grad_output": "one read, half a write",
    "grad_weight": "implicit GEMM that folds grad_output while it is loaded",
}.items():
    register_backend(Backend(_operation, "triton", _computes, False, sources.triton_missing))

for _operation, _computes in {
    "prune_weight": "C++ for CPUs: both directions from one read",
    "prune_grad_output": "C++ for CPUs: one read, one write; rescaling passes twice",
    "prune_columns": "C++ for CPUs: one read, one write",
}.items():
    register_backend(Backend(_operation, cpp.BACKEND, _computes, True, cpp.missing))

for _operation in ("output", "grad_input"):
    register_backend(
        Backend(
            _operation,
            sparse24.BACKEND,
            "2:4 tensor cores, 128 channels by 128 positions at a time",
            False,
            sources.cuda_missing,
            accelerated=True,
        )
    )

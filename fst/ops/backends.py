"""The operations of a convolution, and the backends that compute them."""

from __future__ import annotations

from fst.backends import sources
from fst.backends.registry import Backend, register_backend, register_operation
from fst.ops import cpp


def _nothing_missing() -> str:
    return ""


def _register(operation: str, name: str, computes: str) -> None:
    """A backend of PyTorch's operators: verified, and never missing."""
    register_backend(Backend(operation, name, computes, True, _nothing_missing))


for _operation, _computes in {
    "prune_weight": "S(W) and S(Wᵀ)",
    "prune_grad_output": "N:M pruning of grad_output along the channels (SDGP) or positions",
    "prune_columns": "N:M pruning of the input's columns along the positions (FST, S(Xᵀ))",
    "grad_weight": "the weight gradient over a list of positions, drawn or fixed",
    "output": "the output GEMM with pruned weights",
    "grad_input": "the grad_input GEMM with pruned weights, or over a list of positions",
}.items():
    register_operation(_operation, _computes)
    _register(_operation, "torch", "PyTorch's own operators")

for _operation in ("grad_weight", "grad_input"):
    _register(_operation, "dense", "the exact gradient by the library")
_register("grad_weight", "strided", "the library's kernel with a larger stride (FST, Eq. 10)")

for _operation, _computes in {
    "prune_weight": "one launch for each weight, which is read once",
    "prune_grad_output": "one read, one write; rescaling reads twice",
}.items():
    register_backend(Backend(_operation, "triton", _computes, False, sources.triton_missing))

for _operation, _computes in {
    "prune_weight": "C++ for CPUs: both directions from one read",
    "prune_grad_output": "C++ for CPUs: one read, one write; rescaling passes twice",
    "prune_columns": "C++ for CPUs: one read, one write",
    "grad_weight": "C++ for CPUs: outer products at the listed positions",
    "grad_input": "C++ for CPUs: products at the listed positions, added at their taps",
}.items():
    register_backend(Backend(_operation, cpp.BACKEND, _computes, True, cpp.missing))

"""The torch operators of the kernels: schemas, fake results, and no graph breaks."""

from __future__ import annotations

import pytest
import torch

from fst import backends
from fst.backends import dispatch
from fst.ops import triton as ops

CHECKS = ("test_schema", "test_faketensor")


def _gradient(device: torch.device) -> torch.Tensor:
    values = torch.randn(2, 8, 3, 4, device=device)
    return values.contiguous(memory_format=torch.channels_last)


def test_operators_agree_with_their_declarations(device):
    seed = torch.tensor([3], device=device)
    check = torch.library.opcheck
    for rule, rescale in (
        ("magnitude", ""),
        ("random", ""),
        ("magnitude_rescaled", "sample_channel"),
    ):
        arguments = (_gradient(device), 2, 4, rule, rescale, 1, seed)
        check(ops.prune_grad_output, arguments, test_utils=CHECKS)
    weight = torch.randn(8, 4, 3, 3, device=device)
    check(ops.prune_weight, (weight, 1, (2, 4, 2, 4), torch.bfloat16), test_utils=CHECKS)


def test_no_graph_breaks(device):
    def step(grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        pruned = ops.prune_grad_output(grad_output, 2, 4, "magnitude", "", 1, None)
        output = ops.prune_weight(weight, 1, (2, 4, 2, 4), torch.float32)[0]
        return pruned.sum() + output.sum()

    operands = (_gradient(device), torch.randn(8, 4, 3, 3, device=device))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands), step(*operands))


def test_dispatch_runs_what_is_forced(device):
    """In eager mode and inside torch.compile."""
    grad_output = _gradient(device)

    def prune(grad_output: torch.Tensor, tunable: bool = True) -> torch.Tensor:
        candidates = {
            "torch": lambda: grad_output * 0,
            "triton": lambda: ops.prune_grad_output(grad_output, 2, 4, "magnitude", "", 1, None),
        }
        return dispatch.compute("prune_grad_output", candidates, (grad_output,), tunable=tunable)

    compiled = torch.compile(prune, fullgraph=True, backend="aot_eager")
    for function in (prune, compiled, lambda x: prune(x, tunable=False)):
        torch._dynamo.reset()
        assert not function(grad_output).any()
        torch._dynamo.reset()
        with backends.force(prune_grad_output="triton"):
            kept = function(grad_output) != 0
        assert (kept.unflatten(1, (-1, 4)).sum(2) == 2).all()


def test_seeds_follow_the_generator(device):
    draws = [dispatch.seed(torch.Generator().manual_seed(s), device) for s in (1, 1, 2)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert (draws[0].dtype, draws[0].shape, draws[0].device.type) == (
        torch.int64,
        (1,),
        device.type,
    )
    assert dispatch.seed(None, device) != dispatch.seed(None, device)


def test_a_forced_backend_that_does_not_fit_is_an_error(device):
    values = torch.zeros(1, device=device)
    with backends.force(prune_grad_output="triton"):
        for tunable in (True, False):
            with pytest.raises(RuntimeError, match="'triton' is forced but cannot compute"):
                dispatch.compute(
                    "prune_grad_output", {"torch": lambda: values}, (values,), tunable=tunable
                )

"""The torch operators of the kernels: schemas, fake results, and no graph breaks."""

from __future__ import annotations

import torch

import fst
from fst import backends
from fst.backends.choice import draw_seed
from fst.ops.backends import prune_triton as ops
from fst.ops.prune import prune_grad_output

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
        check(torch.ops.fst.prune_grad_output.default, arguments, test_utils=CHECKS)
    weight = torch.randn(8, 4, 3, 3, device=device)
    arguments = weight, 1, (2, 4, 2, 4), torch.bfloat16
    check(torch.ops.fst.prune_weight.default, arguments, test_utils=CHECKS)


def test_no_graph_breaks(device):
    def step(grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        pruned = ops.prune_grad_output(grad_output, 2, 4, "magnitude", "", 1, None)
        output = ops.prune_weight(weight, 1, (2, 4, 2, 4), torch.float32)[0]
        return pruned.sum() + output.sum()

    operands = (_gradient(device), torch.randn(8, 4, 3, 3, device=device))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands), step(*operands))


def test_the_op_runs_what_is_forced(device):
    """In eager mode and inside torch.compile."""
    grad_output = _gradient(device)
    rule = fst.NM("grad_output", 2, 4)

    def prune(grad_output: torch.Tensor) -> torch.Tensor:
        return prune_grad_output(grad_output, rule, "grad_input", 1, None)

    compiled = torch.compile(prune, fullgraph=True, backend="aot_eager")
    for function in (prune, compiled):
        torch._dynamo.reset()
        with backends.force(prune_grad_output="triton"):
            kept = function(grad_output) != 0
        assert (kept.unflatten(1, (-1, 4)).sum(2) == 2).all()


def test_seeds_follow_the_generator(device):
    draws = [draw_seed(torch.Generator().manual_seed(s), device) for s in (1, 1, 2)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert (draws[0].dtype, draws[0].shape, draws[0].device.type) == (
        torch.int64,
        (1,),
        device.type,
    )
    assert draw_seed(None, device) != draw_seed(None, device)

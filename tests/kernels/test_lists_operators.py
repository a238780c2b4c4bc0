"""The torch operators of lists of positions: schemas, fake results, and compiled graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fst.ops import cpp
from fst.ops.backends.lists_cpp import list_grad_input, list_grad_weight
from fst.ops.positions.draw import draw_positions, measure_positions

FORMATS = (torch.contiguous_format, torch.channels_last)

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")


def test_operators_agree_with_their_declarations():
    check, operators = torch.library.opcheck, torch.ops.fst
    kinds = ("test_schema", "test_faketensor")
    geometry = ([2, 1], [1, 1], [1, 1])
    for memory in FORMATS:
        input = torch.randn(2, 6, 7, 5).contiguous(memory_format=memory)
        grad_output = torch.randn(2, 4, 4, 5).contiguous(memory_format=memory)
        weight = torch.randn(4, 3, 3, 3).contiguous(memory_format=memory)
        start = torch.tensor(0.5, dtype=torch.float64)
        arguments = (grad_output, [7, 5], [3, 3], *geometry, True)
        check(operators.measure_positions_cpp, arguments, test_utils=kinds)
        scores = operators.measure_positions_cpp(*arguments)[0]
        check(operators.draw_positions_cpp, (scores, 9, start), test_utils=kinds)
        listed = operators.draw_positions_cpp(scores, 9, start)
        operands = (grad_output, input, *listed, None, None, None)
        arguments = (*operands, [4, 3, 3, 3], *geometry, 2)
        for last in (True, False):
            check(operators.list_grad_weight_cpp, (*arguments, last), test_utils=kinds)
        arguments = (grad_output, weight, *listed, [2, 6, 7, 5], *geometry, 2)
        check(operators.list_grad_input_cpp, arguments, test_utils=kinds)


def test_compiled_graphs_take_them():
    def gradients(grad_output: Tensor, input: Tensor, weight: Tensor, start: Tensor):
        geometry = ((1, 1), (1, 1), (1, 1))
        scores, sums = measure_positions(grad_output, (6, 6), (3, 3), *geometry, True)
        index, scale = draw_positions(scores, 20, start)
        arguments = (grad_output, input, index, scale, None, None, None, weight.shape)
        return (
            sums,
            list_grad_weight(*arguments, *geometry, 1, False),
            list_grad_input(grad_output, weight, index, scale, input.shape, *geometry, 1),
        )

    operands = (torch.randn(2, 4, 6, 6), torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3))
    start = torch.tensor(0.5, dtype=torch.float64)
    compiled = torch.compile(gradients, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(compiled(*operands, start), gradients(*operands, start), strict=True):
        assert torch.equal(found, wanted)

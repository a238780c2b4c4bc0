"""The weight gradient that sums grad_output while it is loaded, against the float64 reference."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

import fst
from fst import Strategy, backends
from fst.backends import sources
from fst.ops import triton as ops
from fst.rules.alternating import Alternating
from tests.oracle.conv import output_size, reference_conv2d

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)
RULES = (
    Alternating(),
    Alternating(phase=1),
    Alternating(pairing="flat"),
    Alternating(pairing="flat", phase=1),
    Alternating(block=(2, 2)),
    Alternating(restore=False),
    Alternating(pairing="flat", phase=1, restore=False),
    Alternating(block=(2, 2), restore=False),
)


class Case(NamedTuple):
    """One convolution; memory is that of all operands."""

    channels: tuple[int, int]
    size: tuple[int, int]
    kernel: tuple[int, int] = (3, 3)
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] = 1
    dilation: int = 1
    groups: int = 1
    memory: str = "channels_last"

    @property
    def arguments(self) -> dict:
        return {name: getattr(self, name) for name in ("stride", "padding", "dilation", "groups")}

    def operands(self, dtype, device="cpu", integers=False) -> tuple[torch.Tensor, ...]:
        """Input, weight and grad_output."""
        inputs, outputs = self.channels
        geometry = (self.stride, self.padding, self.dilation)
        shapes = (
            (2, inputs, *self.size),
            (outputs, inputs // self.groups, *self.kernel),
            (2, outputs, *output_size(self.size, self.kernel, *geometry)),
        )
        return tuple(self._draw(shape, dtype, device, integers) for shape in shapes)

    def _draw(self, shape, dtype, device, integers) -> torch.Tensor:
        values = torch.randint(-2, 3, shape) if integers else torch.randn(shape)
        values = values.to(device, dtype)
        if self.memory == "sliced":  # whoever reads outside finds NaN
            larger = F.pad(values, (1, 2, 2, 1, 1, 1), value=float("nan"))
            return larger[:, 1:-1, 2:-1, 1:-2]
        last = self.memory == "channels_last"
        layout = torch.channels_last if last else torch.contiguous_format
        return values.contiguous(memory_format=layout)


CASES = (
    Case((8, 20), (5, 6)),
    Case((3, 8), (9, 7), stride=2),
    Case((64, 16), (4, 5), memory="contiguous"),
    Case((20, 64), (5, 7), (1, 1), padding=0),
    Case((8, 8), (7, 6), (1, 1), stride=2, padding=0, memory="contiguous"),
    Case((8, 12), (4, 9), (1, 7), padding=(0, 3), groups=2),
    Case((6, 6), (8, 5), (5, 5), padding=2, groups=6, memory="sliced"),
    Case((16, 3), (7, 9), padding=2, dilation=2, memory="sliced"),
    Case((5, 9), (9, 11), (3, 2), stride=(1, 2), padding=(2, 0)),
    Case((4, 4), (3, 3), padding=0),
    Case((4, 4), (6, 3), padding=0),
)


def strategy_of(rule: Alternating) -> Strategy:
    return Strategy("test", grad_weight=rule)


def gradient(case: Case, rule: Alternating, operands, backend: str) -> torch.Tensor:
    """dW of `fst.sparse_conv2d`."""
    input, weight, grad_output = operands
    weight = weight.detach().requires_grad_()
    output = fst.sparse_conv2d(input, weight, **case.arguments, strategy=strategy_of(rule))
    with backends.force(grad_weight=backend):
        output.backward(grad_output)
    return weight.grad


def reference(case: Case, rule: Alternating, operands) -> torch.Tensor:
    operands = (operand.cpu().double() for operand in operands)
    return reference_conv2d(*operands, **case.arguments, strategy=strategy_of(rule)).grad_weight


def assert_as_exact(mine, theirs, exact):
    """At most twice the error of the same-dtype PyTorch version."""
    errors = [(x.cpu().double() - exact).abs().max().item() for x in (mine, theirs)]
    noise = 1e-6 * exact.abs().max().item() if mine.dtype == torch.float32 else 0.0
    assert errors[0] <= 2 * errors[1] + noise


@pytest.mark.parametrize(
    ("case", "rule"),
    [(c, r) for c, r in itertools.product(CASES, RULES) if r.restore or c in CASES[::3]],
    ids=str,
)
def test_at_most_twice_the_error_of_torch(case, rule, device):
    dtype = DTYPES[(CASES.index(case) + RULES.index(rule)) % len(DTYPES)]
    operands = case.operands(dtype, device)
    exact = reference(case, rule, operands)
    theirs = gradient(case, rule, [x.cpu() for x in operands], "strided")
    mine = gradient(case, rule, operands, "triton")
    assert (mine.dtype, mine.shape) == (dtype, exact.shape)
    assert_as_exact(mine, theirs, exact)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_integers_are_exact(rule, device):
    dtype = HALVES[RULES.index(rule) % len(HALVES)]
    for case in (*CASES[:2], CASES[5]):
        operands = case.operands(dtype, device, integers=True)
        expected = reference(case, rule, operands).to(dtype)
        assert torch.equal(gradient(case, rule, operands, "triton").cpu(), expected)


@pytest.mark.parametrize("case", CASES[:8], ids=str)
def test_a_dense_weight_gradient(case, device):
    operands = input, weight, grad_output = case.operands(torch.bfloat16, device)
    pair = torch.nn.modules.utils._pair
    (up, left), (down, right) = pair(case.padding), pair(case.stride)
    mine = ops.grad_weight(
        grad_output,
        [input],
        weight,
        (1, 1),
        False,
        (0, 1, 0, 1),
        (-up, down, -left, right),
        pair(case.dilation),
        case.groups,
    )
    theirs, exact = (
        torch.autograd.grad(F.conv2d(x, w, None, **case.arguments), w, g)[0]
        for x, w, g in (
            [t.detach().cpu().to(kind).requires_grad_(t is weight) for t in operands]
            for kind in (torch.bfloat16, torch.float64)
        )
    )
    assert_as_exact(mine, theirs, exact)


@pytest.mark.parametrize("memory", ["contiguous", "channels_last"])
def test_the_result_has_the_memory_format_of_the_weight(memory, device):
    case = CASES[0]._replace(memory=memory)
    operands = case.operands(torch.bfloat16, device)
    mine, library = (gradient(case, RULES[0], operands, name) for name in ("triton", "strided"))
    assert mine.stride() == operands[1].stride() == library.stride()


@pytest.mark.parametrize("processors", [1, 3, 132])
def test_slices_do_not_change_what_is_added(processors, device, monkeypatch):
    """Few or many slices of the positions, and 64-bit offsets; all repeat to the bit."""
    module = sources.load("grad_weight")
    monkeypatch.setattr(module, "_machine", lambda _: (processors, module.SHARED_BYTES))
    case = Case((8, 8), (13, 11))
    random, integers = (case.operands(torch.bfloat16, device, kind) for kind in (False, True))
    for rule in (RULES[0], RULES[3]):
        first = gradient(case, rule, random, "triton")
        assert torch.equal(first, gradient(case, rule, random, "triton"))
        expected = reference(case, rule, integers).to(torch.bfloat16)
        assert torch.equal(gradient(case, rule, integers, "triton").cpu(), expected)
        with monkeypatch.context() as patched:
            patched.setattr(module, "INT32", 0)
            assert torch.equal(first, gradient(case, rule, random, "triton"))


def test_every_slice_has_positions(device):
    slices_of = sources.load("grad_weight").slices_of
    for steps, tiles, slots in itertools.product((0, 1, 2, 7, 100, 6272), (1, 5, 72), (2, 132)):
        count = slices_of(steps, tiles, slots)
        length = -(-steps // count)
        assert count == max(1, -(-steps // max(1, length)))
    assert slices_of(6272, 3, 264) == 88  # three tiles fill 264 places
    assert slices_of(4, 300, 132) == 1


def test_an_empty_batch_has_no_gradient(device):
    input, weight, grad_output = (x.to(device) for x in CASES[0].operands(torch.float16))
    operands = input[:0], weight, grad_output[:0]
    assert not gradient(CASES[0], RULES[0], operands, "triton").any()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_sums_are_rounded_as_those_of_a_summed_tensor(dtype, device):
    """The same kernel, given the summed tensor, adds up the same products in the same order."""
    input, weight, grad_output = CASES[0].operands(dtype, device)
    lattice, window, everywhere = (0, 1, 0, 2), (-1, 1, -1, 2), (0, 1, 0, 1)
    (summed,) = ops.sum_grad_output(grad_output, (1, 2), lattice)
    fused, unfused = (
        ops.grad_weight(tensor, [input], weight, block, restore, kept, window, (1, 1), 1)
        for tensor, block, restore, kept in (
            (grad_output, (1, 2), True, lattice),
            (summed, (1, 1), False, everywhere),
        )
    )
    assert torch.equal(fused, unfused)


def test_nothing_is_summed_before(device, monkeypatch):
    """Neither the library's kernel nor a sum of its own runs."""
    operands = CASES[0].operands(torch.bfloat16, device)

    def forbidden(*_: object) -> None:
        raise AssertionError("the fused kernel needs no summed tensor")

    monkeypatch.setattr("fst.ops.positions.fixed.sum_grad_output", forbidden)
    gradient(CASES[0], RULES[0], operands, "triton")
    with pytest.raises(AssertionError, match="no summed tensor"):
        gradient(CASES[0], RULES[0], operands, "strided")


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_declared_and_compiled_without_graph_breaks(case, device):
    input, weight, grad_output = case.operands(torch.bfloat16, device)
    checked = (grad_output, [input[..., ::2]], weight, (1, 2), True, (0, 1, 0, 2), (0, 1, 0, 1))
    torch.library.opcheck(
        ops.grad_weight, (*checked, (1, 1), 1), test_utils=("test_schema", "test_faketensor")
    )

    def step(weight: torch.Tensor) -> torch.Tensor:
        strategy = strategy_of(RULES[0])
        return fst.sparse_conv2d(input, weight, **case.arguments, strategy=strategy)

    torch._dynamo.reset()
    leaf = weight.detach().requires_grad_()
    with backends.force(grad_weight="triton"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(leaf).backward(grad_output)
    expected = gradient(case, RULES[0], (input, weight, grad_output), "triton")
    assert torch.equal(leaf.grad, expected)


def test_it_never_runs_unasked(device):
    case, operands = CASES[0], CASES[0].operands(torch.bfloat16)
    backends.forget_decisions()
    leaf = operands[1].requires_grad_()
    output = fst.sparse_conv2d(operands[0], leaf, padding=1, strategy=strategy_of(RULES[0]))
    output.backward(operands[2])
    (decision,) = backends.decisions("grad_weight")
    assert decision.backend != "triton"
    with pytest.raises(RuntimeError, match="'triton' is forced but cannot compute"):
        gradient(case, RULES[0], [x.detach().double() for x in operands], "triton")


def test_mixed_dtypes_are_refused(device):
    input, weight, grad_output = CASES[0].operands(torch.bfloat16, device)
    with pytest.raises(TypeError, match="grad_output and inputs must have one dtype"):
        ops.grad_weight(
            grad_output, [input.half()], weight, (1, 2), True, (0, 1, 0, 2), (0, 1, 0, 2), (1, 1), 1
        )

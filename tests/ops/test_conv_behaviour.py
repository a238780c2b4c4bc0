"""The op as a citizen of torch: autograd, autocast, memory formats, edge sizes."""

import dataclasses
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import fst
from fst.backends.choice import compute
from fst.ops.operands import PruneWeight
from tests.cases import CASES, Case, case, error, leaves_of, run
from tests.networks import attach
from tests.oracle.conv import reference_conv2d
from tests.strategy_settings import (
    DEFAULTS,
    DETERMINISTIC,
    SETTINGS,
    SHIPPED,
    of_each_kind,
    rows_and_shapes,
    setting,
)

SMALL = Case("small", (4, 4), (4, 5), (3, 3), padding=1, bias=True, batch=1)


# ---------------------------------------------------------------- autograd


def test_gradcheck_dense():
    leaves = leaves_of(SMALL.operands())

    def function(*operands):
        return fst.sparse_conv2d(*operands, **SMALL.arguments, strategy="dense")

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("id", ["srste", "tsm", "tsm-im2col", "srste-4:4"])
def test_gradcheck_input_where_the_mask_is_shared(id):
    """S(W) serves output and grad_input: dX is the true derivative; so is dB, always."""
    strategy = setting(id).build()
    input, weight, bias = leaves_of(SMALL.operands())

    def function(input, bias):
        return fst.sparse_conv2d(input, weight.detach(), bias, **SMALL.arguments, strategy=strategy)

    assert torch.autograd.gradcheck(function, (input, bias))


@pytest.mark.parametrize("row", of_each_kind(DETERMINISTIC))
def test_the_input_is_saved_for_the_weight_alone(row):
    input, weight, _ = leaves_of(case("basic").operands())
    kept = []

    def pack(tensor):
        kept.append(tensor.data_ptr())
        return tensor

    weight.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fst.sparse_conv2d(input, weight, **case("basic").arguments, strategy=row.build())
    assert kept and input.data_ptr() not in kept


@pytest.mark.parametrize("row", of_each_kind(DETERMINISTIC))
def test_a_stride_leaves_rows_that_no_window_sees(row):
    """Their gradient is zero, also where the weight needs none and grad_input comes by itself."""
    the_case = Case("rest", (8, 8), (8, 9), (3, 2), stride=(3, 2), padding=1)
    input, weight, _ = leaves_of(the_case.operands())
    found = []
    for needed in (True, False):
        weight.requires_grad_(needed)
        output = fst.sparse_conv2d(input, weight, **the_case.arguments, strategy=row.build())
        found.append(torch.autograd.grad(output.square().sum(), input)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("row", of_each_kind(DETERMINISTIC))
def test_frozen_operands_change_nothing_for_the_others(row):
    """Every subset of (input, weight, bias) that asks for a gradient gets the same one."""
    the_case = case("basic")
    operands = the_case.operands(torch.float32)
    everything = run(the_case, operands, row.build())
    for needed in itertools.product((False, True), repeat=3):
        leaves = leaves_of(operands)
        for leaf, wanted in zip(leaves, needed, strict=True):
            leaf.requires_grad_(wanted)
        output = fst.sparse_conv2d(*leaves, **the_case.arguments, strategy=row.build())
        assert torch.equal(output.detach(), everything[0])
        assert output.requires_grad == any(needed)
        if not any(needed):
            continue
        output.backward(operands.grad_output)
        for leaf, wanted, expected in zip(leaves, needed, everything[1:], strict=True):
            if wanted:
                torch.testing.assert_close(leaf.grad, expected)
            else:
                assert leaf.grad is None


@pytest.mark.parametrize("row", DEFAULTS)
def test_no_grad(row):
    operands = SMALL.operands()
    with torch.no_grad():
        output = fst.sparse_conv2d(*leaves_of(operands), **SMALL.arguments, strategy=row.build())
    assert not output.requires_grad
    assert torch.equal(output, run(SMALL, operands, row.build())[0])


@pytest.mark.parametrize("row", DEFAULTS)
def test_gradients_have_derivatives_where_weights_alone_are_pruned(row):
    """Straight through S(W), in both modes; elsewhere both raise at once, by name."""
    strategy, operands = row.build(), SMALL.operands()
    if strategy.decay:  # which every backward pass adds
        strategy = dataclasses.replace(strategy, decay=0.0)
    leaves = leaves_of(operands)
    output = fst.sparse_conv2d(*leaves, **SMALL.arguments, strategy=strategy)

    def second(output):
        (grad,) = torch.autograd.grad(output.square().sum(), leaves[0], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaves[:2])

    def tangent(convolution):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(leaf, leaf.detach().cos()) for leaf in leaves]
            return forward_ad.unpack_dual(convolution(*duals)).tangent

    def sparse(*given):
        return fst.sparse_conv2d(*given, **SMALL.arguments, strategy=strategy)

    if not strategy.prunes_only_weights:
        with pytest.raises(RuntimeError, match=rf"double backward.*{strategy.name!r}"):
            second(output)
        with pytest.raises(RuntimeError, match=rf"forward-mode.*{strategy.name!r}"):
            tangent(sparse)
        return
    groups, dtype = SMALL.groups, leaves[1].dtype
    pruned = compute(PruneWeight(leaves[1].detach(), strategy, groups, dtype))

    def through(weight, values):
        return weight + (values - weight).detach()

    def plain(input, weight, *bias):
        return F.conv2d(input, through(weight, pruned.output), *bias, **SMALL.arguments)

    torch.testing.assert_close(tangent(sparse), tangent(plain))
    if pruned.output is pruned.grad_input:
        for mine, other in zip(second(output), second(plain(*leaves)), strict=True):
            torch.testing.assert_close(mine, other)


def test_backward_twice_with_a_retained_graph():
    leaves = leaves_of(SMALL.operands())
    output = fst.sparse_conv2d(*leaves, **SMALL.arguments, strategy="fst")
    first = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(output.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_operands_changed_in_place_before_backward_are_noticed():
    leaves = leaves_of(SMALL.operands())
    leaves[0] = leaves[0] * 1
    output = fst.sparse_conv2d(*leaves, **SMALL.arguments, strategy="fst_w")
    leaves[0].add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        output.sum().backward()


@pytest.mark.parametrize("row", of_each_kind(DETERMINISTIC))
def test_operands_are_left_untouched(row):
    the_case = case("mixed")
    operands = the_case.operands()
    before = [t.clone() for t in (operands.input, operands.weight, operands.grad_output)]
    leaves = leaves_of(operands)
    grad_output = operands.grad_output.clone()
    fst.sparse_conv2d(*leaves, **the_case.arguments, strategy=row.build()).backward(grad_output)
    after = (leaves[0].detach(), leaves[1].detach(), grad_output)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("row", of_each_kind(SETTINGS))
def test_the_default_dtype_is_that_of_new_tensors_alone(row):
    the_case, found = case("basic"), []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = leaves_of(the_case.operands(torch.float32))
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            output = fst.sparse_conv2d(*leaves, **the_case.arguments, strategy=row.build())
            output.square().sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([output, *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_threads_do_not_disturb_each_other():
    the_case = case("odd_nhwc")
    operands = the_case.operands()
    expected = run(the_case, operands, "fst")
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(run(the_case, operands, "fst")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(r[i], expected[i]) for r in results for i in range(3))


# ---------------------------------------------------------------- layout


@pytest.mark.parametrize(
    ("row", "the_case"),
    rows_and_shapes(
        DETERMINISTIC,
        [case("stride_1_2"), case("grouped_stride2")],
        [case("grouped_stride2")],
    ),
)
def test_independent_of_memory_format(row, the_case):
    """Groups run along an axis, never along the memory."""
    operands = the_case.operands()
    assert operands.input.is_contiguous(memory_format=torch.channels_last)
    expected = run(the_case, operands, row.build())
    for formats in itertools.product((False, True), repeat=3):
        names = ("input", "weight", "grad_output")
        for name, channels_last in zip(names, formats, strict=True):
            layout = torch.channels_last if channels_last else torch.contiguous_format
            setattr(
                operands, name, getattr(operands, name).clone().contiguous(memory_format=layout)
            )
        for a, e in zip(run(the_case, operands, row.build())[:3], expected[:3], strict=True):
            assert error(a, e) <= 1e-12


@pytest.mark.parametrize("row", of_each_kind(DETERMINISTIC))
def test_expanded_and_strided_operands(row):
    the_case = case("basic")
    operands = the_case.operands()
    expected = run(the_case, operands, row.build())
    leaves = leaves_of(operands)
    input = torch.zeros(2, 16, 6, 12, dtype=torch.float64)[:, ::2, :, ::2].copy_(leaves[0])
    input = input.detach().requires_grad_()
    weight = leaves[1].detach().permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    weight.requires_grad_()
    output = fst.sparse_conv2d(input, weight, leaves[2], **the_case.arguments, strategy=row.build())
    output.backward(operands.grad_output.transpose(2, 3).contiguous().transpose(2, 3))
    for a, e in zip((output.detach(), input.grad, weight.grad), expected[:3], strict=True):
        assert error(a, e) <= 1e-12
    # the gradient of a sum is an expanded scalar
    leaves = leaves_of(operands)
    fst.sparse_conv2d(*leaves, **the_case.arguments, strategy=row.build()).sum().backward()
    operands.grad_output = torch.ones_like(operands.grad_output)
    expected = run(the_case, operands, row.build())
    for leaf, e in zip(leaves, expected[1:], strict=True):
        assert error(leaf.grad, e) <= 1e-12


@pytest.mark.parametrize("row", DEFAULTS)
def test_output_has_torchs_memory_format(row):
    operands = case("odd_nhwc").operands(torch.float32)
    output = run(case("odd_nhwc"), operands, row.build())[0]
    assert output.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("row", "id"),
    rows_and_shapes(
        SETTINGS,
        ["basic", "kernel_1x1_stride2", "grouped_stride2"],
        ["grouped_stride2"],
    ),
)
def test_empty_batch(row, id):
    the_case = case(id)
    operands = the_case.operands()
    operands.input, operands.grad_output = operands.input[:0], operands.grad_output[:0]
    strategy = row.build()
    output, grad_input, grad_weight, grad_bias = run(the_case, operands, strategy)
    assert output.shape == operands.grad_output.shape and grad_input.shape == operands.input.shape
    assert grad_weight.shape == operands.weight.shape
    assert grad_bias is None or (grad_bias == 0).all()
    if row.deterministic and strategy.gradient_decay:
        expected = reference_conv2d(
            operands.input,
            operands.weight,
            operands.grad_output,
            **the_case.arguments,
            strategy=strategy,
        ).grad_weight
        assert error(grad_weight, expected) <= 1e-12
    elif not strategy.gradient_decay:
        assert (grad_weight == 0).all()


# ---------------------------------------------------------------- autocast


@pytest.mark.parametrize("row", [row for row in DETERMINISTIC if row in DEFAULTS])
def test_autocast(row):
    the_case = case("basic")
    operands = the_case.operands(torch.float32)
    leaves = leaves_of(operands)
    with torch.autocast("cpu", torch.bfloat16):
        output = fst.sparse_conv2d(*leaves, **the_case.arguments, strategy=row.build())
    assert output.dtype == torch.bfloat16
    output.backward(operands.grad_output.bfloat16())
    operands.grad_output = operands.grad_output.bfloat16().float()
    expected = reference_conv2d(
        operands.input,
        operands.weight,
        operands.grad_output,
        bias=operands.bias,
        **the_case.arguments,
        strategy=row.build(),
    )
    assert error(output, expected.output) < 1e-2
    for leaf, e in zip(leaves, expected[1:], strict=True):
        assert leaf.grad.dtype == torch.float32
        if row.id not in ("gg", "wg", "wx", "gx"):  # a mask of rounded X or dY may differ
            assert error(leaf.grad, e) < 1e-2


def test_autocast_dense_is_torch_bit_for_bit():
    operands = case("basic").operands(torch.float32)
    results = []
    for function in (F.conv2d, lambda *args: fst.sparse_conv2d(*args, strategy="dense")):
        leaves = leaves_of(operands)
        with torch.autocast("cpu", torch.bfloat16):
            output = function(*leaves, 1, 1)
        output.backward(operands.grad_output.bfloat16())
        results.append((output, *(leaf.grad for leaf in leaves)))
    for a, e in zip(*results, strict=True):
        assert a.dtype == e.dtype and torch.equal(a, e)


def test_autocast_selects_on_the_stored_weight():
    """1.001 > 1 in float32; in bfloat16 both are 1, and the tie would keep the first."""
    weight = torch.tensor([1.0, 1.001, 0.5, 0.4]).reshape(1, 4, 1, 1)
    input = torch.tensor([1.0, 2.0, 4.0, 8.0]).reshape(1, 4, 1, 1)
    strategy = fst.get_strategy("srste", n=1, m=4)
    with torch.autocast("cpu", torch.bfloat16):
        output = fst.sparse_conv2d(input, weight, strategy=strategy)
    assert output.item() == 2.0


def test_autocast_decay_is_not_rounded():
    """λ(W − S(W)) is added to the float32 gradient, from the float32 weight."""
    weight = torch.tensor([1.0, 2.0, 0.1234567, 0.7654321]).reshape(1, 4, 1, 1)
    weight.requires_grad_()
    strategy = fst.get_strategy("srste", decay=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        output = fst.sparse_conv2d(torch.zeros(1, 4, 1, 1), weight, strategy=strategy)
    output.sum().backward()
    expected = 0.5 * torch.tensor([0, 0, 0.1234567, 0.7654321])
    torch.testing.assert_close(weight.grad.flatten(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("the_case", CASES[:3])
def test_names_and_strategies_are_the_same(the_case):
    operands = the_case.operands()
    by_name = run(the_case, operands, "fst")
    by_object = run(the_case, operands, fst.get_strategy("fst"))
    assert all(a is b or torch.equal(a, b) for a, b in zip(by_name, by_object, strict=True))


def test_the_default_strategy_is_fst():
    operands = SMALL.operands()
    default = fst.sparse_conv2d(operands.input, operands.weight)
    assert torch.equal(default, fst.sparse_conv2d(operands.input, operands.weight, strategy="fst"))


@pytest.mark.parametrize("name", SHIPPED)
def test_meta_tensors(name):
    """Shapes without memory: what FLOP counters and fake initialisation use."""
    layer = torch.nn.Conv2d(8, 8, 3, padding=1, device="meta")
    fst.convert(layer, name)
    attach(layer)
    input = torch.empty(2, 8, 6, 6, device="meta", requires_grad=True)
    output = layer(input)
    output.sum().backward()
    assert output.shape == (2, 8, 6, 6) and output.device.type == "meta"
    assert input.grad.shape == input.shape and layer.weight.grad.shape == layer.weight.shape

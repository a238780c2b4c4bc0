"""Linear layers on tokens: weight gradients pair and sample them, at exactly the promised cost."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fst
from fst.ops import positions, strided
from fst.ops.reference import reference_linear
from fst.report import describe_layer
from fst.rules.alternating import Alternating
from fst.rules.bands import Bands
from fst.rules.sampled import Sampled
from fst.rules.strategy import Strategy
from tests.cases import error
from tests.networks import gradients

OUTPUTS, INPUTS = 6, 8
LOW = Bands(block=(1, 2), keep=("L",), sample=())
QUARTER = Sampled(phase=1, keep=4, axis="columns", center=False)
PREFIX = Sampled(phase=1, center=False, prefix_tokens=1)
HALVES = [Alternating(), Alternating(phase=1), Sampled(phase=0, center=False), LOW]


def operands(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sizes = ((*shape, INPUTS), (OUTPUTS, INPUTS), (*shape, OUTPUTS))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes]


def weight_gradient(rule, input, weight, grad_output):
    weight = weight.clone().requires_grad_()
    output = fst.sparse_linear(input, weight, strategy=Strategy("test", grad_weight=rule))
    return torch.autograd.grad(output, weight, grad_output)[0]


def flops(rule, input, weight, grad_output):
    """Of the weight gradient, as torch counts them."""
    weight = weight.clone().requires_grad_()
    output = fst.sparse_linear(input, weight, strategy=Strategy("test", grad_weight=rule))
    with FlopCounterMode(display=False) as counter:
        output.backward(grad_output)
    return counter.get_total_flops()


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("shape", [(2, 64), (2, 65), (2, 8, 8), (2, 5, 7)], ids=str)
@pytest.mark.parametrize("rule", [*HALVES, QUARTER, PREFIX], ids=str)
def test_multiply_adds_are_exactly_those_of_the_kept_tokens(rule, shape, retained):
    input, weight, grad_output = operands(*shape)
    tokens = grad_output[0, ..., 0].numel()
    if retained:  # by the ReLU: the layer saves nothing of its own
        input = input.requires_grad_().relu()
    weight = weight.requires_grad_()
    output = fst.sparse_linear(input, weight, strategy=Strategy("test", grad_weight=rule))
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(output, weight, grad_output)
    height, width = shape[1:] if len(shape) == 3 else (1, tokens)
    kept, whole = rule.kept("grad_weight", (OUTPUTS, INPUTS, 1, 1), 1, height, width)
    dense = 2 * OUTPUTS * INPUTS * shape[0] * tokens
    of_input = dense if retained else 0  # grad_input
    assert counter.get_total_flops() - of_input == dense * kept / whole
    if rule is not PREFIX and (width == 64 or height == 8):
        assert kept / whole == rule.density


def test_centring_adds_sums_alone():
    shape = (4, 65)
    input, weight, grad_output = operands(*shape)
    plain = flops(Sampled(phase=0, center=False), input, weight, grad_output)
    centred = flops(Sampled(phase=0), input, weight, grad_output)
    assert plain == 2 * OUTPUTS * INPUTS * 4 * 33
    assert centred - plain == 2 * 2 * OUTPUTS * 65 * (4 + 1)  # over samples, then over tokens


@pytest.mark.parametrize("rule", [*HALVES, QUARTER, Sampled(phase=1)], ids=str)
@pytest.mark.parametrize("shape", [(3, 8), (3, 9), (2, 4, 6), (1, 3, 5)], ids=str)
def test_tokens_are_read_where_they_lie(rule, shape, monkeypatch):
    """Of an input that the ReLU before keeps anyway nothing is saved, and nothing copied."""
    input, weight, grad_output = operands(*shape)
    strategy = Strategy("test", grad_weight=rule)
    expected = reference_linear(input.relu(), weight, grad_output, strategy=strategy).grad_weight
    monkeypatch.setattr(positions, "_kept_input", None)  # which copies
    actual = weight_gradient(rule, input.requires_grad_().relu(), weight, grad_output)
    assert error(actual, expected) <= 1e-12


@pytest.mark.parametrize("tokens", [8, 9])
def test_every_other_token_is_a_matrix_without_a_copy(tokens):
    """Where the number of tokens is even: a BLAS takes the step from row to row."""
    maps = torch.randn(3, 1, tokens, 4).permute(0, 3, 1, 2)
    matrix = strided._matrix(maps[:, :, :, ::2])
    is_view = matrix.untyped_storage().data_ptr() == maps.untyped_storage().data_ptr()
    assert is_view == (tokens % 2 == 0)
    if is_view:
        assert matrix.stride() == (2 * 4, 1)


@pytest.mark.parametrize("tokens", [8, 9])
@pytest.mark.parametrize("keep", [2, 4])
def test_sampling_is_exact_in_the_mean_class_token_included(keep, tokens):
    given = operands(3, tokens)
    found = [weight_gradient(Sampled(keep=keep, phase=p), *given) for p in range(keep)]
    assert error(sum(found) / keep, weight_gradient(None, *given)) <= 1e-12
    others = [g.clone() for g in given]
    others[0][:, 1:] = 0  # the class token's share alone
    found = [weight_gradient(Sampled(keep=keep, phase=p), *others) for p in range(keep)]
    assert error(sum(found) / keep, weight_gradient(None, *others)) <= 1e-12


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize(("keep", "tokens"), [(2, 8), (2, 9), (4, 9), (4, 2), (2, 1)])
def test_prefix_tokens_are_exact_in_every_draw(keep, tokens, center, split):
    given = operands(3, tokens)
    rules = [
        Sampled(keep=keep, phase=p, center=center, split=split, prefix_tokens=2)
        for p in range(keep)
    ]
    found = [weight_gradient(rule, *given) for rule in rules]
    assert error(sum(found) / keep, weight_gradient(None, *given)) <= 1e-12
    given[2][:, 2:] = 0  # the gradient of the prefix alone
    for rule in rules:
        assert error(weight_gradient(rule, *given), weight_gradient(None, *given)) <= 1e-12


def test_maps_have_no_prefix():
    given = operands(2, 4, 6)
    rules = (Sampled(phase=0), Sampled(phase=0, prefix_tokens=1))
    plain, prefixed = (weight_gradient(rule, *given) for rule in rules)
    assert torch.equal(plain, prefixed)


def test_pairs_follow_the_sequence_and_the_last_of_an_odd_one_is_exact():
    input, weight, grad_output = operands(2, 5)
    pairs = grad_output[:, 0:4:2] + grad_output[:, 1:4:2]
    expected = torch.einsum("nto,nti->oi", pairs, input[:, 0:4:2])
    expected += grad_output[:, 4].t() @ input[:, 4]
    assert error(weight_gradient(Alternating(), input, weight, grad_output), expected) <= 1e-12


@pytest.mark.parametrize(
    "rule", [Alternating(), Bands(block=(1, 2), sample=(), keep=("L",)), Sampled(phase=1)]
)
def test_rows_of_a_batch_are_samples_and_are_not_paired(rule):
    given = operands(6)
    assert error(weight_gradient(rule, *given), weight_gradient(None, *given)) <= 1e-12
    layer = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    fst.convert(layer, Strategy("test", grad_weight=rule), layers="linear")
    layer(given[0].float()).sum().backward()
    (report,) = [describe_layer(m) for m in layer]
    assert report.gemms["grad_weight"].mode == "dense"
    assert "1x1" in report.gemms["grad_weight"].reason


def test_blocks_of_2x2_leave_a_row_of_tokens_dense():
    given = operands(2, 8)
    assert error(weight_gradient(Bands(), *given), weight_gradient(None, *given)) <= 1e-12


@pytest.mark.parametrize("name", ["fst", "fst_w", "sdgp", "srste"])
def test_memory_layouts_and_bfloat16(name):
    input, weight, grad_output = operands(3, 9)
    strategy = fst.get_strategy(name)
    expected = reference_linear(input, weight, grad_output, strategy=strategy)
    turned = input.transpose(0, 1).contiguous().transpose(0, 1)
    spread = torch.stack([grad_output, grad_output], -1)[..., 0]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        leaves = [t.to(dtype).detach().requires_grad_() for t in (turned, weight)]
        output = fst.sparse_linear(*leaves, strategy=strategy)
        output.backward(spread.to(dtype))
        assert output.dtype == leaves[0].grad.dtype == leaves[1].grad.dtype == dtype
        if dtype == torch.bfloat16:  # masks of what is rounded
            rounded = [t.to(dtype).double() for t in (input, weight, grad_output)]
            expected = reference_linear(*rounded, strategy=strategy)
        assert error(output.detach(), expected.output) <= tolerance
        assert error(leaves[0].grad, expected.grad_input) <= tolerance
        assert error(leaves[1].grad, expected.grad_weight) <= tolerance


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 3)], ids=str)
def test_gradcheck(shape):
    """Where the function is smooth: nothing pruned, and for the input a mask that both GEMMs of
    the weight share.
    """
    input, weight, _ = operands(*shape)
    leaves = [input.requires_grad_(), weight.requires_grad_()]
    assert torch.autograd.gradcheck(lambda *x: fst.sparse_linear(*x, strategy="dense"), leaves)
    strategy = fst.get_strategy("srste")
    fixed = weight.detach()
    assert torch.autograd.gradcheck(
        lambda x: fst.sparse_linear(x, fixed, strategy=strategy), leaves[:1]
    )


@pytest.mark.parametrize("name", ["fst", "fst_w", "sampled"])
def test_a_block_of_a_vision_transformer_is_one_graph(name):
    """Scaled dot product attention stays torch's own."""
    transformer = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    options = {"phase": 0, "min_size": 0, "prefix_tokens": 1} if name == "sampled" else {}
    block = transformer.Block(32, num_heads=2)
    report = fst.convert(block, fst.get_strategy(name, **options), layers="linear")
    assert set(report.converted) == {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"}
    tokens = torch.randn(2, 17, 32)
    other = copy.deepcopy(block)
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for run in (block, compiled):
        run(tokens).square().sum().backward()
    expected = gradients(block)
    for name, value in gradients(other).items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4 * scale)
    with torch.autocast("cpu", torch.bfloat16):
        assert block(tokens).isfinite().all()

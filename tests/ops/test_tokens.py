"""Linear layers on tokens: weight gradients pair them, whatever the backend."""

import copy

import pytest
import torch
from torch import nn

import fst
from fst.api.report import describe_layer
from fst.backends import force
from fst.ops import cpp
from fst.rules.alternating import Alternating
from fst.rules.strategy import Strategy
from tests.cases import error
from tests.networks import gradients
from tests.oracle.conv import reference_linear

OUTPUTS, INPUTS = 6, 8
HALVES = [Alternating(), Alternating(phase=1)]
BACKENDS = ["strided", "torch"] + ["cpp"] * (not cpp.missing())


def operands(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sizes = ((*shape, INPUTS), (OUTPUTS, INPUTS), (*shape, OUTPUTS))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes]


def weight_gradient(rule, input, weight, grad_output):
    weight = weight.clone().requires_grad_()
    output = fst.sparse_linear(input, weight, strategy=Strategy("test", grad_weight=rule))
    return torch.autograd.grad(output, weight, grad_output)[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(3, 8), (3, 9), (2, 4, 6), (1, 3, 5)], ids=str)
def test_tokens_in_pairs(rule, shape, backend):
    given = operands(*shape, dtype=torch.float32)
    strategy = Strategy("test", grad_weight=rule)
    expected = reference_linear(*given, strategy=strategy).grad_weight
    with force(grad_weight=backend):
        assert error(weight_gradient(rule, *given), expected) <= 1e-6


def test_pairs_follow_the_sequence_and_the_last_of_an_odd_one_is_exact():
    input, weight, grad_output = operands(2, 5)
    pairs = grad_output[:, 0:4:2] + grad_output[:, 1:4:2]
    expected = torch.einsum("nto,nti->oi", pairs, input[:, 0:4:2])
    expected += grad_output[:, 4].t() @ input[:, 4]
    assert error(weight_gradient(Alternating(), input, weight, grad_output), expected) <= 1e-12


def test_rows_of_a_batch_are_samples_and_are_not_paired():
    given, rule = operands(6), Alternating()
    assert error(weight_gradient(rule, *given), weight_gradient(None, *given)) <= 1e-12
    layer = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    fst.convert(layer, Strategy("test", grad_weight=rule), layers="linear")
    layer(given[0].float()).sum().backward()
    (report,) = [describe_layer(m) for m in layer]
    assert report.gemms["grad_weight"].mode == "dense"
    assert "too small" in report.gemms["grad_weight"].reason


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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("fst", marks=pytest.mark.system),
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("fst_w", "sampled")),
    ],
)
def test_a_block_of_a_vision_transformer_is_one_graph(name):
    """Scaled dot product attention stays torch's own."""
    transformer = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    options = {"keep": 1.0} if name == "sampled" else {}  # draws of compiled code are others
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

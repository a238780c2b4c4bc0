"""The float64 reference itself: against plain autograd, and against examples worked out by hand."""

import pytest
import torch
import torch.nn.functional as F

from fst.rules.alternating import Alternating
from fst.rules.nm import NM, Transposable
from fst.rules.strategy import Strategy
from tests.oracle.conv import (
    alternating_matrices,
    output_size,
    reference_conv2d,
    reference_im2col,
    reference_linear,
    reference_transposable_mask,
    transposable_patterns,
)

DENSE = Strategy("dense")

GEOMETRIES = [
    dict(),
    dict(stride=(1, 2), padding=(0, 2)),
    dict(stride=(2, 1), padding=(2, 1), dilation=(1, 2)),
    dict(padding="same", dilation=2),
    dict(padding="valid", stride=3),
    dict(groups=2, padding=1),
    dict(groups=4, stride=2),
]


def _operands(geometry, kernel=(3, 2), channels=(4, 8), size=(7, 8), batch=2):
    groups = geometry.get("groups", 1)
    kwargs = {key: value for key, value in geometry.items() if key != "groups"}
    input = torch.randn(batch, channels[0], *size, dtype=torch.float64)
    weight = torch.randn(channels[1], channels[0] // groups, *kernel, dtype=torch.float64)
    grad_output = torch.randn(
        batch, channels[1], *output_size(size, kernel, **kwargs), dtype=torch.float64
    )
    return input, weight, grad_output


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_dense_equals_autograd(geometry):
    input, weight, grad_output = _operands(geometry)
    bias = torch.randn(8, dtype=torch.float64)
    operands = [t.requires_grad_() for t in (input, weight, bias)]
    output = F.conv2d(input, weight, bias, **geometry)
    grads = torch.autograd.grad(output, operands, grad_output)
    result = reference_conv2d(input, weight, grad_output, bias=bias, strategy=DENSE, **geometry)
    for actual, expected in zip(result, (output, *grads[:2], grads[2]), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 6), (3, 7, 6), (2, 3, 2, 6)])
def test_linear_equals_autograd(shape):
    input = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    output = F.linear(input, weight, bias)
    grad_output = torch.randn_like(output)
    grads = torch.autograd.grad(output, (input, weight, bias), grad_output)
    result = reference_linear(input, weight, grad_output, bias=bias, strategy=DENSE)
    for actual, expected in zip(result, (output, *grads), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_im2col_equals_unfold():
    input = torch.randn(2, 3, 6, 7, dtype=torch.float64)
    expected = F.unfold(input, (3, 2), dilation=(1, 2), padding=(2, 1), stride=(2, 1))
    actual = reference_im2col(input, (3, 2), (2, 1), (2, 1), (1, 2))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_ninety_transposable_patterns():
    patterns = transposable_patterns()
    assert len(patterns) == len(set(patterns)) == 90
    assert patterns[0] == ((1, 1, 0, 0), (1, 1, 0, 0), (0, 0, 1, 1), (0, 0, 1, 1))


def test_transposable_mask_by_hand():
    tile = torch.tensor([[9, 1, 1, 8], [1, 9, 8, 1], [1, 8, 9, 1], [8, 1, 1, 9.0]])
    assert reference_transposable_mask(tile).tolist() == (tile > 1).tolist()
    tile = torch.tensor([[5, 5, 1, 0], [5, 5, 5, 0], [1, 5, 5, 1], [0, 0, 1, 1.0]])
    mask = reference_transposable_mask(tile)
    assert (mask.sum(0) == 2).all() and (mask.sum(1) == 2).all()
    best = max(tile[torch.tensor(pattern)].sum().item() for pattern in transposable_patterns())
    assert tile[mask].sum().item() == best


def test_transposable_mask_pads_with_zeros():
    mask = reference_transposable_mask(torch.randn(6, 5))
    assert mask.shape == (6, 5)
    assert (mask[:4, :4].sum(0) == 2).all() and (mask[:, 4].sum() <= 4)


EQUATION_10 = torch.diag(torch.ones(5), -1).double()  # T for six positions: (dY T)[i] = dY[i + 1]


def test_alternating_is_equation_10():
    """For an even width, kept columns 1, 3, 5, … (from 1) and T the paper's shift by one."""
    for rule in (Alternating(), Alternating(pairing="flat")):
        kept, shift = alternating_matrices(1, 6, rule)
        assert kept.int().tolist() == [1, 0, 1, 0, 1, 0]
        assert torch.equal(shift[:, kept], EQUATION_10[:, kept])
    grad_output = torch.tensor([[1.0, 2, 3, 4, 5, 6]]).double()
    assert (grad_output @ EQUATION_10).tolist() == [[2, 3, 4, 5, 6, 0]]  # "shifted left by one"


@pytest.mark.parametrize(
    ("height", "width", "rule", "phase", "sums"),
    [  # grad_output counts 1, 2, 3, … over the positions; sums = what reaches each position
        (2, 4, Alternating(), 0, [3, 0, 7, 0, 11, 0, 15, 0]),
        (2, 3, Alternating(), 0, [3, 0, 3, 9, 0, 6]),  # the odd last column stands alone
        (2, 3, Alternating(pairing="flat"), 0, [3, 0, 7, 0, 11, 0]),  # across the row's end
        (1, 5, Alternating(pairing="flat"), 0, [3, 0, 7, 0, 5]),
        (3, 1, Alternating(), 0, [1, 2, 3]),
        (3, 1, Alternating(), 1, [1, 2, 3]),  # a width of one uses phase 0
        (3, 1, Alternating(pairing="flat"), 0, [3, 0, 3]),
        (3, 1, Alternating(pairing="flat"), 1, [0, 6, 0]),
        (1, 1, Alternating(pairing="flat"), 1, [1]),
        (2, 4, Alternating(phase=1), 1, [0, 3, 0, 7, 0, 11, 0, 15]),
        (2, 3, Alternating(phase=1), 1, [0, 6, 0, 0, 15, 0]),  # a group of three
        (1, 5, Alternating(phase=1), 1, [0, 3, 0, 12, 0]),
        (2, 4, Alternating(block=(2, 2)), 0, [14, 0, 22, 0, 0, 0, 0, 0]),
        (3, 3, Alternating(block=(2, 2)), 0, [12, 0, 9, 0, 0, 0, 15, 0, 9]),
        (1, 3, Alternating(block=(2, 2)), 0, [3, 0, 3]),
        (3, 1, Alternating(block=(2, 2)), 0, [3, 0, 3]),
    ],
)
def test_alternating_by_hand(height, width, rule, phase, sums):
    kept, shift = alternating_matrices(height, width, rule, phase)
    grad_output = torch.arange(1.0, height * width + 1, dtype=torch.float64)
    assert ((grad_output + grad_output @ shift) * kept).tolist() == sums


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("pairing", ["row", "flat"])
def test_restoration_is_exact_on_a_constant_input(pairing, phase):
    """Where neighbours are equal nothing is lost: Eq. 9 holds exactly, so dW is the dense one."""
    input = torch.ones(2, 4, 5, 7, dtype=torch.float64)
    _, weight, _ = _operands({}, kernel=(1, 1))
    grad_output = torch.randn(2, 8, 5, 7, dtype=torch.float64)
    rule = Alternating(pairing=pairing, phase=phase)
    sparse = reference_conv2d(input, weight, grad_output, strategy=Strategy("s", grad_weight=rule))
    dense = reference_conv2d(input, weight, grad_output, strategy=DENSE)
    torch.testing.assert_close(sparse.grad_weight, dense.grad_weight, rtol=1e-12, atol=1e-12)


def _single(values):
    """A 1x1 convolution of one sample and one position, channels = values."""
    return torch.tensor(values, dtype=torch.float64).reshape(1, -1, 1, 1)


def test_weight_in_output_by_hand():
    weight = torch.tensor([[1.0, 7, -3, 2], [4, 3, 2, 1]]).double().reshape(2, 4, 1, 1)
    result = reference_conv2d(
        _single([1, 1, 1, 1]),
        weight,
        _single([1, 2]),
        strategy=Strategy("s", output=NM("weight"), decay=0.5),
    )
    assert result.output.flatten().tolist() == [4, 7]
    assert result.grad_input.flatten().tolist() == [9, 13, 1, 4]  # Wᵀ dY, W dense
    decayed = [[1 + 0.5, 1, 1, 1 + 1.0], [2, 2, 2 + 1.0, 2 + 0.5]]  # dY Xᵀ + λ (W − S(W))
    assert result.grad_weight.reshape(2, 4).tolist() == decayed


def test_weight_in_grad_input_is_pruned_separately():
    weight = torch.tensor([[1.0], [7], [-3], [2]]).double().reshape(4, 1, 1, 1)
    result = reference_conv2d(
        _single([1]),
        weight,
        _single([1, 1, 1, 1]),
        strategy=Strategy("s", output=NM("weight"), grad_input=NM("weight")),
    )
    assert result.output.flatten().tolist() == [1, 7, -3, 2]  # groups of one along the input
    assert result.grad_input.item() == 4  # 7 − 3: groups of four along the output


def test_group_orders_by_hand():
    """Two input channels, 1x2 kernel: channel groups are the flattened positions (0, 2), (1, 3)."""
    weight = torch.tensor([[[[4.0, 1]], [[3, 2]]]]).double()
    input = torch.ones(1, 2, 1, 2, dtype=torch.float64)
    grad_output = torch.ones(1, 1, 1, 1)
    outputs = {
        order: reference_conv2d(
            input,
            weight,
            grad_output,
            strategy=Strategy("s", output=NM("weight", 1, 2, group_order=order)),
        ).output.item()
        for order in ("channel", "im2col")
    }
    assert outputs == {"channel": 6, "im2col": 7}  # 4 + 2 against 4 + 3


def test_grad_output_rules_by_hand():
    grad_output = _single([1, 7, -3, 2])
    weight = torch.eye(4, dtype=torch.float64).reshape(4, 4, 1, 1)
    results = {
        rescale: reference_conv2d(
            _single([1, 1, 1, 1]),
            weight,
            grad_output,
            bias=torch.zeros(4),
            strategy=Strategy(
                "s", grad_input=NM("grad_output", rule="magnitude_rescaled", rescale=rescale)
            ),
        )
        for rescale in ("sample_channel", "channel", "group")
    }
    # one position: per channel the scale is 1 where kept, and 1, not NaN, where the sum is zero
    assert results["sample_channel"].grad_input.flatten().tolist() == [0, 7, -3, 0]
    assert results["channel"].grad_input.flatten().tolist() == [0, 7, -3, 0]
    expected = torch.tensor([0, 7, -3, 0]) * 1.3  # 13 / 10
    torch.testing.assert_close(results["group"].grad_input.flatten(), expected.double())
    for result in results.values():
        assert result.grad_weight[:, 0].flatten().tolist() == [1, 7, -3, 2]  # full dY
        assert result.grad_bias.tolist() == [1, 7, -3, 2]


def test_rescaling_scopes_by_hand():
    """Two samples, two channels, two positions, 1:2: the scopes differ."""
    grad_output = torch.tensor([[[4.0, 1], [2, 3]], [[1, 8], [6, 2]]]).double()[:, :, None]
    weight = torch.eye(2, dtype=torch.float64).reshape(2, 2, 1, 1)
    expected = {
        # kept: sample 0 (4, ·), (·, 3); sample 1 (·, 8), (6, ·)
        "sample_channel": [[[4 * 5 / 4, 0], [0, 3 * 5 / 3]], [[0, 8 * 9 / 8], [6 * 8 / 6, 0]]],
        "channel": [[[4 * 14 / 12, 0], [0, 3 * 13 / 9]], [[0, 8 * 14 / 12], [6 * 13 / 9, 0]]],
        "group": [[[6, 0], [0, 4]], [[0, 10], [7, 0]]],
    }
    for rescale, values in expected.items():
        rule = NM("grad_output", 1, 2, rule="magnitude_rescaled", rescale=rescale)
        result = reference_conv2d(
            torch.ones(2, 2, 1, 2), weight, grad_output, strategy=Strategy("s", grad_input=rule)
        )
        torch.testing.assert_close(result.grad_input[:, :, 0], torch.tensor(values).double())


def test_spatial_rules_by_hand():
    """1x1 convolution, one channel, four positions: groups run along P*Q, per sample."""
    input = torch.tensor([[1.0, 7], [-3, 2]]).double().expand(2, 1, 2, 2)
    grad_output = torch.tensor([[5.0, 1], [1, 6]]).double().expand(2, 1, 2, 2)
    weight = torch.ones(1, 1, 1, 1)

    def grad_weight(rule):
        strategy = Strategy("s", grad_weight=rule)
        return reference_conv2d(input, weight, grad_output, strategy=strategy).grad_weight.item()

    assert grad_weight(NM("input")) == 2 * (7 * 1 - 3 * 1)
    assert grad_weight(NM("grad_output")) == 2 * (5 * 1 + 6 * 2)
    assert grad_weight(Alternating()) == 2 * ((5 + 1) * 1 + (1 + 6) * -3)
    assert grad_weight(Alternating(phase=1)) == 2 * ((5 + 1) * 7 + (1 + 6) * 2)
    assert grad_weight(Alternating(restore=False)) == 2 * (5 * 1 + 1 * -3)
    assert grad_weight(Alternating(block=(2, 2))) == 2 * (13 * 1)


def test_groups_end_with_the_convolution_group():
    """Cout = 4 in two convolution groups: a 2:4 group never spans both."""
    weight = torch.tensor([1.0, 2, 3, 4]).double().reshape(4, 1, 1, 1)
    strategy = Strategy("s", output=NM("weight"), grad_input=NM("weight", 1, 4))
    result = reference_conv2d(
        torch.ones(1, 2, 1, 1), weight, torch.ones(1, 4, 1, 1), groups=2, strategy=strategy
    )
    assert result.output.flatten().tolist() == [1, 2, 3, 4]
    assert result.grad_input.flatten().tolist() == [2, 4]
    strategy = Strategy("s", grad_input=NM("grad_output", 1, 4))
    grad_output = torch.tensor([3.0, 1, 2, 5]).double().reshape(1, 4, 1, 1)
    result = reference_conv2d(
        torch.ones(1, 2, 1, 1), torch.ones(4, 1, 1, 1), grad_output, groups=2, strategy=strategy
    )
    assert result.grad_input.flatten().tolist() == [3, 5]


def test_draws_are_used_and_asked_for():
    rule = NM("weight", rule="random")
    weight = torch.tensor([[1.0, 7, -3, 2]]).double().reshape(1, 4, 1, 1)
    arguments = (_single([1, 1, 1, 1]), weight, _single([1]))
    with pytest.raises(ValueError, match="'output'"):
        reference_conv2d(*arguments, strategy=Strategy("s", output=rule))
    mask = torch.tensor([1, 0, 0, 1]).reshape(1, 4, 1, 1)
    result = reference_conv2d(
        *arguments, strategy=Strategy("s", output=rule), draws={"output": mask}
    )
    assert result.output.item() == 3
    with pytest.raises(ValueError, match="'phase'"):
        strategy = Strategy("s", grad_weight=Alternating(phase="random"))
        reference_conv2d(*arguments, strategy=strategy)
    with pytest.raises(ValueError, match="4:8"):
        greedy = Transposable(n=4, m=8)
        strategy = Strategy("s", output=greedy, grad_input=greedy)
        reference_conv2d(*arguments, strategy=strategy)
    with pytest.raises(ValueError, match="grad_output"):
        reference_conv2d(*arguments[:2], torch.ones(1, 1, 1, 2), strategy=DENSE)

"""Rescaling of pruned output gradients: it keeps norms, in any dtype."""

import pytest
import torch

import fst
from tests.kernels.values import concentrated
from tests.oracle.conv import reference_conv2d, reference_nm_mask


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rescaling_sums_in_float32(dtype):
    """One hundred thousand equal values: a sum in 16 bits would stop at 256 or overflow."""
    value = 2.0 if dtype == torch.bfloat16 else 60.0
    grad_output = torch.full((1, 4, 200, 250), value, dtype=dtype)
    grad_output[:, 2:] = 1.0
    input = torch.zeros(1, 4, 200, 250, dtype=dtype, requires_grad=True)
    weight = torch.eye(4, dtype=dtype).reshape(4, 4, 1, 1)
    for rescale in ("sample_channel", "channel"):
        input.grad = None
        strategy = fst.get_strategy("sdgp", n=2, m=4, rescale=rescale)
        fst.sparse_conv2d(input, weight, strategy=strategy).backward(grad_output)
        assert (input.grad[:, :2] == value).all() and (input.grad[:, 2:] == 0).all()


@pytest.mark.parametrize("memory", ["contiguous", "channels_last"])
@pytest.mark.parametrize("rescale", ["sample_channel", "channel"])
def test_rescaling_by_more_than_float16_holds(rescale, memory):
    """By the C++ kernel, where there is one, and by PyTorch's operators."""
    grad_output = concentrated(memory)
    input = torch.zeros(1, 8, 56, 56, dtype=torch.float16, requires_grad=True)
    weight = torch.eye(8, dtype=torch.float16).reshape(8, 8, 1, 1)
    strategy = fst.get_strategy("sdgp", rescale=rescale)
    fst.sparse_conv2d(input, weight, strategy=strategy).backward(grad_output)
    expected = reference_conv2d(input, weight, grad_output, strategy=strategy).grad_input
    torch.testing.assert_close(input.grad.double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("rescale", ["sample_channel", "channel", "group"])
def test_rescaling_of_zeros_is_zero(rescale):
    input = torch.randn(2, 8, 5, 5, requires_grad=True)
    weight = torch.randn(8, 8, 3, 3)
    strategy = fst.get_strategy("sdgp", rescale=rescale)
    output = fst.sparse_conv2d(input, weight, strategy=strategy)
    output.backward(torch.zeros_like(output))
    assert (input.grad == 0).all()
    grad_output = torch.zeros_like(output)
    grad_output[:, 0] = 1  # the channels 1, 2, 3 are kept nowhere or are zero
    input.grad = None
    fst.sparse_conv2d(input, weight, strategy=strategy).backward(grad_output)
    assert input.grad.isfinite().all()


@pytest.mark.parametrize("rescale", ["sample_channel", "channel", "group"])
def test_rescaling_keeps_the_l1_norm(rescale):
    grad_output = torch.randn(3, 8, 6, 6, dtype=torch.float64)
    input = torch.zeros(3, 8, 6, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.eye(8, dtype=torch.float64).reshape(8, 8, 1, 1)
    strategy = fst.get_strategy("sdgp", rescale=rescale)
    fst.sparse_conv2d(input, weight, strategy=strategy).backward(grad_output)
    pruned = input.grad
    assert torch.equal(pruned != 0, reference_nm_mask(grad_output, 2, 4, 1))

    def norm(tensor):
        if rescale == "sample_channel":
            return tensor.abs().sum((2, 3))
        if rescale == "channel":
            return tensor.abs().sum((0, 2, 3))
        return tensor.abs().unflatten(1, (2, 4)).sum(2)

    torch.testing.assert_close(norm(pruned), norm(grad_output))

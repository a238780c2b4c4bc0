"""Bad input to the functional ops: the error names the argument, its value and what is allowed."""

import numpy
import pytest
import torch

import fst


def _input(*shape, **options):
    return torch.zeros(*(shape or (2, 8, 6, 6)), **options)


def _weight(*shape, **options):
    return torch.zeros(*(shape or (8, 8, 3, 3)), **options)


BAD = [
    # id, arguments, words that the message must contain
    ("groups_input", dict(groups=3), ["groups", "3"]),
    ("groups_output", dict(weight=_weight(9, 4, 3, 3), groups=2), ["groups", "2", "9"]),
    ("groups_zero", dict(groups=0), ["groups", "0"]),
    ("groups_negative", dict(groups=-1), ["groups", "-1"]),
    ("groups_bool", dict(groups=True), ["groups", "True"]),
    ("groups_float", dict(groups=1.0), ["groups", "1.0"]),
    ("input_3d", dict(input=_input(8, 6, 6)), ["input", "(8, 6, 6)"]),
    ("input_5d", dict(input=_input(1, 2, 8, 6, 6)), ["input", "(1, 2, 8, 6, 6)"]),
    ("weight_3d", dict(weight=_weight(8, 8, 3)), ["weight", "(8, 8, 3)"]),
    ("channels", dict(weight=_weight(8, 6, 3, 3)), ["8", "6"]),
    ("channels_grouped", dict(weight=_weight(8, 8, 3, 3), groups=2), ["groups", "2", "8"]),
    ("bias_2d", dict(bias=torch.zeros(1, 8)), ["bias", "(1, 8)", "(8,)"]),
    ("bias_size", dict(bias=torch.zeros(7)), ["bias", "7", "8"]),
    ("dtype_weight", dict(weight=_weight().double()), ["float32", "float64"]),
    ("dtype_input", dict(input=_input(dtype=torch.bfloat16)), ["bfloat16", "float32"]),
    ("dtype_integer", dict(input=_input().long()), ["input", "int64"]),
    (
        "dtype_integer_both",
        dict(input=_input().long(), weight=_weight().long()),
        ["int64", "floating"],
    ),
    ("dtype_bias", dict(bias=torch.zeros(8).double()), ["bias", "float64"]),
    ("device_weight", dict(weight=_weight(device="meta")), ["weight", "meta", "cpu"]),
    ("device_input", dict(input=_input(device="meta")), ["meta", "cpu"]),
    ("device_bias", dict(bias=torch.zeros(8, device="meta")), ["bias", "meta"]),
    ("padding_negative", dict(padding=-1), ["padding", "-1"]),
    ("padding_negative_pair", dict(padding=(0, -2)), ["padding", "-2"]),
    ("padding_word", dict(padding="reflect"), ["padding", "reflect", "same", "valid"]),
    ("padding_same_stride", dict(padding="same", stride=2), ["padding", "same", "stride", "2"]),
    (
        "padding_same_stride_pair",
        dict(padding="same", stride=(1, 2)),
        ["padding", "same", "stride", "2"],
    ),
    ("padding_float", dict(padding=0.5), ["padding", "0.5"]),
    ("padding_triple", dict(padding=(1, 1, 1)), ["padding", "(1, 1, 1)"]),
    ("stride_zero", dict(stride=0), ["stride", "0"]),
    ("stride_negative", dict(stride=(1, -1)), ["stride", "-1"]),
    ("stride_triple", dict(stride=(1, 1, 1)), ["stride", "(1, 1, 1)"]),
    ("stride_float", dict(stride=1.5), ["stride", "1.5"]),
    ("stride_bytes", dict(stride=b"1"), ["stride", "b'1'"]),
    ("dilation_zero", dict(dilation=0), ["dilation", "0"]),
    ("dilation_word", dict(dilation="same"), ["dilation", "same"]),
    ("too_small", dict(input=_input(2, 8, 2, 2)), ["2", "3"]),
    ("too_small_dilated", dict(dilation=3), ["6", "7"]),
    ("strategy_unknown", dict(strategy="fts"), ["strategy", "fts", "fst"]),
    ("strategy_type", dict(strategy=None), ["strategy", "None"]),
    ("strategy_rule", dict(strategy=fst.NM("weight")), ["strategy"]),
    ("strategy_unhashable", dict(strategy=["fst"]), ["strategy", "['fst']", "'fst'"]),
    ("sparse_input", dict(input=_input().to_sparse()), ["input", "sparse_coo", "strided"]),
    ("sparse_weight", dict(weight=_weight().to_sparse()), ["weight", "sparse_coo", "strided"]),
    ("input_type", dict(input=[[0.0]]), ["input"]),
    ("weight_type", dict(weight=None), ["weight"]),
]


def test_integers_of_numpy_are_integers():
    two = numpy.int64(2)
    layer = torch.nn.Conv2d(8, 8, 3, two, (two, 1), groups=two)
    expected = layer(_input()).shape
    fst.convert(layer, "fst")
    layer(_input()).sum().backward()
    output = fst.sparse_conv2d(_input(), layer.weight, None, two, (two, 1), groups=two)
    assert layer(_input()).shape == output.shape == expected


BAD_LINEAR = [
    ("features", dict(weight=torch.zeros(4, 7)), ["7", "8"]),
    ("weight_1d", dict(weight=torch.zeros(8)), ["weight", "(8,)"]),
    ("weight_4d", dict(weight=torch.zeros(4, 8, 1, 1)), ["weight", "(4, 8, 1, 1)"]),
    ("input_0d", dict(input=torch.tensor(1.0)), ["input", "()"]),
    ("bias", dict(bias=torch.zeros(8)), ["bias", "(8,)", "(4,)"]),
    ("dtype", dict(weight=torch.zeros(4, 8).double()), ["float32", "float64"]),
    ("strategy", dict(strategy="sdpg"), ["strategy", "sdpg", "sdgp"]),
    ("sparse", dict(weight=torch.zeros(4, 8).to_sparse()), ["weight", "sparse_coo", "strided"]),
]


OF_CONV = dict(input=_input(), weight=_weight(), strategy="fst")
OF_LINEAR = dict(input=torch.zeros(2, 8), weight=torch.zeros(4, 8))


@pytest.mark.parametrize(
    ("call", "arguments", "words"),
    [pytest.param(fst.sparse_conv2d, OF_CONV | b[1], b[2], id=b[0]) for b in BAD]
    + [pytest.param(fst.sparse_linear, OF_LINEAR | b[1], b[2], id=f"l_{b[0]}") for b in BAD_LINEAR],
)
def test_bad_arguments(call, arguments, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        call(**arguments)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{caught.value} does not name {missing}"


def test_padding_beyond_the_input_is_fine():
    output = fst.sparse_conv2d(torch.ones(1, 4, 1, 1), torch.ones(4, 4, 3, 3), padding=5)
    assert output.shape == (1, 4, 9, 9)


def _of_functional_call(net, parameters, input):
    return torch.func.functional_call(net, parameters, (input,)).sum()


@pytest.mark.parametrize(
    "transform",
    [
        lambda net, p, x: torch.func.grad(_of_functional_call, argnums=1)(net, p, x),
        lambda net, p, x: torch.func.jacrev(net)(x),
        lambda net, p, x: torch.func.vmap(net.eval())(x[None]),
    ],
    ids=["grad", "jacrev", "vmap"],
)
def test_transforms_of_functions_are_refused(transform):
    """The message says what works instead, which then does."""
    net, x = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3)), torch.randn(2, 4, 5, 5)
    fst.convert(net, "fst")
    parameters = {name: p.detach().clone() for name, p in net.named_parameters()}
    with pytest.raises(RuntimeError, match="sparse_conv2d cannot run inside .* call torch.autogr"):
        transform(net, parameters, x)
    for parameter in parameters.values():
        parameter.requires_grad_()
    output = _of_functional_call(net, parameters, x)
    assert all(g.isfinite().all() for g in torch.autograd.grad(output, [*parameters.values()]))
    transform(fst.fold(net), parameters, x)

"""The half-cost weight gradient: its programs agree, and it really does half the work."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import fst
from fst import backends
from fst.ops import positions, strided
from fst.ops.geometry import Geometry
from fst.report import describe_layer
from fst.rules.alternating import Alternating

CASES = [
    # in, out, kernel, stride, padding, dilation, height, width
    (8, 16, (3, 3), (1, 2), (1, 1), (1, 1), 9, 12),
    (8, 16, (3, 3), (1, 2), (0, 1), (1, 1), 7, 7),
    (4, 8, (5, 3), (2, 2), (2, 1), (1, 1), 11, 14),
    (4, 8, (1, 7), (1, 2), (0, 3), (1, 1), 5, 9),
    (4, 8, (3, 3), (2, 4), (1, 1), (1, 1), 14, 14),
    (4, 8, (3, 2), (1, 2), (2, 1), (2, 1), 8, 10),
    (4, 8, (1, 1), (1, 2), (0, 1), (1, 1), 5, 7),
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_programs_agree(case, channels_last):
    inputs, outputs, kernel, stride, padding, dilation, height, width = case
    geometry = Geometry(stride, padding, dilation, 1)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    torch.manual_seed(0)
    input = torch.randn(3, inputs, height, width, dtype=torch.float64).to(memory_format=layout)
    weight = torch.randn(outputs, inputs, *kernel, dtype=torch.float64, requires_grad=True)
    output = F.conv2d(input, weight, None, *geometry)
    grad_output = torch.randn_like(output).to(memory_format=layout)
    (expected,) = torch.autograd.grad(output, weight, grad_output)
    programs = {"strided", "transposed", "gemm"} | ({"product"} if kernel == (1, 1) else set())
    assert strided.PROGRAMS.keys() == programs | {"product"}
    for name in programs:
        actual = strided.PROGRAMS[name]([strided.Piece(grad_output, input, geometry)], weight)
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_matrix_product_in_chunks(monkeypatch):
    monkeypatch.setattr(strided, "MOST_COLUMNS", 2 * 5 * 7 * 9 * 4)  # two samples at a time
    torch.manual_seed(0)
    geometry = Geometry((2, 1), (1, 1), (1, 1), 1)
    image = torch.randn(5, 4, 9, 7, dtype=torch.float64)
    weight = torch.randn(6, 4, 3, 3, dtype=torch.float64)
    grad_output = torch.randn(5, 6, 5, 7, dtype=torch.float64)
    piece = [strided.Piece(grad_output, image, geometry)]
    expected = strided.PROGRAMS["strided"](piece, weight)
    torch.testing.assert_close(strided.PROGRAMS["gemm"](piece, weight), expected)


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512"])
def test_every_program_is_chosen_for_some_shape(instructions, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)

    def chosen(
        outputs, size, stride, dtype=torch.float32, groups=1, kernel=(3, 3), inputs=64, **options
    ):
        grad_output = torch.empty(16, outputs, size, size, dtype=dtype).to(**options)
        weight = torch.empty(outputs, inputs, *kernel)
        return strided.program(grad_output, weight, Geometry(stride, (1, 1), (1, 1), groups))

    with_avx2 = instructions == "AVX2"
    assert chosen(64, 56, (1, 2)) == ("gemm" if with_avx2 else "transposed")
    assert chosen(64, 56, (1, 2), inputs=32) == ("strided" if with_avx2 else "transposed")
    assert chosen(512, 4, (1, 2)) == "gemm"
    for large in ((2, 4), (2, 2), (4, 2)):
        assert chosen(128, 28, large) == ("gemm" if with_avx2 else "strided")
    assert chosen(64, 56, (1, 2), dtype=torch.bfloat16) == "strided"
    assert chosen(64, 56, (1, 2), groups=2) == "strided"
    assert chosen(64, 56, (1, 2), kernel=(1, 1)) == "strided"
    assert chosen(64, 2, (1, 2)) == "strided"
    in_rows = {"kernel": (1, 1), "memory_format": torch.channels_last}
    assert chosen(64, 56, (1, 2), **in_rows) == "product"
    assert chosen(64, 56, (1, 2), groups=2, **in_rows) == "strided"


def test_candidates_begin_with_the_default(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")

    def candidates(stride, kernel=(3, 3), groups=1, size=256):
        geometry = Geometry(stride, (1, 1), (1, 1), groups)
        grad_output = torch.empty(1, 128, size, size)
        return strided.programs(grad_output, torch.empty(128, 4, *kernel), geometry)

    assert candidates((1, 2)) == ("transposed", "strided", "gemm")
    assert candidates((2, 4)) == ("strided", "transposed", "gemm")
    assert candidates((1, 2), size=4) == ("strided", "transposed", "gemm")
    assert candidates((1, 2), groups=2) == ("strided", "transposed")
    assert candidates((1, 2), kernel=(1, 1)) == ("strided",)


@pytest.mark.parametrize("kernel", [1, 3])
def test_one_decision_covers_the_sums_and_both_lattices(kernel, monkeypatch, tmp_path):
    """Pairs along a flattened map of odd width leave two lattices."""
    monkeypatch.setenv("FST_AUTOTUNE", "1")
    monkeypatch.setenv("FST_CACHE_DIR", str(tmp_path))
    strategy = fst.Strategy("test", grad_weight=Alternating(pairing="flat"))
    images = torch.randn(2, 8, 5, 7)
    weight = torch.randn(8, 8, kernel, kernel)
    grad_output = torch.randn(2, 8, 5, 7)

    def gradient(dtype=torch.float32):
        leaf = weight.to(dtype).requires_grad_()
        output = fst.sparse_conv2d(images.to(dtype), leaf, padding=kernel // 2, strategy=strategy)
        return torch.autograd.grad(output, leaf, grad_output.to(dtype))[0]

    backends.forget_decisions()
    gradient()
    (decision,) = backends.decisions("grad_weight")
    names = {"strided", "transposed", "gemm", "masked"} if kernel == 3 else {"strided"}
    assert set(decision.times) == (names if len(names) > 1 else set())
    expected = gradient(torch.float64)
    for name in names:
        with backends.force(grad_weight=name):
            torch.testing.assert_close(gradient().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("overrides", [{}, {"phase": 1}, {"pairing": "flat"}])
def test_1x1_kernels_can_read_the_input_where_it_lies(overrides, monkeypatch):
    images = torch.randn(2, 8, 7, 9, dtype=torch.float64).requires_grad_()
    weight = torch.randn(4, 8, 1, 1, dtype=torch.float64, requires_grad=True)
    strategy = fst.get_strategy("fst", **overrides)

    def gradient():
        output = fst.sparse_conv2d(images.relu(), weight, stride=2, padding=1, strategy=strategy)
        return torch.autograd.grad(output.square().sum(), weight)[0]

    expected = gradient()
    monkeypatch.setattr(positions, "_kept_input", None)  # which copies
    with backends.force(grad_weight="in_place"):
        torch.testing.assert_close(gradient(), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
@pytest.mark.parametrize(
    "overrides", [{}, {"phase": 1}, {"pairing": "flat"}, {"block": (2, 2)}, {"restore": False}]
)
def test_the_dense_kernel_computes_the_same(overrides, kernel):
    """For layers where the library's strided kernel is slower than its dense one."""
    torch.manual_seed(0)
    strategy = fst.get_strategy("fst", **overrides)
    images = torch.randn(2, 8, 7, 9, dtype=torch.float64).relu()
    before = images.clone().requires_grad_()
    weight = torch.randn(4, 4, *kernel, dtype=torch.float64, requires_grad=True)

    def gradient():
        options = {"stride": (2, 1), "padding": 1, "groups": 2}
        output = fst.sparse_conv2d(before.relu(), weight, strategy=strategy, **options)
        return torch.autograd.grad(output.square().sum(), weight)[0]

    expected = gradient()
    with backends.force(grad_weight="masked"):
        torch.testing.assert_close(gradient(), expected, rtol=1e-11, atol=1e-11)
        model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3))
        fst.convert(model, "fst")
        model(torch.randn(1, 8, 6, 6)).sum().backward()
    report = describe_layer(model[0]).gemms["grad_weight"]
    assert report.mode == "simulated" and report.reason.startswith("masked: ")


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ({}, 1 / 2),
        ({"phase": 1}, 1 / 2),
        ({"pairing": "flat"}, 1 / 2),
        ({"block": (2, 1)}, 1 / 2),
        ({"block": (2, 2)}, 1 / 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", [1, 3])
def test_multiply_adds_of_the_weight_gradient(kernel, overrides, share):
    """Counted by torch: a dense product with a mask would count in full."""

    def flops(strategy):
        images = torch.randn(2, 8, 12, 12)
        weight = torch.randn(8, 8, kernel, kernel, requires_grad=True)
        output = fst.sparse_conv2d(images, weight, padding=kernel // 2, strategy=strategy)
        with FlopCounterMode(display=False) as counter:
            output.sum().backward()
        return counter.get_total_flops()

    assert flops(fst.get_strategy("fst", **overrides)) == share * flops("dense")


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("activation", [torch.relu, torch.sigmoid, torch.relu_, F.gelu])
def test_an_input_that_its_maker_keeps_is_not_saved_twice(activation, stride):
    """A ReLU keeps its result, a GELU what it was made of."""
    torch.manual_seed(0)
    before = torch.randn(2, 16, 6, 7, requires_grad=True)
    weight = torch.randn(8, 16, 1, 1, requires_grad=True)
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        images = activation(before + 0)
        output = fst.sparse_conv2d(images, weight, stride=stride, strategy="fst_w")
        dense = sum(storages.values())
        storages.clear()
        images = activation(before + 0)
        output = fst.sparse_conv2d(images, weight, stride=stride, strategy="fst")
    rows, columns = output.shape[2:]
    half = 2 * 16 * rows * ((columns + 1) // 2) * 4
    whole = images.numel() * 4
    saved = half - whole if activation is F.gelu else 0
    assert sum(storages.values()) == dense + saved
    output.square().sum().backward()
    again = fst.sparse_conv2d(images.detach(), weight, stride=stride, strategy="fst")
    gradient, weight.grad = weight.grad, None
    again.square().sum().backward()
    assert torch.equal(weight.grad, gradient)


@pytest.mark.parametrize(("overrides", "share"), [({}, 1 / 2), ({"block": (2, 2)}, 1 / 4)], ids=str)
def test_what_a_1x1_convolution_saves_of_its_input(overrides, share):
    images = torch.randn(2, 64, 12, 12)
    weight = torch.randn(4, 64, 1, 1, requires_grad=True)
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        strategy = fst.get_strategy("fst", decay=0.0, **overrides)
        fst.sparse_conv2d(images, weight, strategy=strategy)
    of_input = [t for t in saved if t.shape[0] == 2]
    assert sum(t.numel() for t in of_input) == share * images.numel()
    for tensor in of_input:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()

"""Every backend of the op computes what it says, and a refusal says why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import fst
from fst import backends
from fst.backends.choice import TIMED_SAMPLES
from fst.ops.backends import lists_cpp
from tests.cases import Case

STRATEGIES = {  # operation and backend -> a strategy that it serves
    ("output", "dense"): "srste",
    ("grad_input", "dense"): "sdgp",
    ("grad_weight", "dense"): "srste",
    ("grad_weight", "columns"): "wx",
    ("grad_weight", "strided"): "fst",
    ("grad_weight", "torch"): "sampled",
    ("grad_weight", "cpp"): "sampled",
    ("grad_input", "torch"): ("sampled", {"grad_input": 0.5}),
    ("grad_input", "cpp"): ("sampled", {"grad_input": 0.5}),
    ("output", "zeros_weight"): "srste",
    ("grad_input", "zeros_weight"): "srste",
    ("output", "zeros_input"): "sparsetrain",
    ("grad_weight", "zeros_input"): "sparsetrain",
    ("grad_input", "zeros_grad_output"): "sdgp",
    ("grad_weight", "zeros_grad_output"): "sparsetrain",
    ("grad_weight", "listed_zeros"): "sampled",
    ("prune_weight", "torch"): "fst",
    ("prune_weight", "cpp"): "fst",
    ("prune_grad_output", "torch"): "sdgp",
    ("prune_grad_output", "cpp"): "sdgp",
    ("prune_columns", "torch"): "wx",
    ("prune_columns", "cpp"): "wx",
}
REGISTERED = [
    (operation, backend.name)
    for operation in backends.OPERATIONS
    for backend in backends.backends(operation)
    if operation != "packed"
]


def _gradients(strategy: fst.Strategy) -> list[Tensor]:
    case = Case("op", (8, 8), (6, 6), padding=1, batch=2)
    operands = case.operands(torch.float32)
    leaves = [t.clone().requires_grad_() for t in (operands.input, operands.weight)]
    generator = torch.Generator().manual_seed(0)
    output = fst.sparse_conv2d(*leaves, **case.arguments, strategy=strategy, generator=generator)
    return [output, *torch.autograd.grad(output, leaves, operands.grad_output)]


@pytest.mark.parametrize(("operation", "name"), REGISTERED, ids=str)
def test_every_operation_is_computed_by_each_of_its_backends(operation, name, monkeypatch):
    """Forced, it runs, and the results are those of the other backends."""
    chosen = backends.backend(operation, name)
    if chosen.unavailable():
        pytest.skip(chosen.unavailable())
    strategy = STRATEGIES[operation, name]
    strategy = (strategy, {}) if isinstance(strategy, str) else strategy
    strategy = fst.get_strategy(strategy[0], **strategy[1])
    ran, plan = [], type(chosen).plan

    def counted(self, operands):
        ran.append((operands.operation, self.name))
        return plan(self, operands)

    monkeypatch.setenv("FST_AUTOTUNE", "0")
    expected = _gradients(strategy)
    with monkeypatch.context() as patched, backends.force(**{operation: name}):
        patched.setattr(type(chosen), "plan", counted)
        found = _gradients(strategy)
    assert (operation, name) in ran
    if name != "dense" or operation == "output":
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chosen", backends.backends("packed"), ids=lambda b: b.name)
def test_packed_layers_are_computed_by_each_of_their_backends(chosen, monkeypatch):
    """Alone, or around a depthwise layer; where one cannot compute a layer, another one does."""
    if chosen.unavailable():
        pytest.skip(chosen.unavailable())
    pointwise, depthwise = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 3, padding=1, groups=32)
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.ReLU(), depthwise, pointwise, nn.ReLU()).eval()
    prune.random_unstructured(model[0], "weight", 0.5)
    prune.remove(model[0], "weight")
    images, ran, plan = torch.randn(4, 8, 9, 9), [], type(chosen).plan

    def counted(self, operands):
        ran.append(self.name)
        return plan(self, operands)

    monkeypatch.setattr(type(chosen), "plan", counted)
    with backends.prefer(packed=chosen.name), torch.no_grad():
        packed = fst.pack(model, images)
        assert chosen.name in ran and "forced" in str(packed.report)
        torch.testing.assert_close(packed(images), model(images), rtol=1e-4, atol=1e-5)


def test_listed_positions_are_timed_on_some_samples_and_computed_on_all(monkeypatch, tmp_path):
    """Both gradients: dX by the list that dW has drawn."""
    if lists_cpp.LISTS_CPP.unavailable():
        pytest.skip(lists_cpp.LISTS_CPP.unavailable())
    monkeypatch.setenv("FST_AUTOTUNE", "1")
    monkeypatch.setenv("FST_CACHE_DIR", str(tmp_path))
    seen = {"list_grad_weight": set(), "list_grad_input": set()}

    def spied(name):
        compute = getattr(lists_cpp.ListsByCpp, name)

        def compute_and_note(self, first, *others):
            maps = first if isinstance(first, Tensor) else first.grad_output
            seen[name].add(len(maps))
            return compute(self, first, *others)

        return compute_and_note

    for name in seen:
        monkeypatch.setattr(lists_cpp.ListsByCpp, name, spied(name))
    case = Case("op", (8, 8), (6, 6), padding=1, batch=40)
    operands = case.operands(torch.float32)
    leaves = [t.clone().requires_grad_() for t in (operands.input, operands.weight)]
    strategy = fst.get_strategy("sampled", grad_input=0.5)

    def gradients(**preferred):
        generator = torch.Generator().manual_seed(0)
        with backends.prefer(**preferred):
            output = fst.sparse_conv2d(
                *leaves, **case.arguments, strategy=strategy, generator=generator
            )
            return torch.autograd.grad(output, leaves, operands.grad_output)

    gradients()
    for name, sizes in seen.items():
        fewest = TIMED_SAMPLES // 2 if name == "list_grad_weight" else TIMED_SAMPLES
        assert min(sizes) in (fewest, 2 * fewest)  # with AVX-512
    for sizes in seen.values():
        sizes.clear()
    gradients(grad_weight="cpp", grad_input="cpp")
    assert list(seen.values()) == [{40}, {40}]


def test_a_refusal_of_the_op_says_why():
    """float64 is nothing that the kernels read."""
    if lists_cpp.LISTS_CPP.unavailable():
        pytest.skip(lists_cpp.LISTS_CPP.unavailable())
    layer = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3)).double()
    fst.convert(layer, "sampled")
    output = layer(torch.randn(1, 4, 8, 8, dtype=torch.float64))
    with (
        backends.force(grad_weight="cpp"),
        pytest.raises(RuntimeError, match="cpp: operands of torch.float64.*torch: can compute"),
    ):
        output.sum().backward()

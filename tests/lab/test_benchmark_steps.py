"""Whole training steps side by side, and the backends they are timed with."""

import pytest
import torch
from torch import nn

import fst
from fst.basics.errors import UsageError
from fst.lab.benchmark.steps import candidates, time_steps
from fst.lab.model import Training


def a_training(model: nn.Module, images: torch.Tensor, **options) -> Training:
    return Training(model, lambda trained: trained(images).square().mean(), **options)


def test_candidates_train_copies_and_convert_what_is_selected():
    model = nn.ModuleDict({"body": nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))})
    before = model["body"][0].weight.clone()
    training = Training(
        model,
        lambda trained: trained["body"](torch.ones(1, 4, 7, 7)).sum(),
        root=lambda trained: trained["body"],
        selection={"exclude": "0"},
    )
    trained, step = training.candidate(fst.get_strategy("fst"))
    reached: list[nn.Parameter] = []
    for parameter in trained.parameters():
        parameter.register_post_accumulate_grad_hook(reached.append)
    step()
    assert len(reached) == 4 and all(p.isfinite().all() for p in reached)
    assert set(fst.sparse_layers(trained)) == {"body.1"} and not fst.sparse_layers(model)
    assert torch.equal(model["body"][0].weight, before)
    assert torch.equal(trained["body"][0].weight, before)  # zeros stay as they are
    assert all(p.grad is None for p in trained.parameters())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1)
    )


@pytest.fixture
def _traced_only(monkeypatch):
    """Compiling runs the traced graph as it is, so that no compiler is needed."""
    compile_module = nn.Module.compile

    def traced(self, *, fullgraph: bool) -> None:
        compile_module(self, backend="eager", fullgraph=fullgraph)

    monkeypatch.setattr(nn.Module, "compile", traced)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_step_without_finite_gradients_is_not_timed(value):
    training = a_training(nn.Conv2d(4, 4, 1), torch.full((1, 4, 3, 3), value))
    with pytest.raises(UsageError, match="^torch: the gradients of random weights .* not finite"):
        candidates(training, {"fst": fst.get_strategy("fst")})


@pytest.mark.system
def test_candidates_are_eager_and_compiled_and_what_fails_says_why(_traced_only):
    training = a_training(_model(), torch.randn(2, 4, 9, 9))
    strategies = {name: fst.get_strategy(name) for name in ("fst", "tsm", "srste")}
    forced = {"grad_weight": "torch"}
    made = candidates(training, strategies, compiled=True, forced=forced)
    eager = ["torch", "fst", "fst, grad_weight=torch", "tsm", "srste"]
    compiled = ["torch, compiled", "fst, compiled", "srste, compiled"]
    assert set(made.ready) == {*eager, *compiled}
    assert made.failed.keys() == {"tsm, compiled"}
    assert (
        "interval=40 steps is state that torch.compile cannot trace" in made.failed["tsm, compiled"]
    )
    chosen = [
        layer.state.record.decisions["grad_weight"]
        for layer in fst.sparse_layers(made.ready["fst, grad_weight=torch"].model).values()
    ]
    assert [d.backend for d in chosen] == ["torch"] * 3
    times = time_steps(made, training, repeats=2)
    assert times.step.keys() == made.ready.keys()
    assert times.failed == made.failed


def test_forced_backends_that_cannot_compute_say_why():
    training = a_training(_model(), torch.randn(2, 4, 9, 9))
    forced = {"prune_weight": "triton"}
    made = candidates(training, {"fst": fst.get_strategy("fst")}, forced=forced)
    assert made.ready.keys() == {"torch", "fst"}
    assert "triton" in made.failed["fst, prune_weight=triton"]


def test_steps_use_forced_backends_where_they_can():
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=8))
    training = a_training(model, torch.randn(2, 8, 9, 9))
    strategies = {name: fst.get_strategy(name) for name in ("fst", "sdgp")}
    made = candidates(training, strategies, forced={"grad_weight": "torch"})
    assert made.failed == {}
    forced = "fst, grad_weight=torch"
    assert made.ready.keys() == {"torch", "fst", "sdgp", forced}
    layers = fst.sparse_layers(made.ready[forced].model)
    computed = [layer.state.record.decisions["grad_weight"].backend for layer in layers.values()]
    assert computed == ["torch"] * len(layers) != []

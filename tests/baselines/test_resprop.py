"""resprop: what it reuses, and the gradients that it remembers."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fst
from fst.api.report import describe_layer
from fst.baselines.resprop import LEAST_THRESHOLD
from tests.cases import error
from tests.networks import batch, end_step, gradients, small_net
from tests.oracle.conv import reference_conv2d
from tests.strategies.weight_systems import Training


class Step:
    """One backward pass of a layer with a gradient of our choice."""

    def __init__(self, layer):
        self.layer, self.generator = layer, torch.Generator().manual_seed(3)

    def __call__(self, size=4, calls=1):
        layer, results = self.layer, []
        layer.zero_grad()
        outputs = []
        for _ in range(calls):
            input = torch.randn(
                size, 4, 5, 5, generator=self.generator, dtype=torch.float64
            ).requires_grad_()
            outputs.append((input, layer(input)))
        grads = [
            torch.randn(out.shape, generator=self.generator, dtype=torch.float64)
            for _, out in outputs
        ]
        torch.autograd.backward([out for _, out in outputs], grads)
        end_step(layer)
        for (input, _), grad_output in zip(outputs, grads, strict=True):
            results.append((input, grad_output))
        return results


def _layer(strategy="resprop", **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1)).double()
    fst.convert(net, fst.get_strategy(strategy, **options))
    return net


def _reference(layer, input, grad_output, **draws):
    conv = layer[0]
    return reference_conv2d(
        input,
        conv.weight,
        grad_output,
        bias=conv.bias,
        padding=1,
        strategy=conv.strategy,
        draws=draws,
    )


def test_resprop_equals_its_definition_over_steps():
    """Sizes of the batch included: what is remembered is one sample."""
    net = _layer(density=0.4, threshold=0.5)
    step, previous, threshold, kept_shares = Step(net), None, 0.5, []
    for size in (4, 4, 3, 5, 1, 4):
        ((input, grad_output),) = step(size)
        draws = {} if previous is None else {"previous": previous, "threshold": threshold}
        expected = _reference(net, input, grad_output, **draws)
        assert error(input.grad, expected.grad_input) < 1e-12
        assert error(net[0].weight.grad, expected.grad_weight) < 1e-12
        assert error(net[0].bias.grad, grad_output.sum((0, 2, 3))) < 1e-12
        if previous is not None:
            share = ((grad_output - previous).abs() > threshold).double().mean().item()
            kept_shares.append(share)
            threshold *= 2 if share > 0.4 else 0.5 if share < 0.4 else 1
        previous = grad_output[0]
        memory = net[0].state.memories[0]
        assert memory["threshold"].item() == pytest.approx(threshold)
        assert torch.equal(memory["previous"], previous)
    assert max(kept_shares) > 0.4 > min(kept_shares), "the threshold goes both ways"


def test_resprop_reuses_where_little_changes():
    """The defining property: a gradient that differs little from the last is not computed with."""
    net = _layer(threshold=0.1)
    conv = net[0]
    input = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    base = torch.randn(1, 6, 5, 5, dtype=torch.float64).expand(2, -1, -1, -1)
    changed = base + 0.01
    changed[0, 2, 1, 1] += 3
    seen = []
    for grad_output in (base, changed):
        conv.weight.grad = None
        net(input).backward(grad_output)
        seen.append(conv.weight.grad.clone())
        end_step(net)
    dense = copy.deepcopy(net)
    dense[0].state.memories.clear()
    expected = base.clone()
    expected[0, 2, 1, 1] = changed[0, 2, 1, 1]
    dense[0].weight.grad = None
    dense(input).backward(expected)
    torch.testing.assert_close(seen[1], dense[0].weight.grad)


def test_resprop_calls_of_a_step_have_memories_of_their_own():
    net = _layer(density=0.5, threshold=1.0)
    step, previous = Step(net), {}
    for _ in range(3):
        for call, (input, grad_output) in enumerate(step(calls=2)):
            draws = {}
            if call in previous:
                draws = dict(zip(("previous", "threshold"), previous[call], strict=True))
            expected = _reference(net, input, grad_output, **draws)
            assert error(input.grad, expected.grad_input) < 1e-12, call
            memory = net[0].state.memories[call]
            previous[call] = (grad_output[0], memory["threshold"].item())
    step(calls=1)
    assert list(net[0].state.memories) == [0], "a call that no longer happens is forgotten"


def test_resprop_starts_anew_when_the_output_has_another_size():
    net = _layer(threshold=1.0)
    for size in (5, 5, 7, 5):
        input = torch.randn(2, 4, size, size, dtype=torch.float64, requires_grad=True)
        known = net[0].state.memories.get(0)
        fits = known is not None and known["previous"].shape[1:] == (size, size)
        output = net(input)
        grad_output = torch.randn_like(output)
        output.backward(grad_output)
        end_step(net)
        dense = reference_conv2d(
            input, net[0].weight, grad_output, padding=1, strategy=fst.get_strategy("dense")
        )
        assert (error(input.grad, dense.grad_input) < 1e-12) == (not fits)


def test_resprop_warms_up():
    net = _layer(density=0.2, warmup=4)
    rule = net[0].strategy.grad_input
    assert [round(rule.density_at(step), 3) for step in range(6)] == [1, 0.8, 0.6, 0.4, 0.2, 0.2]
    step = Step(net)
    for _ in range(40):
        step()
    memory = net[0].state.memories[0]
    assert 1e-7 < memory["threshold"].item() < 10, "the threshold has found its range"


def test_resprop_threshold_never_gets_stuck_at_zero():
    net = _layer()
    input = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for _ in range(60):
        net(input).backward(torch.zeros(2, 6, 5, 5, dtype=torch.float64))
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert net[0].state.memories[0]["threshold"].item() == pytest.approx(LEAST_THRESHOLD)


def test_resprop_without_an_optimizer_says_so():
    """Steps could not be told apart, and each call would be remembered for good."""
    net, input = _layer(), torch.randn(1, 4, 3, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="without a step of an optimizer"):
        for _ in range(1001):
            net(input)


def test_resprop_shows_nan():
    net = _layer(threshold=100.0)
    input = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    grad_output = torch.zeros(2, 6, 5, 5, dtype=torch.float64)
    net(input).backward(grad_output)
    end_step(net)
    grad_output[1, 3, 2, 2] = float("nan")
    input.grad = None
    net(input).backward(grad_output)
    assert input.grad[1].isnan().any() and not input.grad[0].isnan().any()


def test_resprop_is_untouched_by_evaluation_and_looks():
    def train(between):
        training = Training("resprop", threshold=0.01)
        for step in range(5):
            training.step(step)
            between(training.net)
        return training.net

    def look(net):
        net.eval()
        net(batch(99)).sum().backward()  # in eval mode: dense, and not remembered
        net.zero_grad()
        with torch.no_grad():
            net(batch(98))
        fst.sparsity_state(net), fst.fold(net), str(net)
        net.train()

    expected, actual = train(lambda net: None), train(look)
    for p, q in zip(actual.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)


def test_resprop_with_a_frozen_weight_is_dense():
    net = _layer(threshold=100.0)
    net[0].weight.requires_grad_(False)
    for _ in range(2):
        input = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)
        output = net(input)
        grad_output = torch.randn_like(output)
        output.backward(grad_output)
        dense = reference_conv2d(
            input, net[0].weight, grad_output, padding=1, strategy=fst.get_strategy("dense")
        )
        assert error(input.grad, dense.grad_input) < 1e-12
    assert not net[0].state.memories


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_resprop_with_activation_checkpointing(use_reentrant):
    def train(forward):
        net = small_net()
        fst.convert(net, fst.get_strategy("resprop", threshold=0.01))
        for step in range(4):
            forward(net, batch(step).requires_grad_()).square().mean().backward()
            end_step(net)
        return gradients(net)

    plain = train(lambda net, x: net(x))
    recomputed = train(lambda net, x: checkpoint(net, x, use_reentrant=use_reentrant))
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name]), name


def test_resprop_does_not_resume_without_its_memories():
    """With them it does: test_schedules."""
    options = dict(threshold=0.01, warmup=4)
    whole, other = (Training("resprop", **options) for _ in range(2))
    whole.steps(3)
    other.load(whole.saved())
    state = fst.sparsity_state(other.net)
    for entry in state.values():
        entry["memories"] = {}
    fst.load_sparsity_state(other.net, state)
    for training in (whole, other):
        training.steps(3, 7)
    assert not torch.equal(whole.net[0].weight, other.net[0].weight)


def test_resprop_training_cannot_be_compiled_and_says_so():
    net = small_net()
    fst.convert(net, "resprop")
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="uncompiled"):
        compiled(batch())
    torch._dynamo.reset()
    torch.testing.assert_close(compiled.eval()(batch()), net(batch()))


def test_resprop_report_names_the_cost():
    net = _layer()
    report = describe_layer(net[0]).gemms["grad_input"]
    assert report.mode == "simulated" and "Cout·P·Q" in report.reason

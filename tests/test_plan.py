"""A plan: measured, within its budget, and plain data that convert takes."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from timm.layers import StdConv2dSame
from torch import nn

import fst
from fst.gradients import recorded
from fst.plan import measure
from fst.rules.bands import Bands
from fst.rules.sampled import Sampled


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, stride=2),
        nn.Flatten(),
        nn.LazyLinear(5),
    )


@pytest.fixture
def model() -> nn.Sequential:
    made = net()
    made(torch.zeros(1, 3, 12, 12))
    return made


def smooth(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    coarse = torch.randn(number, 8, 3, 4, 4)
    images = F.interpolate(coarse.flatten(0, 1), scale_factor=3, mode="bilinear")
    return [(part, torch.randint(5, (8,))) for part in images.split(8)]


def macs_left(model: nn.Module, plan: dict, size: int = 12) -> float:
    """Share of the multiply-adds of all grad_weights, from the rules' densities."""
    sizes = {"0": 12 * 12, "3": 12 * 12, "5": 5 * 5}
    maps = {"0": (12, 12), "3": (12, 12), "5": (5, 5)}
    whole = {n: sizes[n] * model[int(n)].weight.numel() for n in sizes}
    left = 0.0
    copied = copy.deepcopy(model)
    fst.convert(copied, "fst_w", plan=plan)
    for name, macs in whole.items():
        rule = copied[int(name)].strategy.grad_weight
        part, all = rule.kept("grad_weight", (), 1, *maps[name]) if rule else (1, 1)
        left += macs * part / all
    return left / sum(whole.values())


@pytest.mark.parametrize("budget", [1.0, 0.7, 0.5, 0.3])
def test_the_budget_of_multiply_adds_is_met(model, budget):
    printed = []
    plan = fst.plan(model, smooth(3), budget, log=printed.append)
    assert plan.keys() == {"0", "3", "5"}
    left = macs_left(model, plan)
    assert left <= budget + 1e-9
    assert f"{left:.1%} of the multiply-adds" in printed[0]
    if budget == 1.0:
        assert set(plan.values()) == {None}
    assert json.loads(json.dumps(plan)) == plan


def test_the_model_is_left_as_it_is(model):
    before = copy.deepcopy(model.state_dict())
    fst.plan(model, smooth(2), 0.6, log=lambda text: None)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.training and not any(m._forward_hooks for m in model.modules())


def test_less_budget_loses_more_and_the_table_shows_it(model):
    tables = []
    fst.plan(model, smooth(3), 0.5, choices=[Sampled()], log=tables.append)
    assert "mean lost" in tables[0] and "sampled, 1 of 2 by checkerboard" in tables[0]
    rows = [line.split() for line in tables[0].splitlines() if "sampled" in line]
    for row in rows:  # unbiased: nothing of the mean is lost
        assert float(row[-5]) == 0.0 and float(row[-4]) > 0.0


@pytest.mark.parametrize("count", [3, 1])
def test_what_a_choice_loses_by_hand(model, count):
    """The share of the mean, and the variance beside that between batches or, of one, |g|²."""
    batches = smooth(count)
    found = [recorded(copy.deepcopy(model), batch)["0"] for batch in batches]
    exact = torch.stack([gradients.exact for gradients in found]).double()
    draws = torch.stack([torch.stack([g.of(Bands(), p) for p in (0, 1)]) for g in found]).double()
    mean = draws.mean(1)
    signal = exact.mean(0).square().sum()
    spread = exact.var(0).sum() if count > 1 else signal
    bias = float((mean - exact).mean(0).square().sum() / signal)
    variance = float((draws - mean[:, None]).square().sum((2, 3, 4, 5)).mean() / spread)
    choice = measure(model, batches, choices=[Bands()])["0"].choices[1]
    assert choice.bias == pytest.approx(bias, rel=1e-4)
    assert choice.variance == pytest.approx(variance, rel=1e-4)
    assert choice.loss == pytest.approx(6 * bias + variance, rel=1e-4)


def test_a_converted_model_is_planned_for_its_converted_layers(model):
    fst.convert(model, "sdgp")
    assert fst.plan(model, smooth(2), 0.9, log=lambda text: None).keys() == {"3", "5"}


def test_by_time_everything_is_dense_within_the_whole_budget(model):
    plan = fst.plan(model, smooth(1)[0], 1.0, cost="time", log=lambda text: None)
    assert set(plan.values()) == {None}


class Several(nn.Module):
    """Convolutions that pad in several ways, one without a gradient, and one far smaller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reflected = nn.Conv2d(3, 32, 3, padding=1, padding_mode="reflect")
        self.same = nn.Conv2d(32, 32, (2, 4), padding="same")
        self.standardised = StdConv2dSame(32, 32, 3, stride=2)
        self.frozen = nn.Conv2d(32, 32, 1)
        self.small = nn.Conv2d(32, 2, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.standardised(self.same(self.reflected(images).relu()).relu())
        with torch.no_grad():
            added = self.frozen(maps)
        return self.small(maps + added).mean((2, 3))


def test_layers_that_convert_takes_are_planned_as_they_convolve():
    model = Several()
    batch = (smooth(1)[0][0], torch.randint(2, (8,)))
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    found = recorded(copy.deepcopy(model), batch)
    assert found.keys() == {"reflected", "same", "standardised", "small"}
    for name in ("reflected", "same", "small"):
        torch.testing.assert_close(found[name].exact, model.get_submodule(name).weight.grad)
    plan = fst.plan(model, batch, 0.4, choices=[Sampled(keep=4)], log=str)
    fst.convert(model, "sampled", plan=plan)


def test_a_budget_that_can_just_be_met_is_met_beside_a_small_layer():
    images = torch.randn(4, 3, 16, 16)
    batch = (images, torch.randint(2, (4,)))
    plan = fst.plan(Several(), batch, 0.5, choices=[Sampled()], log=str)
    assert {options["rule"] for options in plan.values()} == {"sampled"}


def test_multiply_adds_are_of_all_batches(model):
    """Of 12x12 half is left, of 6x6 all."""
    (images, labels), log = smooth(1)[0], []
    model = nn.Sequential(model[0], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    batches = [(images, labels), (images[:, :, :6, :6], labels)]
    for order in (batches, batches[::-1]):
        fst.plan(model, order, 0.6, choices=[Sampled(min_size=8)], log=log.append)
    for text in log:
        assert f"{(72 + 36) / (144 + 36):.1%} of the multiply-adds" in text


def test_a_batch_as_a_loader_collates_it(model):
    batch = smooth(1)[0]
    as_list, as_tuple = (fst.plan(model, kind(batch), 0.5, log=str) for kind in (list, tuple))
    assert as_list == as_tuple


def test_gradients_that_are_not_finite_are_refused(model):
    images, labels = smooth(1)[0]
    with pytest.raises(ValueError, match="the gradients of 0, 3, 5 are not finite"):
        fst.plan(model, (images * float("nan"), labels), log=str)


def test_own_loss_and_own_choices(model):
    def loss(model, batch):
        return model(batch["images"]).square().mean()

    batch = {"images": smooth(1)[0][0]}
    options = {"rule": "bands", "sample": []}
    plan = fst.plan(model, batch, 0.3, loss=loss, choices=[options], log=lambda text: None)
    assert {options and options["rule"] for options in plan.values()} <= {"bands", None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 0}, "budget=0 must be a number above 0 and at most 1"),
        ({"budget": 0.1}, "budget=0.1 of the multiply-adds cannot be met.* the least is 0.2"),
        ({"cost": "flops"}, "cost='flops' is unknown"),
        ({"batches": []}, "at least one batch"),
        ({"choices": [{"rule": "sampled", "keep": 8}]}, "keep=8 is unknown"),
    ],
)
def test_bad_arguments(model, arguments, message):
    given = {"batches": smooth(2), "budget": 0.5, "log": lambda text: None, **arguments}
    with pytest.raises(ValueError, match=message):
        fst.plan(model, **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(batches=torch.zeros(2, 3)), "batches is a Tensor"),
        (dict(batches=None), "batches is a NoneType"),
        (dict(choices=["sampled"]), "choices: 'sampled' must be one of Alternating, Bands, Samp"),
        (dict(choices=[fst.NM(operand="grad_output")]), "choices: NM.* must be one of"),
    ],
    ids=str,
)
def test_arguments_of_a_wrong_type(model, arguments, message):
    with pytest.raises(TypeError, match=message):
        fst.plan(model, **{"batches": smooth(2), **arguments})


def test_layers_without_a_gradient_are_named(model):
    """As in a new network whose residual branches end in a gain of zero."""
    torch.nn.init.zeros_(model[1].weight)
    torch.nn.init.constant_(model[1].bias, -1)
    with pytest.raises(ValueError, match=r"the gradients of 0, 3 are zero .*Train for some steps"):
        fst.plan(model, smooth(1), log=str)


def test_nothing_to_plan(model):
    with pytest.raises(ValueError, match="has no convolution"):
        fst.plan(nn.Linear(2, 2), smooth(1), log=print)
    fst.convert(model, "sampled", include="7")
    with pytest.raises(ValueError, match="has no convolution"):
        fst.plan(model, smooth(1), log=print)


def test_a_plan_may_name_layers_of_too_few_channels_for_the_strategy():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3))
    rule = {"rule": "sampled"}
    report = fst.convert(model, "sdgp", plan={"0": rule, "1": None, "2": rule})
    assert set(report.converted) == {"2"}
    assert report.skipped["0"].endswith("; its rule in the plan is not used")
    assert "plan" not in report.skipped["1"]
    assert isinstance(model[2].strategy.grad_weight, Sampled)


def test_convert_refuses_plans_that_do_not_fit(model):
    with pytest.raises(ValueError, match="'7' is no layer that is converted; converted layers: 0"):
        fst.convert(model, "fst_w", plan={"7": None})
    with pytest.raises(ValueError, match="plan, layer '0': grad_weight: rule 'sampled' has no opt"):
        fst.convert(model, "fst_w", plan={"0": {"rule": "sampled", "kep": 2}})
    with pytest.raises(TypeError, match=r"plan=\['0'\] must be a mapping"):
        fst.convert(model, "fst_w", plan=["0"])
    with pytest.raises(ValueError, match="has a schedule"):
        fst.convert(model, "asp", plan={"0": None})
    assert not fst.sparse_layers(model)

"""What the hooks log, and that a run stops at a loss that is not finite."""

import json
import math
import re

import mmengine.runner
import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import HOOKS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn
from torch.utils.data import DataLoader

from fst.cli import main
from fst.files.checkpoint import load_checkpoint_safely
from fst.layers.modules import SparseConv2d
from fst.training.engine import Classifier


@HOOKS.register_module(force=True)
class BreakWeights(Hook):
    """Makes the third iteration of the second epoch give NaN."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.epoch == 1 and batch_idx == 2:
            with torch.no_grad():
                runner.model.architecture[3].bias.fill_(math.nan)


@HOOKS.register_module(force=True)
class BreakWeightsAfterwards(Hook):
    """Breaks a weight after the loss of the last iteration was finite."""

    priority = "VERY_HIGH"

    def after_train_epoch(self, runner):
        if runner.epoch == 1:
            with torch.no_grad():
                runner.model.architecture[3].bias.fill_(math.inf)


def test_non_finite_loss_stops_the_run(train, tmp_path):
    expected = (
        r"loss is nan at epoch 2, iteration 7; the last was [\d.]+, at iteration 6\. "
        r".* newest checkpoint: .*epoch_1\.pth"
    )
    with pytest.raises(FloatingPointError, match=expected):
        train(extra='custom_hooks = [dict(type="BreakWeights")]\n')
    (kept,) = (tmp_path / "run").glob("epoch*.pth")
    state = load_checkpoint_safely(kept)["state_dict"]
    assert all(torch.isfinite(value).all() for value in state.values())


def test_non_finite_weights_are_not_saved(train, tmp_path):
    expected = r"architecture\.3\.bias is not finite, .* at epoch 2, .* at iteration 8\. .*_1\.pth"
    with pytest.raises(FloatingPointError, match=expected):
        train(extra='custom_hooks = [dict(type="BreakWeightsAfterwards")]\n')
    assert [path.name for path in (tmp_path / "run").glob("epoch*.pth")] == ["epoch_1.pth"]


def scalars_of(work_dir):
    (path,) = work_dir.glob("*/vis_data/scalars.json")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_scalars(train):
    work_dir = train(sparsity='dict(strategy="fst", log_interval=2)')
    lines = scalars_of(work_dir)
    layers = [line for line in lines if "density/3" in line]
    assert [line["step"] for line in layers] == [2, 4, 6, 8]
    assert layers[0]["density/3"] == 0.5 and layers[0]["density/0"] == 1.0
    assert "mask_flip_rate/3" not in layers[0] and 0 < layers[1]["mask_flip_rate/3"] < 0.5
    assert all(line["grad_norm/3"] > 0 for line in layers)
    totals = [line for line in lines if "loss" in line]
    sizes = 8 * 9, 64 * 9
    assert totals[0]["density"] == pytest.approx((sizes[0] + 0.5 * sizes[1]) / sum(sizes))
    assert {"mask_flip_rate", "sparse_grad_norm", "lr", "time"} <= totals[-1].keys()
    assert any("accuracy/top3" in line for line in lines)
    assert list(work_dir.glob("*/vis_data/events.out.tfevents*"))
    log = next(work_dir.glob("*/*.log")).read_text()
    assert "eta:" in log and "2 converted, 1 skipped" in log
    (line,) = [line for line in log.splitlines() if "Layers after the first step" in line]
    assert "output: " in line and "grad_input: 1 " in line and "1 not computed" in line
    assert "grad_weight: 2 accelerated" in line


def test_dense_outputs_have_no_mask(train):
    lines = scalars_of(train(sparsity='dict(strategy="sdgp", log_interval=1)'))
    assert any("grad_norm/3" in line for line in lines)
    assert not any("density/3" in line for line in lines)


def test_looking_changes_nothing(train, assert_same_state):
    for strategy in ('"tsm", interval=3', '"sdgp", rule="random"'):
        runs = [
            train(
                f"{strategy[1:3]}{every}",
                sparsity=f"dict(strategy={strategy}, log_interval={every})",
            )
            for every in (1, 100)
        ]
        assert_same_state(*(run / "epoch_2.pth" for run in runs))


def test_gradient_accumulation_is_looked_at_with_the_next_step(train):
    lines = scalars_of(train(extra='optim_wrapper["accumulative_counts"] = 3\n'))
    assert [line["step"] for line in lines if "grad_norm/3" in line][0] == 3


@MODELS.register_module(force=True)
class TwoSteps(Classifier):
    """Trained by two optimizers, each of one convolution."""

    def train_step(self, data, optim_wrapper):
        losses = self(**self.data_preprocessor(data, True), mode="loss")
        self.parse_losses(losses)[0].backward()
        for wrapper in optim_wrapper.values():
            wrapper.step()
            wrapper.zero_grad()
        return losses


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
def two_optimizers(optim_wrapper_cfg, paramwise_cfg):
    def build(model):
        layers = {"first": model.architecture[0], "second": model.architecture[3]}
        found = {n: torch.optim.SGD(x.parameters(), lr=0.5) for n, x in layers.items()}
        return OptimWrapperDict(**{n: OptimWrapper(optimizer) for n, optimizer in found.items()})

    return build


def test_several_optimizers_hold_converted_weights(train):
    """What is logged of a layer is measured at the step of its own optimizer."""
    two = 'model["type"] = "TwoSteps"\noptim_wrapper["constructor"] = "two_optimizers"\n'
    work_dir = train(extra=f"{two}param_scheduler = None\n")
    state = load_checkpoint_safely(work_dir / "epoch_2.pth")["sparsity"]
    assert [layer["step"] for layer in state.values()] == [8, 8]
    layers = [line for line in scalars_of(work_dir) if "density/3" in line]
    assert [line["step"] for line in layers] == [2, 4, 6, 8]
    assert all(line["grad_norm/0"] > 0 and line["grad_norm/3"] > 0 for line in layers)
    assert all(line["mask_flip_rate/3"] > 0 for line in layers[1:])


@MODELS.register_module(force=True)
class StockModel(BaseModel):
    """A model that knows nothing of FST."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(4, 8, 3)
        self.head = nn.Conv2d(8, 2, 3)

    def forward(self, inputs, mode="loss"):
        return {"loss": self.head(self.backbone(inputs)).square().mean()}


def stock_runner(work_dir, name, **arguments):
    data = [{"inputs": torch.ones(4, 8, 8) * i} for i in range(8)]
    return mmengine.runner.Runner(
        model=dict(type="StockModel"),
        work_dir=str(work_dir),
        train_dataloader=DataLoader(data, batch_size=2),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01)),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1)),
        experiment_name=name,
        cfg=Config(dict()),
        **arguments,
    )


def test_sparsity_hook_in_the_stock_runner(tmp_path):
    hook = dict(type="SparsityHook", strategy="fst", include="backbone", log_interval=1)
    runner = stock_runner(tmp_path, "stock1", custom_hooks=[dict(hook)])
    parameter = runner.model.backbone.weight
    runner.train()
    assert type(runner.model.backbone) is SparseConv2d and type(runner.model.head) is nn.Conv2d
    assert runner.model.backbone.weight is parameter
    assert any(group["params"][0] is parameter for group in runner.optim_wrapper.param_groups)
    saved = load_checkpoint_safely(tmp_path / "epoch_1.pth")
    assert saved["sparsity"].keys() == {"backbone"}
    again = stock_runner(
        tmp_path,
        "stock2",
        custom_hooks=[dict(hook)],
        resume=True,
        load_from=str(tmp_path / "epoch_1.pth"),
    )
    again.train()
    torch.testing.assert_close(again.model.backbone.weight, parameter)
    other = dict(hook, strategy="srste")
    runner = stock_runner(
        tmp_path,
        "stock3",
        custom_hooks=[other],
        resume=True,
        load_from=str(tmp_path / "epoch_1.pth"),
    )
    with pytest.raises(ValueError, match="srste"):
        runner.train()


PHASES = [
    *((name, dict(until=until)) for name in ("srste", "tsm") for until in (0.5, 0.7)),
    *(
        (name, dict(start=start))
        for name in ("srste", "tsm", "sampled")
        for start in (0.3, 0.5, 0.7)
    ),
    ("srste", dict(start=0.3, until=0.7)),
]


@pytest.mark.parametrize(("strategy", "phase"), PHASES, ids=str)
def test_a_part_of_a_training_is_sparse_also_after_a_stop(
    train, train_with_stop, assert_same_state, strategy, phase
):
    """Of two epochs; it begins and ends with an epoch or within one."""
    sparsity = str(dict(strategy=strategy, log_interval=1, **phase))
    whole, parts = train("whole", sparsity=sparsity), train_with_stop("parts", sparsity=sparsity)
    assert_same_state(whole / "epoch_2.pth", parts / "epoch_2.pth")
    start, until = phase.get("start", 0), phase.get("until", 1)
    dense = train("dense", sparsity='dict(strategy="dense")')
    (first, last), (same, other) = (
        [load_checkpoint_safely(run / f"epoch_{n}.pth") for n in (1, 2)] for run in (whole, dense)
    )
    assert (bool(first["sparsity"]), bool(last["sparsity"])) == (start < 0.5, until == 1)
    equal = [
        all(torch.equal(a["state_dict"][k], b["state_dict"][k]) for k in a["state_dict"])
        for a, b in ((first, same), (last, other))
    ]
    assert equal == [start >= 0.5, False]
    log = "".join(path.read_text() for path in whole.glob("*/*.log"))
    said = re.findall("(sparse|dense) from here on", log)
    assert said == ["sparse"] * (start > 0) + ["dense"] * (until < 1)


@pytest.mark.parametrize("strategy", ["srste", "tsm"])
def test_a_training_that_has_ended_dense_goes_on_dense(train, strategy):
    extra, sparsity = "param_scheduler = []\n", f'dict(strategy="{strategy}", until=0.7)'
    train("run", sparsity=sparsity, extra=extra)
    longer = ("run", "--resume", "--epochs", "3")
    with pytest.raises(ValueError, match="comes from a run without sparsity"):
        train(*longer, sparsity=f'dict(strategy="{strategy}")', extra=extra)
    again = train(*longer, sparsity=sparsity, extra=extra)
    assert load_checkpoint_safely(again / "epoch_3.pth")["sparsity"] == {}


def test_the_dense_end_of_a_training_is_evaluated_as_it_is(train, write_config, capsys, error_of):
    sparsity = 'dict(strategy="srste", until=0.5)'
    work_dir = train(sparsity=sparsity)
    arguments = [write_config(sparsity), str(work_dir / "epoch_2.pth")]
    capsys.readouterr()
    assert main(["test", *arguments, "--work-dir", str(work_dir / "test"), "--traceback"]) == 0
    assert capsys.readouterr().out.startswith("accuracy/top1: ")
    message = error_of("fold", *arguments, work_dir / "folded.pth")
    assert "holds no sparsity state" in message


def test_a_schedule_that_starts_later_has_the_steps_that_are_left(tmp_path):
    hook = dict(type="SparsityHook", strategy="rigl", include="backbone", start=0.3)
    runner = stock_runner(tmp_path, "later", custom_hooks=[hook])
    runner.train()  # eight steps, three of them dense
    (hook,) = (hook for hook in runner.hooks if type(hook).__name__ == "SparsityHook")
    assert hook._attached[0]._run.total_steps == 5


@pytest.mark.parametrize("share", [0, 1, 1.5, "half"])
@pytest.mark.parametrize("option", ["start", "until"])
def test_a_bad_start_or_end_is_refused(option, share, train):
    with pytest.raises(ValueError, match=f"{option}={share!r} must be a number"):
        train(sparsity=f'dict(strategy="srste", {option}={share!r})')


def test_a_start_behind_the_end_is_refused(train):
    with pytest.raises(ValueError, match="start=0.7 must be less than until=0.3"):
        train(sparsity='dict(strategy="srste", start=0.7, until=0.3)')

"""Averaged weights: which ones a run validates, saves, resumes and folds."""

import json

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import nn

import fst
import fst.models
from fst.checkpoint import load_checkpoint_safely
from fst.engine import cli
from fst.engine.config import load_config
from fst.engine.trained import trained_model

EMA = "ema = dict(decay=0.6)\n"
SEEN: dict[str, list] = {}


@HOOKS.register_module(force=True)
class Watch(Hook):
    """The weights after each iteration, and those within validation and test."""

    priority = "LOWEST"

    def note(self, what, runner):
        state = {name: value.clone() for name, value in runner.model.state_dict().items()}
        SEEN.setdefault(what, []).append(state)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.note("train", runner)

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        self.note("val", runner)

    def after_val_epoch(self, runner, metrics=None):
        SEEN.setdefault("accuracy", []).append(metrics["accuracy/top1"])

    before_test_iter = before_val_iter
    after_test_epoch = after_val_epoch


@pytest.fixture(autouse=True)
def _nothing_seen():
    SEEN.clear()


def hook(name):
    return f'custom_hooks = [dict(type="{name}")]\n'


def test_the_average_is_the_formulas_over_optimizer_steps(train):
    """Ten iterations, two per step: the first step copies, others keep 60 % of the average."""
    accumulate = "optim_wrapper['accumulative_counts'] = 2\n"
    out = train("run", extra=EMA + hook("Watch") + accumulate)
    steps = SEEN["train"][1::2]
    assert len(steps) == 4
    saved = load_checkpoint_safely(out / "epoch_2.pth")
    for name, found in saved["state_dict"].items():
        values = [step[name] for step in steps]
        expected = values[0].double()
        for value in values[1:]:
            expected = 0.6 * expected + 0.4 * value.double()
        if not found.is_floating_point():
            expected = values[-1]
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-6)
        assert torch.equal(saved["ema_state_dict"][name], values[-1])
        assert torch.equal(SEEN["val"][-1][name], found)
    assert not torch.equal(found, steps[-1][name])


@pytest.mark.parametrize(
    "sparsity",
    [
        'dict(strategy="srste")',
        'dict(strategy="tsm", interval=3)',
        'dict(strategy="rigl", interval=2, sparsity=0.8)',
        "None",
    ],
)
def test_resume_restores_the_average(train, train_with_stop, assert_same_state, sparsity):
    whole = train("whole", sparsity=sparsity, extra=EMA)
    parts = train_with_stop("parts", sparsity=sparsity, extra=EMA)
    assert_same_state(whole / "epoch_2.pth", parts / "epoch_2.pth")


@pytest.mark.parametrize("strategy", ["srste", "tsm", "rigl"])
def test_validated_tested_and_folded_are_the_pruned_average(train, write_config, strategy):
    """tsm's and rigl's masks are state: those of the training hold for the average, too."""
    sparsity = f'dict(strategy="{strategy}", include="*")'
    extra = EMA + hook("Watch")
    out = train("run", sparsity=sparsity, extra=extra)
    config = write_config(sparsity, extra)
    path = str(out / "epoch_2.pth")
    cli.test([config, path, "--work-dir", str(out / "test")])
    assert len(SEEN["accuracy"]) == 3 and SEEN["accuracy"][1] == SEEN["accuracy"][2]
    assert all(torch.equal(SEEN["val"][-1][n], v) for n, v in SEEN["val"][-4].items())

    cli.fold([config, path, str(out / "folded.pth")])
    folded = load_checkpoint_safely(out / "folded.pth")
    saved = load_checkpoint_safely(path)
    masks = fst.sparse_layers(trained_model(load_config(config), path).architecture)
    for name, layer in masks.items():
        average = saved["state_dict"][f"architecture.{name}.weight"]
        kept = layer.output_mask()
        if kept is not None:
            assert torch.equal(folded[f"{name}.weight"], average * kept)
    assert 0 < masks["3"].output_mask().float().mean() < 1
    del SEEN["accuracy"][:]
    cli.test([config, str(out / "folded.pth"), "--work-dir", str(out / "test")])
    assert SEEN["accuracy"] == [pytest.approx(saved_accuracy(out))]


def saved_accuracy(out):
    """The last validation's accuracy, from the run's log."""
    (log,) = out.glob("2*/vis_data/scalars.json")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["accuracy/top1"] for line in lines if "accuracy/top1" in line][-1]


def test_fine_tuning_begins_with_the_loaded_weights(train):
    out = train("run", extra=EMA)
    average = load_checkpoint_safely(out / "epoch_2.pth")["state_dict"]
    start = f'load_from = {str(out / "epoch_2.pth")!r}\noptim_wrapper["optimizer"]["lr"] = 0.0\n'
    tuned = train("tuned", extra=EMA + start + "train_cfg['max_epochs'] = 1\n")
    found = load_checkpoint_safely(tuned / "epoch_1.pth")["state_dict"]
    name = "architecture.3.weight"
    assert torch.equal(found[name], average[name])


def tied_net(num_classes=10):
    net = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1) for _ in range(2)))
    net[1].weight = net[0].weight
    return net.extend([nn.Flatten(), nn.Linear(64, num_classes)])


def test_what_is_refused(train, monkeypatch):
    out = train("run", extra=EMA)
    with pytest.raises(ValueError, match="cannot resume without `ema`"):
        train("run", "--resume")
    plain = train("plain")
    with pytest.raises(ValueError, match="cannot resume with `ema`"):
        train("plain", "--resume", extra=EMA)
    assert (out / "epoch_2.pth").is_file() and (plain / "epoch_2.pth").is_file()
    for ema, message in (
        ("dict(momentum=0.1)", "ema key 'momentum' is unknown. Known: decay"),
        ("dict(decay=1.0)", r"decay=1.0 must be a number in \[0, 1\)"),
        ("dict(update_after_step=-1)", "update_after_step=-1"),
        ("dict(min_decay=0.9, decay=0.5)", "min_decay=0.9 must not exceed decay=0.5"),
        ("dict(warmup_gamma=0)", "warmup_gamma=0 must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            train("bad", extra=f"ema = {ema}\n")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="'.*0.weight' and '.*1.w"):
        patch.setattr(fst.models, "tiny_net", tied_net)
        train("tied", sparsity="None", extra=EMA)
    with pytest.raises(ValueError, match="averages weights twice"):
        train("twice", extra=EMA + hook("EMAHook"))
    with pytest.raises(ValueError, match="removes channels"):
        train("channels", sparsity='dict(strategy="prunetrain")', extra=EMA)

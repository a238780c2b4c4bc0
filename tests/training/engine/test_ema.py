"""MMEngine's EMAHook averages a sparse training: what a run validates, saves, resumes and folds."""

import json

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

import fst
from fst.cli import main
from fst.files.checkpoint import load_checkpoint_safely
from fst.training.engine.config import load_config
from fst.training.engine.trained import trained_model

SEEN: dict[str, list] = {}


@HOOKS.register_module(force=True)
class Watch(Hook):
    """The weights and the accuracy of validation and test."""

    priority = "LOWEST"

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        state = {name: value.clone() for name, value in runner.model.state_dict().items()}
        SEEN.setdefault("val", []).append(state)

    def after_val_epoch(self, runner, metrics=None):
        SEEN.setdefault("accuracy", []).append(metrics["accuracy/top1"])

    before_test_iter = before_val_iter
    after_test_epoch = after_val_epoch


@pytest.fixture(autouse=True)
def _nothing_seen():
    SEEN.clear()


def hooks(*names):
    found = [dict(type="EMAHook", momentum=0.4), *(dict(type=name) for name in names)]
    return f"custom_hooks = {found}\n"


@pytest.mark.parametrize("strategy", ["srste", "tsm", "rigl"])
def test_validated_tested_and_folded_are_the_pruned_average(train, write_config, strategy):
    """tsm's and rigl's masks are state: those of the training hold for the average, too."""
    sparsity = f'dict(strategy="{strategy}", include="*")'
    out = train("run", sparsity=sparsity, extra=hooks("Watch"))
    config = write_config(sparsity, hooks("Watch"))
    path = str(out / "epoch_2.pth")
    main(["test", config, path, "--work-dir", str(out / "test")])
    assert len(SEEN["accuracy"]) == 3 and SEEN["accuracy"][1] == SEEN["accuracy"][2]
    assert all(torch.equal(SEEN["val"][-1][n], v) for n, v in SEEN["val"][-4].items())

    main(["fold", config, path, str(out / "folded.pth")])
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
    main(["test", config, str(out / "folded.pth"), "--work-dir", str(out / "test")])
    assert SEEN["accuracy"] == [pytest.approx(saved_accuracy(out))]


def saved_accuracy(out):
    """The last validation's accuracy, from the run's log."""
    (log,) = out.glob("2*/vis_data/scalars.json")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["accuracy/top1"] for line in lines if "accuracy/top1" in line][-1]


def test_what_is_refused(train):
    out = train("run", extra=hooks())
    with pytest.raises(ValueError, match="cannot resume without ema_state_dict"):
        train("run", "--resume")
    plain = train("plain")
    with pytest.raises(ValueError, match="cannot resume with ema_state_dict"):
        train("plain", "--resume", extra=hooks())
    assert (out / "epoch_2.pth").is_file() and (plain / "epoch_2.pth").is_file()
    with pytest.raises(ValueError, match="replaces Parameters"):
        train("channels", sparsity='dict(strategy="prunetrain")', extra=hooks())

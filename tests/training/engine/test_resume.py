"""Two epochs equal one epoch, a stop, and one more: bit for bit."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fst.cli import main
from fst.files.checkpoint import load_checkpoint_safely
from fst.lab.logs import read_run
from fst.training.engine import Runner
from fst.training.engine.checkpoint import newest_checkpoint
from fst.training.engine.config import load_config
from fst.training.engine.metrics import Accuracy
from tests.training.engine.conftest import STOP


class Stopped(Exception):
    pass


STRATEGIES = [
    'dict(strategy="fst_sampled", log_interval=2)',
    'dict(strategy="fst", phase="random", decay_mode="decoupled", log_interval=3)',
    'dict(strategy="sdgp", rule="random", log_interval=1)',
    'dict(strategy="tsm", interval=3, log_interval=1)',
    'dict(strategy="asp", from_scratch="allow", log_interval=1)',
    'dict(strategy="asfp", goal=0.5)',
    'dict(strategy="dpf", interval=2, log_interval=2)',
    'dict(strategy="rigl", interval=2, sparsity=0.8, log_interval=2)',
    'dict(strategy="clicktrain", include="*", choose=0.2, enforce=0.7)',
    'dict(strategy="resprop", threshold=1e-4, warmup=6, log_interval=3)',
    'dict(strategy="srste", patterns={"0": "4:4", "3": "1:8"}, log_interval=2)',
    'dict(strategy="asp", from_scratch="allow", patterns={"3": "1:8"}, log_interval=2)',
    "None",
]
EMA = 'custom_hooks = [dict(type="EMAHook", momentum=0.4)]\n'
PLATEAU = """
train_cfg["max_epochs"] = 3
param_scheduler = dict(
    type="ReduceOnPlateauLR", monitor="accuracy/top1", rule="greater", factor=0.1, patience=0,
    threshold=1000, threshold_rule="abs",
)
"""


@pytest.mark.parametrize(
    ("sparsity", "extra"),
    [
        *(
            pytest.param(text, "", marks=() if index % 3 == 0 else pytest.mark.exhaustive)
            for index, text in enumerate(STRATEGIES)
        ),
        ('dict(strategy="srste")', EMA),
        pytest.param('dict(strategy="tsm", interval=3)', EMA, marks=pytest.mark.exhaustive),
        ('dict(strategy="rigl", interval=2, sparsity=0.8)', EMA),
        pytest.param("None", EMA, marks=pytest.mark.exhaustive),
        ('dict(strategy="fst")', PLATEAU),
    ],
)
def test_resume_is_bit_exact(train, train_with_stop, assert_same_state, sparsity, extra):
    whole = train("whole", sparsity=sparsity, extra=extra)
    parts = train_with_stop("parts", sparsity=sparsity, extra=extra)
    last = "epoch_3.pth" if extra == PLATEAU else "epoch_2.pth"
    assert_same_state(whole / last, parts / last)


def test_epochs_differ_and_seed_matters(train):
    one, same, other = (train(f"r{i}", "--seed", s) for i, s in enumerate(("1", "1", "2")))
    states = [load_checkpoint_safely(r / "epoch_2.pth")["state_dict"] for r in (one, same, other)]
    name = "architecture.3.weight"
    assert torch.equal(states[0][name], states[1][name])
    assert not torch.equal(states[0][name], states[2][name])


def test_resume_takes_an_unset_seed_from_the_checkpoint(train, assert_same_state):
    unset = "randomness = dict()\n"
    whole = train("whole", "--seed", "11")
    with pytest.raises(RuntimeError, match="on purpose"):
        train("parts", "--seed", "11", extra=unset + STOP)
    parts = train("parts", "--resume", extra=unset)
    assert_same_state(whole / "epoch_2.pth", parts / "epoch_2.pth")


def test_validation_leaves_no_trace(train, assert_same_state):
    often, never = (
        train("often"),
        train("never", extra="train_cfg = dict(by_epoch=True, max_epochs=2, val_begin=9)\n"),
    )
    for epoch in (1, 2):
        assert_same_state(often / f"epoch_{epoch}.pth", never / f"epoch_{epoch}.pth")


def test_resume_skips_broken_files_and_says_so(train, caplog):
    work_dir = train("run")
    newest = work_dir / "epoch_2.pth"
    newest.write_bytes(newest.read_bytes()[:2000])
    (work_dir / "last_checkpoint").write_text("")
    assert newest_checkpoint(work_dir) == str(work_dir / "epoch_1.pth")
    train("run", "--resume")
    log = "".join(path.read_text() for path in work_dir.glob("*/*.log"))
    assert f"Resuming from {work_dir / 'epoch_1.pth'} instead of a newer file" in log
    assert str(newest) in log


def test_nothing_readable_to_resume(train):
    work_dir = train("run")
    for path in work_dir.glob("*.pth"):
        path.write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match="no checkpoint in .* can be read"):
        train("run", "--resume")


def test_resume_with_another_strategy(train):
    train("run")
    with pytest.raises(ValueError, match=r"fst_w(.|\n)*fst|fst(.|\n)*fst_w"):
        train("run", "--resume", sparsity='dict(strategy="fst_w")')
    with pytest.raises(ValueError, match="use the strategy that it was saved with"):
        train("run", "--resume", sparsity='dict(strategy="fst", patterns={"3": "1:8"})')
    with pytest.raises(ValueError, match="cannot resume without sparsity"):
        train("run", "--resume", sparsity="None")
    train("dense", sparsity="None")
    with pytest.raises(ValueError, match="cannot resume with sparsity"):
        train("dense", "--resume")


def test_resume_in_another_precision(train):
    train("run", "--amp")
    with pytest.raises(ValueError, match='optim_wrapper is .*"MixedPrecisionOptimWrapper"'):
        train("run", "--resume")


def test_resume_from_weights_alone(train, tmp_path):
    work_dir = train("run")
    state = load_checkpoint_safely(work_dir / "epoch_1.pth")["state_dict"]
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="weights alone"):
        train("run", "--resume", str(tmp_path / "weights.pth"))
    train("tuned", extra=f'load_from = "{tmp_path / "weights.pth"}"\n')


def test_iteration_based_resume(train, assert_same_state):
    loop = """
train_dataloader["sampler"] = dict(type="InfiniteSampler", shuffle=True)
train_cfg = dict(by_epoch=False, max_iters=9, val_interval=100)
default_hooks["checkpoint"] = dict(type="CheckpointHook", by_epoch=False, interval=3)
param_scheduler = dict(type="CosineAnnealingLR", by_epoch=False)
log_processor = dict(by_epoch=False)
"""
    whole = train("whole", extra=loop)
    again = train("again", "--resume", str(whole / "iter_6.pth"), extra=loop)
    assert_same_state(whole / "iter_9.pth", again / "iter_9.pth")


def _copy(path, to, **changes):
    """A checkpoint with other entries, without those of None."""
    checkpoint = load_checkpoint_safely(path)
    checkpoint["meta"] = {**checkpoint["meta"], **changes.pop("meta", {})}
    checkpoint = {k: v for k, v in {**checkpoint, **changes}.items() if v is not None}
    torch.save(checkpoint, to)
    return str(to)


def test_what_would_not_go_on_exactly_is_refused(train, tmp_path):
    work_dir = train("run")
    for changes, reason in (
        ({"optimizer": None}, "holds no 'optimizer'"),
        ({"param_schedulers": None}, "holds no 'param_schedulers'"),
        ({"message_hub": None}, "holds no 'message_hub'"),
        ({"meta": {"epoch": None}}, "no meta with epoch and iter"),
        ({"meta": {"epoch": 9, "iter": 36}}, "epoch=9 lies beyond the end, 2"),
        ({"meta": {"epoch": 0, "iter": 3}}, "inside an epoch"),
    ):
        path = _copy(work_dir / "epoch_1.pth", tmp_path / "changed.pth", **changes)
        with pytest.raises(ValueError, match=f"cannot resume from .*{reason}"):
            train("other", "--resume", path)
    for extra, reason in (
        ("train_cfg['max_epochs'] = 3\n", r"train_cfg is .*: 2}, .* .*: 3} would be ignored"),
        ("param_scheduler['eta_min'] = 0.01\n", 'param_scheduler is .* "eta_min": 0.01'),
        (
            "optim_wrapper['optimizer']['weight_decay'] = 0.5\n",
            '"weight_decay": 0.5',
        ),
        ("optim_wrapper['optimizer']['lr'] = 0.5\n", '"lr": 0.05, .*"lr": 0.5, '),
        ("optim_wrapper['paramwise_cfg'] = dict(bias_lr_mult=2.0)\n", "paramwise_cfg"),
    ):
        with pytest.raises(ValueError, match=f"cannot resume from .*{reason}"):
            train("other", "--resume", str(work_dir / "epoch_1.pth"), extra=extra)
    assert not list((tmp_path / "other").glob("*.pth"))
    constant = "param_scheduler = None\n"
    train("longer", extra=constant)
    adam = constant + "optim_wrapper['optimizer'] = dict(type='Adam', lr=0.05)\n"
    with pytest.raises(ValueError, match='optim_wrapper is .*"SGD"}.* "Adam"}'):
        train("longer", "--resume", extra=adam)
    longer = train("longer", "--resume", extra=constant + "train_cfg['max_epochs'] = 3\n")
    assert (longer / "epoch_3.pth").exists()


def test_a_run_does_not_start_among_the_checkpoints_of_another(train, write_config):
    """Killed before its first save, it would go on from the other's."""
    work_dir = train("run")
    before = sorted(work_dir.rglob("*"))
    with pytest.raises(ValueError, match="holds epoch_2.pth of an earlier run: .* --resume"):
        train("run")
    assert sorted(work_dir.rglob("*")) == before
    config = load_config(write_config())
    config.work_dir = str(work_dir)
    with pytest.raises(ValueError, match="holds epoch_2.pth"):
        Runner.from_cfg(config).train()


def test_a_refused_run_leaves_the_config(train, write_config):
    config = write_config()
    work_dir = Path(config).parent / "run"
    main(["train", config, "--work-dir", str(work_dir), "--traceback"])
    kept = (work_dir / Path(config).name).read_text()
    refused = [config, "--work-dir", str(work_dir), "--resume", "--traceback", "--cfg-options"]
    with pytest.raises(ValueError, match="srste"):
        main(["train", *refused, "sparsity.strategy=srste"])
    main(["test", config, str(work_dir / "epoch_1.pth"), "--work-dir", str(work_dir)])
    assert (work_dir / Path(config).name).read_text() == kept


def test_checkpoints_inside_an_epoch_are_refused(train):
    hook = 'default_hooks["checkpoint"].update(by_epoch=False, interval=4)\n'
    work_dir = train("run", extra=hook)
    assert newest_checkpoint(work_dir).endswith("iter_8.pth")
    with pytest.raises(ValueError, match="inside an epoch"):
        train("run", "--resume", extra=hook)


BEST = """
default_hooks["checkpoint"].update(max_keep_ckpts=1)
"""


@pytest.mark.parametrize("number", [float, np.float64, torch.tensor])
def test_the_best_stays_the_best(train_with_stop, monkeypatch, number):
    scores = iter((0.9, 0.9, 0.6))  # the first epoch is validated again
    monkeypatch.setattr(Accuracy, "evaluate", lambda *_: {"accuracy/top1": number(next(scores))})
    work_dir = train_with_stop("run", extra=BEST)
    (best,) = work_dir.glob("best*")
    assert best.name == "best_accuracy_top1.pth"
    assert load_checkpoint_safely(best)["meta"]["epoch"] == 1


def test_a_metric_whose_direction_nobody_knows_keeps_no_best(train, monkeypatch):
    monkeypatch.setattr(Accuracy, "evaluate", lambda *_: {"strangeness": 1.0})
    work_dir = train("run")
    assert not list(work_dir.glob("best*"))
    log = next(work_dir.glob("*/*.log")).read_text()
    assert log.count("No best checkpoint is kept. Cannot infer the rule for key strangeness") == 1


def test_the_last_validation_is_made_up(train, monkeypatch):
    """A kill between the last checkpoint and its validation."""
    scores = iter((0.5, None, 0.9))

    def evaluate(*_):
        if (score := next(scores)) is None:
            raise Stopped
        return {"accuracy/top1": score}

    monkeypatch.setattr(Accuracy, "evaluate", evaluate)
    with pytest.raises(Stopped):
        train("run")
    work_dir = train("run", "--resume")
    assert list(read_run(work_dir).validation["accuracy/top1"].items()) == [(1, 0.5), (2, 0.9)]


def test_an_older_checkpoint_is_not_gone_on_from_beside_a_newer_one(train, tmp_path):
    work_dir = train("run")
    with pytest.raises(ValueError, match=r"holds epoch_2\.pth.*move it away"):
        train("run", "--resume", str(work_dir / "epoch_1.pth"))
    (work_dir / "epoch_2.pth").unlink()
    train("run", "--resume", str(work_dir / "epoch_1.pth"))
    assert (work_dir / "epoch_2.pth").is_file()


def test_the_newest_has_the_largest_step(train, tmp_path):
    work_dir = train("run", extra="train_cfg['max_epochs'] = 3\n")
    for number, name in enumerate(("epoch_3.pth", "epoch_2.pth", "epoch_1.pth")):
        os.utime(work_dir / name, ns=(number, number))
    assert newest_checkpoint(work_dir) == str(work_dir / "epoch_3.pth")
    (work_dir / "epoch_12.pth").mkdir()
    (work_dir / "epoch_11.pth").symlink_to(work_dir / "absent")
    assert newest_checkpoint(work_dir) == str(work_dir / "epoch_3.pth")


def test_nothing_to_resume(train, tmp_path):
    with pytest.raises((FileNotFoundError, SystemExit)):
        train("run", "--resume")
    weights = tmp_path / "weights.pth"
    torch.save(load_checkpoint_safely(train("old") / "epoch_1.pth")["state_dict"], weights)
    work_dir = train("run", "--resume", "auto", extra=f'load_from = "{weights}"\n')
    log = next(work_dir.glob("*/*.log")).read_text()
    assert f"Loaded checkpoint {weights}" in log, "auto starts as without --resume"
    train("run", "--resume", "auto", extra='load_from = "absent.pth"\n')


def test_what_a_kill_left_is_removed_at_the_start(train, tmp_path, monkeypatch):
    from fst.training.engine.hooks.checkpoint import CrashSafeCheckpointHook

    keep_one = 'default_hooks["checkpoint"]["max_keep_ckpts"] = 1\n'
    remove = CrashSafeCheckpointHook._remove_outdated

    def stops_before_it_removes(self, newest):
        if newest == 2:
            raise Stopped
        remove(self, newest)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(CrashSafeCheckpointHook, "_remove_outdated", stops_before_it_removes)
        train("run", extra=keep_one)
    assert len(list((tmp_path / "run").glob("epoch_*.pth"))) == 2
    work_dir = train("run", "--resume", extra=keep_one)
    assert [path.name for path in work_dir.glob("epoch_*.pth")] == ["epoch_2.pth"]

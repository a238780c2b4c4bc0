"""A run of four iterations per epoch on scikit-learn's digits, and what tests do with it."""

import itertools
import os

import pytest
import torch
from torch import nn

pytest.importorskip("mmengine")

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

import fst.models
from fst.cli import main
from tests.programs import ROOT

SHARED_DATA = ROOT.parent / "shared" / "data"

CONFIG = """
model = dict(
    type="Classifier",
    architecture=dict(source="fst", name="tiny_net", num_classes=10),
    data_preprocessor=dict(type="ImagePreprocessor", mean=[78.0], std=[96.0]),
)
sparsity = {sparsity}
train_dataloader = dict(
    batch_size=64,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(
        type="Digits", split="train", subset=256,
        transforms=[dict(type="RandomCrop", size=8, padding=1)],
    ),
)
val_dataloader = dict(batch_size=128, dataset=dict(type="Digits", split="test"))
val_evaluator = dict(type="Accuracy", topk=(1, 3))
train_cfg = dict(by_epoch=True, max_epochs=2)
val_cfg = dict()
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.05, momentum=0.9))
param_scheduler = dict(type="CosineAnnealingLR", convert_to_iter_based=True)
default_hooks = dict(
    checkpoint=dict(type="CheckpointHook", interval=1),
    logger=dict(type="LoggerHook", interval=2),
)
custom_hooks = []
randomness = dict(seed=3)
"""

STOP = 'custom_hooks += [dict(type="mmengine.StopInSecondEpoch")]\n'

_numbers = itertools.count()


@HOOKS.register_module(force=True)
class StopInSecondEpoch(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.epoch == 1 and batch_idx == 2:
            raise RuntimeError("stopped on purpose")


def tiny_net(num_classes=10):
    """Two convolutions that every strategy prunes, batch norm, and dropout (global generator)."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(fst.models, "tiny_net", tiny_net, raising=False)


@pytest.fixture
def write_config(tmp_path):
    """Writes the config, each time under a new name: mmengine's global objects go by it."""

    def write(sparsity='dict(strategy="fst", log_interval=2)', extra=""):
        path = tmp_path / f"tiny{os.getpid()}_{next(_numbers)}.py"
        path.write_text(CONFIG.format(sparsity=sparsity) + extra)
        return str(path)

    return write


@pytest.fixture
def train(tmp_path, write_config):
    """Trains in this process and returns the work dir; errors are raised as they are."""

    def run(name="run", *arguments, sparsity='dict(strategy="fst", log_interval=2)', extra=""):
        path = write_config(sparsity, extra)
        main(["train", path, "--work-dir", str(tmp_path / name), "--traceback", *arguments])
        return tmp_path / name

    return run


@pytest.fixture
def error_of(capsys):
    """The one line in which a command ends, with exit status 2."""

    def run(command, *arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([command, *map(str, arguments)])
        assert stopped.value.code == 2
        before, error, line = capsys.readouterr().err.rpartition("error: ")
        assert line.count("\n") == 1 and (not before or before.startswith("usage: "))
        return error + line

    return run


@pytest.fixture
def train_with_stop(train):
    """Trains, is stopped in the second epoch, and resumes."""

    def run(name, *arguments, extra="", **options):
        with pytest.raises(RuntimeError, match="on purpose"):
            train(name, *arguments, extra=extra + STOP, **options)
        return train(name, *arguments, "--resume", extra=extra, **options)

    return run


@pytest.fixture
def shared_data():
    """Data next to the repository; tests that need it are skipped without it."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no data at {SHARED_DATA}")
    return SHARED_DATA


def equal(a, b):
    """Whether two nested checkpoints are equal bit for bit."""
    if torch.is_tensor(a):
        return torch.is_tensor(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.fixture
def assert_same_state():
    """Compares everything in two checkpoints that training goes on from."""
    from fst.files.checkpoint import load_checkpoint_safely

    def check(one, other):
        one, other = load_checkpoint_safely(one), load_checkpoint_safely(other)
        keys = ("state_dict", "ema_state_dict", "optimizer", "param_schedulers")
        for key in (*keys, "sparsity", "random_state"):
            assert equal(one.get(key), other.get(key)), f"{key} differs"
        assert one["meta"]["iter"] == other["meta"]["iter"]

    return check

"""SIGKILL and signals at random moments of `fst train`: resumed, it ends as a whole run does."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from fst.files.checkpoint import load_checkpoint_safely
from tests.campaign.shared import ROOT, Checks
from tests.strategy_settings import SHIPPED

EPOCHS, LIMIT = 6, 300
LAST = f"epoch_{EPOCHS}.pth"
OPTIONS = [
    f"train_cfg.max_epochs={EPOCHS}",
    "train_dataloader.dataset.subset=256",
    "train_dataloader.batch_size=32",
    "val_dataloader.dataset.subset=100",
    "model.architecture.width=8",
]
MORE = {  # so that something happens to the masks in 48 steps
    "asp": ["sparsity.from_scratch=allow"],
    "dpf": ["sparsity.interval=5"],
    "rigl": ["sparsity.interval=5"],
    "tsm": ["sparsity.interval=5"],
    "resprop": ["sparsity.threshold=1e-4", "sparsity.warmup=10"],
    "prunetrain": ["sparsity.interval=1"],
}
SIGNALS = {  # name -> signals, and the exit status if they end it
    "int": ([signal.SIGINT], 130),
    "term": ([signal.SIGTERM], 143),
    "int-twice": ([signal.SIGINT, signal.SIGINT], 130),
    "term-twice": ([signal.SIGTERM, signal.SIGTERM], 143),
    "hup": ([signal.SIGHUP], -signal.SIGHUP),
}
SIGNALLED = ("fst", "rigl", "sampled")


def checks() -> Checks:
    """Kills of each strategy; each signal."""
    kills = [(name, 3, partial(_check_kill, name)) for name in SHIPPED]
    return [*kills, *((f"signal-{name}", 3, partial(_check_signal, name)) for name in SIGNALS)]


def _start(strategy: str, folder: str, *arguments: str) -> subprocess.Popen[str]:
    """`fst train` on the digits, in a process of its own."""
    options = [*OPTIONS, f"sparsity.strategy={strategy}", *MORE.get(strategy, [])]
    command = [sys.executable, "tools/train.py", "configs/demo_digits.py", "--work-dir", folder]
    return subprocess.Popen(
        [*command, *arguments, "--cfg-options", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _errors(run: subprocess.Popen[str], what: str) -> str:
    """What a run wrote as errors, at its end."""
    try:
        return run.communicate(timeout=LIMIT)[1]
    except subprocess.TimeoutExpired:
        run.kill()
        raise AssertionError(f"{what} took more than {LIMIT} s") from None


def _weights(folder: str) -> dict[str, torch.Tensor]:
    return load_checkpoint_safely(Path(folder) / LAST)["state_dict"]


@functools.cache
def _whole(strategy: str) -> tuple[dict[str, torch.Tensor], float]:
    """Weights of an uninterrupted run, and its time."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        run = _start(strategy, folder)
        errors = _errors(run, "the uninterrupted run")
        assert run.returncode == 0, f"the uninterrupted run failed: {errors[-500:]}"
        return _weights(folder), time.monotonic() - began


def _check_resumption(strategy: str, folder: str) -> None:
    """Go on in a folder whose run was stopped: the whole run's weights, or a reason why not."""
    expected = _whole(strategy)[0]
    found = sorted(path.name for path in Path(folder).glob("*.pth*"))
    again = _start(strategy, folder, "--resume")
    errors = _errors(again, f"resuming from {found}")
    if again.returncode == 2 and "error: " in errors:
        return  # refused, and said why
    assert again.returncode == 0, f"resuming from {found} failed: {errors[-500:]}"
    resumed = _weights(folder)
    differ = [name for name in expected if not torch.equal(expected[name], resumed[name])]
    assert resumed.keys() == expected.keys() and not differ, f"{differ} differ, from {found}"


def _check_kill(strategy: str, draw: random.Random) -> None:
    _, lasted = _whole(strategy)
    with tempfile.TemporaryDirectory() as folder:
        run = _start(strategy, folder)
        time.sleep(draw.uniform(0.1, 1) * lasted)
        run.kill()
        run.communicate()
        _check_resumption(strategy, folder)


def _check_signal(name: str, draw: random.Random) -> None:
    """It says how it goes on, in one line."""
    strategy, (numbers, status) = draw.choice(SIGNALLED), SIGNALS[name]
    _, lasted = _whole(strategy)
    with tempfile.TemporaryDirectory() as parent:
        folder = f"{parent}/run"
        run = _start(strategy, folder)
        while not os.path.exists(folder) and run.poll() is None:  # imports are over
            time.sleep(0.02)
        time.sleep(draw.uniform(0, lasted / 2))
        for number in numbers:
            run.send_signal(number)
            time.sleep(draw.uniform(0, 0.1))
        errors = _errors(run, name)
        # a command that is done no longer handles signals
        ended = {0, status, -numbers[0]} if Path(folder, LAST).exists() else {0, status}
        assert run.returncode in ended, f"exit status {run.returncode}: {errors[-500:]}"
        stopped = status > 0 and run.returncode == status
        assert not stopped or errors.count("stopped") == 1, errors[-500:]
        assert "Traceback" not in errors, errors[-500:]
        _check_resumption(strategy, folder)

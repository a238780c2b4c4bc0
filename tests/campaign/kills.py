"""SIGKILL of tools/train.py at random moments: resumed, it ends with the weights of a whole run."""

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
from tests.campaign.weights import Checks
from tests.strategy_settings import SHIPPED

ROOT = Path(__file__).resolve().parents[2]
COUNT = 3  # kills of each strategy, at scale 1
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


def checks() -> Checks:
    """Kills of each strategy."""
    return [(name, COUNT, partial(_check, name)) for name in SHIPPED]


def environment() -> dict[str, str]:
    """Of a child process that uses this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(strategy: str, folder: str, *arguments: str) -> subprocess.Popen[str]:
    """`fst train` on the digits, in a process of its own."""
    options = [*OPTIONS, f"sparsity.strategy={strategy}", *MORE.get(strategy, [])]
    command = [sys.executable, "tools/train.py", "configs/demo_digits.py", "--work-dir", folder]
    return subprocess.Popen(
        [*command, *arguments, "--cfg-options", *options],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def weights(folder: str) -> dict[str, torch.Tensor]:
    """Those of the last epoch."""
    return load_checkpoint_safely(Path(folder) / LAST)["state_dict"]


@functools.cache
def whole(strategy: str) -> tuple[dict[str, torch.Tensor], float, float]:
    """Weights of an uninterrupted run, the time until its folder stood, and its whole time."""
    with tempfile.TemporaryDirectory() as folder:
        began, stood = time.monotonic(), None
        run = start(strategy, f"{folder}/run")
        while run.poll() is None and time.monotonic() - began < LIMIT:
            if stood is None and os.path.exists(f"{folder}/run"):
                stood = time.monotonic() - began
            time.sleep(0.02)
        lasted = time.monotonic() - began
        run.kill()
        errors = run.communicate()[1]
        assert run.returncode == 0, f"the uninterrupted run failed: {errors[-500:]}"
        return weights(f"{folder}/run"), stood or 0.0, lasted


def check_resumption(strategy: str, folder: str) -> None:
    """Go on in a folder whose run was stopped: the whole run's weights, or a reason why not."""
    expected = whole(strategy)[0]
    found = sorted(path.name for path in Path(folder).glob("*.pth*"))
    again = start(strategy, folder, "--resume")
    try:
        errors = again.communicate(timeout=LIMIT)[1]
    except subprocess.TimeoutExpired:
        again.kill()
        raise AssertionError(f"resuming from {found} took more than {LIMIT} s") from None
    if again.returncode == 2 and "error: " in errors:
        return  # refused, and said why
    assert again.returncode == 0, f"resuming from {found} failed: {errors[-500:]}"
    resumed = weights(folder)
    differ = [name for name in expected if not torch.equal(expected[name], resumed[name])]
    assert resumed.keys() == expected.keys() and not differ, f"{differ} differ, from {found}"


def _check(strategy: str, draw: random.Random) -> None:
    _, stood, lasted = whole(strategy)
    with tempfile.TemporaryDirectory() as folder:
        run = start(strategy, folder)
        try:
            # Most kills while it trains, some while it starts.
            run.wait(draw.uniform(0.5 * stood, lasted))
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGKILL)
        run.communicate()
        check_resumption(strategy, folder)

"""Signals at random moments: a run says how it goes on, leaves no process, and resumes exactly."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tests.campaign import kills
from tests.campaign.weights import Checks

COUNT = 3  # of each signal and program, at scale 1
STRATEGIES = ("fst", "rigl", "sampled")
SIGNALS = {
    "int": [signal.SIGINT],
    "term": [signal.SIGTERM],
    "int-twice": [signal.SIGINT, signal.SIGINT],
    "term-twice": [signal.SIGTERM, signal.SIGTERM],
    "hup": [signal.SIGHUP],
}
OF_TRAINING = ("int", "term", "int-twice", "term-twice", "hup")  # SIGKILL: the kind "kills"
OF_ABLATION = ("int", "term")
STATUS = {"int": 130, "int-twice": 130, "term": 143, "term-twice": 143}
GRID = "configs/ablation/digits_table1.yaml"
SETTING = "dense"
LEFT_SECONDS = 30.0  # in which a training ends


def checks() -> Checks:
    """Each signal for `fst train` and for `fst ablate`."""
    return [
        *((f"train-{name}", COUNT, partial(_check_train, name)) for name in OF_TRAINING),
        *((f"ablate-{name}", COUNT, partial(_check_ablate, name)) for name in OF_ABLATION),
    ]


def _stop(
    process: subprocess.Popen[str], name: str, folder: str, least: float, draw: random.Random
) -> str:
    """Send the signals up to ``least`` seconds after the folder stands; what it wrote as errors."""
    while not os.path.exists(folder) and process.poll() is None:
        time.sleep(0.02)
    try:
        process.wait(draw.uniform(0, least))
    except subprocess.TimeoutExpired:
        for number in SIGNALS[name]:
            process.send_signal(number)
            time.sleep(draw.uniform(0, 0.1))
    try:
        return process.communicate(timeout=kills.LIMIT)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"{name} did not end it within {kills.LIMIT} s") from None


def _check_train(name: str, draw: random.Random) -> None:
    strategy = draw.choice(STRATEGIES)
    _, stood, lasted = kills.whole(strategy)
    with tempfile.TemporaryDirectory() as parent:
        folder = f"{parent}/run"
        run = kills.start(strategy, folder)
        errors = _stop(run, name, folder, lasted - stood, draw)
        killed = -SIGNALS[name][0]
        ended = STATUS.get(name, killed)
        if Path(folder, kills.LAST).exists() and run.returncode == killed:
            ended = killed  # a command that is done no longer handles signals
        assert run.returncode in (0, ended), f"exit status {run.returncode}: {errors[-500:]}"
        assert run.returncode != STATUS.get(name) or errors.count("stopped") == 1, errors[-500:]
        assert "Traceback" not in errors, errors[-500:]
        kills.check_resumption(strategy, folder)


# ---------------------------------------------------------------- ablations


def _ablate(folder: str) -> subprocess.Popen[str]:
    options = [option for option in kills.OPTIONS if "width" not in option]
    command = [sys.executable, "tools/ablate.py", GRID, "--work-dir", folder, "--seeds", "0"]
    return subprocess.Popen(
        [*command, "--only", SETTING, "--cfg-options", *options],
        cwd=kills.ROOT,
        env=kills.environment(),
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _left(folder: str) -> Sequence[str]:
    """The commands of processes that still work in ``folder`` after a while."""
    deadline, found = time.monotonic() + LEFT_SECONDS, ["?"]
    while found and time.monotonic() < deadline:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has ended
                continue
            found += [words] if folder in words else []
        time.sleep(0.1)
    return found


def _weights(folder: str) -> dict[str, Tensor]:
    return kills.weights(f"{folder}/{SETTING}/seed0")


@functools.cache
def _whole_ablation() -> tuple[dict[str, Tensor], float]:
    """The weights of an ablation that nobody disturbs, and how long it takes."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        run = _ablate(folder)
        errors = run.communicate(timeout=kills.LIMIT)[1]
        assert run.returncode == 0, f"the uninterrupted ablation failed: {errors[-500:]}"
        return _weights(folder), time.monotonic() - began


def _check_ablate(name: str, draw: random.Random) -> None:
    whole, lasted = _whole_ablation()
    with tempfile.TemporaryDirectory() as parent:
        folder = f"{parent}/work"
        run = _ablate(folder)
        errors = _stop(run, name, folder, 0.9 * lasted, draw)
        if left := _left(folder):
            raise AssertionError(f"{len(left)} processes work on: {left[0][:300]}")
        ended = STATUS[name]
        assert run.returncode in (0, ended), f"exit status {run.returncode}: {errors[-500:]}"
        assert not run.returncode or errors.count("goes on from here") == 1, errors[-500:]
        assert "Traceback" not in errors, errors[-500:]
        again = _ablate(folder)
        errors = again.communicate(timeout=kills.LIMIT)[1]
        assert again.returncode == 0, f"going on failed: {errors[-500:]}"
        resumed = _weights(folder)
        differ = [key for key in whole if not torch.equal(whole[key], resumed[key])]
        assert not differ, f"{differ} differ from an undisturbed ablation's"

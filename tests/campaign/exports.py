"""Exported files hold what the folded model computes, and no failure or kill harms another file."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fst
from fst.api.difference import difference
from tests.campaign.shared import ROOT, Checks, outputs_of

FORMATS = {"onnx": 25, "pt2": 40, "safetensors": 60}  # cases of each, at scale 1
STRATEGIES = ("srste", "fst", "fst_w", "tsm", "sdgp", "mvue", "fst_sampled", "dense")
TOLERANCE = 1e-4
State = dict[str, Tensor]


class Log(nn.Module):
    """Whose outputs are not all finite, and not steep where they are."""

    def forward(self, input: Tensor) -> Tensor:
        return input.mul(4).round().log()


class Both(nn.Module):
    """A residual sum, and one weight for two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.second.weight = self.first.weight

    def forward(self, input: Tensor) -> Tensor:
        return input + self.second(self.first(input).relu())


PARTS: dict[str, Callable[[random.Random, int], nn.Module]] = {
    "conv": lambda draw, width: nn.Conv2d(width, width, draw.choice((1, 3)), padding=1),
    "grouped": lambda draw, width: nn.Conv2d(width, width, 3, padding=1, groups=2, bias=False),
    "depthwise": lambda draw, width: nn.Conv2d(width, width, 3, padding=1, groups=width),
    "strided": lambda draw, width: nn.Conv2d(width, width, 3, 2, 1),
    "deconv": lambda draw, width: nn.ConvTranspose2d(width, width, 2),
    "norm": lambda draw, width: nn.BatchNorm2d(width),
    "relu": lambda draw, width: nn.ReLU(),
    "dropout": lambda draw, width: nn.Dropout(0.3),
    "both": lambda draw, width: Both(width),
    "pool": lambda draw, width: nn.AvgPool2d(3, 1, 1),
}


def checks() -> Checks:
    """Files of each format; kills."""
    files = [(f"file-{suffix}", n, partial(_check_file, suffix)) for suffix, n in FORMATS.items()]
    return [*files, ("killed", 8, _check_killed)]


def _model(draw: random.Random, log: bool = False) -> nn.Sequential:
    torch.manual_seed(draw.getrandbits(32))
    width = draw.choice((4, 8, 12))
    parts = [PARTS[draw.choice(list(PARTS))](draw, width) for _ in range(draw.randint(1, 5))]
    head: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5)]
    net = nn.Sequential(nn.Conv2d(4, width, 3, padding=1), *parts, *head)
    if log:
        net.append(Log())
    net.train()
    net(torch.randn(4, 4, 9, 9))  # statistics of batch norm
    fst.convert(net, draw.choice(STRATEGIES), layers=draw.choice(("conv", "all")))
    return net.train(draw.random() < 0.5)


def _check_file(suffix: str, draw: random.Random) -> None:
    """The file's outputs, zeros and notes; all else in the folder and in the model stays."""
    net = _model(draw, log=draw.random() < 0.2)
    state, trains = copy.deepcopy(net.state_dict()), net.training
    sparse = net[0].strategy.output is not None
    plain = fst.fold(net).eval()
    with tempfile.TemporaryDirectory() as name:
        path, other = Path(name) / f"m.{suffix}", Path(name) / f"m.partial.{suffix}"
        other.write_text("mine")
        target = path
        if draw.random() < 0.3:
            target = Path(name) / "elsewhere"
            target.write_text("old")
            path.symlink_to(target)
        exported = plain if draw.random() < 0.3 else net
        report = fst.export(exported, path, torch.randn(2, 4, 9, 9))
        assert path.is_symlink() == (target != path), "a link was replaced"
        assert other.read_text() == "mine", "a file next to it was changed"
        assert {*Path(name).iterdir()} == {path, other, target}, "files were left"
        assert net.training == trains, "the model is in another mode"
        for key, value in net.state_dict().items():
            assert torch.equal(value, state[key]), f"{key} of the model has changed"
        if suffix == "safetensors":
            held = load_file(path)
            for key, value in plain.state_dict().items():
                assert torch.equal(held[key], value), f"{key} differs in the file"
        else:
            for samples in (1, 3):
                images = torch.randn(samples, 4, 9, 9)
                off = difference(outputs_of(path, images), plain(images).detach())
                assert off <= TOLERANCE, f"outputs of {samples} samples are {off:.1e} off"
        patterns = [w.pattern for w in report.weights if w.pattern]
        assert bool(patterns) == sparse, f"patterns {patterns} of {net[0].strategy.name}"
        if sparse:
            found = fst.verify(path)
            assert found.ok and len([x for x in found.layers if x.inside]) >= len({*patterns})


def _is_one_of(path: Path, nets: list[nn.Sequential]) -> bool:
    held = load_file(path)
    states: list[State] = [fst.fold(net).state_dict() for net in nets]
    return any(
        held.keys() == state.keys() and all(torch.equal(held[k], v) for k, v in state.items())
        for state in states
    )


WRITES = """
import sys, fst
from tests.campaign.exports import large
nets = large()
while True:
    for net in nets:
        fst.export(net, sys.argv[1])
        print("written", flush=True)
"""


def large() -> list[nn.Sequential]:
    """Two networks whose files take a while to write."""
    nets = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        nets.append(nn.Sequential(nn.Conv2d(64, 256, 3), nn.Conv2d(256, 256, 3)))
        fst.convert(nets[-1], "srste")
    return nets


def _check_killed(draw: random.Random) -> None:
    """SIGKILL in the middle of exports: the file is a whole one, and the next export works."""
    with tempfile.TemporaryDirectory() as folder:
        path, nets = Path(folder) / "m.safetensors", large()
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", WRITES, str(path)]
        writer = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE)
        while writer.stdout.readline() != "written\n":
            assert writer.poll() is None, "the writer has ended"
        time.sleep(draw.uniform(0, 0.3))
        writer.kill()
        writer.communicate()
        assert _is_one_of(path, nets), "half a file, or a mixture"
        other = _model(draw)
        fst.export(other, path)
        assert _is_one_of(path, [other])

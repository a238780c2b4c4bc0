"""Parts of FST that depend on PyTorch's version: `python tests/versions_check.py` prints, as JSON,
why each does not work in this environment; "" where it works.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

import fst

IMAGES = torch.randn(4, 8, 9, 9)


def trained(strategy: str, compiled: bool = False) -> nn.Module:
    """A converted network after two steps."""
    layers = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3)
    model = nn.Sequential(*layers)
    fst.convert(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    for _ in range(2):
        optimizer.zero_grad()
        forward(IMAGES).square().mean().backward()
        optimizer.step()
    return model


def folded() -> nn.Module:
    """A plain 2:4 network."""
    return fst.fold(trained("srste")).eval()


def core() -> None:
    """Training, what a checkpoint holds, folding and verifying."""
    for strategy in ("srste", "fst", "sdgp", "sampled"):
        model = trained(strategy)
        fst.load_sparsity_state(model, fst.sparsity_state(model))
    assert fst.verify(folded()).ok


def pack() -> None:
    """A packed network computes what the plain one does, compiled too."""
    plain = folded()
    packed = fst.pack(plain, IMAGES)
    with torch.no_grad():
        for run in (packed, torch.compile(packed, backend="aot_eager")):
            torch.testing.assert_close(run(IMAGES), plain(IMAGES), rtol=1e-4, atol=1e-4)


def export(suffix: str) -> None:
    """A file that verifies."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"model.{suffix}")
        fst.export(folded(), file, IMAGES)
        assert fst.verify(file).ok


def compile_training() -> None:
    """torch.compile of converted layers, one graph."""
    for strategy in ("srste", "fst", "sdgp", "sampled"):
        trained(strategy, compiled=True)


PARTS = {
    "core": core,
    "pack": pack,
    ".safetensors": lambda: export("safetensors"),
    ".onnx": lambda: export("onnx"),
    ".pt2": lambda: export("pt2"),
    "torch.compile": compile_training,
}


def found() -> dict[str, str]:
    """The error of each part, in one line."""
    errors = {}
    for name, part in PARTS.items():
        try:
            part()
            errors[name] = ""
        except Exception as error:  # whatever an older PyTorch raises
            errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return errors


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(json.dumps({"torch": torch.__version__, **found()}))

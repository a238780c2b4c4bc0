"""A small base config, grids that use it, and a stand-in for `fst train` that takes no time."""

import json
import textwrap

import pytest
import torch
import yaml

pytest.importorskip("mmengine")

from fst.cli import main
from fst.lab.ablation import runs

BASE = """
model = dict(
    type="Classifier",
    architecture=dict(source="fst", name="digits_net", num_classes=10, width=4),
    data_preprocessor=dict(type="ImagePreprocessor", mean=[78.0], std=[96.0]),
)
sparsity = dict(strategy="fst", phase=1)
train_dataloader = dict(
    batch_size=32,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="Digits", split="train", subset=64),
)
val_dataloader = dict(batch_size=64, dataset=dict(type="Digits", split="test", subset=64))
val_evaluator = dict(type="Accuracy", topk=(1,))
train_cfg = dict(by_epoch=True, max_epochs=1)
val_cfg = dict()
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.05))
param_scheduler = [dict(type="CosineAnnealingLR", T_max=1, end=1)]
default_hooks = dict(
    checkpoint=dict(type="CheckpointHook", interval=1), logger=dict(type="LoggerHook", interval=1)
)
"""

# writes what a run leaves behind; settings whose name begins with "fail" fail
STAND_IN = """
import json, os, pathlib, shutil, sys
config, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[3])
name, seed = folder.parent.name, int(folder.name[4:])
with open(folder / "calls", "a") as file:
    file.write(json.dumps({"argv": sys.argv[4:], "threads": os.environ["OMP_NUM_THREADS"]}) + "\\n")
logs = folder / f"2026010{len((folder / 'calls').read_text().splitlines())}" / "vis_data"
logs.mkdir(parents=True)
shutil.copy(config, logs / "config.py")
if name.startswith("fail"):
    sys.exit("the loss is <not> [finite]")
shutil.copy(pathlib.Path(__file__).with_name("some.pth"), folder / "epoch_1.pth")
lines = [{"loss": 1.0 + seed, "epoch": 1, "iter": 2, "step": 2},
         {"accuracy/top1": 90.0 + seed + 3 * name.count("good"), "time": 0.1, "step": 1}]
(logs / "scalars.json").write_text("\\n".join(map(json.dumps, lines)))
"""


@pytest.fixture
def write_grid(tmp_path):
    """Writes the base config and a grid of the keys given, and returns the grid's path."""
    (tmp_path / "base.py").write_text(BASE)

    def write(name="grid.yaml", **keys):
        grid = {
            "title": "A grid",
            "base": "base.py",
            "seeds": [0, 1],
            "metrics": {"accuracy/top1": {"label": "top-1 %"}},
            "settings": {"dense": {"sparsity": {"strategy": "dense"}}},
            **keys,
        }
        path = tmp_path / name
        path.write_text(
            yaml.safe_dump({k: v for k, v in grid.items() if v is not None}, sort_keys=False)
        )
        return path

    return write


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """The script, in the place of `fst train`."""
    meta = {"epoch": 1, "iter": 2}
    torch.save({"state_dict": {"weight": torch.zeros(1)}, "meta": meta}, tmp_path / "some.pth")
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(STAND_IN))
    monkeypatch.setattr(runs, "TRAIN", [str(path)])
    return path


@pytest.fixture
def ablate(tmp_path, stand_in):
    """Runs a grid in tmp_path/work with the stand-in and returns the exit status."""

    def run(grid, *arguments):
        return main(["ablate", str(grid), "--work-dir", str(tmp_path / "work"), *arguments])

    return run


@pytest.fixture
def calls(tmp_path):
    """What the stand-in was called with, for one run."""

    def read(setting, seed=0):
        path = tmp_path / "work" / setting / f"seed{seed}" / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    return read

"""A tiny classifier on scikit-learn's digits, as a config and as modules."""

import os

import pytest
import torch
from torch import nn

CONFIG = """
model = dict(
    type="Classifier",
    architecture=dict(source="fst", name="analysed_net", num_classes=10),
    data_preprocessor=dict(type="ImagePreprocessor", mean=[78.0], std=[96.0]),
)
sparsity = {sparsity}
train_dataloader = dict(
    batch_size=32,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="Digits", split="train", subset=64),
)
val_dataloader = dict(batch_size=64, dataset=dict(type="Digits", split="test"))
val_evaluator = dict(type="Accuracy", topk=(1,))
train_cfg = dict(by_epoch=True, max_epochs=3)
val_cfg = dict()
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.05))
default_hooks = dict(logger=dict(type="LoggerHook", interval=1))
randomness = dict(seed=3)
"""


def analysed_net(num_classes=10):
    """Stride 2, a 1x1 kernel, an in-place ReLU right behind a convolution, and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(8, 12, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, num_classes),
    )


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def write_config(tmp_path, monkeypatch):
    """Writes the config for a strategy and returns its path."""
    models = pytest.importorskip("fst.models")
    monkeypatch.setattr(models, "analysed_net", analysed_net, raising=False)

    def write(strategy="dense", **options):
        path = tmp_path / f"analysed_{os.getpid()}_{strategy}.py"
        path.write_text(CONFIG.format(sparsity={"strategy": strategy, **options}))
        return str(path)

    return write

"""Datasets, samplers and transforms."""

from fst.engine.data.base import ImageDataset, InMemoryDataset
from fst.engine.data.cifar import CIFAR10
from fst.engine.data.digits import ClutteredDigits, Digits
from fst.engine.data.folder import ImageFolder
from fst.engine.data.loader import build_dataloader
from fst.engine.data.sampler import EpochSampler, Sample

__all__ = [
    "CIFAR10",
    "ClutteredDigits",
    "Digits",
    "EpochSampler",
    "ImageDataset",
    "ImageFolder",
    "InMemoryDataset",
    "Sample",
    "build_dataloader",
]

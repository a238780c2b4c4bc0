"""Datasets, samplers and transforms."""

from fst.training.engine.data.base import ImageDataset, InMemoryDataset
from fst.training.engine.data.cifar import CIFAR10
from fst.training.engine.data.digits import ClutteredDigits, Digits
from fst.training.engine.data.folder import ImageFolder
from fst.training.engine.data.loader import build_dataloader, is_own
from fst.training.engine.data.sampler import EpochSampler, Sample

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
    "is_own",
]

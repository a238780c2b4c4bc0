"""Entropy of features, and what is left of it once the left neighbour is known (FST, Eq. 11)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 16  # samples whose joint histograms are held at once


class SpatialEntropy(NamedTuple):
    """In bits, one number per sample.

    Attributes:
        entropy: H(X).
        conditional: H(X|X′), X′ being the left neighbour of X.
        shuffled: H(X|X′) with the neighbours dealt out at random: how far the entropy seems to
            fall merely because the joint histogram of few values is estimated too sharp.
    """

    entropy: Tensor
    conditional: Tensor
    shuffled: Tensor


def quantise(features: Tensor, levels: int = 256) -> Tensor:
    """Each sample (first axis) to integers 0 ... levels − 1: equal intervals from its minimum to
    its maximum; a constant sample becomes 0.
    """
    if levels < 2:
        raise ValueError(f"levels={levels} must be an integer >= 2.")
    flat = features.flatten(1).double()
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    span = torch.where(high > low, high - low, torch.ones_like(low))
    bins = ((flat - low) / span * levels).long().clamp_(max=levels - 1)
    return bins.view(features.shape)


def histogram_entropy(counts: Tensor) -> Tensor:
    """H = −Σ p log₂ p in bits over the last axis of ``counts``."""
    share = counts.double() / counts.sum(-1, keepdim=True)
    return -torch.xlogy(share, share).sum(-1) / torch.log(torch.tensor(2.0, dtype=torch.float64))


def joint_counts(first: Tensor, second: Tensor, levels: int) -> Tensor:
    """How often each pair occurs: (samples, levels, levels) from two (samples, values)."""
    samples = len(first)
    sample = torch.arange(samples, device=first.device)[:, None]
    index = (sample * levels + first) * levels + second
    counts = torch.bincount(index.flatten(), minlength=samples * levels * levels)
    return counts.view(samples, levels, levels)


def spatial_entropy(
    features: Tensor, levels: int = 256, generator: torch.Generator | None = None
) -> SpatialEntropy:
    """H(X) and H(X|X′) of each sample of ``features`` (N, C, H, W), W >= 2.

    One histogram per sample over all its channels, after `quantise`. X are all positions that have
    a left neighbour, so that H(X) − H(X|X′) is never negative; H(X|X′) = H(X, X′) − H(X′).
    """
    if features.dim() != 4 or features.shape[3] < 2:
        raise ValueError(
            f"features have shape {tuple(features.shape)}; they must be (N, C, H, W) with W >= 2."
        )
    found = []
    for part in quantise(features, levels).split(_CHUNK):
        left, right = part[..., :-1].flatten(1), part[..., 1:].flatten(1)
        order = torch.randperm(left.shape[1], generator=generator).to(left.device)
        joint = joint_counts(left, right, levels)
        dealt = joint_counts(left[:, order], right, levels)
        entropy = histogram_entropy(joint.sum(1))
        of_left = histogram_entropy(joint.sum(2))
        conditional, shuffled = (histogram_entropy(j.flatten(1)) - of_left for j in (joint, dealt))
        found.append(torch.stack([entropy, conditional, shuffled]))
    return SpatialEntropy(*torch.cat(found, 1))


def white_noise(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Gaussian noise with the mean and the standard deviation of each channel of ``images``."""
    noise = torch.randn(images.shape, generator=generator).to(images)
    spread, centre = torch.std_mean(images, (0, 2, 3), keepdim=True)
    return noise * spread + centre

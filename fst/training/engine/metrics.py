"""Classification accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.dist import all_reduce
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from mmengine.registry import METRICS

from fst.basics.values import is_integer


@METRICS.register_module()
class Accuracy(BaseMetric):
    """Top-k accuracy in percent, over all ranks: ``accuracy/top1``, ...

    It is accumulated on the device; nothing is copied to the CPU before the end of the epoch.

    Args:
        topk: One k or several.
    """

    default_prefix = "accuracy"

    def __init__(self, topk: int | Sequence[int] = (1, 5)) -> None:
        super().__init__()
        self.topk = (topk,) if isinstance(topk, int) else tuple(dict.fromkeys(topk))
        if not self.topk or any(not is_integer(k) or k < 1 for k in self.topk):
            raise ValueError(f"topk={topk!r} must be positive integers.")
        self._counts: torch.Tensor | None = None  # hits of each k, and images

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, torch.Tensor]]) -> None:
        """Take the ``scores`` and ``labels`` of a batch."""
        for sample in data_samples:
            scores, labels = sample["scores"], sample["labels"]
            classes, most = scores.shape[1], max(self.topk)
            if most > classes:
                raise ValueError(f"topk={self.topk} exceeds the model's {classes} classes.")
            hits = scores.topk(most).indices == labels[:, None]
            counts = [hits[:, :k].sum() for k in self.topk]
            counts = torch.stack([*counts, torch.full_like(counts[0], len(labels))])
            self._counts = counts if self._counts is None else self._counts + counts

    def evaluate(self, size: int) -> dict[str, float]:
        """Combine all ranks."""
        counts, self._counts = self._counts, None
        if counts is None:
            raise ValueError("no image was evaluated: is there one for every rank?")
        all_reduce(counts)
        *hits, seen = counts.tolist()
        if seen != size:
            print_log(f"{seen} images were evaluated, the dataset has {size}", logger="current")
        names = (f"{self.prefix}/top{k}" for k in self.topk)
        return {name: 100 * hit / seen for name, hit in zip(names, hits, strict=True)}

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Unused: `evaluate` does not collect per-sample results."""
        return {}

"""Classification accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS

from fst.basics.values import check_integer


@METRICS.register_module()
class Accuracy(BaseMetric):
    """Top-k accuracy in percent, over all ranks: ``accuracy/top1``, ...

    Args:
        topk: One k or several.
    """

    default_prefix = "accuracy"

    def __init__(self, topk: int | Sequence[int] = (1, 5)) -> None:
        super().__init__()
        self.topk = tuple(topk) if isinstance(topk, Sequence) else (topk,)
        for k in self.topk:
            check_integer("topk", k, 1)

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, torch.Tensor]]) -> None:
        """Count, on the device, the hits of each k among the ``scores`` and ``labels``."""
        for sample in data_samples:
            scores, labels = sample["scores"], sample["labels"]
            most = max(self.topk)
            if most > scores.shape[1]:
                raise ValueError(f"topk={self.topk} exceeds the model's {scores.shape[1]} classes.")
            hits = scores.topk(most).indices == labels[:, None]
            counts = [hits[:, :k].sum() for k in self.topk]
            self.results.append(torch.stack([*counts, torch.full_like(counts[0], len(labels))]))

    def compute_metrics(self, results: Sequence[torch.Tensor]) -> dict[str, float]:
        """The shares of all batches."""
        if not results:
            raise ValueError("no image was evaluated: is there one for every rank?")
        *hits, seen = torch.stack(results).sum(0).tolist()
        return {f"top{k}": 100 * hit / seen for k, hit in zip(self.topk, hits, strict=True)}

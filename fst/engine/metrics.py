"""Classification accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from mmengine.registry import METRICS

from fst.basics.values import is_integer


@METRICS.register_module()
class Accuracy(BaseMetric):
    """Top-k accuracy in percent, over all ranks, by torchmetrics: ``accuracy/top1``, ...

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
        self._meters: dict[int, Any] = {}
        self._seen = 0

    @property
    def names(self) -> list[str]:
        """Names of what it measures."""
        return [f"{self.prefix}/top{k}" for k in self.topk]

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, torch.Tensor]]) -> None:
        """Take the ``scores`` and ``labels`` of a batch."""
        for sample in data_samples:
            scores, labels = sample["scores"], sample["labels"]
            if not self._meters:
                self._meters = self._new_meters(scores)
            for meter in self._meters.values():
                meter.update(scores, labels)
            self._seen += len(labels)

    def _new_meters(self, scores: torch.Tensor) -> dict[int, Any]:
        from torchmetrics.classification import MulticlassAccuracy

        classes = scores.shape[1]
        if max(self.topk) > classes:
            raise ValueError(f"topk={self.topk} exceeds the model's {classes} classes.")
        return {
            k: MulticlassAccuracy(classes, top_k=k, average="micro", validate_args=False).to(
                scores.device
            )
            for k in self.topk
        }

    def evaluate(self, size: int) -> dict[str, float]:
        """Combine all ranks; torchmetrics sums its counts over them."""
        if not self._meters:
            raise ValueError("no image was evaluated: is there one for every rank?")
        values = (100 * meter.compute().item() for meter in self._meters.values())
        metrics = dict(zip(self.names, values, strict=True))
        seen = torch.tensor(self._seen, device=next(iter(self._meters.values())).device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(seen)
        if int(seen) != size:
            print_log(
                f"{int(seen)} images were evaluated, the dataset has {size}", logger="current"
            )
        self._meters, self._seen = {}, 0
        return metrics

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Unused: `evaluate` does not collect per-sample results."""
        return {}

"""Where the operators ask which backend computes an operation on these operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fst.backends import autotune, registry

Result = TypeVar("Result")


def run(
    operation: str,
    candidates: Mapping[str, Callable[[], Result]],
    tensors: tuple[Tensor, ...],
    options: tuple[Any, ...] = (),
    *,
    tunable: bool = True,
) -> Result:
    """Compute ``operation`` with the backend that is forced, or the fastest verified one.

    Args:
        candidates: backend -> function that computes it; the default comes first.
        tensors, options: what the time depends on, see `autotune.LayerKey`.
        tunable: False where running a candidate has an effect (it draws random numbers): then the
            default is used unless another backend is forced. So it is inside torch.compile.

    Raises:
        RuntimeError: the forced backend is not among the candidates or cannot run here.
    """
    if torch.compiler.is_compiling() or not tunable:
        return candidates[_without_measuring(operation, tuple(candidates))]()
    key = autotune.LayerKey.of(*tensors, options=options)
    default, device = next(iter(candidates)), tensors[0].device
    decision = autotune.choose(operation, key, candidates, default, device)
    return candidates[decision.backend]()


@torch.compiler.assume_constant_result
def _without_measuring(operation: str, names: tuple[str, ...]) -> str:
    demanded = registry.forced(operation)
    if demanded is not None and demanded not in names:
        raise RuntimeError(
            f"{operation}={demanded!r} is forced but cannot compute this; "
            f"possible: {', '.join(names)}."
        )
    return demanded or names[0]


def seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """A seed for kernels: one int64 on ``device``, drawn without a host synchronisation."""
    source = device if generator is None else generator.device
    drawn = torch.randint(2**62, (1,), generator=generator, device=source)
    return drawn.to(device, non_blocking=True)

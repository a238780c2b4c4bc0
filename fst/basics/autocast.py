"""Autocast on any device, the one included that has none (meta)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

is_autocast = torch._C._is_any_autocast_enabled  # far cheaper than to look for one device


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on ``device``; None where autocast is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Context in which tensors keep their dtype."""
    if not is_autocast() or autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)

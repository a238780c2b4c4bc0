"""Mixed precision on CPU and GPU."""

from __future__ import annotations

from typing import Any

import torch
from mmengine.device import get_device
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS

from fst.basics.values import one_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@OPTIM_WRAPPERS.register_module()
class MixedPrecisionOptimWrapper(AmpOptimWrapper):
    """mmengine's AmpOptimWrapper that also runs on a CPU and scales the loss only where needed.

    Args:
        dtype: "bfloat16", or "float16" (GPU only), which scales the loss.
        **kwargs: Arguments of mmengine's OptimWrapper.
    """

    def __init__(self, dtype: str = "bfloat16", **kwargs: Any) -> None:
        one_of("dtype", dtype, tuple(DTYPES))
        device = get_device()
        if dtype == "float16" and device == "cpu":
            raise ValueError("dtype='float16' needs a GPU; use dtype='bfloat16' on a CPU.")
        # not AmpOptimWrapper's own: it refuses to run without a GPU
        OptimWrapper.__init__(self, **kwargs)
        self._scale_update_param = None
        self.loss_scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
        self.cast_dtype = DTYPES[dtype]

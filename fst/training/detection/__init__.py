"""Detectors of MMDetection, trained sparsely: the only part of FST that imports mmcv and mmdet.

Importing it makes `mmcv.ops` work without mmcv's compiled extension (`ops`) and, where mmdet is
installed, mends what stops its detectors (`fixes`) and registers checked data sets (`data`).
"""

import contextlib
import importlib.util

from fst.training.detection import ops

ops.install()
if importlib.util.find_spec("mmdet") is not None:
    with contextlib.redirect_stdout(None):  # mmdet prints which of its data sets it cannot import
        from fst.training.detection import data, fixes  # noqa: F401

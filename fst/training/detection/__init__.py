"""Detectors of MMDetection, trained sparsely: the only part of FST that imports mmcv and mmdet.

Importing it makes `mmcv.ops` work without mmcv's compiled extension (`ops`) and, where mmdet is
installed, mends what stops its detectors (`fixes`) and registers checked data sets (`data`), a
metric and hooks.
"""

import importlib.util

from fst.training.detection import fixes, ops

ops.install()
if importlib.util.find_spec("mmdet") is not None:
    with fixes.quiet():
        fixes.apply()
        import fst.training.detection.anchors
        import fst.training.detection.data
        import fst.training.detection.metric  # noqa: F401

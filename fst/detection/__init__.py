"""Detectors of MMDetection, trained sparsely: the only part of FST that imports mmcv and mmdet.

Importing it makes `mmcv.ops` work without mmcv's compiled extension (`fst.detection.ops`) and,
where mmdet is installed, mends what stops its detectors (`fst.detection.fixes`) and registers
checked data sets (`fst.detection.data`), a metric and hooks.
"""

import importlib.util

from fst.detection import fixes, ops

ops.install()
if importlib.util.find_spec("mmdet") is not None:
    with fixes.quiet():
        fixes.apply()
        import fst.detection.anchors
        import fst.detection.data
        import fst.detection.metric  # noqa: F401

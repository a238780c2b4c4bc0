"""FST: N:M structured sparse training of convolutional networks."""

import importlib
from typing import TYPE_CHECKING, Any

from fst.basics.version import __version__ as __version__

if TYPE_CHECKING:
    from fst.face import *  # noqa: F403
    from fst.face import __all__ as __all__


def __getattr__(name: str) -> Any:
    """Import `fst.face`, and with it torch, at the first use of a name: `fst --help` uses none."""
    if not name.startswith("_") or name == "__all__":
        face = importlib.import_module("fst.face")
        globals().update({name: getattr(face, name) for name in ("__all__", *face.__all__)})
        importlib.import_module("fst.baselines")  # they register themselves with these names
    if name in globals():
        return globals()[name]
    raise AttributeError(f"module 'fst' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})

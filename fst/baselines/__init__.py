"""Systems of FST's Table 3 that are no N:M, written as plug-ins from outside are.

They use `fst.rules`, the registry of strategies, and checks of values in `fst.basics`. Importing
the package registers them; `fst` does it.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

"""The API reference: the names of `fst` by purpose, and modules with what they define."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from pages import fence, linked, page, table, toctree

import fst

NAMES = {
    "Convert and train": (
        "convert",
        "patterns",
        "attach",
        "unconvert",
        "frozen",
        "seed_random_rules",
    ),
    "Look at it": ("backends_table", "metrics", "sparse_layers"),
    "Check and ship": ("verify", "fold", "hold", "pack", "export", "load"),
    "Save and resume": ("sparsity_state", "load_sparsity_state"),
    "Strategies": ("list_strategies", "get_strategy", "register_strategy"),
    "What strategies are made of": ("Strategy", "NM", "Rule", "Schedule"),
    "The operation itself": ("sparse_conv2d", "sparse_linear"),
    "Version": ("__version__",),
}
# Of a package with __all__ that is documented, of any other all of its modules.
PAGES = {
    "reports": (
        "fst.api.report",
        "fst.api.convert",
        "fst.api.patterns",
        "fst.api.attach",
        "fst.api.verify",
        "fst.layers.table",
        "fst.api.metrics",
        "fst.api.hold",
        "fst.layers.coverage",
        "fst.api.export",
        "fst.api.state",
        "fst.api.functional",
    ),
    "rules": ("fst.rules",),
    "strategies": ("fst.strategies",),
    "baselines": ("fst.baselines",),
    "layers": (
        "fst.layers.modules",
        "fst.layers.weights",
        "fst.layers.remembered",
    ),
    "files": ("fst.files",),
    "integrations": ("fst.integrations",),
    "backends": ("fst.backends",),
    "models": ("fst.models",),
    "engine": ("fst.training.engine",),
    "detection": ("fst.training.detection.data",),
}
DATA = {
    "fst.__version__": "The version, as in `pip show fst-train`.",
    "fst.backends.NO_GAIN": "Begins the reason of a backend that can compute and saves nothing.",
    "fst.backends.OPERATIONS": "Name of each operation that has several backends -> what it is.",
}
TITLES = {
    "reports": "Reports and checks",
    "layers": "Layers",
    "models": "Models",
    "detection": "Detection",
}
INTRODUCTION = """\
What users and extensions call. Modules that are not listed here are for the package itself and
change without notice. `import fst` needs torch alone; a module that needs more says so when it is
imported."""


def pages() -> dict[str, str]:
    """Path under docs/ -> text."""
    rows = [(f"[{_title(key)}]({key}.md)", _summary(names)) for key, names in PAGES.items()]
    index = page(
        "# API reference",
        INTRODUCTION,
        table(("page", "what it holds"), [("[fst](fst.md)", _first_line(fst)), *rows]),
        toctree(["fst", *PAGES]),
    )
    return {
        "api/index.md": index,
        "api/fst.md": _names(),
        **{f"api/{key}.md": _page(key, names) for key, names in PAGES.items()},
    }


def modules(name: str) -> list[ModuleType]:
    """A module; of a package without ``__all__`` its modules."""
    module = importlib.import_module(name)
    if not hasattr(module, "__path__") or hasattr(module, "__all__"):
        return [module]
    inner = pkgutil.iter_modules(module.__path__, f"{name}.")
    return [importlib.import_module(info.name) for info in inner]


def public_names(module: ModuleType) -> list[str]:
    """``__all__``, or the classes and functions that the module itself defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def _names() -> str:
    named = [name for names in NAMES.values() for name in names]
    if set(named) != set(fst.__all__):
        wrong = sorted(set(named) ^ set(fst.__all__))
        raise ValueError(f"NAMES in docs/_ext/api_pages.py and fst.__all__ differ in {wrong}.")
    sections = [
        part for title, names in NAMES.items() for part in (f"## {title}", _directives(fst, names))
    ]
    return page("# fst", "What `import fst` brings.", *sections)


def _title(key: str) -> str:
    return TITLES.get(key, PAGES[key][0])


def _first_line(module: ModuleType) -> str:
    return linked((inspect.getdoc(module) or "").split("\n\n")[0].replace("\n", " "))


def _summary(names: tuple[str, ...]) -> str:
    return " ".join(_first_line(importlib.import_module(name)) for name in names[:1])


def _page(key: str, names: tuple[str, ...]) -> str:
    sections = [part for name in names for module in modules(name) for part in _module(module)]
    package = importlib.import_module(names[0])
    lead = linked(inspect.getdoc(package) or "") if len(names) == 1 else ""
    return page(f"# {_title(key)}", lead, *sections)


def _module(module: ModuleType) -> Iterator[str]:
    """Heading, docstring and members; of the names of `fst` only which they are."""
    names = public_names(module)
    public = [name for name in names if getattr(fst, name, None) is getattr(module, name)]
    own = [name for name in names if name not in public]
    if not own:
        return
    if not hasattr(module, "__path__"):
        yield f"## {module.__name__}"
        yield linked(inspect.getdoc(module) or "")
    if public:
        yield "As `fst.NAME`: " + ", ".join(f"{{py:obj}}`fst.{name}`" for name in public) + "."
    yield _directives(module, own)


def _directives(module: ModuleType, names: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    lines = []
    for name in names:
        value = getattr(module, name)
        if inspect.isclass(value):
            lines += [f".. autoclass:: {module.__name__}.{name}", "   :members:", ""]
        elif inspect.isroutine(value):
            lines += [f".. autofunction:: {module.__name__}.{name}", ""]
        else:
            text = DATA[f"{module.__name__}.{name}"]
            lines += [f".. py:data:: {module.__name__}.{name}", "", f"   {text}", ""]
    return fence("{eval-rst}", "\n".join(lines).rstrip())

"""Imports run one way: a file uses its own package and those below it, wherever it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fst
from fst.rules.rule import Rule
from tests.programs import ROOT, python

# From the ground up; packages of one line do not know each other.
FLOORS = (
    ("basics",),
    ("rules", "backends", "models"),
    ("ops", "files"),
    ("layers",),
    ("strategies", "inference"),
    ("api", "baselines"),
    ("",),  # fst/__init__.py
    ("cli",),
    ("integrations",),
    ("training",),
    ("lab",),
    ("__main__",),
)
# What a file loads by its name from above it, when a user asks for it.
BY_NAME = {
    "fst/api/convert.py": {"integrations"},  # that of a layer's library
    "fst/cli/commands.py": {"training", "lab"},  # the one of a command
}
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
FILES = sorted((ROOT / "fst").rglob("*.py"))


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file) for file in FILES}


def imported(file: Path) -> Iterator[str]:
    """The modules of fst that a file imports: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "fst")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            if node.module.split(".")[0] == "fst":
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    yield name if name in MODULES else node.module


def named(file: Path) -> Iterator[str]:
    """The modules of fst that a file may import by importlib: all whose names are strings in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.rstrip(".")  # "fst.rules." begins an f-string
            if name.startswith("fst.") and name in MODULES:
                yield name


def package(module: str) -> str:
    return module.partition(".")[2].split(".")[0]


def test_imports_point_down() -> None:
    wrong = []
    for file in FILES:
        here = package(module_of(file))
        assert here in FLOOR, f"fst/{here} stands on no floor of this table"
        wrong += [
            f"{file.relative_to(ROOT)} imports {module}"
            for module in imported(file)
            if package(module) != here and FLOOR[package(module)] >= FLOOR[here]
        ]
    assert not wrong


def test_modules_that_are_imported_by_name_stand_below_too() -> None:
    above = {}
    for file in FILES:
        here = package(module_of(file))
        found = {package(module) for module in named(file)} - {here}
        if upward := {other for other in found if FLOOR[other] >= FLOOR[here]}:
            above[str(file.relative_to(ROOT))] = upward
    assert above == BY_NAME


def test_baselines_use_what_a_plug_in_may_use() -> None:
    """The modules that CONTRIBUTING.md names to plug-ins."""
    wrong = [
        f"{file.name} imports {module}"
        for file in sorted((ROOT / "fst" / "baselines").glob("*.py"))
        for module in imported(file)
        if package(module) not in {"baselines", "basics", "rules"}
        and module != "fst.strategies.registry"
    ]
    assert not wrong


def test_no_module_is_hidden() -> None:
    """`fst.NAME` is a function or a module, never the one in the place of the other."""
    packages = {path.stem for path in (ROOT / "fst").iterdir()}
    assert not packages & set(fst.__all__)


@pytest.mark.system
def test_names_are_imported_at_their_first_use() -> None:
    """`import fst` imports no torch; the first name, dir() or * brings all names and modules."""
    code = """
import sys, fst
assert "torch" not in sys.modules and fst.__version__
assert not hasattr(fst, "__wrapped__") and "torch" not in sys.modules
{}
assert fst.NM.__module__ == "fst.rules.nm" and fst.layers.modules.SparseConv2d
assert set(fst.__all__) <= set(dir(fst)) and {{"sampled", "meprop"}} <= set(fst.list_strategies())
assert not hasattr(fst, "absent")
"""
    uses = ("dir(fst)", "from fst import *; convert")
    for use in uses:
        python("-c", code.format(use))


def test_type_checkers_see_the_names_that_are_imported_at_first_use() -> None:
    (block,) = [n for n in ast.parse(Path(fst.__file__).read_text()).body if isinstance(n, ast.If)]
    seen = {node.names[0].asname: f"{node.module}" for node in block.body}
    assert seen == {name: f"fst.{module}" for name, module in fst._MODULES.items()}
    assert fst.__all__ == ["__version__", *fst._MODULES]


def test_no_circles() -> None:
    graph = {module_of(file): set(imported(file)) & MODULES for file in FILES}
    while leaves := [module for module, used in graph.items() if not used & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert not graph, f"files that import each other: {sorted(graph)}"


def test_import_loads_no_kernel() -> None:
    """Neither Triton nor a module of the kernels: the names of `fst` need torch alone."""
    code = "import sys, fst; fst.convert"
    code += "; print(*(m for m in sys.modules if m.startswith('fst.kernels')))"
    others = ("triton", "mmengine", "torchvision", "timm")
    code += f"; print(*(m for m in {others} if m in sys.modules))"
    assert not python("-c", code).stdout.split()


def test_timm_is_imported_by_two_packages_alone() -> None:
    allowed = {"fst.integrations.timm"}
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in FILES
        if module_of(file) not in allowed and package(module_of(file)) != "training"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", ""), *(alias.name for alias in node.names)]
        if name.split(".")[0] == "timm"
    ]
    assert not wrong


def test_nobody_asks_for_the_type_of_a_rule() -> None:
    """A rule's meaning is its methods: only its own package may tell rules apart."""

    def below(kind: type) -> Iterator[str]:
        yield kind.__name__
        for child in kind.__subclasses__():
            yield from below(child)

    rules, asking = set(below(Rule)), []
    for file in FILES:
        if package(module_of(file)) == "rules":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                named = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                if named & rules:
                    asking.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not asking

"""Read the descriptions of the repository's configs and grids, without loading them."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(
    path
    for path in (ROOT / "configs").rglob("*.py")
    if "_base_" not in path.relative_to(ROOT).parts
)
GRIDS = sorted((ROOT / "configs" / "ablation").glob("*.yaml"))


def _assigned(tree: ast.Module, name: str) -> ast.expr | None:
    """The value that the module's last line of that kind gives to ``name``."""
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    return values[-1] if values else None


def strategy_of(config: Path) -> str | None:
    """The strategy of a config's ``sparsity``, its own or inherited; None without one."""
    tree = ast.parse(config.read_text(encoding="utf-8"))
    sparsity = _assigned(tree, "sparsity")
    if isinstance(sparsity, ast.Call):
        for keyword in sparsity.keywords:
            if keyword.arg == "strategy":
                return ast.literal_eval(keyword.value)
    bases = _assigned(tree, "_base_")
    names = [] if bases is None else ast.literal_eval(bases)
    for name in reversed([names] if isinstance(names, str) else names):
        if "::" not in name and (found := strategy_of(config.parent / name)):
            return found
    return None


def summary_of(config: Path) -> str:
    """The first line of a config's docstring."""
    return (ast.get_docstring(ast.parse(config.read_text(encoding="utf-8"))) or "").split("\n")[0]


def packaged_name(config: Path) -> str:
    """Name on command lines: ``fst::configs/...``."""
    return f"fst::{config.relative_to(ROOT).as_posix()}"


def link(file: Path) -> str:
    """A link to a file of the repository, from a generated page."""
    path = file.relative_to(ROOT).as_posix()
    return f"[{path}](../../{path})"

"""The documentation site: it builds, its links lead somewhere, and it leaves nothing public out."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import fst
from tests.programs import ROOT, python
from tests.strategy_settings import SHIPPED

pytest.importorskip("sphinx")
# One worker builds the site, for all of these.
pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.xdist_group("site")]

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PACKAGES = ("baselines", "files", "integrations", "rules", "strategies")
API = (
    "attach",
    "convert",
    "export",
    "functional",
    "hold",
    "metrics",
    "patterns",
    "report",
    "state",
)
MODULES = (*(f"api/{name}" for name in (*API, "verify")), "layers/table")


class Page(HTMLParser):
    """What a page refers to, what can be referred to in it, and its text."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()
        self.words: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.targets.add(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    options = ("-W", "-n", "--keep-going", "-q", "-E", "-d", str(folder / "doctrees"))
    python("-m", "sphinx", *options, "docs", folder / "html")
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {file: Page(file) for file in site.rglob("*.html")}


def test_no_link_and_no_image_is_broken(site, pages):
    broken = []
    for file, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            found = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not found.is_file():
                broken.append(f"{file.relative_to(site)}: {target}")
            elif parts.fragment and unquote(parts.fragment) not in pages[found].anchors:
                broken.append(f"{file.relative_to(site)}: {target} (no such anchor)")
    assert len(pages) > 60 and not broken


def test_every_strategy_has_a_page(site, pages):
    for name in SHIPPED:
        text = pages[site / "strategies" / f"{name}.html"].text
        assert f'fst.convert(model, "{name}")' in text
        assert str(fst.get_strategy(name).output or "dense") in text
    srste = pages[site / "strategies" / "srste.html"].text
    assert "Zhou et al." in srste and "backward" in srste
    assert "71.2" in srste and "fst::configs/srste_resnet50_imagenet.py" in srste


def public_names() -> Iterator[tuple[str, str, ast.AST]]:
    """(module, name in it): without an underscore, and public methods of classes without bases."""
    files = [file for package in PACKAGES for file in (ROOT / "fst" / package).glob("*.py")]
    for file in [*files, *(ROOT / "fst" / f"{module}.py" for module in MODULES)]:
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_":
                yield module, node.name, node
                if isinstance(node, ast.ClassDef) and not node.bases:
                    for method in node.body:
                        if isinstance(method, ast.FunctionDef) and method.name[0] != "_":
                            yield module, f"{node.name}.{method.name}", method


def test_no_public_name_is_undocumented(site):
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    listed = {name for kind, names in inventory.data.items() if kind[:3] == "py:" for name in names}
    missing = [name for name in fst.__all__ if f"fst.{name}" not in listed]
    for module, name, node in public_names():
        if not {f"{module}.{name}", f"fst.{name}"} & listed:
            missing.append(f"{module}.{name}")
        if ast.get_docstring(node) is None:
            missing.append(f"{module}.{name} has no docstring")
    assert not missing


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_run(file, pages, site):
    """The build stops where a cell raises; their outputs are made there, and nowhere stored."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    shown = (site / "notebooks" / f"{file.stem}.html").read_text(encoding="utf-8")
    assert shown.count("cell_output") >= 4 and "Traceback" not in shown
    expected = {
        "first_steps": "3 weights are 2:4, 1 exempt",
        "your_own_loop": "bit for bit the same",
        "reading_a_report": "the first step tells which backend is the fastest",
    }
    assert expected[file.stem] in pages[site / "notebooks" / f"{file.stem}.html"].text

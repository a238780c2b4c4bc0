"""Links of Markdown pages that leave docs/: to a page that says the same, or to the file itself.

On a code host they lead to files and folders of the repository, which the site does not have.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index",
    "CONTRIBUTING.md": "extend",
    "CHANGELOG.md": "changelog",
    "configs": "recipes/index",
    "configs/ablation": "recipes/grids",
    "configs/detection": "recipes/index",
    "configs/sdgp": "recipes/index",
    "docs": "index",
    "docs/results": "results/README",
    "examples": "integrations",
    "fst": "api/index",
    "fst/strategies": "strategies/index",
    "kernels": "kernels",
}
RESULTS = "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"


class RepositoryLinks(SphinxTransform):
    """Resolves each such link, from its page or, in an included file, from the root."""

    default_priority = 10

    def apply(self, **kwargs: object) -> None:
        """Called by Sphinx for each document."""
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node.get("reftype") == "myst" and node.get("refdomain") in (None, "", "doc"):
                self._resolve(node)

    def _resolve(self, node: addnodes.pending_xref) -> None:
        name = node["reftarget"].partition("#")[0]
        here = Path(self.env.doc2path(self.env.docname)).parent
        for start in (here, ROOT):
            path = (start / name).resolve()
            target = path if path.exists() else path.with_name(path.name + ".md")
            if not target.is_relative_to(ROOT) or not target.exists():
                continue
            inside = target.relative_to(ROOT).as_posix()
            page = PAGES.get(inside) or self._page_of_folder(inside, target)
            if page:
                node["refdomain"], node["reftarget"] = "doc", page
                node.setdefault("reftargetid", None)
            elif start is ROOT and target.is_file():
                self._offer_file(node, target)
            return

    def _page_of_folder(self, inside: str, target: Path) -> str:
        package = inside.removeprefix("fst/")
        if target.is_dir() and f"api/{package}" in self.env.found_docs:
            return f"api/{package}"
        return ""

    def _offer_file(self, node: addnodes.pending_xref, file: Path) -> None:
        path = os.path.relpath(file, self.env.srcdir)
        download = addnodes.download_reference("", "", *node.children, reftarget=f"/{path}")
        node.replace_self(download)


def _list_results(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname == "results/README":
        source[0] += RESULTS


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_transform(RepositoryLinks)
    app.connect("source-read", _list_results)
    return {"parallel_read_safe": True}

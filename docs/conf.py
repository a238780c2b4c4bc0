"""Sphinx builds the site with this: `make docs`, then build/docs/index.html."""

import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent)]
os.environ["PYTHONPATH"] = str(DOCS.parent)  # of the notebooks' kernels

import fst  # noqa: E402

project = "FST"
author = copyright = "The FST maintainers"
version = release = fst.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "docstrings",
    "generated_pages",
    "repository_links",
]
exclude_patterns = ["_ext"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

default_role = "py:obj"
nitpicky = True
# Documented elsewhere, and nothing is fetched while the site is built.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|torchvision|nn|timm|mmengine|mmdet|lightning|accelerate|numpy|np|onnx|PIL)(\..*)?",
    ),
    (r"py:.*", r"(Tensor|Path|Any|Callable|Iterable|Iterator|Mapping|Sequence)"),
    (r"py:.*", r"(collections|pathlib|os|types|typing|argparse|weakref|zipfile)\..*"),
    (r"py:.*", r"fst\.(ops|basics)\..*|.*\._\w+"),
]
nitpick_ignore = [
    ("py:class", "fst.strategies.registry.Recipe"),  # aliases and type variables
    ("py:class", "Axis"),
    ("py:class", "Outputs"),
    ("py:class", "Inputs"),
    ("py:class", "Candidate"),
    ("py:class", "Geometry"),
    ("py:class", "Candidates"),
    ("py:class", "fst.backends.timing.Samples"),
    ("py:class", "fst.backends.choice.Operands"),
    ("py:class", "Records"),
    ("py:class", "Times"),
    ("py:class", "CallPlan"),
]
suppress_warnings = ["myst.header"]  # reports of commands begin their tables at the third level
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
toc_object_entries = False  # the sidebar of every page would be made of them
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]

html_theme = "furo"
html_title = f"FST {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

"""The description of the package is the same everywhere: version, Pythons, extras, issue forms."""

import ast
import builtins
import configparser
import contextlib
import importlib
import re
import runpy
from pathlib import Path

import pytest
import yaml

import fst

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MADE = {"fst/.mim/configs/configs"}  # by an installation


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def requirements(text: str) -> list[str]:
    return re.findall(r"^([\w-]+)", text.strip(), re.MULTILINE)


def test_the_version_has_one_place(setup):
    assert setup["metadata"]["version"] == "attr: fst.basics.version.__version__"
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == fst.__version__


def test_pythons_are_the_same_everywhere(setup):
    named = re.findall(r"Python :: 3\.(\d+)", setup["metadata"]["classifiers"])
    first, last = named[0], named[-1]
    assert setup["options"]["python_requires"] == f">=3.{first}"
    for file in ("README.md", "CONTRIBUTING.md", "Makefile"):
        assert f"Python 3.{first}-3.{last}" in (ROOT / file).read_text(), file
    assert f"(3, {first}) <= v[:2] <= (3, {last})" in (ROOT / "Makefile").read_text()
    assert f'target-version = "py3{first}"' in (ROOT / "pyproject.toml").read_text()


def test_the_readme_s_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert not [target for target in targets if not (ROOT / target).exists()]


def test_names_in_the_documentation_can_be_reached():
    """As written: ``fst.convert`` is the function, which hides the module of that name."""
    named = set()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        named |= set(re.findall(r"`(fst(?:\.[A-Za-z_]\w*)+)", page.read_text(encoding="utf-8")))
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "fst").rglob("*.py")
    }
    missing = []
    for name in named - modules:
        found, path = fst, "fst"
        for part in name.split(".")[1:]:
            path = f"{path}.{part}"
            if not hasattr(found, part):
                with contextlib.suppress(ModuleNotFoundError):
                    importlib.import_module(path)
            found = getattr(found, part, None)
        if found is None:
            missing.append(name)
    assert not missing


def test_files_in_the_documentation_exist():
    missing = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = re.sub(r"```.*?```|https?://\S+", "", page.read_text(), flags=re.DOTALL)
        named = re.findall(r"\b(?:fst|tests|kernels|benchmarks|examples|tools)/[\w./]*[\w/]", text)
        named = {path for path in named if not re.search("[A-Z]{4}", path)}  # such as SCRIPT.py
        missing += [path for path in named - MADE if not (ROOT / path).exists()]
    assert not missing


def test_every_requirement_is_pinned(setup):
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    wanted = setup["options"]["install_requires"]
    wanted += "".join(setup["options.extras_require"].values())
    assert {name.lower() for name in requirements(wanted)} - {"fst-train"} <= pinned


def test_types_are_shipped(setup):
    assert (ROOT / "fst" / "py.typed").is_file()
    assert "py.typed" in setup["options.package_data"]["fst"]
    for path in setup["mypy"]["files"].split(", "):
        assert list(ROOT.glob(path)), path


def test_issue_forms_ask_for_the_environment():
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(file.read_text())
        if file.stem != "config":
            assert form["name"] and form["body"]
    assert "fst env" in (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()


def test_docstrings_begin_with_a_verb_or_a_noun():
    vague = re.compile(r"(What|Whether|How|Where|Within)\b")
    found = []
    for folder in ("fst", "kernels", "benchmarks", "configs", "examples", "tools", "docs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, DOCUMENTED) and vague.match(ast.get_docstring(node) or ""):
                    found.append(f"{path.relative_to(ROOT)}: {ast.get_docstring(node):.60}")
    assert not found


def test_documented_errors_are_python_s():
    """Of the packages that the site documents: it links each error, and knows no other."""
    unknown = []
    for folder in ("api", "baselines", "files", "integrations", "rules", "strategies"):
        for path in sorted((ROOT / "fst" / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, DOCUMENTED):
                    raised = (ast.get_docstring(node) or "").partition("Raises:\n")[2]
                    named = re.findall(r"^    (\w+):", raised, re.MULTILINE)
                    unknown += [(path.name, x) for x in named if not hasattr(builtins, x)]
    assert not unknown


def test_figures_are_those_of_their_script():
    figures = runpy.run_path(str(ROOT / "docs" / "images" / "zeros.py"))["FIGURES"]
    for name, draw in figures.items():
        assert (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") == str(draw()), name

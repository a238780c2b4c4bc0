"""The command `fst`: its subcommands, what it says about mistakes, and the scripts in tools/."""

import argparse
import importlib.util
import os
import pkgutil
import re
import signal
import subprocess
import sys
import time
import warnings
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fst
from fst.basics.extras import EXTRA_OF, how_to_get
from fst.cli import commands as cli
from fst.cli.checks import described
from fst.cli.options.parsing import add_cfg_options
from fst.cli.options.paths import config_path, packaged_configs
from fst.training.engine.config import load_config
from tests.programs import ROOT, python

SCRIPTS = sorted((ROOT / "tools").glob("*.py"))


def stopped(argv: list[str]) -> int:
    """The exit status of a command that does not return."""
    with pytest.raises(SystemExit) as found:
        cli.main(argv)
    return found.value.code


def test_help_lists_every_command(capsys):
    assert cli.main([]) == 0
    listed = capsys.readouterr().out
    assert stopped(["--help"]) == 0 and capsys.readouterr().out == listed
    for name, command in cli.COMMANDS.items():
        assert re.search(rf"^{name} +{re.escape(command.summary)}$", listed, re.MULTILINE)
    assert stopped(["--version"]) == 0
    assert capsys.readouterr().out == f"fst-train {fst.__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_under_its_name(name, capsys):
    assert stopped([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: fst {name} ")


def test_help_imports_nothing_that_takes_long():
    """Of any command and sub-command, in a process in which no other package can be imported."""
    below = [["configs", name] for name in ("list", "show", "copy")]
    code = (
        "import sys\n"
        "for name in 'torch numpy mmengine mmcv mmdet timm matplotlib cv2 rich'.split():\n"
        "    sys.modules[name] = None\n"
        "import fst.cli.commands as cli\n"
        f"for words in {[[], *([name] for name in cli.COMMANDS), *below]}:\n"
        "    try: cli.main([*words, '--help'])\n"
        "    except SystemExit as stop: assert stop.code == 0, words\n"
    )
    assert python("-c", code).stdout.count("usage: fst ") == 1 + len(cli.COMMANDS) + len(below)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_are_the_commands(script):
    text = script.read_text()
    (name,) = re.findall(r'main\(\["(\w+)", \*sys.argv\[1:\]\]\)', text)
    assert name in cli.COMMANDS and len(text.splitlines()) <= 8
    assert name == {"benchmark": "bench"}.get(script.stem, script.stem)


@pytest.mark.system
def test_a_command_runs_as_a_module_and_as_a_script():
    for start in (["-m", "fst", "verify"], ["tools/verify.py"]):
        done = python(*start, "absent.pth", status=2)
        assert done.stderr.startswith("error: checkpoint 'absent.pth' does not exist")


MISTAKE = """
import sys
from fst.cli.commands import main
try:
    main(["train", "fst::configs/demo_digits.py", "--cfg-options", "traincfg.x=3"])
finally:
    assert "torch" not in sys.modules
"""


def test_a_mistake_in_a_config_comes_before_the_imports_of_a_training():
    done = python("-c", MISTAKE, status=2)
    assert done.stderr.startswith("error: --cfg-options traincfg.x: 'traincfg' is no configuration")


def test_an_unknown_command_is_corrected(capsys):
    assert stopped(["tarin"]) == 2
    assert "'tarin' is no command. Did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "package"), [("train", "mmengine"), ("ablate", "msgspec")])
def test_a_missing_extra_is_named(command, package, monkeypatch, capsys):
    for name in [m for m in sys.modules if m.startswith(("fst.training.engine", "fst.lab"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in {"engine", "lab"} & vars(fst).keys():  # the packages themselves come back too
        monkeypatch.setattr(fst, name, getattr(fst, name))
    for name in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    # Python says "import of X halted; None in sys.modules" and gives the name, as for a missing one
    assert stopped([command, "fst::configs/demo_digits.py"]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        rf"error: {package}[\w.]* is not installed: pip install 'fst-train\[train\]'\n", said
    )


@pytest.mark.system
def test_importing_the_engine_names_the_extra():
    code = "import sys; sys.modules['numpy'] = None; import fst.training.engine"
    done = python("-c", code, status=1)
    last = done.stderr.strip().splitlines()[-1]
    assert "numpy" in last and last.endswith("pip install 'fst-train[train]'")


def test_every_requirement_of_an_extra_is_known():
    """The table of packages is that of setup.cfg."""
    packages: dict[str, list[str]] = {}
    for package, distributions in packages_distributions().items():
        for distribution in distributions:
            packages.setdefault(distribution.lower(), []).append(package)
    for line in requires("fst-train"):
        requirement = Requirement(line)
        (extra,) = re.findall(r'extra == "(\w+)"', line) or [None]
        if extra in (None, "dev") or requirement.name == "fst-train":
            continue
        names = packages.get(requirement.name.lower(), [])
        assert not names or any(EXTRA_OF.get(name) == extra for name in names), line
    assert how_to_get("mmdet.apis") == "pip install 'fst-train[det]'" and how_to_get("os") == ""


def test_env_says_what_a_bug_report_needs(capsys, monkeypatch):
    monkeypatch.setitem(EXTRA_OF, "absent", "export")
    assert cli.main(["env"]) == 0
    said = capsys.readouterr().out
    for part in ("torch ", "python ", "machine ", "prune_weight", str(ROOT), fst.__version__):
        assert part in said
    assert re.search(r"^absent +missing: pip install 'fst-train\[export\]'$", said, re.MULTILINE)
    for package in EXTRA_OF:
        if package in ("accelerate", "onnx", "safetensors", "timm"):
            there = importlib.util.find_spec(package) is not None
            assert bool(re.search(rf"^{package} +\d", said, re.MULTILINE)) == there


def test_strategies_are_listed_with_what_they_prune_and_their_papers(capsys):
    assert cli.main(["strategies"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if not line.startswith(" ")] == fst.list_strategies()
    assert all(described(name).prunes and described(name).idea for name in fst.list_strategies())
    srste = described("srste")
    assert srste.prunes.startswith("Y = S(W)·X, dX = S(W)ᵀ·dY")
    assert srste.source.startswith("Zhou et al.") and srste.source.endswith("ICLR 2021")
    assert described("dense").source == "" and described("asp").source.endswith("(2021)")
    at = said.index("srste")
    assert [line.strip() for line in said[at + 1 : at + 4]] == list(srste)


def test_configs_are_listed_and_copied(capsys, tmp_path):
    assert cli.main(["configs", "list", "*demo_*"]) == 0
    assert capsys.readouterr().out == "fst::configs/demo_digits.py\n"
    assert cli.main(["configs", "list"]) == 0
    assert capsys.readouterr().out.split() == packaged_configs()
    assert "fst::configs/ablation/digits_table3.yaml" in packaged_configs()
    assert not any("_base_" in name or "/settings/" in name for name in packaged_configs())
    target = tmp_path / "mine"
    assert cli.main(["configs", "copy", str(target)]) == 0
    of_checkout = {p.relative_to(ROOT / "configs") for p in (ROOT / "configs").rglob("*.py")}
    assert {path.relative_to(target) for path in target.rglob("*.py")} == of_checkout
    assert stopped(["configs", "copy", str(target)]) == 2
    assert stopped(["configs", "list", "*.txt"]) == 2
    said = capsys.readouterr().err
    assert "exists; name a folder that does not" in said and "pattern='*.txt'" in said


def test_a_config_is_shown_with_what_it_inherits(capsys, tmp_path):
    """What is printed is a config: it trains as the other does, and shows itself again."""
    options = ["--cfg-options", "train_cfg.max_epochs=3"]
    assert cli.main(["configs", "show", "fst::configs/demo_digits.py", *options]) == 0
    said = capsys.readouterr().out
    (tmp_path / "own.py").write_text(said)
    shown = load_config(str(tmp_path / "own.py"))
    changed = {"train_cfg.max_epochs": 3}
    assert shown.to_dict() == load_config("fst::configs/demo_digits.py", changed).to_dict()
    assert shown.train_cfg.max_epochs == 3 and shown.default_hooks  # of its own, and inherited
    assert cli.main(["configs", "show", str(tmp_path / "own.py")]) == 0
    assert capsys.readouterr().out == said
    assert stopped(["configs", "show", "fst::configs/demo_digit.py"]) == 2
    assert "Did you mean 'fst::configs/demo_digits.py'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("SRSTE", "SRSTE"),
        ("sampled,keep=0.25", "sampled,keep=0.25"),
        ("fst,block=(2, 1),phase=random", "fst,block=(2, 1),phase=random"),
        ("a,b", ["a", "b"]),
        ("[a,b=1]", ["a", "b=1"]),
        ("1,2", [1, 2]),
        ("(1,2)", (1, 2)),
        ("true", True),
        ("None", None),
        ("1e-3", 0.001),
        ("-inf", -float("inf")),
        (r"layer\.(1|2)", r"layer\.(1|2)"),
        ("data/2026-11-28/1", "data/2026-11-28/1"),
        ("", ""),
    ],
)
def test_values_of_options(text, value):
    parser = argparse.ArgumentParser()
    add_cfg_options(parser)
    found = parser.parse_args(["--cfg-options", "x=1", f"sparsity.strategy={text}"]).cfg_options
    assert found == {"x": 1, "sparsity.strategy": value}


def test_a_list_of_dicts_is_said_how_to_write(capsys):
    parser = argparse.ArgumentParser()
    add_cfg_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--cfg-options", "a.b=[dict(type='Resize',size=16)]"])
    assert "write a list of dicts as [{'type': 'Resize', 'size': 16}]" in capsys.readouterr().err
    found = parser.parse_args(["--cfg-options", "a.b=[{'type': 'Resize', 'size': 16}]"])
    assert found.cfg_options == {"a.b": [{"type": "Resize", "size": 16}]}


@pytest.mark.system
def test_output_that_nobody_reads_ends_a_command_silently():
    command = [sys.executable, "-m", "fst", "configs", "list"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_names_of_packaged_configs():
    file = Path(config_path("fst::configs/demo_digits.py"))
    assert file.samefile(ROOT / "configs" / "demo_digits.py")
    assert config_path("fst::configs/demo_digits") == str(file)
    assert config_path("elsewhere/a.py") == "elsewhere/a.py"
    with pytest.raises(FileNotFoundError, match="Did you mean 'fst::configs/demo_digits.py'"):
        config_path("fst::configs/demo_digit")


def test_every_command_imports():
    for command in cli.COMMANDS.values():
        assert callable(pkgutil.resolve_name(command.run))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "absent.py"], "config 'absent.py' does not exist or is no file."),
        (["test", "absent.py", "absent.pth"], "config 'absent.py' does not exist"),
        (
            ["fold", "fst::configs/demo_digits.py", "absent.pth", "o"],
            "checkpoint 'absent.pth' does",
        ),
        (
            ["export", str(ROOT), "absent.pth", "m.onnx"],
            f"config {str(ROOT)!r} does not exist or is",
        ),
        (["verify", "absent.onnx"], "checkpoint 'absent.onnx' does not exist or is no file."),
        (["ablate", "absent.yaml"], "grid 'absent.yaml' does not exist"),
        (["ablate", "fst::configs/ablation/absent"], "'fst::configs/ablation/absent' is no config"),
        (["bench", "--model", "absent.py"], "config 'absent.py' does not exist"),
        (["configs", "show", "absent.py"], "config 'absent.py' does not exist"),
        (
            ["train", "fst::configs/demo_digits", "--resume", "absent.pth"],
            "checkpoint 'absent.pth'",
        ),
        (
            ["fold", "README.md", "README.md", "absent/o.pth"],
            "the folder of OUT=",
        ),
        (["export", "README.md", "README.md", "README.md"], "OUT='README.md' is the checkpoint"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_wrong_path_is_said_before_the_imports_that_take_long(arguments, said, tmp_path):
    late = {"mmengine", "timm", "onnx"}
    if arguments[0] != "bench":  # its --model may be a name, which torchvision knows
        late.add("torch")
    code = (
        "import sys, fst.cli.commands as cli\n"
        f"try: cli.main({arguments!r})\n"
        f"finally: print(*({late!r} & set(sys.modules)))"
    )
    done = python("-c", code, status=2)
    assert done.stderr.startswith(f"error: {said}")
    assert not done.stdout.split()


@pytest.mark.system
@pytest.mark.parametrize("start", ["-m fst train", "tools/train.py", "tools/ablate.py"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_ends_a_command_in_one_line(start, number, tmp_path):
    """Before any work: also where a library that is imported catches every exception."""
    config = "ablation/digits_table1.yaml" if "ablate" in start else "demo_digits.py"
    command = [*start.split(), f"fst::configs/{config}", "--work-dir", str(tmp_path / "run")]
    for moment in (0.6, 0.9, 1.2):
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # pytest may run in the background of a shell, where SIGINT is ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        time.sleep(moment)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
        assert (process.returncode, said.count("\n")) == (128 + number, 1), said
        assert said.startswith("stopped")


def _noisy(_: argparse.Namespace) -> int:
    """A command in which libraries warn as they do in FST's own."""
    for text in cli.NOISE:
        warnings.warn(text.replace("\\", ""), stacklevel=1)
    warnings.warn("of use too", stacklevel=1)
    return 0


def test_a_command_line_is_parsed_once(monkeypatch):
    parsed, parse = [], argparse.ArgumentParser.parse_args

    def noted(parser, *words):
        parsed.append(parser.prog)
        return parse(parser, *words)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", noted)
    assert cli.main(["env"]) == 0 and parsed == ["fst env"]


def test_a_command_leaves_out_the_noise_of_libraries(monkeypatch):
    noisy = cli.Command(f"{__name__}:_noisy", "says much", argparse.ArgumentParser)
    monkeypatch.setitem(cli.COMMANDS, "noisy", noisy)
    with pytest.warns(UserWarning) as caught:
        assert cli.main(["noisy"]) == 0
    assert [str(warning.message) for warning in caught] == ["of use too"]

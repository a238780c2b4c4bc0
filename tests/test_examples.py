"""The examples run as a reader would run them."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from fst.inference.report import NOTHING_GAINED
from tests.programs import ROOT, python

pytestmark = pytest.mark.system


def run(*words: object, **options: Any) -> str:
    """What Python prints with these arguments."""
    return python(*words, **options).stdout


def test_the_readme_prints_its_lines(tmp_path: Path) -> None:
    for library in ("torchvision", "onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library)
    found = re.search(
        r"```python\n(.*?)```.*?```\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    assert found
    code, shown = found.groups()
    printed = run("-c", code, folder=tmp_path)
    for line in shown.splitlines():
        expected = ".*".join(map(re.escape, line.split("...")))
        if line.startswith("packed"):  # where a busy machine measures no gain, the report says so
            expected = f"(?:{expected}|by zeros: {NOTHING_GAINED})"
        assert re.search(f"^{expected}", printed, re.MULTILINE), line


def test_a_rule_outside_the_package_trains_by_a_config(tmp_path: Path) -> None:
    """The first two blocks of CONTRIBUTING.md are the module and the config."""
    pytest.importorskip("mmengine")
    module, config = re.findall(
        r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S
    )[:2]
    (tmp_path / "my_rules.py").write_text(module)
    (tmp_path / "mine.py").write_text(config)
    quick = ("train_cfg.max_epochs=1", "train_dataloader.dataset.subset=128")
    command = ("-m", "fst", "train", "mine.py", "--cfg-options", *quick)
    printed = run(*command, folder=tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert "every_other [output: EveryOther(" in printed
    assert (tmp_path / "work_dirs" / "mine" / "epoch_1.pth").is_file()


def test_a_network_trains_folds_verifies_exports_and_packs(tmp_path: Path) -> None:
    """The commands of docs/deploy.md."""
    for library in ("mmengine", "onnx", "onnxscript"):
        pytest.importorskip(library)
    found = re.search(
        r"```bash\n(fst train fst::.*?)```", (ROOT / "docs/deploy.md").read_text(), re.S
    )
    assert found
    for line in found.group(1).splitlines():
        words = line.split()[1:]
        printed = run("-m", "fst", *words, folder=tmp_path)
        if words[0] == "verify":
            assert "weights are 2:4" in printed
    assert (tmp_path / "model.onnx").is_file() and (tmp_path / "packed.pt").is_file()


@pytest.mark.parametrize("strategy", ["fst", pytest.param("dense", marks=pytest.mark.exhaustive)])
def test_own_loop_learns_and_folds(strategy: str) -> None:
    printed = run("examples/own_loop.py", "--strategy", strategy, "--epochs", "3")
    trained = float(re.findall(r"test accuracy ([\d.]+)", printed)[-1])
    folded = float(re.search(r"folded: ([\d.]+)", printed).group(1))
    assert trained > 90
    assert folded == pytest.approx(trained, abs=0.5)


@pytest.mark.parametrize("strategy", ["rigl", "asfp", "prunetrain"])
def test_own_loop_tells_schedules_what_they_need(strategy, monkeypatch, capsys) -> None:
    arguments = ["own_loop.py", "--strategy", strategy, "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(ROOT / "examples" / "own_loop.py"), run_name="__main__")
    assert "folded: " in capsys.readouterr().out


def test_demo_writes_its_table_and_curves(tmp_path: Path) -> None:
    options = ["--epochs", "3", "--seeds", "0", "--repeats", "1", "--strategies", "fst", "sdgp"]
    run("tools/demo.py", *options, "--out", tmp_path)
    rows = {}
    for line in (tmp_path / "table.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0]] = cells[1:]
    assert rows["fst"][2:] == ["99.9 %", "weight 50 %", "weight 50 %", "input 50 %"]
    assert rows["sdgp"][2:] == ["nothing", "dense", "grad_output 50 %", "dense"]
    assert float(rows["fst"][0]) > 40
    assert 0.2 < float(re.match(r"([\d.]+) x \(", rows["fst"][1])[1]) < 5
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("start", "options"),
    [
        (["timm_loop.py"], ["--epochs", "2"]),
        pytest.param(
            ["timm_loop.py"], ["--epochs", "2", "--strategy", "dpf"], marks=pytest.mark.exhaustive
        ),
        (["torchvision_loop.py"], ["--epochs", "3"]),
        (["accelerate_loop.py"], ["--out", "saved"]),
        (["lightning_module.py"], ["--out", "saved"]),
        pytest.param(
            ["lightning_module.py"],
            ["--out", "saved", "--ranks", "2", "--epochs", "3"],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            + ["accelerate_loop.py"],
            ["--out", "saved", "--epochs", "3"],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids="timm timm-dpf torchvision accelerate lightning lightning-2 accelerate-2".split(),
)
@pytest.mark.slow
def test_loops_of_other_libraries(start: list[str], options: list[str], tmp_path: Path) -> None:
    """A short training in each library's own loop; --ranks 2 and torchrun: two processes, gloo."""
    library = re.match(r"[a-z]+", start[-1])[0]
    pytest.importorskip(library)
    script = ROOT / "examples" / start[-1]
    printed = run(*start[:-1], script, "--epochs", "1", *options, folder=tmp_path)
    assert float(re.search(r"folded: ([\d.]+)", printed)[1]) > 10
    assert "weights are 2:4" in printed or "not 2:4" in printed

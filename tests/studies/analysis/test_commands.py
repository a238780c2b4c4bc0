"""Every subcommand of tools/analyze.py from end to end, on tiny data."""

import argparse
import json

import pytest

pytest.importorskip("mmengine")
pytest.importorskip("matplotlib")

import torch
from timm import create_model

import fst
from fst.engine import cli
from fst.studies.analysis import overhead
from fst.studies.analysis.cli import COMMANDS, main
from fst.studies.analysis.macs import count_macs
from fst.studies.analysis.subject import from_config, from_name, images_of
from fst.studies.benchmark.run import from_config as bench_config
from fst.studies.benchmark.steps import contestants
from fst.studies.reporting.document import load_document
from tests.studies.analysis.conftest import analysed_net
from tests.studies.analysis.test_figures import REPORT

ON_DATA = {
    "entropy": ["--batches", "2", "--levels", "16", "--per", "batch"],
    "similarity": [],
    "overhead": ["--repeats", "2"],
    "gradients": ["--dtype", "bfloat16", "--show", "2"],
    "saliency": ["--strategies", "sdgp", "dy,axis=position", "--batches", "2"],
    "macs": ["--strategy", "fst"],
    "plan": ["--budget", "0.6", "--batches", "2"],
}
FIGURES = {"saliency": 4, "plan": 0}


def check(folder, figures=1):
    """The folder's document, after a look at every file."""
    document = load_document(folder)
    assert len(document.figures) == figures and document.tables
    page = (folder / "analysis.md").read_text()
    assert document.command in page and document.versions["torch"] == torch.__version__
    for figure in document.figures:
        svg = (folder / figure.file).read_text()
        assert "<svg" in svg and figure.file.removesuffix("svg") + "png" in page
        png = (folder / figure.file).with_suffix(".png").read_bytes()
        assert png.startswith(b"\x89PNG") and 2_000 < len(png) < 500_000
    for table in document.tables:
        assert table.title in page
        assert all(column.replace("|", r"\|") in page for column in table.columns)
        assert all(len(row) == len(table.columns) for row in table.rows) and table.rows
    return document


@pytest.mark.parametrize("command", ON_DATA)
def test_on_a_config(command, write_config, tmp_path, capsys):
    out = tmp_path / "deep" / "out"
    arguments = [command, write_config("fst"), "--batch-size", "8", *ON_DATA[command]]
    assert main([*arguments, "--out", str(out)]) == 0
    document = check(out, figures=FIGURES.get(command, 1))
    assert document.command.startswith(f"fst analyze {command} ")
    assert str(out / "analysis.json") in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_overhead_is_timed_in_the_dtype_of_the_step(dtype, write_config, tmp_path, monkeypatch):
    seen = set()

    def gradient(grad_output, *_):
        seen.add(("grad_output", grad_output.dtype))

    def weight(weight, strategy, groups, cast):
        seen.add(("weight", cast))

    def fold(grad_output, kept):
        seen.add(("shift", grad_output.dtype))

    monkeypatch.setattr(overhead, "prune_grad_output", gradient)
    monkeypatch.setattr(overhead, "prune_weight", weight)
    monkeypatch.setattr(overhead.positions, "fold_grad_output", fold)
    arguments = ["--batch-size", "4", "--repeats", "1", "--dtype", dtype, "--out", str(tmp_path)]
    main(["overhead", write_config(), *arguments])
    wanted = getattr(torch, dtype)
    assert seen == {(operand, wanted) for operand in ("grad_output", "weight", "shift")}


@pytest.mark.parametrize("command", ["macs", "overhead"])
def test_on_a_named_model(command, tmp_path):
    extra = ["--repeats", "1"] if command == "overhead" else []
    arguments = ["--model", "fst:resnet9", "--size", "16", "--batch-size", "2", "--classes", "10"]
    main([command, *arguments, *extra, "--out", str(tmp_path)])
    check(tmp_path)


def test_coverage_of_named_models(tmp_path):
    names = ["timm:test_efficientnet", "fst:resnet9"]
    main(["coverage", "--models", *names, "--size", "32", "--out", str(tmp_path)])
    default, _, everything, left = check(tmp_path, figures=0).tables
    model = create_model("test_efficientnet")
    report = fst.convert(model, "fst")
    cells = [names[0], len(report.layers), f"{report.coverage:.1%}"]
    assert [default.rows[0][i] for i in (0, 1, 4)] == cells
    assert [row[3] for row in default.rows] == [1, 1] and default.rows[0][2] > 0
    assert [row[3] for row in everything.rows] == [0, 0]
    assert left.rows and all(row[1] >= 1 for row in left.rows)


def test_macs_of_a_config_without_data(write_config, tmp_path):
    options = ["train_dataloader.dataset.split=nowhere"]
    main(
        ["macs", write_config(), "--random-images", "--size", "8", "--out", str(tmp_path)]
        + ["--strategy", "sdgp", "--cfg-options", *options]
    )
    overview, *_ = check(tmp_path).tables
    row = dict(zip(overview.columns, overview.rows[0], strict=True))
    assert row["batch"] == "1x1x8x8"
    assert "->" not in row["output"] and row["grad_input"].endswith(": 100.0% -> 50.0%")


PLAN = {"2": {"rule": "sampled", "min_size": 0}, "6": None}


def test_a_plan_is_that_of_the_config_s_own_strategy(write_config, tmp_path):
    """Not that of other strategies, nor of what is exact, nor of what is timed in turns."""
    config = write_config("dense", plan=PLAN)
    options = [config, "--random-images", "--size", "8", "--strategies", "dense", "fst_w"]
    main(["macs", *options, "--out", str(tmp_path / "macs")])
    overview, *_ = load_document(tmp_path / "macs").tables
    cells = [row[overview.columns.index("grad_weight")] for row in overview.rows]
    model, image = analysed_net(), torch.randn(1, 1, 8, 8)
    fst.convert(model, "dense", plan=PLAN)
    share = count_macs(model, lambda: model(image).sum().backward()).total("grad_weight").share_left
    assert share < 1 and cells[0].endswith(f"-> {share:.1%}") and "->" not in cells[1]

    options = [config, "--batches", "1", "--batch-size", "4", "--strategies", "dense", "wx"]
    main(["saliency", *options, "--out", str(tmp_path / "saliency")])
    per_layer = load_document(tmp_path / "saliency").tables[1]
    error = per_layer.columns.index("local grad_weight: relative error")
    errors = {(row[0], row[1]): row[error] for row in per_layer.rows}
    assert errors["dense", "2"] > 0.1 and errors["dense", "0"] == errors["dense", "6"] == 0
    assert errors["wx", "6"] > 0

    arguments = argparse.Namespace(
        config=config, batch=2, size=(8, 8), device="cpu", dtype="float32"
    )
    training, _ = bench_config(arguments)
    strategies = {name: fst.get_strategy(name) for name in ("dense", "sdgp")}
    for name, contestant in contestants(training, strategies).ready.items():
        for layer in fst.sparse_layers(contestant.model).values():
            assert layer.strategy == strategies[name]


def test_macs_of_several_configs_and_strategies(write_config, tmp_path):
    configs = [write_config("dense"), write_config("fst")]
    options = "--random-images --size 8 --all --strategies fst sdgp".split()
    main(["macs", *configs, *options, "--out", str(tmp_path)])
    overview, *others = check(tmp_path, figures=0).tables
    assert [row[2] for row in overview.rows] == ["fst", "sdgp"] * 2
    assert len([table for table in others if table.title.endswith("by module")]) == 4
    page = (tmp_path / "analysis.md").read_text()
    assert "GMAC: share in sparse GEMMs" in page and "converted only if included" not in page


def test_runtime(tmp_path):
    report = tmp_path / "benchmark.json"
    report.write_text(json.dumps(REPORT))
    main(["runtime", str(report), "--out", str(tmp_path / "out")])
    rows = check(tmp_path / "out").tables[1].rows
    assert rows[0][:5] == ["torch", 6.0, 4.0, 8.0, 18.0] and rows[1][4] == 9.0


def test_time_to_accuracy_of_runs(write_config, tmp_path):
    folders = []
    for strategy in ("dense", "sdgp"):
        folders.append(str(tmp_path / strategy))
        cli.train(
            [
                write_config(strategy),
                "--work-dir",
                folders[-1],
                "--cfg-options",
                "train_dataloader.num_workers=0",
                "train_dataloader.persistent_workers=False",
            ]
        )
    main(["time-to-accuracy", *folders, "--target", "0", "--out", str(tmp_path / "out")])
    first, second = check(tmp_path / "out").tables
    kinds = [(row[0], row[1]) for row in first.rows]
    assert kinds == [("dense", "measured"), ("sdgp", "measured"), ("sdgp", "projected")]
    assert first.rows[2][4] == pytest.approx(first.rows[1][4] * 5 / 6, rel=1e-3)
    assert second.rows[1] == ["sdgp", "sdgp", "grad_input", pytest.approx(5 / 6, abs=1e-3)]
    assert all(0 < row[5] < row[4] for row in first.rows)


def test_checkpoints_and_masks(write_config, tmp_path):
    """tsm keeps its masks in the checkpoint; the analysed copy has them."""
    path, work = write_config("tsm"), tmp_path / "run"
    options = {"train_dataloader.num_workers": 0, "train_dataloader.persistent_workers": False}
    cli.train(
        [path, "--work-dir", str(work), "--cfg-options", *(f"{k}={v}" for k, v in options.items())]
    )
    saved = torch.load(work / "epoch_3.pth", weights_only=False)
    subject = from_config(path, options, checkpoint=str(work / "epoch_3.pth"), batches=2)
    assert [len(images_of(batch)) for batch in subject.batches] == [32, 32]
    copied = subject.copied(subject.strategy).architecture
    for name, entry in saved["sparsity"].items():
        layer = copied.get_submodule(name)
        assert torch.equal(layer.output_mask(), entry["kept_mask"].view(layer.weight.shape))
        key = f"architecture.{name}.weight"
        assert torch.equal(layer.weight, saved["state_dict"][key])
    with pytest.raises(ValueError, match="does not fit the model"):
        other = {**options, "model.architecture.num_classes": 7}
        from_config(path, other, checkpoint=str(work / "epoch_3.pth"))


def test_help_and_bad_arguments(write_config, tmp_path, capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as done:
            main([name, "--help"])
        assert done.value.code == 0 and "--out" in capsys.readouterr().out
    config = write_config()
    bad = [
        (["entropy"], "either a config or --model"),
        (["entropy", config, "--model", "resnet18"], "not both"),
        (
            ["entropy", config, "--batches", "1", "--layers", "nothing*"],
            "'nothing*' matches no convolution",
        ),
        (["entropy", config, "--batches", "99"], "batches=99"),
        (["entropy", "missing.py"], "missing.py"),
        (["entropy", config, "--checkpoint", "missing.pth"], "missing.pth"),
        (["macs", "--model", "resnet81"], "resnet81"),
        (["macs", "--model", "resnet18", "--checkpoint", "x"], "--checkpoint needs a config"),
        (["macs", "--model", "resnet18", "--split", "val"], "--split needs a config"),
        (["macs", config, "--classes", "7"], "--classes needs --model"),
        (["macs", config, "--size", "99"], "--size needs --model or --random-images"),
        (["macs", config, "--random-images", "--split", "val"], "neither --checkpoint nor --split"),
        (["saliency", config, "--loss-scale", "0"], "'0' is not a positive number"),
        (["overhead", config, "--loss-scale", "nan"], "'nan' is not a positive number"),
        (["macs", config, "--strategy", "dy"], "no registered strategy"),
        (["coverage", "--models", "timm:resnet81"], "resnet81"),
        (["coverage", "--strategy", "fts"], "fst"),
        (["coverage", "--size", "0"], "--size"),
        (["saliency", config, "--strategies", "fts"], "fst"),
        (["gradients", config, "--show", "9"], "'9' is none of: 0, 2, 6"),
        (["gradients", config, "--group", "9"], "--group 9"),
        (["similarity", config, "--image", "99"], "--image 99"),
        (["similarity", config, "--show", "9"], "matches none of: 0, 2, 6"),
        (["runtime", str(tmp_path / "none.json")], "none.json"),
        (["time-to-accuracy", str(tmp_path)], "holds no run"),
        (["overhead", config, "--device", "quantum"], "quantum"),
        (["overhead", config, "--repeats", "0"], "0"),
    ]
    for arguments, message in bad:
        with pytest.raises(SystemExit) as done:
            main([*arguments, "--out", str(tmp_path / "out")])
        assert done.value.code == 2
        assert message in capsys.readouterr().err, arguments
    assert not (tmp_path / "out").exists()


def test_named_models():
    subject = from_name("timm:resnet18", classes=5, size=32, batch_size=2, batches=2)
    assert len(subject.batches) == 2 and images_of(subject.batches[0]).shape == (2, 3, 32, 32)
    assert subject.loss(subject.model, subject.batches[0]).dim() == 0

"""Every subcommand of tools/analyze.py from end to end, on tiny data."""

import pytest

pytest.importorskip("mmengine")
pytest.importorskip("matplotlib")

import torch

from fst.lab.analysis.cli import main
from fst.lab.reporting.document import load_document


def check(folder, figures=1):
    """The folder's document, after a look at every file."""
    document = load_document(folder)
    assert len(document.figures) == figures and document.tables
    page = (folder / "analysis.md").read_text()
    assert document.command in page and document.versions["torch"] == torch.__version__
    for figure in document.figures:
        assert figure.file in page
        png = (folder / figure.file).read_bytes()
        assert png.startswith(b"\x89PNG") and 2_000 < len(png) < 500_000
    for table in document.tables:
        assert table.title in page
        assert all(column.replace("|", r"\|") in page for column in table.columns)
        assert all(len(row) == len(table.columns) for row in table.rows) and table.rows
    return document


def test_on_a_config(write_config, tmp_path, capsys):
    out = tmp_path / "deep" / "out"
    arguments = ["macs", write_config("fst"), "--size", "8", "--strategy", "sdgp"]
    assert main([*arguments, "--out", str(out)]) == 0
    document = check(out)
    overview = document.tables[0]
    row = dict(zip(overview.columns, overview.rows[0], strict=True))
    assert row["batch"] == "1x1x8x8"
    assert "->" not in row["output"] and row["grad_input"].endswith(": 100.0% -> 50.0%")
    assert document.command.startswith("fst analyze macs ")
    assert str(out / "analysis.json") in capsys.readouterr().out


def test_on_a_named_model(tmp_path):
    arguments = ["--model", "fst:resnet9", "--size", "16", "--batch-size", "2"]
    main(["macs", *arguments, "--out", str(tmp_path)])
    overview, *_ = check(tmp_path).tables
    row = dict(zip(overview.columns, overview.rows[0], strict=True))
    assert row["batch"] == "2x3x16x16" and row["strategy"] == "dense"


def test_macs_are_those_of_each_config_s_strategy(write_config, tmp_path):
    configs = [write_config("dense"), write_config("sdgp")]
    main(["macs", *configs, "--size", "8", "--out", str(tmp_path)])
    overview, *_ = check(tmp_path, figures=0).tables
    assert [row[2] for row in overview.rows] == ["dense", "sdgp"]
    cells = [row[overview.columns.index("grad_input")] for row in overview.rows]
    assert "->" not in cells[0] and cells[1].endswith("-> 50.0%")


def test_macs_of_several_configs_and_strategies(write_config, tmp_path):
    configs = [write_config("dense"), write_config("fst")]
    options = "--size 8 --all --strategies fst sdgp".split()
    main(["macs", *configs, *options, "--out", str(tmp_path)])
    overview, *others = check(tmp_path, figures=0).tables
    assert [row[2] for row in overview.rows] == ["fst", "sdgp"] * 2
    assert len([table for table in others if table.title.endswith("by module")]) == 4
    page = (tmp_path / "analysis.md").read_text()
    assert "GMAC: share in sparse GEMMs" in page and "converted only if included" not in page


def test_help_and_bad_arguments(write_config, tmp_path, capsys):
    with pytest.raises(SystemExit) as done:
        main(["macs", "--help"])
    assert done.value.code == 0 and "--out" in capsys.readouterr().out
    config = write_config()
    bad = [
        (["macs"], "either a config or --model"),
        (["macs", config, "--model", "resnet18"], "not both"),
        (["macs", "missing.py"], "missing.py"),
        (["macs", config], "a classifier's config names no size"),
        (["macs", config, "--size", "1", "2", "3"], "not one number or two"),
        (["macs", "--model", "resnet81"], "resnet81"),
        (["macs", "--model", "resnet18", "--cfg-options", "a=1"], "--cfg-options needs a config"),
        (["macs", config, "--strategy", "dy"], "strategy='dy' is unknown"),
        (["macs", config, "--strategies", "fts"], "fst"),
    ]
    for arguments, message in bad:
        with pytest.raises(SystemExit) as done:
            main([*arguments, "--out", str(tmp_path / "out")])
        assert done.value.code == 2
        assert message in capsys.readouterr().err, arguments
    assert not (tmp_path / "out").exists()

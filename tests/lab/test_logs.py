"""Reading what a training logs: interruptions, broken last lines."""

import json

import pytest

from fst.lab.logs import read_run

CONFIG = "train_cfg = dict(by_epoch={by_epoch}, max_epochs=3)\n"


def write_log(folder, start, lines, by_epoch=True, tail=""):
    logs = folder / start / "vis_data"
    logs.mkdir(parents=True)
    (logs / "scalars.json").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    (logs / "config.py").write_text(CONFIG.format(by_epoch=by_epoch))


def train_line(epoch, iteration, loss):
    return {"loss": loss, "lr": 0.1, "epoch": epoch, "iter": iteration, "step": iteration}


def test_a_resumed_run_is_one_run(tmp_path):
    """The second start repeats epoch 2; the first was killed while it wrote a line."""
    first = [
        train_line(1, 2, 4.0),
        train_line(1, 4, 2.0),
        {"acc": 10.0, "time": 1.0, "data_time": 1.0, "step": 1},
        train_line(2, 6, 9.0),
        {"density/conv": 0.5, "step": 6},
    ]
    second = [
        train_line(2, 6, 1.0),
        train_line(2, 8, 3.0),
        {"acc": 20.0, "time": 1.0, "step": 2},
    ]
    write_log(tmp_path, "20260101_000000", first, tail='{"loss": 1')
    write_log(tmp_path, "20260102_000000", second)
    log = read_run(tmp_path)
    assert log.validation == {"acc": {1: 10.0, 2: 20.0}}
    assert log.training["loss"] == {1: 3.0, 2: 2.0}
    assert "density/conv" not in log.training
    assert log.x_label == "epoch"


def test_iterations_where_the_loop_counts_these(tmp_path):
    write_log(tmp_path, "1", [train_line(1, 50, 4.0), train_line(1, 100, 2.0)], by_epoch=False)
    log = read_run(tmp_path)
    assert log.training["loss"] == {50: 4.0, 100: 2.0}
    assert log.x_label == "iteration"


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    write_log(tmp_path, "1", [], tail='{"loss"\n{"step": 1, "loss": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        read_run(tmp_path)


def test_values_that_are_not_finite_are_left_out(tmp_path):
    write_log(tmp_path, "1", [train_line(1, 1, float("nan")), train_line(2, 2, 1.0)])
    assert read_run(tmp_path).training["loss"] == {2: 1.0}


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        read_run(tmp_path)

"""Runs that signals stop: nothing trains on, and they resume."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fst.basics.arguments import STOP_SIGNALS, signals_handled
from fst.lab.ablation import cli, guard
from fst.lab.ablation.folders import RunFolder

DENSE = {"sparsity": {"strategy": "dense"}}
SIGNALS = {
    "int": [signal.SIGINT],
    "term-twice": [signal.SIGTERM, signal.SIGTERM],
    "hup-term-int": [signal.SIGHUP, signal.SIGTERM, signal.SIGINT],
    "quit": [signal.SIGQUIT],
    "kill": [signal.SIGKILL],
}

ENDED = {  # exit status by the signal
    signal.SIGINT: 130,
    signal.SIGTERM: 143,
    signal.SIGHUP: 130,
    signal.SIGQUIT: -signal.SIGQUIT,
    signal.SIGKILL: -signal.SIGKILL,
}


@pytest.fixture
def start(tmp_path, stand_in):
    """Starts `fst ablate` with the stand-in in a copy of this process."""
    started = []

    def ablate_elsewhere(grid, *arguments):
        def run():
            sys.stdout = sys.stderr = open(tmp_path / "printed", "a", buffering=1)
            # ignored where the tests run in the background of a shell
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            load_grid = cli.load_grid

            def begun(path):
                (tmp_path / "begun").touch()
                return load_grid(path)

            cli.load_grid = begun
            options = [str(grid), "--work-dir", str(tmp_path / "work"), *arguments]
            sys.exit(cli.main(options, train=[str(stand_in)]))

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        started.append(process)
        return process

    yield ablate_elsewhere
    for process in started:
        process.kill()


def left_behind(folder, seconds=8.0):
    """Processes of trainings and of their guards that are still there after a while."""
    deadline = time.time() + seconds
    while time.time() < deadline:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().replace(b"\0", b" ").decode()
                found += [words] if str(folder / "work") in words else []
        if not found:
            break
        time.sleep(0.05)
    return found


def wait_for(path, seconds=60.0):
    deadline = time.time() + seconds
    while not path.exists():
        assert time.time() < deadline, f"{path} did not come"
        time.sleep(0.01)


@pytest.mark.parametrize("numbers", SIGNALS.values(), ids=SIGNALS)
def test_stopped_in_training_and_resumed(numbers, write_grid, ablate, start, tmp_path, calls):
    grid, work = write_grid(settings={"waits": DENSE}, seeds=[0]), tmp_path / "work"
    process = start(grid)
    wait_for(work / "waits" / "seed0" / "epoch_1.pth")
    with pytest.raises(RuntimeError, match="another process is training"):
        RunFolder.of(work, "waits", 0).lock()
    for number in numbers:
        os.kill(process.pid, number)
        time.sleep(0.02)
    process.join(60)
    ended_by = numbers[0] if numbers[0] in (signal.SIGQUIT, signal.SIGKILL) else None
    assert process.exitcode == ENDED[numbers[0]]
    printed = (tmp_path / "printed").read_text()
    lines = [line for line in printed.splitlines() if "goes on from here" in line]
    assert len(lines) == (ended_by is None) and "Traceback" not in printed
    assert left_behind(tmp_path) == []
    assert [call["argv"] for call in calls("waits")] == [[]]
    (tmp_path / "go").touch()
    assert ablate(grid) == 0
    assert [call["argv"] for call in calls("waits")] == [[], ["--resume"]]
    results = json.loads((work / "results.json").read_text())
    assert results["settings"]["waits"]["runs"]["0"]["state"] == "finished"


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(5, marks=pytest.mark.system),
        pytest.param(60, marks=[pytest.mark.exhaustive, pytest.mark.slow]),
    ],
)
def test_no_signal_at_any_moment_leaves_a_training_behind(times, write_grid, start, tmp_path):
    """Real signals, from the first look at the grid until trainings wait."""
    grid = write_grid(settings={"waits": DENSE, "wait2": DENSE}, seeds=[0, 1])
    moments = random.Random(0)
    for turn in range(times):
        name, numbers = list(SIGNALS.items())[turn % len(SIGNALS)]
        (tmp_path / "begun").unlink(missing_ok=True)
        process = start(grid, "--jobs", "2", "--rerun")
        wait_for(tmp_path / "begun")
        time.sleep(moments.uniform(0, 1.2))
        for number in numbers:
            os.kill(process.pid, number)
            time.sleep(moments.uniform(0, 0.05))
        process.join(60)
        # of signals that are pending together Python handles the lowest number first
        assert process.exitcode in {ENDED[number] for number in numbers}, name
        assert left_behind(tmp_path) == [], (name, turn)
    assert "Traceback" not in (tmp_path / "printed").read_text()


def test_a_guard_that_is_asked_to_end_ends_its_command(tmp_path):
    """And ends as the command does."""
    pipe, alive = os.pipe()
    with open(tmp_path / "lock", "w") as lock:
        fds = [pipe, lock.fileno()]
        command = [sys.executable, guard.__file__, *map(str, fds), "sleep", "60"]
        process = subprocess.Popen(command, pass_fds=fds)
        time.sleep(0.3)
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
        for text, status in (("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9)):
            code = [sys.executable, "-c", f"import os, sys; {text}"]
            process = subprocess.Popen([*command[:4], *code], pass_fds=fds)
            assert process.wait(20) == status
    os.close(pipe)
    os.close(alive)


def test_a_guard_ends_the_children_of_its_command_too(tmp_path):
    pipe, alive = os.pipe()
    text = f"sleep 60 & echo $! > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; wait"
    with open(tmp_path / "lock", "w") as lock:
        fds = [pipe, lock.fileno()]
        command = [sys.executable, guard.__file__, *map(str, fds), "sh", "-c", text]
        process = subprocess.Popen(command, pass_fds=fds)
        wait_for(tmp_path / "pid")
        os.close(alive)  # as if this process had ended
        assert process.wait(20) == -signal.SIGTERM
    child = Path("/proc", (tmp_path / "pid").read_text().strip(), "cmdline")
    deadline = time.time() + 10
    while child.exists() and child.read_bytes():  # a zombie has no command line
        assert time.time() < deadline
        time.sleep(0.05)
    os.close(pipe)


def test_signals_that_are_ignored_stay_ignored():
    """As under nohup."""
    before, seen = signal.signal(signal.SIGHUP, signal.SIG_IGN), []
    try:
        with signals_handled(STOP_SIGNALS, lambda number, _: seen.append(number)):
            for number in (signal.SIGHUP, signal.SIGTERM):
                os.kill(os.getpid(), number)
        assert seen == [signal.SIGTERM] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

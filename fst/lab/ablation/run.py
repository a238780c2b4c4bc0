"""The runs of a grid are trained, each in a process and a folder of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.markup import escape
from torch.backends.cpu import get_cpu_capability

from fst.basics.arguments import STOP_SIGNALS, raise_stop, signals_handled
from fst.cli.environment import commit, machine, versions
from fst.lab.ablation import guard
from fst.lab.ablation.configs import PlannedRun, write_config
from fst.lab.ablation.folders import LOG, RunFolder
from fst.lab.reporting.runs import is_run, read_run
from fst.training.engine.checkpoint import newest_checkpoint

POLL_SECONDS = 0.25
LOG_LINES = 15
TRAIN = ("-m", "fst", "train")


@dataclass(frozen=True)
class Failure:
    """A run that did not succeed, and why."""

    run: PlannedRun
    reason: str


class Process:
    """One training under a `guard`: it ends with this process, whatever ends this process.

    What it prints goes to log.txt in ``folder``. The training and its children hold ``lock``, the
    locked file of the folder.
    """

    def __init__(self, command: Sequence[str], folder: Path, threads: int, lock: IO[str]) -> None:
        watched, alive = os.pipe()
        self._alive: int | None = alive
        try:
            with open(folder / LOG, "a", encoding="utf-8") as log:
                self._popen = subprocess.Popen(
                    [sys.executable, guard.__file__, str(watched), str(lock.fileno()), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                    start_new_session=True,
                    pass_fds=[watched, lock.fileno()],
                )
        except BaseException:
            os.close(alive)
            raise
        finally:
            os.close(watched)

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        status = self._popen.poll()
        if status is not None:
            self._let_go()
        return status

    def stop(self) -> None:
        """End the process and its children."""
        self._let_go()
        self._popen.wait()

    def _let_go(self) -> None:
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None


@dataclass(frozen=True)
class _Started:
    run: PlannedRun
    folder: RunFolder
    lock: IO[str]
    job: Process
    attempts: int
    commits: list[str]
    start: float


class Trainer:
    """Training of runs, ``jobs`` at a time; finished ones are skipped, interrupted ones go on.

    ``train`` are the arguments of Python that start a training.
    """

    def __init__(
        self,
        work_dir: Path,
        train: Sequence[str],
        jobs: int,
        threads: int,
        metric: str,
        console: Console,
    ) -> None:
        self.work_dir, self.command, self.metric = work_dir, train, metric
        self.jobs, self.threads, self.console = jobs, threads, console
        self._waiting: list[PlannedRun] = []
        self._running: list[_Started] = []
        self._done: set[tuple[str, int]] = set()
        self._failures: dict[tuple[str, int], Failure] = {}

    def folder(self, run: PlannedRun) -> RunFolder:
        """Return the folder of a run."""
        return RunFolder.of(self.work_dir, run.setting, run.seed)

    def train(self, runs: Sequence[PlannedRun]) -> list[Failure]:
        """Train what is not finished; return what failed.

        An exception stops all trainings. A signal that asks this process to end (see
        `STOP_SIGNALS`) stops them too, at the next look, so that none is interrupted as it starts.

        Raises:
            KeyboardInterrupt: there was such a signal.
        """
        asked_to_stop: list[int] = []
        with signals_handled(STOP_SIGNALS, lambda number, _: asked_to_stop.append(number)):
            failures = self._train(runs, asked_to_stop)
        if asked_to_stop:
            raise_stop(asked_to_stop[0])
        return failures

    def _train(self, runs: Sequence[PlannedRun], asked_to_stop: Sequence[int]) -> list[Failure]:
        self._done = {_key(run) for run in runs if self.folder(run).state(run) == "finished"}
        self._waiting = [run for run in runs if _key(run) not in self._done]
        self._failures = {}
        try:
            while (self._waiting or self._running) and not asked_to_stop:
                self._start_ready()
                self._collect()
                if self._running:
                    time.sleep(POLL_SECONDS)
        finally:
            for started in self._running:
                started.job.stop()
                started.lock.close()
            self._running = []
        return list(self._failures.values())

    def _start_ready(self) -> None:
        """Start runs while a process is free; drop those whose source has failed."""
        for run in list(self._waiting):
            source = (run.start_from, run.seed) if run.start_from else None
            if source in self._failures:
                self._waiting.remove(run)
                self._fail(run, f"not started: {run.start_from!r}, which it needs, failed")
            elif len(self._running) < self.jobs and (source is None or source in self._done):
                self._waiting.remove(run)
                try:
                    self._running.append(self._begin(run))
                except (RuntimeError, ValueError) as error:
                    self._fail(run, str(error))

    def _begin(self, run: PlannedRun) -> _Started:
        folder = self.folder(run)
        folder.path.mkdir(parents=True, exist_ok=True)
        if run.start_from is not None:
            source = RunFolder.of(self.work_dir, run.start_from, run.seed)
            run.config.load_from = newest_checkpoint(source.path)
            if run.config.load_from is None:
                raise ValueError(f"{source.path} holds no checkpoint to start from.")
        command = [sys.executable, *self.command, str(folder.config)]
        command += ["--work-dir", str(folder.path)]
        # only where there is something to resume: --resume ignores load_from
        checkpoint = newest_checkpoint(folder.path)
        if checkpoint is not None:
            command.append("--resume")
        start = time.time()
        lock = folder.lock()
        try:
            write_config(run.config, folder.config)
            made = folder.read("run.json")
            attempts = made.get("attempts", 0) + 1
            commits = list(dict.fromkeys([*made.get("commits", []), *filter(None, [commit()])]))
            begun = {**_described(run), "attempts": attempts, "commits": commits}
            folder.write("run.json", begun)
            folder.log(f"$ {' '.join(command)}")
            job = Process(command, folder.path, self.threads, lock)
        except BaseException:
            lock.close()
            raise
        (folder.path / "failed.json").unlink(missing_ok=True)
        verb = f"goes on from {Path(checkpoint).name}" if checkpoint else "starts"
        left = f"{len(self._waiting)} more to start"
        self.console.print(f"{escape(_title(run))} {verb}, {left}", highlight=False)
        return _Started(run, folder, lock, job, attempts, commits, start)

    def _collect(self) -> None:
        """Record the trainings that have ended."""
        for started in list(self._running):
            status = started.job.poll()
            if status is None:
                continue
            self._running.remove(started)
            started.lock.close()
            run, folder = started.run, started.folder
            if status != 0:
                how = f"exit status {status}"
                if status < 0:
                    how = f"ended by {signal.Signals(-status).name}"
                self._fail(run, f"{how}\n{folder.log_tail(LOG_LINES)}")
                continue
            logged = sorted(read_run(folder.path).validation) if is_run(folder.path) else []
            if self.metric not in logged:
                self._fail(run, f"metric {self.metric!r} was not logged, only {logged}")
                continue
            seconds = time.time() - started.start
            of_run = {"commit": " and ".join(started.commits)} if started.commits else {}
            place = {"machine": machine(), "instruction set": get_cpu_capability()}
            made_with = {**versions(), **of_run, **place}
            finished = {**_described(run), "seconds": seconds, "versions": made_with}
            finished |= {"attempts": started.attempts, "threads": self.threads, "jobs": self.jobs}
            folder.write("finished.json", finished)
            self._done.add(_key(run))
            self.console.print(f"{escape(_title(run))} done in {seconds:.0f} s", highlight=False)

    def _fail(self, run: PlannedRun, reason: str) -> None:
        self._failures[_key(run)] = Failure(run, reason)
        self.console.print(f"[red]{escape(_title(run))} failed:[/] {escape(reason)}")
        folder = self.folder(run)
        if folder.path.is_dir():
            folder.write("failed.json", {**_described(run), "reason": reason})


def _key(run: PlannedRun) -> tuple[str, int]:
    return run.setting, run.seed


def _title(run: PlannedRun) -> str:
    return f"{run.setting}, seed {run.seed}"


def _described(run: PlannedRun) -> dict[str, Any]:
    return {
        "setting": run.setting,
        "seed": run.seed,
        "fingerprint": run.fingerprint,
        "length": run.length,
        "earlier": run.earlier,
    }

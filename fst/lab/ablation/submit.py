"""The runs of a grid as jobs, through submitit: of Slurm, or processes of this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fst.basics.extras import extra_named
from fst.engine.checkpoint import newest_checkpoint
from fst.lab.ablation.folders import LOG

# configured by submitit, logging would close the files that other loggers write
os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")
with extra_named():
    import submitit
    from submitit.helpers import DelayedSubmission

JOBS = "jobs"  # submitit's own files, in the folder of the run


@dataclass(frozen=True)
class Training:
    """What a job does. A job that is started a second time goes on from the newest checkpoint."""

    command: list[str]
    folder: Path
    threads: int

    def __call__(self) -> int:
        resume = ["--resume"] if newest_checkpoint(self.folder) else []
        command = self.command if "--resume" in self.command else self.command + resume
        with open(self.folder / LOG, "a", encoding="utf-8") as log:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
                check=False,
            ).returncode

    def checkpoint(self) -> DelayedSubmission:
        """What submitit starts again where the job was preempted or ran out of time."""
        return DelayedSubmission(self)


class SubmittedJob:
    """A training that waits or runs somewhere."""

    def __init__(self, job: submitit.Job[int], log: Path) -> None:
        self._job, self._log = job, log

    def poll(self) -> int | None:
        """Exit status (1 where the job itself failed, with its reason in the log), or None."""
        if not self._job.done():
            return None
        error = self._job.exception()
        if error is None:
            return self._job.result()
        with open(self._log, "a", encoding="utf-8") as log:
            log.write(f"job {self._job.job_id}: {error}\n")
        return 1

    def stop(self) -> None:
        """Cancel the job."""
        self._job.cancel()


class Cluster:
    """Starts trainings as jobs.

    Args:
        name: "slurm" or "local".
        parameters: of submitit's ``AutoExecutor.update_parameters``: ``timeout_min``,
            ``gpus_per_node``, ``cpus_per_task``, ``mem_gb``, ``slurm_partition``, ...

    Raises:
        ValueError: a parameter that submitit does not know, or of another type; Slurm's commands
            are not on this machine.
    """

    def __init__(self, name: str, parameters: Mapping[str, Any]) -> None:
        self.name, self.parameters = name, dict(parameters)
        self._executor(Path(JOBS))

    def __call__(
        self, command: Sequence[str], folder: Path, threads: int, lock: IO[str]
    ) -> SubmittedJob:
        """Submit ``command``, which trains the config in ``folder``."""
        training = Training(list(command), folder.resolve(), threads)
        return SubmittedJob(self._executor(folder / JOBS).submit(training), folder / LOG)

    def _executor(self, folder: Path) -> submitit.AutoExecutor:
        try:
            executor = submitit.AutoExecutor(folder=folder, cluster=self.name)
            executor.update_parameters(**self.parameters)
        except (AssertionError, NameError, RuntimeError) as error:
            raise ValueError(f"--submit {self.name} {self.parameters}: {error}") from error
        return executor

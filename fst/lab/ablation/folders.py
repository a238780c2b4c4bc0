"""The folder of one run of a grid: what was started there, whether it finished, its log."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fst.basics.errors import UsageError
from fst.files.checkpoint import write_text_atomically
from fst.lab.ablation.configs import PlannedRun
from fst.lab.reporting.runs import flatten, read_config

LOG = "log.txt"
SET_BY_TRAINING = ("load_from", "resume", "launcher", "work_dir")  # its own copy replaces config.py


@dataclass(frozen=True)
class RunFolder:
    """WORK/<setting>/seed<k>.

    config.py is what the run trains. run.json names it by its fingerprint and is written before the
    training starts, finished.json after it has succeeded; log.txt is what the process printed.
    """

    path: Path

    @classmethod
    def of(cls, work_dir: Path, setting: str, seed: int) -> RunFolder:
        """The folder of a setting and seed."""
        return cls(work_dir / setting / f"seed{seed}")

    @property
    def config(self) -> Path:
        """The file that the run trains."""
        return self.path / "config.py"

    def read(self, name: str) -> dict[str, Any]:
        """run.json or finished.json; empty where there is none."""
        path = self.path / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace the file in one step."""
        write_text_atomically(json.dumps(content, indent=1) + "\n", self.path / name)

    def state(self, run: PlannedRun) -> str:
        """'new', 'started', 'finished', or 'changed' if it was made with another config."""
        made = self.read("run.json")
        if not made:
            return "new"
        if made["fingerprint"] != run.fingerprint:
            return "changed"
        return "finished" if self.read("finished.json") else "started"

    def changes(self, run: PlannedRun) -> str:
        """Return the differences between the config of the folder and that of the run."""
        old = flatten(read_config(self.config)) if self.config.is_file() else {}
        new = flatten(run.config.to_dict())
        keys = [key for key in sorted(old | new) if _text(old.get(key)) != _text(new.get(key))]
        keys = [key for key in keys if key not in SET_BY_TRAINING]
        if not keys:
            return f"the run of {run.start_from!r} that it starts from"
        texts = [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys[:5]]
        return "; ".join(texts + ["..."] * (len(keys) > 5))

    def put_aside(self) -> Path:
        """Rename the folder, so that the run can be made again.

        Raises:
            RuntimeError: another process is training in it.
        """
        number = 1
        while (old := self.path.with_name(f"{self.path.name}.old{number}")).exists():
            number += 1
        with self.lock():
            return self.path.rename(old)

    def lock(self) -> IO[str]:
        """A file that nobody else can lock as long as it, or a copy in a child process, is open.

        Raises:
            RuntimeError: another process holds it.
        """
        file = open(self.path / "lock", "w", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UsageError(f"another process is training in {self.path}.") from None
        return file

    def log_tail(self, lines: int) -> str:
        """The end of what the process printed last."""
        log = (self.path / LOG).read_text(encoding="utf-8", errors="replace")
        return "\n".join(log.splitlines()[-lines:])

    def log(self, line: str) -> None:
        """Append a line to what was printed."""
        with open(self.path / LOG, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def _text(value: Any) -> str:
    return json.dumps(value, default=str)

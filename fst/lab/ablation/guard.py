"""Runs a command until it ends, or until nobody holds the other end of a pipe any more.

    python guard.py PIPE LOCK COMMAND...

PIPE and LOCK are inherited file descriptors. The process that started the guard holds the writing
end of the pipe, so whatever ends that process, SIGKILL included, ends the command and its children.
The file is run as a script and needs Python alone, because it starts with every training.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

STOP_SECONDS = 10.0  # between SIGTERM and SIGKILL
HANDLED = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(pipe: int, lock: int, command: Sequence[str]) -> int:
    """Run the command in a process group of its own; returns the exit status, or minus a signal."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)  # gets the number of each signal that has a handler
    for number in HANDLED:
        signal.signal(number, lambda *_: None)
    process = subprocess.Popen(command, process_group=0, pass_fds=[lock])
    while process.poll() is None:
        ready, _, _ = select.select([pipe, ended], [], [])
        if pipe in ready or os.read(ended, 1)[0] != signal.SIGCHLD:
            _stop(process)
    return process.returncode


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOP_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    if status < 0:  # ends as the command did
        if -status in HANDLED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)

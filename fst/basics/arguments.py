"""What every command line shares: types of arguments, and how a command ends."""

from __future__ import annotations

import argparse
import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fst.basics import extras
from fst.basics.errors import UsageError

STOPPED = 130  # a shell's exit status of what Ctrl-C has ended
TERMINATED = 143  # and of what SIGTERM has ended
UNREAD = 141  # and of what has written to a pipe that nobody reads
OF_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")
USER_ERRORS = (
    AssertionError,  # mmengine's and timm's checks of arguments
    ValueError,
    TypeError,
    KeyError,
    OSError,
    ImportError,
    SyntaxError,
    FloatingPointError,
    NotImplementedError,
    UsageError,
)


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised as an exception, so that a command ends as it does after Ctrl-C."""


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def add_traceback(parser: argparse.ArgumentParser) -> None:
    """--traceback"""
    parser.add_argument(
        "--traceback", action="store_true", help="show where in the code an error was raised"
    )


@contextmanager
def user_errors(
    options: argparse.Namespace, when_stopped: Callable[[], str] = lambda: "stopped"
) -> Iterator[None]:
    """End a command in one line: exit status 2 after an error, 130 after Ctrl-C, 143 after SIGTERM.

    Args:
        options: parsed, with `add_traceback`'s option: whether errors are raised as they are.
        when_stopped: Makes the line to print after Ctrl-C or SIGTERM; an empty line is not printed.
    """
    try:
        with _sigterm_raises():
            yield
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        stop = _stop_behind(error)
        if stop is not None:
            if line := when_stopped():
                print(line, file=sys.stderr)
            raise SystemExit(TERMINATED if isinstance(stop, Terminated) else STOPPED) from None
        if options.traceback or not isinstance(error, USER_ERRORS):
            raise
        print(f"error: {_in_words(error)}", file=sys.stderr)
        raise SystemExit(2) from None


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM, where the signal would end the process without a word."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(number: int, frame: object) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """The stop that ``error`` replaces, where a library catches every exception and raises its own.

    MMEngine does so while it formats a config.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


@contextmanager
def silent_when_unread() -> Iterator[None]:
    """End without a word, and with exit status 141, where nobody reads on, as after ``| head``."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        output = sys.stdout.fileno()
        if not stat.S_ISFIFO(os.fstat(output).st_mode):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # Python flushes once more at its end
        raise SystemExit(UNREAD) from None


def _in_words(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return extras.in_words(error)
    text = str(error) or type(error).__name__
    if OF_WORKER.match(text):  # whose traceback is the message; its last line is the error
        text = text.rstrip().rpartition("\n")[2].partition(": ")[2]
    if isinstance(error, KeyError) and error.args:
        text = str(error.args[0])
        text = text if " " in text else f"key {text!r} is missing"
    # of these not every one is a sentence of a check
    is_vague = isinstance(error, TypeError | KeyError | AssertionError | NotImplementedError)
    return f"{text} (--traceback shows where)" if is_vague else text

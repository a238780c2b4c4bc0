"""Shared by all command lines: types of arguments, and the end of a command."""

from __future__ import annotations

import argparse
import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from fst.basics import extras
from fst.basics.errors import UsageError

STOPPED = 130  # a shell's exit status of what Ctrl-C has ended
TERMINATED = 143  # and of what SIGTERM has ended
UNREAD = 141  # and of what has written to a pipe that nobody reads
STOP_SIGNALS = tuple(s for s in signal.Signals if s.name in ("SIGHUP", "SIGINT", "SIGTERM"))
Handler = Callable[[int, Any], object] | signal.Handlers
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
    with _sigterm_raises():
        try:
            yield
        except BrokenPipeError:
            raise
        except (Exception, KeyboardInterrupt) as error:
            stop = _stop_behind(error)
            if stop is not None:
                _end(TERMINATED if isinstance(stop, Terminated) else STOPPED, when_stopped)
            if options.traceback or not isinstance(error, USER_ERRORS):
                raise
            print(f"error: {_in_words(error)}", file=sys.stderr)
            raise SystemExit(2) from None


def _end(status: int, line: Callable[[], str]) -> NoReturn:
    """End with a line, which no further signal cuts short; one that comes later ends at once."""
    handle_signals(STOP_SIGNALS, lambda *_: None)
    if text := line():
        print(text, file=sys.stderr, flush=True)
    handle_signals(STOP_SIGNALS, lambda *_: os._exit(status))
    raise SystemExit(status) from None


def handle_signals(numbers: Iterable[int], handler: Handler) -> dict[int, Any]:
    """Let ``handler`` take these signals, but for ignored ones; returns what took them before.

    Threads other than the main one cannot: there it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


@contextmanager
def signals_handled(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Let ``handler`` handle these signals while the block runs; ignored ones stay ignored."""
    before = handle_signals(numbers, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def raise_stop(number: int, frame: object = None) -> NoReturn:
    """Raise the exception of a signal to end."""
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def stop_at_once(number: int, frame: object = None) -> NoReturn:
    """End the process with the line and the status of `user_errors`, without cleaning up.

    Imports need it: some libraries catch each exception of theirs, KeyboardInterrupt too.
    """
    os.write(sys.stderr.fileno(), b"stopped\n")
    os._exit(128 + number)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM, where the signal would end the process without a word."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    handle_signals([signal.SIGTERM], raise_stop)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is raise_stop:
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

"""Options that commands share."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from fst.basics.arguments import add_traceback, positive

Line = argparse.Namespace
Command = Callable[..., int]
NAMED = re.compile(r"[\w-]+(,\s*\w+=[^=]+)+")  # a strategy with options, which is no list
DTYPES = ("float32", "bfloat16", "float16")


def command(name: str, description: str) -> argparse.ArgumentParser:
    """The parser of `fst NAME`, with --traceback."""
    parser = argparse.ArgumentParser(prog=f"fst {name}", description=description)
    add_traceback(parser)
    return parser


def parsed(parser: Callable[[], argparse.ArgumentParser], words: Sequence[str]) -> Line:
    """A command line's arguments, and as ``words`` the line itself."""
    return parser().parse_args(words, argparse.Namespace(words=list(words)))


def takes(parser: Callable[[], argparse.ArgumentParser]) -> Callable[[Command], Command]:
    """Make a command of a function of its parsed arguments, which takes words as well."""

    def decorate(run: Command) -> Command:
        @functools.wraps(run)
        def command(line: Line | Sequence[str], **options: Any) -> int:
            return run(line if isinstance(line, Line) else parsed(parser, line), **options)

        return command

    return decorate


class Size(argparse.Action):
    """Height and width from one number or two."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if len(values) > 2:
            parser.error(f"argument {option_string}: {values} is not one number or two")
        setattr(namespace, self.dest, (values[0], values[-1]))


SIZE: dict[str, Any] = {
    "type": positive,
    "nargs": "+",
    "action": Size,
    "metavar": ("HEIGHT", "WIDTH"),
}  # of images


class OptionAction(argparse.Action):
    """``key=value`` pairs, as MMEngine reads them, and what is wrong with others.

    MMEngine would make a list of a value that is `NAMED`, and cut dicts within lists to pieces.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        for value in values:
            if not value.partition("=")[0] or "=" not in value:
                parser.error(f"argument {option_string}: {value!r} is not of the form key=value")
            if any(value.count(a) != value.count(b) for a, b in ("()", "[]")):
                parser.error(f"argument {option_string}: {value!r} has unbalanced brackets")
        from mmengine.config import DictAction  # takes a second, and no --help needs it

        pairs = dict(value.split("=", 1) for value in values)
        named: dict[str, Any] = {k: text for k, text in pairs.items() if NAMED.fullmatch(text)}
        for key, text in pairs.items():
            if text.startswith(("[", "(", "{")):
                with contextlib.suppress(ValueError, SyntaxError):
                    named[key] = ast.literal_eval(text)
        action = DictAction(self.option_strings, self.dest, nargs="+")
        lists = [f"{key}={text}" for key, text in pairs.items() if key not in named]
        try:
            action(parser, namespace, lists, option_string)
        except (RecursionError, AssertionError):
            parser.error(
                f"argument {option_string}: {' '.join(lists)!r} cannot be read; write a list of "
                "dicts as [{'type': 'Resize', 'size': 16}]"
            )
        getattr(namespace, self.dest).update(named)


def add_cfg_options(
    parser: argparse.ArgumentParser, meaning: str = "changes to the config"
) -> None:
    """--cfg-options KEY=VALUE ..."""
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action=OptionAction,
        default={},
        metavar="KEY=VALUE",
        help=meaning,
    )

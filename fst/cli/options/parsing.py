"""Options that commands share."""

from __future__ import annotations

import argparse
import ast
import contextlib
import re
from typing import Any

from fst.basics.arguments import add_traceback, positive

NAMED = re.compile(r"[\w-]+(,\s*\w+=[^=]+)+")  # a strategy with options, which is no list
DTYPES = ("float32", "bfloat16", "float16")


def command(name: str, description: str) -> argparse.ArgumentParser:
    """The parser of `fst NAME`, with --traceback."""
    parser = argparse.ArgumentParser(prog=f"fst {name}", description=description)
    add_traceback(parser)
    return parser


class Size(argparse.Action):
    """Height and width from one number or two."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if len(values) > 2:
            parser.error(f"argument {option_string}: {values} is not one number or two")
        setattr(namespace, self.dest, (values[0], values[-1]))


SIZE: dict[str, Any] = dict(type=positive, nargs="+", action=Size, metavar=("HEIGHT", "WIDTH"))


class _Update(argparse.Action):
    """Adds pairs of key and value to a dict."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, getattr(namespace, self.dest) | dict(values))


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value")
    return key, _value(value)


def _value(text: str) -> Any:
    """A value as Python writes it, true or false, names in a list, or else the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for read in (ast.literal_eval, float):  # float: of inf and nan
        with contextlib.suppress(ValueError, SyntaxError):
            value = read(text)
            return list(value) if isinstance(value, tuple) and text[0] != "(" else value
    if NAMED.fullmatch(text) or ("," not in text and text[:1] not in ("[", "(", "{")):
        return text
    is_list = text[:1] == "[" and text[-1:] == "]"
    names = [name.strip() for name in (text[1:-1] if is_list else text).split(",")]
    if any(bracket in name for name in names for bracket in "()[]{}"):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be read; write a list of dicts as [{{'type': 'Resize', 'size': 16}}]"
        )
    return names


def add_cfg_options(
    parser: argparse.ArgumentParser, meaning: str = "changes to the config"
) -> None:
    """--cfg-options KEY=VALUE ..."""
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        type=_pair,
        action=_Update,
        default={},
        metavar="KEY=VALUE",
        help=meaning,
    )

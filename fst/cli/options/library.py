"""The command lines of what needs PyTorch alone."""

from __future__ import annotations

import argparse

from fst.cli.options.parsing import command


def verify() -> argparse.ArgumentParser:
    """`fst verify`."""
    parser = command(
        "verify",
        "Check that the weights of a checkpoint obey an N:M pattern, and say "
        "which share of the model that is (exit status: 0 yes, 1 no, 2 error).",
    )
    add = parser.add_argument
    add("checkpoint", help="folded checkpoint, any state_dict, .safetensors, .onnx or .pt2")
    kept = "weights kept per group (default, without --m too: as the file says, else 2)"
    add("--n", type=int, help=kept)
    add("--m", type=int, help="group size (default, without --n too: as the file says, else 4)")
    order = "where groups run (default: as the file says, else channel)"
    add("--group-order", choices=("channel", "im2col"), help=order)
    add("--include", nargs="+", metavar="PATTERN", help="only these layers")
    add("--exclude", nargs="+", metavar="PATTERN", help="not these layers")
    least = (
        "least share (0 to 1) of all convolutions' and linear layers' weights in full N:M "
        "groups (default: 0)"
    )
    add("--min-coverage", type=float, default=0.0, metavar="SHARE", help=least)
    return parser


def strategies() -> argparse.ArgumentParser:
    """`fst strategies`."""
    return command(
        "strategies",
        "List the strategies: what each prunes, and the paper that it is from. W: weight, X: "
        "input, Y: output, dY: its gradient, S(W): W pruned to N:M.",
    )


def env() -> argparse.ArgumentParser:
    """`fst env`."""
    return command(
        "env",
        "Print what a bug report needs: versions, devices, the packages of the extras "
        "or that they are missing, and the backends with what each lacks here.",
    )

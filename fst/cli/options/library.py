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
    parser.add_argument(
        "checkpoint", help="folded checkpoint, any state_dict, .safetensors, .onnx or .pt2"
    )
    parser.add_argument(
        "--n",
        type=int,
        help="weights kept per group (default, without --m too: as the file says, else 2)",
    )
    parser.add_argument("--m", type=int, help="group size (likewise, else 4)")
    parser.add_argument(
        "--group-order",
        choices=("channel", "im2col"),
        help="where groups run (default: as the file says, else channel)",
    )
    parser.add_argument("--include", nargs="+", metavar="PATTERN", help="only these layers")
    parser.add_argument("--exclude", nargs="+", metavar="PATTERN", help="not these layers")
    parser.add_argument(
        "--min-coverage",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="least share (0 to 1) of all convolutions' and linear layers' weights in full N:M "
        "groups (default: 0)",
    )
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

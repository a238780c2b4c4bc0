"""Processes that are forked after the kernels have run, as data loaders and servers fork them.

They are forked from a fresh one: a fork inherits whatever the threads of other tests hold.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fst
from fst.backends import force
from fst.ops import cpp

BACKENDS = {"output": "zeros_weight", "grad_input": "zeros_weight", "grad_weight": "zeros_input"}


def step() -> tuple[Tensor, ...]:
    """The three products of a call, from kernels of this library alone."""
    torch.manual_seed(0)
    input = torch.randn(2, 8, 6, 6).relu().requires_grad_()
    weight = torch.randn(8, 8, 3, 3).requires_grad_()
    with force(**BACKENDS):
        output = fst.sparse_conv2d(input, weight, padding=1, strategy="srste")
        return output.detach(), *torch.autograd.grad(output.square().sum(), (input, weight))


def in_child(function: Callable[[], object]) -> str:
    """What it returns in a forked process, or raises, as text."""

    def send() -> None:
        try:
            sender.send(str(function()))
        except RuntimeError as error:
            sender.send(str(error))

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=send)
    child.start()
    sender.close()  # so that a child's death is heard
    try:
        return receiver.recv() if receiver.poll(20) else "the child hangs"
    except EOFError:
        child.join()
        return f"the child ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()


def in_one_thread(wanted: tuple[Tensor, ...]) -> bool:
    torch.set_num_threads(1)
    return all(torch.equal(a, b) for a, b in zip(step(), wanted, strict=True))


def main() -> None:
    """Print what forked processes did, a line each."""
    torch.set_num_threads(1)
    wanted = step()
    print(in_child(lambda: in_one_thread(wanted)))
    torch.set_num_threads(2)
    step()
    print(in_child(lambda: in_one_thread(wanted)))
    print(in_child(step))


@pytest.mark.system
@pytest.mark.skipif(bool(cpp.missing()), reason="the C++ kernels are missing")
def test_a_forked_process_computes_in_one_thread_and_refuses_more():
    """PyTorch's own operators hang in more, where the parent has used its threads."""
    command = [sys.executable, "-c", "from tests.ops.test_forked import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    same, same_after_threads, refused = done.stdout.splitlines() or [done.stderr] * 3
    assert (same, same_after_threads) == ("True", "True")
    assert "torch.set_num_threads(1)" in refused

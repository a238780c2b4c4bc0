"""Shared by the kinds: the form of a check, random convolutions, children, small trainings."""

from __future__ import annotations

import multiprocessing
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Checks = list[tuple[str, int, Callable[[random.Random], None]]]  # name, cases at scale 1, a case
ROOT = Path(__file__).resolve().parents[2]
MEMORY = 1 << 30  # bytes that a child may take


def example_of(test: Any) -> Callable[[random.Random], None]:
    """One example of a property test of the suite, which hypothesis draws there."""
    return test.hypothesis.inner_test


def outputs_of(path: Path, images: Tensor) -> Tensor:
    """What an .onnx or .pt2 file computes, read by another program than FST."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(images)
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])


def train(
    net: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    steps: range,
    size: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Steps on random images (N, C, H, W), which are the same for the same step."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(size, generator=generator, dtype=dtype).requires_grad_()
        net(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal_weights(net: nn.Module, other: nn.Module, what: str) -> None:
    """Bit for bit."""
    for (name, mine), theirs in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), f"{name} differs {what}"


# ---------------------------------------------------------------- children


def in_child(work: Callable[..., str], *given: Any, limit: float) -> str:
    """What ``work(tell, *given)`` returns in a process whose memory is limited; "" if all is well.

    If the process dies or takes more than ``limit`` seconds, the result is that, and the last text
    that it gave to ``tell``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.campaign.files", "tests.campaign.operators"])
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(work, given, sender))
    child.start()
    sender.close()
    told, answer = "", None
    try:
        while answer is None:
            if not receiver.poll(limit):
                return f"no answer within {limit} s: {told}"
            told, answer = receiver.recv()
    except EOFError:
        child.join()
        answer = f"the child ended with exit code {child.exitcode}: {told}"
    finally:
        child.kill()
        child.join()
    return answer


def _serve(work: Callable[..., str], given: tuple[Any, ...], sender: Any) -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    answer = work(lambda text: sender.send((text, None)), *given)
    sender.send(("", answer))

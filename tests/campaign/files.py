"""Hostile files: the loader refuses each by name, or has plain data, and no code runs."""

from __future__ import annotations

import hashlib
import io
import pickle
import random
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fst.files.checkpoint import load_checkpoint_safely, state_dict_of
from tests.campaign.payloads import CANARY, IN_ZIP, PAYLOADS, ZIPS
from tests.campaign.shared import Checks, in_child

LIMIT = 60  # seconds that a child may last
PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray)
TORCH = (torch.Size, torch.dtype, torch.device, torch.layout)
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.remove", "os.rename")
FORBIDDEN += ("os.mkdir", "subprocess.Popen", "socket.connect", "shutil.", "ctypes.")

Content = dict[str, Any]
Writer = Callable[[Path, random.Random], None]


def genuine() -> Content:
    """A small checkpoint like the engine's."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"{i}.weight": torch.randn(8, 8, 3, 3, generator=generator) for i in range(3)}
    state = {0: {"momentum_buffer": torch.ones(8, 8, 3, 3)}}
    return {
        "meta": {"epoch": 3, "iter": 12, "seed": 0},
        "state_dict": weights,
        "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "sparsity": {"strategy": "fst", "masks": {"0": torch.ones(8, 8, 3, 3) > 0}},
    }


def checks() -> Checks:
    """Each crafted file once, and random damage to a genuine one."""
    found: Checks = []
    for name, payload in PAYLOADS.items():
        for container, contain in {"plain": bytes, "zip": _zip, "legacy": _legacy}.items():
            write = partial(_write_payload, payload, contain)
            found.append((f"{name}-{container}", 0, partial(_check, write, False)))
    for name, payload in IN_ZIP.items():
        found.append((name, 0, partial(_check, partial(_write_payload, payload, _zip), False)))
    for name, write in ZIPS.items():
        found.append((name, 0, partial(_check, partial(_write_archive, write), False)))
    for name, (damage, count) in DAMAGES.items():
        for legacy in (False, True):
            # Files of before PyTorch 1.6 have no checksums: there a flip may go unseen.
            check = partial(_check, partial(_write_damaged, damage, legacy), not legacy)
            found.append((f"{name}{'-legacy' * legacy}", count, check))
    return found


# ---------------------------------------------------------------- writing


def _genuine_bytes(legacy: bool = False) -> bytes:
    file = io.BytesIO()
    torch.save(genuine(), file, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


def _write_payload(payload: Callable[[Path], bytes], contain: Any, path: Path, _: Any) -> None:
    path.write_bytes(contain(payload(path.parent)))


def _write_archive(write: Callable[[Path, bytes], None], path: Path, _: Any) -> None:
    write(path, _genuine_bytes())


def _zip(content: bytes) -> bytes:
    """The genuine file with another pickle in it."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(_genuine_bytes())) as old, zipfile.ZipFile(file, "w") as new:
        for record in old.infolist():
            is_pickle = record.filename.endswith("data.pkl")
            new.writestr(record.filename, content if is_pickle else old.read(record))
    return file.getvalue()


def _legacy(content: bytes) -> bytes:
    """PyTorch's format of before 1.6 with another pickle in it."""
    head = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True, "protocol_version": 1001})
    return b"".join(pickle.dumps(part, 2) for part in head) + content + pickle.dumps([], 2)


def _flipped_bit(content: bytearray, draw: random.Random) -> bytes:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return content


def _changed_bytes(content: bytearray, draw: random.Random) -> bytes:
    for _ in range(draw.randint(2, 40)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    return content


def _changed_pickle(content: bytearray, draw: random.Random) -> bytes:
    start = content.find(b"\x80\x02}")
    for _ in range(draw.randint(1, 4)):
        content[start + draw.randrange(700)] = draw.randrange(256)
    return content


DAMAGES: dict[str, tuple[Callable[[bytearray, random.Random], bytes], int]] = {
    "flipped-bit": (_flipped_bit, 40),
    "changed-bytes": (_changed_bytes, 30),
    "changed-pickle": (_changed_pickle, 60),
    "truncated": (lambda content, draw: content[: draw.randrange(len(content))], 20),
    "extended": (lambda content, draw: content + draw.randbytes(draw.randint(1, 999)), 5),
    "spliced": (lambda content, draw: content[: draw.randrange(len(content))] * 2, 5),
    "random": (lambda content, draw: draw.randbytes(draw.randint(0, 5000)), 10),
}


def _write_damaged(damage: Any, legacy: bool, path: Path, draw: random.Random) -> None:
    path.write_bytes(bytes(damage(bytearray(_genuine_bytes(legacy)), draw)))


# ---------------------------------------------------------------- reading, in a child


def _check(write: Writer, same: bool, draw: random.Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hostile.pth"
        write(path, draw)
        answer = in_child(_read, path, same, limit=LIMIT)
        assert not (path.parent / CANARY).exists(), "code from the file was run"
        assert not answer, answer


def _read(tell: Any, path: Path, same: bool) -> str:
    """Read the file; "", or what went wrong."""
    forbidden: list[str] = []

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and str(arguments[1] or "r")[0] in "wax"
        if writes or event.startswith(FORBIDDEN):
            forbidden.append(f"{event}{arguments}")

    sys.addaudithook(listen)
    try:
        wrong = _outcome(path, same)
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        wrong = f"unnamed {type(error).__name__} in {frame.name}: {error}"
    return f"it called {forbidden[0]}" if forbidden else wrong


def _outcome(path: Path, same: bool) -> str:
    try:
        content = load_checkpoint_safely(path)
    except (ValueError, FileNotFoundError) as error:
        if str(path) not in str(error):
            return f"the message does not name the file: {error}"
        cause = error.__cause__
        is_archive = path.is_file() and zipfile.is_zipfile(path)  # others are pickles alone
        if is_archive and (isinstance(cause, MemoryError) or "alloc" in str(cause)):
            return f"memory was asked for until none was left: {cause}"
        return ""
    if same:
        return "" if _digest(content) == _digest(genuine()) else "damage was not noticed"
    if foreign := _foreign(content):
        return f"it made a {foreign}"
    try:
        weights = state_dict_of(content, path)
    except ValueError:
        return ""
    named = all(isinstance(k, str) and torch.is_tensor(v) for k, v in weights.items())
    return "" if named else f"a state_dict has keys {list(weights)[:3]}"


def _digest(value: Any) -> str:
    if torch.is_tensor(value):
        value = (str(value.dtype), tuple(value.shape), value.flatten().tolist())
    elif isinstance(value, Mapping):
        value = [(k, _digest(v)) for k, v in value.items()]
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _foreign(content: Any) -> str | None:
    """The type of the first thing in there that is neither plain data nor a tensor."""
    waiting, seen = [content], set()
    while waiting and len(seen) < 10_000:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (*PLAIN, *TORCH)):
            continue
        seen.add(id(value))
        if torch.is_tensor(value):
            if value.numel() < 10_000:
                value.detach().to_dense().clone()  # crashes where the memory is not its own
        elif isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject:
                return f"array of {value.dtype}"
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif (
            type(value).__module__ != "fst.files.checkpoint"
        ):  # its stand-ins hold nothing that runs
            return f"{type(value).__module__}.{type(value).__qualname__}"
    return None

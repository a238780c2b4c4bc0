"""Crafted pickles and archives: what somebody would write who wants a loader to do more."""

from __future__ import annotations

import collections
import functools
import io
import operator
import os
import pickle
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

CANARY = "executed"
FAR, HUGE = 1 << 33, 1 << 50
Payload = Callable[[Path], bytes]


class _Call:
    """Pickles as a call, and with ``state`` as what is done to its result."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.parts


class _Stored:
    """Pickles as a reference to a record of the archive."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.parts if isinstance(value, _Stored) else None


def _pickled(value: Any, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol).dump(value)
    return file.getvalue()


def _touch(folder: Path) -> str:
    return f"touch {folder / CANARY}"


def _of(make: Callable[[Path], Any], protocol: int = 2) -> Payload:
    """A checkpoint with weights, and something beside them."""
    return lambda folder: _pickled({"state_dict": {}, "meta": make(folder)}, protocol)


def _call(function: Any, *arguments: Any, state: Any = None) -> Payload:
    return _of(lambda _: _Call(function, *arguments, state=state))


def _raw(*opcodes: bytes) -> Payload:
    return lambda folder: b"".join(opcodes).replace(b"TOUCH", _touch(folder).encode()) + b"."


def _array(*state: Any, shape: Any = (0,), kind: Any = b"b") -> Payload:
    return _call(np._core.multiarray._reconstruct, np.ndarray, shape, kind, state=state or None)


def _dtype(name: str, *state: Any) -> Payload:
    return _call(np.dtype, name, False, True, state=state)


_storage = functools.partial(_Stored, "storage", torch.FloatStorage)
_kept = _storage("0", "cpu", 576)


def _tensor(storage: Any, offset: Any = 0, size: Any = (2,), stride: Any = (1,)) -> Payload:
    hooks = collections.OrderedDict()
    return _call(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, hooks)


def _nested(depth: int) -> Payload:
    return lambda _: b"\x80\x02" + b")" + b"\x85" * depth + b"."


PAYLOADS: dict[str, Payload] = {
    # code by a name that every loader should refuse
    "system": _of(lambda folder: _Call(os.system, _touch(folder))),
    "system-protocol-4": _of(lambda folder: _Call(os.system, _touch(folder)), 4),
    "popen": _of(lambda folder: _Call(subprocess.Popen, ["touch", str(folder / CANARY)])),
    "eval": _of(lambda folder: _Call(eval, f"open({str(folder / CANARY)!r}, 'w')")),
    "open": _of(lambda folder: _Call(open, str(folder / CANARY), "w")),
    "partial": _of(lambda folder: _Call(functools.partial(os.system, _touch(folder)))),
    "methodcaller": _raw(b"\x80\x02coperator\nmethodcaller\nX\6\0\0\0system\x85R"),
    "getattr": _raw(b"\x80\x02c__builtin__\ngetattr\nctorch\nnn\nX\4\0\0\0init\x86R"),
    "getattr-of-array": _of(lambda _: _Call(getattr, np.ndarray, "tofile")),
    "getattr-called": _raw(
        b"\x80\x02cbuiltins\ngetattr\nccollections\nOrderedDict\nX\6\0\0\0system\x86R"
        b"S'TOUCH'\n\x85R"
    ),
    "inst": _raw(b"(S'TOUCH'\nios\nsystem\n"),
    "stack-global": _raw(b"\x80\x04\x8c\x02os\x8c\x06system\x93S'TOUCH'\n\x85R"),
    "dotted-global": _raw(b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93S'TOUCH'\n\x85R"),
    "torch-load": _of(lambda folder: _Call(torch.load, str(folder / "hostile.pth"))),
    "torch-save": _of(lambda folder: _Call(torch.save, 1, str(folder / CANARY))),
    "module": _of(lambda _: torch.nn.Conv2d(2, 2, 1)),
    "function": _of(lambda _: torch.nn.functional.relu),
    "tensor-class-state": _raw(b"\x80\x02ctorch._tensor\nTensor\n}X\1\0\0\0aK\1sb"),
    "extension": _raw(b"\x80\x02\x82\1"),
    "numpy-load": _call(np.load, "/etc/passwd"),
    # arrays and numbers of NumPy
    "object-array": _of(lambda _: np.array([{"a": 1}, "b"], dtype=object)),
    "object-array-of-code": _of(lambda f: np.array([_Call(os.system, _touch(f))], dtype=object)),
    "object-array-of-addresses": _array(1, (2,), np.dtype("O"), False, b"A" * 16),
    "object-scalar": _call(np._core.multiarray.scalar, np.dtype("O"), b"A" * 8),
    "array-called": _call(np.ndarray, (2,), np.dtype("O"), b"A" * 16),
    "array-called-huge": _call(np.ndarray, (HUGE,)),
    "array-huge": _array(shape=(HUGE,)),
    "array-too-short": _array(1, (1000,), np.dtype("f4"), False, b"A" * 16),
    "array-overflow": _array(1, (HUGE, HUGE), np.dtype("f4"), False, b""),
    "array-kind": _array(shape=(4,), kind=b"O"),
    "dtype-size": _dtype("f4", 3, "<", None, None, None, FAR, FAR, 0),
    "dtype-fields": _dtype("V8", 3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0),
    # sizes that no file holds
    "string-huge": _raw(b"\x80\x04\x8d" + struct.pack("<Q", HUGE) + b"a"),
    "long-huge": _raw(b"\x80\x02\x8b" + struct.pack("<i", (1 << 31) - 1) + b"a"),
    "repeated": _call(operator.mul, [0], FAR),
    "nested-deeply": _nested(3_000_000),
    "laughs": lambda _: b"\x80\x02]q\0" + b"]q\1(h\0h\0eq\0" * 40 + b".",
    "cycle": lambda _: b"\x80\x02]q\0h\0a.",
    # states of a checkpoint that are none
    "no-mapping": lambda _: _pickled([1, 2]),
    "no-content": lambda _: b"",
    "unknown-opcode": lambda _: b"\x80\x02\xff\xfe.",
    "text": lambda _: b"state_dict: 1\n",
}

_parameter = torch._utils._rebuild_parameter
IN_ZIP: dict[str, Payload] = {
    # tensors over memory that is not theirs
    "tensor": _tensor(_kept),
    "tensor-beyond": _tensor(_kept, size=(577,)),
    "tensor-offset-negative": _tensor(_kept, -4),
    "tensor-stride": _tensor(_kept, stride=(FAR,)),
    "tensor-overflow": _tensor(_kept, size=(HUGE, HUGE), stride=(1, HUGE)),
    "tensor-expanded": _tensor(_kept, size=(FAR,), stride=(0,)),
    "tensor-of-nothing": _tensor(None),
    "storage-huge": _tensor(_storage("0", "cpu", HUGE)),
    "storage-key-missing": _tensor(_storage("99", "cpu", 4)),
    "storage-key-outside": _tensor(_storage("../../../etc/passwd", "cpu", 4)),
    "storage-place": _tensor(_storage("0", "cuda:99", 576)),
    "storage-place-unknown": _tensor(_storage("0", "moon", 576)),
    "storage-kind": _tensor(_Stored("storage", torch.Size, "0", "cpu", 576)),
    "persistent-id": _tensor(_Stored("module", "os", "0", "cpu", 576)),
    "parameter-hooks": _call(_parameter, "abc", True, {"a": _Call(os.system, "true")}),
    "sparse-outside": _call(
        torch._utils._rebuild_sparse_tensor,
        torch.sparse_coo,
        (torch.tensor([[10**9]]).tolist(), [1.0], (2,), False),
    ),
    "meta-huge": _call(
        torch._utils._rebuild_meta_tensor_no_storage, torch.float, (HUGE,), (1,), False
    ),
    "from-type": _call(torch._tensor._rebuild_from_type_v2, os.system, int, ("true",), None),
    # keys that no model has
    "key-number": lambda _: _pickled_tensors({1: torch.ones(576)}),
    "key-dunder": lambda _: _pickled_tensors({"__class__": torch.ones(576), "a.__init__": 3}),
    "state-dict-in-itself": lambda _: b"\x80\x02}q\0X\x0a\0\0\0state_dicth\0s.",
}


def _pickled_tensors(content: Any) -> bytes:
    """The pickle of a checkpoint, for an archive that has its records."""
    file = io.BytesIO()
    torch.save(content, file)
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return archive.read(name)


# ---------------------------------------------------------------- archives


def _archive(
    change: Callable[[str, bytes], bytes | None],
    compression: int = zipfile.ZIP_STORED,
    rename: Callable[[str], str] = str,
) -> Callable[[Path, bytes], None]:
    """Writes an archive with each record changed, left out (None), packed or renamed."""

    def write(path: Path, genuine: bytes) -> None:
        with (
            zipfile.ZipFile(io.BytesIO(genuine)) as old,
            zipfile.ZipFile(path, "w", compression) as new,
        ):
            for name in old.namelist():
                if (content := change(name, old.read(name))) is not None:
                    new.writestr(rename(name), content)

    return write


def _bomb(path: Path, genuine: bytes) -> None:
    """4 GiB of zeros in 4 MiB."""
    with (
        zipfile.ZipFile(io.BytesIO(genuine)) as old,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for name in old.namelist():
            if not name.endswith("data/0"):
                new.writestr(name, old.read(name))
                continue
            with new.open(name, "w", force_zip64=True) as record:
                for _ in range(64):
                    record.write(bytes(1 << 26))


def _claimed(path: Path, genuine: bytes) -> None:
    """Sizes in the central directory that the file does not have."""
    content, start = bytearray(genuine), genuine.find(b"PK\1\2")
    while start >= 0:
        content[start + 20 : start + 28] = struct.pack("<II", 0xFFFFFFF0, 0xFFFFFFF0)
        start = content.find(b"PK\1\2", start + 4)
    path.write_bytes(content)


def _without(part: str) -> Callable[[Path, bytes], None]:
    return _archive(lambda name, content: None if part in name else content)


ZIPS: dict[str, Callable[[Path, bytes], None]] = {
    "zip-bomb": _bomb,
    "zip-claimed-sizes": _claimed,
    "zip-deflated": _archive(lambda _, content: content, zipfile.ZIP_DEFLATED),
    "zip-empty": lambda path, _: zipfile.ZipFile(path, "w").close(),
    "zip-without-pickle": _without("data.pkl"),
    "zip-emptied": _archive(lambda _, content: b""),
    "zip-long-record": _archive(lambda n, c: c * 9 if "/data/" in n else c),
    "zip-outside": _archive(lambda _, c: c, rename=lambda name: f"../../{name}"),
    "zip-torchscript": _archive(
        lambda _, content: content, rename=lambda name: name.replace("data.pkl", "constants.pkl")
    ),
    "zip-twice": lambda path, genuine: path.write_bytes(genuine + genuine),
    "folder": lambda path, _: path.mkdir(),
    "pipe": lambda path, _: os.mkfifo(path),
    "link-to-itself": lambda path, _: path.symlink_to(path),
}

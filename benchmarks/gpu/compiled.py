"""Compile the Triton kernels for GPUs that need not be here, and count what they take.

    python benchmarks/gpu/compiled.py

Prints and writes registers, local memory (spills), shared memory and memory instructions of each
kernel in both memory formats, for sm_80 and sm_90a.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fst.backends import sources


def main() -> None:
    """Compile, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/out/compiled.json"), help="JSON to write"
    )
    out = parser.parse_args().out
    compile_for = sources.load("inspect_triton").compile_for
    rows = []
    for name, sample in sources.load("samples").SAMPLES.items():
        for channels_last in (True, False):
            launch = sample(channels_last)
            for capability in (80, 90):
                made = compile_for(launch, capability)._asdict()
                memory_format = "channels_last" if channels_last else "contiguous"
                row = {"kernel": name, "memory_format": memory_format, "sm": capability, **made}
                rows.append(row)
                print(
                    f"{name:24s} {memory_format:14s} sm_{capability} {made['registers']:4d} "
                    f"registers {made['stack']} B stack {made['shared']:5d} B shared "
                    f"{made['memory']}",
                    flush=True,
                )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=1))
    print(f"written: {out}")


if __name__ == "__main__":
    main()

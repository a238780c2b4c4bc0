"""Tests of the C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.campaign.sanitize                    # `make sanitize`: some three minutes
    python -m tests.campaign.sanitize tests/ops -k maps  # other tests, as pytest selects them

The library for this processor is compiled into a temporary folder, with GCC. pytest runs with this
file as its plugin and loads that library instead. The first finding ends it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import setuptools  # noqa: F401  (distutils comes with it from Python 3.12 on)

from fst.backends import sources

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "FST_SANITIZED_LIBRARY"  # the environment variable that tells the plugin where it lies
TESTS = [
    *(f"tests/kernels/test_{name}.py" for name in ("zeros_weight", "zeros_maps")),
    *("tests/kernels/test_lists_cpp.py", "tests/kernels/test_refusals_cpp.py"),
    "tests/inference/test_depthwise.py",
    "tests/ops/test_zeros.py",
]
# Without -O3 or -O1, whose loops take the compiler minutes more.
COMPILE = ["-O0", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined"]
SANITIZE = ["-fsanitize=address,undefined"]
# torch frees with another function than it allocates with; Python leaks.
OPTIONS = "alloc_dealloc_mismatch=0:detect_leaks=0"


def build(folder: Path) -> Path:
    """Compile the library that this processor would load, as setup.py does."""
    from distutils.core import run_setup

    setup = run_setup(str(ROOT / "setup.py"), ["--quiet"], stop_after="commandline")
    wanted = f"fst.kernels.{sources.cpp_library().stem}"
    setup.ext_modules = [ext for ext in setup.ext_modules if ext.name == wanted]
    for ext in setup.ext_modules:
        ext.extra_compile_args += [*COMPILE, *SANITIZE]
        ext.extra_link_args += SANITIZE
    command = setup.get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(folder), str(folder / "objects")
    command.ensure_finalized()
    command.run()
    return folder / "fst" / "kernels" / sources.cpp_library().name


def pytest_load_initial_conftests() -> None:
    """As a plugin: load the sanitized library."""
    library = Path(os.environ[LIBRARY])
    sources.cpp_library = lambda: library


def preloaded() -> list[str]:
    """GCC's libraries: exceptions of C++ are intercepted only where theirs was there before."""
    return [
        subprocess.check_output(["gcc", f"-print-file-name={name}.so"], text=True).strip()
        for name in ("libasan", "libstdc++")
    ]


def missing() -> str:
    """What this machine lacks to run it; "" if nothing."""
    if sys.platform != "linux" or shutil.which("gcc") is None:
        return "Linux and GCC are needed"
    absent = [name for name in preloaded() if not Path(name).is_absolute()]
    return f"GCC lacks {', '.join(absent)}" if absent else ""


def main() -> int:
    """Returns pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            LIBRARY: str(build(Path(folder))),
            "LD_PRELOAD": " ".join(preloaded()),
            "ASAN_OPTIONS": OPTIONS,
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        # Findings are written where pytest would hold back what is written.
        plugins = ["-p", "tests.campaign.sanitize", "-p", "no:faulthandler", "--capture=sys"]
        command = [sys.executable, "-m", "pytest", "-x", *plugins, *(sys.argv[1:] or TESTS)]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

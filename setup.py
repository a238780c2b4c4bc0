"""The packages: fst, and the kernels' folder as fst.kernels with its C++ compiled for CPUs.

The C++ kernels are plain libraries, none of Python's extensions: one for each set of instructions,
of which a process loads one (fst/ops/cpp.py). Where no C++ compiler works, FST is installed without
them. All else is in setup.cfg.
"""

import os
import platform
import re
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError, PlatformError

ROOT = Path(__file__).resolve().parent
RELATIVE = r'\((?!https?:|#)([^)"\s]+)(?: "[^"]*")?\)'
KERNELS = sorted(path.name for path in (ROOT / "kernels").glob("*.cpp"))
HEADERS = sorted(path.name for path in (ROOT / "kernels").glob("*.h"))
FLAGS = [
    *("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-trapping-math", "-fno-math-errno"),
    *("-fopenmp-simd", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-g0"),
]
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"]
AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl")]
LEVELS = {"base": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS |= {"avx2": AVX2, "avx512": [*AVX2, *AVX512, "-mprefer-vector-width=512"]}
WITHOUT = (
    "\nFST is installed without its C++ kernels for CPUs: {}\n"
    "All works with PyTorch's operators. The kernels need GCC or Clang when FST is installed.\n"
)


def index_page(readme: str) -> str:
    """README.md where links into the repository lead nowhere: their paths as text, no images."""
    shown = re.sub(rf"!\[[^\]]*\]{RELATIVE}\n*", "", readme)
    shown = re.sub(r"\[([^\]]+)\]\(\1\)", r"\1", shown)
    return re.sub(rf"\[([^\]]+)\]{RELATIVE}", r"\1 (\2)", shown)


def checksum() -> int:
    """Of all C++ sources, as `fst.backends.sources.cpp_checksum` computes it."""
    found = 0
    for name in sorted(KERNELS + HEADERS):
        found = zlib.crc32((ROOT / "kernels" / name).read_bytes(), found)
    return found


def libraries() -> list[Extension]:
    """One library for each set of instructions."""
    # The OpenMP runtime's functions are found in what torch has loaded.
    unresolved = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [
        Extension(
            f"fst.kernels.cpu_{level}",
            [f"kernels/{name}" for name in KERNELS],
            define_macros=[("FST_SOURCES", f"{checksum()}u")],
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=unresolved,
        )
        for level, flags in LEVELS.items()
    ]


class BuildLibraries(build_ext):
    """Compiles what the compiler can, without Python's names, and says what is missing."""

    def get_ext_filename(self, name: str) -> str:
        """The file's path below the packages; all versions of Python take the same file."""
        return str(Path(*name.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Without Python's headers, in all cores; each library has a folder for its objects."""

        def compiled(source: str) -> str:
            (built,) = self.compiler.compile(
                [source],
                output_dir=str(Path(self.build_temp, ext.name)),
                macros=ext.define_macros,
                extra_postargs=ext.extra_compile_args,
            )
            return built

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, ext.sources))
        library = self.get_ext_fullpath(ext.name)
        link = self.compiler.link_shared_object
        link(objects, library, extra_postargs=ext.extra_link_args, target_lang="c++")

    def run(self) -> None:
        """Compile all libraries, or none."""
        try:
            super().run()
        except (CompileError, LinkError, ExecError, PlatformError) as error:
            for extension in self.extensions:  # of an earlier build
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
            print(WITHOUT.format(error), file=sys.stderr)
            self.extensions = self.distribution.ext_modules = []


class Wheel(bdist_wheel):
    """A wheel of any Python 3 on this platform, or on any where nothing was compiled."""

    def run(self) -> None:
        """Compile first: it decides what kind of wheel this is."""
        self.run_command("build_ext")
        self.root_is_pure = not self.distribution.ext_modules
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """No version of Python or of its interface."""
        return ("py3", "none", super().get_tag()[2])


setup(
    long_description=index_page(Path(__file__).with_name("README.md").read_text("utf-8")),
    packages=[*find_packages(include=["fst", "fst.*"]), "fst.kernels"],
    package_dir={"fst.kernels": "kernels"},
    ext_modules=libraries(),
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": Wheel},
)

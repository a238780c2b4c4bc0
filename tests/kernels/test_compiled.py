"""The C++ kernels are there to be tested wherever they can be compiled."""

import torch

from fst.backends.sources import cpp_library
from fst.ops import cpp
from tests.conftest import kernels_that_run


def test_kernels_are_compiled_where_a_compiler_is(compiler):
    why = cpp.missing()
    assert not (compiler and why), f"{why}; {compiler} is here: pip install -e . compiles them"


def test_the_line_names_what_ran(monkeypatch):
    """The library of the processor's instructions, or what is missing."""
    level = torch.backends.cpu.get_cpu_capability().lower()
    if not cpp.missing():
        assert kernels_that_run() == f"C++ kernels: {cpp_library().name}"
        assert level in cpp_library().stem or cpp_library().stem == "cpu_base"
    monkeypatch.setattr(cpp, "missing", lambda: "not compiled")
    assert kernels_that_run() == "C++ kernels: not compiled"

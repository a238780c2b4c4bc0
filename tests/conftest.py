"""One thread per worker, fixed seeds and a hypothesis profile for the whole suite.

`pytest` leaves out what is marked `system` (compilers, processes, wheels, the site), and what is
marked `exhaustive`, the rest of a crossing of which the hard part runs:

    pytest -m "system and not exhaustive"     # `make test-system`
    pytest -m "not campaign"                  # everything, the full crossings too
    pytest -m exhaustive                      # only what is left out of them otherwise
    pytest -m campaign                        # see docs/reliability.md
    pytest -m "not slow and not exhaustive"   # a -m of one's own replaces that of setup.cfg
    make test PYTEST_ARGS='-m "not campaign"'
"""

import gc
import shutil
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

from fst.backends import backend
from fst.backends.sources import cpp_library
from fst.basics.arguments import STOP_SIGNALS
from fst.ops import cpp
from fst.ops.backends import prune_triton as ops
from tests.stand_in import PruneWeight, stand_ins

COMPILERS = ("c++", "g++", "clang++")
KERNELS = dict.fromkeys(("prune_weight", "prune_grad_output"), "triton")

torch.set_num_threads(1)

settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """No decisions that the user's autotuner has taken, nor any that times of this machine take."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FST_AUTOTUNE", "0")
        environment.setenv("FST_CACHE_DIR", str(tmp_path_factory.mktemp("fst-cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _short_collections():
    """mmengine calls gc.collect for each data set: leave out what earlier tests have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _signals_arrive():
    """Also where the tests were started by nohup or by a script in the background."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == signal.SIG_IGN:
            handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _signal_handlers():
    """A command that was stopped leaves handlers for the rest of its process."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _seed_and_one_thread():
    """Commands have an option for the number of threads."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


def kernels_that_run() -> str:
    """The library of C++ kernels that these tests call, or why they call none."""
    return f"C++ kernels: {cpp.missing() or cpp_library().name}"


def pytest_terminal_summary(terminalreporter):
    """Say at the end which kernels were tested: a clone may lack its compiled ones."""
    instructions = torch.backends.cpu.get_cpu_capability()
    terminalreporter.write_line(f"{kernels_that_run()} (torch uses {instructions})")


@pytest.fixture(scope="session")
def compiler() -> str:
    """A C++ compiler of this machine; "" where there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), "")


def pytest_make_parametrize_id(config, val, argname):
    """Name the rows of the settings and shape tables by their own ``id``."""
    return getattr(val, "id", None)


@pytest.fixture
def triton_usable(monkeypatch) -> dict[str, str]:
    """As if Triton's kernels could run here; returns how to `force` them."""
    for operation, name in KERNELS.items():
        monkeypatch.setattr(type(backend(operation, name)), "unavailable", lambda _: "")
    return KERNELS


@pytest.fixture
def stand_in(monkeypatch, triton_usable) -> PruneWeight:
    """Kernels are replaced; returns what prunes weights."""
    kernels = stand_ins()
    monkeypatch.setattr(ops, "_kernels", kernels.__getitem__)
    return kernels["prune_weight"]

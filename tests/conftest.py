"""What holds for every test: one thread, no network, slow ones only when asked, reproducible examples in CI."""

from __future__ import annotations

import os

# Before anything imports torch: oversubscribed OpenMP is several times slower, and another number of threads
# changes bits. Child processes inherit these.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"
for _variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
    os.environ[_variable] = "1"
os.environ["MPLBACKEND"] = "Agg"
# Whoever starts the tests in a terminal of their own width, or without colours, sees what others see.
for _variable in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(_variable, None)

import gc
import ipaddress
import multiprocessing
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.support")

settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True, print_blob=True)
settings.register_profile("nightly", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

# A shell starts what runs in the background with interrupts ignored, and children inherit that; tests interrupt theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ON_DEMAND = {
    "slow": "tests of more than about two seconds",
    "broad": "all cases of tests whose slow cases are a sample",
    "bench": "measurements",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    for marker, what in ON_DEMAND.items():
        parser.addoption(f"--run-{marker}", action="store_true", help=f"also run {what}")
    parser.addoption(
        "--seeds", type=int, default=2, metavar="N", help="interleavings of streams tried for each case"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _thin_out_cases_that_cross_the_same_choices(items)
    left_out = {marker for marker in ON_DEMAND if not config.getoption(f"--run-{marker}")}
    unwanted = [item for item in items if any(item.get_closest_marker(marker) for marker in left_out)]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if item not in unwanted]


def _thin_out_cases_that_cross_the_same_choices(items: Iterable[pytest.Item]) -> None:
    """Of a test marked ``crossed(quick=N, slow=M)``, leave every Nth case quick and every Mth of the others slow; the rest is broad."""
    num_seen: Counter[tuple[str, str]] = Counter()
    for item in items:
        marker = item.get_closest_marker("crossed")
        if marker is None:
            continue
        function = item.nodeid.partition("[")[0]
        for speed in ("quick", "slow"):
            if speed == "quick" and item.get_closest_marker("slow") is not None:
                continue
            number = num_seen[function, speed]
            num_seen[function, speed] += 1
            if number % marker.kwargs.get(speed, 1) == 0:
                break
            item.add_marker(pytest.mark.slow if speed == "quick" else pytest.mark.broad)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep what importing and collecting made out of later garbage collections, and have fewer of them.

    These are 600,000 objects that live to the end. Looking at them again and again was a fifth of the tests' time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        reason = _why_no_cuda()
        if reason is not None:
            pytest.skip(reason)


def _why_no_cuda() -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return "needs a CUDA device: torch is not installed"
    if torch.cuda.is_available():
        return None
    return f"needs a CUDA device: torch {torch.__version__} finds none"


def _refuse_unless_local(address: Any) -> None:
    if not isinstance(address, tuple):
        return  # a path of a Unix socket
    host = address[0]
    if host in ("", "localhost", socket.gethostname()):
        return
    try:
        if ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:
        pass
    message = f"a test reached for the network: {address!r}"
    raise RuntimeError(message)


class _LocalSocket(socket.socket):
    """Socket that connects to this machine only."""

    def connect(self, address: Any, /) -> None:
        _refuse_unless_local(address)
        super().connect(address)

    def connect_ex(self, address: Any, /) -> int:
        _refuse_unless_local(address)
        return super().connect_ex(address)


socket.socket = _LocalSocket  # type: ignore[misc]


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """Find the test that leaves variables behind."""
    from tests.support.environment import unchanged_environment

    with unchanged_environment():
        yield


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Undo what an earlier test did to torch's number of threads."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _ranks_begin_as_copies() -> None:
    """Give ranks torch without a second for importing it, in everything that a test starts through our launcher."""
    from tests.support.forked import copy_ranks

    copy_ranks()


@pytest.fixture(autouse=True, scope="session")
def _only_devices_count_live_tensors() -> None:
    """Leave out, on the CPU, that sessions look at the memory of their first two steps, which takes as long as ten more."""
    session = sys.modules.get("executors.runs.session")
    if session is not None:
        of_devices = session.ObservedSteps
        nothing = SimpleNamespace(peak_bytes=0, step=nullcontext)
        session.ObservedSteps = lambda device: nothing if device.type == "cpu" else of_devices(device)


@pytest.fixture
def live_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the sessions of this test look at their memory, as users' do."""
    from executors.runs import session
    from executors.steps.memory import ObservedSteps

    monkeypatch.setattr(session, "ObservedSteps", ObservedSteps)


@pytest.fixture(autouse=True, scope="session")
def _memory_is_measured_once() -> None:
    """Give every plan for this machine the bandwidth that its process measured first, which took all cores a third of a second."""
    from topology import detection

    detection.measure_copy_bandwidth = cache(detection.measure_copy_bandwidth)


@pytest.fixture
def fresh_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks of this test started as users' are: fresh processes, which import all they need."""
    from executors.ranks import launch

    monkeypatch.setattr(launch, "PROCESSES", multiprocessing.get_context("spawn"))

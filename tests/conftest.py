"""Fixtures for the library's tests: a device, and resources on it that are closed afterwards.

A test that needs any device takes ``context``, and states unusual requirements with
``support.needs``. A test that only makes sense on a real device takes ``verbs_context``, and does
not run on soft0.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import signal
from collections.abc import Iterator

import pytest
from support import Connect, Pair, kernel

import rdmapost as rp

NO_DEVICE = "no RDMA device on this machine; tests/guest.py runs these on Soft-RoCE"

with contextlib.suppress(ImportError):
    import hypothesis

    # The tests may run on a read-only file system, or on a much slower machine.
    hypothesis.settings.register_profile(
        "rdmapost",
        database=None,
        deadline=None,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.function_scoped_fixture,
        ],
    )
    hypothesis.settings.load_profile("rdmapost")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rdma: needs a real RDMA device, such as Soft-RoCE")
    config.addinivalue_line("markers", "two_hosts: needs a second machine on the same network")
    config.addinivalue_line("markers", "slow: takes 20 s of CPU, and is the same on every Python")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell script's background jobs ignore SIGINT, and so would every program that a test
        # starts and interrupts.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup() -> None:
    """Remove hypothesis' callback, which would swallow what a signal handler raises in it.

    CPython reports an exception in a callback of the collector, and drops it.
    """
    gc.callbacks.clear()


def pytest_report_header() -> list[str]:
    return [f"kernel: {kernel()}", f"rdmapost: {rp.__file__}"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Summarize why tests were skipped, one line per reason.

    The same few reasons apply to hundreds of tests, and would bury the failures.
    """
    reasons = collections.Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
    )
    if reasons:
        terminalreporter.section("skipped")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5} {reason}")


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_is_new() -> None:
    """Hide objects that pytest and earlier modules keep from the garbage collector.

    Some tests run it thousands of times, and a run over all objects takes a third of a second.
    """
    gc.collect()
    gc.freeze()


def _open_soft() -> rp.Context:
    return rp.open_device("soft0")


def open_verbs() -> rp.Context:
    """Open the verbs device that RDMAPOST_DEVICE names, or the first with an active port."""
    try:
        names = [info.name for info in rp.list_devices() if info.kind == "verbs"]
    except rp.NoRdmaError:
        names = []
    wanted = os.environ.get("RDMAPOST_DEVICE")
    for name in [wanted] if wanted in names else names:
        context = rp.open_device(name)
        if context.query_port(1).state is rp.PortState.ACTIVE:
            return context
        context.close()
    if os.environ.get("RDMAPOST_REQUIRE_DEVICE") == "1":
        pytest.fail(f"RDMAPOST_REQUIRE_DEVICE=1, and there is {NO_DEVICE}")
    pytest.skip(NO_DEVICE)


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(_open_soft, id="soft0"),
        pytest.param(open_verbs, id="verbs", marks=pytest.mark.rdma),
    ],
)
def context(request: pytest.FixtureRequest) -> Iterator[rp.Context]:
    """An open device; a test that takes it runs on each kind of device."""
    with request.param() as opened:
        yield opened


@pytest.fixture(
    scope="session", params=[pytest.param(open_verbs, id="verbs", marks=pytest.mark.rdma)]
)
def verbs_context(request: pytest.FixtureRequest) -> Iterator[rp.Context]:
    """An open real device, for tests that soft0 cannot run."""
    with request.param() as opened:
        yield opened


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """An exit stack, closed after the test."""
    with contextlib.ExitStack() as opened:
        yield opened


@pytest.fixture
def pd(context: rp.Context, stack: contextlib.ExitStack) -> rp.PD:
    return stack.enter_context(rp.PD(context))


@pytest.fixture
def cq(context: rp.Context, stack: contextlib.ExitStack) -> rp.CQ:
    return stack.enter_context(rp.CQ(context, 512))


@pytest.fixture
def connect(pd: rp.PD, cq: rp.CQ, stack: contextlib.ExitStack) -> Connect:
    """Make pairs of connected queue pairs."""

    def make(qp_type: rp.QPType = rp.QPType.RC, **options: object) -> Pair:
        return Pair(stack, pd, cq, qp_type, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def rc(connect: Connect) -> Pair:
    """A connected pair of RC queue pairs."""
    return connect()


@pytest.fixture
def device(context: rp.Context) -> str:
    """The name of a device, for a test whose body runs in a separate Python."""
    return context.name


@pytest.fixture
def soft() -> str:
    """The name of the device that is always available."""
    return "soft0"


@pytest.fixture
def real(verbs_context: rp.Context) -> str:
    """The name of a real device; soft0 has a separate test of the same."""
    return verbs_context.name

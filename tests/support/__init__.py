"""Helpers shared by the tests."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

import rdmapost as rp
from rdmapost import Access, DeviceCap, QPState, QPType, SendOps, WCStatus
from rdmapost.resources.resource import Resource, _all_open

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

ALL = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
LOCAL_ERROR = {
    WCStatus.LOC_PROT_ERR,
    # rxe reports a local error in a send or write this way,
    WCStatus.LOC_QP_OP_ERR,
    # and on Linux 6.12 it may flush the failed work request itself.
    WCStatus.WR_FLUSH_ERR,
}
"""The possible statuses of a wrong lkey, or of an operation that the queue pair cannot do."""

GRH = 40
"""Bytes in front of the message in a UD receive."""

TIMES = 1 if os.environ.get("RDMAPOST_REQUIRE_DEVICE") != "1" else 5
"""How much longer things may take: a guest is emulated."""

LIMIT = 120.0
"""Seconds to wait for something that must happen."""

MOMENT = 0.2
"""Seconds after which a pending work request is assumed not to complete."""

TYPES = [QPType.RC, QPType.UC, QPType.UD]
CONNECTED = [QPType.RC, QPType.UC]


def kernel() -> str:
    """Return the kernel's version, because devices in it differ between versions."""
    return platform.release()


def resident() -> int:
    """Return this process's resident memory in bytes."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def until(holds: Callable[[], object]) -> None:
    """Poll until a condition is true that another thread causes without reporting it."""
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def needs(condition: object, what: str, context: rp.Context) -> None:
    """Skip a test by name if the device lacks what it needs."""
    if not condition:
        pytest.skip(f"{context.name} has no {what}")


SEND_OP_CAPS = {
    SendOps.FLUSH: DeviceCap.FLUSH_GLOBAL | DeviceCap.FLUSH_PERSISTENT,
    SendOps.ATOMIC_WRITE: DeviceCap.ATOMIC_WRITE,
}


def needs_send_op(context: rp.Context, op: SendOps) -> None:
    """Skip where the kernel or libibverbs lacks an opcode."""
    needs(context.attr.device_cap_flags_ex & SEND_OP_CAPS[op], op.name or "", context)
    made = False
    with contextlib.suppress(rp.UnsupportedError), rp.PD(context) as pd, rp.CQ(context) as cq:
        rp.QP(pd, QPType.RC, cq, send_ops_flags=op).close()
        made = True
    needs(made, f"{op.name} in the installed libibverbs", context)


@pytest.fixture(scope="module")
def soft_context() -> Iterator[rp.Context]:
    """soft0, for files about what only it does: ``context = soft_context``."""
    with rp.open_device("soft0") as opened:
        yield opened


class Connect(Protocol):
    def __call__(self, qp_type: QPType = QPType.RC, **options: Any) -> Pair: ...


class Pair:
    """Two queue pairs that are connected to each other, and memory for each.

    Attributes:
        a, b: the queue pairs; both complete on ``cq``.
        mine, theirs: a memory region for each side, all accesses allowed.
        ah: the address handle from a to b, on UD.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        pd: rp.PD,
        cq: rp.CQ,
        qp_type: QPType = QPType.RC,
        *,
        size: int = 8192,
        to: rp.QPState = rp.QPState.RTS,
        rnr_retry: int = 1,
        access: int = ALL & ~Access.LOCAL_WRITE,
        b_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.pd, self.cq, self.type = pd, cq, qp_type
        self._connect_options = {"rnr_retry": rnr_retry, "access": access}
        self.mine = stack.enter_context(rp.MR(pd, size, ALL))
        self.theirs = stack.enter_context(rp.MR(pd, size, ALL))
        self.a = stack.enter_context(rp.QP(pd, qp_type, cq, **options))
        self.b = stack.enter_context(rp.QP(pd, qp_type, cq, **{**options, **(b_options or {})}))
        self.ah: rp.AH | None = None
        if to is rp.QPState.RTS:
            self.connect()
        if qp_type is QPType.UD:
            self.ah = stack.enter_context(self.a.ah_to(self.b.endpoint()))
        # Queue pairs first: outstanding work requests name the regions.
        stack.callback(self.b.close)
        stack.callback(self.a.close)

    def connect(self) -> None:
        """Bring both sides to RTS."""
        self.a.connect(self.b.endpoint(), **self._connect_options)
        self.b.connect(self.a.endpoint(), **self._connect_options)

    def wr(self, wr_type: type, *args: Any, **fields: Any) -> Any:
        """Make a work request for a to post, with b's address or memory filled in."""
        if self.type is QPType.UD and issubclass(wr_type, rp.Send | rp.SendWithImm):
            assert self.ah is not None
            fields = {
                "ah": self.ah,
                "remote_qpn": self.b.qp_num,
                "remote_qkey": rp.resources.qp.DEFAULT_QKEY,
                **fields,
            }
        remote = rp.RdmaWrite | rp.RdmaWriteWithImm | rp.RdmaRead
        if issubclass(wr_type, remote | rp.AtomicCmpAndSwp | rp.AtomicFetchAndAdd):
            fields = {"remote_addr": self.theirs.addr, "rkey": self.theirs.rkey, **fields}
        return wr_type(*args, **fields)

    def send(self, *args: Any, **fields: Any) -> Any:
        """Make a SEND for a to post."""
        return self.wr(rp.Send, *args, **fields)

    def works(self) -> None:
        """Send a message and see that it arrives: the pair is usable."""
        grh = GRH if self.type is QPType.UD else 0
        self.mine.buffer[-8:] = b"still ok"
        self.b.post_recv(rp.RecvWR(self.theirs[:256], wr_id=901))
        self.a.post_send(self.send(self.mine[-8:], wr_id=900))
        done = {wc.wr_id: wc.status for wc in self.cq.wait(2)}
        assert done == {900: WCStatus.SUCCESS, 901: WCStatus.SUCCESS}
        assert bytes(self.theirs.buffer[grh : grh + 8]) == b"still ok"

    def wait(self, count: int = 1, timeout: float = 10.0) -> list[rp.WC]:
        """Wait for completions, all of them successful."""
        return [wc.check() for wc in self.cq.wait(count, timeout)]

    def finish(self) -> dict[int, WCStatus]:
        """Move both sides to ERR, and return the statuses of what was outstanding, by wr_id."""
        found: dict[int, WCStatus] = {}
        for qp in (self.a, self.b):
            qp.to_err()
        while any(self.a.outstanding) or any(self.b.outstanding):
            found |= {wc.wr_id: wc.status for wc in self.cq.wait(1)}
        return found


LOSES_MEMORY = {"ASAN_OPTIONS": "detect_leaks=0"}
"""For a program in which Python itself leaks memory: that of threads stopped at interpreter exit,
and locks that are replaced in the child of a fork."""


def run_python(
    code: str, *args: str, timeout: float = 150, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a separate Python, for 150 seconds times TIMES; return its output."""
    return subprocess.run(
        # -P: import the installed package, not one in the current directory.
        [sys.executable, "-P", "-W", "error", "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=timeout * TIMES,
        check=False,
        env={**os.environ, **env},
    )


def prints(code: str, *args: str, **env: str) -> str:
    """Run a program that must succeed with nothing on standard error; return its output."""
    done = run_python(code, *args, **env)
    assert done.returncode == 0, done.stderr or f"ended with {done.returncode}"
    assert done.stderr == ""
    return done.stdout.strip()


class Interrupted(BaseException):
    """The exception that a signal handler raises."""


@contextlib.contextmanager
def _no_automatic_gc() -> Iterator[None]:
    """Disable automatic collection, whose callbacks, and those of weakrefs, lose interrupts."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_no_automatic_gc()
def interrupt_everywhere(call: Callable[[], object]) -> int:
    """Interrupt a call at each point at which Python runs signal handlers, once each.

    The call must leave nothing open, even though the exceptions and their tracebacks are kept.

    Returns:
        the number of such points.
    """
    kept: list[Interrupted] = []
    before = _all_open()
    while True:
        seen = 0

        def look(_: object, event: str, __: object) -> None:
            nonlocal seen
            # On entry to a Python function, and after a C function has returned.
            seen += event in ("call", "c_return")
            if seen > len(kept):
                sys.setprofile(None)
                raise Interrupted

        sys.setprofile(look)
        try:
            made = call()
        except Interrupted as error:
            kept.append(error)
        else:
            sys.setprofile(None)
            if isinstance(made, Resource):
                made.close()
            return len(kept)
        finally:
            sys.setprofile(None)
        assert _all_open() == before, f"at moment {seen}"


def nothing_comes(cq: rp.CQ) -> None:
    """Check that no completion comes for a moment."""
    with pytest.raises(rp.WaitTimeout, match="0 of 1 completions came"):
        cq.wait(timeout=MOMENT)


def writes(pair: Pair, count: int, start: int = 0) -> list[rp.RdmaWrite]:
    """Make writes of one byte each, whose values are 1, 2, 3, ..."""
    pair.mine.buffer[:count] = bytes(range(1, count + 1))
    return [
        pair.wr(
            rp.RdmaWrite, pair.mine[i : i + 1], remote_addr=pair.theirs.addr + i, wr_id=start + i
        )
        for i in range(count)
    ]


def connected(
    stack: contextlib.ExitStack, pd: rp.PD, near_cq: rp.CQ, far_cq: rp.CQ
) -> tuple[rp.QP, rp.QP]:
    """Make two connected RC queue pairs, each with its own CQ."""
    near = stack.enter_context(rp.QP(pd, QPType.RC, near_cq))
    far = stack.enter_context(rp.QP(pd, QPType.RC, far_cq))
    far.connect(near.endpoint())
    near.connect(far.endpoint(), rnr_retry=1)
    return near, far


def waiting(source: rp.CQ | rp.CompChannel, threads: list[threading.Thread]) -> None:
    """Wait until all threads wait for a CQ or a channel."""
    until(lambda: source._poller.waiting == len(threads))


def ended(threads: list[threading.Thread]) -> None:
    """Join threads, which must end."""
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()


def write(pair: Pair, wr_id: int = 0) -> Any:
    """Make a write of one byte."""
    return pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=wr_id)


def refused(pair: Pair, wr: rp.SendWR, words: str) -> None:
    """Check that a post is refused, with nothing posted."""
    with pytest.raises(rp.PostError, match=words) as caught:
        pair.a.post_send(wr)
    assert caught.value.wr is wr
    assert pair.a.outstanding.send == 0


def climb(qp: rp.QP, state: QPState, remote: rp.Endpoint) -> None:
    """Bring a queue pair up from RESET to a state, and down to SQD from RTS."""
    connected = qp.qp_type is not QPType.UD
    transitions = {
        QPState.INIT: qp.to_init,
        QPState.RTR: lambda: qp.to_rtr(remote if connected else None),
        QPState.RTS: lambda: qp.to_rts(rnr_retry=1),
        QPState.SQD: qp.to_sqd,
    }
    for step, move in transitions.items():
        if qp.state < step <= state:
            move()
    assert qp.state is state

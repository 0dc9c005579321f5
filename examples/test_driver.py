"""Test how a device handles invalid work requests.

A queue pair normally refuses these before they reach the driver. With `checked=False` it passes
them on. The driver must then refuse the post, or the device must complete it with an error; the
memory must not change.

    RDMAPOST_DEVICE=mlx5_0 pytest examples/test_driver.py     (default: soft0)
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

import pytest

import rdmapost as rp

ALL = (
    rp.Access.LOCAL_WRITE | rp.Access.REMOTE_READ | rp.Access.REMOTE_WRITE | rp.Access.REMOTE_ATOMIC
)
PAGE = 4096
DEVICE = os.environ.get("RDMAPOST_DEVICE", "soft0")


class Target:
    """Two connected queue pairs, the first one unchecked, and memory with guard pages."""

    def __init__(self, context: rp.Context, pd: rp.PD, cq: rp.CQ) -> None:
        self.pd, self.cq = pd, cq
        self.memory = bytearray(b"\x5a" * (3 * PAGE))
        # Only the page in the middle is registered.
        self.mr = rp.MR(pd, memoryview(self.memory)[PAGE : 2 * PAGE], ALL)
        self.read_only = rp.MR(pd, PAGE, rp.Access.REMOTE_READ)
        self.qp = rp.QP(pd, rp.QPType.RC, cq, checked=False)
        self.peer = rp.QP(pd, rp.QPType.RC, cq)
        self.qp.connect(self.peer.endpoint(), rnr_retry=1)
        self.peer.connect(self.qp.endpoint())

    def outcome(self, wr: rp.SendWR) -> str:
        """Post a work request; return the errno with which it was refused, or its status."""
        try:
            self.qp.post_send(wr)
        except rp.PostError as error:
            return errno.errorcode[error.errno or 0]
        return self.cq.wait(1, timeout=30)[0].status.name

    def close(self) -> None:
        for resource in (self.qp, self.peer, self.mr, self.read_only):
            resource.close()


@pytest.fixture
def target() -> Iterator[Target]:
    with rp.open_device(DEVICE) as context, rp.PD(context) as pd, rp.CQ(context) as cq:
        made = Target(context, pd, cq)
        yield made
        made.close()


def test_a_valid_write_succeeds(target: Target) -> None:
    there = {"remote_addr": target.mr.addr + 64, "rkey": target.mr.rkey}
    assert target.outcome(rp.RdmaWrite(target.mr[:64], **there)) == "SUCCESS"


INVALID: dict[str, Callable[[Target], rp.SendWR]] = {
    "unknown lkey": lambda t: rp.RdmaWrite(
        rp.SGE(t.mr.addr, 8, t.mr.lkey ^ 0xFF00), remote_addr=t.mr.addr, rkey=t.mr.rkey
    ),
    "local end": lambda t: rp.RdmaWrite(
        rp.SGE(t.mr.end - 4, 8, t.mr.lkey), remote_addr=t.mr.addr, rkey=t.mr.rkey
    ),
    "read into read-only memory": lambda t: rp.RdmaRead(
        rp.SGE(t.read_only.addr, 8, t.read_only.lkey), remote_addr=t.mr.addr, rkey=t.mr.rkey
    ),
    "unknown rkey": lambda t: rp.RdmaWrite(
        t.mr[:8], remote_addr=t.mr.addr, rkey=t.mr.rkey ^ 0xFF00
    ),
    "remote end": lambda t: rp.RdmaWrite(t.mr[:8], remote_addr=t.mr.end - 4, rkey=t.mr.rkey),
    "remote start": lambda t: rp.RdmaWrite(t.mr[:8], remote_addr=t.mr.addr - 4, rkey=t.mr.rkey),
    "write without REMOTE_WRITE": lambda t: rp.RdmaWrite(
        t.mr[:8], remote_addr=t.read_only.addr, rkey=t.read_only.rkey
    ),
    "misaligned atomic": lambda t: rp.AtomicFetchAndAdd(
        t.mr[:8], remote_addr=t.mr.addr + 4, rkey=t.mr.rkey, compare_add=1
    ),
    "too many SGEs": lambda t: rp.RdmaWrite(
        [t.mr[:8]] * (t.qp.max_send_sge + 1), remote_addr=t.mr.addr, rkey=t.mr.rkey
    ),
    "send without a receive": lambda t: rp.Send(t.mr[:8]),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_work_request_does_no_harm(target: Target, name: str) -> None:
    outcome = target.outcome(INVALID[name](target))
    print(f"{DEVICE}: {name}: {outcome}")
    assert outcome != "SUCCESS"
    assert target.memory == b"\x5a" * (3 * PAGE)
    assert not any(target.read_only.buffer)


@pytest.mark.parametrize("name", INVALID)
def test_the_queue_pair_recovers(target: Target, name: str) -> None:
    target.outcome(INVALID[name](target))
    for qp in (target.qp, target.peer):
        qp.to_reset()
    target.qp.connect(target.peer.endpoint())
    target.peer.connect(target.qp.endpoint())
    target.cq.poll()
    there = {"remote_addr": target.mr.addr + 64, "rkey": target.mr.rkey}
    assert target.outcome(rp.RdmaWrite(target.mr[:64], **there)) == "SUCCESS"

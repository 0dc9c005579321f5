"""A device with two connected queue pairs, created for each test."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import rdmapost as rp
from rdmapost.providers.software.state import objects
from support import TIMES, threads

ALL = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE | rp.Access.REMOTE_READ
BINDABLE = ALL | rp.Access.MW_BIND
INLINE = rp.SendFlags.SIGNALED | rp.SendFlags.INLINE
LIMIT = 2.0 * TIMES
"""Seconds after which what must come does not come."""


def open_files() -> set[str]:
    """Return the open descriptors of this process, and what each is."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {f"{link} {os.readlink(link)}" for link in links if os.path.lexists(link)}


def left_on_soft0() -> int:
    """Return how many objects soft0 has: it closes even if some are left."""
    return len(objects)


class Memory(bytearray):
    """A bytearray that a weakref can observe."""

    __slots__ = ("__weakref__",)


class Rig:
    """A device, a domain, a CQ, a region, and two RC queue pairs connected to each other.

    Attributes:
        context, pd, cq, mr, a, b: the resources; both queue pairs complete on ``cq``.
        memory: the region's memory.
        more: other resources that a test created; closed first, the latest first.
        found: completions that a test has polled.
        rows: the buffer for completions polled as rows; its initial bytes match no completion.
    """

    def __init__(self, device: str = "soft0", **options: Any) -> None:
        self.files, self.objects = open_files(), left_on_soft0()
        self.context = rp.open_device(device)
        self.pd = rp.PD(self.context)
        self.cq = rp.CQ(self.context, 4096)
        self.memory = Memory(4096)
        self.mr = rp.MR(self.pd, self.memory, BINDABLE)
        self.a, self.b = self.queue_pair(max_inline_data=64, **options), self.queue_pair()
        self.a.connect(self.b.endpoint(), rnr_retry=1)
        self.b.connect(self.a.endpoint(), rnr_retry=1)
        self.more: list[Any] = []
        self.found: list[rp.WC] = []
        self.rows = bytearray(b"\xee" * 48 * 8)

    def queue_pair(self, **options: Any) -> rp.QP:
        return rp.QP(self.pd, rp.QPType.RC, self.cq, **options)

    def write(self, number: int = 0, **fields: Any) -> rp.RdmaWrite:
        """Make a write of the byte 1 to an offset that no other write uses, its wr_id."""
        self.mr.buffer[0] = 1
        return rp.RdmaWrite(
            self.mr[:1],
            **{
                "wr_id": number,
                "remote_addr": self.mr.addr + 1024 + number,
                "rkey": self.mr.rkey,
                **fields,
            },
        )

    def written(self) -> set[int]:
        """Return the numbers of the writes that have arrived."""
        return {number for number in range(1024) if self.mr.buffer[1024 + number]}

    def receive(self, number: int) -> rp.RecvWR:
        return rp.RecvWR(self.mr[3072:3080], wr_id=number)

    def drain(self) -> None:
        """Poll until everything outstanding in a's send queue has completed."""
        deadline = time.monotonic() + LIMIT
        while True:
            self.found += self.cq.poll()
            if not self.a.outstanding.send:
                break
            assert time.monotonic() < deadline, (
                f"{self.a.outstanding.send} outstanding that the device has not, "
                f"completions of {sorted(wc.wr_id for wc in self.found)}"
            )
        self.found += self.cq.poll()

    def drain_receives(self) -> None:
        """Send messages until all of b's outstanding receives have completed."""
        left = self.b.outstanding.recv
        for _ in range(left):
            self.a.post_send(rp.Send(self.mr[:8], wr_id=900))
        received = 0
        deadline = time.monotonic() + LIMIT
        while received < left:
            done = self.cq.poll()
            self.found += done
            received += sum(1 for wc in done if wc.opcode is rp.WCOpcode.RECV)
            assert time.monotonic() < deadline, f"{received} of {left} messages were received"
        self.drain()
        assert self.b.outstanding.recv == 0

    def works(self) -> None:
        """Post, poll and see the byte arrive: nothing is locked, lost or full."""
        self.found += self.cq.poll()
        self.mr.buffer[1000] = 0
        self.a.post_send(self.write(999, remote_addr=self.mr.addr + 1000))
        deadline = time.monotonic() + LIMIT
        while True:
            done = self.cq.poll()
            self.found += [wc for wc in done if wc.wr_id != 999]
            if any(wc.check().wr_id == 999 for wc in done):
                break
            assert time.monotonic() < deadline, "a fresh write does not complete"
        assert self.mr.buffer[1000] == 1, "a fresh write has not arrived"

    def close(self) -> None:
        """Close everything; fail if something cannot be closed or leaves a descriptor open."""
        for thing in self.more[::-1]:
            thing.close()
        self.more.clear()
        for qp in (self.a, self.b):
            qp.to_reset()
            assert qp.outstanding == (0, 0), f"{qp.outstanding} after a reset"
            qp.close()
        self.mr.close()
        # A bytearray can be resized only if no view of it is left.
        self.memory += b"resized"
        gc.collect()
        self.cq.close()
        self.pd.close()
        self.context.close()
        left = open_files() - self.files
        assert not left, f"descriptors left: {left}"
        assert left_on_soft0() <= self.objects, "the soft device still has something"


thread = functools.partial(threads.thread, limit=LIMIT)


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {LIMIT:g} s"
        time.sleep(0.001)


class Number:
    """A number that runs code when it is read, as a caller's own type may."""

    def __init__(self, value: int, run: Callable[[], object]) -> None:
        self.value, self.run = value, run

    def __index__(self) -> int:
        self.run()
        return self.value

    __int__ = __index__
    __hash__ = None  # type: ignore[assignment]

    def __lt__(self, other: Any) -> bool:
        return self.__index__() < other

    def __le__(self, other: Any) -> bool:
        return self.__index__() <= other

    def __gt__(self, other: Any) -> bool:
        return self.__index__() > other

    def __ge__(self, other: Any) -> bool:
        return self.__index__() >= other

    def __and__(self, other: Any) -> int:
        return self.__index__() & other

    def __rshift__(self, other: Any) -> int:
        return self.__index__() >> other

    def __mod__(self, other: Any) -> int:
        return self.__index__() % other

"""Test what a program does when RDMA fails, with the faults that soft0 can inject.

`Replica` is the program: it copies a buffer to a remote node, waits while its queue is full, and
reconnects after an error. The tests make soft0 fail in ways that hardware rarely does.

    pytest examples/test_fault_injection.py
"""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import rdmapost as rp

# ---- the program ----------------------------------------------------------------


class Replica:
    """Copies its memory to another region, over a connection that it repairs."""

    def __init__(self, context: rp.Context, stack: ExitStack, size: int = 4096) -> None:
        enter = stack.enter_context
        pd = enter(rp.PD(context))
        self.cq = enter(rp.CQ(context))
        self.mr = enter(rp.MR(pd, size))
        self.copy = enter(rp.MR(pd, size, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE))
        self.near, self.far = (enter(rp.QP(pd, rp.QPType.RC, self.cq)) for _ in range(2))
        self.wr_ids = itertools.count(1)
        self.reconnected = 0
        self.connect()

    def connect(self) -> None:
        for qp, peer in ((self.near, self.far), (self.far, self.near)):
            qp.connect(peer.endpoint())

    def write(self, attempts: int = 3) -> None:
        """Copy the memory; raise CompletionError if that fails several times."""
        for attempt in range(attempts):
            wr = rp.RdmaWrite(
                self.mr[:], wr_id=next(self.wr_ids), remote_addr=self.copy.addr, rkey=self.copy.rkey
            )
            self.post(wr)
            try:
                self.cq.wait(1)[0].check()
                return
            except rp.CompletionError:
                if attempt == attempts - 1:
                    raise
                # An error puts the queue pair into ERR: reset both sides and connect again.
                self.near.to_reset()
                self.far.to_reset()
                self.connect()
                self.reconnected += 1

    def post(self, wr: rp.SendWR, attempts: int = 10) -> None:
        for attempt in range(attempts):
            try:
                self.near.post_send(wr)
                return
            except rp.PostError as error:
                # A full queue will drain; any other error is a bug in this program.
                if error.errno != errno.ENOMEM or attempt == attempts - 1:
                    raise
                time.sleep(0.001)


# ---- its tests ------------------------------------------------------------------


@pytest.fixture
def context() -> Iterator[rp.Context]:
    with rp.open_device("soft0") as context:
        yield context


@pytest.fixture
def replica(context: rp.Context) -> Iterator[Replica]:
    with ExitStack() as stack:
        made = Replica(context, stack)
        made.mr.buffer[:5] = b"hello"
        yield made


def test_written_bytes_reach_the_copy(replica: Replica) -> None:
    replica.write()
    assert bytes(replica.copy.buffer[:5]) == b"hello"


def test_tries_again_while_the_queue_is_full(context: rp.Context, replica: Replica) -> None:
    for _ in range(3):
        context.faults.fail_post(errno.ENOMEM)
    replica.write()
    assert bytes(replica.copy.buffer[:5]) == b"hello"


def test_does_not_repeat_what_the_device_calls_invalid(
    context: rp.Context, replica: Replica
) -> None:
    context.faults.fail_post(errno.EINVAL)
    with pytest.raises(rp.PostError) as caught:
        replica.write()
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize(
    "status", [rp.WCStatus.RETRY_EXC_ERR, rp.WCStatus.REM_OP_ERR, rp.WCStatus.RESP_TIMEOUT_ERR]
)
def test_connects_again_after_an_error(
    context: rp.Context, replica: Replica, status: rp.WCStatus
) -> None:
    context.faults.complete_with(wr_id=1, status=status)
    replica.write()
    assert replica.reconnected == 1
    assert bytes(replica.copy.buffer[:5]) == b"hello"


def test_gives_up_after_three_errors(context: rp.Context, replica: Replica) -> None:
    for wr_id in (1, 2, 3):
        context.faults.complete_with(wr_id, rp.WCStatus.RETRY_EXC_ERR)
    with pytest.raises(rp.CompletionError, match="RETRY_EXC_ERR"):
        replica.write()
    assert replica.reconnected == 2

"""RDMA_WRITE and RDMA_READ: what arrives, without a receive at the peer."""

from __future__ import annotations

import pytest

import rdmapost as rp
from rdmapost import WCOpcode


def test_write_reaches_the_peers_memory_without_a_completion_there(rc):
    """RDMA_WRITE: the bytes arrive, and the peer has no completion."""
    rc.mine.buffer[:5] = b"hello"
    rc.a.post_send(
        rp.RdmaWrite(rc.mine[:5], remote_addr=rc.theirs.addr + 50, rkey=rc.theirs.rkey, wr_id=9)
    )
    (sent,) = rc.wait()
    assert (sent.wr_id, sent.opcode) == (9, WCOpcode.RDMA_WRITE)
    assert bytes(rc.theirs.buffer[49:56]) == b"\0hello\0"
    assert rc.cq.poll() == []


def test_read_fetches_the_peers_bytes(rc):
    """RDMA_READ: the peer's bytes arrive here."""
    rc.theirs.buffer[:5] = b"hello"
    rc.a.post_send(rc.wr(rp.RdmaRead, rc.mine[10:15], wr_id=9))
    (done,) = rc.wait()
    assert (done.wr_id, done.opcode) == (9, WCOpcode.RDMA_READ)
    assert bytes(rc.mine.buffer[9:16]) == b"\0hello\0"


@pytest.mark.parametrize("wr_type", [rp.RdmaWrite, rp.RdmaRead])
def test_write_and_read_take_no_receive(rc, wr_type):
    """The far side does not see them, and needs nothing posted."""
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=7))
    rc.a.post_send(rc.wr(wr_type, rc.mine[:8], wr_id=9))
    assert [wc.wr_id for wc in rc.wait()] == [9]
    assert rc.cq.poll() == []
    assert rc.b.outstanding.recv == 1

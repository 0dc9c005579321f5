"""Immediate data: a number of the host at both ends, and the receive that it takes."""

from __future__ import annotations

import pytest
from support import CONNECTED, TYPES

import rdmapost as rp
from rdmapost import QPType, WCOpcode

WITH_IMM = [
    *((qp_type, rp.SendWithImm) for qp_type in TYPES),
    *((qp_type, rp.RdmaWriteWithImm) for qp_type in CONNECTED),
]


def is_write(wr_type: type) -> bool:
    return issubclass(wr_type, rp.RdmaWrite | rp.RdmaWriteWithImm)


@pytest.mark.parametrize(
    ("qp_type", "wr_type"), WITH_IMM, ids=lambda x: x.__name__ if isinstance(x, type) else x.name
)
def test_immediate_data_is_a_number_of_the_host_at_both_ends(connect, qp_type, wr_type):
    """All bytes differ: only the right order gives the same number."""
    pair = connect(qp_type)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:100], wr_id=7))
    pair.a.post_send(pair.wr(wr_type, pair.mine[:4], imm_data=0x01020304, wr_id=9))
    done = {wc.wr_id: wc for wc in pair.wait(2)}
    assert done[7].imm_data == 0x01020304
    assert done[7].opcode is (WCOpcode.RECV_RDMA_WITH_IMM if is_write(wr_type) else WCOpcode.RECV)
    assert done[9].imm_data is None


@pytest.mark.parametrize("wr_type", [rp.Send, rp.RdmaWrite])
def test_completion_without_immediate_data_or_key_has_none(rc, wr_type):
    """They are None instead of 0, which could have been sent."""
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=7))
    rc.a.post_send(rc.wr(wr_type, rc.mine[:8], wr_id=9))
    done = rc.wait(1 if is_write(wr_type) else 2)
    assert [wc.imm_data for wc in done] == [None] * len(done)
    assert [wc.invalidated_rkey for wc in done] == [None] * len(done)


@pytest.mark.parametrize(
    ("qp_type", "wr_type"), WITH_IMM, ids=lambda x: x.__name__ if isinstance(x, type) else x.name
)
def test_immediate_data_takes_a_receive(connect, qp_type, wr_type):
    pair = connect(qp_type)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:100], wr_id=7))
    pair.a.post_send(pair.wr(wr_type, pair.mine[:4], wr_id=9))
    pair.wait(2)
    assert pair.b.outstanding.recv == 0


def test_write_with_immediate_leaves_the_receives_buffers_alone(rc):
    """The data is at the remote address; only the receive's completion is used."""
    rc.mine.buffer[:4] = b"data"
    rc.b.post_recv(rp.RecvWR(rc.theirs[100:108], wr_id=7))
    rc.a.post_send(rc.wr(rp.RdmaWriteWithImm, rc.mine[:4], wr_id=9))
    rc.wait(2)
    assert bytes(rc.theirs.buffer[:5]) == b"data\0"
    assert not any(rc.theirs.buffer[100:108])


def test_write_with_immediate_writes_and_completes_a_receive(rc):
    """RDMA_WRITE_WITH_IMM: it also consumes a receive, whose buffer is unchanged."""
    rc.mine.buffer[:5] = b"hello"
    rc.b.post_recv(rp.RecvWR(rc.theirs[4096:], wr_id=7))
    rc.a.post_send(rc.wr(rp.RdmaWriteWithImm, rc.mine[:5], wr_id=9, imm_data=0xFFFFFFFE))
    done = {wc.wr_id: wc for wc in rc.wait(2)}
    assert done[9].opcode is WCOpcode.RDMA_WRITE
    assert done[7].opcode is WCOpcode.RECV_RDMA_WITH_IMM
    assert (done[7].imm_data, done[7].byte_len) == (0xFFFFFFFE, 5)
    assert bytes(rc.theirs.buffer[:6]) == b"hello\0"
    assert not any(rc.theirs.buffer[4096:])


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD])
@pytest.mark.parametrize("imm", [0, 1, 0x01020304, 0xFFFFFFFF])
def test_immediate_data_arrives_in_host_order(connect, qp_type, imm):
    pair = connect(qp_type)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:100], wr_id=7))
    pair.a.post_send(pair.wr(rp.SendWithImm, pair.mine[:4], imm_data=imm, wr_id=9))
    done = {wc.wr_id: wc for wc in pair.wait(2)}
    assert done[7].imm_data == imm
    assert done[7].wc_flags & rp.WCFlags.WITH_IMM
    assert done[9].imm_data is None

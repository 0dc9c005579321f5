"""SEND and SEND_WITH_IMM: the bytes arrive in the receive of the peer."""

from __future__ import annotations

from support import GRH

import rdmapost as rp
from rdmapost import QPType, WCOpcode, WCStatus


def test_send_arrives_in_the_peers_receive_buffer(rc):
    """SEND: the bytes arrive in the peer's receive buffer."""
    rc.mine.buffer[:5] = b"hello"
    rc.b.post_recv(rp.RecvWR(rc.theirs[100:200], wr_id=7))
    rc.a.post_send(rp.Send(rc.mine[:5], wr_id=9))
    done = {wc.wr_id: wc for wc in rc.wait(2)}
    assert bytes(rc.theirs.buffer[99:106]) == b"\0hello\0"
    sent, received = done[9], done[7]
    assert (sent.status, sent.opcode, sent.qp_num) == (WCStatus.SUCCESS, WCOpcode.SEND, rc.a.qp_num)
    assert (received.opcode, received.byte_len) == (WCOpcode.RECV, 5)
    assert (received.qp_num, received.imm_data) == (rc.b.qp_num, None)


def test_ud_send_with_immediate_puts_a_grh_before_the_data(connect):
    """SEND_WITH_IMM on UD: 40 bytes of GRH precede the data."""
    ud = connect(QPType.UD)
    ud.mine.buffer[:5] = b"hello"
    ud.b.post_recv(rp.RecvWR(ud.theirs[:200], wr_id=7))
    ud.a.post_send(ud.wr(rp.SendWithImm, ud.mine[:5], wr_id=9, imm_data=0x12345678))
    done = {wc.wr_id: wc for wc in ud.wait(2)}
    received = done[7]
    assert bytes(ud.theirs.buffer[GRH : GRH + 6]) == b"hello\0"
    assert received.byte_len == GRH + 5
    assert received.wc_flags & rp.WCFlags.GRH
    assert (received.imm_data, received.src_qp) == (0x12345678, ud.a.qp_num)
    assert done[9].opcode is WCOpcode.SEND


def test_send_of_no_bytes_consumes_a_receive(rc):
    """A message of 0 bytes has no SGEs, and consumes a receive all the same."""
    rc.b.post_recv(rp.RecvWR(wr_id=7))
    rc.a.post_send(rp.Send(wr_id=9))
    done = {wc.wr_id: wc for wc in rc.wait(2)}
    assert done[7].byte_len == 0
    assert done[9].status is WCStatus.SUCCESS

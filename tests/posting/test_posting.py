"""Posting to a device: every kind of work request, and what arrives."""

from __future__ import annotations

import errno
import struct

import pytest
from support import ALL, GRH, needs

import rdmapost as rp
from rdmapost import QPType, SendFlags, WCOpcode, WCStatus

U64 = 1 << 64


def value_at(mr: rp.MR, offset: int = 0) -> int:
    return struct.unpack_from("=Q", mr.buffer, offset)[0]


def put(mr: rp.MR, value: int, offset: int = 0) -> None:
    struct.pack_into("=Q", mr.buffer, offset, value)


# ---- the eight examples of the ibv_post_send tutorial -----------------------------


def test_example_send(rc):
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


def test_example_ud_send_with_immediate(connect):
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


def test_example_rdma_write(rc):
    """RDMA_WRITE: the bytes arrive, and the peer has no completion."""
    rc.mine.buffer[:5] = b"hello"
    rc.a.post_send(
        rp.RdmaWrite(rc.mine[:5], remote_addr=rc.theirs.addr + 50, rkey=rc.theirs.rkey, wr_id=9)
    )
    (sent,) = rc.wait()
    assert (sent.wr_id, sent.opcode) == (9, WCOpcode.RDMA_WRITE)
    assert bytes(rc.theirs.buffer[49:56]) == b"\0hello\0"
    assert rc.cq.poll() == []


def test_example_rdma_write_with_immediate(rc):
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


def test_example_rdma_read(rc):
    """RDMA_READ: the peer's bytes arrive here."""
    rc.theirs.buffer[:5] = b"hello"
    rc.a.post_send(rc.wr(rp.RdmaRead, rc.mine[10:15], wr_id=9))
    (done,) = rc.wait()
    assert (done.wr_id, done.opcode) == (9, WCOpcode.RDMA_READ)
    assert bytes(rc.mine.buffer[9:16]) == b"\0hello\0"


@pytest.mark.parametrize(("compare", "after"), [(1000, 2000), (1001, 1000)])
def test_example_compare_and_swap(rc, context, compare, after):
    """ATOMIC_CMP_AND_SWP: the old value comes back, and is replaced only if equal."""
    needs(context.attr.atomic_cap, "atomics", context)
    put(rc.theirs, 1000, 64)
    wr = rc.wr(
        rp.AtomicCmpAndSwp,
        rc.mine[8:16],
        remote_addr=rc.theirs.addr + 64,
        compare_add=compare,
        swap=2000,
        wr_id=9,
    )
    rc.a.post_send(wr)
    (done,) = rc.wait()
    assert (done.wr_id, done.opcode) == (9, WCOpcode.COMP_SWAP)
    assert value_at(rc.mine, 8) == 1000
    assert value_at(rc.theirs, 64) == after


def test_example_fetch_and_add(rc, context):
    """ATOMIC_FETCH_AND_ADD: the old value comes back, the sum stays there."""
    needs(context.attr.atomic_cap, "atomics", context)
    put(rc.theirs, 10)
    rc.a.post_send(rc.wr(rp.AtomicFetchAndAdd, rc.mine[:8], compare_add=5, wr_id=9))
    (done,) = rc.wait()
    assert (done.wr_id, done.opcode) == (9, WCOpcode.FETCH_ADD)
    assert (value_at(rc.mine), value_at(rc.theirs)) == (10, 15)


def test_example_zero_byte_send(rc):
    """A message of 0 bytes has no SGEs, and consumes a receive all the same."""
    rc.b.post_recv(rp.RecvWR(wr_id=7))
    rc.a.post_send(rp.Send(wr_id=9))
    done = {wc.wr_id: wc for wc in rc.wait(2)}
    assert done[7].byte_len == 0
    assert done[9].status is WCStatus.SUCCESS


# ---- other kinds ------------------------------------------------------------------


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD])
def test_send_of_every_size_arrives(connect, qp_type):
    pair = connect(qp_type)
    grh = GRH if qp_type is QPType.UD else 0
    for size in (1, 7, 8, 64, 511, 1000):
        pair.mine.buffer[:size] = bytes(i % 251 + 1 for i in range(size))
        pair.theirs.buffer[:] = bytes(len(pair.theirs))
        pair.b.post_recv(rp.RecvWR(pair.theirs[: grh + 1024], wr_id=7))
        pair.a.post_send(pair.send(pair.mine[:size], wr_id=9))
        done = {wc.wr_id: wc for wc in pair.wait(2)}
        assert done[7].byte_len == grh + size
        assert pair.theirs.buffer[grh : grh + size] == pair.mine.buffer[:size]
        assert not any(pair.theirs.buffer[grh + size :])


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC])
def test_large_message_arrives(connect, qp_type):
    """Many packets: more than the path MTU."""
    size = 100_000
    pair = connect(qp_type, size=size)
    pair.mine.buffer[:] = bytes(i % 251 for i in range(size))
    pair.b.post_recv(rp.RecvWR(pair.theirs[:]))
    pair.a.post_send(pair.send(pair.mine[:]))
    pair.wait(2)
    assert pair.theirs.buffer == pair.mine.buffer


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


def test_atomics_wrap_at_2_to_the_64(rc, context):
    needs(context.attr.atomic_cap, "atomics", context)
    put(rc.theirs, U64 - 1)
    rc.a.post_send(rc.wr(rp.AtomicFetchAndAdd, rc.mine[:8], compare_add=2))
    rc.wait()
    assert (value_at(rc.mine), value_at(rc.theirs)) == (U64 - 1, 1)
    rc.a.post_send(rc.wr(rp.AtomicFetchAndAdd, rc.mine[:8], compare_add=U64 - 1))
    rc.wait()
    assert (value_at(rc.mine), value_at(rc.theirs)) == (1, 0)
    rc.a.post_send(rc.wr(rp.AtomicCmpAndSwp, rc.mine[:8], compare_add=0, swap=U64 - 1))
    rc.wait()
    assert (value_at(rc.mine), value_at(rc.theirs)) == (0, U64 - 1)


def test_sges_are_gathered_and_scattered(rc):
    """The message is the pieces in order, from different regions, scattered into other pieces."""
    with rp.MR(rc.pd, bytearray(b"three"), ALL) as third:
        rc.mine.buffer[:9] = b"two\0one  "
        rc.b.post_recv(rp.RecvWR([rc.theirs[100:102], rc.theirs[0:7], rc.theirs[50:60]], wr_id=7))
        rc.a.post_send(rp.Send([rc.mine[4:8], rc.mine[0:3], third[:]], wr_id=9))
        done = {wc.wr_id: wc for wc in rc.wait(2)}
    assert done[7].byte_len == 12
    buffer = rc.theirs.buffer
    assert (bytes(buffer[100:103]), bytes(buffer[:8])) == (b"on\0", b"e twoth\0")
    assert bytes(buffer[50:54]) == b"ree\0"
    rc.a.post_send(rc.wr(rp.RdmaRead, [rc.mine[200:201], rc.mine[300:303]]))
    rc.wait()
    assert bytes(rc.mine.buffer[200:202]) == b"e\0"
    assert bytes(rc.mine.buffer[300:304]) == b" tw\0"


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC])
def test_inline_needs_no_region_and_is_free_at_once(connect, qp_type):
    """The data is as it was when posted, whatever happens to the buffer later."""
    pair = connect(qp_type, max_inline_data=64)
    for kind in (rp.Send, rp.SendWithImm, rp.RdmaWrite):
        data = bytearray(b"inline data")
        pair.theirs.buffer[:11] = bytes(11)
        pair.b.post_recv(rp.RecvWR(() if kind is rp.RdmaWrite else pair.theirs[:64]))
        flags = SendFlags.INLINE | SendFlags.SIGNALED
        pair.a.post_send(pair.wr(kind, rp.SGE.from_buffer(data), send_flags=flags))
        data[:] = b"overwritten"
        data.clear()  # nothing holds it any more
        if kind is rp.RdmaWrite:
            # A message after it shows when a UC write has arrived.
            pair.a.post_send(rp.Send())
        pair.wait(3 if kind is rp.RdmaWrite else 2)
        assert bytes(pair.theirs.buffer[:12]) == b"inline data\0"


def test_inline_that_is_too_long_is_refused(connect):
    pair = connect(max_inline_data=32)
    most = pair.a.max_inline_data
    assert most >= 32
    data = rp.SGE.from_buffer(bytes(most + 1))
    with pytest.raises(rp.PostError, match=f"max_inline_data={most}") as caught:
        pair.a.post_send(rp.Send(data, send_flags=SendFlags.INLINE))
    assert caught.value.errno == errno.EINVAL
    pair.works()


def test_fence_and_solicited_are_taken(rc):
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8]))
    flags = SendFlags.SIGNALED | SendFlags.FENCE | SendFlags.SOLICITED
    rc.a.post_send([rc.wr(rp.RdmaRead, rc.mine[:8]), rp.Send(rc.mine[:8], send_flags=flags)])
    assert len(rc.wait(3)) == 3

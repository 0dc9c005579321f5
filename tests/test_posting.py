"""Posting to a device: every kind of work request, lists, full queues, and what is outstanding."""

from __future__ import annotations

import array
import errno
import struct

import pytest
from support import ALL, GRH, LOCAL_ERROR, Pair, needs

import rdmapost as rp
from rdmapost import Opcode, QPType, SendFlags, WCOpcode, WCStatus

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
    """SEND_WITH_IMM on UD: 40 bytes of GRH stand before the data."""
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
    """RDMA_WRITE: the bytes are there, and the peer has no completion."""
    rc.mine.buffer[:5] = b"hello"
    rc.a.post_send(
        rp.RdmaWrite(rc.mine[:5], remote_addr=rc.theirs.addr + 50, rkey=rc.theirs.rkey, wr_id=9)
    )
    (sent,) = rc.wait()
    assert (sent.wr_id, sent.opcode) == (9, WCOpcode.RDMA_WRITE)
    assert bytes(rc.theirs.buffer[49:56]) == b"\0hello\0"
    assert rc.cq.poll() == []


def test_example_rdma_write_with_immediate(rc):
    """RDMA_WRITE_WITH_IMM: it also consumes a receive, whose buffer stays as it was."""
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
    """ATOMIC_CMP_AND_SWP: the old value comes back, and is replaced only if it is equal."""
    needs(context.attr.atomic_cap, "atomics", context)
    put(rc.theirs, 1000, 64)
    wr = rc.wr(
        rp.AtomicCmpAndSwp, rc.mine[8:16], remote_addr=rc.theirs.addr + 64,
        compare_add=compare, swap=2000, wr_id=9,
    )  # fmt: skip
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
    """The message is the pieces in their order, from different regions, into other pieces."""
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
    """The data is what it was at the post, whatever happens to the buffer then."""
    pair = connect(qp_type, max_inline_data=64)
    for kind in (rp.Send, rp.SendWithImm, rp.RdmaWrite):
        data = bytearray(b"inline data")
        pair.theirs.buffer[:11] = bytes(11)
        if kind is not rp.RdmaWrite:
            pair.b.post_recv(rp.RecvWR(pair.theirs[:64]))
        flags = SendFlags.INLINE | SendFlags.SIGNALED
        pair.a.post_send(pair.wr(kind, rp.SGE.from_buffer(data), send_flags=flags))
        data[:] = b"overwritten"
        data.clear()  # nothing holds it any more
        pair.wait(1 if kind is rp.RdmaWrite else 2)
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


# ---- lists ------------------------------------------------------------------------


def writes(pair: Pair, count: int, start: int = 0) -> list[rp.RdmaWrite]:
    """Make writes of one byte each, whose values are 1, 2, 3, ..."""
    pair.mine.buffer[:count] = bytes(range(1, count + 1))
    return [
        pair.wr(
            rp.RdmaWrite, pair.mine[i : i + 1], remote_addr=pair.theirs.addr + i, wr_id=start + i
        )
        for i in range(count)
    ]


def too_many(pair: Pair) -> rp.Send:
    """Make a work request that every device refuses at the post."""
    return rp.Send([pair.mine[:1]] * (pair.a.max_send_sge + 1), wr_id=99)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("bad", [0, 3, 7])
def test_list_of_8_with_a_bad_one(connect, checked, bad):
    """Those before it went in and complete; it and those after it did not.

    Checked, the library refuses it; unchecked, the device does.
    """
    pair = connect(checked=checked)
    wrs: list[rp.SendWR] = list(writes(pair, 8))
    wrs[bad] = too_many(pair)
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send(wrs)
    error = caught.value
    assert (error.index, error.posted, error.wr) == (bad, bad, wrs[bad])
    # mlx5 says ENOMEM.
    assert error.errno in (errno.EINVAL, errno.ENOMEM)
    assert f"work request {bad + 1} of 8 (index {bad})" in str(error)
    if checked:
        assert f"max_send_sge={pair.a.max_send_sge}" in error.reason
    assert pair.a.outstanding.send == bad
    assert [wc.wr_id for wc in pair.wait(bad)] == list(range(bad))
    assert pair.a.outstanding.send == 0
    assert bytes(pair.theirs.buffer[:8]) == bytes(range(1, bad + 1)) + bytes(8 - bad)
    pair.works()


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_list_with_two_bad_ones_stops_at_the_first(connect, checked):
    pair = connect(checked=checked)
    wrs: list[rp.SendWR] = list(writes(pair, 8))
    wrs[2] = wrs[5] = too_many(pair)
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send(wrs)
    assert (caught.value.index, caught.value.posted) == (2, 2)
    pair.wait(2)
    pair.works()


def test_long_list_goes_in_with_one_call(connect, stack, context):
    """More than the buffers were made for at first."""
    pair = connect(max_send_wr=200)
    pair.a.post_send(writes(pair, 200))
    assert pair.a.outstanding.send == 200
    assert [wc.wr_id for wc in pair.wait(200)] == list(range(200))
    assert bytes(pair.theirs.buffer[:200]) == bytes(range(1, 201))


def test_list_of_different_kinds(rc, context):
    """One list, records of different lengths."""
    needs(context.attr.atomic_cap, "atomics", context)
    rc.b.post_recv([rp.RecvWR([rc.theirs[:4], rc.theirs[4:100]], wr_id=70), rp.RecvWR(wr_id=71)])
    rc.a.post_send(
        [
            rp.Send([rc.mine[:3], rc.mine[3:6], rc.mine[6:9]], wr_id=1),
            rc.wr(rp.RdmaRead, rc.mine[100:108], wr_id=2),
            rc.wr(rp.AtomicFetchAndAdd, rc.mine[:8], wr_id=3),
            rp.SendWithImm(wr_id=4, imm_data=5),
        ]
    )
    assert sorted(wc.wr_id for wc in rc.wait(6)) == [1, 2, 3, 4, 70, 71]


def test_any_iterable_and_a_single_one_and_none(rc):
    rc.a.post_send(iter(writes(rc, 3)))
    rc.a.post_send(writes(rc, 1, start=3)[0])
    rc.a.post_send([])
    rc.b.post_recv(())
    assert [wc.wr_id for wc in rc.wait(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [None, 5, object()])
def test_what_is_no_work_request_is_a_type_error(rc, wrong):
    with pytest.raises(TypeError, match="ibv_post_send takes a SendWR or a sequence of them"):
        rc.a.post_send(wrong)
    with pytest.raises(TypeError, match="ibv_post_recv takes a RecvWR or a sequence of them"):
        rc.b.post_recv(wrong)


def test_work_request_of_the_other_queue_is_refused(rc):
    with pytest.raises(rp.PostError, match="ibv_post_send takes a SendWR, not a RecvWR"):
        rc.a.post_send([rp.RecvWR()])
    with pytest.raises(rp.PostError, match="ibv_post_recv takes a RecvWR, not a Send") as caught:
        rc.b.post_recv([rp.RecvWR(rc.theirs[:1]), rp.Send()])
    assert caught.value.posted == 1
    assert rc.b.outstanding.recv == 1


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"wr_id": -1}, "wr_id=-1 is not in 0"),
        ({"wr_id": U64}, "is not in 0..2^64-1"),
        ({"wr_id": "x"}, "wr_id is a str"),
        ({"wr_id": None}, "wr_id is a NoneType"),
        ({"imm_data": 1 << 32}, "imm_data=4294967296 is not in 0..2^32-1"),
        ({"imm_data": 1.5}, "imm_data is a float"),
        ({"send_flags": None}, "send_flags is a NoneType"),
        ({"remote_addr": -1}, "remote_addr=-1"),
        ({"remote_addr": "x"}, "remote_addr is a str"),
        ({"rkey": 1 << 32}, "rkey="),
        ({"sg_list": 5}, "int"),
        ({"sg_list": None}, "NoneType"),
        ({"sg_list": [5]}, "sg_list holds a int"),
        ({"sg_list": rp.SGE(1, "x", 1)}, "an SGE's length is a str"),
        ({"sg_list": rp.SGE(None, 1, 1)}, "an SGE's addr is a NoneType"),
        ({"sg_list": rp.SGE(1, 1, 1 << 32)}, "an SGE's lkey=4294967296"),
    ],
)
def test_field_of_a_wrong_kind_is_named(connect, checked, fields, words):
    """Whatever stands in a field, the post ends in a PostError and the list before it is posted."""
    pair = connect(checked=checked)
    good = writes(pair, 1)[0]
    bad = pair.wr(rp.RdmaWriteWithImm, pair.mine[:1])
    for name, value in fields.items():
        setattr(bad, name, value)
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send([good, bad])
    assert words in caught.value.reason
    assert (caught.value.index, caught.value.posted) == (1, 1)
    pair.wait(1)
    assert pair.a.outstanding.send == 0
    pair.works()


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("ah", ["ah", 5, object(), "mr"])
def test_ud_with_something_else_for_an_address_handle(connect, checked, ah):
    pair = connect(QPType.UD, checked=checked)
    with pytest.raises(rp.PostError, match="not an address handle"):
        pair.a.post_send(pair.send(pair.mine[:4], ah=pair.mine if ah == "mr" else ah))
    assert pair.a.outstanding.send == 0
    pair.works()


def test_error_of_an_iterator_is_the_callers(rc):
    """Nothing is posted, and nothing is counted as posted."""

    def generate():
        yield writes(rc, 1)[0]
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rc.a.post_send(generate())
    assert rc.a.outstanding.send == 0
    rc.works()


def test_error_of_a_field_is_the_callers_and_nothing_is_posted(rc):
    class Odd(rp.RdmaWrite):
        @property
        def remote_addr(self) -> int:
            raise KeyError("mine")

        @remote_addr.setter
        def remote_addr(self, value: int) -> None:
            pass

    with pytest.raises(KeyError, match="mine"):
        rc.a.post_send([*writes(rc, 2), Odd(rc.mine[:1])])
    assert rc.a.outstanding.send == 0
    rc.works()


# ---- full queues, and what is outstanding ----------------------------------------


def test_full_send_queue_is_refused_by_name_and_usable_after_polling(connect):
    pair = connect(max_send_wr=16)
    depth = pair.a.max_send_wr
    pair.a.post_send([pair.wr(rp.RdmaWrite, pair.mine[:1]) for _ in range(depth)])
    assert pair.a.outstanding.send == depth
    with pytest.raises(rp.PostError, match=f"the queue is full: max_send_wr={depth}") as caught:
        pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:1]))
    assert caught.value.errno == errno.ENOMEM
    assert "poll the CQ" in str(caught.value)
    pair.wait(depth)
    pair.works()


def test_list_that_fills_the_queue_stops_where_it_is_full(connect):
    pair = connect(max_send_wr=16)
    depth = pair.a.max_send_wr
    with pytest.raises(rp.PostError, match="the queue is full") as caught:
        pair.a.post_send([pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=i) for i in range(depth + 3)])
    assert (caught.value.index, caught.value.posted) == (depth, depth)
    assert [wc.wr_id for wc in pair.wait(depth)] == list(range(depth))


def test_full_receive_queue_is_refused_by_name(connect):
    pair = connect(max_recv_wr=8)
    depth = pair.b.max_recv_wr
    pair.b.post_recv([rp.RecvWR(pair.theirs[:8], wr_id=i) for i in range(depth)])
    with pytest.raises(rp.PostError, match=f"the queue is full: max_recv_wr={depth}") as caught:
        pair.b.post_recv(rp.RecvWR(pair.theirs[:8]))
    assert caught.value.errno == errno.ENOMEM
    assert pair.b.outstanding == (0, depth)
    pair.a.post_send(rp.Send(pair.mine[:8]))
    pair.wait(2)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:8]))
    assert pair.b.outstanding == (0, depth)


def test_full_queue_of_the_device_unchecked(connect):
    """The device's own ENOMEM: at its own time, and with the index."""
    pair = connect(max_recv_wr=4, checked=False)
    with pytest.raises(rp.PostError) as caught:
        pair.b.post_recv([rp.RecvWR(pair.theirs[:8], wr_id=i) for i in range(5000)])
    error = caught.value
    assert error.errno == errno.ENOMEM
    assert error.index == error.posted == pair.b.outstanding.recv
    assert error.index is not None
    assert error.index >= 4
    assert error.wr.wr_id == error.index


def test_unsignaled_ones_are_outstanding_until_a_later_one_completes(connect):
    pair = connect()
    quiet = [pair.wr(rp.RdmaWrite, pair.mine[:1], send_flags=0, wr_id=i) for i in range(5)]
    pair.a.post_send(quiet)
    assert pair.a.outstanding == (5, 0)
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=5))
    assert pair.a.outstanding == (6, 0)
    pair.a.post_send(quiet[:2])
    assert [wc.wr_id for wc in pair.wait(1)] == [5]
    assert pair.a.outstanding == (2, 0)
    assert pair.cq.poll() == []


def test_sq_sig_all_signals_everything(connect):
    pair = connect(sq_sig_all=True)
    pair.a.post_send([pair.wr(rp.RdmaWrite, pair.mine[:1], send_flags=0, wr_id=i) for i in (1, 2)])
    assert [wc.wr_id for wc in pair.wait(2)] == [1, 2]
    assert pair.a.outstanding == (0, 0)


def test_receives_are_outstanding_until_they_complete(rc):
    rc.b.post_recv([rp.RecvWR(rc.theirs[:8], wr_id=i) for i in range(3)])
    assert rc.b.outstanding == (0, 3)
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=9))
    rc.wait(2)
    assert rc.b.outstanding == (0, 2)
    assert rc.a.outstanding == (0, 0)


@pytest.mark.parametrize("wr_id", [0, 1, (1 << 32) + 1, U64 - 1])
def test_wr_id_comes_back_whole(rc, wr_id):
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=wr_id))
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=wr_id))
    assert [wc.wr_id for wc in rc.wait(2)] == [wr_id, wr_id]


# ---- what does not go -------------------------------------------------------------


@pytest.mark.parametrize(
    ("qp_type", "opcode"),
    [
        (QPType.UC, Opcode.RDMA_READ),
        (QPType.UC, Opcode.ATOMIC_FETCH_AND_ADD),
        (QPType.UD, Opcode.RDMA_WRITE),
        (QPType.UD, Opcode.SEND_WITH_INV),
        (QPType.RC, Opcode.TSO),
    ],
)
def test_opcode_of_another_qp_type_is_refused(connect, qp_type, opcode):
    pair = connect(qp_type)
    kind = next(k for k in map(vars(rp).get, rp.wr.__all__) if getattr(k, "opcode", None) is opcode)
    with pytest.raises(rp.PostError, match=f"{opcode.name} is not an opcode of {qp_type.name} QPs"):
        pair.a.post_send(pair.wr(kind, pair.mine[:8]))
    pair.works()


@pytest.mark.parametrize("opcode", [Opcode.RDMA_READ, Opcode.ATOMIC_FETCH_AND_ADD])
def test_opcode_of_another_qp_type_unchecked_is_the_devices_to_refuse(connect, opcode):
    """At the post, or with an error completion; never with success."""
    pair = connect(QPType.UC, checked=False)
    kind = rp.RdmaRead if opcode is Opcode.RDMA_READ else rp.AtomicFetchAndAdd
    refused: list[rp.PostError] = []
    try:
        pair.a.post_send(pair.wr(kind, pair.mine[:8], wr_id=1))
    except rp.PostError as error:
        refused.append(error)
    if refused:
        assert refused[0].index in (0, None)
    else:
        (done,) = pair.cq.wait()
        assert done.wr_id == 1
        assert done.status in LOCAL_ERROR


@pytest.mark.parametrize(
    ("qp_type", "flag"), [(QPType.UC, SendFlags.FENCE), (QPType.UD, SendFlags.FENCE)]
)
def test_flag_of_another_qp_type_is_refused(connect, qp_type, flag):
    pair = connect(qp_type)
    with pytest.raises(rp.PostError, match=f"{flag.name} has no meaning on a {qp_type.name} QP"):
        pair.a.post_send(pair.send(pair.mine[:4], send_flags=flag))


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_ud_without_an_address_handle_is_refused(connect, checked):
    """Unchecked too: a driver would follow the NULL."""
    pair = connect(QPType.UD, checked=checked)
    with pytest.raises(rp.PostError, match="needs an address handle"):
        pair.a.post_send(rp.Send(pair.mine[:4]))
    pair.works()


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_closed_address_handle_is_refused(connect, checked):
    pair = connect(QPType.UD, checked=checked)
    pair.ah.close()
    with pytest.raises(rp.PostError, match="is closed"):
        pair.a.post_send(pair.send(pair.mine[:4]))


def test_ud_longer_than_the_mtu_is_refused(connect, context):
    pair = connect(QPType.UD)
    mtu = context.query_port(1).active_mtu.bytes
    pair.b.post_recv(rp.RecvWR(pair.theirs[: GRH + mtu]))
    pair.a.post_send(pair.send(pair.mine[:mtu]))
    pair.wait(2)
    with pytest.raises(rp.PostError, match=f"{mtu + 1} bytes, but a message on this UD QP"):
        pair.a.post_send(pair.send(pair.mine[: mtu + 1]))


def test_region_of_another_pd_is_refused(rc, context):
    with rp.PD(context) as other, rp.MR(other, 64) as mr:
        with pytest.raises(rp.PostError, match="belongs to another PD"):
            rc.a.post_send(rp.Send(mr[:8]))
        with pytest.raises(rp.PostError, match="belongs to another PD"):
            rc.b.post_recv(rp.RecvWR(mr[:8]))
    rc.works()


def test_region_of_another_pd_unchecked_is_the_devices_to_refuse(connect, context):
    pair = connect(checked=False)
    with rp.PD(context) as other, rp.MR(other, 64) as mr:
        pair.a.post_send(pair.wr(rp.RdmaWrite, mr[:8]))
        (done,) = pair.cq.wait()
        assert done.status in LOCAL_ERROR


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_closed_region_is_refused(connect, checked):
    pair = connect(checked=checked)
    with rp.MR(pair.pd, 64) as mr:
        sge = mr[:8]
    with pytest.raises(rp.PostError, match=r"MR of 64 bytes .* is closed"):
        pair.a.post_send(rp.Send(sge))
    with pytest.raises(rp.PostError, match="is closed"):
        pair.b.post_recv(rp.RecvWR(sge))
    pair.works()


def test_sge_of_length_0_is_refused(rc):
    with pytest.raises(rp.PostError, match=r"length 0 means 2\^31 bytes"):
        rc.a.post_send(rp.Send(rc.mine[5:5]))
    with pytest.raises(rp.PostError, match="empty sg_list"):
        rc.b.post_recv(rp.RecvWR(rc.theirs[5:5]))


def test_sge_of_numbers_goes_as_it_is(rc):
    """The right numbers work, and nothing else vouches for them."""
    rc.mine.buffer[:4] = b"raw!"
    rc.b.post_recv(rp.RecvWR(rp.SGE(rc.theirs.addr, 4, rc.theirs.lkey)))
    rc.a.post_send(rp.Send(rp.SGE(rc.mine.addr, 4, rc.mine.lkey)))
    rc.wait(2)
    assert bytes(rc.theirs.buffer[:4]) == b"raw!"


def test_unregistered_buffer_without_inline_is_refused(rc):
    with pytest.raises(rp.PostError, match=r"can only be sent with SendFlags\.INLINE"):
        rc.a.post_send(rp.Send(rp.SGE.from_buffer(array.array("B", b"abc"))))
    with pytest.raises(rp.PostError, match=r"SendFlags\.INLINE"):
        rc.b.post_recv(rp.RecvWR(rp.SGE.from_buffer(bytearray(8))))


def test_misaligned_atomic_is_refused(rc, context):
    needs(context.attr.atomic_cap, "atomics", context)
    with pytest.raises(rp.PostError, match="is not a multiple of 8"):
        rc.a.post_send(rc.wr(rp.AtomicFetchAndAdd, rc.mine[:8], remote_addr=rc.theirs.addr + 4))
    with pytest.raises(rp.PostError, match="one SGE of 8 bytes"):
        rc.a.post_send(rc.wr(rp.AtomicFetchAndAdd, rc.mine[:4]))


# ---- what the peer refuses --------------------------------------------------------


def test_no_receive_ends_with_rnr_retry_exceeded(rc):
    """rnr_retry is small here; 7 would be for ever."""
    rc.a.post_send([rp.Send(rc.mine[:4], wr_id=1), rc.wr(rp.RdmaWrite, rc.mine[:4], wr_id=2)])
    done = rc.cq.wait(2)
    assert [(wc.wr_id, wc.status) for wc in done] == [
        (1, WCStatus.RNR_RETRY_EXC_ERR), (2, WCStatus.WR_FLUSH_ERR),
    ]  # fmt: skip
    assert rc.a.state is rp.QPState.ERR
    assert rc.a.outstanding == (0, 0)
    with pytest.raises(rp.CompletionError, match="RNR_RETRY_EXC_ERR"):
        done[0].check()


@pytest.mark.parametrize("what", ["rkey", "range", "permission"])
@pytest.mark.parametrize("kind", [rp.RdmaWrite, rp.RdmaRead])
def test_access_that_the_peer_did_not_grant(connect, what, kind):
    pair = connect()
    with rp.MR(pair.pd, 64, rp.Access.LOCAL_WRITE) as closed_to_peers:
        fields = {
            "rkey": {"rkey": pair.theirs.rkey ^ 0xA5},
            "range": {"remote_addr": pair.theirs.addr + len(pair.theirs) - 7},
            "permission": {"remote_addr": closed_to_peers.addr, "rkey": closed_to_peers.rkey},
        }[what]
        pair.a.post_send(pair.wr(kind, pair.mine[:8], wr_id=1, **fields))
        (done,) = pair.cq.wait()
        assert (done.wr_id, done.status) == (1, WCStatus.REM_ACCESS_ERR)
        assert not any(closed_to_peers.buffer)
    assert not any(pair.theirs.buffer)


def test_access_that_the_queue_pair_did_not_grant(connect):
    """The region allows the write and the peer's queue pair does not."""
    pair = connect(access=rp.Access.REMOTE_READ)
    pair.a.post_send(pair.wr(rp.RdmaRead, pair.mine[:8]))
    pair.wait()
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8]))
    (done,) = pair.cq.wait()
    # IBTA: REM_ACCESS_ERR; rxe calls a request that the QP does not take invalid.
    assert done.status in (WCStatus.REM_ACCESS_ERR, WCStatus.REM_INV_REQ_ERR)


@pytest.mark.parametrize("kind", [rp.Send, rp.RdmaWrite, rp.RdmaRead])
def test_wrong_lkey_is_a_local_error(connect, kind):
    """Numbers are passed on, and the device finds out."""
    pair = connect()
    pair.b.post_recv(rp.RecvWR(pair.theirs[:64]))
    pair.a.post_send(pair.wr(kind, rp.SGE(pair.mine.addr, 8, pair.mine.lkey ^ 0xA5), wr_id=1))
    (done,) = [wc for wc in pair.cq.wait() if wc.wr_id == 1]
    assert done.status in LOCAL_ERROR


def test_wrong_lkey_of_a_receive(rc):
    rc.b.post_recv(rp.RecvWR(rp.SGE(rc.theirs.addr, 8, rc.theirs.lkey ^ 0xA5), wr_id=7))
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=9))
    done = {wc.wr_id: wc.status for wc in rc.cq.wait(2)}
    assert done[9] is WCStatus.REM_OP_ERR
    # IBTA: LOC_PROT_ERR; rxe calls it LOC_QP_OP_ERR.
    assert done[7] in (WCStatus.LOC_PROT_ERR, WCStatus.LOC_QP_OP_ERR)


def test_receive_that_is_too_small(rc):
    rc.b.post_recv(rp.RecvWR(rc.theirs[:4], wr_id=7))
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=9))
    done = {wc.wr_id: wc.status for wc in rc.cq.wait(2)}
    # IBTA: REM_INV_REQ_ERR and LOC_LEN_ERR; rxe takes the receive for malformed, or, when the
    # message has several packets, reports the requester's status on both sides.
    assert (done[9], done[7]) in (
        (WCStatus.REM_INV_REQ_ERR, WCStatus.LOC_LEN_ERR),
        (WCStatus.REM_OP_ERR, WCStatus.LOC_QP_OP_ERR),
        (WCStatus.REM_INV_REQ_ERR, WCStatus.REM_INV_REQ_ERR),
    )
    assert not any(rc.theirs.buffer[4:])


def test_error_completion_has_only_what_is_valid(rc):
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8], rkey=rc.theirs.rkey ^ 0xA5, wr_id=3))
    (done,) = rc.cq.wait()
    assert (done.wr_id, done.qp_num) == (3, rc.a.qp_num)
    assert (done.opcode, done.byte_len, done.imm_data, done.invalidated_rkey) == (
        None,
        0,
        None,
        None,
    )

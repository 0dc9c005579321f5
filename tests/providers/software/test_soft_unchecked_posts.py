"""soft0 under a C program: soft0 itself must refuse wrong posts and polls."""

from __future__ import annotations

import errno
import gc
import sys
import weakref
from typing import Any

import pytest
from support import soft_context
from support.tag_server import small_server

import rdmapost as rp
from rdmapost import Access, Opcode, OpsOpcode, QPType, SendFlags
from rdmapost._binding import ffi, lib, native
from rdmapost.providers.software.state import objects
from rdmapost.resources.qp import DEFAULT_QKEY

context = soft_context
server = small_server

NOWHERE = 0xFFFF_FFF0
"""An unused handle."""


class Raw:
    """A queue pair for posts from C, with its own CQ and memory."""

    def __init__(self, pd: rp.PD, qp_type: QPType, stack: Any) -> None:
        self.cq = stack.enter_context(rp.CQ(pd.context, 64))
        self.mr = stack.enter_context(rp.MR(pd, 4096, Access.LOCAL_WRITE | Access.MW_BIND))
        extra = {"max_tso_header": 16} if qp_type is QPType.UD else {}
        self.qp = rp.QP(
            pd,
            qp_type,
            self.cq,
            max_send_wr=8,
            max_recv_wr=8,
            max_send_sge=4,
            max_recv_sge=4,
            max_inline_data=64,
            **extra,
        )
        self.qp.connect(self.qp.endpoint()) if qp_type is QPType.RC else self.qp.connect()
        stack.callback(self.qp.close)
        self.keep: list[Any] = []

    def sges(self, *ranges: tuple[int, int]) -> Any:
        """Return an array of SGEs, (offset, length) each."""
        array = ffi.new(
            "struct ibv_sge[]", [(self.mr.addr + at, n, self.mr.lkey) for at, n in ranges]
        )
        self.keep.append(array)
        return array

    def wr(self, opcode: int, *ranges: tuple[int, int], **fields: Any) -> Any:
        wr = ffi.new("struct ibv_send_wr *")
        wr.opcode, wr.num_sge = int(opcode), len(ranges)
        wr.sg_list = self.sges(*ranges) if ranges else ffi.NULL
        wr.send_flags = int(SendFlags.SIGNALED)
        for name, value in fields.items():
            setattr(wr, name, value)
        return wr

    def post(self, wr: Any) -> int:
        """Post a send; return the errno, and check that it is reported for this work request."""
        untouched = ffi.new("struct ibv_send_wr *")
        bad = ffi.new("struct ibv_send_wr **", untouched)
        code: int = lib.ibv_post_send(self.qp._handle, wr, bad)
        assert bad[0] == (wr if code else untouched)
        return code


@pytest.fixture
def rc_raw(pd, stack):
    return Raw(pd, QPType.RC, stack)


@pytest.fixture
def ud_raw(pd, stack):
    return Raw(pd, QPType.UD, stack)


def test_context_has_one_vector_and_no_device_file(context):
    handle = context._handle
    assert (handle.num_comp_vectors, handle.cmd_fd) == (1, -1)


def test_send_with_missing_or_too_many_sges_is_einval(rc_raw):
    limit = 4
    for flags in (SendFlags.SIGNALED, SendFlags.SIGNALED | SendFlags.INLINE):
        for wr in (
            rc_raw.wr(Opcode.SEND, num_sge=-1),
            rc_raw.wr(Opcode.SEND, num_sge=1),
            rc_raw.wr(Opcode.SEND, *[(0, 1)] * (limit + 1)),
        ):
            wr.send_flags = int(flags)
            assert rc_raw.post(wr) == errno.EINVAL
    assert rc_raw.post(rc_raw.wr(Opcode.SEND, *[(0, 1)] * limit)) == 0


@pytest.mark.parametrize("more", [0, 1])
def test_inline_data_is_limited_and_keeps_its_order(rc_raw, more):
    limit = rc_raw.qp.max_inline_data
    rc_raw.mr.buffer[:256] = bytes(range(256))
    rc_raw.qp.post_recv(rp.RecvWR(rc_raw.mr[2048:4096]))
    wr = rc_raw.wr(Opcode.SEND, (200, 3), (100, 5), (0, limit - 8 + more))
    wr.send_flags = int(SendFlags.SIGNALED | SendFlags.INLINE)
    assert rc_raw.post(wr) == (errno.EINVAL if more else 0)
    if not more:
        rc_raw.cq.wait(1)[0].check()
        data = bytes(rc_raw.mr.buffer[2048 : 2048 + limit])
        assert data == bytes([200, 201, 202, 100, 101, 102, 103, 104, *range(limit - 8)])


def test_inline_data_of_which_a_part_is_not_mapped_is_efault(rc_raw):
    missing = (8 - rc_raw.mr.addr, 4)
    for ranges in ([missing, (0, 4)], [(0, 4), missing]):
        wr = rc_raw.wr(Opcode.SEND, *ranges)
        wr.send_flags = int(SendFlags.SIGNALED | SendFlags.INLINE)
        assert rc_raw.post(wr) == errno.EFAULT


def bind(raw: Raw, mw: rp.MW) -> Any:
    wr = raw.wr(Opcode.BIND_MW)
    wr.bind_mw.mw, wr.bind_mw.bind_info.mr = mw._handle, raw.mr._handle
    wr.bind_mw.rkey = (mw.rkey & ~0xFF) | ((mw.rkey + 1) & 0xFF)
    wr.bind_mw.bind_info.addr, wr.bind_mw.bind_info.length = raw.mr.addr, 64
    return wr


def test_type_2_bind_of_an_unknown_window_or_region_is_einval(rc_raw, pd):
    with rp.MW(pd, rp.MWType.TYPE_2) as mw:
        for member in ("mw", "mr"):
            wr = bind(rc_raw, mw)
            holder = wr.bind_mw if member == "mw" else wr.bind_mw.bind_info
            setattr(holder, member, ffi.NULL)
            assert rc_raw.post(wr) == errno.EINVAL
            other = ffi.new(f"struct ibv_{member} *")
            other.handle = NOWHERE
            setattr(holder, member, other)
            assert rc_raw.post(wr) == errno.EINVAL
        assert rc_raw.cq.poll() == []


def test_type_1_bind_of_an_unknown_window_or_region_is_einval(rc_raw, pd):
    with rp.MW(pd, rp.MWType.TYPE_1) as mw:
        for member in ("mw", "mr"):
            request = ffi.new("struct ibv_mw_bind *")
            request.bind_info.mr = rc_raw.mr._handle
            request.bind_info.addr, request.bind_info.length = rc_raw.mr.addr, 64
            request.send_flags = int(SendFlags.SIGNALED)
            window = mw._handle
            # A copy of the real struct with another handle.
            other = ffi.new(
                f"struct ibv_{member} *", (window if member == "mw" else rc_raw.mr._handle)[0]
            )
            other.handle = NOWHERE
            if member == "mw":
                window = other
            else:
                request.bind_info.mr = other
            before = window.rkey
            assert lib.rp_bind_mw(rc_raw.qp._handle, window, request) == errno.EINVAL
            assert window.rkey == before
        assert rc_raw.cq.poll() == []


def test_each_type_1_bind_increments_the_key(rc_raw, pd):
    """Only the low byte changes, and it wraps around after 256 binds."""
    with rp.MW(pd, rp.MWType.TYPE_1) as mw:
        keys = [mw.rkey]
        for _ in range(258):
            rc_raw.qp.bind_mw(mw, rc_raw.mr, rc_raw.mr.addr, 64, Access.REMOTE_READ)
            rc_raw.cq.wait(1)[0].check()
            keys.append(mw.rkey)
        assert keys == [keys[0] & ~0xFF | (keys[0] + n) & 0xFF for n in range(259)]


def test_datagram_without_an_address_handle_is_einval(ud_raw):
    for opcode in (Opcode.SEND, Opcode.SEND_WITH_IMM):
        assert ud_raw.post(ud_raw.wr(opcode, (0, 8))) == errno.EINVAL
        other = ffi.new("struct ibv_ah *")
        other.handle = NOWHERE
        wr = ud_raw.wr(opcode, (0, 8))
        wr.wr.ud.ah = other
        assert ud_raw.post(wr) == errno.EINVAL


def test_only_datagrams_need_an_address_handle(ud_raw):
    """A UD queue pair completes other opcodes with an error instead of refusing them."""
    assert ud_raw.post(ud_raw.wr(Opcode.RDMA_WRITE, (0, 8))) == 0
    assert ud_raw.qp.state in (rp.QPState.RTS, rp.QPState.SQE, rp.QPState.ERR)


@pytest.mark.parametrize(
    ("there", "size", "code"),
    [(True, 16, 0), (True, 17, errno.EINVAL), (False, 0, 0), (False, 1, errno.EINVAL)],
)
def test_tso_without_a_header_or_with_one_too_long_is_einval(ud_raw, there, size, code):
    assert ud_raw.qp.max_tso_header == 16
    with ud_raw.qp.ah_to(ud_raw.qp.endpoint()) as ah:
        wr = ud_raw.wr(Opcode.TSO, (0, 8))
        wr.wr.ud.ah = ah._handle
        wr.tso.hdr = ud_raw.sges((0, 8)) if there else ffi.NULL
        wr.tso.hdr_sz, wr.tso.mss = size, 64
        assert ud_raw.post(wr) == code


def test_operation_on_a_tag_that_was_never_added_is_einval(server):
    added = server.add(7, 0, 64)
    assert added.flags

    def post(handle: int) -> int:
        op, bad = ffi.new("struct ibv_ops_wr *"), ffi.new("struct ibv_ops_wr **")
        op.opcode, op.flags, op.tm.handle = int(OpsOpcode.TAG_DEL), 1, handle
        code: int = lib.ibv_post_srq_ops(server.srq._handle, op, bad)
        assert bad[0] == (op if code else ffi.NULL)
        return code

    assert [post(handle) for handle in (0, 2, 1 << 20)] == [errno.EINVAL] * 3
    assert post(1) == 0


def test_full_matching_list_refuses_only_tag_add(server):
    for tag in range(8):
        server.add(tag, 0, 64)

    def post(opcode: int, handle: int = 0) -> int:
        op, bad = ffi.new("struct ibv_ops_wr *"), ffi.new("struct ibv_ops_wr **")
        op.opcode, op.flags, op.tm.handle = int(opcode), 1, handle
        return int(lib.ibv_post_srq_ops(server.srq._handle, op, bad))

    assert post(OpsOpcode.TAG_ADD) == errno.ENOMEM
    assert post(OpsOpcode.TAG_SYNC) == 0
    assert post(OpsOpcode.TAG_DEL, 1) == 0
    assert post(3) == errno.EINVAL


def test_refused_tag_add_consumes_no_handle(server):
    """The next entry gets the handle that the refused one would have had."""
    handles = []
    for count in (-1, 0):
        op, bad = ffi.new("struct ibv_ops_wr *"), ffi.new("struct ibv_ops_wr **")
        op.opcode, op.flags, op.tm.add.num_sge = int(OpsOpcode.TAG_ADD), 1, count
        handles.append((lib.ibv_post_srq_ops(server.srq._handle, op, bad), op.tm.handle))
    assert handles == [(errno.EINVAL, 0), (0, 1)]


def test_operation_on_a_queue_that_matches_no_tags_is_einval(pd):
    with rp.SRQ(pd, 8) as srq:
        for opcode in OpsOpcode:
            op, bad = ffi.new("struct ibv_ops_wr *"), ffi.new("struct ibv_ops_wr **")
            op.opcode = int(opcode)
            assert lib.ibv_post_srq_ops(srq._handle, op, bad) == errno.EINVAL


def test_operation_without_a_matching_list_is_einval(server):
    """Code may find the queue through the garbage collector, and take its list away."""
    queue = objects[server.srq._handle.handle].ops
    slots = queue.slots

    def post() -> int:
        op, bad = ffi.new("struct ibv_ops_wr *"), ffi.new("struct ibv_ops_wr **")
        op.opcode = int(OpsOpcode.TAG_SYNC)
        return int(lib.ibv_post_srq_ops(server.srq._handle, op, bad))

    queue.slots = None
    codes = [post()]
    del queue.slots
    codes.append(post())
    queue.slots = slots
    assert [*codes, post()] == [errno.EINVAL, errno.EINVAL, 0]


def test_receives_of_an_srq_are_no_work_for_the_device(pd, caplog):
    """It would find none, and log that as its own error."""
    with rp.SRQ(pd, 8) as srq:
        srq.post_srq_recv([rp.RecvWR()] * 2)
        assert srq.outstanding == 2
    assert caplog.records == []


def test_verbs_on_unknown_queues_are_einval(rc_raw, context):
    cq = ffi.new("struct ibv_cq *")
    cq.context, cq.handle = context._handle, NOWHERE
    wc = ffi.new("struct ibv_wc *")
    assert lib.ibv_poll_cq(cq, 1, wc) == -1
    assert ffi.errno == errno.EINVAL
    assert lib.ibv_req_notify_cq(cq, 0) == errno.EINVAL
    # A region has a handle too, but is not a queue.
    cq.handle = rc_raw.mr._handle.handle
    assert lib.ibv_poll_cq(cq, 1, wc) == -1
    assert ffi.errno == errno.EINVAL


def test_planned_failures_hit_their_posts_and_precede_a_full_queue(rc_raw, context):
    wr = rc_raw.wr(Opcode.SEND)
    for after, code in ((1, errno.EIO), (3, errno.EBADF), (10, errno.EPERM)):
        context.faults.fail_post(code, after=after)
    codes = [rc_raw.post(wr) for _ in range(12)]
    none, full = [0], errno.ENOMEM
    assert codes == [*none, errno.EIO, *none, errno.EBADF, *none * 6, errno.EPERM, full]


@pytest.mark.parametrize("done", [0, 1, 3])
def test_polled_completions_free_exactly_their_slots(rc_raw, done):
    """Polling a completion frees its slot."""
    rc_raw.qp.post_recv([rp.RecvWR(rc_raw.mr[:8])] * 8)
    for _ in range(done):
        rc_raw.qp.post_send(rp.Send(rc_raw.mr[8:16], send_flags=0))
    wr = ffi.new("struct ibv_recv_wr *")

    def post() -> int:
        bad = ffi.new("struct ibv_recv_wr **")
        return int(lib.ibv_post_recv(rc_raw.qp._handle, wr, bad))

    assert post() == errno.ENOMEM
    for _ in range(done):
        rc_raw.cq.wait(1)
    assert [post() for _ in range(done + 1)] == [0] * done + [errno.ENOMEM]


def test_poll_skips_what_is_no_completion(rc_raw):
    """Code may find a CQ's entries through the garbage collector, and add anything."""

    class Entry(tuple):
        __slots__ = ()

    class Bytes(bytes):
        pass

    entries = objects[rc_raw.cq._handle.handle].pending
    queue = objects[rc_raw.qp._handle.handle].rq
    shortest = ffi.sizeof("struct ibv_wc")
    longest = shortest + ffi.sizeof("struct rp_wc_ex")
    wc = bytes(shortest)
    entries += [
        None,
        [wc, queue, 0],
        Entry((wc, queue, 0)),
        (),
        (wc, queue),
        (wc, queue, 0, 0),
        (wc, None, 0),
        (wc, queue, None),
        (None, queue, 0),
        (bytearray(wc), queue, 0),
        (Bytes(wc), queue, 0),
        (bytes(shortest - 1), queue, 0),
        (bytes(longest + 1), queue, 0),
        (b"\x07".ljust(shortest, b"\0"), queue, 0),
        (b"\x08".ljust(longest, b"\0"), queue, 0),
    ]
    wcs = ffi.new("struct ibv_wc[]", len(entries))
    assert lib.ibv_poll_cq(rc_raw.cq._handle, len(entries), wcs) == 2
    assert [int.from_bytes(ffi.buffer(wcs + n)[:1], "little") for n in range(2)] == [7, 8]
    assert not entries


def test_closed_resources_are_not_kept_by_work_requests_that_are_done(pd, stack):
    ud, rc = Raw(pd, QPType.UD, stack), Raw(pd, QPType.RC, stack)
    memory = bytearray(64)
    with (
        rp.MR(pd, memory, Access.LOCAL_WRITE | Access.MW_BIND) as mr,
        rp.MW(pd, rp.MWType.TYPE_2) as mw,
        ud.qp.ah_to(ud.qp.endpoint()) as ah,
        rp.CQ(pd.context, 4) as cq,
    ):
        path, queue = (objects[each._handle.handle] for each in (ah, cq))
        references = sys.getrefcount(path)
        rc.qp.post_send(rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=mr, addr=mr.addr, length=64))
        to_itself = {"ah": ah, "remote_qpn": ud.qp.qp_num, "remote_qkey": DEFAULT_QKEY}
        ud.qp.post_send(rp.Send(ud.mr[:8], **to_itself))
        rc.cq.wait()[0].check()
        ud.cq.wait()[0].check()
        assert sys.getrefcount(path) == references
        left = [weakref.ref(queue), weakref.ref(queue.pending)]
        del path, queue
    gc.collect()
    assert [each() for each in left] == [None] * 2
    # A bytearray can be resized only if no view of it is left.
    memory += b"resized"


def test_queues_of_the_device_refuse_what_they_cannot_take(rc_raw):
    """Code may find them, too, through the garbage collector."""
    rc_raw.qp.post_recv(rp.RecvWR(rc_raw.mr[:8]))
    queue = objects[rc_raw.qp._handle.handle].rq
    (wqe,) = queue.posted()
    depth, sges = queue.depth, wqe.sges
    for call in (
        lambda: native.add(),
        lambda: native.add(queue),
        lambda: native.add(queue.pending, wqe),
        lambda: queue.resize("depth"),
        lambda: queue.announce([], "fd", False),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(OverflowError):
        queue.resize(-1)
    with pytest.raises(AttributeError, match="sges cannot be deleted"):
        del wqe.sges
    assert (queue.depth, queue.posted(), wqe.sges) == (depth, (wqe,), sges)


def test_reset_frees_the_slots_of_sends_without_completions(rc_raw):
    rc_raw.qp.post_recv([rp.RecvWR(rc_raw.mr[:8])] * 8)
    rc_raw.qp.post_send([rp.Send(rc_raw.mr[8:16], send_flags=0)] * 8)
    rc_raw.qp.to_reset()
    rc_raw.qp.connect(rc_raw.qp.endpoint())
    wr = rc_raw.wr(Opcode.SEND)
    assert [rc_raw.post(wr) for _ in range(9)] == [0] * 8 + [errno.ENOMEM]


@pytest.mark.parametrize("enabled", [True, False])
def test_posts_and_polls_leave_the_garbage_collector_as_it_is(rc_raw, enabled):
    try:
        (gc.enable if enabled else gc.disable)()
        rc_raw.qp.post_recv(rp.RecvWR(rc_raw.mr[:8]))
        rc_raw.qp.post_send(rp.Send(rc_raw.mr[:8]))
        assert gc.isenabled() is enabled
        rc_raw.cq.poll()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


@pytest.mark.parametrize("claim", [-1, 33, 1 << 30, 2])
@pytest.mark.parametrize("length", [3, 200])
@pytest.mark.parametrize("direction", ["send", "recv"])
def test_invalid_work_request_of_a_c_program_is_refused(context, direction, length, claim):
    """Through the exported symbol, without Python's checks; bad_wr names the work request."""
    with (
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.QP(pd, QPType.UC, cq, max_send_wr=256, max_recv_wr=256) as near,
        rp.QP(pd, QPType.UC, cq) as far,
    ):
        near.connect(far.endpoint())
        far.connect(near.endpoint())
        sges = ffi.new("struct ibv_sge[]", 32)
        wrs = ffi.new(f"struct ibv_{direction}_wr[]", length)
        for index in range(length - 1):
            wrs[index].next = wrs + index + 1
        wrong = length - 2
        wrs[wrong].num_sge = claim
        wrs[wrong].sg_list = ffi.NULL if claim == 2 else sges
        bad = ffi.new(f"struct ibv_{direction}_wr **")
        assert getattr(lib, f"ibv_post_{direction}")(near._open_struct(), wrs, bad) == errno.EINVAL
        assert bad[0] == wrs + wrong

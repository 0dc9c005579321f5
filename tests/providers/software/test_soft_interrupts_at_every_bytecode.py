"""Signal handlers in the middle of soft0's verbs: each verb happens completely or not at all.

In each run, a signal is raised before one bytecode of the soft device that a verb runs. The
device's state afterwards, down to slots and readable descriptors, must be the state that an
undisturbed run leaves, or the state before; and everything must close.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import select
import signal
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
from support import ALL, prints

from rdmapost import (
    Access,
    MWType,
    Opcode,
    OpsFlags,
    OpsOpcode,
    QPAttrMask,
    QPState,
    QPType,
    SRQAttrMask,
    SRQType,
    VerbsError,
)
from rdmapost._binding import ffi, lib, native
from rdmapost.enums import SendFlags
from rdmapost.providers import soft_provider
from rdmapost.providers.soft0.device import device as soft_device
from rdmapost.providers.software import provider as soft
from rdmapost.providers.software import state as soft_state

pytestmark = pytest.mark.skipif(
    sys.gettrace() is not None, reason="coverage (or a debugger) traces already"
)

BINDABLE = int(ALL | Access.MW_BIND)
M = QPAttrMask
GROUP = bytes([0xFF, 0x12, *bytes(14)])
DATA = bytes(range(256)) * 8
OURS = ("/rdmapost/providers/software/", "/rdmapost/providers/soft0/")
provider: Any = soft_provider()
monitoring: Any = getattr(sys, "monitoring", None)
"""Since Python 3.12; earlier versions have only sys.settrace."""
TOOL = 4


class Bench:
    """Soft device objects, created only with the device's verbs."""

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()
        # Other tests may have opened the device, too.
        self.before = [set(table) for table in soft_state._tables]
        self.memory = bytearray(DATA)
        self.unequal = 0  # bytes of a message, at 0, and of its answer, at 768, that have addresses
        self.completions: list[tuple[int, int, int]] = []
        self.too_late = math.inf  # when the device may repeat what the verb sent
        self.context = self.keep(provider.open_device("soft0"), provider.close_device)
        self.pd = self.keep(provider.alloc_pd(self.context), provider.dealloc_pd)
        self.channel = self.keep(
            provider.create_comp_channel(self.context), provider.destroy_comp_channel
        )
        self.cq = self.keep(
            provider.create_cq(self.context, 64, self.channel, 0), provider.destroy_cq
        )
        self.addr = int(ffi.cast("uintptr_t", ffi.from_buffer(self.memory)))
        self.mr = self.keep(
            provider.reg_mr(self.pd, ffi.cast("void *", self.addr), len(self.memory), BINDABLE),
            provider.dereg_mr,
        )
        self.side = self.qp()
        self.to_init(self.side)

    def keep(self, thing: Any, close: Callable[[Any], None]) -> Any:
        """Close an object at the end, unless it has been closed before."""

        def end() -> None:
            try:
                close(thing)
            except VerbsError as error:
                if error.errno != errno.EINVAL:
                    raise

        self.stack.callback(end)
        return thing

    def qp(self, qp_type: QPType = QPType.RC, srq: Any = ffi.NULL) -> Any:
        init = ffi.new("struct ibv_qp_init_attr *")
        init.send_cq = init.recv_cq = self.cq
        init.qp_type, init.sq_sig_all, init.srq = qp_type, 1, srq
        init.cap = (8, 8, 4, 4, 64)
        return self.keep(provider.create_qp(self.pd, init), provider.destroy_qp)

    def modify(self, qp: Any, mask: int, **fields: Any) -> None:
        attr = ffi.new("struct ibv_qp_attr *")
        for name, value in fields.items():
            setattr(attr, name, value)
        if mask & M.AV:
            attr.ah_attr.is_global = attr.ah_attr.port_num = 1
            attr.ah_attr.grh.dgid.raw = soft_device.gids[0]
        provider.modify_qp(qp, attr, int(mask))

    def to_init(self, qp: Any) -> None:
        self.modify(
            qp,
            M.STATE | M.PKEY_INDEX | M.PORT | M.ACCESS_FLAGS,
            qp_state=QPState.INIT,
            port_num=1,
            qp_access_flags=BINDABLE,
        )

    def connect(self, qp: Any, to: Any, rnr_retry: int = 7, timer: int = 1) -> None:
        self.to_init(qp)
        self.modify(
            qp,
            M.STATE
            | M.AV
            | M.PATH_MTU
            | M.DEST_QPN
            | M.RQ_PSN
            | M.MAX_DEST_RD_ATOMIC
            | M.MIN_RNR_TIMER,
            qp_state=QPState.RTR,
            path_mtu=3,
            dest_qp_num=to.qp_num,
            max_dest_rd_atomic=1,
            min_rnr_timer=timer,
        )
        self.modify(
            qp,
            M.STATE | M.TIMEOUT | M.RETRY_CNT | M.RNR_RETRY | M.SQ_PSN | M.MAX_QP_RD_ATOMIC,
            qp_state=QPState.RTS,
            timeout=14,
            retry_cnt=7,
            rnr_retry=rnr_retry,
            max_rd_atomic=1,
        )

    def pair(self, rnr_retry: int = 7, srq: Any = ffi.NULL, timer: int = 1) -> tuple[Any, Any]:
        near, far = self.qp(), self.qp(srq=srq)
        self.connect(near, far, rnr_retry, timer)
        self.connect(far, near, timer=timer)
        return near, far

    def datagrams(self) -> Any:
        qp = self.qp(QPType.UD)
        self.modify(
            qp, M.STATE | M.PKEY_INDEX | M.PORT | M.QKEY, qp_state=QPState.INIT, port_num=1, qkey=7
        )
        self.modify(qp, M.STATE, qp_state=QPState.RTR)
        self.modify(qp, M.STATE | M.SQ_PSN, qp_state=QPState.RTS)
        return qp

    def srq(self, srq_type: SRQType = SRQType.BASIC) -> Any:
        init = ffi.new("struct ibv_srq_init_attr_ex *")
        init.attr.max_wr, init.attr.max_sge, init.attr.srq_limit = 8, 2, 0
        init.pd, init.srq_type = self.pd, srq_type
        init.comp_mask = lib.IBV_SRQ_INIT_ATTR_TYPE | lib.IBV_SRQ_INIT_ATTR_PD
        if srq_type == SRQType.TM:
            init.cq, init.tm_cap.max_num_tags, init.tm_cap.max_ops = self.cq, 4, 4
            init.comp_mask |= lib.IBV_SRQ_INIT_ATTR_CQ | lib.IBV_SRQ_INIT_ATTR_TM
        return self.keep(provider.create_srq_ex(self.context, init), provider.destroy_srq)

    def sge(self, at: int, size: int) -> Any:
        return ffi.new("struct ibv_sge[1]", [(self.addr + at, size, self.mr.lkey)])

    def send(self, qp: Any, opcode: Opcode, at: int = 0, size: int = 8, **fields: Any) -> None:
        wr, bad, sges = ffi.new("struct ibv_send_wr *"), ffi.new("void **"), self.sge(at, size)
        wr.wr_id, wr.opcode, wr.sg_list, wr.num_sge = 10 + int(opcode), opcode, sges, 1
        wr.send_flags = fields.pop("flags", 0)
        if opcode in (Opcode.ATOMIC_CMP_AND_SWP, Opcode.ATOMIC_FETCH_AND_ADD):
            wr.wr.atomic = (self.addr + 64, fields.pop("add", 1), 0, self.mr.rkey)
        elif "ah" in fields:
            wr.wr.ud = (fields.pop("ah"), fields.pop("qpn"), 7)
        else:
            wr.wr.rdma = (self.addr + 1024, self.mr.rkey)
        assert lib.ibv_post_send(qp, wr, ffi.cast("struct ibv_send_wr **", bad)) == 0
        native.run_device()

    def receive(self, qp: Any, wr_id: int = 1, at: int = 512, size: int = 64) -> None:
        wr, bad, sges = ffi.new("struct ibv_recv_wr *"), ffi.new("void **"), self.sge(at, size)
        wr.wr_id, wr.sg_list, wr.num_sge = wr_id, sges, 1
        post = lib.ibv_post_recv if "ibv_qp" in str(ffi.typeof(qp)) else lib.ibv_post_srq_recv
        assert post(qp, wr, ffi.cast("struct ibv_recv_wr **", bad)) == 0
        native.run_device()

    def tag(self, srq: Any, opcode: OpsOpcode, handle: int = 0) -> int:
        op, bad, sges = ffi.new("struct ibv_ops_wr *"), ffi.new("void **"), self.sge(256, 32)
        op.wr_id, op.opcode, op.flags = 90, opcode, OpsFlags.SIGNALED
        op.tm.handle = handle
        op.tm.add = (91, sges, 1, 5, (1 << 64) - 1)
        assert lib.ibv_post_srq_ops(srq, op, ffi.cast("struct ibv_ops_wr **", bad)) == 0
        native.run_device()
        return int(op.tm.handle)

    def poll(self) -> None:
        native.run_device()
        wc = ffi.new("struct ibv_wc[16]")
        while (count := lib.ibv_poll_cq(self.cq, 16, wc)) > 0:
            self.completions += [(w.wr_id, w.status, w.byte_len) for w in wc[0:count]]
        assert count == 0

    def digest(self) -> list[Any]:
        """Return the device's whole state and reports, except for numbers that always differ."""
        device = soft_device
        for qp in device.qps.values():
            slots_add_up(qp.sq, qp.send_cq)
            slots_add_up(qp.rq, qp.recv_cq)
        ready = select.poll()
        descriptors = [
            *(opened.events.fd for opened in soft_state.contexts.values()),
            *soft._channels,
        ]
        for fd in descriptors:
            ready.register(fd, select.POLLIN)
        return [
            sorted(type(thing).__name__ for thing in soft_state.objects.values()),
            [len(table) for table in soft_state._tables],
            [
                (
                    qp.state,
                    qp.sq.used,
                    len(qp.sq.pending),
                    qp.sq.silent,
                    qp.sq.refuses,
                    qp.rq.used,
                    len(qp.rq.pending),
                    qp.rq.refuses,
                    qp.retries,
                    qp.rnr_retries,
                    qp.due > 0,
                    qp.established,
                    {**qp.attr, "dest_qp_num": 0, "ah_attr": 0},
                )
                for qp in device.qps.values()
            ],
            [
                (srq.users, srq.limit, srq.queue.used, len(srq.queue.pending))
                + (
                    (
                        len(srq.tags._entries),
                        len(srq.tags._held),
                        srq.tags.slots.used,
                        srq.tags.ops.used,
                        srq.tags._seen,
                    )
                    if srq.tags
                    else ()
                )
                for srq in device.srqs.values()
            ],
            [
                (cq.users, cq.armed)
                for cq in soft_state.objects.values()
                if type(cq).__name__ == "CompletionQueue"
            ],
            sorted((r.valid, r.windows) for r in device.memory.regions_by_lkey.values()),
            sorted(type(thing).__name__ for thing in device.memory.by_index.values()),
            {gid: len(members) for gid, members in device.groups.items()},
            len(device.parked),
            len(descriptors),
            [len(opened.events.events) for opened in soft_state.contexts.values()],
            sorted((len(channel.events), channel.users) for channel in soft._channels.values()),
            [fd in dict(ready.poll(0)) for fd in descriptors],
            len(os.listdir("/proc/self/fd")),
            bytes(self.memory[self.unequal : 768] + self.memory[768 + self.unequal :]),
        ]

    def close(self) -> None:
        """Close everything, and check that nothing is left."""
        self.stack.close()
        device = soft_device
        made = [
            set(table) - was for table, was in zip(soft_state._tables, self.before, strict=True)
        ]
        assert not any(made), made
        for left in (
            device.qps,
            device.srqs,
            device.groups,
            device.parked,
            soft._channels,
            device.memory.regions_by_lkey,
            device.memory.by_index,
        ):
            assert not left


def slots_add_up(queue: Any, cq: Any) -> None:
    """Every used slot is pending, unsignaled, or in a completion that has not been polled."""
    waiting = sum(wqe.owner is None for wqe in queue.pending)
    unpolled = sum(frees for _, of, frees in cq.pending if of is queue)
    assert queue.used == waiting + queue.silent + unpolled


Verb = Callable[[], Any]
VERBS: dict[str, Callable[[Bench], Verb]] = {}


def verb(setup: Callable[[Bench], Verb]) -> Callable[[Bench], Verb]:
    VERBS[setup.__name__] = setup
    return setup


def control(
    name: str, make: Callable[[Bench], tuple[Any, ...]], undo: Callable[[Any], None] | None = None
) -> None:
    """Register a control verb, its arguments, and the verb that closes its result."""

    def setup(b: Bench) -> Verb:
        args = make(b)

        def call() -> None:
            made = getattr(provider, name)(*args)
            if undo is not None:
                b.keep(made, undo)

        return call

    VERBS[name] = setup


def windows(b: Bench, mw_type: MWType) -> Any:
    return b.keep(provider.alloc_mw(b.pd, mw_type), provider.dealloc_mw)


def bind_of(b: Bench) -> Any:
    bind = ffi.new("struct ibv_mw_bind *")
    bind.wr_id, bind.send_flags = 80, SendFlags.SIGNALED
    bind.bind_info = (b.mr, b.addr, 64, int(Access.REMOTE_WRITE))
    return bind


def bind_type_1(qp: Any, mw: Any, bind: Any) -> None:
    assert lib.rp_bind_mw(qp, mw, bind) == 0
    native.run_device()


def destroyed_with_work(b: Bench) -> Any:
    near, far = b.pair(timer=0)
    b.too_late = time.monotonic() + 0.6
    b.receive(far)
    b.receive(far, 2)
    b.send(near, Opcode.SEND)
    b.send(far, Opcode.SEND)
    b.send(far, Opcode.SEND)
    return far


def ah_attr(b: Bench) -> Any:
    attr = ffi.new("struct ibv_ah_attr *")
    attr.is_global = attr.port_num = 1
    attr.grh.dgid.raw = soft_device.gids[0]
    return attr


def with_event(b: Bench) -> Any:
    near, _ = b.pair()
    assert lib.ibv_req_notify_cq(b.cq, 0) == 0
    b.send(near, Opcode.RDMA_WRITE)
    return b.channel


def xrcd_init() -> Any:
    init = ffi.new("struct ibv_xrcd_init_attr *")
    init.fd, init.oflags = -1, os.O_CREAT
    return init


def qp_init(b: Bench) -> Any:
    init = ffi.new("struct ibv_qp_init_attr *")
    init.send_cq = init.recv_cq = b.cq
    init.qp_type, init.cap = QPType.RC, (8, 8, 4, 4, 0)
    return init


def srq_attr(limit: int) -> Any:
    attr = ffi.new("struct ibv_srq_attr *")
    attr.srq_limit = limit
    return attr


def member(b: Bench) -> Any:
    qp = b.datagrams()
    provider.attach_mcast(qp, GROUP, 0)
    return qp


def other_context(b: Bench) -> Any:
    return b.keep(provider.open_device("soft0"), provider.close_device)


def region(b: Bench) -> Any:
    return b.keep(
        provider.reg_mr(b.pd, ffi.cast("void *", b.addr), 64, BINDABLE), provider.dereg_mr
    )


def channel(b: Bench) -> Any:
    return b.keep(provider.create_comp_channel(b.context), provider.destroy_comp_channel)


def announcing_cq(b: Bench) -> Any:
    return b.keep(provider.create_cq(b.context, 8, b.channel, 0), provider.destroy_cq)


def xrcd(b: Bench) -> Any:
    return b.keep(provider.open_xrcd(b.context, xrcd_init()), provider.close_xrcd)


def ah(b: Bench) -> Any:
    return b.keep(provider.create_ah(b.pd, ah_attr(b)), provider.destroy_ah)


def destroy_extended(cq: Any) -> None:
    provider.destroy_cq(ffi.cast("struct ibv_cq *", cq))


control("open_device", lambda b: ("soft0",), provider.close_device)
control("close_device", lambda b: (other_context(b),))
control("alloc_pd", lambda b: (b.context,), provider.dealloc_pd)
control("dealloc_pd", lambda b: (b.keep(provider.alloc_pd(b.context), provider.dealloc_pd),))
control("reg_mr", lambda b: (b.pd, ffi.cast("void *", b.addr), 64, BINDABLE), provider.dereg_mr)
control("dereg_mr", lambda b: (region(b),))
control("alloc_mw", lambda b: (b.pd, MWType.TYPE_2), provider.dealloc_mw)
control("dealloc_mw", lambda b: (windows(b, MWType.TYPE_1),))


@verb
def bind_mw(b: Bench) -> Verb:
    near, window, bind = b.pair()[0], windows(b, MWType.TYPE_1), bind_of(b)
    return lambda: bind_type_1(near, window, bind)


control("create_comp_channel", lambda b: (b.context,), provider.destroy_comp_channel)
control("destroy_comp_channel", lambda b: (channel(b),))
control("create_cq", lambda b: (b.context, 8, b.channel, 0), provider.destroy_cq)
control("create_cq_ex", lambda b: (b.context, 8, ffi.NULL, 0, 1 << 7), destroy_extended)
control("resize_cq", lambda b: (announcing_cq(b), 4))
control("destroy_cq", lambda b: (announcing_cq(b),))
control("get_cq_event", lambda b: (with_event(b), {}))
control("get_async_event", lambda b: (with_async_event(b), {}))
control("destroy_srq", lambda b: (b.srq(SRQType.TM),))
control("modify_srq", lambda b: (b.srq(), srq_attr(2), int(SRQAttrMask.LIMIT)))
control("open_xrcd", lambda b: (b.context, xrcd_init()), provider.close_xrcd)
control("close_xrcd", lambda b: (xrcd(b),))
control("create_qp", lambda b: (b.pd, qp_init(b)), provider.destroy_qp)
control("destroy_qp", lambda b: (destroyed_with_work(b),))
control("create_ah", lambda b: (b.pd, ah_attr(b)), provider.destroy_ah)
control("destroy_ah", lambda b: (ah(b),))
control("attach_mcast", lambda b: (b.datagrams(), GROUP, 0))
control("detach_mcast", lambda b: (member(b), GROUP, 0))


def with_async_event(b: Bench) -> Any:
    """Cause an asynchronous event: a queue pair of an SRQ breaks."""
    _, far = b.pair(srq=b.srq())
    b.modify(far, M.STATE, qp_state=QPState.ERR)
    return b.context


@verb
def create_srq_ex(b: Bench) -> Verb:
    return lambda: b.srq(SRQType.TM)


@verb
def modify_qp_to_rtr(b: Bench) -> Verb:
    qp = b.qp()
    b.to_init(qp)
    mask = (
        M.STATE | M.AV | M.PATH_MTU | M.DEST_QPN | M.RQ_PSN | M.MAX_DEST_RD_ATOMIC | M.MIN_RNR_TIMER
    )
    return lambda: b.modify(qp, mask, qp_state=QPState.RTR, path_mtu=3, dest_qp_num=1)


@verb
def modify_qp_to_err_flushes(b: Bench) -> Verb:
    _, far = b.pair()
    for wr_id in range(3):
        b.receive(far, wr_id)
    return lambda: b.modify(far, M.STATE, qp_state=QPState.ERR)


@verb
def modify_qp_to_reset_forgets(b: Bench) -> Verb:
    far = destroyed_with_work(b)
    return lambda: b.modify(far, M.STATE, qp_state=QPState.RESET)


@verb
def send(b: Bench) -> Verb:
    near, far = b.pair()
    b.receive(far)
    lib.ibv_req_notify_cq(b.cq, 0)
    return lambda: b.send(near, Opcode.SEND)


@verb
def send_with_imm_from_srq(b: Bench) -> Verb:
    srq = b.srq()
    near, _ = b.pair(srq=srq)
    b.receive(srq)
    provider.modify_srq(srq, srq_attr(1), int(SRQAttrMask.LIMIT))
    return lambda: b.send(near, Opcode.SEND_WITH_IMM)


@verb
def send_inline(b: Bench) -> Verb:
    near, far = b.pair()
    b.receive(far)
    return lambda: b.send(near, Opcode.SEND, flags=int(SendFlags.INLINE))


@verb
def write(b: Bench) -> Verb:
    near, _ = b.pair()
    return lambda: b.send(near, Opcode.RDMA_WRITE, size=512)


@verb
def read(b: Bench) -> Verb:
    near, _ = b.pair()
    return lambda: b.send(near, Opcode.RDMA_READ, size=512)


@verb
def fetch_and_add(b: Bench) -> Verb:
    near, _ = b.pair()
    return lambda: b.send(near, Opcode.ATOMIC_FETCH_AND_ADD)


@verb
def send_that_is_not_awaited(b: Bench) -> Verb:
    near, _ = b.pair(timer=0)  # 655 ms
    b.too_late = time.monotonic() + 0.6
    return lambda: b.send(near, Opcode.SEND)


@verb
def send_that_fails(b: Bench) -> Verb:
    near, _ = b.pair(rnr_retry=0)
    b.receive(near, 5)
    return lambda: b.send(near, Opcode.SEND)


@verb
def write_to_memory_that_has_gone_since_the_check(b: Bench) -> Verb:
    near, _ = b.pair()
    region = soft_device.memory.find_region(b.mr.lkey)
    assert region is not None
    region.unsure = 8
    check = native.reachable
    b.stack.enter_context(
        mock.patch.object(native, "reachable", lambda addr, *others: check(b.addr, *others))
    )
    return lambda: b.send(near, Opcode.RDMA_WRITE, flags=int(SendFlags.INLINE))


@verb
def send_that_is_flushed(b: Bench) -> Verb:
    near, _ = b.pair()
    b.modify(near, M.STATE, qp_state=QPState.ERR)
    return lambda: b.send(near, Opcode.SEND)


@verb
def multicast(b: Bench) -> Verb:
    qps = [member(b) for _ in range(2)]
    for at, qp in enumerate(qps):
        b.receive(qp, at=512 + 64 * at)
    attr = ah_attr(b)
    attr.grh.dgid.raw = GROUP
    ah = b.keep(provider.create_ah(b.pd, attr), provider.destroy_ah)
    sender = b.datagrams()
    return lambda: b.send(sender, Opcode.SEND, ah=ah, qpn=0xFFFFFF)


@verb
def receive_that_is_flushed(b: Bench) -> Verb:
    _, far = b.pair()
    b.modify(far, M.STATE, qp_state=QPState.ERR)
    return lambda: b.receive(far)


@verb
def tag_add(b: Bench) -> Verb:
    srq = b.srq(SRQType.TM)
    return lambda: b.tag(srq, OpsOpcode.TAG_ADD)


@verb
def tag_del(b: Bench) -> Verb:
    srq = b.srq(SRQType.TM)
    handle = b.tag(srq, OpsOpcode.TAG_ADD)
    return lambda: b.tag(srq, OpsOpcode.TAG_DEL, handle)


def tagged(b: Bench, opcode: int, behind: bytes) -> Verb:
    srq = b.srq(SRQType.TM)
    near, _ = b.pair(srq=srq)
    b.receive(srq)
    b.receive(near, 60, at=768)
    b.tag(srq, OpsOpcode.TAG_ADD)
    message = struct.pack("!B3xIQ", opcode, 3, 5) + behind
    b.memory[: len(message)] = message
    b.unequal = len(message)
    return lambda: b.send(near, Opcode.SEND, size=len(message))


@verb
def eager_message(b: Bench) -> Verb:
    return tagged(b, 3, b"payload")


@verb
def rendezvous(b: Bench) -> Verb:
    return tagged(b, 1, struct.pack("!QII", b.addr + 1024, b.mr.rkey, 16))


@verb
def poll_when_a_request_is_due(b: Bench) -> Verb:
    near, far = b.pair(timer=20)  # 10.24 ms
    start = time.monotonic()
    b.send(near, Opcode.SEND)
    b.receive(far)
    if time.monotonic() - start > 0.01:
        raise TooLate
    for source in (b.channel, *(opened.events for opened in soft_state.contexts.values())):
        assert select.select([source.fd], [], [], 5)[0]
    return b.poll


class TooLate(Exception):
    """This machine is so busy that a timer has fired before or during the verb."""


# ---- the runs ---------------------------------------------------------------------


class Struck:
    """Raises a signal before the n-th bytecode of the soft device."""

    def __init__(self, at: int, every: bool = False) -> None:
        self.left = at
        self.every = every
        self.seen = 0

    def __enter__(self) -> Struck:
        if monitoring is None:
            sys.settrace(self.begin)
            return self
        event = monitoring.events.INSTRUCTION
        monitoring.use_tool_id(TOOL, "interrupts")
        monitoring.register_callback(TOOL, event, self.monitored)
        monitoring.set_events(TOOL, event)
        return self

    def __exit__(self, *error: object) -> None:
        if monitoring is None:
            sys.settrace(None)
            return
        monitoring.set_events(TOOL, 0)
        monitoring.register_callback(TOOL, monitoring.events.INSTRUCTION, None)
        monitoring.free_tool_id(TOOL)
        monitoring.restart_events()

    def monitored(self, code: Any, offset: int) -> Any:
        if not any(part in code.co_filename for part in OURS):
            return monitoring.DISABLE
        if threading.current_thread() is threading.main_thread():
            self.moment()
        return None

    def begin(self, frame: Any, event: str, arg: Any) -> Any:
        if not any(part in frame.f_code.co_filename for part in OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.each

    def each(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "opcode":
            self.moment()
        return self.each

    def moment(self) -> None:
        self.left -= 1
        self.seen += 1
        if not self.left or (self.every and self.left < 0):
            signal.raise_signal(signal.SIGUSR1)


class Alarm(Exception):
    """An exception of the caller's own."""


@contextlib.contextmanager
def handler(handle: Callable[..., Any]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class Result(NamedTuple):
    """The outcome of a verb.

    Attributes:
        signals: how many signals arrived.
        out: the exception that the verb raised, or None.
        before, after: the device's state and reports.
        completions: all completions.
        moments: bytecodes of the soft device that ran in the verb.
    """

    signals: int
    out: BaseException | None
    before: list[Any]
    after: list[Any]
    completions: list[tuple[int, int, int]]
    moments: int


def run(
    setup: Callable[[Bench], Verb], at: int, act: Callable[[Bench], None], every: bool = False
) -> Result:
    """Run a verb with a signal before one bytecode, or before every bytecode from this one on."""
    while True:
        with contextlib.suppress(TooLate):
            return attempt(setup, at, act, every)


def attempt(
    setup: Callable[[Bench], Verb], at: int, act: Callable[[Bench], None], every: bool
) -> Result:
    b = Bench()
    signals: list[bool] = []
    out: BaseException | None = None

    def handle(*_: object) -> None:
        signals.append(True)
        act(b)

    try:
        call = setup(b)
        before = b.digest()
        with handler(handle), Struck(at, every) as struck:
            try:
                call()
                for _ in range(2):
                    """Deferred exceptions are raised here."""
            except (KeyboardInterrupt, Alarm) as error:
                out = error
        after = b.digest()
        if time.monotonic() > b.too_late:
            raise TooLate
        b.poll()
    finally:
        b.close()
    return Result(len(signals), out, before, after, b.completions, struck.seen)


NEVER = 1 << 40
MOMENTS = float(os.environ.get("RDMAPOST_MOMENTS", "30"))
"""About how many of each verb's bytecodes to try; "inf" tries all, and takes minutes."""


def each_moment(
    setup: Callable[[Bench], Verb], act: Callable[[Bench], None], moments: int
) -> Iterator[tuple[int, Result]]:
    """Run a verb once for each of its bytecodes, or for some, including the first and the last."""
    assert moments, "it runs nothing of the soft device"
    step = max(1, int(moments // MOMENTS))
    for at in sorted({*range(1, moments + 1, step), moments}):
        result = run(setup, at, act)
        if not result.signals:
            # On a busy machine a verb may run fewer bytecodes: after 2 ms it leaves work to a later
            # verb.
            assert result.moments < at
            continue
        assert result.signals == 1, at
        yield at, result


def ctrl_c(_: Bench) -> None:
    raise KeyboardInterrupt


def alarm(_: Bench) -> None:
    raise Alarm("mine")


@pytest.mark.parametrize("act", [ctrl_c, alarm], ids=["KeyboardInterrupt", "another exception"])
@pytest.mark.parametrize("name", VERBS)
def test_interrupted_verb_happens_completely_or_not_at_all(name, act):
    """The exception is raised exactly once; posted work is always carried out."""
    setup = VERBS[name]
    whole = run(setup, NEVER, act)
    assert (whole.out, whole.signals) == (None, 0)
    is_control = hasattr(provider, name) or name.startswith(("create", "modify"))
    for at, result in each_moment(setup, act, whole.moments):
        assert type(result.out) is (KeyboardInterrupt if act is ctrl_c else Alarm), at
        assert result.out.args == (() if act is ctrl_c else ("mine",))
        assert settled(result.before) == settled(whole.before), at
        if is_control and result.after == whole.before:
            continue
        if name.startswith("poll"):
            # An interrupted caller gets no completions, but the requests due have been carried out.
            assert settled(result.after) == settled(whole.after), at
        else:
            assert result.after == whole.after, at
        assert result.completions == whole.completions, at


@pytest.mark.parametrize("name", ["fetch_and_add", "rendezvous", "poll_when_a_request_is_due"])
def test_handler_that_always_raises_does_not_stop_a_work_request(name):
    """The work request is carried out once, and the first exception is raised."""
    setup = VERBS[name]
    whole = run(setup, NEVER, alarm)
    numbers = itertools.count()

    def numbered(_: Bench) -> None:
        raise Alarm(next(numbers))

    result = run(setup, 1, numbered, every=True)
    assert result.signals >= 1
    assert result.out.args == (0,)
    assert settled(result.after) == settled(whole.after)
    assert result.completions == whole.completions


@pytest.mark.parametrize("name", VERBS)
def test_handler_may_post_poll_and_close_in_the_middle_of_a_verb(name):
    """Posts are accepted, polls return what is available, and control verbs are refused by name."""
    setup = VERBS[name]

    def act(b: Bench) -> None:
        b.receive(b.side, 7)
        b.poll()
        if native.in_step():
            with pytest.raises(VerbsError, match="in the middle of a verb of a software") as caught:
                provider.destroy_qp(b.side)
            assert caught.value.errno == errno.EBUSY

    def then(b: Bench) -> Verb:
        call = setup(b)
        return lambda: (call(), act(b))

    forgets = name in ("destroy_qp", "modify_qp_to_reset_forgets")
    whole = run(then, NEVER, act)
    for at, result in each_moment(setup, act, whole.moments):
        assert result.out is None, at
        # The order may differ, because the handler polls, too.
        completions = Counter(result.completions)
        if forgets:
            # The handler polls what the verb would have dropped.
            assert completions >= Counter(whole.completions), at
        else:
            assert completions == Counter(whole.completions), at
        assert settled(result.after) == settled(whole.after), at


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "returns"])
@pytest.mark.parametrize("name", VERBS)
def test_handler_may_post_to_the_queues_of_the_verb_it_interrupts(name, raises):
    """Slots add up whether the verb succeeds or not (digest checks), and everything closes."""
    setup = VERBS[name]

    def act(b: Bench) -> None:
        for qp in tuple(soft_device.qps.values()):
            with contextlib.suppress(AssertionError):  # Not in this state, or no room.
                b.receive(qp.handle, 70)
            with contextlib.suppress(AssertionError):
                b.send(qp.handle, Opcode.RDMA_WRITE)
        for srq in tuple(soft_device.srqs.values()):
            with contextlib.suppress(AssertionError):
                b.receive(srq.handle, 71)
            with contextlib.suppress(AssertionError):
                b.tag(srq.handle, OpsOpcode.TAG_ADD)
        assert lib.ibv_req_notify_cq(b.cq, 0) in (0, errno.EINVAL)
        b.poll()
        if raises:
            raise Alarm

    whole = run(setup, NEVER, act)
    for at, result in each_moment(setup, act, whole.moments):
        assert (type(result.out) is Alarm) is raises, at


def settled(digest: list[Any]) -> Any:
    """Omit the parts of a digest that depend on whether completions have been polled."""
    return [*digest[:2], *digest[5:]]


FORKED = """
import os, signal
import rdmapost as rp
from rdmapost._binding import native, ffi, lib
from rdmapost.providers import soft_provider
from rdmapost.providers.soft0.device import device as soft_device
from rdmapost.providers.software import state as soft_state
provider = soft_provider()
context = provider.open_device("soft0")
pd = provider.alloc_pd(context)
cq = provider.create_cq(context, 8, ffi.NULL, 0)

def child():
    signal.alarm(20)  # of a child that hangs
    wc = ffi.new("struct ibv_wc *")
    assert lib.ibv_poll_cq(cq, 1, wc) == -1
    for call in (lambda: provider.dealloc_pd(pd), lambda: provider.alloc_pd(context)):
        try:
            call()
        except rp.VerbsError as error:
            assert error.errno == 22, error
        else:
            raise AssertionError("an object of the parent's was used")
    assert not soft_state.objects and not soft_state.contexts
    with rp.open_device("soft0") as mine, rp.PD(mine), rp.CQ(mine) as own:
        assert own.poll() == []
    os._exit(7)

def fork():
    pid = os.fork()
    if not pid:
        child()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_forked_child_has_its_own_empty_soft0():
    """The child's soft0 does not know inherited objects, and the parent's still works."""
    after = (
        "fork(); provider.destroy_cq(cq); provider.dealloc_pd(pd); print(len(soft_state.objects))"
    )
    assert prints(FORKED + after).split() == ["7", "0"]


def test_child_forked_during_another_threads_verb_does_not_hang():
    """The thread that holds the lock does not exist in the child."""
    code = """
import threading, time
inside, go = threading.Event(), threading.Event()

def alloc(self, context):
    inside.set()
    assert go.wait(20)

thread = threading.Thread(target=native.verb, args=(alloc, provider, context))
thread.start()
assert inside.wait(20)
fork()
go.set()
thread.join(20)
print(provider.alloc_pd(context) != ffi.NULL)
"""
    assert prints(FORKED + code).split() == ["7", "True"]


def test_signal_handler_may_fork_in_the_middle_of_a_verb():
    """The verb fails in the child, and continues in the parent."""
    code = """
def alloc(self, context):
    soft_device.port_mtu = 1
    fork_here()

def fork_here():
    global pid
    pid = os.fork()

rp.PD  # Loads the module that gives ClosedError to C.
before = soft_device.port_mtu
try:
    native.verb(alloc, provider, context)
except rp.ClosedError as error:
    assert not pid and "forked in the middle of a verb" in str(error)
    assert soft_device.port_mtu == before
    child()
assert pid and soft_device.port_mtu == 1
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert prints(FORKED + code) == "7"


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("dealloc_pd", lambda b: provider.alloc_pd(b.context)),
        ("dereg_mr", lambda b: provider.reg_mr(b.pd, ffi.cast("void *", b.addr), 8, 1)),
        ("dealloc_mw", lambda b: provider.alloc_mw(b.pd, MWType.TYPE_1)),
        ("destroy_cq", lambda b: provider.create_cq(b.context, 1, ffi.NULL, 0)),
        ("destroy_comp_channel", lambda b: provider.create_comp_channel(b.context)),
        ("destroy_qp", lambda b: provider.create_qp(b.pd, qp_init(b))),
        ("destroy_ah", lambda b: provider.create_ah(b.pd, ah_attr(b))),
        ("close_xrcd", lambda b: provider.open_xrcd(b.context, xrcd_init())),
    ],
)
def test_verb_on_a_destroyed_object_fails_and_names_it(name, make):
    b = Bench()
    thing = make(b)
    getattr(provider, name)(thing)
    with pytest.raises(VerbsError) as caught:
        getattr(provider, name)(thing)
    assert caught.value.errno == errno.EINVAL
    assert name.partition("_")[2] in str(caught.value)
    b.close()


def test_refused_destroy_says_why_and_changes_nothing():
    b = Bench()
    window = windows(b, MWType.TYPE_1)
    near, _ = b.pair()
    bind_type_1(near, window, bind_of(b))
    before = b.digest()
    for call, thing, why in (
        (provider.dereg_mr, b.mr, "a memory window is bound"),
        (provider.destroy_cq, b.cq, "queues complete on it"),
        (provider.destroy_comp_channel, b.channel, "1 CQs use it"),
    ):
        with pytest.raises(VerbsError, match=why) as caught:
            call(thing)
        assert caught.value.errno == errno.EBUSY
        assert b.digest() == before
    b.close()


HANDLER = """
import signal, sys, threading, time
import rdmapost as rp
from rdmapost._binding import native

signal.alarm(20)
context = rp.open_device("soft0")
pd, cq = rp.PD(context), rp.CQ(context)
mr, mw = rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.MW_BIND), rp.MW(pd, 1)
qp = rp.QP(pd, rp.QPType.RC, cq)
qp.connect(qp.endpoint())
batch = qp.prepare(rp.Send(mr[:8]))
inside, begun = threading.Event(), threading.Event()

def other():
    inside.wait(20)
    begun.set()
    {other}

def verb():
    inside.set()
    begun.wait(20)
    for _ in range(100):  # at one of these the other thread waits for the device
        time.sleep(1e-3)
        try:
            {handler}
            said = "nothing"
        except Exception as error:
            said = f"{{type(error).__name__}} {{getattr(error, 'errno', None)}}"
    return said

thread = threading.Thread(target=other)
thread.start()
print(native.verb(verb))
thread.join(20)
print(thread.is_alive())
"""
"""A program in which a handler runs code within a verb while another thread runs other code."""


@pytest.mark.parametrize(("count", "said"), [("-1", "ValueError"), ("None", "TypeError")])
def test_invalid_poll_within_a_verb_does_not_wait_for_another_threads_poll(count, said):
    """The other thread holds the completion queue, and waits for the device."""
    code = HANDLER.format(other="cq.poll()", handler=f"cq.poll({count})")
    assert prints(code).split("\n") == [f"{said} None", "False"]


@pytest.mark.parametrize(
    "handler",
    ["qp.post_send(rp.Send(mr[:8]))", "qp.prepare(rp.Send(mr[:8]))", "batch[0].wr_id = 5"],
)
@pytest.mark.parametrize(
    "other", ["qp.post_send([rp.Send(mr[:8])])", "qp.bind_mw(mw, mr, mr.addr, 8, 0)"]
)
def test_post_within_a_verb_does_not_wait_for_another_threads_post(other, handler):
    """No thread holds the queue while the device is busy: posts are accepted until it is full."""
    code = HANDLER.format(other=other, handler=handler)
    said, waits = prints(code).split("\n")
    assert said == (f"PostError {errno.ENOMEM}" if "post_send" in handler else "nothing")
    assert waits == "False"


STEP = """
import os, signal, sys, threading, time
import rdmapost as rp
from rdmapost.providers.soft0 import requester
from rdmapost.providers.software import completion, qp

requester._open_fast_path = lambda qp: None  # so that Python executes every work request
signal.alarm(20)
context = rp.open_device("soft0")
pd, mr_size = rp.PD(context), 64
channel, cq = rp.CompChannel(context), rp.CQ(context)
announced = rp.CQ(context, channel=channel)
mr = rp.MR(pd, mr_size, rp.Access.LOCAL_WRITE)
a, b = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, announced)
a.connect(b.endpoint())
b.connect(a.endpoint(), min_rnr_timer=1)
"""


def test_cq_armed_before_a_completion_is_visible_announces_it():
    """Another thread is adding the completion, so a poll does not see it yet."""
    code = """
inside, go = threading.Event(), threading.Event()
add = completion.CompletionQueue.add

def add_and_wait(self, entry):
    added = add(self, entry)
    if self.channel is not None and not inside.is_set():
        inside.set()
        go.wait(20)
    return added

completion.CompletionQueue.add = add_and_wait
b.post_recv(rp.RecvWR(mr[:8], wr_id=7))
thread = threading.Thread(target=a.post_send, args=(rp.Send(mr[:8]),))
thread.start()
assert inside.wait(20)
announced.req_notify()
seen = len(announced.poll())
go.set()
assert channel.get_cq_event(20) is announced
print(seen, [wc.wr_id for wc in announced.poll()])
"""
    assert prints(STEP + code) == "0 [7]"


def test_poll_during_another_threads_step_returns_only_committed_completions():
    """Both on the CQ to which the step adds, and on another one."""
    code = """
inside, go = threading.Event(), threading.Event()
add = completion.CompletionQueue.add

def add_and_wait(self, entry):
    added = add(self, entry)
    if not inside.is_set():
        inside.set()
        go.wait(20)
    return added

b.post_recv([rp.RecvWR(mr[:8], wr_id=7), rp.RecvWR(mr[:8], wr_id=8)])
a.post_send(rp.Send(mr[:8], wr_id=1))
completion.CompletionQueue.add = add_and_wait
thread = threading.Thread(target=a.post_send, args=(rp.Send(mr[:8], wr_id=2),))
thread.start()
assert inside.wait(20)
seen = [[wc.wr_id for wc in queue.poll()] for queue in (announced, cq)]
go.set()
thread.join(20)
print(seen, [[wc.wr_id for wc in queue.poll()] for queue in (announced, cq)])
"""
    assert prints(STEP + code) == "[[7], [1]] [[8], [2]]"


def test_fault_planned_during_a_step_survives_its_rollback():
    """Only the step's own changes are undone."""
    code = """
inside, go = threading.Event(), threading.Event()
add = completion.CompletionQueue.add

def add_and_fail(self, entry):
    added = add(self, entry)
    if not inside.is_set():
        inside.set()
        go.wait(20)
        raise KeyboardInterrupt
    return added

def post():
    try:
        a.post_send(rp.Send(mr[:8], wr_id=6))
        for _ in range(9): time.sleep(0)
    except KeyboardInterrupt:
        pass

completion.CompletionQueue.add = add_and_fail
b.post_recv([rp.RecvWR(mr[:8])] * 2)
thread = threading.Thread(target=post)
thread.start()
assert inside.wait(20)
context.faults.complete_with(7, rp.WCStatus.RETRY_EXC_ERR)
go.set()
thread.join(20)
a.post_send(rp.Send(mr[:8], wr_id=7))
print(*((wc.wr_id, wc.status.name) for wc in cq.wait(2)))
"""
    assert prints(STEP + code) == "(6, 'SUCCESS') (7, 'RETRY_EXC_ERR')"


def test_handler_of_another_signal_runs_to_its_end_while_an_exception_is_pending():
    """The other signal arrives while the step that the exception has ended is retried."""
    code = """
stopped = attempts = 0

def stop(*_):
    global stopped
    stopped = 1

def fail(*_):
    raise TimeoutError

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGALRM, fail)
complete = qp.QueuePair.complete_send

def complete_send(self, *args):
    global attempts
    attempts += 1
    if attempts == 1:
        signal.raise_signal(signal.SIGALRM)
    if attempts == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return complete(self, *args)

qp.QueuePair.complete_send = complete_send
b.post_recv(rp.RecvWR(mr[:8]))
raised = False
try:
    a.post_send(rp.Send(mr[:8]))
except TimeoutError:
    raised = True
done = len(cq.wait())
print(raised, attempts, stopped, done)
"""
    assert prints(STEP + code) == "True 2 1 1"


def test_ctrl_c_in_the_device_ends_the_wait_that_runs_the_device():
    """The wait is for another CQ, and the device is just failing a send."""
    code = """
complete = qp.QueuePair.complete_send

def complete_send(self, *args):
    if waiting and not struck:
        struck.append(time.monotonic())
        signal.raise_signal(signal.SIGINT)
    return complete(self, *args)

waiting, struck = False, []
qp.QueuePair.complete_send = complete_send
a.post_send(rp.Send(mr[:8]))
waiting = True
try:
    rp.CQ(context).wait(1, None)
except KeyboardInterrupt:
    print(time.monotonic() - struck[0] < 5)
"""
    assert prints(STEP + code) == "True"


def test_fork_during_a_repeated_step_leaves_the_childs_garbage_collector_enabled():
    """The thread that has disabled the collector does not exist in the child."""
    code = """
import gc, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
inside, forked = threading.Event(), threading.Event()
complete = qp.QueuePair.complete_send
attempts, found = [], []

def fail(*_):
    raise TimeoutError

def complete_send(self, *args):
    attempts.append(gc.isenabled())
    if len(attempts) == 1:
        signal.raise_signal(signal.SIGALRM)
    if len(attempts) == 2:
        inside.set()
        assert forked.wait(20)
    return complete(self, *args)

def fork():
    assert inside.wait(20)
    pid = os.fork()
    if not pid:
        os._exit(gc.isenabled())
    found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    forked.set()

signal.signal(signal.SIGALRM, fail)
qp.QueuePair.complete_send = complete_send
thread = threading.Thread(target=fork)
thread.start()
b.post_recv(rp.RecvWR(mr[:8]))
try:
    a.post_send(rp.Send(mr[:8]))
except TimeoutError:
    print(attempts, found, gc.isenabled())
thread.join(20)
# If the program has disabled it, it stays disabled.
gc.disable()
pid = os.fork()
if not pid:
    os._exit(gc.isenabled())
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert prints(STEP + code).split("\n") == ["[True, False] [1] True", "0"]

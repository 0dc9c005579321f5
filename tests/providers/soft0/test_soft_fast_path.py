"""Common work requests, which C executes, end as if soft0's Python code had executed them.

The same random programs run both ways. Between the posts, the programs change whatever decides how
a work request ends: keys, regions, windows, permissions, states, completion queues, planned faults.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
from support import ALL, LOSES_MEMORY, Pair, prints, soft_context, until

import rdmapost as rp
from rdmapost import Access, QPState, SendFlags, WCStatus
from rdmapost.providers.soft0 import requester

context = soft_context
REMOTE = ALL & ~Access.LOCAL_WRITE
SIZE = 1024
SIZES = 1, 7, 8, 30, 64
PROGRAMS, STEPS = 120, 60


class Scene:
    """Two connected queue pairs with memory, and a list of everything that has happened.

    Args:
        stack: closes everything.
        seed: the program.
    """

    def __init__(self, stack: contextlib.ExitStack, seed: int) -> None:
        self.stack, self.random = stack, random.Random(seed)
        self.context = stack.enter_context(rp.open_device("soft0"))
        self.pds = [stack.enter_context(rp.PD(self.context)) for _ in range(2)]
        self.channel = stack.enter_context(rp.CompChannel(self.context))
        self.cqs = [
            stack.enter_context(rp.CQ(self.context, 64, channel=self.channel)),
            stack.enter_context(rp.CQ(self.context, self.random.choice((16, 64)))),
        ]
        self.mrs = [stack.enter_context(rp.MR(self.pds[0], SIZE, ALL)) for _ in range(3)]
        for number, mr in enumerate(self.mrs):
            mr.buffer[:] = bytes((7 * i + number) & 0xFF for i in range(SIZE))
        self.mw = stack.enter_context(rp.MW(self.pds[0], rp.MWType.TYPE_1))
        self.old_keys = [(mr.addr, mr.rkey) for mr in self.mrs]
        every = self.random.random() < 0.3
        self.qps = [
            stack.enter_context(
                rp.QP(
                    self.pds[0],
                    rp.QPType.RC,
                    send_cq=self.random.choice(self.cqs),
                    recv_cq=self.random.choice(self.cqs),
                    sq_sig_all=every,
                    max_send_sge=8,
                    max_recv_sge=8,
                    max_inline_data=64,
                    checked=False,
                )
            )
            for _ in range(2)
        ]
        self.happened: list[Any] = []
        self.posted = 0
        self.reconnect()

    def note(self, *what: Any) -> None:
        self.happened.append(what)

    def run(self) -> list[Any]:
        """Run the program; return what has happened."""
        for _ in range(STEPS):
            for _ in range(self.random.randrange(1, 6)):
                self.send()
            if self.random.random() < 0.12:
                change = self.random.choice(CHANGES)
                try:
                    change(self)
                except rp.RdmaError as error:
                    self.note(change.__name__, type(error))
            self.look()
            if any(qp.state is not QPState.RTS for qp in self.qps):
                self.reconnect()
        return self.happened

    def look(self) -> None:
        for cq in self.cqs:
            if self.random.random() < 0.6:
                self.note("polled", [self.described(wc) for wc in cq.poll(99)])
        if self.random.random() < 0.1:
            self.cqs[0].req_notify(solicited_only=self.random.random() < 0.5)
        with contextlib.suppress(rp.WaitTimeout):
            self.note("event", self.channel.get_cq_event(0) is self.cqs[0])
        self.note([bytes(mr.buffer) for mr in self.mrs])
        self.note([(qp.state, qp.outstanding) for qp in self.qps])

    def described(self, wc: rp.WC) -> Any:
        number = [qp.qp_num for qp in self.qps].index(wc.qp_num)
        if wc.status:
            return wc.wr_id, wc.status, number
        imm = wc.imm_data if wc.wc_flags & rp.WCFlags.WITH_IMM else None
        return wc.wr_id, wc.opcode, number, wc.byte_len, imm, wc.wc_flags, wc.src_qp, wc.sl

    # ---- posts --------------------------------------------------------------

    def sges(self, wrong: bool = False) -> list[rp.SGE]:
        found = []
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 3, 6))):
            mr = self.random.choice(self.mrs)
            size = self.random.choice(SIZES)
            at = self.random.randrange(SIZE - size + 1)
            found.append(rp.SGE(mr.addr + at + SIZE * wrong, size, mr.lkey))
        return found

    def post(self, call: Callable[[Any], None], wr: Any) -> None:
        self.posted += 1
        try:
            call(wr)
        except rp.PostError as error:
            self.note("refused", error.errno)

    def receive(self, qp: rp.QP) -> None:
        """Post a receive, which nearly always has room for the next message."""
        if self.random.random() < 0.04:
            return
        sges = self.sges(self.random.random() < 0.02)
        if self.random.random() < 0.95:
            mr = self.random.choice(self.mrs)
            sges = [*sges[:3], mr[: SIZE // 2]]
        self.post(qp.post_recv, rp.RecvWR(sges, wr_id=self.posted))

    def send(self) -> None:
        qp, peer = self.random.sample(self.qps, 2)
        mr, at = self.random.choice(self.mrs), self.random.randrange(SIZE // 2)
        key, addr = self.random.choice(
            [(mr.rkey, mr.addr)] * 60
            + [(old[1], old[0]) for old in self.old_keys[-2:]]
            + [(self.mw.rkey, mr.addr), (mr.lkey, mr.addr), (mr.rkey, mr.addr + SIZE - 30)]
        )
        remote = {"remote_addr": addr + at, "rkey": key}
        sges = self.sges(self.random.random() < 0.02)
        flags = self.random.choice((SendFlags.SIGNALED,) * 3 + (SendFlags(0),))
        if self.random.random() < 0.2:
            flags |= SendFlags.SOLICITED
        kind = self.random.choice("SSIWWNRRA")
        if kind in "SIWN" and sum(sge.length for sge in sges) <= 64 and self.random.random() < 0.3:
            flags |= SendFlags.INLINE
        if flags & SendFlags.INLINE:
            # The post itself reads the bytes, so they must be there.
            sges = [mr[:20] for mr in self.mrs[: len(sges) // 2]]
        if kind in "SIN":
            self.receive(peer)
        common = {"wr_id": self.posted, "send_flags": flags}
        wr = {
            "S": lambda: rp.Send(sges, **common),
            "I": lambda: rp.SendWithImm(sges, imm_data=self.posted, **common),
            "W": lambda: rp.RdmaWrite(sges, **remote, **common),
            "N": lambda: rp.RdmaWriteWithImm(sges, imm_data=self.posted, **remote, **common),
            "R": lambda: rp.RdmaRead(sges, **remote, **common),
            "A": lambda: rp.AtomicFetchAndAdd(
                self.mrs[0][:8], remote_addr=addr, rkey=key, compare_add=1, **common
            ),
        }[kind]()
        self.post(qp.post_send, wr)

    # ---- changes ------------------------------------------------------------

    def reconnect(self) -> None:
        for qp in self.qps:
            qp.to_reset()
        for cq in self.cqs:
            self.note("before reset", [self.described(wc) for wc in cq.poll(99)])
        self.mw.close()
        self.mw = self.stack.enter_context(rp.MW(self.pds[0], rp.MWType.TYPE_1))
        for mr in self.mrs:
            mr.rereg(access=ALL, pd=self.pds[0])
        self.context.faults.clear()
        for qp, peer in zip(self.qps, reversed(self.qps), strict=True):
            qp.connect(peer.endpoint(), access=REMOTE, rnr_retry=0)

    def rereg(self, mr: rp.MR, **changes: Any) -> None:
        """Re-register a region; InUseError if work requests name it."""
        for cq in self.cqs:
            self.note("before rereg", [self.described(wc) for wc in cq.poll(99)])
        old = mr.addr, mr.rkey
        mr.rereg(**changes)
        if mr.rkey != old[1]:
            self.old_keys.append(old)

    def replace_memory(self) -> None:
        mr = self.random.choice(self.mrs)
        self.rereg(mr, memory=bytearray(mr.buffer))

    def limit_access(self) -> None:
        access = self.random.choice((ALL, Access.LOCAL_WRITE, Access.REMOTE_READ, Access(0)))
        self.rereg(self.random.choice(self.mrs), access=access)

    def move_to_other_pd(self) -> None:
        self.rereg(self.random.choice(self.mrs), pd=self.pds[1])

    def limit_peer(self) -> None:
        access = self.random.choice((Access(0), Access.REMOTE_READ, Access.REMOTE_WRITE))
        self.random.choice(self.qps).modify(qp_access_flags=access)

    def fail(self) -> None:
        self.random.choice(self.qps).to_err()

    def plan_status(self) -> None:
        status = self.random.choice((WCStatus.SUCCESS, WCStatus.REM_OP_ERR))
        self.context.faults.complete_with(self.posted + self.random.randrange(3), status)

    def plan_refusal(self) -> None:
        self.context.faults.not_ready(self.random.choice(self.qps).qp_num, 1)

    def bind(self) -> None:
        self.qps[0].bind_mw(self.mw, self.mrs[0], self.mrs[0].addr, SIZE, REMOTE)

    def resize(self) -> None:
        self.cqs[1].resize(self.random.choice((8, 64)))


CHANGES: list[Callable[[Scene], None]] = [
    Scene.reconnect,
    Scene.replace_memory,
    Scene.limit_access,
    Scene.move_to_other_pd,
    Scene.limit_peer,
    Scene.fail,
    Scene.plan_status,
    Scene.plan_refusal,
    Scene.bind,
    Scene.resize,
]


def run(seed: int) -> list[Any]:
    with contextlib.ExitStack() as stack:
        return Scene(stack, seed).run()


@pytest.mark.parametrize("first", range(0, PROGRAMS, 40), ids=lambda first: f"from-{first}")
def test_random_programs_end_as_if_python_executed_them(first, monkeypatch):
    for seed in range(first, first + 40):
        found = run(seed)
        with monkeypatch.context() as patch:
            patch.setattr(requester, "_open_fast_path", lambda qp: None)
            expected = run(seed)
        for number, (have, want) in enumerate(zip(found, expected, strict=True)):
            assert have == want, (seed, number)


# ---- what is executed where ------------------------------------------------------------


@pytest.fixture
def executed(monkeypatch):
    """List the opcodes of the work requests that Python executes."""
    opcodes: list[rp.Opcode] = []
    carry_out = requester._carry_out

    def carried_out(qp: Any, wqe: Any) -> int:
        opcodes.append(rp.Opcode(wqe.opcode))
        return carry_out(qp, wqe)

    monkeypatch.setattr(requester, "_carry_out", carried_out)
    return opcodes


def test_python_executes_only_the_first_of_many_common_work_requests(rc, executed):
    rc.b.post_recv([rp.RecvWR(rc.theirs[:32])] * 7)
    rc.a.post_send([rc.wr(rp.RdmaWrite, rc.mine[:8]), rc.send(rc.mine[:8])])
    for wr_type in (rp.Send, rp.SendWithImm, rp.RdmaWrite, rp.RdmaWriteWithImm, rp.RdmaRead):
        rc.a.post_send([rc.wr(wr_type, rc.mine[:8]), rc.wr(wr_type, [rc.mine[:8]] * 4)])
    rc.wait(19)
    assert executed == [rp.Opcode.RDMA_WRITE]


def test_python_executes_only_the_first_of_many_rarer_forms(connect, executed):
    """No bytes and no key; INLINE; a receive with more SGEs than the message needs."""
    rc = connect(max_inline_data=16, max_recv_sge=3)
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8]))
    inline = SendFlags.SIGNALED | SendFlags.INLINE
    wrs = [
        rc.wr(rp.RdmaWrite, [], rkey=0),
        rc.wr(rp.RdmaWrite, rc.mine[:8], send_flags=inline),
        rc.wr(rp.RdmaWrite, [], send_flags=inline),
        rc.send(rc.mine[:8]),
        rc.send(rc.mine[:12]),
    ]
    rc.b.post_recv([rp.RecvWR([rc.theirs[:8]] * 3)] * 2)
    rc.a.post_send(wrs)
    rc.wait(8)
    assert len(executed) == 1


def test_atomics_and_sends_to_an_srq_are_executed_by_python(context, pd, stack, executed):
    mr = stack.enter_context(rp.MR(pd, bytearray(range(64)), ALL))
    cq, srq = stack.enter_context(rp.CQ(context)), stack.enter_context(rp.SRQ(pd, 8))
    a = stack.enter_context(rp.QP(pd, rp.QPType.RC, cq))
    b = stack.enter_context(rp.QP(pd, rp.QPType.RC, cq, srq=srq))
    a.connect(b.endpoint())
    b.connect(a.endpoint())
    srq.post_srq_recv([rp.RecvWR(mr[32:40]), rp.RecvWR(mr[40:48])])
    there = {"remote_addr": mr.addr + 8, "rkey": mr.rkey}
    write = rp.RdmaWrite(mr[:8], **there)
    add = rp.AtomicFetchAndAdd(mr[24:32], **there, compare_add=0)
    a.post_send([write, write, add, write, rp.Send(mr[:8]), rp.Send(mr[16:24])])
    assert all(wc.check() for wc in cq.wait(8))
    names = [opcode.name for opcode in executed]
    assert names == ["RDMA_WRITE", "ATOMIC_FETCH_AND_ADD", "SEND", "SEND"]
    first, other = bytes(range(8)), bytes(range(16, 24))
    assert mr.buffer[24:48] == first + first + other


@pytest.mark.parametrize("wr_type", [rp.Send, rp.RdmaWrite])
def test_work_that_c_executes_gives_back_every_place_in_the_queues(connect, executed, wr_type):
    """The device alone counts them; most sends have no completion."""
    pair = connect(max_send_wr=4, max_recv_wr=4, checked=False)
    depth = pair.a.max_send_wr
    assert depth <= pair.b.max_recv_wr
    uses_receives = wr_type is rp.Send
    for _ in range(5):
        if uses_receives:
            pair.b.post_recv([rp.RecvWR(pair.theirs[:8])] * depth)
        quiet = pair.wr(wr_type, pair.mine[:8], send_flags=SendFlags(0))
        pair.a.post_send([quiet] * (depth - 1) + [pair.wr(wr_type, pair.mine[:8])])
        assert len(pair.wait(1 + depth * uses_receives)) == 1 + depth * uses_receives
    assert len(executed) <= 1


def test_c_fills_a_completion_queue_to_its_last_entry(context, pd, executed):
    with rp.CQ(context, 8) as cq, contextlib.ExitStack() as inner:
        rc = Pair(inner, pd, cq)
        rc.a.post_send([rc.wr(rp.RdmaWrite, rc.mine[:8])] * cq.cqe)
        assert len(cq.wait(cq.cqe)) == cq.cqe
        assert len(executed) == 1
        rc.b.post_recv(rp.RecvWR(rc.theirs[:8]))
        rc.a.post_send([*[rc.wr(rp.RdmaWrite, rc.mine[:8])] * (cq.cqe - 2), rc.send(rc.mine[:8])])
        assert len(cq.wait(cq.cqe)) == cq.cqe
    assert len(executed) == 1


@pytest.mark.parametrize("lost", ["sent", "received"])
def test_completion_without_room_raises_no_event_of_its_cq(context, pd, lost):
    """A program that waits for the CQ's events would find no completion."""
    with (
        rp.CompChannel(context) as channel,
        rp.CQ(context, 64) as large,
        rp.CQ(context, 4, channel=channel) as small,
        rp.MR(pd, 64, ALL) as mr,
        rp.QP(pd, rp.QPType.RC, small if lost == "sent" else large, checked=False) as a,
        rp.QP(pd, rp.QPType.RC, large, small if lost == "received" else large) as b,
    ):
        a.connect(b.endpoint())
        b.connect(a.endpoint())
        b.post_recv([rp.RecvWR(mr[8:16])] * (small.cqe + 1))
        a.post_send([rp.Send(mr[:8])] * small.cqe)
        small.req_notify()
        a.post_send(rp.Send(mr[:8]))
        until(lambda: QPState.ERR in (a.query().qp_state, b.query().qp_state))
        assert channel.get_cq_event(0) is None
        assert len(small.poll(99)) == small.cqe


def test_python_executes_what_has_more_than_four_sges(connect, context, executed):
    rc = connect(max_send_sge=5)
    for sges in (4, 5, 4):
        rc.a.post_send(rc.wr(rp.RdmaWrite, [rc.mine[:8]] * sges))
    rc.wait(3)
    assert executed == [rp.Opcode.RDMA_WRITE] * 2


def test_first_work_request_after_a_qp_modify_is_executed_by_python(rc, executed):
    for _ in range(3):
        rc.a.post_send([rc.wr(rp.RdmaWrite, rc.mine[:8])] * 2)
        rc.b.modify(min_rnr_timer=1)
    rc.wait(6)
    assert len(executed) == 3


def test_completions_have_timestamps_if_the_cq_has(context, pd, stack, executed):
    flags = rp.WCExFlags.WITH_COMPLETION_TIMESTAMP
    with rp.CQ(context, wc_flags=flags) as cq, contextlib.ExitStack() as inner:
        rc = Pair(inner, pd, cq)
        rc.b.post_recv([rp.RecvWR(rc.theirs[:8])] * 3)
        rc.a.post_send([rc.send(rc.mine[:8])] * 3)
        stamps = [wc.completion_ts for wc in rc.wait(6)]
    assert all(stamps)
    assert stamps == sorted(stamps)
    assert len(executed) == 3


def test_memory_that_may_be_unmapped_is_accessed_by_python(rc, pd, stack, executed):
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mr = stack.enter_context(rp.MR.at(pd, address, mmap.PAGESIZE, ALL))
    stack.callback(rc.a.close)
    rc.mine.buffer[:4] = b"okay"
    for _ in range(3):
        rc.a.post_send(rp.RdmaWrite(rc.mine[:4], remote_addr=mr.addr, rkey=mr.rkey))
        rc.a.post_send(rp.RdmaWrite(mr[:4], remote_addr=rc.theirs.addr, rkey=rc.theirs.rkey))
    rc.wait(6)
    assert memory[:4] == bytes(rc.theirs.buffer[:4]) == b"okay"
    assert len(executed) == 6


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("where", ["local", "remote", "receive"])
def test_remote_or_local_range_may_end_with_its_region_but_not_later(connect, where, beyond):
    rc = connect(checked=False)
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8]))
    end = rc.mine.addr + len(rc.mine.buffer) - 8 + beyond
    sge, remote_addr = rc.mine[:8], rc.theirs.addr
    receive = rc.theirs[:8]
    if where == "local":
        sge = sge._replace(addr=end)
    elif where == "remote":
        remote_addr += len(rc.theirs.buffer) - 8 + beyond
    else:
        receive = receive._replace(addr=rc.theirs.addr + len(rc.theirs.buffer) - 8 + beyond)
    wr = rc.wr(rp.RdmaWrite, sge, remote_addr=remote_addr)
    if where == "receive":
        rc.b.post_recv(rp.RecvWR(receive))
        wr = rc.send(sge)
    rc.a.post_send(wr)
    failed = {"local": WCStatus.LOC_PROT_ERR, "remote": WCStatus.REM_ACCESS_ERR}
    done = [wc.status for wc in rc.cq.wait(3 if where == "receive" else 2)]
    expected = failed.get(where, WCStatus.LOC_PROT_ERR) if beyond else WCStatus.SUCCESS
    assert done[:2] == [WCStatus.SUCCESS, expected]


def test_address_2_to_the_63_behind_the_region_is_refused(connect):
    """No pointer is computed from it, which UBSan would report."""
    rc = connect()
    beyond = (rc.theirs.addr + (1 << 63)) % (1 << 64)
    rc.a.post_send([rc.wr(rp.RdmaWrite, rc.mine[:8])] * 2)
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8], remote_addr=beyond))
    assert [wc.status.name for wc in rc.cq.wait(3)] == ["SUCCESS", "SUCCESS", "REM_ACCESS_ERR"]


def test_address_before_its_region_ends_with_an_access_error(connect):
    rc = connect(checked=False)
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8]))
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8], remote_addr=rc.theirs.addr - 1))
    assert [wc.status.name for wc in rc.cq.wait(2)] == ["SUCCESS", "REM_ACCESS_ERR"]


def test_key_with_another_low_byte_ends_with_an_access_error(rc):
    rc.a.post_send([rc.wr(rp.RdmaWrite, rc.mine[:8])] * 2)
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8], rkey=rc.theirs.rkey ^ 1))
    assert [wc.status.name for wc in rc.cq.wait(3)] == ["SUCCESS", "SUCCESS", "REM_ACCESS_ERR"]


def test_work_requests_over_more_regions_than_c_caches_use_the_right_ones(rc, pd, stack):
    """More than C remembers at a time."""
    regions = [stack.enter_context(rp.MR(pd, bytearray([i] * 8), ALL)) for i in range(200)]
    stack.callback(rc.a.close)
    for source, target in [(0, 64), (64, 128), (7, 64), (128, 71), (135, 0), (192, 0)] * 3:
        wr = rp.RdmaWrite(regions[source][:], wr_id=source)
        wr.remote_addr, wr.rkey = regions[target].addr, regions[target].rkey
        data = bytes(regions[source].buffer)
        rc.a.post_send(wr)
        rc.wait(1)
        assert bytes(regions[target].buffer) == data, (source, target)


def test_regions_over_the_same_memory_keep_their_own_permissions(rc, pd, stack):
    """C remembers at most one of two regions whose keys are 64 apart."""
    memory = bytearray(8)
    access = [ALL] * 64 + [Access.LOCAL_WRITE]
    regions = [stack.enter_context(rp.MR(pd, memory, each)) for each in access]
    stack.callback(rc.a.close)
    for region in (regions[0], regions[0], regions[64]):
        wr = rp.RdmaWrite(rc.mine[:8], remote_addr=region.addr, rkey=region.rkey)
        rc.a.post_send(wr)
    assert [wc.status.name for wc in rc.cq.wait(3)] == ["SUCCESS", "SUCCESS", "REM_ACCESS_ERR"]


def test_zero_based_region_takes_offsets_and_no_addresses(rc, pd, stack):
    mr = stack.enter_context(rp.MR(pd, 64, ALL | Access.ZERO_BASED))
    stack.callback(rc.a.close)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mr.buffer))
    rc.mine.buffer[:4] = b"base"
    for addr in (8, 16, address):
        rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=addr, rkey=mr.rkey))
    assert [wc.status.name for wc in rc.cq.wait(3)] == ["SUCCESS", "SUCCESS", "REM_ACCESS_ERR"]
    assert bytes(mr.buffer[8:20]) == b"base" + bytes(4) + b"base"


def test_sge_length_0_means_2_to_the_31_bytes_on_the_fast_path(connect):
    rc = connect(checked=False)
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8]))
    rc.a.post_send(rc.wr(rp.RdmaWrite, rp.SGE(rc.mine.addr, 0, rc.mine.lkey)))
    assert [wc.status.name for wc in rc.cq.wait(2)] == ["SUCCESS", "LOC_PROT_ERR"]


def test_rdma_read_with_max_rd_atomic_0_fails_on_the_fast_path(connect):
    pair = connect(to=QPState.RESET)
    pair.a.connect(pair.b.endpoint(), max_rd_atomic=0)
    pair.b.connect(pair.a.endpoint())
    pair.a.post_send([pair.wr(rp.RdmaWrite, pair.mine[:8])] * 3)
    pair.wait(3)
    pair.a.post_send(pair.wr(rp.RdmaRead, pair.mine[:8]))
    assert pair.cq.wait()[0].status is WCStatus.LOC_QP_OP_ERR


def test_rdma_read_with_inline_fails_on_the_fast_path(connect):
    rc = connect(checked=False, max_inline_data=64)
    inline = SendFlags.SIGNALED | SendFlags.INLINE
    rc.a.post_send([rc.wr(rp.RdmaWrite, rc.mine[:4])] * 2)
    rc.a.post_send(rc.wr(rp.RdmaRead, rc.mine[:4], send_flags=inline))
    assert [wc.status.name for wc in rc.cq.wait(3)] == ["SUCCESS", "SUCCESS", "LOC_QP_OP_ERR"]


def test_fast_path_releases_views_of_memory_with_their_regions(rc, pd):
    """Apart from the 64 regions that C remembers."""

    def count() -> int:
        gc.collect()
        return sum(isinstance(each, memoryview) for each in gc.get_objects())

    before = count()
    for _ in range(200):
        with rp.MR(pd, 8, ALL) as mr:
            rc.a.post_send([rp.RdmaWrite(mr[:], remote_addr=mr.addr, rkey=mr.rkey)] * 3)
            rc.wait(3)
    assert count() <= before + 64


def test_planned_status_applies_to_a_work_request_that_c_could_execute(rc, context):
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8]))
    context.faults.complete_with(7, WCStatus.REM_ACCESS_ERR)
    rc.a.post_send([rc.wr(rp.RdmaWrite, rc.mine[:8], wr_id=wr_id) for wr_id in (6, 7)])
    assert [wc.status.name for wc in rc.cq.wait(3)] == ["SUCCESS", "SUCCESS", "REM_ACCESS_ERR"]


def test_large_write_arrives_whole(connect):
    size = 32 << 20
    rc = connect(size=size)
    rc.mine.buffer[:] = random.Random(1).randbytes(size)
    rc.a.post_send([rc.wr(rp.RdmaWrite, rc.mine[:8]), rc.wr(rp.RdmaWrite, rc.mine[:])])
    rc.wait(2)
    assert rc.theirs.buffer[:] == rc.mine.buffer[:]


def test_receive_posted_after_a_failure_is_flushed(connect):
    rc = connect(checked=False)
    rc.b.post_send(rp.RdmaWrite(rc.theirs[:8], remote_addr=rc.mine.addr, rkey=rc.mine.rkey))
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8], rkey=0))
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=7))
    done = [(wc.wr_id, wc.status.name) for wc in rc.cq.wait(3)]
    assert done == [(0, "SUCCESS"), (0, "REM_ACCESS_ERR"), (7, "WR_FLUSH_ERR")]


def test_signal_handler_runs_between_the_work_requests_of_a_long_list(connect, stack):
    def handle(*_: Any) -> None:
        polled.append(len(rc.cq.poll(64)))

    polled: list[int] = []
    rc = connect(size=8 << 20)
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8]))
    rc.wait()
    writes = [rc.wr(rp.RdmaWrite, rc.mine[:])] * 60
    stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, handle))
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    rc.a.post_send(writes)
    until(lambda: bool(polled))  # another thread may have executed the list
    assert polled[0] < 60


def test_child_forked_by_a_finalizer_does_not_execute_the_parents_work():
    """The collector runs while C makes a completion; the child shares the memory."""
    code = """
import gc, mmap, os
import rdmapost as rp

COUNT = 200
memory = mmap.mmap(-1, 4096)
parent = os.getpid()

class Forks:
    def __init__(self):
        self.me = self

    def __del__(self):
        if forks and os.getpid() == parent:
            forks.clear()
            pid = os.fork()
            if pid:
                before = memory[:COUNT].count(1)
                os.waitpid(pid, 0)
                written.append(memory[:COUNT].count(1) - before)

forks, written = [], []
context = rp.open_device("soft0")
pd, cq = rp.PD(context), rp.CQ(context, COUNT)
mr = rp.MR(pd, memory, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE)
qp = rp.QP(pd, rp.QPType.RC, cq, max_send_wr=COUNT)
qp.connect(qp.endpoint())
mr.buffer[4095] = 1
batch = qp.prepare(
    [rp.RdmaWrite(mr[4095:], remote_addr=mr.addr + i, rkey=mr.rkey) for i in range(COUNT)]
)
qp.post_send(rp.RdmaWrite(mr[4095:], remote_addr=mr.addr, rkey=mr.rkey))
cq.wait()
for more in range(0, 400, 40):
    gc.disable()
    gc.collect()
    Forks()
    mr.buffer[:COUNT] = bytes(COUNT)
    forks.append(more)
    gc.set_threshold(gc.get_count()[0] + 20 + more)
    gc.enable()
    batch.post()
    gc.disable()
    gc.collect()
    if os.getpid() != parent:
        os._exit(0)
    cq.wait(COUNT)
print(len(written), set(written))
"""
    assert prints(code) == "10 {0}"


def test_silent_work_requests_that_run_at_the_recursion_limit_are_executed_once():
    """A retry is due in a poll in the deepest frame; CPython 3.11 then refuses even C calls."""
    code = """
import sys, time
import rdmapost as rp
from rdmapost.providers.soft0.device import device

context = rp.open_device("soft0")
pd, cq, other = rp.PD(context), rp.CQ(context), rp.CQ(context)
mr = rp.MR(pd, 4096, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE)
a, b = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, cq)
for qp, peer in ((a, b), (b, a)):
    qp.connect(peer.endpoint(), rnr_retry=7, min_rnr_timer=12)
write = rp.RdmaWrite(mr[:8], remote_addr=mr.addr + 8, rkey=mr.rkey)
silent = rp.RdmaWrite([], remote_addr=0, rkey=0, send_flags=0)

def deep(frames):
    return deep(frames - 1) if frames else other.poll(1)

frames = 0
sys.setrecursionlimit(300)
try:
    while True:
        deep(frames)
        frames += 1
except RecursionError:
    frames -= 1
for less in range(4):
    sys.setrecursionlimit(1000)
    a.post_send([rp.Send(mr[:8]), silent, silent, silent])
    b.post_recv(rp.RecvWR(mr[16:24]))
    while time.monotonic() <= device.due:  # until the retry is due
        pass
    sys.setrecursionlimit(300)
    try:
        deep(frames - less)
    except RecursionError:
        pass
    sys.setrecursionlimit(1000)
    a.post_send(write)
    cq.wait(3)
    a.post_send([write] * 64)
    print(len(cq.wait(64)), end=" ")
"""
    assert prints(code) == "64 64 64 64"


def test_sends_that_lack_memory_for_a_moment_are_carried_out_once():
    """Whichever allocation fails."""
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    code = """
import _testcapi
import rdmapost as rp

context = rp.open_device("soft0")
pd, cqs = rp.PD(context), [rp.CQ(context), rp.CQ(context)]
mr = rp.MR(pd, 4096, rp.Access.LOCAL_WRITE)
a, b = (rp.QP(pd, rp.QPType.RC, cq) for cq in cqs)
a.connect(b.endpoint())
b.connect(a.endpoint())
wrong, sent = [], 0

def both(at, burst):
    global sent
    send, recv = rp.Send(mr[:8], wr_id=sent), rp.RecvWR(mr[8:16], wr_id=sent)
    mr.buffer[:8] = sent.to_bytes(8, "little")
    b.post_recv(recv)
    lacked = False
    _testcapi.set_nomemory(at, at + burst)
    try: a.post_send(send)
    except (MemoryError, rp.PostError): lacked = True
    finally: _testcapi.remove_mem_hooks()
    if lacked and not a.outstanding.send:
        a.post_send(send)
    for cq in cqs:
        got = [(wc.status, wc.wr_id) for wc in cq.wait(timeout=20)]
        if got != [(rp.WCStatus.SUCCESS, sent)] or cq.poll():
            wrong.append((at, burst, got))
    if mr.buffer[8:16] != mr.buffer[:8]:
        wrong.append((at, burst, bytes(mr.buffer[:16])))
    sent += 1

for burst in (1, 2, 5):
    for at in range(25):
        # A queue allocates only now and then.
        for _ in range(70):
            both(at, burst)
print(wrong, sent)
"""
    assert prints(code, **LOSES_MEMORY) == "[] 5250"

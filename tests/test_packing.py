"""Packed work requests, read back as the C structs that a driver would see."""

from __future__ import annotations

import socket
import struct
import types
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rdmapost as rp
from rdmapost import Opcode, OpsFlags, SendFlags
from rdmapost._binding import ffi, lib
from rdmapost.packing import Refused, gather, pack_ops, pack_recv, pack_send, record_size

U64, U32 = (1 << 64) - 1, (1 << 32) - 1


def made(kind: type, ctype: str) -> Any:
    """Make a resource of the library over a struct of ours, as if a device had made it."""
    resource = kind.__new__(kind)
    resource.pd = types.SimpleNamespace(context=types.SimpleNamespace(_queues={}))
    if kind is rp.MR:
        resource._memory, resource._given = memoryview(b""), False
    resource._make(ffi.new, (f"{ctype} *",), lambda _: None, ())
    return resource


_kept: deque[Any] = deque(maxlen=8)


class Linked:
    """Records that were packed and linked: `[i]` is the i-th struct."""

    def __init__(self, pack: Any, link: Any, ctype: str, wrs: list[Any], wr_ids: list[int]) -> None:
        self.buffer = bytearray(sum(record_size(len(sges_of(wr))) for wr in wrs))
        self.refers: list[Any] = []
        ends, at = [], 0
        for wr, wr_id in zip(wrs, wr_ids, strict=True):
            ends.append(at)
            at, refers = pack(self.buffer, at, wr, wr_id, sges_of(wr))
            self.refers.append(refers)
        self.pointer = ffi.from_buffer("char[]", self.buffer)
        self.size = at
        self.structs = [ffi.cast(f"{ctype} *", self.pointer + at) for at in ends]
        assert link(self.pointer, at, len(wrs)) == 0
        # The structs are views of the buffer: it outlives a test's use of them.
        _kept.append(self)

    def __getitem__(self, index: int) -> Any:
        return self.structs[index]


def sges_of(wr: Any) -> Any:
    return gather(getattr(wr, "sg_list", ()))


def link_send(*wrs: Any, wr_ids: list[int] | None = None) -> Linked:
    ids = wr_ids or list(range(len(wrs)))
    return Linked(pack_send, lib.rp_link_send, "struct ibv_send_wr", list(wrs), ids)


def sge_list(wr: Any, count: int) -> list[tuple[int, int, int]]:
    assert (wr.sg_list == ffi.NULL) is (count == 0)
    return [(wr.sg_list[i].addr, wr.sg_list[i].length, wr.sg_list[i].lkey) for i in range(count)]


sges = st.lists(
    st.builds(rp.SGE, st.integers(0, U64), st.integers(0, U32), st.integers(0, U32), st.none()),
    max_size=5,
)
u64, u32 = st.integers(0, U64), st.integers(0, U32)


@given(sges, u64, u32, u32, u32, u32)
def test_send_fields_arrive(sg_list, wr_id, flags, qpn, qkey, srqn):
    ah = made(rp.AH, "struct ibv_ah")
    wr = link_send(
        rp.Send(
            sg_list, send_flags=flags, ah=ah, remote_qpn=qpn, remote_qkey=qkey, remote_srqn=srqn
        ),
        wr_ids=[wr_id],
    )
    c = wr[0]
    assert (c.wr_id, c.opcode, c.send_flags, c.imm_data) == (wr_id, Opcode.SEND, flags, 0)
    assert (c.num_sge, c.next) == (len(sg_list), ffi.NULL)
    assert sge_list(c, len(sg_list)) == [sge[:3] for sge in sg_list]
    assert (c.wr.ud.ah, c.wr.ud.remote_qpn, c.wr.ud.remote_qkey) == (ah._handle, qpn, qkey)
    assert c.qp_type.xrc.remote_srqn == srqn
    assert wr.refers == [(ah,)]


@given(u32, st.sampled_from([rp.SendWithImm, rp.RdmaWriteWithImm]))
def test_immediate_data_goes_out_in_network_order(imm, kind):
    c = link_send(kind(imm_data=imm))[0]
    assert c.imm_data == socket.htonl(imm)
    assert bytes(ffi.buffer(ffi.addressof(c, "imm_data"))) == struct.pack(">I", imm)


@given(u32, st.sampled_from([rp.SendWithInv, rp.LocalInv]))
def test_invalidated_key_stays_in_host_order(rkey, kind):
    c = link_send(kind(invalidate_rkey=rkey))[0]
    assert c.invalidate_rkey == rkey
    assert c.opcode == kind.opcode


@given(u64, u32, u32, st.sampled_from([rp.RdmaWrite, rp.RdmaWriteWithImm, rp.RdmaRead]))
def test_rdma_fields_arrive(addr, rkey, srqn, kind):
    c = link_send(kind(rp.SGE(1, 2, 3), remote_addr=addr, rkey=rkey, remote_srqn=srqn))[0]
    assert (c.opcode, c.num_sge) == (kind.opcode, 1)
    assert (c.wr.rdma.remote_addr, c.wr.rdma.rkey) == (addr, rkey)
    assert c.qp_type.xrc.remote_srqn == srqn
    assert sge_list(c, 1) == [(1, 2, 3)]


@given(u64, u64, u64, u32)
def test_atomic_fields_arrive(addr, compare, swap, rkey):
    linked = link_send(
        rp.AtomicCmpAndSwp(
            rp.SGE(1, 8, 3), remote_addr=addr, rkey=rkey, compare_add=compare, swap=swap
        ),
        rp.AtomicFetchAndAdd(rp.SGE(1, 8, 3), remote_addr=addr, rkey=rkey, compare_add=compare),
    )
    for c, opcode, swapped in (
        (linked[0], Opcode.ATOMIC_CMP_AND_SWP, swap),
        (linked[1], Opcode.ATOMIC_FETCH_AND_ADD, 0),
    ):
        atomic = c.wr.atomic
        assert c.opcode == opcode
        assert (atomic.remote_addr, atomic.rkey) == (addr, rkey)
        assert (atomic.compare_add, atomic.swap) == (compare, swapped)


@given(u64, u64, u32, u32)
def test_bind_fields_arrive(addr, length, rkey, access):
    mw, mr = made(rp.MW, "struct ibv_mw"), made(rp.MR, "struct ibv_mr")
    linked = link_send(
        rp.BindMW(mw=mw, rkey=rkey, mr=mr, addr=addr, length=length, mw_access_flags=access)
    )
    c = linked[0]
    assert (c.opcode, c.num_sge, c.sg_list) == (Opcode.BIND_MW, 0, ffi.NULL)
    assert (c.bind_mw.mw, c.bind_mw.rkey) == (mw._handle, rkey)
    info = c.bind_mw.bind_info
    assert (info.mr, info.addr, info.length) == (mr._handle, addr, length)
    assert info.mw_access_flags == access
    assert linked.refers == [(mw, mr)]


@given(st.binary(max_size=64), st.integers(0, 0xFFFF), u32)
def test_tso_fields_arrive(hdr, mss, qpn):
    c = link_send(rp.TSO(rp.SGE(1, 2, 3), hdr=hdr, mss=mss, remote_qpn=qpn))[0]
    assert (c.opcode, c.tso.mss, c.tso.hdr_sz) == (Opcode.TSO, mss, len(hdr))
    assert bytes(ffi.buffer(c.tso.hdr, c.tso.hdr_sz)) == hdr
    assert (c.wr.ud.ah, c.wr.ud.remote_qpn) == (ffi.NULL, qpn)


@given(st.lists(st.tuples(u64, sges), min_size=1, max_size=6))
def test_receives_are_chained(posts):
    wrs = [rp.RecvWR(sg_list) for _, sg_list in posts]
    ids = [wr_id for wr_id, _ in posts]
    linked = Linked(pack_recv, lib.rp_link_recv, "struct ibv_recv_wr", wrs, ids)
    for index, (wr_id, sg_list) in enumerate(posts):
        c = linked[index]
        assert (c.wr_id, c.num_sge) == (wr_id, len(sg_list))
        assert sge_list(c, len(sg_list)) == [sge[:3] for sge in sg_list]
        assert c.next == (linked[index + 1] if index + 1 < len(posts) else ffi.NULL)


def test_sends_of_every_kind_are_chained():
    """Records have different lengths, and the chain goes through all of them."""
    wrs = [
        rp.Send([rp.SGE(1, 2, 3)] * 3),
        rp.LocalInv(invalidate_rkey=5),
        rp.SendWithImm(imm_data=7),
        rp.AtomicFetchAndAdd(rp.SGE(1, 8, 3)),
        rp.TSO(rp.SGE(4, 5, 6), hdr=b"h"),
    ]
    linked = link_send(*wrs)
    at = linked[0]
    seen = []
    while at != ffi.NULL:
        seen.append((at.wr_id, at.opcode))
        at = at.next
    assert seen == [(i, wr.opcode) for i, wr in enumerate(wrs)]


@given(u64, u64, u64, u64, u32, sges)
def test_tag_operations_arrive(wr_id, recv_wr_id, tag, mask, count, sg_list):
    add = rp.TagAdd(recv_wr_id=recv_wr_id, sg_list=sg_list, tag=tag, mask=mask)
    sync = rp.TagSync(unexpected_cnt=count, flags=OpsFlags.TM_SYNC)

    def pack(out: bytearray, at: int, wr: Any, ticket: int, gathered: Any) -> Any:
        return pack_ops(out, at, wr, ticket, getattr(wr, "recv_wr_id", 0), gathered)

    linked = Linked(pack, lib.rp_link_ops, "struct ibv_ops_wr", [add, sync], [wr_id, 1])
    c = linked[0]
    assert (c.wr_id, c.opcode, c.flags) == (wr_id, rp.OpsOpcode.TAG_ADD, OpsFlags.SIGNALED)
    assert (c.tm.add.recv_wr_id, c.tm.add.tag, c.tm.add.mask) == (recv_wr_id, tag, mask)
    assert c.tm.add.num_sge == len(sg_list)
    assert sge_list(c.tm.add, len(sg_list)) == [sge[:3] for sge in sg_list]
    assert c.next == linked[1]
    c = linked[1]
    assert (c.opcode, c.flags) == (rp.OpsOpcode.TAG_SYNC, OpsFlags.TM_SYNC)
    assert (c.tm.unexpected_cnt, c.next) == (count, ffi.NULL)


# ---- what the shim refuses --------------------------------------------------------

LINKS = [
    ("send", "struct ibv_send_wr", 128),
    ("recv", "struct ibv_recv_wr", 32),
    ("ops", "struct ibv_ops_wr", 72),
]


@pytest.mark.parametrize(("kind", "ctype", "size"), LINKS)
def test_records_that_do_not_fill_the_buffer_are_refused(kind, ctype, size):
    """The shim reads nothing outside the buffer, whatever the records say."""
    link = getattr(lib, f"rp_link_{kind}")
    assert ffi.sizeof(ctype) == size
    records = ffi.new("char[]", 2 * size + 64)
    assert link(records, size, 1) == 0
    assert link(records, 2 * size, 2) == 0
    for wrong, count in ((size - 1, 1), (size + 1, 1), (0, 1), (2 * size, 1), (size, 2), (size, 0)):
        assert link(records, wrong, count) == 22, (wrong, count)
    assert link(ffi.NULL, size, 1) == 22


@pytest.mark.parametrize(("kind", "ctype", "size"), LINKS)
def test_a_number_of_sges_that_lies_is_refused(kind, ctype, size):
    link = getattr(lib, f"rp_link_{kind}")
    records = ffi.new("char[]", size + 32)
    wr = ffi.cast(f"{ctype} *", records)
    holder = wr.tm.add if kind == "ops" else wr
    for claim in (-1, 3, 1 << 20, (1 << 31) - 1, -(1 << 31)):
        holder.num_sge = claim
        assert link(records, size + 32, 1) == 22, claim
    holder.num_sge = 2
    assert link(records, size + 32, 1) == 0


@pytest.mark.parametrize(("kind", "ctype", "size"), LINKS)
@given(
    claims=st.lists(st.integers(-1, 4), max_size=5),
    noise=st.binary(min_size=1, max_size=40),
    slack=st.integers(-40, 40) | st.just(0),
    more=st.integers(-2, 2) | st.just(0),
)
def test_any_bytes_are_refused_or_linked_inside_their_buffer(
    kind, ctype, size, claims, noise, slack, more
):
    """Records with noise in them, cut short or with bytes to spare, and counted wrongly."""
    data = bytearray()
    for claim in claims:
        record = bytearray((noise * size)[:size])
        wr = ffi.cast(f"{ctype} *", ffi.from_buffer(record))
        (wr.tm.add if kind == "ops" else wr).num_sge = claim
        data += record + (noise * 64)[: 16 * max(claim, 0)]
    data = data[:slack] if slack < 0 else data + (noise * 40)[:slack]
    # Of exactly this size, so that the sanitizers see whatever lies outside of it.
    records = ffi.new("char[]", len(data))
    ffi.memmove(records, bytes(data), len(data))
    count = max(0, len(claims) + more)
    done = getattr(lib, f"rp_link_{kind}")(records, len(data), count)
    if claims and slack == more == 0 and min(claims) >= 0:
        assert done == 0
    if done:
        assert done == 22
        return
    start = int(ffi.cast("uintptr_t", records))
    wr, found = ffi.cast(f"{ctype} *", records), 0
    while wr != ffi.NULL:
        found += 1
        at = int(ffi.cast("uintptr_t", wr)) - start
        assert 0 <= at <= len(data) - size
        holder = wr.tm.add if kind == "ops" else wr
        if holder.num_sge:
            at = int(ffi.cast("uintptr_t", holder.sg_list)) - start
            assert 0 <= at <= len(data) - 16 * holder.num_sge
        else:
            assert holder.sg_list == ffi.NULL
        wr = wr.next
    assert found == count


# ---- what cannot be packed --------------------------------------------------------


def refusal(wr: Any) -> str:
    with pytest.raises(Refused) as caught:
        pack_send(bytearray(4096), 0, wr, 0, sges_of(wr))
    return str(caught.value)


@pytest.mark.parametrize(
    ("wr", "words"),
    [
        (rp.SendWithImm(imm_data=1 << 32), "imm_data=4294967296 is not in 0..2^32-1"),
        (rp.SendWithImm(imm_data=-1), "imm_data=-1 is not in 0..2^32-1"),
        (rp.RdmaWrite(remote_addr=1 << 64), "remote_addr="),
        (rp.RdmaWrite(rkey="key"), "rkey is a str, not an integer"),
        (rp.RdmaRead(remote_addr=1.5), "remote_addr is a float, not an integer"),
        (rp.LocalInv(invalidate_rkey=None), "invalidate_rkey is a NoneType"),
        (rp.Send(rp.SGE(0, 1 << 32, 0)), "an SGE's length=4294967296"),
        (rp.Send(rp.SGE(-1, 1, 0)), "an SGE's addr=-1"),
        (rp.Send(rp.SGE(0, 1, "x")), "an SGE's lkey is a str"),
        (rp.Send(send_flags=-1), "send_flags=-1"),
        (rp.TSO(hdr=b"", mss=1 << 16), "mss=65536 is not in 0..2^16-1"),
        (rp.TSO(hdr=bytes(1 << 16)), "hdr has 65536 bytes; at most 65535 fit"),
        (rp.TSO(hdr=bytes(0xFFFF), mss=1 << 16), "mss=65536 is not in 0..2^16-1"),
        (rp.TSO(hdr=5), "hdr is not bytes"),
        (rp.TSO(hdr=memoryview(b"1234")[::2], mss=5), "contiguous"),
        (rp.BindMW(), "BIND_MW needs a memory window"),
        (rp.BindMW(mw=made(rp.MW, "struct ibv_mw")), "BIND_MW needs a memory window"),
        (rp.BindMW(mr=made(rp.MR, "struct ibv_mr")), "BIND_MW needs a memory window"),
        (rp.BindMW(mw="mw", mr="mr"), "not a memory window"),
        (rp.Send(ah="ah"), "not an address handle"),
        (rp.TSO(ah=5, hdr=b""), "not an address handle"),
        (SimpleNamespace(opcode=2, send_flags=0), "SimpleNamespace is no send work request"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_name(wr, words):
    assert words in refusal(wr)


@pytest.mark.parametrize("sg_list", [[5], ["sge"], [(1, 2, 3)], [None]])
def test_only_sges_go_into_an_sg_list(sg_list):
    with pytest.raises(Refused, match=r"sg_list holds a \w+; mr\[a:b\] makes an SGE"):
        gather(sg_list)


def test_a_resource_of_another_kind_is_no_pointer():
    """A driver would read an MR's struct as an address handle, past its end."""
    mr, mw, ah = (
        made(rp.MR, "struct ibv_mr"), made(rp.MW, "struct ibv_mw"), made(rp.AH, "struct ibv_ah"),
    )  # fmt: skip
    assert "not an address handle" in refusal(rp.Send(ah=mr))
    assert "not an address handle" in refusal(rp.SendWithImm(ah=mw))
    assert "not an address handle" in refusal(rp.TSO(ah=mr, hdr=b""))
    assert "not a memory window" in refusal(rp.BindMW(mw=mr, mr=mr))
    assert "not a memory region" in refusal(rp.BindMW(mw=mw, mr=ah))
    assert "not a memory region" in refusal(rp.BindMW(mw=mw, mr=mw))


def test_closed_resources_are_no_pointers():
    mr, mw, ah = (
        made(rp.MR, "struct ibv_mr"), made(rp.MW, "struct ibv_mw"), made(rp.AH, "struct ibv_ah"),
    )  # fmt: skip
    mw.close()
    ah.close()
    assert refusal(rp.Send(ah=ah)).endswith("is closed")
    assert refusal(rp.BindMW(mw=mw, mr=mr)).endswith("is closed")
    with pytest.raises(Refused, match="is closed"):
        gather(rp.SGE(1, 2, 3, ah))


def test_a_subclass_is_packed_as_its_base():
    class Mine(rp.SendWithImm):
        pass

    assert link_send(Mine(imm_data=1))[0].opcode == Opcode.SEND_WITH_IMM


def test_sg_list_may_be_any_iterable_and_is_read_once():
    assert gather(iter([rp.SGE(1, 2)])) == (rp.SGE(1, 2),)
    assert gather(rp.SGE(1, 2)) == (rp.SGE(1, 2),)
    assert gather(()) == ()


def test_flags_travel_as_numbers():
    wr = rp.Send(send_flags=SendFlags.SIGNALED | SendFlags.FENCE)
    assert link_send(wr)[0].send_flags == 3

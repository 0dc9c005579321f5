"""The records that a device is handed: every byte, for every class of work requests."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ALL
from support.posting_tap import RECV, SEND, SRQ_OPS, SRQ_RECV, STRUCTS, Record, Tap, open_tap

import rdmapost as rp
from rdmapost import Access, MWType, OpsFlags, QPType, SendFlags, SRQType
from rdmapost._binding import address_of, ffi

U64, U32, U31 = (1 << 64) - 1, (1 << 32) - 1, (1 << 31) - 1

HEAD = {"send_flags": "send_flags"}
IMM = {"imm_data": "imm_data"}
INV = {"invalidate_rkey": "invalidate_rkey"}
UD = {"ah": "wr.ud.ah", "remote_qpn": "wr.ud.remote_qpn", "remote_qkey": "wr.ud.remote_qkey"}
XRC = {"remote_srqn": "qp_type.xrc.remote_srqn"}
RDMA = {"remote_addr": "wr.rdma.remote_addr", "rkey": "wr.rdma.rkey", **XRC}
ATOMIC = {
    "remote_addr": "wr.atomic.remote_addr",
    "rkey": "wr.atomic.rkey",
    "compare_add": "wr.atomic.compare_add",
    **XRC,
}
COUNT = {"flags": "flags", "unexpected_cnt": "tm.unexpected_cnt"}

MEMBERS: dict[Any, dict[str, str]] = {
    rp.Send: HEAD | UD | XRC,
    rp.SendWithImm: HEAD | IMM | UD | XRC,
    rp.SendWithInv: HEAD | INV | XRC,
    rp.RdmaWrite: HEAD | RDMA,
    rp.RdmaWriteWithImm: HEAD | IMM | RDMA,
    rp.RdmaRead: HEAD | RDMA,
    rp.AtomicCmpAndSwp: HEAD | ATOMIC | {"swap": "wr.atomic.swap"},
    rp.AtomicFetchAndAdd: HEAD | ATOMIC,
    rp.LocalInv: HEAD | INV,
    rp.BindMW: HEAD
    | {
        "mw": "bind_mw.mw",
        "rkey": "bind_mw.rkey",
        "mr": "bind_mw.bind_info.mr",
        "addr": "bind_mw.bind_info.addr",
        "length": "bind_mw.bind_info.length",
        "mw_access_flags": "bind_mw.bind_info.mw_access_flags",
    },
    rp.TSO: HEAD | UD | {"mss": "tso.mss"},
    rp.RecvWR: {},
    rp.TagAdd: COUNT | {"tag": "tm.add.tag", "mask": "tm.add.mask"},
    rp.TagDel: COUNT,
    rp.TagSync: COUNT,
}
"""For each class, its fields and the struct member that each one sets.

Fields that are not simply copied are checked by name: wr_id, recv_wr_id, sg_list, hdr and handle.
"""
BUILT = {rp.AtomicWrite, rp.Flush}
"""What libibverbs has no struct for: test_atomic_write_and_flush."""
OTHERWISE = {"wr_id", "recv_wr_id", "sg_list", "hdr", "handle"}
BITS = {
    "send_flags": 32,
    "flags": 31,
    "imm_data": 32,
    "invalidate_rkey": 32,
    "remote_qpn": 32,
    "remote_qkey": 32,
    "remote_srqn": 32,
    "remote_addr": 64,
    "rkey": 32,
    "compare_add": 64,
    "swap": 64,
    "addr": 64,
    "length": 64,
    "mw_access_flags": 32,
    "mss": 16,
    "unexpected_cnt": 32,
    "tag": 64,
    "mask": 64,
}


class Given:
    """Queues without checks on a device that is watched, and what work requests refer to."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        context = stack.enter_context(rp.open_device("soft0"))
        self.tap: Tap = open_tap(context)
        stack.callback(self.tap.close)
        pd = stack.enter_context(rp.PD(context))
        cq = stack.enter_context(rp.CQ(context, wc_flags=rp.WCExFlags.WITH_TM_INFO))
        self.mr = stack.enter_context(rp.MR(pd, 4096, ALL | Access.MW_BIND))
        self.mw = stack.enter_context(rp.MW(pd, MWType.TYPE_2))
        self.qp = stack.enter_context(rp.QP(pd, QPType.RC, cq, checked=False))
        self.qp.connect(self.qp.endpoint())
        self.ah = stack.enter_context(self.qp.ah_to(self.qp.endpoint()))
        self.srq = stack.enter_context(rp.SRQ(pd, srq_type=SRQType.TM, cq=cq, checked=False))
        # None of what follows reaches the device itself.
        self.tap.refuse()

    def seen(self, wrs: Any, verb: int | None = None) -> list[Record]:
        """Post work requests; return the records that the device was handed."""
        first = wrs[0] if isinstance(wrs, list) else wrs
        if isinstance(first, rp.OpsWR):
            wanted, post = SRQ_OPS, self.srq.post_srq_ops
        elif isinstance(first, rp.RecvWR) and verb == SRQ_RECV:
            wanted, post = SRQ_RECV, self.srq.post_srq_recv
        elif isinstance(first, rp.RecvWR):
            wanted, post = RECV, self.qp.post_recv
        else:
            wanted, post = SEND, self.qp.post_send
        return self.during(wanted, lambda: post(wrs))

    def during(self, verb: int, post: Callable[[], None]) -> list[Record]:
        """Return the records of a post, which the device refuses from the first one on."""
        posts = len(self.tap.chains)
        with pytest.raises(rp.PostError) as caught:
            post()
        assert caught.value.posted == 0
        assert len(self.tap.chains) == posts + 1
        found, records = self.tap.chains.pop()
        assert found == verb
        return records


@pytest.fixture(scope="module")
def device() -> Iterator[Given]:
    with contextlib.ExitStack() as stack:
        yield Given(stack)


def put(at: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        at = getattr(at, parent)
    setattr(at, name, value)


def expected(wr: Any, record: Record) -> bytes:
    """Return the bytes that the struct of a work request has to have, made by cffi.

    The addresses of what the shim makes itself (SGEs, the next one, a copy of the header) and the
    cookie that stands for the wr_id are those of the record; they are tested elsewhere.
    """
    recv, op = isinstance(wr, rp.RecvWR), isinstance(wr, rp.OpsWR)
    made = ffi.new(f"{STRUCTS[RECV if recv else SRQ_OPS if op else SEND]} *")
    made.wr_id, made.next = record.wr.wr_id, record.wr.next
    if not recv:
        made.opcode = wr.opcode
    holder, held = (made.tm.add, record.wr.tm.add) if op else (made, record.wr)
    if hasattr(wr, "sg_list"):
        holder.num_sge, holder.sg_list = len(wr.sg_list), held.sg_list
    if isinstance(wr, rp.TagAdd):
        holder.recv_wr_id = held.recv_wr_id
    if isinstance(wr, rp.TSO) and wr.hdr:
        made.tso.hdr, made.tso.hdr_sz = record.wr.tso.hdr, len(wr.hdr)
    wr_type = next(wr_type for wr_type in MEMBERS if isinstance(wr, wr_type))
    for name, path in MEMBERS[wr_type].items():
        value = getattr(wr, name)
        if name in ("ah", "mw", "mr"):
            value = ffi.NULL if value is None else value._handle
        put(made, path, socket.htonl(value) if name == "imm_data" else value)
    return bytes(ffi.buffer(made))


def agrees(wr: Any, record: Record) -> None:
    """Check that a record is its work request and nothing else."""
    assert record.data == expected(wr, record)
    assert record.sges == [sge[:3] for sge in getattr(wr, "sg_list", ())]
    op, add = isinstance(wr, rp.OpsWR), isinstance(wr, rp.TagAdd)
    if not op or add:
        holder = record.wr.tm.add if add else record.wr
        assert (holder.sg_list == ffi.NULL) is (not record.sges)
    if isinstance(wr, rp.TSO):
        assert record.hdr == (bytes(wr.hdr) or None)


def test_every_field_of_every_work_request_class_is_compared_with_its_struct():
    for wr_type, members in MEMBERS.items():
        names = {field.name for field in dataclasses.fields(wr_type)}
        assert members.keys() | (OTHERWISE & names) == names
    assert {
        wr_type
        for wr_type in map(vars(rp).get, rp.posting.wr.__all__)
        if hasattr(wr_type, "opcode")
    } | {rp.RecvWR} == MEMBERS.keys() | BUILT


def distinct(wr_type: Any, device: Given, sges: int = 2) -> Any:
    """Make a work request with another value in every field, and in every byte of it."""
    # Of a prime number of bytes, so that no two SGEs are the same.
    byte = itertools.cycle(range(1, 252))

    def number(bits: int) -> int:
        value = int.from_bytes(bytes(next(byte) for _ in range(bits // 8)))
        return value & (U64 >> (64 - bits))

    fields: dict[str, Any] = {"wr_id": number(64)}
    for field in dataclasses.fields(wr_type):
        if field.name in ("ah", "mw", "mr"):
            fields[field.name] = getattr(device, field.name)
        elif field.name == "hdr":
            fields["hdr"] = bytes(range(200, 220))
        elif field.name == "sg_list":
            fields["sg_list"] = [rp.SGE(number(64), number(32), number(32)) for _ in range(sges)]
        elif field.name in BITS:
            bits = BITS[field.name]
            fields[field.name] = number(-(-bits // 8) * 8) & (U64 >> (64 - bits))
    if "send_flags" in fields:
        # Inline data would be read from there.
        fields["send_flags"] &= ~SendFlags.INLINE
    if wr_type is rp.TagDel:
        add = rp.TagAdd()
        device.tap.answer = None
        device.srq.post_srq_ops(add)
        device.tap.refuse()
        device.tap.chains.clear()
        fields["handle"] = add.handle
    return wr_type(**fields)


@pytest.mark.parametrize("wr_type", MEMBERS)
@pytest.mark.parametrize("sges", [0, 1, 2, 5, 40])
def test_every_byte_of_a_struct_is_as_the_work_request_says(device, wr_type, sges):
    """Each field has a distinct value, and whatever is not set is 0."""
    wr = distinct(wr_type, device, sges)
    for verb in (RECV, SRQ_RECV):
        [record] = device.seen(wr, verb)
        if wr_type is rp.TagDel:
            assert record.wr.tm.handle == int(str(wr.handle).split()[1].rstrip(">"))
            record.wr.tm.handle = 0
            record.data = bytes(ffi.buffer(record.wr))
        agrees(wr, record)


@pytest.mark.parametrize("wr_type", MEMBERS)
def test_omitted_work_request_fields_are_0_in_the_struct(device, wr_type):
    """A driver may read any of it, and nothing of an earlier post may remain."""
    device.seen([distinct(each, device) for each in (rp.AtomicCmpAndSwp, rp.TSO, rp.BindMW)] * 3)
    wr = wr_type()
    if wr_type is rp.BindMW:
        wr.mw, wr.mr = device.mw, device.mr
    elif wr_type is rp.TagDel:
        wr.handle = distinct(wr_type, device).handle
    [record] = device.seen(wr)
    if wr_type is rp.TagDel:
        record.wr.tm.handle = 0
        record.data = bytes(ffi.buffer(record.wr))
    agrees(wr, record)


@pytest.mark.parametrize("wr_type", MEMBERS)
def test_every_number_of_a_work_request_has_the_range_of_its_struct_member(device, wr_type):
    """As wide as its struct member; a number just outside names the field."""
    for name in MEMBERS[wr_type].keys() & BITS.keys() | {"wr_id", "recv_wr_id"} & {
        field.name for field in dataclasses.fields(wr_type)
    }:
        bits = BITS.get(name, 64)
        wr = distinct(wr_type, device)
        post = device.srq.post_srq_ops if isinstance(wr, rp.OpsWR) else device.qp.post_send
        post = device.qp.post_recv if isinstance(wr, rp.RecvWR) else post
        for value in (-1, 1 << bits, 1 << 200):
            setattr(wr, name, value)
            with pytest.raises(rp.PostError) as caught:
                post(wr)
            end = "1..65535" if name == "mss" else f"0..2^{bits}-1"
            assert caught.value.reason == f"{name}={value} is not in {end}"
        for value in (0, (1 << bits) - 1):
            if name == "send_flags":
                value &= ~int(SendFlags.INLINE)
            setattr(wr, name, value)
            [record] = device.seen(wr)
            if wr_type is not rp.TagDel:
                agrees(wr, record)
    assert device.tap.chains == []


def test_numbers_of_an_sge_have_the_ranges_of_their_struct_members(device):
    for name, bits in (("addr", 64), ("length", 32), ("lkey", 32)):
        for value in (-1, 1 << bits):
            with pytest.raises(rp.PostError) as caught:
                device.qp.post_send(rp.Send(rp.SGE(1, 2, 3)._replace(**{name: value})))
            said = f"an SGE's {name}={value} is not in 0..2^{bits}-1"
            assert caught.value.reason == said
        highest = rp.SGE(1, 2, 3)._replace(**{name: (1 << bits) - 1})
        [record] = device.seen(rp.Send([rp.SGE(4, 5, 6), highest]))
        assert record.sges == [(4, 5, 6), highest[:3]]


# ---- any values --------------------------------------------------------------------

u64, u32, u16 = st.integers(0, U64), st.integers(0, U32), st.integers(0, 0xFFFF)
flags = u32.map(lambda value: value & ~SendFlags.INLINE)
sges = st.lists(st.builds(rp.SGE, u64, u32, u32, st.none()), max_size=5)


@given(sges, u64, flags, u32, u32, u32, st.booleans())
def test_fields_of_a_send_reach_the_driver(
    device, sg_list, wr_id, send_flags, qpn, qkey, srqn, with_ah
):
    wr = rp.Send(
        sg_list,
        wr_id=wr_id,
        send_flags=send_flags,
        ah=device.ah if with_ah else None,
        remote_qpn=qpn,
        remote_qkey=qkey,
        remote_srqn=srqn,
    )
    [record] = device.seen(wr)
    agrees(wr, record)
    ud = record.wr.wr.ud
    assert (ud.ah, ud.remote_qpn, ud.remote_qkey) == (
        device.ah._handle if with_ah else ffi.NULL,
        qpn,
        qkey,
    )
    assert record.wr.qp_type.xrc.remote_srqn == srqn


@given(u32, st.sampled_from([rp.SendWithImm, rp.RdmaWriteWithImm]))
def test_immediate_data_is_in_network_order_in_the_struct(device, imm, wr_type):
    [record] = device.seen(wr_type(imm_data=imm))
    assert record.wr.imm_data == socket.htonl(imm)
    at = ffi.offsetof("struct ibv_send_wr", "imm_data")
    assert record.data[at : at + 4] == struct.pack(">I", imm)


@given(u32, st.sampled_from([rp.SendWithInv, rp.LocalInv]))
def test_invalidated_key_is_in_host_order_in_the_struct(device, rkey, wr_type):
    [record] = device.seen(wr_type(invalidate_rkey=rkey))
    assert record.wr.invalidate_rkey == rkey
    at = ffi.offsetof("struct ibv_send_wr", "invalidate_rkey")
    assert record.data[at : at + 4] == struct.pack("=I", rkey)


@given(u64, u32, u32, st.sampled_from([rp.RdmaWrite, rp.RdmaWriteWithImm, rp.RdmaRead]))
def test_fields_of_an_rdma_write_or_read_reach_the_driver(device, addr, rkey, srqn, wr_type):
    wr = wr_type([rp.SGE(1, 2, 3)], remote_addr=addr, rkey=rkey, remote_srqn=srqn)
    [record] = device.seen(wr)
    agrees(wr, record)
    assert (record.wr.wr.rdma.remote_addr, record.wr.wr.rdma.rkey) == (addr, rkey)


@given(u64, u64, u64, u32)
def test_fields_of_an_atomic_reach_the_driver(device, addr, compare, swap, rkey):
    wrs = [
        rp.AtomicCmpAndSwp(
            [rp.SGE(1, 8, 3)], remote_addr=addr, rkey=rkey, compare_add=compare, swap=swap
        ),
        rp.AtomicFetchAndAdd([rp.SGE(1, 8, 3)], remote_addr=addr, rkey=rkey, compare_add=compare),
    ]
    records = device.seen(wrs)
    for wr, record, swapped in zip(wrs, records, (swap, 0), strict=True):
        agrees(wr, record)
        atomic = record.wr.wr.atomic
        assert (atomic.remote_addr, atomic.rkey) == (addr, rkey)
        assert (atomic.compare_add, atomic.swap) == (compare, swapped)


@given(u64, u64, u32, u32)
def test_fields_of_a_bind_reach_the_driver(device, addr, length, rkey, access):
    wr = rp.BindMW(
        mw=device.mw, rkey=rkey, mr=device.mr, addr=addr, length=length, mw_access_flags=access
    )
    [record] = device.seen(wr)
    agrees(wr, record)
    bind = record.wr.bind_mw
    assert (bind.mw, bind.bind_info.mr) == (device.mw._handle, device.mr._handle)
    assert (record.wr.num_sge, record.wr.sg_list) == (0, ffi.NULL)


@given(st.binary(max_size=64), u16, u32)
def test_fields_of_a_tso_reach_the_driver(device, hdr, mss, qpn):
    """The header is not copied: the pointer is to its buffer."""
    wr = rp.TSO([rp.SGE(1, 2, 3)], hdr=hdr, mss=mss, remote_qpn=qpn)
    [record] = device.seen(wr)
    agrees(wr, record)
    where = rp.SGE.from_buffer(hdr).addr if hdr else 0
    assert address_of(record.wr.tso.hdr) == where
    assert (record.wr.tso.hdr_sz, record.wr.tso.mss) == (len(hdr), mss)


@given(u64, u64, u64, u64, u32, sges)
def test_fields_of_a_tag_operation_reach_the_driver(
    device, wr_id, recv_wr_id, tag, mask, count, sg_list
):
    add = rp.TagAdd(wr_id=wr_id, recv_wr_id=recv_wr_id, sg_list=sg_list, tag=tag, mask=mask)
    sync = rp.TagSync(unexpected_cnt=count, flags=OpsFlags.TM_SYNC)
    first, second = device.seen([add, sync])
    agrees(add, first)
    agrees(sync, second)
    # Both are cookies, of two queues.
    assert first.wr.wr_id >> 32 != first.wr.tm.add.recv_wr_id >> 32
    assert (second.wr.wr_id - first.wr.wr_id, second.wr.tm.unexpected_cnt) == (1, count)


# ---- chains ------------------------------------------------------------------------


def is_chain(records: list[Record], wrs: list[Any]) -> None:
    assert len(records) == len(wrs)
    for at, (record, wr) in enumerate(zip(records, wrs, strict=True)):
        agrees(wr, record)
        following = records[at + 1].address if at + 1 < len(records) else 0
        assert address_of(record.wr.next) == following
        # Cookies count up from the first.
        assert record.wr.wr_id == records[0].wr.wr_id + at


@given(st.lists(st.tuples(u64, sges), min_size=1, max_size=6), st.sampled_from([RECV, SRQ_RECV]))
def test_list_of_receives_reaches_the_driver_as_a_chain_of_structs(device, posts, verb):
    wrs = [rp.RecvWR(sg_list, wr_id=wr_id) for wr_id, sg_list in posts]
    records = device.seen(wrs, verb)
    assert len(records) == len(wrs)
    for at, (record, wr) in enumerate(zip(records, wrs, strict=True)):
        agrees(wr, record)
        following = records[at + 1].address if at + 1 < len(records) else 0
        assert address_of(record.wr.next) == following
    assert len({record.wr.wr_id for record in records}) == len(wrs)


@pytest.mark.parametrize("times", [1, 2, 20])
def test_list_of_sends_of_every_opcode_reaches_the_driver_as_a_chain_of_structs(device, times):
    """Records have different lengths, and the chain goes through all of them."""
    wr_types = [wr_type for wr_type in MEMBERS if issubclass(wr_type, rp.SendWR)]
    wrs = [distinct(wr_type, device, n % 4) for n, wr_type in enumerate(wr_types * times)]
    is_chain(device.seen(wrs), wrs)
    is_chain(device.seen(wrs[::-1]), wrs[::-1])


def test_list_of_tag_operations_reaches_the_driver_as_a_chain_of_structs(device):
    wrs = [distinct(wr_type, device, n) for n in range(3) for wr_type in (rp.TagAdd, rp.TagSync)]
    is_chain(device.seen(wrs), wrs)


def test_structs_and_sges_of_one_post_do_not_overlap(device):
    wrs = [rp.Send([rp.SGE(i, 1, 1)] * (i % 5)) for i in range(60)]
    taken: list[tuple[int, int]] = []
    for record in device.seen(wrs):
        taken.append((record.address, len(record.data)))
        if record.sges:
            taken.append((address_of(record.wr.sg_list), 16 * len(record.sges)))
    taken.sort()
    assert all(at + n <= after for (at, n), (after, _) in itertools.pairwise(taken))
    assert all(at % 8 == 0 for at, _ in taken)


def test_send_flags_reach_the_driver_as_a_number(device):
    [record] = device.seen(rp.Send(send_flags=SendFlags.SIGNALED | SendFlags.FENCE))
    assert record.wr.send_flags == 3


def test_subclass_of_a_work_request_is_posted_as_its_base(device):
    class Mine(rp.SendWithImm):
        pass

    [record] = device.seen(Mine(imm_data=1))
    assert record.wr.opcode == rp.Opcode.SEND_WITH_IMM


def test_an_sge_of_a_region_names_its_address_and_key(device):
    mr = device.mr
    [record] = device.seen(rp.Send([mr[8:24], mr[-8:]]))
    assert record.sges == [(mr.addr + 8, 16, mr.lkey), (mr.addr + 4088, 8, mr.lkey)]


# ---- prepared lists ------------------------------------------------------------------

PREPARED = [
    wr_type for wr_type in MEMBERS if issubclass(wr_type, rp.SendWR) and wr_type is not rp.BindMW
]


def test_prepared_list_reaches_the_driver_as_the_same_structs_as_a_post(device):
    wrs = [distinct(wr_type, device, n % 4) for n, wr_type in enumerate(PREPARED)]
    with device.qp.prepare(wrs) as batch:
        for _ in range(2):
            is_chain(device.during(SEND, batch.post), wrs)
    receives = [distinct(rp.RecvWR, device, n) for n in range(3)]
    with device.qp.prepare_recv(receives) as batch:
        is_chain(device.during(RECV, batch.post), receives)


@pytest.mark.parametrize("wr_type", PREPARED)
def test_what_is_changed_in_a_prepared_work_request_is_all_that_changes(device, wr_type):
    """Field by field, each to the ends of its range; the neighbours stay as they are."""
    wrs = [rp.LocalInv(), wr_type(), rp.LocalInv()]
    if wr_type is rp.TSO:
        wrs[1].hdr = b"header"
    with device.qp.prepare(wrs) as batch:
        item = batch[1]
        changeable = [name for name in MEMBERS[wr_type] if hasattr(type(item), name)]
        assert set(changeable) == MEMBERS[wr_type].keys() - {"send_flags", "ah"}
        for name in changeable:
            before = getattr(item, name)
            assert before == getattr(wrs[1], name)
            for value in ((1 << BITS[name]) - 1, 0x5A, before):
                setattr(item, name, value)
                setattr(wrs[1], name, value)
                assert getattr(item, name) == value
                is_chain(device.during(SEND, batch.post), wrs)
            for value in (-1, 1 << BITS[name]):
                with pytest.raises(ValueError, match=f"^{name}={value} is not in "):
                    setattr(item, name, value)
            is_chain(device.during(SEND, batch.post), wrs)


def test_sges_of_a_prepared_work_request_are_replaced_whole(device):
    wrs = [rp.Send([rp.SGE(1, 2, 3)]), rp.Send([rp.SGE(4, 5, 6)] * 3), rp.Send([rp.SGE(7, 8, 9)])]
    with device.qp.prepare(wrs) as batch:
        wrs[1].sg_list = [rp.SGE(U64, U32, U32), device.mr[8:16], rp.SGE(0, 1, 0)]
        batch[1].sg_list = wrs[1].sg_list
        assert batch[1].sg_list == tuple(wrs[1].sg_list)
        is_chain(device.during(SEND, batch.post), wrs)

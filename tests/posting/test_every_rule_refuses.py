"""Every rule that refuses a post, provoked on soft0.

Each is provoked alone, in a list, and prepared, with checks and without; its text is checked, and
the nearest valid values are accepted.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from support import ALL, ROOT, soft_queues
from support.soft_queues import WRS, Soft, outside, part, reason

import rdmapost as rp
from rdmapost import Access, MWType, Opcode, OpsFlags, QPType, SendFlags, SRQType
from rdmapost._binding import ffi
from rdmapost.posting import rules as rules_module
from rdmapost.resources.device import provider_of
from rdmapost.standard import opcodes

soft = soft_queues.soft
unchecked = soft_queues.unchecked

F = SendFlags
SIGNALED_INLINE = F.SIGNALED | F.INLINE
U64, U32 = (1 << 64) - 1, (1 << 32) - 1
ATOMICS = (rp.AtomicCmpAndSwp, rp.AtomicFetchAndAdd)


# ---- every rule --------------------------------------------------------------------


def without(wr: Any, name: str) -> Any:
    delattr(wr, name)
    return wr


def missing(wr: Any, name: str) -> str:
    with pytest.raises(AttributeError) as caught:
        getattr(wr, name)
    return str(caught.value)


def inline(*sges: Any) -> rp.Send:
    return rp.Send(sges, send_flags=SIGNALED_INLINE)


class Case(NamedTuple):
    """A work request that a rule refuses.

    Attributes:
        rule: the rule's name.
        to: what it is posted to: a type of queue pair, or "recv", "srq" or "ops".
        make: makes it.
        says: the text, or a function that makes it from the work request.
        fits: makes the nearest work requests that the checks accept.
        where: whether it is refused with checks, without, or both.
        alone: whether it is also refused when posted by itself, not in a list.
    """

    rule: str
    to: QPType | str
    make: Callable[[Soft], Any]
    says: str | Callable[[Soft, Any], str]
    fits: Callable[[Soft], list[Any]] | None = None
    where: str = "checked"
    alone: bool = True

    def text(self, soft: Soft, wr: Any) -> str:
        return self.says if isinstance(self.says, str) else self.says(soft, wr)


RC, UC, UD, RAW = QPType.RC, QPType.UC, QPType.UD, QPType.RAW_PACKET
XRC = QPType.XRC_SEND
TO_AN_SRQ = sorted(op for op, kind in WRS.items() if "remote_srqn" in kind.__dataclass_fields__)
SYNC = OpsFlags.TM_SYNC
BIG = 1 << 31
MISMADE: Any = object()

CASES = [
    # Unreadable values are refused everywhere.
    Case(
        "not_a_work_request",
        RC,
        lambda s: rp.RecvWR(),
        "expected SendWR, got RecvWR",
        where="both",
        alone=False,
    ),
    Case(
        "not_a_work_request",
        RC,
        lambda s: None,
        "expected SendWR, got NoneType",
        where="both",
        alone=False,
    ),
    Case(
        "not_a_work_request",
        RC,
        lambda s: rp.SendWR(),
        "SendWR is only a base class; post one of its subclasses",
        where="both",
        alone=False,
    ),
    Case(
        "not_a_work_request",
        "recv",
        lambda s: rp.Send(),
        "expected RecvWR, got Send",
        where="both",
        alone=False,
    ),
    Case(
        "not_a_work_request",
        "srq",
        lambda s: rp.TagAdd(),
        "expected RecvWR, got TagAdd",
        where="both",
        alone=False,
    ),
    Case(
        "not_a_work_request",
        "ops",
        lambda s: rp.RecvWR(),
        "expected OpsWR, got RecvWR",
        where="both",
        alone=False,
    ),
    Case(
        "not_a_work_request",
        "ops",
        lambda s: rp.OpsWR(),
        "OpsWR is only a base class; post one of its subclasses",
        where="both",
        alone=False,
    ),
    *(
        Case(
            "unreadable",
            RC,
            lambda s, name=name: without(rp.SendWithImm(), name),
            lambda s, wr, name=name: missing(wr, name),
            where="both",
        )
        for name in ("wr_id", "send_flags", "imm_data", "ah", "sg_list", "remote_srqn")
    ),
    Case(
        "unreadable",
        "recv",
        lambda s: without(rp.RecvWR(), "sg_list"),
        lambda s, wr: missing(wr, "sg_list"),
        where="both",
    ),
    Case(
        "unreadable",
        "ops",
        lambda s: without(rp.TagAdd(), "tag"),
        lambda s, wr: missing(wr, "tag"),
        where="both",
    ),
    *(
        Case(
            "not_an_integer",
            RC,
            lambda s, value=value: rp.SendWithImm(imm_data=value),
            f"imm_data: expected int, got {type(value).__name__}",
            lambda s: [rp.SendWithImm(imm_data=True)],
            where="both",
        )
        for value in (1.0, None, "1", b"1", [1])
    ),
    Case(
        "not_an_integer",
        RC,
        lambda s: rp.Send(rp.SGE(1, 1, "x")),  # type: ignore[arg-type]
        "an SGE's lkey: expected int, got str",
        where="both",
    ),
    *(
        Case(
            "out_of_range",
            RC,
            lambda s, value=value: rp.SendWithImm(imm_data=value),
            f"imm_data={value} is not in 0..2^32-1",
            lambda s: [rp.SendWithImm(imm_data=0), rp.SendWithImm(imm_data=U32)],
            where="both",
        )
        for value in (-1, U32 + 1, U64, 1 << 200)
    ),
    Case(
        "out_of_range",
        RC,
        lambda s: rp.Send(wr_id=U64 + 1),
        f"wr_id={U64 + 1} is not in 0..2^64-1",
        lambda s: [rp.Send(wr_id=U64)],
        where="both",
    ),
    Case(
        "out_of_range",
        RC,
        lambda s: rp.Send(send_flags=-1),
        "send_flags=-1 is not in 0..2^32-1",
        where="both",
    ),
    Case(
        "out_of_range",
        RC,
        lambda s: rp.Send(rp.SGE(0, U32 + 1, 0)),
        f"an SGE's length={U32 + 1} is not in 0..2^32-1",
        where="both",
    ),
    Case(
        "out_of_range",
        UD,
        lambda s: s.tso(mss=1 << 16),
        "mss=65536 is not in 1..65535",
        lambda s: [s.tso(mss=0xFFFF)],
        where="both",
    ),
    Case(
        "out_of_range",
        "ops",
        lambda s: rp.TagAdd(flags=1 << 31),
        f"flags={1 << 31} is not in 0..2^31-1",
        where="both",
    ),
    *(
        Case(
            "not_sges",
            to,
            lambda s, kind=kind: kind(sg_list=5),
            "sg_list: expected SGEs, got int; mr[a:b] makes an SGE",
            where="both",
        )
        for to, kind in ((RC, rp.Send), ("recv", rp.RecvWR), ("srq", rp.RecvWR), ("ops", rp.TagAdd))
    ),
    Case(
        "not_sges",
        RC,
        lambda s: rp.Send(s.mr),  # type: ignore[arg-type]
        "sg_list: expected SGEs, got MR; use mr[:]",
        where="both",
    ),
    Case(
        "not_an_sge",
        RC,
        lambda s: rp.Send([s.mr[:8], (1, 2, 3)]),  # type: ignore[list-item]
        "sg_list holds tuple; mr[a:b] makes an SGE",
        where="both",
    ),
    Case(
        "not_an_sge",
        RC,
        lambda s: rp.Send(b"hello"),  # type: ignore[arg-type]
        "sg_list holds int, as bytes do; copy them into a region: mr[a:b] makes an SGE, or "
        "SGE.from_buffer(data) for INLINE",
        where="both",
    ),
    Case(
        "not_an_sge",
        "recv",
        lambda s: rp.RecvWR(bytearray(5)),  # type: ignore[arg-type]
        "sg_list holds int, as bytes do; copy them into a region: mr[a:b] makes an SGE",
        where="both",
    ),
    Case(
        "not_an_owner",
        RC,
        lambda s: rp.Send(rp.SGE(1, 1, 1, MISMADE)),
        "an SGE's owner: expected MR or a buffer, got object",
        lambda s: [rp.Send(rp.SGE(1, 1, 1, None))],
        where="both",
    ),
    Case(
        "not_a_resource",
        UD,
        lambda s: rp.Send(ah=MISMADE),
        "ah: expected AH, got object",
        where="both",
    ),
    Case("not_a_resource", UD, lambda s: s.tso(ah=s.mr), "ah: expected AH, got MR", where="both"),
    Case("not_a_resource", RC, lambda s: s.bind(mw=s.mr), "mw: expected MW, got MR", where="both"),
    Case(
        "not_a_resource",
        RC,
        lambda s: s.bind(mr=s.window()),
        "mr: expected MR, got MW",
        where="both",
    ),
    Case("not_bytes", UD, lambda s: s.tso(hdr=5), "hdr is not bytes", where="both"),
    Case(
        "not_bytes",
        UD,
        lambda s: s.tso(hdr=memoryview(b"1234")[::2]),
        "hdr is not bytes",
        lambda s: [s.tso(hdr=memoryview(b"1234")[1:])],
        where="both",
    ),
    Case(
        "header_too_long",
        UD,
        lambda s: s.tso(hdr=bytes(1 << 16)),
        "hdr has 65536 bytes; at most 65535 fit",
        where="both",
    ),
    # What is closed.
    Case(
        "closed",
        RC,
        lambda s: rp.Send(s.closed),
        lambda s, wr: f"MR of 64 bytes (lkey {s.closed.lkey:#x}) is closed",
        where="both",
    ),
    *(
        Case(
            "closed",
            to,
            lambda s, kind=kind: kind(sg_list=[s.mr[:8], s.closed]),
            lambda s, wr: f"MR of 64 bytes (lkey {s.closed.lkey:#x}) is closed",
            where="both",
        )
        for to, kind in (("recv", rp.RecvWR), ("srq", rp.RecvWR), ("ops", rp.TagAdd))
    ),
    # The opcode and the flags.
    Case(
        "wrong_opcode",
        UC,
        lambda s: s.valid(Opcode.RDMA_READ),
        "RDMA_READ is not supported on UC QPs, only on RC, XRC_SEND",
    ),
    Case(
        "wrong_opcode",
        RC,
        lambda s: s.tso(),
        "TSO is not supported on RC QPs, only on RAW_PACKET, UD",
    ),
    Case(
        "wrong_flags",
        UC,
        lambda s: rp.Send(send_flags=F.FENCE),
        "FENCE has no meaning on UC QPs",
        lambda s: [rp.Send(send_flags=F.SOLICITED)],
    ),
    Case(
        "wrong_flags",
        RC,
        lambda s: s.valid(Opcode.RDMA_READ, send_flags=F.INLINE),
        "INLINE has no meaning on RDMA_READ",
    ),
    Case(
        "wrong_flags",
        RC,
        lambda s: s.valid(Opcode.RDMA_READ, send_flags=F.INLINE | F.SOLICITED),
        "SOLICITED|INLINE has no meaning on RDMA_READ",
        lambda s: [s.valid(Opcode.RDMA_READ, send_flags=F.SIGNALED | F.FENCE)],
    ),
    Case(
        "wrong_flags",
        RC,
        lambda s: rp.Send(send_flags=32),
        "send_flags=0x20 has bits that are not send flags",
    ),
    # Memory.
    Case(
        "too_many_sges",
        RC,
        lambda s: rp.Send([s.mr[:8]] * 5),
        "5 SGEs, but this queue was created with max_send_sge=4",
        lambda s: [rp.Send([s.mr[:8]] * 4)],
    ),
    *(
        Case(
            "too_many_sges",
            to,
            lambda s: rp.RecvWR([s.mr[:8]] * 3),
            f"3 SGEs, but this queue was created with {name}=2",
            lambda s: [rp.RecvWR([s.mr[:8]] * 2)],
        )
        for to, name in (("recv", "max_recv_sge"), ("srq", "max_sge"))
    ),
    *(
        Case(
            "length_0",
            to,
            lambda s, kind=kind: kind(sg_list=[s.mr[:8], s.mr[5:5]]),
            "an SGE of length 0 means 2^31 bytes to some devices; "
            "give an empty sg_list for a message of 0 bytes",
            lambda s, kind=kind: [kind(sg_list=()), kind(sg_list=s.mr[5:6])],
        )
        for to, kind in (
            (RC, rp.Send),
            (RC, rp.RdmaRead),
            ("recv", rp.RecvWR),
            ("srq", rp.RecvWR),
            ("ops", rp.TagAdd),
        )
    ),
    Case(
        "length_0",
        RC,
        lambda s: inline(rp.SGE.from_buffer(b"")),
        "an SGE of length 0 means 2^31 bytes to some devices; "
        "give an empty sg_list for a message of 0 bytes",
        lambda s: [inline(rp.SGE.from_buffer(b"1")), inline()],
    ),
    Case(
        "inline_numbers",
        RC,
        lambda s: inline(s.mr[:8], rp.SGE(s.mr.addr, 8, s.mr.lkey)),
        "INLINE reads the buffer in this process, but this SGE was made from numbers; "
        "use mr[a:b] or SGE.from_buffer(data), or a QP with checked=False",
        lambda s: [
            inline(s.mr[:8]),
            inline(rp.SGE.from_buffer(b"12345678")),
            inline(s.foreign[:8]),
        ],
    ),
    Case(
        "inline_zero_based",
        RC,
        lambda s: inline(s.region(64, ALL | Access.ZERO_BASED)[:8]),
        "INLINE reads the buffer in this process, but a ZERO_BASED region's addresses count "
        "from its start; use SGE.from_buffer(mr.buffer[a:b])",
        lambda s: [rp.Send(s.region(64, ALL | Access.ZERO_BASED)[:8])],
        where="both",
    ),
    Case(
        "inline_too_long",
        RC,
        lambda s: inline(s.mr[:60], s.mr[:5]),
        "65 bytes inline, but this QP was created with max_inline_data=64",
        lambda s: [inline(s.mr[:60], s.mr[:4]), inline(rp.SGE.from_buffer(bytes(64)))],
    ),
    Case(
        "inline_32_bits",
        RC,
        lambda s: inline(*[s.region(BIG)[:]] * 2),
        "4294967296 bytes inline; drivers count only up to 2^32-1",
        where="unchecked",
    ),
    *(
        Case(
            "not_registered",
            to,
            lambda s, kind=kind: kind(rp.SGE.from_buffer(bytearray(8))),
            "a buffer that is not registered can only be sent with SendFlags.INLINE",
        )
        for to, kind in ((RC, rp.Send), ("recv", rp.RecvWR), ("srq", rp.RecvWR))
    ),
    *(
        Case(
            "region_of_other_pd",
            to,
            lambda s, kind=kind: kind(sg_list=[s.mr[:8], s.foreign[:8]]),
            lambda s, wr: f"{s.foreign} does not belong to the queue's PD",
        )
        for to, kind in ((RC, rp.Send), ("recv", rp.RecvWR), ("srq", rp.RecvWR), ("ops", rp.TagAdd))
    ),
    *(
        Case(
            "outside_region",
            to,
            lambda s, kind=kind, start=start, n=n: kind(sg_list=part(s, start, n)),
            lambda s, wr, start=start, n=n: outside(s, s.mr.addr + start, n),
            lambda s, kind=kind: [
                kind(sg_list=part(s, start, n)) for start, n in ((0, 4096), (4095, 1), (0, 1))
            ],
        )
        for to, kind in ((RC, rp.Send), ("recv", rp.RecvWR), ("srq", rp.RecvWR))
        for start, n in ((-1, 8), (4089, 8), (4096, 1), (0, 4097), (4097, 1), (-1, 1))
    ),
    *(
        Case(
            "outside_region",
            RC,
            lambda s, start=start, n=n: inline(s.mr[:8], part(s, start, n)),
            lambda s, wr, start=start, n=n: outside(s, s.mr.addr + start, n),
            lambda s: [inline(s.mr[4032:4096])],
            where="both",
        )
        for start, n in ((-1, 8), (4089, 8), (4096, 1))
    ),
    *(
        Case(
            "outside_region",
            RC,
            lambda s, start=start, n=n: inline(
                (sge := rp.SGE.from_buffer(b"12345678"))._replace(addr=sge.addr + start, length=n)
            ),
            lambda s, wr, start=start: (
                f"{(sge := wr.sg_list[0])} lies outside buffer of 8 bytes "
                f"from {sge.addr - start:#x}"
            ),
            where="both",
        )
        for start, n in ((0, 9), (-1, 8), (1, 8), (8, 1))
    ),
    Case(
        "too_long",
        UD,
        lambda s: rp.Send([s.mr[:4096], s.mr[:1]], **s.ud),
        "4097 bytes, but a message on this UD QP holds at most 4096",
        # A TSO may be longer than a message: each segment is a message.
        lambda s: [
            rp.Send([s.mr[:4095], s.mr[:1]], **s.ud),
            s.tso(sg_list=[s.mr[:4096], s.mr[:1]], mss=1000),
        ],
    ),
    *(
        Case(
            "too_long",
            qp_type,
            lambda s: rp.Send([s.region(BIG)[:], s.mr[:1]]),
            f"{BIG + 1} bytes, but a message on this {qp_type.name} QP holds at most {BIG}",
        )
        for qp_type in (RC, UC)
    ),
    *(
        Case(
            "not_writable",
            RC,
            lambda s, op=op: s.valid(op, sg_list=s.region(64, Access.REMOTE_READ)[:8]),
            lambda s, wr: (
                f"the result goes to {wr.sg_list.owner}, which was registered without LOCAL_WRITE"
            ),
            lambda s, op=op: [s.valid(op), rp.Send(s.region(64, Access(0))[:8])],
        )
        for op in (Opcode.RDMA_READ, Opcode.ATOMIC_CMP_AND_SWP, Opcode.ATOMIC_FETCH_AND_ADD)
    ),
    *(
        Case(
            "not_writable",
            to,
            lambda s, kind=kind: kind(sg_list=[s.mr[:8], s.region(64, Access(0))[:8]]),
            lambda s, wr: (
                f"the message goes to {wr.sg_list[1].owner}, which was registered "
                "without LOCAL_WRITE"
            ),
            lambda s, kind=kind: [kind(sg_list=s.mr[:8])],
        )
        for to, kind in (("recv", rp.RecvWR), ("srq", rp.RecvWR), ("ops", rp.TagAdd))
    ),
    *(
        Case(
            "atomic_sge",
            RC,
            lambda s, kind=kind, sizes=sizes: kind([s.mr[:n] for n in sizes]),
            f"{kind.opcode.name} returns the old value into one SGE of 8 bytes",
            lambda s, kind=kind: [kind(s.mr[:8]), kind([s.mr[8:16]])],
        )
        for kind in ATOMICS
        for sizes in ((), (4,), (7,), (9,), (16,), (4, 4), (8, 8))
    ),
    *(
        Case(
            "misaligned",
            RC,
            lambda s, kind=kind, at=at: kind(s.mr[:8], remote_addr=at),
            f"remote_addr={at:#x} is not a multiple of 8",
            lambda s, kind=kind: [kind(s.mr[:8], remote_addr=at) for at in (0, 8, 1 << 63)],
        )
        for kind in ATOMICS
        for at in (1, 4, 7, 12, U64)
    ),
    # Datagrams, windows, segmentation.
    *(
        Case(
            "no_address_handle",
            UD,
            lambda s, op=op: s.valid(op, UD, ah=None),
            "a UD work request needs an address handle (ah=...)",
            lambda s, op=op: [s.valid(op, UD)],
            where="both",
        )
        for op in (Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO)
    ),
    *(
        Case(
            "invalid_qp_number",
            UD,
            lambda s, op=op, qpn=qpn: s.valid(op, UD, remote_qpn=qpn),
            f"remote_qpn={qpn:#x} is not a QP number, which has 24 bits",
            lambda s, op=op: [s.valid(op, UD, remote_qpn=0xFFFFFE)],
        )
        for op in (Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO)
        for qpn in (1 << 24, U32)
    ),
    *(
        Case(
            "invalid_srq_number",
            XRC,
            lambda s, op=op, srqn=srqn: s.valid(op, XRC, remote_srqn=srqn),
            f"remote_srqn={srqn:#x} is not an SRQ number, which has 24 bits",
            lambda s, op=op: [s.valid(op, XRC, remote_srqn=0xFFFFFF)],
        )
        for op in TO_AN_SRQ
        for srqn in (1 << 24, U32)
    ),
    # Drivers read it from every work request of a UD queue pair, whatever the opcode.
    *(
        Case(
            "no_address_handle",
            UD,
            lambda s, op=op: s.valid(op),
            f"{op.name} is not supported on UD QPs, only on "
            + ", ".join(sorted(kind.name for kind in opcodes.QP_TYPES_BY_OPCODE[op])),
            where="unchecked",
        )
        for op in sorted(WRS.keys() - {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO})
    ),
    Case(
        "resource_of_other_pd",
        UD,
        lambda s: rp.Send(ah=s.stack.enter_context(rp.AH(s.other, s.ud["ah"].attr))),
        lambda s, wr: f"{wr.ah} does not belong to the queue pair's PD",
    ),
    Case(
        "resource_of_other_pd",
        RC,
        lambda s: s.bind(mw=s.window(pd=s.other)),
        lambda s, wr: f"{wr.mw} does not belong to the queue pair's PD",
    ),
    Case(
        "resource_of_other_pd",
        RC,
        lambda s: s.bind(mr=s.foreign),
        lambda s, wr: f"{wr.mr} does not belong to the queue pair's PD",
    ),
    Case(
        "resource_of_other_device",
        UD,
        lambda s: rp.Send(ah=s.stack.enter_context(rp.AH(s.away(), s.ud["ah"].attr))),
        lambda s, wr: f"{wr.ah} does not belong to the queue pair's open device",
        where="unchecked",
    ),
    Case(
        "resource_of_other_device",
        RC,
        lambda s: s.bind(mw=s.window(pd=s.away())),
        lambda s, wr: f"{wr.mw} does not belong to the queue pair's open device",
        where="unchecked",
    ),
    Case(
        "resource_of_other_device",
        RC,
        lambda s: s.bind(mr=s.stack.enter_context(rp.MR(s.away(), 64))),
        lambda s, wr: f"{wr.mr} does not belong to the queue pair's open device",
        where="unchecked",
    ),
    *(
        Case(
            "bind_needs",
            RC,
            lambda s, nothing=nothing: s.bind(**nothing),
            "BIND_MW needs a memory window (mw=...) and a memory region (mr=...)",
            lambda s: [s.bind()],
            where="both",
        )
        for nothing in ({"mw": None}, {"mr": None}, {"mw": None, "mr": None})
    ),
    Case(
        "window_of_type_1",
        RC,
        lambda s: s.bind(mw=s.window(MWType.TYPE_1)),
        lambda s, wr: (
            f"{wr.mw} is of type 1, but a BIND_MW work request binds windows of type "
            "2; use qp.bind_mw()"
        ),
    ),
    *(
        Case(
            "not_a_window_key",
            RC,
            lambda s, change=change: s.bind(mw=(mw := s.window()), rkey=change(mw.rkey)),
            lambda s, wr: (
                f"rkey={wr.rkey:#x} is not a key of {wr.mw}: only the low 8 bits may change; "
                "use mw.next_rkey()"
            ),
            lambda s: [s.bind(mw=(mw := s.window()), rkey=mw.rkey ^ n) for n in (0, 1, 0xFF)],
        )
        for change in (
            lambda rkey: rkey ^ 1 << 8,
            lambda rkey: rkey ^ 1 << 31,
            lambda rkey: 0,
            lambda rkey: U32,
        )
    ),
    *(
        Case(
            "not_window_access",
            RC,
            lambda s, flags=flags: s.bind(mw_access_flags=flags),
            f"mw_access_flags={flags:#x} has more than REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC "
            "and ZERO_BASED",
            lambda s: [s.bind(mw_access_flags=flags) for flags in (0, 2 | 4 | 8, 4 | 1 << 5)],
        )
        for flags in (1, 1 << 4, 1 << 25, 4 | 1 << 31)
    ),
    *(
        Case(
            "not_bindable",
            RC,
            lambda s, n=n: s.bind(mr=(mr := s.region(64)), addr=mr.addr, length=n),
            lambda s, wr: f"{wr.mr} was registered without MW_BIND",
        )
        for n in (64, 0)
    ),
    Case(
        "bind_of_nothing",
        RC,
        lambda s: s.bind(length=0),
        lambda s, wr: (
            f"length=0 binds {wr.mw} to nothing; post a LocalInv of its rkey to unbind it"
        ),
        lambda s: [s.bind(length=1)],
    ),
    *(
        Case(
            "bind_outside",
            RC,
            lambda s, at=at, n=n: s.bind(addr=s.mr.addr + at, length=n),
            lambda s, wr, n=n: (
                f"addr={wr.addr:#x} length={n} lies outside {s.mr} from {s.mr.addr:#x}"
            ),
            lambda s: [
                s.bind(addr=s.mr.addr + at, length=n) for at, n in ((0, 4096), (4095, 1), (0, 1))
            ],
        )
        for at, n in ((-1, 1), (0, 4097), (4096, 1), (1, 4096), (0, U64), (8, U64 - 7))
    ),
    *(
        Case(
            "no_flush_type",
            RC,
            lambda s, flags=flags: s.valid(Opcode.FLUSH, type=flags),
            f"type={flags} is not FlushType.GLOBAL, PERSISTENT or both",
            lambda s: [s.valid(Opcode.FLUSH, type=flags) for flags in (1, 2, 3)],
        )
        for flags in (0, 4, 0x101, U32)
    ),
    *(
        Case(
            "no_flush_level",
            RC,
            lambda s, level=level: s.valid(Opcode.FLUSH, level=level),
            f"level={level} is not FlushLevel.RANGE or MR",
            lambda s: [s.valid(Opcode.FLUSH, level=level) for level in (0, 1)],
        )
        for level in (2, 0x100, U32)
    ),
    *(
        Case(
            "mss",
            qp_type,
            lambda s, qp_type=qp_type: s.valid(Opcode.TSO, qp_type, mss=0),
            "mss=0 is not in 1..65535",
            lambda s, qp_type=qp_type: [s.valid(Opcode.TSO, qp_type, mss=n) for n in (1, 0xFFFF)],
        )
        for qp_type in (UD, RAW)
    ),
    *(
        Case(
            "longer_than_max_tso_header",
            UD,
            lambda s, n=n: s.tso(hdr=bytes(n)),
            f"hdr has {n} bytes, but this QP was created with max_tso_header=32",
            lambda s: [s.tso(hdr=bytes(32)), s.tso(hdr=b"")],
        )
        for n in (33, 0xFFFF)
    ),
    # Tag matching.
    Case(
        "no_tag_handle",
        "ops",
        lambda s: rp.TagDel(),
        "TAG_DEL needs the handle of a TagAdd that was posted to this SRQ",
        lambda s: [rp.TagDel(handle=s.added().handle)],
        where="both",
    ),
    Case(
        "not_a_tag_handle",
        "ops",
        lambda s: rp.TagDel(handle=MISMADE),
        "TAG_DEL needs the handle of a TagAdd that was posted to this SRQ",
        where="both",
    ),
    Case(
        "wrong_ops_flags",
        "ops",
        lambda s: rp.TagAdd(flags=4),
        "flags=0x4 has bits that are not flags of a tag-matching operation",
        lambda s: [rp.TagAdd(flags=3)],
    ),
    Case(
        "wrong_ops_flags",
        "ops",
        lambda s: rp.TagSync(flags=7),
        "flags=0x7 has bits that are not flags of a tag-matching operation",
    ),
    *(
        Case(
            "count_without_sync",
            "ops",
            lambda s, kind=kind: kind(s, unexpected_cnt=1),
            "unexpected_cnt=1 is ignored without OpsFlags.TM_SYNC",
            lambda s, kind=kind: [kind(s, unexpected_cnt=1, flags=SYNC), kind(s)],
        )
        for kind in (
            lambda s, **f: rp.TagAdd(**f),
            lambda s, **f: rp.TagDel(handle=s.added().handle, **f),
        )
    ),
    Case(
        "sync_of_nothing",
        "ops",
        lambda s: rp.TagSync(flags=OpsFlags.SIGNALED),
        "a TAG_SYNC without OpsFlags.TM_SYNC has no effect",
        lambda s: [rp.TagSync(), rp.TagSync(flags=SYNC, unexpected_cnt=3)],
    ),
    *(
        Case(
            "tag_outside_mask",
            "ops",
            lambda s, tag=tag, mask=mask: rp.TagAdd(tag=tag, mask=mask),
            f"tag={tag:#x} has bits outside mask={mask:#x}, so no message can match: "
            "a message matches if its tag & mask == tag",
            lambda s: [rp.TagAdd(tag=1, mask=3), rp.TagAdd(tag=3, mask=3), rp.TagAdd(mask=0)],
        )
        for tag, mask in ((3, 1), (1, 0), (1 << 63, U64 >> 1))
    ),
]


def name_of(case: Case) -> str:
    return f"{case.rule}-{case.to.name if isinstance(case.to, QPType) else case.to}"


def poster(soft: Soft, to: QPType | str) -> tuple[Callable[[Any], None], Callable[[], int], Any]:
    """Return a queue's post function, its outstanding count, and a work request for it."""
    if to == "recv":
        qp = soft.qp()
        return qp.post_recv, lambda: qp.outstanding.recv, rp.RecvWR(soft.mr[:8])
    if to == "srq":
        srq = soft.srq()
        return srq.post_srq_recv, lambda: srq.outstanding, rp.RecvWR(soft.mr[:8])
    if to == "ops":
        srq = soft.srq(SRQType.TM)
        return srq.post_srq_ops, lambda: srq.outstanding_ops, rp.TagAdd(flags=OpsFlags(0))
    assert isinstance(to, QPType)
    qp = soft.qp(to)
    return qp.post_send, lambda: qp.outstanding.send, soft.valid(Opcode.SEND, to, send_flags=0)


def each(condition: Callable[[Case], Any]) -> Any:
    return pytest.mark.parametrize("case", [c for c in CASES if condition(c)], ids=name_of)


def refuses(soft: Soft, case: Case) -> None:
    """Check that a work request is refused alone and in a list, with its text and nothing else."""
    post, outstanding, good = poster(soft, case.to)
    bad = case.make(soft)
    text, before = case.text(soft, bad), outstanding()
    for wrs in ([bad], [bad, good], bad) if case.alone else ([bad], [bad, good]):
        with pytest.raises(rp.PostError) as caught:
            post(wrs)
        error = caught.value
        assert error.reason == text
        assert (error.errno, error.index, error.posted) == (errno.EINVAL, 0, 0)
        assert error.wr is bad
        assert outstanding() == before
    # Those before it are posted, and those after it are not.
    with pytest.raises(rp.PostError) as caught:
        post([good, good, bad, good])
    assert (caught.value.reason, caught.value.index, caught.value.posted) == (text, 2, 2)
    assert outstanding() == before + 2


@each(lambda case: case.where != "unchecked")
def test_each_posting_rule_refuses_the_case_that_breaks_it(soft, case):
    refuses(soft, case)


@each(lambda case: case.where != "checked")
def test_rule_against_harm_to_the_process_holds_on_an_unchecked_queue_pair(unchecked, case):
    refuses(unchecked, case)


def test_error_for_a_base_class_differs_from_that_for_no_work_request(soft):
    for post, base in (
        (soft.qp().post_send, rp.SendWR),
        (soft.srq(SRQType.TM).post_srq_ops, rp.OpsWR),
    ):
        with pytest.raises(TypeError, match=f"^{base.__name__} is only a base class; post one of"):
            post(base())


@each(lambda case: case.where == "checked")
def test_unchecked_queue_pair_leaves_the_other_rules_to_the_device(unchecked, case):
    """The device accepts the work request, or refuses it itself, or the completion says why not."""
    post, _, _ = poster(unchecked, case.to)
    wr = case.make(unchecked)
    text = case.text(unchecked, wr)
    said: list[rp.PostError] = []
    try:
        post(wr)
    except rp.PostError as error:
        said.append(error)
    assert all(error.reason != text and "soft0" in error.reason for error in said)


@each(lambda case: case.fits)
def test_case_just_within_each_posting_rule_is_posted(soft, case):
    assert case.fits is not None
    for wr in case.fits(soft):
        post, outstanding, _ = poster(soft, case.to)
        before = outstanding()
        post(wr)
        assert outstanding() == before + 1


def can_be_prepared(case: Case) -> bool:
    return case.to not in ("srq", "ops")


def preparer(soft: Soft, to: QPType | str) -> Callable[[Any], rp.Batch]:
    if to == "recv":
        return soft.qp().prepare_recv
    assert isinstance(to, QPType)
    return soft.qp(to).prepare


def refuses_to_prepare(soft: Soft, case: Case) -> None:
    _, outstanding, good = poster(soft, case.to)
    bad = case.make(soft)
    text = case.text(soft, bad)
    if isinstance(bad, rp.BindMW) and case.rule != "not_a_resource":
        # prepare() refuses every BIND_MW that can be read, for this reason.
        text = "a BIND_MW changes the window's key, so it cannot be posted again"
    with pytest.raises(rp.PostError) as caught:
        preparer(soft, case.to)([good, bad, good])
    error = caught.value
    assert (error.reason, error.errno) == (text, errno.EINVAL)
    assert (error.index, error.posted, error.wr) == (1, 0, bad)
    assert outstanding() == 0


@each(lambda case: case.where != "unchecked" and can_be_prepared(case))
def test_each_posting_rule_refuses_a_prepared_list_that_breaks_it(soft, case):
    refuses_to_prepare(soft, case)


@each(lambda case: case.where != "checked" and can_be_prepared(case))
def test_rule_against_harm_to_the_process_holds_for_an_unchecked_prepared_list(unchecked, case):
    refuses_to_prepare(unchecked, case)


BY_SGES = {
    "not_sges",
    "not_an_sge",
    "not_an_owner",
    "closed",
    "length_0",
    "inline_numbers",
    "inline_zero_based",
    "inline_too_long",
    "not_registered",
    "region_of_other_pd",
    "outside_region",
    "too_long",
    "not_writable",
    "atomic_sge",
}


@each(lambda case: case.where != "unchecked" and can_be_prepared(case) and case.rule in BY_SGES)
def test_rules_about_sges_hold_for_those_set_on_a_prepared_work_request(soft, case):
    """The text is the same; the list keeps its SGEs."""
    bad = case.make(soft)
    wrong, good, count = bad.sg_list, soft.mr[:8], 1
    text = case.text(soft, bad)
    if isinstance(wrong, list | tuple) and not isinstance(wrong, rp.SGE):
        count = len(wrong)
    if count != 1 and case.rule == "atomic_sge":
        text, count = f"{count} SGEs, but it was prepared with 1", 1
    bad.sg_list = [good] * count
    _, _, first = poster(soft, case.to)
    _, item = preparer(soft, case.to)([first, bad])
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(text)}$"):
        item.sg_list = wrong
    assert item.sg_list == (good,) * count


# ---- rules that need more than one post ---------------------------------------------


PROVOKED: dict[str, Any] = {}


def provokes(rule: str) -> Any:
    """Say which rule a separate test provokes."""

    def note(test: Any) -> Any:
        PROVOKED[rule] = test
        return test

    return note


@provokes("inline_unreadable")
def test_inline_is_not_read_from_memory_that_python_cannot_read(soft):
    with rp.MR.at(soft.pd, soft.mr.addr, 64) as mr:
        text = (
            f"INLINE reads the buffer in this process, but {mr} has none: it was registered by "
            "address, or is a device's memory or a dma-buf; post without INLINE"
        )
        with pytest.raises(rp.PostError, match=re.escape(text)):
            soft.qp().post_send(inline(mr[:8]))


def _rereg_as(monkeypatch, soft, ibv_rereg_mr):
    monkeypatch.setattr(type(provider_of(soft.pd.context)), "rereg_mr", staticmethod(ibv_rereg_mr))


@provokes("spoiled")
def test_region_that_failed_to_be_registered_again_is_not_posted(soft, monkeypatch):
    def fail(*_):
        ffi.errno = errno.EIO
        return -4

    _rereg_as(monkeypatch, soft, fail)
    with rp.MR(soft.pd, 64, ALL) as mr:
        sge, text = mr[:8], f"{mr} cannot be used: its re-registration failed; close it"
        with pytest.raises(rp.VerbsError):
            mr.rereg(memory=64)
        with pytest.raises(rp.PostError, match=re.escape(text)):
            soft.qp().post_send(rp.Send(sge))


@provokes("being_registered")
def test_region_that_is_being_registered_again_is_not_posted(soft, monkeypatch):
    qp, seen = soft.qp(), []

    def post(*_):
        with pytest.raises(rp.PostError) as caught:
            qp.post_send(rp.Send(mr[:8]))
        seen.append((caught.value.errno, caught.value.reason))
        return -1

    _rereg_as(monkeypatch, soft, post)
    with rp.MR(soft.pd, 64, ALL) as mr:
        with pytest.raises(rp.VerbsError):
            mr.rereg(memory=64)
        assert seen == [(errno.EBUSY, f"another thread is re-registering {mr}")]


@provokes("being_closed")
def test_region_that_is_being_closed_is_not_posted(soft, monkeypatch):
    """The device refuses the close, so the region is not called closed, and is posted later."""
    qp, seen = soft.qp(), []
    provider = provider_of(soft.pd.context)
    dereg_mr = provider.dereg_mr

    def refuse_once(handle):
        if seen:
            return dereg_mr(handle)
        with pytest.raises(rp.PostError) as caught:
            qp.post_send(rp.Send(mr[:8]))
        seen.append((caught.value.errno, caught.value.reason))
        return errno.EIO

    monkeypatch.setattr(type(provider), "dereg_mr", staticmethod(refuse_once))
    with rp.MR(soft.pd, 64, ALL) as mr:
        with pytest.raises(rp.VerbsError):
            mr.close()
        assert seen == [(errno.EBUSY, f"{mr} is being closed")]
        qp.post_send(rp.Send(mr[:8]))
        qp.close()


_UNSIGNALED = "; if none of them is SIGNALED, no slot is ever freed"


@provokes("full")
@pytest.mark.parametrize("to", [RC, "recv", "srq", "ops"])
def test_post_to_a_full_queue_is_refused(soft, to):
    """The errno is ENOMEM, as in the man pages, and no other refusal has it."""
    post, outstanding, good = poster(soft, to)
    name = {RC: "max_send_wr", "recv": "max_recv_wr", "srq": "max_wr", "ops": "max_ops"}[to]
    if to == "ops":
        good = rp.TagSync(flags=SYNC)
    room = {
        RC: soft.qp().max_send_wr,
        "recv": soft.qp().max_recv_wr,
        "srq": soft.srq().max_wr,
        "ops": 8,
    }[to]
    with pytest.raises(rp.PostError) as caught:
        post([good] * (room + 2))
    assert (caught.value.index, caught.value.posted) == (room, room)
    assert caught.value.reason == (
        f"a list of {room + 2} cannot fit a queue of {name}={room}; "
        "post it in parts, or create a deeper queue"
    )
    assert outstanding() == room
    for wrs in (good, [good], [good] * 3):
        with pytest.raises(rp.PostError) as caught:
            post(wrs)
        error = caught.value
        assert (error.errno, error.index, error.posted) == (errno.ENOMEM, 0, 0)
        assert error.reason == (
            f"the queue is full: {name}={room} and {room} work requests are outstanding; "
            "poll the CQ, or create a deeper queue" + (_UNSIGNALED if to == RC else "")
        )
    assert outstanding() == room


@provokes("full")
def test_prepared_list_is_posted_whole_or_not_at_all(soft):
    qp = soft.qp()
    room = qp.max_send_wr
    one, all_of_it = (qp.prepare([rp.LocalInv()] * n) for n in (1, room))
    all_of_it.post()
    soft.cq.wait(room)
    one.post()
    with pytest.raises(rp.PostError) as caught:
        all_of_it.post()
    error = caught.value
    assert (error.errno, error.index, error.posted) == (errno.ENOMEM, room - 1, 0)
    assert error.reason == (
        f"the queue is full: max_send_wr={room} and 1 work request is outstanding, and the "
        f"list has {room} more; poll the CQ, or create a deeper queue{_UNSIGNALED}"
    )
    assert qp.outstanding.send == 1
    with pytest.raises(rp.PostError, match="a list of 9 cannot fit"):
        qp.prepare([rp.LocalInv()] * (room + 1))


@provokes("list_full")
def test_matching_list_takes_no_more_entries_than_its_size(soft):
    srq = soft.srq(SRQType.TM)
    with pytest.raises(rp.PostError) as caught:
        srq.post_srq_ops([rp.TagAdd(tag=i, flags=0) for i in range(6)])
    error = caught.value
    assert (error.index, error.posted, error.errno) == (4, 4, errno.EINVAL)
    assert error.reason == (
        "the matching list is full: all max_num_tags=4 tagged receives are outstanding; "
        "poll the CQ, remove some, or create an SRQ with a larger max_num_tags"
    )
    assert (srq.outstanding_tags, srq.outstanding_ops) == (4, 4)
    # Anything but a receive is still posted.
    srq.post_srq_ops(rp.TagSync())


@provokes("tag_not_listed")
def test_handle_of_a_completed_tagged_receive_is_refused(soft):
    srq = soft.srq(SRQType.TM)
    handle = soft.added().handle
    srq.post_srq_ops(rp.TagDel(handle=handle))
    assert srq.cq is not None
    srq.cq.wait(1)
    with pytest.raises(rp.PostError) as caught:
        srq.post_srq_ops(rp.TagDel(handle=handle))
    assert caught.value.reason == (
        f"{handle} is no longer on the list: its completion has been polled"
    )


def test_unchecked_handle_of_a_completed_receive_is_left_to_the_device(unchecked):
    """Its completion reports it."""
    srq = unchecked.srq(SRQType.TM)
    handle = unchecked.added().handle
    assert srq.cq is not None
    for wr_id, status in ((1, rp.WCStatus.SUCCESS), (2, rp.WCStatus.TM_ERR)):
        srq.post_srq_ops(rp.TagDel(wr_id=wr_id, handle=handle))
        assert [(wc.wr_id, wc.status) for wc in srq.cq.wait(1)] == [(wr_id, status)]


@pytest.mark.parametrize("checked", [True, False])
def test_srq_without_a_matching_list_refuses_every_operation_by_name(checked):
    with contextlib.ExitStack() as stack:
        soft = Soft(stack, checked=checked)
        srq, handle = soft.srq(), soft.added().handle
        for op in (rp.TagAdd(), rp.TagSync(), rp.TagDel(), rp.TagDel(handle=handle)):
            said = f"{srq} has no matching list; create it with srq_type=SRQType.TM"
            assert reason(srq.post_srq_ops, op) == said


@provokes("no_tag_handle")
@pytest.mark.parametrize("checked", [True, False])
def test_tag_handle_of_another_srq_is_refused(checked):
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as another:
        soft, other = Soft(stack, checked=checked), Soft(another)
        handle = other.added().handle
        said = reason(soft.srq(SRQType.TM).post_srq_ops, rp.TagDel(handle=handle))
        assert said == "TAG_DEL needs the handle of a TagAdd that was posted to this SRQ"


@provokes("bind_prepared")
@pytest.mark.parametrize("checked", [True, False])
def test_bind_cannot_be_prepared(checked):
    with contextlib.ExitStack() as stack:
        soft = Soft(stack, checked=checked)
        for bind in (soft.bind(), rp.BindMW()):
            with pytest.raises(rp.PostError) as caught:
                soft.qp().prepare([rp.LocalInv(), bind])
            error = caught.value
            assert (error.index, error.posted, error.errno) == (1, 0, errno.EINVAL)
            assert error.reason == (
                "a BIND_MW changes the window's key, so it cannot be posted again"
            )


@provokes("other_num_sge")
@pytest.mark.parametrize("count", [0, 1, 3])
def test_prepared_work_request_keeps_its_number_of_sges(soft, count):
    mr = soft.mr
    [item] = soft.qp().prepare(rp.Send([mr[:8], mr[8:16]]))
    with pytest.raises(ValueError, match=f"^{count} SGEs?, but it was prepared with 2$"):
        item.sg_list = [mr[:8]] * count
    item.sg_list = [mr[16:24], mr[24:32]]


@provokes("misaligned")
@pytest.mark.parametrize("kind", ATOMICS)
def test_prepared_atomic_stays_aligned(soft, unchecked, kind):
    [item] = soft.qp().prepare(kind(soft.mr[:8]))
    with pytest.raises(ValueError, match=r"^remote_addr=0xc is not a multiple of 8$"):
        item.remote_addr = 12
    assert item.remote_addr == 0
    item.remote_addr = 16
    item.compare_add = 12
    [item] = unchecked.qp().prepare(kind(unchecked.mr[:8]))
    item.remote_addr = 12
    [write] = soft.qp().prepare(rp.RdmaWrite(soft.mr[:8]))
    write.remote_addr = 12


def test_prepared_atomic_write_stays_aligned(soft):
    [item] = soft.qp().prepare(rp.AtomicWrite())
    with pytest.raises(ValueError, match=r"^remote_addr=0xc is not a multiple of 8$"):
        item.remote_addr = 12
    item.atomic_wr = 12
    assert (item.remote_addr, item.atomic_wr) == (0, 12)


@provokes("no_flush_type")
def test_prepared_flush_refuses_a_wrong_type(soft):
    [item] = soft.qp().prepare(soft.valid(Opcode.FLUSH))
    with pytest.raises(ValueError, match=r"^type=4 is not FlushType"):
        item.type = 4
    item.type, item.length = 3, 7
    assert (item.type, item.length) == (3, 7)


@provokes("no_flush_level")
def test_prepared_flush_refuses_a_wrong_level(soft):
    [item] = soft.qp().prepare(soft.valid(Opcode.FLUSH))
    with pytest.raises(ValueError, match=r"^level=2 is not FlushLevel"):
        item.level = 2
    item.level = 1
    assert item.level == 1


@provokes("invalid_qp_number")
@pytest.mark.parametrize("opcode", [Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO])
def test_prepared_datagram_refuses_a_qp_number_of_25_bits(soft, unchecked, opcode):
    [item] = soft.qp(UD).prepare(soft.valid(opcode, UD))
    for qpn in (1 << 24, U32):
        with pytest.raises(ValueError, match=f"^remote_qpn={qpn:#x} is not a QP number"):
            item.remote_qpn = qpn
    item.remote_qpn = 0xFFFFFE
    assert item.remote_qpn == 0xFFFFFE
    item.remote_qkey = 0xFFFFFFFE
    assert item.remote_qkey == 0xFFFFFFFE
    [item] = unchecked.qp(UD).prepare(unchecked.valid(opcode, UD))
    item.remote_qpn = 1 << 24
    [send] = soft.qp().prepare(rp.Send(soft.mr[:8]))
    send.remote_qpn = 1 << 24  # ignored where the QP is connected


@provokes("invalid_srq_number")
@pytest.mark.parametrize("opcode", TO_AN_SRQ)
def test_prepared_xrc_send_refuses_an_srq_number_of_25_bits(soft, unchecked, opcode):
    [item] = soft.qp(XRC).prepare(soft.valid(opcode, XRC))
    for srqn in (1 << 24, U32):
        with pytest.raises(ValueError, match=f"^remote_srqn={srqn:#x} is not an SRQ number"):
            item.remote_srqn = srqn
    item.remote_srqn = 0xFFFFFF
    assert item.remote_srqn == 0xFFFFFF
    [item] = unchecked.qp(XRC).prepare(unchecked.valid(opcode, XRC))
    item.remote_srqn = 1 << 24
    [other] = soft.qp().prepare(soft.valid(opcode))
    other.remote_srqn = 1 << 24  # ignored where the QP is not XRC


def test_only_the_srq_number_of_an_xrc_work_request_has_24_bits(soft):
    [write] = soft.qp(XRC).prepare(soft.valid(Opcode.RDMA_WRITE, XRC))
    write.rkey = U32
    assert write.rkey == U32


def test_srq_number_is_ignored_where_the_queue_pair_is_not_xrc(soft):
    soft.qp().post_send(soft.valid(Opcode.RDMA_WRITE, remote_srqn=1 << 24))
    assert soft.cq.wait(1)[0].status is rp.WCStatus.SUCCESS


@provokes("mss")
def test_prepared_tso_refuses_a_segment_size_of_0(soft):
    [item] = soft.qp(UD).prepare(soft.valid(Opcode.TSO, UD))
    before = item.mss
    with pytest.raises(ValueError, match=r"^mss=0 is not in 1\.\.65535$"):
        item.mss = 0
    assert item.mss == before


# ---- windows of type 1, which have a call of their own -------------------------------


def refused_bind(soft: Soft, mw: Any, mr: Any, *more: Any, **fields: Any) -> str:
    """Try to bind a type 1 window; return why the bind is refused."""
    qp = soft.qp(fields.pop("to", RC))
    key = mw.rkey if isinstance(mw, rp.MW) else None
    with pytest.raises(rp.PostError) as caught:
        qp.bind_mw(mw, mr, *more, **fields)
    error = caught.value
    assert (error.call, error.errno, error.posted) == ("ibv_bind_mw", errno.EINVAL, 0)
    assert qp.outstanding.send == 0
    assert key is None or mw.rkey == key
    return error.reason


@provokes("window_of_type_2")
def test_bind_mw_takes_windows_of_type_1_only(soft):
    mw = soft.window()
    assert refused_bind(soft, mw, soft.mr, soft.mr.addr, 64) == (
        f"{mw} is of type 2, but qp.bind_mw() binds windows of type 1; post a BindMW"
    )
    soft.qp().bind_mw(soft.window(MWType.TYPE_1), soft.mr, soft.mr.addr, 4096)


def test_bind_mw_has_the_rules_of_the_opcode_bind_mw(soft, unchecked):
    mw, mr = soft.window(MWType.TYPE_1), soft.mr
    solicited = refused_bind(soft, mw, mr, mr.addr, 8, send_flags=F.SOLICITED)
    assert solicited == "SOLICITED has no meaning on BIND_MW"
    for at, n in ((-1, 1), (0, 4097), (4096, 1)):
        said = refused_bind(soft, mw, mr, mr.addr + at, n)
        assert said == f"addr={mr.addr + at:#x} length={n} lies outside {mr} from {mr.addr:#x}"
    for wrong in ({"mw": None}, {"mr": None}):
        said = refused_bind(soft, **{"mw": mw, "mr": mr, "addr": 0, "length": 8, **wrong})
        assert said == "BIND_MW needs a memory window (mw=...) and a memory region (mr=...)"
    foreign = soft.window(MWType.TYPE_1, soft.other)
    said = refused_bind(soft, foreign, mr, mr.addr, 8)
    assert said == f"{foreign} does not belong to the queue pair's PD"
    said = refused_bind(soft, mw, soft.foreign, soft.foreign.addr, 8)
    assert said == f"{soft.foreign} does not belong to the queue pair's PD"
    no = "BIND_MW is not supported on {} QPs, only on RC, UC, XRC_SEND"
    for to in (UD, RAW):
        said = refused_bind(soft, mw, mr, mr.addr, 8, to=to)
        assert said == no.format(to.name)
    # Unchecked, this would crash: the call checks neither.
    mw, mr = unchecked.window(MWType.TYPE_1), unchecked.mr
    for to in (UD, RAW):
        said = refused_bind(unchecked, mw, mr, mr.addr, 8, to=to)
        assert said == no.format(to.name)
    for wrong in ({"mw": None}, {"mr": None}):
        said = refused_bind(unchecked, **{"mw": mw, "mr": mr, "addr": 0, "length": 8, **wrong})
        assert said == "BIND_MW needs a memory window (mw=...) and a memory region (mr=...)"
    away = soft.window(MWType.TYPE_1)
    said = refused_bind(unchecked, away, mr, mr.addr, 8)
    assert said == f"{away} does not belong to the queue pair's open device"


def test_length_of_0_unbinds_a_window_of_type_1(soft):
    """A region must be given, but need not permit the binding."""
    mw, unbindable = soft.window(MWType.TYPE_1), soft.region(64)
    said = f"{unbindable} was registered without MW_BIND"
    assert refused_bind(soft, mw, unbindable, unbindable.addr, 1) == said
    soft.qp().bind_mw(mw, unbindable, 0, 0)
    assert soft.cq.wait(1)[0].status is rp.WCStatus.SUCCESS


# ---- the rules themselves ------------------------------------------------------------


TEXTS = {
    name
    for name, method in vars(rules_module.Refusal).items()
    if inspect.isfunction(method) and not name.startswith("_")
}

SPECIAL = {"not_ready"}
"""The queue pair gives the reason, from its state."""


def test_every_posting_rule_has_a_case_that_breaks_it():
    """Shown here, by a program that ends with its text."""
    provoked = {case.rule for case in CASES} | PROVOKED.keys()
    assert provoked == TEXTS
    for test in PROVOKED.values():
        assert globals()[test.__name__] is test


def test_every_posting_rule_in_c_has_one_error_text_and_every_text_a_rule():
    """The names in the C sources, however they are written there."""
    sources = ROOT / "rdmapost" / "_c" / "posting"
    if not (sources / "rules.c").exists():
        pytest.skip("the C sources are not here")
    named: set[str] = set()
    for name in ("read_wr.c", "rules.c", "post.c", "prepared.c"):
        text = (sources / name).read_text()
        for pattern in (
            r"\b(?:rp_)?refuse\(&?post, (\"\w+\")",
            r"\brefuse_(?:with|for)\(post,((?:[^,;]|\n)*)",
            r"\brule = ((?:[^;]|\n)*);",
            r"\breturn (\"\w+\");",
        ):
            for found in re.findall(pattern, text):
                named |= set(re.findall(r'"(\w+)"', found))
    assert named - SPECIAL == TEXTS
    assert named >= SPECIAL

"""What may be posted where: the tables of the man pages, and every rule that refuses.

Each rule is provoked on soft0, with its text and with the nearest values that fit: alone, in a
list, and prepared, with the library's checks and without them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from support import ALL, ROOT

import rdmapost as rp
from rdmapost import (
    Access,
    DeviceCap,
    MWType,
    Opcode,
    OpsFlags,
    QPAttrMask,
    QPState,
    QPType,
    SendFlags,
    SRQType,
)
from rdmapost.posting import rules as rules_module
from rdmapost.posting.rules import (
    FLAGS_BY_OPCODE,
    OPCODES_BY_QP_TYPE,
    check_send_state,
    flags_allowed,
)
from rdmapost.standard.qp_states import FIELDS, OPTIONAL, REQUIRED, missing_attributes

F = SendFlags
SIGNALED_INLINE = F.SIGNALED | F.INLINE
U64, U32 = (1 << 64) - 1, (1 << 32) - 1

# As printed in the man page.
TABLE = """
OPCODE                      | UD | UC | RC | XRC_SEND | RAW_PACKET
IBV_WR_SEND                 | X  | X  | X  |    X     |     X
IBV_WR_SEND_WITH_IMM        | X  | X  | X  |    X     |
IBV_WR_RDMA_WRITE           |    | X  | X  |    X     |
IBV_WR_RDMA_WRITE_WITH_IMM  |    | X  | X  |    X     |
IBV_WR_RDMA_READ            |    |    | X  |    X     |
IBV_WR_ATOMIC_CMP_AND_SWP   |    |    | X  |    X     |
IBV_WR_ATOMIC_FETCH_AND_ADD |    |    | X  |    X     |
IBV_WR_LOCAL_INV            |    | X  | X  |    X     |
IBV_WR_BIND_MW              |    | X  | X  |    X     |
IBV_WR_SEND_WITH_INV        |    | X  | X  |    X     |
IBV_WR_TSO                  | X  |    |    |          |     X
"""


def table() -> dict[tuple[Opcode, QPType], bool]:
    head, *rows = [[cell.strip() for cell in line.split("|")] for line in TABLE.split("\n") if line]
    return {
        (Opcode[row[0].removeprefix("IBV_WR_")], QPType[column]): cell == "X"
        for row in rows
        for column, cell in zip(head[1:], row[1:], strict=True)
    }


WRS: dict[Opcode, Any] = {
    kind.opcode: kind
    for kind in (
        rp.Send,
        rp.SendWithImm,
        rp.SendWithInv,
        rp.RdmaWrite,
        rp.RdmaWriteWithImm,
        rp.RdmaRead,
        rp.AtomicCmpAndSwp,
        rp.AtomicFetchAndAdd,
        rp.LocalInv,
        rp.BindMW,
        rp.TSO,
    )
}
ATOMICS = (rp.AtomicCmpAndSwp, rp.AtomicFetchAndAdd)


class Soft:
    """soft0, with memory, and with queues that are made on first use.

    Queue pairs have 4 SGEs for sends and 2 for receives, 64 bytes of inline data and, where there
    is TSO, 32 of its header; SRQs have 2 SGEs, and a matching list holds 4 entries.

    Attributes:
        mr: a region of 4096 bytes with all access rights.
        closed: an SGE of a region that has been closed.
        other: another protection domain of the device, ``foreign`` a region of its.
        away: another open device.
    """

    def __init__(self, stack: contextlib.ExitStack, *, checked: bool = True) -> None:
        # Queues are closed before what their work requests name, whenever that was made.
        self.stack = stack.enter_context(contextlib.ExitStack())
        self.queues = stack.enter_context(contextlib.ExitStack())
        self.checked = checked
        self.context = self.stack.enter_context(rp.open_device("soft0"))
        self.pd = self.stack.enter_context(rp.PD(self.context))
        self.cq = self.stack.enter_context(rp.CQ(self.context, 256))
        self.mr = self.region(4096, ALL | Access.MW_BIND)
        self.other = self.stack.enter_context(rp.PD(self.context))
        self.foreign = self.stack.enter_context(rp.MR(self.other, 64, ALL | Access.MW_BIND))
        with rp.MR(self.pd, 64) as mr:
            self.closed = mr[:8]
        self._qps: dict[QPType, rp.QP] = {}
        self._srqs: dict[SRQType, rp.SRQ] = {}

    def region(self, memory: Any, access: int = ALL) -> rp.MR:
        return self.stack.enter_context(rp.MR(self.pd, memory, access))

    def window(self, mw_type: MWType = MWType.TYPE_2, pd: rp.PD | None = None) -> rp.MW:
        return self.stack.enter_context(rp.MW(pd or self.pd, mw_type))

    def away(self) -> rp.PD:
        """Return a protection domain of another open device."""
        context = self.stack.enter_context(rp.open_device("soft0"))
        return self.stack.enter_context(rp.PD(context))

    def qp(self, qp_type: QPType = QPType.RC) -> rp.QP:
        """Return the queue pair of a type, ready to send."""
        if qp_type not in self._qps:
            self._qps[qp_type] = self._make(qp_type)
        return self._qps[qp_type]

    def _make(self, qp_type: QPType) -> rp.QP:
        more = {"max_tso_header": 32} if qp_type in (QPType.UD, QPType.RAW_PACKET) else {}
        qp = rp.QP(
            self.pd,
            qp_type,
            self.cq,
            checked=self.checked,
            max_send_wr=8,
            max_recv_wr=8,
            max_send_sge=4,
            max_recv_sge=2,
            max_inline_data=64,
            **more,
        )
        self.queues.callback(qp.close)
        if qp_type is QPType.XRC_SEND:
            xrcd = self.stack.enter_context(rp.XRCD(self.context))
            target = rp.QP(self.pd, QPType.XRC_RECV, self.cq, xrcd=xrcd)
            self.queues.callback(target.close)
            qp.connect(target.endpoint(), rnr_retry=0)
            target.connect(qp.endpoint())
        elif qp_type in (QPType.UD, QPType.RAW_PACKET):
            qp.connect()
        else:
            qp.connect(qp.endpoint(), rnr_retry=0)
        return qp

    def srq(self, srq_type: SRQType = SRQType.BASIC) -> rp.SRQ:
        if srq_type not in self._srqs:
            more: Any = {}
            if srq_type is SRQType.TM:
                cq = self.stack.enter_context(rp.CQ(self.context, tm_info=True))
                more = {"cq": cq, "max_num_tags": 4, "max_ops": 8}
            srq = rp.SRQ(self.pd, 8, 2, srq_type=srq_type, checked=self.checked, **more)
            self.queues.callback(srq.close)
            self._srqs[srq_type] = srq
        return self._srqs[srq_type]

    @property
    def ud(self) -> dict[str, Any]:
        """The fields that say where a datagram goes."""
        if not hasattr(self, "_ah"):
            qp = self.qp(QPType.UD)
            self._ah = self.stack.enter_context(qp.ah_to(qp.endpoint()))
        return {"ah": self._ah, "remote_qpn": self.qp(QPType.UD).qp_num, "remote_qkey": 1}

    def valid(self, opcode: Opcode, qp_type: QPType = QPType.RC, **fields: Any) -> Any:
        """Make a work request that is valid on queue pairs of its type."""
        kind, needs = WRS[opcode], {}
        names = {field.name for field in dataclasses.fields(kind)}
        if "ah" in names and qp_type is QPType.UD:
            needs |= self.ud
        if "sg_list" in names:
            needs["sg_list"] = self.mr[:8]
        if "remote_addr" in names:
            needs |= {"remote_addr": self.mr.addr, "rkey": self.mr.rkey}
        if opcode is Opcode.TSO:
            needs |= {"mss": 100, "hdr": b"h"}
        if opcode is Opcode.BIND_MW:
            mw = self.window()
            needs |= {
                "mw": mw,
                "rkey": mw.next_rkey(),
                "mr": self.mr,
                "addr": self.mr.addr,
                "length": 64,
            }
        return kind(**{**needs, **fields})

    def bind(self, **fields: Any) -> Any:
        return self.valid(Opcode.BIND_MW, **fields)

    def tso(self, **fields: Any) -> Any:
        return self.valid(Opcode.TSO, QPType.UD, **fields)

    def added(self, srq: rp.SRQ | None = None) -> rp.TagAdd:
        """Post a tagged receive; return its work request."""
        add = rp.TagAdd(tag=1, flags=OpsFlags(0))
        (srq or self.srq(SRQType.TM)).post_srq_ops(add)
        return add


@pytest.fixture
def soft() -> Iterator[Soft]:
    with contextlib.ExitStack() as stack:
        yield Soft(stack)


@pytest.fixture
def unchecked() -> Iterator[Soft]:
    with contextlib.ExitStack() as stack:
        yield Soft(stack, checked=False)


def reason(post: Callable[[Any], None], wr: Any) -> str:
    """Post something invalid; return why."""
    with pytest.raises(rp.PostError) as caught:
        post(wr)
    return caught.value.reason


# ---- opcodes and flags ------------------------------------------------------------


@pytest.mark.parametrize(("opcode", "qp_type"), table())
def test_opcode_goes_where_the_man_page_says(soft, opcode, qp_type):
    post, wr = soft.qp(qp_type).post_send, soft.valid(opcode, qp_type)
    if table()[opcode, qp_type]:
        post(wr)
        assert soft.qp(qp_type).outstanding.send == 1
    else:
        refused = reason(post, wr)
        assert f"{opcode.name} is not an opcode of {qp_type.name} QPs" in refused
        for other in QPType:
            assert (other.name in refused.split("; ")[1].split(" have")[0].split(", ")) is (
                table().get((opcode, other), False)
            )


def test_table_has_no_other_rows_or_columns():
    assert {op for ops in OPCODES_BY_QP_TYPE.values() for op in ops} == {op for op, _ in table()}
    rest = set(QPType) - {qp_type for _, qp_type in table()}
    assert all(not OPCODES_BY_QP_TYPE[qp_type] for qp_type in rest)


@pytest.mark.parametrize("opcode", [Opcode.FLUSH, Opcode.ATOMIC_WRITE, Opcode.DRIVER1])
def test_opcodes_that_ibv_post_send_cannot_carry_have_no_class(soft, opcode):
    """And a work request cannot be given one: its class determines what is posted."""
    assert opcode not in WRS
    assert opcode not in {
        getattr(getattr(rp, name), "opcode", None) for name in rp.posting.wr.__all__
    }
    odd = type("Odd", (rp.LocalInv,), {"opcode": opcode, "__slots__": ()})
    soft.qp().post_send(odd())
    assert [wc.opcode for wc in soft.cq.wait(1)] in ([rp.WCOpcode.LOCAL_INV], [None])
    assert "expected SendWR" in reason(
        soft.qp().post_send, [type("Odder", (rp.SendWR,), {"opcode": opcode})()]
    )


SENDS = {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.SEND_WITH_INV}
WRITES = {Opcode.RDMA_WRITE, Opcode.RDMA_WRITE_WITH_IMM}


def flag_is_valid(flag: SendFlags, opcode: Opcode, qp_type: QPType, offloads: DeviceCap) -> bool:
    """The flags of ibv_post_send(3)."""
    # Neither XRC nor UC has a checksum offload in device_cap_flags.
    cap = {
        QPType.RC: DeviceCap.RC_IP_CSUM,
        QPType.UD: DeviceCap.UD_IP_CSUM,
        QPType.RAW_PACKET: DeviceCap.RAW_IP_CSUM,
    }.get(qp_type, DeviceCap(0))
    return {
        F.FENCE: qp_type in (QPType.RC, QPType.XRC_SEND),
        F.SIGNALED: True,
        F.SOLICITED: opcode in SENDS | {Opcode.RDMA_WRITE_WITH_IMM},
        F.INLINE: opcode in SENDS | WRITES,
        F.IP_CSUM: opcode in {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO}
        and bool(offloads & cap),
    }[flag]


FLAGS = [(op, t, flag) for (op, t), ok in table().items() if ok for flag in SendFlags]


@pytest.mark.parametrize(("opcode", "qp_type", "flag"), FLAGS)
def test_flag_goes_where_the_man_page_says(soft, opcode, qp_type, flag):
    post, wr = soft.qp(qp_type).post_send, soft.valid(opcode, qp_type, send_flags=flag)
    offloads = DeviceCap(soft.context.attr.device_cap_flags)
    if flag_is_valid(flag, opcode, qp_type, offloads):
        post(wr)
    else:
        refused = reason(post, wr)
        assert flag.name in refused
        assert opcode.name in refused or qp_type.name in refused


@pytest.mark.parametrize(("opcode", "qp_type", "flag"), FLAGS)
def test_flags_follow_the_offloads_of_the_device(opcode, qp_type, flag):
    for offloads in (~DeviceCap(0), DeviceCap(0)):
        allowed = bool(flags_allowed(qp_type, opcode, offloads) & flag)
        assert allowed is flag_is_valid(flag, opcode, qp_type, offloads)


@pytest.mark.parametrize(
    ("qp_type", "cap"),
    [
        (QPType.UD, DeviceCap.UD_IP_CSUM),
        (QPType.RAW_PACKET, DeviceCap.RAW_IP_CSUM),
        (QPType.RC, DeviceCap.RC_IP_CSUM),
    ],
)
def test_checksum_offload_needs_the_capability_of_its_qp_type(soft, qp_type, cap):
    assert flags_allowed(qp_type, Opcode.SEND, cap) & F.IP_CSUM
    assert not flags_allowed(qp_type, Opcode.SEND, ~cap) & F.IP_CSUM
    post = soft.qp(qp_type).post_send
    wr = soft.valid(Opcode.SEND, qp_type, send_flags=F.IP_CSUM)
    if soft.context.attr.device_cap_flags & cap:
        post(wr)
    else:
        said = f"IP_CSUM: the device has no such offload on {qp_type.name} QPs"
        assert reason(post, wr) == said


@pytest.mark.parametrize("flags", [1 << 5, 1 << 31, 33])
def test_bits_that_are_no_flag_are_refused(soft, flags):
    said = f"send_flags={flags:#x} has bits that are not send flags"
    assert reason(soft.qp().post_send, rp.Send(send_flags=flags)) == said


def test_flags_of_every_opcode_are_known():
    assert FLAGS_BY_OPCODE.keys() == WRS.keys()


# ---- every rule --------------------------------------------------------------------


def outside(soft: Soft, addr: int, length: int) -> str:
    return (
        f"SGE(addr={addr:#x}, length={length}, lkey={soft.mr.lkey:#x}) lies outside "
        f"MR of 4096 bytes (lkey {soft.mr.lkey:#x})"
    )


def part(soft: Soft, start: int, length: int, mr: rp.MR | None = None) -> rp.SGE:
    """Make an SGE that need not lie in its region."""
    mr = mr or soft.mr
    return rp.SGE(mr.addr + start, length, mr.lkey, mr)


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
        says: the text, or what makes it from the work request.
        fits: makes what is beside it, and is accepted where there are checks.
        where: whether it is refused with checks, without, or both.
        alone: whether it is also refused where it is no list.
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
        "RDMA_READ is not an opcode of UC QPs; RC, XRC_SEND have it",
    ),
    Case(
        "wrong_opcode",
        RC,
        lambda s: s.tso(),
        "TSO is not an opcode of RC QPs; RAW_PACKET, UD have it",
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
            "3 SGEs, but this queue was created with max_recv_sge=2",
            lambda s: [rp.RecvWR([s.mr[:8]] * 2)],
        )
        for to in ("recv", "srq")
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
        "INLINE reads the buffer in this process, and this SGE is only numbers; "
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
        "INLINE reads the buffer in this process, and addresses of a ZERO_BASED region count "
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
            "foreign_region",
            to,
            lambda s, kind=kind: kind(sg_list=[s.mr[:8], s.foreign[:8]]),
            lambda s, wr: f"{s.foreign} belongs to another PD than the queue",
        )
        for to, kind in ((RC, rp.Send), ("recv", rp.RecvWR), ("srq", rp.RecvWR), ("ops", rp.TagAdd))
    ),
    *(
        Case(
            "outside",
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
            "outside",
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
            "outside",
            RC,
            lambda s, start=start, n=n: inline(
                (sge := rp.SGE.from_buffer(b"12345678"))._replace(addr=sge.addr + start, length=n)
            ),
            lambda s, wr: f"{wr.sg_list[0]} lies outside buffer of 8 bytes",
            where="both",
        )
        for start, n in ((0, 9), (-1, 8), (1, 8), (8, 1))
    ),
    Case(
        "too_long",
        UD,
        lambda s: rp.Send([s.mr[:4096], s.mr[:1]], **s.ud),
        "4097 bytes, but a message on this UD QP holds at most 4096",
        # The whole of a TSO may be longer: its segments are the messages.
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
            "no_qp_number",
            UD,
            lambda s, op=op, qpn=qpn: s.valid(op, UD, remote_qpn=qpn),
            f"remote_qpn={qpn:#x} is not a QP number, which has 24 bits",
            lambda s, op=op: [s.valid(op, UD, remote_qpn=0xFFFFFE)],
        )
        for op in (Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO)
        for qpn in (1 << 24, U32)
    ),
    # Drivers read it from every work request of a UD queue pair, whatever the opcode.
    *(
        Case(
            "no_address_handle",
            UD,
            lambda s, op=op: s.valid(op),
            "a UD work request needs an address handle (ah=...)",
            where="unchecked",
        )
        for op in sorted(WRS.keys() - {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO})
    ),
    Case(
        "foreign_resource",
        UD,
        lambda s: rp.Send(ah=s.stack.enter_context(rp.AH(s.other, s.ud["ah"].attr))),
        lambda s, wr: f"{wr.ah} belongs to another PD than the queue pair",
    ),
    Case(
        "foreign_resource",
        RC,
        lambda s: s.bind(mw=s.window(pd=s.other)),
        lambda s, wr: f"{wr.mw} belongs to another PD than the queue pair",
    ),
    Case(
        "foreign_resource",
        RC,
        lambda s: s.bind(mr=s.foreign),
        lambda s, wr: f"{wr.mr} belongs to another PD than the queue pair",
    ),
    Case(
        "foreign_device",
        UD,
        lambda s: rp.Send(ah=s.stack.enter_context(rp.AH(s.away(), s.ud["ah"].attr))),
        lambda s, wr: f"{wr.ah} belongs to another open device than the queue pair",
        where="unchecked",
    ),
    Case(
        "foreign_device",
        RC,
        lambda s: s.bind(mw=s.window(pd=s.away())),
        lambda s, wr: f"{wr.mw} belongs to another open device than the queue pair",
        where="unchecked",
    ),
    Case(
        "foreign_device",
        RC,
        lambda s: s.bind(mr=s.stack.enter_context(rp.MR(s.away(), 64))),
        lambda s, wr: f"{wr.mr} belongs to another open device than the queue pair",
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
            f"{wr.mw} is of type 1, and a BIND_MW work request binds windows of type "
            "2; qp.bind_mw() binds this one"
        ),
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
    *(
        Case(
            "bind_outside",
            RC,
            lambda s, at=at, n=n: s.bind(addr=s.mr.addr + at, length=n),
            lambda s, wr, n=n: f"addr={wr.addr:#x} length={n} lies outside {s.mr}",
            lambda s: [
                s.bind(addr=s.mr.addr + at, length=n) for at, n in ((0, 4096), (4095, 1), (0, 1))
            ],
        )
        for at, n in ((-1, 1), (0, 4097), (4096, 1), (1, 4096), (0, U64), (8, U64 - 7))
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
        "TAG_DEL needs the handle that a TagAdd of this SRQ was given",
        lambda s: [rp.TagDel(handle=s.added().handle)],
        where="both",
    ),
    Case(
        "not_a_tag_handle",
        "ops",
        lambda s: rp.TagDel(handle=MISMADE),
        "TAG_DEL needs the handle that a TagAdd of this SRQ was given",
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
            f"tag={tag:#x} has bits outside of mask={mask:#x}, so no message can match: "
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
def test_each_rule_refuses_its_case(soft, case):
    refuses(soft, case)


@each(lambda case: case.where != "checked")
def test_rule_about_what_harms_the_process_refuses_unchecked_too(unchecked, case):
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
def test_case_next_to_each_refused_one_is_posted(soft, case):
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
        # If it can be read, it is not prepared at all.
        text = "a BIND_MW changes the window's key, so it cannot be posted again"
    with pytest.raises(rp.PostError) as caught:
        preparer(soft, case.to)([good, bad, good])
    error = caught.value
    assert (error.reason, error.errno) == (text, errno.EINVAL)
    assert (error.index, error.posted, error.wr) == (1, 0, bad)
    assert outstanding() == 0


@each(lambda case: case.where != "unchecked" and can_be_prepared(case))
def test_rule_refuses_a_prepared_list(soft, case):
    refuses_to_prepare(soft, case)


@each(lambda case: case.where != "checked" and can_be_prepared(case))
def test_rule_refuses_an_unchecked_prepared_list(unchecked, case):
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
    "foreign_region",
    "outside",
    "too_long",
    "not_writable",
    "atomic_sge",
}


@each(lambda case: case.where != "unchecked" and can_be_prepared(case) and case.rule in BY_SGES)
def test_rule_about_sges_refuses_those_of_a_prepared_work_request(soft, case):
    """With the same text; the list keeps what it had."""
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
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
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


_UNSIGNALED = "; if none of them is SIGNALED, no slot ever comes free"


@provokes("full")
@pytest.mark.parametrize("to", [RC, "recv", "srq", "ops"])
def test_full_queue_takes_no_more(soft, to):
    """ENOMEM, as the man pages have it, and no other refusal has that errno."""
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
        "post it in parts, or create the queue deeper"
    )
    assert outstanding() == room
    for wrs in (good, [good], [good] * 3):
        with pytest.raises(rp.PostError) as caught:
            post(wrs)
        error = caught.value
        assert (error.errno, error.index, error.posted) == (errno.ENOMEM, 0, 0)
        assert error.reason == (
            f"the queue is full: {name}={room} and {room} work requests are outstanding; "
            "poll the CQ, or create the queue deeper" + (_UNSIGNALED if to == RC else "")
        )
    assert outstanding() == room


@provokes("full")
def test_prepared_list_goes_in_whole_or_not_at_all(soft):
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
        f"list has {room} more; poll the CQ, or create the queue deeper{_UNSIGNALED}"
    )
    assert qp.outstanding.send == 1
    with pytest.raises(rp.PostError, match="a list of 9 cannot fit"):
        qp.prepare([rp.LocalInv()] * (room + 1))


def test_unchecked_full_queue_is_left_to_the_device(unchecked):
    """In its own words, when it decides, and also ENOMEM."""
    qp = unchecked.qp()
    qp.post_recv([rp.RecvWR()] * qp.max_recv_wr)
    with pytest.raises(rp.PostError) as caught:
        qp.post_recv(rp.RecvWR())
    assert caught.value.errno == errno.ENOMEM
    assert "soft0 says that the queue is full" in caught.value.reason


@provokes("list_full")
def test_matching_list_takes_no_more_than_it_has_entries(soft):
    srq = soft.srq(SRQType.TM)
    with pytest.raises(rp.PostError) as caught:
        srq.post_srq_ops([rp.TagAdd(tag=i, flags=0) for i in range(6)])
    error = caught.value
    assert (error.index, error.posted, error.errno) == (4, 4, errno.EINVAL)
    assert error.reason == (
        "the matching list is full: max_num_tags=4 and as many tagged receives are outstanding; "
        "poll the CQ, remove some, or create the SRQ with more"
    )
    assert (srq.outstanding_tags, srq.outstanding_ops) == (4, 4)
    # Anything but a receive is still posted.
    srq.post_srq_ops(rp.TagSync())


@provokes("tag_not_listed")
def test_receive_that_is_done_is_not_on_the_list(soft):
    srq = soft.srq(SRQType.TM)
    handle = soft.added().handle
    srq.post_srq_ops(rp.TagDel(handle=handle))
    assert srq.cq is not None
    srq.cq.wait(1)
    with pytest.raises(rp.PostError) as caught:
        srq.post_srq_ops(rp.TagDel(handle=handle))
    assert caught.value.reason == (
        f"{handle} is not on the list any more: its completion has been polled"
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
        assert said == "TAG_DEL needs the handle that a TagAdd of this SRQ was given"


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


@provokes("no_qp_number")
@pytest.mark.parametrize("opcode", [Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO])
def test_prepared_datagram_keeps_a_qp_number(soft, unchecked, opcode):
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


@provokes("mss")
def test_prepared_tso_keeps_a_maximum_segment_size(soft):
    [item] = soft.qp(UD).prepare(soft.valid(Opcode.TSO, UD))
    before = item.mss
    with pytest.raises(ValueError, match=r"^mss=0 is not in 1\.\.65535$"):
        item.mss = 0
    assert item.mss == before


# ---- windows of type 1, which have a call of their own -------------------------------


def refused_bind(soft: Soft, mw: Any, mr: Any, *more: Any, **fields: Any) -> str:
    """Try to bind a type 1 window; return why it cannot be."""
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
def test_call_that_binds_takes_windows_of_type_1(soft):
    mw = soft.window()
    assert refused_bind(soft, mw, soft.mr, soft.mr.addr, 64) == (
        f"{mw} is of type 2; post a BindMW for it, qp.bind_mw() binds windows of type 1"
    )
    soft.qp().bind_mw(soft.window(MWType.TYPE_1), soft.mr, soft.mr.addr, 4096)


def test_call_that_binds_has_the_rules_of_its_opcode(soft, unchecked):
    mw, mr = soft.window(MWType.TYPE_1), soft.mr
    solicited = refused_bind(soft, mw, mr, mr.addr, 8, send_flags=F.SOLICITED)
    assert solicited == "SOLICITED has no meaning on BIND_MW"
    for at, n in ((-1, 1), (0, 4097), (4096, 1)):
        said = refused_bind(soft, mw, mr, mr.addr + at, n)
        assert said == f"addr={mr.addr + at:#x} length={n} lies outside {mr}"
    for wrong in ({"mw": None}, {"mr": None}):
        said = refused_bind(soft, **{"mw": mw, "mr": mr, "addr": 0, "length": 8, **wrong})
        assert said == "BIND_MW needs a memory window (mw=...) and a memory region (mr=...)"
    foreign = soft.window(MWType.TYPE_1, soft.other)
    said = refused_bind(soft, foreign, mr, mr.addr, 8)
    assert said == f"{foreign} belongs to another PD than the queue pair"
    said = refused_bind(soft, mw, soft.foreign, soft.foreign.addr, 8)
    assert said == f"{soft.foreign} belongs to another PD than the queue pair"
    no = "BIND_MW is not an opcode of UD QPs; RC, UC, XRC_SEND have it"
    assert refused_bind(soft, mw, mr, mr.addr, 8, to=UD) == no
    # Unchecked, this would crash: the call checks neither.
    mw, mr = unchecked.window(MWType.TYPE_1), unchecked.mr
    assert refused_bind(unchecked, mw, mr, mr.addr, 8, to=UD) == no
    for wrong in ({"mw": None}, {"mr": None}):
        said = refused_bind(unchecked, **{"mw": mw, "mr": mr, "addr": 0, "length": 8, **wrong})
        assert said == "BIND_MW needs a memory window (mw=...) and a memory region (mr=...)"
    away = soft.window(MWType.TYPE_1)
    said = refused_bind(unchecked, away, mr, mr.addr, 8)
    assert said == f"{away} belongs to another open device than the queue pair"


def test_length_of_0_unbinds_a_window_of_type_1(soft):
    """The region need only be given: it need not permit the binding."""
    mw, plain = soft.window(MWType.TYPE_1), soft.region(64)
    said = f"{plain} was registered without MW_BIND"
    assert refused_bind(soft, mw, plain, plain.addr, 1) == said
    soft.qp().bind_mw(mw, plain, 0, 0)
    assert soft.cq.wait(1)[0].status is rp.WCStatus.SUCCESS


def test_each_rule_of_bind_info_refuses_its_case(soft):
    """The statements about struct ibv_mw_bind_info, one by one."""
    post = soft.qp().post_send
    for wrong in (
        soft.bind(mw=None),
        soft.bind(mr=None),
        soft.bind(mw=soft.window(MWType.TYPE_1)),
        soft.bind(mr=soft.foreign),
        soft.bind(mr=soft.region(64)),
        soft.bind(length=4097),
    ):
        with pytest.raises(rp.PostError):
            post(wrong)
    post(soft.bind())


# ---- rules that others name --------------------------------------------------------


def test_too_many_sges_are_counted(soft):
    text = "5 SGEs, but this queue was created with max_send_sge=4"
    assert reason(soft.qp().post_send, rp.Send([soft.mr[:8]] * 5)) == text
    text = "3 SGEs, but this queue was created with max_recv_sge=2"
    assert reason(soft.qp().post_recv, rp.RecvWR([soft.mr[:8]] * 3)) == text


@pytest.mark.parametrize(("start", "length"), [(-1, 8), (4089, 8), (4096, 1), (0, 4097)])
def test_sge_outside_its_region_is_refused(soft, start, length):
    wrong = part(soft, start, length)
    text = outside(soft, soft.mr.addr + start, length)
    assert reason(soft.qp().post_send, rp.Send(wrong)) == text
    assert reason(soft.qp().post_recv, rp.RecvWR(wrong)) == text


def test_inline_needs_no_registration(soft):
    data = rp.SGE.from_buffer(b"x" * 64)
    soft.qp().post_send(rp.Send(data, send_flags=SIGNALED_INLINE))
    assert "can only be sent with SendFlags.INLINE" in reason(soft.qp().post_send, rp.Send(data))


def test_unchecked_inline_data_of_up_to_32_bits_is_left_to_the_device(unchecked):
    memory = unchecked.region(BIG)
    said = reason(unchecked.qp().post_send, inline(memory[:], memory[1:]))
    assert "soft0" in said
    assert "2^32" not in said


def test_inline_by_number_is_refused(soft):
    """It would read arbitrary memory of this process."""
    said = reason(soft.qp().post_send, inline(rp.SGE(5, 5, 5)))
    assert "SGE.from_buffer" in said


@pytest.mark.parametrize("kind", ATOMICS)
def test_atomic_takes_8_aligned_bytes(soft, kind):
    post = soft.qp().post_send
    assert "one SGE of 8 bytes" in reason(post, kind(soft.mr[:4]))
    assert "not a multiple of 8" in reason(post, kind(soft.mr[:8], remote_addr=4))
    post(kind(soft.mr[:8], remote_addr=16))


def test_address_handle_of_another_pd_is_refused(soft):
    ah = soft.stack.enter_context(rp.AH(soft.other, soft.ud["ah"].attr))
    assert "another PD" in reason(soft.qp(UD).post_send, rp.Send(ah=ah))


@pytest.mark.parametrize("mss", [0, -1, 1 << 16])
@pytest.mark.parametrize("qp_type", [UD, RAW])
def test_tso_needs_a_segment_size(soft, qp_type, mss):
    said = reason(soft.qp(qp_type).post_send, soft.valid(Opcode.TSO, qp_type, mss=mss))
    assert said == ("mss=-1 is not in 1..65535" if mss < 0 else f"mss={mss} is not in 1..65535")


def test_groups_have_the_number_of_the_specification():
    """The highest of 24 bits; on soft0 alone, any other would do."""
    assert rules_module.MULTICAST_QPN == rp.MULTICAST_QPN == 0xFFFFFF


# ---- the rules themselves ------------------------------------------------------------

TEXTS = {
    name
    for name, method in vars(rules_module.Refusal).items()
    if inspect.isfunction(method) and not name.startswith("_")
}
SPECIAL = {"not_ready"}
"""The queue pair gives the reason, from its state."""


def test_every_rule_is_provoked():
    """Shown here, by a program that ends with its text."""
    provoked = {case.rule for case in CASES} | PROVOKED.keys()
    assert provoked == TEXTS
    for test in PROVOKED.values():
        assert globals()[test.__name__] is test


def test_every_rule_of_c_has_a_text_and_every_text_its_rule():
    """The names in the C sources, however they are written there."""
    sources = ROOT / "rdmapost" / "_c" / "posting"
    if not (sources / "rules.c").exists():
        pytest.skip("the C sources are not here")
    named: set[str] = set()
    for name in ("read.c", "rules.c", "post.c", "prepared.c"):
        text = (sources / name).read_text()
        for pattern in (
            r"\b(?:rp_)?refuse\(&?post, (\"\w+\")",
            r"\bno_(?:because_)?of\(post,((?:[^,;]|\n)*)",
            r"\brule = ((?:[^;]|\n)*);",
            r"\breturn (\"\w+\");",
        ):
            for found in re.findall(pattern, text):
                named |= set(re.findall(r'"(\w+)"', found))
    assert named - SPECIAL == TEXTS
    assert named >= SPECIAL


@pytest.mark.parametrize("checked", [True, False])
def test_closed_prepared_list_raises_closed_error(checked):
    with contextlib.ExitStack() as stack:
        batch = Soft(stack, checked=checked).qp().prepare([rp.LocalInv()] * 3)
        batch.close()
        with pytest.raises(rp.ClosedError, match=r"^the prepared list of 3 is closed$"):
            batch.post()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (QPState.RESET, "the QP is in RESET; bring it to RTS first (qp.connect)"),
        (QPState.INIT, "the QP is in INIT; bring it to RTS first (qp.connect)"),
        (QPState.RTR, "the QP is in RTR, ready to receive only; bring it to RTS first (qp.to_rts)"),
    ],
)
def test_queue_pair_that_is_not_ready_takes_nothing(soft, state, said):
    qp = soft.queues.enter_context(rp.QP(soft.pd, RC, soft.cq))
    batch = qp.prepare(rp.LocalInv())
    if state is not QPState.RESET:
        qp.to_init()
    if state is QPState.RTR:
        qp.to_rtr(qp.endpoint())
    for post in (lambda: qp.post_send(rp.LocalInv()), batch.post):
        with pytest.raises(rp.PostError) as caught:
            post()
        assert (caught.value.reason, caught.value.errno) == (said, errno.EINVAL)
        assert (caught.value.index, caught.value.posted) == (0, 0)
    if state is QPState.RESET:
        said = "the QP is in RESET; receives can be posted from INIT on (qp.to_init)"
        assert reason(qp.post_recv, rp.RecvWR()) == said
    else:
        qp.post_recv(rp.RecvWR())
    batch.close()


# ---- fields -----------------------------------------------------------------------

COMMON = {"wr_id", "send_flags"}
MESSAGE = COMMON | {"sg_list", "ah", "remote_qpn", "remote_qkey", "remote_srqn"}
REMOTE = COMMON | {"sg_list", "remote_addr", "rkey", "remote_srqn"}
FIELD_NAMES = {
    rp.Send: MESSAGE,
    rp.SendWithImm: MESSAGE | {"imm_data"},
    rp.SendWithInv: COMMON | {"sg_list", "invalidate_rkey", "remote_srqn"},
    rp.RdmaWrite: REMOTE,
    rp.RdmaWriteWithImm: REMOTE | {"imm_data"},
    rp.RdmaRead: REMOTE,
    rp.AtomicCmpAndSwp: REMOTE | {"compare_add", "swap"},
    rp.AtomicFetchAndAdd: REMOTE | {"compare_add"},
    rp.LocalInv: COMMON | {"invalidate_rkey"},
    rp.BindMW: COMMON | {"mw", "rkey", "mr", "addr", "length", "mw_access_flags"},
    rp.TSO: COMMON | {"sg_list", "hdr", "mss", "ah", "remote_qpn", "remote_qkey"},
    rp.RecvWR: {"wr_id", "sg_list"},
    rp.TagAdd: {
        "wr_id",
        "flags",
        "unexpected_cnt",
        "recv_wr_id",
        "sg_list",
        "tag",
        "mask",
        "handle",
    },
    rp.TagDel: {"wr_id", "flags", "unexpected_cnt", "handle"},
    rp.TagSync: {"wr_id", "flags", "unexpected_cnt"},
}


@pytest.mark.parametrize("kind", FIELD_NAMES)
def test_work_request_has_the_fields_that_its_opcode_uses(kind):
    """A field that the opcode does not have can neither be given nor set."""
    fields = {field.name for field in dataclasses.fields(kind)}
    assert fields == FIELD_NAMES[kind]
    wr = kind()
    for name in set().union(*FIELD_NAMES.values()) - fields:
        with pytest.raises(TypeError, match=name):
            kind(**{name: 0})
        with pytest.raises(AttributeError):
            setattr(wr, name, 0)


@pytest.mark.parametrize("kind", WRS.values())
def test_send_work_request_is_signaled_by_default(kind):
    assert kind().send_flags == SendFlags.SIGNALED
    assert kind(send_flags=0).send_flags == 0
    assert isinstance(kind(), rp.SendWR)


# ---- states -----------------------------------------------------------------------


@pytest.mark.parametrize("state", QPState)
def test_sends_are_refused_before_rts(state):
    refused = check_send_state(state)
    if state in (QPState.RESET, QPState.INIT, QPState.RTR):
        assert f"the QP is in {state.name}" in str(refused)
        assert "RTS" in str(refused)
    else:
        assert refused is None


# The tables of ibv_modify_qp(3); every step also takes IBV_QP_STATE.
MODIFY = {
    QPType.UD: ("PKEY_INDEX PORT QKEY", "", "SQ_PSN"),
    QPType.UC: ("PKEY_INDEX PORT ACCESS_FLAGS", "AV PATH_MTU DEST_QPN RQ_PSN", "SQ_PSN"),
    QPType.RC: (
        "PKEY_INDEX PORT ACCESS_FLAGS",
        "AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER",
        "SQ_PSN MAX_QP_RD_ATOMIC RETRY_CNT RNR_RETRY TIMEOUT",
    ),
    QPType.RAW_PACKET: ("PORT", "", ""),
}
WAY_UP = [QPState.RESET, QPState.INIT, QPState.RTR, QPState.RTS]


@pytest.mark.parametrize("qp_type", MODIFY)
@pytest.mark.parametrize("step", range(3))
def test_step_needs_the_attributes_of_the_man_page(qp_type, step):
    start, end = itertools.pairwise(WAY_UP[step : step + 2]).__next__()
    names = MODIFY[qp_type][step].split()
    full = QPAttrMask(0)
    for name in names:
        full |= QPAttrMask[name]
    assert REQUIRED[qp_type][start, end] == full
    assert missing_attributes(qp_type, start, end, full) is None
    for name in names:
        refused = missing_attributes(qp_type, start, end, full & ~QPAttrMask[name])
        field = next(field for field, bit in FIELDS.items() if bit is QPAttrMask[name])
        assert f"{start.name} to {end.name}" in str(refused)
        assert f"also needs {field} " in str(refused)


@pytest.mark.parametrize("qp_type", REQUIRED)
def test_every_state_can_be_left_for_reset_and_err(qp_type):
    for state in QPState:
        for end in (QPState.RESET, QPState.ERR):
            assert missing_attributes(qp_type, state, end, QPAttrMask(0)) is None


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (QPState.RESET, QPState.RTR),
        (QPState.RESET, QPState.RTS),
        (QPState.INIT, QPState.RTS),
        (QPState.RTR, QPState.INIT),
        (QPState.RTS, QPState.RTR),
        (QPState.ERR, QPState.RTS),
        (QPState.SQE, QPState.RTR),
        (QPState.RTS, QPState.SQE),
    ],
)
def test_step_that_does_not_exist_names_those_that_do(start, end):
    refused = str(missing_attributes(QPType.RC, start, end, ~QPAttrMask(0)))
    assert f"cannot go from {start.name} to {end.name}" in refused
    assert "RESET" in refused.split("can go to")[1]


def test_optional_attributes_belong_to_steps_that_exist():
    for qp_type, steps in OPTIONAL.items():
        for step, mask in steps.items():
            assert step in REQUIRED[qp_type]
            assert not mask & REQUIRED[qp_type][step]


def test_fields_are_those_of_the_struct():
    """Every name that modify() accepts is a field of struct ibv_qp_attr."""
    from rdmapost._binding import ffi

    struct = {name for name, _ in ffi.typeof("struct ibv_qp_attr").fields}
    assert FIELDS.keys() <= struct
    several = {bit for bit in FIELDS.values() if list(FIELDS.values()).count(bit) > 1}
    assert several <= {QPAttrMask.ALT_PATH}


def test_error_names_the_step_that_continues():
    assert "qp.connect" in str(check_send_state(QPState.RESET))
    assert "qp.connect" in str(check_send_state(QPState.INIT))
    assert "qp.to_rts" in str(check_send_state(QPState.RTR))
    for state in (QPState.RTS, QPState.SQD, QPState.SQE, QPState.ERR):
        assert check_send_state(state) is None

"""soft0 with queues of every type, and a valid work request for each opcode."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rdmapost as rp
from rdmapost import Access, MWType, Opcode, OpsFlags, QPType, SendOps, SRQType
from support import ALL
from support.wr_classes import SEND_CLASSES

WRS: dict[Opcode, Any] = {kind.opcode: kind for kind in SEND_CLASSES}


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
        # Close queues before the resources that their work requests name, whichever came first.
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
        more: dict[str, Any] = {}
        if qp_type in (QPType.UD, QPType.RAW_PACKET):
            more = {"max_tso_header": 32}
        if qp_type in (QPType.RC, QPType.XRC_SEND):
            more = {"send_ops_flags": SendOps.FLUSH | SendOps.ATOMIC_WRITE}
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
            target = rp.QP(None, QPType.XRC_RECV, xrcd=xrcd)
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
                cq = self.stack.enter_context(
                    rp.CQ(self.context, wc_flags=rp.WCExFlags.WITH_TM_INFO)
                )
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


def outside(soft: Soft, addr: int, length: int) -> str:
    return (
        f"SGE(addr={addr:#x}, length={length}, lkey={soft.mr.lkey:#x}) lies outside "
        f"MR of 4096 bytes (lkey {soft.mr.lkey:#x}) from {soft.mr.addr:#x}"
    )


def part(soft: Soft, start: int, length: int, mr: rp.MR | None = None) -> rp.SGE:
    """Make an SGE that need not lie in its region."""
    mr = mr or soft.mr
    return rp.SGE(mr.addr + start, length, mr.lkey, mr)

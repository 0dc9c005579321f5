"""The short way for a work request that is plainly right.

Most work requests have one SGE of a live region, and flags that their opcode
takes.  They are recognised here with a few comparisons, and packed at once; the
bounds are compared where the record is written, in C.
Nothing is refused here: what is not plainly right goes the long way, which
looks at everything and can say what is wrong (``rules``, ``packing``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ._binding import door
from .address import AH
from .enums import Opcode, QPType, SendFlags
from .memory import MR
from .rules import Limits
from .wr import SGE, RdmaRead, RdmaWrite, RdmaWriteWithImm, RecvWR, Send, SendWithImm

__all__ = ["Plain", "plain_receives", "plain_sends"]

Plain = Callable[[int, int, Any], "tuple[Any, ...] | None"]
"""Write a work request at an address, under a ticket; return what it refers to, or None where it
is not plain.  May raise what a wrong value in a field makes it raise."""

_MASK64 = (1 << 64) - 1
_FLAGS = tuple(int(flag) for flag in SendFlags)


def _combinations(allowed: int) -> frozenset[int]:
    """Return all values of the flags that are allowed, but for those with INLINE."""
    # Looking a value up is quicker than arithmetic on a Flag.
    found = {0}
    for flag in _FLAGS:
        if flag & allowed & ~SendFlags.INLINE:
            found |= {value | flag for value in found}
    return frozenset(found)


def _only(sg_list: Any) -> Any:
    """Return the SGE of a sequence of one, else None."""
    return sg_list[0] if type(sg_list) in (list, tuple) and len(sg_list) == 1 else None


def _message(limits: Limits, checked: bool, opcode: Opcode, flags: frozenset[int]) -> Plain:
    put, code, pd, most = door.put_message, int(opcode), limits.pd, limits.max_msg_size
    datagram = limits.qp_type is QPType.UD
    has_imm = opcode is Opcode.SEND_WITH_IMM

    def pack(at: int, ticket: int, wr: Any) -> Any:
        sge, ah = wr.sg_list, wr.ah
        if type(sge) is not SGE and type(sge := _only(sge)) is not SGE:
            return None
        addr, length, lkey, owner = sge
        start, end = 0, _MASK64
        if checked:
            if type(owner) is not MR or owner.pd is not pd or owner._handle is None:
                return None
            start, end = owner.addr, owner.end
        elif owner is not None and (type(owner) is not MR or owner._handle is None):
            return None
        if datagram:
            if type(ah) is not AH or ah._handle is None or ah.pd is not pd:
                return None
        elif ah is not None:
            return None
        if wr.send_flags in flags and put(
            at, ticket, code, wr.send_flags, wr.imm_data if has_imm else 0,
            ah.address if datagram else 0, wr.remote_qpn, wr.remote_qkey, wr.remote_srqn,
            addr, length, lkey, start, end, most,
        ):  # fmt: skip
            return (sge, ah) if datagram else (sge,)
        return None

    return pack


def _rdma(limits: Limits, checked: bool, opcode: Opcode, flags: frozenset[int]) -> Plain:
    put, code, pd, most = door.put_rdma, int(opcode), limits.pd, limits.max_msg_size
    has_imm = opcode is Opcode.RDMA_WRITE_WITH_IMM
    fetches = opcode is Opcode.RDMA_READ

    def pack(at: int, ticket: int, wr: Any) -> Any:
        sge = wr.sg_list
        if type(sge) is not SGE and type(sge := _only(sge)) is not SGE:
            return None
        addr, length, lkey, owner = sge
        start, end = 0, _MASK64
        if checked:
            if type(owner) is not MR or owner.pd is not pd or owner._handle is None:
                return None
            if fetches and not owner.writable:
                return None
            start, end = owner.addr, owner.end
        elif owner is not None and (type(owner) is not MR or owner._handle is None):
            return None
        if wr.send_flags in flags and put(
            at, ticket, code, wr.send_flags, wr.imm_data if has_imm else 0,
            wr.remote_addr, wr.rkey, wr.remote_srqn, addr, length, lkey, start, end, most,
        ):  # fmt: skip
            return (sge,)
        return None

    return pack


def plain_sends(limits: Limits, checked: bool) -> Mapping[type, Plain]:
    """Return the short ways of a send queue, by the class of the work request.

    Args:
        limits: what the queue pair was created with.
        checked: whether the work requests are checked.
    """
    ways: dict[type, Plain] = {}
    for kind, make in (
        (Send, _message),
        (SendWithImm, _message),
        (RdmaWrite, _rdma),
        (RdmaWriteWithImm, _rdma),
        (RdmaRead, _rdma),
    ):
        opcode = kind.opcode
        if make is _rdma and limits.qp_type is QPType.UD:
            # Drivers follow the pointer to an address handle whatever the opcode.
            continue
        allowed = limits.flags.get(opcode) if checked else sum(_FLAGS)
        if allowed is not None and (limits.max_send_sge or not checked):
            ways[kind] = make(limits, checked, opcode, _combinations(allowed))
    return ways


def plain_receives(limits: Limits, checked: bool) -> Mapping[type, Plain]:
    """Return the short way of a receive queue; the rest is as in plain_sends."""
    put, pd = door.put_recv, limits.pd

    def pack(at: int, ticket: int, wr: Any) -> Any:
        sge = wr.sg_list
        if type(sge) is not SGE and type(sge := _only(sge)) is not SGE:
            return None
        addr, length, lkey, owner = sge
        start, end = 0, _MASK64
        if checked:
            if type(owner) is not MR or owner.pd is not pd or owner._handle is None:
                return None
            if not owner.writable:
                return None
            start, end = owner.addr, owner.end
        elif owner is not None and (type(owner) is not MR or owner._handle is None):
            return None
        return (sge,) if put(at, ticket, addr, length, lkey, start, end) else None

    return {RecvWR: pack} if limits.max_recv_sge or not checked else {}

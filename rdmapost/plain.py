"""The short way for a work request that is plainly right.

Most work requests have one SGE of a live region, and flags that their opcode
takes.  They are recognised here with a few comparisons, and packed at once.
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

Plain = Callable[[int, int, Any], tuple[Any, ...] | None]
"""Write a work request at an address, under a ticket; return what it refers to, or None where it
is not plain.  May raise what a wrong value in a field makes it raise."""

_FLAGS = tuple(int(flag) for flag in SendFlags)


def _combinations(allowed: int) -> frozenset[int]:
    """Return all values of the flags that are allowed, but for those with INLINE."""
    # Looking a value up is quicker than arithmetic on a Flag.
    found = {0}
    for flag in _FLAGS:
        if flag & allowed & ~SendFlags.INLINE:
            found |= {value | flag for value in found}
    return frozenset(found)


def _region(pd: Any, most: int, checked: bool, written: bool) -> Callable[[Any], Any]:
    """Return what takes an sg_list and returns its SGE where it is plain, or None."""

    def one(sg_list: Any) -> Any:
        if type(sg_list) is not SGE:
            if type(sg_list) not in (list, tuple) or len(sg_list) != 1:
                return None
            sg_list = sg_list[0]
            if type(sg_list) is not SGE:
                return None
        addr, length, _, owner = sg_list
        if type(owner) is not MR:
            return None if checked or owner is not None else sg_list
        if owner._handle is None:
            return None
        if checked and (
            owner.pd is not pd or addr < owner.addr or not 0 < length <= owner.end - addr
            or length > most or (written and not owner.writable)
        ):  # fmt: skip
            return None
        return sg_list

    return one


def _message(limits: Limits, checked: bool, opcode: Opcode, flags: frozenset[int]) -> Plain:
    put, code = door.put_message, int(opcode)
    region = _region(limits.pd, limits.max_msg_size, checked, False)
    datagram, pd = limits.qp_type is QPType.UD, limits.pd
    has_imm = opcode is Opcode.SEND_WITH_IMM

    def pack(at: int, ticket: int, wr: Any) -> tuple[Any, ...] | None:
        sge, ah = region(wr.sg_list), wr.ah
        if sge is None or wr.send_flags not in flags:
            return None
        if datagram:
            if type(ah) is not AH or ah._handle is None or ah.pd is not pd:
                return None
        elif ah is not None:
            return None
        put(
            at, ticket, code, wr.send_flags, wr.imm_data if has_imm else 0,
            ah.address if datagram else 0, wr.remote_qpn, wr.remote_qkey, wr.remote_srqn,
            sge[0], sge[1], sge[2],
        )  # fmt: skip
        return (sge, ah) if datagram else (sge,)

    return pack


def _rdma(limits: Limits, checked: bool, opcode: Opcode, flags: frozenset[int]) -> Plain:
    put, code = door.put_rdma, int(opcode)
    region = _region(limits.pd, limits.max_msg_size, checked, opcode is Opcode.RDMA_READ)
    has_imm = opcode is Opcode.RDMA_WRITE_WITH_IMM

    def pack(at: int, ticket: int, wr: Any) -> tuple[Any, ...] | None:
        sge = region(wr.sg_list)
        if sge is None or wr.send_flags not in flags:
            return None
        put(
            at, ticket, code, wr.send_flags, wr.imm_data if has_imm else 0,
            wr.remote_addr, wr.rkey, wr.remote_srqn, sge[0], sge[1], sge[2],
        )  # fmt: skip
        return (sge,)

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
    put = door.put_recv
    # A receive may be longer than any message.
    region = _region(limits.pd, 1 << 32, checked, True)

    def pack(at: int, ticket: int, wr: Any) -> tuple[Any, ...] | None:
        sge = region(wr.sg_list)
        if sge is None:
            return None
        put(at, ticket, sge[0], sge[1], sge[2])
        return (sge,)

    return {RecvWR: pack} if limits.max_recv_sge or not checked else {}

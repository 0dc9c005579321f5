"""What may be posted where: the table of ibv_post_send(3) as data, and the checks.

A check returns None, or the reason why a work request cannot be posted.  It
knows the queue pair only as ``Limits``: what the queue was created with and
the state it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .enums import Access, DeviceCap, MWType, Opcode, OpsFlags, QPState, QPType, SendFlags
from .wr import SGE, TSO, BindMW, OpsWR, RecvWR, SendWR, TagAdd, TagSync

__all__ = [
    "FLAGS_BY_OPCODE",
    "MAX_MSG_SIZE",
    "MULTICAST_QPN",
    "OPCODES_BY_QP_TYPE",
    "QP_TYPES_BY_OPCODE",
    "Limits",
    "check_bind_mw",
    "check_op",
    "check_recv",
    "check_send",
    "check_send_state",
    "check_unsafe",
    "check_unsafe_bind_mw",
    "flags_allowed",
]

MAX_MSG_SIZE = 1 << 31
"""Bytes in one message, at most."""

MULTICAST_QPN = 0xFFFFFF
"""The remote_qpn of a message to a multicast group."""

_CONNECTED = frozenset({QPType.UC, QPType.RC, QPType.XRC_SEND})
_RELIABLE = frozenset({QPType.RC, QPType.XRC_SEND})

QP_TYPES_BY_OPCODE: dict[Opcode, frozenset[QPType]] = {
    Opcode.SEND: _CONNECTED | {QPType.UD, QPType.RAW_PACKET},
    Opcode.SEND_WITH_IMM: _CONNECTED | {QPType.UD},
    Opcode.RDMA_WRITE: _CONNECTED,
    Opcode.RDMA_WRITE_WITH_IMM: _CONNECTED,
    Opcode.RDMA_READ: _RELIABLE,
    Opcode.ATOMIC_CMP_AND_SWP: _RELIABLE,
    Opcode.ATOMIC_FETCH_AND_ADD: _RELIABLE,
    Opcode.LOCAL_INV: _CONNECTED,
    Opcode.BIND_MW: _CONNECTED,
    Opcode.SEND_WITH_INV: _CONNECTED,
    Opcode.TSO: frozenset({QPType.UD, QPType.RAW_PACKET}),
}
"""The table of ibv_post_send(3), by rows."""

OPCODES_BY_QP_TYPE: dict[QPType, frozenset[Opcode]] = {
    qp_type: frozenset(op for op, types in QP_TYPES_BY_OPCODE.items() if qp_type in types)
    for qp_type in QPType
}
"""The same table, by columns."""

_SENDS = frozenset(
    {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.SEND_WITH_INV, Opcode.RDMA_WRITE_WITH_IMM}
)
_ATOMICS = frozenset({Opcode.ATOMIC_CMP_AND_SWP, Opcode.ATOMIC_FETCH_AND_ADD})
_WRITE_LOCALLY = _ATOMICS | {Opcode.RDMA_READ}


def _flags_of(opcode: Opcode) -> SendFlags:
    flags = SendFlags.SIGNALED | SendFlags.FENCE
    if opcode in _SENDS:
        # Only what a receive work request of the peer's answers can be solicited.
        flags |= SendFlags.SOLICITED
    if opcode in _SENDS | {Opcode.RDMA_WRITE}:
        flags |= SendFlags.INLINE
    if opcode in {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO}:
        flags |= SendFlags.IP_CSUM
    return flags


FLAGS_BY_OPCODE = {opcode: _flags_of(opcode) for opcode in QP_TYPES_BY_OPCODE}
"""Which flags mean something on an opcode, before the QP type is looked at."""

_POINTERS = ("ah", "mw", "mr")
"""Fields that a driver follows into the resource's own struct."""

_IP_CSUM_CAP = {
    QPType.RC: DeviceCap.RC_IP_CSUM,
    QPType.UD: DeviceCap.UD_IP_CSUM,
    QPType.RAW_PACKET: DeviceCap.RAW_IP_CSUM,
}

# A number: the complement of a Flag has only the bits that are flags.
_ALL_FLAGS = 0x1F
_MASK64 = (1 << 64) - 1
_OPS_SIGNALED, _TM_SYNC = int(OpsFlags.SIGNALED), int(OpsFlags.TM_SYNC)
# Arithmetic on a Flag costs a microsecond, on a number next to nothing.
_INLINE = int(SendFlags.INLINE)
_ZERO_BASED = int(Access.ZERO_BASED)
_MW_BIND = int(Access.MW_BIND)


def flags_allowed(qp_type: QPType, opcode: Opcode, device_cap: int) -> SendFlags:
    """Return the flags that a work request may carry on a queue pair.

    Args:
        qp_type: the queue pair's type.
        opcode: an opcode that the type has.
        device_cap: device_cap_flags of the device; it says whether IP_CSUM works.
    """
    flags = FLAGS_BY_OPCODE[opcode]
    if qp_type not in _RELIABLE:
        flags &= ~SendFlags.FENCE
    if not device_cap & _IP_CSUM_CAP.get(qp_type, DeviceCap(0)):
        flags &= ~SendFlags.IP_CSUM
    return flags


@dataclass(slots=True)
class Limits:
    """What a queue pair was created with, as far as posting to it depends on it."""

    qp_type: QPType
    pd: Any
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int
    flags: dict[Opcode, int]
    """For each opcode of the QP type, the flags that are allowed."""
    max_msg_size: int = MAX_MSG_SIZE
    """Bytes in one message: the path MTU on UD."""
    max_tso_header: int = 0xFFFF
    """Bytes of a TSO's header."""


_STATE_REASON = {
    QPState.RESET: "the QP is in RESET; bring it to RTS first (qp.connect)",
    QPState.INIT: "the QP is in INIT; bring it to RTS first (qp.connect)",
    QPState.RTR: "the QP is in RTR, ready to receive only; bring it to RTS first (qp.to_rts)",
}


def check_send_state(state: QPState) -> str | None:
    """Say why nothing can be posted to a send queue in this state, or None.

    RESET, INIT and RTR refuse; SQD holds the work request and ERR and SQE
    complete it with a flush error (ibv_modify_qp(3)).
    """
    return _STATE_REASON.get(state)


def check_send(wr: SendWR, sges: Sequence[SGE], limits: Limits) -> str | None:
    """Say why a send work request cannot be posted to a queue pair, or None."""
    opcode = wr.opcode
    allowed = limits.flags.get(opcode)
    if allowed is None:
        return _wrong_type(opcode, limits.qp_type)
    flags = int(wr.send_flags)
    if flags & ~allowed:
        return _wrong_flags(wr, flags & ~allowed, limits)
    if len(sges) > limits.max_send_sge:
        return _too_many(len(sges), "max_send_sge", limits.max_send_sge)
    inline = flags & _INLINE
    total = 0
    for sge in sges:
        total += sge.length
        reason = _check_inline(sge) if inline else _check_sge(sge, limits.pd)
        if reason:
            return reason
    if inline and total > limits.max_inline_data:
        return (
            f"{total} bytes inline, but this QP was created with "
            f"max_inline_data={limits.max_inline_data}"
        )
    if total > limits.max_msg_size and opcode is not Opcode.TSO:
        return (
            f"{total} bytes, but a message on this {limits.qp_type.name} QP "
            f"holds at most {limits.max_msg_size}"
        )
    if opcode in _WRITE_LOCALLY and (reason := _check_writable(sges, "the result")):
        return reason
    if opcode in _ATOMICS:
        return _check_atomic(wr, sges)
    if limits.qp_type is QPType.UD and (reason := _check_datagram(wr, limits.pd)):
        return reason
    if isinstance(wr, BindMW):
        return _check_bind(wr, limits.pd, MWType.TYPE_2)
    if isinstance(wr, TSO):
        return _check_tso(wr, limits)
    return None


def check_bind_mw(wr: BindMW, limits: Limits) -> str | None:
    """Say why a window of type 1 cannot be bound through a queue pair (ibv_bind_mw(3)), or None."""
    allowed = limits.flags.get(wr.opcode)
    if allowed is None:
        return _wrong_type(wr.opcode, limits.qp_type)
    if wrong := int(wr.send_flags) & ~allowed:
        return _wrong_flags(wr, wrong, limits)
    return _check_bind(wr, limits.pd, MWType.TYPE_1)


def check_unsafe_bind_mw(wr: BindMW, limits: Limits) -> str | None:
    """Say why a bind of type 1 would harm this process or the driver, or None."""
    if wr.opcode not in OPCODES_BY_QP_TYPE[limits.qp_type]:
        # Drivers read its work request as one of the queue pair's type.
        return _wrong_type(wr.opcode, limits.qp_type)
    if wr.mw is None or wr.mr is None:
        return _BIND_NEEDS
    return check_unsafe(wr, (), limits)


def check_unsafe(wr: SendWR, sges: Sequence[SGE], limits: Limits) -> str | None:
    """Say why a work request would harm this process or the driver, or None.

    This is all that is looked at where the caller asked for no checks.
    """
    if limits.qp_type is QPType.UD and getattr(wr, "ah", None) is None:
        # Drivers follow the pointer without looking, whatever the opcode.
        return "a UD work request needs an address handle (ah=...)"
    for name in _POINTERS:
        pointer = getattr(wr, name, None)
        if pointer is not None and pointer.pd.context is not limits.pd.context:
            # Of another driver, perhaps: its structs have another shape.
            return f"{pointer} belongs to another open device than the queue pair"
    if int(wr.send_flags) & _INLINE:
        total = 0
        for sge in sges:
            total += sge.length
            if sge.owner is not None and (reason := _check_place(sge)):
                return reason
        if total > 0xFFFF_FFFF:
            # Drivers add up in 32 bits, and copy everything if the sum seems to fit.
            return f"{total} bytes inline; drivers count only up to 2^32-1"
    return None


def check_recv(wr: RecvWR | TagAdd, sges: Sequence[SGE], limits: Limits) -> str | None:
    """Say why a receive work request cannot be posted, or None."""
    if len(sges) > limits.max_recv_sge:
        return _too_many(len(sges), "max_recv_sge", limits.max_recv_sge)
    for sge in sges:
        reason = _check_sge(sge, limits.pd)
        if reason:
            return reason
    return _check_writable(sges, "the message")


def check_op(wr: OpsWR, sges: Sequence[SGE], limits: Limits) -> str | None:
    """Say why a tag-matching operation cannot be posted, or None.

    Which entries there are is for the queue to say.
    """
    flags = wr.flags
    if flags & ~(_OPS_SIGNALED | _TM_SYNC):
        return f"flags={flags:#x} has bits that are no flag of a tag-matching operation"
    if not flags & _TM_SYNC:
        if wr.unexpected_cnt:
            return f"unexpected_cnt={wr.unexpected_cnt} is not looked at without OpsFlags.TM_SYNC"
        if isinstance(wr, TagSync):
            return "a TAG_SYNC without OpsFlags.TM_SYNC tells the device nothing"
    if not isinstance(wr, TagAdd):
        return None
    if wr.tag >= 0 and wr.tag & ~wr.mask & _MASK64:
        return (
            f"tag={wr.tag:#x} has bits outside of mask={wr.mask:#x}, so no message can match: "
            "a message matches if its tag & mask == tag"
        )
    return check_recv(wr, sges, limits)


def _wrong_type(opcode: Opcode, qp_type: QPType) -> str:
    has = QP_TYPES_BY_OPCODE.get(opcode)
    if not has:
        return f"{opcode.name} cannot be posted with ibv_post_send"
    types = ", ".join(sorted(t.name for t in has))
    return f"{opcode.name} is not an opcode of {qp_type.name} QPs; {types} have it"


def _wrong_flags(wr: SendWR, wrong: int, limits: Limits) -> str:
    opcode = wr.opcode
    if wrong & ~_ALL_FLAGS:
        return f"send_flags={wr.send_flags:#x} has bits that are no send flag"
    names = "|".join(flag.name or "" for flag in SendFlags if flag & wrong)
    if wrong & FLAGS_BY_OPCODE[opcode]:
        if wrong & SendFlags.IP_CSUM:
            return f"{names}: the device has no such offload on {limits.qp_type.name} QPs"
        return f"{names} has no meaning on a {limits.qp_type.name} QP"
    return f"{names} has no meaning on {opcode.name}"


def _too_many(count: int, name: str, most: int) -> str:
    return f"{count} SGEs, but this queue was created with {name}={most}"


def _check_length(sge: SGE) -> str | None:
    if sge.length == 0:
        return (
            "an SGE of length 0 means 2^31 bytes to some devices; "
            "give an empty sg_list for a message of 0 bytes"
        )
    return None


def _check_inline(sge: SGE) -> str | None:
    if sge.owner is None:
        return (
            "INLINE reads the buffer in this process, and this SGE is only numbers; "
            "use mr[a:b] or SGE.from_buffer(data), or a QP with checked=False"
        )
    return _check_place(sge) or _check_length(sge)


def _check_place(sge: SGE) -> str | None:
    """Say why an SGE cannot be read in this process, or None."""
    if int(getattr(sge.owner, "access", 0)) & _ZERO_BASED:
        return (
            "INLINE reads the buffer in this process, and addresses of a ZERO_BASED region count "
            "from its start; use SGE.from_buffer(mr.buffer[a:b])"
        )
    return _check_bounds(sge)


def _check_sge(sge: SGE, pd: Any) -> str | None:
    owner = sge.owner
    if owner is None:
        return _check_length(sge)
    if getattr(owner, "lkey", None) is None:
        return "a buffer that is not registered can only be sent with SendFlags.INLINE"
    if owner.pd is not pd:
        return f"{owner} belongs to another PD than the queue"
    return _check_bounds(sge) or _check_length(sge)


def _check_writable(sges: Sequence[SGE], what: str) -> str | None:
    for sge in sges:
        owner = sge.owner
        if owner is not None and not owner.writable:
            return f"{what} goes to {owner}, which was registered without LOCAL_WRITE"
    return None


def _check_bounds(sge: SGE) -> str | None:
    owner = sge.owner
    start = sge.addr - owner.addr
    if start < 0 or start + sge.length > owner.length:
        return f"{sge} lies outside {owner}"
    return None


def _check_atomic(wr: Any, sges: Sequence[SGE]) -> str | None:
    if len(sges) != 1 or sges[0].length != 8:
        return f"{wr.opcode.name} returns the old value into one SGE of 8 bytes"
    if wr.remote_addr % 8:
        return f"remote_addr={wr.remote_addr:#x} is not a multiple of 8"
    return None


def _check_datagram(wr: Any, pd: Any) -> str | None:
    if wr.ah is None:
        return "a UD work request needs an address handle (ah=...)"
    if wr.ah.pd is not pd:
        return f"{wr.ah} belongs to another PD than the queue pair"
    return None


_BIND_NEEDS = "BIND_MW needs a memory window (mw=...) and a memory region (mr=...)"


def _check_bind(wr: BindMW, pd: Any, mw_type: MWType) -> str | None:
    mw, mr = wr.mw, wr.mr
    if mw is None or mr is None:
        return _BIND_NEEDS
    if mw.type is not mw_type:
        if mw_type is MWType.TYPE_2:
            return (
                f"{mw} is of type 1, and a BIND_MW work request binds windows of type 2; "
                "qp.bind_mw() binds this one"
            )
        return f"{mw} is of type 2; post a BindMW for it, qp.bind_mw() binds windows of type 1"
    if mw.pd is not pd or mr.pd is not pd:
        return f"{mw if mw.pd is not pd else mr} belongs to another PD than the queue pair"
    if mw_type is MWType.TYPE_1 and not wr.length:
        # It is unbound; the region only has to be there.
        return None
    if not int(mr.access) & _MW_BIND:
        return f"{mr} was registered without MW_BIND"
    if wr.addr < mr.addr or wr.addr + wr.length > mr.addr + mr.length:
        return f"addr={wr.addr:#x} length={wr.length} lies outside {mr}"
    return None


def _check_tso(wr: TSO, limits: Limits) -> str | None:
    if not 0 < wr.mss < 1 << 16:
        return f"mss={wr.mss} is not in 1..65535"
    if len(wr.hdr) > limits.max_tso_header:
        return (
            f"hdr has {len(wr.hdr)} bytes, but this QP was created with "
            f"max_tso_header={limits.max_tso_header}"
        )
    return None

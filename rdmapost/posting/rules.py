"""What may be posted where: the table of ibv_post_send(3) as data, and why something is refused.

C checks what is posted (``_c/posting/rules.c``); the text of each of its rules is here, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from .._arguments import counted
from ..enums import DeviceCap, Opcode, QPState, QPType, SendFlags
from .wr import SGE, SendWR

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

CONSUMES_RECEIVE = frozenset(
    {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.SEND_WITH_INV, Opcode.RDMA_WRITE_WITH_IMM}
)
"""Opcodes that consume one of the peer's receives."""


def _flags_of(opcode: Opcode) -> SendFlags:
    flags = SendFlags.SIGNALED | SendFlags.FENCE
    if opcode in CONSUMES_RECEIVE:
        # Only what completes a receive at the peer can be solicited.
        flags |= SendFlags.SOLICITED
    if opcode in CONSUMES_RECEIVE | {Opcode.RDMA_WRITE}:
        flags |= SendFlags.INLINE
    if opcode in {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO}:
        flags |= SendFlags.IP_CSUM
    return flags


FLAGS_BY_OPCODE = {opcode: _flags_of(opcode) for opcode in QP_TYPES_BY_OPCODE}
"""Which flags have a meaning on an opcode, on any QP type."""

_IP_CSUM_CAP = {
    QPType.RC: DeviceCap.RC_IP_CSUM,
    QPType.UD: DeviceCap.UD_IP_CSUM,
    QPType.RAW_PACKET: DeviceCap.RAW_IP_CSUM,
}


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
    """The creation parameters of a queue pair that posting depends on."""

    qp_type: QPType
    pd: int
    """Address of the protection domain's struct."""
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int
    flags: dict[Opcode, int]
    """For each opcode of the QP type, the flags that are allowed."""
    max_msg_size: int = MAX_MSG_SIZE
    """Bytes in one message: the path MTU on UD."""
    max_tso_header: int = 0
    """Bytes of a TSO's header."""
    max_num_tags: int = 0
    """Entries of the matching list (SRQ)."""
    sq_sig_all: bool = False
    """Every send generates a completion."""


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


# ---- why a work request is refused --------------------------------------------------


class Refusal(NamedTuple):
    """A work request that was refused (``_c/posting/read.c``, ``_c/posting/rules.c``).

    Attributes:
        rule: the rule that it breaks: the name of a function below.
        wr: the work request.
        name: the field's name, or "".
        value: the field's value, or the resource in question.
        a, b: the numbers in question.
        sge: addr, length and lkey of the SGE in question.
        queue: the queue that it was to be posted to.
    """

    rule: str
    wr: Any
    name: str
    value: Any
    a: int
    b: int
    sge: tuple[int, int, int]
    queue: QueueLimits

    def __str__(self) -> str:
        return _RULES[self.rule](self)


class QueueLimits(Protocol):
    """What the texts say about a queue."""

    verb: str
    wr_type: type
    depth: int
    depth_name: str
    sge_name: str
    max_sge: int
    max_num_tags: int
    limits: Limits

    @property
    def outstanding(self) -> int: ...


_RULES: dict[str, Callable[[Refusal], str]] = {}


def _rule(function: Callable[[Refusal], str]) -> Callable[[Refusal], str]:
    _RULES[function.__name__] = function
    return function


# ---- what cannot be read -----------------------------------------------------------


@_rule
def not_a_work_request(r: Refusal) -> str:
    given, wanted = type(r.wr), r.queue.wr_type
    if given is wanted:
        return f"{given.__name__} is only a base class; post one of its subclasses"
    return f"expected {wanted.__name__}, got {given.__name__}"


@_rule
def unreadable(r: Refusal) -> str:
    return str(r.value)


@_rule
def not_an_integer(r: Refusal) -> str:
    return f"{r.name}: expected int, got {type(r.value).__name__}"


@_rule
def out_of_range(r: Refusal) -> str:
    if r.name == "mss":
        return f"mss={r.value} is not in 1..65535"
    return f"{r.name}={r.value} is not in 0..2^{r.a}-1"


@_rule
def not_sges(r: Refusal) -> str:
    return f"sg_list: expected SGEs, got {type(r.value).__name__}; {_slice(r)}"


@_rule
def not_an_sge(r: Refusal) -> str:
    return f"sg_list holds {type(r.value).__name__}; {_slice(r)}"


def _slice(r: Refusal) -> str:
    return "use mr[:]" if type(r.value).__name__ == "MR" else "mr[a:b] makes an SGE"


@_rule
def not_an_owner(r: Refusal) -> str:
    return f"an SGE's owner: expected MR or a buffer, got {type(r.value).__name__}"


_RESOURCES = {ord("a"): "AH", ord("w"): "MW", ord("r"): "MR"}


@_rule
def not_a_resource(r: Refusal) -> str:
    return f"{r.name}: expected {_RESOURCES[r.a]}, got {type(r.value).__name__}"


@_rule
def not_bytes(r: Refusal) -> str:
    return f"{r.name} is not bytes"


@_rule
def header_too_long(r: Refusal) -> str:
    return f"hdr has {r.a} bytes; at most 65535 fit"


# ---- the queue -------------------------------------------------------------------------


@_rule
def closed(r: Refusal) -> str:
    return f"{r.value} is closed"


@_rule
def full(r: Refusal) -> str:
    queue = r.queue
    if r.b > queue.depth:
        return too_long_a_list(queue, r.b)
    outstanding = counted(queue.outstanding, "work request")
    verb = "is" if queue.outstanding == 1 else "are"
    beside = "" if r.a == 1 else f", and the list has {r.a} more"
    # It is not recorded which are SIGNALED.
    unsure = queue.verb == "ibv_post_send" and not queue.limits.sq_sig_all
    doubt = "; if none of them is SIGNALED, no slot ever comes free" if unsure else ""
    return (
        f"the queue is full: {queue.depth_name}={queue.depth} and "
        f"{outstanding} {verb} outstanding{beside}; poll the CQ, or create "
        f"the queue deeper{doubt}"
    )


def too_long_a_list(queue: QueueLimits, count: int) -> str:
    """Say that a list can never fit, however many completions are polled."""
    return (
        f"a list of {count} cannot fit a queue of {queue.depth_name}={queue.depth}; "
        "post it in parts, or create the queue deeper"
    )


@_rule
def list_full(r: Refusal) -> str:
    return (
        f"the matching list is full: max_num_tags={r.queue.max_num_tags} and as many "
        "tagged receives are outstanding; poll the CQ, remove some, or create the "
        "SRQ with more"
    )


@_rule
def bind_prepared(r: Refusal) -> str:
    return "a BIND_MW changes the window's key, so it cannot be posted again"


@_rule
def other_num_sge(r: Refusal) -> str:
    return f"{counted(r.a, 'SGE')}, but it was prepared with {r.b}"


# ---- opcode and flags -------------------------------------------------------------------


@_rule
def wrong_opcode(r: Refusal) -> str:
    opcode: Opcode = r.wr.opcode
    types = ", ".join(sorted(t.name for t in QP_TYPES_BY_OPCODE[opcode]))
    return f"{opcode.name} is not an opcode of {r.queue.limits.qp_type.name} QPs; {types} have it"


@_rule
def wrong_flags(r: Refusal) -> str:
    opcode: Opcode = r.wr.opcode
    wrong, qp_type = r.a, r.queue.limits.qp_type
    if wrong & ~_ALL_FLAGS:
        return f"send_flags={r.b:#x} has bits that are not send flags"
    names = "|".join(flag.name or "" for flag in SendFlags if flag & wrong)
    if wrong & FLAGS_BY_OPCODE[opcode]:
        if wrong & SendFlags.IP_CSUM:
            return f"{names}: the device has no such offload on {qp_type.name} QPs"
        return f"{names} has no meaning on {qp_type.name} QPs"
    return f"{names} has no meaning on {opcode.name}"


_ALL_FLAGS = sum(int(flag) for flag in SendFlags)


# ---- memory ------------------------------------------------------------------------------


@_rule
def too_many_sges(r: Refusal) -> str:
    queue = r.queue
    return (
        f"{counted(r.a, 'SGE')}, but this queue was created with {queue.sge_name}={queue.max_sge}"
    )


@_rule
def length_0(r: Refusal) -> str:
    return (
        "an SGE of length 0 means 2^31 bytes to some devices; "
        "give an empty sg_list for a message of 0 bytes"
    )


@_rule
def inline_numbers(r: Refusal) -> str:
    return (
        "INLINE reads the buffer in this process, and this SGE is only numbers; "
        "use mr[a:b] or SGE.from_buffer(data), or a QP with checked=False"
    )


@_rule
def inline_zero_based(r: Refusal) -> str:
    return (
        "INLINE reads the buffer in this process, and addresses of a ZERO_BASED region count "
        "from its start; use SGE.from_buffer(mr.buffer[a:b])"
    )


@_rule
def inline_too_long(r: Refusal) -> str:
    return (
        f"{counted(r.a, 'byte')} inline, but this QP was created with "
        f"max_inline_data={r.queue.limits.max_inline_data}"
    )


@_rule
def inline_32_bits(r: Refusal) -> str:
    # Drivers add up in 32 bits, and copy everything if the sum seems to fit.
    return f"{r.a} bytes inline; drivers count only up to 2^32-1"


@_rule
def not_registered(r: Refusal) -> str:
    return "a buffer that is not registered can only be sent with SendFlags.INLINE"


@_rule
def foreign_region(r: Refusal) -> str:
    return f"{r.value} belongs to another PD than the queue"


@_rule
def outside(r: Refusal) -> str:
    return f"{SGE(*r.sge)} lies outside {r.value}"


@_rule
def too_long(r: Refusal) -> str:
    limits = r.queue.limits
    return (
        f"{counted(r.a, 'byte')}, but a message on this {limits.qp_type.name} QP "
        f"holds at most {limits.max_msg_size}"
    )


@_rule
def not_writable(r: Refusal) -> str:
    what = "the result" if isinstance(r.wr, SendWR) else "the message"
    return f"{what} goes to {r.value}, which was registered without LOCAL_WRITE"


@_rule
def atomic_sge(r: Refusal) -> str:
    return f"{r.wr.opcode.name} returns the old value into one SGE of 8 bytes"


@_rule
def misaligned(r: Refusal) -> str:
    return f"remote_addr={r.a:#x} is not a multiple of 8"


# ---- datagrams, windows, segmentation ----------------------------------------------------


@_rule
def no_address_handle(r: Refusal) -> str:
    return "a UD work request needs an address handle (ah=...)"


@_rule
def no_qp_number(r: Refusal) -> str:
    return f"remote_qpn={r.a:#x} is not a QP number, which has 24 bits"


@_rule
def foreign_resource(r: Refusal) -> str:
    return f"{r.value} belongs to another PD than the queue pair"


@_rule
def foreign_device(r: Refusal) -> str:
    return f"{r.value} belongs to another open device than the queue pair"


@_rule
def bind_needs(r: Refusal) -> str:
    return "BIND_MW needs a memory window (mw=...) and a memory region (mr=...)"


@_rule
def window_of_type_1(r: Refusal) -> str:
    return (
        f"{r.value} is of type 1, and a BIND_MW work request binds windows of type 2; "
        "qp.bind_mw() binds this one"
    )


@_rule
def window_of_type_2(r: Refusal) -> str:
    return f"{r.value} is of type 2; post a BindMW for it, qp.bind_mw() binds windows of type 1"


@_rule
def not_bindable(r: Refusal) -> str:
    return f"{r.value} was registered without MW_BIND"


@_rule
def bind_outside(r: Refusal) -> str:
    return f"addr={r.a:#x} length={r.b} lies outside {r.value}"


@_rule
def mss(r: Refusal) -> str:
    return f"mss={r.a} is not in 1..65535"


@_rule
def longer_than_max_tso_header(r: Refusal) -> str:
    return (
        f"hdr has {counted(r.a, 'byte')}, but this QP was created with "
        f"max_tso_header={r.queue.limits.max_tso_header}"
    )


# ---- tag matching ------------------------------------------------------------------------


@_rule
def no_tag_handle(r: Refusal) -> str:
    return "TAG_DEL needs the handle that a TagAdd of this SRQ was given"


not_a_tag_handle = _RULES["not_a_tag_handle"] = no_tag_handle


@_rule
def tag_not_listed(r: Refusal) -> str:
    return f"{r.value} is not on the list any more: its completion has been polled"


@_rule
def wrong_ops_flags(r: Refusal) -> str:
    return f"flags={r.a:#x} has bits that are not flags of a tag-matching operation"


@_rule
def count_without_sync(r: Refusal) -> str:
    return f"unexpected_cnt={r.a} is not looked at without OpsFlags.TM_SYNC"


@_rule
def sync_of_nothing(r: Refusal) -> str:
    return "a TAG_SYNC without OpsFlags.TM_SYNC tells the device nothing"


@_rule
def tag_outside_mask(r: Refusal) -> str:
    return (
        f"tag={r.a:#x} has bits outside of mask={r.b:#x}, so no message can match: "
        "a message matches if its tag & mask == tag"
    )

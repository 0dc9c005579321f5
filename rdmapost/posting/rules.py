"""The rules for posting, and the refusal messages.

C checks the work requests (``_c/posting/rules.c``); each rule's message is here, in the method
with the rule's name. ``standard/opcodes.py`` has the table of opcodes and queue pair types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from .._arguments import counted, shown
from ..enums import DeviceCap, Opcode, QPState, QPType, SendFlags
from ..standard.opcodes import (
    CONSUMES_RECEIVE,
    MAX_MSG_SIZE,
    QP_TYPES_BY_OPCODE,
    RELIABLE,
    SEND_OPS,
)
from .wr import SGE, SendWR


def _flags_of(opcode: Opcode) -> SendFlags:
    flags = SendFlags.SIGNALED | SendFlags.FENCE
    if opcode in CONSUMES_RECEIVE:
        # Only a message that completes a receive at the peer can be solicited.
        flags |= SendFlags.SOLICITED
    if opcode in CONSUMES_RECEIVE | {Opcode.RDMA_WRITE}:
        flags |= SendFlags.INLINE
    if opcode in {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO}:
        flags |= SendFlags.IP_CSUM
    return flags


FLAGS_BY_OPCODE = {opcode: _flags_of(opcode) for opcode in QP_TYPES_BY_OPCODE}
"""For each opcode, the flags that have a meaning on at least one QP type."""

_IP_CSUM_CAP = {
    QPType.RC: DeviceCap.RC_IP_CSUM,
    QPType.UD: DeviceCap.UD_IP_CSUM,
    QPType.RAW_PACKET: DeviceCap.RAW_IP_CSUM,
}


def flags_allowed(qp_type: QPType, opcode: Opcode, device_cap: int) -> SendFlags:
    """Return the flags that a work request may carry on a queue pair.

    Args:
        qp_type: the queue pair's type.
        opcode: an opcode that the type supports.
        device_cap: the device's device_cap_flags, which say whether IP_CSUM works.
    """
    flags = FLAGS_BY_OPCODE[opcode]
    if qp_type not in RELIABLE:
        flags &= ~SendFlags.FENCE
    if not device_cap & _IP_CSUM_CAP.get(qp_type, DeviceCap(0)):
        flags &= ~SendFlags.IP_CSUM
    return flags


@dataclass(slots=True)
class Limits:
    """Limits of a queue pair or SRQ that the posting rules check."""

    qp_type: QPType
    pd: int
    """Address of the protection domain's struct."""
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int
    flags: dict[Opcode, int]
    """For each opcode of the QP type, the flags that are allowed."""
    max_msg_size: int = MAX_MSG_SIZE
    """The most bytes in one message; on UD, the path MTU."""
    max_tso_header: int = 0
    """The most bytes in a TSO header."""
    max_num_tags: int = 0
    """Entries in the matching list (SRQ)."""
    sq_sig_all: bool = False
    """Every send generates a completion."""


_STATE_REASON = {
    QPState.RESET: "the QP is in RESET; bring it to RTS first (qp.connect)",
    QPState.INIT: "the QP is in INIT; bring it to RTS first (qp.connect)",
    QPState.RTR: "the QP is in RTR, ready to receive only; bring it to RTS first (qp.to_rts)",
}


def check_send_state(state: QPState) -> str | None:
    """Return why nothing can be posted to a send queue in this state; None if posts are possible.

    In RESET, INIT and RTR a work request is refused; in SQD it is held; in ERR
    and SQE it completes with a flush error (ibv_modify_qp(3)).
    """
    return _STATE_REASON.get(state)


# ---- why a work request is refused --------------------------------------------------

_FLAGS = tuple(SendFlags)
ALL_FLAGS = sum(map(int, _FLAGS))
_RESOURCES = {ord("a"): "AH", ord("w"): "MW", ord("r"): "MR"}


def too_long_a_list(queue: QueueLimits, count: int) -> str:
    """Say that a list can never fit, however many completions are polled."""
    return (
        f"a list of {count} cannot fit a queue of {queue.depth_name}={queue.depth}; "
        "post it in parts, or create a deeper queue"
    )


class QueueLimits(Protocol):
    """The queue attributes that the messages mention."""

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


WRONG_TYPES = frozenset(
    {
        "not_a_work_request",
        "not_an_integer",
        "not_sges",
        "not_an_sge",
        "not_an_owner",
        "not_a_resource",
        "not_bytes",
    }
)
"""The rules that a value of the wrong type breaks."""


class Refusal(NamedTuple):
    """A work request that was refused (``_c/posting/read_wr.c``, ``_c/posting/rules.c``).

    Attributes:
        rule: the rule that it breaks, as the name of a method below.
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
        text: str = getattr(self, self.rule)()
        return text

    # ---- what cannot be read -----------------------------------------------------------

    def not_a_work_request(self) -> str:
        given, wanted = type(self.wr), self.queue.wr_type
        if given is wanted:
            return f"{given.__name__} is only a base class; post one of its subclasses"
        return f"expected {wanted.__name__}, got {given.__name__}"

    def unreadable(self) -> str:
        return str(self.value)

    def not_an_integer(self) -> str:
        return f"{self.name}: expected int, got {type(self.value).__name__}"

    def out_of_range(self) -> str:
        if self.name == "mss":
            return f"mss={shown(self.value)} is not in 1..65535"
        return f"{self.name}={shown(self.value)} is not in 0..2^{self.a}-1"

    def not_sges(self) -> str:
        return f"sg_list: expected SGEs, got {type(self.value).__name__}; {self._slice()}"

    def not_an_sge(self) -> str:
        if type(self.value) is not int:
            return f"sg_list holds {type(self.value).__name__}; {self._slice()}"
        sends = self.queue.verb == "ibv_post_send"
        inlined = ", or SGE.from_buffer(data) for INLINE" if sends else ""
        return f"sg_list holds int, as bytes do; copy them into a region: {self._slice()}{inlined}"

    def _slice(self) -> str:
        return "use mr[:]" if type(self.value).__name__ == "MR" else "mr[a:b] makes an SGE"

    def not_an_owner(self) -> str:
        return f"an SGE's owner: expected MR or a buffer, got {type(self.value).__name__}"

    def not_a_resource(self) -> str:
        return f"{self.name}: expected {_RESOURCES[self.a]}, got {type(self.value).__name__}"

    def not_bytes(self) -> str:
        return f"{self.name} is not bytes"

    def header_too_long(self) -> str:
        return f"hdr has {self.a} bytes; at most 65535 fit"

    # ---- the queue -------------------------------------------------------------------------

    def closed(self) -> str:
        return f"{self.value} is closed"

    def being_closed(self) -> str:
        return f"{self.value} is being closed"

    def spoiled(self) -> str:
        return f"{self.value} cannot be used: its re-registration failed; close it"

    def being_registered(self) -> str:
        return f"another thread is re-registering {self.value}"

    def full(self) -> str:
        queue = self.queue
        if self.b > queue.depth:
            return too_long_a_list(queue, self.b)
        count = queue.outstanding
        if count + self.a <= queue.depth:
            # Another thread has since polled completions or reset the queue.
            return f"the queue was full: {queue.depth_name}={queue.depth}; now there is room"
        outstanding = counted(count, "work request")
        verb = "is" if count == 1 else "are"
        more = "" if self.a == 1 else f", and the list has {self.a} more"
        # Which of them are SIGNALED is not recorded.
        unsure = queue.verb == "ibv_post_send" and not queue.limits.sq_sig_all
        doubt = "; if none of them is SIGNALED, no slot is ever freed" if unsure else ""
        return (
            f"the queue is full: {queue.depth_name}={queue.depth} and "
            f"{outstanding} {verb} outstanding{more}; poll the CQ, or create "
            f"a deeper queue{doubt}"
        )

    def list_full(self) -> str:
        return (
            f"the matching list is full: all max_num_tags={self.queue.max_num_tags} tagged "
            "receives are outstanding; poll the CQ, remove some, or create an SRQ with a larger "
            "max_num_tags"
        )

    def bind_prepared(self) -> str:
        return "a BIND_MW changes the window's key, so it cannot be posted again"

    def other_num_sge(self) -> str:
        return f"{counted(self.a, 'SGE')}, but it was prepared with {self.b}"

    # ---- opcode and flags -------------------------------------------------------------------

    def wrong_opcode(self) -> str:
        opcode, mine = self.wr.opcode, self.queue.limits.qp_type
        if opcode in SEND_OPS and mine in QP_TYPES_BY_OPCODE[opcode]:
            flag = f"SendOps.{SEND_OPS[opcode].name}"
            return f"{opcode.name} needs a QP that was created with send_ops_flags={flag}"
        types = ", ".join(sorted([t.name for t in QP_TYPES_BY_OPCODE[opcode]]))
        return f"{opcode.name} is not supported on {mine.name} QPs, only on {types}"

    def wrong_flags(self) -> str:
        opcode: Opcode = self.wr.opcode
        wrong, qp_type = self.a, self.queue.limits.qp_type
        if wrong & ~ALL_FLAGS:
            return f"send_flags={self.b:#x} has bits that are not send flags"
        names = "|".join([flag.name or "" for flag in _FLAGS if flag & wrong])
        if wrong & FLAGS_BY_OPCODE[opcode]:
            if wrong & SendFlags.IP_CSUM:
                return f"{names} is not supported by the device on {qp_type.name} QPs"
            return f"{names} has no meaning on {qp_type.name} QPs"
        return f"{names} has no meaning on {opcode.name}"

    # ---- memory ------------------------------------------------------------------------------

    def too_many_sges(self) -> str:
        limit = f"{self.queue.sge_name}={self.queue.max_sge}"
        return f"{counted(self.a, 'SGE')}, but this queue was created with {limit}"

    def length_0(self) -> str:
        return (
            "an SGE of length 0 means 2^31 bytes to some devices; "
            "give an empty sg_list for a message of 0 bytes"
        )

    def inline_numbers(self) -> str:
        return (
            "INLINE reads the buffer in this process, but this SGE was made from numbers; "
            "use mr[a:b] or SGE.from_buffer(data), or a QP with checked=False"
        )

    def inline_zero_based(self) -> str:
        return (
            "INLINE reads the buffer in this process, but a ZERO_BASED region's addresses count "
            "from its start; use SGE.from_buffer(mr.buffer[a:b])"
        )

    def inline_unreadable(self) -> str:
        return (
            f"INLINE reads the buffer in this process, but {self.value} has none: it was "
            "registered by address, or is a device's memory or a dma-buf; post without INLINE"
        )

    def inline_too_long(self) -> str:
        return (
            f"{counted(self.a, 'byte')} inline, but this QP was created with "
            f"max_inline_data={self.queue.limits.max_inline_data}"
        )

    def inline_32_bits(self) -> str:
        # Drivers compute the sum in 32 bits, and copy everything if that seems to fit.
        return f"{self.a} bytes inline; drivers count only up to 2^32-1"

    def not_registered(self) -> str:
        return "a buffer that is not registered can only be sent with SendFlags.INLINE"

    def region_of_other_pd(self) -> str:
        return f"{self.value} does not belong to the queue's PD"

    def outside_region(self) -> str:
        return f"{SGE(*self.sge)} lies outside {self.value} from {self.value.addr:#x}"

    def too_long(self) -> str:
        limits = self.queue.limits
        return (
            f"{counted(self.a, 'byte')}, but a message on this {limits.qp_type.name} QP "
            f"holds at most {limits.max_msg_size}"
        )

    def not_writable(self) -> str:
        what = "the result" if isinstance(self.wr, SendWR) else "the message"
        return f"{what} goes to {self.value}, which was registered without LOCAL_WRITE"

    def atomic_sge(self) -> str:
        return f"{self.wr.opcode.name} returns the old value into one SGE of 8 bytes"

    def misaligned(self) -> str:
        return f"remote_addr={self.a:#x} is not a multiple of 8"

    # ---- datagrams, windows, segmentation ----------------------------------------------------

    def no_address_handle(self) -> str:
        if QPType.UD not in QP_TYPES_BY_OPCODE[self.wr.opcode]:
            # Its work request has no ah.
            return self.wrong_opcode()
        return "a UD work request needs an address handle (ah=...)"

    def invalid_qp_number(self) -> str:
        return f"remote_qpn={self.a:#x} is not a QP number, which has 24 bits"

    def invalid_srq_number(self) -> str:
        return f"remote_srqn={self.a:#x} is not an SRQ number, which has 24 bits"

    def resource_of_other_pd(self) -> str:
        return f"{self.value} does not belong to the queue pair's PD"

    def resource_of_other_device(self) -> str:
        return f"{self.value} does not belong to the queue pair's open device"

    def bind_needs(self) -> str:
        return "BIND_MW needs a memory window (mw=...) and a memory region (mr=...)"

    def window_of_type_1(self) -> str:
        return (
            f"{self.value} is of type 1, but a BIND_MW work request binds windows of type 2; "
            "use qp.bind_mw()"
        )

    def window_of_type_2(self) -> str:
        return f"{self.value} is of type 2, but qp.bind_mw() binds windows of type 1; post a BindMW"

    def not_a_window_key(self) -> str:
        return (
            f"rkey={self.a:#x} is not a key of {self.value}: only the low 8 bits may change; "
            "use mw.next_rkey()"
        )

    def not_window_access(self) -> str:
        return (
            f"mw_access_flags={self.a:#x} has more than REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC "
            "and ZERO_BASED"
        )

    def not_bindable(self) -> str:
        return f"{self.value} was registered without MW_BIND"

    def bind_of_nothing(self) -> str:
        return f"length=0 binds {self.value} to nothing; post a LocalInv of its rkey to unbind it"

    def bind_outside(self) -> str:
        mr = self.value
        return f"addr={self.a:#x} length={self.b} lies outside {mr} from {mr.addr:#x}"

    def mss(self) -> str:
        return f"mss={self.a} is not in 1..65535"

    def no_flush_type(self) -> str:
        return f"type={self.a} is not FlushType.GLOBAL, PERSISTENT or both"

    def no_flush_level(self) -> str:
        return f"level={self.a} is not FlushLevel.RANGE or MR"

    def longer_than_max_tso_header(self) -> str:
        return (
            f"hdr has {counted(self.a, 'byte')}, but this QP was created with "
            f"max_tso_header={self.queue.limits.max_tso_header}"
        )

    # ---- tag matching ------------------------------------------------------------------------

    def no_tag_handle(self) -> str:
        return "TAG_DEL needs the handle of a TagAdd that was posted to this SRQ"

    def not_a_tag_handle(self) -> str:
        return self.no_tag_handle()

    def tag_not_listed(self) -> str:
        return f"{self.value} is no longer on the list: its completion has been polled"

    def wrong_ops_flags(self) -> str:
        return f"flags={self.a:#x} has bits that are not flags of a tag-matching operation"

    def count_without_sync(self) -> str:
        return f"unexpected_cnt={self.a} is ignored without OpsFlags.TM_SYNC"

    def sync_of_nothing(self) -> str:
        return "a TAG_SYNC without OpsFlags.TM_SYNC has no effect"

    def tag_outside_mask(self) -> str:
        return (
            f"tag={self.a:#x} has bits outside mask={self.b:#x}, so no message can match: "
            "a message matches if its tag & mask == tag"
        )

"""The queues that work requests are posted to, and the errors for refused ones.

Posting is done in C (``_c/post.h`` says how): reading the work requests, checking them, recording
them as in flight, and the call. A list stops at the first work request that cannot be posted; those
before it are posted.
"""

from __future__ import annotations

import errno
from typing import Any, NoReturn

from .._binding import address_of, door
from ..enums import Opcode, QPType, SendFlags
from ..errors import ClosedError, PostError
from .fields import KINDS, Verb
from .rules import OPCODES_BY_QP_TYPE, Limits, Refusal, too_long_a_list
from .wr import OpsWR, RecvWR, SendWR

__all__ = ["PostQueue", "ops_queue", "recv_queue", "send_queue"]

_COUNT_MASK = 0xFFFF_FFFF
_ALL_FLAGS = sum(int(flag) for flag in SendFlags)
_UNLIMITED = (1 << 64) - 1
_MOST_SGES = 0x7FFF_FFFF
_WR_TYPES: dict[Verb, type] = {
    Verb.ibv_post_send: SendWR,
    Verb.ibv_post_recv: RecvWR,
    Verb.ibv_post_srq_recv: RecvWR,
    Verb.ibv_post_srq_ops: OpsWR,
}


class PostQueue(door.Queue):
    """A queue that work requests are posted to.

    ``post(owner, wrs)`` posts a work request or an iterable of them to the queue of ``owner``,
    its queue pair or SRQ.

    Args:
        verb: the verb that posts to it.
        limits: what the queue was created with.
        depth: how many work requests it holds.
        depth_name: the attribute that set this.
        sge_name: the attribute that set how many SGEs each may have.
        checked: check work requests; refuse one when ``depth`` are outstanding.
        bounded: with ``checked``, whether it can be full at all.
        flags: for each class of work requests that it accepts, the flags allowed.
        tagged: the receives on its matching list.

    Attributes:
        verb, depth, depth_name, sge_name, max_sge, max_num_tags, limits: as given.
        in_flight: what is posted and not known to be done.
        tagged: as given.
    """

    def __init__(
        self,
        verb: Verb,
        limits: Limits,
        depth: int,
        depth_name: str,
        sge_name: str,
        flags: dict[type, int],
        *,
        checked: bool,
        bounded: bool = True,
        tagged: door.InFlight | None = None,
    ) -> None:
        self.verb = verb.name
        self.wr_type = _WR_TYPES[verb]
        self.limits, self.checked = limits, checked
        self.depth, self.depth_name, self.sge_name = depth, depth_name, sge_name
        sends = verb is Verb.ibv_post_send
        self.max_sge = limits.max_send_sge if sends else limits.max_recv_sge
        self.max_num_tags = limits.max_num_tags
        self.tagged = tagged
        self.in_flight = door.InFlight(tagged=tagged, in_order=verb is not Verb.ibv_post_srq_recv)
        super().__init__(
            verb=int(verb),
            in_flight=self.in_flight,
            checked=checked,
            pd=address_of(limits.pd._live()),
            room=depth if checked and bounded else _COUNT_MASK,
            datagram=sends and limits.qp_type is QPType.UD,
            binds=Opcode.BIND_MW in OPCODES_BY_QP_TYPE[limits.qp_type],
            max_sge=self.max_sge if checked else _MOST_SGES,
            max_msg_size=limits.max_msg_size if sends else _UNLIMITED,
            max_inline_data=limits.max_inline_data,
            max_tso_header=limits.max_tso_header,
            max_num_tags=limits.max_num_tags,
            kinds=tuple((KINDS[wr_type], allowed) for wr_type, allowed in flags.items()),
        )

    @property
    def outstanding(self) -> int:
        """How many work requests are posted and not known to be done."""
        return self.in_flight.outstanding

    def bind(self, owner: Any, wr: Any, *, sure: bool) -> None:
        """Bind a window of type 1 (ibv_bind_mw(3)).

        Args:
            owner: the queue pair.
            wr: what is to be bound; its rkey is ignored, as the device chooses it.
            sure: a failed call leaves nothing in the queue.

        Raises:
            PostError: it was refused, here or by the device.
        """
        try:
            self.bind_mw(owner, wr, sure)
        except PostError as error:
            error.call = "ibv_bind_mw"
            raise

    # ---- called by C ------------------------------------------------------------

    def _not_a_sequence(self, wrs: Any) -> NoReturn:
        if issubclass(type(wrs), self.wr_type):
            kind = type(wrs).__name__
            raise TypeError(f"{kind} is only a base class; post one of its subclasses")
        raise TypeError(
            f"{self.verb}: expected {self.wr_type.__name__} or an iterable of them, "
            f"got {type(wrs).__name__}"
        )

    def _list_closed(self, count: int) -> NoReturn:
        raise ClosedError(f"the prepared list of {count} is closed")

    def _refused(
        self,
        owner: Any,
        wrs: tuple[Any, ...],
        index: int,
        posted: int,
        rule: str,
        name: str | None,
        value: Any,
        a: int,
        b: int,
        sge: tuple[int, int, int],
    ) -> NoReturn:
        """Say why a work request was refused; ``posted`` is -1 if a field was to be changed."""
        code = errno.ENOMEM if rule == "full" else errno.EINVAL
        if rule == "not_ready":
            reason = owner._why_not_ready(self)
        else:
            if rule == "full":
                # An ordinary list stops at the first work request without a slot; a prepared one is
                # posted whole or not at all.
                a, b = 1 if posted == index else len(wrs), len(wrs)
            reason = str(Refusal(rule, wrs[index], name or "", value, a, b, sge, self))
        if posted < 0:
            raise ValueError(reason)
        raise PostError(
            self.verb, code, reason, index=index, posted=posted, count=len(wrs), wr=wrs[index]
        )

    def _failed(self, owner: Any, wrs: tuple[Any, ...], code: int, posted: int) -> NoReturn:
        """Say that the device has refused; ``posted`` is -1 if it did not say which."""
        index = None if posted < 0 else posted
        wr = None if index is None else wrs[index]
        if code == errno.ENOMEM and len(wrs) > self.depth:
            reason = too_long_a_list(self, len(wrs))
        else:
            reason = owner._hint(code, wr)
        raise PostError(self.verb, code, reason, index=index, posted=index, count=len(wrs), wr=wr)


def _flags(wr_type: type, value: dict[Any, int], checked: bool) -> dict[type, int]:
    kinds = [kind for kind in KINDS if issubclass(kind, wr_type)]
    if not checked or wr_type is not SendWR:
        return dict.fromkeys(kinds, _ALL_FLAGS)
    return {kind: value[kind.opcode] for kind in kinds if kind.opcode in value}  # type: ignore[attr-defined]


def send_queue(limits: Limits, depth: int, *, checked: bool, bounded: bool = True) -> PostQueue:
    """Return the send queue of a queue pair."""
    return PostQueue(
        Verb.ibv_post_send,
        limits,
        depth,
        "max_send_wr",
        "max_send_sge",
        _flags(SendWR, dict(limits.flags), checked),
        checked=checked,
        bounded=bounded,
    )


def recv_queue(limits: Limits, depth: int, *, checked: bool, shared: bool = False) -> PostQueue:
    """Return the receive queue of a queue pair, or of an SRQ."""
    verb = Verb.ibv_post_srq_recv if shared else Verb.ibv_post_recv
    return PostQueue(
        verb,
        limits,
        depth,
        "max_wr" if shared else "max_recv_wr",
        "max_recv_sge",
        _flags(RecvWR, {}, checked),
        checked=checked,
    )


def ops_queue(limits: Limits, depth: int, *, checked: bool) -> PostQueue:
    """Return the queue of an SRQ's tag-matching operations."""
    return PostQueue(
        Verb.ibv_post_srq_ops,
        limits,
        depth,
        "max_ops",
        "max_recv_sge",
        _flags(OpsWR, {}, checked),
        checked=checked,
        tagged=door.InFlight(in_order=False),
    )

"""The queues that work requests are posted to, and the errors for refused ones.

Posting is done in C (``_c/posting/post.h`` says how): reading the work requests, checking them,
recording them as in flight, and the call. A list stops at the first work request that cannot be
posted; those before it are posted.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from .._binding import native
from ..enums import Opcode, QPType, SendFlags
from ..errors import ClosedError, PostError
from .fields import TYPE_NUMBERS, Verb
from .rules import OPCODES_BY_QP_TYPE, Limits, Refusal, too_long_a_list
from .wr import OpsWR, RecvWR, SendWR

_COUNT_MASK = 0xFFFF_FFFF
_ALL_FLAGS = sum(int(flag) for flag in SendFlags)
_UNLIMITED = (1 << 64) - 1
_MOST_SGES = 0x7FFF_FFFF
_ATTRIBUTES: dict[Verb, tuple[type, str, str]] = {
    Verb.ibv_post_send: (SendWR, "max_send_wr", "max_send_sge"),
    Verb.ibv_post_recv: (RecvWR, "max_recv_wr", "max_recv_sge"),
    Verb.ibv_post_srq_recv: (RecvWR, "max_wr", "max_recv_sge"),
    Verb.ibv_post_srq_ops: (OpsWR, "max_ops", "max_recv_sge"),
}
"""What is posted with each verb, and the attributes that set the queue's size."""


class Reasons(NamedTuple):
    """Why a post is refused, as functions of the queue pair or SRQ: a queue does not refer to it.

    Attributes:
        refused: what the device's errno means for a work request.
        not_ready: why nothing can be posted now.
    """

    refused: Callable[[Any, int, Any], str]
    not_ready: Callable[[Any], str] = "{} is not ready".format


class PostQueue(native.Queue):
    """A queue that work requests are posted to.

    ``post(owner, wrs)`` posts a work request or an iterable of them to the queue of ``owner``,
    its queue pair or SRQ.

    Args:
        verb: the verb that posts to it.
        limits: what the queue was created with.
        depth: how many work requests it holds.
        reasons: why its owner or the device refuses a post.
        checked: check work requests; refuse one when ``depth`` are outstanding.
        bounded: with ``checked``, whether it can be full at all.

    Attributes:
        verb: the verb's name.
        wr_type: the base class of what is posted to it.
        limits, depth, checked: as given.
        depth_name, sge_name: the attributes that set its depth, and how many SGEs each may have.
        in_flight: what is posted and not known to be done.
        tagged: the receives on its matching list, if operations are posted to it.
    """

    def __init__(
        self,
        verb: Verb,
        limits: Limits,
        depth: int,
        reasons: Reasons,
        *,
        checked: bool,
        bounded: bool = True,
    ) -> None:
        self.verb = verb.name
        self.wr_type, self.depth_name, self.sge_name = _ATTRIBUTES[verb]
        self.limits, self.depth, self.checked = limits, depth, checked
        self._reasons = reasons
        sends = verb is Verb.ibv_post_send
        self.max_sge = limits.max_send_sge if sends else limits.max_recv_sge
        self.max_num_tags = limits.max_num_tags
        is_ops = verb is Verb.ibv_post_srq_ops
        self.tagged = native.InFlight(in_order=False) if is_ops else None
        self.in_flight = native.InFlight(
            tagged=self.tagged, in_order=verb is not Verb.ibv_post_srq_recv
        )
        super().__init__(
            verb=int(verb),
            in_flight=self.in_flight,
            checked=checked,
            pd=limits.pd,
            room=depth if checked and bounded else _COUNT_MASK,
            datagram=sends and limits.qp_type is QPType.UD,
            binds=Opcode.BIND_MW in OPCODES_BY_QP_TYPE[limits.qp_type],
            max_sge=self.max_sge if checked else _MOST_SGES,
            max_msg_size=limits.max_msg_size if sends else _UNLIMITED,
            max_inline_data=limits.max_inline_data,
            max_tso_header=limits.max_tso_header,
            max_num_tags=limits.max_num_tags,
            kinds=tuple(self._allowed()),
        )

    def _allowed(self) -> Iterator[tuple[int, int]]:
        """Go through the classes of work requests that it accepts, and the flags of each."""
        for wr_type, number in TYPE_NUMBERS.items():
            if not issubclass(wr_type, self.wr_type):
                continue
            if not self.checked or not issubclass(wr_type, SendWR):
                yield number, _ALL_FLAGS
            elif wr_type.opcode in self.limits.flags:
                yield number, self.limits.flags[wr_type.opcode]

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
            name = type(wrs).__name__
            raise TypeError(f"{name} is only a base class; post one of its subclasses")
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
            reason = self._reasons.not_ready(owner)
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
            reason = self._reasons.refused(owner, code, wr)
        raise PostError(self.verb, code, reason, index=index, posted=index, count=len(wrs), wr=wr)

"""The queues that work requests are posted to, and the errors for refused work requests.

Posting is done in C (``_c/posting/post.h`` says how): C reads the work requests, checks them,
records them as in flight, and makes the call. Posting a list stops at the first work request that
cannot be posted; those before it are posted.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from .._arguments import within
from .._binding import native
from ..enums import Opcode, QPType
from ..errors import PostError
from ..standard.opcodes import OPCODES_BY_QP_TYPE, QP_TYPES_BY_OPCODE, SEND_OPS
from .columns import field_of_row
from .fields import TYPE_NUMBERS, Verb
from .rules import ALL_FLAGS, WRONG_TYPES, Limits, Refusal, too_long_a_list
from .wr import AtomicWrite, Flush, OpsWR, RecvWR, SendWR

_COUNT_MASK = 0xFFFF_FFFF
_UNLIMITED = (1 << 64) - 1
_MAX_SGES = 0x7FFF_FFFF
_ATTRIBUTES: dict[Verb, tuple[type, str, str]] = {
    Verb.ibv_post_send: (SendWR, "max_send_wr", "max_send_sge"),
    Verb.ibv_post_recv: (RecvWR, "max_recv_wr", "max_recv_sge"),
    Verb.ibv_post_srq_recv: (RecvWR, "max_wr", "max_sge"),
    Verb.ibv_post_srq_ops: (OpsWR, "max_ops", "max_sge"),
}
"""The class that each verb posts, and the attributes that set the queue's size."""
_ERRNOS = {"full": errno.ENOMEM, "being_registered": errno.EBUSY, "being_closed": errno.EBUSY}
"""The errnos of the rules that the same post may satisfy later; for the others it is EINVAL."""


class Reasons(NamedTuple):
    """Functions that say why a post was refused.

    They take the queue pair or SRQ as an argument: its queues hold no reference to it.

    Attributes:
        refused: what the device's errno means for a work request.
        not_ready: why nothing can be posted now.
    """

    refused: Callable[[Any, int, Any], str]
    not_ready: Callable[[Any], str] = "{} is not ready".format


class _ColumnRow(Sequence[Any]):
    """Stands in for a list of work requests of which only one is known: every index returns it."""

    def __init__(self, wr: Any, count: int) -> None:
        self._wr, self._count = wr, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._wr


class PostQueue(native.Queue):
    """A queue that work requests are posted to.

    ``post(owner, wrs)`` posts a work request or an iterable of them to the queue of ``owner``,
    its queue pair or SRQ.

    Args:
        verb: the verb that posts to it.
        limits: the limits that the queue was created with.
        depth: how many work requests it can hold.
        reasons: why its owner or the device refuses a post.
        checked: check work requests; refuse one when ``depth`` are outstanding.
        bounded: whether it can ever be full.

    Attributes:
        verb: the verb's name.
        wr_type: the base class of the work requests that are posted to it.
        limits, depth, checked: the arguments; resize() changes depth.
        depth_name, sge_name: the names of the attributes that set its depth, and the number of SGEs
            in each work request.
        in_flight: the work requests that are posted and not yet known to be done.
        tagged: the receives on its matching list, if it takes tag-matching operations.
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
            room=depth if bounded else _COUNT_MASK,
            datagram=sends and limits.qp_type is QPType.UD,
            xrc=sends and limits.qp_type is QPType.XRC_SEND,
            binds=Opcode.BIND_MW in OPCODES_BY_QP_TYPE[limits.qp_type],
            builds=sends and not SEND_OPS.keys().isdisjoint(limits.flags),
            max_sge=self.max_sge if checked else _MAX_SGES,
            max_msg_size=limits.max_msg_size if sends else _UNLIMITED,
            max_inline_data=limits.max_inline_data,
            max_tso_header=limits.max_tso_header,
            max_num_tags=limits.max_num_tags,
            wr_types=tuple(self._allowed()),
        )

    def _allowed(self) -> list[tuple[int, int]]:
        """Return the work request classes that the queue accepts, and each one's allowed flags."""
        allowed = []
        for wr_type, number in TYPE_NUMBERS.items():
            if not issubclass(wr_type, self.wr_type):
                continue
            if not issubclass(wr_type, SendWR) or not (self.checked or wr_type.opcode in SEND_OPS):
                allowed.append((number, ALL_FLAGS))
            elif wr_type.opcode in self.limits.flags:
                allowed.append((number, self.limits.flags[wr_type.opcode]))
        return allowed

    @property
    def outstanding(self) -> int:
        """How many work requests have been posted and are not yet known to be done."""
        return self.in_flight.outstanding

    def resize(self, depth: int) -> None:
        """Adopt the new size that the device has granted.

        Args:
            depth: how many work requests the queue can now hold.
        """
        self.set_room(depth)
        self.depth = depth

    def bind(self, owner: Any, wr: Any, *, sure: bool) -> None:
        """Bind a window of type 1 (ibv_bind_mw(3)).

        Args:
            owner: the queue pair.
            wr: the bind; its rkey is ignored, because the device chooses it.
            sure: whether a failed call is known to have posted nothing.

        Raises:
            PostError: the bind was refused, here or by the device.
        """
        try:
            self.bind_mw(owner, wr, sure)
        except PostError as error:
            error.call = "ibv_bind_mw"
            raise

    def call_for(self, wr: Any) -> str:
        """Name the function that posts a work request to the queue."""
        if issubclass(type(wr), AtomicWrite):
            return "ibv_wr_atomic_write"
        return "ibv_wr_flush" if issubclass(type(wr), Flush) else self.verb

    # ---- called by C ------------------------------------------------------------

    def _not_a_sequence(self, wrs: Any) -> NoReturn:
        if issubclass(type(wrs), self.wr_type):
            name = type(wrs).__name__
            raise TypeError(f"{name} is only a base class; post one of its subclasses")
        name, wanted = type(wrs).__name__, self.wr_type.__name__
        hint = ""
        if name in ("SGE", "MR") and self.wr_type is not OpsWR:
            hint = f"; post {'Send' if self.wr_type is SendWR else 'RecvWR'}(mr[a:b])"
        elif name == "Blocks":
            hint = "; post_columns() and post_recv_columns() take Blocks"
        raise TypeError(f"{self.verb}: expected {wanted} or an iterable of them, got {name}{hint}")

    def _refused(
        self,
        owner: Any,
        wrs: Sequence[Any],
        index: int,
        posted: int,
        rule: str,
        name: str | None,
        value: Any,
        a: int,
        b: int,
        sge: tuple[int, int, int],
    ) -> NoReturn:
        """Say why a work request or (if ``posted`` is -1) a prepared one's new value is refused."""
        code = _ERRNOS.get(rule, errno.EINVAL)
        if rule == "not_ready" and self._lacks(wrs[index]):
            # No state of the queue pair accepts this opcode.
            rule = "wrong_opcode"
        if rule == "not_ready":
            reason = self._reasons.not_ready(owner)
        else:
            if rule == "full":
                # Posting an ordinary list stops at the first work request without a slot; a
                # prepared list is posted whole or not at all.
                a, b = 1 if posted == index else len(wrs), len(wrs)
            reason = str(Refusal(rule, wrs[index], name or "", value, a, b, sge, self))
        if posted < 0:
            raise (TypeError if rule in WRONG_TYPES else ValueError)(reason)
        raise PostError(
            self.call_for(wrs[index]),
            code,
            reason,
            index=index,
            posted=posted,
            count=len(wrs),
            wr=wrs[index],
        )

    def _lacks(self, wr: Any) -> bool:
        """Whether a work request is a send whose opcode the queue pair's type does not support."""
        if not (self.checked and issubclass(self.wr_type, SendWR)):
            return False
        opcode = getattr(type(wr), "opcode", None)
        return opcode in QP_TYPES_BY_OPCODE and opcode not in self.limits.flags

    def _whole(self, name: str, value: Any, least: int) -> int:
        """Check an argument that C could not read as a 64-bit integer, and return it as an int."""
        return within(name, value, least, _UNLIMITED)

    def _row_refused(
        self,
        owner: Any,
        wr_type: Any,
        fields: dict[str, Any],
        index: int,
        count: int,
        ready: bool,
        code: int,
        posted: int,
    ) -> NoReturn:
        """Raise the error that a row of columns would raise if it were posted alone.

        Args:
            owner: the queue pair or SRQ.
            wr_type: the work request class.
            fields: the arguments of the call, by name.
            index, count: the row's index, and the number of rows.
            ready: whether the queue accepts work requests.
            code: the errno that the device returned; 0 if the row was refused here.
            posted: how many rows were posted; -1 if the device did not say.
        """
        fields.pop("signal_every", None)
        wr = wr_type(**{name: field_of_row(name, given, index) for name, given in fields.items()})
        row = _ColumnRow(wr, count)
        if code:
            self._failed(owner, row, code, posted)
        if not ready:
            self._refused(owner, row, index, 0, "not_ready", None, None, 0, 0, (0, 0, 0))
        try:
            native.Prepared()._prepare(self, owner, (wr,))
        except PostError as error:
            error.index, error.count = index, count
            raise
        # The row passes now: the caller's objects returned a different value when they were reread,
        # or another thread has changed the queue or a region.
        reason = "it was refused, but the reason no longer applies: post it again"
        call = self.call_for(wr)
        raise PostError(call, errno.EBUSY, reason, index=index, posted=0, count=count, wr=wr)

    def _failed(self, owner: Any, wrs: Sequence[Any], code: int, posted: int) -> NoReturn:
        """Raise an error for a refusal; ``posted`` is -1 if the device did not say which work
        request."""
        index = None if posted < 0 else posted
        wr = None if index is None else wrs[index]
        if code == errno.ENOMEM and len(wrs) > self.depth:
            reason = too_long_a_list(self, len(wrs))
        else:
            reason = self._reasons.refused(owner, code, wr)
        # ibv_wr_atomic_write(3) and ibv_wr_flush(3) return nothing; ibv_wr_complete(3) fails.
        call = self.verb if self.call_for(wr) == self.verb else "ibv_wr_complete"
        raise PostError(call, code, reason, index=index, posted=index, count=len(wrs), wr=wr)

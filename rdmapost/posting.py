"""Posting a list of work requests to one queue, whichever queue it is.

The steps are the same for sends, receives, shared receives and tag-matching
operations: check each work request, record it as in flight, pack it, and hand
the whole chain to the device in one call.  The list stops at the first work
request that cannot be posted; those before it go in, and stand.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from ._binding import address_of, door, ffi
from .enums import SendFlags
from .errors import PostError
from .inflight import InFlight
from .packing import Refused, check_numbers, gather, record_size
from .plain import Ways
from .wr import SGE, BindMW, RecvWR

__all__ = ["Check", "Hint", "PostQueue"]

Check = Callable[[Any, Sequence[SGE]], "str | None"]
"""Says why a work request cannot be posted, or None."""
Hint = Callable[[int, Any], str]
"""Says what the device may have meant by an error number, of a work request or None."""

_WR_ID_END = 1 << 64
_INLINE = int(SendFlags.INLINE)
_COUNT_MASK = 0xFFFF_FFFF
_VERBS = ("ibv_post_send", "ibv_post_recv", "ibv_post_srq_recv", "ibv_post_srq_ops")
"""As ``_c/plain.h`` numbers them."""


class PostQueue(door.Poster):
    """One queue that work requests are posted to.

    Args:
        call: the verb, by its man page's name.
        submit: the shim's call that links packed records and posts them.
        wr_type: the class of work request that the queue takes.
        pack: writes one work request as a record.
        depth: how many work requests the queue holds.
        depth_name: the attribute that said so.
        bounded: refuse a work request when that many are outstanding.
        in_flight: where they are recorded.
        ways: what goes the short way.

    Attributes:
        call, wr_type, pack, depth, in_flight: as given.
        lock: whoever posts holds it, and whoever closes the queue.
        room: how many work requests may be outstanding.
    """

    def __init__(
        self,
        call: str,
        submit: Any,
        wr_type: type,
        pack: Callable[[bytearray, int, Any, int, Sequence[SGE]], tuple[int, tuple[Any, ...]]],
        depth: int,
        depth_name: str,
        bounded: bool,
        in_flight: InFlight,
        ways: Ways,
    ) -> None:
        self.call = call
        self.in_flight = in_flight
        self.depth = depth
        self._bounded = bounded
        self.room = depth if bounded else _COUNT_MASK
        self.lock = door.Lock()
        self._handle = 0
        self._submit = submit
        self.wr_type = wr_type
        self.pack = pack
        self._depth_name = depth_name
        self._binds: list[tuple[int, Any]] = []
        self._grow(16 * record_size(1))
        verb = _VERBS.index(call)
        super().__init__(self.lock, in_flight, verb, self.room, *ways)

    def post(
        self,
        live: Callable[[], Any],
        wrs: Any,
        check: Check | None,
        hint: Hint,
    ) -> None:
        """Post a work request, or a sequence of them.

        Args:
            live: returns the queue's struct, or raises ClosedError.
            wrs: one work request or an iterable of them.
            check: says why one cannot be posted, or None.
            hint: says what the device may have meant by an error number.

        Raises:
            PostError: a work request was refused, here or by the device.
        """
        items: Iterable[Any] = (wrs,) if isinstance(wrs, self.wr_type) else wrs
        try:
            wr_list = tuple(items)
        except TypeError:
            raise TypeError(
                f"{self.call} takes a {self.wr_type.__name__} or a sequence of them, "
                f"not a {type(wrs).__name__}"
            ) from None
        with self.lock:
            # Whoever closes the queue takes the lock too.
            handle = live()
            if not wr_list:
                return
            refused = self._pack_all(wr_list, check)
            count = len(wr_list) if refused is None else refused[0]
            if count:
                self._post_packed(handle, wr_list, count, hint)
        if refused is not None:
            index, code, reason = refused
            raise PostError(
                self.call, code, reason,
                index=index, posted=index, count=len(wr_list), wr=wr_list[index],
            )  # fmt: skip

    def _refused(self, result: int, wrs: Any, owner: Any) -> NoReturn:
        """Say why the device has refused what went the short way; the lock is held."""
        wr_list = (wrs,) if isinstance(wrs, self.wr_type) else wrs
        self.fail(result, wr_list, len(wr_list), owner._hint)

    @property
    def receives(self) -> bool:
        """Whether it takes receives."""
        return self.wr_type is RecvWR

    def open(self, handle: Any) -> None:
        """Say which struct work requests are posted to; none is before that."""
        self._handle = address_of(handle)

    def shut(self) -> None:
        """Let nothing be posted any more; whoever calls this holds the lock."""
        self._handle = self.in_flight.handle = 0

    def set_ready(self, ready: bool) -> None:
        """Say whether the state of the queue lets work requests go the short way."""
        self.in_flight.handle = self._handle if ready else 0

    def _pack_all(
        self,
        wrs: Sequence[Any],
        check: Check | None,
    ) -> tuple[int, int, str] | None:
        """Pack work requests up to the first that is refused; return which, errno and why."""
        self._binds.clear()
        self._end = 0
        for index, wr in enumerate(wrs):
            sges: Sequence[SGE] = ()
            try:
                sges = gather(getattr(wr, "sg_list", ()))
                reason = self._refuse(wr, sges, check)
                if reason is None:
                    if self._pack_one(wr, sges):
                        self._binds.append((index, wr))
                    continue
            except Refused as error:
                reason = str(error)
            except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
                # A field of the wrong type, met by a check before the packing.
                reason = check_numbers(wr, sges) or str(error)
            except BaseException:
                self.in_flight.forget_last(index)
                raise
            full = self._bounded and self.in_flight.outstanding >= self.depth
            return index, errno.ENOMEM if full else errno.EINVAL, reason
        return None

    def _refuse(
        self,
        wr: Any,
        sges: Sequence[SGE],
        check: Check | None,
    ) -> str | None:
        wr_type: Any = self.wr_type
        if not isinstance(wr, wr_type):
            return f"{self.call} takes a {wr_type.__name__}, not a {type(wr).__name__}"
        if not 0 <= wr.wr_id < _WR_ID_END:
            return f"wr_id={wr.wr_id} is not in 0..2^64-1"
        if self._bounded and self.in_flight.outstanding >= self.depth:
            return self._full()
        return None if check is None else check(wr, sges)

    def _full(self) -> str:
        return (
            f"the queue is full: {self._depth_name}={self.depth} and "
            f"{self.in_flight.outstanding} work requests are outstanding; poll the CQ, or create "
            "the queue deeper"
        )

    def refuse_whole(self, wrs: Sequence[Any], reason: str | None) -> NoReturn:
        """Refuse a list that goes in as a whole or not at all.

        Args:
            wrs: the list.
            reason: why nothing can be posted now; None where there is no room for all of it.

        Raises:
            PostError: always.
        """
        code, index = errno.EINVAL, 0
        if reason is None:
            left = max(0, self.depth - self.in_flight.outstanding)
            code, index, reason = errno.ENOMEM, min(left, len(wrs) - 1), self._full()
        raise PostError(
            self.call, code, reason, index=index, posted=0, count=len(wrs), wr=wrs[index]
        )

    def _pack_one(self, wr: Any, sges: Sequence[SGE]) -> bool:
        """Record and pack a work request; return whether it binds a window."""
        at = self._make_room(sges)
        ticket = self.in_flight.next_ticket()
        self._end, others = self.pack(self._records, at, wr, ticket, sges)
        # Inline data has been copied when the call returns; the rest must stay.
        inline = int(getattr(wr, "send_flags", 0)) & _INLINE
        self.in_flight.add(wr.wr_id, others if inline else (*sges, *others))
        return bool(others) and isinstance(wr, BindMW)

    def _post_packed(self, handle: Any, wrs: Sequence[Any], count: int, hint: Hint) -> None:
        result = self._submit(address_of(handle), self._at, self._end, count)
        if result:
            self.fail(result, wrs, count, hint)
        self._bound(count)

    def fail(self, result: int, wrs: Sequence[Any], count: int, hint: Hint) -> NoReturn:
        """Take back what the device did not take, and say so."""
        if result < 0:
            raise AssertionError("packed records do not add up")
        code = int(result & 0xFFFF_FFFF)
        index: int | None = (result >> 32) - 1
        if index is not None and index < 0:
            # Nothing of an unsupported call goes in; of another, who knows:
            # then everything counts as posted, so that its memory stays alive.
            index = 0 if code in (errno.EOPNOTSUPP, errno.ENOSYS) else None
        if index is not None:
            self.in_flight.forget_last(count - index)
        self._bound(count if index is None else index)
        wr = None if index is None else wrs[index]
        raise PostError(
            self.call, code, hint(code, wr),
            index=index, posted=index, count=len(wrs), wr=wr,
        )  # fmt: skip

    def _bound(self, posted: int) -> None:
        for index, wr in self._binds:
            if index < posted:
                wr.mw._bound(wr.rkey)
        self._binds.clear()

    def _make_room(self, sges: Sequence[SGE]) -> int:
        """Return where the next record goes, with room for its SGEs."""
        end = self._end + record_size(len(sges))
        if end > len(self._records):
            self._grow(2 * end)
        return self._end

    def _grow(self, size: int) -> None:
        records = bytearray(size)
        if old := getattr(self, "_records", None):
            records[: len(old)] = old
        self._records = records
        # Held: the buffer stays where it is.
        self._held = ffi.from_buffer("char[]", records)
        self._at = address_of(self._held)

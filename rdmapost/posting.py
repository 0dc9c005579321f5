"""Posting a list of work requests to one queue, whichever queue it is.

The steps are the same for sends, receives, shared receives and tag-matching
operations: check each work request, record it as in flight, pack it, and hand
the whole chain to the device in one call.  The list stops at the first work
request that cannot be posted; those before it go in, and stand.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ._binding import ffi
from .enums import SendFlags
from .errors import PostError
from .inflight import InFlight, InFlightAny
from .packing import Refused, check_numbers, gather, record_size
from .wr import SGE, BindMW

__all__ = ["PostQueue"]

_WR_ID_END = 1 << 64
_INLINE = int(SendFlags.INLINE)


class PostQueue:
    """One queue that work requests are posted to.

    Args:
        call: the verb, by its man page's name.
        link: the shim's call that links packed records.
        post: the shim's call that posts them.
        wr_type: the class of work request that the queue takes.
        pack: writes one work request as a record.
        depth: how many work requests the queue holds.
        depth_name: the attribute that said so.
        bounded: refuse a work request when that many are outstanding.
        in_flight: where they are recorded.
    """

    def __init__(
        self,
        call: str,
        link: Any,
        post: Any,
        wr_type: type,
        pack: Callable[[bytearray, int, Any, int, Sequence[SGE]], tuple[int, tuple[Any, ...]]],
        depth: int,
        depth_name: str,
        bounded: bool,
        in_flight: InFlight | InFlightAny,
    ) -> None:
        self.call = call
        self.in_flight = in_flight
        self.depth = depth
        self._bounded = bounded
        self.lock = threading.Lock()
        self._link = link
        self._post = post
        self._wr_type = wr_type
        self._pack = pack
        self._depth_name = depth_name
        self._binds: list[tuple[int, Any]] = []
        self._grow(16 * record_size(1))

    def post(
        self,
        live: Callable[[], Any],
        wrs: Any,
        check: Callable[[Any, Sequence[SGE]], str | None] | None,
        hint: Callable[[int, Any], str],
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
        items: Iterable[Any] = (wrs,) if isinstance(wrs, self._wr_type) else wrs
        try:
            wr_list = tuple(items)
        except TypeError:
            raise TypeError(
                f"{self.call} takes a {self._wr_type.__name__} or a sequence of them, "
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

    def _pack_all(
        self, wrs: Sequence[Any], check: Callable[[Any, Sequence[SGE]], str | None] | None
    ) -> tuple[int, int, str] | None:
        """Pack work requests up to the first that is refused; return which, errno and why."""
        self._end = 0
        self._binds.clear()
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
        check: Callable[[Any, Sequence[SGE]], str | None] | None,
    ) -> str | None:
        wr_type: Any = self._wr_type
        if not isinstance(wr, wr_type):
            return f"{self.call} takes a {wr_type.__name__}, not a {type(wr).__name__}"
        if not 0 <= wr.wr_id < _WR_ID_END:
            return f"wr_id={wr.wr_id} is not in 0..2^64-1"
        outstanding = self.in_flight.outstanding
        if self._bounded and outstanding >= self.depth:
            return (
                f"the queue is full: {self._depth_name}={self.depth} and {outstanding} work "
                "requests are outstanding; poll the CQ, or create the queue deeper"
            )
        return None if check is None else check(wr, sges)

    def _pack_one(self, wr: Any, sges: Sequence[SGE]) -> bool:
        """Record and pack a work request; return whether it binds a window."""
        at = self._make_room(sges)
        ticket = self.in_flight.next_ticket()
        self._end, others = self._pack(self._records, at, wr, ticket, sges)
        # Inline data has been copied when the call returns; the rest must stay.
        inline = int(getattr(wr, "send_flags", 0)) & _INLINE
        self.in_flight.add(wr.wr_id, others if inline else (*sges, *others))
        return bool(others) and isinstance(wr, BindMW)

    def _post_packed(
        self, handle: Any, wrs: Sequence[Any], count: int, hint: Callable[[int, Any], str]
    ) -> None:
        if self._link(self._records_ptr, self._end, count):
            raise AssertionError("packed records do not add up")
        result = self._post(handle, self._records_ptr)
        if not result:
            self._bound(count)
            return
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
        self._records_ptr = ffi.from_buffer("char[]", records)

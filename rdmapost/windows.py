"""Binding windows of type 1: a verb of its own that posts to the send queue.

The device gets a ticket as wr_id, as for any work request (``inflight``), and
the record keeps the window and the region open until the bind is done.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any

from ._binding import ffi
from .errors import PostError, VerbsError
from .packing import check_numbers
from .posting import PostQueue
from .wr import SGE, BindMW

__all__ = ["post_bind"]

_CALL = "ibv_bind_mw"
_NOTHING_POSTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})


def post_bind(
    queue: PostQueue,
    live: Callable[[], Any],
    wr: BindMW,
    check: Callable[[Any, Sequence[SGE]], str | None],
    hint: Callable[[int, Any], str],
    bind: Callable[[Any, Any, Any], None],
    *,
    sure: bool,
) -> None:
    """Bind a window of type 1, and record it as in flight.

    Args:
        queue: the send queue.
        live: returns the queue pair's struct, or raises ClosedError.
        wr: what is to be bound; its rkey is not looked at, the device chooses it.
        check: says why it cannot be posted, or None.
        hint: says what the device may have meant by an error number.
        bind: the provider's verb.
        sure: a failed call leaves nothing in the queue.

    Raises:
        PostError: it was refused, here or by the device.
    """
    with queue.lock:
        # Whoever closes the queue pair takes the lock too.
        handle = live()
        in_flight = queue.in_flight
        reason = check_numbers(wr) or _closed(wr) or queue._refuse(wr, (), check)
        if reason is not None:
            full = queue._bounded and in_flight.outstanding >= queue.depth
            code = errno.ENOMEM if full else errno.EINVAL
            raise PostError(_CALL, code, reason, index=0, posted=0, count=1, wr=wr)
        window: Any = wr.mw
        region: Any = wr.mr
        mw, mr = window._live(), region._live()
        raw = ffi.new("struct ibv_mw_bind *")
        raw.wr_id, raw.send_flags = in_flight.next_ticket(), int(wr.send_flags)
        info = raw.bind_info
        info.mr, info.addr, info.length = mr, wr.addr, wr.length
        info.mw_access_flags = int(wr.mw_access_flags)
        rkey = mw.rkey
        in_flight.add(wr.wr_id, (window, region))
        try:
            bind(handle, mw, raw)
        except VerbsError as error:
            mw.rkey = rkey
            code = error.errno or errno.EIO
            index = 0 if sure or code in _NOTHING_POSTED else None
            if index is not None:
                in_flight.forget_last(1)
            # Else it counts as posted: the device may complete it yet.
            raise PostError(
                _CALL, code, error.hint or hint(code, wr), index=index, posted=index, count=1, wr=wr
            ) from None


def _closed(wr: BindMW) -> str | None:
    for named in (wr.mw, wr.mr):
        if named is not None and named.closed:
            return f"{named} is closed"
    return None

"""Completion queues and completions."""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from .._arguments import counted, expect, flags, index, seconds, shown, within
from .._binding import native
from ..enums import WCExFlags, WCFlags, WCOpcode, WCStatus
from ..errors import ClosedError, CompletionError, RdmaError, UnsupportedError, VerbsError
from ..posting.columns import with_c_methods
from .channel import CompChannel, OwnChannel, announce_on
from .device import NO_MORE, Context, in_flight_of, invalidated_of, no_more, provider_of
from .events import timed_out
from .grh import Datagram, read_datagram
from .resource import close_quietly, struct_of
from .waitable import CompletionSource, check_max_entries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


class WC(NamedTuple):
    """A completion (``struct ibv_wc``, ibv_poll_cq(3)).

    In an error completion only wr_id, status, qp_num and vendor_err are valid;
    the other fields are None or 0.

    Attributes:
        wr_id: the wr_id of the work request.
        status: how the work request ended.
        opcode: the operation that completed, or None.
        byte_len: valid for receives, RDMA reads and atomics; for a UD receive, it includes the
            40-byte GRH.
        imm_data: immediate data in host order, or None.
        invalidated_rkey: the key that the peer invalidated, or None.
        qp_num: number of the local queue pair.
        src_qp: number of the sender's queue pair (UD).
        wc_flags: what else the completion carries, a WCFlags.
        vendor_err: the device's own error code.
        pkey_index, slid, sl, dlid_path_bits: from the packet's headers (UD).
        tm_tag, tm_priv: the tag of a message that matched (TM_MATCH), and 32 bits that
            its sender chose; None in other completions.  An unexpected message has both in
            its header.
        completion_ts: when it completed, by the device's clock (``context.query_rt_values()``):
            in ticks at attr.hca_core_clock kHz.  None unless the CQ was created with
            WCExFlags.WITH_COMPLETION_TIMESTAMP.
        completion_wallclock_ns: when it completed, in ns since 1970; None unless the CQ was
            created with WCExFlags.WITH_COMPLETION_TIMESTAMP_WALLCLOCK.
        cvlan: the VLAN tag that the device has stripped from the packet (RAW_PACKET); None unless
            the CQ was created with WCExFlags.WITH_CVLAN.
        flow_tag: the tag of the flow steering rule that the packet matched, 24 bits; None unless
            the CQ was created with WCExFlags.WITH_FLOW_TAG.
    """

    wr_id: int
    status: WCStatus
    opcode: WCOpcode | None
    byte_len: int
    imm_data: int | None
    invalidated_rkey: int | None
    qp_num: int
    src_qp: int
    wc_flags: WCFlags
    vendor_err: int
    pkey_index: int
    slid: int
    sl: int
    dlid_path_bits: int
    tm_tag: int | None = None
    tm_priv: int | None = None
    completion_ts: int | None = None
    completion_wallclock_ns: int | None = None
    cvlan: int | None = None
    flow_tag: int | None = None

    def check(self) -> WC:
        """Return the completion if its status is SUCCESS.

        Raises:
            CompletionError: its status is not SUCCESS.
        """
        if self.status:
            raise CompletionError(self, self._ending())
        return self

    def _ending(self) -> str:
        """Say how the work request ended."""
        return (
            f"the work request with wr_id {self.wr_id} on QP {self.qp_num:#x} ended with "
            f"{self.status.name}"
            + (f" (vendor_err {self.vendor_err:#x})" if self.vendor_err else "")
        )

    def datagram(self, received: Any) -> Datagram:
        """Return the GRH and the payload of a receive on a UD queue pair.

        Use it for UD only: messages on other types of queue pair have no GRH.

        Args:
            received: the RecvWR that was posted, or a buffer that begins with the received
                bytes.

        Raises:
            CompletionError: the receive failed.
            TypeError: received is neither.
            ValueError: this is not a receive's completion, or received is too short.
            ClosedError: a memory region that the RecvWR names is closed.

        See ibv_post_recv(3).
        """
        self.check()
        if self.opcode is None or not self.opcode & _RECV:
            raise ValueError(f"{getattr(self.opcode, 'name', None)} received nothing")
        return read_datagram(received, self.byte_len, bool(self.wc_flags & WCFlags.GRH))

    def _row(self) -> bytes:
        """Return the completion as ``poll_into`` writes it."""
        imm_data = self.imm_data if self.imm_data is not None else self.invalidated_rkey
        return _ROW.pack(
            self.wr_id,
            self.status,
            self.opcode or 0,
            self.vendor_err,
            self.byte_len,
            imm_data or 0,
            self.qp_num,
            self.src_qp,
            self.wc_flags,
            self.pkey_index,
            self.slid,
            self.sl,
            self.dlid_path_bits,
        )


_ROW = struct.Struct("=Q8I2H2B2x")
_FIELDS = (
    ("wr_id", "u8", 0),
    ("status", "u4", 8),
    ("opcode", "u4", 12),
    ("vendor_err", "u4", 16),
    ("byte_len", "u4", 20),
    ("imm_data", "u4", 24),
    ("qp_num", "u4", 28),
    ("src_qp", "u4", 32),
    ("wc_flags", "u4", 36),
    ("pkey_index", "u2", 40),
    ("slid", "u2", 42),
    ("sl", "u1", 44),
    ("dlid_path_bits", "u1", 45),
)


class _RowType(dict[str, Any]):
    """A completion as ``CQ.poll_into`` writes it: a ``struct ibv_wc`` of 48 bytes.

    ``numpy.zeros(256, numpy.dtype(rp.WC_DTYPE))`` makes an array of 256 rows. All fields are plain
    unsigned integers in native byte order:

    - wr_id (8 bytes): the wr_id of the work request.
    - status (4): how it ended, a WCStatus; 0 is SUCCESS. ``rp.WCStatus(row["status"])`` gives its
      name; explain() and 'rdmapost explain' name its causes.
    - opcode (4): the operation that completed, a WCOpcode.
    - vendor_err (4): the device's own error code.
    - byte_len (4): valid for receives, RDMA reads and atomics; for a UD receive, it includes the
      40-byte GRH.
    - imm_data (4): for a receive with WITH_IMM in wc_flags, the immediate data in host order; with
      WITH_INV, the key that the peer invalidated; otherwise 0.
    - qp_num (4): number of the local queue pair.
    - src_qp (4): number of the sender's queue pair (UD).
    - wc_flags (4): what else the completion carries, WCFlags.
    - pkey_index, slid (2 each), sl, dlid_path_bits (1 each): from the packet's headers (UD).

    In a row whose status is not SUCCESS, only wr_id, status, qp_num and vendor_err are valid; the
    other fields are 0. Rows have no tags and no timestamps. ``AH.from_wc`` and ``WC.datagram`` need
    a WC: a program that answers datagrams polls with ``CQ.poll``.
    """

    __module__ = "rdmapost"

    def __reduce__(self) -> tuple[Any, ...]:
        # Its class has no public name.
        return dict, (dict(self),)


WC_DTYPE: Any = _RowType(
    names=[name for name, _, _ in _FIELDS],
    formats=[code for _, code, _ in _FIELDS],
    offsets=[offset for _, _, offset in _FIELDS],
    itemsize=_ROW.size,
)


_RECV = int(WCOpcode.RECV)

_SHARED = (
    "{} uses a shared completion channel: wait with channel.get_cq_event(), "
    "or create it without channel="
)

_BATCH = 64
"""How many completions ``poll`` returns at most by default (``_c/polling/cq.c``)."""


class CQ(CompletionSource, struct="ibv_cq"):
    """A completion queue (ibv_create_cq(3)).

    If more completions are outstanding than it has entries, it overruns: completions are lost, and
    the queue pairs that report their completions to it fail.

    Args:
        context: an open device.
        cqe: entries it must hold, 1..the device's max_cqe.
        channel: the channel on which it reports completions; None gives the CQ a
            private one, on which ``wait`` sleeps.
        comp_vector: the completion vector that signals its events, from 0; a ValueError
            names the range.
        wc_flags: extra fields of its completions, a WCExFlags: timestamps, or tags, which the
            CQ of a tag-matching SRQ must report.  With any flag it is an extended CQ
            (ibv_create_cq_ex(3)).

    Attributes:
        wc_flags: the flags that it was created with.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: cqe or comp_vector is out of range, wc_flags has bits that are not in
            WCExFlags, or the channel belongs to another open device.
        ClosedError: the device is closed.
        UnsupportedError: the device cannot report a field that wc_flags names.
        VerbsError: the device refused.
    """

    __slots__ = ("_cqe", "channel", "context", "wc_flags")

    _type_name = "CQ"
    _rank = 5

    def __init__(
        self,
        context: Context,
        cqe: int = 256,
        *,
        channel: CompChannel | None = None,
        comp_vector: int = 0,
        wc_flags: int = WCExFlags(0),
    ) -> None:
        expect("context", context, Context)
        expect("channel", channel, CompChannel, None)
        self.context = context
        comp_vector = within("comp_vector", comp_vector, 0, context.num_comp_vectors - 1)
        cqe = _check_cqe(context, cqe)
        if channel is not None and channel.context is not context:
            raise ValueError("the channel was created on another open device")
        self.channel = channel
        self.wc_flags = flags("wc_flags", wc_flags, _ALL_WC_EX, "WCExFlags")
        self._overrun = False
        own = None
        try:
            if channel is None:
                own = OwnChannel(context)
            self._create(own or channel, cqe, comp_vector)
        finally:
            if own is not None:
                # The private channel closes with the CQ; if no CQ was created, close it now.
                own._abandoned = True
                if self._handle is None:
                    close_quietly(own)
        if channel is not None:
            # Another thread may close the CQ.
            self._verb(functools.partial(announce_on, channel, self))

    def _create(self, announces: Any, cqe: int, comp_vector: int) -> None:
        context = self.context
        provider = provider_of(context)
        reports = struct_of(announces)
        self._drop_event = functools.partial(provider.get_cq_event, reports, {})
        self._poller = native.Poller(
            self,
            in_flight_of(context),
            invalidated_of(context),
            int(self.wc_flags),
            provider.spin_ns,
            announces.fileno(),
            self._drop_event,
        )
        args: tuple[Any, ...] = (context, cqe, announces, comp_vector)
        create: Any = provider.create_cq
        if self.wc_flags:
            args, create = (*args, int(self.wc_flags)), provider.create_cq_ex
        try:
            self._make(create, args, provider.destroy_cq, (context, announces))
        except VerbsError as error:
            if error.errno in _UNSUPPORTED and (reason := self._not_reported()):
                raise UnsupportedError(error.call, errno.EOPNOTSUPP, reason) from None
            if error.errno in NO_MORE:
                error.hint = error.hint or no_more(context, "CQs", "max_cq", error.errno)
            raise
        # Another thread may have closed the CQ.
        self._cqe: int = self._verb(_CQE)

    def _not_reported(self) -> str | None:
        """Say which of wc_flags the device does not report, or return None if that is unknown."""
        name, attr = self.context.name, self.context.attr
        if self.wc_flags & _TIMESTAMPS and not attr.completion_timestamp_mask:
            return f"{name} has no completion timestamps (its completion_timestamp_mask is 0)"
        if self.wc_flags & WCExFlags.WITH_TM_INFO and not attr.tm_caps.max_num_tags:
            return f"{name} has no tag matching"
        if rarely := self.wc_flags & _RARELY_REPORTED:
            return f"{name} does not report {rarely}"
        return None

    def __str__(self) -> str:
        return (
            f"CQ of {counted(self._cqe, 'entry', 'entries')}"
            if hasattr(self, "_cqe")
            else self._type_name
        )

    def _event_fd(self) -> int:
        # Read it in a verb, so that the channel's struct is not freed during the call.
        fd: int = self._verb(_CHANNEL_FD)
        return fd

    @property
    def cqe(self) -> int:
        """How many entries it can hold: at least as many as were last requested."""
        return self._cqe

    def resize(self, cqe: int) -> None:
        """Change how many entries it can hold; its completions stay in it.

        Args:
            cqe: entries it must hold, 1..the device's max_cqe, and at least as many as it
                has completions.  The device may grant more: see the attribute cqe.

        Raises:
            TypeError: cqe is not an integer.
            ValueError: cqe is out of range.
            ClosedError: the CQ is closed.
            UnsupportedError: the device cannot resize CQs.
            VerbsError: the device refused, because the CQ has more completions or the device has no
                memory.

        See ibv_resize_cq(3).
        """
        cqe = _check_cqe(self.context, cqe)
        try:
            self._verb(provider_of(self.context).resize_cq, cqe)
        except VerbsError as error:
            if error.errno in _TOO_SMALL:
                error.hint = error.hint or (
                    f"there may be more than cqe={cqe} completions in it; poll them first"
                )
            raise
        finally:
            # Record the new size even if a signal handler raised after the call, and record it
            # again if another thread has resized the CQ since.
            noted = None
            with contextlib.suppress(ClosedError):
                while noted != (granted := self._verb(_CQE)):
                    self._cqe = noted = granted

    def req_notify(self, solicited_only: bool = False) -> None:
        """Request one event on the channel, at the next completion.

        Args:
            solicited_only: only for a receive whose sender set SendFlags.SOLICITED,
                or for an error completion.

        Raises:
            TypeError: solicited_only is not a bool.
            RdmaError: the CQ was created without a channel.
            ClosedError: the CQ is closed.
            VerbsError: the device failed.

        See ibv_req_notify_cq(3).
        """
        expect("solicited_only", solicited_only, bool)
        if self.channel is None:
            self._open_struct()
            raise RdmaError(
                f"{self} was created without a completion channel: pass CQ(channel=...); its "
                "private channel is only for cq.wait()"
            )
        self._poller.notify(self, solicited_only)

    def poll(self, max_entries: int = _BATCH) -> list[WC]:
        """Return the available completions, without waiting.

        Args:
            max_entries: how many to return at most.

        Raises:
            TypeError: max_entries is not an integer.
            ValueError: it is negative.
            ClosedError: the CQ is closed.
            VerbsError: the device failed.

        See ibv_poll_cq(3).
        """
        if type(max_entries) is not int:
            max_entries = index("max_entries", max_entries)
        found: list[WC] = []
        try:
            self._poller.poll(self, max_entries, found)
            return found
        except BaseException:
            # A signal handler may have raised after the poll.
            self._poller.put_back(found)
            raise

    def wait(
        self, count: int = 1, timeout: float | None = 5.0, *, max_entries: int | None = None
    ) -> list[WC]:
        """Wait for count completions; return them and any others available, up to max_entries.

        If enough are available, it returns at once.  Otherwise it spins, then sleeps; while other
        threads run Python, the spinning and the sleeping each cost one GIL switch interval.
        Closing the CQ ends the wait; an overrun of the CQ does not.  Threads are served in the
        order in which they began to wait, but one that waits for many completions does not delay
        those that wait for few.  While tasks of a stopped or blocked event loop wait for the same
        CQ, a thread may notice a completion 20 ms late.

        Args:
            count: how many to wait for.
            timeout: seconds; None for no limit.
            max_entries: how many to return at most, if more than count are available; None
                returns exactly count.

        Raises:
            WaitTimeout: fewer completions came; they are kept for the next poll or wait.  The
                message says if one of them has failed, and if the CQ is known to have overrun
                and thus to have lost completions.
            WaitCancelled: cancel_waits() was called.
            TypeError: count, timeout or max_entries is not a number.
            ValueError: count is negative or more than max_entries, or timeout is NaN.
            RdmaError: the CQ uses a shared completion channel.
            ClosedError: the CQ is closed, or is closed during the wait.
            VerbsError: the device failed.
        """
        if self.channel is not None:
            raise RdmaError(_SHARED.format(self))
        if max_entries is not None:
            count, max_entries = check_max_entries(count, max_entries)
        if type(timeout) is not float or timeout != timeout:
            timeout = seconds(timeout)
        if type(count) is not int:
            count = index("count", count)
        found: list[WC] = []
        try:
            # The loop is in _c/polling/cq.c.
            available = self._poller.wait(self, count, 0, timeout, found)
            if available is None:
                if max_entries is not None:
                    # A failure is left to the next poll: count completions have arrived.
                    with contextlib.suppress(ClosedError, VerbsError):
                        self._poller.poll(self, max_entries - len(found), found)
                return found
        except BaseException:
            self._poller.put_back(found)
            raise
        raise timed_out(self, available, count, timeout)

    def poll_into(self, buffer: Any, /) -> int:
        """Write the available completions to a buffer, and return how many.

        Each takes a row of 48 bytes, with the fields of WC_DTYPE:
        ``numpy.zeros(256, numpy.dtype(rp.WC_DTYPE))`` has room for 256. ``AH.from_wc`` and
        ``WC.datagram`` (UD) need WCs, which ``poll`` returns.

        Args:
            buffer: a writable, contiguous buffer of whole rows.

        Returns:
            How many rows were written; the rest of the buffer is unchanged.

        Raises:
            TypeError: it is not a buffer, is read-only, or holds pointers that Python follows.
            ValueError: it is not contiguous, or does not hold whole rows.
            ClosedError: the CQ is closed.
            VerbsError: the device failed.

        See ibv_poll_cq(3).
        """
        raise NotImplementedError  # in C: _c/polling/cq.c

    def wait_into(self, buffer: Any, count: int = 1, timeout: float | None = 5.0) -> int:
        """Wait for completions, write them to a buffer, and return how many.

        It waits as ``wait`` does.

        Args:
            buffer: as for poll_into.
            count: how many to wait for; others that are available are also written.
            timeout: seconds; None for no limit.

        Returns:
            How many rows were written, at least count.

        Raises:
            WaitTimeout: fewer completions came; they are kept for the next poll or wait.
            WaitCancelled: cancel_waits() was called.
            TypeError: an argument has the wrong type, or buffer is read-only.
            ValueError: the buffer is not contiguous, does not hold whole rows, or holds fewer than
                count; count is negative, or timeout is NaN.
            RdmaError: the CQ reports its completions on a shared channel.
            ClosedError: the CQ is closed, or is closed during the wait.
            VerbsError: the device failed.
        """
        if self.channel is not None:
            raise RdmaError(_SHARED.format(self))
        timeout, count = seconds(timeout), index("count", count)
        # Take a view first: any code of the buffer's class runs now, not in the middle of the wait.
        with _view_of(buffer) as rows:
            available = self._poller.wait(self, count, 0, timeout, rows)
        assert available is not None
        if available >= 0:
            return available
        raise timed_out(self, -1 - available, count, timeout)

    def cancel_waits(self, for_good: bool = False) -> None:
        """End the waits in progress: they raise WaitCancelled.

        This ends wait and wait_into in any thread, and completions and ``async for`` in any task.
        The waits consume no completions, even if some have just come.  Call it from any thread, or
        from a signal handler.

        To end a loop that waits, pass for_good: without it, a loop that is between two waits
        would wait again.

        Args:
            for_good: also cancel every later wait on this CQ.  ``poll`` and ``poll_into`` still
                work.

        Raises:
            TypeError: for_good is not a bool.
            ClosedError: the CQ is closed.
        """
        expect("for_good", for_good, bool)
        struct_of(self)
        self._poller.cancel(for_good)

    async def completions(
        self, count: int = 1, timeout: float | None = 5.0, *, max_entries: int | None = None
    ) -> list[WC]:
        """Wait in an asyncio task for count completions; return them and more, up to max_entries.

        No thread blocks, and cancelling the task loses no completion.  If enough are available,
        it returns without suspending: in a loop that must let other tasks run, await
        asyncio.sleep(0) too.  Several tasks of one event loop may wait; one that waits for many
        completions does not delay one that waits for few.  The CQ may share its channel with
        other CQs.  ``async for wc in cq`` yields completions one at a time.

        Args:
            count: how many to wait for.
            timeout: seconds; None for no limit.
            max_entries: how many to return at most, as for wait; completions that other tasks
                wait for are left to them.

        Raises:
            WaitTimeout: fewer completions came; they are kept for the next poll or wait.  The
                message says if one of them has failed, and if the CQ is known to have overrun
                and thus to have lost completions.
            WaitCancelled: cancel_waits() was called.
            TypeError: count, timeout or max_entries is not a number.
            ValueError: count is negative or more than max_entries, or timeout is NaN.
            RdmaError: a thread or another event loop is already waiting on the same CQ
                or channel.
            ClosedError: the CQ is closed, or is closed during the wait.
            VerbsError: the device failed.
        """
        return await _aio_completions()(self, count, timeout, max_entries)

    def __aiter__(self) -> AsyncIterator[WC]:
        from .aio import Completions

        return Completions(self)


with_c_methods(CQ)


@functools.cache
def _aio_completions() -> Callable[..., Awaitable[list[WC]]]:
    from .aio import completions  # asyncio is slow to import

    return completions


def _view_of(buffer: Any) -> memoryview:
    """Return a writable view of a buffer; errors name what the caller passed."""
    found = type(buffer).__name__
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise TypeError(f"buffer: expected a writable buffer, got {found}") from error
    except (BufferError, ValueError) as error:
        raise ValueError(f"buffer: {error}") from None
    if view.readonly:
        raise TypeError(f"buffer: expected a writable buffer, got {found}, which is read-only")
    if not view.c_contiguous:
        raise ValueError(
            f"buffer: expected a contiguous buffer, got {found}, which is not contiguous"
        )
    return view


def _check_cqe(context: Context, cqe: int) -> int:
    """Check a CQ's size against the device's limit, and return it as an int."""
    cqe, limit = index("cqe", cqe), context.attr.max_cqe
    if not 1 <= cqe <= limit:
        raise ValueError(f"cqe={shown(cqe)} is not in 1..{limit}, the max_cqe of {context.name}")
    return cqe


_ALL_WC_EX = functools.reduce(operator.or_, WCExFlags)
_TIMESTAMPS = WCExFlags.WITH_COMPLETION_TIMESTAMP | WCExFlags.WITH_COMPLETION_TIMESTAMP_WALLCLOCK
_RARELY_REPORTED = WCExFlags.WITH_CVLAN | WCExFlags.WITH_FLOW_TAG
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""The errnos with which devices refuse a flag that they do not support."""
_CQE = operator.attrgetter("cqe")
_CHANNEL_FD = operator.attrgetter("channel.fd")
_TOO_SMALL = frozenset({errno.EINVAL, errno.EBUSY})
"""The errnos with which devices refuse a size below the number of completions in the CQ."""


def keep_completions(cq: CQ) -> None:
    """Move all completions of a CQ to its backlog, before one of its QPs is destroyed or reset.

    Some devices drop the completions of such a QP; those in the backlog are delivered on every
    device.
    """
    with contextlib.suppress(ClosedError, VerbsError):
        cq._poller.fill(cq, cq._poller.fill(cq, 0) + cq._cqe)

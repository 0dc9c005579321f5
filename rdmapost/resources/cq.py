"""Completion queues and completions."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from .._arguments import counted, expect, index, seconds, within
from .._binding import native
from ..enums import WCFlags, WCOpcode, WCStatus
from ..errors import ClosedError, CompletionError, RdmaError, VerbsError
from .channel import CompChannel, OwnChannel, announce_on
from .device import Context, in_flight_of, provider_of
from .events import timed_out
from .grh import Datagram, read_datagram
from .resource import close_quietly, struct_of
from .waiting import CompletionSource

if TYPE_CHECKING:
    from .aio import Completions


class WC(NamedTuple):
    """A completion (``struct ibv_wc``, ibv_poll_cq(3)).

    In an error completion only wr_id, status, qp_num and vendor_err are valid;
    the other fields are None or 0.

    Attributes:
        wr_id: the wr_id of the work request.
        status: how the work request ended.
        opcode: the operation that completed, or None.
        byte_len: bytes received (on UD including the 40 bytes of GRH), read or exchanged.
        imm_data: immediate data in host order, or None.
        invalidated_rkey: the key that the peer invalidated, or None.
        qp_num: number of the local queue pair.
        src_qp: number of the sender's queue pair (UD).
        wc_flags: what else the completion carries, a WCFlags.
        vendor_err: the device's own error code.
        pkey_index, slid, sl, dlid_path_bits: from the packet's headers (UD).
        tm_tag, tm_priv: the tag of a message that matched (TM_MATCH), and 32 bits that
            its sender chose; None in other completions.  A message that nothing matched
            has both in its header.
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

    def check(self) -> WC:
        """Return the completion if its status is SUCCESS.

        Raises:
            CompletionError: its status is another one.
        """
        if self.status:
            raise CompletionError(
                self,
                f"the work request with wr_id {self.wr_id} on QP {self.qp_num:#x} ended with "
                f"{self.status.name}"
                + (f" (vendor_err {self.vendor_err:#x})" if self.vendor_err else ""),
            )
        return self

    def datagram(self, received: Any) -> Datagram:
        """Return the GRH and the payload of a receive on a UD queue pair.

        Use it for UD only: messages of other types have no GRH.

        Args:
            received: the RecvWR that was posted, or a buffer that begins with the
                bytes that it received.

        Raises:
            CompletionError: the receive failed.
            TypeError: received is neither.
            ValueError: this completion is not that of a receive, or received does not
                hold its bytes.
            ClosedError: a memory region that the RecvWR names is closed.

        See ibv_post_recv(3).
        """
        self.check()
        if self.opcode is None or not self.opcode & _RECV:
            raise ValueError(f"{getattr(self.opcode, 'name', None)} received nothing")
        return read_datagram(received, self.byte_len, bool(self.wc_flags & WCFlags.GRH))


_RECV = int(WCOpcode.RECV)

_BATCH = 64
"""How many completions one call polls at most (``_c/polling/cq.c``)."""


class CQ(CompletionSource, struct="ibv_cq"):
    """A completion queue (ibv_create_cq(3)).

    If more completions are outstanding than it has entries, it overruns: completions are lost, and
    the queue pairs that complete there fail.

    Args:
        context: an open device.
        cqe: entries it must hold, 1..the device's max_cqe.
        channel: the channel on which it reports completions; None gives the CQ a
            private one, on which ``wait`` sleeps.
        comp_vector: the completion vector that signals its events, from 0; a ValueError
            names the range.
        tm_info: whether completions carry the tags of tag-matching messages, as the
            CQ of a tag-matching SRQ must.

    Attributes:
        cqe: entries it holds.

    Raises:
        TypeError: an argument is of another type.
        ValueError: cqe or comp_vector is out of range.
        ClosedError: the device is closed.
        UnsupportedError: tm_info is set, and the device has no tag matching.
        VerbsError: the device refused.
    """

    __slots__ = ("_channel", "_extended", "channel", "context", "cqe")

    _type_name = "CQ"
    _rank = 5

    def __init__(
        self,
        context: Context,
        cqe: int = 128,
        *,
        channel: CompChannel | None = None,
        comp_vector: int = 0,
        tm_info: bool = False,
    ) -> None:
        expect("context", context, Context)
        expect("channel", channel, CompChannel, None)
        cqe = index("cqe", cqe)
        self.context = context
        vectors = struct_of(context).num_comp_vectors
        comp_vector = within("comp_vector", comp_vector, 0, vectors - 1)
        max_cqe = context.attr.max_cqe
        if not 1 <= cqe <= max_cqe:
            raise ValueError(f"cqe={cqe} is not in 1..{max_cqe}, what {context.name} can hold")
        if channel is not None and channel.context is not context:
            raise ValueError("the channel was created on another open device")
        self.channel = channel
        self._extended = bool(tm_info)
        self._overrun = False
        own = None
        try:
            if channel is None:
                own = OwnChannel(context)
            self._create(own or channel, cqe, comp_vector)
        finally:
            if own is not None:
                # It closes with the CQ, or at once if there is none.
                own._abandoned = True
                if self._handle is None:
                    close_quietly(own)
        if channel is not None:
            announce_on(channel, self, self._handle)

    def _create(self, announces: Any, cqe: int, comp_vector: int) -> None:
        context = self.context
        provider = provider_of(context)
        self._channel = struct_of(announces)
        self._drop_event = functools.partial(provider.get_cq_event, self._channel, {})
        self._poller = native.Poller(
            in_flight_of(context),
            self._extended,
            provider.spin_ns,
            self._channel.fd,
            self._drop_event,
        )
        create = provider.create_cq_ex if self._extended else provider.create_cq
        handle = self._make(
            create,
            (context, cqe, announces, comp_vector),
            provider.destroy_cq,
            (context, announces),
        )
        self.cqe: int = handle.cqe

    def __str__(self) -> str:
        return (
            f"CQ of {counted(self.cqe, 'entry', 'entries')}"
            if hasattr(self, "cqe")
            else self._type_name
        )

    def _event_fd(self) -> int:
        fd: int = self._channel.fd
        return fd

    def req_notify(self, solicited_only: bool = False) -> None:
        """Request one event on the channel, at the next completion.

        Args:
            solicited_only: only at a receive whose sender set SendFlags.SOLICITED,
                or at an error completion.

        Raises:
            RdmaError: the CQ was created without a channel.
            ClosedError: the CQ is closed.
            VerbsError: the device failed.

        See ibv_req_notify_cq(3).
        """
        if self.channel is None:
            self._live()
            raise RdmaError(f"{self} has no channel to announce completions on: CQ(channel=...)")
        self._poller.notify(self, bool(solicited_only))

    def poll(self, max_entries: int = _BATCH) -> list[WC]:
        """Return the completions that are available, without waiting.

        Args:
            max_entries: how many at most.

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
            # A signal handler may raise after they have arrived here.
            self._poller.put_back(found)
            raise

    def wait(self, count: int = 1, timeout: float | None = 5.0) -> list[WC]:
        """Wait for completions and return exactly that many.

        It spins briefly, then sleeps on the completion channel.  If another thread
        keeps the GIL busy, spinning and sleeping each cost one switch interval
        (sys.getswitchinterval); completions that are already there cost none.
        Closing the CQ ends the wait; a CQ that has overrun does not.  If several threads wait,
        the first to have begun is served first; one that wants many completions does not hold
        up those that want few.  While tasks of a stopped or blocked event loop wait for the
        same CQ, a thread may notice a completion 20 ms late.

        Args:
            count: how many.
            timeout: seconds; None for no limit.

        Raises:
            WaitTimeout: fewer came; those stay for the next poll or wait.  The text says
                if the CQ is known to have overrun, and so has lost completions.
            TypeError: count or timeout is not a number.
            ValueError: count is negative, or timeout is NaN.
            RdmaError: the CQ reports its completions on a shared channel.
            ClosedError: the CQ is closed, or is closed during the wait.
            VerbsError: the device failed.
        """
        if self.channel is not None:
            raise RdmaError(
                f"{self} announces its completions on a channel that it shares: wait with "
                "channel.get_cq_event(), or create it without channel="
            )
        if type(timeout) is not float or timeout != timeout:
            timeout = seconds(timeout)
        if type(count) is not int:
            count = index("count", count)
        found: list[WC] = []
        try:
            available = self._poller.wait(self, count, 0, timeout, found)
            if available is None:
                return found
        except BaseException:
            self._poller.put_back(found)
            raise
        raise timed_out(self, available, count, timeout)

    async def completions(self, count: int = 1, timeout: float | None = None) -> list[WC]:
        """Wait for completions in an asyncio task and return exactly that many.

        No thread blocks, and cancelling the task loses no completion.  If that many are already
        there it returns without suspending: a loop that must let other tasks run awaits
        asyncio.sleep(0), too.  Several tasks of
        one event loop may wait; one that wants few is not held up by one that wants many.
        CQs that share a channel work too.  ``async for wc in cq`` yields completions one
        at a time.

        Args:
            count: how many.
            timeout: seconds; None for no limit.

        Raises:
            WaitTimeout: fewer came; those stay for the next poll or wait.  The text says
                if the CQ is known to have overrun, and so has lost completions.
            TypeError: count or timeout is not a number.
            ValueError: count is negative, or timeout is NaN.
            RdmaError: a thread or another event loop is already waiting on the same CQ
                or channel.
            ClosedError: the CQ is closed, or is closed during the wait.
            VerbsError: the device failed.
        """
        from .aio import completions  # asyncio takes long to import

        return await completions(self, count, timeout)

    def __aiter__(self) -> Completions:
        from .aio import Completions

        return Completions(self)


def keep_completions(cq: CQ) -> None:
    """Poll everything in the queue, before or after one of its QPs is destroyed.

    Some devices drop the completions of a destroyed QP; taken here, they
    are delivered on every device.
    """
    with contextlib.suppress(ClosedError, VerbsError):
        cq._poller.fill(cq, cq._poller.fill(cq, 0) + cq.cqe)

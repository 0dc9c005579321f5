"""Completion queues and completions."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from ._binding import address_of, door
from ._resource import Resource
from .channel import CompChannel, OwnChannel, wait_readable
from .device import Context
from .enums import WCFlags, WCOpcode, WCStatus
from .errors import CompletionError, InUseError, RdmaError, VerbsError, WaitTimeout
from .grh import Datagram, read_datagram

if TYPE_CHECKING:
    from .aio import Completions

__all__ = ["CQ", "WC"]


class WC(NamedTuple):
    """A completion (``struct ibv_wc``, ibv_poll_cq(3)).

    In an error completion only wr_id, status, qp_num and vendor_err mean
    anything; the rest is None or 0.

    Attributes:
        wr_id: what the work request carried.
        status: how it ended.
        opcode: what completed, or None.
        byte_len: bytes received (with the 40 bytes of GRH on UD), read or exchanged.
        imm_data: immediate data in host order, or None.
        invalidated_rkey: the key that the peer invalidated, or None.
        qp_num: number of the local queue pair.
        src_qp: number of the sender's queue pair (UD).
        wc_flags: what the completion carries.
        vendor_err: the device's own error code.
        pkey_index, slid, sl, dlid_path_bits: of the packet (UD).
        tm_tag, tm_priv: the tag, and the sender's 32 bits, of a tag-matching
            message as it arrived; None elsewhere.
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
        """Return the completion if it is a success.

        Raises:
            CompletionError: it is not.
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
        """Return what a receive on a UD queue pair got: the GRH, and the payload.

        Only for UD: elsewhere a message has nothing in front.

        Args:
            received: the RecvWR that was posted, or the buffer of its bytes.

        Raises:
            CompletionError: it failed.
            TypeError: this is neither.
            ValueError: nothing was received, or these are other buffers.
            ClosedError: a region of them is closed.

        See ibv_post_recv(3).
        """
        self.check()
        if self.opcode is None or not self.opcode & _RECV:
            raise ValueError(f"{getattr(self.opcode, 'name', None)} received nothing")
        return read_datagram(received, self.byte_len, bool(self.wc_flags & WCFlags.GRH))


_RECV = int(WCOpcode.RECV)

door.make_completions_of(
    WC, {int(status): status for status in WCStatus}, WCStatus.GENERAL_ERR,
    {int(opcode): opcode for opcode in WCOpcode},
    {flags: WCFlags(flags) for flags in range(128)}, WCFlags,
)  # fmt: skip

_BATCH = 64
"""Completions that one call polls at most (``_c/completions.c``)."""


class CQ(Resource):
    """A completion queue (ibv_create_cq(3)).

    Args:
        context: an open device.
        cqe: entries it must hold, 1..the device's max_cqe.
        channel: where it announces completions; without one it has a channel
            of its own, and ``wait`` sleeps on that.
        comp_vector: which interrupt vector signals it.
        tm_info: completions tell the tags of tag-matching messages; the CQ of a
            tag-matching SRQ needs it.

    Attributes:
        cqe: entries it holds.

    Raises:
        ValueError: cqe is out of range.
        ClosedError: the device is closed.
        UnsupportedError: tm_info is wanted, and the device has no tag matching.
        VerbsError: the device refused.
    """

    __slots__ = (
        "_address", "_awake", "_backlog", "_channel", "_extended", "_lock", "_sleeping", "_waiting",
        "channel", "context", "cqe",
    )  # fmt: skip

    _kind = "CQ"
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
        self.context = context
        context._live()
        most = context.attr.max_cqe
        if not 1 <= cqe <= most:
            raise ValueError(f"cqe={cqe} is not in 1..{most}, what {context.name} can hold")
        self._backlog: deque[WC] = deque()
        self._lock = threading.Lock()
        self._awake = threading.Condition(self._lock)
        self._waiting = 0
        self._sleeping = False
        provider = context._provider
        if channel is not None and channel.context is not context:
            raise ValueError("the channel was created on another open device")
        self.channel = channel
        announces = OwnChannel(context) if channel is None else channel
        self._channel = announces._live()
        create = provider.create_cq_ex if tm_info else provider.create_cq
        handle = self._make(
            create, (context, cqe, announces, comp_vector), provider.destroy_cq,
            (context, announces),
        )  # fmt: skip
        if channel is None:
            announces._abandon()
        self._address = address_of(handle)
        # The two structs are one, with more behind it (ibv_cq_ex_to_cq).
        self._extended = self._address if tm_info else 0
        self.cqe: int = handle.cqe
        if channel is not None:
            channel._announced_by(self)

    def __str__(self) -> str:
        return f"CQ of {self.cqe} entries" if hasattr(self, "cqe") else self._kind

    def _release(self) -> None:
        # Whoever polls holds the lock.
        with self._lock:
            if self._waiting:
                raise InUseError(
                    f"{self} cannot be closed: a thread or task waits for its completions"
                )

    def req_notify(self, solicited_only: bool = False) -> None:
        """Ask for one event on the channel, at the next completion.

        Args:
            solicited_only: only at a completion that the sender asked to be
                announced (SendFlags.SOLICITED), or at an error.

        Raises:
            RdmaError: the CQ was created without a channel to announce it on.
            ClosedError: the CQ is closed.
            VerbsError: the device failed.

        See ibv_req_notify_cq(3).
        """
        self._live()
        if self.channel is None:
            raise RdmaError(f"{self} has no channel to announce completions on: CQ(channel=...)")
        self._arm(solicited_only)

    def _arm(self, solicited_only: bool = False) -> None:
        """Ask for one event, of a CQ that is open."""
        if error := door.req_notify(self, bool(solicited_only)):
            raise VerbsError("ibv_req_notify_cq", abs(error))

    def poll(self, max_entries: int = _BATCH) -> list[WC]:
        """Return the completions that are there now, without waiting.

        Args:
            max_entries: how many at most.

        Raises:
            ClosedError: the CQ is closed.
            VerbsError: the device failed.
        """
        return self._take(max_entries)

    def wait(self, count: int = 1, timeout: float | None = 5.0) -> list[WC]:
        """Wait for completions and return exactly that many.

        The wait spins for a moment, and then sleeps on the completion channel.
        Beside another thread that keeps the GIL busy, each of the two costs
        one turn of that thread, and completions that are there cost none.

        Args:
            count: how many.
            timeout: seconds; None waits as long as it takes.

        Raises:
            WaitTimeout: fewer came; those stay for the next poll or wait.
            RdmaError: the CQ announces its completions on a channel that it shares.
            ClosedError: the CQ is closed.
            VerbsError: the device failed.
        """
        if self.channel is not None:
            raise RdmaError(
                f"{self} announces its completions on a channel that it shares: wait with "
                "channel.get_cq_event(), or create it without channel="
            )
        if found := self._take(count, count):
            return found
        deadline = None if timeout is None else time.monotonic() + timeout
        backlog, spin_ns = self._backlog, self.context._provider.spin_ns
        with self._lock:
            self._waiting += 1
            try:
                self._live()
                while True:
                    if spin_ns:
                        # This gives up the GIL, and what was there already is not worth that.
                        self._fill(backlog, count, spin_ns)
                    if len(backlog) >= count:
                        return [backlog.popleft() for _ in range(count)]
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise WaitTimeout(
                            f"{len(backlog)} of {count} completions came within {timeout:g} s"
                        )
                    if self._sleeping:
                        # One thread takes the events, and wakes the others.
                        self._awake.wait(left)
                    else:
                        self._sleep(count, left)
                    # What came stays in the backlog until it is enough: nothing can lose it.
                    self._fill(backlog, count)
            finally:
                self._waiting -= 1

    def _take(self, most: int, least: int = 0) -> list[WC]:
        """Return up to `most` that are there now; where there are fewer than `least`, none."""
        found: list[WC] = []
        backlog = self._backlog
        # acquire() and try would take less time, but an interrupt between the two keep the lock.
        with self._lock:
            if self._handle is None:
                self._live()
            try:
                if not backlog and 0 < most <= _BATCH:
                    # As _fill does, whose call would take most of the time.
                    polled = door.poll(
                        self._address, self._extended, most, 0, self.context._queues, found
                    )
                    if polled < 0:
                        raise VerbsError("ibv_poll_cq", -polled)
                else:
                    while backlog and len(found) < most:
                        found.append(backlog.popleft())
                    self._fill(found, most)
                if len(found) >= least:
                    return found
            except BaseException:
                # What was taken stays, also where an interrupt came.
                backlog.extendleft(reversed(found))
                raise
            backlog.extendleft(reversed(found))
        return []

    async def completions(self, count: int = 1, timeout: float | None = None) -> list[WC]:
        """Wait for completions in an asyncio task and return exactly that many.

        No thread waits, and cancelling loses none.  Several tasks of one event loop may
        wait; one who wants few does not wait for one who wants many.  CQs that share a
        channel may be waited for too.  ``async for wc in cq`` gives one after another.

        Args:
            count: how many.
            timeout: seconds; None waits as long as it takes.

        Raises:
            WaitTimeout: fewer came; those stay for the next poll or wait.
            RdmaError: a thread sleeps on the same CQ or channel, or tasks of another
                event loop do.
            ClosedError: the CQ is closed.
            VerbsError: the device failed.
        """
        from .aio import completions  # asyncio takes long to import

        return await completions(self, count, timeout)

    def __aiter__(self) -> Completions:
        from .aio import Completions

        return Completions(self)

    def _sleep(self, count: int, seconds: float | None) -> None:
        """Sleep on the channel, without the lock; it is held before and after."""
        self._sleeping = True
        try:
            # Ask for an event, then look again: what came in between raises none.
            self._arm()
            self._fill(self._backlog, count)
            if len(self._backlog) >= count:
                return
            try:
                self._lock.release()
                ready = wait_readable(self._channel.fd, seconds)
            finally:
                self._lock.acquire()
            if ready:
                self.context._provider.drop_cq_event(self._channel)
        finally:
            self._sleeping = False
            self._awake.notify_all()

    def _fill(self, into: list[WC] | deque[WC], count: int, spin_ns: int = 0) -> None:
        """Poll with the lock held, until there are `count`; spin that long for them."""
        while (lacking := count - len(into)) > 0:
            room = min(lacking, _BATCH)
            polled = door.poll(
                self._address, self._extended, room, spin_ns, self.context._queues, into
            )
            if polled < 0 and not into:
                raise VerbsError("ibv_poll_cq", -polled)
            if polled < room:
                return

    def _keep(self, *, wait: bool) -> None:
        """Take what is in the queue now, before or after one of its QPs is destroyed.

        Devices differ in what they do to completions of a destroyed QP; taken
        here, they are delivered on all of them.

        Args:
            wait: wait for whoever is polling, another thread; else leave them to it.
        """
        if self._handle is None or (not wait and self._lock.locked()):
            return
        with self._lock:
            # Not more than it holds: another QP may keep filling it.
            self._fill(self._backlog, len(self._backlog) + self.cqe)

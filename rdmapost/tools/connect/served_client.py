"""A server's device resources for one client."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any

from ..._arguments import within
from ..._binding import native, start_of
from ...enums import Access, QPState, QPType, WCOpcode, WCStatus
from ...errors import ClosedError, RdmaError
from ...posting.wr import RecvWR
from ...resources.channel import CompChannel
from ...resources.cq import CQ, WC
from ...resources.device import Context
from ...resources.device_attr import FLUSH_CAPS
from ...resources.mr import MR
from ...resources.pd import PD
from ...resources.qp import QP
from ...resources.resource import struct_of
from ...standard.wire import GRH_BYTES
from ..resource_stack import NotCopied, ResourceStack
from .exposure import EXPOSABLE, Exposure, bytes_within, windows_access
from .protocol_messages import HEAD_BYTES, Arrival, Hello, Offer, Seen
from .qp_options import Given
from .server_events import Changed
from .wakeup import Wakeup

MAX_LATEST = 1024
"""How many of a client's latest arrivals can be reported."""

_CHANGES = Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
_BY_QP_TYPE = {QPType.RC: EXPOSABLE, QPType.UC: Access.REMOTE_WRITE, QPType.UD: Access(0)}
"""The access that a peer can have through a queue pair of each type."""
_POLL_BATCH = 64
"""Completions taken per poll, so that a flood of them does not stall everything else."""
_FLUSH_S = 1.0
"""How long a device may take to flush the receives of a queue pair in ERR."""
_CHUNK = 1 << 20
_SENDS = 16
_MIN_RNR_TIMER = 24
"""41 ms: the least time before a client retries, if it sends faster than receives are reposted."""


class Place:
    """One of a server's max_clients places, taken for as long as this object exists."""

    __slots__ = ("__weakref__",)


class ServedClient(NotCopied):
    """A client's queue pair, memory and posted receives; the server creates it.

    Each client has its own protection domain: no other client can use its resources, even by
    guessing a key.  If the owner passes an MR or SRQ, all clients share its protection domain.

    Attributes:
        number: the client's number, from 1.
        address: its address, HOST:PORT.
        private_data: bytes that the client sent when it connected.
        qp: the server's queue pair, connected to the client's.  You can post up to 16 sends,
            reads, writes or binds at a time (qp_options), and poll their completions in
            ``qp.send_cq``; the server uses the receive queue, unless the queue pair takes
            its receives from your SRQ.
        mr: the exposed memory.
        offer: the offer to the client.
        channel: reports arrivals; None with an SRQ.
        arrived: how many receives have completed.
        may_have_more: whether there may be completions that the channel will not report again.
    """

    def __init__(
        self,
        context: Context,
        exposure: Exposure,
        given: Given,
        hello: Hello,
        number: int,
        address: str,
    ) -> None:
        exposure.refuse_unenforced(context)
        self._exposure = exposure
        # Wakes the session when the owner closes the client; None once the client is released.
        self._wakeup: Wakeup | None = Wakeup()
        # Also None once the client is released.
        self._place: Place | None = None
        self._close_called = False
        self.number, self.address = number, address
        self.private_data = hello.private_data
        access = exposure.access & _BY_QP_TYPE[hello.qp_type]
        local = Access.LOCAL_WRITE if access & _CHANGES else Access(0)
        self._headroom = GRH_BYTES if hello.qp_type is QPType.UD else 0
        self._slot_size = self._headroom + exposure.receive_size
        self.arrived = 0
        self.may_have_more = False
        self._latest: deque[Arrival] = deque(maxlen=MAX_LATEST)
        self._failed: WCStatus | None = None
        self._free: list[int] = []
        self._stack = ResourceStack()
        with self._stack.closed_on_error() as stack:
            pd = stack.add(PD(context)) if given.pd is None else given.pd
            self._own_pd = pd if given.pd is None else None
            options = {"max_send_wr": _SENDS, "max_send_sge": 1, **given.create}
            if (send_cq := given.cq) is None:
                send_cq = stack.add(CQ(context, max(1, options["max_send_wr"])))
            self.channel: CompChannel | None = None
            if given.srq is None:
                self.channel = stack.add(CompChannel(context))
                # Only for the receives: the owner polls the completions of its own work requests.
                self._cq = stack.add(CQ(context, max(1, exposure.count), channel=self.channel))
                # Never exposed: this holds only received messages.
                room = max(1, exposure.count * self._slot_size)
                self._receive_mr = stack.add(MR(pd, room, Access.LOCAL_WRITE))
            memory: Any = exposure.size if exposure.memory is None else exposure.memory
            if (mr := given.mr) is None:
                mr = stack.add(MR(pd, memory, access | local))
            # Raises ClosedError if the owner has closed the region.
            struct_of(mr)
            self.mr = mr
            if not exposure.shared:
                self.mr.buffer[: len(exposure.data)] = exposure.data
            self.qp = stack.add(
                QP(
                    pd,
                    hello.qp_type,
                    send_cq,
                    send_cq if given.srq is not None else self._cq,
                    srq=given.srq,
                    max_recv_wr=max(1, exposure.count),
                    max_recv_sge=1,
                    port_num=exposure.port_num,
                    gid_index=exposure.gid_index,
                    **options,
                )
            )
            # 31 bits, because a Q_Key's top bit has a meaning. Random, because a peer that does not
            # know the Q_Key reaches nothing.
            qkey = secrets.randbits(31) if hello.qp_type is QPType.UD else 0
            more = exposure.has & sum(FLUSH_CAPS) | windows_access(exposure.has)
            self.qp.to_init(access | more, qkey=qkey)
            if self.channel is not None:
                self._cq.req_notify()
            if exposure.count:
                self.qp.post_recv([self._receive(slot) for slot in range(exposure.count)])
            self.qp.connect(
                None if hello.qp_type is QPType.UD else hello.endpoint,
                **{"min_rnr_timer": _MIN_RNR_TIMER, **given.connect},
            )
            self.offer = Offer(
                client=number,
                device=context.name,
                endpoint=self.qp.endpoint(),
                qkey=qkey,
                addr=self.mr.addr,
                rkey=self.mr.rkey,
                size=self.mr.length,
                access=access,
                receives=exposure.count,
                receive_size=exposure.receive_size,
                private_data=exposure.private_data,
            )

    def __repr__(self) -> str:
        who = f"rdmapost.connect.ServedClient {self.number} at {self.address}"
        if not hasattr(self, "qp"):
            # The constructor has failed, and a traceback shows this.
            return f"<{who}>"
        return f"<{who}: {self.qp}{' (closed)' if self.closed else ''}>"

    @property
    def closed(self) -> bool:
        """True once the client has left, and its queue pair is closed."""
        return self.qp.closed

    def close(self) -> None:
        """Release everything: first the queue pair, so that the memory cannot be reached.

        The client gets an error message, and its connection is closed. Anything that the owner has
        created on the client's own PD (qp.pd), such as address handles (qp.ah_to), is closed, too.

        Raises:
            InUseError: the owner's queue pair on another PD uses the client's CQ.
            VerbsError: the device refused; the rest is closed.
        """
        self._close_called = True
        try:
            self._stack.close_with_all_on(self._own_pd)
        finally:
            # Ring even if the queue pair will not be closed until the end of the verb that this
            # call interrupts.
            if (wakeup := self._wakeup) is not None:
                wakeup.ring()

    # ---- what arrives -------------------------------------------------------

    def _receive(self, slot: int) -> RecvWR:
        start = slot * self._slot_size
        sges = [self._receive_mr[start : start + self._slot_size]] if self._slot_size else []
        return RecvWR(sges, wr_id=slot)

    def poll(self) -> list[Arrival]:
        """Return the arrivals since the last call; with an SRQ, none."""
        if self.channel is None:
            return []
        while self.channel.get_cq_event(0) is not None:
            pass
        # This comes before the poll, so that later arrivals raise an event.
        self._cq.req_notify()
        wcs = self._cq.poll(_POLL_BATCH)
        self.may_have_more = len(wcs) == _POLL_BATCH
        return self._arrivals(wcs)

    def repost(self) -> None:
        """Repost the receives that ``poll`` has returned."""
        free, self._free = self._free, []
        if free:
            self.qp.post_recv([self._receive(slot) for slot in free])

    def stop(self) -> list[Arrival]:
        """Accept nothing more from the client, and return the arrivals not yet polled.

        Never raise: if the device fails, return what the CQ still holds.
        """
        found: list[Arrival] = []
        flushed = False
        with suppress(RdmaError):
            # Report flushes only if the queue pair failed before this.
            failed = self.qp.state is QPState.ERR
            self.qp.to_err()
            if self.channel is None:
                return found
            # Receives complete in order: the messages, then the flushes.
            deadline = time.monotonic() + _FLUSH_S
            while not flushed:
                self._cq.req_notify()
                wcs = self._cq.poll(_POLL_BATCH)
                found += self._arrivals(
                    [wc for wc in wcs if failed or wc.status is not WCStatus.WR_FLUSH_ERR]
                )
                flushed = not self.qp.outstanding.recv
                if not flushed and not wcs:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        break
                    self.channel.get_cq_event(left)
        if not flushed and self.channel is not None:
            with suppress(RdmaError):
                self.qp.close()
            with suppress(RdmaError):
                while wcs := self._cq.poll(_POLL_BATCH):
                    found += self._arrivals([wc for wc in wcs if not wc.status])
        return found

    def _arrivals(self, wcs: Iterable[WC]) -> list[Arrival]:
        found = []
        for wc in wcs:
            if wc.status and self._failed is not None:
                # After a failure, flushes are not reported.
                continue
            self.arrived += 1
            arrival = self._read(wc)
            self._latest.append(arrival)
            found.append(arrival)
            if wc.status:
                self._failed = wc.status
            else:
                self._free.append(wc.wr_id)
        return found

    def _read(self, wc: WC) -> Arrival:
        if wc.status:
            return Arrival(self.arrived, wc.status, None, 0, None, "", b"")
        length, digest, data = wc.byte_len, "", b""
        if wc.opcode is WCOpcode.RECV:
            length -= self._headroom
            start = wc.wr_id * self._slot_size + self._headroom
            message = self._receive_mr.buffer[start : start + length]
            digest, data = hashlib.sha256(message).hexdigest(), bytes(message[:HEAD_BYTES])
        return Arrival(self.arrived, wc.status, wc.opcode, length, wc.imm_data, digest, data)

    def arrival(self, index: int) -> Arrival | None:
        """Return the message that has arrived in a receive, or None if none has.

        Args:
            index: which receive, from 1.

        Raises:
            TypeError: index is not an integer.
            ValueError: it is less than 1.
            RdmaError: the server no longer keeps it, because 1024 or more have arrived since.
        """
        index = within("index", index, 1)
        if index > self.arrived:
            if self._failed is None:
                return None
            return Arrival(index, self._failed, None, 0, None, "", b"")
        if index <= self.arrived - len(self._latest):
            raise RdmaError(
                f"only the last {MAX_LATEST} arrivals of {self.arrived} are still known"
            )
        return self._latest[index - self.arrived - 1]

    # ---- the memory's contents -------------------------------------------

    def look(self, offset: int, length: int) -> Generator[None, None, Seen]:
        """Return the memory's contents; yield after each piece, so that other clients are served.

        A client without read access learns only what it has written itself.

        Args:
            offset, length: which bytes.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: the bytes are not within the exposed memory.
            ClosedError: the owner has closed its MR.
        """
        return self._look(*bytes_within(self.mr.length, offset, length))

    def _look(self, offset: int, length: int) -> Generator[None, None, Seen]:
        exposure, unseen = self._exposure, Seen(offset, length, "", b"")
        # The owner may have removed REMOTE_READ from the region since the offer.
        readable = self.offer.access & self.mr.access & Access.REMOTE_READ
        if (exposure.shared or exposure.data) and not readable:
            return unseen
        self._refuse_closed()
        try:
            buffer, end = self.mr.buffer, offset + length
        except ClosedError:
            raise
        except ValueError:
            # The region is on an address or a dma-buf, which cannot be read here.
            return unseen
        # The bytes hashed and shown are the same, even if a client is writing to the memory.
        data = self._piece(buffer, offset, min(end, offset + HEAD_BYTES))
        digest = hashlib.sha256(data)
        for start in range(offset + len(data), end, _CHUNK):
            if start > offset + HEAD_BYTES:
                yield
            digest.update(self._piece(buffer, start, min(end, start + _CHUNK)))
        return Seen(offset, length, digest.hexdigest(), data)

    def _piece(self, buffer: memoryview, start: int, end: int) -> bytes:
        try:
            view = buffer[start:end]
            # The kernel reads it: if the memory maps a truncated file, copying it here would kill
            # the process.
            piece = native.Room(start_of(view), len(view), view).read()
        except ValueError:
            self._refuse_closed()
            raise
        # Memory that the region has allocated can be read even after the region is closed.
        self._refuse_closed()
        if piece is None:
            raise RdmaError(
                f"bytes {start} to {end - 1} of the memory cannot be read: its file may have been "
                "truncated"
            )
        return piece

    def _refuse_closed(self) -> None:
        if self.mr.closed:
            # A client gets this text, so the region's key must not be in it.
            raise ClosedError("the owner has closed its MR")

    def changed(self) -> Generator[None, None, Changed | None]:
        """Return how the contents differ from the initial ones; yield now and then, as look() does.

        Return None for the owner's MR, whose initial contents are unknown, and for a closed region,
        whose current contents are unknown.
        """
        if not self.offer.access & _CHANGES or self._exposure.mr is not None or self.mr.closed:
            return None
        buffer, first, last = self.mr.buffer, None, 0
        for start, was in self._initial():
            yield
            now = bytes(buffer[start : start + len(was)])
            if now == was:
                continue
            if first is None:
                first = start + _common(now, was)
            last = start + len(was) - _common(now[::-1], was[::-1])
        if first is None:
            return None
        return Changed(first, last - first, bytes(buffer[first : min(last, first + HEAD_BYTES)]))

    def _initial(self) -> Iterator[tuple[int, bytes]]:
        data, size = self._exposure.data, self.mr.length
        zeros = bytes(min(_CHUNK, size))
        for start in range(0, size, _CHUNK):
            length = min(_CHUNK, size - start)
            # Zeros need no copy.
            had = data[start : start + length]
            yield start, had.ljust(length, b"\0") if had else zeros[:length]


OnConnect = Callable[[ServedClient], bytes | None]
AsyncOnConnect = Callable[[ServedClient], bytes | Awaitable[bytes | None] | None]


def _common(a: bytes, b: bytes) -> int:
    """Return the length of the common prefix of two strings of equal length."""
    low, high = 0, len(a)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

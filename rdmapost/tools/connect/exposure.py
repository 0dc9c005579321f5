"""A server's device resources for each client."""

from __future__ import annotations

import hashlib
import mmap
import secrets
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..._arguments import content, counted, expect, flags, within
from ...enums import Access, QPState, QPType, WCOpcode, WCStatus
from ...errors import RdmaError
from ...posting.wr import RecvWR
from ...resources.address import choose_gid
from ...resources.channel import CompChannel
from ...resources.cq import CQ, WC
from ...resources.device import Context
from ...resources.memory import MR, PD
from ...resources.qp import QP
from ...standard.wire import GRH_BYTES
from ..resource_stack import ResourceStack
from .protocol_messages import HEAD_BYTES, Arrival, Hello, Offer, Seen, access_names
from .server_events import Changed

_EXPOSABLE = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
_CHANGES = Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
_BY_QP_TYPE = {QPType.RC: _EXPOSABLE, QPType.UC: Access.REMOTE_WRITE, QPType.UD: Access(0)}
"""What a peer can do through a queue pair of each type."""

_MAX_LATEST = 1024
"""A client's latest arrivals, which can still be asked for."""
_POLL_BATCH = 64
"""Completions polled at once, so that a flood of them does not stall everything else."""
_FLUSH_S = 1.0
"""What a device may take to flush the receives of a queue pair in ERR."""
_CHUNK = 1 << 20
_MAX_COUNT = 1 << 14
_RECEIVE_SIZE = 1 << 16
_SENDS = 16
_MIN_RNR_TIMER = 24
"""41 ms: a client that sends faster than receives are reposted waits for them."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """What every client is given.

    Attributes:
        size: bytes of the exposed memory.
        access: what a client may do with it, of REMOTE_READ, REMOTE_WRITE and REMOTE_ATOMIC.
        count: receives that are posted for each client.
        receive_size: bytes of message that each takes.
        data: the initial contents; zeros follow.
        memory: one memory for all clients, or None for one each.
        port_num, gid_index: as in QP.
    """

    size: int
    access: Access
    count: int
    receive_size: int
    data: bytes = b""
    memory: mmap.mmap | None = None
    port_num: int = 1
    gid_index: int | None = None

    def __str__(self) -> str:
        allowed = ", ".join(access_names(self.access)) or "no"
        whose = "shared by all clients" if self.memory is not None else "for each client"
        return f"{allowed} access to {counted(self.size, 'byte')} of memory {whose}"


def make_exposure(
    context: Context,
    *,
    size: int,
    access: int | None,
    count: int,
    receive_size: int | None,
    data: bytes,
    shared: bool,
    port_num: int,
    gid_index: int | None,
) -> Exposure:
    """Check what will be exposed; the arguments are serve()'s."""
    expect("context", context, Context)
    size = within("size", size, 1, 1 << 40)
    count = within("count", count, 0, _MAX_COUNT)
    if receive_size is None:
        receive_size = min(size, _RECEIVE_SIZE)
    receive_size = within("receive_size", receive_size, 0, 1 << 31)
    data = content("data", data)
    if len(data) > size:
        raise ValueError(f"data: {counted(len(data), 'byte')} do not fit into size={size}")
    has_atomics = bool(context.attr.atomic_cap)
    if access is None:
        access = _EXPOSABLE if has_atomics else _EXPOSABLE & ~Access.REMOTE_ATOMIC
    access = flags("access", access, _EXPOSABLE, "REMOTE_READ, REMOTE_WRITE and REMOTE_ATOMIC")
    if access & Access.REMOTE_ATOMIC and not has_atomics:
        raise RdmaError(f"{context.name} has no atomics (atomic_cap is NONE)")
    # Report what is wrong with these now, not to the first client.
    choose_gid(context, port_num, gid_index)
    if count > context.attr.max_qp_wr:
        raise ValueError(f"count={count} is more than max_qp_wr={context.attr.max_qp_wr}")
    memory = None
    if shared:
        memory = mmap.mmap(-1, size)
        memory[: len(data)] = data
    return Exposure(size, access, count, receive_size, data, memory, port_num, gid_index)


class ServedClient:
    """A client's queue pair, memory and posted receives.

    Each client has its own protection domain: no other client can use its resources, even by
    guessing a key.

    Attributes:
        number: the client's number.
        qp: the server's queue pair, connected to the client's.
        mr: the exposed memory.
        offer: what the client is offered.
        channel: reports arrivals.
        arrived: how many receives have completed.
        may_have_more: whether there may be completions that the channel will not report again.
    """

    def __init__(self, context: Context, exposure: Exposure, hello: Hello, number: int) -> None:
        self._exposure = exposure
        self.number = number
        access = exposure.access & _BY_QP_TYPE[hello.qp_type]
        local = Access.LOCAL_WRITE if access & _CHANGES else Access(0)
        self._headroom = GRH_BYTES if hello.qp_type is QPType.UD else 0
        self._slot_size = self._headroom + exposure.receive_size
        self.arrived = 0
        self.may_have_more = False
        self._latest: deque[Arrival] = deque(maxlen=_MAX_LATEST)
        self._failed: WCStatus | None = None
        self._free: list[int] = []
        self._stack = ResourceStack()
        with self._stack.closed_on_error() as stack:
            pd = stack.add(PD(context))
            self.channel = stack.add(CompChannel(context))
            self._cq = stack.add(CQ(context, exposure.count + _SENDS, channel=self.channel))
            memory: Any = exposure.size if exposure.memory is None else exposure.memory
            self.mr = stack.add(MR(pd, memory, access | local))
            if exposure.memory is None:
                self.mr.buffer[: len(exposure.data)] = exposure.data
            # Never exposed: only receives go here.
            room = max(1, exposure.count * self._slot_size)
            self._receive_mr = stack.add(MR(pd, room, Access.LOCAL_WRITE))
            self.qp = stack.add(
                QP(
                    pd,
                    hello.qp_type,
                    self._cq,
                    max_send_wr=_SENDS,
                    max_recv_wr=max(1, exposure.count),
                    max_send_sge=1,
                    max_recv_sge=1,
                    port_num=exposure.port_num,
                    gid_index=exposure.gid_index,
                )
            )
            # The top bit has another meaning. Without the Q_Key nothing can be reached.
            qkey = secrets.randbits(31) if hello.qp_type is QPType.UD else 0
            self.qp.to_init(access, qkey=qkey)
            self._cq.req_notify()
            if exposure.count:
                self.qp.post_recv([self._receive(slot) for slot in range(exposure.count)])
            self.qp.connect(
                None if hello.qp_type is QPType.UD else hello.endpoint, min_rnr_timer=_MIN_RNR_TIMER
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
            )

    def close(self) -> None:
        """Release everything: first the queue pair, so that the memory cannot be reached."""
        self._stack.close()

    # ---- what arrives -------------------------------------------------------

    def _receive(self, slot: int) -> RecvWR:
        start = slot * self._slot_size
        sges = [self._receive_mr[start : start + self._slot_size]] if self._slot_size else []
        return RecvWR(sges, wr_id=slot)

    def poll(self) -> list[Arrival]:
        """Return what has arrived since the last call."""
        while self.channel.get_cq_event() is not None:
            pass
        # Before the poll, so that what arrives after it is reported.
        self._cq.req_notify()
        wcs = self._cq.poll(_POLL_BATCH)
        self.may_have_more = len(wcs) == _POLL_BATCH
        return self._arrivals(wcs)

    def repost(self) -> None:
        """Post again the receives that ``poll`` has emptied."""
        free, self._free = self._free, []
        if free:
            self.qp.post_recv([self._receive(slot) for slot in free])

    def stop(self) -> list[Arrival]:
        """Accept nothing more from the client, and return the arrivals not yet polled.

        Never raises: if the device fails, it returns what the CQ still holds.
        """
        found: list[Arrival] = []
        flushed = False
        with suppress(RdmaError):
            # Report flushes only if the queue pair failed before this.
            failed = self.qp.state is QPState.ERR
            self.qp.to_err()
            # Receives complete in order: the messages, then the flushes.
            deadline = time.monotonic() + _FLUSH_S
            while not flushed:
                self._cq.req_notify()
                wcs = self._cq.poll(_POLL_BATCH)
                found += self._arrivals(
                    wc for wc in wcs if failed or wc.status is not WCStatus.WR_FLUSH_ERR
                )
                flushed = not self.qp.outstanding.recv
                if not flushed and not wcs:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        break
                    self.channel.get_cq_event(left)
        if not flushed:
            with suppress(RdmaError):
                self.qp.close()
            with suppress(RdmaError):
                while wcs := self._cq.poll(_POLL_BATCH):
                    found += self._arrivals(wc for wc in wcs if not wc.status)
        return found

    def _arrivals(self, wcs: Iterable[WC]) -> list[Arrival]:
        found = []
        for wc in wcs:
            # After a failure, flushes are not reported; sends are the owner's.
            is_news = self._failed is None if wc.status else _received(wc)
            if not is_news:
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
        """Return what has arrived in a receive, counted from 1, or None if nothing has."""
        if index > self.arrived:
            if self._failed is None:
                return None
            return Arrival(index, self._failed, None, 0, None, "", b"")
        if index <= self.arrived - len(self._latest):
            raise RdmaError(
                f"only the last {_MAX_LATEST} arrivals of {self.arrived} are still known"
            )
        return self._latest[index - self.arrived - 1]

    # ---- the memory's contents -------------------------------------------

    def look(self, offset: int, length: int) -> Generator[None, None, Seen]:
        """Return the contents of the memory, and yield after each piece, to give others their turn.

        A client that may not read the memory learns only what it has written itself.
        """
        if offset + length > self.mr.length:
            raise RdmaError(
                f"bytes {offset}..{offset + length} are not within the {self.mr.length} exposed"
            )
        exposure = self._exposure
        others = exposure.memory is not None or exposure.data
        if others and not self.offer.access & Access.REMOTE_READ:
            return Seen(offset, length, "", b"")
        buffer, end = self.mr.buffer, offset + length
        # The bytes hashed and shown are the same, even if written meanwhile.
        data = bytes(buffer[offset : min(end, offset + HEAD_BYTES)])
        digest = hashlib.sha256(data)
        for start in range(offset + len(data), end, _CHUNK):
            if start > offset + HEAD_BYTES:
                yield
            digest.update(buffer[start : min(end, start + _CHUNK)])
        return Seen(offset, length, digest.hexdigest(), data)

    def changed(self) -> Generator[None, None, Changed | None]:
        """Return what has changed from the initial contents, and yield as look does."""
        if not self.offer.access & _CHANGES:
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


def _received(wc: WC) -> bool:
    return wc.opcode in (WCOpcode.RECV, WCOpcode.RECV_RDMA_WITH_IMM)


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

"""Receiving: datagrams come from the socket, and their packets go to the queue pairs."""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, Any

from ..._binding import native
from ...standard.wire import GRH_BYTES, IPPROTO_UDP, IPV4, IPV4_MAPPED, IPV6, ipv4_header
from . import captured_packets, packets, protocol_engine
from .addresses import flow, peer_of
from .faults import damage

if TYPE_CHECKING:
    from .device import RoceDevice

_BUFFER = 1 << 16
"""Longer than any datagram, even one that the kernel has joined from several."""
_AT_ONCE = 64
"""The most datagrams processed at once, so that other threads get their turn during a flood."""


class Receiver(native.Record):
    """What a device receives through its socket.

    Attributes:
        buffer: holds received datagrams while they are processed.
        is_drained: whether the latest look() ended because the socket was empty.
    """

    def __init__(self) -> None:
        self.buffer = bytearray(_BUFFER)
        self._inbox: deque[Any] = deque()
        """What was received in a step that was interrupted."""
        self._arrived: deque[Any] = deque()
        """Packets that the fault plan has let through."""
        self._batch: Any = None
        """What was received and is being processed: its place in the buffer and its addresses."""
        self._at = 0
        self._looks_left = _AT_ONCE
        self.is_drained = True

    def look(self, device: RoceDevice) -> bool:
        """Process one packet, or a run of them; return whether there may be more."""
        if self._batch is None and not self._receive(device):
            self._looks_left = _AT_ONCE
            self.is_drained = True
            return False
        if self._batch is not None:
            self._process_next(device)
        if self._batch is not None or self._arrived:
            return True
        self._looks_left = (self._looks_left or _AT_ONCE) - 1
        if self._looks_left:
            return True
        self.is_drained = False
        return False

    def _receive(self, device: RoceDevice) -> bool:
        """Receive datagrams, some of which the kernel may have coalesced; return whether there were
        any."""
        if self._inbox:
            got = native.take(self._inbox)
        elif self._arrived:
            packet, *rest = native.take(self._arrived)
            self.buffer[: len(packet)] = packet
            self._begin(device, (len(packet), len(packet), *rest))
            return True
        else:
            # What was received goes to the inbox if a signal handler raises before it is processed.
            got = native.made(self._inbox.append, native.roce_receive, device.socket, self.buffer)
        if got is None:
            return False
        size, segment, sender, tos, ttl = got
        gid, port = peer_of(sender)
        covered = flow(gid, device.gids[0], port)
        if covered is None:
            return True
        if device.recordings:
            # Before roce_check(), which marks corrupted packets.
            captured_packets.received(device, gid, port, covered, tos, ttl, size, segment)
        if device.incoming.is_straight:
            self._begin(device, (size, segment, gid, covered, tos, ttl))
            return True

        damaged = functools.partial(_damaged, covered)
        # If memory runs out while a bytearray is sliced, Python's error is about exported buffers.
        whole = memoryview(self.buffer)
        for at in range(0, size, segment or 1):
            item = bytes(whole[at : min(at + segment, size)]), gid, covered, tos, ttl
            for each in device.admit(device.incoming, item, damaged):
                native.put(self._arrived, each)
        return True

    def _begin(self, device: RoceDevice, batch: tuple[int, int, bytes, bytes, int, int]) -> None:
        size, segment, _, covered, _, _ = batch
        if bad := native.roce_check(self.buffer, size, segment, covered):
            device.counters.icrc_errors += bad
        self._batch, self._at = batch, 0

    def _process_next(self, device: RoceDevice) -> None:
        """Process the next received packet, or the next run of packets.

        Each is a separate step, because it may read memory that the previous one wrote.
        """
        size, segment, gid, covered, tos, ttl = self._batch
        at = self._at
        if at < size:
            length, count = min(segment, size - at), 1
            if self.buffer[at] in packets.MIDDLE:
                count = native.roce_run(self.buffer, size, segment, at)
            grh = functools.partial(self._grh, device.gids[0], gid, at, length, covered, tos, ttl)
            packet = packets.parse(memoryview(self.buffer), at, length, count, gid, grh)
            packets_received, bytes_received = device.counters.received
            device.counters.received = packets_received + count, bytes_received + length * count
            self._at = at + segment * count
            qp: Any = None if packet is None else device.qps.get(packet.qpn)
            if qp is None or packet is None or not protocol_engine.receive(qp, packet):
                device.counters.dropped += count
        if self._at >= size:
            self._batch = None

    def _grh(
        self, target: bytes, source: bytes, at: int, length: int, covered: bytes, tos: int, ttl: int
    ) -> bytes:
        """Return the 40 bytes before a datagram's payload: its IP header."""
        if not source.startswith(IPV4_MAPPED):
            return IPV6.pack(6 << 28 | tos << 20, length + 8, IPPROTO_UDP, ttl, source, target)
        number = native.roce_id(self.buffer, at, length, covered)
        total = IPV4.size + 8 + length
        header = ipv4_header(tos, total, 0x4000, ttl, IPPROTO_UDP, source[12:], target[12:], number)
        return bytes(GRH_BYTES - IPV4.size) + header

    def let_through(self, item: Any) -> None:
        """Accept a packet that the fault plan has held until now."""
        native.put(self._arrived, item)

    def give_up(self) -> tuple[bool, bool]:
        """Drop the packets that the engine could not process, as if the network had lost them.

        Returns:
            whether there were any; whether others, which the socket no longer holds, are left.
        """
        lost = self._batch is not None
        if not lost and (packets := self._inbox or self._arrived):
            native.take(packets)
            lost = True
        self._batch = None
        return lost, bool(self._inbox or self._arrived)


def _damaged(covered: bytes, item: Any, number: int) -> Any:
    return damage(item[0], covered, number), *item[1:]

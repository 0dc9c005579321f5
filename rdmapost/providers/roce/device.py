"""The device: its socket, its timers, and the thread that looks after them.

A verb that begins, and so each poll, receives what has come and has the engine process it. So does
a thread that waits for a completion, because the socket is among the descriptors that it waits for.
While nobody does, the device's own thread looks. It sleeps first whenever somebody else may be
quicker, because two threads that take turns with the GIL are slower than one.
"""

from __future__ import annotations

import _socket
import _thread
import atexit
import contextlib
import errno
import functools
import logging
import math
import os
import secrets
import select
import socket
import threading
import time
import zlib
from collections import deque
from typing import Any

from ..._binding import native
from ...standard.wire import (
    GRH_BYTES,
    ICRC_BYTES,
    IPPROTO_UDP,
    IPV4,
    IPV4_MAPPED,
    IPV6,
    ROCE_V2_PORT,
    ipv4_header,
)
from ..base import ROCE
from ..soft0.engine.device import Device, wires
from ..soft0.engine.journaled_dict import JournaledDict
from ..soft0.engine.memory import Memory
from ..soft0.engine.transport_messages import Segments, size_of
from . import engine, packets
from .addresses import LocalAddress, candidates, flow, peer_of, sockaddr
from .packets import Path
from .qp import RoceQueuePair

_log = logging.getLogger("rdmapost.roce")

_BUFFER = 1 << 16
"""Longer than any datagram, also after the kernel has joined several."""
_SOCKET_BUFFER = 1 << 22
"""What is asked of the kernel, which may grant less (net.core.rmem_max)."""
_AT_ONCE = 64
"""Datagrams processed in one look, so that a flood leaves other threads their turn."""
_SHORTEST, _LONGEST = 0.0002, 0.002
"""Seconds that the thread leaves to others."""
_AFTER_ERROR = 0.1
"""Seconds before it tries again."""
_AT_EXIT = 1.0
"""Seconds that the exit of the process waits for threads at most."""

# Not in every socket module: linux/in.h, linux/in6.h, linux/udp.h.
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3
_UDP_GRO = 104
_UDP_NO_CHECK6_RX = 102
_IPV6_DONTFRAG = 62
_OPTIONS = {
    socket.AF_INET: (
        (socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE),
        (socket.IPPROTO_IP, socket.IP_RECVTOS, 1),
        (socket.IPPROTO_IP, socket.IP_RECVTTL if hasattr(socket, "IP_RECVTTL") else 12, 1),
    ),
    socket.AF_INET6: (
        (socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1),
        (socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE),
        (socket.IPPROTO_IPV6, _IPV6_DONTFRAG, 1),
        # Soft-RoCE sends no UDP checksum, which IPv6 usually requires: the ICRC covers the packet.
        (socket.SOL_UDP, _UDP_NO_CHECK6_RX, 1),
        (socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS, 1),
        (socket.IPPROTO_IPV6, socket.IPV6_RECVHOPLIMIT, 1),
    ),
}
"""With PROBE, an unconnected socket sends IPv4 packets with identification 0 and "don't fragment",
which the ICRC covers."""


_shared: list[Any] = []
"""The sockets that the child of a fork closes at once."""


def _share(made: Any) -> None:
    """Note a socket, until the end of the verb or of the device."""
    native.undo(_shared.remove, made)
    _shared.append(made)


def _close_shared() -> None:
    """Leave the addresses to the parent, which may close its devices while the child lives.

    It takes no lock: its owner may be a thread that the child lacks.
    """
    _threads.clear()
    while _shared:
        _shared.pop().close()


_threads: dict[Any, Any] = {}
"""The socket of each device's thread, and a lock that is held until the thread ends."""


def _end_threads() -> None:
    """End the threads before the interpreter does, which would not release what they hold."""
    ending = list(_threads.items())
    for stopped, _ in ending:
        # It may have ended by itself.
        with contextlib.suppress(OSError):
            stopped.shutdown(socket.SHUT_RDWR)
    end = time.monotonic() + _AT_EXIT
    for _, running in ending:
        # A thread waits for the device's lock if another one stays in a verb.
        running.acquire(timeout=max(0.0, end - time.monotonic()))


os.register_at_fork(after_in_child=_close_shared)
atexit.register(_end_threads)


def guid_of(name: str) -> int:
    """Return the node GUID of a device of this process: locally administered."""
    return 0x0200_0000 << 32 | zlib.crc32(f"{name} {os.getpid()}".encode())


class RandomKeys(Memory):
    """Memory whose keys cannot be guessed."""

    def _new_key(self) -> int:
        # The top bit tells an rkey from the lkey of the same region.
        key = secrets.randbits(31)
        taken = not key or key in self.regions_by_lkey
        # As a window's key, or as a region's.
        taken = taken or self.has_index_of(key) or self.has_index_of(key | 0x8000_0000)
        return self._new_key() if taken else key


class Counters(native.Record):
    """What a device has counted since it was opened.

    Attributes:
        sent, received: packets.
        retransmitted: packets sent again.
        naks_sent, naks_received: negative acknowledgements, those for a missing receive included.
        icrc_errors: packets dropped because they were damaged.
        dropped: packets dropped because they fit no queue pair.
        send_errors: datagrams that the kernel refused.
    """

    def __init__(self) -> None:
        self.sent = self.received = self.retransmitted = 0
        self.naks_sent = self.naks_received = 0
        self.icrc_errors = self.dropped = self.send_errors = 0


class RoceDevice(Device):
    """An RDMA device on a UDP socket.

    Attributes:
        address: the address of this machine that it uses.
        socket: its socket; None while it is not open.
        now: the time of the step in progress, by the monotonic clock.
        counters: its counters.
    """

    queue_pair = RoceQueuePair

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.guid = guid_of(name)
        self.memory = RandomKeys()
        self.counters = Counters()
        self.gids = ()
        self.address: LocalAddress | None = None
        self.socket: Any = None
        self._stop: Any = None
        """Tells the thread to end. The other end is the thread's: no number is shared."""
        self.now = 0.0
        self.timers: dict[RoceQueuePair, float] = JournaledDict()
        self._gso = True
        self._errors: list[int] = []
        """The errnos of sends, which happen when a step is committed."""
        self._inbox: deque[Any] = deque()
        """What was received in a step that was interrupted."""
        self._batch: Any = None
        """What was received and is being processed: its place in the buffer and its addresses."""
        self._at = 0
        self._buffer = bytearray(_BUFFER)
        self._looks_left = _AT_ONCE

    # ---- opening and closing ------------------------------------------------

    @property
    def device(self) -> RoceDevice:
        """This device, which is also a worker: it looks for packets."""
        return self

    @property
    def wake_fds(self) -> tuple[int, ...]:
        return self.timer_fd, self.socket.fileno()

    def open(self) -> None:
        if self.socket is None:
            self._bind()
        super().open()
        if self._times_open == 1:
            self._start_thread()

    def _start_thread(self) -> None:
        """Start the thread, which a rollback ends again.

        Raises:
            OSError: there are too many threads or descriptors.
        """
        watched = select.epoll()
        self._stop, stopped = _socket.socketpair()
        native.undo(self._stop.close)
        _share(self._stop)
        for fd in (*self.wake_fds, stopped.fileno()):
            watched.register(fd, select.EPOLLIN)
        running = threading.Lock()
        running.acquire()
        native.undo(_threads.pop, stopped, None)
        _threads[stopped] = running
        try:
            _thread.start_new_thread(_watch, (watched, stopped, running))
        except (RuntimeError, MemoryError) as error:
            stopped.close()
            if isinstance(error, MemoryError):
                raise
            raise OSError(errno.EAGAIN, "pthread_create") from None

    def _bind(self) -> None:
        """Open the socket on the first address that is free.

        Raises:
            OSError: none is.
            LookupError: this machine has no such address.
        """
        error: OSError | None = None
        for address in candidates(self.name.removeprefix(ROCE)):
            kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            made = native.made(_socket.socket.close, _socket.socket, address.family, kind)
            # Before it has the address.
            _share(made)
            try:
                _prepare(made, address)
            except OSError as refused:
                error = refused
                made.close()
                _shared.remove(made)
                if refused.errno == errno.EADDRINUSE:
                    continue
                break
            self.address, self.socket = address, made
            self.gids, self.netdev = (address.gid,), address.netdev
            self.port_mtu = address.path_mtu
            native.undo(list.remove, wires, self)
            wires.append(self)
            return
        assert error is not None
        raise error

    def close(self) -> None:
        super().close()
        if self._times_open:
            return
        native.undo(list.append, wires, self)
        wires.remove(self)
        native.on_commit(self._stop.shutdown, socket.SHUT_RDWR)
        for each in (self._stop, self.socket):
            native.on_commit(each.close)
            native.on_commit(_shared.remove, each)
        self.socket = self._stop = None

    def start_over(self) -> None:
        # Again: whoever forked may not have called Python's functions.
        _close_shared()
        super().start_over()

    def new_number(self) -> int:
        number = secrets.randbits(24)
        taken = number < 2 or number in self.qps or number in self.srqs
        return self.new_number() if taken or number == 0xFFFFFF else number

    # ---- what the engine calls ----------------------------------------------

    def send(
        self, path: Path, headers: list[bytes], payload: Segments | tuple[()] = (), mtu: int = 0
    ) -> None:
        """Send packets, when the step is committed.

        Args:
            path: where to.
            headers: the headers of each packet, without those of IP and UDP. All packets but the
                last one are of the same size.
            payload: what follows the headers, `mtu` bytes in each packet.
            mtu: payload bytes in each packet but the last.
        """
        self.counters.sent += len(headers)
        source = self.gids[0]
        covered = flow(source, path.dgid, ROCE_V2_PORT)
        assert self.address is not None
        if covered is None:
            return
        where = sockaddr(path.dgid, self.address.scope)
        if self._gso or len(headers) == 1:
            self._send(where, covered, path.traffic_class, headers, payload, mtu)
            return
        whole = b"".join(payload)
        for n, header in enumerate(headers):
            part = whole[n * mtu : (n + 1) * mtu]
            self._send(where, covered, path.traffic_class, [header], [part], mtu)

    def _send(
        self,
        where: bytes,
        covered: bytes,
        traffic_class: int,
        headers: list[bytes],
        payload: Any,
        mtu: int,
    ) -> None:
        # Up to 3 bytes of padding, and the ICRC.
        data = bytearray(sum(map(len, headers)) + size_of(payload) + 7 * len(headers))
        size = native.roce_build(data, covered, headers, tuple(payload), mtu)
        whole = len(headers[0]) + mtu + -mtu % 4 + ICRC_BYTES
        segment = size if len(headers) == 1 else whole
        native.on_commit(
            native.roce_send,
            self.socket.fileno(),
            where,
            data,
            size,
            segment,
            traffic_class,
            self._errors,
        )

    def set_timer(self, qp: RoceQueuePair, when: float | None) -> None:
        """Have the engine's on_timer called for a queue pair at a time, or not, if it is None."""
        if when is None:
            self.timers.pop(qp, None)
            return
        self.timers[qp] = when
        # A timer that expires too early finds nothing to do, and costs less than setting it often.
        if self.due < 0 or when < self.due:
            self.set_due(when)

    def again(self, qp: RoceQueuePair) -> None:
        """Have the engine's execute_next called for a queue pair after this step."""
        self.start(qp)

    # ---- progress -----------------------------------------------------------

    def run_due(self) -> None:
        now = time.monotonic()
        if not 0 <= self.due <= now:
            return
        left = -1.0
        for qp, when in list(self.timers.items()):
            if when <= now:
                # Each in a step of its own, by execute_next.
                self.start(qp)
            else:
                left = when if left < 0 else min(left, when)
        self.set_due(left)

    def put_off(self) -> bool:
        now = time.monotonic()
        if not 0 <= self.due <= now:
            self.set_due(now)
        return True

    def execute_next(self, worker: Any) -> bool:
        self.now = time.monotonic()
        if worker is self:
            return bool(self._look())
        if isinstance(worker, RoceQueuePair):
            if self.timers.get(worker, math.inf) <= self.now:
                self.timers.pop(worker)
                engine.on_timer(worker)
                return True
            return bool(engine.execute_next(worker))
        return bool(super().execute_next(worker))

    def give_up(self, worker: Any) -> bool:
        if isinstance(worker, RoceQueuePair):
            return bool(engine.give_up(worker))
        if worker is not self:
            return bool(super().give_up(worker))
        # The engine could not process these packets: they are lost, as the network may lose any.
        if self._batch is None and self._inbox:
            native.take(self._inbox)
        self._batch = None
        return False

    def _look(self) -> bool:
        """Process one packet, or a run of them; return whether there may be more."""
        for code in self._errors:
            self._note_send_error(code)
        self._errors.clear()
        if self.socket is None:
            return False
        if self._batch is None and not self._receive():
            self._looks_left = _AT_ONCE
            return False
        self._process_next()
        if self._batch is not None:
            return True
        self._looks_left = (self._looks_left or _AT_ONCE) - 1
        return self._looks_left > 0

    def _note_send_error(self, code: int) -> None:
        self.counters.send_errors += 1
        if code in (errno.EIO, errno.EINVAL, errno.EOPNOTSUPP) and self._gso:
            # This network device cannot segment, so each packet is sent by itself.
            self._gso = False

    def _receive(self) -> bool:
        """Receive datagrams, which the kernel may have joined; return whether there were any."""
        if self._inbox:
            got = native.take(self._inbox)
        else:
            # Back to the inbox if a signal handler raises before it is processed.
            fd = self.socket.fileno()
            got = native.made(self._inbox.append, native.roce_receive, fd, self._buffer)
        if got is None:
            return False
        size, segment, sender, tos, ttl = got
        gid, port = peer_of(sender)
        covered = flow(gid, self.gids[0], port)
        if covered is None:
            size = 0
        elif bad := native.roce_check(self._buffer, size, segment, covered):
            self.counters.icrc_errors += bad
        self._batch, self._at = (size, segment, gid, covered, tos, ttl), 0
        return True

    def _process_next(self) -> None:
        """Process the next packet or run of what was received.

        Each in a step of its own: it may read what the one before it has written.
        """
        size, segment, gid, covered, tos, ttl = self._batch
        at = self._at
        if at < size:
            length, count = min(segment, size - at), 1
            if self._buffer[at] in packets.MIDDLE:
                count = native.roce_run(self._buffer, size, segment, at)
            grh = functools.partial(self._grh, gid, at, length, covered, tos, ttl)
            packet = packets.parse(memoryview(self._buffer), at, length, count, gid, grh)
            self.counters.received += count
            self._at = at + segment * count
            qp: Any = None if packet is None else self.qps.get(packet.qpn)
            if qp is None or packet is None or not engine.receive(qp, packet):
                self.counters.dropped += count
        if self._at >= size:
            self._batch = None

    def _grh(
        self, source: bytes, at: int, length: int, covered: bytes, tos: int, ttl: int
    ) -> bytes:
        """Return the 40 bytes before a datagram's payload: its IP header."""
        target = self.gids[0]
        if not source.startswith(IPV4_MAPPED):
            return IPV6.pack(6 << 28 | tos << 20, length + 8, IPPROTO_UDP, ttl, source, target)
        number = native.roce_id(self._buffer, at, length, covered)
        total = IPV4.size + 8 + length
        header = ipv4_header(tos, total, 0x4000, ttl, IPPROTO_UDP, source[12:], target[12:], number)
        return bytes(GRH_BYTES - IPV4.size) + header


def _prepare(made: Any, address: LocalAddress) -> None:
    """Set a socket's options, and bind it."""
    for level, option, value in _OPTIONS[address.family]:
        made.setsockopt(level, option, value)
    with contextlib.suppress(OSError):
        # Linux 5.0; without it each packet comes by itself.
        made.setsockopt(socket.SOL_UDP, _UDP_GRO, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    scope = (0, address.scope) if address.family is socket.AF_INET6 else ()
    made.bind((address.host, ROCE_V2_PORT, *scope))


def _watch(epoll: select.epoll, stopped: Any, running: Any) -> None:
    """Make progress while nobody else does; a thread runs this until the device is closed."""
    pause: float | None = 0.0
    error: Exception | None = None
    try:
        while pause is not None:
            # Nothing but the device's end ends the thread, and least of all a lack of memory.
            try:
                if error is not None:
                    _recover(error)
                    error = None
                pause = _wait_and_look(epoll, stopped.fileno(), pause)
            except Exception as raised:
                error = raised
    finally:
        epoll.close()
        _threads.pop(stopped, None)
        stopped.close()
        running.release()


def _recover(error: Exception) -> None:
    time.sleep(_AFTER_ERROR)
    if not isinstance(error, MemoryError):
        _log.error("the thread of a roce device goes on after an error", exc_info=error)


def _wait_and_look(epoll: select.epoll, stop_fd: int, pause: float) -> float | None:
    """Wait until there is something to do, and do it unless somebody else does in the pause.

    Returns:
        How long to pause next time; None to end.
    """
    if _is_stopped(epoll.poll(), stop_fd):
        return None
    if pause:
        time.sleep(pause)
        found = epoll.poll(0)
        if _is_stopped(found, stop_fd):
            return None
        if not found:
            # Somebody else was quicker, and probably will be again.
            return min(2 * pause, _LONGEST)
    native.run_device()
    # Whoever had time to look, looks again soon.
    return 0.0 if epoll.poll(0) else _SHORTEST


def _is_stopped(events: list[tuple[int, int]], stop_fd: int) -> bool:
    return any(fd == stop_fd for fd, _ in events)

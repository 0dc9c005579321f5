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
from collections.abc import Callable
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
from ..base import ROCE, Counters
from ..soft0.engine.device import Device, wires
from ..soft0.engine.faults import PacketFaults
from ..soft0.engine.journaled_dict import JournaledDict
from ..soft0.engine.memory import Memory
from ..soft0.engine.transport_messages import Segments, size_of
from . import engine, packets, trace
from .addresses import LocalAddress, candidates, flow, peer_of, sockaddr
from .capture import Recording, end_all
from .faults import Way, damage
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

_TTL = {
    socket.AF_INET: (socket.IPPROTO_IP, socket.IP_TTL),
    socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS),
}

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


class Counted(native.Record):
    """Counters, which a step that is undone leaves as they were.

    Attributes:
        sent, received: packets, and their bytes: each pair is changed at once, for every packet.

    The others are named as in Counters.
    """

    def __init__(self) -> None:
        self.sent = self.received = (0, 0)
        self.retransmitted = 0
        self.naks_sent = self.naks_received = self.rnr_naks_sent = self.rnr_naks_received = 0
        self.icrc_errors = self.dropped = self.send_errors = self.faults = 0

    def now(self) -> Counters:
        """Return them."""
        others = dict(vars(self))
        ways = {way: others.pop(way) for way in ("sent", "received")}
        return Counters(
            **{f"packets_{way}": packets for way, (packets, _) in ways.items()},
            **{f"bytes_{way}": size for way, (_, size) in ways.items()},
            **others,
        )


class RoceDevice(Device):
    """An RDMA device on a UDP socket.

    Attributes:
        address: the address of this machine that it uses.
        socket: its socket; None while it is not open.
        now: the time of the step in progress, by the monotonic clock.
        counters: what it has counted.
        recordings: the captures in progress.
        outgoing, incoming: what the fault plan does to packets.
        ttl: the time to live, or the hop limit, of what it sends.
        buffer: what has been received, while it is processed.
    """

    queue_pair = RoceQueuePair

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.guid = guid_of(name)
        self.memory = RandomKeys()
        self.counters = Counted()
        self.recordings: tuple[Recording, ...] = ()
        self.outgoing, self.incoming = Way(1), Way(2)
        self._arrived: deque[Any] = deque()
        """Packets that the fault plan has let through."""
        self.ttl = 0
        self.gids = ()
        self.address: LocalAddress | None = None
        self.socket: Any = None
        self._stop: Any = None
        """Tells the thread to end. The other end is the thread's: no number is shared."""
        self.now = 0.0
        self.timers: dict[RoceQueuePair | RoceDevice, float] = JournaledDict()
        self._gso = True
        self._errors: list[int] = []
        """The errnos of sends, which happen when a step is committed."""
        self._inbox: deque[Any] = deque()
        """What was received in a step that was interrupted."""
        self._batch: Any = None
        """What was received and is being processed: its place in the buffer and its addresses."""
        self._at = 0
        self.buffer = bytearray(_BUFFER)
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
            self.ttl = made.getsockopt(*_TTL[address.family])
            native.undo(list.remove, wires, self)
            wires.append(self)
            return
        assert error is not None
        raise error

    def close(self) -> None:
        super().close()
        if self._times_open:
            return
        end_all(self.recordings)
        self.recordings = ()
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
        self,
        qp: RoceQueuePair,
        path: Path,
        headers: list[bytes],
        payload: Segments | tuple[()] = (),
        mtu: int = 0,
    ) -> None:
        """Send packets, when the step is committed.

        Args:
            qp: the queue pair that sends them.
            path: where to.
            headers: the headers of each packet, without those of IP and UDP. All packets but the
                last one are of the same size.
            payload: what follows the headers, `mtu` bytes in each packet.
            mtu: payload bytes in each packet but the last.
        """
        covered = flow(self.gids[0], path.dgid, ROCE_V2_PORT)
        if covered is None:
            return
        if len(headers) == 1 or (self._gso and self.outgoing.is_straight):
            self._send(qp, path, covered, headers, payload, mtu)
            return
        whole = b"".join(payload)
        for n, header in enumerate(headers):
            part = whole[n * mtu : (n + 1) * mtu]
            self._send(qp, path, covered, [header], [part], mtu)

    def _send(
        self,
        qp: RoceQueuePair,
        path: Path,
        covered: bytes,
        headers: list[bytes],
        payload: Any,
        mtu: int,
    ) -> None:
        # Up to 3 bytes of padding, and the ICRC.
        data = bytearray(sum(map(len, headers)) + size_of(payload) + 7 * len(headers))
        size = native.roce_build(data, covered, headers, tuple(payload), mtu)
        packets_sent, bytes_sent = self.counters.sent
        self.counters.sent = packets_sent + len(headers), bytes_sent + size
        whole = len(headers[0]) + mtu + -mtu % 4 + ICRC_BYTES
        segment = size if len(headers) == 1 else whole
        about: Any = functools.partial(trace.about_sent, qp) if self.recordings else None
        if self.outgoing.is_straight:
            self._transmit(path, about, data, size, segment)
            return
        packet = bytes(data[:size])
        if about is not None:
            # By the time that it goes, it may be damaged, and its work request gone.
            about = functools.partial(trace.said, about(packet))

        damaged = functools.partial(_damaged_sent, covered)
        for each in self._pass(self.outgoing, (path, about, packet), damaged):
            self._transmit_held(each)

    def _pass(self, way: Way, item: Any, damaged: Any) -> list[Any]:
        """Have the fault plan take a packet on its way; return those that arrive now."""
        arrived, is_faulty = way.admit(item, self.now, damaged)
        if is_faulty:
            self.counters.faults += 1
            self._wait_for_held()
        return arrived

    def _transmit(
        self, path: Path, about: Callable[[bytes], str] | None, data: Any, size: int, segment: int
    ) -> None:
        assert self.address is not None
        if about is not None:
            trace.sent(self, about, path.dgid, path.traffic_class, data, size, segment)
        native.on_commit(
            native.roce_send,
            self.socket.fileno(),
            sockaddr(path.dgid, self.address.scope),
            data,
            size,
            segment,
            path.traffic_class,
            self._errors,
        )

    def _transmit_held(self, item: Any) -> None:
        path, about, packet = item
        self._transmit(path, about, packet, len(packet), len(packet))

    # ---- faults ---------------------------------------------------------------

    def plan_packets(self, plan: PacketFaults | None, sent: bool, received: bool) -> None:
        for way, is_meant in ((self.outgoing, sent), (self.incoming, received)):
            if is_meant:
                native.verb(way.begin, plan)

    def _wait_for_held(self) -> None:
        """Have _let_go called when a packet has waited long enough."""
        due = [way.due for way in (self.outgoing, self.incoming) if way.due is not None]
        if due:
            self.set_timer(self, min(due))

    def _let_go(self) -> None:
        """Let the packets pass that have waited long enough."""
        if self.socket is None:
            return
        for item in self.outgoing.release(self.now):
            self._transmit_held(item)
        for item in self.incoming.release(self.now):
            native.put(self._arrived, item)
        self._wait_for_held()

    def set_timer(self, qp: RoceQueuePair | RoceDevice, when: float | None) -> None:
        """Have the engine's on_timer called for a queue pair at a time, or not, if it is None.

        For the device itself, it is _let_go.
        """
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
                self.start(qp)  # type: ignore[arg-type]
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
            if self.timers.get(self, math.inf) <= self.now:
                self.timers.pop(self)
                self._let_go()
                return True
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
        if self._batch is None and (lost := self._inbox or self._arrived):
            native.take(lost)
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
        if self._batch is not None:
            self._process_next()
        if self._batch is not None or self._arrived:
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
        elif self._arrived:
            packet, *rest = native.take(self._arrived)
            self.buffer[: len(packet)] = packet
            self._begin(len(packet), len(packet), *rest)
            return True
        else:
            # Back to the inbox if a signal handler raises before it is processed.
            fd = self.socket.fileno()
            got = native.made(self._inbox.append, native.roce_receive, fd, self.buffer)
        if got is None:
            return False
        size, segment, sender, tos, ttl = got
        gid, port = peer_of(sender)
        covered = flow(gid, self.gids[0], port)
        if covered is None:
            return True
        if self.recordings:
            # First: the check marks the packets that are damaged.
            trace.received(self, gid, port, covered, tos, ttl, size, segment)
        if self.incoming.is_straight:
            self._begin(size, segment, gid, covered, tos, ttl)
            return True

        damaged = functools.partial(_damaged_received, covered)
        for at in range(0, size, segment or 1):
            item = bytes(self.buffer[at : min(at + segment, size)]), gid, covered, tos, ttl
            for each in self._pass(self.incoming, item, damaged):
                native.put(self._arrived, each)
        return True

    def _begin(
        self, size: int, segment: int, gid: bytes, covered: bytes, tos: int, ttl: int
    ) -> None:
        """Begin to process what is in the buffer."""
        if bad := native.roce_check(self.buffer, size, segment, covered):
            self.counters.icrc_errors += bad
        self._batch, self._at = (size, segment, gid, covered, tos, ttl), 0

    def _process_next(self) -> None:
        """Process the next packet or run of what was received.

        Each in a step of its own: it may read what the one before it has written.
        """
        size, segment, gid, covered, tos, ttl = self._batch
        at = self._at
        if at < size:
            length, count = min(segment, size - at), 1
            if self.buffer[at] in packets.MIDDLE:
                count = native.roce_run(self.buffer, size, segment, at)
            grh = functools.partial(self._grh, gid, at, length, covered, tos, ttl)
            packet = packets.parse(memoryview(self.buffer), at, length, count, gid, grh)
            packets_received, bytes_received = self.counters.received
            self.counters.received = packets_received + count, bytes_received + length * count
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
        number = native.roce_id(self.buffer, at, length, covered)
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


def _damaged_sent(covered: bytes, item: Any, number: int) -> Any:
    path, about, packet = item
    if about is not None:
        about = functools.partial(trace.said, f"{about(packet)}, damaged on purpose")
    return path, about, damage(packet, covered, number)


def _damaged_received(covered: bytes, item: Any, number: int) -> Any:
    return damage(item[0], covered, number), *item[1:]


def _is_stopped(events: list[tuple[int, int]], stop_fd: int) -> bool:
    return stop_fd in [fd for fd, _ in events]

"""The device: its socket and thread, its timers, and the methods that the engine and C call."""

from __future__ import annotations

import math
import os
import socket
import time
import zlib
from typing import Any

from ..._binding import native
from ...standard.wire import ROCE_V2_PORT
from ..base import ROCE
from ..fault_plan import PacketFaults
from ..software.device import QP_NUMBERS, Device, wires
from ..software.journaled_dict import JournaledDict
from ..software.numbers import RandomNumbers
from ..software.transport_messages import Segments
from . import device_thread, protocol_engine, udp_socket
from .addresses import LocalAddress, flow
from .capture import end_all
from .capture_thread import Recording
from .counters import Counted
from .faults import Direction
from .packets import Path
from .qp import RoceQueuePair
from .random_keys import RandomKeys
from .receiver import Receiver
from .sender import Sender

_LONGEST_LOOK = 0.1
"""The longest, in seconds, that an expired timer waits while packets that have arrived are
processed. By then, a socket buffer of the usual size has been read once, whatever arrives in the
meantime."""


def guid_of(name: str) -> int:
    """Return the locally administered node GUID for one of this process's devices."""
    return 0x0200_0000 << 32 | zlib.crc32(f"{name} {os.getpid()}".encode())


class RoceDevice(Device):
    """An RDMA device on a UDP socket.

    Attributes:
        address: the local address that it uses.
        socket: its socket; None while it is not open.
        now: the time of the step in progress, by the monotonic clock.
        counters: its counters.
        recordings: the captures in progress.
        outgoing, incoming: its packets in each direction, to which a fault plan may apply.
        ttl: the time to live, or the hop limit, of the packets that it sends.
    """

    queue_pair = RoceQueuePair

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.guid = guid_of(name)
        self.memory = RandomKeys()
        self.numbers = RandomNumbers(*QP_NUMBERS)
        self.counters = Counted()
        self.recordings: tuple[Recording, ...] = ()
        self.outgoing, self.incoming = Direction(1), Direction(2)
        self.sender, self.receiver = Sender(), Receiver()
        self.ttl = 0
        self.address: LocalAddress | None = None
        self.socket: Any = None
        self._stop: Any = None
        """A socket whose shutdown ends the thread. The thread has the other end, so no descriptor
        is shared."""
        self.now = 0.0
        self._looked = 0.0
        """The time of the last look for packets; timers that had expired by then may run."""
        self._expired_at = math.inf
        """The time at which a waiting timer expired; infinity if none is waiting to run."""
        self.timers: dict[RoceQueuePair | RoceDevice, float] = JournaledDict()

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
        if self.times_open == 1:
            self._stop = device_thread.start(self.wake_fds, self.counters)

    def _bind(self) -> None:
        address, made = udp_socket.bind(self.name.removeprefix(ROCE))
        self.address, self.socket = address, made
        self.gids, self.netdev = (address.gid,), address.netdev
        self.port_mtu = address.path_mtu
        self.ttl = udp_socket.hop_limit(made, address)
        native.undo(list.remove, wires, self)
        wires.append(self)

    def close(self) -> None:
        super().close()
        if self.times_open:
            return
        end_all(self.recordings)
        self.recordings = ()
        native.undo(list.append, wires, self)
        wires.remove(self)
        native.on_commit(self._stop.shutdown, socket.SHUT_RDWR)
        for each in (self._stop, self.socket):
            udp_socket.close(each)
        self.socket = self._stop = None

    def start_over(self) -> None:
        # Here too, because a fork by C code does not run what os.register_at_fork registers.
        device_thread.forget_all()
        udp_socket.close_all()
        super().start_over()

    # ---- what the engine calls ----------------------------------------------

    def send(
        self,
        qp: RoceQueuePair,
        path: Path,
        headers: list[bytes],
        payload: Segments,
        mtu: int,
        again: int = 0,
    ) -> None:
        """Send packets when the step is committed.

        Args:
            qp: the queue pair that sends them.
            path: the path to the peer.
            headers: the headers of each packet, except the IP and UDP headers. All packets but the
                last are the same size.
            payload: the payloads of all packets, in order.
            mtu: payload bytes in each packet but the last.
            again: how many of the packets have been sent before; these come first.
        """
        covered = flow(self.gids[0], path.dgid, ROCE_V2_PORT)
        if covered is None:
            # An IPv4 address cannot reach an IPv6 address.
            self.counters.send_errors += len(headers)
            return
        if len(headers) == 1 or (self.sender.may_join and self.outgoing.is_straight):
            self.sender.send(self, qp, path, covered, headers, payload, mtu, again)
            return
        whole = b"".join(payload)
        for n, header in enumerate(headers):
            part = whole[n * mtu : (n + 1) * mtu]
            self.sender.send(self, qp, path, covered, [header], [part], mtu, int(n < again))

    def admit(self, direction: Direction, item: Any, damaged: Any) -> list[Any]:
        """Apply the fault plan to a packet; return the packets that arrive now."""
        arrived, is_faulty = direction.admit(item, self.now, damaged)
        if is_faulty:
            self.counters.faults += 1
            self._wait_for_held()
        return arrived

    # ---- faults ---------------------------------------------------------------

    def plan_packets(self, plan: PacketFaults | None, sent: bool, received: bool) -> None:
        for direction, is_meant in ((self.outgoing, sent), (self.incoming, received)):
            if is_meant:
                native.verb(direction.begin, plan)

    def _wait_for_held(self) -> None:
        """Arrange for _let_go to be called when a packet has waited long enough."""
        due = min(self.outgoing.due, self.incoming.due)
        if due < math.inf:
            self.set_timer(self, due)

    def _let_go(self) -> None:
        """Let through the packets that have waited long enough."""
        if self.socket is None:
            return
        for item in self.outgoing.release(self.now):
            self.sender.send_held(self, item)
        for item in self.incoming.release(self.now):
            self.receiver.let_through(item)
        self._wait_for_held()

    def set_timer(self, qp: RoceQueuePair | RoceDevice, when: float | None) -> None:
        """Have the engine's on_timer called for a queue pair at this time; None cancels it.

        For the device itself, _let_go is called.
        """
        if when is None:
            self.timers.pop(qp, None)
            return
        self.timers[qp] = when
        # A timer that expires early finds nothing to do; this costs less than setting it often.
        if self.due < 0 or when < self.due:
            self.set_due(when)

    # ---- progress -----------------------------------------------------------

    def run_due(self, now: float) -> None:
        # First, this verb processes the packets that have arrived: the response may be among them.
        self._expired_at = min(self._expired_at, now)
        left = min([when for when in self.timers.values() if when > now], default=math.inf)
        self.set_due(left if left < math.inf else -1.0)

    def _run_expired(self) -> None:
        """Run the timers that have expired, if any, unless packets come first."""
        is_late = self.now > self._expired_at + _LONGEST_LOOK
        if not (self.receiver.is_drained or is_late):
            # The socket may be empty by now, and then nothing else would wake a thread.
            self.set_due(self.now)
            return
        self._looked = self.now
        if self._expired_at == math.inf:
            return
        self._expired_at = math.inf
        for worker, when in self.timers.items():
            if when <= self._looked:
                # execute_next runs each in a separate step.
                self.start(worker)

    def put_off(self) -> bool:
        now = time.monotonic()
        if not 0 <= self.due <= now:
            self.set_due(now)
        return True

    def execute_next(self, worker: Any) -> bool:
        self.now = time.monotonic()
        if worker is self:
            if self.timers.get(self, math.inf) <= self.now:
                self.timers[self] = math.inf
                self._let_go()
                return True
            if self.sender.errors:
                self.sender.note_errors(self)
            if self.socket is not None and self.receiver.look(self):
                return True
            self._run_expired()
            return False
        if self.timers.get(worker, math.inf) <= self._looked:
            # Do not remove it: undoing that might need memory.
            self.timers[worker] = math.inf
            protocol_engine.on_timer(worker)
            return True
        return bool(protocol_engine.execute_next(worker))

    def give_up(self, worker: Any) -> int:
        if worker is not self:
            expired = self.timers.get(worker, math.inf) <= self._looked
            if expired:
                self.timers[worker] = math.inf
            return bool(protocol_engine.give_up(worker, expired=expired))
        lost, more = self.receiver.give_up()
        self.now = time.monotonic()
        if self.now > self._expired_at + _LONGEST_LOOK:
            self._run_expired()
        elif self._expired_at < math.inf:
            # Not at once: the next look may fail, too.
            self.set_due(self.now + _LONGEST_LOOK)
        # Once a packet has been dropped, the next look may succeed; if there was none to drop, it
        # would fail again at once.
        return more if lost else -1

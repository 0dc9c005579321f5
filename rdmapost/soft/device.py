"""The device: what it can do, what it holds, and what carries its messages."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from ..enums import MTU
from . import requester, responder
from .completion import Channel, EventQueue
from .faults import FaultPlan
from .memory import Memory
from .qp import QueuePair
from .queue import SharedReceiveQueue
from .wire import Ack, Request

__all__ = ["Device", "OpenDevice"]

_LINK_LOCAL = bytes.fromhex("fe80000000000000025200fffe500f00")
_LOOPBACK = bytes.fromhex("00000000000000000000ffff7f000001")


def _as_it_is(wr_id: int) -> int:
    return wr_id


class OpenDevice:
    """One open context of the device."""

    def __init__(self) -> None:
        self.events = EventQueue()
        self.wr_id_of: Callable[[int], int | None] = _as_it_is
        self.faults = FaultPlan(lambda wr_id: self.wr_id_of(wr_id))
        """What is to go wrong on purpose."""


class Device:
    """A software RDMA device.

    One lock covers all that it does; whoever enters through a verb holds it.
    It has no threads: progress is made inside the verbs.

    Attributes:
        name: its name.
        gids: its GID table.
        port_mtu: the active MTU of its port.
        memory: its keys.
        qps, srqs: what exists, by number.
        parked: queue pairs whose next request is to be tried again later.
        lock: to be held inside every verb.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.guid = int.from_bytes(_LINK_LOCAL[8:]) ^ 0x0200_0000_0000_0000
        self.gids = (_LINK_LOCAL, _LOOPBACK)
        self.port_mtu = MTU.MTU_4096
        self.memory = Memory()
        self.qps: dict[int, QueuePair] = {}
        self.srqs: dict[int, SharedReceiveQueue] = {}
        self.parked: set[QueuePair] = set()
        self.channels: set[Channel] = set()
        self.groups: dict[bytes, set[QueuePair]] = {}
        self.lock = threading.RLock()
        self.numbers = itertools.count(0x11)
        """Numbers of queues; 0 and 1 are special queue pairs elsewhere."""
        self.errors: list[BaseException] = []

    # ---- the wire -----------------------------------------------------------

    def transmit(self, request: Request, dgid: bytes | None) -> Ack | None:
        """Carry a request to its queue pair and return the answer, if any comes."""
        if dgid is not None and dgid not in self.gids:
            return None
        qp = self.qps.get(request.dest_qpn)
        return None if qp is None else responder.receive(qp, request)

    def attach(self, qp: QueuePair, group: bytes) -> None:
        """Let a queue pair receive what is sent to a multicast group."""
        self.groups.setdefault(group, set()).add(qp)

    def detach(self, qp: QueuePair, group: bytes) -> bool:
        """Undo attach; return whether the queue pair was attached."""
        members = self.groups.get(group, set())
        attached = qp in members
        members.discard(qp)
        if attached and not members:
            del self.groups[group]
        return attached

    def multicast(self, request: Request, dgid: bytes) -> None:
        """Carry a datagram to every queue pair that is attached to the group."""
        for qp in list(self.groups.get(dgid, ())):
            responder.receive(qp, request)

    # ---- progress -----------------------------------------------------------

    def park(self, qp: QueuePair) -> None:
        """Come back to a queue pair when its next attempt is due."""
        self.parked.add(qp)
        for channel in self.channels:
            channel.signal()

    def progress(self) -> None:
        """Go on with what is due."""
        now = time.monotonic()
        for qp in [qp for qp in self.parked if qp.due <= now]:
            self.parked.discard(qp)
            requester.run(qp)

    def nanoseconds_until_due(self) -> int:
        """Return when something parked is due next; 0 when nothing is parked."""
        if not self.parked:
            return 0
        due = min(qp.due for qp in self.parked)
        return max(1, int((due - time.monotonic()) * 1e9))

    # ---- faults of its own --------------------------------------------------

    def report(self, error: BaseException) -> None:
        """Keep an exception until the call that met it has come back from C."""
        self.errors.append(error)

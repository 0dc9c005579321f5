"""The device: its objects, the wire between its queue pairs, and its progress."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from ...._binding import ffi, lib, native
from ....enums import MTU
from . import requester, responder
from .completion import EventQueue
from .device_queues import SharedReceiveQueue
from .faults import FaultPlan, PlannedFaults
from .journaled_dict import JournaledDict
from .memory import Memory
from .qp import QueuePair
from .transport_messages import Ack, Request

_LINK_LOCAL = bytes.fromhex("fe80000000000000025200fffe500f00")
_LOOPBACK = bytes.fromhex("00000000000000000000ffff7f000001")

_TIMER = (lib.CLOCK_MONOTONIC, lib.TFD_CLOEXEC | lib.TFD_NONBLOCK)
MAX_MCAST_GRP = 1 << 13
MAX_MCAST_QP_ATTACH = 1 << 8


ready: list[QueuePair | SharedReceiveQueue] = []
"""What has work requests to execute after the verb; C empties it."""


class OpenDevice(native.Record):
    """One open context of the device."""

    def __init__(self, device: Device, struct: Any) -> None:
        self.struct = struct
        """The struct around the context; a pointer to a part does not keep the whole."""
        self.events = EventQueue(device)
        self.faults = PlannedFaults()
        self.plan = FaultPlan(self.faults)
        """The users' interface to the faults."""


class Device(native.Record):
    """A software RDMA device.

    Every verb holds one lock, which covers everything (``_c/soft0/transaction.c``). The device has
    no threads: progress is made inside the verbs.

    Attributes:
        name: its name.
        gids: its GID table.
        port_mtu: the active MTU of its port.
        memory: its keys.
        qps, srqs: its queue pairs and SRQs, by number.
        timer_fd: expires when a retry is due; -1 while the device is not open.
        parked: queue pairs whose next request will be retried later.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.guid = int.from_bytes(_LINK_LOCAL[8:]) ^ 0x0200_0000_0000_0000
        self.gids = (_LINK_LOCAL, _LOOPBACK)
        self.port_mtu = MTU.MTU_4096
        self.memory = Memory()
        self.qps: dict[int, QueuePair] = JournaledDict()
        self.srqs: dict[int, SharedReceiveQueue] = JournaledDict()
        self.parked: frozenset[QueuePair] = frozenset()
        self._due = -1.0
        self.timer_fd = -1
        self._times_open = 0
        self.groups: dict[bytes, frozenset[QueuePair]] = JournaledDict()
        self.numbers = itertools.count(0x11)
        """Numbers of queues; 0 and 1 are special queue pairs elsewhere."""

    def open(self) -> None:
        """Count one more open context; the first makes the timer."""
        if not self._times_open:
            self.timer_fd = native.made(os.close, lib.timerfd_create, *_TIMER)
            if self.timer_fd < 0:
                raise OSError(ffi.errno, "timerfd_create")
        self._times_open += 1

    def close(self) -> None:
        """Undo open()."""
        self._times_open -= 1
        if not self._times_open:
            native.on_commit(os.close, self.timer_fd)
            self.timer_fd = -1

    # ---- the wire -----------------------------------------------------------

    def transmit(self, request: Request, dgid: bytes | None) -> Ack | None:
        """Deliver a request to its queue pair and return the acknowledgement, if any."""
        if dgid is not None and dgid not in self.gids:
            return None
        qp = self.qps.get(request.dest_qpn)
        return None if qp is None else responder.receive(qp, request)

    def attach(self, qp: QueuePair, group: bytes) -> bool:
        """Attach a queue pair to a multicast group; return whether the limits allow it."""
        members = self.groups.get(group, frozenset())
        if qp in members:
            return True
        if len(members) >= MAX_MCAST_QP_ATTACH or (
            not members and len(self.groups) >= MAX_MCAST_GRP
        ):
            return False
        self.groups[group] = members | {qp}
        return True

    def detach(self, qp: QueuePair, group: bytes) -> bool:
        """Undo attach; return whether the queue pair was attached."""
        members = self.groups.get(group, frozenset())
        if qp not in members:
            return False
        if len(members) > 1:
            self.groups[group] = members - {qp}
        else:
            del self.groups[group]
        return True

    def multicast(self, request: Request, dgid: bytes) -> None:
        """Deliver a datagram to every queue pair that is attached to the group."""
        for qp in list(self.groups.get(dgid, ())):
            responder.receive(qp, request)

    # ---- progress -----------------------------------------------------------

    def park(self, qp: QueuePair) -> None:
        """Start a queue pair again when its next attempt is due."""
        self._set_parked(self.parked | {qp})

    def unpark(self, qp: QueuePair) -> None:
        """Undo park."""
        if qp in self.parked:
            self._set_parked(self.parked - {qp})

    def _set_parked(self, parked: frozenset[QueuePair]) -> None:
        self.parked = parked
        self._due = min([qp.due for qp in parked], default=-1.0)
        native.on_commit(native.schedule_at, self._due)
        native.on_commit(native.set_timer, self.timer_fd, self._nanoseconds_until_due())

    def start(self, worker: QueuePair | SharedReceiveQueue) -> None:
        """Have a queue's work requests executed after the verb."""
        native.on_commit(native.start, worker)

    def execute_next(self, worker: QueuePair | SharedReceiveQueue | None) -> bool:
        """Carry out one pending work request of a worker; return whether to call again.

        Args:
            worker: None starts the queue pairs that are parked and due.
        """
        if isinstance(worker, QueuePair):
            return requester.execute_next(worker)
        if worker is not None:
            return bool(worker.tags.execute_next())
        now = time.monotonic()
        due = frozenset([qp for qp in self.parked if qp.due <= now])
        self._set_parked(self.parked - due)
        for qp in due:
            self.start(qp)
        return False

    def give_up(self, worker: QueuePair | SharedReceiveQueue | None) -> bool:
        """Fail the work request that could not be executed; return whether to call again."""
        if isinstance(worker, QueuePair):
            return requester.give_up(worker)
        return worker is not None and bool(worker.tags.give_up())

    def _nanoseconds_until_due(self) -> int:
        """Return the time to the next retry; 0 when nothing is parked."""
        if not self.parked:
            return 0
        return max(1, int((self._due - time.monotonic()) * 1e9))

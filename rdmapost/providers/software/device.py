"""The device: its objects, the wire between its queue pairs, and its progress."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

from ..._binding import ffi, lib, native
from ...enums import MTU
from ...errors import UnsupportedError
from ..soft0 import requester
from . import responder
from .completion import EventQueue
from .device_queues import SharedReceiveQueue
from .faults import FaultPlan, PacketFaults, PlannedFaults
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
wires: list[Device] = []
"""The open devices on a network, which look for packets in every verb."""
open_devices: dict[str, Device] = JournaledDict()
"""The devices that have an open context, by name."""


def run_due() -> None:
    """Start what is due on the open devices."""
    for device in list(open_devices.values()):
        device.run_due()
    _schedule()


def _schedule() -> None:
    """Have run_due called when the first of the devices is due."""
    due = [device.due for device in open_devices.values() if device.due >= 0]
    native.on_commit(native.schedule_at, min(due, default=-1.0))


def _unknown(cookie: int) -> None:
    """Return the caller's wr_id: not known."""


class OpenDevice(native.Record):
    """One open context of the device."""

    def __init__(self, device: Device, struct: Any) -> None:
        self.device = device
        self.struct = struct
        """The struct around the context; a pointer to a part does not keep the whole."""
        self.events = EventQueue(device)
        self.faults = PlannedFaults()
        self.plan = FaultPlan(self.faults, device)
        """The users' interface to the faults."""
        self.wr_id_of: Callable[[int], int | None] = _unknown
        """Returns the caller's wr_id for the device's, or None."""


class Device(native.Record):
    """A software RDMA device.

    Every verb holds one lock, which covers everything (``_c/soft0/transaction.c``). The device has
    no threads: progress is made inside the verbs.

    Attributes:
        name: its name.
        gids: its GID table.
        netdev: the network device behind it, or "".
        port_mtu: the active MTU of its port.
        memory: its keys.
        qps, srqs: its queue pairs and SRQs, by number.
        timer_fd: expires when the device is due; -1 while it is not open.
        due: when something must be done, by the monotonic clock; negative if never.
        parked: queue pairs whose next request will be retried later.
    """

    queue_pair = QueuePair

    def __init__(self, name: str) -> None:
        self.name = name
        self.guid = int.from_bytes(_LINK_LOCAL[8:]) ^ 0x0200_0000_0000_0000
        self.gids: tuple[bytes, ...] = (_LINK_LOCAL, _LOOPBACK)
        self.netdev = ""
        self.port_mtu = MTU.MTU_4096
        self.memory = Memory()
        self.qps: dict[int, QueuePair] = JournaledDict()
        self.srqs: dict[int, SharedReceiveQueue] = JournaledDict()
        self.parked: frozenset[QueuePair] = frozenset()
        self.due = -1.0
        self.timer_fd = -1
        self._times_open = 0
        self.groups: dict[bytes, frozenset[QueuePair]] = JournaledDict()
        self._numbers = itertools.count(0x11)

    def open(self) -> None:
        """Count one more open context; the first makes the timer."""
        if not self._times_open:
            self.timer_fd = native.made(os.close, lib.timerfd_create, *_TIMER)
            if self.timer_fd < 0:
                raise OSError(ffi.errno, "timerfd_create")
            open_devices[self.name] = self
        self._times_open += 1

    def close(self) -> None:
        """Undo open()."""
        self._times_open -= 1
        if not self._times_open:
            native.on_commit(os.close, self.timer_fd)
            self.timer_fd = -1
            del open_devices[self.name]

    @property
    def wake_fds(self) -> tuple[int, ...]:
        """The descriptors that are readable when a verb can make progress, such as a retry."""
        return (self.timer_fd,)

    def start_over(self) -> None:
        """Forget everything, in the child of a fork."""
        self.__init__(self.name)  # type: ignore[misc]

    def new_number(self) -> int:
        """Return the number of a new queue; 0 and 1 are special queue pairs elsewhere."""
        return next(self._numbers) & 0xFFFFFF

    # ---- the wire -----------------------------------------------------------

    def plan_packets(self, plan: PacketFaults | None, sent: bool, received: bool) -> None:
        """Begin a plan for packets, or end it.

        Raises:
            UnsupportedError: the device has none.
        """
        if plan is not None:
            raise UnsupportedError(
                "faults.packets",
                errno.EOPNOTSUPP,
                "soft0 has no packets; use a roce device, such as roce:lo",
            )

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
        self.set_due(min([qp.due for qp in parked], default=-1.0))

    def set_due(self, due: float) -> None:
        """Have run_due called at a time, unless it is negative."""
        self.due = due
        _schedule()
        # 0 disarms the timer.
        nanoseconds = max(1, int((due - time.monotonic()) * 1e9)) if due >= 0 else 0
        native.on_commit(native.set_timer, self.timer_fd, nanoseconds)

    def run_due(self) -> None:
        """Start the queue pairs that are parked and due."""
        now = time.monotonic()
        if not 0 <= self.due <= now:
            return
        due = frozenset([qp for qp in self.parked if qp.due <= now])
        self._set_parked(self.parked - due)
        for qp in due:
            self.start(qp)

    def start(self, worker: QueuePair | SharedReceiveQueue) -> None:
        """Have a queue's work requests executed after the verb."""
        native.on_commit(native.start, worker)

    def put_off(self) -> bool:
        """Have another verb go on with the pending work soon; return whether one will."""
        # Nobody would begin it, and a poll shows all that was posted before.
        return False

    def execute_next(self, worker: QueuePair | SharedReceiveQueue) -> bool:
        """Carry out one pending work request of a worker; return whether to call again."""
        if isinstance(worker, QueuePair):
            return requester.execute_next(worker)
        return bool(worker.tags.execute_next())

    def give_up(self, worker: QueuePair | SharedReceiveQueue) -> bool:
        """Fail the work request that could not be executed; return whether to call again."""
        if isinstance(worker, QueuePair):
            return requester.give_up(worker)
        return bool(worker.tags.give_up())

"""The device: its objects, its timer, and how it makes progress."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from ..._binding import ffi, lib, native
from ...enums import MTU
from ..fault_plan import FaultPlan, PacketFaults
from .completion import EventQueue
from .device_queues import SharedReceiveQueue
from .journaled_dict import JournaledDict
from .memory import Memory
from .numbers import Numbers
from .planned_faults import PlannedFaults
from .qp import QueuePair

QP_NUMBERS = 2, 0xFFFFFE
"""The first and the last number of a queue pair: 0 and 1 are reserved, and 0xFFFFFF stands for
multicast."""

_TIMER = (lib.CLOCK_MONOTONIC, lib.TFD_CLOEXEC | lib.TFD_NONBLOCK)


ready: list[QueuePair | SharedReceiveQueue] = []
"""The objects with work requests to execute after the verb; C empties the list."""
wires: list[Device] = []
"""The open devices on a network, which look for packets in every verb."""
open_devices: dict[str, Device] = JournaledDict()
"""The devices that have an open context, by name."""
permanent: list[Device] = []
"""The devices that outlive their contexts."""


def run_due() -> None:
    """Start the work that is due on every open device."""
    now = time.monotonic()
    for device in list(open_devices.values()):
        if 0 <= device.due <= now:
            device.run_due(now)
        else:
            # C has set the timer if it lacked memory (transaction.c).
            device.set_due(device.due)


def _unknown(cookie: int) -> None:
    """Return None, because the caller's wr_id is not known."""


class OpenDevice(native.Record):
    """One open context of a device."""

    def __init__(self, device: Device, struct: Any) -> None:
        self.device = device
        self.struct = struct
        """The struct around the context; a pointer to a part does not keep the whole alive."""
        self.events = EventQueue(device)
        self.faults = PlannedFaults()
        self.plan = FaultPlan(self.faults, device)
        """The user's interface to the faults."""
        self.wr_id_of: Callable[[int], int | None] = _unknown
        """Maps the device's wr_id to the caller's, or to None."""


class Device(native.Record):
    """A software RDMA device.

    Every verb holds one lock, which covers everything (``_c/software/transaction.c``). The device
    makes progress inside the verbs. Each device's class implements the methods that raise
    NotImplementedError here, and may replace ``queue_pair``.

    Attributes:
        name: its name.
        guid: its node GUID.
        gids: its GID table.
        netdev: the network device behind it, or "".
        port_mtu: the active MTU of its port.
        memory: its keys.
        qps, srqs: its queue pairs and SRQs, by number.
        numbers: chooses the numbers of new queue pairs and SRQs.
        timer_fd: expires when the device is due; -1 while it is not open.
        times_open: how many open contexts it has.
        qkey_violations: how many datagrams had a wrong Q_Key, up to 65535.
        due: when something must be done, by the monotonic clock; negative if never.
    """

    queue_pair: type[QueuePair] = QueuePair

    def __init__(self, name: str) -> None:
        self.name = name
        self.guid = 0
        self.gids: tuple[bytes, ...] = ()
        self.netdev = ""
        self.port_mtu = MTU.MTU_4096
        self.memory = Memory()
        self.qps: dict[int, Any] = JournaledDict()
        self.srqs: dict[int, SharedReceiveQueue] = JournaledDict()
        self.numbers = Numbers(*QP_NUMBERS, start=0x11)
        self.due = -1.0
        self.timer_fd = -1
        self.times_open = 0
        self.qkey_violations = 0

    def open(self) -> None:
        """Count one more open context; the first makes the timer."""
        if not self.times_open:
            self.timer_fd = native.made(os.close, lib.timerfd_create, *_TIMER)
            if self.timer_fd < 0:
                raise OSError(ffi.errno, "timerfd_create")
            open_devices[self.name] = self
        self.times_open += 1

    def close(self) -> None:
        """Undo open()."""
        self.times_open -= 1
        if not self.times_open:
            native.on_commit(os.close, self.timer_fd)
            self.timer_fd = -1
            del open_devices[self.name]

    @property
    def wake_fds(self) -> tuple[int, ...]:
        """The descriptors that are readable when there is work for a verb, such as a retry."""
        return (self.timer_fd,)

    def count_qkey_violation(self) -> None:
        """Count a datagram that is dropped because its Q_Key is wrong."""
        self.qkey_violations = min(self.qkey_violations + 1, 0xFFFF)

    def start_over(self) -> None:
        """Reset everything, in the child of a fork."""
        self.__init__(self.name)  # type: ignore[misc]

    def new_number(self, call: str) -> int:
        """Return the number of a new queue pair or SRQ, for the named verb.

        Raises:
            VerbsError: ENOMEM: all are in use.
        """
        what = "queue pair and SRQ numbers"
        return self.numbers.choose(call, what, self._is_number_taken)

    def _is_number_taken(self, number: int) -> bool:
        return number in self.qps or number in self.srqs

    def remove(self, qp: Any) -> None:
        """Remove a queue pair that is being destroyed."""
        del self.qps[qp.number]

    def plan_packets(self, plan: PacketFaults | None, sent: bool, received: bool) -> None:
        """Start a plan of packet faults; None ends the current one.

        Raises:
            UnsupportedError: the device has no packets.
        """
        raise NotImplementedError

    # ---- progress -----------------------------------------------------------

    def set_due(self, due: float) -> None:
        """Have run_due called at a given time; a negative time cancels the call."""
        self.due = due
        # C looks at the time for all the devices.
        all_due = [device.due for device in open_devices.values() if device.due >= 0]
        native.on_commit(native.schedule_at, min(all_due, default=-1.0))
        # 0 disarms the timer.
        nanoseconds = max(1, int((due - time.monotonic()) * 1e9)) if due >= 0 else 0
        native.on_commit(native.set_timer, self.timer_fd, nanoseconds)

    def start(self, worker: Any) -> None:
        """Schedule a queue's work requests to be executed after the verb."""
        native.on_commit(native.start, worker)

    def run_due(self, now: float) -> None:
        """Start the work that is due by this time."""
        raise NotImplementedError

    def put_off(self) -> bool:
        """Have another verb continue the pending work soon; return whether one will."""
        raise NotImplementedError

    def execute_next(self, worker: Any) -> bool:
        """Do one part of a worker's pending work; return whether to call again."""
        raise NotImplementedError

    def give_up(self, worker: Any) -> int:
        """Fail the work that could not be executed.

        Returns:
            1 to be called again; 0 at the end; -1 if there is nothing to fail, so that a later verb
            must retry the work.
        """
        raise NotImplementedError

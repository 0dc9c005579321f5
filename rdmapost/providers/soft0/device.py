"""The device: the wire between its queue pairs, multicast groups, and retries."""

from __future__ import annotations

import errno

from ...errors import UnsupportedError
from ..fault_plan import PacketFaults
from ..software.device import Device, permanent
from ..software.device_queues import SharedReceiveQueue
from ..software.journaled_dict import JournaledDict
from ..software.transport_messages import Ack, Request
from . import requester, responder
from .qp import SoftQueuePair

_LINK_LOCAL = bytes.fromhex("fe80000000000000025200fffe500f00")
_LOOPBACK = bytes.fromhex("00000000000000000000ffff7f000001")

NO_PACKETS = "soft0 has no packets; use a roce device, such as roce:lo"
MAX_MCAST_GRP = 1 << 13
MAX_MCAST_QP_ATTACH = 1 << 8


class SoftDevice(Device):
    """The device whose peers are its own queue pairs.

    It has no threads.

    Attributes:
        parked: queue pairs whose next request will be retried later.
        groups: the queue pairs that are attached to each multicast group.
    """

    queue_pair = SoftQueuePair

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.guid = int.from_bytes(_LINK_LOCAL[8:]) ^ 0x0200_0000_0000_0000
        self.gids = (_LINK_LOCAL, _LOOPBACK)
        self.parked: frozenset[SoftQueuePair] = frozenset()
        self.groups: dict[bytes, frozenset[SoftQueuePair]] = JournaledDict()

    def remove(self, qp: SoftQueuePair) -> None:
        for group in list(self.groups):
            self.detach(qp, group)
        super().remove(qp)

    # ---- the wire -----------------------------------------------------------

    def plan_packets(self, plan: PacketFaults | None, sent: bool, received: bool) -> None:
        if plan is not None:
            raise UnsupportedError("faults.packets", errno.EOPNOTSUPP, NO_PACKETS)

    def transmit(self, request: Request, dgid: bytes | None) -> Ack | None:
        """Deliver a request to its queue pair and return the acknowledgement, if any."""
        if dgid is not None and dgid not in self.gids:
            return None
        qp = self.qps.get(request.dest_qpn)
        return None if qp is None else responder.receive(qp, request)

    def attach(self, qp: SoftQueuePair, group: bytes) -> bool:
        """Attach a queue pair to a multicast group; return False if a limit forbids it."""
        members = self.groups.get(group, frozenset())
        if qp in members:
            return True
        if len(members) >= MAX_MCAST_QP_ATTACH or (
            not members and len(self.groups) >= MAX_MCAST_GRP
        ):
            return False
        self.groups[group] = members | {qp}
        return True

    def detach(self, qp: SoftQueuePair, group: bytes) -> bool:
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

    def park(self, qp: SoftQueuePair) -> None:
        """Start a queue pair again when its next attempt is due."""
        self._set_parked(self.parked | {qp})

    def unpark(self, qp: SoftQueuePair) -> None:
        """Undo park."""
        if qp in self.parked:
            self._set_parked(self.parked - {qp})

    def _set_parked(self, parked: frozenset[SoftQueuePair]) -> None:
        self.parked = parked
        self.set_due(min([qp.due for qp in parked], default=-1.0))

    def run_due(self, now: float) -> None:
        """Start the queue pairs that are parked and due."""
        due = frozenset([qp for qp in self.parked if qp.due <= now])
        self._set_parked(self.parked - due)
        for qp in due:
            self.start(qp)

    def put_off(self) -> bool:
        # No thread would continue the work, and a poll must show the results of all earlier posts.
        return False

    def execute_next(self, worker: SoftQueuePair | SharedReceiveQueue) -> bool:
        """Execute one of a worker's pending work requests; return whether to call again."""
        if isinstance(worker, SoftQueuePair):
            return requester.execute_next(worker)
        return bool(worker.tags.execute_next())

    def give_up(self, worker: SoftQueuePair | SharedReceiveQueue) -> bool:
        if isinstance(worker, SoftQueuePair):
            return requester.give_up(worker)
        return bool(worker.tags.give_up())


device = SoftDevice("soft0")
permanent.append(device)

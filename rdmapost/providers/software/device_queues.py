"""Work queue entries, and the queues that hold them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._binding import native

if TYPE_CHECKING:
    from .completion import CompletionQueue
    from .memory import ProtectionDomain

WQE = native.WQE
"""A work request as the device holds it. It has the members of ``struct ibv_send_wr``, ``struct
ibv_recv_wr`` or ``struct ibv_ops_wr``, under the same names; those that its opcode does not use are
garbage. ``opcode`` is a number, each of ``sges`` is (addr, length, lkey), ``inline`` is the data
copied when it was posted, and ``ah``, ``window`` and ``region`` are the device's objects. The
device's own work requests (for tag matching) have an ``owner``, which is notified when they
end."""


class AddressHandle(NamedTuple):
    """The path to a peer."""

    sgid: bytes
    dgid: bytes
    sl: int
    flow_label: int
    hop_limit: int
    traffic_class: int


class WorkQueue(native.DeviceQueue):
    """A queue of work requests with a fixed number of slots.

    Posting, in C, takes a slot. The slot becomes free only when a completion that retires its work
    request has been polled, as on hardware.

    Attributes:
        pending: the work requests not yet completed.
        depth: its number of slots.
        max_sge: the most SGEs in a work request.
        used: slots taken.
        silent: completed unsignaled work requests, whose slots a later completion frees.
        refuses: the errno with which every post fails, or 0.
        prompt: whether posted work requests are executed at once, without waiting for a message.
    """

    __slots__ = ()

    def __init__(self, depth: int, max_sge: int, refuses: int = 0) -> None:
        self.pending: deque[WQE] = deque()
        self.depth = depth
        self.max_sge = max_sge
        self.refuses = refuses

    def take(self) -> WQE:
        """Remove and return the first work request."""
        wqe: WQE = native.take(self.pending)
        return wqe

    def clear(self) -> None:
        """Remove everything."""
        self.silent = 0
        # This includes work requests that a signal handler posts in the meantime.
        native.on_commit(self.empty)


class XRCDomain(native.Record):
    """XRC targets work only with the XRC shared receive queues of the same domain."""

    __slots__ = ("handle", "inode", "opened", "users")

    def __init__(self, inode: tuple[int, int] | None) -> None:
        self.inode = inode
        """The file by which other contexts find it, or None."""
        self.handle: Any = None
        self.opened = 0
        self.users = 0


class SharedReceiveQueue(native.Record):
    """Receives that many queue pairs share."""

    def __init__(
        self, context: Any, pd: ProtectionDomain, depth: int, max_sge: int, number: int
    ) -> None:
        self.device = context.device
        self.context = context
        self.pd = pd
        self.queue = WorkQueue(depth, max_sge)
        self.number = number
        self.limit = 0
        """The limit event fires when fewer receives than this are left; 0 means not armed."""
        self.cq: CompletionQueue | None = None
        """Where XRC and tag-matching receives complete."""
        self.xrcd: Any = None
        self.tags: Any = None
        """The matching list of a tag-matching queue."""
        self.ops: WorkQueue | None = None
        """The operations on the matching list."""
        self.handle: Any = None
        self.users = 0

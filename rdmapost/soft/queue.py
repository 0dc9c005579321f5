"""Work queue entries, and the queues that hold them."""

from __future__ import annotations

import errno
from collections import deque
from typing import TYPE_CHECKING, Any

from ..enums import Opcode

if TYPE_CHECKING:
    from .completion import CompletionQueue
    from .memory import ProtectionDomain

__all__ = ["RecvWQE", "SendWQE", "SharedReceiveQueue", "WorkQueue", "XRCDomain"]


class SendWQE:
    """A send work request as the device holds it."""

    # Most work requests differ from these in two or three.
    sges: Any = ()
    """(addr, length, lkey) each."""
    inline: Any = None
    """The data, copied at the post, where the work request is inline."""
    remote_addr = rkey = compare_add = swap = 0
    ah: Any = None
    remote_qpn = remote_qkey = remote_srqn = 0
    bind: Any = None
    """(window, region, addr, length, access) of a BIND_MW."""
    hdr = b""
    mss = 0
    owner: Any = None
    """Who hears how it ended, where it is the device's own (tags)."""

    def __init__(self, wr_id: int, opcode: Opcode, flags: int, imm: int) -> None:
        self.wr_id = wr_id
        self.opcode = opcode
        self.flags = flags
        self.imm = imm
        """imm_data in network order, or invalidate_rkey."""


class RecvWQE:
    """A receive work request as the device holds it."""

    __slots__ = ("sges", "wr_id")

    def __init__(self, wr_id: int, sges: Any) -> None:
        self.wr_id = wr_id
        self.sges = sges


class WorkQueue:
    """A queue of work requests with a fixed number of slots.

    A slot is taken at the post.  It comes free when a completion that shows
    its work request as done has been polled, and not before: hardware knows no
    more than the consumer tells it.
    """

    __slots__ = ("depth", "max_sge", "pending", "silent", "used")

    def __init__(self, depth: int, max_sge: int) -> None:
        self.depth = depth
        self.max_sge = max_sge
        self.pending: deque[Any] = deque()
        self.used = 0
        self.silent = 0
        """Unsignaled work requests that are done, and whose slots wait for a completion."""

    def add(self, wqe: Any) -> int:
        """Take a slot for a work request; return 0 or an errno."""
        if self.used >= self.depth:
            return errno.ENOMEM
        if len(wqe.sges) > self.max_sge:
            return errno.EINVAL
        self.used += 1
        self.pending.append(wqe)
        return 0

    def clear(self) -> None:
        """Forget everything."""
        self.pending.clear()
        self.used = self.silent = 0


class XRCDomain:
    """What XRC targets and XRC shared receive queues may be used together."""

    __slots__ = ("handle", "inode", "opened", "users")

    def __init__(self, inode: tuple[int, int] | None) -> None:
        self.inode = inode
        """The file by which other contexts find it, or None."""
        self.handle: Any = None
        self.opened = 0
        self.users = 0


class SharedReceiveQueue:
    """Receives that many queue pairs share."""

    __slots__ = (
        "context",
        "cq",
        "handle",
        "limit",
        "number",
        "pd",
        "queue",
        "tags",
        "users",
        "xrcd",
    )

    def __init__(
        self, context: Any, pd: ProtectionDomain, depth: int, max_sge: int, number: int
    ) -> None:
        self.context = context
        self.pd = pd
        self.queue = WorkQueue(depth, max_sge)
        self.number = number
        self.limit = 0
        """The limit event fires when fewer receives than this are left; 0 is not armed."""
        self.cq: CompletionQueue | None = None
        """Where receives of XRC and tag matching complete."""
        self.xrcd: Any = None
        self.tags: Any = None
        """The matching list of a tag-matching queue."""
        self.handle: Any = None
        self.users = 0

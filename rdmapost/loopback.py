"""Two queue pairs of one device that reach each other, with what they need around them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from .completion import CQ, WC
from .device import Context
from .enums import Access, MWType, QPType
from .errors import RdmaError, WaitTimeout
from .memory import MR, MW, PD
from .queuepair import DEFAULT_QKEY, QP
from .wr import SGE, RecvWR

__all__ = ["GRH_BYTES", "Loopback", "Side"]

GRH_BYTES = 40
"""What a UD receive finds in front of the message (ibv_post_recv(3))."""

_EVERY_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
_LOOK_AGAIN_S = 0.0005


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a loopback.

    Attributes:
        qp: its queue pair.
        cq: where everything of the queue pair completes.
        mr: its memory.
    """

    qp: QP
    cq: CQ
    mr: MR


class Loopback:
    """A local and a remote queue pair of one device, connected to each other.

    A context manager; ``close()`` gives everything back, in the right order
    whatever is still outstanding.  UD queue pairs are not connected: give work
    requests ``**loopback.address``.

    The waits share one deadline, so that nothing hangs: it starts when the
    loopback has been made.

    Args:
        context: an open device.
        qp_type: RC, UC or UD.
        local_size, remote_size: bytes of memory on each side; the remote one has the headroom
            of its receives besides.
        access: what the remote memory permits, an Access; everything unless given.
        depth: work requests that each queue must hold.
        max_inline_data: bytes of one inline work request.
        port_num: the port of both, from 1.
        gid_index: the GID of both; chosen by choose_gid unless given.
        timeout: seconds for all waits together.

    Attributes:
        local: the side that posts sends, reads, writes and atomics.
        remote: the side that they go to.
        address: on UD, the fields of a work request that name the remote side.
        headroom: bytes in front of a received message: the GRH on UD.
        timeout: as given.

    Raises:
        ValueError: the device has no such port, or cannot hold that many completions.
        RdmaError: the port has no GID.
        VerbsError: the device refused; the text says what.
    """

    def __init__(
        self,
        context: Context,
        qp_type: QPType = QPType.RC,
        *,
        local_size: int = 4096,
        remote_size: int = 4096,
        access: int | None = None,
        depth: int = 16,
        max_inline_data: int = 0,
        port_num: int = 1,
        gid_index: int | None = None,
        timeout: float = 5.0,
    ) -> None:
        if access is None:
            access = _EVERY_ACCESS
            if not context.attr.atomic_cap:
                access &= ~Access.REMOTE_ATOMIC
        # Sends and receives complete in the same queue.
        cqe = min(2 * depth, context.attr.max_cqe)
        self.headroom = GRH_BYTES if qp_type is QPType.UD else 0
        self.address: dict[str, Any] = {}
        self.timeout = timeout
        with ExitStack() as stack:
            self._pd = stack.enter_context(PD(context))
            sides = [
                (
                    stack.enter_context(CQ(context, cqe)),
                    stack.enter_context(MR(self._pd, max(1, size), allowed)),
                )
                for size, allowed in (
                    (local_size, int(Access.LOCAL_WRITE)),
                    (remote_size + depth * self.headroom, access),
                )
            ]
            self.local, self.remote = (
                Side(
                    stack.enter_context(
                        QP(
                            self._pd,
                            qp_type,
                            cq,
                            max_send_wr=depth,
                            max_recv_wr=depth,
                            max_send_sge=1,
                            max_recv_sge=1,
                            max_inline_data=max_inline_data,
                            port_num=port_num,
                            gid_index=gid_index,
                        )
                    ),
                    cq,
                    mr,
                )
                for cq, mr in sides
            )
            # Windows and address handles go before the queue pairs: rxe takes 25 s
            # to destroy a queue pair that has a window bound to it.
            self._used = stack.enter_context(ExitStack())
            stack.callback(self._drop_outstanding)
            self._connect(qp_type)
            self._stack = stack.pop_all()
        self._deadline = time.monotonic() + timeout

    def _connect(self, qp_type: QPType) -> None:
        here, there = self.local.qp, self.remote.qp
        if qp_type is not QPType.UD:
            there.connect(here.endpoint())
            here.connect(there.endpoint())
            return
        for qp in (there, here):
            qp.connect(qkey=DEFAULT_QKEY)
        self.address = {
            "ah": self._used.enter_context(here.ah_to(there.endpoint())),
            "remote_qpn": there.qp_num,
            "remote_qkey": DEFAULT_QKEY,
        }

    def _drop_outstanding(self) -> None:
        # What a work request names cannot be closed while it is outstanding.
        for side in (self.local, self.remote):
            if any(side.qp.outstanding):
                with suppress(RdmaError):
                    side.qp.to_reset()

    def close(self) -> None:
        """Give everything back; do nothing if that has been done.

        Raises:
            VerbsError: the device refused.
        """
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def window(self, mw_type: MWType = MWType.TYPE_2) -> MW:
        """Allocate a memory window that is given back with the loopback.

        Raises:
            UnsupportedError: the device has no memory windows.
            VerbsError: the device has no more.
        """
        return self._used.enter_context(MW(self._pd, mw_type))

    def target(self, offset: int = 0) -> dict[str, Any]:
        """Return the fields of a work request that name a place in the remote memory.

        Args:
            offset: bytes from its start.
        """
        return {"remote_addr": self.remote.mr.addr + offset, "rkey": self.remote.mr.rkey}

    # ---- receiving ----------------------------------------------------------

    def receive(self, length: int, count: int = 1) -> None:
        """Post receives on the remote side, one after the other in its memory.

        Args:
            length: bytes of message that each has room for.
            count: how many; their wr_id counts from 1.

        Raises:
            PostError: the device refused.
            IndexError: the remote memory is too small.
        """
        slot = self.headroom + length
        self.remote.qp.post_recv(
            [
                RecvWR(self.cut(self.remote, index * slot, slot), wr_id=index + 1)
                for index in range(count)
            ]
        )

    def received(self, length: int, index: int = 0, room: int | None = None) -> bytes:
        """Return the message that a receive took.

        Args:
            length: bytes of the message.
            index: which receive, from 0.
            room: what it had room for; length unless given.
        """
        start = index * (self.headroom + (length if room is None else room)) + self.headroom
        return bytes(self.remote.mr.buffer[start : start + length])

    @staticmethod
    def cut(side: Side, offset: int, length: int) -> Sequence[SGE]:
        """Return the sg_list for a range of a side's memory; it is empty for 0 bytes."""
        return [side.mr[offset : offset + length]] if length else []

    # ---- waiting ------------------------------------------------------------

    def sent(self, count: int = 1) -> list[WC]:
        """Wait for completions of what the local side posted.

        Raises:
            WaitTimeout: they did not come in time.
        """
        return self._wait(self.local, count, "what was posted did not complete")

    def arrived(self, count: int = 1) -> list[WC]:
        """Wait for completions of the remote side.

        Raises:
            WaitTimeout: they did not come in time.
        """
        return self._wait(self.remote, count, "nothing arrived at the remote queue pair")

    def settled(self, expected: bytes, offset: int = 0) -> bool:
        """Wait until the remote memory holds these bytes, and say whether it does.

        An unacknowledged write (UC) can be seen in no other way.

        Args:
            expected: the bytes.
            offset: where, from the start of the remote memory.
        """
        memory = self.remote.mr.buffer[offset : offset + len(expected)]
        while memory != expected:
            if time.monotonic() > self._deadline:
                return False
            time.sleep(_LOOK_AGAIN_S)
        return True

    def _wait(self, side: Side, count: int, otherwise: str) -> list[WC]:
        try:
            return side.cq.wait(count, max(0.0, self._deadline - time.monotonic()))
        except WaitTimeout:
            # The time that was left says little; the whole of it is what was asked for.
            raise WaitTimeout(f"{otherwise} within {self.timeout:g} s") from None

"""Two connected queue pairs on one device, with their resources."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .._arguments import counted, expect, index, member, time_limit, within
from ..enums import Access, DeviceCap, MWType, QPType, SRQType, WCExFlags
from ..errors import UnsupportedError, WaitTimeout
from ..posting.wr import SGE, RecvWR
from ..resources.cq import CQ, WC
from ..resources.device import Context
from ..resources.mr import MR
from ..resources.mw import MW
from ..resources.pd import PD
from ..resources.qp import DEFAULT_QKEY, QP
from ..resources.srq import SRQ
from ..resources.xrcd import XRCD
from ..standard.wire import GRH_BYTES
from .remote_fields import remote_fields
from .resource_stack import ResourceHolder, ResourceStack

__all__ = ["Loopback", "Side"]

_EVERY_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
_POLL_INTERVAL_S = 0.0005
_QP_TYPES = (QPType.RC, QPType.UC, QPType.UD, QPType.RAW_PACKET, QPType.XRC_SEND)


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a loopback.

    Attributes:
        qp: its queue pair.
        cq: where all of the queue pair's work requests complete.
        mr: its memory.
    """

    qp: QP
    cq: CQ
    mr: MR


class Loopback(ResourceHolder):
    """A local and a remote queue pair on one device, connected to each other.

    A context manager; ``close()`` closes everything in the right order, even with
    work requests outstanding.  ``**loopback.address`` are the fields of a work
    request that address the remote side: an address handle on UD, a shared receive
    queue on XRC, and none for the other types.

    All waits share one deadline, counted from the creation of the loopback.

    Args:
        context: an open device.
        qp_type: RC, UC, UD, RAW_PACKET, or XRC_SEND, whose remote side is an XRC_RECV.
        local_size, remote_size: bytes of memory on each side; remote_size excludes the headroom of
            the remote side's receives.
        access: access to the remote memory, an Access; default: LOCAL_WRITE and all supported
            REMOTE flags (add MW_BIND to bind windows to it).
        depth: work requests that each queue must hold.
        max_inline_data: the most bytes in one inline work request.
        max_recv_sge: SGEs that each receive can have.
        max_tso_header: header bytes of a TSO work request; 0 for no TSO.
        send_ops_flags: SendOps.FLUSH and SendOps.ATOMIC_WRITE, to allow these to be posted.
        srq_type: give the remote side a shared receive queue: BASIC, or TM with a matching
            list of `depth` tags.  XRC_SEND always has one.
        port_num: the port of both queue pairs, from 1.
        gid_index: the GID of both queue pairs; default: chosen by choose_gid.
        timeout: seconds for all waits in total, more than 0.

    Attributes:
        local: the side that posts sends, reads, writes and atomics.
        remote: the side that they go to.
        address: the fields of a work request that address the remote side.
        srq: the remote side's shared receive queue, or None.
        headroom: bytes before a received message: the GRH on UD.
        timeout: seconds for all waits in total.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, qp_type is another type, the device has no such
            port, or it cannot hold that many completions.
        RdmaError: the port has no GID.
        UnsupportedError: the device lacks what was asked for; the message says what.
        VerbsError: the device refused; the message says what.
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
        max_recv_sge: int = 1,
        max_tso_header: int = 0,
        send_ops_flags: int = 0,
        srq_type: SRQType | None = None,
        port_num: int = 1,
        gid_index: int | None = None,
        timeout: float = 5.0,
    ) -> None:
        expect("context", context, Context)
        qp_type = member("qp_type", qp_type, QPType)
        if qp_type not in _QP_TYPES:
            names = ", ".join([each.name for each in _QP_TYPES])
            raise ValueError(
                f"qp_type: expected one of {names} (whose remote side is an XRC_RECV), "
                f"got {qp_type.name}"
            )
        local_size = within("local_size", local_size, 0)
        remote_size = within("remote_size", remote_size, 0)
        depth = within("depth", depth, 1)
        max_tso_header = within("max_tso_header", max_tso_header, 0)
        self.timeout = time_limit(timeout)
        if qp_type is QPType.XRC_SEND:
            srq_type = SRQType.XRC
        _require(context, qp_type, max_tso_header, srq_type)
        if access is None:
            access = _EVERY_ACCESS
            if not context.attr.atomic_cap:
                access &= ~Access.REMOTE_ATOMIC
        # Sends and receives complete in the same queue; so do operations on a matching list.
        tagged = srq_type is SRQType.TM
        cqe = min((4 if tagged else 2) * depth, context.attr.max_cqe)
        self.headroom = GRH_BYTES if qp_type is QPType.UD else 0
        self.address: dict[str, Any] = {}
        self.srq: SRQ | None = None
        options: dict[str, Any] = {
            "max_send_wr": depth,
            "max_recv_wr": depth,
            "max_send_sge": 1,
            "max_recv_sge": max_recv_sge,
            "max_inline_data": max_inline_data,
            "max_tso_header": max_tso_header,
            "port_num": port_num,
            "gid_index": gid_index,
        }
        super().__init__()
        with self._stack.closed_on_error() as stack:
            self._pd = stack.add(PD(context))
            cq = stack.add(CQ(context, cqe))
            mr = stack.add(MR(self._pd, max(1, local_size)))
            wc_flags = WCExFlags.WITH_TM_INFO if tagged else WCExFlags(0)
            remote_cq = stack.add(CQ(context, cqe, wc_flags=wc_flags))
            room = max(1, remote_size + depth * self.headroom)
            remote_mr = stack.add(MR(self._pd, room, access))
            # Close these after the queue pairs, whose outstanding work requests may use them.
            self._used = stack.add(ResourceStack())
            remote = {**options, "pd": self._pd, "qp_type": qp_type, "send_cq": remote_cq}
            if srq_type is SRQType.XRC:
                xrcd = stack.add(XRCD(context))
                remote = {**options, "pd": None, "qp_type": QPType.XRC_RECV, "xrcd": xrcd}
                self.srq = SRQ(
                    self._pd, depth, max_recv_sge, srq_type=srq_type, xrcd=xrcd, cq=remote_cq
                )
            elif srq_type is not None:
                more: dict[str, Any] = {}
                if tagged:
                    more = {"cq": remote_cq, "max_num_tags": depth, "max_ops": depth}
                self.srq = SRQ(self._pd, depth, max_recv_sge, srq_type=srq_type, **more)
                remote["srq"] = self.srq
            if self.srq is not None:
                stack.add(self.srq)
            qp = stack.add(QP(self._pd, qp_type, cq, send_ops_flags=send_ops_flags, **options))
            self.local = Side(qp, cq, mr)
            self.remote = Side(stack.add(QP(**remote)), remote_cq, remote_mr)
            self._connect(qp_type)
        self._deadline = time.monotonic() + self.timeout

    def _connect(self, qp_type: QPType) -> None:
        here, there = self.local.qp, self.remote.qp
        if qp_type is QPType.RAW_PACKET:
            there.connect()
            here.connect()
            return
        if qp_type is not QPType.UD:
            there.connect(here.endpoint())
            here.connect(there.endpoint())
            if self.srq is not None and qp_type is QPType.XRC_SEND:
                self.address = {"remote_srqn": self.srq.srq_num}
            return
        for qp in (there, here):
            qp.connect(qkey=DEFAULT_QKEY)
        self.address = {
            "ah": self._used.add(here.ah_to(there.endpoint())),
            "remote_qpn": there.qp_num,
            "remote_qkey": DEFAULT_QKEY,
        }

    def close(self) -> None:
        """Close everything, including what other code has created on the PD.

        Do nothing if it is already closed. If it was interrupted or failed, call it again: it
        closes what is still open.

        Raises:
            VerbsError: the device refused; the rest is closed.
        """
        # Windows first: rxe needs 50 s to destroy a queue pair with a window bound to it.
        self._stack.close_with_all_on(self._pd)

    def window(self, mw_type: MWType = MWType.TYPE_2) -> MW:
        """Create a memory window that is closed with the loopback.

        Args:
            mw_type: the type of the window.

        Raises:
            UnsupportedError: the device has no memory windows.
            VerbsError: the device has no more windows.
        """
        return self._used.add(MW(self._pd, mw_type))

    def region(self, length: int, access: int) -> MR:
        """Create another region on the PD that both sides share; it is closed with the loopback.

        Args:
            length: bytes.
            access: an Access.

        Raises:
            VerbsError: the device refused.
        """
        return self._used.add(MR(self._pd, length, access))

    def target(self, offset: int = 0, rkey: int | None = None) -> dict[str, Any]:
        """Return the fields of a work request that address the remote memory.

        On XRC_SEND they include those of ``address``: pass only one of the two.

        Args:
            offset: bytes from the start of the remote memory.
            rkey: the key to use; default: the region's.

        Raises:
            TypeError: offset is not an integer.
            ValueError: the type is UD or RAW_PACKET, which cannot access remote memory: send with
                ``**address``.
        """
        mr = self.remote.mr
        # Convert to int, because a numpy integer could overflow.
        address = mr.addr + index("offset", offset)
        fields = remote_fields(self.local.qp.qp_type, address, mr.rkey if rkey is None else rkey)
        # On XRC, remote_srqn; empty on the other types.
        return fields | self.address

    # ---- receiving ----------------------------------------------------------

    def receive(self, length: int, count: int = 1) -> None:
        """Post receives on the remote side, with consecutive buffers in its memory.

        Args:
            length: the message bytes that each receive can hold.
            count: the number of receives; wr_id starts at 1.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: one is negative.
            PostError: the device refused.
            IndexError: the remote memory is too small.
        """
        slot = self.headroom + within("length", length, 0)
        count = within("count", count, 0)
        self.post_receives(
            [
                RecvWR(self.cut(self.remote, number * slot, slot), wr_id=number + 1)
                for number in range(count)
            ]
        )

    def post_receives(self, wrs: Iterable[RecvWR]) -> None:
        """Post receives to the remote side's receive queue, or to its shared receive queue.

        Args:
            wrs: the receives.

        Raises:
            PostError: the device refused.
        """
        if self.srq is not None:
            self.srq.post_srq_recv(wrs)
        else:
            self.remote.qp.post_recv(wrs)

    def received(self, length: int, index: int = 0, room: int | None = None) -> bytes:
        """Return the message in a receive.

        Args:
            length: bytes of the message.
            index: which receive, from 0.
            room: message bytes that each receive can hold; default: `length`.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: one is negative.
            IndexError: the remote memory has no such receive.
        """
        length, index = within("length", length, 0), within("index", index, 0)
        room = length if room is None else within("room", room, 0)
        start = index * (self.headroom + room) + self.headroom
        return bytes(self.remote.mr.buffer[_within(self.remote.mr, start, length)])

    @staticmethod
    def cut(side: Side, offset: int, length: int) -> Sequence[SGE]:
        """Return the sg_list for a range of a side's memory; it is empty for 0 bytes.

        Args:
            side: the side whose memory it is.
            offset: bytes from the start of the memory.
            length: bytes.

        Raises:
            TypeError: an argument has the wrong type.
            IndexError: the range is not within the memory.
        """
        expect("side", side, Side)
        span = _within(side.mr, index("offset", offset), index("length", length))
        return [side.mr[span]] if length else []

    # ---- waiting ------------------------------------------------------------

    def sent(self, count: int = 1) -> list[WC]:
        """Wait for completions of the local side's work requests.

        Args:
            count: how many completions.

        Raises:
            WaitTimeout: fewer completions came in time.
        """
        return self._wait(self.local, count, "the posted work requests did not complete")

    def arrived(self, count: int = 1) -> list[WC]:
        """Wait for completions on the remote side.

        Args:
            count: how many completions.

        Raises:
            WaitTimeout: fewer completions came in time.
        """
        return self._wait(self.remote, count, "nothing arrived at the remote queue pair")

    def settled(self, expected: bytes, offset: int = 0) -> bool:
        """Wait until the remote memory holds these bytes; return whether it does.

        On UC nothing else shows that a write has arrived.

        Args:
            expected: the bytes.
            offset: bytes from the start of the remote memory.

        Raises:
            TypeError: expected is not bytes, or offset not an integer.
            IndexError: the remote memory does not have that many bytes there.
        """
        expect("expected", expected, bytes, bytearray, memoryview)
        # Bytes, because a memoryview's length counts items, and its comparison compares items.
        expected = bytes(expected)
        mr = self.remote.mr
        memory = mr.buffer[_within(mr, index("offset", offset), len(expected))]
        while memory != expected:
            if time.monotonic() > self._deadline:
                return False
            time.sleep(_POLL_INTERVAL_S)
        return True

    def _wait(self, side: Side, count: int, otherwise: str) -> list[WC]:
        try:
            return side.cq.wait(count, max(0.0, self._deadline - time.monotonic()))
        except WaitTimeout:
            # Report the whole timeout, not the rest of it.
            error = WaitTimeout(f"{otherwise} within {self.timeout:g} s")
        error.add_note("local.qp.diagnose(remote.qp) says what the two wait for")
        raise error


def _within(mr: MR, offset: int, length: int) -> slice:
    """Return a range of a region as a slice; raise IndexError if it is not within the region."""
    if not (offset >= 0 <= length and offset + length <= mr.length):
        raise IndexError(f"{counted(length, 'byte')} at offset {offset} are not within {mr}")
    return slice(offset, offset + length)


# ---- missing features ----------------------------------------------------


def _lacking(call: str, what: str, context: Context) -> UnsupportedError:
    return UnsupportedError(call, errno.EOPNOTSUPP, f"{context.name} has no {what}")


def _require(
    context: Context, qp_type: QPType, max_tso_header: int, srq_type: SRQType | None
) -> None:
    """Raise UnsupportedError if the device reports that it lacks a feature.

    Do not leave this to drivers: their errors are less clear, and some ignore what they do not
    know.
    """
    attr = context.attr
    if srq_type is SRQType.XRC and not attr.device_cap_flags & DeviceCap.XRC:
        raise _lacking("ibv_open_xrcd", "XRC", context)
    if srq_type is not None and not attr.max_srq:
        raise _lacking("ibv_create_srq", "shared receive queues", context)
    if max_tso_header and not attr.tso_caps.supports(qp_type):
        raise _lacking("ibv_create_qp_ex", f"TSO on {qp_type.name} queue pairs", context)
    if srq_type is SRQType.TM and not attr.tm_caps.max_num_tags:
        raise _lacking("ibv_create_srq_ex", "tag matching", context)

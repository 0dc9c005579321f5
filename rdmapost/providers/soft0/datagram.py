"""Unreliable datagrams: each names its destination, arrives with a GRH, and may be dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...enums import Opcode, SendFlags, WCFlags, WCStatus
from ...standard.opcodes import MULTICAST_QPN
from ...standard.wire import (
    BTH_BYTES,
    DETH_BYTES,
    DONT_FRAGMENT,
    GRH_BYTES,
    ICRC_BYTES,
    IMM_BYTES,
    IPPROTO_UDP,
    IPV4,
    IPV4_MAPPED,
    IPV6,
    UDP_BYTES,
    ipv4_header,
)
from ..software.memory import ErrorStatus, gather
from ..software.transport_messages import Request, Segments
from . import offload

if TYPE_CHECKING:
    from ..software.device_queues import WQE, AddressHandle
    from .qp import SoftQueuePair

_HEADERS = UDP_BYTES + BTH_BYTES + DETH_BYTES + ICRC_BYTES
"""Bytes of a datagram's packet after the IP header, without the payload."""
_PRIVILEGED_QKEY = 0x8000_0000
_IP_CSUM = int(SendFlags.IP_CSUM)
_ETHERTYPE_STARTS = (b"\x08", b"\x86")


def send(qp: SoftQueuePair, wqe: WQE, data: Segments, size: int) -> None:
    """Send one datagram; nothing reports whether it arrived.

    Raises:
        ErrorStatus: it is longer than the MTU.
    """
    if size > qp.device.port_mtu.bytes:
        raise ErrorStatus(WCStatus.LOC_LEN_ERR)
    if wqe.flags & _IP_CSUM:
        data = [offload.fill_checksums(gather(data), offload.ipoib)]
    _send(qp, wqe, data, size)


def send_segmented(qp: SoftQueuePair, wqe: WQE, data: Segments, size: int) -> None:
    """Send a payload as IP-over-InfiniBand messages, each with the work request's header.

    Raises:
        ErrorStatus: a message would be longer than the MTU, or the header cannot be used.
    """
    if len(wqe.hdr) + min(size, wqe.mss) > qp.device.port_mtu.bytes:
        raise ErrorStatus(WCStatus.LOC_LEN_ERR)
    for message in offload.segments(wqe.hdr, offload.ipoib, gather(data), wqe.mss):
        _send(qp, wqe, [message], len(message))


def _send(qp: SoftQueuePair, wqe: WQE, data: Segments, size: int) -> None:
    address: AddressHandle = wqe.ah
    # The segments of a TSO are SENDs on the wire.
    opcode = Opcode.SEND if wqe.opcode == Opcode.TSO else wqe.opcode
    request = Request(opcode, qp.type, qp.number, wqe.remote_qpn, data, size)
    request.solicited = bool(wqe.flags & SendFlags.SOLICITED)
    if wqe.opcode == Opcode.SEND_WITH_IMM:
        request.imm = wqe.imm
    # A Q_Key with the top bit set stands for the sender's own Q_Key.
    request.qkey = qp.attr["qkey"] if wqe.remote_qkey & _PRIVILEGED_QKEY else wqe.remote_qkey
    request.sl = address.sl
    request.grh = _ip_header(address, size + IMM_BYTES * (request.imm is not None))
    if wqe.remote_qpn == MULTICAST_QPN:
        qp.device.multicast(request, address.dgid)
    else:
        qp.device.transmit(request, address.dgid)


def _ip_header(address: AddressHandle, size: int) -> bytes:
    """Return the RoCE v2 packet's IP header, which precedes the payload in a receive's buffers.

    An IPv4 header takes up the last 20 of the GRH's 40 bytes.
    """
    sgid, dgid = address.sgid, address.dgid
    length = _HEADERS + -(-size // 4) * 4
    if not sgid.startswith(IPV4_MAPPED) or not dgid.startswith(IPV4_MAPPED):
        first = 6 << 28 | address.traffic_class << 20 | address.flow_label
        return IPV6.pack(first, length, IPPROTO_UDP, address.hop_limit, sgid, dgid)

    return bytes(GRH_BYTES - IPV4.size) + ipv4_header(
        address.traffic_class,
        IPV4.size + length,
        DONT_FRAGMENT,
        address.hop_limit,
        IPPROTO_UDP,
        sgid[12:],
        dgid[12:],
    )


def flags_of(request: Request) -> int:
    """Return IP_CSUM_OK for an IP-over-InfiniBand message with correct checksums, else 0."""
    if not request.data or bytes(request.data[0][:1]) not in _ETHERTYPE_STARTS:
        return 0
    right = offload.checksums_are_right(gather(request.data), offload.ipoib)
    return int(WCFlags.IP_CSUM_OK) if right else 0

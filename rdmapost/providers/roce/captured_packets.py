"""The packets in a capture, as they are on the wire; comments name their work requests."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..._binding import native
from ...enums import Opcode, QPType
from ...standard.wire import (
    BTH_BYTES,
    DONT_FRAGMENT,
    IPPROTO_UDP,
    IPV4,
    IPV4_MAPPED,
    IPV6,
    ROCE_V2_PORT,
    UDP_BYTES,
    checksum_residue,
    ipv4_header,
)
from ..software import requester
from . import pcapng
from .capture import in_progress, put
from .packets import PSN_MASK, ROWS, distance

if TYPE_CHECKING:
    from .qp import RoceQueuePair, SendRequest

_NAMES = {int(each): each.name for each in Opcode}
_UDP = struct.Struct("!HHHH")
_DETH_QPN = BTH_BYTES + 5
"""The offset of the source queue pair number in a datagram's packet."""


def frame(
    source: bytes, target: bytes, port: int, tos: int, ttl: int, number: int, packet: bytes
) -> bytes:
    """Return a packet with its IP and UDP headers.

    Args:
        source, target: GIDs.
        port: the source UDP port.
        tos: the type of service, or the traffic class.
        ttl: the time to live, or the hop limit.
        number: the IPv4 identification.
        packet: the packet, from its BTH to its ICRC.
    """
    size = UDP_BYTES + len(packet)
    if source.startswith(IPV4_MAPPED):
        source, target = source[12:], target[12:]
        header = ipv4_header(
            tos, IPV4.size + size, DONT_FRAGMENT, ttl, IPPROTO_UDP, source, target, number
        )
    else:
        header = IPV6.pack(6 << 28 | tos << 20, size, IPPROTO_UDP, ttl, source, target)
    # What UDP's checksum covers, in any order: the addresses, the protocol, the size twice.
    words = struct.pack("!HHHH", IPPROTO_UDP, size, port, ROCE_V2_PORT) + size.to_bytes(2)
    checksum = -checksum_residue(source + target + words + packet) % 0xFFFF
    return header + _UDP.pack(port, ROCE_V2_PORT, size, checksum or 0xFFFF) + packet


def sent(
    device: Any,
    about: Callable[[bytes], str],
    target: bytes,
    tos: int,
    data: Any,
    size: int,
    each: int,
) -> None:
    """Pass outgoing packets to the device's captures, just before they are sent.

    Args:
        device: the device.
        about: returns the comment on a packet.
        target: the GID that they go to.
        tos: the type of service, or the traffic class.
        data: holds the packets, in its first `size` bytes.
        size: their total length in bytes.
        each: the length of each packet except the last.
    """
    known = about, device.gids[0], target, tos, device.ttl, time.time_ns()
    _put(device, _sent_block, known, data, size, each)


def _sent_block(
    about: Callable[[bytes], str],
    source: bytes,
    target: bytes,
    tos: int,
    ttl: int,
    now: int,
    number: int,
    packet: bytes,
) -> bytes:
    whole = frame(source, target, ROCE_V2_PORT, tos, ttl, number, packet)
    return pcapng.packet(whole, now, True, about(packet))


def received(
    device: Any, source: bytes, port: int, covered: bytes, tos: int, ttl: int, size: int, each: int
) -> None:
    """Pass the packets in a device's receive buffer to its captures, before they are checked.

    Args:
        device: the device.
        source: the GID that they come from.
        port: the UDP port that they come from.
        covered: their IP and UDP headers as the ICRC covers them.
        tos: the type of service, or the traffic class.
        ttl: the time to live, or the hop limit.
        size: their total length in bytes.
        each: the length of each packet except the last.
    """
    known = device, source, port, covered, tos, ttl, time.time_ns()
    _put(device, _received_block, known, device.receiver.buffer, size, each)


def _received_block(
    device: Any,
    source: bytes,
    port: int,
    covered: bytes,
    tos: int,
    ttl: int,
    now: int,
    _: int,
    packet: bytes,
) -> bytes:
    number = native.roce_id(packet, 0, len(packet), covered)
    comment = "its ICRC is wrong" if number < 0 else _about_received(device, packet)
    whole = frame(source, device.gids[0], port, tos, ttl, max(number, 0), packet)
    return pcapng.packet(whole, now, False, comment)


def _put(
    device: Any,
    block: Callable[..., bytes],
    known: tuple[Any, ...],
    data: Any,
    size: int,
    each: int,
) -> None:
    """Pass the packets in a buffer to the captures, as blocks.

    `block` creates a packet's block from `known`, the packet's number and the packet. It must not
    be a closure: CPython 3.12 and 3.13 crash if there is no memory for one.
    """
    recordings = in_progress(device)
    if not recordings:
        return
    count = -(-size // each) if size else 0
    try:
        # If memory runs out while a bytearray is sliced, Python's error is about exported buffers.
        packets = memoryview(data)
        blocks = b"".join(
            [
                block(*known, n, bytes(packets[n * each : min((n + 1) * each, size)]))
                for n in range(count)
            ]
        )
    except MemoryError:
        # The packets are missing from the capture; the step continues.
        for recording in recordings:
            recording.tally.dropped += count
        return
    for recording in recordings:
        put(recording, count, blocks)


# ---- comments -----------------------------------------------------------------------


def about_sent(qp: RoceQueuePair, packet: bytes) -> str:
    """Return the comment on a packet that a queue pair sends."""
    row, psn = ROWS[packet[0]], _psn_of(qp, packet)
    route = _route(qp.number, int.from_bytes(packet[5:8]))
    if row.operation < 0:
        return f"an answer, {route}"
    request = _request_with(qp, psn)
    if request is None:
        return route
    again = ", again" if psn < qp.top else ""
    return f"{_about(qp, request)}, {route}{again}"


def known_comment(comment: str, packet: bytes) -> str:
    """Return a comment that was determined earlier; the packet may have changed since."""
    return comment


def _about_received(device: Any, packet: bytes) -> str:
    row, number = ROWS.get(packet[0]), int.from_bytes(packet[5:8])
    qp: Any = device.qps.get(number)
    if row is None or qp is None or row.service is not qp.type:
        return f"no {'' if row is None else row.service.name} QP {number:#x}"
    if qp.type is QPType.UD:
        source = int.from_bytes(packet[_DETH_QPN : _DETH_QPN + 3])
    else:
        source = qp.attr.get("dest_qp_num", 0)
    route = _route(source, number)
    if row.operation >= 0:
        return f"{_NAMES[row.operation]}, {route}"
    request = _request_with(qp, _psn_of(qp, packet))
    return f"an answer{'' if request is None else f' to {_about(qp, request)}'}, {route}"


def _route(source: int, target: int) -> str:
    return f"QP {source:#x} to {target:#x}"


def _psn_of(qp: RoceQueuePair, packet: bytes) -> int:
    """Return a packet's PSN as the requester counts it, not truncated to 24 bits."""
    return qp.una + distance(int.from_bytes(packet[9:12]), qp.una & PSN_MASK)


def _request_with(qp: RoceQueuePair, psn: int) -> SendRequest | None:
    for request in qp.requests:
        if request.psn <= psn < request.end:
            return request
    return None


def _about(qp: RoceQueuePair, request: SendRequest) -> str:
    """Describe a work request: "RDMA_WRITE wr_id 7, 4096 bytes"."""
    wqe = request.wqe
    size = requester.room(wqe) if wqe.opcode == requester.READ else request.size
    name, wr_id = _NAMES[wqe.opcode], qp.context.wr_id_of(wqe.wr_id)
    known = "" if wr_id is None else f" wr_id {wr_id}"
    return f"{name}{known}, {size} byte{'' if size == 1 else 's'}"

"""IP packets, built and parsed byte by byte, and queue pairs that carry them.

Shared by the checksum and segmentation tests.
"""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest

import rdmapost as rp
from rdmapost import QPType, SendFlags, WCFlags, WCOpcode
from support import ALL, GRH

SLOT = 10240
SLOTS = 64
IP_CSUM = SendFlags.SIGNALED | SendFlags.IP_CSUM
FIN, SYN, PSH, ACK, CWR = 0x01, 0x02, 0x08, 0x10, 0x80

ETHERNET = bytes.fromhex("020000000002 020000000001")
IPV4, IPV6 = b"\x08\x00", b"\x86\xdd"
VLAN = b"\x81\x00\x00\x64"
SRC4, DST4 = bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])
SRC6, DST6 = bytes(range(16)), bytes(range(16, 32))


# ---- packets ----------------------------------------------------------------------


def word_sum(data: bytes) -> int:
    """Add up 16-bit words in one's complement, word by word."""
    total = 0
    for high, low in zip(data[::2], (data + b"\0")[1::2], strict=False):
        total += high << 8 | low
        total = (total & 0xFFFF) + (total >> 16)
    return total


def ipv4(protocol: int, payload: bytes, *, ident: int = 7, options: bytes = b"") -> bytes:
    """Make an IPv4 packet without its checksum."""
    header = struct.pack(
        "!BBHHHBBH4s4s",
        0x45 + len(options) // 4,
        0,
        20 + len(options) + len(payload),
        ident,
        0x4000,
        64,
        protocol,
        0xAAAA,
        SRC4,
        DST4,
    )
    return header + options + payload


def ipv6(protocol: int, payload: bytes, *, extension: bytes = b"") -> bytes:
    """Make an IPv6 packet, with an extension header if one is given."""
    first = 60 if extension else protocol
    return (
        struct.pack("!IHBB", 6 << 28, len(extension) + len(payload), first, 64)
        + SRC6
        + DST6
        + extension
        + payload
    )


def tcp(payload: bytes = b"", *, seq: int = 1000, flags: int = ACK, options: bytes = b"") -> bytes:
    """Make a TCP segment without its checksum."""
    offset = (20 + len(options)) // 4 << 4
    return (
        struct.pack("!HHIIBBHHH", 1, 2, seq, 5, offset, flags, 1000, 0xBBBB, 0) + options + payload
    )


def udp(payload: bytes = b"", checksum: int = 0xBBBB) -> bytes:
    """Make a UDP datagram without its checksum."""
    return struct.pack("!HHHH", 1, 2, 8 + len(payload), checksum) + payload


class Parsed:
    """A parsed packet, with its checksums verified word by word."""

    def __init__(self, packet: bytes) -> None:
        self.packet = packet
        self.version = packet[0] >> 4
        if self.version == 4:
            self.header = packet[: (packet[0] & 15) * 4]
            (self.length, self.ident) = struct.unpack_from("!HH", packet, 2)
            self.protocol, addresses = packet[9], packet[12:20]
            assert word_sum(self.header) == 0xFFFF
        else:
            (length,) = struct.unpack_from("!H", packet, 4)
            self.length, self.protocol, addresses = 40 + length, packet[6], packet[8:40]
            self.header = packet[:40]
            if self.protocol == 60:
                self.protocol, size = packet[40], 8 + 8 * packet[41]
                self.header = packet[: 40 + size]
        assert self.length == len(packet)
        self.segment = packet[len(self.header) :]
        pseudo = addresses + struct.pack("!HH", self.protocol, len(self.segment))
        assert word_sum(pseudo + self.segment) == 0xFFFF
        if self.protocol == 6:
            (self.seq,) = struct.unpack_from("!I", self.segment, 4)
            self.flags = self.segment[13]
            self.payload = self.segment[(self.segment[12] >> 4) * 4 :]
        else:
            assert struct.unpack_from("!H", self.segment, 4) == (len(self.segment),)
            self.payload = self.segment[8:]


# ---- queue pairs ------------------------------------------------------------------


class Link:
    """A sending queue pair and receivers of the same type, with many receives posted on each."""

    def __init__(
        self, stack: contextlib.ExitStack, pd: rp.PD, cq: rp.CQ, qp_type: QPType, receivers: int = 1
    ) -> None:
        self.cq = cq
        self.qp_type = qp_type
        self.mr = stack.enter_context(rp.MR(pd, 1 << 19, ALL))
        self.memory = [stack.enter_context(rp.MR(pd, SLOT * SLOTS, ALL)) for _ in range(receivers)]
        self.a = rp.QP(pd, qp_type, cq, max_tso_header=256, max_inline_data=256)
        self.receivers = [
            rp.QP(pd, qp_type, stack.enter_context(rp.CQ(pd.context))) for _ in range(receivers)
        ]
        stack.callback(self.a.close)
        self.more: dict[str, Any] = {}
        for number, qp in enumerate(self.receivers):
            stack.callback(qp.close)
            qp.connect()
            memory = self.memory[number]
            qp.post_recv(
                [rp.RecvWR(memory[i * SLOT : i * SLOT + SLOT], wr_id=i) for i in range(SLOTS)]
            )
        self.a.connect()
        if qp_type is QPType.UD:
            b = self.receivers[0]
            ah = stack.enter_context(self.a.ah_to(b.endpoint()))
            key = rp.resources.qp.DEFAULT_QKEY
            self.more = {"ah": ah, "remote_qpn": b.qp_num, "remote_qkey": key}

    def send(self, frame: bytes, send_flags: int = SendFlags.SIGNALED) -> rp.WC:
        """Send one frame or message; return its completion."""
        self.mr.buffer[: len(frame)] = frame
        wr = rp.Send(self.mr[: len(frame)], wr_id=1, send_flags=send_flags, **self.more)
        self.a.post_send(wr)
        return self.cq.wait(1)[0]

    def tso(self, hdr: bytes, payload: bytes, mss: int) -> rp.WC:
        """Send a payload in segments; return its completion."""
        self.mr.buffer[: len(payload)] = payload
        sg_list = self.mr[: len(payload)] if payload else ()
        self.a.post_send(rp.TSO(sg_list, hdr=hdr, mss=mss, wr_id=2, **self.more))
        return self.cq.wait(1)[0]

    def received(self, number: int = 0) -> list[tuple[bytes, WCFlags]]:
        """Return the frames that a receiver got, without the GRH, and their flags.

        The receives that they consumed are posted again.
        """
        grh = GRH if self.qp_type is QPType.UD else 0
        qp, memory = self.receivers[number], self.memory[number]
        found = []
        for wc in qp.recv_cq.poll():
            assert (wc.check().opcode, wc.qp_num) == (WCOpcode.RECV, qp.qp_num)
            start = wc.wr_id * SLOT
            frame = bytes(memory.buffer[start + grh : start + wc.byte_len])
            found.append((frame, wc.wc_flags & ~WCFlags.GRH))
            qp.post_recv(rp.RecvWR(memory[start : start + SLOT], wr_id=wc.wr_id))
        return found


@pytest.fixture
def raw_link(stack: contextlib.ExitStack, pd: rp.PD, cq: rp.CQ) -> Link:
    """One sender and one receiver of raw packets: ``raw = raw_link``."""
    return Link(stack, pd, cq, QPType.RAW_PACKET)


@pytest.fixture
def ud_link(stack: contextlib.ExitStack, pd: rp.PD, cq: rp.CQ) -> Link:
    """One sender and one receiver of datagrams: ``ud = ud_link``."""
    return Link(stack, pd, cq, QPType.UD)

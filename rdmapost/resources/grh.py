"""What a receive on a UD queue pair holds: a Global Routing Header, and then the payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._arguments import counted, expect, index, shown, within
from ..errors import ClosedError
from ..posting.wr import SGE, RecvWR
from ..standard.wire import (
    DONT_FRAGMENT,
    GRH_BYTES,
    IPV4,
    IPV4_MAPPED,
    IPV4_VERSION_IHL,
    IPV6,
    checksum_residue,
    ipv4_header,
)
from .gid import GID

_IPV4_AT = GRH_BYTES - IPV4.size


@dataclass(frozen=True, slots=True)
class GRH:
    """A Global Routing Header (``struct ibv_grh``): the path that a datagram took.

    Over RoCE v2 it is the IP packet's header.  An IPv4 header has 20 bytes, which
    are the last 20 of the 40; its addresses are shown as GIDs.

    Attributes:
        sgid, dgid: where the datagram came from, and where it went.
        traffic_class: 0..255; for IPv4 the type of service.
        flow_label: 0..2^20-1; 0 for IPv4.
        payload_length: bytes of transport headers, message and ICRC, as stated in the header,
            0..65535; for IPv4 0..65515.
        next_header: which header follows, 0..255; 27 is InfiniBand's, 17 is UDP's (RoCE v2).
        hop_limit: 0..255; for IPv4 the time to live.
        version: 6, or 4.
    """

    sgid: GID
    dgid: GID
    traffic_class: int
    flow_label: int
    payload_length: int
    next_header: int
    hop_limit: int
    version: int = 6

    @classmethod
    def parse(cls, data: Any) -> GRH:
        """Read the header that a buffer starts with.

        Args:
            data: bytes, a memoryview, ...: 40 bytes or more.

        Raises:
            TypeError: data is not bytes-like.
            ValueError: data is shorter than 40 bytes, or holds neither an IPv6 nor an IPv4 header.
        """
        raw = bytes(_view("data", data)[:GRH_BYTES])
        if len(raw) < GRH_BYTES:
            raise ValueError(f"a GRH has {GRH_BYTES} bytes, not {len(raw)}")
        is_ipv6 = raw[0] >> 4 == 6
        # 20 bytes of an IPv6 address may look like IPv4, but the checksum is unlikely to be right.
        # Packets that stay on the machine have no checksum.
        if raw[_IPV4_AT] == IPV4_VERSION_IHL and (
            not is_ipv6 or not checksum_residue(raw[_IPV4_AT:])
        ):
            _, tos, total, _, _, ttl, protocol, _, src, dst = IPV4.unpack_from(raw, _IPV4_AT)
            return cls(
                GID(IPV4_MAPPED + src),
                GID(IPV4_MAPPED + dst),
                tos,
                0,
                max(0, total - IPV4.size),
                protocol,
                ttl,
                4,
            )
        if not is_ipv6:
            raise ValueError(
                "these 40 bytes are not a GRH: the message came without one, or they are not the "
                "first 40 of a UD receive"
            )
        first, length, following, hop_limit, sgid, dgid = IPV6.unpack(raw)
        return cls(
            GID(sgid), GID(dgid), first >> 20 & 0xFF, first & 0xFFFFF, length, following, hop_limit
        )

    def pack(self) -> bytes:
        """Return the header as the 40 bytes that a UD receive starts with.

        Raises:
            TypeError: a field has the wrong type.
            ValueError: a number is out of its field's range, or a version 4 header has a GID that
                is not an IPv4 GID.
        """
        version = index("version", self.version)
        if version not in (4, 6):
            raise ValueError(f"version={shown(version)} is not 4 or 6")
        traffic_class = within("traffic_class", self.traffic_class, 0, 0xFF)
        flow_label = within("flow_label", self.flow_label, 0, 0xFFFFF)
        if version == 4 and flow_label:
            raise ValueError(f"flow_label={flow_label}: an IPv4 header has no flow label")
        # The length in an IPv4 header includes the header.
        limit = 0xFFFF if version == 6 else 0xFFFF - IPV4.size
        payload_length = within("payload_length", self.payload_length, 0, limit)
        next_header = within("next_header", self.next_header, 0, 0xFF)
        hop_limit = within("hop_limit", self.hop_limit, 0, 0xFF)
        for name in ("sgid", "dgid"):
            gid = getattr(self, name)
            expect(name, gid, GID)
            if version == 4 and gid[:-4] != IPV4_MAPPED:
                raise ValueError(f"{name}: {gid} is not an IPv4 GID, and version is 4")
        if version == 4:
            return bytes(_IPV4_AT) + ipv4_header(
                traffic_class,
                IPV4.size + payload_length,
                DONT_FRAGMENT,
                hop_limit,
                next_header,
                self.sgid[-4:],
                self.dgid[-4:],
            )
        first = 6 << 28 | traffic_class << 20 | flow_label
        return IPV6.pack(first, payload_length, next_header, hop_limit, self.sgid, self.dgid)


class Datagram(NamedTuple):
    """The contents of a UD receive.

    Attributes:
        grh: the header, or None if the message came without one (wc_flags lacks GRH).
        payload: what the peer sent.
    """

    grh: GRH | None
    payload: bytes


def read_datagram(received: Any, byte_len: int, has_grh: bool) -> Datagram:
    """Read a message of `byte_len` bytes, which include a 40-byte GRH, for WC.datagram."""
    if byte_len < GRH_BYTES:
        raise ValueError(f"a UD receive has at least {GRH_BYTES} bytes, and this has {byte_len}")
    if isinstance(received, RecvWR):
        message = b"".join(_pieces(received.sg_list))[:byte_len]
    else:
        message = bytes(_view("received", received, "RecvWR or bytes")[:byte_len])
    if len(message) < byte_len:
        raise ValueError(
            f"{counted(byte_len, 'byte')} arrived, but this has only {len(message)}: pass what the "
            "receive was posted with"
        )
    grh = GRH.parse(message) if has_grh else None
    return Datagram(grh, message[GRH_BYTES:])


def _view(name: str, given: Any, wanted: str = "bytes") -> memoryview:
    try:
        return memoryview(given).cast("B")
    except TypeError:
        raise TypeError(f"{name}: expected {wanted}, got {type(given).__name__}") from None


def _pieces(sg_list: SGE | Sequence[SGE]) -> list[bytes]:
    pieces = []
    for sge in (sg_list,) if isinstance(sg_list, SGE) else sg_list:
        region = sge.owner
        if getattr(region, "lkey", None) is None:
            raise ValueError(f"{sge} belongs to no region; pass the buffer itself")
        if region.closed:
            raise ClosedError(f"{region} is closed")
        start = sge.addr - region.addr
        pieces.append(bytes(region.buffer[start : start + sge.length]))
    return pieces

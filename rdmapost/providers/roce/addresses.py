"""Addresses of this machine that a device can use, and headers of packets between addresses."""

from __future__ import annotations

import fcntl
import functools
import socket
import struct
from array import array
from typing import NamedTuple

from ...enums import MTU
from ...errors import suppress_system_errors
from ...standard.wire import IPPROTO_UDP, IPV4_MAPPED, ROCE_V2_BYTES, ROCE_V2_PORT

_SIOCGIFCONF = 0x8912
_SIOCGIFMTU = 0x8921
"""ioctls of netdevice(7)."""
_IFREQ = struct.Struct("16s24s")
_IFCONF = struct.Struct("@iP")
_LOOPBACK = "lo"
_LOOPBACK_ADDRESSES = 254
_MTUS = tuple(MTU)
_IPV6_MORE = 20
"""How much longer an IPv6 header is than an IPv4 header."""


class LocalAddress(NamedTuple):
    """An address of this machine.

    Attributes:
        host: the address, as text.
        netdev: the network device that has it.
        family: AF_INET or AF_INET6.
        scope: the network device's index if the address is link-local, else 0.
    """

    host: str
    netdev: str
    family: socket.AddressFamily
    scope: int = 0

    @property
    def gid(self) -> bytes:
        """The GID of this address."""
        raw = socket.inet_pton(self.family, self.host)
        return raw if self.family is socket.AF_INET6 else IPV4_MAPPED + raw

    @property
    def path_mtu(self) -> MTU:
        """The largest MTU whose packets fit the network device."""
        room = mtu_of(self.netdev) - ROCE_V2_BYTES
        if self.family is socket.AF_INET6:
            room -= _IPV6_MORE
        return max([mtu for mtu in _MTUS if mtu.bytes <= room], default=MTU.MTU_256)


def candidates(place: str) -> list[LocalAddress]:
    """List the addresses that a device's name allows, the preferred one first.

    Args:
        place: a network device or an address. On "lo", each device takes a free 127.0.0.N.

    Raises:
        LookupError: this machine has no such network device or address; the text lists what it has.
    """
    found = _addresses()
    if place == _LOOPBACK:
        return [
            LocalAddress(f"127.0.0.{n}", _LOOPBACK, socket.AF_INET)
            for n in range(1, _LOOPBACK_ADDRESSES + 1)
        ]
    if place in [name for _, name in socket.if_nameindex()]:
        there = [address for address in found if address.netdev == place]
        if not there:
            raise LookupError(f"the network device {place} has no IP address")
        return there[:1]
    host = place.removeprefix("[").removesuffix("]").partition("%")[0]
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            raw = socket.inet_pton(family, host)
        except OSError as error:
            # inet_pton() raises a plain OSError; what a signal handler raises is a subclass.
            if type(error) is not OSError:
                raise
            continue
        if raw.startswith(IPV4_MAPPED):
            # GIDs are shown in this form.
            return candidates(socket.inet_ntoa(raw[12:]))
        if family is socket.AF_INET and raw[0] == 127:
            return [LocalAddress(host, _LOOPBACK, family)]
        for address in found:
            if address.family is family and socket.inet_pton(family, address.host) == raw:
                return [address]
        break
    has = ", ".join(dict.fromkeys([f"{each.netdev} ({each.host})" for each in found]))
    raise LookupError(f"this machine has no network device or address {place!r}; it has {has}")


def _addresses() -> list[LocalAddress]:
    """List the addresses of the network devices, IPv4 before IPv6."""
    # Not a generator: a generator dropped when memory runs out reports that it cannot be closed.
    found = []
    for label, sockaddr_in in _IFREQ.iter_unpack(_ipv4_table()):
        # A second address has a label such as "eth0:1".
        name = label.rstrip(b"\0").decode().partition(":")[0]
        found.append(LocalAddress(socket.inet_ntoa(sockaddr_in[4:8]), name, socket.AF_INET))
    with suppress_system_errors, open("/proc/net/if_inet6", encoding="ascii") as lines:
        for line in lines:
            raw, index, _, scope, _, name = line.split()
            host = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(raw))
            number = int(index, 16) if scope == "20" else 0
            found.append(LocalAddress(host, name, socket.AF_INET6, number))
    return found


def _ipv4_table() -> bytes:
    """Return an ifreq for each IPv4 address, including secondary ones."""
    size = 64 * _IFREQ.size
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        while True:
            table = array("B", bytes(size))
            request = _IFCONF.pack(size, table.buffer_info()[0])
            used, _ = _IFCONF.unpack(fcntl.ioctl(any_socket, _SIOCGIFCONF, request))
            # A full table may have been cut off.
            if used < size:
                return table[:used].tobytes()
            size *= 2


def mtu_of(netdev: str) -> int:
    """Return a network device's MTU."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        reply = fcntl.ioctl(any_socket, _SIOCGIFMTU, _IFREQ.pack(netdev.encode(), b""))
    mtu: int = struct.unpack_from("=i", reply, 16)[0]
    return mtu


# ---- headers and socket addresses -----------------------------------------------


@functools.lru_cache(maxsize=1024)
def flow(source: bytes, target: bytes, source_port: int) -> bytes | None:
    """Return the IP and UDP headers of packets to port 4791 as the ICRC covers them.

    The fields that routers change are all ones; the lengths and the identification are 0.

    Args:
        source, target: GIDs.

    Returns:
        The headers, or None if one address is IPv4 and the other IPv6.
    """
    v4 = source.startswith(IPV4_MAPPED)
    if v4 is not target.startswith(IPV4_MAPPED):
        return None
    udp = struct.pack("!HHHH", source_port, ROCE_V2_PORT, 0, 0xFFFF)
    if v4:
        # Version and header length, TOS; length, identification, don't fragment; TTL, checksum.
        ip = struct.pack("!BBHHHBBH", 0x45, 0xFF, 0, 0, 0x4000, 0xFF, IPPROTO_UDP, 0xFFFF)
        return ip + source[12:] + target[12:] + udp
    ip = struct.pack("!IHBB", 0x6FFFFFFF, 0, IPPROTO_UDP, 0xFF)
    return ip + source + target + udp


@functools.lru_cache(maxsize=1024)
def sockaddr(gid: bytes, scope: int) -> bytes:
    """Return a GID's address, with port 4791, as a struct sockaddr_in or sockaddr_in6."""
    port = struct.pack("!H", ROCE_V2_PORT)
    if gid.startswith(IPV4_MAPPED):
        return struct.pack("=H", socket.AF_INET) + port + gid[12:] + bytes(8)
    return struct.pack("=H", socket.AF_INET6) + port + bytes(4) + gid + struct.pack("=I", scope)


def peer_of(address: bytes) -> tuple[bytes, int]:
    """Return the GID and the port of a struct sockaddr_in or sockaddr_in6."""
    (port,) = struct.unpack_from("!H", address, 2)
    (family,) = struct.unpack_from("=H", address)
    gid = IPV4_MAPPED + address[4:8] if family == socket.AF_INET else address[8:24]
    return gid, port

"""The network devices on which roce devices can be opened, and what prevents it on the others."""

from __future__ import annotations

import errno
import os
import socket
import sys

from ...errors import suppress_system_errors
from ...standard.wire import ROCE_V2_PORT
from ..base import ROCE, RoceInterface
from . import udp_socket
from .addresses import LocalAddress, candidates

_TABLES = {socket.AF_INET: "/proc/net/udp", socket.AF_INET6: "/proc/net/udp6"}
_LOCAL_ADDRESS, _INODE = 1, 9
"""Columns of these tables (proc_net_udp(5))."""


def list_interfaces() -> list[RoceInterface]:
    """List the network devices that have an address."""
    found = []
    for _, netdev in socket.if_nameindex():
        try:
            addresses = candidates(netdev)
        except LookupError:
            continue
        address, obstacle = addresses[0], None
        for address in addresses:
            obstacle = obstacle_on(address)
            if obstacle is None or not obstacle.startswith("UDP"):
                break
        else:
            # No address is free: report the one that an attempt to open the device would name.
            address = addresses[0]
        found.append(RoceInterface(ROCE + netdev, address.host, address.path_mtu, obstacle))
    return found


def obstacle_on(address: LocalAddress) -> str | None:
    """Say why a device cannot be opened on an address, or return None."""
    with socket.socket(address.family, socket.SOCK_DGRAM) as probe:
        try:
            udp_socket.prepare(probe, address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"UDP port {ROCE_V2_PORT} is taken by {holder(address)}"
            return error.strerror or str(error)
    return None


def holder(address: LocalAddress) -> str:
    """Say who holds UDP port 4791 on an address, as far as this user can see."""
    raw = socket.inet_pton(address.family, address.host)
    words = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    here = "".join([f"{int.from_bytes(word, sys.byteorder):08X}" for word in words])
    inodes = set()
    with suppress_system_errors, open(_TABLES[address.family], encoding="ascii") as table:
        for line in table.readlines()[1:]:
            columns = line.split()
            bound, _, port = columns[_LOCAL_ADDRESS].partition(":")
            if int(port, 16) == ROCE_V2_PORT and (bound == here or not int(bound, 16)):
                inodes.add(columns[_INODE])
    for inode in inodes:
        pid = _owner(inode)
        if pid is not None:
            return f"process {pid}"
    if os.path.isdir("/sys/module/rdma_rxe"):
        return "Soft-RoCE: use its device"
    return "another process"


def _owner(inode: str) -> int | None:
    """Return the process that has a socket open, or None."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress_system_errors:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress_system_errors:
                    if os.readlink(f"/proc/{pid}/fd/{fd}") == f"socket:[{inode}]":
                        return int(pid)
    return None

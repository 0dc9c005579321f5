"""RDMA devices, network devices and addresses, as /sys and /proc show them."""

from __future__ import annotations

import os
import re
import sys
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import NamedTuple

_IFF_UP = 1
_LOCAL = re.compile(r"\|-- (\S+)\s+/32 host LOCAL")
_PHYS_STATES = {
    1: "Sleep",
    2: "Polling",
    3: "Disabled",
    4: "Training",
    5: "LinkUp",
    6: "LinkErrorRecovery",
    7: "PhyTest",
}


class Port(NamedTuple):
    """A port, as sysfs shows it to any user.

    Attributes:
        port_num: the port, from 1.
        state: name of its state, such as "ACTIVE".
        phys_state: name of its physical state, such as "LinkUp".
        link_layer: "Ethernet" or "InfiniBand".
        netdev: name of its network device, or "".
    """

    port_num: int
    state: str
    phys_state: str
    link_layer: str
    netdev: str


class Route(NamedTuple):
    """A line of the IPv4 routing table.

    Attributes:
        netdev: the network device.
        network: the destinations.
        gateway: the next hop, or None if directly connected.
    """

    netdev: str
    network: IPv4Network
    gateway: IPv4Address | None


_LOOPBACK = Route("lo", IPv4Network("127.0.0.0/8"), None)


class System:
    """The state of the machine, as seen in /sys, /proc and /dev.

    Args:
        root: the directory to read them from, instead of /.
    """

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = Path(root)

    def path(self, *parts: str) -> Path:
        """Return a path below the root."""
        return self.root.joinpath(*parts)

    def read(self, *parts: str) -> str | None:
        """Return a file's contents, or None if it cannot be read."""
        try:
            return self.path(*parts).read_text(errors="replace").strip()
        except OSError:
            return None

    def names(self, *parts: str) -> list[str]:
        """Return the names in a directory, sorted; none if it does not exist."""
        try:
            return sorted(os.listdir(self.path(*parts)))
        except OSError:
            return []

    def module(self, name: str) -> bool:
        """Whether a kernel module is loaded, or built in and known to sysfs."""
        return self.path("sys/module", name).exists()

    def kernel_has(self, module: str) -> bool:
        """Whether the running kernel has a module: loaded, loadable or built in."""
        if self.module(module):
            return True
        where = ("lib/modules", os.uname().release)
        file = re.compile(rf"/{module}\.ko", re.MULTILINE)
        return any(
            file.search(self.read(*where, listing) or "")
            for listing in ("modules.dep", "modules.builtin")
        )

    # ---- RDMA devices -------------------------------------------------------

    def devices(self) -> list[str]:
        """Return the names of the kernel's RDMA devices."""
        return self.names("sys/class/infiniband")

    def ports(self, device: str) -> list[Port]:
        """Return the ports of an RDMA device."""
        found = []
        for number in self.names("sys/class/infiniband", device, "ports"):
            where = ("sys/class/infiniband", device, "ports", number)
            state, phys_state = (
                # "4: ACTIVE"
                (self.read(*where, name) or "unknown").rpartition(": ")[2]
                for name in ("state", "phys_state")
            )
            link_layer = self.read(*where, "link_layer") or "unknown"
            netdev = self.netdev_of(device, int(number))
            found.append(Port(int(number), state, phys_state, link_layer, netdev))
        return found

    def netdev_of(self, device: str, port_num: int) -> str:
        """Return the name of the network device behind a port, or ""."""
        where = ("sys/class/infiniband", device)
        ndevs = (*where, "ports", str(port_num), "gid_attrs", "ndevs")
        for index in self.names(*ndevs)[:16]:
            if name := self.read(*ndevs, index):
                return name
        # Soft-RoCE and siw name it in ``parent``; a PCI function lists it in ``device/net``.
        if name := self.read(*where, "parent"):
            return name
        siblings = self.names(*where, "device", "net")
        return siblings[port_num - 1] if port_num <= len(siblings) else ""

    # ---- network devices ----------------------------------------------------

    def netdevs(self) -> list[str]:
        """Return the network devices except loopback."""
        return [name for name in self.names("sys/class/net") if name != "lo"]

    def has_netdev(self, name: str) -> bool:
        """Whether this network namespace has the device."""
        return bool(name) and self.path("sys/class/net", name).exists()

    def netdev_is_up(self, name: str) -> bool:
        """Whether a network device is up, and not known to lack a link."""
        flags = self.read("sys/class/net", name, "flags") or "0"
        state = self.read("sys/class/net", name, "operstate") or "unknown"
        return bool(int(flags, 16) & _IFF_UP) and state not in ("down", "lowerlayerdown")

    def netdev_mtu(self, name: str) -> int | None:
        """Return the MTU of a network device in bytes, or None."""
        text = self.read("sys/class/net", name, "mtu")
        return int(text) if text and text.isdecimal() else None

    # ---- addresses and routes -----------------------------------------------

    def has_ipv4_address(self, address: str) -> bool | None:
        """Return whether this machine has an IPv4 address, or None if unknown."""
        text = self.read("proc/net/fib_trie")
        if text is None:
            return None
        return IPv4Address(address) in _LOOPBACK.network or address in _LOCAL.findall(text)

    def ipv6_addresses(self) -> set[tuple[bytes, str]] | None:
        """Return this machine's IPv6 addresses with their devices, or None."""
        text = self.read("proc/net/if_inet6")
        if text is None:
            return None
        lines = [line.split() for line in text.splitlines()]
        return {(bytes.fromhex(words[0]), words[-1]) for words in lines if len(words) >= 6}

    def ipv4_routes(self) -> list[Route]:
        """Return the IPv4 routes, the longest prefix first."""
        # 127.0.0.0/8 is not in the main table: the kernel has it in the local table.
        routes = [_LOOPBACK] if self.has_netdev(_LOOPBACK.netdev) else []
        for line in (self.read("proc/net/route") or "").splitlines()[1:]:
            words = line.split()
            if len(words) < 8:
                continue
            to, gateway, mask = (_ipv4(words[index]) for index in (1, 2, 7))
            network = IPv4Network((int(to), bin(int(mask)).count("1")), strict=False)
            routes.append(Route(words[0], network, gateway if int(gateway) else None))
        return sorted(routes, key=lambda route: -route.network.prefixlen)


def phys_state_name(phys_state: int) -> str:
    """Return the name of a port's physical state."""
    return _PHYS_STATES.get(phys_state, str(phys_state))


def _ipv4(text: str) -> IPv4Address:
    # The kernel prints network-order bytes as a host-order number.
    return IPv4Address(int(text, 16).to_bytes(4, sys.byteorder))

"""Checks of ports, GIDs and the route between two of them."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address

from ...enums import GIDType, LinkLayer, NodeType, PortState
from ...resources.device import Context
from ...resources.device_attr import PortAttr
from ...resources.gid import GID, GIDChoice, GIDTableEntry
from ...standard.wire import ROCE_V2_BYTES
from .finding import Finding, Severity
from .sysfs import System, phys_state_name

_CARRIES_TRAFFIC = (PortState.ACTIVE, PortState.ACTIVE_DEFER)


def uses_gids(context: Context, port: PortAttr) -> bool:
    """Whether the port routes packets by GID (RoCE)."""
    return port.link_layer is LinkLayer.ETHERNET and context.node_type is not NodeType.RNIC


def check_port(context: Context, port: PortAttr, system: System) -> Iterable[Finding]:
    """Check a port's state, its network device, and the MTU of both."""
    about = f"{context.name} port {port.port_num}"
    ethernet = port.link_layer is LinkLayer.ETHERNET
    netdev = system.netdev_of(context.name, port.port_num)
    if context.kind == "roce":
        netdev = context.query_gid_table(port.port_num)[0].ndev
    evidence = f"{about} is {port.state.name} ({phys_state_name(port.phys_state)})"
    if port.state in _CARRIES_TRAFFIC:
        yield Finding("port-active", "ok", evidence, about=about)
    else:
        remedy = "start a subnet manager ('opensm') and check the cable"
        if ethernet:
            remedy = f"ip link set {netdev or 'NETDEV'} up, and check its cable"
        yield Finding("port-down", "problem", f"{evidence}: it carries no traffic", remedy, about)
    if not netdev or not ethernet:
        return
    if not system.has_netdev(netdev):
        evidence = f"its network device {netdev} is not in this network namespace"
        remedy = "inspect it in its own namespace ('ip netns'), or move the RDMA device here"
        yield Finding("netdev-hidden", "info", evidence, remedy, about)
        return
    if not system.netdev_is_up(netdev):
        evidence = f"its network device {netdev} is down"
        yield Finding("netdev-down", "problem", evidence, f"ip link set {netdev} up", about)
    mtu, active = system.netdev_mtu(netdev), port.active_mtu.bytes
    if mtu is None:
        return
    needed = active + ROCE_V2_BYTES
    evidence = f"active_mtu {active} (at most {port.max_mtu.bytes}), MTU {mtu} of {netdev}"
    if needed > mtu:
        evidence += f": packets of {active} bytes need {needed} with headers"
        remedy = f"ip link set {netdev} mtu {max(needed, 1500)}, on both sides"
        yield Finding("mtu-mismatch", "problem", evidence, remedy, about)
    else:
        yield Finding("mtu", "ok", evidence, about=about)


def check_gid(chosen: GIDChoice, table: list[GIDTableEntry], system: System) -> Finding:
    """Check a chosen GID: is it still in the table, with the right type and an address in use?"""
    entry = next((entry for entry in table if entry.gid_index == chosen.gid_index), None)
    name = f"GID {chosen.gid_index} ({chosen.gid})"
    again = "choose again: create another queue pair, or give gid_index= ('rdmapost devices')"
    if entry is None:
        there = ", ".join(str(entry.gid_index) for entry in table) or "none"
        return Finding(
            "gid-stale",
            "problem",
            f"{name} is no longer in the port's table; valid now: {there}",
            f"add the address to the network device again, or {again}",
        )
    if entry.gid != chosen.gid:
        return Finding(
            "gid-stale",
            "problem",
            f"GID {chosen.gid_index} was {chosen.gid} when chosen, but is now {entry.gid}",
            again,
        )
    if entry.ndev and _address_is_gone(entry, system):
        remedy = f"ip addr add {ip_address(entry.gid)}/24 dev {entry.ndev}, or {again}"
        return Finding(
            "gid-stale", "problem", f"{entry.ndev} does not have the address of {name}", remedy
        )
    gid_type = "" if entry.gid_type is None else entry.gid_type.name
    # Do not repeat the type if the reason begins with it.
    gid_type = "" if not gid_type or chosen.reason.startswith(gid_type) else f", {gid_type}"
    where = f" of {entry.ndev}" if entry.ndev else ""
    evidence = f"{name}{where}{gid_type}: {chosen.reason}"
    better = [
        f"{other.gid_index} ({other.gid})"
        for other in table
        if other.gid_type is not GIDType.ROCE_V1 and not other.gid.is_link_local
    ]
    use = f"gid_index={better[0].split()[0]}, GID {better[0]}" if better else ""
    if entry.gid_type is GIDType.ROCE_V1:
        return Finding(
            "gid-roce-v1",
            "warning",
            f"{evidence}; RoCE v1 reaches only its own Ethernet segment, and only RoCE v1",
            use or "let the peer use RoCE v1 too",
        )
    if entry.gid.is_link_local:
        address = f"give {entry.ndev or 'the network device'} an address: ip addr add 10.0.0.1/24"
        return Finding(
            "gid-link-local",
            "warning",
            f"{evidence}; a link-local address reaches only its own Ethernet segment",
            use or address + (f" dev {entry.ndev}" if entry.ndev else ""),
        )
    return Finding("gid", "ok", evidence)


def ip_address(gid: GID) -> IPv4Address | IPv6Address:
    """Return the IP address that a GID holds."""
    address = IPv6Address(bytes(gid))
    return address.ipv4_mapped or address


def _address_is_gone(entry: GIDTableEntry, system: System) -> bool:
    # A device derives a link-local GID from its MAC, whether or not the netdev has that address.
    if entry.gid.is_link_local or not system.has_netdev(entry.ndev):
        return False
    if entry.gid.is_ipv4:
        return system.has_ipv4_address(str(ip_address(entry.gid))) is False
    found = system.ipv6_addresses()
    return found is not None and (bytes(entry.gid), entry.ndev) not in found


def check_route(
    source: GIDTableEntry, dgid: GID, table: list[GIDTableEntry], system: System, *, on_soft0: bool
) -> Finding:
    """Check whether one GID can be reached from another.

    Args:
        source: the local GID.
        dgid: the peer's.
        table: the GIDs of the local port.
        system: the machine, for its routes.
        on_soft0: whether the device is soft0, which reaches only itself.
    """
    here = f"GID {source.gid_index} ({source.gid})"
    both = "use GIDs of the same type and network on both sides: gid_index= ('rdmapost devices')"

    def wrong(why: str, remedy: str = both, severity: Severity = "problem") -> Finding:
        return Finding("gid-wrong", severity, why, remedy)

    if source.gid.is_ipv4 != dgid.is_ipv4:
        families = ["IPv4" if gid.is_ipv4 else "IPv6" for gid in (source.gid, dgid)]
        return wrong(f"{here} is {families[0]}, but the peer's {dgid} is {families[1]}")
    if source.gid.is_link_local != dgid.is_link_local:
        which, other = here, f"the peer's {dgid}"
        if dgid.is_link_local:
            which, other = other, which
        return wrong(f"{which} is link-local, but {other} is not")
    local = dgid in [entry.gid for entry in table]
    if on_soft0 and not local:
        return wrong(
            f"the peer's {dgid} is not a GID of soft0, and soft0 reaches only itself",
            "connect to a queue pair in this process, or use a real device",
        )
    looked_up = dgid.is_ipv4 and system.has_netdev(source.ndev)
    routes = system.ipv4_routes() if looked_up else []
    to = ip_address(dgid) if looked_up else None
    network = next(
        (
            route.network
            for route in routes
            if route.netdev == source.ndev
            and not route.gateway
            and ip_address(source.gid) in route.network
        ),
        None,
    )
    if local:
        if network is not None and to not in network:
            return wrong(
                f"{here} is in {network}, but the peer's {to} on the same device is not",
                severity="warning",
            )
        return Finding("route", "ok", f"from {here} to {dgid}, on this device")
    if to is None:
        return Finding("route", "info", f"from {here} to {dgid}; not looked up")
    route = next((route for route in routes if to in route.network), None)
    if route is None:
        return wrong(f"there is no route from {here} to {to}", f"ip route get {to}; {both}")
    if route.netdev != source.ndev:
        return wrong(
            f"{here} belongs to {source.ndev}, but the route to {to} goes through {route.netdev}",
            f"use the GID of {route.netdev} ('ip route get {to}')",
        )
    if route.gateway is None and network is not None and to not in network:
        return wrong(f"{here} is in {network}, but the peer's {to} is in {route.network}")
    through = "directly" if route.gateway is None else f"through {route.gateway}"
    evidence = f"from {here} to {to} over {source.ndev}, {through}"
    return Finding("route", "ok", evidence)

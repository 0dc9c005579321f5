"""Checks of the network, and of the kernel's UDP, on which a roce device depends."""

from __future__ import annotations

from collections.abc import Iterable

from ...resources.device import Context
from ...resources.device_attr import PortAttr
from ...resources.gid import GID
from .finding import Finding
from .path import ip_address
from .sysfs import System

_ENOUGH = 1 << 20
_LOOPBACK = "lo"


def check_network(context: Context, port: PortAttr, system: System) -> Iterable[Finding]:
    """Check the socket's receive buffer, and whether NAT may translate the addresses."""
    yield from _check_buffer(port, system)
    for entry in context.query_gid_table(port.port_num):
        if entry.ndev != _LOOPBACK:
            yield from _check_translation(entry.gid)


def _check_buffer(port: PortAttr, system: System) -> Iterable[Finding]:
    text = system.read("proc/sys/net/core/rmem_max")
    if text is None:
        return
    limit, mtu = int(text), port.active_mtu.bytes
    # The kernel doubles the limit, and counts about twice the bytes of a packet.
    evidence = (
        f"net.core.rmem_max={limit}: without CAP_NET_ADMIN the socket holds about {limit // mtu} "
        f"packets of {mtu}"
    )
    if limit >= _ENOUGH:
        yield Finding("rmem-max", "ok", evidence)
        return
    yield Finding(
        "rmem-max",
        "info",
        f"{evidence}; longer bursts lose packets (counters: rcvbuf_errors), which the sender "
        "retransmits",
        "sysctl -w net.core.rmem_max=4194304, for bandwidth",
    )


def _check_translation(gid: GID) -> Iterable[Finding]:
    host = ip_address(gid)
    if host.is_link_local or not host.is_private:
        return
    yield Finding(
        "nat",
        "info",
        f"{host} is a private address: if NAT changes it in transit, the peer drops every packet, "
        "because RoCE's checksum (ICRC) covers the addresses",
        "in a container use the host's network, or a network without NAT between the two sides",
    )

"""List this machine's RDMA devices, choose the best port, and show that it works.

The list shows each device's PCI address and NUMA node, and each port's state, P_Keys and GIDs. Only
a port that is up is chosen, if possible on a device close to the CPUs that this process may run on:
RDMA then needs no hop between NUMA nodes. Without any RDMA device, the choice is soft0. The program
then sends a message through the chosen port and compares it, byte by byte.

    python examples/choose_device.py [DEVICE]     (default: any)
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import rdmapost as rp

NODES = Path("/sys/devices/system/node")


class Candidate(NamedTuple):
    """A usable port; a better one compares greater."""

    is_hardware: bool
    is_near: bool
    speed: int
    name: str
    port_num: int


def nearby_nodes() -> set[int]:
    """Return the NUMA nodes of the CPUs that this process may run on."""
    allowed = os.sched_getaffinity(0)
    return {
        int(node.name.removeprefix("node"))
        for node in NODES.glob("node[0-9]*")
        if allowed & {int(cpu.name[3:]) for cpu in node.glob("cpu[0-9]*")}
    }


def pkeys(context: rp.Context, port: rp.PortAttr) -> str:
    table = [context.query_pkey(port.port_num, i) for i in range(port.pkey_tbl_len)]
    return ", ".join(f"{pkey:#06x}" for pkey in table if pkey) or "none"


def describe(info: rp.DeviceInfo, near: set[int]) -> list[Candidate]:
    """Print what a device is, and return its usable ports."""
    numa, pci = info.numa_node, info.pci_address
    print(f"{info.name}: PCI {pci or '-'}, NUMA node {'-' if numa is None else numa}")
    found = []
    with rp.open_device(info.name) as context:
        for port_num in range(1, context.attr.phys_port_cnt_ex + 1):
            port = context.query_port(port_num)
            print(
                f"  port {port_num}: {port.state}, {port.link_layer}, MTU {port.active_mtu.bytes}"
            )
            print(f"    P_Keys: {pkeys(context, port)}")
            table = context.query_gid_table(port_num)
            chosen = context.choose_gid(port_num).gid_index if table else None
            for entry in table:
                mark = "*" if entry.gid_index == chosen else " "
                print(
                    f"   {mark}GID {entry.gid_index}: {entry.gid} {entry.gid_type or ''}".rstrip()
                )
            if port.state is rp.PortState.ACTIVE and table:
                is_hardware, is_near = info.kind == "verbs", numa is None or numa in near
                found.append(
                    Candidate(is_hardware, is_near, port.active_speed_ex, info.name, port_num)
                )
    return found


def try_out(choice: Candidate) -> bool:
    """Say whether every byte value arrives intact when sent between two queue pairs on the port."""
    with ExitStack() as stack:
        enter = stack.enter_context
        context = enter(rp.open_device(choice.name))
        pd, cq = enter(rp.PD(context)), enter(rp.CQ(context))
        mr = enter(rp.MR(pd, 512))
        a, b = (enter(rp.QP(pd, rp.QPType.RC, cq, port_num=choice.port_num)) for _ in range(2))
        a.connect(b.endpoint())
        b.connect(a.endpoint())
        mr.buffer[:256] = bytes(range(256))
        b.post_recv(rp.RecvWR(mr[256:]))
        a.post_send(rp.Send(mr[:256]))
        for wc in cq.wait(2):
            wc.check()
        return mr.buffer[256:] == bytes(range(256))


def main(device: str | None = None) -> None:
    near = nearby_nodes()
    candidates: list[Candidate] = []
    devices = [info for info in rp.list_devices() if device in (None, info.name)]
    for info in devices:
        candidates += describe(info, near)
    if not candidates:
        sys.exit("no port is up" if devices else f"{device} is not listed")
    best = max(candidates)
    print(f"chosen: {best.name} port {best.port_num}")
    if not try_out(best):
        sys.exit("the message is damaged")
    print("256 bytes sent: intact")


if __name__ == "__main__":
    main(*sys.argv[1:])

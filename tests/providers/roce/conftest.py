"""Soft-RoCE and a roce device as each other's peers.

Soft-RoCE is on one end of a virtual Ethernet cable; the other end is in a network namespace of its
own, where a process without any capability opens the roce device.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.agents import local_agent
from support.cable import (
    FAR,
    GIDS,
    IN_NAMESPACE,
    NAMESPACE,
    NEAR,
    RXE,
    WITHOUT_RIGHTS,
    Cable,
    Ends,
    Side,
    system,
)

import rdmapost as rp


@pytest.fixture(scope="module", params=[(4, 1500), (6, 4200)], ids=["IPv4-1024", "IPv6-4096"])
def cable(request: pytest.FixtureRequest, verbs_context: rp.Context) -> Iterator[Cable]:
    """Soft-RoCE and roce on one cable."""
    if not verbs_context.name.startswith("rxe"):
        pytest.skip("needs Soft-RoCE")
    if os.geteuid() != 0 or not (shutil.which("rdma") and shutil.which("setpriv")):
        pytest.skip("needs root, iproute2 and util-linux to make Soft-RoCE and a namespace")
    version, mtu = request.param
    with ExitStack() as stack:
        stack.callback(subprocess.run, ["ip", "netns", "del", NAMESPACE], check=False)
        stack.callback(subprocess.run, ["rdma", "link", "delete", RXE], check=False)
        system(
            f"ip netns add {NAMESPACE}",
            f"ip link add {NEAR} mtu {mtu} type veth peer name {FAR} mtu {mtu} netns {NAMESPACE}",
            f"ip addr add 10.9.0.1/24 dev {NEAR}",
            f"ip -6 addr add fd00:9::1/64 dev {NEAR} nodad",
            f"ip link set {NEAR} up",
            *(
                f"ip -n {NAMESPACE} {command}"
                for command in (
                    f"addr add 10.9.0.2/24 dev {FAR}",
                    f"addr add 10.9.0.3/24 dev {FAR}",
                    f"-6 addr add fd00:9::2/64 dev {FAR} nodad",
                    f"-6 addr add fd00:9::3/64 dev {FAR} nodad",
                    f"link set {FAR} up",
                    "link set lo up",
                )
            ),
            f"rdma link add {RXE} type rxe netdev {NEAR}",
        )
        ours = stack.enter_context(local_agent("10.9.0.2", (*IN_NAMESPACE, *WITHOUT_RIGHTS)))
        theirs = stack.enter_context(local_agent())
        near_gid, far_gid = GIDS[version]
        device = f"roce:{far_gid.removeprefix('::ffff:')}"
        rxe = Side(stack, theirs, RXE, near_gid)
        yield Cable(
            rxe=rxe,
            roce=Side(stack, ours, device, far_gid),
            mtu=1024 if mtu == 1500 else 4096,
            theirs=theirs,
            ours=ours,
            device=f"{device[:-1]}3",
            gid_index=str(rxe.gid_index()),
        )


@pytest.fixture(scope="module", params=["roce", "rxe"], ids="{} posts".format)
def ends(request: pytest.FixtureRequest, cable: Cable) -> Ends:
    """Both roles."""
    if request.param == "roce":
        return Ends(cable.roce, cable.rxe, cable.mtu, cable)
    return Ends(cable.rxe, cable.roce, cable.mtu, cable)

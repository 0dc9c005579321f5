"""Soft-RoCE and a roce device as each other's peers.

Soft-RoCE is on one end of a virtual Ethernet cable; the other end is in a network namespace of its
own, where a process without any capability opens the roce device.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rdmapost as rp
from support import LIMIT, verbs_side
from support.agents import Remote, local_agent

NAMESPACE, NEAR, FAR, RXE = "rdmapost-peer", "rdmapost-v0", "rdmapost-v1", "rdmapost9"
IN_NAMESPACE = ("ip", "netns", "exec", NAMESPACE)
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
GIDS = {4: ("::ffff:10.9.0.1", "::ffff:10.9.0.2"), 6: ("fd00:9::1", "fd00:9::2")}
PATIENT = {"timeout": 18}
"""A second: an emulated machine is slow."""


def system(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True, timeout=LIMIT)


class Side:
    """A device in another process (tests/support/verbs_side.py)."""

    def __init__(self, stack: ExitStack, agent: tuple[str, int], device: str, gid: str) -> None:
        program = Path(verbs_side.__file__).read_text()
        self._remote = stack.enter_context(Remote(agent, "python", "-c", program, device, gid))

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any, **fields: Any) -> Any:
            names = ASKED.get(name, ())
            request = {"do": name, **dict(zip(names, args, strict=False)), **fields}
            self._remote.write(json.dumps(request) + "\n")
            answer = json.loads(self._remote.until("out", "^{"))
            assert "error" not in answer, f"{request}: {answer['error']}"
            return answer["answer"]

        return ask


ASKED = {
    "make": ("qp_type",),
    "capture": ("path",),
    "connect": ("endpoint",),
    "connect_at": ("endpoint",),
    "fill": ("start", "data"),
    "peek": ("start", "length"),
    "recv": ("start", "length"),
    "post": ("name", "start", "length"),
    "post_mixed": ("rounds", "addr", "rkey", "responses"),
    "post_writes": ("count", "start", "remote_addr", "rkey"),
    "window": ("mw_type", "start", "length"),
    "wait": ("count", "timeout"),
}
"""The arguments that are passed by position."""


class Cable(NamedTuple):
    """The sides, the path MTU between them, and the agents that run commands at each end."""

    rxe: Side
    roce: Side
    mtu: int
    theirs: tuple[str, int]
    ours: tuple[str, int]
    device: str
    """The name of a roce device on another address, for commands."""
    gid_index: str
    """The index of Soft-RoCE's GID on the cable."""


class Ends(NamedTuple):
    """The side that posts, the other one, and the path MTU between them."""

    near: Side
    far: Side
    mtu: int
    cable: Cable

    def connect(self, qp_type: str, checked: bool = True, **options: int) -> dict[str, Any]:
        """Connect a new queue pair on each side; return what the far one exposes."""
        near, far = self.near.make(qp_type, checked=checked), self.far.make(qp_type)
        options = PATIENT | options
        self.far.connect(near["endpoint"], **PATIENT)
        self.near.connect(far["endpoint"], **options)
        return far

    def statuses(self, count: int) -> list[str]:
        return [wc["status"] for wc in self.near.wait(count, LIMIT)]


def noise(size: int) -> str:
    return random.Random(size).randbytes(size).hex()


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


@pytest.fixture(params=["roce", "rxe"], ids="{} posts".format)
def ends(request: pytest.FixtureRequest, cable: Cable) -> Ends:
    """Both roles.

    It is made for each test: pytest would lay a new cable for each parameter of a whole module.
    """
    if request.param == "roce":
        return Ends(cable.roce, cable.rxe, cable.mtu, cable)
    return Ends(cable.rxe, cable.roce, cable.mtu, cable)

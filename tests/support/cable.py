"""A virtual Ethernet cable between Soft-RoCE and a roce device, with a process on each."""

from __future__ import annotations

import json
import random
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from support import LIMIT, verbs_side
from support.agents import Remote

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

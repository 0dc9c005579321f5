"""A server in this process and what a test must do to it: helpers of the tests of connect."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import LIMIT

import rdmapost as rp
from rdmapost import QPType, connect
from rdmapost.connect.fabric import fabric_of
from rdmapost.connect.messages import Bye, Hello, Look, Message, Ready, Report, encode

ENDPOINT = "qpn=0x123456 psn=0x1 gid={gid} lid=0x0 mtu=1024"


class Served:
    """A server and what it has told."""

    def __init__(self, context: rp.Context, **options: Any) -> None:
        self.context = context
        self.told: queue.Queue[connect.Event] = queue.Queue()
        options = {"port": 0, "token": None, **options}
        self.token = options["token"]
        self.server = connect.serve(context, on_event=self.told.put, **options)

    def dial(self, **options: Any) -> connect.Connection:
        return connect.dial(
            self.context, *self.server.address[:2], **{"token": self.token, **options}
        )

    def until(self, kind: type[Any]) -> Any:
        """Wait for an event of this kind; others are passed over."""
        while True:
            event = self.told.get(timeout=LIMIT)
            if isinstance(event, kind):
                return event

    def works(self) -> None:
        """A client comes, and its bytes arrive."""
        with self.dial() as peer:
            peer.mr.buffer[:8] = b"still ok"
            peer.qp.post_send(rp.Send(peer.mr[:8]))
            peer.wait()[0].check()
            arrival = peer.report()
            assert arrival is not None
            assert arrival.data == b"still ok"


@pytest.fixture
def servers(context: rp.Context) -> Iterator[Callable[..., Served]]:
    """Make servers, which end with the test: ``serve = servers``."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Served:
            served = Served(context, **options)
            stack.callback(served.server.close)
            return served

        yield make


def hello(context: rp.Context, token: str | None = None) -> Hello:
    """What a client says first whose queue pair is nowhere."""
    gid = rp.choose_gid(context).gid
    return Hello(token, fabric_of(context), QPType.RC, rp.Endpoint.parse(ENDPOINT.format(gid=gid)))


@contextlib.contextmanager
def stranger(served: Served, *messages: Message | bytes) -> Iterator[socket.socket]:
    """A plain connection that says something, all of it at once."""
    said = b"".join(one if isinstance(one, bytes) else encode(one) for one in messages)
    with socket.create_connection(served.server.address[:2], LIMIT) as sock:
        sock.sendall(said)
        yield sock


def answers(sock: socket.socket) -> list[dict[str, Any]]:
    """Read all that the server says, to its end."""
    heard = b""
    while data := sock.recv(65536):
        heard += data
    return [json.loads(line) for line in heard.splitlines()]


def one_error(sock: socket.socket) -> tuple[str, str]:
    """Return code and text of the one error that the server says at last."""
    *before, last = answers(sock)
    assert [m["type"] for m in before if m["type"] == "error"] == []
    assert last["type"] == "error"
    assert "\n" not in last["text"]
    return last["code"], last["text"]


def part(message: Message) -> bytes:
    line = encode(message)
    return line[: len(line) // 2]


STEPS: dict[str, Callable[[Hello], list[Message | bytes]]] = {
    "at once": lambda hello: [],
    "in the hello": lambda hello: [part(hello)],
    "after the hello": lambda hello: [hello],
    "in ready": lambda hello: [hello, part(Ready())],
    "after ready": lambda hello: [hello, Ready()],
    "in a report": lambda hello: [hello, Ready(), part(Report(1, 60_000))],
    "waiting for a report": lambda hello: [hello, Ready(), Report(1, 60_000)],
    "after a look": lambda hello: [hello, Ready(), Look(0, 4096)],
    "in the bye": lambda hello: [hello, Ready(), part(Bye())],
    "after the bye": lambda hello: [hello, Ready(), Bye()],
}

"""Helpers for the connect tests: a server in this process, and its clients."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import queue
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import rdmapost as rp
from rdmapost import QPType, connect
from rdmapost.tools.connect.protocol_messages import (
    Bye,
    Hello,
    Look,
    Message,
    Ready,
    Report,
    encode,
)
from rdmapost.tools.connect.server_threads import ServerThread
from rdmapost.tools.reachability import fabric_of
from support import LIMIT


def server_threads() -> list[ServerThread]:
    """Return the threads of all servers that exist."""
    return [one for one in gc.get_objects() if isinstance(one, ServerThread) and one.exists()]


ENDPOINT = "qp_num=0x123456 psn=0x1 gid={gid} lid=0x0 mtu=1024"


class AsyncServerInThread:
    """``aserve`` in the event loop of a separate thread, with a Server's interface."""

    def __init__(self, context: rp.Context, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        try:
            self._server = self._run(connect.aserve(context, **options))
        except BaseException:
            self._end()
            raise
        self.address = self._server.address

    @property
    def clients(self) -> list[Any]:
        return self._server.clients

    @property
    def exposure(self) -> Any:
        return self._server.exposure

    @property
    def closed(self) -> bool:
        return self._server.closed

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self._server.close())
            self._end()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


class Served:
    """A server and the events that it has reported."""

    def __init__(self, context: rp.Context, serve: Callable[..., Any], **options: Any) -> None:
        self.context = context
        self.events: queue.Queue[connect.Event] = queue.Queue()
        options = {"port": 0, "token": None, "on_event": self.events.put, **options}
        self.token = options["token"]
        self.server = serve(context, **options)

    def dial(self, **options: Any) -> connect.Connection:
        return connect.dial(
            self.context, *self.server.address[:2], **{"token": self.token, **options}
        )

    def until(self, event_type: type[Any]) -> Any:
        """Wait for an event of this type, skipping others."""
        while True:
            event = self.events.get(timeout=LIMIT)
            if isinstance(event, event_type):
                return event

    def works(self) -> None:
        """Check that a client can connect, and its message arrives."""
        with self.dial() as peer:
            peer.mr.buffer[:8] = b"still ok"
            peer.qp.post_send(rp.Send(peer.mr[:8]))
            peer.wait()[0].check()
            arrival = peer.report()
            assert arrival is not None
            assert arrival.data == b"still ok"


@contextlib.contextmanager
def _making(context: rp.Context, serve: Callable[..., Any]) -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Served:
            served = Served(context, serve, **options)
            stack.callback(served.server.close)
            return served

        yield make


@pytest.fixture
def servers(context: rp.Context) -> Iterator[Callable[..., Served]]:
    """Make servers that are closed after the test: ``serve = servers``."""
    with _making(context, connect.serve) as make:
        yield make


@pytest.fixture(params=[connect.serve, AsyncServerInThread], ids=["threads", "asyncio"])
def both_servers(
    context: rp.Context, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Served]]:
    """As ``servers``, for both the threaded and the asyncio server: ``serve = both_servers``."""
    with _making(context, request.param) as make:
        yield make


def hello(context: rp.Context, token: str | None = None) -> Hello:
    """The hello of a client whose queue pair does not exist."""
    gid = context.choose_gid().gid
    return Hello(token, fabric_of(context), QPType.RC, rp.Endpoint.parse(ENDPOINT.format(gid=gid)))


@contextlib.contextmanager
def raw_client(served: Served, *messages: Message | bytes) -> Iterator[socket.socket]:
    """A TCP connection that sends all of this at once."""
    data = b"".join(one if isinstance(one, bytes) else encode(one) for one in messages)
    with socket.create_connection(served.server.address[:2], LIMIT) as sock:
        sock.sendall(data)
        yield sock


def answers(sock: socket.socket) -> list[dict[str, Any]]:
    """Read everything that the server sends, to end of file."""
    received = b""
    while data := sock.recv(65536):
        received += data
    return [json.loads(line) for line in received.splitlines()]


def one_error(sock: socket.socket) -> tuple[str, str]:
    """Return the code and text of the error that ends what the server sends."""
    *before, last = answers(sock)
    assert [m["type"] for m in before if m["type"] == "error"] == []
    assert last["type"] == "error"
    assert "\n" not in last["text"]
    return last["code"], last["text"]


def part(message: Message) -> bytes:
    line = encode(message)
    return line[: len(line) // 2]


STAGES: dict[str, Callable[[Hello], list[Message | bytes]]] = {
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

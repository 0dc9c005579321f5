"""How servers and connections end: interrupted, dropped, forked, and closed by others."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from serving import Served, both_servers
from support import LIMIT

import rdmapost as rp
from rdmapost import connect

serve = both_servers


@pytest.fixture
def context() -> Iterator[rp.Context]:
    """A device of the test's own, which it may close."""
    with rp.open_device("soft0") as opened:
        yield opened


def until(holds: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def server_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("serve ")]


class Interrupted(BaseException):
    pass


class Alarm:
    """An exception from a signal handler, at most one for each time that it is set."""

    def __init__(self) -> None:
        self._armed = False
        self._before = signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, *args: object) -> None:
        if self._armed:
            self._armed = False
            raise Interrupted

    def set(self, seconds: float) -> None:
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def clear(self) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def end(self) -> None:
        self.clear()
        signal.signal(signal.SIGALRM, self._before)


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    one = Alarm()
    yield one
    one.end()


# ---- a server ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupted_serve_leaves_no_server(context: rp.Context, alarm: Alarm) -> None:
    rng, interrupted, port = random.Random(1), 0, 0
    open_before = len(os.listdir("/proc/self/fd"))
    end = time.monotonic() + LIMIT
    while interrupted < 100 and time.monotonic() < end:
        server = None
        try:
            alarm.set(rng.uniform(1e-5, 1.2e-3))
            server = connect.serve(context, port=port)
            alarm.clear()
        except Interrupted:
            interrupted += 1
        finally:
            alarm.clear()
        if server is not None:
            port = server.address[1]
            server.close()
        until(lambda: not server_threads())
    assert interrupted > 10
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= open_before
    # Nothing is left on the port or the device either.
    connect.serve(context, port=port).close()
    context.close()


@pytest.mark.parametrize("clients", [0, 1])
def test_a_server_that_nobody_can_reach_ends(context: rp.Context, clients: int) -> None:
    server = connect.serve(context, port=0)
    address, dropped = server.address, weakref.ref(server)
    peers = [connect.dial(context, *address) for _ in range(clients)]
    with pytest.warns(ResourceWarning, match=f"unclosed .*Server 127.0.0.1:{address[1]}"):
        del server
    assert dropped() is None
    until(lambda: not server_threads())
    for peer in peers:
        with pytest.raises(connect.ConnectError, match="the server ends"):
            peer.look()
        peer.close()
    connect.serve(context, port=address[1]).close()
    context.close()


def test_asyncio_a_server_that_nobody_can_reach_ends(context: rp.Context) -> None:
    async def main() -> None:
        server = await connect.aserve(context, port=0)
        with pytest.warns(ResourceWarning, match="unclosed .*AsyncServer 127.0.0.1:"):
            del server
        until(lambda: not server_threads())

    asyncio.run(main())
    context.close()


def test_a_closed_server_warns_of_nothing(context: rp.Context) -> None:
    server = connect.serve(context, port=0)
    server.close()
    server.close()
    del server
    gc.collect()


def test_a_callback_may_close_its_server(context: rp.Context) -> None:
    closed = threading.Event()

    def close(event: connect.Event) -> None:
        if isinstance(event, connect.Arrived):
            server.close()
            closed.set()

    server = connect.serve(context, port=0, on_event=close)
    with connect.dial(context, *server.address) as peer:
        peer.qp.post_send(rp.Send(peer.mr[:1]))
        assert closed.wait(LIMIT)
    until(lambda: not server_threads())
    context.close()


def test_a_device_is_not_closed_under_a_server_without_clients(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    port = served.server.address[1]
    with pytest.raises(rp.InUseError, match=f"server 127.0.0.1:{port} still open on it"):
        served.context.close()
    served.works()
    served.server.close()
    served.context.close()
    assert served.context.closed


# ---- the child of a fork -----------------------------------------------------------

FORK = """
import os, sys
import rdmapost as rp
from rdmapost import connect
context = rp.open_device("soft0")
server = connect.serve(context, port=0)
peer = connect.dial(context, port=server.address[1])
child = os.fork()
if child == 0:
    what = sys.argv[1]
    try:
        exec(what)
        print("did it")
    except rp.ClosedError as error:
        print(error)
    sys.exit(0)
sys.stdout.flush()
assert os.waitpid(child, 0)[1] == 0
assert peer.look(0, 4).data == bytes(4)
assert not peer.closed
connect.dial(context, port=server.address[1]).close()
peer.close()
server.close()
context.close()
"""


def in_a_child(what: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore::DeprecationWarning", "-c", FORK, what],
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.parametrize("what", ["server.close()", "del server", "sys.exit(0)"])
def test_a_child_cannot_end_its_parents_server(what: str) -> None:
    assert in_a_child(what) in ("did it", "")


@pytest.mark.parametrize("what", ["server.clients", "server.memory", "server.__enter__()"])
def test_a_child_cannot_use_its_parents_server(what: str) -> None:
    text = in_a_child(what)
    assert text.startswith("server 127.0.0.1:")
    assert " was opened by process " in text

"""Whether the other side is alive: silent clients, and sides that go."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from support import LIMIT, soft_context, until
from support.serving import Served, both_servers, server_threads

import rdmapost as rp
from rdmapost import connect

context = soft_context
serve = both_servers


def test_a_client_that_only_reads_and_writes_is_not_dropped(serve: Callable[..., Served]) -> None:
    served = serve(timeout=0.3)
    with served.dial() as peer:
        served.until(connect.Joined)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            peer.qp.post_send(rp.RdmaWrite(peer.mr[:8], **peer.target()))
            peer.wait()[0].check()
        assert not peer.closed
        assert served.events.empty()
        assert peer.look(0, 1).data == b"\0"
    assert served.until(connect.Left).reason == "done"


@pytest.mark.parametrize("face", [connect.serve, connect.aserve])
def test_serve_and_aserve_have_no_idle_timeout_by_default(face: Callable[..., object]) -> None:
    assert inspect.signature(face).parameters["idle_timeout"].default is None


def test_a_client_that_was_dropped_is_closed_without_asking(serve: Callable[..., Served]) -> None:
    served = serve(idle_timeout=0.3)
    with served.dial() as peer:
        assert not peer.closed
        assert served.until(connect.Left).reason == "nothing came from the client within 0.3 s"
        assert peer.closed
        # Reading `closed` does not take the error from the next request.
        with pytest.raises(connect.ConnectError, match="nothing came from the client"):
            peer.look()
        assert peer.closed


def test_a_connection_is_closed_without_asking_when_its_server_closes(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    with served.dial() as peer:
        assert not peer.closed
        served.server.close()
        assert peer.closed
        with pytest.raises(connect.ConnectError, match="the server is shutting down"):
            peer.report()


@pytest.mark.parametrize("qp_type", [rp.QPType.RC, rp.QPType.UD])
def test_a_connection_is_closed_without_asking_when_the_server_closes_that_client(
    serve: Callable[..., Served], qp_type: rp.QPType
) -> None:
    served = serve()
    with served.dial(qp_type=qp_type) as peer, served.dial() as other:
        (client, _) = served.server.clients
        client.close()
        until(lambda: peer.closed)
        left = served.until(connect.Left)
        assert (left.client, left.reason) == (client.number, "the server closed the connection")
        assert [one.number for one in served.server.clients] == [other.offer.client]
        with pytest.raises(connect.ConnectError, match="the server closed the connection"):
            peer.look()
        # The other client's connection is not affected.
        assert not other.closed
        assert other.look(0, 1).data == b"\0"


def test_a_connection_that_only_writes_is_closed_when_the_server_closes_that_client(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    with served.dial() as peer:
        peer.qp.post_send(rp.RdmaWrite(peer.mr[:8], **peer.target()))
        peer.wait()[0].check()
        served.server.clients[0].close()
        until(lambda: peer.closed)
        served.until(connect.Left)
        assert served.server.clients == []


def test_a_client_may_be_closed_in_on_connect_and_in_on_event(context: rp.Context) -> None:
    """In on_event, the thread that closes the client is the one that should notice it."""
    admitted: list[connect.ServedClient] = []
    left: list[connect.Left] = []

    def on_event(event: connect.Event) -> None:
        if isinstance(event, connect.Arrived):
            admitted[-1].close()
        elif isinstance(event, connect.Left):
            left.append(event)

    with connect.serve(context, port=0, on_event=on_event, on_connect=admitted.append) as server:
        with connect.dial(context, *server.address[:2]) as peer:
            peer.qp.post_send(rp.Send(peer.mr[:8]))
            until(lambda: peer.closed)
            until(lambda: left)
        assert admitted[0].closed


def test_asyncio_a_connection_is_closed_without_asking_when_the_server_closes_that_client(
    serve: Callable[..., Served],
) -> None:
    served = serve()

    async def main() -> None:
        async with await connect.adial(served.context, *served.server.address[:2]) as peer:
            assert not peer.closed
            served.server.clients[0].close()
            async with asyncio.timeout(LIMIT):
                while not peer.closed:
                    await asyncio.sleep(0)
            with pytest.raises(connect.ConnectError, match="the server closed the connection"):
                await peer.look()

    asyncio.run(main())
    assert served.until(connect.Left).reason == "the server closed the connection"


def test_a_client_that_is_closed_many_times_leaves_no_descriptor(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    kept = []

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = 0
    for _ in range(8):
        with served.dial() as peer:
            kept.append(served.server.clients[0])
            kept[-1].close()
            kept[-1].close()
            until(lambda peer=peer: peer.closed)
        served.until(connect.Left)
        # Only the acceptor's thread is left.
        until(lambda: len(server_threads()) == 1)
        before = before or descriptors()
    assert descriptors() == before
    assert all(client.closed for client in kept)


def test_a_connection_is_not_closed_while_it_asks(serve: Callable[..., Served]) -> None:
    served = serve()
    with served.dial() as peer:
        asking = threading.Thread(target=peer.report, args=(1, LIMIT))
        asking.start()
        while asking.is_alive():
            assert not peer.closed
            peer.qp.post_send(rp.Send(peer.mr[:1]))
            peer.wait()[0].check()
            asking.join(1.0)
        assert not peer.closed


def test_asyncio_a_connection_is_closed_without_asking_when_its_server_closes(
    context: rp.Context,
) -> None:
    async def main() -> None:
        async with await connect.aserve(context, port=0) as server:
            peer = await connect.adial(context, *server.address[:2])
            assert (await peer.look(0, 1)).data == b"\0"
            assert not peer.closed
        async with asyncio.timeout(LIMIT):
            while not peer.closed:
                await asyncio.sleep(0)
        with pytest.raises(connect.ConnectError, match="the server is shutting down"):
            await peer.look()
        assert peer.closed
        await peer.close()

    asyncio.run(main())


def test_asyncio_a_server_ends_with_its_event_loop(context: rp.Context) -> None:
    async def main() -> tuple[connect.AsyncServer, connect.Connection]:
        server = await connect.aserve(context, port=0)
        return server, await asyncio.to_thread(connect.dial, context, *server.address[:2])

    server, peer = asyncio.run(main())
    with peer:
        assert peer.closed
        with pytest.raises(connect.ConnectError, match="the server is shutting down"):
            peer.look()
    assert server_threads() == []
    del server


NETWORK_THAT_GOES = """
import fcntl, queue, socket, struct, time
import rdmapost as rp
from rdmapost import connect

def loopback(up):
    with socket.socket() as sock:
        # SIOCSIFFLAGS; IFF_UP is 1.
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", up))

loopback(1)
reported = queue.Queue()
with rp.open_device("soft0") as context:
    with connect.serve(context, port=0, on_event=reported.put) as server:
        with connect.dial(context, *server.address) as peer:
            assert isinstance(reported.get(timeout=60), connect.Joined)
            assert not peer.closed
            loopback(0)
            left = reported.get(timeout=60)
            assert isinstance(left, connect.Left), left
            print(left.reason)
            until = time.monotonic() + 60
            while not peer.closed:
                assert time.monotonic() < until
                time.sleep(0.01)
"""


def test_both_sides_notice_within_a_minute_that_the_network_is_down() -> None:
    unshare = shutil.which("unshare")
    unshared = [unshare or "unshare", "--user", "--map-root-user", "--net"]
    if unshare is None or subprocess.run([*unshared, "true"], check=False).returncode:
        pytest.skip("no network namespace of one's own (unshare --user --net)")
    began = time.monotonic()
    done = subprocess.run(
        [*unshared, sys.executable, "-P", "-W", "error", "-c", NETWORK_THAT_GOES],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("the connection broke: ")
    assert time.monotonic() - began < 60

"""Serving and dialling with asyncio: the same protocol and the same malformed clients."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import threading
import warnings
from typing import Any

import pytest
from support import LIMIT, prints, run_python
from support.ports import HOST, free_port, impostor, read_to_end
from support.serving import STAGES, hello

import rdmapost as rp
from rdmapost import connect
from rdmapost.tools.connect import base_connection
from rdmapost.tools.connect.protocol_messages import encode


def test_dir_of_connect_lists_every_public_name_before_asyncio_is_imported() -> None:
    listed = prints("from rdmapost import connect; print(*dir(connect))").split()
    assert listed == sorted(connect.__all__)
    assert {"AsyncConnection", "AsyncServer", "adial", "aserve"} <= {*listed}


def test_asyncio_client_and_server_exchange_messages_and_memory(context: rp.Context) -> None:
    async def main() -> list[connect.Event]:
        reported: list[connect.Event] = []
        async with await connect.aserve(
            context, port=0, token="secret", on_event=reported.append
        ) as server:
            address = server.address[:2]
            async with await connect.adial(context, *address, token="secret") as peer:
                peer.mr.buffer[:5] = b"hello"
                asked = asyncio.create_task(peer.report(1, LIMIT))
                await asyncio.sleep(0)
                peer.qp.post_send(rp.Send(peer.mr[:5]))
                arrival = await asked
                assert arrival is not None
                assert arrival.data == b"hello"
                peer.qp.post_send(rp.RdmaWrite(peer.mr[:5], **peer.target(3)))
                for wc in await peer.wait(2):
                    wc.check()
                assert (await peer.look(3, 5)).data == b"hello"
                assert await peer.report(2, 0.05) is None
                with pytest.raises(connect.ConnectError, match="token"):
                    await connect.adial(context, *address, token="Secret")
            assert server.clients == []
            assert peer.closed
        return reported

    reported = asyncio.run(main())
    # The refusal may be reported after the other has left.
    assert sorted(type(event).__name__ for event in reported) == [
        "Arrived",
        "Joined",
        "Left",
        "Refused",
    ]


def test_asyncio_server_serves_good_silent_and_malformed_clients_at_once(
    context: rp.Context,
) -> None:
    def work(address: tuple[str, int]) -> bytes:
        with connect.dial(context, *address) as peer:
            peer.mr.buffer[:2] = b"hi"
            peer.qp.post_send(rp.Send(peer.mr[:2]))
            peer.wait()[0].check()
            arrival = peer.report()
            assert arrival is not None
            return arrival.data

    async def main() -> None:
        async with await connect.aserve(context, port=0, timeout=1.5) as server:
            address = server.address[:2]
            reader, writer = await asyncio.open_connection(*address)
            garbage, other = await asyncio.open_connection(*address)
            other.write(b"garbage")
            found = await asyncio.gather(*(asyncio.to_thread(work, address) for _ in range(4)))
            assert found == [b"hi"] * 4
            assert json.loads(await garbage.readline())["code"] == "format"
            # The silent one times out.
            assert json.loads(await reader.readline())["code"] == "timeout"
            for w in (writer, other):
                w.close()
                with contextlib.suppress(ConnectionError):
                    await w.wait_closed()

    asyncio.run(main())


@pytest.mark.parametrize("step", STAGES)
def test_asyncio_server_serves_on_after_a_client_left_at_any_stage(
    context: rp.Context, step: str
) -> None:
    async def main() -> None:
        gone = asyncio.Event()

        def on_event(event: connect.Event) -> None:
            if isinstance(event, connect.Left | connect.Refused):
                gone.set()

        async with await connect.aserve(context, port=0, on_event=on_event) as server:
            _, writer = await asyncio.open_connection(*server.address[:2])
            for sent in STAGES[step](hello(context)):
                writer.write(sent if isinstance(sent, bytes) else encode(sent))
            await writer.drain()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            await asyncio.wait_for(gone.wait(), LIMIT)
            assert server.clients == []
            async with await connect.adial(context, *server.address[:2]) as peer:
                assert (await peer.look(0, 1)).data == b"\0"

    asyncio.run(main())


def test_asyncio_closing_a_server_releases_its_clients(context: rp.Context) -> None:
    async def main() -> None:
        server = await connect.aserve(context, port=0)
        peer = await connect.adial(context, *server.address[:2])
        (client,) = server.clients
        await server.close()
        assert client.mr.closed
        with pytest.raises(connect.ConnectError, match="the server is shutting down"):
            await peer.look()
        await peer.close()
        assert peer.qp.closed

    asyncio.run(main())


def test_asyncio_report_from_a_server_without_receives_says_that_the_connection_is_closed(
    context: rp.Context,
) -> None:
    async def main() -> None:
        server = await connect.aserve(context, port=0, count=0)
        peer = await connect.adial(context, *server.address[:2])
        assert await peer.report() is None
        await server.close()
        with pytest.raises(connect.ConnectError, match="the server is shutting down"):
            await peer.report()
        await peer.close()

    asyncio.run(main())


def test_asyncio_adial_can_be_cancelled(context: rp.Context) -> None:
    async def main(address: tuple[str, int]) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await connect.adial(context, *address, timeout=LIMIT)

    with impostor(read_to_end) as address:
        asyncio.run(main(address))


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"SSH-2.0-x\r\n", "is not an 'rdmapost serve'"),
        (b'{"type":"off', "closed the connection in the middle of a message"),
        (None, r"did not answer within 0\.3 s"),
    ],
    ids=["ssh", "half", "silent"],
)
def test_asyncio_adial_names_what_answers_in_place_of_a_server(
    context: rp.Context, sent: bytes | None, expected: str
) -> None:
    def respond(sock: socket.socket) -> None:
        sock.recv(4096)
        if sent is not None:
            with contextlib.suppress(OSError):
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
        read_to_end(sock)

    with impostor(respond) as address, pytest.raises(connect.ConnectError, match=expected):
        asyncio.run(connect.adial(context, *address, timeout=0.3))


def test_asyncio_adial_is_refused_where_nothing_listens(context: rp.Context) -> None:
    with pytest.raises(connect.ConnectError, match="refused the connection"):
        asyncio.run(connect.adial(context, HOST, free_port()))


# ---- waiting ------------------------------------------------------------------------


def test_asyncio_wait_lets_the_event_loop_run(context: rp.Context) -> None:
    async def main() -> None:
        async with (
            await connect.aserve(context, port=0) as server,
            await connect.adial(context, *server.address[:2]) as peer,
        ):
            waiting = asyncio.create_task(peer.wait(2, timeout=None))
            peer.qp.post_send(rp.RdmaWrite(peer.mr[:8], **peer.target()))
            assert (await peer.look(0, 8)).data == bytes(8)
            assert not waiting.done()
            peer.qp.post_send(rp.Send(peer.mr[:8]))
            assert [wc.status for wc in await waiting] == [rp.WCStatus.SUCCESS] * 2
            arrival = await peer.report(timeout=None)
            assert arrival is not None
            with pytest.raises(rp.WaitTimeout):
                await peer.wait(timeout=0.01)

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [None, LIMIT])
def test_a_wait_has_its_own_limit_and_not_the_connections(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    """However many requests the wait takes: the server limits how long each may wait."""
    monkeypatch.setattr(base_connection, "LONGEST_WAIT_S", 0.2)
    asked = []
    with (
        connect.serve(context, port=0) as server,
        connect.dial(context, *server.address, timeout=1.0) as peer,
    ):
        ask = peer._ask

        def count(message: Any, more_time: float = 0.0) -> Any:
            asked.append(message)
            if len(asked) == 8:
                peer.qp.post_send(rp.Send(peer.mr[:5]))
            return ask(message, more_time)

        monkeypatch.setattr(peer, "_ask", count)
        arrival = peer.report(1, timeout)
        assert arrival is not None
        assert (arrival.byte_len, len(asked) >= 8) == (5, True)
        assert peer.wait(1, timeout)[0].status is rp.WCStatus.SUCCESS
        assert peer.report(2, 0.05) is None
        monkeypatch.undo()


# ---- another event loop -------------------------------------------------------------


async def _call(peer: connect.AsyncConnection, method: str) -> object:
    return await getattr(peer, method)()


@pytest.mark.parametrize("method", ["wait", "report", "look", "close"])
def test_asyncio_connection_refuses_another_event_loop(context: rp.Context, method: str) -> None:
    """And it still works in its own."""

    async def main() -> None:
        async with (
            await connect.aserve(context, port=0) as server,
            await connect.adial(context, *server.address[:2]) as peer,
        ):
            with pytest.raises(rp.RdmaError, match="belongs to another event loop"):
                await asyncio.to_thread(asyncio.run, asyncio.wait_for(_call(peer, method), 5))
            assert (await peer.look(0, 1)).data == b"\0"

    asyncio.run(main())


@pytest.mark.parametrize("elsewhere", ["thread", "loop"])
def test_closed_read_in_another_thread_leaves_a_late_answer_to_the_event_loop(
    context: rp.Context, elsewhere: str
) -> None:
    async def main() -> None:
        async with (
            await connect.aserve(context, port=0) as server,
            await connect.adial(context, *server.address[:2]) as peer,
        ):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await peer.report(1, 0.1)
            async with asyncio.timeout(LIMIT):
                while not peer._reading.done():
                    await asyncio.sleep(0.01)

            async def is_closed() -> bool:
                return peer.closed

            if elsewhere == "thread":
                assert await asyncio.to_thread(lambda: peer.closed) is False
            else:
                assert await asyncio.to_thread(asyncio.run, is_closed()) is False
            assert (await peer.look(0, 1)).data == b"\0"

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:.*:ResourceWarning")
@pytest.mark.parametrize("method", ["wait", "report", "look", "close"])
def test_asyncio_connection_can_only_be_closed_after_its_event_loop(
    context: rp.Context, method: str
) -> None:
    left = threading.Event()

    def on_event(event: connect.Event) -> None:
        if isinstance(event, connect.Left):
            left.set()

    with connect.serve(context, port=0, on_event=on_event) as server:
        peer = asyncio.run(connect.adial(context, *server.address[:2]))
        with pytest.raises(rp.RdmaError, match="ended with its event loop, which is closed"):
            asyncio.run(asyncio.wait_for(_call(peer, method), 5))
        assert peer.qp.closed == (method == "close")
        if method != "close":
            with pytest.raises(rp.RdmaError, match="is closed"):
                asyncio.run(peer.close())
        # The server notices that the client has gone.
        assert left.wait(LIMIT)
        assert peer.qp.closed
        assert peer.closed
        asyncio.run(peer.close())
        del peer
        gc.collect()


def test_sys_exit_in_on_event_of_aserve_ends_the_program_after_its_tasks_clean_up() -> None:
    """Even if on_event raises SystemExit for the events of the cleanup, too."""
    ended = run_python(
        """
import asyncio, sys, rdmapost as rp
from rdmapost import connect

def on_event(event):
    print(type(event).__name__)
    sys.exit(3)

async def main(context):
    try:
        async with await connect.aserve(context, port=0, on_event=on_event) as server:
            await asyncio.to_thread(visit, server.address[:2])
            await asyncio.sleep(30)
    finally:
        await asyncio.sleep(0.05)
        print("cleaned up")

def visit(address):
    try:
        connect.dial(context, *address).close()
    except connect.ConnectError:
        pass

with rp.open_device("soft0") as context:
    asyncio.run(main(context))
"""
    )
    assert (ended.stdout.split("\n", 1), ended.stderr) == (["Joined", "cleaned up\n"], "")
    assert ended.returncode == 3


def test_asyncio_server_can_be_closed_in_another_event_loop(context: rp.Context) -> None:
    server = asyncio.run(connect.aserve(context, port=0))
    asyncio.run(server.close())

    async def main() -> None:
        server = await connect.aserve(context, port=0)
        await asyncio.to_thread(asyncio.run, server.close())
        with pytest.raises(connect.ConnectError):
            await connect.adial(context, *server.address[:2])

    asyncio.run(main(), debug=True)


@pytest.mark.parametrize("iterations", range(6))
def test_aserve_that_is_cancelled_leaves_no_listener(context: rp.Context, iterations: int) -> None:
    """After any number of iterations of the event loop; a listener left to the collector warns."""
    port = free_port()
    threads = threading.active_count()

    async def main() -> None:
        task = asyncio.create_task(connect.aserve(context, port=port))
        for _ in range(iterations):
            await asyncio.sleep(0)
        task.cancel()
        (server,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(server, connect.AsyncServer):
            await server.close()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert [str(one.message) for one in warned] == []
    assert threading.active_count() == threads
    # Would fail if a listener were left: it does not set SO_REUSEPORT.
    with socket.create_server((HOST, port)):
        pass


@pytest.mark.parametrize("body_fails", [False, True], ids=["", "body fails"])
def test_cancellation_of_a_close_is_not_replaced_by_an_in_use_error(
    context: rp.Context, body_fails: bool
) -> None:
    """The caller's queue pair on another PD uses the connection's CQ."""
    leaves, go_on = threading.Event(), threading.Event()

    def on_event(event: object) -> None:
        if isinstance(event, connect.Left):
            leaves.set()
            go_on.wait(LIMIT)

    async def client(address: Any, pd: rp.PD, opened: list[Any]) -> None:
        peer = await connect.adial(context, *address)
        opened += [peer, rp.QP(pd, rp.QPType.RC, peer.cq)]
        async with peer:
            if body_fails:
                raise LookupError

    async def main(address: Any) -> None:
        opened: list[Any] = []
        with rp.PD(context) as pd:
            task = asyncio.create_task(client(address, pd, opened))
            await asyncio.to_thread(leaves.wait, LIMIT)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go_on.set()
            peer, qp = opened
            qp.close()
            await peer.close()

    with connect.serve(context, port=0, on_event=on_event) as server:
        asyncio.run(main(server.address[:2]))

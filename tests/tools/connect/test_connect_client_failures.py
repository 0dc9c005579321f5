"""Servers with many clients, clients that die at any stage, and servers that end.

A misbehaving client is a raw socket; each such test ends with a client that works.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import queue
import socket
import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from support import LIMIT, run_python
from support.serving import (
    STAGES,
    Served,
    answers,
    hello,
    one_error,
    raw_client,
    server_threads,
    servers,
)

import rdmapost as rp
from rdmapost import connect
from rdmapost.tools.connect import base_connection

serve = servers


# ---- many clients ---------------------------------------------------------------


def test_eight_clients_write_send_and_look_at_once(serve: Callable[..., Served]) -> None:
    served = serve(max_clients=8)
    ready = threading.Barrier(8, timeout=LIMIT)
    failed: list[BaseException] = []

    def work(name: int) -> None:
        try:
            text = b"%d" % name * 100
            with served.dial() as peer:
                peer.mr.buffer[:100] = text
                ready.wait()
                for index in range(1, 21):
                    peer.qp.post_send(rp.RdmaWrite(peer.mr[:100], **peer.target(index)))
                    peer.qp.post_send(rp.Send(peer.mr[:100]))
                    for wc in peer.wait(2, LIMIT):
                        wc.check()
                    arrival = peer.report(index, LIMIT)
                    assert arrival is not None
                    assert arrival.data == text
                assert peer.look(20, 100).data == text
        except BaseException as error:
            failed.append(error)
            ready.abort()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    left = [served.until(connect.Left) for _ in threads]
    assert {event.reason for event in left} == {"done"}


def test_a_client_beyond_max_clients_is_refused_until_another_leaves(
    serve: Callable[..., Served],
) -> None:
    served = serve(max_clients=2)
    with served.dial() as first, served.dial():
        with pytest.raises(
            connect.ConnectError, match=r"is full \(2 clients at most\); try again"
        ) as error:
            served.dial()
        assert error.value.code == "busy"
        first.close()
        # When close() returns, the place is free.
        served.works()
    served.works()


def test_a_client_whose_resources_cannot_be_created_takes_no_place(
    serve: Callable[..., Served],
) -> None:
    served = serve(max_clients=1, size=4096, receive_size=1 << 31, count=1 << 14)
    # 32 TiB of receives: no machine has that.
    for _ in range(3):
        with pytest.raises(connect.ConnectError) as error:
            served.dial()
        assert error.value.code == "failed"
    assert served.server.clients == []


# ---- clients that die ---------------------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "reset"])
@pytest.mark.parametrize("step", STAGES)
def test_a_client_that_dies_at_any_stage_is_released_and_the_other_served(
    serve: Callable[..., Served], context: rp.Context, step: str, how: str
) -> None:
    served = serve(max_clients=2)
    with served.dial() as witness:
        served.until(connect.Joined)
        with raw_client(served, *STAGES[step](hello(context))) as sock:
            if how == "reset":
                # With a linger time of 0, close() resets the connection.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                # Read the answers: closing with unread data would reset the connection, too.
                sock.shutdown(socket.SHUT_WR)
                answers(sock)
        event = served.until((connect.Left, connect.Refused))  # type: ignore[arg-type]
        if step == "after the bye" and how != "reset":
            assert event.reason == "done"
        elif step == "in the hello" and how != "reset":
            assert event.text == "disconnected in the middle of its hello"
        elif step == "at once" and how != "reset":
            assert event.text == "disconnected before its hello"
        elif step == "in a report" and how != "reset":
            assert event.reason == "disconnected in the middle of a message"
        elif step == "after ready" and how != "reset":
            assert event.reason == "disconnected without close()"
        # Its resources are gone, and the other client is unaffected.
        assert len(served.server.clients) == 1
        witness.qp.post_send(rp.RdmaWrite(witness.mr[:8], **witness.target()))
        witness.wait()[0].check()
        served.works()


def test_a_client_that_breaks_its_queue_pair_is_still_served(serve: Callable[..., Served]) -> None:
    served = serve()
    with served.dial() as peer:
        peer.qp.to_err()
        assert peer.look(0, 1).data == b"\0"
    assert served.until(connect.Left).reason == "done"
    served.works()


def test_a_program_that_exits_or_is_killed_without_closing_ends_cleanly(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    code = """
import os, sys, warnings, rdmapost as rp
from rdmapost import connect
# Python warns of every socket left open.
warnings.simplefilter("ignore", ResourceWarning)
with rp.open_device(sys.argv[1]) as context:
    kept = connect.serve(context, port=0), rp.PD(context)
    if context.kind == "soft":
        dialled = connect.dial(context, *kept[0].address)
    else:
        dialled = connect.dial(context, "127.0.0.1", int(sys.argv[2]))
    print(dialled.offer.size, flush=True)
    if sys.argv[3] == "killed":
        os.kill(os.getpid(), 9)
    sys.exit()
"""
    port = str(served.server.address[1])
    for how, code_expected in (("exits", 0), ("killed", -9)):
        ended = run_python(code, served.context.name, port, how)
        assert ended.stdout == "4096\n"
        assert ended.stderr == ""
        assert ended.returncode == code_expected
    served.works()


# ---- the end ------------------------------------------------------------------------


def test_closing_a_server_releases_its_clients_and_sends_them_an_error(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    with served.dial() as peer, raw_client(served) as waiting:
        (client,) = served.server.clients
        served.until(connect.Joined)
        served.server.close()
        assert client.mr.closed
        assert client.qp.closed
        assert served.until(connect.Left).reason == "the server is shutting down"
        assert one_error(waiting)[0] == "closing"
        with pytest.raises(connect.ConnectError, match="refused: the server is shutting down"):
            peer.look()
    served.server.close()
    with pytest.raises(
        connect.ConnectError, match="refused the connection: start 'rdmapost serve'"
    ):
        served.dial()
    assert server_threads() == []


def test_on_event_may_close_its_server_when_a_client_joins(context: rp.Context) -> None:
    ended = threading.Event()
    servers: queue.Queue[connect.Server] = queue.Queue()

    def end(event: connect.Event) -> None:
        if isinstance(event, connect.Joined):
            servers.get(timeout=LIMIT).close()
            ended.set()

    server = connect.serve(context, port=0, on_event=end)
    servers.put(server)
    with contextlib.suppress(connect.ConnectError):
        connect.dial(context, *server.address[:2]).close()
    assert ended.wait(LIMIT)


def test_a_failing_on_event_is_logged_and_clients_are_served(
    context: rp.Context, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(event: connect.Event) -> None:
        raise ZeroDivisionError("on purpose")

    with (
        connect.serve(context, port=0, on_event=fails) as server,
        connect.dial(context, *server.address[:2]) as peer,
    ):
        assert peer.look(0, 1).data == b"\0"
    assert "on_event failed" in caplog.messages


# ---- requests without an answer -----------------------------------------------------


class _Stalled:
    """A server whose thread blocks in on_event until let_go() is called."""

    def __init__(self, serve: Callable[..., Served]) -> None:
        self._let_go = threading.Event()
        self.served = serve(on_event=self._on_event)

    def _on_event(self, event: object) -> None:
        if isinstance(event, connect.Arrived):
            assert self._let_go.wait(LIMIT)

    def let_go(self) -> None:
        self._let_go.set()


def test_report_that_times_out_names_the_seconds_that_were_asked_for(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what was left of them when the request was sent."""
    stalled = _Stalled(serve)
    with stalled.served.dial() as peer:
        peer.timeout = 0.2
        peer.qp.post_send(rp.Send(peer.mr[:4]))
        peer.wait(1, LIMIT)
        slow = SimpleNamespace(monotonic=itertools.count().__next__)
        monkeypatch.setattr(base_connection, "time", slow)
        with pytest.raises(connect.ConnectTimeout) as caught:
            peer.report(3, timeout=0.1)
        stalled.let_go()
    assert "did not answer within 1.3 s;" in str(caught.value)


def test_connection_timeout_refuses_the_values_that_dial_refuses(
    serve: Callable[..., Served],
) -> None:
    with serve().dial(timeout=LIMIT) as peer:
        for timeout, error in ((0, ValueError), (math.inf, ValueError), (None, TypeError)):
            with pytest.raises(error, match=r"^timeout"):
                peer.timeout = timeout  # type: ignore[assignment]
            assert peer.timeout == LIMIT


def test_a_request_that_times_out_leaves_the_connection_usable(
    serve: Callable[..., Served],
) -> None:
    stalled = _Stalled(serve)
    with stalled.served.dial() as peer:
        peer.timeout = 0.2
        peer.mr.buffer[:4] = b"data"
        peer.qp.post_send([rp.Send(peer.mr[:4]), rp.RdmaWrite(peer.mr[:4], **peer.target())])
        peer.wait(2, LIMIT)
        late = "did not answer within .* s; the connection stays open, and a late answer is dropped"
        with pytest.raises(connect.ConnectTimeout, match=late):
            peer.report(3, timeout=0)
        for _ in range(2):
            with pytest.raises(connect.ConnectTimeout, match=late):
                peer.look(100, 8)
        assert not peer.closed
        stalled.let_go()
        # No late answer is taken for the answer to this request.
        peer.timeout = LIMIT
        seen = peer.look(0, 4)
        assert (seen.offset, seen.length, seen.data) == (0, 4, b"data")
        arrival = peer.report(1, LIMIT)
        assert arrival is not None
        assert (arrival.index, arrival.byte_len) == (1, 4)
        assert not peer.closed


def test_a_request_that_times_out_leaves_an_asyncio_connection_usable(
    serve: Callable[..., Served], context: rp.Context
) -> None:
    stalled = _Stalled(serve)

    async def main() -> None:
        host, port = stalled.served.server.address
        async with await connect.adial(context, host, port) as peer:
            peer.timeout = 0.2
            peer.mr.buffer[:4] = b"data"
            peer.qp.post_send([rp.Send(peer.mr[:4]), rp.RdmaWrite(peer.mr[:4], **peer.target())])
            await peer.wait(2, LIMIT)
            with pytest.raises(connect.ConnectTimeout, match="the connection stays open"):
                await peer.report(3, timeout=0)
            for _ in range(2):
                with pytest.raises(connect.ConnectTimeout, match="the connection stays open"):
                    await peer.look(100, 8)
            assert not peer.closed
            stalled.let_go()
            # The late answer to the look may still take a while.
            for _ in range(100):
                with contextlib.suppress(connect.ConnectTimeout):
                    seen = await peer.look(0, 4)
                    break
            assert (seen.offset, seen.length, seen.data) == (0, 4, b"data")
            arrival = await peer.report(1, LIMIT)
            assert arrival is not None
            assert (arrival.index, arrival.byte_len) == (1, 4)

    asyncio.run(main())


def test_every_request_on_a_closed_connection_says_why_it_is(
    serve: Callable[..., Served], context: rp.Context
) -> None:
    served = serve()
    peer = served.dial()

    async def main() -> list[str]:
        said = []
        host, port = served.server.address
        other = await connect.adial(context, host, port)
        served.server.close()
        for _ in range(3):
            with pytest.raises(connect.ConnectError) as raised:
                await other.look()
            said.append(str(raised.value))
        await other.close()
        return said

    said = [asyncio.run(main()), []]
    for _ in range(3):
        with pytest.raises(connect.ConnectError) as raised:
            peer.look()
        said[1].append(str(raised.value))
    for first, *later in said:
        assert first.endswith("the server is shutting down")
        assert later == [f"the connection is closed: {first}"] * 2
    peer.close()


def test_dial_names_on_connect_when_the_server_is_slow(serve: Callable[..., Served]) -> None:
    let_go = threading.Event()
    served = serve(on_connect=lambda client: let_go.wait(LIMIT) and None)
    try:
        with pytest.raises(connect.ConnectTimeout, match="or does its on_connect take longer"):
            served.dial(timeout=0.2)
    finally:
        let_go.set()

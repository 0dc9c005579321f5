"""Every acknowledged message is reported to the server's owner, however the connection ends."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support import LIMIT, soft_context
from support.serving import Served, both_servers

import rdmapost as rp
from rdmapost import WCStatus, connect

context = soft_context
serve = both_servers

SOON = 30.0
"""Seconds within which a server reports that a client has left."""
LARGE = 1 << 26
"""Bytes of memory, which take the server a while to compare when a client has left."""


class Load:
    """A thread in which a client writes with immediate data, until a write fails."""

    def __init__(self, peer: connect.Connection) -> None:
        self._peer = peer
        self.successes = 0
        self.failure: WCStatus | None = None
        self.under_way = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self.under_way.wait(LIMIT)

    def _run(self) -> None:
        peer, posted = self._peer, 0
        try:
            while self.failure is None:
                while posted < self.successes + 8:
                    peer.qp.post_send(
                        rp.RdmaWriteWithImm(peer.mr[:64], imm_data=posted, **peer.target())
                    )
                    posted += 1
                for wc in [*peer.cq.wait(1, LIMIT), *peer.cq.poll()]:
                    if wc.status:
                        self.failure = self.failure or wc.status
                    else:
                        self.successes += 1
                if self.successes > 100:
                    self.under_way.set()
        except rp.ClosedError:
            pass

    def join(self) -> None:
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()


def arrived(events: list[connect.Event]) -> list[int | None]:
    """Return the immediate data of the messages, and check the order of the events."""
    types = [type(event) for event in events]
    assert (types[0], types[-1]) == (connect.Joined, connect.Left)
    assert set(types[1:-1]) <= {connect.Arrived}
    arrivals = [event.arrival for event in events if isinstance(event, connect.Arrived)]
    taken = [one for one in arrivals if one.status is WCStatus.SUCCESS]
    assert [one.index for one in taken] == list(range(1, len(taken) + 1))
    return [one.imm_data for one in taken]


def everything(reported: queue.Queue[connect.Event]) -> list[connect.Event]:
    """Return all events up to the one that a client has left."""
    events = [reported.get(timeout=SOON)]
    while not isinstance(events[-1], connect.Left):
        events.append(reported.get(timeout=SOON))
    return events


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_closing_server_reports_every_acknowledged_message(
    serve: Callable[..., Served], shared: bool
) -> None:
    served = serve(size=LARGE, shared=shared)
    with served.dial() as peer:
        load = Load(peer)
        served.server.close()
        load.join()
        assert load.failure is WCStatus.RETRY_EXC_ERR
    assert arrived(everything(served.events)) == list(range(load.successes))
    assert served.events.empty()


def test_every_acknowledged_message_is_reported_when_the_tcp_connection_breaks(
    serve: Callable[..., Served],
) -> None:
    served = serve(size=LARGE)
    with served.dial() as peer:
        load = Load(peer)
        assert peer._socket is not None
        peer._socket.shutdown(socket.SHUT_RDWR)
        load.join()
        assert load.failure is WCStatus.RETRY_EXC_ERR
    assert arrived(everything(served.events)) == list(range(load.successes))


def test_every_acknowledged_message_is_reported_when_a_client_closes_while_sending(
    serve: Callable[..., Served],
) -> None:
    served = serve(size=LARGE)
    with served.dial() as peer:
        load = Load(peer)
        peer.close()
        load.join()
    messages = arrived(everything(served.events))
    # The client may be closed before it has seen the last success.
    assert messages == list(range(len(messages)))
    assert len(messages) >= load.successes


def test_a_closing_server_reports_every_acknowledged_message_of_each_client(
    serve: Callable[..., Served],
) -> None:
    served = serve(size=LARGE, shared=True)
    peers = [served.dial() for _ in range(3)]
    loads = {peer.offer.client: Load(peer) for peer in peers}
    served.server.close()
    for load in loads.values():
        load.join()
    for peer in peers:
        peer.close()
    events = list(served.events.queue)
    for number, load in loads.items():
        of_client: list[Any] = [
            event for event in events if getattr(event, "client", None) == number
        ]
        assert arrived(of_client) == list(range(load.successes))


@pytest.mark.parametrize("cancels", [1, 2])
def test_every_acknowledged_message_is_reported_when_the_servers_task_is_cancelled(
    context: rp.Context, cancels: int
) -> None:
    """The second cancellation hits the server's close()."""
    events: list[connect.Event] = []

    async def host(started: asyncio.Future[connect.AsyncServer]) -> None:
        server = await connect.aserve(context, port=0, size=LARGE, on_event=events.append)
        async with server:
            started.set_result(server)
            await asyncio.Event().wait()

    async def main() -> tuple[connect.Connection, Load]:
        started = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(host(started))
        server = await started
        peer = await asyncio.to_thread(connect.dial, context, *server.address[:2])
        load = await asyncio.to_thread(Load, peer)
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.close()  # what the second cancellation cut short
        return peer, load

    peer, load = asyncio.run(main())
    with peer:
        load.join()
        assert load.failure is WCStatus.RETRY_EXC_ERR
    assert arrived(events) == list(range(load.successes))


def test_a_message_posted_in_on_event_while_the_server_closes_is_reported_or_fails(
    context: rp.Context,
) -> None:
    reported: queue.Queue[connect.Event] = queue.Queue()
    statuses: list[WCStatus] = []
    first = threading.Event()

    def send() -> None:
        peer.qp.post_send(rp.Send(peer.mr[:4]))
        statuses.append(peer.wait(timeout=LIMIT)[0].status)

    def on_event(event: connect.Event) -> None:
        reported.put(event)
        if isinstance(event, connect.Arrived) and event.arrival.status is WCStatus.SUCCESS:
            assert first.wait(LIMIT)
            # In on_event, close() only starts to close, and returns.
            server.close()
            if not any(statuses):
                send()

    with (
        connect.serve(context, port=0, on_event=on_event) as server,
        connect.dial(context, *server.address[:2]) as peer,
    ):
        send()
        first.set()
        events = everything(reported)
    assert statuses == [WCStatus.SUCCESS, WCStatus.SUCCESS, WCStatus.RETRY_EXC_ERR]
    assert len(arrived(events)) == 2


def test_a_closing_server_reports_more_messages_than_it_polls_at_once(context: rp.Context) -> None:
    count = 2000
    reported: queue.Queue[connect.Event] = queue.Queue()
    go_on = threading.Event()

    def on_event(event: connect.Event) -> None:
        reported.put(event)
        if isinstance(event, connect.Arrived):
            server.close()
            assert go_on.wait(LIMIT)

    with (
        connect.serve(context, port=0, count=count, size=64, on_event=on_event) as server,
        connect.dial(context, *server.address[:2]) as peer,
    ):
        for _ in range(count):
            peer.qp.post_send(rp.Send(peer.mr[:4]))
            peer.wait()[0].check()
        go_on.set()
        assert arrived(everything(reported)) == [None] * count


@pytest.mark.parametrize("ends", [rp.QP.close, rp.QP.to_reset])
def test_messages_are_reported_though_their_receives_cannot_be_reposted(
    context: rp.Context, ends: Callable[[rp.QP], None]
) -> None:
    """The owner of the server ends the queue pair of a client while messages are in the CQ."""
    reported: queue.Queue[connect.Event] = queue.Queue()
    first, go_on = threading.Event(), threading.Event()

    def on_event(event: connect.Event) -> None:
        reported.put(event)
        if isinstance(event, connect.Arrived) and event.arrival.index == 1:
            first.set()
            assert go_on.wait(LIMIT)
            ends(server.clients[0].qp)

    with (
        connect.serve(context, port=0, on_event=on_event) as server,
        connect.dial(context, *server.address[:2]) as peer,
    ):
        for _ in range(4):
            peer.qp.post_send(rp.Send(peer.mr[:4]))
            peer.wait()[0].check()
            assert first.wait(LIMIT)
        go_on.set()
        assert arrived(everything(reported)) == [None] * 4

"""How servers and connections end: interrupted, dropped, forked, and closed by others."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import gc
import logging
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from support import LIMIT, run_python, until
from support.serving import Served, both_servers, server_threads
from support.threads import posting, repeating

import rdmapost as rp
from rdmapost import connect
from rdmapost.tools.connect.acceptor import Acceptor
from rdmapost.tools.connect.served_client import ServedClient
from rdmapost.tools.tcp import name_of

serve = both_servers


@pytest.fixture
def context() -> Iterator[rp.Context]:
    """The test's own device, which it may close."""
    with rp.open_device("soft0") as opened:
        yield opened


class Interrupted(BaseException):
    pass


class Alarm:
    """Raises an exception in a signal handler, at most once for each set().

    Attributes:
        error: the exception.
        within: the name of the function that it interrupts; None for any.
    """

    def __init__(self) -> None:
        self._armed = False
        self.error: type[BaseException] = Interrupted
        self.within: str | None = None
        self._before = signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, signum: int, frame: types.FrameType | None) -> None:
        if not self._armed:
            return
        if self.within is not None and (frame is None or frame.f_code.co_name != self.within):
            self.set(0.01)
            return
        self._armed = False
        raise self.error

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


# ---- a connection ------------------------------------------------------------------------


def test_a_dropped_connection_releases_everything_at_once_with_one_warning(
    serve: Callable[..., Served],
) -> None:
    """Without the garbage collector, and with one warning."""
    served = serve()
    peer = served.dial()
    where, dropped = name_of(served.server.address), weakref.ref(peer)
    qp, mr = peer.qp, peer.mr
    qp.post_recv(rp.RecvWR(mr[:64]))
    peer.look()
    gc.disable()
    try:
        with pytest.warns(ResourceWarning) as warned:
            del peer
        messages = [str(one.message) for one in warned]
        # A recorded warning refers to its source, the connection.
        del warned
        assert dropped() is None
    finally:
        gc.enable()
    assert messages == [f"the connection to {where} was not closed"]
    assert qp.closed
    assert mr.closed
    assert served.until(connect.Left).reason == "disconnected without close()"


def test_asyncio_a_connection_dropped_in_another_thread_releases_everything(
    serve: Callable[..., Served],
) -> None:
    """Not only in the thread of the event loop."""
    served = serve()

    async def main() -> None:
        held = [await connect.adial(served.context, *served.server.address[:2])]
        await held[0].look()
        where, dropped, qp = name_of(served.server.address), weakref.ref(held[0]), held[0].qp
        with pytest.warns(ResourceWarning) as warned:
            await asyncio.to_thread(held.clear)
        messages = [str(one.message) for one in warned]
        del warned
        assert dropped() is None
        assert messages == [f"the connection to {where} was not closed"]
        assert qp.closed
        left = await asyncio.to_thread(served.until, connect.Left)
        assert left.reason == "disconnected without close()"

    asyncio.run(main())


def test_a_dropped_connection_in_a_reference_cycle_releases_everything(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    peer = served.dial()
    peer.qp.post_recv(rp.RecvWR(peer.mr[:64]))
    peer.itself = peer  # type: ignore[attr-defined]
    del peer
    with pytest.warns(ResourceWarning, match=r"the connection to .* was not closed"):
        gc.collect()
    assert served.until(connect.Left).reason == "disconnected without close()"


def test_a_connection_that_was_closed_or_refused_warns_of_nothing(
    serve: Callable[..., Served],
) -> None:
    """Nor does one that was never established."""
    served = serve(token="secret")
    where = (served.context, *served.server.address[:2])
    served.dial().close()
    with pytest.raises(connect.ConnectError, match="token"):
        served.dial(token="wrong")

    async def main() -> None:
        await (await connect.adial(*where, token="secret")).close()
        with pytest.raises(connect.ConnectError, match="token"):
            await connect.adial(*where, token="wrong")

    asyncio.run(main())
    gc.collect()


# ---- a server ---------------------------------------------------------------------


@pytest.mark.parametrize("clients", [0, 1])
def test_an_unreachable_server_ends_with_a_warning(context: rp.Context, clients: int) -> None:
    server = connect.serve(context, port=0)
    address, dropped = server.address, weakref.ref(server)
    peers = [connect.dial(context, *address) for _ in range(clients)]
    with pytest.warns(ResourceWarning, match=f"unclosed .*Server 127.0.0.1:{address[1]}"):
        del server
    assert dropped() is None
    until(lambda: not server_threads())
    for peer in peers:
        with pytest.raises(connect.ConnectError, match="the server is shutting down"):
            peer.look()
        peer.close()
    connect.serve(context, port=address[1]).close()
    context.close()


def test_asyncio_an_unreachable_server_ends_with_a_warning(context: rp.Context) -> None:
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


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("wrong")])
def test_exceptions_of_on_event_are_logged_and_end_no_thread(
    context: rp.Context, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the client's thread nor the one that accepts."""
    reported: queue.Queue[connect.Event] = queue.Queue()

    def on_event(event: connect.Event) -> None:
        reported.put(event)
        raise error

    with connect.serve(context, port=0, token="secret", on_event=on_event) as server:
        for _ in range(2):
            with pytest.raises(connect.ConnectError, match="token"):
                connect.dial(context, *server.address, token="wrong")
            with connect.dial(context, *server.address, token="secret") as peer:
                assert peer.look(0, 1).length == 1
        types = [type(reported.get(timeout=LIMIT)) for _ in range(6)]
    assert types == [connect.Refused, connect.Joined, connect.Left] * 2
    assert caplog.messages == ["on_event failed"] * 6
    assert {record.exc_info[1] for record in caplog.records if record.exc_info} == {error}


def test_on_event_may_close_its_server_when_a_message_arrives(context: rp.Context) -> None:
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


def test_a_device_refuses_to_close_under_a_server_without_clients(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    port = served.server.address[1]
    with pytest.raises(rp.InUseError, match=f"server 127.0.0.1:{port} still open"):
        served.context.close()
    served.works()
    served.server.close()
    served.context.close()
    assert served.context.closed


def test_server_says_whether_it_is_closed(serve: Callable[..., Served]) -> None:
    server = serve().server
    assert not server.closed
    server.close()
    assert server.closed


def test_close_all_closes_the_server_before_its_device(serve: Callable[..., Served]) -> None:
    """Its clients get the reason, and its port is free."""
    served = serve()
    with rp.open_device("soft0") as another:
        address = served.server.address[:2]
        with connect.dial(another, *address) as peer:
            served.until(connect.Joined)
            served.context.close_all()
            assert served.context.closed
            assert served.server.closed
            assert served.until(connect.Left).reason == "the server is shutting down"
            assert peer.closed
            with pytest.raises(connect.ConnectError, match="the server is shutting down"):
                peer.look()
        with pytest.raises(connect.ConnectError) as refused:
            connect.dial(another, *address)
        assert refused.value.code == "refused"
    assert server_threads() == []


def test_close_waits_for_the_thread_of_a_client_that_has_just_left(context: rp.Context) -> None:
    """A busy machine may stop a thread between its last cleanup and its end."""
    slow = threading.Event()

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code.co_name == "_serve_client":
            slow.set()
            threading.Event().wait(0.2)

    def on_event(event: connect.Event) -> None:
        if isinstance(event, connect.Joined):
            sys.setprofile(profile)

    with (
        rp.open_device("soft0") as another,
        connect.serve(context, port=0, on_event=on_event) as server,
    ):
        connect.dial(another, *server.address[:2]).close()
        assert slow.wait(LIMIT)
        server.close()
        assert server_threads() == []


def test_close_all_in_on_event_ends_the_server_too(context: rp.Context) -> None:
    done = threading.Event()

    def on_event(event: connect.Event) -> None:
        if isinstance(event, connect.Arrived):
            context.close_all()
            done.set()

    with rp.open_device("soft0") as another:
        server = connect.serve(context, port=0, on_event=on_event)
        with connect.dial(another, *server.address[:2]) as peer:
            peer.qp.post_send(rp.Send(peer.mr[:8]))
            assert done.wait(LIMIT)
            until(lambda: peer.closed)
    until(lambda: server_threads() == [])
    assert context.closed
    assert repr(server).endswith(" (closed)>")


def test_asyncio_close_all_in_the_event_loop_does_not_wait_for_on_connect(
    context: rp.Context,
) -> None:
    async def main() -> None:
        asked = asyncio.Event()

        async def on_connect(client: connect.ServedClient) -> None:
            asked.set()
            await asyncio.Event().wait()

        async with await connect.aserve(
            context, port=0, timeout=LIMIT, on_connect=on_connect
        ) as server:
            with rp.open_device("soft0") as another:
                dialing = asyncio.create_task(connect.adial(another, *server.address[:2]))
                async with asyncio.timeout(LIMIT):
                    await asked.wait()
                began = time.monotonic()
                context.close_all()
                assert time.monotonic() - began < LIMIT / 2
                assert server_threads() == []
                with pytest.raises(connect.ConnectError, match="the server is shutting") as refused:
                    await dialing
                assert refused.value.code == "closing"

    asyncio.run(main())


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
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.parametrize("what", ["server.close()", "del server", "sys.exit(0)"])
def test_a_child_cannot_end_its_parents_server(what: str) -> None:
    assert in_a_child(what) in ("did it", "")


@pytest.mark.parametrize("what", ["server.clients", "server.memory", "server.__enter__()"])
def test_a_child_cannot_use_its_parents_server(what: str) -> None:
    text = in_a_child("assert server.closed\n" + what)
    assert text.startswith("server 127.0.0.1:")
    assert re.search(r" was opened by process \d+; open the device again$", text)


@pytest.mark.parametrize("what", ["peer.close()", "del peer"])
def test_a_child_cannot_end_its_parents_connection(what: str) -> None:
    assert in_a_child(what) == "did it"


@pytest.mark.parametrize(
    "what", ["peer.look()", "peer.report()", "peer.target()", "peer.wait()", "peer.__enter__()"]
)
def test_a_child_cannot_use_its_parents_connection(what: str) -> None:
    assert " was opened by process " in in_a_child("assert peer.closed\n" + what)


FORK_IN_HANDLER = """
import logging, os, signal, sys, threading, time
import rdmapost as rp
from rdmapost import connect

ending, what = sys.argv[1:]
children = []

def fork(*_):
    children.append(os.fork())
    if not children[-1]:
        signal.alarm(20)
        if ending == "exits":
            sys.exit(0)

signal.signal(signal.SIGUSR1, fork)
main = threading.get_ident()

def handle(*_):
    if not children:
        signal.pthread_kill(main, signal.SIGUSR1)
    while not children:
        time.sleep(0.001)

class Listening(logging.Filter):
    def filter(self, record):
        # serve() warns of an address that others reach when it listens.
        signal.raise_signal(signal.SIGUSR1)
        return False

context, other = rp.open_device("soft0"), rp.open_device("soft0")
if what == "serve":
    logging.getLogger("rdmapost.connect").addFilter(Listening())
host = "0.0.0.0" if what == "serve" else "127.0.0.1"
answer = None
try:
    if what == "serve":
        server = connect.serve(context, host, 0)
    else:
        on_connect = handle if what == "dial" else None
        server = connect.serve(context, host, 0, on_connect=on_connect)
        peer = connect.dial(other, "127.0.0.1", server.address[1])
    if what == "report":
        threading.Timer(0.2, handle).start()
        answer = peer.report(1, 1.0)
except rp.ClosedError as error:
    assert children[-1] == 0
    print(error, flush=True)
    os._exit(0)
assert children[-1] > 0, "the child went on with what is its parent's"
assert os.waitstatus_to_exitcode(os.waitpid(children[-1], 0)[1]) == 0
assert answer is None
if what != "serve":
    assert peer.look(0, 4).data == bytes(4)
    peer.close()
connect.dial(other, "127.0.0.1", server.address[1]).close()
server.close()
"""


@pytest.mark.parametrize("what", ["serve", "dial", "report"])
@pytest.mark.parametrize("ending", ["goes on", "exits"])
def test_child_forked_by_a_signal_handler_leaves_the_parents_connections_alone(
    ending: str, what: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", FORK_IN_HANDLER, ending, what],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("was opened by process" in done.stdout) == (ending == "goes on")


# ---- interrupted requests -------------------------------------------------------------


@pytest.mark.parametrize("error", [Interrupted, TimeoutError, OSError])
@pytest.mark.parametrize("question", ["report", "look"])
def test_an_interrupted_request_leaves_the_connection_usable(
    serve: Callable[..., Served], alarm: Alarm, question: str, error: type[BaseException]
) -> None:
    """An OSError from a signal handler is not taken for an error of the connection."""
    alarm.error = error
    # Not while the request is sent: then it is unknown how much was.
    alarm.within = "_receive"
    size = 1 << 28 if question == "look" else 4096
    served = serve(size=size)
    with served.dial(timeout=LIMIT) as peer:
        alarm.set(0.05)
        with pytest.raises(error) as caught:
            peer.look() if question == "look" else peer.report(1, LIMIT)
        assert type(caught.value) is error
        assert not peer.closed
        began = time.monotonic()
        assert peer.look(3, 5).offset == 3
        assert time.monotonic() - began < LIMIT / 2
        peer.qp.post_send(rp.Send(peer.mr[:7]))
        arrival = peer.report(1)
        assert arrival is not None
        assert arrival.byte_len == 7
        assert not peer.closed
    assert served.until(connect.Left).reason == "done"


def test_report_from_a_server_without_receives_says_that_the_connection_is_closed(
    serve: Callable[..., Served],
) -> None:
    served = serve(count=0)
    with served.dial() as peer:
        assert peer.report() is None
        served.server.close()
        with pytest.raises(connect.ConnectError, match="the server is shutting down"):
            peer.report()
    with pytest.raises(connect.ConnectError, match="the connection is closed"):
        peer.report()


def test_a_late_answer_does_not_make_a_connection_look_closed(
    serve: Callable[..., Served], alarm: Alarm
) -> None:
    served = serve()
    with served.dial(timeout=LIMIT) as peer:
        alarm.set(0.05)
        with pytest.raises(Interrupted):
            peer.report(1, LIMIT)
        peer.qp.post_send(rp.Send(peer.mr[:7]))
        served.until(connect.Arrived)
        # The late answer comes now.
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            assert not peer.closed
        assert peer.report(2, timeout=0) is None
        alarm.set(0.05)
        with pytest.raises(Interrupted):
            peer.report(2)
        served.server.close()
        until(lambda: peer.closed)
        with pytest.raises(connect.ConnectError, match="the server is shutting down"):
            peer.look()


@pytest.mark.parametrize("question", ["report", "look"])
def test_asyncio_a_cancelled_request_leaves_the_connection_usable(
    serve: Callable[..., Served], question: str
) -> None:
    served = serve(size=1 << 28 if question == "look" else 4096)

    async def main() -> None:
        address = served.server.address[:2]
        async with await connect.adial(served.context, *address, timeout=LIMIT) as peer:
            asked = peer.look() if question == "look" else peer.report(1, LIMIT)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asked, 0.05)
            assert not peer.closed
            assert (await peer.look(3, 5)).offset == 3
            peer.qp.post_send(rp.Send(peer.mr[:7]))
            arrival = await peer.report(1)
            assert arrival is not None
            assert arrival.byte_len == 7
            assert not peer.closed

    asyncio.run(main())
    assert served.until(connect.Left).reason == "done"


# ---- closed while another asks ----------------------------------------------------------


def test_close_ends_the_request_of_another_thread(serve: Callable[..., Served]) -> None:
    served = serve()
    peer = served.dial()
    messages: list[Any] = []

    def ask() -> None:
        try:
            messages.append(peer.report(1, timeout=60))
        except connect.ConnectError as error:
            messages.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for one in threads:
        one.start()
    until(lambda: len(peer._turns) == 3)
    began = time.monotonic()
    peer.close()
    for one in threads:
        one.join(LIMIT)
    assert time.monotonic() - began < 30
    assert messages[0] == "the connection was closed before the answer came"
    assert set(messages[1:]) == {"the connection is closed"}
    assert served.until(connect.Left).reason == "done"


def test_asyncio_close_ends_the_request_of_another_task(serve: Callable[..., Served]) -> None:
    served = serve()

    async def main() -> None:
        peer = await connect.adial(served.context, *served.server.address[:2])
        asking = asyncio.create_task(peer.report(1, timeout=60))
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await peer.close()
            with pytest.raises(connect.ConnectError, match="closed before the answer came"):
                await asking

    asyncio.run(main())
    assert served.until(connect.Left).reason == "done"


# ---- arguments --------------------------------------------------------------------------

REPORTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"index": 0}, ValueError, "index=0 is not in 1"),
    ({"index": 1 << 64}, ValueError, r"index=18446744073709551616 is not in 1\.\.2\^64-1"),
    ({"index": 1.5}, TypeError, "index: expected int, got float"),
    ({"index": "1"}, TypeError, "index: expected int, got str"),
    ({"timeout": float("nan")}, ValueError, "timeout: expected seconds or None, got NaN"),
    ({"timeout": "1"}, TypeError, "timeout: expected seconds or None, got str"),
]
LOOKS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"offset": -1}, ValueError, "offset=-1 is not within the 4096 bytes"),
    ({"offset": 5000}, ValueError, "offset=5000 is not within the 4096 bytes"),
    ({"offset": 1.5}, TypeError, "offset: expected int, got float"),
    ({"offset": None}, TypeError, "offset: expected int, got NoneType"),
    ({"length": -1}, ValueError, "length=-1 is not in 0"),
    ({"length": 1 << 64}, ValueError, r"\[0:18446744073709551616\] is not within"),
    ({"length": 1.5}, TypeError, "length: expected int, got float"),
]


@pytest.mark.parametrize(
    ("question", "arguments", "error", "text"),
    [("report", *one) for one in REPORTS] + [("look", *one) for one in LOOKS],
)
def test_report_and_look_refuse_a_wrong_argument_before_anything_is_sent(
    context: rp.Context, question: str, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with connect.serve(context, port=0) as server:
        with connect.dial(context, *server.address) as peer:
            with pytest.raises(error, match=text):
                getattr(peer, question)(**arguments)
            assert peer.look(0, True).data == b"\0"
            assert peer.report(True, timeout=-1.0) is None

        async def main() -> None:
            async with await connect.adial(context, *server.address) as peer:
                with pytest.raises(error, match=text):
                    await getattr(peer, question)(**arguments)
                assert (await peer.look(0, True)).data == b"\0"
                assert await peer.report(True, timeout=-1.0) is None

        asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("max_clients", 0, ValueError),
        ("max_clients", (1 << 16) + 1, ValueError),
        ("max_clients", 1 << 64, ValueError),
        ("max_clients", float("nan"), TypeError),
        ("on_event", "x", TypeError),
    ],
)
def test_serve_names_the_argument_that_is_wrong(
    context: rp.Context, name: str, value: object, error: type[Exception]
) -> None:
    options: dict[str, Any] = {"port": 0, name: value}
    with pytest.raises(error, match=name):
        connect.serve(context, **options)

    async def main() -> None:
        with pytest.raises(error, match=name):
            await connect.aserve(context, **options)

    asyncio.run(main())


@pytest.mark.parametrize(("size", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_dial_refuses_a_local_size_that_is_negative_or_not_an_integer(
    context: rp.Context, size: Any, error: type[Exception]
) -> None:
    with connect.serve(context, port=0) as server, pytest.raises(error, match="local_size"):
        connect.dial(context, *server.address, local_size=size)


@pytest.mark.parametrize(
    ("offset", "error"),
    [(-1, ValueError), (8192, ValueError), (1 << 64, ValueError), (1.5, TypeError)],
)
def test_target_refuses_an_offset_outside_the_exposed_memory(
    context: rp.Context, offset: Any, error: type[Exception]
) -> None:
    served = connect.serve(context, port=0, size=8192)
    with served as server, connect.dial(context, *server.address) as peer:
        assert peer.target(8191)["remote_addr"] == peer.offer.addr + 8191
        with pytest.raises(error, match="offset"):
            peer.target(offset)
        with pytest.raises(TypeError, match=r"^Connection\.target\(\) takes"):
            peer.target(0, 5)  # type: ignore[call-arg]


def test_target_of_a_datagram_connection_is_refused_and_names_address(
    serve: Callable[..., Served],
) -> None:
    says = r"UD queue pairs cannot .*: send with \*\*address$"
    with serve().dial(qp_type=rp.QPType.UD) as peer, pytest.raises(ValueError, match=says):
        peer.target()


def test_parse_address_refuses_what_is_not_text() -> None:
    text: Any = None
    with pytest.raises(TypeError, match="text: expected str, got NoneType"):
        connect.parse_address(text)


@pytest.mark.parametrize("access", [-1, 1 << 60])
def test_mr_refuses_bits_that_are_not_access_flags(context: rp.Context, access: int) -> None:
    with rp.PD(context) as pd, pytest.raises(ValueError, match="not a combination of Access flags"):
        rp.MR(pd, 64, access)


@pytest.mark.parametrize("client", ["threads", "asyncio"])
def test_connection_that_only_a_module_refers_to_is_silent_at_exit(client: str) -> None:
    """It is finalized when modules have been cleared; the kernel closes the TCP connection."""
    ended = run_python(
        """
import asyncio, sys, rdmapost as rp
from rdmapost import connect

class Holder: ...

context = rp.open_device("soft0")
server = connect.serve(context, port=0)
holder, loop = Holder(), asyncio.new_event_loop()
holder.me, holder.loop, holder.rp = holder, loop, rp
if sys.argv[1] == "threads":
    holder.peer = connect.dial(context, *server.address[:2])
else:
    holder.peer = loop.run_until_complete(connect.adial(context, *server.address[:2]))
rp.connect.holder = holder
server.close()

def report(unraisable):
    if not isinstance(unraisable.exc_value, ResourceWarning):
        sys.__unraisablehook__(unraisable)

sys.unraisablehook = report
del holder, loop
""",
        client,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("region", ["its own", "the caller's"])
def test_thread_that_posts_while_its_connection_is_closed_is_told_so(
    serve: Callable[..., Served], context: rp.Context, region: str
) -> None:
    served = serve()
    with rp.PD(context) as pd, rp.MR(pd, 4096) as mr:
        for _ in range(20):
            peer = served.dial(**({} if region == "its own" else {"mr": mr}))
            with posting(peer.qp, peer.mr) as raised:
                peer.close()
            assert [type(error) for error in raised] == [rp.ClosedError]


@pytest.mark.parametrize("memory", ["its own", "the caller's"])
def test_thread_that_creates_regions_all_the_time_does_not_keep_its_connection_open(
    serve: Callable[..., Served], context: rp.Context, memory: str
) -> None:
    served = serve()
    for _ in range(10):
        pd = rp.PD(context)
        mr = rp.MR(pd, 64)
        peer = served.dial(**({} if memory == "its own" else {"mr": mr}))
        with repeating(partial(peer.region, 64)) as raised:
            peer.close()
        assert [type(error) for error in raised] == [rp.ClosedError]
        with pytest.raises(rp.ClosedError):
            peer.region(64)
        # Nothing of the connection's is left on it.
        mr.close()
        pd.close()


# ---- what the caller creates on a connection's own PD ----------------------------------


def test_close_closes_what_was_created_on_the_connections_pd(serve: Callable[..., Served]) -> None:
    """As close_all() does: a UD peer's address handles, for instance, do not keep the PD open."""
    served = serve()
    peer = served.dial(qp_type=rp.QPType.UD)
    (client,) = served.server.clients
    pds = peer.qp.pd, client.qp.pd
    made = [
        peer.qp.ah_to(client.offer.endpoint),
        rp.MR(peer.qp.pd, 64),
        client.qp.ah_to(peer.qp.endpoint()),
    ]
    peer.close()
    assert served.until(connect.Left).reason == "done"
    assert all(one.closed for one in (*made, *pds))


def test_asyncio_close_closes_what_was_created_on_the_connections_pd(
    serve: Callable[..., Served],
) -> None:
    served = serve()

    async def main() -> None:
        peer = await connect.adial(served.context, *served.server.address[:2], qp_type=rp.QPType.UD)
        ah = peer.qp.ah_to(peer.offer.endpoint)
        await peer.close()
        assert ah.closed
        assert peer.qp.pd.closed

    asyncio.run(main())


def test_close_leaves_resources_on_the_callers_pd_open(serve: Callable[..., Served]) -> None:
    served = serve()
    with rp.PD(served.context) as pd, rp.MR(pd, 64, rp.Access.LOCAL_WRITE) as mr:
        peer = served.dial(qp_type=rp.QPType.UD, mr=mr)
        with peer.qp.ah_to(peer.offer.endpoint) as ah:
            peer.close()
            assert peer.qp.closed
            assert not ah.closed


def test_a_dropped_connection_leaves_open_what_the_caller_still_has(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    peer = served.dial(qp_type=rp.QPType.UD)
    ah = peer.qp.ah_to(peer.offer.endpoint)
    pd = ah.pd
    with pytest.warns(ResourceWarning, match="was not closed"):
        del peer
    assert not ah.closed
    ah.close()
    del ah
    pd.close()


@pytest.mark.parametrize("side", ["client", "server"])
def test_resource_whose_close_fails_keeps_nothing_else_of_a_connection_open(
    context: rp.Context, side: str
) -> None:
    """The resource is of a caller's subclass, and is on the connection's own PD."""

    class Bad(rp.MW):
        fails = True

        def close(self) -> None:
            if self.fails:
                raise ValueError("mine")
            super().close()

    clients: list[connect.ServedClient] = []
    with connect.serve(context, port=0, on_connect=clients.append) as server:
        peer = connect.dial(context, *server.address[:2])
        (client,) = clients
        bad = Bad(peer.qp.pd if side == "client" else client.qp.pd)
        with contextlib.suppress(rp.RdmaError):
            peer.close()
    ends = (peer, client)
    assert [(end.qp.closed, end.mr.closed) for end in ends] == [(True, True)] * 2
    bad.fails = False
    context.close_all()


def test_server_without_memory_for_a_moment_serves_the_next_client(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [MemoryError(), SystemError("error return without exception set")]
    real = Acceptor._poll

    def poll(acceptor: Acceptor) -> bool:
        if failures:
            raise failures.pop()
        return real(acceptor)

    monkeypatch.setattr(Acceptor, "_poll", poll)
    with connect.serve(context, port=0) as server:
        until(lambda: not failures)
        with connect.dial(context, *server.address[:2]) as peer:
            assert peer.look(0, 4).length == 4
        assert not server.closed


def test_server_whose_acceptor_has_failed_is_closed(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Acceptor) -> bool:
        raise RuntimeError("as a test wants")

    monkeypatch.setattr(sys, "unraisablehook", lambda error: None)
    monkeypatch.setattr(Acceptor, "_poll", fail)
    with connect.serve(context, port=0) as server:
        until(lambda: server.closed)


def test_client_whose_thread_dies_before_it_begins_is_refused_and_the_next_one_is_served(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = die_before_they_begin(monkeypatch, "_serve_client", 1)
    with connect.serve(context, port=0) as server:
        with pytest.raises(connect.ConnectError):
            connect.dial(context, *server.address[:2])
        assert deaths == ["_serve_client"]
        with connect.dial(context, *server.address[:2]) as peer:
            assert peer.look(0, 4).length == 4


@pytest.mark.parametrize("function", ["_start_threads", "_accept"])
def test_serve_raises_where_a_thread_dies_before_it_begins(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    deaths = die_before_they_begin(monkeypatch, function, 1)
    began = time.monotonic()
    with pytest.raises(rp.RdmaError, match="cannot start a thread for the server"):
        connect.serve(context, port=0)
    assert deaths == [function]
    assert time.monotonic() - began < 5
    context.close()


def die_before_they_begin(monkeypatch: pytest.MonkeyPatch, function: str, count: int) -> list[str]:
    """Let threads that would call a function die first, like threads without memory for a frame."""
    start, deaths = _thread.start_new_thread, []

    def start_or_die(call: Callable[..., None], args: tuple[Any, ...]) -> int:
        called = getattr(call, "args", [None])[0]
        if getattr(called, "__name__", "") == function and len(deaths) < count:
            deaths.append(function)
            return start(id, (call,))
        return start(call, args)

    monkeypatch.setattr(_thread, "start_new_thread", start_or_die)
    return deaths


@pytest.mark.parametrize("failing", ["stop", "close"])
def test_client_that_is_released_without_memory_frees_its_place(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    failures = 0
    works = getattr(ServedClient, failing)

    def fail_at_first(client: ServedClient) -> Any:
        nonlocal failures
        failures += 1
        if failures < 3:
            raise MemoryError
        return works(client)

    def cannot_log(*_: object) -> None:
        raise MemoryError

    with connect.serve(context, port=0, max_clients=1) as server:
        peer = connect.dial(context, *server.address[:2])
        monkeypatch.setattr(ServedClient, failing, fail_at_first)
        monkeypatch.setattr(logging.getLogger("rdmapost.connect"), "exception", cannot_log)
        with contextlib.suppress(connect.ConnectError):
            peer.close()
        until(lambda: not server.clients and failures >= 3)
        with connect.dial(context, *server.address[:2]) as peer:
            assert peer.look(0, 4).length == 4

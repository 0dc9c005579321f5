"""Ping-pong with peers that are absent, leave, differ or speak another protocol."""

from __future__ import annotations

import contextlib
import mmap
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support import LIMIT, kernel
from support.pingpong_runs import MESSAGE, TYPES, Ends, run_pair
from support.ports import HOST, free_port, impostor, read_to_end
from support.roce import open_roce
from support.threads import thread

import rdmapost as rp
from rdmapost import QPType, connect
from rdmapost.pingpong import Address, Pingpong, PingpongError, Result, listen
from rdmapost.tools.pingpong.handshake import DONE, HandshakeConnection
from rdmapost.tools.pingpong.payload import fill, what_is_wrong


def drip(sock: socket.socket) -> None:
    """Send the right bytes slowly: each within the time limit, but not the whole message."""
    with contextlib.suppress(ConnectionError):
        for byte in MESSAGE:
            sock.sendall(bytes((byte,)))
            time.sleep(0.05)


def answer(message: bytes) -> Callable[[socket.socket], None]:
    def act(sock: socket.socket) -> None:
        sock.sendall(message)
        read_to_end(sock)

    return act


BAD_SERVERS = {
    "closes": (lambda sock: sock.recv(52), r"closed the connection.* instead of sending its addr"),
    "half": (
        lambda sock: (sock.recv(52), sock.sendall(MESSAGE[:20])),
        r"instead of sending its address \(20 of 52 bytes came\)",
    ),
    "silent": (read_to_end, r"did not send its address within 0\.5 s"),
    "drips": (drip, r"did not send its address \(\d+ of 52 bytes came\) within 0\.5 s"),
    "garbage": (answer(b"220 mail ESMTP\r\n"), r"does not speak .*: got b'220 mail ESMTP"),
    "no gid": (
        answer(b"0000:000011:abcdef:" + 32 * b"0" + b"\0"),
        "sent no GID, which Ethernet .* needs: start it with -g INDEX",
    ),
}


@pytest.mark.parametrize("fault", BAD_SERVERS)
def test_a_client_names_what_is_wrong_with_its_server(context, fault):
    does, why = BAD_SERVERS[fault]
    with (
        impostor(does) as (_, port),
        Pingpong(context, timeout=0.5) as side,
        pytest.raises(PingpongError, match=why) as error,
    ):
        side.run_client(HOST, port)
    assert f"{HOST}:{port}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", r"did not send its address within 0\.5 s"),
        (MESSAGE[:9], r"did not send its address \(9 of 52 bytes came\) within 0\.5 s"),
        (b"GET / HTTP/1.0\r\n", "does not speak ibv_rc_pingpong's protocol"),
        (MESSAGE[:19] + 32 * b"0" + b"\0", "sent no GID"),
        (MESSAGE, r'did not send "done" within 0\.5 s'),
        (MESSAGE + b"d", r'did not send "done" within 0\.5 s'),
        (MESSAGE + b"nope!", 'does not speak .* got .* instead of "done"'),
        # The client leaves without sending anything.
        (None, r"closed the connection.* instead of sending its address$"),
        # The client completes the handshake, and then does nothing.
        (MESSAGE + DONE, r"no message from .* within 0\.5 s, from the start"),
    ],
)
def test_a_server_names_what_is_wrong_with_its_client(context, sent, why):
    if sent is not None and sent[12:18] == b"abcdef" and sent[19:51] != 32 * b"0":
        # The server's queue pair must be connected to something that it can reach.
        gid = context.choose_gid().gid.hex().encode()
        sent = sent[:19] + gid[: max(0, len(sent) - 19)] + sent[51:]
    with (
        listen(HOST, 0) as listener,
        Pingpong(context, timeout=0.5) as side,
        socket.create_connection(listener.getsockname()[:2]) as sock,
    ):
        if sent is None:
            sock.close()
        else:
            sock.sendall(sent)
        with pytest.raises(PingpongError, match=why):
            side.run_server(listener, timeout=5)


def test_a_client_that_reaches_a_server_of_connect_says_what_to_run(context):
    refused = queue.Queue()
    with (
        connect.serve(context, HOST, 0, on_event=refused.put) as server,
        Pingpong(context) as side,
        pytest.raises(PingpongError) as error,
    ):
        side.run_client(*server.address)
    assert str(error.value) == (
        f"{server}: it is 'rdmapost serve': run 'rdmapost pingpong' there, or 'rdmapost send' here"
    )
    event = refused.get(timeout=LIMIT)
    assert isinstance(event, connect.Refused)
    assert event.text.startswith("it speaks the protocol of 'rdmapost pingpong' and ibv_rc_ping")


def test_a_server_that_a_client_of_connect_reaches_tells_it_what_to_run(context):
    """Both sides say it, each from its own point of view."""
    with listen(HOST, 0) as listener, Pingpong(context) as side:
        port = listener.getsockname()[1]
        with (
            thread(lambda: side.run_server(listener, timeout=LIMIT)) as raised,
            pytest.raises(connect.ConnectError) as error,
        ):
            connect.dial(context, HOST, port)
    assert str(error.value) == (
        f"{HOST}:{port} refused: it is 'rdmapost pingpong': run 'rdmapost serve' there, or "
        "'rdmapost pingpong' here"
    )
    (ended,) = raised
    assert isinstance(ended, PingpongError)
    assert str(ended).endswith(
        ": it is a client of 'rdmapost serve': run that here, or 'rdmapost pingpong' there"
    )


def test_a_peer_whose_queue_pair_does_not_exist_is_reported(context):
    """The handshake succeeds, but no message is acknowledged."""
    address = Address(0, 0xFFFFF0, 1, context.choose_gid().gid)
    why = r"does not answer, from the start \(RETRY_EXC_ERR\): check that both sides' GIDs"
    with (
        impostor(answer(address.encode())) as (_, port),
        Pingpong(context, timeout=20) as side,
        pytest.raises(PingpongError, match=why),
    ):
        side.run_client(HOST, port)


def test_run_client_says_to_start_the_server_where_nothing_listens(context):
    why = r"cannot connect to .* refused; start the server"
    with Pingpong(context, timeout=5) as side, pytest.raises(PingpongError, match=why):
        side.run_client(HOST, free_port())


def test_run_client_says_that_a_link_local_address_needs_its_interface(context):
    with (
        Pingpong(context, timeout=5) as side,
        pytest.raises(PingpongError, match=r"cannot connect to .* as in fe80::1%eth0$"),
    ):
        side.run_client("fe80::1")


def test_run_client_names_a_host_that_cannot_be_found(context):
    why = r"host no\.such\.host\.invalid cannot be found"
    with Pingpong(context, timeout=5) as side, pytest.raises(PingpongError, match=why):
        side.run_client("no.such.host.invalid")


def test_run_server_says_that_no_client_came_in_time(context):
    why = r"no client connected to 127\.0\.0\.1:\d+ within 0\.2 s"
    with (
        Pingpong(context) as side,
        listen(HOST, 0) as listener,
        pytest.raises(PingpongError, match=why),
    ):
        side.run_server(listener, timeout=0.2)


class Watched(socket.socket):
    """A listening socket that tells when somebody accepts, and when it is closed."""

    def __init__(self) -> None:
        super().__init__(fileno=listen(HOST, 0).detach())
        self.asked, self.ended = threading.Event(), threading.Event()

    def accept(self):
        self.asked.set()
        return super().accept()

    def close(self):
        super().close()
        self.ended.set()


def closed_while_it_waits(
    run: Callable[[], object], waits: threading.Event, close: Callable[[], object]
) -> BaseException | None:
    """Run one side in a thread, close it once it waits, and return what the run raised."""
    with thread(run) as raised:
        assert waits.wait(LIMIT)
        close()
    return raised.pop() if raised else None


CLOSES = pytest.mark.parametrize("what", ["pingpong", "device"])


@CLOSES
@pytest.mark.parametrize("timeout", [None, 10 * LIMIT])
def test_closing_ends_a_servers_wait_for_its_client(what, timeout):
    with rp.open_device("soft0") as context, Watched() as listener:
        side = Pingpong(context)
        close = side.close if what == "pingpong" else context.close_all
        error = closed_while_it_waits(
            lambda: side.run_server(listener, timeout=timeout), listener.asked, close
        )
        assert isinstance(error, rp.ClosedError)


@CLOSES
@pytest.mark.parametrize("sent", [b"", MESSAGE], ids=["address", "done"])
def test_closing_ends_a_servers_wait_for_a_message(what, sent):
    with rp.open_device("soft0") as context, Watched() as listener:
        side = Pingpong(context, timeout=10 * LIMIT)
        address = listener.getsockname()
        gid = context.choose_gid().gid.hex().encode()
        waits = threading.Event()

        def run() -> None:
            side.run_server(listener, timeout=LIMIT)

        def connect() -> None:
            # The listener is closed once the client has connected.
            with socket.create_connection(address, LIMIT) as sock:
                if sent:
                    sock.sendall(sent[:19] + gid + b"\0")
                    sock.recv(52)
                else:
                    assert listener.ended.wait(LIMIT)
                waits.set()
                read_to_end(sock)

        client = threading.Thread(target=connect)
        client.start()
        close = side.close if what == "pingpong" else context.close_all
        error = closed_while_it_waits(run, waits, close)
        client.join(LIMIT)
        assert isinstance(error, rp.ClosedError)


@CLOSES
def test_closing_ends_a_clients_wait_for_its_server(what):
    waits = threading.Event()

    def silent(sock: socket.socket) -> None:
        sock.recv(52)
        waits.set()
        read_to_end(sock)

    with rp.open_device("soft0") as context, impostor(silent) as (_, port):
        side = Pingpong(context, timeout=10 * LIMIT)
        close = side.close if what == "pingpong" else context.close_all
        error = closed_while_it_waits(lambda: side.run_client(HOST, port), waits, close)
        assert isinstance(error, rp.ClosedError)


def test_listen_names_a_port_in_use_and_an_address_of_another_machine():
    in_use = r"cannot listen on 127\.0\.0\.1:\d+: Address already"
    with listen(HOST, 0) as first, pytest.raises(PingpongError, match=in_use):
        listen(HOST, first.getsockname()[1])
    with pytest.raises(PingpongError, match=r"cannot listen on 203\.0\.113\.7:0: Cannot assign"):
        listen("203.0.113.7", 0)


def test_listen_accepts_on_every_address_by_default():
    with listen(None, 0) as listener:
        for host in (HOST, "127.0.0.2"):
            socket.create_connection((host, listener.getsockname()[1]), 5).close()


def test_a_validating_server_reports_a_client_that_does_not_mark_pages(context):
    ends = run_pair(context, iters=5, server={"validate": True})
    assert isinstance(ends.client, Result)
    assert isinstance(ends.server, PingpongError)
    assert "the data is wrong: 1 of 4096 bytes, the first at 0: 0x7b, not 0x00" in str(ends.server)
    assert "does the client validate" in str(ends.server)


@pytest.mark.parametrize("is_server", [False, True])
def test_each_changed_byte_of_the_data_is_found_and_named(is_server):
    """Every byte is checked, not only those that the stock programs mark."""
    size = 3 * mmap.PAGESIZE
    sent = bytearray(size)
    fill(memoryview(sent), marked=True)
    assert what_is_wrong(bytes(sent), is_server=is_server) == ""
    for at in (1, size // 2 + 1, size - 1):
        found = bytearray(sent)
        found[at] ^= 1
        wrong = what_is_wrong(bytes(found), is_server=is_server)
        assert f"1 of {size} bytes, the first at {at}: 0x7a" in wrong


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the handshake of the stock programs, which does not compare options."""
    monkeypatch.setattr(HandshakeConnection, "compare", lambda self, mine: False)


@pytest.fixture
def packets(context: rp.Context) -> Iterator[rp.Context]:
    """A device with packets, and so a path MTU: roce in place of soft0."""
    if context.name != "soft0":
        yield context
        return
    with open_roce("roce:lo") as roce:
        yield roce


RC_UC = {"qp_type": QPType.RC}, {"qp_type": QPType.UC}
UD_RC = {"qp_type": QPType.UD, "size": 64}, {"qp_type": QPType.RC, "size": 64}
MTUS = {"mtu": rp.MTU.MTU_512}, {"mtu": rp.MTU.MTU_1024}
SIZES = {"size": 64}, {"size": 4096}
DIFFER = pytest.mark.parametrize(
    ("here", "there"),
    [(a, b) for pair in (RC_UC, UD_RC, MTUS, SIZES) for a, b in (pair, pair[::-1])],
    ids=str,
)


def shown(options: dict[str, object], other: dict[str, object]) -> str:
    """Name the options that differ, as the errors do."""
    different = {name: value for name, value in options.items() if other[name] != value}
    return ", ".join(
        f"{name}={value.bytes if isinstance(value, rp.MTU) else getattr(value, 'name', value)}"
        for name, value in different.items()
    )


@DIFFER
def test_two_sides_whose_options_differ_name_them_before_they_begin(context, here, there):
    began = time.monotonic()
    ends = run_pair(context, iters=5, client=here, server=there, timeout=LIMIT)
    mine, theirs = shown(here, there), shown(there, here)
    for end, (its, others) in ((ends.client, (mine, theirs)), (ends.server, (theirs, mine))):
        assert isinstance(end, PingpongError)
        assert re.fullmatch(
            rf"127.0.0.1:\d+ has {others}, and this side has {its}: give both sides the same",
            str(end),
        )
    assert time.monotonic() - began < LIMIT / 2


def test_different_numbers_of_messages_are_named(context):
    ends = run_pair(context, client={"iters": 5}, server={"iters": 6})
    assert "has iters=6, and this side has iters=5" in str(ends.client)
    assert "has iters=5, and this side has iters=6" in str(ends.server)


@DIFFER
def test_options_that_differ_from_a_stock_programs_are_likely_causes(packets, stock, here, there):
    if packets.kind == "verbs" and here.keys() == {"mtu"} and kernel().startswith("6.1."):
        pytest.skip(f"{packets.name} has no check of a message's packets against the path MTU")
    ends = run_pair(packets, iters=5, client=here, server=there, timeout=1.0)
    for end, options in ((ends.client, here), (ends.server, there)):
        assert isinstance(end, PingpongError)
        for option in shown(options, there if options is here else here).split(", "):
            # "mtu=512", or "size and mtu; here they are 4096 and 512".
            name, value = option.split("=")
            assert name in str(end)
            assert value in str(end)
        assert re.search("give both (sides )?the same", str(end))
        assert ("path MTU" in str(end)) <= (options.get("qp_type") is not QPType.UD)
        assert "\n" not in str(end)


def test_a_peer_that_has_answered_is_not_said_to_differ(context, stock):
    """It leaves in the middle of the run, with the same options but fewer messages."""
    ends = run_pair(context, client={"iters": 500, "timeout": 2.0}, server={"iters": 50})
    assert "differ" not in str(ends.client)


@TYPES
def test_a_peer_that_leaves_in_the_middle_of_a_run_is_reported(context, stock, qp_type):
    """It sends fewer messages, and leaves."""
    ends = run_pair(context, qp_type, client={"iters": 500, "timeout": 2.0}, server={"iters": 50})
    assert isinstance(ends.server, Result)
    assert isinstance(ends.client, PingpongError)
    text = str(ends.client)
    assert "after 50 of 500 messages" in text
    assert "it has died, " in text
    assert "\n" not in text
    if qp_type is not QPType.RC:
        assert f"a message was lost, which {qp_type.name} does not repeat" in text


def test_peer_whose_memory_goes_while_a_message_arrives_is_reported_as_dead(soft):
    """Soft-RoCE ends the send with REM_OP_ERR if the peer is killed at that moment."""
    with rp.open_device(soft) as context:
        context.faults.complete_with(2, rp.WCStatus.REM_OP_ERR)  # the client's first message
        ends = run_pair(context, iters=5, server={"timeout": 0.5})
    assert isinstance(ends.client, PingpongError)
    assert re.fullmatch(
        rf"{HOST}:\d+ could not accept a message, from the start \(REM_OP_ERR\): "
        "it has died, or its device failed",
        str(ends.client),
    )
    assert isinstance(ends.server, PingpongError)


def test_an_interrupted_side_releases_everything_and_the_other_reports_that_it_died(
    context, monkeypatch
):
    context = rp.open_device(context.name)
    monkeypatch.setattr("rdmapost.tools.pingpong.side._PROGRESS_EVERY_NS", 1_000_000)
    options = {"events": True, "iters": 1 << 30, "timeout": 2.0}
    ends = Ends()

    def press(count: int) -> None:
        if count > 10:
            raise KeyboardInterrupt

    with listen(HOST, 0) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            with Pingpong(context, **options) as side:
                try:
                    ends.server = side.run_server(listener, timeout=20)
                except PingpongError as error:
                    ends.server = error

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(KeyboardInterrupt), Pingpong(context, **options) as side:
            side.run_client(HOST, port, progress=press)
        thread.join(30)
    # Raises InUseError while something is left open.
    context.close()
    assert re.search(rf"after \d+ of {1 << 30} messages.*: it has died", str(ends.server))

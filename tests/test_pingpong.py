"""Ping-pong: its exchange with garbage of every kind, its runs, and peers that go or differ."""

from __future__ import annotations

import contextlib
import mmap
import random
import re
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rdmapost as rp
from rdmapost import MTU, QPType
from rdmapost.pingpong import Address, Latency, Pingpong, PingpongError, Result, listen
from rdmapost.pingpong.exchange import DONE, Exchange, Line, name_of

HOST = "127.0.0.1"
TYPES = pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD], ids=lambda t: t.name)
MESSAGE = b"0000:000011:abcdef:00000000000000000000ffff0a000001\0"
"""What ibv_rc_pingpong sends for QP 0x11 with the GID ::ffff:10.0.0.1."""


IN_ONE_PROCESS = {"events": True, "timeout": 20.0}
"""Sleep where both sides are in this process: two threads that poll hinder each other."""


# ---- the messages -------------------------------------------------------------


def test_an_address_is_what_the_stock_programs_send():
    address = Address(0, 0x11, 0xABCDEF, rp.GID("::ffff:10.0.0.1"))
    assert address.encode() == MESSAGE
    assert len(MESSAGE) == 52
    assert Address.decode(MESSAGE) == address


@given(
    st.integers(0, 0xFFFF),
    st.integers(0, 0xFFFFFF),
    st.integers(0, 0xFFFFFF),
    st.binary(min_size=16, max_size=16),
    st.integers(1, 57),
)
def test_every_address_comes_through_in_pieces_of_any_size(lid, qpn, psn, gid, piece):
    address = Address(lid, qpn, psn, rp.GID(gid))
    server = Exchange(is_client=False)
    told = address.encode() + DONE
    for start in range(0, len(told), piece):
        assert server.needed == len(told) - start
        server.feed(told[start : start + piece])
    assert server.needed == 0
    assert server.peer == address
    client = Exchange(is_client=True)
    client.feed(address.encode())
    assert client.needed == 0
    assert client.peer == address


def malformed(rng: random.Random) -> bytes:
    """Return something that a peer may send: garbage, or the right thing with faults in it."""
    whole = bytearray(MESSAGE + DONE)
    kind = rng.randrange(7)
    if kind == 0:
        return rng.randbytes(rng.randint(1, 80))
    if kind == 1:
        return rng.choice(
            [b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\0", b"done\0"]
        )
    if kind == 2:
        return bytes(whole[: rng.randrange(len(whole))])
    if kind == 3:
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    elif kind == 4:
        at = rng.randrange(len(whole))
        whole[at:at] = rng.randbytes(rng.randint(1, 4))
    elif kind == 5:
        at = rng.randrange(len(whole))
        del whole[at : at + rng.randint(1, 4)]
    else:
        whole += rng.randbytes(rng.randint(1, 4))
    return bytes(whole)


def test_a_hundred_thousand_malformed_exchanges_are_refused_or_waited_for():
    """Each is refused, is incomplete, or is an exchange; nothing else comes of it."""
    rng = random.Random(52)
    refused = incomplete = accepted = 0
    for _ in range(100_000):
        data = malformed(rng)
        exchange = Exchange(is_client=False)
        try:
            at = 0
            while at < len(data):
                piece = rng.randint(1, 60)
                exchange.feed(data[at : at + piece])
                at += piece
        except PingpongError:
            refused += 1
        else:
            if exchange.needed:
                incomplete += 1
                assert 0 < exchange.needed <= 57
            else:
                accepted += 1
                # The same bytes, or other digits.
                assert exchange.peer is not None
                assert exchange.peer.encode() + DONE == data.lower()
    assert refused > 60_000
    assert incomplete > 5_000
    assert accepted > 100


def test_malformed_exchanges_over_a_connection_end_at_once():
    """The peer says something wrong, in pieces, and goes; nothing is waited for."""
    rng = random.Random(53)
    for _ in range(3000):
        ours, theirs = socket.socketpair()
        data = malformed(rng)
        with theirs:
            at = 0
            while at < len(data):
                piece = rng.randint(1, 60)
                theirs.sendall(data[at : at + piece])
                at += piece
        with Line(ours, "peer", 30, is_client=False) as line:
            try:
                line.peer()
                line.done()
            except PingpongError:
                continue
            # What comes after the exchange is not read.
            assert data[51:57] == b"\0" + DONE


@pytest.mark.parametrize(
    ("said", "stage"),
    [
        (b"GET / HTTP", "its address"),
        (b"0000:0000111", r"its address"),
        (MESSAGE[:-1] + b" ", "its address"),
        (MESSAGE + b"gone\0", '"done"'),
        (MESSAGE + DONE + b"!", '"done"'),
    ],
)
def test_what_is_wrong_is_shown(said, stage):
    with pytest.raises(PingpongError, match=stage):
        Exchange(is_client=False).feed(said)


@pytest.mark.parametrize("data", [b"", MESSAGE[:-1], MESSAGE + b"\0", MESSAGE.replace(b":", b";")])
def test_decode_refuses_what_is_no_address(data):
    with pytest.raises(ValueError, match="not an address of the pingpong exchange"):
        Address.decode(data)


def test_names_of_peers():
    assert name_of(("10.0.0.1", 5)) == "10.0.0.1:5"
    assert name_of(("::1", 5, 0, 0)) == "[::1]:5"
    assert name_of(("::ffff:10.0.0.1", 5, 0, 0)) == "10.0.0.1:5"


# ---- the figures --------------------------------------------------------------


def test_percentiles_are_of_the_nearest_rank():
    latency = Latency.of(array("Q", (1000 * n for n in range(1000, 0, -1))))
    assert latency == Latency(min=1, p50=500, p90=900, p99=990, p99_9=999, max=1000)
    assert Latency.of(array("Q", [7000])) == Latency(7, 7, 7, 7, 7, 7)


def test_rates_count_both_ways():
    here = Address(0, 1, 2, rp.GID("::1"))
    result = Result("client", "x:1", here, here, 1000, 500, 500, 0.25, None, False)
    assert result.messages_per_second == 4000
    assert result.bytes_per_second == 4e6
    assert result.usec_per_iter == 500
    # One message: a server has seen no round trip.
    empty = Result("server", "x:1", here, here, 1000, 1, 0, 0.0, None, False)
    assert (empty.messages_per_second, empty.usec_per_iter) == (0, 0)


# ---- both sides in one process ------------------------------------------------


class Ends:
    """What became of two sides that played: a Result or the exception of each."""

    client: Any = None
    server: Any = None


def play(
    context: rp.Context,
    qp_type: QPType = QPType.RC,
    client: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    **both: Any,
) -> Ends:
    """Let two sides play, each in a thread of its own, and return how each ended."""
    ends = Ends()
    options = IN_ONE_PROCESS | both
    with listen(HOST, 0) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            try:
                with Pingpong(context, qp_type, **{**options, **(server or {})}) as side:
                    ends.server = side.run_server(listener, wait=20)
            except Exception as error:
                ends.server = error
                listener.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with Pingpong(context, qp_type, **{**options, **(client or {})}) as side:
                ends.client = side.run_client(HOST, port)
        except Exception as error:
            ends.client = error
        thread.join(60)
    assert not thread.is_alive()
    return ends


def done(ends: Ends) -> tuple[Result, Result]:
    """Return both results of a run that went well."""
    for end in (ends.client, ends.server):
        if isinstance(end, Exception):
            raise end
    return ends.client, ends.server


@TYPES
def test_both_sides_play_and_measure(context, qp_type):
    client, server = done(play(context, qp_type, iters=200))
    assert (client.role, server.role) == ("client", "server")
    assert (client.local, client.remote) == (server.remote, server.local)
    assert client.size == server.size == (1024 if qp_type is QPType.UD else 4096)
    # The last message of the server's is not answered.
    assert (client.round_trips, server.round_trips) == (200, 199)
    for result in (client, server):
        figures = result.latency
        assert 0 < figures.min <= figures.p50 <= figures.p90 <= figures.p99 <= figures.p99_9
        assert figures.p99_9 <= figures.max
        # All of them, one after another, make up the whole time.
        assert figures.min * result.round_trips <= result.seconds * 1e6
        assert figures.max <= result.seconds * 1e6
        assert not result.validated


@TYPES
@pytest.mark.parametrize(
    "options",
    [
        {"size": 1, "rx_depth": 1},
        {"size": 777, "rx_depth": 2, "iters": 40},
        {"iters": 1},
        {"iters": 33, "rx_depth": 33},
        {"events": False},
        {"sl": 3},
    ],
    ids=str,
)
def test_options(context, qp_type, options):
    client, server = done(play(context, qp_type, validate=True, **{"iters": 20, **options}))
    iters = options.get("iters", 20)
    assert (client.round_trips, server.round_trips) == (iters, iters - 1)
    assert (client.latency is None, server.latency is None) == (False, iters == 1)
    assert client.validated
    assert server.validated


@pytest.mark.parametrize("size", [4095, 4096, 4097, 100_000, 1 << 20])
def test_data_of_several_pages_arrives(context, size):
    done(play(context, size=size, iters=5, rx_depth=8, validate=True))


@pytest.mark.parametrize("mtu", [MTU.MTU_256, MTU.MTU_1024])
def test_path_mtu(context, mtu):
    done(play(context, size=3000, iters=10, mtu=mtu, validate=True))


def test_a_side_runs_once(context):
    with Pingpong(context, timeout=0.2) as side:
        with pytest.raises(PingpongError):
            side.run_client(HOST, closed_port())
        with pytest.raises(rp.RdmaError, match="runs once"):
            side.run_client(HOST, closed_port())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"size": 0}, r"size=0 is not in 1\.\."),
        ({"size": 1 << 40}, r"size=\d+ is not in 1\.\."),
        ({"iters": 0}, r"iters=0 is not in 1\.\."),
        ({"rx_depth": 0}, r"rx_depth=0 is not in 1\.\."),
        ({"sl": 16}, r"sl=16 is not in 0\.\.15"),
        ({"qp_type": QPType.UD, "size": 5000}, r"size=5000 is not in 1\.\."),
        ({"qp_type": QPType.RAW_PACKET}, "no pingpong on RAW_PACKET"),
        ({"port_num": 9}, "has no port 9"),
    ],
)
def test_options_are_checked(context, options, why):
    with pytest.raises(ValueError, match=why):
        Pingpong(context, **options)


def test_nothing_is_left_open(context, pd):
    """What a failed run has posted does not keep its resources."""
    for _ in range(3):
        with pytest.raises(PingpongError), Pingpong(context, timeout=0.2) as side:
            side.run_client(HOST, closed_port())
        assert side._qp.closed
        assert side._mr.closed
        assert side._pd.closed


# ---- peers that are not what they should be -----------------------------------


def closed_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextlib.contextmanager
def server_that(does: Callable[[socket.socket], None]) -> Iterator[int]:
    """Listen for one client and do something with its connection; give the port."""
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as sock:
                sock.settimeout(20)
                does(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join(30)
    assert not thread.is_alive()


def until_closed(sock: socket.socket) -> None:
    while sock.recv(4096):
        pass


def drip(sock: socket.socket) -> None:
    """Send the right bytes, each of them well within the time limit."""
    for byte in MESSAGE:
        sock.sendall(bytes((byte,)))
        time.sleep(0.05)


def answer(message: bytes) -> Callable[[socket.socket], None]:
    def act(sock: socket.socket) -> None:
        sock.sendall(message)
        until_closed(sock)

    return act


BAD_SERVERS = {
    "closes": (lambda sock: sock.recv(52), r"closed the connection.* instead of sending its addr"),
    "half": (
        lambda sock: (sock.recv(52), sock.sendall(MESSAGE[:20])),
        r"instead of sending its address \(20 of 52 bytes came\)",
    ),
    "silent": (until_closed, r"did not send its address within 0\.5 s"),
    "drips": (drip, r"did not send its address \(\d+ of 52 bytes came\) within 0\.5 s"),
    "garbage": (answer(b"220 mail ESMTP\r\n"), r"does not speak .*: b'220 mail ESMTP"),
    "no gid": (
        answer(b"0000:000011:abcdef:" + 32 * b"0" + b"\0"),
        "sent no GID, and on Ethernet .* start it with -g INDEX",
    ),
}


@pytest.mark.parametrize("kind", BAD_SERVERS)
def test_servers_that_do_not_play(context, kind):
    does, why = BAD_SERVERS[kind]
    with (
        server_that(does) as port,
        Pingpong(context, timeout=0.5) as side,
        pytest.raises(PingpongError, match=why) as error,
    ):
        side.run_client(HOST, port)
    assert f"{HOST}:{port}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", r"did not send its address within 0\.5 s"),
        (MESSAGE[:9], r"did not send its address \(9 of 52 bytes came\) within 0\.5 s"),
        (b"GET / HTTP/1.0\r\n", "does not speak the exchange"),
        (MESSAGE[:19] + 32 * b"0" + b"\0", "sent no GID"),
        (MESSAGE, r'did not send "done" within 0\.5 s'),
        (MESSAGE + b"d", r'did not send "done" within 0\.5 s'),
        (MESSAGE + b"nope!", 'does not speak .* came instead of "done"'),
        # It goes without a word.
        (None, r"closed the connection.* instead of sending its address"),
        # It said all that there is to say, and does nothing.
        (MESSAGE + DONE, r"no message from .* within 0\.5 s, from the start"),
    ],
)
def test_clients_that_do_not_play(context, said, why):
    if said is not None and said[12:18] == b"abcdef" and said[19:51] != 32 * b"0":
        # The server's queue pair is to be connected to something that it can reach.
        gid = rp.choose_gid(context).gid.hex().encode()
        said = said[:19] + gid[: max(0, len(said) - 19)] + said[51:]
    with (
        listen(HOST, 0) as listener,
        Pingpong(context, timeout=0.5) as side,
        socket.create_connection(listener.getsockname()[:2]) as sock,
    ):
        if said is None:
            sock.close()
        else:
            sock.sendall(said)
        with pytest.raises(PingpongError, match=why):
            side.run_server(listener, wait=5)


def test_a_queue_pair_that_is_not_there(context):
    """The exchange goes well; no message is acknowledged."""
    address = Address(0, 0xFFFFF0, 1, rp.choose_gid(context).gid)
    why = r"does not answer, from the start \(RETRY_EXC_ERR\): see that the GIDs"
    with (
        server_that(answer(address.encode())) as port,
        Pingpong(context, timeout=20) as side,
        pytest.raises(PingpongError, match=why),
    ):
        side.run_client(HOST, port)


def test_nobody_listens(context):
    why = r"cannot connect to .* refused; start the server"
    with Pingpong(context, timeout=5) as side, pytest.raises(PingpongError, match=why):
        side.run_client(HOST, closed_port())


def test_no_such_host(context):
    why = r"there is no host 'no\.such\.host\.invalid'"
    with Pingpong(context, timeout=5) as side, pytest.raises(PingpongError, match=why):
        side.run_client("no.such.host.invalid")


def test_no_client_comes(context):
    why = r"no client came to 127\.0\.0\.1:\d+ within 0\.2 s"
    with (
        Pingpong(context) as side,
        listen(HOST, 0) as listener,
        pytest.raises(PingpongError, match=why),
    ):
        side.run_server(listener, wait=0.2)


def test_a_port_that_is_in_use_and_an_address_that_is_not_there():
    in_use = r"cannot listen on 127\.0\.0\.1:\d+: Address already"
    with listen(HOST, 0) as first, pytest.raises(PingpongError, match=in_use):
        listen(HOST, first.getsockname()[1])
    with pytest.raises(PingpongError, match=r"cannot listen on 203\.0\.113\.7:0: Cannot assign"):
        listen("203.0.113.7", 0)


def test_it_listens_on_every_address_unless_told_otherwise():
    with listen(None, 0) as listener:
        socket.create_connection((HOST, listener.getsockname()[1]), 5).close()


def test_a_peer_that_looks_for_data_that_the_client_does_not_send(context):
    ends = play(context, iters=5, server={"validate": True})
    assert isinstance(ends.client, Result)
    assert isinstance(ends.server, PingpongError)
    assert "the data is wrong: 1 of 4096 bytes, the first at 0: 0x7b, not 0x00" in str(ends.server)
    assert "was the client told to validate" in str(ends.server)


def test_data_that_was_changed_on_the_way_is_found(context):
    """Every byte is looked at, not only those that the stock programs mark."""
    size = 3 * mmap.PAGESIZE
    for at in (1, size // 2 + 1, size - 1):
        with Pingpong(context, size=size, validate=True) as side:
            side._begin(is_client=True)
            landing = side._mr.buffer[side._landing :]
            landing[:] = side._mr.buffer[: side._landing]
            side._look("client")
            landing[at] ^= 1
            with pytest.raises(PingpongError, match=f"1 of {size} bytes, the first at {at}: 0x7a"):
                side._look("client")


@pytest.mark.parametrize("sizes", [(64, 4096), (4096, 64)])
def test_sizes_that_differ_are_told(context, sizes):
    client, server = sizes
    ends = play(context, iters=5, client={"size": client}, server={"size": server}, timeout=1.0)
    assert isinstance(ends.server, PingpongError)
    assert "the same size" in str(ends.server)
    assert isinstance(ends.client, PingpongError)


@TYPES
def test_a_peer_that_goes_in_the_middle_is_told(context, qp_type):
    """It plays fewer messages, and is gone."""
    ends = play(context, qp_type, client={"iters": 500, "timeout": 2.0}, server={"iters": 50})
    assert isinstance(ends.server, Result)
    assert isinstance(ends.client, PingpongError)
    text = str(ends.client)
    assert "after 50 of 500 messages" in text
    assert "it has died, " in text
    assert "\n" not in text
    if qp_type is not QPType.RC:
        assert f"a message was lost, which {qp_type.name} does not repeat" in text


def test_an_interrupted_side_gives_everything_back_and_the_other_is_told(context, monkeypatch):
    monkeypatch.setattr("rdmapost.pingpong.side._TELL_EVERY_NS", 1_000_000)
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
                    ends.server = side.run_server(listener, wait=20)
                except PingpongError as error:
                    ends.server = error

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(KeyboardInterrupt), Pingpong(context, **options) as side:
            side.run_client(HOST, port, progress=press)
        assert side._qp.closed
        assert side._mr.closed
        assert side._pd.closed
        thread.join(30)
    assert re.search(rf"after \d+ of {1 << 30} messages.*: it has died", str(ends.server))


def test_progress_is_told_and_does_not_count(context, monkeypatch):
    """Rounds in which it was told are left out of the figures, with the time they took."""
    monkeypatch.setattr("rdmapost.pingpong.side._TELL_EVERY_NS", 1_000_000)
    told: list[int] = []
    options = {**IN_ONE_PROCESS, "iters": 100}

    def progress(count: int) -> None:
        told.append(count)
        time.sleep(0.02)

    with listen(HOST, 0) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            with Pingpong(context, **options) as side:
                side.run_server(listener, wait=20)

        thread = threading.Thread(target=serve)
        thread.start()
        start = time.monotonic()
        with Pingpong(context, **options) as side:
            result = side.run_client(HOST, port, progress=progress)
        took = time.monotonic() - start
        thread.join(30)
    # The first is before the first message.
    assert told.pop(0) == 0
    assert told
    assert told == sorted(told)
    assert result.round_trips == 100 - len(told)
    assert result.seconds <= took - 0.02 * len(told)

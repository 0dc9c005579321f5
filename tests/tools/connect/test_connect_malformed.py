"""Clients that send garbage, stall or come in crowds, and servers of another protocol.

A misbehaving client is a raw socket; each such test ends with a client that works. All of it runs
only on soft0: what such clients send never reaches a device.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Callable

import pytest
from support import LIMIT, soft_context
from support.ports import impostor, read_to_end
from support.serving import STAGES, Served, answers, hello, one_error, raw_client, servers

import rdmapost as rp
from rdmapost import connect
from rdmapost.tools.connect.protocol_messages import (
    MAX_LINE,
    VERSION,
    Bye,
    Look,
    Message,
    Ready,
    Report,
    encode,
)

context = soft_context
serve = servers


# ---- clients that misbehave ---------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not rdmapost's protocol"),
        (
            b"0000:000011:a1b2c3:00000000000000000000ffff0a000001\0",
            "it speaks the protocol of 'rdmapost pin",
        ),
        (b"{}\n", "does not give its protocol version"),
        (b"{nonsense}\n", "not a line with one JSON object"),
        (b'{"rdmapost":2,"type":"hello"}\n', "hello lacks its field token"),
        (b'{"rdmapost":2,"type":"ready"}\n', "type hello, got 'ready'"),
        (b"{" + b"x" * MAX_LINE, "longer than 4096 bytes"),
        (b"{" + b"[" * (1 << 20), "longer than 4096 bytes"),
    ],
    ids=lambda v: str(v)[:12],
)
def test_garbage_instead_of_a_hello_gets_one_error_that_names_it(
    serve: Callable[..., Served], sent: bytes, expected: str
) -> None:
    served = serve()
    # The client may be cut off while it is still sending.
    with socket.create_connection(served.server.address[:2], LIMIT) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(sent)
        if len(sent) < 1 << 16:
            code, text = one_error(sock)
            assert code == "format"
            assert expected in text
    assert expected in served.until(connect.Refused).text
    served.works()


@pytest.mark.parametrize("after", ["hello", "ready"])
def test_garbage_after_the_hello_ends_that_client_only(
    serve: Callable[..., Served], context: rp.Context, after: str
) -> None:
    served = serve()
    sent = [hello(context), Ready()][: 1 + (after == "ready")]
    with raw_client(served, *sent, b'{"type":"look","offset":0,"length":-1}\n') as sock:
        code, _ = one_error(sock)
        assert code == "format"
    assert served.until(connect.Left).reason != "done"
    assert served.server.clients == []
    served.works()


def test_a_hello_of_another_protocol_version_is_refused_with_both_versions(
    serve: Callable[..., Served],
) -> None:
    served = serve(token="secret")
    with raw_client(served, b'{"rdmapost":1,"type":"hello"}\n') as sock:
        code, text = one_error(sock)
    assert code == "version"
    assert "version 1" in text
    assert f"version {VERSION}" in text
    served.works()


@pytest.mark.parametrize("token", [None, "Secret", "secret " * 20])
def test_a_client_without_the_right_token_is_refused(
    serve: Callable[..., Served], token: str | None
) -> None:
    served = serve(token="secret")
    with pytest.raises(connect.ConnectError, match="token") as error:
        served.dial(token=token)
    assert error.value.code == "token"
    assert served.until(connect.Refused).code == "token"
    assert "secret" not in str(error.value)
    assert served.events.empty()
    served.works()


@pytest.mark.parametrize("step", ["at once", "in the hello", "after the hello", "in ready"])
def test_a_slow_client_gets_a_timeout_error_and_delays_no_other(
    serve: Callable[..., Served], context: rp.Context, step: str
) -> None:
    served = serve(timeout=1.0)
    with raw_client(served, *STAGES[step](hello(context))) as sock:
        served.works()
        code, text = one_error(sock)
    assert code == "timeout"
    assert "within 1 s" in text
    expected = "hello" if step in ("at once", "in the hello") else "ready"
    assert f"its {expected} was expected" in text
    assert ("half a message" in text) == (step.startswith("in "))
    assert served.server.clients == []


def test_a_hello_times_out_after_five_seconds_however_long_the_timeout(
    serve: Callable[..., Served],
) -> None:
    served = serve(timeout=LIMIT)
    with raw_client(served, b'{"rdmapost":') as sock:
        sock.settimeout(LIMIT / 2)
        code, text = one_error(sock)
    assert code == "timeout"
    assert text == "half a message came from the client within 5 s: its hello was expected"


def test_a_hello_sent_byte_by_byte_times_out(
    serve: Callable[..., Served], context: rp.Context
) -> None:
    served = serve(timeout=1.0)
    line = encode(hello(context))
    started = time.monotonic()
    with raw_client(served) as sock:
        sock.settimeout(0.05)
        received = b""
        for byte in line:
            with contextlib.suppress(OSError):
                sock.send(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                if received := sock.recv(4096):
                    break
    assert json.loads(received)["code"] == "timeout"
    assert time.monotonic() - started < len(line) * 0.05
    served.works()


def test_idle_timeout_drops_a_client_that_sends_nothing(serve: Callable[..., Served]) -> None:
    served = serve(idle_timeout=1.0)
    with served.dial() as peer:
        assert served.until(connect.Left).reason == "nothing came from the client within 1 s"
        with pytest.raises(connect.ConnectError, match="nothing came from the client within 1 s"):
            peer.look()
        assert peer.closed
    with served.dial() as waiting:
        # A client waiting for an answer is not idle.
        assert waiting.report(1, 2.0) is None
        assert waiting.look(0, 1).data == b"\0"
    served.works()


def test_the_oldest_pending_connections_are_evicted_for_new_ones(
    serve: Callable[..., Served],
) -> None:
    served = serve(timeout=3.0)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(raw_client(served)) for _ in range(300)]
        codes = [one_error(sock)[0] for sock in crowd]
    # The latest wait until their time is up; the others have made room for them.
    assert codes == ["busy"] * 44 + ["timeout"] * 256
    served.works()


def test_a_client_that_never_reads_its_answers_is_dropped(
    serve: Callable[..., Served], context: rp.Context
) -> None:
    served = serve(timeout=1.0)
    with served.dial() as witness, raw_client(served, hello(context), Ready()) as sock:
        sock.settimeout(0.2)
        requests = encode(Look(0, 4096)) * 500
        with contextlib.suppress(OSError):
            while True:
                sock.sendall(requests)
        left = served.until(connect.Left)
        assert left.client == 2
        assert left.reason == "another request came before the answer to the last one"
        assert witness.look(0, 1).data == b"\0"
    served.works()


@pytest.mark.parametrize("second", [Report(2, 60_000), Look(0, 1)], ids=["report", "look"])
def test_a_second_request_before_the_answer_to_a_look_is_refused(
    serve: Callable[..., Served], context: rp.Context, second: Message
) -> None:
    served = serve()
    sent = [hello(context), Ready(), Look(0, 1), second]
    with raw_client(served, *sent) as sock:
        code, text = one_error(sock)
    assert (code, text) == ("format", "another request came before the answer to the last one")
    served.works()


@pytest.mark.parametrize("size", [4096, 1 << 28], ids=["small", "large"])
@pytest.mark.parametrize("split", [5, None], ids=["in two pieces", "whole"])
def test_a_client_may_leave_before_the_answer_to_a_look(
    serve: Callable[..., Served], context: rp.Context, split: int | None, size: int
) -> None:
    served = serve(size=size)
    leave = encode(Bye())
    first = encode(Look(0, size)) + leave[:split]
    with raw_client(served, hello(context), Ready(), first) as sock:
        sock.sendall(leave[len(leave[:split]) :])
        assert [answer["type"] for answer in answers(sock)][-1] == "bye"
    assert served.until(connect.Left).reason == "done"
    served.works()


@pytest.mark.parametrize(("second", "last"), [(Report(2, 0), "nothing"), (Look(0, 1), "seen")])
def test_a_second_request_ends_the_wait_for_a_report(
    serve: Callable[..., Served], context: rp.Context, second: Message, last: str
) -> None:
    served = serve()
    began = time.monotonic()
    with raw_client(served, hello(context), Ready(), Report(1, 60_000), second) as sock:
        sock.shutdown(socket.SHUT_WR)
        types = [answer["type"] for answer in answers(sock)]
    assert types == ["offer", "ready", "nothing", last]
    assert time.monotonic() - began < 30
    served.works()


@pytest.mark.parametrize("asked", [Look(4096, 1), Look(0, 1 << 40), Look((1 << 64) - 1, 1)])
def test_a_look_outside_the_exposed_memory_is_refused(
    serve: Callable[..., Served], context: rp.Context, asked: Look
) -> None:
    served = serve()
    with raw_client(served, hello(context), Ready(), asked) as sock:
        code, text = one_error(sock)
    assert code == "failed"
    assert "not within the 4096 bytes exposed" in text
    with served.dial() as peer, pytest.raises(ValueError, match="not within the 4096 bytes"):
        peer.look(4000, 97)


def test_random_bytes_in_messages_never_end_the_server(
    serve: Callable[..., Served], context: rp.Context
) -> None:

    rng = random.Random(5)
    served = serve(timeout=1.0, max_clients=4)
    start = encode(hello(context)) + encode(Ready())
    more = encode(Report(1, 0)) + encode(Look(0, 9)) + encode(Bye())
    for _ in range(100):
        sent = bytearray(start + more)
        for _ in range(rng.randrange(4)):
            sent[rng.randrange(len(sent))] = rng.randrange(256)
        with raw_client(served) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(bytes(sent[: rng.randrange(len(sent))]))
            if rng.randrange(3):
                sock.shutdown(socket.SHUT_WR)
                answers(sock)
    served.works()
    assert served.server.clients == []


@pytest.mark.parametrize("step", STAGES)
def test_a_client_that_shuts_down_sending_is_released_at_any_stage(
    serve: Callable[..., Served], context: rp.Context, step: str
) -> None:
    served = serve()
    with raw_client(served, *STAGES[step](hello(context))) as sock:
        sock.shutdown(socket.SHUT_WR)
        answers(sock)
    event = served.until((connect.Left, connect.Refused))  # type: ignore[arg-type]
    if step == "after the bye":
        assert event.reason == "done"
    assert served.server.clients == []
    served.works()


# ---- other servers -------------------------------------------------------------------


def test_dial_times_out_where_the_server_sends_nothing(context: rp.Context) -> None:
    with (
        impostor(read_to_end) as address,
        pytest.raises(
            connect.ConnectTimeout, match=r"did not answer within 0\.3 s: is it 'rdmapost"
        ),
    ):
        connect.dial(context, *address, timeout=0.3)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"SSH-2.0-x\r\n", "is not an 'rdmapost serve': this is not rdmapost's protocol"),
        (
            b"0000:000011:a1b2c3:00000000000000000000ffff0a000001\0",
            "is not an 'rdmapost serve': it speaks the protocol of 'rdmapost pingpong'",
        ),
        (b'{"type":"ready"}\n', "type offer or error, got 'ready'"),
        (b"{" + b" " * 5000, "longer than 4096 bytes"),
        (b'{"type":"off', "closed the connection in the middle of a message"),
        (b"", r"closed the connection and did not answer: is it 'rdmapost serve'\?$"),
        (b'{"rdmapost":2,"type":"error","code":"failed","text":"no luck"}\n', "refused: no luck"),
    ],
    ids=lambda v: str(v)[:12],
)
def test_dial_names_what_answers_in_place_of_a_server(
    context: rp.Context, sent: bytes, expected: str
) -> None:
    def respond(sock: socket.socket) -> None:
        sock.recv(4096)
        # The client may have hung up by now.
        with contextlib.suppress(OSError):
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
        read_to_end(sock)

    with impostor(respond) as address, pytest.raises(connect.ConnectError, match=expected):
        connect.dial(context, *address)

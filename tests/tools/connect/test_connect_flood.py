"""Floods of connections without the token: clients with it get in regardless.

The flood is a separate process (connection_flood.py), to be as fast as possible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT, ROOT, soft_context
from support.serving import Served, answers, both_servers, hello, one_error, raw_client

import rdmapost as rp
from rdmapost import connect
from rdmapost.tools.connect.protocol_messages import Look, Ready, encode

context = soft_context
serve = both_servers

CLIENTS = 100
MORE_THAN_PENDING = 400
"""More connections than a server keeps pending at once."""


class FloodResult:
    """How the server treated a flood, once it is over."""

    answers: dict[str, int]
    seconds: float


@contextlib.contextmanager
def flood(served: Served, behaviour: str, count: int, sources: int = 0) -> Iterator[FloodResult]:
    """Flood a server with connections until the end of the block."""
    host, port = served.server.address[:2]
    message = encode(hello(served.context)).decode()
    program = ROOT / "tests" / "support" / "connection_flood.py"
    options = [host, str(port), behaviour, str(count), str(sources), message]
    result = FloodResult()
    with subprocess.Popen(
        [sys.executable, "-P", str(program), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "connected\n"
            yield result
            last, _ = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    vars(result).update(json.loads(last))


@pytest.mark.parametrize(
    ("behaviour", "count"),
    [("idle", 64), ("half", 64), ("idle", MORE_THAN_PENDING), ("churn", MORE_THAN_PENDING)],
)
def test_every_client_with_the_token_gets_in_during_a_flood(
    serve: Callable[..., Served], behaviour: str, count: int
) -> None:
    served = serve(token="secret", timeout=5.0)
    with flood(served, behaviour, count):
        for _ in range(CLIENTS):
            with served.dial(timeout=5.0) as peer:
                assert peer.look(0, 1).data == b"\0"
    served.works()


def test_a_connection_evicted_by_a_flood_gets_a_busy_error(serve: Callable[..., Served]) -> None:
    served = serve(timeout=5.0)
    with flood(served, "idle", MORE_THAN_PENDING) as result:
        event = served.until(connect.Refused)
        assert event.code == "busy"
        assert "too many pending connections at this server" in event.text
    assert result.answers["busy"] > 0


def test_a_flood_from_one_address_evicts_no_connection_from_another(
    serve: Callable[..., Served],
) -> None:
    served = serve(token="secret", timeout=5.0)
    # This one has its own address, and sends nothing for long.
    with raw_client(served) as patient, flood(served, "churn", MORE_THAN_PENDING, sources=1):
        for _ in range(10):
            served.dial().close()
        patient.sendall(encode(dataclasses.replace(hello(served.context), token="no")))
        assert one_error(patient)[0] == "token"


def test_a_server_that_ran_out_of_descriptors_serves_clients_again(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(token="secret")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(fd.name) for fd in Path("/proc/self/fd").iterdir()}
    *_, few = itertools.islice((fd for fd in itertools.count() if fd not in used), 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with flood(served, "idle", 64):
            assert served.until(connect.Refused).code == "busy"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "cannot accept: [Errno 24] Too many open files" in caplog.messages
    served.works()


# ---- guessing -----------------------------------------------------------------------


@pytest.mark.parametrize(("sources", "per_second"), [(0, 32), (16, 64)], ids=["one", "several"])
def test_token_guesses_are_rate_limited_and_clients_with_the_token_get_in(
    serve: Callable[..., Served], sources: int, per_second: int
) -> None:
    served = serve(token="secret", timeout=5.0)
    with flood(served, "guess", 16, sources) as guessers:
        started = time.monotonic()
        while time.monotonic() < started + 2.0:
            served.dial(timeout=5.0).close()
    # A burst of one second's worth is allowed.
    maximum = per_second * (guessers.seconds + 1.5)
    assert 16 <= guessers.answers["token"] <= maximum
    served.works()


def test_twenty_wrong_tokens_in_a_row_are_refused_without_delay(
    serve: Callable[..., Served],
) -> None:
    served = serve(token="secret")
    started = time.monotonic()
    for _ in range(20):
        with pytest.raises(connect.ConnectError, match="wrong token"):
            served.dial(token="Secret")
    assert time.monotonic() - started < 20 * 0.5
    served.works()


# ---- long looks ---------------------------------------------------------------------


LARGE = 1 << 28


@pytest.fixture
def lookers(
    serve: Callable[..., Served], context: rp.Context
) -> Iterator[tuple[Served, list[Any]]]:
    """A server, and clients that have asked for a look at a large memory."""
    served = serve(
        size=LARGE, shared=True, max_clients=20, access=rp.Access.REMOTE_READ, timeout=LIMIT
    )
    with contextlib.ExitStack() as stack:
        sent = hello(context), Ready(), Look(0, LARGE)
        socks = [stack.enter_context(raw_client(served, *sent)) for _ in range(14)]
        for _ in socks:
            served.until(connect.Joined)
        yield served, socks


def test_concurrent_long_looks_use_one_core_and_do_not_delay_new_clients(
    lookers: tuple[Served, list[Any]],
) -> None:
    served, socks = lookers
    with served.dial(timeout=LIMIT) as peer:
        assert peer.look(0, 16).data == bytes(16)
        done = [sock for sock in socks if _answered(sock)]
    assert len(done) < len(socks) // 2
    # One of the threads that read memory runs at a time; a few are between two pieces.
    assert statistics.median(_running() for _ in range(200)) <= len(socks) / 2
    for sock in socks:
        received = b""
        while received.count(b"\n") < 3:
            received += sock.recv(65536)
        seen = json.loads(received.splitlines()[2])
        assert (seen["type"], seen["length"]) == ("seen", LARGE)


def _running() -> int:
    """Return how many other threads of this process are running or runnable."""
    found = 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            found += state == "R" and int(thread.name) != threading.get_native_id()
    return found


def _answered(sock: socket.socket) -> bool:
    """Whether all three answers are there."""
    flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
    try:
        return sock.recv(65536, flags).count(b"\n") == 3
    except BlockingIOError:
        return False


def test_a_server_closes_in_the_middle_of_long_looks(lookers: tuple[Served, list[Any]]) -> None:
    served, socks = lookers
    served.server.close()
    last = [answers(sock)[-1] for sock in socks]
    assert {message.get("code") for message in last} == {"closing"}


def test_a_long_look_is_abandoned_when_its_client_leaves(lookers: tuple[Served, list[Any]]) -> None:
    served, socks = lookers
    for sock in socks:
        sock.close()
    began = time.process_time()
    for _ in socks:
        assert served.until(connect.Left).reason != "done"
    spent = time.process_time() - began
    with served.dial(timeout=LIMIT) as peer:
        began = time.process_time()
        peer.look()
        one = time.process_time() - began
    assert spent < len(socks) / 2 * one

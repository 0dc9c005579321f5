"""A server's port and descriptors: with forked children, and when no descriptors are left."""

from __future__ import annotations

import asyncio
import copy
import errno
import gc
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support import LIMIT, prints

import rdmapost as rp
from rdmapost import connect

# ---- the port of a closed server -----------------------------------------------------

WORKER = """
import asyncio, os, warnings
import rdmapost as rp
from rdmapost import connect
from rdmapost.pingpong import Pingpong, PingpongError, listen
warnings.simplefilter("ignore", DeprecationWarning)  # fork() with threads

context = rp.open_device("soft0")

def fork_worker():
    "Fork a child that lives until the end of this script."
    global done
    wait, done = os.pipe()
    if os.fork() == 0:
        os.close(done)
        os.read(wait, 1)
        os._exit(0)
    os.close(wait)

def refused(port):
    try:
        connect.dial(context, port=port, timeout=5).close()
    except connect.ConnectError as error:
        return error.code == "refused"
"""
SERVE = """
server = connect.serve(context, port=0)
port = server.address[1]
fork_worker()
server.close()
print(refused(port))
with connect.serve(context, port=port), connect.dial(context, port=port) as peer:
    print(peer.look(0, 1).data)
"""
ASERVE = """
async def main():
    server = await connect.aserve(context, port=0)
    port = server.address[1]
    fork_worker()
    await server.close()
    print(refused(port))
    async with (
        await connect.aserve(context, port=port),
        await connect.adial(context, port=port) as peer,
    ):
        print((await peer.look(0, 1)).data)
asyncio.run(main())
"""
DROP = """
warnings.simplefilter("ignore", ResourceWarning)
server = connect.serve(context, port=0)
port, threads = server.address[1], server._threads
fork_worker()
del server
threads.close()
print(refused(port))
with connect.serve(context, port=port), connect.dial(context, port=port) as peer:
    print(peer.look(0, 1).data)
"""


@pytest.mark.parametrize("ends", [SERVE, ASERVE, DROP], ids=["serve", "aserve", "dropped"])
def test_a_closed_servers_port_is_free_while_a_forked_child_lives(ends: str) -> None:
    assert prints(WORKER + ends).split() == ["True", r"b'\x00'"]


def test_a_pingpong_servers_port_is_free_while_a_forked_child_lives() -> None:
    used = """
listener = listen("127.0.0.1", 0)
port = listener.getsockname()[1]
fork_worker()
with Pingpong(context) as side:
    try:
        side.run_server(listener, timeout=0.01)
    except PingpongError as error:
        print("no client connected" in str(error))
print(refused(port))
listen("127.0.0.1", port).close()
"""
    assert prints(WORKER + used).split() == ["True", "True"]


# ---- an address that is not available --------------------------------------------------


def of_aserve(context: rp.Context, *where: Any) -> None:
    async def main() -> None:
        await (await connect.aserve(context, *where)).close()

    asyncio.run(main())


def of_serve(context: rp.Context, *where: Any) -> None:
    connect.serve(context, *where).close()


@pytest.mark.parametrize("start", [of_serve, of_aserve])
def test_the_error_for_an_address_in_use_has_its_errno_and_the_remedy(
    start: Callable[..., None], context: rp.Context
) -> None:
    with connect.serve(context, port=0) as server:
        port = server.address[1]
        with pytest.raises(connect.ConnectError) as caught:
            start(context, "127.0.0.1", port)
    assert caught.value.errno == errno.EADDRINUSE
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; "
        "give another port, or 0 for a free one"
    )
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.errno, str(again), again.code) == (
        errno.EADDRINUSE,
        str(caught.value),
        "unreachable",
    )
    with pytest.raises(connect.ConnectError, match=r"192\.0\.2\.1.*: Cannot assign") as caught:
        start(context, "192.0.2.1", 0)
    assert caught.value.errno == errno.EADDRNOTAVAIL


def test_a_link_local_address_without_its_interface_is_refused_with_a_hint(context) -> None:
    for start in connect.dial, connect.serve:
        with pytest.raises(connect.ConnectError, match=r"as in fe80::1%eth0$"):
            start(context, "fe80::1", 18600)


def test_the_error_for_a_refused_connection_has_its_errno(context: rp.Context) -> None:
    async def main() -> None:
        await connect.adial(context, port=port)

    server = connect.serve(context, port=0)
    port = server.address[1]
    server.close()
    with pytest.raises(connect.ConnectError, match="refused the connection") as caught:
        connect.dial(context, port=port)
    assert caught.value.errno == errno.ECONNREFUSED
    with pytest.raises(connect.ConnectError, match="refused the connection") as caught:
        asyncio.run(main())
    assert caught.value.errno == errno.ECONNREFUSED


def test_the_error_for_a_host_that_cannot_be_found_has_no_errno(context: rp.Context) -> None:
    """getaddrinfo's codes are not errnos."""
    with pytest.raises(connect.ConnectError, match="cannot be found") as caught:
        connect.serve(context, "nowhere.invalid", 0)
    assert caught.value.errno is None


# ---- no descriptors ------------------------------------------------------------------

FEW = """
import asyncio, contextlib, errno, gc, os, resource, sys
import rdmapost as rp
from rdmapost import connect
context = rp.open_device("soft0")
server = connect.serve(context, port=0)
port = server.address[1]
connect.dial(context, port=port).close()
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))

def open_fds():
    return len(os.listdir("/proc/self/fd"))

@contextlib.contextmanager
def few(left):
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.dup(0))
    for _ in range(left):
        os.close(held.pop())
    try:
        yield
    finally:
        for fd in held:
            os.close(fd)

def attempt(call, left):
    with few(left):
        try:
            return call()
        except OSError as error:
            assert error.errno == errno.EMFILE, repr(error)
            assert "Too many open files" in str(error), str(error)
            assert "cannot be found" not in str(error), str(error)
            assert "thread" not in str(error), str(error)
            return None
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_serve_without_descriptors_names_the_cause_and_leaves_none_open(host: str) -> None:
    swept = f"""
server.close()
refused = 0
for left in range(12):
    before = open_fds()
    made = attempt(lambda: connect.serve(context, {host!r}, 0), left)
    if made is None:
        refused += 1
        gc.collect()
        assert open_fds() == before, (left, open_fds(), before)
    else:
        connect.dial(context, {host!r}, made.address[1]).close()
        made.close()
context.close()
print(refused > 2, refused < 12)
"""
    assert prints(FEW + swept).split() == ["True", "True"]


def test_dial_without_descriptors_names_the_cause_and_leaves_none_open() -> None:
    swept = """
server.close()
unused = port
before = open_fds()
refused = 0
for left in range(12):
    try:
        assert attempt(lambda: connect.dial(context, port=unused), left) is None
        refused += 1
    except AssertionError as error:
        assert "refused the connection" in str(error), error
        break
    gc.collect()
    assert open_fds() == before, (left, open_fds(), before)
context.close()
print(refused > 2, refused < 12)
"""
    assert prints(FEW + swept).split() == ["True", "True"]


def test_a_server_without_descriptors_sends_the_reason_to_the_client_it_refuses() -> None:
    full = """
import socket, time
from rdmapost.tools.connect.protocol_messages import MAX_LINE

def accepted(client):
    # A connection has no inode until it is accepted.
    ends = f":{port:04X}", f":{client.getsockname()[1]:04X}"
    with open("/proc/self/net/tcp") as table:
        rows = [line.split() for line in table]
    return any((row[1][8:], row[2][8:]) == ends and row[9] != "0" for row in rows)

idle = socket.create_connection(("127.0.0.1", port))
deadline = time.monotonic() + 30
while not accepted(idle):
    assert time.monotonic() < deadline
    time.sleep(0.001)
another = socket.socket()
idle.settimeout(60)
with few(0):
    # The server cannot accept more, and drops the oldest that has not sent its hello.
    another.connect(("127.0.0.1", port))
    print(idle.recv(MAX_LINE).decode())
idle.close()
another.close()
server.close()
context.close()
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", FEW + full],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the server cannot accept connections: Too many open files" in done.stdout
    assert "too many pending connections" not in done.stdout


# ---- copies ----------------------------------------------------------------------------


def refuse_copies(thing: Any) -> None:
    name = type(thing).__name__
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=f"^cannot copy or pickle '{name}' object"):
            copier(thing)


def test_servers_and_connections_cannot_be_copied_or_pickled(context: rp.Context) -> None:
    with (
        connect.serve(context, port=0) as server,
        connect.dial(context, port=server.address[1]) as peer,
    ):
        descriptors = os.listdir("/proc/self/fd")
        refuse_copies(server)
        refuse_copies(peer)
        refuse_copies(server.clients[0])
        with pytest.raises(TypeError, match=r"^cannot copy or pickle 'ServedClient' object"):
            copy.deepcopy({"client": server.clients[0]})
        gc.collect()
        assert os.listdir("/proc/self/fd") == descriptors
        assert peer.look(0, 1).data == bytes(1)


def test_asyncio_servers_and_connections_cannot_be_copied_or_pickled(context: rp.Context) -> None:
    async def main() -> None:
        async with (
            await connect.aserve(context, port=0) as server,
            await connect.adial(context, port=server.address[1]) as peer,
        ):
            refuse_copies(server)
            refuse_copies(peer)
            refuse_copies(server.clients[0])
            gc.collect()
            assert (await peer.look(0, 1)).data == bytes(1)

    asyncio.run(main())


# ---- how they print ------------------------------------------------------------------------


def test_a_connection_and_a_client_print_their_queue_pair_and_the_other_side(
    context: rp.Context,
) -> None:
    with (
        connect.serve(context, port=0) as server,
        connect.dial(context, port=server.address[1]) as a,
    ):
        (client,) = server.clients
        here = f"<rdmapost.connect.Connection RC QP {a.qp.qp_num:#x} to {server}"
        there = f"<rdmapost.connect.ServedClient 1 at {client.address}: RC QP "
        there += f"{client.qp.qp_num:#x}"
        with ThreadPoolExecutor(1) as other:
            assert other.submit(repr, a).result() == f"{here}>"
        assert (repr(a), str(a), repr(client)) == (f"{here}>", f"{here}>", f"{there}>")
        client.close()
        assert repr(client) == f"{there} (closed)>"
        with pytest.raises(connect.ConnectError):
            a.look()
        assert repr(a) == f"{here} (closed)>"
    assert repr(a) == f"{here} (closed)>"


def test_asyncio_a_connection_prints_its_queue_pair_and_the_server(context: rp.Context) -> None:
    async def main() -> None:
        async with await connect.aserve(context, port=0) as server:
            peer = await connect.adial(context, port=server.address[1], qp_type=rp.QPType.UD)
            shown = f"<rdmapost.connect.AsyncConnection UD QP {peer.qp.qp_num:#x} to {server}"
            assert repr(peer) == f"{shown}>"
            await peer.close()
            assert repr(peer) == f"{shown} (closed)>"

    asyncio.run(main())


def test_a_connection_whose_constructor_fails_prints_in_its_traceback(context: rp.Context) -> None:
    """A debugger, and pytest -l, print the values of a traceback's variables."""
    with pytest.raises(TypeError) as caught:
        connect.dial("soft0")  # type: ignore[arg-type]
    shown = [
        repr(entry.frame.f_locals["self"])
        for entry in caught.traceback
        if "self" in entry.frame.f_locals
    ]
    assert shown
    assert set(shown) == {"<rdmapost.connect.Connection>"}


# ---- the warning ---------------------------------------------------------------------------


def test_the_warning_of_an_unclosed_server_does_not_call_it_closed(context: rp.Context) -> None:
    server = connect.serve(context, port=0)
    text = re.escape(f"unclosed <rdmapost.connect.Server {server}>")
    with pytest.warns(ResourceWarning, match=f"^{text}$"):
        del server


def test_asyncio_the_warning_of_an_unclosed_server_does_not_call_it_closed(
    context: rp.Context,
) -> None:
    async def main() -> None:
        server = await connect.aserve(context, port=0)
        text = re.escape(f"unclosed <rdmapost.connect.AsyncServer {server}>")
        with pytest.warns(ResourceWarning, match=f"^{text}$"):
            del server

    asyncio.run(main())

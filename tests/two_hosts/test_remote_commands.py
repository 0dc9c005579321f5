"""The commands that post to ``rdmapost serve`` on another machine: every command, refused access,
the peer killed at each stage, and its link down and up again."""

from __future__ import annotations

import json
import queue
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.cli_runner import Ran, run

import rdmapost as rp
from rdmapost import connect

from .remote import DEVICE, GID_INDEX, LIMIT, Remote, said, wait_for_no_link
from .serving import Serve, Serving, servers

pytestmark = pytest.mark.two_hosts

PATIENCE = "4"
TYPES = pytest.mark.parametrize("qp_type", ["rc", "uc", "ud"])


@pytest.fixture
def serve(peer: str, device: rp.Context) -> Iterator[Serve]:
    """Start servers on the other machine, for one test."""
    with servers(peer) as start:
        yield start


@pytest.fixture(scope="module")
def serving(peer: str, device: rp.Context) -> Iterator[Serving]:
    """Start one server for all tests that do not change it: each client has its own memory."""
    with servers(peer) as start:
        yield start()


def command(*args: str, timeout: str = "20") -> Ran:
    return run(*args, "-d", DEVICE, "--timeout", timeout)


def done(*args: str) -> dict[str, Any]:
    """Run a command that must succeed; return its document."""
    ran = command(*args, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.doc["status"] == "SUCCESS"
    return ran.doc


def works(serving: Serving) -> None:
    """Assert that the server still serves."""
    assert done("send", serving.where, "--data", "still here")["received"] == "still here"


# ---- each command -------------------------------------------------------------


@TYPES
def test_send_is_reported_with_data_and_immediate_on_both_sides(
    serving: Serving, qp_type: str
) -> None:
    doc = done("send", serving.where, "--data", "over there", "--imm", "0x12", "--qp-type", qp_type)
    assert (doc["peer"], doc["received"], doc["imm_data"]) == (serving.where, "over there", 18)
    arrived = serving.event("arrived")
    assert (arrived["opcode"], arrived["data"], arrived["imm_data"]) == ("RECV", "over there", 18)
    assert serving.event("left")["address"].startswith("10.0.1.")


@pytest.mark.parametrize("qp_type", ["rc", "uc"])
def test_write_changes_the_exposed_memory_and_its_immediate_is_reported(
    serving: Serving, qp_type: str
) -> None:
    doc = done(
        "write",
        serving.where,
        "--data",
        "abc",
        "--offset",
        "16",
        "--count",
        "3",
        "--qp-type",
        qp_type,
    )
    assert doc["received"] == "abc"
    changed = serving.event("left")["changed"]
    assert (changed["offset"], changed["data"]) == (16, "abcabcabc")
    assert done("write", serving.where, "--data", "x", "--imm", "7")["imm_data"] == 7
    assert serving.event("arrived")["opcode"] == "RECV_RDMA_WITH_IMM"
    # Otherwise the next test would see this event.
    serving.event("left")


def test_read_returns_the_exposed_memory(serve: Serve) -> None:
    where = serve("--data", "served from there").where
    assert done("read", where, "--size", "17")["received"] == "served from there"
    doc = done("read", where, "--offset", "5", "--size", "6", "--count", "2")
    assert doc["received"] == "d from"
    # A UC queue pair cannot read, so the server does not reveal the contents.
    assert "received" not in done("write", where, "--data", "x", "--qp-type", "uc")


def test_atomic_returns_the_old_values_and_changes_the_memory(serving: Serving) -> None:
    at = ["--offset", "64"]
    doc = done("atomic", "fetch-add", serving.where, "--add", "5", "--count", "3", *at)
    assert (doc["olds"], doc["new"]) == ([0, 5, 10], 15)
    doc = done("atomic", "cas", serving.where, "--compare", "0", "--swap", "99", *at)
    assert (doc["old"], doc["new"]) == (0, 99)


def test_transfers_larger_than_a_packet_and_than_all_receives_succeed(serve: Serve) -> None:
    serving = serve("--size", "1M", "--count", "8", "--receive-size", "4096")
    assert done("send", serving.where, "--size", "4096", "--count", "60")["count"] == 60
    assert done("write", serving.where, "--size", "1M")["byte_len"] == 1 << 20
    assert done("read", serving.where, "--size", "256K", "--count", "2")["byte_len"] == 1 << 18


def test_a_wrong_token_and_a_write_to_read_only_memory_are_refused(serve: Serve) -> None:
    serving = serve("--access", "read", "--token", "secret")
    ran = command("read", serving.where, "--token", "Secret")
    assert ran.code == 1
    assert "token" in ran.err
    ran = command("write", serving.where, "--token", "secret", "--json")
    assert ran.code == 1
    # rxe reports the second status.
    assert ran.doc["status"] in ("REM_ACCESS_ERR", "REM_INV_REQ_ERR")
    assert done("read", serving.where, "--token", "secret")["byte_len"] == 4096


def test_a_server_ends_cleanly_on_sigterm(serve: Serve) -> None:
    serving = serve()
    works(serving)
    serving.remote.signal(signal.SIGTERM)
    ended = serving.remote.ended()
    assert ended.status == 0
    assert json.loads(ended.out.splitlines()[-1]) == {"event": "ended", "clients": 1}


# ---- the other side killed ----------------------------------------------------


def refusal(ran: Ran, start: float) -> str:
    """Return the one error that a command must print, in time."""
    assert time.monotonic() - start < float(PATIENCE) + 3
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 1
    assert ran.err.startswith("rdmapost: ")
    return ran.err


def test_command_to_a_stopped_server_times_out(serving: Serving) -> None:
    """The server's kernel accepts the connection, and nothing answers."""
    serving.remote.signal(signal.SIGSTOP)
    start = time.monotonic()
    ran = command("send", serving.where, timeout=PATIENCE)
    assert f"did not answer within {PATIENCE} s" in refusal(ran, start)
    serving.remote.signal(signal.SIGCONT)
    works(serving)


@pytest.mark.parametrize("qp_type", ["rc", "ud"])
def test_a_client_reports_a_server_killed_after_connecting(
    peer: str, device: rp.Context, serve: Serve, qp_type: str
):
    serving = serve()
    with connect.dial(
        device, peer, serving.port, qp_type=rp.QPType[qp_type.upper()], timeout=float(PATIENCE)
    ) as connection:
        serving.remote.signal(signal.SIGKILL)
        serving.remote.ended()
        start = time.monotonic()
        with pytest.raises(rp.RdmaError) as caught:  # noqa: PT012 - at which step is the device's
            connection.qp.post_send(rp.Send(connection.mr[:8], **connection.address))
            connection.wait(timeout=float(PATIENCE))[0].check()
            connection.report(timeout=float(PATIENCE))
        assert time.monotonic() - start < float(PATIENCE) + 3
    assert "\n" not in str(caught.value)
    # The next client cannot connect.
    start = time.monotonic()
    ran = command("send", serving.where, timeout=PATIENCE)
    assert "refused the connection: start 'rdmapost serve' there" in refusal(ran, start)


SERVER = """
import os, signal, sys, rdmapost as rp
from rdmapost import connect

def on_event(event):
    if type(event).__name__ == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)

with (
    rp.open_device("rxe0") as context,
    connect.serve(context, "10.0.1.2", 0, on_event=on_event) as server,
):
    print(server.address[1], flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("qp_type", ["rc", "ud"])
@pytest.mark.parametrize("step", ["Joined", "Arrived", "Left"])
def test_a_client_reports_a_server_killed_at_an_event(
    peer: str, device: rp.Context, step: str, qp_type: str
) -> None:
    """Before its offer, after it has the message, or after it has released everything."""
    with Remote("python", "-c", SERVER, step) as server:
        port = server.until("out", r"^\d+$")
        start = time.monotonic()
        ran = command("send", f"{peer}:{port}", "--qp-type", qp_type, timeout=PATIENCE)
        assert server.ended().status == -signal.SIGKILL
    if step == "Left":
        # Only the server's Bye is missing.
        assert (ran.code, ran.err) == (0, "")
    else:
        assert f"{peer}:{port}" in refusal(ran, start)


CLIENT = """
import signal, sys, rdmapost as rp
from rdmapost import connect
port, step = int(sys.argv[1]), sys.argv[2]
with rp.open_device("rxe0") as context, connect.dial(context, "10.0.1.1", port) as connection:
    posts = {"connected": 0, "sent": 1, "posting": 1 << 40}[step]
    if step == "posting":
        print("here", flush=True)
    for _ in range(posts):
        connection.qp.post_send(rp.Send(connection.mr[:8]))
        connection.wait()[0].check()
    print("here", flush=True)
    signal.pause()
"""


def test_a_server_notices_killed_clients_and_serves_the_next(peer: str, device: rp.Context) -> None:
    """The server is on this machine."""
    left: queue.Queue[connect.Left] = queue.Queue()

    def on_event(event: connect.Event) -> None:
        if isinstance(event, connect.Left):
            left.put(event)

    with connect.serve(device, "10.0.1.1", 0, on_event=on_event) as server:
        port = server.address[1]
        for step in ("connected", "sent", "posting"):
            with Remote("python", "-c", CLIENT, str(port), step) as client:
                client.until("out", "here")
                client.signal(signal.SIGKILL)
                assert client.ended().status == -signal.SIGKILL
            reason = left.get(timeout=LIMIT).reason
            assert "connection" in reason or "disconnected" in reason, step
            with connect.dial(device, "10.0.1.1", port) as connection:
                connection.qp.post_send(rp.Send(connection.mr[:8]))
                connection.wait()[0].check()
            assert left.get(timeout=LIMIT).reason == "done"


def test_silent_and_malformed_clients_are_refused_while_others_are_served(
    peer: str, serve: Serve
) -> None:
    serving = serve("--timeout", "1")
    for says in (b"", b'{"type": "hel', b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((peer, serving.port), LIMIT) as sock:
            sock.sendall(says)
            works(serving)
            serving.event("refused")


# ---- the link -----------------------------------------------------------------


def test_a_command_fails_in_time_while_the_link_is_down_and_succeeds_once_it_is_up(
    serving: Serving,
) -> None:
    path = f"/sys/class/infiniband/{DEVICE}/ports/1/gid_attrs/ndevs/{GID_INDEX}"
    netdev = said("cat", path).strip()
    # The command waits a little first: the agent's answer needs the same link.
    script = f"sleep 0.3; ip link set {netdev} down; sleep 12; ip link set {netdev} up"
    with Remote("sh", "-e", "-c", script) as link:
        wait_for_no_link()
        start = time.monotonic()
        ran = command("send", serving.where, timeout="3")
        assert serving.where in refusal(ran, start)
        assert link.ended().status == 0
    works(serving)

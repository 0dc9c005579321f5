"""Ping-pong between two machines: with the stock programs and with rdmapost, in both roles; the
peer killed at each stage, and its link down and up again."""

from __future__ import annotations

import json
import queue
import re
import signal
import subprocess
import threading
import time
from typing import Any

import pytest
from support.cli_runner import run
from support.ports import free_port
from support.ports import wait_for_port as local_port

import rdmapost as rp
from rdmapost import QPType
from rdmapost.pingpong import Pingpong, PingpongError, Result, listen

from .remote import DEVICE, GID_INDEX, LIMIT, Remote, own_address, said, wait_for_port

pytestmark = pytest.mark.two_hosts

ITERS = "200"
PORT = 18515
ENDLESS = 100_000_000
PATIENCE = 4.0
"""The time limit for a side whose peer disappears."""
TYPES = pytest.mark.parametrize("qp_type", ["rc", "uc", "ud"])


def ours(qp_type: str, *more: str) -> list[str]:
    """The options of rdmapost pingpong on either side; without -e two emulated machines crawl."""
    return [
        "-d",
        DEVICE,
        "--qp-type",
        qp_type,
        "-n",
        ITERS,
        "-c",
        "-e",
        "--timeout",
        "30",
        "--json",
        *more,
    ]


def stock(qp_type: str, *more: str) -> list[str]:
    """The stock program and its options."""
    return [f"ibv_{qp_type}_pingpong", "-d", DEVICE, "-g", GID_INDEX, "-n", ITERS, "-e", *more]


def check(doc: dict[str, Any], role: str) -> None:
    """Assert that a run succeeded."""
    assert "error" not in doc
    assert (doc["role"], doc["iters"], doc["validated"]) == (role, int(ITERS), True)
    assert doc["round_trips"] == int(ITERS) - (role == "server")


# ---- both roles ---------------------------------------------------------------


@TYPES
def test_a_client_measures_against_the_stock_server(peer, device, qp_type):
    with Remote(*stock(qp_type, "-c", "-p", str(PORT))) as other:
        wait_for_port(PORT)
        ran = run("pingpong", peer, "--tcp-port", str(PORT), *ours(qp_type))
        assert (ran.code, ran.err) == (0, "")
        ended = other.ended()
    check(ran.doc, "client")
    assert ended.status == 0
    assert f"{ITERS} iters in" in ended.out
    assert "invalid data" not in ended.out + ended.err


@TYPES
def test_a_server_measures_against_the_stock_client(peer, device, qp_type):
    port, clients = free_port(), queue.Queue()

    def start_client() -> None:
        local_port(port)
        clients.put(Remote(*stock(qp_type, "-c", "-p", str(port), own_address(peer))))

    thread = threading.Thread(target=start_client)
    thread.start()
    ran = run("pingpong", "--tcp-port", str(port), "--wait", "60", *ours(qp_type))
    thread.join(LIMIT)
    with clients.get(timeout=LIMIT) as other:
        ended = other.ended()
    assert ran.code == 0
    assert re.fullmatch(rf"waiting for a client on \S+:{port}\n", ran.err)
    check(ran.doc, "server")
    assert ended.status == 0, ended
    assert f"{ITERS} iters in" in ended.out


@TYPES
def test_client_and_server_of_rdmapost_both_measure_and_name_each_other(peer, device, qp_type):
    server = ["--tcp-port", "0", "--bind", peer, "--wait", "60"]
    with Remote("rdmapost", "pingpong", *ours(qp_type, *server)) as other:
        port = other.until("err", "waiting for a client on").rpartition(":")[2]
        ran = run("pingpong", peer, "--tcp-port", port, *ours(qp_type))
        assert (ran.code, ran.err) == (0, "")
        ended = other.ended()
    assert ended.status == 0
    check(ran.doc, "client")
    check(json.loads(ended.out), "server")
    # Each side's remote address is the other side's local one.
    assert ran.doc["remote"] == json.loads(ended.out)["local"]
    assert ran.doc["local"]["gid"] == f"::ffff:{own_address(peer)}"
    assert ran.doc["remote"]["gid"] == f"::ffff:{peer}"


# ---- the peer killed ----------------------------------------------------------

# Peers that go through the handshake up to a given byte, and are killed there.
HALTING_SERVER = """
import os, signal, socket, sys
hears, says = int(sys.argv[1]), int(sys.argv[2])
with socket.create_server(("10.0.1.2", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    sock, _ = listener.accept()
    while hears > 0:
        hears -= len(sock.recv(hears))
    sock.sendall((b"0000:000011:000001:00000000000000000000ffff0a000102" + bytes(1))[:says])
    os.kill(os.getpid(), signal.SIGKILL)
"""
HALTING_CLIENT = """
import os, signal, socket, sys
port, says, hears = map(int, sys.argv[1:])
sock = socket.create_connection(("10.0.1.1", port), 20)
message = b"0000:000011:000001:00000000000000000000ffff0a000102" + bytes(1) + b"done" + bytes(1)
sock.sendall(message[:min(says, 52)])
while hears > 0:
    hears -= len(sock.recv(hears))
sock.sendall(message[52:says])
os.kill(os.getpid(), signal.SIGKILL)
"""


def works(peer: str) -> None:
    """Assert that a new run succeeds."""
    few = ["-n", "20"]
    with Remote(*stock("rc", "-c", "-p", str(PORT), *few)) as other:
        wait_for_port(PORT)
        ran = run("pingpong", peer, "--tcp-port", str(PORT), *ours("rc", *few))
        assert (ran.code, ran.err) == (0, "")
        assert other.ended().status == 0
    assert ran.doc["validated"]


def one_line(error: BaseException | None) -> str:
    """Return the text of a PingpongError, which is one line."""
    assert isinstance(error, PingpongError), error
    text = str(error)
    assert "\n" not in text
    return text


def test_a_client_is_refused_after_its_server_was_killed(peer, device):
    with Remote(*stock("rc", "-p", str(PORT))) as other:
        wait_for_port(PORT)
        other.signal(signal.SIGKILL)
        assert other.ended().status == -signal.SIGKILL
    ran = run("pingpong", peer, "--tcp-port", str(PORT), *ours("rc"))
    assert ran.code == 1
    why = f"cannot connect to {peer}:{PORT}: Connection refused; start the server there first"
    assert ran.doc["error"].startswith(why)
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("hears", "says", "stage"),
    [
        (0, 0, "its address"),
        (52, 0, "its address"),
        (52, 20, r"its address \(20 of 52 bytes"),
        (52, 51, r"its address \(51 of 52 bytes"),
    ],
)
def test_a_client_reports_a_server_killed_in_the_handshake(peer, device, hears, says, stage):
    with Remote("python", "-c", HALTING_SERVER, str(hears), str(says)) as other:
        port = int(other.until("out", r"^\d+$"))
        start = time.monotonic()
        with Pingpong(device, timeout=PATIENCE) as side, pytest.raises(PingpongError) as caught:
            side.run_client(peer, port)
        assert time.monotonic() - start < PATIENCE + 2
        assert other.ended().status == -signal.SIGKILL
    why = rf"{peer}:\d+ closed the connection( \(.*\))? instead of sending {stage}"
    assert re.match(why, one_line(caught.value)), caught.value


@pytest.mark.parametrize(
    ("says", "hears", "why"),
    [
        (0, 0, r"closed the connection.* instead of sending its address"),
        (20, 0, r"closed the connection.* instead of sending its address \(20 of 52 bytes"),
        (52, 0, r'closed the connection.* instead of sending ("done"|its address)'),
        (52, 52, r'closed the connection.* instead of sending "done"'),
        (55, 52, r'closed the connection.* instead of sending "done"'),
        (57, 52, rf"no message from {{}} within {PATIENCE:g} s, from the start: it has died"),
    ],
    ids=["at once", "in its address", "after it", "before done", "in done", "after done"],
)
def test_a_server_reports_a_client_killed_in_the_handshake(peer, device, says, hears, why):
    with Pingpong(device, timeout=PATIENCE, events=True) as side, listen(None, 0) as listener:
        port = listener.getsockname()[1]
        argv = ["python", "-c", HALTING_CLIENT, str(port), str(says), str(hears)]
        with Remote(*argv) as other:
            with pytest.raises(PingpongError) as caught:
                side.run_server(listener, timeout=LIMIT)
            assert other.ended().status == -signal.SIGKILL
    who = rf"{re.escape(peer)}:\d+"
    assert re.match(f".*{why.format(who)}", one_line(caught.value)), caught.value
    assert peer in str(caught.value)


class Murder:
    """Kills the peer after some round trips."""

    def __init__(self) -> None:
        self.other: Remote | None = None
        self.at = 0.0

    def __call__(self, messages: int) -> None:
        if messages > 10 and not self.at:
            assert self.other is not None
            self.other.signal(signal.SIGKILL)
            self.at = time.monotonic()


GONE = (
    r"({} does not answer|{} could not accept a message|no message from {} within 4 s|"
    r"a (send|receive) ended with \w+), "
    rf"after \d+ of {ENDLESS} messages"
)


@pytest.mark.parametrize(
    ("program", "qp_type"), [("stock", "rc"), ("stock", "uc"), ("stock", "ud"), ("rdmapost", "rc")]
)
def test_a_client_reports_a_server_killed_in_the_middle_of_a_run(peer, device, qp_type, program):
    murder = Murder()
    more = ["-n", str(ENDLESS)]
    argv = stock(qp_type, "-p", str(PORT), *more)
    if program == "rdmapost":
        argv = ["rdmapost", "pingpong", *ours(qp_type, "--tcp-port", str(PORT), *more)]
    with Remote(*argv) as murder.other:
        wait_for_port(PORT)
        with (
            Pingpong(
                device, QPType[qp_type.upper()], iters=ENDLESS, events=True, timeout=PATIENCE
            ) as side,
            pytest.raises(PingpongError) as caught,
        ):
            side.run_client(peer, PORT, progress=murder)
    assert 0 < time.monotonic() - murder.at < PATIENCE + 3
    assert re.match(GONE.replace("{}", f"{peer}:{PORT}"), one_line(caught.value)), caught.value
    works(peer)


@TYPES
def test_a_server_reports_a_client_killed_in_the_middle_of_a_run(peer, device, qp_type):
    murder = Murder()
    with (
        Pingpong(
            device, QPType[qp_type.upper()], iters=ENDLESS, events=True, timeout=PATIENCE
        ) as side,
        listen(None, 0) as listener,
    ):
        port = str(listener.getsockname()[1])
        argv = stock(qp_type, "-p", port, "-n", str(ENDLESS), own_address(peer))
        with Remote(*argv) as murder.other, pytest.raises(PingpongError) as caught:
            side.run_server(listener, timeout=LIMIT, progress=murder)
    assert 0 < time.monotonic() - murder.at < PATIENCE + 3
    who = rf"{re.escape(peer)}:\d+"
    assert re.match(GONE.replace("{}", who), one_line(caught.value)), caught.value


# ---- the link -----------------------------------------------------------------


class Blink:
    """Takes the link of the other machine down after some messages, and up again."""

    def __init__(self, seconds: float) -> None:
        netdev = said("cat", f"/sys/class/infiniband/{DEVICE}/ports/1/gid_attrs/ndevs/{GID_INDEX}")
        # The command waits a little first: the agent's answer needs the same link.
        self._script = (
            f"sleep 0.3; ip link set {netdev.strip()} down; sleep {seconds}; "
            f"ip link set {netdev.strip()} up"
        )
        self.command: Remote | None = None

    def __call__(self, messages: int) -> None:
        if messages > 10 and self.command is None:
            self.command = Remote("sh", "-e", "-c", self._script)

    def over(self) -> None:
        """Wait until the link is up again."""
        assert self.command is not None, "the run was over before the link went down"
        with self.command:
            ended = self.command.ended()
        assert ended == (0, "", "")


@pytest.mark.parametrize(("qp_type", "seconds"), [("rc", 0.2), ("rc", 3), ("ud", 1)])
def test_a_link_that_goes_down_ends_a_run_with_its_result_or_one_error(
    peer, device, qp_type, seconds
):
    """RC retransmits what was lost, or reports that it could not; UD reports a missing message."""
    # Enough to last until the link goes down.
    blink, iters = Blink(seconds), 1500
    outcome: Result | PingpongError
    with Remote(*stock(qp_type, "-p", str(PORT), "-n", str(iters))):
        wait_for_port(PORT)
        with Pingpong(
            device, QPType[qp_type.upper()], iters=iters, events=True, timeout=PATIENCE
        ) as side:
            try:
                outcome = side.run_client(peer, PORT, progress=blink)
            except PingpongError as error:
                outcome = error
        blink.over()
    if isinstance(outcome, Result):
        assert outcome.iters == iters
    else:
        assert re.search(r"after \d+ of 1500 messages.*its link is down", one_line(outcome))
    works(peer)


def test_the_device_holds_no_resources_of_any_process_afterwards(device: rp.Context):
    for resource in ("qp", "cq", "mr"):
        done = subprocess.run(
            ["rdma", "-j", "resource", "show", resource, "link", f"{DEVICE}/1"]
            if resource == "qp"
            else ["rdma", "-j", "resource", "show", resource, "dev", DEVICE],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=True,
        )
        held = [entry for entry in json.loads(done.stdout or "[]") if entry.get("pid")]
        assert held == [], resource

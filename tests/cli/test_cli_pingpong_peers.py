"""``rdmapost pingpong`` with another process, on a real device: itself, or the stock programs.

One side runs in this process, and an agent runs the other: starting Python takes long on an
emulated machine.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support import LIMIT
from support.agents import Ended, Remote, local_agent
from support.cli_runner import run
from support.ports import HOST, free_port, wait_for_port

import rdmapost as rp

TYPES = pytest.mark.parametrize("qp_type", ["rc", "uc", "ud"])


@pytest.fixture
def device(verbs_context: rp.Context) -> str:
    return verbs_context.name


@pytest.fixture(scope="module")
def agent(verbs_context: rp.Context) -> Iterator[tuple[str, int]]:
    with local_agent() as address:
        yield address


LISTENS = r"^waiting for a client on \S+:\d+$"


@pytest.fixture
def device_gid(verbs_context: rp.Context) -> str:
    return str(verbs_context.choose_gid().gid_index)


@pytest.mark.parametrize(
    ("qp_type", "more"), [("rc", []), ("rc", ["-e"]), ("uc", ["-e"]), ("ud", [])]
)
def test_client_and_server_in_two_processes_agree(agent, device, qp_type, more):
    common = ["-d", device, "--qp-type", qp_type, "-n", "200", "-c", "--json", "--timeout", "20"]
    common += more
    at = ["--tcp-port", "0", "--bind", HOST, "--wait", "30"]
    with Remote(agent, "rdmapost", "pingpong", *common, *at) as server:
        port = server.until("err", LISTENS).rpartition(":")[2]
        ran = run("pingpong", HOST, *common, "--tcp-port", port)
        ended = server.ended()
    assert (ran.code, ran.err) == (0, "")
    assert (ended.status, ended.err) == (0, f"waiting for a client on {HOST}:{port}\n")
    documents = [ran.doc, json.loads(ended.out)]
    assert [doc["round_trips"] for doc in documents] == [200, 199]
    assert all(doc["validated"] for doc in documents)


class Doomed(threading.Thread):
    """Starts a side, unless it is running, and ends it in the middle of the run.

    Args:
        make: what starts it.
        end: the signal that ends it.
    """

    def __init__(self, make: Callable[[], Remote], end: signal.Signals) -> None:
        super().__init__()
        self._make, self._end = make, end
        self.start()

    def run(self) -> None:
        with self._make() as side:
            # It is verbose, and says who its peer is: then it plays.
            side.until("err", "^remote ")
            # Some messages: nothing tells of them.
            time.sleep(1)
            side.signal(self._end)
            self._ended = side.ended()

    def ended(self) -> Ended:
        """Wait for its end."""
        self.join(LIMIT)
        return self._ended


@pytest.mark.parametrize(
    ("qp_type", "victim", "end"),
    [
        ("rc", "client", signal.SIGKILL),
        ("rc", "server", signal.SIGINT),
        ("ud", "server", signal.SIGKILL),
        ("ud", "client", signal.SIGINT),
    ],
)
def test_peer_that_dies_is_reported_in_one_line(agent, device, qp_type, victim, end):
    common = ["-d", device, "--qp-type", qp_type, "-n", "100000000"]
    listen_on = ["--bind", HOST, "--wait", "30", "--tcp-port"]
    patience = ["--timeout", "5"]
    if victim == "server":
        process = Remote(agent, "rdmapost", "pingpong", *common, *listen_on, "0", "-v")
        port = process.until("err", LISTENS).rpartition(":")[2]
        doomed = Doomed(lambda: process, end)
        ran = run("pingpong", HOST, *common, "--tcp-port", port, *patience)
    else:
        port = str(free_port())

        def play() -> Remote:
            wait_for_port(int(port))
            return Remote(agent, "rdmapost", "pingpong", HOST, *common, "--tcp-port", port, "-v")

        doomed = Doomed(play, end)
        ran = run("pingpong", *common, *listen_on, port, *patience)
    if end is signal.SIGINT:
        status, out, err = doomed.ended()
        assert (status, out) == (130, "")
        assert err.splitlines()[-1] == "" or err.splitlines()[-1].startswith("remote ")
    assert (ran.code, ran.out) == (1, "")
    waiting = "" if victim == "server" else f"waiting for a client on {HOST}:{port}\n"
    assert re.fullmatch(
        waiting + rf"rdmapost: ({HOST}:\d+ (does not answer|could not accept a message)"
        rf"|no message from {HOST}:\d+ within 5 s), "
        r"after \d+ of 100000000 messages.*: it has died.*\n",
        ran.err,
    )


# ---- against the stock programs -----------------------------------------------


@contextlib.contextmanager
def stock(qp_type: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program of ibverbs-utils."""
    name = f"ibv_{qp_type}_pingpong"
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed (package ibverbs-utils)")
    process = subprocess.Popen(
        [name, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def said(process: subprocess.Popen[str]) -> str:
    """Return what a stock program printed; it must have succeeded."""
    out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, out
    assert "invalid data" not in out
    return out


STOCK = pytest.mark.parametrize(
    ("qp_type", "options"),
    [
        ("rc", []),
        ("rc", ["-s", "1000", "-n", "37", "-r", "5"]),
        ("rc", ["-n", "60", "-e"]),
        ("uc", ["-s", "1", "-n", "60"]),
        ("uc", ["-n", "60", "-e"]),
        ("ud", ["-n", "60"]),
        ("ud", ["-s", "1000", "-n", "37", "-r", "5", "-e"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "defaults",
)


@STOCK
def test_client_measures_against_a_stock_server(device, device_gid, qp_type, options):
    port = free_port()
    with stock(qp_type, "-d", device, "-g", device_gid, "-p", str(port), "-c", *options) as server:
        wait_for_port(port)
        ran = run(
            "pingpong",
            HOST,
            "--tcp-port",
            str(port),
            "-d",
            device,
            "--qp-type",
            qp_type,
            "-c",
            "--timeout",
            "20",
            "--json",
            *options,
        )
        assert (ran.code, ran.err) == (0, "")
        out = said(server)
    doc = ran.doc
    assert doc["validated"]
    assert doc["round_trips"] == doc["iters"]
    assert f"{2 * doc['size'] * doc['iters']} bytes in " in out
    assert f"{doc['iters']} iters in " in out
    assert f"QPN {doc['local']['qp_num']:#08x}" in out


@STOCK
def test_server_measures_against_a_stock_client(device, device_gid, qp_type, options):
    port = free_port()
    printed: list[str] = []

    def play() -> None:
        wait_for_port(port)
        argv = ["-d", device, "-g", device_gid, "-p", str(port), "-c", *options, HOST]
        with stock(qp_type, *argv) as player:
            printed.append(said(player))

    thread = threading.Thread(target=play)
    thread.start()
    ran = run(
        "pingpong",
        "-d",
        device,
        "--qp-type",
        qp_type,
        "--tcp-port",
        str(port),
        "--bind",
        HOST,
        "--wait",
        "30",
        "-c",
        "--timeout",
        "20",
        "--json",
        *options,
    )
    thread.join(LIMIT)
    assert ran.code == 0
    assert ran.err == f"waiting for a client on {HOST}:{port}\n"
    doc = ran.doc
    assert doc["validated"]
    assert doc["round_trips"] == doc["iters"] - 1
    assert f"{doc['iters']} iters in " in printed[0]


@TYPES
def test_stock_program_without_a_gid_is_explained(device, verbs_context, qp_type):
    if verbs_context.query_port(1).link_layer is not rp.LinkLayer.ETHERNET:
        pytest.skip(f"{device} needs no GID")
    port = free_port()
    with stock(qp_type, "-d", device, "-p", str(port)):
        wait_for_port(port)
        ran = run("pingpong", HOST, "--tcp-port", str(port), "-d", device, "--qp-type", qp_type)
    assert ran.code == 1
    assert "-g INDEX" in ran.err

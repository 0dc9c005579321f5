"""``rdmapost pingpong``: both roles, what it prints and how it ends, and the stock programs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support import LIMIT, run_python
from support.cli_runner import Ran, run
from support.pingpong_runs import listening, start
from support.ports import HOST, free_port, wait_for_port
from support.terminal import terminal

import rdmapost as rp
from rdmapost import QPType
from rdmapost.pingpong import Pingpong, PingpongError, Result, listen

TYPES = pytest.mark.parametrize("qp_type", ["rc", "uc", "ud"])


@contextlib.contextmanager
def library_server(context: rp.Context, qp_type: str = "rc", **options: Any) -> Iterator[list[Any]]:
    """Run a server of the library in a thread; give its port and then what it returned."""
    found: list[Any] = []
    with listen(HOST, 0) as listener:
        found.append(listener.getsockname()[1])

        def serve() -> None:
            try:
                with Pingpong(
                    context, QPType[qp_type.upper()], events=True, timeout=20, **options
                ) as side:
                    found.append(side.run_server(listener, timeout=20))
            except rp.RdmaError as error:
                found.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield found
        finally:
            thread.join(LIMIT)
    assert not thread.is_alive()


def client(context: rp.Context, port: int, *args: str) -> Ran:
    """Run the command as a client of a port of this machine."""
    return run(
        "pingpong",
        HOST,
        "--tcp-port",
        str(port),
        "-d",
        context.name,
        "-e",
        "--timeout",
        "20",
        *args,
    )


def device_note(context: rp.Context) -> str:
    """What is said of a software device, on standard error."""
    if context.kind != "soft":
        return ""
    return (
        f"{context.name} exists only in its own process and reaches no other; "
        "use roce:lo, or a real device such as rxe0, on both sides\n"
    )


# ---- both roles, in this process ----------------------------------------------


@TYPES
def test_pingpong_client_prints_its_measurements(context, qp_type):
    with library_server(context, qp_type, iters=50) as (port, *_):
        ran = client(context, port, "--qp-type", qp_type, "-n", "50")
    assert ran.err == device_note(context)
    assert ran.code == 0
    size = 1024 if qp_type == "ud" else 4096
    lines = ran.out.splitlines()
    assert lines[0] == (
        f"pingpong on {qp_type.upper()}, {context.name}, client of {HOST}:{port}: SUCCESS"
    )
    assert lines[1].split() == f"messages 50 of {size} bytes each way".split()
    assert re.fullmatch(r"  time +\d+\.\d\d s for 50 round trips, [\d.]+ usec/iter", lines[2])
    assert lines[3].split() == ["latency", "min", "p50", "p90", "p99", "p99.9", "max"]
    times = [float(text) for text in lines[4].split()[:-1]]
    assert len(times) == 6
    assert times == sorted(times)
    assert re.fullmatch(r"  rate +\d+ messages/s, [\d.]+ MB/s, [\d.]+ Mbit/s, both ways", lines[5])
    assert len(lines) == 6
    assert max(map(len, lines)) <= 80


def test_json_of_pingpong_has_the_measurements(context):
    with library_server(context, size=100, iters=20, validate=True) as found:
        ran = client(context, found[0], "-n", "20", "-s", "100", "-c", "--json")
    doc = ran.doc
    assert ran.code == 0
    server: Result = found[1]
    assert list(doc) == [
        "device",
        "kind",
        "role",
        "peer",
        "qp_type",
        "size",
        "iters",
        "gid_index",
        "local",
        "remote",
        "round_trips",
        "seconds",
        "latency_us",
        "usec_per_iter",
        "messages_per_second",
        "bytes_per_second",
        "validated",
    ]
    assert list(doc["latency_us"]) == ["min", "p50", "p90", "p99", "p99_9", "max"]
    expected = {
        "device": context.name,
        "kind": context.kind,
        "role": "client",
        "peer": f"{HOST}:{found[0]}",
        "qp_type": "RC",
        "size": 100,
        "iters": 20,
        "gid_index": context.choose_gid().gid_index,
        "round_trips": 20,
        "validated": True,
        "remote": {
            "lid": server.local.lid,
            "qp_num": server.local.qp_num,
            "psn": server.local.psn,
            "gid": str(server.local.gid),
        },
    }
    assert doc | expected == doc
    assert doc["bytes_per_second"] == pytest.approx(100 * doc["messages_per_second"])
    assert doc["messages_per_second"] == pytest.approx(2e6 / doc["usec_per_iter"])


def serve(context: rp.Context, port: int, *options: str) -> Ran:
    """Run a server that waits for a client on this port."""
    where = ["-d", context.name, "--bind", HOST, "--tcp-port", str(port)]
    return run("pingpong", *where, "--wait", "30", *options)


@TYPES
def test_pingpong_server_waits_for_a_client(context, qp_type):
    port, found = free_port(), []

    def play() -> None:
        end = time.monotonic() + LIMIT
        while not found and time.monotonic() < end:
            # Refused until the server is there.
            with (
                Pingpong(context, QPType[qp_type.upper()], iters=30, events=True) as side,
                contextlib.suppress(PingpongError),
            ):
                found.append(side.run_client(HOST, port))

    thread = threading.Thread(target=play)
    thread.start()
    ran = serve(context, port, "--qp-type", qp_type, "-n", "30", "-e", "--timeout", "20")
    thread.join(LIMIT)
    assert ran.code == 0
    assert ran.err == device_note(context) + f"waiting for a client on {HOST}:{port}\n"
    assert re.match(rf"pingpong on {qp_type.upper()}, .*, server of {HOST}:\d+: SUCCESS\n", ran.out)
    assert "for 29 round trips" in ran.out
    assert found[0].iters == 30


def test_pingpong_of_one_message_has_no_latency_at_the_server(context):
    port = free_port()

    def play() -> None:
        for _ in range(1000):
            with (
                Pingpong(context, iters=1, events=True) as side,
                contextlib.suppress(PingpongError),
            ):
                side.run_client(HOST, port)
                return

    thread = threading.Thread(target=play)
    thread.start()
    ran = serve(context, port, "-n", "1", "-e", "--json")
    thread.join(LIMIT)
    assert ran.code == 0
    assert ran.doc["latency_us"] is None
    assert ran.doc["round_trips"] == 0


def test_verbose_pingpong_shows_both_addresses(context):
    with library_server(context, iters=5) as found:
        ran = client(context, found[0], "-n", "5", "-v")
    server = found[1]
    assert f"local    {server.remote}\n" in ran.err
    assert f"remote   {server.local}\n" in ran.err
    assert re.search(r"local    LID 0x0000, QPN 0x\w{6}, PSN 0x\w{6}, GID ", ran.err)


# ---- how it ends --------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["h", "--bind", "127.0.0.1"], "--bind and --wait are for a server"),
        (["h", "--wait", "1"], "--bind and --wait are for a server"),
        (["h", "--size", "0"], "a message needs at least one byte"),
        (["h", "--qp-type", "raw"], "'raw' is not one of 'rc', 'uc', 'ud'"),
        (["h", "--mtu", "1500"], "'1500' is not one of '256', '512'"),
        (["h", "-n", "0"], "0 is not at least 1"),
        (["h", "-r", "0"], "0 is not at least 1"),
        (["h", "--tcp-port", "70000"], "70000 is not at least 0 and at most 65535"),
        (["h", "--sl", "16"], "16 is not at least 0 and at most 15"),
        (["h", "--timeout", "0"], "expected more than 0 s and at most 86400 s, got 0"),
        (["a", "b"], "unexpected extra argument"),
    ],
)
def test_wrong_options_of_pingpong_are_usage_errors(args, why):
    ran = run("pingpong", "-d", "soft0", *args)
    assert ran.code == 2
    assert why in ran.err
    assert ran.err.endswith("Try 'rdmapost pingpong --help'.\n")
    assert ran.out == ""


def test_help_of_pingpong_fits_a_terminal_and_names_the_other_side():
    ran = run("pingpong", "--help")
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= 80
    for word in ("[HOST[:PORT]]", "ibv_rc_pingpong", "-g INDEX", "exposes no memory"):
        assert word in ran.out


def test_refused_connection_says_to_start_the_server(context):
    port = free_port()
    ran = client(context, port)
    assert ran.code == 1
    assert ran.err == device_note(context) + (
        f"rdmapost: cannot connect to {HOST}:{port}: Connection refused; start the server there "
        "first (rdmapost pingpong, or ibv_rc_pingpong)\n"
    )
    assert ran.out == ""


def test_json_of_a_failed_pingpong_keeps_what_was_known(context):
    port = free_port()
    ran = client(context, port, "--json", "-s", "64")
    assert ran.code == 1
    assert ran.doc["role"] == "client"
    assert ran.doc["size"] == 64
    assert ran.doc["local"]["qp_num"] > 0
    assert ran.doc["error"].startswith("cannot connect to")


def test_pingpong_options_beyond_the_device_are_usage_errors(context):
    port = context.query_port(1)
    ran = client(context, 1, "--qp-type", "ud", "-s", str(port.active_mtu.bytes + 1))
    assert ran.code == 2
    assert f"size={port.active_mtu.bytes + 1} is not in 1..{port.active_mtu.bytes}" in ran.err
    assert "a UD message is one packet" in ran.err
    ran = client(context, 1, "--rx-depth", str(context.attr.max_qp_wr + 1))
    assert ran.code == 2
    assert "rx_depth=" in ran.err
    if port.active_mtu < rp.MTU.MTU_4096:
        ran = client(context, 1, "--mtu", "4096")
        assert ran.code == 2
        assert "mtu=4096 is more than the active MTU" in ran.err


def test_pingpong_on_a_missing_device_exits_with_3():
    ran = run("pingpong", HOST, "-d", "nosuch0")
    assert ran.code == 3
    assert "there is no RDMA device nosuch0" in ran.err


def test_server_without_a_client_gives_up_after_wait(context):
    ran = run("pingpong", "-d", context.name, "--tcp-port", "0", "--bind", HOST, "--wait", "0.2")
    assert ran.code == 1
    assert re.search(rf"rdmapost: no client connected to {HOST}:\d+ within 0\.2 s\n$", ran.err)


def test_client_that_is_not_a_pingpong_is_reported_in_one_line(context):
    port = free_port()

    def shout() -> None:
        wait_for_port(port)
        with socket.create_connection((HOST, port), 5) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(OSError):
                sock.recv(1)

    thread = threading.Thread(target=shout)
    thread.start()
    ran = run(
        "pingpong", "-d", context.name, "--tcp-port", str(port), "--bind", HOST, "--wait", "20"
    )
    thread.join(LIMIT)
    assert ran.code == 1
    last = ran.err.splitlines()[-1]
    assert re.fullmatch(
        rf"rdmapost: {HOST}:\d+: it does not speak ibv_rc_pingpong's protocol: "
        r"got b'GET / HTTP/1\.1.*' instead of its address",
        last,
    )


def test_ctrl_c_ends_a_waiting_server():
    server = start("-d", "soft0", "--tcp-port", "0", "--bind", HOST, "--json")
    try:
        listening(server)
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=LIMIT)
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 130
    assert "Traceback" not in err
    assert json.loads(out)["error"] == "interrupted"


TERMINAL = """
import sys, threading
import rdmapost as rp
from rdmapost.cli.app import app
from rdmapost.pingpong import Pingpong, listen

with rp.open_device("soft0") as context, listen("127.0.0.1", 0) as listener:
    port = str(listener.getsockname()[1])

    def serve():
        with Pingpong(context, events=True, iters=3000, size=64, timeout=20) as side:
            side.run_server(listener, timeout=20)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        app(["pingpong", "127.0.0.1", "--tcp-port", port, "-d", "soft0", "-e", "-n", "3000",
             "-s", "64", "--timeout", "20", "--json"])
    finally:
        thread.join()
"""


def test_pingpong_shows_a_progress_bar_on_a_terminal():
    """It is on standard error; the document on standard output is unchanged."""
    with (
        terminal() as (stderr, shown),
        subprocess.Popen(
            [sys.executable, "-P", "-W", "error", "-c", TERMINAL],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
        ) as process,
    ):
        out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, shown
    document = json.loads(out)
    percents = [int(found) for found in re.findall(rb"(\d+)%", bytes(shown))]
    assert percents[0] == 0
    assert percents[-1] == 100
    assert percents == sorted(percents)
    # What was drawn between two messages is not in the figures.
    assert 2800 <= document["round_trips"] <= 3000


def test_pingpong_shows_no_progress_bar_without_a_terminal():
    done = run_python(TERMINAL)
    assert done.returncode == 0
    assert done.stderr == (
        "soft0 exists only in its own process and reaches no other; "
        "use roce:lo, or a real device such as rxe0, on both sides\n"
    )
    assert json.loads(done.stdout)["round_trips"] == 3000

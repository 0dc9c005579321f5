"""Ping-pong: its figures, and runs with both sides in one process.

The handshake is in test_pingpong_handshake, peers that leave or differ in test_pingpong_peers.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from array import array

import pytest
from support.pingpong_runs import IN_ONE_PROCESS, TYPES, done, run_pair
from support.ports import HOST, free_port

import rdmapost as rp
from rdmapost import MTU, QPType
from rdmapost.pingpong import Address, Latency, Pingpong, PingpongError, Result, listen

# ---- the figures --------------------------------------------------------------


def test_pingpong_latency_percentiles_are_of_the_nearest_rank():
    latency = Latency.of(array("Q", (1000 * n for n in range(1000, 0, -1))))
    assert latency == Latency(min=1, p50=500, p90=900, p99=990, p99_9=999, max=1000)
    assert Latency.of(array("Q", [7000])) == Latency(7, 7, 7, 7, 7, 7)


def test_pingpong_rates_count_both_directions():
    here = Address(0, 1, 2, rp.GID("::1"))
    result = Result("client", "x:1", here, here, 1000, 500, 500, 0.25, None, False)
    assert result.messages_per_second == 4000
    assert result.bytes_per_second == 4e6
    assert result.usec_per_iter == 500
    # One message: a server has seen no round trip.
    empty = Result("server", "x:1", here, here, 1000, 1, 0, 0.0, None, False)
    assert (empty.messages_per_second, empty.usec_per_iter) == (0, 0)


# ---- both sides in one process ------------------------------------------------


@TYPES
def test_both_sides_of_a_pingpong_measure_every_round_trip(context, qp_type):
    client, server = done(run_pair(context, qp_type, iters=200))
    assert (client.role, server.role) == ("client", "server")
    assert (client.local, client.remote) == (server.remote, server.local)
    assert client.size == server.size == (1024 if qp_type is QPType.UD else 4096)
    # The server's last message is not answered.
    assert (client.round_trips, server.round_trips) == (200, 199)
    for result in (client, server):
        figures = result.latency
        assert 0 < figures.min <= figures.p50 <= figures.p90 <= figures.p99 <= figures.p99_9
        assert figures.p99_9 <= figures.max
        # The round trips follow one another, so their times add up to at most the whole time.
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
def test_a_run_succeeds_with_extreme_options(context, qp_type, options):
    client, server = done(run_pair(context, qp_type, validate=True, **{"iters": 20, **options}))
    iters = options.get("iters", 20)
    assert (client.round_trips, server.round_trips) == (iters, iters - 1)
    assert (client.latency is None, server.latency is None) == (False, iters == 1)
    assert client.validated
    assert server.validated


@pytest.mark.parametrize("size", [4095, 4096, 4097, 100_000, 1 << 20])
def test_data_of_one_to_many_pages_is_validated(context, size):
    done(run_pair(context, size=size, iters=5, rx_depth=8, validate=True))


@pytest.mark.parametrize("mtu", [MTU.MTU_256, MTU.MTU_1024])
def test_a_message_larger_than_the_path_mtu_arrives(context, mtu):
    done(run_pair(context, size=3000, iters=10, mtu=mtu, validate=True))


def test_a_pingpong_refuses_a_second_run(context):
    with Pingpong(context, timeout=0.2) as side:
        with pytest.raises(PingpongError):
            side.run_client(HOST, free_port())
        with pytest.raises(rp.RdmaError, match="runs once"):
            side.run_client(HOST, free_port())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"size": 0}, r"size=0 is not in 1\.\."),
        ({"size": 1 << 40}, r"size=\d+ is not in 1\.\."),
        ({"iters": 0}, r"iters=0 is not in 1\.\."),
        ({"rx_depth": 0}, r"rx_depth=0 is not in 1\.\."),
        ({"sl": 16}, r"sl=16 is not in 0\.\.15"),
        ({"qp_type": QPType.UD, "size": 5000}, r"size=5000 is not in 1\.\."),
        ({"qp_type": QPType.RAW_PACKET}, "RC, UC or UD, not RAW_PACKET"),
        ({"port_num": 9}, "has no port 9"),
    ],
)
def test_pingpong_refuses_options_out_of_range(context, options, why):
    with pytest.raises(ValueError, match=why):
        Pingpong(context, **options)


def test_a_failed_run_leaves_nothing_open(context):
    """Outstanding work requests do not keep the resources open."""
    # Closing a device refuses while something is left open.
    with rp.open_device(context.name) as device:
        for _ in range(3):
            with pytest.raises(PingpongError), Pingpong(device, timeout=0.2) as side:
                side.run_client(HOST, free_port())
    assert device.closed


def test_round_trips_with_a_progress_report_are_left_out_of_the_figures(context, monkeypatch):
    """The time they take is left out, too."""
    monkeypatch.setattr("rdmapost.tools.pingpong.side._PROGRESS_EVERY_NS", 1_000_000)
    reported: list[int] = []
    options = {**IN_ONE_PROCESS, "iters": 100}

    def progress(count: int) -> None:
        reported.append(count)
        time.sleep(0.02)

    with listen(HOST, 0) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            with Pingpong(context, **options) as side:
                side.run_server(listener, timeout=20)

        thread = threading.Thread(target=serve)
        thread.start()
        start = time.monotonic()
        with Pingpong(context, **options) as side:
            result = side.run_client(HOST, port, progress=progress)
        took = time.monotonic() - start
        thread.join(30)
    # The first report comes before the first message.
    assert reported.pop(0) == 0
    assert reported
    assert reported == sorted(reported)
    assert result.round_trips == 100 - len(reported)
    assert result.seconds <= took - 0.02 * len(reported)


ACROSS = """
import sys
import rdmapost as rp
from rdmapost.pingpong import Pingpong, listen
with rp.open_device("soft0") as context, Pingpong(context, timeout=20) as side:
    try:
        if sys.argv[1:]:
            side.run_client("127.0.0.1", int(sys.argv[1]))
        else:
            with listen("127.0.0.1", 0) as listener:
                print(listener.getsockname()[1], flush=True)
                side.run_server(listener, timeout=20)
    except rp.RdmaError as error:
        print(error)
"""


def test_soft_device_refuses_a_peer_in_another_process():
    """The peer's queue pair has the same number as the client's, which would measure itself."""
    command = [sys.executable, "-P", "-W", "error", "-c", ACROSS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        port = server.stdout.readline().strip()
        client = subprocess.run([*command, port], capture_output=True, text=True, timeout=60)
        said = server.communicate(timeout=60)[0]
    assert "is in another process, but soft0 exists only in its own process" in said
    assert "its own output may say why" in client.stdout

"""What a roce device counts, in Python and on the command line."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import LIMIT, Pair, until
from support.cli_runner import run
from support.roce import open_roce

import rdmapost as rp
from rdmapost import QPType, WCStatus

DEVICE = "roce:lo"
CAP_NET_ADMIN = 12
CAN_EXCEED = bool(
    int(re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[1], 16)
    >> CAP_NET_ADMIN
    & 1
)


@pytest.fixture
def context() -> Iterator[rp.Context]:
    """A device of the test's own: its counters begin at 0."""
    with open_roce(DEVICE) as opened:
        yield opened


def test_counters_of_a_roce_device_begin_at_0(context):
    assert context.counters() == rp.Counters(*[0] * len(rp.Counters._fields))


def test_packets_and_bytes_are_counted_with_their_headers(context, connect):
    pair = connect()
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:5000]))
    pair.wait()
    now = context.counters()
    # Two packets and an acknowledgement, with BTH, RETH, AETH, padding and ICRC.
    assert now.packets_sent == now.packets_received == 3
    assert now.bytes_sent == now.bytes_received == 5000 + 3 * (12 + 4) + 16 + 4
    assert not any(now[4:])


def test_rnr_naks_and_other_naks_are_counted_apart(context, connect):
    pair: Pair = connect()
    pair.a.post_send(pair.send(pair.mine[:8]))
    (wc,) = pair.cq.wait(1, LIMIT)
    assert wc.status is WCStatus.RNR_RETRY_EXC_ERR
    now = context.counters()
    # rnr_retry is 1 here.
    assert (now.rnr_naks_sent, now.rnr_naks_received, now.retransmitted) == (2, 2, 1)
    assert (now.naks_sent, now.naks_received) == (0, 0)
    other = connect()
    other.a.post_send(rp.RdmaWrite(other.mine[:8], remote_addr=other.theirs.addr, rkey=1))
    assert other.cq.wait(1, LIMIT)[0].status is WCStatus.REM_ACCESS_ERR
    now = context.counters()
    assert (now.naks_sent, now.naks_received, now.rnr_naks_sent) == (1, 1, 2)


def test_damaged_packets_are_counted_as_icrc_errors_and_dropped(context):
    host = str(context.choose_gid(1).gid).removeprefix("::ffff:")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for _ in range(3):
            stranger.sendto(b"x" * 64, (host, 4791))
    until(lambda: context.counters().packets_received == 3)
    now = context.counters()
    assert (now.icrc_errors, now.dropped, now.bytes_received) == (3, 3, 192)


@pytest.mark.parametrize("qp_type", [QPType.UC, QPType.UD])
def test_message_without_a_receive_is_counted_as_dropped(context, connect, qp_type):
    """Nothing else tells of it: there is no NAK."""
    pair: Pair = connect(qp_type)
    for count in (1, 2):
        pair.a.post_send(pair.send(pair.mine[:8]))
        pair.wait()
        until(lambda count=count: context.counters().dropped == count)
    pair.works()
    assert context.counters().dropped == 2


def test_uc_write_that_its_key_does_not_permit_is_counted_as_dropped(context, connect):
    pair: Pair = connect(QPType.UC)
    target = {"remote_addr": pair.theirs.addr, "rkey": pair.theirs.rkey ^ 1}
    pair.a.post_send(rp.RdmaWrite(pair.mine[:5000], **target))
    pair.wait()
    # Its first packet names the key; without that, the second one begins nothing.
    until(lambda: context.counters().dropped == 2)
    pair.works()


def test_uc_message_that_ends_a_receive_with_an_error_is_not_counted_as_dropped(context, connect):
    pair: Pair = connect(QPType.UC)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:4], wr_id=7))
    pair.a.post_send(pair.send(pair.mine[:8], wr_id=9))
    statuses = {wc.wr_id: wc.status for wc in pair.cq.wait(2, LIMIT)}
    assert statuses[7] is WCStatus.LOC_LEN_ERR
    assert context.counters().dropped == 0


STOPPED = """
import os, signal, sys
import rdmapost as rp
with rp.open_device(sys.argv[1]) as context:
    os.kill(os.getpid(), signal.SIGSTOP)
    for _ in sys.stdin:
        print(*context.counters(), flush=True)
"""


def flood(host: str, packets: int) -> rp.Counters:
    """Send packets to a device that cannot read them; return its counters after it has."""
    name = f"roce:{host}"
    open_roce(name).close()
    with (
        subprocess.Popen(
            [sys.executable, "-P", "-c", STOPPED, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as device,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger,
    ):
        assert device.stdin is not None
        assert device.stdout is not None
        try:
            stopped = os.waitid(os.P_PID, device.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            assert stopped is not None
            assert stopped.si_code == os.CLD_STOPPED
            for _ in range(packets):
                stranger.sendto(bytes(1024), (host, 4791))
            device.send_signal(signal.SIGCONT)

            def counters() -> rp.Counters:
                device.stdin.write("\n")
                device.stdin.flush()
                return rp.Counters(*map(int, device.stdout.readline().split()))

            until(lambda: received(counters()) == packets)
            return counters()
        finally:
            device.kill()


def received(now: rp.Counters) -> int:
    """How many packets have come to the socket."""
    return now.packets_received + now.rcvbuf_errors


def test_packets_that_overflow_the_receive_buffer_are_counted():
    now = flood("127.0.0.114", 20_000)
    assert received(now) == 20_000
    assert now.rcvbuf_errors > 0
    assert now.dropped == now.packets_received


@pytest.mark.skipif(not CAN_EXCEED, reason="needs CAP_NET_ADMIN")
def test_receive_buffer_exceeds_the_limit_where_the_process_may():
    assert flood("127.0.0.115", 1500).rcvbuf_errors == 0


def test_counters_of_a_closed_roce_device_raise_closed_error(context):
    context.close()
    with pytest.raises(rp.ClosedError):
        context.counters()


def test_soft0_has_no_packet_counters_and_says_which_devices_have():
    with (
        rp.open_device("soft0") as soft,
        pytest.raises(rp.UnsupportedError, match="soft0 has no packets; use a roce device"),
    ):
        soft.counters()


@pytest.mark.rdma
def test_counters_of_a_real_device_are_refused_with_where_sysfs_has_them(verbs_context):
    with pytest.raises(rp.UnsupportedError, match="/sys/class/infiniband/NAME/ports/PORT/hw_cou"):
        verbs_context.counters()


def test_verbose_devices_command_prints_the_counters(context):
    shown = run("devices", DEVICE, "-v")
    assert shown.code == 0
    lines = [line.split() for line in shown.out.splitlines()]
    for name in rp.Counters._fields:
        assert [name, "0"] in lines
    assert "packets_sent" not in run("devices", DEVICE).out


def test_verbose_devices_command_puts_the_counters_into_its_json(context, connect):
    connect().works()
    (device,) = run("devices", DEVICE, "-v", "--json").doc["devices"]
    assert device["counters"] == context.counters()._asdict()
    assert device["counters"]["packets_sent"] > 0
    (device,) = run("devices", DEVICE, "--json").doc["devices"]
    assert "counters" not in device
    (device,) = run("devices", "soft0", "-v", "--json").doc["devices"]
    assert "counters" not in device


def test_verbose_posting_command_notes_the_counters(context):
    ran = run("write", "-d", DEVICE, "--data", "hello", "-v")
    assert ran.code == 0
    assert "counters packets_sent 2, packets_received 2, bytes_sent " in ran.err


@pytest.mark.parametrize("host", ["::1", "10.255.255.1"])
def test_what_cannot_be_sent_is_not_counted_as_sent(host):
    """From 127.0.0.1 there is no way to an IPv6 address, nor out of this machine."""
    with open_roce("roce:127.0.0.113") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
        with rp.QP(pd, rp.QPType.RC, cq) as qp, rp.MR(pd, 8, rp.Access.LOCAL_WRITE) as mr:
            gid = rp.GID(host if ":" in host else f"::ffff:{host}")
            qp.connect(rp.Endpoint(5, 6, gid, 0, rp.MTU.MTU_1024), timeout=8, retry_cnt=3)
            qp.post_send(rp.Send(mr[:8]))
            assert cq.wait(1, LIMIT)[0].status is WCStatus.RETRY_EXC_ERR
        now = context.counters()
    assert now._replace(send_errors=0) == rp.Counters(*[0] * len(now))
    assert now.send_errors == 4

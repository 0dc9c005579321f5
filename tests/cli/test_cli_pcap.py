"""--pcap: the packets of a command, in a file for Wireshark."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from support import LIMIT
from support.cli_runner import Ran, process, run
from support.file_limit import files_of_at_most
from support.pcapng import check_headers, payload_of, read
from support.ports import free_port
from support.roce import skip_unless_free

DEVICE = "roce:lo"


@pytest.fixture(scope="module", autouse=True)
def _has_device() -> None:
    skip_unless_free(DEVICE)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "packets.pcapng"


def comments(path: pathlib.Path) -> list[str]:
    """Check each packet in a file, and return the comments."""
    seen = read(path)
    for each in seen:
        check_headers(each.frame)
    return [each.comment for each in seen]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["send", "--data", "hello"], "SEND wr_id 1, 5 bytes, QP 0x"),
        (["send", "--data", "hello", "--qp-type", "ud"], "SEND wr_id 1, 5 bytes, QP 0x"),
        (["write", "--data", "hello"], "RDMA_WRITE wr_id 1, 5 bytes, QP 0x"),
        (["read", "--size", "7"], "RDMA_READ wr_id 1, 7 bytes, QP 0x"),
        (["atomic", "cas"], "ATOMIC_CMP_AND_SWP wr_id 1, 8 bytes, QP 0x"),
        (["atomic", "fetch-add"], "ATOMIC_FETCH_AND_ADD wr_id 1, 8 bytes, QP 0x"),
        (["bind-mw"], "RDMA_WRITE wr_id 2, 11 bytes, QP 0x"),
        (["invalidate"], "RDMA_WRITE wr_id "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_pcap_names_the_work_request_of_each_packet(path, command, says):
    ran = run(*command, "-d", DEVICE, "--pcap", str(path), "-v")
    assert ran.code == 0, ran.err
    said = comments(path)
    assert [each for each in said if each.startswith(says)]
    assert f"capture  {len(said)} packets in {path}\n" in ran.err


def test_client_and_server_capture_a_post_between_processes(path, tmp_path):
    theirs = tmp_path / "served.pcapng"
    command = [sys.executable, "-P", "-m", "rdmapost.cli", "serve", "-d", DEVICE, "--tcp-port", "0"]
    with subprocess.Popen(
        [*command, "--pcap", str(theirs)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        where = server.stdout.readline().split()[2]
        try:
            ran = run("write", where, "--data", "hello", "-d", DEVICE, "--pcap", str(path))
        finally:
            server.send_signal(signal.SIGINT)
            server.stdout.read()
            assert server.wait(LIMIT) == 0
    assert ran.code == 0, ran.err
    assert any(each.startswith("RDMA_WRITE wr_id 1, 5 bytes") for each in comments(path))
    assert any(each.startswith("RDMA_WRITE, QP 0x") for each in comments(theirs))
    here, there = ({each.frame for each in read(file)} for file in (path, theirs))
    assert here == there


def test_pingpong_writes_its_packets_to_a_capture(path):
    port = str(free_port())
    options = ("-d", DEVICE, "-n", "20", "-s", "100", "--tcp-port", port)
    command = [sys.executable, "-P", "-m", "rdmapost.cli", "pingpong", *options]
    command += ["--bind", "127.0.0.1", "--wait", "60"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stderr is not None
        server.stderr.readline()
        client = run("pingpong", "127.0.0.1", *options, "--pcap", str(path))
        assert server.wait(LIMIT) == 0
    assert client.code == 0, client.err
    sent = [each for each in read(path) if each.is_sent and each.comment.startswith("SEND")]
    assert len(sent) >= 20
    assert all(payload_of(each.frame)[12:112] for each in sent)


def separate(*args: str) -> Ran:
    """Run a command as a process: what is logged is on its standard error, too."""
    done = process(*args)
    return Ran(done.returncode, done.stdout, done.stderr)


def failed(ran: Ran, code: int, text: str) -> None:
    assert (ran.code, ran.out) == (code, "")
    assert text in ran.err


def test_pcap_is_refused_on_devices_without_packets(path):
    ran = run("write", "-d", "soft0", "--pcap", str(path))
    failed(ran, 1, "--pcap is not supported: soft0 has no packets; use a roce device")
    assert not path.exists()


def test_pcap_file_that_cannot_be_created_is_a_usage_error(tmp_path):
    path = tmp_path / "missing" / "packets"
    ran = run("write", "-d", DEVICE, "--pcap", str(path))
    failed(ran, 2, f"--pcap {path}: No such file or directory")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_pcap_file_that_takes_no_first_bytes_is_a_usage_error():
    """Every time: nothing is posted."""
    for _ in range(10):
        ran = separate("write", "-d", DEVICE, "--pcap", "/dev/full")
        failed(ran, 2, "--pcap /dev/full: No space left on device")
        assert ran.err.count("No space left") == 1


@pytest.mark.parametrize("json", [False, True])
def test_pcap_file_that_cannot_be_completed_fails_the_command_with_its_result(path, json):
    with files_of_at_most(4096):
        ran = separate(
            *("write", "-d", DEVICE, "--size", "64K", "--pcap", str(path)),
            *(["--json"] if json else []),
        )
    text = f"the capture to {path} ended after 0 packets: File too large"
    assert (ran.code, ran.err) == (1, f"rdmapost: {text}\n")
    if json:
        assert (ran.doc["status"], ran.doc["error"]) == ("SUCCESS", text)
        assert ran.doc["received"] == ran.doc["data"]
    else:
        assert ran.out.startswith(f"RDMA_WRITE of 65536 bytes on RC, {DEVICE}: SUCCESS\n")
    assert read(path, is_whole=False) == []

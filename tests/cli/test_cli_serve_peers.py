"""``rdmapost serve`` as a process on a real device, with clients in this process and in others."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support import LIMIT
from support.agents import Remote, local_agent
from support.cli_runner import on, run

import rdmapost as rp
from rdmapost import WCStatus, connect


@pytest.fixture(scope="module")
def agent(verbs_context: rp.Context) -> Iterator[tuple[str, int]]:
    with local_agent() as address:
        yield address


class Serving:
    """``rdmapost serve --json``, and its output."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.port: int = self.next("serving")["port"]
        self.where = f"127.0.0.1:{self.port}"

    def next(self, event: str) -> dict[str, Any]:
        """Wait for an event, skipping others."""
        doc: dict[str, Any] = json.loads(self.remote.until("out", f'"event": "{event}"'))
        return doc

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End it; return exit status and standard error."""
        self.remote.signal(number)
        ended = self.remote.ended()
        return ended.status, ended.err


Start = Callable[..., Serving]


@pytest.fixture
def start(verbs_context: rp.Context, agent: tuple[str, int]) -> Iterator[Start]:
    """Start processes that serve, which end with the test."""
    with ExitStack() as stack:

        def make(*args: str) -> Serving:
            argv = ["rdmapost", "serve", "--json", "--tcp-port", "0", "-d", verbs_context.name]
            return Serving(stack.enter_context(Remote(agent, *argv, *args)))

        yield make


def test_every_posting_command_reaches_serve(
    verbs_context: rp.Context, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = start("--token", "secret", "--shared", "--data", "12345678")
    monkeypatch.setenv("RDMAPOST_TOKEN", "secret")

    def post(*args: str) -> dict[str, Any]:
        ran = on(verbs_context, *args, served.where, "--json")
        assert (ran.code, ran.err) == (0, "")
        assert ran.doc["status"] == "SUCCESS"
        return ran.doc

    for qp_type in ("rc", "uc", "ud"):
        doc = post("send", "--data", "hello", "--imm", "5", "--qp-type", qp_type)
        assert (doc["received"], doc["imm_data"]) == ("hello", 5)
        joined, arrived = served.next("joined"), served.next("arrived")
        assert joined["qp_type"] == qp_type.upper()
        assert (arrived["data"], arrived["imm_data"], arrived["byte_len"]) == ("hello", 5, 5)
        assert served.next("left")["reason"] == "done"
    assert post("read", "--size", "8")["received"] == "12345678"
    assert post("write", "--data", "abc", "--offset", "100")["received"] == "abc"
    assert post("write", "--data", "xyz", "--imm", "9", "--qp-type", "uc")["imm_data"] == 9
    assert served.next("arrived")["imm_data"] == 9
    assert post("atomic", "fetch-add", "--offset", "64", "--add", "7")["new"] == 7
    doc = post("atomic", "cas", "--offset", "64", "--compare", "7", "--swap", "8")
    assert (doc["old"], doc["new"]) == (7, 8)
    monkeypatch.delenv("RDMAPOST_TOKEN")
    ran = on(verbs_context, "send", served.where)
    assert ran.code == 1
    assert "requires a token" in ran.err
    assert served.end() == (0, "")
    assert served.next("ended")["clients"] == 8


def test_client_on_the_software_device_is_refused_by_name(start: Start) -> None:
    served = start()
    ran = run("send", "-d", "soft0", served.where)
    assert ran.code == 1
    assert "the client's soft0 exists only in its own process" in ran.err


CLIENT = """
import os, socket, sys, rdmapost as rp
from rdmapost import connect
from rdmapost.tools.reachability import fabric_of
from rdmapost.tools.connect.protocol_messages import Bye, Hello, Look, Ready, Report, encode
device, port, stage = sys.argv[1], int(sys.argv[2]), sys.argv[3]
context = rp.open_device(device)
def die():
    os.kill(os.getpid(), 9)
if stage in ("hello", "half a hello", "ready", "half a report", "waiting"):
    pd = rp.PD(context); cq = rp.CQ(context); qp = rp.QP(pd, rp.QPType.RC, cq)
    sock = socket.create_connection(("127.0.0.1", port))
    hello = encode(Hello(None, fabric_of(context), rp.QPType.RC, qp.endpoint()))
    sock.sendall(hello[:40] if stage == "half a hello" else hello)
    if stage not in ("half a hello", "hello"):
        sock.recv(4096)
        sock.sendall(encode(Ready()))
        sock.recv(4096)
    if stage == "half a report":
        sock.sendall(encode(Report(1, 1000))[:9])
    if stage == "waiting":
        sock.sendall(encode(Report(1, 60000)))
    die()
peer = connect.dial(context, "127.0.0.1", port)
if stage == "connected":
    die()
memory = peer.region(4096)
peer.qp.post_send([rp.RdmaWrite(memory[:4096], **peer.target())] * 8)
if stage == "posted":
    die()
peer.wait(8)
die()
"""


def test_serve_survives_clients_that_are_killed(
    verbs_context: rp.Context, agent: tuple[str, int], start: Start
) -> None:
    served = start("--max-clients", "2")
    with connect.dial(verbs_context, "127.0.0.1", served.port) as witness:
        served.next("joined")
        for stage in (
            "half a hello",
            "hello",
            "ready",
            "half a report",
            "waiting",
            "connected",
            "posted",
            "done",
        ):
            argv = ["python", "-c", CLIENT, verbs_context.name, str(served.port), stage]
            with Remote(agent, *argv) as client:
                assert client.ended() == (-signal.SIGKILL, "", ""), stage
            # Its resources are released, so the next client can join.
            gone = served.next("refused" if stage == "half a hello" else "left")
            reason = gone.get("reason", gone.get("error"))
            assert "connection" in reason or "disconnected" in reason, stage
            # It wrote zeros, which were there already.
            assert gone.get("changed") is None
            witness.qp.post_send(rp.RdmaWrite(witness.mr[:8], **witness.target()))
            witness.wait()[0].check()
    with connect.dial(verbs_context, "127.0.0.1", served.port) as peer:
        assert peer.look(0, 1).data == b"\0"
    assert served.end() == (0, "")


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name
)
def test_client_whose_server_dies_gets_an_error(
    verbs_context: rp.Context, start: Start, number: signal.Signals
) -> None:
    served = start()
    with connect.dial(verbs_context, "127.0.0.1", served.port) as peer:
        peer.qp.post_send(rp.RdmaWrite(peer.mr[:8], **peer.target()))
        peer.wait()[0].check()
        assert served.end(number)[0] == (-9 if number == signal.SIGKILL else 0)
        peer.qp.post_send(rp.RdmaWrite(peer.mr[:8], **peer.target()))
        # The peer's queue pair is gone: nothing acknowledges.
        assert peer.wait(1, LIMIT)[0].status is WCStatus.RETRY_EXC_ERR
        started = time.monotonic()
        with pytest.raises(connect.ConnectError) as error:
            peer.look()
        assert error.value.code == ("lost" if number == signal.SIGKILL else "closing")
        assert time.monotonic() - started < peer.timeout
    assert peer.qp.closed


def test_several_processes_post_at_once(
    verbs_context: rp.Context, agent: tuple[str, int], start: Start
) -> None:
    served = start()
    with ExitStack() as stack:
        clients = [
            stack.enter_context(
                Remote(
                    agent,
                    "rdmapost",
                    "send",
                    "-d",
                    verbs_context.name,
                    served.where,
                    "--count",
                    "10",
                    "--data",
                    f"from {name}",
                    "--timeout",
                    "30",
                    "--json",
                )
            )
            for name in range(4)
        ]
        for name, client in enumerate(clients):
            ended = client.ended()
            assert (ended.status, ended.err) == (0, "")
            assert json.loads(ended.out)["received"] == f"from {name}"
    assert [served.next("left")["reason"] for _ in clients] == ["done"] * 4
    assert served.end() == (0, "")

"""``rdmapost serve``: what it prints, how it ends, and what it survives.

What only two processes with a real device can show is in test_cli_serve_peers.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import LIMIT, until
from support.cli_runner import Ran, on, process, run

import rdmapost as rp
from rdmapost import connect

# ---- what serve prints --------------------------------------------------------


def test_serve_on_a_used_port_or_an_unknown_host_fails(context: rp.Context) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        ran = on(context, "serve", "--tcp-port", port)
    assert ran.code == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in ran.err
    ran = on(context, "serve", "--bind", "nowhere.invalid")
    assert ran.code == 1
    assert "host nowhere.invalid " in ran.err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--size", "x"],
        ["--size", "0"],
        ["--what"],
        ["-d", "nosuch"],
        ["--bind", "192.0.2.1", "-d", "soft0"],
    ],
    ids=lambda args: " ".join(args),
)
def test_serve_fails_with_one_object_on_one_line(wrong: list[str]) -> None:
    ran = run("serve", "--json", "--tcp-port", "0", *wrong)
    assert ran.code != 0
    (line,) = ran.out.splitlines()
    assert json.loads(line)["error"]


def serving(
    context: rp.Context,
    monkeypatch: pytest.MonkeyPatch,
    visit: Callable[[tuple[str, int]], object],
    *args: str,
    number: int = signal.SIGINT,
) -> Ran:
    """Run ``serve`` in this thread and a client in another one, which ends it with a signal."""
    serve, started = connect.serve, threading.Event()
    address: list[tuple[str, int]] = []
    failed: list[BaseException] = []

    def begin(*args: Any, **options: Any) -> connect.Server:
        server = serve(*args, **options)
        address.append(server.address[:2])
        started.set()
        return server

    def client() -> None:
        started.wait(LIMIT)
        if not address:
            return
        try:
            visit(address[0])
        except BaseException as error:
            failed.append(error)
        finally:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(connect, "serve", begin)
    thread = threading.Thread(target=client)
    thread.start()
    ran = on(context, "serve", "--tcp-port", "0", *args)
    started.set()
    thread.join()
    assert failed == []
    return ran


def test_serve_shows_what_each_client_gets_and_does(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {}

    def visit(address: tuple[str, int]) -> None:
        with connect.dial(context, *address) as peer:
            shown["offer"] = peer.offer
            peer.mr.buffer[:6] = b"hello\xff"
            peer.qp.post_send(rp.SendWithImm(peer.mr[:5], imm_data=5))
            peer.qp.post_send(rp.Send(peer.mr[5:6]))
            peer.qp.post_send(rp.RdmaWrite(peer.mr[:5], **peer.target(7)))
            peer.qp.post_send(rp.RdmaWriteWithImm(peer.mr[:1], imm_data=6, **peer.target(7)))
            for wc in peer.wait(4):
                wc.check()
            peer.report(3)
        with pytest.raises(connect.ConnectError, match=r"the (server|client)'s"):
            refused(address)

    def refused(address: tuple[str, int]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(
                "rdmapost.tools.connect.base_connection.fabric_of", lambda _: "soft:soft0:elsewhere"
            )
            connect.dial(context, *address)

    ran = serving(context, monkeypatch, visit, "--json", "--access", "write", "--count", "3")
    assert ran.code == 0
    docs = [json.loads(line) for line in ran.out.splitlines()]
    assert [doc.pop("event") for doc in docs] == [
        "serving",
        "joined",
        "arrived",
        "arrived",
        "arrived",
        "left",
        "refused",
        "ended",
    ]
    offer = shown["offer"]
    address = docs[1].pop("address")
    assert address.startswith("127.0.0.1:")
    assert docs[1] == {
        "client": 1,
        "qp_type": "RC",
        "qp_num": offer.endpoint.qp_num,
        "addr": offer.addr,
        "rkey": offer.rkey,
        "size": 4096,
        "access": ["write"],
        "receives": 3,
        "receive_size": 4096,
    }
    first, second, third = docs[2:5]
    assert len(first.pop("sha256")) == 64
    assert first == {
        "client": 1,
        "index": 1,
        "status": "SUCCESS",
        "opcode": "RECV",
        "byte_len": 5,
        "imm_data": 5,
        "data": "hello",
        "encoding": "utf-8",
    }
    assert (second["data"], second["encoding"]) == ("ff", "hex")
    assert third == {
        "client": 1,
        "index": 3,
        "status": "SUCCESS",
        "opcode": "RECV_RDMA_WITH_IMM",
        "byte_len": 1,
        "imm_data": 6,
    }
    assert docs[5] == {
        "client": 1,
        "address": address,
        "reason": "done",
        "changed": {"offset": 7, "length": 5, "data": "hello", "encoding": "utf-8"},
    }
    assert docs[6]["code"] == "device"
    assert docs[7] == {"clients": 1}


def test_serve_says_that_a_request_was_refused(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def visit(address: tuple[str, int]) -> None:
        with connect.dial(context, *address) as peer:
            peer.qp.post_send(rp.RdmaWrite(peer.mr[:2], remote_addr=1, rkey=peer.offer.rkey))
            assert peer.wait()[0].status
            peer.report(1)

    ran = serving(context, monkeypatch, visit, number=signal.SIGTERM)
    (failed,) = [line for line in ran.out.splitlines() if "failed" in line]
    assert failed.startswith(
        "client 1: its queue pair failed: one of the client's requests was refused"
    )
    assert failed.endswith("receives end with WR_FLUSH_ERR")


def test_serve_prints_events_as_text(context: rp.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def visit(address: tuple[str, int]) -> None:
        with connect.dial(context, *address) as peer:
            shown.append(peer.offer)
            peer.mr.buffer[:100] = b"x" * 100
            peer.qp.post_send(rp.SendWithImm(peer.mr[:100], imm_data=5))
            peer.qp.post_send(rp.RdmaWrite(peer.mr[:2], **peer.target()))
            for wc in peer.wait(2):
                wc.check()
            peer.report(1)
            peer.qp.post_send(rp.Send(peer.mr[:101]))
            assert peer.wait()[0].status
            peer.report(2)

    shown: list[connect.Offer] = []
    ran = serving(context, monkeypatch, visit, "--receive-size", "100", number=signal.SIGTERM)
    assert ran.code == 0
    _, joined, arrived, failed, changed, left, ended = ran.out.splitlines()
    (offer,) = shown
    assert joined.endswith(
        f": RC, address {offer.addr:#x}, rkey {offer.rkey:#x}, size {offer.size}"
    )
    assert arrived == f'client 1: RECV of 100 bytes, imm_data 0x5: "{"x" * 60}..."'
    assert failed.startswith("client 1: its queue pair failed: ")
    assert "WR_FLUSH_ERR" not in failed
    assert changed == 'client 1: memory 0..2 holds "xx"'
    assert left == "client 1 left: done"
    assert ended == "ended after 1 client"


def test_serve_disconnects_a_client_after_idle_timeout(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def visit(address: tuple[str, int]) -> None:
        with connect.dial(context, *address) as peer:
            until(lambda: peer.closed)

    ran = serving(context, monkeypatch, visit, "--idle-timeout", "0.3")
    assert ran.code == 0
    left = ran.out.splitlines()[2]
    assert left == "client 1 left: nothing came from the client within 0.3 s"


# ---- serve as a process ---------------------------------------------------------


class Process:
    """``rdmapost serve --json`` as a separate process, and its output."""

    def __init__(self, *args: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "rdmapost.cli",
                "serve",
                "--json",
                "--tcp-port",
                "0",
                *args,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.first = self.next("serving")
        self.where = f"127.0.0.1:{self.first['port']}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put({"event": None})

    def next(self, event: str) -> dict[str, Any]:
        """Wait for an event, skipping others."""
        while True:
            doc = self._lines.get(timeout=LIMIT)
            if doc["event"] == event:
                return doc
            assert doc["event"] is not None, "the server has ended"

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End it; return exit status and standard error."""
        self.process.send_signal(number)
        code = self.process.wait(LIMIT)
        self._reader.join()
        assert self.process.stderr is not None
        return code, self.process.stderr.read()

    def clean(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Start processes that serve, which end with the test."""
    with contextlib.ExitStack() as stack:

        def make(*args: str, **environment: str) -> Process:
            process = Process(*args, **environment)
            stack.callback(process.clean)
            return process

        yield make


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_sigint_or_sigterm_ends_serve_with_0_and_notifies_clients(
    start: Callable[..., Process], number: signal.Signals
) -> None:
    served = start("-d", "soft0")
    first = served.first
    assert (first["device"], first["kind"], first["host"]) == ("soft0", "soft", "127.0.0.1")
    assert (first["size"], first["count"], first["warning"]) == (4096, 16, None)
    assert first["access"] == ["read", "write", "atomic"]
    with socket.create_connection(("127.0.0.1", first["port"]), LIMIT) as waiting:
        code, err = served.end(number)
        assert code == 0
        assert json.loads(waiting.recv(4096))["code"] == "closing"
    assert served.next("ended")["clients"] == 0
    (line,) = err.splitlines()
    assert line.startswith(
        "soft0 exists only in its own process and reaches no other; "
        "use roce:lo, or a real device such as rxe0, on both sides"
    )


def test_serve_says_what_it_exposes(start: Callable[..., Process]) -> None:
    served = start(
        "-d", "soft0", "--bind", "0.0.0.0", "--access", "read", "--size", "1K", "--count", "3"
    )
    warning = (
        f"everyone who reaches 0.0.0.0:{served.first['port']} gets read access to 1024 bytes "
        "of memory for each client"
    )
    assert served.first["warning"] == warning
    assert (served.first["access"], served.first["count"]) == (["read"], 3)
    code, err = served.end()
    assert code == 0
    assert err.count(warning) == 1


def test_client_of_another_process_is_refused_on_the_software_device(
    start: Callable[..., Process],
) -> None:
    served = start("-d", "soft0")
    ran = process("send", "-d", "soft0", served.where)
    assert ran.returncode == 1
    assert "the server's soft0 exists only in its own process" in ran.stderr
    assert "use roce:lo, or a real device such as rxe0, on both sides" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert served.next("refused")["code"] == "device"
    assert served.end()[0] == 0


def test_serve_survives_clients_that_send_garbage(start: Callable[..., Process]) -> None:
    served = start("-d", "soft0", "--timeout", "1")
    address = ("127.0.0.1", served.first["port"])
    for said, code in ((b"GET /\n", "format"), (b'{"rdmapost":9}\n', "version"), (b"{", "timeout")):
        with socket.create_connection(address, LIMIT) as sock:
            sock.sendall(said)
            assert json.loads(sock.makefile("rb").readline())["code"] == code
        assert served.next("refused")["code"] == code
    with socket.create_connection(address, LIMIT):
        pass
    assert served.next("refused")["error"] == "disconnected before its hello"
    code_, _ = served.end()
    assert code_ == 0


def test_serve_prints_text_without_json() -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-u",
            "-m",
            "rdmapost.cli",
            "serve",
            "-d",
            "soft0",
            "--tcp-port",
            "0",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        where = line.split()[2]
        offers = "4096 bytes for read, write, atomic; 16 receives"
        assert line == f"serving on {where} (soft0): {offers}\n"
        with socket.create_connection(("127.0.0.1", int(where.split(":")[1]))) as sock:
            sock.sendall(b"hello\n")
            assert process.stdout.readline().startswith("refused 127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "ended after 0 clients\n"
    assert process.returncode == 0


SIGNALS_READY = """
import os
from rdmapost.cli import main
os.write(1, b"ready\\n")
main()
"""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pressed", ["once", "twice while it serves", "until it ends"])
def test_ctrl_c_at_any_moment_ends_serve_with_130_or_0_and_no_traceback(
    pressed: str, seed: int
) -> None:
    moment = random.Random(seed)
    command = subprocess.Popen(
        [sys.executable, "-P", "-c", SIGNALS_READY, "serve", "-d", "soft0", "--tcp-port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with command:
        assert command.stdout is not None
        assert command.stdout.readline() == "ready\n"
        if pressed == "twice while it serves":
            assert command.stdout.readline().startswith("serving on ")
            command.send_signal(signal.SIGINT)
            time.sleep(moment.uniform(0, 0.06))
        else:
            time.sleep(moment.uniform(0, 0.5))
        command.send_signal(signal.SIGINT)
        while pressed == "until it ends" and command.poll() is None:
            time.sleep(moment.uniform(0, 0.05))
            command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=LIMIT)
    assert command.returncode in (0, 130)
    assert "Traceback" not in err


INTERRUPTED_FINALIZER = """
import signal
import rdmapost.cli.app as app
from rdmapost.cli import main

class Dropped:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

app.app = Dropped
main()
print("not interrupted")
"""


def test_ctrl_c_in_a_finalizer_ends_a_command_with_130() -> None:
    """Python reports such an exception and carries on."""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", INTERRUPTED_FINALIZER],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_help_of_serve_says_what_its_json_prints() -> None:
    text = " ".join(run("serve", "--help").out.split())
    assert "--json Print one JSON object per line, for each event." in text
    assert "Print one JSON document." in run("send", "--help").out

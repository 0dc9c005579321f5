"""Serving and dialling in one process: what is exposed, to whom, for how long; who can break it.

The device is real in every test, and so are the sockets.  A client that must misbehave is a plain
socket; every test of one ends with a client that works.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import run_python

import rdmapost as rp
from rdmapost import Access, QPType, WCStatus, connect
from rdmapost.connect.fabric import fabric_of
from rdmapost.connect.messages import MAX_LINE, Bye, Hello, Look, Message, Ready, Report, encode

READ, WRITE, ATOMIC = Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC
EVERYTHING = READ | WRITE | ATOMIC
PATIENCE = 30.0
"""Seconds after which something that must come does not come."""
ENDPOINT = "qpn=0x123456 psn=0x1 gid={gid} lid=0x0 mtu=1024"


class Served:
    """A server and what it has told."""

    def __init__(self, context: rp.Context, **options: Any) -> None:
        self.context = context
        self.told: queue.Queue[connect.Event] = queue.Queue()
        options = {"port": 0, "token": None, **options}
        self.token = options["token"]
        self.server = connect.serve(context, on_event=self.told.put, **options)

    def dial(self, **options: Any) -> connect.Connection:
        return connect.dial(
            self.context, *self.server.address[:2], **{"token": self.token, **options}
        )

    def until(self, kind: type[Any]) -> Any:
        """Wait for an event of this kind; others are passed over."""
        while True:
            event = self.told.get(timeout=PATIENCE)
            if isinstance(event, kind):
                return event

    def works(self) -> None:
        """A client comes, and its bytes arrive."""
        with self.dial() as peer:
            peer.mr.buffer[:8] = b"still ok"
            peer.qp.post_send(rp.Send(peer.mr[:8]))
            peer.wait()[0].check()
            arrival = peer.report()
            assert arrival is not None
            assert arrival.data == b"still ok"


@pytest.fixture
def serve(context: rp.Context) -> Iterator[Callable[..., Served]]:
    """Make servers, which end with the test and leave nothing open."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Served:
            served = Served(context, **options)
            stack.callback(served.server.close)
            return served

        yield make


def hello(context: rp.Context, token: str | None = None) -> Hello:
    """What a client says first whose queue pair is nowhere."""
    gid = rp.choose_gid(context).gid
    return Hello(token, fabric_of(context), QPType.RC, rp.Endpoint.parse(ENDPOINT.format(gid=gid)))


@contextlib.contextmanager
def stranger(served: Served, *messages: Message | bytes) -> Iterator[socket.socket]:
    """A plain connection that says something."""
    with socket.create_connection(served.server.address[:2], PATIENCE) as sock:
        for message in messages:
            sock.sendall(message if isinstance(message, bytes) else encode(message))
        yield sock


def answers(sock: socket.socket) -> list[dict[str, Any]]:
    """Read all that the server says, to its end."""
    heard = b""
    while data := sock.recv(65536):
        heard += data
    return [json.loads(line) for line in heard.splitlines()]


def one_error(sock: socket.socket) -> tuple[str, str]:
    """Return code and text of the one error that the server says at last."""
    *before, last = answers(sock)
    assert [m["type"] for m in before if m["type"] == "error"] == []
    assert last["type"] == "error"
    assert "\n" not in last["text"]
    return last["code"], last["text"]


# ---- what is exposed ----------------------------------------------------------


def test_one_sided_operations_reach_the_exposed_memory(serve: Callable[..., Served]) -> None:
    served = serve(data=b"what stood there")
    with served.dial() as peer:
        (client,) = served.server.clients
        assert (peer.offer.addr, peer.offer.rkey) == (client.mr.addr, client.mr.rkey)
        assert peer.offer.size == 4096
        peer.qp.post_send(rp.RdmaRead(peer.mr[:16], **peer.target()))
        peer.wait()[0].check()
        assert bytes(peer.mr.buffer[:16]) == b"what stood there"
        peer.qp.post_send(rp.RdmaWrite(peer.mr[:4], **peer.target(4088)))
        peer.wait()[0].check()
        assert bytes(client.mr.buffer[-8:]) == b"what\0\0\0\0"
        seen = peer.look(4080)
        assert seen.data == bytes(8) + b"what" + bytes(4)
        assert seen.sha256 == hashlib.sha256(seen.data).hexdigest()
    left = served.until(connect.Left)
    assert left.reason == "done"
    assert left.changed == connect.Changed(4088, 4, b"what")


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD], ids=lambda t: t.name)
def test_messages_are_reported(serve: Callable[..., Served], qp_type: QPType) -> None:
    served = serve(count=4, receive_size=64)
    with served.dial(qp_type=qp_type) as peer:
        # More than there are receives: they are posted again.
        for index in range(1, 10):
            text = b"message %d" % index
            peer.mr.buffer[: len(text)] = text
            peer.qp.post_send(rp.SendWithImm(peer.mr[: len(text)], imm_data=index, **peer.address))
            peer.wait()[0].check()
            arrival = peer.report(index)
            assert arrival is not None
            assert arrival.status is WCStatus.SUCCESS
            assert arrival.opcode is rp.WCOpcode.RECV
            assert (arrival.index, arrival.imm_data) == (index, index)
            assert (arrival.byte_len, arrival.data) == (len(text), text)
            assert arrival.sha256 == hashlib.sha256(text).hexdigest()
            assert served.until(connect.Arrived) == connect.Arrived(1, arrival)
        assert peer.report(10, 0.05) is None
        early = peer.report(3)
        assert early is not None
        assert early.data == b"message 3"


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC], ids=lambda t: t.name)
def test_a_write_with_immediate_is_reported(serve: Callable[..., Served], qp_type: QPType) -> None:
    served = serve()
    with served.dial(qp_type=qp_type) as peer:
        peer.mr.buffer[:3] = b"abc"
        peer.qp.post_send(rp.RdmaWriteWithImm(peer.mr[:3], imm_data=77, **peer.target(10)))
        peer.wait()[0].check()
        arrival = peer.report()
        assert arrival is not None
        assert arrival.opcode is rp.WCOpcode.RECV_RDMA_WITH_IMM
        assert (arrival.byte_len, arrival.imm_data, arrival.sha256) == (3, 77, "")
        assert peer.look(10, 3).data == b"abc"


def test_threads_may_ask_at_once(serve: Callable[..., Served]) -> None:
    with serve(data=bytes(range(8))).dial() as peer:
        found: list[bytes] = []

        def ask(offset: int) -> None:
            for _ in range(20):
                found.append(peer.look(offset, 1).data)

        threads = [threading.Thread(target=ask, args=(offset,)) for offset in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == [bytes([offset]) for offset in range(4) for _ in range(20)]


def test_a_report_waits_for_the_message(serve: Callable[..., Served]) -> None:
    served = serve()
    with served.dial() as peer:

        def send() -> None:
            served.until(connect.Joined)
            peer.qp.post_send(rp.Send())

        sender = threading.Thread(target=send)
        sender.start()
        arrival = peer.report(1, PATIENCE)
        sender.join()
        assert arrival is not None
        assert arrival.byte_len == 0


GRANTS = [Access(0), READ, WRITE, ATOMIC, READ | WRITE, EVERYTHING]
OPERATIONS: dict[Access, Callable[[connect.Connection], rp.SendWR]] = {
    READ: lambda peer: rp.RdmaRead(peer.mr[:8], **peer.target()),
    WRITE: lambda peer: rp.RdmaWrite(peer.mr[:8], **peer.target()),
    ATOMIC: lambda peer: rp.AtomicFetchAndAdd(peer.mr[:8], compare_add=1, **peer.target()),
}


@pytest.mark.parametrize("access", GRANTS, ids=str)
def test_exactly_the_access_asked_for_is_given(
    serve: Callable[..., Served], access: Access
) -> None:
    served = serve(access=access)
    for needed, make in OPERATIONS.items():
        with served.dial() as peer:
            (client,) = served.server.clients
            assert peer.offer.access == access
            assert client.mr.access & ~Access.LOCAL_WRITE == access
            assert client.qp.query().qp_access_flags & EVERYTHING == access
            peer.qp.post_send(make(peer))
            status = peer.wait()[0].status
            # A device may refuse at the queue pair or at the region.
            refused = {WCStatus.REM_ACCESS_ERR, WCStatus.REM_INV_REQ_ERR}
            assert status is WCStatus.SUCCESS if needed & access else status in refused
    served.works()


def test_a_key_of_another_client_is_of_no_use(serve: Callable[..., Served]) -> None:
    served = serve()
    with served.dial() as mine, served.dial() as other:
        mine.qp.post_send(
            rp.RdmaWrite(mine.mr[:8], remote_addr=other.offer.addr, rkey=other.offer.rkey)
        )
        assert mine.wait()[0].status is WCStatus.REM_ACCESS_ERR
        assert other.look(0, 8).data == bytes(8)


def test_a_key_is_gone_with_its_client(serve: Callable[..., Served]) -> None:
    served = serve(max_clients=1)
    with served.dial() as first:
        (client,) = served.server.clients
        old = first.target()
    assert (client.mr.closed, client.qp.closed, client.channel.closed) == (True, True, True)
    assert served.server.clients == []
    with served.dial() as second:
        second.qp.post_send(rp.RdmaWrite(second.mr[:8], **old))
        if second.offer.rkey != old["rkey"]:
            assert second.wait()[0].status is WCStatus.REM_ACCESS_ERR


def test_what_goes_wrong_at_the_far_side_is_told_there(serve: Callable[..., Served]) -> None:
    served = serve(receive_size=4)
    with served.dial() as peer:
        peer.qp.post_send(rp.Send(peer.mr[:8]))
        assert peer.wait()[0].status is not WCStatus.SUCCESS
        arrival = served.until(connect.Arrived).arrival
        assert arrival.status is not WCStatus.SUCCESS
        # And so is every later question, at once.
        again = peer.report(5, PATIENCE)
        assert again is not None
        assert again.status is arrival.status
    served_again = serve()
    served_again.works()


def test_clients_share_memory_when_asked_to(
    serve: Callable[..., Served], context: rp.Context
) -> None:
    served = serve(shared=True, size=64)
    assert served.server.memory is not None
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(served.dial()) for _ in range(4)]
        assert len({peer.offer.rkey for peer in peers}) == 4
        for peer in peers:
            peer.qp.post_send(rp.AtomicFetchAndAdd(peer.mr[:8], compare_add=5, **peer.target(8)))
            peer.wait()[0].check()
        assert served.server.memory[8:16].cast("Q")[0] == 20
        assert peers[0].look(8, 8).data == bytes(served.server.memory[8:16])
    assert served.until(connect.Left).changed == connect.Changed(8, 1, b"\x14")


def test_what_may_not_be_read_is_not_told(serve: Callable[..., Served]) -> None:
    for options in ({"shared": True}, {"data": b"secret"}):
        with serve(access=WRITE, **options).dial() as peer:
            assert (peer.look().sha256, peer.look().data) == ("", b"")
    # Its own, which held nothing, it may know.
    with serve(access=WRITE).dial() as peer:
        assert peer.look(0, 4).data == bytes(4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size": 0}, "size=0"), ({"count": -1}, "count=-1"), ({"count": 1 << 20}, "count=1048576"),
        ({"receive_size": -1}, "receive_size=-1"), ({"access": Access.LOCAL_WRITE}, "not made of"),
        ({"data": b"12345", "size": 4}, "5 bytes of data"), ({"token": ""}, "a token has"),
        ({"max_clients": 0}, "max_clients=0"), ({"timeout": 0}, "timeout=0"),
        ({"idle_timeout": -1}, "idle_timeout=-1"), ({"port_num": 99}, "no port 99"),
        ({"port": 65536}, "port=65536"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_served_is_refused_at_once(
    context: rp.Context, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        connect.serve(context, **{"port": 0, **options})


def test_a_gid_that_is_not_there_is_named_at_once(context: rp.Context) -> None:
    with pytest.raises(rp.RdmaError, match="no GID with index 99"):
        connect.serve(context, port=0, gid_index=99)


def test_an_address_in_use_is_named(serve: Callable[..., Served], context: rp.Context) -> None:
    served = serve()
    with pytest.raises(
        connect.ConnectError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address al"
    ):
        connect.serve(context, port=served.server.address[1])
    with pytest.raises(connect.ConnectError, match=r"cannot listen on 192\.0\.2\.1"):
        connect.serve(context, "192.0.2.1", 0)


@pytest.mark.parametrize("token", [None, "secret"])
def test_it_says_what_others_are_given(
    serve: Callable[..., Served], token: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert serve(token=token).server.warning is None
    assert caplog.messages == []
    served = serve(host="0.0.0.0", token=token, access=READ, size=100)
    who = "everyone" if token is None else "everyone with the token"
    port = served.server.address[1]
    assert served.server.warning == (
        f"{who} who reaches 0.0.0.0:{port} gets read access to 100 bytes of memory for each client"
    )
    assert caplog.messages == [served.server.warning]
    with connect.dial(served.context, "127.0.0.1", port, token=token) as peer:
        assert peer.offer.size == 100


# ---- many clients ---------------------------------------------------------------


def test_several_clients_at_once(serve: Callable[..., Served]) -> None:
    served = serve(max_clients=8)
    ready = threading.Barrier(8, timeout=PATIENCE)
    failed: list[BaseException] = []

    def work(name: int) -> None:
        try:
            text = b"%d" % name * 100
            with served.dial() as peer:
                peer.mr.buffer[:100] = text
                ready.wait()
                for index in range(1, 21):
                    peer.qp.post_send(rp.RdmaWrite(peer.mr[:100], **peer.target(index)))
                    peer.qp.post_send(rp.Send(peer.mr[:100]))
                    for wc in peer.wait(2, PATIENCE):
                        wc.check()
                    arrival = peer.report(index, PATIENCE)
                    assert arrival is not None
                    assert arrival.data == text
                assert peer.look(20, 100).data == text
        except BaseException as error:
            failed.append(error)
            ready.abort()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    left = [served.until(connect.Left) for _ in threads]
    assert {event.reason for event in left} == {"done"}


def test_there_is_a_last_place(serve: Callable[..., Served]) -> None:
    served = serve(max_clients=2)
    with served.dial() as first, served.dial():
        with pytest.raises(connect.ConnectError, match="has its 2 clients; try again") as error:
            served.dial()
        assert error.value.code == "busy"
        first.close()
        # When close() is back the place is free.
        served.works()
    served.works()


def test_a_place_is_free_after_what_could_not_be_made(serve: Callable[..., Served]) -> None:
    served = serve(max_clients=1, size=4096, receive_size=1 << 31, count=1 << 14)
    # 32 TiB of receives: no machine has that.
    for _ in range(3):
        with pytest.raises(connect.ConnectError) as error:
            served.dial()
        assert error.value.code == "failed"
    assert served.server.clients == []


# ---- clients that die ---------------------------------------------------------------


def part(message: Message) -> bytes:
    line = encode(message)
    return line[: len(line) // 2]


STEPS: dict[str, Callable[[Hello], list[Message | bytes]]] = {
    "at once": lambda hello: [],
    "in the hello": lambda hello: [part(hello)],
    "after the hello": lambda hello: [hello],
    "in ready": lambda hello: [hello, part(Ready())],
    "after ready": lambda hello: [hello, Ready()],
    "in a report": lambda hello: [hello, Ready(), part(Report(1, 60_000))],
    "waiting for a report": lambda hello: [hello, Ready(), Report(1, 60_000)],
    "after a look": lambda hello: [hello, Ready(), Look(0, 4096)],
    "in the bye": lambda hello: [hello, Ready(), part(Bye())],
    "after the bye": lambda hello: [hello, Ready(), Bye()],
}


@pytest.mark.parametrize("how", ["closed", "reset", "closed for writing"])
@pytest.mark.parametrize("step", STEPS)
def test_a_client_dies(
    serve: Callable[..., Served], context: rp.Context, step: str, how: str
) -> None:
    served = serve(max_clients=2)
    with served.dial() as witness:
        served.until(connect.Joined)
        with stranger(served, *STEPS[step](hello(context))) as sock:
            if how == "reset":
                # With a linger of no time a close is a reset.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif how == "closed for writing":
                sock.shutdown(socket.SHUT_WR)
                answers(sock)
        event = served.until((connect.Left, connect.Refused))  # type: ignore[arg-type]
        if step == "after the bye" and how != "reset":
            assert event.reason == "done"
        elif step == "in the hello" and how != "reset":
            assert event.text == "the connection ended in the middle of a message without a bye"
        # What it had is gone, and the other has noticed nothing.
        assert len(served.server.clients) == 1
        witness.qp.post_send(rp.RdmaWrite(witness.mr[:8], **witness.target()))
        witness.wait()[0].check()
        served.works()


def test_a_client_that_breaks_its_queue_pair_is_still_served(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    with served.dial() as peer:
        peer.qp.to_err()
        assert peer.look(0, 1).data == b"\0"
    assert served.until(connect.Left).reason == "done"
    served.works()


def test_a_program_that_ends_without_closing(serve: Callable[..., Served]) -> None:
    served = serve()
    code = """
import os, sys, warnings, rdmapost as rp
from rdmapost import connect
# Python says so of every socket that is left open.
warnings.simplefilter("ignore", ResourceWarning)
with rp.open_device(sys.argv[1]) as context:
    kept = connect.serve(context, port=0), rp.PD(context)
    if context.kind == "soft":
        dialled = connect.dial(context, *kept[0].address)
    else:
        dialled = connect.dial(context, "127.0.0.1", int(sys.argv[2]))
    print(dialled.offer.size, flush=True)
    if sys.argv[3] == "killed":
        os.kill(os.getpid(), 9)
    sys.exit()
"""
    port = str(served.server.address[1])
    for how, code_expected in (("exits", 0), ("killed", -9)):
        ended = run_python(code, served.context.name, port, how)
        assert ended.stdout == "4096\n"
        assert ended.stderr == ""
        assert ended.returncode == code_expected
    served.works()


# ---- clients that misbehave ---------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not the exchange of rdmapost"),
        (b"0000:000011:a1b2c3:00000000000000000000ffff0a000001\0", "not the exchange"),
        (b"{}\n", "does not say which version"),
        (b"{nonsense}\n", "not a line with one JSON object"),
        (b'{"rdmapost":1,"type":"hello"}\n', "hello lacks its field token"),
        (b'{"rdmapost":1,"type":"ready"}\n', "'ready' came, and not hello"),
        (b"{" + b"x" * MAX_LINE, "longer than 4096 bytes"),
        (b"{" + b"[" * (1 << 20), "longer than 4096 bytes"),
    ],
    ids=lambda v: str(v)[:12],
)  # fmt: skip
def test_garbage_gets_one_clear_error(serve: Callable[..., Served], sent: bytes, says: str) -> None:
    served = serve()
    # It may be cut off while it is still talking.
    with socket.create_connection(served.server.address[:2], PATIENCE) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(sent)
        if len(sent) < 1 << 16:
            code, text = one_error(sock)
            assert code == "format"
            assert says in text
    assert says in served.until(connect.Refused).text
    served.works()


@pytest.mark.parametrize("after", ["hello", "ready"])
def test_garbage_from_a_client_ends_it(
    serve: Callable[..., Served], context: rp.Context, after: str
) -> None:
    served = serve()
    said = [hello(context), Ready()][: 1 + (after == "ready")]
    with stranger(served, *said, b'{"type":"look","offset":0,"length":-1}\n') as sock:
        code, _ = one_error(sock)
        assert code == "format"
    assert served.until(connect.Left).reason != "done"
    assert served.server.clients == []
    served.works()


def test_another_version_is_refused(serve: Callable[..., Served]) -> None:
    served = serve(token="secret")
    with stranger(served, b'{"rdmapost":2,"type":"hello"}\n') as sock:
        code, text = one_error(sock)
    assert code == "version"
    assert "version 1" in text
    assert "version 2" in text
    served.works()


@pytest.mark.parametrize("token", [None, "Secret", "secret " * 20])
def test_strangers_are_kept_out(serve: Callable[..., Served], token: str | None) -> None:
    served = serve(token="secret")
    with pytest.raises(connect.ConnectError, match="token") as error:
        served.dial(token=token)
    assert error.value.code == "token"
    assert served.until(connect.Refused).code == "token"
    assert "secret" not in str(error.value)
    assert served.told.empty()
    served.works()


@pytest.mark.parametrize("step", ["at once", "in the hello", "after the hello", "in ready"])
def test_a_slow_client_is_told_so_and_keeps_nobody_waiting(
    serve: Callable[..., Served], context: rp.Context, step: str
) -> None:
    served = serve(timeout=1.0)
    with stranger(served, *STEPS[step](hello(context))) as sock:
        served.works()
        code, text = one_error(sock)
    assert code == "timeout"
    assert "within 1 s" in text
    expected = "hello" if step in ("at once", "in the hello") else "ready"
    assert f"its {expected} was to come" in text
    assert ("half a message" in text) == (step.startswith("in "))
    assert served.server.clients == []


def test_byte_by_byte_is_too_slow(serve: Callable[..., Served], context: rp.Context) -> None:
    served = serve(timeout=1.0)
    line = encode(hello(context))
    started = time.monotonic()
    with stranger(served) as sock:
        sock.settimeout(0.05)
        heard = b""
        for byte in line:
            with contextlib.suppress(OSError):
                sock.send(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                if heard := sock.recv(4096):
                    break
    assert json.loads(heard)["code"] == "timeout"
    assert time.monotonic() - started < len(line) * 0.05
    served.works()


def test_a_client_of_which_nothing_is_heard_goes(serve: Callable[..., Served]) -> None:
    served = serve(idle_timeout=1.0)
    with served.dial() as peer:
        assert served.until(connect.Left).reason == "nothing came from the client within 1 s"
        with pytest.raises(connect.ConnectError, match="nothing came from the client within 1 s"):
            peer.look()
        assert peer.closed
    served.works()


def test_a_crowd_at_the_door(serve: Callable[..., Served]) -> None:
    served = serve(timeout=3.0)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(stranger(served)) for _ in range(100)]
        told = [one_error(sock) for sock in crowd]
    codes = [code for code, _ in told]
    # Some wait until their time is over, the others are turned away at once.
    assert set(codes) == {"busy", "timeout"}
    assert codes.count("timeout") <= 32
    served.works()


def test_a_client_that_asks_and_never_listens(
    serve: Callable[..., Served], context: rp.Context
) -> None:
    served = serve(timeout=1.0)
    with served.dial() as witness, stranger(served, hello(context), Ready()) as sock:
        sock.settimeout(0.2)
        questions = encode(Look(0, 4096)) * 500
        with contextlib.suppress(OSError):
            while True:
                sock.sendall(questions)
        # The server stops reading as long as its answers are not taken, and then hangs up.
        left = served.until(connect.Left)
        assert left.client == 2
        assert left.reason.startswith(("the connection broke", "nothing came"))
        assert witness.look(0, 1).data == b"\0"
    served.works()


def test_two_questions_at_once_are_one_too_many(
    serve: Callable[..., Served], context: rp.Context
) -> None:
    served = serve()
    said = [hello(context), Ready(), Report(1, 60_000), Report(2, 60_000)]
    with stranger(served, *said) as sock:
        code, text = one_error(sock)
    assert (code, text) == ("format", "another question came before the answer to the last one")
    served.works()


@pytest.mark.parametrize("asked", [Look(4096, 1), Look(0, 1 << 40), Look((1 << 64) - 1, 1)])
def test_nobody_looks_outside_the_memory(
    serve: Callable[..., Served], context: rp.Context, asked: Look
) -> None:
    served = serve()
    with stranger(served, hello(context), Ready(), asked) as sock:
        code, text = one_error(sock)
    assert code == "failed"
    assert "not within the 4096 exposed" in text
    with served.dial() as peer, pytest.raises(ValueError, match="not within the 4096 bytes"):
        peer.look(4000, 97)


def test_a_random_exchange_never_ends_the_server(
    serve: Callable[..., Served], context: rp.Context
) -> None:
    import random

    rng = random.Random(5)
    served = serve(timeout=1.0, max_clients=4)
    start = encode(hello(context)) + encode(Ready())
    more = encode(Report(1, 0)) + encode(Look(0, 9)) + encode(Bye())
    for _ in range(150):
        said = bytearray(start + more)
        for _ in range(rng.randrange(4)):
            said[rng.randrange(len(said))] = rng.randrange(256)
        with stranger(served) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(bytes(said[: rng.randrange(len(said))]))
            if rng.randrange(3):
                sock.shutdown(socket.SHUT_WR)
                answers(sock)
    served.works()
    assert served.server.clients == []


# ---- the end ------------------------------------------------------------------------


def test_the_server_ends_with_clients_there(serve: Callable[..., Served]) -> None:
    served = serve()
    with served.dial() as peer, stranger(served) as waiting:
        (client,) = served.server.clients
        served.until(connect.Joined)
        served.server.close()
        assert client.mr.closed
        assert client.qp.closed
        assert served.until(connect.Left).reason == "the server ends"
        assert one_error(waiting)[0] == "closing"
        with pytest.raises(connect.ConnectError, match="refused: the server ends"):
            peer.look()
    served.server.close()
    with pytest.raises(
        connect.ConnectError, match="refused the connection: start 'rdmapost serve'"
    ):
        served.dial()
    assert [t.name for t in threading.enumerate() if t.name.startswith("serve ")] == []


def test_a_callback_may_end_the_server(context: rp.Context) -> None:
    ended = threading.Event()
    servers: queue.Queue[connect.Server] = queue.Queue()

    def end(event: connect.Event) -> None:
        if isinstance(event, connect.Joined):
            servers.get(timeout=PATIENCE).close()
            ended.set()

    server = connect.serve(context, port=0, on_event=end)
    servers.put(server)
    with contextlib.suppress(connect.ConnectError):
        connect.dial(context, *server.address[:2]).close()
    assert ended.wait(PATIENCE)


def test_an_owner_whose_callback_fails_serves_on(
    context: rp.Context, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(event: connect.Event) -> None:
        raise ZeroDivisionError("on purpose")

    with (
        connect.serve(context, port=0, on_event=fails) as server,
        connect.dial(context, *server.address[:2]) as peer,
    ):
        assert peer.look(0, 1).data == b"\0"
    assert "on_event failed" in caplog.messages


# ---- dialling -------------------------------------------------------------------------


@contextlib.contextmanager
def impostor(talk: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Something else that listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(PATIENCE)
                talk(sock)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            thread.join()


def heard(sock: socket.socket) -> None:
    """Read until the other side is gone."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass


def test_a_server_that_says_nothing(context: rp.Context) -> None:
    with (
        impostor(heard) as address,
        pytest.raises(
            connect.ConnectTimeout, match=r"did not answer within 0\.3 s: is it 'rdmapost"
        ),
    ):
        connect.dial(context, *address, timeout=0.3)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (b"SSH-2.0-x\r\n", "is no 'rdmapost serve': this is not the exchange"),
        (b'{"type":"ready"}\n', "'ready' came, and not offer or error"),
        (b"{" + b" " * 5000, "longer than 4096 bytes"),
        (b'{"type":"off', "closed the connection in the middle of a message"),
        (b"", "closed the connection and did not answer"),
        (b'{"rdmapost":1,"type":"error","code":"failed","text":"no luck"}\n', "refused: no luck"),
    ],
    ids=lambda v: str(v)[:12],
)
def test_a_server_that_is_none(context: rp.Context, said: bytes, says: str) -> None:
    def talk(sock: socket.socket) -> None:
        sock.recv(4096)
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        heard(sock)

    with impostor(talk) as address, pytest.raises(connect.ConnectError, match=says):
        connect.dial(context, *address)


def test_a_host_that_is_not_there(context: rp.Context) -> None:
    with pytest.raises(connect.ConnectError, match=r"host nowhere\.invalid") as error:
        connect.dial(context, "nowhere.invalid", timeout=PATIENCE)
    assert error.value.code in ("unreachable", "timeout")


@pytest.mark.parametrize(
    ("options", "says"),
    [({"qp_type": QPType.XRC_SEND}, "XRC_SEND queue pairs cannot"), ({"timeout": 0}, "timeout=0"),
     ({"token": ""}, "a token has"), ({"port_num": 99}, "no port 99")],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_dialled(context: rp.Context, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        connect.dial(context, **options)


def test_closing_drops_what_is_outstanding(serve: Callable[..., Served]) -> None:
    served = serve()
    for qp_type in (QPType.RC, QPType.UD):
        with served.dial(qp_type=qp_type) as peer:
            peer.qp.post_recv(rp.RecvWR(peer.mr[:64]))
        peer.close()
        assert (peer.qp.closed, peer.mr.closed, peer.cq.closed) == (True, True, True)
        with pytest.raises(connect.ConnectError, match="the connection is closed"):
            peer.look()
    with pytest.raises(KeyError), served.dial() as peer:
        raise KeyError("on purpose")
    assert peer.qp.closed


def test_the_software_device_is_not_reached_from_another_process() -> None:
    code = """
import sys, rdmapost as rp
from rdmapost import connect
with rp.open_device("soft0") as context:
    try:
        connect.dial(context, "127.0.0.1", int(sys.argv[1]))
    except connect.ConnectError as error:
        print(error.code, error)
"""
    with rp.open_device("soft0") as context, connect.serve(context, port=0) as server:
        ended = run_python(code, str(server.address[1]))
        assert server.clients == []
    assert (ended.stderr, ended.returncode) == ("", 0)
    assert ended.stdout.startswith("device 127.0.0.1:")
    assert (
        "the server uses soft0 and the client uses soft0: such a device lives in one"
        in ended.stdout
    )
    assert "use a real device" in ended.stdout


# ---- asyncio --------------------------------------------------------------------------


def test_asyncio_both_sides(context: rp.Context) -> None:
    async def main() -> list[connect.Event]:
        told: list[connect.Event] = []
        async with await connect.aserve(
            context, port=0, token="secret", on_event=told.append
        ) as server:
            address = server.address[:2]
            async with await connect.adial(context, *address, token="secret") as peer:
                peer.mr.buffer[:5] = b"hello"
                asked = asyncio.create_task(peer.report(1, PATIENCE))
                await asyncio.sleep(0)
                peer.qp.post_send(rp.Send(peer.mr[:5]))
                arrival = await asked
                assert arrival is not None
                assert arrival.data == b"hello"
                peer.qp.post_send(rp.RdmaWrite(peer.mr[:5], **peer.target(3)))
                (await asyncio.to_thread(peer.wait))[0].check()
                assert (await peer.look(3, 5)).data == b"hello"
                assert await peer.report(2, 0.05) is None
                with pytest.raises(connect.ConnectError, match="token"):
                    await connect.adial(context, *address, token="Secret")
            assert server.clients == []
            assert peer.closed
        return told

    told = asyncio.run(main())
    # The refused one may be told of after the other has left.
    assert sorted(type(event).__name__ for event in told) == [
        "Arrived", "Joined", "Left", "Refused",
    ]  # fmt: skip


def test_asyncio_server_serves_clients_of_any_kind_at_once(context: rp.Context) -> None:
    def work(address: tuple[str, int]) -> bytes:
        with connect.dial(context, *address) as peer:
            peer.mr.buffer[:2] = b"hi"
            peer.qp.post_send(rp.Send(peer.mr[:2]))
            peer.wait()[0].check()
            arrival = peer.report()
            assert arrival is not None
            return arrival.data

    async def main() -> None:
        async with await connect.aserve(context, port=0, timeout=1.5) as server:
            address = server.address[:2]
            reader, writer = await asyncio.open_connection(*address)
            garbage, other = await asyncio.open_connection(*address)
            other.write(b"garbage")
            found = await asyncio.gather(*(asyncio.to_thread(work, address) for _ in range(4)))
            assert found == [b"hi"] * 4
            assert json.loads(await garbage.readline())["code"] == "format"
            # The one that says nothing has its time.
            assert json.loads(await reader.readline())["code"] == "timeout"
            for w in (writer, other):
                w.close()
                with contextlib.suppress(ConnectionError):
                    await w.wait_closed()

    asyncio.run(main())


@pytest.mark.parametrize("step", STEPS)
def test_asyncio_server_outlives_its_clients(context: rp.Context, step: str) -> None:
    async def main() -> None:
        gone = asyncio.Event()

        def tell(event: connect.Event) -> None:
            if isinstance(event, connect.Left | connect.Refused):
                gone.set()

        async with await connect.aserve(context, port=0, on_event=tell) as server:
            _, writer = await asyncio.open_connection(*server.address[:2])
            for said in STEPS[step](hello(context)):
                writer.write(said if isinstance(said, bytes) else encode(said))
            await writer.drain()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            await asyncio.wait_for(gone.wait(), PATIENCE)
            assert server.clients == []
            async with await connect.adial(context, *server.address[:2]) as peer:
                assert (await peer.look(0, 1)).data == b"\0"

    asyncio.run(main())


def test_asyncio_server_ends_with_clients_there(context: rp.Context) -> None:
    async def main() -> None:
        server = await connect.aserve(context, port=0)
        peer = await connect.adial(context, *server.address[:2])
        (client,) = server.clients
        await server.close()
        assert client.mr.closed
        with pytest.raises(connect.ConnectError, match="the server ends"):
            await peer.look()
        await peer.close()
        assert peer.qp.closed

    asyncio.run(main())


def test_asyncio_dialling_can_be_cancelled(context: rp.Context) -> None:
    async def main(address: tuple[str, int]) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await connect.adial(context, *address, timeout=PATIENCE)

    with impostor(heard) as address:
        asyncio.run(main(address))


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (b"SSH-2.0-x\r\n", "is no 'rdmapost serve'"),
        (b'{"type":"off', "closed the connection in the middle of a message"),
        (None, r"did not answer within 0\.3 s"),
    ],
    ids=["ssh", "half", "silent"],
)
def test_asyncio_dialling_what_is_no_server(
    context: rp.Context, said: bytes | None, says: str
) -> None:
    def talk(sock: socket.socket) -> None:
        sock.recv(4096)
        if said is not None:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
        heard(sock)

    with impostor(talk) as address, pytest.raises(connect.ConnectError, match=says):
        asyncio.run(connect.adial(context, *address, timeout=0.3))


def test_asyncio_dialling_nothing(context: rp.Context) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(connect.ConnectError, match="refused the connection"):
        asyncio.run(connect.adial(context, *address))

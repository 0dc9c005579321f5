"""The posting commands with HOST: their output and their errors.

The server is in this process, on the same device.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.cli_runner import done, on, run
from support.ports import HOST, free_port
from support.roce import open_roce

import rdmapost as rp
from rdmapost import Access, connect
from rdmapost.tools.connect.protocol_messages import access_names

Serve = Callable[..., str]


@pytest.fixture
def serve(context: rp.Context) -> Iterator[Serve]:
    """Serve in this process, and return HOST:PORT."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> str:
            server = stack.enter_context(connect.serve(context, port=0, **options))
            return str(server)

        yield make


# ---- the posting commands ----------------------------------------------------


@pytest.mark.parametrize("qp_type", ["rc", "uc", "ud"])
@pytest.mark.parametrize("more", [[], ["--inline"], ["--imm", "0x12"]], ids=["", "inline", "imm"])
def test_send_to_a_server_reports_what_arrived(
    context: rp.Context, serve: Serve, qp_type: str, more: list[str]
) -> None:
    where = serve()
    doc = done(context, "send", where, "--data", "h\u00e4llo", "--qp-type", qp_type, *more)
    imm = {"imm_data": 18} if "--imm" in more else {}
    assert doc == {
        "device": context.name,
        "kind": context.kind,
        "opcode": "SEND_WITH_IMM" if imm else "SEND",
        "qp_type": qp_type.upper(),
        "peer": where,
        "status": "SUCCESS",
        "wr_id": 1,
        "byte_len": 6,
        "gid_index": context.choose_gid().gid_index,
        "data": "h\u00e4llo",
        "encoding": "utf-8",
        "received": "h\u00e4llo",
        **imm,
    }


def test_send_to_a_server_prints_its_address(context: rp.Context, serve: Serve) -> None:
    where = serve()
    ran = on(context, "send", "--count", "3", "--size", "5000", where)
    assert ran.code == 1
    ran = on(context, "send", "--count", "20", "--size", "3000", where)
    assert ran.code == 0
    head, *lines = ran.out.splitlines()
    assert head == f"20 x SEND of 3000 bytes on RC, {context.name} to {where}: SUCCESS"
    assert [line.split()[0] for line in lines] == ["data", "received"]


def test_one_byte_is_in_the_singular(context: rp.Context, serve: Serve) -> None:
    where = serve(size=1, count=1)
    ran = on(context, "write", where, "--data", "x", "-v")
    assert ran.out.startswith(f"RDMA_WRITE of 1 byte on RC, {context.name} to {where}: SUCCESS")
    assert "exposed  1 byte at 0x" in ran.err
    ran = on(context, "read", where, "--offset", "2")
    assert "--offset 2 is past the end of the 1 byte that" in ran.err.replace("\n", " ")


@pytest.mark.parametrize("qp_type", ["rc", "uc"])
@pytest.mark.parametrize("more", [[], ["--imm", "7"]], ids=["", "imm"])
def test_write_to_a_server_reports_what_its_memory_holds(
    context: rp.Context, serve: Serve, qp_type: str, more: list[str]
) -> None:
    seen: list[connect.Event] = []
    where = serve(on_event=seen.append)
    doc = done(
        context,
        "write",
        where,
        "--data",
        "abc",
        "--offset",
        "0x10",
        "--count",
        "2",
        "--qp-type",
        qp_type,
        *more,
    )
    assert (doc["peer"], doc["status"], doc["count"]) == (where, "SUCCESS", 2)
    assert (doc["data"], doc["received"]) == ("abc", "abc")
    assert doc.get("imm_data") == (7 if more else None)
    (joined,) = [event for event in seen if isinstance(event, connect.Joined)]
    assert doc["remote_addr"] == joined.offer.addr + 16
    # When the command ends, the server has released everything.
    (left,) = [event for event in seen if isinstance(event, connect.Left)]
    assert left.changed == connect.Changed(16, 6, b"abcabc")


def test_write_to_memory_without_read_access_shows_no_data(
    context: rp.Context, serve: Serve
) -> None:
    where = serve(access=Access.REMOTE_WRITE, data=b"secret")
    doc = done(context, "write", where, "--data", "abc")
    assert doc["status"] == "SUCCESS"
    assert "received" not in doc


def test_write_of_no_bytes_and_of_the_whole_memory_succeeds(
    context: rp.Context, serve: Serve
) -> None:
    where = serve()
    assert done(context, "write", where, "--data", "")["byte_len"] == 0
    assert done(context, "write", where, "--size", "4096")["byte_len"] == 4096
    assert done(context, "send", where, "--data", "")["byte_len"] == 0


def test_read_returns_the_memory_of_a_server(context: rp.Context, serve: Serve) -> None:
    where = serve(data=b"memory to be read", size=17)
    doc = done(context, "read", where)
    assert (doc["byte_len"], doc["received"]) == (17, "memory to be read")
    assert "data" not in doc
    doc = done(context, "read", where, "--offset", "7", "--size", "5", "--count", "2")
    assert (doc["byte_len"], doc["received"], doc["count"]) == (5, "to be", 2)
    ran = on(context, "read", where, "--offset", "18")
    assert ran.code == 2
    assert "past the end of the 17 bytes" in ran.err


def test_atomic_changes_the_memory_of_a_server(context: rp.Context, serve: Serve) -> None:
    where = serve(shared=True)
    doc = done(context, "atomic", "fetch-add", where, "--add", "5", "--count", "3", "--offset", "8")
    assert (doc["add"], doc["old"], doc["new"], doc["olds"]) == (5, 0, 15, [0, 5, 10])
    assert "initial" not in doc
    again = ["atomic", "cas", where, "--compare", "15", "--swap", "99", "--offset", "8"]
    doc = done(context, *again)
    assert (doc["compare"], doc["swap"], doc["old"], doc["new"]) == (15, 99, 15, 99)
    doc = done(context, *again)
    assert (doc["old"], doc["new"]) == (99, 99)


@pytest.mark.parametrize("offset", ["24", "32"])
@pytest.mark.parametrize(
    "command", [["write"], ["read"], ["read", "--size", "1"], ["atomic", "cas"]]
)
def test_offset_past_the_end_of_the_memory_is_wrong_usage(
    context: rp.Context, serve: Serve, command: list[str], offset: str
) -> None:
    where = serve(size=24)
    ran = on(context, *command, where, "--offset", offset, "--json")
    assert ran.code == 2
    assert (
        ran.doc["error"]
        == f"--offset {offset} is past the end of the 24 bytes that {where} exposes"
    )


@pytest.mark.parametrize("opcode", ["cas", "fetch-add"])
def test_atomic_at_an_offset_that_is_not_aligned_is_wrong_usage(
    context: rp.Context, serve: Serve, opcode: str
) -> None:
    ran = on(context, "atomic", opcode, serve(), "--offset", "4", "--json")
    assert ran.code == 2
    assert ran.doc["error"] == "--offset 4 is not a multiple of 8, which an atomic needs"


@pytest.mark.parametrize(
    ("access", "command", "grants"),
    [
        (Access.REMOTE_READ, ["write"], "read,write"),
        (Access.REMOTE_WRITE, ["read"], "read,write"),
        (Access.REMOTE_READ, ["atomic", "cas"], "read,atomic"),
        (Access.REMOTE_READ | Access.REMOTE_WRITE, ["atomic", "fetch-add"], "read,write,atomic"),
        (Access(0), ["write"], "write"),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
def test_access_that_the_server_lacks_is_refused_by_the_device(
    context: rp.Context, serve: Serve, access: Access, command: list[str], grants: str
) -> None:
    ran = on(context, *command, serve(access=access), "--json")
    assert ran.code == 1
    assert ran.doc["status"] in ("REM_ACCESS_ERR", "REM_INV_REQ_ERR")
    assert "exposes 4096 bytes at 0x" in ran.doc["error"]
    has = ", ".join(access_names(access)) or "nothing"
    assert ran.doc["error"].endswith(f"for {has}; 'rdmapost serve --access {grants}' allows it")


def test_writes_beyond_the_memory_say_how_they_are_laid_out(
    context: rp.Context, serve: Serve
) -> None:
    where = serve(size=1000)
    ran = on(context, "write", where, "--size", "300", "--offset", "200", "--count", "50", "--json")
    assert ran.code == 2
    assert ran.doc["error"] == (
        f"--count 50: the writes are laid out one after another from --offset 200, and need 15200 "
        f"bytes; {where} exposes 1000, and write 4 would begin at 1100"
    )


def test_write_past_the_end_is_refused_by_the_device(context: rp.Context, serve: Serve) -> None:
    ran = on(context, "write", serve(), "--offset", "4090", "--json")
    assert ran.code == 1
    assert ran.doc["status"] == "REM_ACCESS_ERR"


@pytest.mark.parametrize("qp_type", ["uc", "ud"])
def test_message_that_found_no_receive_says_how_many_there_are(qp_type: str) -> None:
    with rp.open_device("soft0") as soft, connect.serve(soft, HOST, 0, count=0) as server:
        where = f"{HOST}:{server.address[1]}"
        # A server without receives answers at once.
        ran = run(*("send", where, "-d", "soft0", "--qp-type", qp_type, "--count", "20", "--json"))
    assert ran.code == 1
    assert ran.doc["error"] == (
        f"message 1 of 20 did not arrive at {where} within 5 s; {qp_type.upper()} drops a message "
        f"that finds no receive, and {where} posts 0: 'rdmapost serve --count 20' posts enough, "
        "and --qp-type rc waits for one"
    )


def test_message_longer_than_the_receives_is_an_error(context: rp.Context, serve: Serve) -> None:
    ran = on(context, "send", serve(receive_size=4), "--data", "x" * 32, "--json")
    assert ran.code == 1
    assert ran.doc["status"] not in (None, "SUCCESS")
    assert "the message has 32 bytes, and the receives of 127.0.0.1:" in ran.doc["error"]
    assert "hold 4 each; 'rdmapost serve --receive-size 32' posts larger ones" in ran.doc["error"]


def test_datagram_without_a_receive_is_reported_as_not_arrived(
    context: rp.Context, serve: Serve
) -> None:
    ran = on(context, "send", serve(count=0), "--qp-type", "ud", "--timeout", "0.5")
    assert ran.code == 1
    assert "the message did not arrive at 127.0.0.1:" in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize("args", [["write"], ["send", "--qp-type", "uc", "--timeout", "0.5"]])
def test_server_that_the_gid_cannot_reach_is_named(args: list[str]) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no address ::1")
    here = "roce:127.0.0.114"
    with open_roce("roce:::1") as far, connect.serve(far, "::1", port=0) as server:
        ran = run(args[0], "-d", here, *args[1:], str(server), "--json")
    assert ran.code == 1
    assert "GID 0 (::ffff:127.0.0.114) is IPv4, but the peer's ::1 is IPv6" in ran.doc["error"]
    assert "use GIDs of the same type and network on both sides" in ran.doc["error"]


def test_verbose_says_what_is_exposed(context: rp.Context, serve: Serve) -> None:
    ran = on(context, "read", serve(access=Access.REMOTE_READ, size=100), "-v")
    assert ran.code == 0
    assert "exposed  100 bytes at 0x" in ran.err
    assert "for read" in ran.err


@pytest.mark.parametrize("how", ["option", "variable"])
def test_token_must_be_that_of_the_server(
    context: rp.Context, serve: Serve, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = serve(token="secret")
    for ran in (on(context, "send", where), on(context, "send", where, "--token", "Secret")):
        assert ran.code == 1
        assert "token" in ran.err
        assert len(ran.err.splitlines()) == 1
    monkeypatch.setenv("RDMAPOST_TOKEN", "secret" if how == "variable" else "wrong")
    more = ["--token", "secret"] if how == "option" else []
    assert done(context, "send", where, *more)["status"] == "SUCCESS"


# ---- what cannot be reached ---------------------------------------------------


def test_refused_connection_says_to_start_a_server(context: rp.Context) -> None:
    where = f"{HOST}:{free_port()}"
    ran = on(context, "send", where, "--json")
    assert ran.code == 1
    says = "refused the connection: start 'rdmapost serve' there, or name its port"
    assert ran.err == f"rdmapost: {where} {says}\n"
    assert (ran.doc["peer"], ran.doc["status"]) == (where, None)
    assert ran.doc["error"] in ran.err


def test_server_that_never_answers_is_an_error(context: rp.Context) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # It accepts the connection, and does nothing else.
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        ran = on(context, "send", where, "--timeout", "0.3")
    assert ran.code == 1
    assert "did not answer within 0.3 s: is it 'rdmapost serve', or" in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["send", "::1"], "write an IPv6 address in brackets: [::1]"),
        (["send", "host:port"], "'port' is not a port"),
        (["write", ":5"], "has no host"),
        (["read", "127.0.0.1", "--data", "x"], "--data and --data-file work only without HOST"),
        (["atomic", "cas", "127.0.0.1", "--initial", "5"], "--initial works only without HOST"),
        (["send", "127.0.0.1", "--invalidate"], "without HOST"),
        (["write", "--offset", "5"], "--offset needs a HOST"),
        (["send", "--token", "x"], "--token needs a HOST"),
        (["send", "127.0.0.1", "--token", "x" * 257], "a token has 1 to 256 characters, not 257"),
        *(
            ([*words, "-d", "soft0", "127.0.0.1", "--qp-type", "xrc"], f"can only be {types}\n")
            for words, types in (
                (["send"], "rc, uc or ud"),
                (["write"], "rc or uc"),
                (["read"], "rc"),
                (["atomic", "cas"], "rc"),
            )
        ),
        (["serve", "--tcp-port", "99999"], "at most 65535"),
        (["serve", "--access", "read,everything"], "'everything' is not read, write or atomic"),
        (["serve", "--size", "2", "--data", "abc"], "too small for 3 bytes of data"),
        (["serve", "--size", "0"], "at least one byte"),
        (["serve", "--token", ""], "1 to 256 characters"),
        (["serve", "--count", "99999"], "at most 16384"),
    ],
    ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else "",
)
def test_options_that_exclude_each_other_are_usage_errors(args: list[str], says: str) -> None:
    ran = run(*args)
    assert ran.code == 2
    assert says in ran.err

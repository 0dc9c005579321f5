"""Serving and dialling in one process: what is exposed, to whom, and for how long.

The device is real in every test, and so are the sockets.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support import LIMIT, run_python
from support.serving import Served, servers

import rdmapost as rp
from rdmapost import Access, QPType, WCStatus, connect

READ, WRITE, ATOMIC = Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC
EVERYTHING = READ | WRITE | ATOMIC

serve = servers


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
def test_messages_are_reported_to_client_and_server_with_their_contents(
    serve: Callable[..., Served], qp_type: QPType
) -> None:
    served = serve(count=4, receive_size=64)
    with served.dial(qp_type=qp_type) as peer:
        # More messages than receives, so the receives are reposted.
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
        assert peer.report(10, 0) is None
        early = peer.report(3)
        assert early is not None
        assert early.data == b"message 3"


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC], ids=lambda t: t.name)
def test_a_write_with_immediate_is_reported_with_its_immediate_data(
    serve: Callable[..., Served], qp_type: QPType
) -> None:
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


def test_a_message_that_has_arrived_is_reported_without_waiting(
    serve: Callable[..., Served], context: rp.Context
) -> None:
    with serve().dial() as peer:
        for index in range(1, 50):
            peer.qp.post_send(rp.Send(peer.mr[:4]))
            peer.wait()[0].check()
            # In one process, acknowledged data has arrived; elsewhere it is on its way.
            arrival = peer.report(index, 0 if context.kind == "soft" else None)
            assert arrival is not None
            assert arrival.byte_len == 4


def test_a_server_on_the_ipv6_loopback_serves_clients(serve: Callable[..., Served]) -> None:
    try:
        served = serve(host="::1")
    except OSError as error:
        pytest.skip(f"this machine has no ::1 ({error})")
    assert str(served.server).startswith("[::1]:")
    assert served.server.warning is None
    served.works()


def test_threads_may_send_requests_on_one_connection_at_once(serve: Callable[..., Served]) -> None:
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
        arrival = peer.report(1, LIMIT)
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
def test_a_client_gets_exactly_the_access_that_the_server_grants(
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


def test_what_the_owner_posts_on_a_clients_queue_pair_completes_in_its_send_cq(
    serve: Callable[..., Served],
) -> None:
    served = serve(data=b"from the owner")
    with served.dial(local_access=Access.LOCAL_WRITE | READ | WRITE) as peer:
        (client,) = served.server.clients
        there = {"remote_addr": peer.mr.addr, "rkey": peer.mr.rkey}
        client.qp.post_send(rp.RdmaWrite(client.mr[:14], wr_id=42, **there))
        [wc] = client.qp.send_cq.wait(1, timeout=LIMIT)
        assert (wc.wr_id, wc.status) == (42, WCStatus.SUCCESS)
        assert bytes(peer.mr.buffer[:14]) == b"from the owner"
        # A failed work request is reported there too; the client only sees its receives flushed.
        client.qp.post_send(rp.RdmaWrite(client.mr[:14], wr_id=43, remote_addr=0, rkey=1))
        [wc] = client.qp.send_cq.wait(1, timeout=LIMIT)
        assert (wc.wr_id, wc.status) == (43, WCStatus.REM_ACCESS_ERR)
        assert peer.report(1).status is WCStatus.WR_FLUSH_ERR


def test_closing_the_server_releases_what_could_not_be_released_when_its_client_left(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    pd = rp.PD(served.context)
    with served.dial():
        (client,) = served.server.clients
        cq = client.qp.send_cq
        owners = rp.QP(pd, QPType.RC, cq)
    assert "cannot be closed: RC QP" in served.until(connect.Left).reason
    assert not cq.closed
    owners.close()
    served.server.close()
    assert cq.closed


def test_the_rkey_of_another_client_gives_no_access(serve: Callable[..., Served]) -> None:
    served = serve()
    with served.dial() as mine, served.dial() as other:
        mine.qp.post_send(
            rp.RdmaWrite(mine.mr[:8], remote_addr=other.offer.addr, rkey=other.offer.rkey)
        )
        assert mine.wait()[0].status is WCStatus.REM_ACCESS_ERR
        assert other.look(0, 8).data == bytes(8)


def test_the_rkey_of_a_client_that_left_gives_no_access(serve: Callable[..., Served]) -> None:
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


def test_a_receive_that_fails_is_reported_to_server_and_client(
    serve: Callable[..., Served],
) -> None:
    served = serve(receive_size=4)
    with served.dial() as peer:
        peer.qp.post_send(rp.Send(peer.mr[:8]))
        assert peer.wait()[0].status is not WCStatus.SUCCESS
        arrival = served.until(connect.Arrived).arrival
        assert arrival.status is not WCStatus.SUCCESS
        # Every later request reports the failure, too, immediately.
        again = peer.report(5, LIMIT)
        assert again is not None
        assert again.status is arrival.status
    served_again = serve()
    served_again.works()


def test_clients_of_a_server_with_shared_memory_see_each_others_writes(
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


def test_a_look_does_not_reveal_others_data_without_read_access(
    serve: Callable[..., Served],
) -> None:
    for options in ({"shared": True}, {"data": b"secret"}):
        with serve(access=WRITE, **options).dial() as peer:
            assert (peer.look().sha256, peer.look().data) == ("", b"")
    # A client may see its own memory, which began empty.
    with serve(access=WRITE).dial() as peer:
        assert peer.look(0, 4).data == bytes(4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"size": 0}, "size=0"),
        ({"count": -1}, "count=-1"),
        ({"count": 1 << 20}, "count=1048576"),
        ({"receive_size": -1}, "receive_size=-1"),
        ({"access": Access.LOCAL_WRITE}, "not a combination of"),
        ({"data": b"12345", "size": 4}, "data: 5 bytes do not fit"),
        ({"token": ""}, "a token has"),
        ({"max_clients": 0}, "max_clients=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"idle_timeout": -1}, "idle_timeout=-1"),
        ({"port_num": 99}, "no port 99"),
        ({"port": 65536}, "port=65536"),
    ],
    ids=str,
)
def test_serve_refuses_arguments_out_of_range(
    context: rp.Context, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        connect.serve(context, **{"port": 0, **options})


def test_serve_refuses_a_gid_index_that_the_port_does_not_have(context: rp.Context) -> None:
    with pytest.raises(ValueError, match="no GID with index 99"):
        connect.serve(context, port=0, gid_index=99)


def test_serve_names_the_address_that_it_cannot_listen_on(
    serve: Callable[..., Served], context: rp.Context
) -> None:
    served = serve()
    with pytest.raises(
        connect.ConnectError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address al"
    ):
        connect.serve(context, port=served.server.address[1])
    with pytest.raises(
        connect.ConnectError,
        match=r"cannot listen on 192\.0\.2\.1:0: .*; give an address of this machine",
    ):
        connect.serve(context, "192.0.2.1", 0)


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_server_beyond_loopback_warns_of_what_it_exposes(
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


# ---- dialling -------------------------------------------------------------------------


def test_dial_names_a_host_that_cannot_be_found(context: rp.Context) -> None:
    with pytest.raises(connect.ConnectError, match=r"host nowhere\.invalid") as error:
        connect.dial(context, "nowhere.invalid", timeout=LIMIT)
    assert error.value.code in ("unreachable", "timeout")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"qp_type": QPType.XRC_SEND}, "XRC_SEND queue pairs are not supported"),
        ({"timeout": 0}, "timeout=0"),
        ({"token": ""}, "a token has"),
        ({"port_num": 99}, "no port 99"),
    ],
    ids=str,
)
def test_dial_refuses_arguments_out_of_range(
    context: rp.Context, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        connect.dial(context, **options)


def test_closing_a_connection_drops_outstanding_work_requests(serve: Callable[..., Served]) -> None:
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


def test_soft0_refuses_a_client_of_another_process_and_says_why() -> None:
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
    assert "the server's soft0 exists only in its own process" in ended.stdout
    assert "use roce:lo, or a real device" in ended.stdout

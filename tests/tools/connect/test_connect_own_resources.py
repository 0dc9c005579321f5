"""Serving and dialling with the caller's memory, SRQ, CQ, queue pair options and private data."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import mmap
import re
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support import LIMIT, needs, serving
from support.serving import Served
from support.windows import bind_wr

import rdmapost as rp
from rdmapost import Access, QPType, WCOpcode, connect

EVERYTHING = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC

REFUSED = (rp.WCStatus.REM_ACCESS_ERR, rp.WCStatus.REM_INV_REQ_ERR)
"""The statuses with which a peer refuses access that its region or queue pair does not allow."""

servers = serving.both_servers


@pytest.fixture
def serve(pd: rp.PD, servers: Callable[..., Served]) -> Callable[..., Served]:
    """Serve; the servers are closed before the PD of the caller's region."""
    return servers


# ---- memory -------------------------------------------------------------------


def test_clients_read_and_write_the_callers_region(serve: Callable[..., Served], pd: rp.PD) -> None:
    memory = bytearray(b"what the caller had".ljust(100))
    with rp.MR(pd, memory, EVERYTHING) as mr:
        served = serve(mr=mr)
        with served.dial() as one, served.dial() as other:
            assert (one.offer.addr, one.offer.rkey, one.offer.size) == (mr.addr, mr.rkey, 100)
            one.qp.post_send(rp.RdmaRead(one.mr[:19], **one.target()))
            one.wait()[0].check()
            assert bytes(one.mr.buffer[:19]) == b"what the caller had"
            one.mr.buffer[:3] = b"now"
            one.qp.post_send(rp.RdmaWrite(one.mr[:3], **one.target(97)))
            one.wait()[0].check()
            assert other.look(97).data == b"now"
        assert served.until(connect.Left).changed is None
        served.server.close()
        assert memory[97:] == b"now"
        assert not mr.closed


@pytest.mark.parametrize("memory", [100, bytearray(100)], ids=["allocated", "bytearray"])
def test_closed_region_of_the_caller_is_not_looked_at(
    serve: Callable[..., Served], pd: rp.PD, memory: Any
) -> None:
    mr = rp.MR(pd, memory, EVERYTHING)
    served = serve(mr=mr)
    with served.dial() as peer:
        (client,) = served.server.clients
        assert peer.look(0, 8).data == bytes(8)
        pieces = client.look(0, 100)
        mr.close()
        with pytest.raises(rp.ClosedError, match="the owner has closed its MR"):
            next(pieces)
        with pytest.raises(connect.ConnectError, match="the owner has closed its MR"):
            peer.look(0, 8)


def _rereg(mr: rp.MR, access: Access) -> None:
    """Change a region's access, or skip the test on a device without ibv_rereg_mr."""
    try:
        mr.rereg(access=access)
    except rp.UnsupportedError as error:
        pytest.skip(str(error))


def test_clients_flush_the_callers_region(serve: Callable[..., Served], pd: rp.PD) -> None:
    needs(pd.context.attr.device_cap_flags_ex & rp.DeviceCap.FLUSH_GLOBAL, "FLUSH", pd.context)
    options = {"send_ops_flags": rp.SendOps.FLUSH}
    try:
        rp.QP(pd, QPType.RC, rp.CQ(pd.context), **options).close()
    except rp.UnsupportedError as error:
        pytest.skip(str(error))
    access = EVERYTHING | Access.FLUSH_GLOBAL
    with rp.MR(pd, 64, access) as mr, serve(mr=mr).dial(qp_options=options) as peer:
        peer.qp.post_send(rp.Flush(length=64, **peer.target()))
        assert peer.wait()[0].status is rp.WCStatus.SUCCESS
        # The protocol has no name for it.
        assert peer.offer.access == EVERYTHING & ~Access.LOCAL_WRITE


def test_clients_write_through_a_window_of_the_callers_region(
    serve: Callable[..., Served], pd: rp.PD
) -> None:
    """The region alone grants less."""
    needs(pd.context.attr.device_cap_flags & rp.DeviceCap.MEM_WINDOW_TYPE_2B, "MW", pd.context)
    granted = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.MW_BIND
    with rp.MR(pd, 64, granted) as mr:
        served = serve(mr=mr)
        # The window is closed first: destroying Soft-RoCE's queue pair waits for that.
        with served.dial() as peer, rp.MW(pd) as mw:
            (client,) = served.server.clients
            bind = bind_wr(mw, mr)
            client.qp.post_send(bind)
            client.qp.send_cq.wait()[0].check()
            peer.qp.post_send(rp.RdmaWrite(peer.mr[:8], **(peer.target() | {"rkey": mw.rkey})))
            assert peer.wait()[0].status is rp.WCStatus.SUCCESS


WINDOWS_ONLY = Access.LOCAL_WRITE | Access.MW_BIND


def _has_windows(context: rp.Context) -> None:
    needs(context.attr.device_cap_flags & rp.DeviceCap.MEM_WINDOW_TYPE_2B, "MW", context)


@pytest.mark.parametrize("asked", [Access(0), Access.REMOTE_READ])
def test_access_that_a_region_for_windows_would_exceed_is_refused(
    serve: Callable[..., Served], pd: rp.PD, asked: Access
) -> None:
    """A queue pair that permits what a window grants permits it with the region's key, too."""
    _has_windows(pd.context)
    granted = WINDOWS_ONLY | Access.REMOTE_READ | Access.REMOTE_WRITE
    with rp.MR(pd, 64, granted) as mr:
        with pytest.raises(ValueError, match=r"only LOCAL_WRITE \| MW_BIND, or leave") as refused:
            serve(mr=mr, access=asked)
        assert str(refused.value).startswith(f"access={asked} cannot be enforced: mr has MW_BIND ")
        same = Access.REMOTE_READ | Access.REMOTE_WRITE
        for access in (None, same):
            with serve(mr=mr, access=access).dial() as peer:
                assert peer.offer.access == same
                for wr in (rp.RdmaRead, rp.RdmaWrite):
                    peer.qp.post_send(wr(peer.mr[:8], **peer.target()))
                    peer.wait()[0].check()


def test_region_for_windows_only_grants_nothing_with_its_own_key(
    serve: Callable[..., Served], pd: rp.PD
) -> None:
    _has_windows(pd.context)
    with rp.MR(pd, 64, WINDOWS_ONLY) as mr:
        for access in (None, Access(0)):
            served = serve(mr=mr, access=access)
            for wr in (rp.RdmaRead, rp.RdmaWrite):
                with served.dial() as peer, rp.MW(pd) as mw:
                    assert peer.offer.access == Access(0)
                    (client,) = served.server.clients
                    granted = Access.REMOTE_READ | Access.REMOTE_WRITE
                    client.qp.post_send(bind_wr(mw, mr, granted))
                    client.qp.send_cq.wait()[0].check()
                    peer.qp.post_send(wr(peer.mr[:8], **peer.target() | {"rkey": mw.rkey}))
                    peer.wait()[0].check()
                    peer.qp.post_send(wr(peer.mr[:8], **peer.target()))
                    assert peer.wait()[0].status in REFUSED
                served.until(connect.Left)


def test_region_that_gets_windows_and_more_access_later_refuses_new_clients(
    serve: Callable[..., Served], pd: rp.PD
) -> None:
    _has_windows(pd.context)
    with rp.MR(pd, 64, Access.LOCAL_WRITE | Access.REMOTE_READ) as mr:
        served = serve(mr=mr, access=Access.REMOTE_READ)
        _rereg(mr, WINDOWS_ONLY | Access.REMOTE_READ | Access.REMOTE_WRITE)
        with pytest.raises(connect.ConnectError, match="access=REMOTE_READ cannot be enforced"):
            served.dial()
        mr.rereg(access=WINDOWS_ONLY | Access.REMOTE_READ)
        served.works()


def test_server_reads_through_a_window_of_the_clients_region(
    serve: Callable[..., Served], pd: rp.PD
) -> None:
    _has_windows(pd.context)
    served = serve()
    memory = bytearray(b"see here".ljust(64))
    with rp.MR(pd, memory, WINDOWS_ONLY) as mr, served.dial(mr=mr) as peer, rp.MW(pd) as mw:
        peer.qp.post_send(bind_wr(mw, mr, Access.REMOTE_READ))
        peer.wait()[0].check()
        (client,) = served.server.clients
        with rp.MR(client.qp.pd, 8) as box:
            for rkey, fine in ((mw.rkey, True), (mr.rkey, False)):
                client.qp.post_send(rp.RdmaRead(box[:8], remote_addr=mr.addr, rkey=rkey))
                (wc,) = client.qp.send_cq.wait()
                assert (wc.status is rp.WCStatus.SUCCESS) == fine
            assert bytes(box.buffer) == b"see here"


def test_region_grants_clients_no_more_access_than_it_has(
    serve: Callable[..., Served], pd: rp.PD
) -> None:
    with rp.MR(pd, 64, Access.LOCAL_WRITE | Access.REMOTE_READ) as mr:
        with serve(mr=mr).dial() as peer:
            assert peer.offer.access == Access.REMOTE_READ
            peer.qp.post_send(rp.RdmaWrite(peer.mr[:8], **peer.target()))
            assert peer.wait()[0].status in REFUSED
        with pytest.raises(ValueError, match="access: the MR lacks REMOTE_WRITE"):
            serve(mr=mr, access=Access.REMOTE_READ | Access.REMOTE_WRITE)
    with rp.MR(pd, 64, EVERYTHING) as mr, serve(mr=mr, access=Access.REMOTE_WRITE).dial() as peer:
        assert peer.offer.access == Access.REMOTE_WRITE
        # The server's queue pair refuses what the region alone would allow.
        peer.qp.post_send(rp.RdmaRead(peer.mr[:8], **peer.target()))
        assert peer.wait()[0].status in REFUSED


@pytest.mark.parametrize("asked", [None, Access.REMOTE_READ | Access.REMOTE_WRITE])
def test_clients_get_what_the_region_has_when_they_connect(
    serve: Callable[..., Served], pd: rp.PD, asked: Access | None
) -> None:
    with rp.MR(pd, 64, Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE) as mr:
        served = serve(mr=mr, access=asked)
        with served.dial() as before:
            assert before.look(0, 8).data == bytes(8)
            _rereg(mr, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
            assert before.look(0, 8).data == b""
        with served.dial() as peer:
            assert peer.offer.access == served.server.exposure.access == Access.REMOTE_WRITE
            assert served.server.clients[0].qp.query().qp_access_flags == Access.REMOTE_WRITE
        mr.rereg(memory=128, access=Access.LOCAL_WRITE | Access.REMOTE_READ)
        with served.dial() as peer:
            assert peer.offer.access == served.server.exposure.access == Access.REMOTE_READ
            assert peer.offer.size == served.server.exposure.size == 128
            peer.qp.post_send(rp.RdmaRead(peer.mr[:8], **peer.target(120)))
            peer.wait()[0].check()
        mr.rereg(access=EVERYTHING)
        everything = Access.REMOTE_READ | Access.REMOTE_WRITE
        with served.dial() as peer:
            if asked is None and pd.context.attr.atomic_cap:
                everything |= Access.REMOTE_ATOMIC
            assert peer.offer.access == served.server.exposure.access == everything


def test_memory_without_a_buffer_can_be_exposed_and_not_looked_at(
    serve: Callable[..., Served], pd: rp.PD
) -> None:
    with rp.MR(pd, 64, EVERYTHING) as whole:
        whole.buffer[:5] = b"found"
        with (
            rp.MR.at(pd, whole.addr, 64, EVERYTHING, owner=whole) as mr,
            serve(mr=mr).dial() as peer,
        ):
            peer.qp.post_send(rp.RdmaRead(peer.mr[:5], **peer.target()))
            peer.wait()[0].check()
            assert bytes(peer.mr.buffer[:5]) == b"found"
            seen = peer.look()
            assert (seen.sha256, seen.data) == ("", b"")


def test_mapped_file_that_was_truncated_is_not_looked_at_instead_of_a_crash(
    serve: Callable[..., Served], pd: rp.PD
) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(2 * mmap.PAGESIZE)
        with rp.MR(pd, mmap.mmap(file.fileno(), 2 * mmap.PAGESIZE), EVERYTHING) as mr:
            served = serve(mr=mr)
            with served.dial() as peer:
                mr.buffer[:5] = b"found"
                assert peer.look(0, 5).data == b"found"
                file.truncate(mmap.PAGESIZE)
                assert peer.look(0, 5).data == b"found"
                with pytest.raises(rp.RdmaError, match=r"bytes \d+ to \d+ of the memory cannot"):
                    peer.look(mmap.PAGESIZE - 5, 10)
            with served.dial() as peer:
                assert peer.look(0, 5).data == b"found"


def test_region_closed_under_a_server_refuses_new_clients_by_name(
    serve: Callable[..., Served], pd: rp.PD
) -> None:
    mr = rp.MR(pd, 64, EVERYTHING)
    served = serve(mr=mr)
    with served.dial() as peer:
        mr.close()
        peer.qp.post_send(rp.RdmaRead(peer.mr[:5], **peer.target()))
        assert peer.wait()[0].status is rp.WCStatus.REM_ACCESS_ERR
    with pytest.raises(connect.ConnectError, match=r"on the server: MR of 64 bytes .* is closed"):
        served.dial()


def test_client_sends_from_its_own_region(serve: Callable[..., Served], pd: rp.PD) -> None:
    served = serve()
    with rp.MR(pd, b"read-only", Access(0)) as mr:
        with served.dial(mr=mr) as peer:
            assert peer.mr is mr
            assert peer.qp.pd is pd
            peer.qp.post_send(rp.Send(mr[:9]))
            peer.wait()[0].check()
            arrival = peer.report()
            assert arrival is not None
            assert arrival.data == b"read-only"
        assert not mr.closed


# ---- SRQ and CQ ---------------------------------------------------------------


def test_clients_share_the_callers_srq_and_cq(
    serve: Callable[..., Served], context: rp.Context, pd: rp.PD
) -> None:
    with rp.CQ(context) as cq, rp.MR(pd, 8 * 64, EVERYTHING) as mr, rp.SRQ(pd, max_wr=8) as srq:
        srq.post_srq_recv([rp.RecvWR(mr[n * 64 : n * 64 + 64], wr_id=n) for n in range(8)])
        served = serve(mr=mr, srq=srq, cq=cq)
        with served.dial() as one, served.dial() as other:
            senders = {client.qp.qp_num: client.number for client in served.server.clients}
            for number, peer in enumerate((one, other), 1):
                assert (peer.offer.receives, peer.offer.receive_size) == (0, 0)
                peer.mr.buffer[:6] = b"from %d" % number
                peer.qp.post_send(rp.Send(peer.mr[:6]))
                peer.wait()[0].check()
            for wc in cq.wait(2, LIMIT):
                wc.check()
                assert wc.opcode is WCOpcode.RECV
                text = bytes(mr.buffer[wc.wr_id * 64 :][: wc.byte_len])
                assert text == b"from %d" % senders[wc.qp_num]
            # The caller's own work requests complete there, too.
            client = served.server.clients[0]
            one.qp.post_recv(rp.RecvWR([], wr_id=5))
            client.qp.post_send(rp.Send([], wr_id=77))
            assert cq.wait(1, LIMIT)[0].wr_id == 77
            assert one.wait()[0].wr_id == 5
            assert one.report(1, None) is None
        served.server.close()
        assert not srq.closed
        assert not cq.closed


def test_client_receives_from_its_own_srq_into_its_own_cq(
    serve: Callable[..., Served], context: rp.Context, pd: rp.PD
) -> None:
    served = serve()
    with (
        rp.CQ(context) as cq,
        rp.SRQ(pd) as srq,
        rp.MR(pd, 64, EVERYTHING) as mr,
        served.dial(mr=mr, srq=srq, cq=cq) as peer,
    ):
        assert peer.cq is cq
        srq.post_srq_recv(rp.RecvWR(mr[:64], wr_id=9))
        (client,) = served.server.clients
        client.mr.buffer[:2] = b"hi"
        client.qp.post_send(rp.Send(client.mr[:2]))
        wc = peer.wait()[0]
        assert (wc.wr_id, wc.byte_len, bytes(mr.buffer[:2])) == (9, 2, b"hi")


def test_cq_of_a_client_has_room_for_what_its_srq_holds(
    serve: Callable[..., Served], context: rp.Context, pd: rp.PD
) -> None:
    served = serve(qp_options={"max_send_wr": 200})
    with (
        rp.SRQ(pd, max_wr=256) as srq,
        rp.MR(pd, 64, EVERYTHING) as mr,
        served.dial(mr=mr, srq=srq) as peer,
    ):
        srq.post_srq_recv([rp.RecvWR(mr[:8], wr_id=n) for n in range(150)])
        (client,) = served.server.clients
        client.qp.post_send([rp.Send(client.mr[:8]) for _ in range(150)])
        assert sorted(wc.check().wr_id for wc in peer.wait(150, LIMIT)) == list(range(150))


# ---- queue pair options -------------------------------------------------------


def test_numpy_integers_as_options_make_a_cq_that_is_large_enough(
    serve: Callable[..., Served],
) -> None:
    numpy = pytest.importorskip("numpy")
    options: Any = {"max_send_wr": numpy.uint8(200), "max_recv_wr": numpy.uint8(100)}
    with serve().dial(qp_options=options) as peer:
        assert peer.cq.cqe >= 300


def test_wrong_option_of_a_client_is_named(serve: Callable[..., Served]) -> None:
    options: Any = {"max_send_wr": "x"}
    with pytest.raises(TypeError, match="max_send_wr: expected int, got str"):
        serve().dial(qp_options=options)


def test_queue_pairs_of_both_sides_take_options(serve: Callable[..., Served]) -> None:
    served = serve(qp_options={"max_send_wr": 33, "max_inline_data": 32, "retry_cnt": 3})
    options: connect.QPOptions = {"max_send_wr": 40, "max_send_sge": 3, "timeout": 11}
    with served.dial(qp_options=options) as peer:
        (client,) = served.server.clients
        assert client.qp.max_send_wr >= 33
        assert client.qp.max_inline_data >= 32
        assert client.qp.query().retry_cnt == 3
        assert peer.qp.max_send_wr >= 40
        assert peer.qp.max_send_sge >= 3
        assert peer.qp.query().timeout == 11


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_send_w": 1}, ValueError, "'max_send_w' is not one of .*max_send_wr"),
        ({"max_recv_wr": 1}, ValueError, "'max_recv_wr' is not one of"),
        ({"max_send_wr": "1"}, TypeError, "max_send_wr"),
        ({"retry_cnt": 8}, ValueError, "retry_cnt"),
        ([("retry_cnt", 1)], TypeError, "qp_options: expected a dict, got list"),
    ],
)
def test_wrong_options_are_refused_before_the_first_client(
    context: rp.Context, options: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        connect.serve(context, port=0, qp_options=options)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda o: {"mr": o.mr, "size": 8}, "size, data and shared cannot be given with mr"),
        (lambda o: {"mr": o.mr, "data": b"x"}, "size, data and shared cannot be given with mr"),
        (lambda o: {"mr": o.mr, "shared": True}, "size, data and shared cannot be given with mr"),
        (lambda o: {"srq": o.srq}, "srq needs cq"),
        (lambda o: {"srq": o.srq, "cq": o.cq, "count": 4}, "count and receive_size cannot"),
        (lambda o: {"mr": o.other_mr, "srq": o.srq, "cq": o.cq}, "belong to different PDs"),
        (lambda o: {"mr": o.foreign_mr}, "mr belongs to another open device"),
        (lambda o: {"cq": o.foreign_cq}, "cq belongs to another open device"),
        (
            lambda o: {"private_data": bytes(257)},
            "private_data: 257 bytes; at most 256 are allowed",
        ),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    context: rp.Context, device: str, make: Callable[[Any], dict[str, Any]], text: str
) -> None:
    class Owned:
        pass

    own: Any = Owned()
    with contextlib.ExitStack() as stack:
        foreign = stack.enter_context(rp.open_device(device))
        pd, other, far = (stack.enter_context(rp.PD(each)) for each in (context, context, foreign))
        own.mr, own.other_mr, own.foreign_mr = (
            stack.enter_context(rp.MR(each, 64, EVERYTHING)) for each in (pd, other, far)
        )
        own.srq = stack.enter_context(rp.SRQ(pd))
        own.cq, own.foreign_cq = (stack.enter_context(rp.CQ(each)) for each in (context, foreign))
        with pytest.raises(ValueError, match=text):
            connect.serve(context, port=0, **make(own))


def test_client_cannot_give_a_region_and_its_size(context: rp.Context, pd: rp.PD) -> None:
    with rp.MR(pd, 64) as mr, pytest.raises(ValueError, match="cannot be given with mr"):
        connect.dial(context, port=1, mr=mr, local_size=64)
    with pytest.raises(rp.ClosedError, match=r"MR of 64 bytes .* is closed"):
        connect.dial(context, port=1, mr=mr)


# ---- private data and on_connect ----------------------------------------------


def test_private_data_goes_both_ways(serve: Callable[..., Served]) -> None:
    every_byte = bytes(range(256))
    served = serve(private_data=every_byte)
    with served.dial(private_data=every_byte[::-1]) as peer:
        assert peer.offer.private_data == every_byte
        joined = served.until(connect.Joined)
        assert joined.private_data == every_byte[::-1]
        (client,) = served.server.clients
        assert client.private_data == every_byte[::-1]
        assert client.address == joined.address
    with served.dial() as peer:
        assert served.until(connect.Joined).private_data == b""


def test_on_connect_prepares_answers_and_rejects_clients(serve: Callable[..., Served]) -> None:
    def on_connect(client: connect.ServedClient) -> bytes | None:
        if client.private_data == b"stranger":
            raise connect.ConnectError("members\nonly", "rejected")
        # The client's queue pair is connected, but the client does not know it yet.
        client.mr.buffer[:7] = b"welcome"
        assert client.qp.state is rp.QPState.RTS
        return b"to " + client.private_data if client.private_data else None

    served = serve(on_connect=on_connect, private_data=b"for all")
    with served.dial(private_data=b"Ada") as peer:
        assert peer.offer.private_data == b"to Ada"
        assert peer.look(0, 7).data == b"welcome"
    with served.dial() as peer:
        assert peer.offer.private_data == b"for all"
    with pytest.raises(connect.ConnectError, match="refused: members only") as error:
        served.dial(private_data=b"stranger")
    assert error.value.code == "rejected"
    refused = served.until(connect.Refused)
    assert (refused.code, refused.text) == ("rejected", "members only")
    assert served.server.clients == []
    served.works()


@pytest.mark.parametrize("failure", [ValueError("odd"), SystemExit(3), "text", bytes(257)])
def test_failure_in_on_connect_is_logged_and_ends_only_that_client(
    context: rp.Context, caplog: pytest.LogCaptureFixture, failure: object
) -> None:
    failing = [failure]

    def on_connect(client: connect.ServedClient) -> Any:
        if failing and isinstance(failing[0], BaseException):
            raise failing[0]
        return failing[0] if failing else None

    with connect.serve(context, port=0, on_connect=on_connect) as server:
        with pytest.raises(connect.ConnectError, match="on_connect failed") as error:
            connect.dial(context, *server.address[:2])
        assert error.value.code == "failed"
        assert "on_connect failed" in caplog.text
        failing.clear()
        with connect.dial(context, *server.address[:2]) as peer:
            assert peer.offer.client > 1
        assert server.clients == []


def test_server_may_close_a_client_in_on_connect_or_later(
    context: rp.Context, serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    closing = True

    def on_connect(client: connect.ServedClient) -> None:
        if closing:
            client.close()

    served = serve(on_connect=on_connect)
    with pytest.raises(connect.ConnectError, match="the server closed the connection"):
        connect.dial(context, *served.server.address[:2])
    assert served.until(connect.Left).reason == "the server closed the connection"
    closing = False
    with connect.dial(context, *served.server.address[:2]) as peer:
        served.server.clients[0].close()
        with pytest.raises(connect.ConnectError, match="the server closed the connection"):
            peer.look(0, 8)
    assert served.until(connect.Left).reason == "the server closed the connection"
    assert (served.server.clients, caplog.text) == ([], "")
    served.works()


def test_a_served_client_refuses_wrong_arguments_as_the_client_does(
    serve: Callable[..., Served],
) -> None:
    served = serve(size=64)
    with served.dial() as peer:
        (client,) = served.server.clients
        for offset, length in ((-1, 8), (0, -1), (60, 8), (65, 0)):
            with pytest.raises(ValueError, match=r"exposed|is not in 0") as error:
                client.look(offset, length)
            assert not isinstance(error.value, rp.RdmaError)
            with pytest.raises(ValueError, match=r"exposed|is not in 0"):
                peer.look(offset, length)
        with pytest.raises(TypeError, match="offset: expected int, got str"):
            client.look("0", 8)  # type: ignore[arg-type]
        for index in (0, -1):
            with pytest.raises(ValueError, match=rf"index={index} is not in 1\.\."):
                client.arrival(index)
            with pytest.raises(ValueError, match=rf"index={index} is not in 1\.\."):
                peer.report(index)
        assert client.arrival(1) is None


def test_on_connect_must_be_callable(context: rp.Context) -> None:
    with pytest.raises(TypeError, match="on_connect: expected a callable or None, got int"):
        connect.serve(context, port=0, on_connect=3)  # type: ignore[arg-type]


def test_on_event_must_not_be_a_coroutine_function(context: rp.Context) -> None:
    async def on_event(event: connect.Event) -> None:
        pass

    refused: Any = on_event
    with pytest.raises(TypeError, match="on_event must be a plain function: nothing"):
        connect.serve(context, port=0, on_event=refused)
    with pytest.raises(TypeError, match="on_event must be a plain function: nothing"):
        asyncio.run(connect.aserve(context, port=0, on_event=refused))


def test_server_with_threads_refuses_a_coroutine_function(context: rp.Context) -> None:
    async def on_connect(client: connect.ServedClient) -> None:
        pass

    class Callback:
        async def __call__(self, client: connect.ServedClient) -> None:
            pass

    refused: Any
    for refused in (on_connect, Callback(), functools.partial(on_connect)):
        with pytest.raises(TypeError, match=r"on_connect: a coroutine function .* use aserve"):
            connect.serve(context, port=0, on_connect=refused)


def test_clients_number_is_bounded_also_when_on_connect_rejects(context: rp.Context) -> None:
    def reject(client: connect.ServedClient) -> None:
        raise rp.RdmaError("no")

    with connect.serve(context, port=0, max_clients=1, on_connect=reject) as server:
        for _ in range(3):
            with pytest.raises(connect.ConnectError, match="refused: no"):
                connect.dial(context, *server.address[:2])


def test_asyncio_on_connect_may_be_a_coroutine_function(context: rp.Context) -> None:
    async def main() -> bytes:
        admitted = asyncio.Event()

        async def on_connect(client: connect.ServedClient) -> bytes:
            assert threading.current_thread() is threading.main_thread()
            await admitted.wait()
            return b"at last"

        async with await connect.aserve(context, port=0, on_connect=on_connect) as server:
            dialling = asyncio.create_task(connect.adial(context, *server.address[:2]))
            await asyncio.sleep(0.05)
            assert not dialling.done()
            admitted.set()
            async with await dialling as peer:
                return peer.offer.private_data

    assert asyncio.run(main()) == b"at last"


def test_asyncio_on_connect_that_awaits_a_cancelled_task_has_failed(context: rp.Context) -> None:
    async def main() -> str:
        async def on_connect(client: connect.ServedClient) -> None:
            task = asyncio.ensure_future(asyncio.Event().wait())
            task.cancel()
            await task

        async with await connect.aserve(context, port=0, on_connect=on_connect) as server:
            failed = r"the server's on_connect failed \(CancelledError\)"
            with pytest.raises(connect.ConnectError, match=failed) as error:
                await connect.adial(context, *server.address[:2])
        return error.value.code

    assert asyncio.run(main()) == "failed"


def test_asyncio_client_whose_on_connect_never_ends_is_dropped(
    context: rp.Context, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> str:
        cancelled = asyncio.Event()

        async def on_connect(client: connect.ServedClient) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async with await connect.aserve(
            context, port=0, on_connect=on_connect, timeout=0.2
        ) as server:
            with pytest.raises(connect.ConnectError, match="on_connect took longer") as error:
                await connect.adial(context, *server.address[:2])
            await asyncio.wait_for(cancelled.wait(), LIMIT)
            assert server.clients == []
        return error.value.code

    assert asyncio.run(main()) == "timeout"
    assert not caplog.records


def test_asyncio_on_connect_is_not_called_once_the_client_has_been_refused(
    context: rp.Context,
) -> None:
    async def main() -> list[connect.ServedClient]:
        asked: list[connect.ServedClient] = []
        async with await connect.aserve(
            context, port=0, on_connect=asked.append, timeout=0.1
        ) as server:
            # This keeps the event loop busy for as long as the client waits.
            with pytest.raises(connect.ConnectError, match="on_connect took longer") as error:
                connect.dial(context, *server.address[:2])
            assert error.value.code == "timeout"
            # The loop's next turns would call on_connect.
            await asyncio.sleep(0.01)
            return asked

    assert asyncio.run(main()) == []


@pytest.mark.parametrize("why", ["it takes too long", "the server closes"])
def test_asyncio_client_that_on_connect_admits_too_late_joins_and_leaves(
    context: rp.Context, why: str
) -> None:
    """The owner can then take back what on_connect has assigned to the client."""
    refused = threading.Event()

    def dial(address: tuple[str, int]) -> str:
        try:
            with pytest.raises(connect.ConnectError) as error:
                connect.dial(context, *address)
            return error.value.code
        finally:
            refused.set()

    async def main() -> tuple[str, list[connect.Event]]:
        events: list[connect.Event] = []
        loop = asyncio.get_running_loop()

        def on_connect(client: connect.ServedClient) -> bytes:
            if why == "the server closes":
                device.close_all()
            assert refused.wait(LIMIT)
            return b"admitted"

        server = await connect.aserve(
            device, port=0, on_connect=on_connect, on_event=events.append, timeout=0.2
        )
        code = await loop.run_in_executor(None, dial, server.address[:2])
        await server.close()
        # The events were put in the loop's queue by then.
        await asyncio.sleep(0.01)
        return code, events

    with rp.open_device(context.name) as device:
        code, events = asyncio.run(main())
    assert code == ("timeout" if why == "it takes too long" else "closing")
    joined, left = (e for e in events if not isinstance(e, connect.Refused))
    assert isinstance(joined, connect.Joined)
    assert isinstance(left, connect.Left)
    assert joined.client == left.client == 1
    assert joined.offer.private_data == b"admitted"
    assert left.reason == "on_connect answered too late: the client had been refused"


def test_both_sides_know_when_the_other_is_gone(context: rp.Context) -> None:
    gone = threading.Event()

    def on_event(event: connect.Event) -> None:
        if isinstance(event, connect.Left):
            gone.set()

    with connect.serve(context, port=0, on_event=on_event) as server:
        with connect.dial(context, *server.address[:2], qp_type=QPType.RC) as peer:
            (client,) = server.clients
            assert not client.closed
            assert not peer.closed
        assert gone.wait(LIMIT)
        assert client.closed
        assert peer.closed


@pytest.mark.parametrize("how", ["close", "the event loop ends"])
def test_server_that_ends_does_not_wait_for_a_pending_on_connect(
    context: rp.Context, how: str
) -> None:
    refused: list[rp.RdmaError] = []
    cancelled: list[bool] = []

    async def main() -> threading.Thread:
        asked = asyncio.Event()

        async def on_connect(_: connect.ServedClient) -> None:
            asked.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        server = await connect.aserve(context, port=0, on_connect=on_connect, timeout=4 * LIMIT)

        def dial() -> None:
            try:
                connect.dial(context, port=server.address[1], timeout=4 * LIMIT)
            except rp.RdmaError as error:
                refused.append(error)

        client = threading.Thread(target=dial)
        client.start()
        await asyncio.wait_for(asked.wait(), LIMIT)
        if how == "close":
            await server.close()
        return client

    start = time.monotonic()
    client = asyncio.run(main())
    client.join(LIMIT)
    assert not client.is_alive()
    assert time.monotonic() - start < 2 * LIMIT
    assert cancelled == [True]
    assert isinstance(refused[0], connect.ConnectError)


@pytest.mark.parametrize("helped", [connect.serve, connect.aserve])
def test_defaults_of_the_servers_queue_pairs_are_those_that_help_names(
    serve: Callable[..., Served], helped: Callable[..., Any]
) -> None:
    named = re.findall(r"(min_rnr_timer|max_send_wr|max_send_sge)=(\d+)", helped.__doc__ or "")
    said = {name: int(value) for name, value in named}
    served = serve()
    with served.dial():
        (client,) = served.server.clients
        assert set(said) == {"min_rnr_timer", "max_send_wr", "max_send_sge"}
        assert client.qp.query().min_rnr_timer == said["min_rnr_timer"]
        # A device may grant more.
        assert client.qp.max_send_wr >= said["max_send_wr"]
        assert client.qp.max_send_sge >= said["max_send_sge"]

"""Rendezvous on the software device: the data is fetched by the server's side."""

from __future__ import annotations

import struct
import threading

import pytest
from support import soft_context
from support.tag_server import FIN, NO_FLAGS, RECEIVES, Server, small_server

import rdmapost as rp
from rdmapost import QPState, WCFlags, WCOpcode, WCStatus

context = soft_context
server = small_server


def test_rendezvous_fetches_the_data_and_sends_a_fin(server):
    """The match, the data by RDMA READ, and a FIN that repeats the request except for its
    opcode."""
    client = server.client
    client.qp.post_recv(rp.RecvWR(client.mr[4096:4200], wr_id=20))
    server.add(1, size=8192, recv_wr_id=6)
    data = bytes(i % 253 for i in range(8192))
    request = client.rndv(1, data, app_ctx=0xABCD, more=b"more")
    client.post(request)
    sent, fin = client.cq.wait(2)
    assert (sent.wr_id, sent.opcode, sent.status) == (1, WCOpcode.SEND, WCStatus.SUCCESS)
    assert (fin.wr_id, fin.opcode, fin.byte_len) == (20, WCOpcode.RECV, 32)
    assert bytes(client.mr.buffer[4096 : 4096 + 32]) == bytes([FIN]) + request[1:32]
    match, done = server.cq.wait(2)
    for wc in (match, done):
        assert (wc.wr_id, wc.opcode, wc.qp_num) == (6, WCOpcode.TM_RECV, client.peer.qp_num)
        assert (wc.imm_data, wc.invalidated_rkey, wc.src_qp, wc.vendor_err) == (None, None, 0, 0)
        assert (wc.pkey_index, wc.slid, wc.sl, wc.dlid_path_bits) == (0, 0, 0, 0)
    assert (match.wc_flags, done.wc_flags) == (WCFlags.TM_MATCH, WCFlags.TM_DATA_VALID)
    assert (match.tm_tag, match.tm_priv) == (1, 0xABCD)
    assert (done.byte_len, done.tm_tag) == (8192, None)
    assert server.bytes(8192) == data
    assert (server.srq.outstanding_tags, client.peer.outstanding.send) == (0, 0)


def test_rendezvous_progresses_while_its_consumer_waits(server):
    """Only the thread that waits for the data is running."""
    client = server.client
    client.qp.post_recv(rp.RecvWR(client.mr[4096:4200], wr_id=20))
    server.add(1, size=8192, recv_wr_id=6)
    found: list[rp.WC] = []
    waiter = threading.Thread(target=lambda: found.extend(server.cq.wait(2, 10)))
    waiter.start()
    waiter.join(0.2)
    client.post(client.rndv(1, b"data"))
    waiter.join(10)
    assert [wc.wr_id for wc in found] == [6, 6]
    assert server.bytes(4) == b"data"


def test_completion_of_rendezvous_data_is_not_solicited(context, stack, pd):
    """The device's own work requests do not wake a waiter for solicited messages."""
    channel = stack.enter_context(rp.CompChannel(context))
    server = Server(stack, pd, channel=channel)
    client = server.client
    client.qp.post_recv(rp.RecvWR(client.mr[4096:4200], wr_id=20))
    server.add(1, size=8192, flags=0)
    server.cq.req_notify(solicited_only=True)
    client.post(client.rndv(1, b"data"))
    client.cq.wait(2)
    assert channel.get_cq_event(0) is None
    assert [wc.wc_flags for wc in server.cq.poll()] == [WCFlags.TM_MATCH, WCFlags.TM_DATA_VALID]


@pytest.mark.parametrize("size", [0, 1, 100])
def test_rendezvous_shorter_than_its_buffer_fills_only_its_start(server, size):
    client = server.client
    client.qp.post_recv(rp.RecvWR(client.mr[4096:4200]))
    server.srq.post_srq_ops(
        rp.TagAdd(tag=1, sg_list=[server.mr[0:60], server.mr[200:300]], flags=0)
    )
    assert client.send(client.rndv(1, b"z" * size)) is WCStatus.SUCCESS
    assert server.cq.wait(2)[1].byte_len == size
    assert server.bytes(300).count(b"z") == size
    assert server.bytes(60) == (b"z" * size).ljust(60, b"\0")[:60]


def test_rendezvous_that_does_not_fit_is_left_to_software(server):
    """The headers are in the tagged buffer: software reads the data, and sends the FIN."""
    client = server.client
    server.add(1, size=64, recv_wr_id=3)
    request = client.rndv(1, b"y" * 65, more=b"meta")
    assert client.send(request) is WCStatus.SUCCESS
    wc = server.one()
    assert (wc.status, wc.wr_id) == (WCStatus.TM_RNDV_INCOMPLETE, 3)
    assert server.bytes(36) == request[:32] + bytes(4)
    assert server.srq.outstanding_tags == 0
    assert client.peer.state is QPState.RTS
    va, rkey, size = struct.unpack_from("!QII", server.bytes(32), 16)
    client.peer.post_send(rp.RdmaRead(server.mr[1000:1065], remote_addr=va, rkey=rkey))
    server.send_cq.wait(1)[0].check()
    assert server.bytes(size, 1000) == b"y" * 65


def test_rendezvous_for_an_empty_buffer_is_incomplete(server):
    server.add(1, size=0, recv_wr_id=3)
    assert server.client.send(server.client.rndv(1, b"y")) is WCStatus.SUCCESS
    assert server.one().status is WCStatus.TM_RNDV_INCOMPLETE


def test_unexpected_rendezvous_is_left_to_software(server):
    server.post_receives()
    request = server.client.rndv(1, b"data", app_ctx=3)
    assert server.client.send(request) is WCStatus.SUCCESS
    wc = server.one()
    assert (wc.opcode, wc.wc_flags, wc.tm_tag, wc.tm_priv) == (
        WCOpcode.TM_RECV,
        NO_FLAGS,
        None,
        None,
    )
    assert server.bytes(len(request), RECEIVES) == request
    server.srq.post_srq_ops(rp.TagSync(unexpected_cnt=1))
    assert server.one().wc_flags == NO_FLAGS


@pytest.mark.parametrize("wrong", [{"rkey": 1}, {"len": 60000}])
def test_rendezvous_whose_data_cannot_be_read_is_incomplete_and_breaks_the_connection(
    server, wrong
):
    """The match is reported, then TM_RNDV_INCOMPLETE."""
    client = server.client
    server.add(1, size=60000, recv_wr_id=3)
    assert client.send(client.rndv(1, b"data", **wrong)) is WCStatus.SUCCESS
    match, broken = server.cq.wait(2)
    assert (match.status, match.wc_flags) == (WCStatus.SUCCESS, WCFlags.TM_MATCH)
    assert (broken.status, broken.wr_id) == (WCStatus.TM_RNDV_INCOMPLETE, 3)
    assert (client.peer.state, client.qp.state) == (QPState.ERR, QPState.ERR)
    assert server.srq.outstanding_tags == 0


def test_fin_without_a_receive_is_retried(stack, pd):
    """Like any send of the server's queue pair, as often as its rnr_retry allows."""
    server = Server(stack, pd)
    client = server.client
    # The only retry comes after 0.5 s: late enough on a busy machine.
    client.qp.modify(min_rnr_timer=31)
    server.add(1, recv_wr_id=3)
    assert client.send(client.rndv(1, b"data")) is WCStatus.SUCCESS
    assert [wc.wc_flags for wc in server.cq.wait(2)] == [WCFlags.TM_MATCH, WCFlags.TM_DATA_VALID]
    client.qp.post_recv(rp.RecvWR(client.mr[4096:4200], wr_id=20))
    assert client.cq.wait(1)[0].check().wr_id == 20
    assert client.peer.state is QPState.RTS


def test_rendezvous_waits_for_rts(stack, pd, server):
    client = server.client
    client.qp.to_reset()
    client.peer.to_reset()
    client.qp.connect(client.peer.endpoint())
    client.peer.to_init()
    client.peer.to_rtr(client.qp.endpoint())
    client.qp.post_recv(rp.RecvWR(client.mr[4096:4200]))
    server.add(1, recv_wr_id=3)
    assert client.send(client.rndv(1, b"data")) is WCStatus.SUCCESS
    assert server.one().wc_flags is WCFlags.TM_MATCH
    client.peer.to_rts()
    assert server.one().wc_flags is WCFlags.TM_DATA_VALID


@pytest.mark.parametrize("how", ["to_err", "to_reset", "close"])
def test_rendezvous_on_a_queue_pair_that_breaks_or_is_reset_completes_its_buffer(server, how):
    """The completion returns the buffer and reports that no data arrived."""
    client = server.client
    client.peer.to_sqd()
    server.add(1, recv_wr_id=3)
    assert client.send(client.rndv(1, b"data")) is WCStatus.SUCCESS
    assert server.one().wc_flags is WCFlags.TM_MATCH
    getattr(client.peer, how)()
    wc = server.one()
    assert (wc.wr_id, wc.status) == (3, WCStatus.TM_RNDV_INCOMPLETE)
    assert server.srq.outstanding_tags == 0


def test_sends_of_the_server_keep_their_order_around_a_rendezvous(server):
    """The device's READ and FIN are in the same queue."""
    client = server.client
    client.qp.post_recv(
        [rp.RecvWR(client.mr[i * 64 : i * 64 + 64], wr_id=i) for i in range(100, 104)]
    )
    server.add(1, recv_wr_id=3)
    client.peer.to_sqd()
    server.mr.buffer[5000:5003] = b"own"
    client.peer.post_send(rp.Send(server.mr[5000:5003], wr_id=50))
    assert client.send(client.rndv(1, b"data")) is WCStatus.SUCCESS
    client.peer.post_send(rp.Send(server.mr[5000:5003], wr_id=51))
    client.peer.to_rts()
    assert [wc.wr_id for wc in server.send_cq.wait(2)] == [50, 51]
    assert [wc.byte_len for wc in client.cq.wait(3)] == [3, 32, 3]
    assert [wc.wc_flags for wc in server.cq.wait(2)] == [WCFlags.TM_MATCH, WCFlags.TM_DATA_VALID]

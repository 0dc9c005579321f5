"""Tag matching on the software device: the queue, and what happens to messages."""

from __future__ import annotations

import contextlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ALL, soft_context
from support.tag_server import (
    EAGER,
    FIN,
    MATCHED,
    NO_FLAGS,
    NO_TAG,
    RECEIVES,
    RNDV,
    SLOT,
    SYNC,
    Server,
    small_server,
    tmh,
)

import rdmapost as rp
from rdmapost import QPState, QPType, SRQType, WCFlags, WCOpcode, WCStatus

context = soft_context
server = small_server


# ---- the queue --------------------------------------------------------------------


def test_tag_matching_queue_reports_its_type_sizes_and_cq(server):
    srq = server.srq
    assert str(srq) == "TM SRQ of 16 work requests"
    assert (srq.srq_type, srq.max_num_tags, srq.max_ops, srq.cq) == (SRQType.TM, 8, 8, server.cq)
    assert (srq.outstanding, srq.outstanding_tags, srq.outstanding_ops) == (0, 0, 0)
    with pytest.raises(rp.RdmaError, match="has no SRQ number; only XRC SRQs have one"):
        _ = srq.srq_num


def test_tag_matching_queue_without_what_it_needs_is_refused_by_name(pd, cq, context, stack):
    tagged = stack.enter_context(rp.CQ(context, wc_flags=rp.WCExFlags.WITH_TM_INFO))
    for options, words in (
        ({}, "an SRQ of type TM needs a CQ"),
        ({"cq": cq}, r"needs a CQ that reports tags: CQ\(context, wc_flags=WCExFlags\.WITH_TM"),
        ({"cq": tagged, "max_num_tags": 128}, r"max_num_tags=128 is not in 1\.\.127"),
        ({"cq": tagged, "max_num_tags": 0}, "max_num_tags=0 is not in"),
        ({"cq": tagged, "max_ops": -1}, "max_ops=-1 is not in"),
        ({"cq": tagged, "max_ops": 1025}, r"max_ops=1025 is not in 1\.\.1024"),
    ):
        with pytest.raises(ValueError, match=words):
            rp.SRQ(pd, srq_type=SRQType.TM, **options)
    with pytest.raises(ValueError, match="type BASIC has no use for a CQ"):
        rp.SRQ(pd, cq=cq)


def test_only_rc_queue_pairs_match_tags(server, pd, cq):
    for qp_type in (QPType.UC, QPType.UD):
        with pytest.raises(ValueError, match=f"requires an RC queue pair, not {qp_type.name}"):
            rp.QP(pd, qp_type, cq, srq=server.srq)


def test_cq_of_a_tag_matching_queue_cannot_be_closed_first(server):
    with pytest.raises(rp.InUseError, match="TM SRQ of 16 work requests"):
        server.cq.close()


# ---- eager messages ---------------------------------------------------------------


def test_message_goes_to_the_buffer_with_its_tag(server):
    """The payload without the header; the tag and the sender's data in the completion."""
    add = server.add(0x1234_5678_9ABC_DEF0, wr_id=1, recv_wr_id=2)
    assert isinstance(add.handle, rp.TagHandle)
    assert (server.srq.outstanding_tags, server.srq.outstanding_ops) == (1, 0)
    assert server.client.eager(0x1234_5678_9ABC_DEF0, b"payload", 0xCAFE) is WCStatus.SUCCESS
    wc = server.one()
    assert (wc.status, wc.opcode, wc.wr_id) == (WCStatus.SUCCESS, WCOpcode.TM_RECV, 2)
    assert (wc.wc_flags, wc.byte_len, wc.qp_num) == (MATCHED, 7, server.client.peer.qp_num)
    assert (wc.tm_tag, wc.tm_priv) == (0x1234_5678_9ABC_DEF0, 0xCAFE)
    assert server.bytes(8) == b"payload\0"
    assert server.srq.outstanding_tags == 0


def test_first_matching_entry_is_used(server):
    """The first in list order; the mask selects the bits that are compared."""
    server.add(0x10, 0, mask=0xF0, recv_wr_id=1)
    server.add(0x12, SLOT, recv_wr_id=2)
    server.add(0, 2 * SLOT, mask=0, recv_wr_id=3)
    for tag, wr_id in ((0x12, 1), (0x12, 2), (0x99, 3)):
        server.client.eager(tag, bytes([wr_id]))
        wc = server.one()
        assert (wc.wr_id, wc.tm_tag, wc.wc_flags) == (wr_id, tag, MATCHED)
        assert server.bytes(1, (wr_id - 1) * SLOT) == bytes([wr_id])


def test_tags_of_up_to_64_bits_match(server):
    for tag in (0, 1, (1 << 64) - 1, 1 << 63):
        server.add(tag, recv_wr_id=tag)
        server.client.eager(tag)
        wc = server.one()
        assert (wc.wr_id, wc.tm_tag) == (tag, tag)


def test_tagged_payload_is_scattered_over_the_sges(server):
    mr = server.mr
    server.srq.post_srq_ops(rp.TagAdd(tag=1, sg_list=[mr[0:3], mr[100:200]], flags=0))
    server.client.eager(1, b"abcdefgh")
    assert server.one().byte_len == 8
    assert (server.bytes(4), server.bytes(6, 100)) == (b"abc\0", b"defgh\0")


def test_message_sent_inline_matches(server):
    server.add(1, recv_wr_id=4)
    data = rp.SGE.from_buffer(tmh(EAGER, 1) + b"inline")
    flags = rp.SendFlags.SIGNALED | rp.SendFlags.INLINE
    server.client.qp.post_send(rp.Send(data, send_flags=flags))
    assert server.one().byte_len == 6
    assert server.bytes(6) == b"inline"


def test_message_header_may_span_send_buffers(server):
    client, message = server.client, tmh(EAGER, 77, 3) + b"xyz"
    client.mr.buffer[:5], client.mr.buffer[100:114] = message[:5], message[5:]
    server.add(77)
    client.qp.post_send(rp.Send([client.mr[0:5], client.mr[100:106], client.mr[106:114]]))
    wc = server.one()
    assert (wc.tm_tag, wc.tm_priv, wc.byte_len) == (77, 3, 3)
    assert server.bytes(3) == b"xyz"


def test_tagged_message_delivers_its_immediate_data(server):
    server.add(5)
    server.client.mr.buffer[:16] = tmh(EAGER, 5)
    server.client.qp.post_send(rp.SendWithImm(server.client.mr[:16], imm_data=0x0102_0304))
    wc = server.one()
    assert wc.imm_data == 0x0102_0304
    assert wc.wc_flags == MATCHED | WCFlags.WITH_IMM


def test_tagged_message_of_several_packets_completes_twice(server):
    """The first packet reports the match, the last the data (tag_matching.md)."""
    server.add(1, size=16384, recv_wr_id=6)
    data = bytes(i % 251 for i in range(10000))
    server.client.eager(1, data, 8)
    first, second = server.cq.wait(2)
    assert (first.wr_id, second.wr_id) == (6, 6)
    assert (first.opcode, second.opcode) == (WCOpcode.TM_RECV, WCOpcode.TM_RECV)
    assert (first.wc_flags, second.wc_flags) == (WCFlags.TM_MATCH, WCFlags.TM_DATA_VALID)
    assert (first.tm_tag, first.tm_priv) == (1, 8)
    assert (second.tm_tag, second.tm_priv, second.byte_len) == (None, None, 10000)
    assert server.bytes(10000) == data


def test_message_longer_than_its_tagged_buffer_fails_on_both_sides(server):
    server.add(1, size=4, recv_wr_id=3)
    assert server.client.eager(1, b"12345") is WCStatus.REM_INV_REQ_ERR
    wc = server.one()
    assert (wc.status, wc.wr_id) == (WCStatus.LOC_LEN_ERR, 3)
    assert server.client.peer.state is QPState.ERR
    assert server.srq.outstanding_tags == 0


def test_tagged_buffer_with_a_wrong_key_fails_the_message(stack, pd):
    server = Server(stack, pd, checked=False)
    server.srq.post_srq_ops(rp.TagAdd(tag=1, sg_list=rp.SGE(server.mr.addr, 8, 0xDEAD)))
    assert server.client.eager(1, b"x") is WCStatus.REM_OP_ERR
    assert [wc.status for wc in server.cq.wait(2)] == [WCStatus.SUCCESS, WCStatus.LOC_PROT_ERR]


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=8),
    st.lists(st.integers(0, 7), max_size=12),
)
def test_matching_agrees_with_a_linear_search(context, entries, messages):
    """Against a list that is searched from its beginning."""
    with contextlib.ExitStack() as stack:
        server = Server(stack, stack.enter_context(rp.PD(context)), max_num_tags=8)
        server.post_receives(12)
        model = []
        for number, (tag, mask) in enumerate(entries):
            server.add(tag & mask, number * SLOT, mask=mask, recv_wr_id=number)
            model.append((number, tag & mask, mask))
        for number, tag in enumerate(messages):
            assert server.client.eager(tag, bytes([number])) is WCStatus.SUCCESS
            wc = server.one()
            found = next((e for e in model if tag & e[2] == e[1]), None)
            if found is None:
                assert (wc.wr_id >= 500, wc.wc_flags, wc.tm_tag) == (True, NO_FLAGS, None)
            else:
                model.remove(found)
                assert (wc.wr_id, wc.wc_flags, wc.tm_tag) == (found[0], MATCHED, tag)
                assert server.bytes(1, found[0] * SLOT) == bytes([number])
        assert server.srq.outstanding_tags == len(model)


# ---- unexpected messages ----------------------------------------------------------


def test_unexpected_message_is_delivered_whole(server):
    """As TM_RECV without flags, with its header, to the queue's next receive."""
    server.post_receives()
    server.add(1)
    assert server.client.eager(2, b"what", 31) is WCStatus.SUCCESS
    wc = server.one()
    assert (wc.opcode, wc.wc_flags, wc.wr_id) == (WCOpcode.TM_RECV, NO_FLAGS, 500)
    # The header has the tag: a NIC reports it only for a match.
    assert (wc.byte_len, wc.tm_tag, wc.tm_priv) == (20, None, None)
    assert server.bytes(20, RECEIVES) == tmh(EAGER, 2, 31) + b"what"
    assert (server.srq.outstanding, server.srq.outstanding_tags) == (0, 1)


def test_unexpected_message_without_a_receive_is_retried_and_not_counted(server):
    """The sender retries and finally gives up."""
    assert server.client.eager(2) is WCStatus.RNR_RETRY_EXC_ERR
    server.add(3)
    assert server.cq.poll() == []


def test_message_matches_an_entry_that_was_added_while_it_waited(stack, pd):
    server = Server(stack, pd)
    server.client.qp.to_reset()
    server.client.qp.connect(server.client.peer.endpoint(), rnr_retry=7)
    server.client.peer.to_reset()
    server.client.peer.connect(server.client.qp.endpoint(), min_rnr_timer=1)
    server.client.post(tmh(EAGER, 4) + b"late")
    server.srq.post_srq_ops(rp.TagAdd(tag=4, sg_list=server.mr[:8], recv_wr_id=3, flags=0))
    wc = server.one()
    assert (wc.wr_id, wc.wc_flags) == (3, MATCHED)
    server.client.cq.wait(1)[0].check()


@pytest.mark.parametrize("message", [b"", b"\0", tmh(NO_TAG, 5) + b"text", tmh(FIN, 5)])
def test_no_tag_and_fin_messages_are_neither_matched_nor_counted(server, message):
    """They go to software, as does a FIN."""
    server.post_receives()
    server.add(5)
    assert server.client.send(message) is WCStatus.SUCCESS
    wc = server.one()
    assert (wc.opcode, wc.wc_flags, wc.wr_id) == (WCOpcode.TM_NO_TAG, NO_FLAGS, 500)
    assert (wc.byte_len, wc.tm_tag) == (len(message), None)
    assert server.bytes(len(message), RECEIVES) == message
    server.srq.post_srq_ops(rp.TagSync(unexpected_cnt=0))
    assert server.one().wc_flags == NO_FLAGS


@pytest.mark.parametrize(
    "message",
    [
        b"\x03" + bytes(14),
        b"\x01",
        b"\x04" + bytes(15),
        b"\xff" * 40,
        tmh(RNDV, 1) + bytes(15),
        tmh(RNDV, 1) + bytes(49),
    ],
)
def test_malformed_message_breaks_the_connection(server, message):
    server.post_receives()
    server.add(1)
    assert server.client.send(message) is WCStatus.REM_INV_REQ_ERR
    assert server.client.peer.state is QPState.ERR
    assert server.cq.poll() == []


def test_write_with_immediate_consumes_a_receive_of_the_tag_matching_queue(server):
    server.post_receives()
    server.client.qp.post_send(
        rp.RdmaWriteWithImm(
            server.client.mr[:4], remote_addr=server.mr.addr, rkey=server.mr.rkey, imm_data=6
        )
    )
    wc = server.one()
    assert (wc.opcode, wc.wr_id, wc.imm_data) == (WCOpcode.RECV_RDMA_WITH_IMM, 500, 6)


# ---- phase synchronisation --------------------------------------------------------


def unexpected(server: Server, count: int = 1) -> None:
    """Let that many unexpected messages arrive."""
    server.post_receives(count)
    for _ in range(count):
        server.client.eager(0xDEAD)
        assert server.one().wc_flags == NO_FLAGS


def test_entry_added_after_an_unexpected_message_is_held(server):
    """A later message must not overtake the one that software has not seen yet."""
    unexpected(server)
    add = rp.TagAdd(wr_id=1, recv_wr_id=2, tag=0xDEAD, sg_list=server.mr[:8])
    server.srq.post_srq_ops(add)
    wc = server.one()
    assert (wc.opcode, wc.status) == (WCOpcode.TM_ADD, WCStatus.SUCCESS)
    assert wc.wc_flags is WCFlags.TM_SYNC_REQ
    server.post_receives()
    server.client.eager(0xDEAD)
    wc = server.one()
    assert (wc.wr_id, wc.wc_flags) == (500, NO_FLAGS)


@pytest.mark.parametrize("how", ["sync", "add", "del"])
def test_any_operation_with_the_right_count_releases_held_entries(server, how):
    early = server.add(0x1, recv_wr_id=1)
    unexpected(server, 3)
    server.srq.post_srq_ops(rp.TagAdd(recv_wr_id=2, tag=2, sg_list=server.mr[:8], flags=0))
    op = {
        "sync": lambda: rp.TagSync(unexpected_cnt=3),
        "add": lambda: rp.TagAdd(tag=9, unexpected_cnt=3, flags=SYNC),
        "del": lambda: rp.TagDel(handle=early.handle, unexpected_cnt=3, flags=SYNC),
    }[how]()
    server.srq.post_srq_ops(op)
    wc = server.one()
    assert (wc.status, wc.wc_flags) == (WCStatus.SUCCESS, NO_FLAGS)
    server.client.eager(2)
    wc = server.one()
    assert (wc.wr_id, wc.wc_flags) == (2, MATCHED)


@pytest.mark.parametrize("count", [0, 1, 3, 1 << 16])
def test_wrong_count_asks_for_another_sync(server, count):
    unexpected(server, 2)
    server.srq.post_srq_ops(rp.TagSync(unexpected_cnt=count))
    wc = server.one()
    assert (wc.opcode, wc.wc_flags) == (WCOpcode.TM_SYNC, WCFlags.TM_SYNC_REQ)
    server.srq.post_srq_ops(rp.TagSync(unexpected_cnt=2))
    assert server.one().wc_flags == NO_FLAGS


def test_device_counts_unexpected_messages_in_16_bits(server):
    unexpected(server, 2)
    server.srq.post_srq_ops(rp.TagSync(unexpected_cnt=(1 << 16) + 2))
    assert server.one().wc_flags == NO_FLAGS


def test_entries_added_before_an_unexpected_message_still_match(server):
    server.add(1, recv_wr_id=7)
    unexpected(server)
    server.client.eager(1)
    assert server.one().wc_flags == MATCHED


def test_held_entry_can_be_removed(server):
    unexpected(server)
    held = server.add(0xDEAD)
    server.srq.post_srq_ops(rp.TagDel(wr_id=4, handle=held.handle, unexpected_cnt=1, flags=SYNC))
    wc = server.one()
    assert (wc.opcode, wc.status, wc.wc_flags) == (WCOpcode.TM_DEL, WCStatus.SUCCESS, NO_FLAGS)
    assert server.srq.outstanding_tags == 0


# ---- several queue pairs, and the CQ ----------------------------------------------


def test_matching_list_serves_all_queue_pairs_of_its_srq(stack, pd):
    server = Server(stack, pd, clients=3)
    for tag in range(6):
        server.add(tag, tag * SLOT, recv_wr_id=tag)
    for tag, number in enumerate((2, 0, 1, 1, 0, 2)):
        client = server.clients[number]
        client.eager(tag, bytes([number]))
        wc = server.one()
        assert (wc.wr_id, wc.qp_num) == (tag, client.peer.qp_num)
        assert server.bytes(1, tag * SLOT) == bytes([number])


def test_small_polls_of_a_tag_matching_cq_lose_no_completion(server):
    """The device returns completions in batches; none is lost between them."""
    server.srq.post_srq_ops([rp.TagSync(wr_id=i) for i in range(8)])
    found = []
    while len(found) < 8:
        got = server.cq.poll(3)
        assert 1 <= len(got) <= 3
        found += [wc.wr_id for wc in got]
    assert found == list(range(8))
    assert server.cq.poll() == []


def test_cq_with_tags_reports_ordinary_completions_in_full(pd, context, stack):
    """It also serves queue pairs, with every field that an ordinary CQ reports."""
    seen = []
    for wc_flags in (0, rp.WCExFlags.WITH_TM_INFO):
        cq = stack.enter_context(rp.CQ(context, 256, wc_flags=wc_flags))
        mr = stack.enter_context(rp.MR(pd, 4096, ALL))
        a, b = rp.QP(pd, QPType.UD, cq), rp.QP(pd, QPType.UD, cq)
        a.connect()
        b.connect()
        ah = stack.enter_context(a.ah_to(b.endpoint()))
        key = rp.resources.qp.DEFAULT_QKEY
        for i in range(40):
            b.post_recv(rp.RecvWR(mr[100:200], wr_id=i))
            a.post_send(
                rp.SendWithImm(
                    mr[:7], wr_id=100 + i, imm_data=i, ah=ah, remote_qpn=b.qp_num, remote_qkey=key
                )
            )
        a.post_send(rp.Send(mr[:8], wr_id=999, ah=ah, remote_qpn=b.qp_num, remote_qkey=key))
        b.to_err()
        found = cq.wait(81)
        assert cq.poll() == []
        numbers = {a.qp_num: 1, b.qp_num: 2}
        seen.append(
            [
                wc._replace(qp_num=numbers[wc.qp_num], src_qp=numbers.get(wc.src_qp, 0))
                for wc in found
            ]
        )
        a.close()
        b.close()
    assert seen[0] == seen[1]


def test_completion_event_wakes_a_sleeper_on_a_tag_matching_cq(server):
    found: list[rp.WC] = []
    waiter = threading.Thread(target=lambda: found.extend(server.cq.wait(1, 10)))
    waiter.start()
    waiter.join(0.2)
    server.srq.post_srq_ops(rp.TagSync(wr_id=5))
    waiter.join(10)
    assert [wc.wr_id for wc in found] == [5]


def test_completions_of_a_closed_tag_matching_queue_are_delivered(stack, pd):
    server = Server(stack, pd)
    server.add(1, recv_wr_id=3)
    server.client.eager(1)
    server.srq.post_srq_ops(rp.TagSync(wr_id=4))
    server.client.qp.close()
    server.client.peer.close()
    server.srq.close()
    assert [wc.wr_id for wc in server.cq.poll()] == [3, 4]

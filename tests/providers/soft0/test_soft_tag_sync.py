"""Phase synchronisation in tag matching: counts, sync requests, and races.

What the matching list does with single messages is in test_soft_tag_matching.
"""

from __future__ import annotations

import pytest
from support import soft_context
from support.tag_server import EAGER, MATCHED, NO_FLAGS, SYNC, Server, small_server, tmh

import rdmapost as rp
from rdmapost import OpsFlags, WCFlags, WCOpcode, WCStatus

MAX_BEHIND = 0x3FFF
"""Unexpected messages after which mlx5 asks for a sync, and soft0 too."""


context = soft_context
server = small_server


def surprise(server: Server, count: int) -> list[rp.WC]:
    """Let unexpected messages arrive; return their completions."""
    client, done = server.client, []
    message = tmh(EAGER, 0xDEAD)
    client.mr.buffer[: len(message)] = message
    recv = rp.RecvWR(server.mr[:1024], wr_id=500)
    send = rp.Send(client.mr[: len(message)], wr_id=1)
    while len(done) < count:
        some = min(16, count - len(done))
        server.srq.post_srq_recv([recv] * some)
        client.qp.post_send([send] * some)
        done += server.cq.wait(some)
        client.cq.wait(some)
    return done


def test_unexpected_messages_ask_for_a_sync_when_software_is_far_behind(server):
    """Until then their completions carry no flags; a sync clears the flag again."""
    quiet = surprise(server, MAX_BEHIND)
    assert {(wc.opcode, wc.wc_flags) for wc in quiet} == {(WCOpcode.TM_RECV, NO_FLAGS)}
    (first,) = surprise(server, 1)
    assert (first.wr_id, first.opcode, first.wc_flags) == (
        500,
        WCOpcode.TM_RECV,
        WCFlags.TM_SYNC_REQ,
    )
    server.srq.post_srq_ops(rp.TagSync(wr_id=3, unexpected_cnt=MAX_BEHIND + 1))
    assert (server.one().wr_id, server.srq.outstanding_ops) == (3, 0)
    assert surprise(server, 1)[0].wc_flags == NO_FLAGS


def test_held_tag_entry_matches_once_a_sync_has_the_right_count(server):
    """An entry that was held matches as soon as the counts agree, and not before."""
    surprise(server, 2)
    server.srq.post_srq_ops(rp.TagAdd(tag=1, recv_wr_id=7, sg_list=server.mr[:64], wr_id=1))
    asked = server.one()
    assert (asked.opcode, asked.wc_flags) == (WCOpcode.TM_ADD, WCFlags.TM_SYNC_REQ)
    server.srq.post_srq_ops(rp.TagSync(wr_id=2, unexpected_cnt=2))
    assert server.one().wc_flags == NO_FLAGS
    assert server.client.eager(1, b"data") is WCStatus.SUCCESS
    wc = server.one()
    assert (wc.wr_id, wc.wc_flags) == (7, MATCHED)


def test_unexpected_cnt_is_refused_without_the_flag_tm_sync_and_taken_with_it(server):
    surprise(server, 1)
    with pytest.raises(rp.PostError, match="unexpected_cnt=1 is ignored without OpsFlags"):
        server.srq.post_srq_ops(rp.TagAdd(tag=1, unexpected_cnt=1))
    server.srq.post_srq_ops(rp.TagAdd(tag=1, unexpected_cnt=1, flags=SYNC))
    assert server.one().wc_flags == NO_FLAGS


def test_tag_sync_leaves_the_matching_list_as_it_is(server):
    add = server.add(5, recv_wr_id=6)
    server.srq.post_srq_ops(rp.TagSync(unexpected_cnt=0))
    assert server.one().opcode is WCOpcode.TM_SYNC
    assert server.srq.outstanding_tags == 1
    assert add.handle is not None
    server.client.eager(5)
    assert server.one().wr_id == 6


@pytest.mark.parametrize("first", ["message", "removal"])
def test_tag_is_either_removed_or_matched_in_a_race_with_a_message(server, first):
    """Either the message or the removal gets the entry; never both, never neither."""
    add = server.add(5, size=64, recv_wr_id=6)
    remove = rp.TagDel(handle=add.handle, wr_id=7)
    server.post_receives(1)
    if first == "message":
        server.client.eager(5)
        server.srq.post_srq_ops(remove)
    else:
        server.srq.post_srq_ops(remove)
        server.client.eager(5)
    done = [(wc.wr_id, wc.status) for wc in server.cq.wait(2)]
    assert done == (
        [(6, WCStatus.SUCCESS), (7, WCStatus.TM_ERR)]
        if first == "message"
        else [(7, WCStatus.SUCCESS), (500, WCStatus.SUCCESS)]
    )
    assert server.srq.outstanding_tags == 0


def test_unsignaled_operation_has_no_completion_but_its_receive_has(server):
    """SIGNALED is about the operation; the message that matches always completes."""
    server.srq.post_srq_ops(rp.TagAdd(tag=5, recv_wr_id=6, sg_list=server.mr[:64], flags=0))
    assert server.cq.poll() == []
    server.client.eager(5, b"data")
    assert server.one().wr_id == 6


def test_unsignaled_removal_that_came_too_late_leaves_no_trace(server):
    """The message gets the entry, and the removal is done when the next operation is."""
    add = server.add(5, recv_wr_id=6)
    server.client.eager(5)
    server.srq.post_srq_ops(rp.TagDel(handle=add.handle, flags=0, wr_id=7))
    server.srq.post_srq_ops(rp.TagSync(wr_id=8))
    assert [wc.check().wr_id for wc in server.cq.wait(2)] == [6, 8]
    assert (server.srq.outstanding_tags, server.srq.outstanding_ops) == (0, 0)
    assert server.cq.poll() == []


def test_wr_id_of_the_operation_and_of_the_receive_are_two(server):
    """Both may be any number, and the same one."""
    server.srq.post_srq_ops(
        rp.TagAdd(tag=5, wr_id=1 << 63, recv_wr_id=1 << 63, flags=OpsFlags.SIGNALED)
    )
    added = server.one()
    server.client.eager(5)
    received = server.one()
    assert added.wr_id == received.wr_id == 1 << 63
    assert (added.opcode, received.opcode) == (WCOpcode.TM_ADD, WCOpcode.TM_RECV)

"""Requests that the software device refuses: statuses, events and memory on both sides."""

from __future__ import annotations

from typing import Any

import pytest
from support import ALL, Pair, async_events, soft_context

import rdmapost as rp
from rdmapost import Access, EventType, QPState, QPType, WCStatus

context = soft_context
no_old_events = async_events.no_old_events
pytestmark = pytest.mark.usefixtures("no_old_events")


def again(pair: Pair, **options: Any) -> None:
    """Connect a pair again, with options for b."""
    pair.a.to_reset()
    pair.b.to_reset()
    pair.a.connect(pair.b.endpoint(), rnr_retry=1)
    pair.b.connect(pair.a.endpoint(), **options)


def statuses(pair: Pair, count: int) -> dict[int, WCStatus]:
    return {wc.wr_id: wc.status for wc in pair.cq.wait(count)}


# ---- requests that the queue pair forbids -----------------------------------------


READ, ATOMIC, WRITE = Access.REMOTE_READ, Access.REMOTE_ATOMIC, Access.REMOTE_WRITE


@pytest.mark.parametrize(
    ("wr_class", "options"),
    [
        (rp.RdmaWrite, {"access": READ | ATOMIC}),
        (rp.RdmaWriteWithImm, {"access": READ | ATOMIC}),
        (rp.RdmaRead, {"access": WRITE | ATOMIC}),
        (rp.AtomicFetchAndAdd, {"access": READ | WRITE}),
        (rp.AtomicCmpAndSwp, {"access": READ | WRITE}),
        (rp.RdmaRead, {"max_dest_rd_atomic": 0}),
        (rp.AtomicFetchAndAdd, {"max_dest_rd_atomic": 0}),
        (rp.AtomicCmpAndSwp, {"max_dest_rd_atomic": 0}),
    ],
)
def test_request_that_the_responders_queue_pair_forbids_breaks_the_connection(
    rc, context, wr_class, options
):
    """It is an invalid request, although the region would allow it."""
    again(rc, **options)
    rc.mine.buffer[:8] = rc.theirs.buffer[:8] = b"12345678"
    rc.mine.buffer[8:16] = b"abcdefgh"
    rc.b.post_recv(rp.RecvWR(wr_id=2))
    rc.a.post_send(rc.wr(wr_class, rc.mine[8:16], wr_id=1))
    assert statuses(rc, 2) == {1: WCStatus.REM_INV_REQ_ERR, 2: WCStatus.WR_FLUSH_ERR}
    assert bytes(rc.theirs.buffer[:8]) == b"12345678"
    assert bytes(rc.mine.buffer[8:16]) == b"abcdefgh"
    event = context.get_async_event(0)
    assert event == rp.AsyncEvent(EventType.QP_REQ_ERR, rc.b)


@pytest.mark.parametrize("offset", [1, 4, 7])
def test_atomic_at_an_unaligned_address_is_an_invalid_request(connect, context, offset):
    pair = connect(checked=False)
    addr = pair.theirs.addr + offset
    pair.a.post_send(pair.wr(rp.AtomicFetchAndAdd, pair.mine[:8], remote_addr=addr, compare_add=5))
    assert [wc.status for wc in pair.cq.wait()] == [WCStatus.REM_INV_REQ_ERR]
    assert not any(pair.theirs.buffer)
    event = context.get_async_event(0)
    assert event == rp.AsyncEvent(EventType.QP_REQ_ERR, pair.b)


@pytest.mark.parametrize("wrong", [{"rkey": 1}, {"access": READ}], ids=["key", "access"])
def test_unreliable_service_drops_a_forbidden_write_silently(connect, context, wrong):
    """The sender sees nothing, and the receiver continues."""
    pair = connect(QPType.UC, access=wrong.get("access", WRITE))
    fields = {name: value for name, value in wrong.items() if name == "rkey"}
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8], wr_id=1, **fields))
    assert statuses(pair, 1) == {1: WCStatus.SUCCESS}
    assert not any(pair.theirs.buffer)
    assert pair.b.query().qp_state is QPState.RTS
    assert context.get_async_event(0) is None
    pair.works()


def test_message_without_bytes_needs_no_key(rc):
    """It touches no memory, so its key and address are not checked (IBA, C9-88)."""
    nowhere = {"remote_addr": 5, "rkey": 7}
    rc.b.post_recv(rp.RecvWR(wr_id=4))
    rc.a.post_send(
        [
            rp.RdmaWrite(**nowhere, wr_id=1),
            rp.RdmaRead(**nowhere, wr_id=2),
            rp.RdmaWriteWithImm(**nowhere, imm_data=1, wr_id=3),
        ]
    )
    assert statuses(rc, 4) == dict.fromkeys([1, 2, 3, 4], WCStatus.SUCCESS)


# ---- receives that cannot take a message ------------------------------------------


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC])
def test_write_with_immediate_without_a_receive_writes_nothing(connect, qp_type):
    pair = connect(qp_type)
    pair.mine.buffer[:8] = b"12345678"
    pair.a.post_send(pair.wr(rp.RdmaWriteWithImm, pair.mine[:8], wr_id=1))
    ends = WCStatus.RNR_RETRY_EXC_ERR if qp_type is QPType.RC else WCStatus.SUCCESS
    assert statuses(pair, 1) == {1: ends}
    assert not any(pair.theirs.buffer)


@pytest.mark.parametrize(
    ("length", "wrong_key", "status"),
    [
        (7, False, WCStatus.LOC_LEN_ERR),
        (7, True, WCStatus.LOC_LEN_ERR),
        (8, True, WCStatus.LOC_PROT_ERR),
        (0, True, WCStatus.LOC_PROT_ERR),
    ],
)
def test_receive_that_is_too_short_or_has_a_wrong_key_fails_both_sides(
    connect, length, wrong_key, status
):
    """Whether the message fits is determined first; a length of 0 is 2^31 bytes."""
    pair = connect(checked=False)
    key = pair.theirs.lkey ^ (0xA5 if wrong_key else 0)
    pair.b.post_recv(rp.RecvWR(rp.SGE(pair.theirs.addr, length, key), wr_id=2))
    pair.a.post_send(rp.Send(pair.mine[:8], wr_id=1))
    short = status is WCStatus.LOC_LEN_ERR
    sender = WCStatus.REM_INV_REQ_ERR if short else WCStatus.REM_OP_ERR
    assert statuses(pair, 2) == {1: sender, 2: status}


def test_receive_into_memory_without_local_write_fails(connect, stack):
    pair = connect(checked=False)
    mr = stack.enter_context(rp.MR(pair.pd, 64, Access.REMOTE_READ))
    pair.mine.buffer[:8] = b"12345678"
    pair.b.post_recv(rp.RecvWR(mr[:8], wr_id=2))
    pair.a.post_send(rp.Send(pair.mine[:8], wr_id=1))
    assert statuses(pair, 2) == {1: WCStatus.REM_OP_ERR, 2: WCStatus.LOC_PROT_ERR}
    assert not any(mr.buffer)


# ---- SEND_WITH_INV ----------------------------------------------------------------


def test_message_that_is_not_delivered_invalidates_nothing(rc, stack):
    mr = stack.enter_context(rp.MR(rc.pd, 64, ALL))
    rc.b.post_recv(rp.RecvWR(rc.theirs[:4], wr_id=2))
    rc.a.post_send(rp.SendWithInv(rc.mine[:8], invalidate_rkey=mr.rkey, wr_id=1))
    assert statuses(rc, 2) == {1: WCStatus.REM_INV_REQ_ERR, 2: WCStatus.LOC_LEN_ERR}
    again(rc)
    rc.a.post_send(rp.RdmaWrite(rc.mine[:8], remote_addr=mr.addr, rkey=mr.rkey, wr_id=3))
    assert statuses(rc, 1) == {3: WCStatus.SUCCESS}


@pytest.mark.parametrize("by_peer", [False, True])
def test_region_whose_keys_are_invalidated_is_registered_again_only_with_memory(rc, stack, by_peer):
    """Other changes would leave keys that the device does not know."""
    mr = stack.enter_context(rp.MR(rc.pd, 64, ALL))
    if by_peer:
        rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=2))
        rc.a.post_send(rp.SendWithInv(rc.mine[:8], invalidate_rkey=mr.rkey, wr_id=1))
        assert set(statuses(rc, 2).values()) == {WCStatus.SUCCESS}
    else:
        rc.b.post_send(rp.LocalInv(invalidate_rkey=mr.rkey, wr_id=1))
        assert statuses(rc, 1) == {1: WCStatus.SUCCESS}
    with pytest.raises(rp.VerbsError, match="its keys were invalidated"):
        mr.rereg(access=ALL)
    mr.rereg(memory=bytearray(64))
    rc.a.post_send(rp.RdmaWrite(rc.mine[:8], remote_addr=mr.addr, rkey=mr.rkey, wr_id=3))
    assert statuses(rc, 1) == {3: WCStatus.SUCCESS}


@pytest.mark.parametrize("is_own", [True, False])
def test_peer_invalidates_keys_of_the_queue_pairs_pd_not_of_its_srqs(rc, stack, is_own):
    other = stack.enter_context(rp.PD(rc.pd.context))
    buffer = stack.enter_context(rp.MR(other, 64, ALL))
    mr = stack.enter_context(rp.MR(rc.pd if is_own else other, 64, ALL))
    srq = stack.enter_context(rp.SRQ(other))
    b = stack.enter_context(rp.QP(rc.pd, QPType.RC, rc.cq, srq=srq))
    rc.a.to_reset()
    rc.a.connect(b.endpoint())
    b.connect(rc.a.endpoint())
    srq.post_srq_recv(rp.RecvWR(buffer[:8], wr_id=2))
    rc.a.post_send(rp.SendWithInv(rc.mine[:8], invalidate_rkey=mr.rkey, wr_id=1))
    status = WCStatus.SUCCESS if is_own else WCStatus.REM_INV_REQ_ERR
    assert statuses(rc, 2) == {1: WCStatus.SUCCESS, 2: status}
    assert rc.a.query().qp_state is QPState.RTS
    assert b.query().qp_state is (QPState.RTS if is_own else QPState.ERR)


def test_key_that_cannot_be_invalidated_breaks_only_the_receiver(rc):
    """The message has arrived by then."""
    rc.mine.buffer[:8] = b"12345678"
    rc.b.post_recv([rp.RecvWR(rc.theirs[:8], wr_id=i) for i in (2, 3)])
    rc.a.post_send(rp.SendWithInv(rc.mine[:8], invalidate_rkey=rc.theirs.rkey ^ 0xA5, wr_id=1))
    assert statuses(rc, 3) == {
        1: WCStatus.SUCCESS,
        2: WCStatus.REM_INV_REQ_ERR,
        3: WCStatus.WR_FLUSH_ERR,
    }
    assert bytes(rc.theirs.buffer[:8]) == b"12345678"
    assert (rc.a.query().qp_state, rc.b.query().qp_state) == (QPState.RTS, QPState.ERR)

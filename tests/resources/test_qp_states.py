"""What each state of a queue pair does with a work request: refuse, carry out, hold or flush."""

from __future__ import annotations

import contextlib
import errno
import functools
import sys
import threading
from typing import Any

import pytest
from support import ALL, GRH, LIMIT, LOCAL_ERROR, TYPES, Pair, climb, needs, soft_queues, until
from support.soft_queues import reason
from support.threads import stopped, thread

import rdmapost as rp
from rdmapost import Access, QPState, QPType, WCStatus
from rdmapost._binding import ffi
from rdmapost.posting.rules import check_send_state
from rdmapost.providers.software.state import objects
from rdmapost.resources.device import provider_of
from rdmapost.resources.resource import struct_of

soft = soft_queues.soft

ROOM = GRH + 64


def receive(pair: Pair, wr_id: int) -> rp.RecvWR:
    return rp.RecvWR(pair.theirs[:ROOM], wr_id=wr_id)


# ---- RESET, INIT, RTR ---------------------------------------------------------------


@pytest.mark.parametrize("state", [QPState.RESET, QPState.INIT, QPState.RTR])
@pytest.mark.parametrize("qp_type", TYPES)
def test_reset_init_and_rtr_refuse_a_send_at_once(connect, qp_type, state):
    """And for good: it is not carried out when the queue pair reaches RTS later."""
    pair = connect(qp_type, to=QPState.RESET)
    climb(pair.a, state, pair.b.endpoint())
    with pytest.raises(rp.PostError, match=f"the QP is in {state.name}.* to RTS first") as caught:
        pair.a.post_send([pair.send(pair.mine[:8], wr_id=i) for i in range(2)])
    error = caught.value
    assert (error.index, error.posted, error.errno) == (0, 0, errno.EINVAL)
    assert pair.a.outstanding == (0, 0)
    pair.connect()
    pair.works()
    assert pair.cq.poll() == []


@pytest.mark.parametrize("state", [QPState.RESET, QPState.INIT, QPState.RTR])
def test_unchecked_send_before_rts_is_refused_by_the_device(connect, context, state):
    """Unchecked, so that the state is not checked first."""
    needs(context.kind == "soft", "lasting refusal of sends before RTS", context)
    pair = connect(to=QPState.RESET, checked=False)
    climb(pair.a, state, pair.b.endpoint())
    with pytest.raises(rp.PostError, match=f"the QP is in {state.name}") as caught:
        pair.a.post_send([pair.send(pair.mine[:8], wr_id=i) for i in range(2)])
    assert (caught.value.index, caught.value.posted) == (0, 0)
    pair.connect()
    pair.works()
    assert pair.cq.poll() == []


# ---- RTS ------------------------------------------------------------------------------


@pytest.mark.parametrize("qp_type", TYPES)
def test_rts_processes_what_is_posted(connect, qp_type):
    """In the order in which it was posted."""
    pair = connect(qp_type)
    assert pair.a.state is QPState.RTS
    pair.b.post_recv([receive(pair, 10 + i) for i in range(3)])
    pair.a.post_send([pair.send(pair.mine[i : i + 8], wr_id=i) for i in range(3)])
    done = [wc.wr_id for wc in pair.wait(6)]
    assert [wr_id for wr_id in done if wr_id < 10] == [0, 1, 2]
    assert [wr_id for wr_id in done if wr_id >= 10] == [10, 11, 12]


def test_posts_are_carried_out_in_their_order_over_many_calls(rc):
    """Each write lands where the one before it did: the last one is what is left."""
    for value in range(1, 33):
        rc.mine.buffer[value] = value
        rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[value : value + 1], wr_id=value))
    assert [wc.wr_id for wc in rc.wait(32)] == list(range(1, 33))
    assert rc.theirs.buffer[0] == 32


# ---- ERR ------------------------------------------------------------------------------


@pytest.mark.parametrize("qp_type", TYPES)
def test_err_takes_a_send_and_completes_it_with_a_flush_error(connect, qp_type):
    """SIGNALED or not: an error always completes."""
    pair = connect(qp_type)
    pair.a.to_err()
    flags = [rp.SendFlags.SIGNALED, 0, rp.SendFlags.SIGNALED]
    pair.a.post_send([pair.send(pair.mine[:8], wr_id=i, send_flags=f) for i, f in enumerate(flags)])
    done = pair.cq.wait(3)
    assert [(wc.wr_id, wc.status) for wc in done] == [(i, WCStatus.WR_FLUSH_ERR) for i in range(3)]
    assert pair.a.outstanding == (0, 0)


def test_a_failure_flushes_what_was_posted_behind_it(rc):
    """The first failure says why, and the library need not know about ERR."""
    rc.a.post_recv(rp.RecvWR(rc.mine[:8], wr_id=7))
    rc.a.post_send(
        [
            rc.wr(rp.RdmaWrite, rc.mine[:8], rkey=rc.theirs.rkey ^ 0xA5, wr_id=1),
            rc.wr(rp.RdmaWrite, rc.mine[:8], wr_id=2),
        ]
    )
    done = {wc.wr_id: wc.status for wc in rc.cq.wait(3)}
    assert done == {1: WCStatus.REM_ACCESS_ERR, 2: WCStatus.WR_FLUSH_ERR, 7: WCStatus.WR_FLUSH_ERR}
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8], wr_id=3))
    assert [(wc.wr_id, wc.status) for wc in rc.cq.wait()] == [(3, WCStatus.WR_FLUSH_ERR)]
    assert rc.a.state is QPState.ERR


# ---- SQE ------------------------------------------------------------------------------


def break_the_sender(pair: Pair) -> None:
    """Make one of a's sends fail on its own side."""
    wrong = rp.SGE(pair.mine.addr, 8, pair.mine.lkey ^ 0xA5)
    pair.a.post_send(pair.send(wrong, wr_id=1))
    (done,) = pair.cq.wait()
    assert done.wr_id == 1
    assert done.status in LOCAL_ERROR


@pytest.mark.parametrize("qp_type", [QPType.UC, QPType.UD])
def test_sqe_completes_a_send_with_a_flush_error(connect, qp_type):
    pair = connect(qp_type)
    break_the_sender(pair)
    # rxe goes to ERR right away, where it is the same.
    assert pair.a.state in (QPState.SQE, QPState.ERR)
    pair.a.post_send([pair.send(pair.mine[:8], wr_id=i) for i in (2, 3)])
    done = pair.cq.wait(2)
    assert [(wc.wr_id, wc.status) for wc in done] == [(i, WCStatus.WR_FLUSH_ERR) for i in (2, 3)]


@pytest.mark.parametrize("qp_type", [QPType.UC, QPType.UD])
def test_sqe_still_receives_and_can_be_left_for_rts(connect, context, qp_type):
    needs(context.kind == "soft", "state SQE (rxe goes to ERR)", context)
    pair = connect(qp_type)
    pair.a.post_recv(rp.RecvWR(pair.mine[:ROOM], wr_id=7))
    break_the_sender(pair)
    assert pair.a.state is QPState.SQE
    pair.a.post_recv(rp.RecvWR(pair.mine[:ROOM], wr_id=8))
    back = rp.Send(pair.theirs[:8], wr_id=9)
    if qp_type is QPType.UD:
        back.ah = pair.ah
        back.remote_qpn, back.remote_qkey = pair.a.qp_num, rp.resources.qp.DEFAULT_QKEY
    pair.b.post_send([back, back])
    assert sorted(wc.wr_id for wc in pair.wait(4)) == [7, 8, 9, 9]
    pair.a.to_rts()
    pair.works()


# ---- SQD ------------------------------------------------------------------------------


@pytest.mark.parametrize("qp_type", TYPES)
def test_sqd_takes_a_send_and_holds_it(connect, qp_type):
    """Until the queue pair is in RTS again; then all of it goes out, in order."""
    pair = connect(qp_type)
    pair.a.to_sqd()
    pair.b.post_recv([receive(pair, 10 + i) for i in range(3)])
    for i in range(2):
        pair.a.post_send(pair.send(pair.mine[:8], wr_id=i))
    with pytest.raises(rp.WaitTimeout):
        pair.cq.wait(timeout=0.1)
    assert pair.a.outstanding == (2, 0)
    pair.a.to_rts()
    # rxe continues only after another doorbell.
    pair.a.post_send(pair.send(pair.mine[:8], wr_id=2))
    done = [wc.wr_id for wc in pair.wait(6)]
    assert [wr_id for wr_id in done if wr_id < 10] == [0, 1, 2]


def test_sqd_still_receives(rc):
    rc.b.post_recv(rp.RecvWR(rc.theirs[:64], wr_id=1))
    rc.b.to_sqd()
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=2))
    assert sorted(wc.wr_id for wc in rc.wait(2)) == [1, 2]


# ---- receives -------------------------------------------------------------------


@pytest.mark.parametrize("qp_type", TYPES)
def test_reset_refuses_a_receive(connect, qp_type):
    pair = connect(qp_type, to=QPState.RESET)
    with pytest.raises(rp.PostError, match=r"RESET; receives can be posted from INIT on") as caught:
        pair.b.post_recv([receive(pair, i) for i in range(2)])
    assert (caught.value.index, caught.value.posted) == (0, 0)
    assert pair.b.outstanding == (0, 0)


@pytest.mark.parametrize("state", [QPState.INIT, QPState.RTR, QPState.RTS, QPState.SQD])
@pytest.mark.parametrize("qp_type", TYPES)
def test_receive_is_taken_from_init_on(connect, qp_type, state):
    """And used by the first message that comes once the queue pair can receive."""
    pair = connect(qp_type, to=QPState.RESET)
    climb(pair.b, state, pair.a.endpoint())
    pair.b.post_recv(receive(pair, 7))
    assert pair.b.outstanding == (0, 1)
    climb(pair.a, QPState.RTS, pair.b.endpoint())
    if state is QPState.INIT:
        climb(pair.b, QPState.RTR, pair.a.endpoint())
    pair.a.post_send(pair.send(pair.mine[:8], wr_id=9))
    assert sorted(wc.wr_id for wc in pair.wait(2)) == [7, 9]


def test_receive_of_init_waits_for_rtr(connect):
    """A peer that sends too early gets no answer."""
    pair = connect(to=QPState.RESET)
    pair.a.connect(pair.b.endpoint(), timeout=8, retry_cnt=1)
    pair.b.to_init()
    pair.b.post_recv(receive(pair, 7))
    pair.a.post_send(rp.Send(pair.mine[:8], wr_id=9))
    (done,) = pair.cq.wait()
    assert (done.wr_id, done.status) == (9, WCStatus.RETRY_EXC_ERR)
    assert pair.b.outstanding == (0, 1)
    assert not any(pair.theirs.buffer)


@pytest.mark.parametrize("qp_type", TYPES)
def test_receive_posted_in_err_completes_with_a_flush_error(connect, context, qp_type):
    needs(context.kind == "soft", "flush of receives posted in ERR", context)
    pair = connect(qp_type)
    pair.b.to_err()
    pair.b.post_recv([receive(pair, i) for i in range(3)])
    done = pair.cq.wait(3)
    assert [(wc.wr_id, wc.status) for wc in done] == [(i, WCStatus.WR_FLUSH_ERR) for i in range(3)]


# ---- several steps ----------------------------------------------------------------


@pytest.mark.parametrize("state", [QPState.RESET, QPState.INIT, QPState.RTR])
def test_sends_are_refused_before_rts(connect, state):
    """Refused here: rxe keeps them, returns EINVAL, and runs them later."""
    pair = connect(to=QPState.RESET)
    climb(pair.a, state, pair.b.endpoint())
    with pytest.raises(rp.PostError, match=f"the QP is in {state.name}") as caught:
        pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:4]))
    assert (caught.value.index, caught.value.posted) == (0, 0)
    assert pair.a.outstanding == (0, 0)


def test_receives_are_refused_in_reset_and_taken_from_init_on(connect):
    pair = connect(to=QPState.RESET)
    with pytest.raises(rp.PostError, match=r"RESET; receives can be posted from INIT on"):
        pair.b.post_recv(rp.RecvWR(pair.theirs[:8]))
    pair.b.to_init(ALL & ~Access.LOCAL_WRITE)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:8], wr_id=1))
    assert pair.b.outstanding == (0, 1)
    pair.b.to_rtr(pair.a.endpoint())
    pair.b.post_recv(rp.RecvWR(pair.theirs[8:16], wr_id=2))
    pair.connect()
    pair.a.post_send([rp.Send(pair.mine[:8], wr_id=9), rp.Send(pair.mine[:8], wr_id=9)])
    assert sorted(wc.wr_id for wc in pair.wait(4)) == [1, 2, 9, 9]


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD])
def test_to_err_flushes_everything(connect, qp_type):
    """What is posted, and what is posted from then on."""
    pair = connect(qp_type)
    pair.b.post_recv([rp.RecvWR(pair.theirs[:100], wr_id=i) for i in range(5)])
    pair.b.to_err()
    assert pair.b.state is QPState.ERR
    done = pair.cq.wait(5)
    assert [(wc.wr_id, wc.status) for wc in done] == [(i, WCStatus.WR_FLUSH_ERR) for i in range(5)]
    pair.a.to_err()
    pair.a.post_send([pair.send(pair.mine[:4], wr_id=i) for i in range(3)])
    done = pair.cq.wait(3)
    assert [(wc.wr_id, wc.status) for wc in done] == [(i, WCStatus.WR_FLUSH_ERR) for i in range(3)]
    assert pair.a.outstanding == pair.b.outstanding == (0, 0)


def test_receive_posted_in_err_is_flushed(rc):
    rc.b.to_err()
    rc.b.post_recv(rp.RecvWR(rc.theirs[:100], wr_id=6))
    try:
        done = [(wc.wr_id, wc.status) for wc in rc.cq.wait(timeout=1)]
    except rp.WaitTimeout:
        # rxe looks at its receives only when a packet comes.
        assert rc.b.outstanding == (0, 1)
    else:
        assert done == [(6, WCStatus.WR_FLUSH_ERR)]
        assert rc.b.outstanding == (0, 0)


def test_reset_drops_what_is_posted(rc):
    """Nothing completes, nothing is outstanding, and the memory is free."""
    rc.b.post_recv([rp.RecvWR(rc.theirs[:8], wr_id=i) for i in range(5)])
    rc.b.to_reset()
    assert rc.b.state is QPState.RESET
    assert rc.b.outstanding == (0, 0)
    assert rc.cq.poll() == []
    rc.theirs.close()


def test_queue_pair_works_again_after_a_reset(rc):
    """From ERR via RESET to RTS, any number of times."""
    for _ in range(3):
        rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8], rkey=rc.theirs.rkey ^ 0xA5))
        assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR
        for qp in (rc.a, rc.b):
            qp.to_reset()
        rc.connect()
        rc.works()


def test_each_connection_has_its_own_psn(rc):
    """Delayed packets of the one before are not taken for its own."""
    psns = set()
    for _ in range(4):
        psns.add(rc.a.psn)
        rc.a.to_reset()
        rc.b.to_reset()
        rc.connect()
        rc.works()
    assert len(psns) > 1


def test_psn_of_a_reset_queue_pair_that_has_sent_nothing_stays(rc):
    """The peer may have been told."""
    for qp in (rc.a, rc.b):
        qp.to_reset()
    psn = rc.a.psn
    rc.a.to_init()
    rc.a.to_reset()
    assert rc.a.psn == rc.a.endpoint().psn == psn


def test_sqd_holds_what_is_posted(rc):
    rc.a.to_sqd()
    assert rc.a.state is QPState.SQD
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:1], wr_id=5))
    with pytest.raises(rp.WaitTimeout):
        rc.cq.wait(timeout=0.2)
    assert rc.a.outstanding == (1, 0)
    rc.a.to_rts()
    # rxe continues only after another doorbell.
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:1], wr_id=6))
    assert [wc.wr_id for wc in rc.wait(2)] == [5, 6]


# ---- before RTS -------------------------------------------------------------------


RC, UC, UD, RAW = QPType.RC, QPType.UC, QPType.UD, QPType.RAW_PACKET


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (QPState.RESET, "the QP is in RESET; bring it to RTS first (qp.connect)"),
        (QPState.INIT, "the QP is in INIT; bring it to RTS first (qp.connect)"),
        (QPState.RTR, "the QP is in RTR, ready to receive only; bring it to RTS first (qp.to_rts)"),
    ],
)
def test_queue_pair_that_is_not_ready_takes_nothing(soft, state, said):
    qp = soft.queues.enter_context(rp.QP(soft.pd, RC, soft.cq))
    batch = qp.prepare(rp.LocalInv())
    if state is not QPState.RESET:
        qp.to_init()
    if state is QPState.RTR:
        qp.to_rtr(qp.endpoint())
    for post in (lambda: qp.post_send(rp.LocalInv()), batch.post):
        with pytest.raises(rp.PostError) as caught:
            post()
        assert (caught.value.reason, caught.value.errno) == (said, errno.EINVAL)
        assert (caught.value.index, caught.value.posted) == (0, 0)
    if state is QPState.RESET:
        said = "the QP is in RESET; receives can be posted from INIT on (qp.to_init)"
        assert reason(qp.post_recv, rp.RecvWR()) == said
    else:
        qp.post_recv(rp.RecvWR())
    batch.close()


@pytest.mark.parametrize("state", QPState)
def test_states_before_rts_refuse_sends(state):
    refused = check_send_state(state)
    if state in (QPState.RESET, QPState.INIT, QPState.RTR):
        assert f"the QP is in {state.name}" in str(refused)
        assert "RTS" in str(refused)
    else:
        assert refused is None


def test_error_for_a_state_before_rts_names_the_call_that_continues():
    assert "qp.connect" in str(check_send_state(QPState.RESET))
    assert "qp.connect" in str(check_send_state(QPState.INIT))
    assert "qp.to_rts" in str(check_send_state(QPState.RTR))
    for state in (QPState.RTS, QPState.SQD, QPState.SQE, QPState.ERR):
        assert check_send_state(state) is None


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("device_has_reset", [False, True])
def test_post_during_a_reset_is_refused(context, monkeypatch, checked, device_has_reset):
    """The device would drop it, or it would never be seen."""
    with (
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 64) as mr,
        rp.QP(pd, QPType.RC, cq, checked=checked) as qp,
    ):
        qp.connect(qp.endpoint())
        provider = provider_of(context)
        modify = provider.modify_qp
        refused = []

        def modify_qp(*args: Any) -> Any:
            if device_has_reset:
                modify(*args)
            for post in (
                lambda: qp.post_recv(rp.RecvWR(mr[:8])),
                lambda: qp.post_send(rp.Send(mr[:8])),
            ):
                with pytest.raises(rp.PostError, match="RESET") as caught:
                    post()
                refused.append(caught.value)
            if not device_has_reset:
                modify(*args)

        monkeypatch.setattr(provider, "modify_qp", modify_qp)
        qp.to_reset()
        monkeypatch.undo()
        assert len(refused) == 2
        assert qp.outstanding == (0, 0)
        qp.connect(qp.endpoint())
        qp.post_recv(rp.RecvWR(mr[:8], wr_id=7))
        qp.post_send(rp.Send(mr[8:16], wr_id=8))
        assert sorted(wc.wr_id for wc in cq.wait(2)) == [7, 8]


def test_after_a_reset_the_device_decides_about_what_is_not_checked(context):
    with (
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 64) as mr,
        rp.QP(pd, QPType.RC, cq, checked=False) as qp,
    ):
        qp.connect(qp.endpoint())
        qp.to_reset()
        posted, refused = 1, None
        try:
            qp.post_recv(rp.RecvWR(mr[:8]))
        except rp.PostError as error:
            refused = str(error)
            # rxe does not set *bad_wr: the receive counts as posted.
            posted = 1 if error.posted is None else error.posted
        assert refused is None or f"{context.name} refused" in refused
        assert qp.outstanding == (0, posted)
        qp.to_reset()
        assert qp.outstanding == (0, 0)


def test_what_is_posted_after_a_reset_stays_although_its_thread_has_not_returned(
    connect, monkeypatch
):
    """Another thread sees that the device has reset the queue pair, and uses it again."""
    pair = connect()
    provider = provider_of(pair.a.context)
    with stopped(pair.a.to_reset, monkeypatch, provider, "modify_qp", after=True) as raised:
        pair.a.connect(pair.b.endpoint(), rnr_retry=7)
        pair.b.to_reset()
        pair.b.connect(pair.a.endpoint())
        # It waits for a receive.
        pair.a.post_send(rp.Send(pair.mine[:8], wr_id=7))
    assert not raised
    assert pair.a.outstanding == (1, 0)
    assert pair.a.state is QPState.RTS
    with pytest.raises(rp.InUseError):
        pair.mine.close()
    pair.b.post_recv(rp.RecvWR(pair.theirs[:8], wr_id=8))
    assert sorted(wc.check().wr_id for wc in pair.wait(2)) == [7, 8]
    assert pair.a.outstanding == (0, 0)


def test_reset_is_not_repeated_if_another_thread_has_used_the_queue_pair_and_moved_it_to_err(
    connect, monkeypatch
):
    """A device may move it to ERR during a reset, which is repeated then."""
    pair = connect()
    provider = provider_of(pair.a.context)
    with stopped(pair.a.to_reset, monkeypatch, provider, "modify_qp", after=True) as raised:
        pair.a.to_init()
        pair.a.to_err()
    assert not raised
    assert pair.a.state is QPState.ERR


def test_what_a_reset_drops_is_not_outstanding_although_another_thread_has_reset_it_too(
    connect, monkeypatch
):
    """Between the two, that thread has connected it again; until both are done it cannot post."""
    pair = connect()
    provider = provider_of(pair.a.context)
    with stopped(pair.a.to_reset, monkeypatch, provider, "modify_qp") as raised:
        pair.a.to_reset()
        pair.a.connect(pair.b.endpoint(), rnr_retry=7)
        for post in (
            lambda: pair.a.post_recv(rp.RecvWR(pair.mine[:8])),
            lambda: pair.a.post_send(rp.Send(pair.mine[:8])),
        ):
            with pytest.raises(rp.PostError, match="RESET is in progress"):
                post()
    assert not raised
    assert pair.a.outstanding == (0, 0)
    assert pair.a.state is QPState.RESET
    pair.b.to_reset()
    pair.connect()
    pair.works()


def test_states_that_two_threads_set_are_those_of_the_device(connect):
    """Whichever comes last: the library would refuse to post otherwise, or allow what is lost."""
    pair = connect(to=QPState.RESET)

    def cycle() -> None:
        for _ in range(60):
            for change in (pair.a.to_reset, lambda: pair.a.connect(pair.b.endpoint())):
                # The other thread may have come between.
                with contextlib.suppress(ValueError, rp.VerbsError):
                    change()

    with thread(cycle) as first, thread(cycle) as second:
        pass
    assert not first + second
    assert pair.a._state is pair.a.query().qp_state
    pair.a.to_reset()
    pair.connect()
    pair.works()


@pytest.mark.parametrize("before", [QPState.RESET, QPState.RTS])
def test_an_attribute_changed_beside_a_change_of_state_does_not_undo_it(
    connect, monkeypatch, before
):
    """modify() without qp_state sets no state, whatever it was when the call began."""
    pair = connect()
    if before is QPState.RESET:
        pair.a.to_reset()
    provider = provider_of(pair.a.context)
    change = functools.partial(pair.a.modify, pkey_index=0)
    with stopped(change, monkeypatch, provider, "query_port") as raised:
        pair.a.to_reset()
        pair.a.to_init()
    assert not raised
    pair.a.post_recv(rp.RecvWR(pair.mine[:8]))
    with pytest.raises(rp.PostError, match="INIT"):
        pair.a.post_send(rp.Send(pair.mine[:8]))
    assert pair.a.outstanding == (0, 1)


def test_a_refused_change_beside_others_does_not_bring_back_the_state_before_them(
    connect, monkeypatch
):
    """Another thread has connected the queue pair since that state was read."""
    pair = connect(to=QPState.RESET)
    provider = provider_of(pair.a.context)
    query_port, query_qp = provider.query_port, provider.query_qp
    begun, connected, refused, posted = (threading.Event() for _ in range(4))

    def beside(verb: Any, reached: threading.Event, continues: threading.Event) -> Any:
        def slow(*args: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                reached.set()
                assert continues.wait(60)
            return verb(*args)

        return slow

    monkeypatch.setattr(provider, "query_port", beside(query_port, begun, connected))
    monkeypatch.setattr(provider, "query_qp", beside(query_qp, refused, posted))
    with thread(pair.a.to_init) as raised:
        try:
            assert begun.wait(60)
            pair.connect()
            connected.set()
            assert refused.wait(60)
            pair.works()
        finally:
            connected.set()
            posted.set()
    assert [type(error) for error in raised] == [rp.VerbsError]
    pair.works()


def test_receive_of_init_is_refused_while_a_reset_that_would_drop_it_has_begun(
    connect, monkeypatch
):
    """From INIT to INIT is no sign that the device has made that reset."""
    pair = connect(to=QPState.RESET)
    pair.a.to_init()
    provider = provider_of(pair.a.context)
    with stopped(pair.a.to_reset, monkeypatch, provider, "modify_qp") as raised:
        pair.a.to_init()
        with pytest.raises(rp.PostError, match="RESET is in progress"):
            pair.a.post_recv(rp.RecvWR(pair.mine[:8]))
    assert not raised
    assert pair.a.outstanding == (0, 0)
    pair.b.to_reset()
    pair.connect()
    pair.works()


def test_refused_reset_beside_others_does_not_disturb_them(connect, monkeypatch):
    """The device refuses qkey in RESET; until then posts wait, and the state is the device's."""
    pair = connect(to=QPState.RESET)
    provider = provider_of(pair.a.context)
    refused = functools.partial(pair.a.modify, qp_state=QPState.RESET, qkey=3)
    with stopped(refused, monkeypatch, provider, "modify_qp") as raised:
        pair.connect()
        with pytest.raises(rp.PostError, match="RESET is in progress"):
            pair.a.post_send(pair.send(pair.mine[:8]))
    assert [type(error) for error in raised] == [rp.VerbsError]
    pair.works()


def test_reset_that_an_interrupt_ends_drops_what_was_posted_although_the_queue_pair_is_in_init(
    connect, monkeypatch
):
    """Another thread has seen that the device made the reset, and has left RESET."""
    pair = connect()
    pair.a.post_recv(rp.RecvWR(pair.mine[:8], wr_id=1))
    psn = pair.a.psn
    provider = provider_of(pair.a.context)
    modify = provider.modify_qp

    def modify_qp(*args: Any) -> Any:
        monkeypatch.undo()
        assert not modify(*args)
        with thread(pair.a.to_init) as raised:
            pass
        assert not raised
        pair.a.post_recv(rp.RecvWR(pair.mine[8:16], wr_id=2))
        raise KeyboardInterrupt

    monkeypatch.setattr(provider, "modify_qp", modify_qp)
    with pytest.raises(KeyboardInterrupt):
        pair.a.to_reset()
    assert pair.a.outstanding == (0, 1)
    assert pair.a.psn != psn
    pair.b.to_reset()
    pair.connect()
    pair.b.post_send(rp.Send(pair.theirs[:8], wr_id=3))
    assert sorted(wc.check().wr_id for wc in pair.wait(2)) == [2, 3]


def test_reset_that_an_interrupt_ends_drops_what_was_posted_although_the_queue_pair_is_in_err(
    connect, monkeypatch
):
    """Another thread has moved it there, and what the reset dropped is not flushed."""
    pair = connect()
    pair.a.post_recv(rp.RecvWR(pair.mine[:8], wr_id=1))
    psn = pair.a.psn
    provider = provider_of(pair.a.context)
    modify, query = provider.modify_qp, provider.query_qp

    def move_to_err() -> None:
        try:
            pair.a.to_err()
        except rp.VerbsError:
            # Linux does not have this transition from RESET.
            pair.a.to_init()
            pair.a.to_err()

    def query_qp(*args: Any) -> None:
        monkeypatch.undo()
        query(*args)
        with thread(move_to_err) as raised:
            pass
        assert not raised
        raise KeyboardInterrupt

    def modify_qp(*args: Any) -> None:
        modify(*args)
        monkeypatch.setattr(provider, "query_qp", query_qp)

    monkeypatch.setattr(provider, "modify_qp", modify_qp)
    with pytest.raises(KeyboardInterrupt):
        pair.a.to_reset()
    assert pair.a.outstanding == (0, 0)
    assert pair.a.state is QPState.ERR
    assert pair.a.psn != psn


@pytest.mark.parametrize("climb_first", [True, False])
def test_queue_pair_whose_noted_state_is_stale_can_be_connected(connect, climb_first):
    """Two interrupts may end a reset that the device has made before it is noted."""
    pair = connect()
    pair.a.post_recv(rp.RecvWR(pair.mine[:8], wr_id=1))
    attr = ffi.new("struct ibv_qp_attr *")
    attr.qp_state = QPState.RESET
    provider_of(pair.a.context).modify_qp(struct_of(pair.a), attr, rp.QPAttrMask.STATE)
    pair.b.to_reset()
    if climb_first:
        pair.a.to_init()
    pair.connect()
    assert pair.a.outstanding == (0, 0)
    pair.works()


def test_connect_in_err_is_refused_by_the_device_unless_to_err_was_called(connect):
    """An error in the connection is no wrong argument."""
    pair = connect()
    pair.b.post_send(rp.RdmaWrite(pair.theirs[:8], remote_addr=pair.mine.addr, rkey=0xDEAD00))
    (wc,) = pair.cq.wait()
    assert wc.status is WCStatus.REM_ACCESS_ERR
    until(lambda: pair.a.state is QPState.ERR)
    for qp, peer in ((pair.a, pair.b), (pair.b, pair.a)):
        with pytest.raises(rp.VerbsError, match="the QP is in ERR: call to_reset"):
            qp.connect(peer.endpoint())
    pair.a.to_err()
    with pytest.raises(ValueError, match=r"from ERR .* call to_reset"):
        pair.a.connect(pair.b.endpoint())


def test_psn_of_an_endpoint_stays_although_a_reset_in_another_thread_has_not_returned(
    connect, monkeypatch
):
    """The peer expects it."""
    pair = connect()
    provider = provider_of(pair.a.context)
    query, main = provider.query_qp, threading.current_thread()
    made, goes_on = threading.Event(), threading.Event()
    old = pair.a.psn

    def query_qp(*args: Any) -> None:
        query(*args)
        if threading.current_thread() is not main and pair.a.psn != old:
            made.set()
            assert goes_on.wait(LIMIT)

    monkeypatch.setattr(provider, "query_qp", query_qp)
    with thread(pair.a.to_reset) as raised:
        assert made.wait(LIMIT)
        psn = pair.a.endpoint().psn
        pair.a.to_init()
        assert pair.a.psn == psn
        goes_on.set()
    assert not raised
    assert pair.a.psn == psn


def test_receive_that_a_device_has_taken_in_reset_stays_outstanding():
    """Some drivers take it; without checks, the library does not refuse it."""
    with (
        rp.open_device("soft0") as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 64) as mr,
        rp.QP(pd, QPType.RC, cq, checked=False) as qp,
    ):
        objects[struct_of(qp).handle].rq.refuses = 0
        qp.post_recv(rp.RecvWR(mr[:8], wr_id=5))
        qp.connect(qp.endpoint())
        assert qp.outstanding == (0, 1)
        with pytest.raises(rp.InUseError):
            mr.close()
        qp.post_send(rp.Send(mr[8:16], wr_id=6))
        assert sorted(wc.check().wr_id for wc in cq.wait(2)) == [5, 6]


def test_state_after_an_interrupted_reset_is_not_one_that_another_thread_has_read_before(
    connect, monkeypatch
):
    """What the reset dropped is released, too, and the queue pair can be connected again."""
    pair = connect()
    pair.a.post_recv(rp.RecvWR(pair.mine[:8], wr_id=1))
    provider = provider_of(pair.a.context)
    modify, query, admit = provider.modify_qp, provider.query_qp, rp.QP._admit_posts
    main = threading.current_thread()
    has_read, goes_on = threading.Event(), threading.Event()
    reader = threading.Thread(target=lambda: pair.a.state, daemon=True)

    def query_qp(*args: Any) -> None:
        query(*args)
        if threading.current_thread() is reader:
            has_read.set()
            assert goes_on.wait(LIMIT)

    def modify_qp(*args: Any) -> None:
        reader.start()
        assert has_read.wait(LIMIT)
        modify(*args)
        monkeypatch.setattr(rp.QP, "_admit_posts", admit_posts)
        raise KeyboardInterrupt

    def admit_posts(qp: rp.QP) -> None:
        # The interrupted thread has noted RESET.
        if threading.current_thread() is main and not goes_on.is_set():
            goes_on.set()
            reader.join(LIMIT)
        admit(qp)

    monkeypatch.setattr(provider, "query_qp", query_qp)
    monkeypatch.setattr(provider, "modify_qp", modify_qp)
    with pytest.raises(KeyboardInterrupt):
        pair.a.to_reset()
    monkeypatch.undo()
    assert not reader.is_alive()
    assert pair.a.outstanding == (0, 0)
    with pytest.raises(rp.PostError, match="RESET"):
        pair.a.post_recv(rp.RecvWR(pair.mine[:8]))
    pair.b.to_reset()
    pair.connect()
    pair.works()


def test_state_after_a_change_beside_a_reset_is_the_devices(connect, monkeypatch):
    """The device makes the reset last, although it began first."""
    pair = connect()
    pair.a.to_sqd()
    provider = provider_of(pair.a.context)
    modify, admit, main = provider.modify_qp, rp.QP._admit_posts, threading.current_thread()
    begun, made, noted, goes_on = (threading.Event() for _ in range(4))

    def modify_qp(*args: Any) -> None:
        if threading.current_thread() is main:
            modify(*args)
            made.set()
            assert noted.wait(LIMIT)
        else:
            begun.set()
            assert made.wait(LIMIT)
            modify(*args)

    def admit_posts(qp: rp.QP) -> None:
        admit(qp)
        if threading.current_thread() is not main and qp._state is QPState.RESET:
            noted.set()
            assert goes_on.wait(LIMIT)

    monkeypatch.setattr(provider, "modify_qp", modify_qp)
    monkeypatch.setattr(rp.QP, "_admit_posts", admit_posts)
    with thread(pair.a.to_reset) as raised:
        assert begun.wait(LIMIT)
        pair.a.to_rts()
        goes_on.set()
    monkeypatch.undo()
    assert not raised
    with pytest.raises(rp.PostError, match="RESET"):
        pair.a.post_recv(rp.RecvWR(pair.mine[:8]))
    pair.b.to_reset()
    pair.connect()
    pair.works()


def test_receive_is_refused_during_a_reset_although_an_interrupt_has_ended_an_earlier_one(
    connect, monkeypatch
):
    """The device is in RESET because of the earlier one, which proves nothing of the later one."""
    pair = connect()
    provider = provider_of(pair.a.context)
    modify = provider.modify_qp

    def interrupted(*args: Any) -> Any:
        modify(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(provider, "modify_qp", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.a.to_reset()
    with stopped(pair.a.to_reset, monkeypatch, provider, "modify_qp") as raised:
        pair.a.to_init()
        with pytest.raises(rp.PostError, match="RESET is in progress"):
            pair.a.post_recv(rp.RecvWR(pair.mine[:8]))
    assert not raised
    assert pair.a.outstanding == (0, 0)


def test_reset_that_returns_late_leaves_the_psn_of_the_next_connection(connect, monkeypatch):
    """The peer expects the one that endpoint() has told it."""
    pair = connect()
    provider = provider_of(pair.a.context)
    with stopped(pair.a.to_reset, monkeypatch, provider, "modify_qp", after=True) as raised:
        # Another reset, so that the first one cannot be told from it.
        pair.a.to_reset()
        pair.b.to_reset()
        pair.connect()
    assert not raised
    assert pair.a.psn == pair.a.query().sq_psn
    pair.works()


def test_connect_is_right_while_another_thread_changes_attributes(connect):
    """The other thread sets no state: the owner's calls are all legal, and so are its posts."""
    pair = connect(to=QPState.RESET)
    interval = sys.getswitchinterval()
    done = threading.Event()

    def tune() -> None:
        while not done.is_set():
            # Where the state does not allow it.
            with contextlib.suppress(ValueError, rp.VerbsError):
                pair.a.modify(min_rnr_timer=3)

    with thread(tune) as raised:
        sys.setswitchinterval(1e-5)
        try:
            for _ in range(100):
                pair.connect()
                pair.a.post_send(pair.wr(rp.RdmaWrite))
                assert pair.wait(1)[0].status is rp.WCStatus.SUCCESS
                pair.a.to_reset()
                pair.b.to_reset()
        finally:
            sys.setswitchinterval(interval)
            done.set()
    assert not raised


def test_queue_pair_that_could_not_be_reset_can_be_posted_to(context, monkeypatch):
    with (
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 64) as mr,
        rp.QP(pd, QPType.RC, cq) as qp,
    ):
        qp.connect(qp.endpoint())

        def modify_qp(*_: Any) -> None:
            raise rp.VerbsError("ibv_modify_qp", errno.EIO)

        monkeypatch.setattr(provider_of(context), "modify_qp", modify_qp)
        with pytest.raises(rp.VerbsError, match="EIO"):
            qp.to_reset()
        monkeypatch.undo()
        qp.post_recv(rp.RecvWR(mr[:8], wr_id=7))
        qp.post_send(rp.Send(mr[8:16], wr_id=8))
        assert sorted(wc.wr_id for wc in cq.wait(2)) == [7, 8]

"""What each state of a queue pair does with a work request: refuse, carry out, hold or flush."""

from __future__ import annotations

import errno

import pytest
from support import GRH, LOCAL_ERROR, Pair, needs

import rdmapost as rp
from rdmapost import QPState, QPType, WCStatus

TYPES = [QPType.RC, QPType.UC, QPType.UD]
CONNECTED = [QPType.RC, QPType.UC]
STEPS = (QPState.INIT, QPState.RTR, QPState.RTS)
ROOM = GRH + 64


def climb(qp: rp.QP, state: QPState, remote: rp.Endpoint) -> None:
    """Bring a queue pair up from RESET to a state, and down to SQD from RTS."""
    connected = qp.qp_type is not QPType.UD
    ways = {
        QPState.INIT: qp.to_init,
        QPState.RTR: lambda: qp.to_rtr(remote if connected else None),
        QPState.RTS: lambda: qp.to_rts(rnr_retry=1),
        QPState.SQD: qp.to_sqd,
    }
    for step, way in ways.items():
        if qp.state < step <= state:
            way()
    assert qp.state is state


def receive(pair: Pair, wr_id: int) -> rp.RecvWR:
    return rp.RecvWR(pair.theirs[:ROOM], wr_id=wr_id)


# ---- attributes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_rnr_timer", 32),
        ("max_dest_rd_atomic", 255),
        ("timeout", 32),
        ("retry_cnt", 8),
        ("rnr_retry", 8),
        ("max_rd_atomic", 255),
    ],
)
def test_an_attribute_out_of_range_is_named(connect, context, name, value):
    """If the device just returns EINVAL; then it can be posted again."""
    looks = context.kind == "soft" or name in ("timeout", "max_rd_atomic")
    needs(looks, f"a look at {name}: it takes any", context)
    pair = connect(QPType.RC, to=QPState.RESET)
    with pytest.raises(rp.VerbsError, match=rf"EINVAL.*{name}={value} is not in 0\.\.\d+"):
        pair.a.connect(pair.b.endpoint(), **{name: value})
    pair.connect()
    pair.works()


@pytest.mark.parametrize(
    ("attrs", "words"),
    [
        ({"timeout": 3}, "timeout cannot be changed from RTS to RTS"),
        ({"timeout": 3, "rnr_retry": 1}, "timeout, rnr_retry cannot be changed from RTS to RTS"),
        (
            {"qp_state": QPState.SQD, "min_rnr_timer": 1},
            "min_rnr_timer cannot be changed from RTS to SQD",
        ),
    ],
    ids=["one", "two", "of a step"],
)
def test_an_attribute_that_a_step_cannot_change_is_named(rc, context, attrs, words):
    looks = context.kind == "soft" or "qp_state" in attrs
    needs(looks, "a look at attributes given without a state: it ignores them", context)
    with pytest.raises(rp.VerbsError, match=rf"EINVAL.*: {words} "):
        rc.a.modify(**attrs)
    rc.works()


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
    needs(context.kind == "soft", "refusal of a send before RTS that holds for good", context)
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


# ---- receives -------------------------------------------------------------------------


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
    needs(context.kind == "soft", "flush of a receive that is posted in ERR", context)
    pair = connect(qp_type)
    pair.b.to_err()
    pair.b.post_recv([receive(pair, i) for i in range(3)])
    done = pair.cq.wait(3)
    assert [(wc.wr_id, wc.status) for wc in done] == [(i, WCStatus.WR_FLUSH_ERR) for i in range(3)]


# ---- the queue pair after a refusal ----------------------------------------------------


@pytest.mark.parametrize("qp_type", TYPES)
def test_refused_list_leaves_the_queue_pair_as_it_was(connect, qp_type):
    """What came before the bad one is carried out, what came after it was never posted."""
    pair = connect(qp_type)
    pair.b.post_recv([receive(pair, 10 + i) for i in range(2)])
    too_many = pair.send([pair.mine[:1]] * (pair.a.max_send_sge + 1), wr_id=2)
    wrs = [
        pair.send(pair.mine[:8], wr_id=0),
        pair.send(pair.mine[:8], wr_id=1),
        too_many,
        pair.send(pair.mine[:8], wr_id=3),
    ]
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send(wrs)
    assert (caught.value.index, caught.value.posted, caught.value.wr) == (2, 2, too_many)
    assert pair.a.state is QPState.RTS
    assert sorted(wc.wr_id for wc in pair.wait(4)) == [0, 1, 10, 11]
    assert pair.a.outstanding == pair.b.outstanding == (0, 0)
    pair.works()


def test_refused_list_of_receives_keeps_those_before_it(rc):
    wrs = [
        receive(rc, 0),
        receive(rc, 1),
        rp.RecvWR([rc.theirs[:1]] * (rc.b.max_recv_sge + 1)),
        receive(rc, 3),
    ]
    with pytest.raises(rp.PostError, match="work request 3 of 4") as caught:
        rc.b.post_recv(wrs)
    assert (caught.value.index, caught.value.posted, caught.value.wr) == (2, 2, wrs[2])
    assert rc.b.outstanding.recv == 2
    rc.a.post_send([rp.Send(rc.mine[:8], wr_id=9)] * 2)
    assert sorted(wc.wr_id for wc in rc.wait(4)) == [0, 1, 9, 9]

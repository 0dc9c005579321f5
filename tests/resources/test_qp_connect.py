"""Connecting queue pairs: from where, to whom, and with which options."""

from __future__ import annotations

import dataclasses
import time

import pytest
from support import ALL, LIMIT, climb, needs, null_device

import rdmapost as rp
from rdmapost import Access, QPState, QPType, WCStatus
from rdmapost.resources.qp_modify_arguments import RTS_OPTIONS


def test_receiver_needs_only_rtr(connect):
    pair = connect(to=QPState.RESET)
    climb(pair.b, QPState.RTR, pair.a.endpoint())
    pair.a.connect(pair.b.endpoint())
    pair.works()


@pytest.mark.parametrize("known", [True, False], ids=["known", "unnoticed"])
def test_connect_in_err_advises_to_reset(connect, known):
    pair = connect()
    if known:
        pair.a.to_err()
    else:
        # The device puts it there, without a query of its state.
        pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8], rkey=pair.theirs.rkey ^ 0xFF00))
        assert pair.cq.wait(1)[0].status is WCStatus.REM_ACCESS_ERR
    for peer in (pair.b.endpoint(), None):
        with pytest.raises((rp.VerbsError, ValueError), match=r"in ERR|from ERR") as caught:
            pair.a.connect(peer)
        assert "call to_reset() first" in str(caught.value)
    for qp in (pair.a, pair.b):
        qp.to_reset()
    pair.connect()
    pair.works()


def test_connect_takes_no_unknown_option(connect):
    pair = connect(to=QPState.RESET)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        pair.a.connect(pair.b.endpoint(), colour=1)
    assert pair.a.state is QPState.RESET


def test_connect_continues_from_init_or_rtr(connect):
    pair = connect(to=QPState.RESET)
    pair.a.to_init(ALL & ~Access.LOCAL_WRITE)
    climb(pair.b, QPState.RTR, pair.a.endpoint())
    pair.connect()
    pair.works()


def test_options_of_connect_are_what_query_returns(connect):
    pair = connect(to=QPState.RESET)
    remote = pair.b.endpoint()
    pair.a.connect(
        remote,
        timeout=12,
        retry_cnt=3,
        rnr_retry=2,
        min_rnr_timer=5,
        max_rd_atomic=2,
        max_dest_rd_atomic=3,
    )
    attr = pair.a.query()
    assert attr.qp_state is QPState.RTS
    assert (attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer) == (12, 3, 2, 5)
    # Devices may round these up.
    assert attr.max_rd_atomic >= 2
    assert attr.max_dest_rd_atomic >= 3
    assert (attr.dest_qp_num, attr.rq_psn, attr.sq_psn) == (remote.qp_num, remote.psn, pair.a.psn)
    assert attr.path_mtu == remote.mtu
    assert attr.port_num == 1


def test_what_is_no_endpoint_is_refused_in_every_state(connect, pd, cq):
    ready = connect().a
    with rp.QP(pd, QPType.RC, cq) as new, rp.QP(pd, QPType.UD, cq) as ud:
        for wrong in ("garbage", str(ready.endpoint()), ready, 5):
            words = f"remote: expected Endpoint.*, got {type(wrong).__name__}"
            for call in (ready.connect, new.connect, new.to_rtr, new.path_to, ud.ah_to):
                with pytest.raises(TypeError, match=words):
                    call(wrong)
        assert new.state is QPState.RESET
        with pytest.raises(TypeError, match="remote: expected Endpoint, got NoneType"):
            ud.ah_to(None)
    with pytest.raises(TypeError, match="line: expected str, got bytes"):
        rp.Endpoint.parse(str(ready.endpoint()).encode())


def test_connected_queue_pair_is_not_connected_to_another_peer(connect, pd, cq):
    pair = connect()
    with rp.QP(pd, QPType.RC, cq) as other:
        with pytest.raises(ValueError, match=r"connected to QP .*, not to .*to_reset\(\) first"):
            pair.a.connect(other.endpoint())
        elsewhere = other.endpoint()
        there = rp.Endpoint(
            pair.b.qp_num,
            elsewhere.psn,
            rp.GID("::ffff:192.0.2.77"),
            elsewhere.lid ^ 1,
            elsewhere.mtu,
        )
        with pytest.raises(ValueError, match="connected to QP"):
            pair.a.connect(there)
        assert pair.a.query().dest_qp_num == pair.b.qp_num
    # The same peer again is not another one.
    pair.a.connect(pair.b.endpoint())
    pair.a.connect()
    pair.a.to_reset()
    pair.a.connect(pair.b.endpoint())


@pytest.mark.parametrize("was_connected", [False, True])
def test_failed_queue_pair_is_not_connected_but_reset_first(connect, pd, cq, was_connected):
    pair = connect(to=QPState.RTS if was_connected else QPState.RESET)
    if not was_connected:
        pair.a.to_init()  # rxe takes no queue pair from RESET to ERR
    pair.a.to_err()
    with rp.QP(pd, QPType.RC, cq) as other:
        with pytest.raises(ValueError, match=r"0x\w+ is in ERR; call to_reset\(\) first"):
            pair.a.connect(other.endpoint())
        pair.a.to_reset()
        pair.a.connect(other.endpoint())


# ---- options after the transition that they belong to ---------------------------------

LATE = {
    "timeout": 5,
    "retry_cnt": 2,
    "rnr_retry": 2,
    "max_rd_atomic": 3,
    "max_dest_rd_atomic": 3,
    "sl": 1,
    "traffic_class": 4,
}
"""What ibv_modify_qp cannot change in RTS."""


@pytest.mark.parametrize("name", LATE)
def test_option_that_rts_cannot_change_is_refused(rc, name):
    before = rc.a.query()
    calls = [lambda: rc.a.connect(rc.b.endpoint(), **{name: LATE[name]})]
    if name in RTS_OPTIONS:
        calls.append(lambda: rc.a.to_rts(**{name: LATE[name]}))
    for call in calls:
        with pytest.raises(
            ValueError, match=rf"is in RTS, where {name} cannot be changed .*: to_sqd\(\) first, or"
        ):
            call()
    after = rc.a.query()
    assert (after.qp_state, after.timeout, after.retry_cnt) == (
        before.qp_state,
        before.timeout,
        before.retry_cnt,
    )
    rc.works()


def test_options_are_applied_in_rts_where_it_can_change_them(rc):
    rc.a.connect(rc.b.endpoint(), access=Access.REMOTE_READ, min_rnr_timer=7)
    attr = rc.a.query()
    assert attr.qp_state is QPState.RTS
    assert (attr.qp_access_flags & ALL, attr.min_rnr_timer) == (Access.REMOTE_READ, 7)


def test_qkey_of_a_ud_queue_pair_in_rts_is_changed(connect):
    pair = connect(QPType.UD)
    pair.a.connect(qkey=0x1234)
    assert pair.a.query().qkey == 0x1234


def drain(qp):
    """Bring it to SQD and wait until its send queue is drained, which Linux 6.12 does later."""
    qp.to_sqd()
    deadline = time.monotonic() + LIMIT
    while qp.query().sq_draining:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("by", ["connect", "to_rts"])
def test_options_are_applied_on_the_way_from_sqd(rc, by):
    """Ten times: what is applied must not make Linux 6.12 drain the queue again."""
    for _ in range(10):
        drain(rc.a)
        if by == "to_rts":
            rc.a.to_rts(timeout=9, retry_cnt=3)
        else:
            rc.a.connect(rc.b.endpoint(), timeout=9, retry_cnt=3, min_rnr_timer=7)
    attr = rc.a.query()
    assert (attr.qp_state, attr.timeout, attr.retry_cnt) == (QPState.RTS, 9, 3)
    assert attr.min_rnr_timer == (12 if by == "to_rts" else 7)
    rc.works()


def test_traffic_class_is_changed_on_the_way_from_sqd(rc, context):
    needs(context.kind == "soft", "path changes in SQD", context)
    drain(rc.a)
    rc.a.connect(rc.b.endpoint(), traffic_class=32, sl=3)
    path = rc.a.query().ah_attr
    assert (path.traffic_class, path.sl, path.dgid) == (32, 3, rc.b.gid.gid)
    rc.works()


def test_options_of_earlier_steps_are_applied_or_refused_on_the_way_up(connect):
    pair = connect(to=QPState.RESET)
    climb(pair.a, QPState.INIT, pair.b.endpoint())
    pair.a.connect(pair.b.endpoint(), access=Access.REMOTE_WRITE, min_rnr_timer=7)
    attr = pair.a.query()
    assert (attr.qp_access_flags & ALL, attr.min_rnr_timer) == (Access.REMOTE_WRITE, 7)
    climb(pair.b, QPState.RTR, pair.a.endpoint())
    with pytest.raises(
        ValueError, match=r"is in RTR, where sl cannot be changed .*: reset it with to_reset"
    ):
        pair.b.connect(pair.a.endpoint(), sl=1)
    assert pair.b.state is QPState.RTR
    pair.b.connect(pair.a.endpoint(), access=Access.REMOTE_READ, timeout=9)
    attr = pair.b.query()
    assert (attr.qp_access_flags & ALL, attr.timeout) == (Access.REMOTE_READ, 9)


def test_option_in_err_advises_to_reset(rc):
    rc.a.to_err()
    for call in (rc.a.connect, rc.a.to_rts):
        with pytest.raises(ValueError, match=r"cannot go from ERR to RTS.*to_reset\(\) first"):
            call(timeout=5)


def test_options_that_the_type_does_not_have_are_ignored(connect):
    pair = connect(QPType.UD)
    pair.a.connect(**LATE, access=Access.REMOTE_READ)
    pair.a.to_rts(timeout=5)
    pair.works()


# ---- PSNs -----------------------------------------------------------------------------


def test_psn_that_the_peer_does_not_expect_ends_with_retry_exceeded(connect):
    pair = connect(to=QPState.RESET)
    near, far = pair.a.endpoint(), pair.b.endpoint()
    pair.a.connect(far, timeout=8, retry_cnt=1)
    # Beyond what it expects: what lies before is a duplicate, which is acknowledged.
    pair.b.connect(dataclasses.replace(near, psn=(near.psn - 1000) % (1 << 24)))
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:1]))
    assert pair.cq.wait(1, timeout=LIMIT)[0].status is WCStatus.RETRY_EXC_ERR
    for qp in (pair.a, pair.b):
        qp.to_reset()
    pair.connect()
    pair.works()


def test_uc_accepts_any_psn(connect):
    pair = connect(QPType.UC, to=QPState.RESET)
    near = pair.a.endpoint()
    pair.a.connect(pair.b.endpoint())
    pair.b.connect(dataclasses.replace(near, psn=near.psn ^ 0x800000))
    pair.works()


def test_psn_that_modify_sets_is_the_endpoints(connect):
    pair = connect(to=QPState.RESET)
    climb(pair.a, QPState.RTR, pair.b.endpoint())
    psn = pair.a.psn ^ 0x800000
    pair.a.modify(
        qp_state=QPState.RTS, sq_psn=psn, timeout=14, retry_cnt=6, rnr_retry=1, max_rd_atomic=1
    )
    assert pair.a.psn == pair.a.endpoint().psn == psn
    pair.b.connect(pair.a.endpoint())
    pair.works()


# ---- failures -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"max_dest_rd_atomic": 255}, {"timeout": 77}, {"rnr_retry": 8}], ids=str
)
def test_failed_connect_leaves_a_reset_queue_pair_in_reset(connect, context, wrong):
    looks = context.kind == "soft" or "timeout" in wrong
    needs(looks, "check of the attribute", context)
    pair = connect(to=QPState.RESET)
    with pytest.raises((rp.VerbsError, ValueError)):
        pair.a.connect(pair.b.endpoint(), **wrong)
    assert pair.a.state is QPState.RESET
    with pytest.raises(ValueError, match="need the peer's endpoint"):
        pair.a.connect()
    assert pair.a.state is QPState.RESET
    pair.connect()
    pair.works()


def test_failed_connect_keeps_the_receives_posted_in_init(connect):
    pair = connect(to=QPState.RESET)
    pair.a.to_init()
    pair.a.post_recv(rp.RecvWR(pair.mine[:8]))
    with pytest.raises((rp.VerbsError, ValueError)):
        pair.a.connect(pair.b.endpoint(), timeout=77)
    assert pair.a.state is QPState.RTR
    assert pair.a.outstanding.recv == 1


null = null_device.null
on_null = null_device.on_null


def test_unreachable_peer_is_refused_with_the_kernels_errno(on_null):
    """The kernel resolves the path when it is set."""
    text = on_null(
        """
        import os
        context, pd, cq = resources()
        qp = rp.QP(pd, rp.QPType.RC, cq)
        qp.to_init()
        os.environ["NULL_REFUSES"] = "ibv_modify_qp=101"
        remote = rp.Endpoint(1, 2, "::ffff:192.0.2.1", 0, rp.MTU.MTU_1024)
        print(said(lambda: qp.to_rtr(remote)))
        """
    )
    assert "ENETUNREACH" in text
    assert "192.0.2.1 cannot be reached from GID 0 (fe80::1)" in text

"""Queue pairs of the software device: completions, slots, attributes and resets."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from support import ALL, GRH

import rdmapost as rp
from rdmapost import (
    EventType,
    MigState,
    QPAttrMask,
    QPState,
    QPType,
    SendFlags,
    WCFlags,
    WCOpcode,
    WCStatus,
)
from rdmapost._binding import ffi


@pytest.fixture(scope="module")
def context() -> Iterator[rp.Context]:
    with rp.open_device("soft0") as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_old_events(context):
    """Discard the events of earlier tests."""
    events(context)


def events(context: rp.Context) -> list[tuple[EventType, Any]]:
    """Take the pending events; return the type and element of each."""
    found = []
    while event := rp.get_async_event(context):
        found.append((event.event_type, event.element))
    return found


def to_state(qp: rp.QP, state: QPState, mask: QPAttrMask = QPAttrMask.STATE) -> None:
    """Query a state from the device, as a program without the library does."""
    attr = ffi.new("struct ibv_qp_attr *", {"qp_state": state, "port_num": 1})
    qp.pd.context._provider.modify_qp(qp._handle, attr, QPAttrMask.STATE | mask)


@pytest.mark.parametrize("attr", ["port_num", "pkey_index"])
def test_unknown_port_or_pkey_index_is_refused(rc, attr):
    rc.a.to_reset()
    attrs = {"port_num": 1, "pkey_index": 0, "qp_access_flags": 0}
    with pytest.raises(rp.VerbsError, match=r"EINVAL.*stays in RESET"):
        rc.a.modify(qp_state=QPState.INIT, **attrs | {attr: attrs[attr] + 1})
    if attr == "port_num":
        with pytest.raises(rp.VerbsError, match=r"EINVAL.*stays in RESET"):
            rc.a.modify(qp_state=QPState.INIT, **attrs | {"port_num": 0})
    rc.a.modify(qp_state=QPState.INIT, **attrs)


def test_xrc_initiator_does_not_acknowledge_requests(pd, stack, rc):
    """Only the other side of XRC, its target, takes requests."""
    a, b = (stack.enter_context(rp.QP(pd, QPType.XRC_SEND, rc.cq)) for _ in range(2))
    b.connect(a.endpoint())
    a.connect(b.endpoint(), timeout=1, retry_cnt=0)
    rc.mine.buffer[:8] = b"12345678"
    a.post_send(rp.RdmaWrite(rc.mine[:8], remote_addr=rc.theirs.addr, rkey=rc.theirs.rkey))
    assert [wc.status for wc in rc.cq.wait()] == [WCStatus.RETRY_EXC_ERR]
    assert not any(rc.theirs.buffer)


# ---- completions ------------------------------------------------------------------


def success(wr_id: int, opcode: WCOpcode, qp: rp.QP, **fields: Any) -> rp.WC:
    """Make a completion with only the given values."""
    nothing = dict.fromkeys(rp.WC._fields, 0) | {
        "imm_data": None,
        "invalidated_rkey": None,
        "wc_flags": WCFlags(0),
        "tm_tag": None,
        "tm_priv": None,
    }
    said = {"wr_id": wr_id, "status": WCStatus.SUCCESS, "opcode": opcode, "qp_num": qp.qp_num}
    return rp.WC(**nothing | said | fields)


def test_completion_of_a_send_has_no_fields_of_a_receive(rc, stack):
    """byte_len counts the bytes that came back."""
    region = stack.enter_context(rp.MR(rc.pd, 64, ALL | rp.Access.MW_BIND))
    window = stack.enter_context(rp.MW(rc.pd, rp.MWType.TYPE_2))
    key = window.next_rkey()
    binding = {"mr": region, "addr": region.addr, "length": 64}
    rc.b.post_recv([rp.RecvWR(rc.theirs[1024:1088], wr_id=9)] * 4)
    posted = [
        (rc.send(rc.mine[:8]), WCOpcode.SEND, 0),
        (rc.wr(rp.SendWithImm, rc.mine[:8], imm_data=7), WCOpcode.SEND, 0),
        (rc.wr(rp.RdmaWrite, rc.mine[:8]), WCOpcode.RDMA_WRITE, 0),
        (rc.wr(rp.RdmaWriteWithImm, rc.mine[:8], imm_data=7), WCOpcode.RDMA_WRITE, 0),
        (rc.wr(rp.RdmaRead, rc.mine[:24]), WCOpcode.RDMA_READ, 24),
        (rc.wr(rp.AtomicFetchAndAdd, rc.mine[:8]), WCOpcode.FETCH_ADD, 8),
        (rc.wr(rp.AtomicCmpAndSwp, rc.mine[:8]), WCOpcode.COMP_SWAP, 8),
        (rp.BindMW(mw=window, rkey=key, **binding), WCOpcode.BIND_MW, 0),
        (rp.LocalInv(invalidate_rkey=key), WCOpcode.LOCAL_INV, 0),
        (rc.wr(rp.SendWithInv, rc.mine[:8], invalidate_rkey=region.rkey), WCOpcode.SEND, 0),
    ]
    for number, (wr, opcode, byte_len) in enumerate(posted):
        wr.wr_id = 100 + number
        rc.a.post_send(wr)
        [done] = [wc for wc in rc.cq.poll() if wc.qp_num == rc.a.qp_num]
        assert done == success(100 + number, opcode, rc.a, byte_len=byte_len)


def test_completion_of_a_receive_has_exactly_the_fields_of_its_message(rc, stack):
    key = stack.enter_context(rp.MR(rc.pd, 64, ALL))
    for wr, fields in (
        (rc.send(rc.mine[:5]), {}),
        (
            rc.wr(rp.SendWithImm, rc.mine[:5], imm_data=7),
            {"imm_data": 7, "wc_flags": WCFlags.WITH_IMM},
        ),
        (
            rc.wr(rp.SendWithInv, rc.mine[:5], invalidate_rkey=key.rkey),
            {"invalidated_rkey": key.rkey, "wc_flags": WCFlags.WITH_INV},
        ),
        (
            rc.wr(rp.RdmaWriteWithImm, rc.mine[:5], imm_data=7),
            {"imm_data": 7, "wc_flags": WCFlags.WITH_IMM, "opcode": WCOpcode.RECV_RDMA_WITH_IMM},
        ),
    ):
        rc.b.post_recv(rp.RecvWR(rc.theirs[1024:1088], wr_id=9))
        rc.a.post_send(wr)
        [done] = [wc for wc in rc.wait(2) if wc.qp_num == rc.b.qp_num]
        assert done == success(9, **{"opcode": WCOpcode.RECV, "qp": rc.b, "byte_len": 5, **fields})


def test_completion_of_a_datagram_names_its_sender(connect, stack):
    """And the service level of its path."""
    pair = connect(QPType.UD)
    attr = pair.ah.attr
    ah = stack.enter_context(
        rp.AH(pair.pd, rp.AHAttr(dgid=attr.dgid, sgid_index=attr.sgid_index, sl=3))
    )
    pair.b.post_recv(rp.RecvWR(pair.theirs[:256], wr_id=9))
    pair.a.post_send(pair.send(pair.mine[:5], ah=ah, wr_id=8))
    came = {"byte_len": GRH + 5, "src_qp": pair.a.qp_num, "sl": 3, "wc_flags": WCFlags.GRH}
    assert sorted(pair.wait(2)) == [
        success(8, WCOpcode.SEND, pair.a),
        success(9, WCOpcode.RECV, pair.b, **came),
    ]


def test_flushed_work_request_has_no_vendor_error(rc):
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=1))
    rc.b.to_err()
    rc.b.post_send(rp.Send(rc.theirs[:8], wr_id=2))
    found = [(wc.wr_id, wc.status, wc.qp_num, wc.vendor_err) for wc in rc.cq.wait(2)]
    assert found == [(i, WCStatus.WR_FLUSH_ERR, rc.b.qp_num, 0) for i in (1, 2)]


def test_completion_of_a_send_is_not_solicited(context, pd, cq, stack):
    """Whatever it requests at the receiver; an error wakes all the same."""
    channel = stack.enter_context(rp.CompChannel(context))
    own = stack.enter_context(rp.CQ(context, 8, channel=channel))
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    near = stack.enter_context(rp.QP(pd, QPType.RC, own))
    far = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    far.connect(near.endpoint())
    near.connect(far.endpoint())
    far.post_recv(rp.RecvWR(mr[:8]))
    own.req_notify(solicited_only=True)
    near.post_send(rp.Send(mr[:8], send_flags=SendFlags.SIGNALED | SendFlags.SOLICITED))
    assert len(own.poll()) == 1
    assert channel.get_cq_event(0) is None
    near.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey ^ 0xA5))
    assert channel.get_cq_event(0) is own


# ---- slots ------------------------------------------------------------------------


def full(post: Callable[[list[Any]], None], wr: Any, depth: int) -> None:
    """Check that a queue accepts exactly as many as it has slots."""
    with pytest.raises(rp.PostError) as caught:
        post([wr] * (depth + 1))
    error = caught.value
    assert (error.errno, error.index, error.posted) == (errno.ENOMEM, depth, depth)


def test_completion_frees_its_slot_and_those_of_earlier_unsignaled_sends(connect):
    pair = connect(max_send_wr=4, checked=False)
    quiet = pair.wr(rp.RdmaWrite, pair.mine[:8], send_flags=0)
    for count in (3, 3, 1, 0, 3):
        pair.a.post_send([quiet] * count + [pair.wr(rp.RdmaWrite, pair.mine[:8])])
        pair.wait(1)
    full(pair.a.post_send, quiet, 4)


@pytest.mark.parametrize("wr_class", [rp.Send, rp.RdmaWriteWithImm])
def test_completion_of_a_receive_frees_its_slot(connect, wr_class):
    pair = connect(max_recv_wr=4, checked=False)
    for _ in range(3):
        pair.b.post_recv([rp.RecvWR(pair.theirs[:8])] * 2)
        pair.a.post_send([pair.wr(wr_class, pair.mine[:8])] * 2)
        pair.wait(4)
    full(pair.b.post_recv, rp.RecvWR(pair.theirs[:8]), 4)


def test_flushed_receive_frees_its_slot(connect):
    pair = connect(max_recv_wr=4, checked=False)
    pair.b.post_recv([rp.RecvWR(pair.theirs[:8])] * 4)
    pair.b.to_err()
    assert [wc.status for wc in pair.cq.wait(4)] == [WCStatus.WR_FLUSH_ERR] * 4
    full(pair.b.post_recv, rp.RecvWR(pair.theirs[:8]), 4)


def test_queue_pair_created_without_tso_refuses_a_header(pd, cq):
    with rp.QP(pd, QPType.RAW_PACKET, cq, checked=False) as qp:
        qp.connect()
        with pytest.raises(rp.PostError) as caught:
            qp.post_send(rp.TSO(hdr=b"x", mss=9))
        assert (caught.value.errno, caught.value.index) == (errno.EINVAL, 0)


# ---- what is set, and what a reset leaves -----------------------------------------


def test_query_reports_attributes_only_after_they_are_set(pd, cq):
    """They are unset before, and after a reset."""
    with rp.QP(pd, QPType.RC, cq) as qp:
        new = qp.query()
        assert (new.qp_access_flags, new.timeout, new.retry_cnt) == (rp.Access(0), 0, 0)
        assert (new.dest_qp_num, new.path_mtu, new.max_rd_atomic) == (0, None, 0)
        qp.connect(qp.endpoint())
        assert qp.query() != new
        qp.to_reset()
        assert qp.query() == new


@pytest.mark.parametrize(("value", "fits"), [(MigState.MIGRATED, True), (MigState.REARM, False)])
def test_path_migration_state_can_only_be_migrated(rc, value, fits):
    if fits:
        rc.a.modify(path_mig_state=value)
    else:
        with pytest.raises(rp.VerbsError) as caught:
            rc.a.modify(path_mig_state=value)
        assert caught.value.errno == errno.EINVAL
    assert rc.a.query().path_mig_state is MigState.MIGRATED
    rc.works()


def test_reset_drops_receives_and_completions(rc):
    """The device drops them; the library has taken its completions before."""
    depth = rc.b.max_recv_wr
    rc.b.post_recv([rp.RecvWR(rc.theirs[1024:1032], wr_id=i) for i in range(depth)])
    rc.a.post_send(rp.Send(rc.mine[:8]))
    for qp in (rc.a, rc.b):
        to_state(qp, QPState.RESET)
    assert rc.cq.poll() == []
    for qp in (rc.a, rc.b):
        qp.to_reset()
    rc.connect()
    rc.works()
    rc.b.post_recv([rp.RecvWR(rc.theirs[1024:1032], wr_id=i) for i in range(depth)])


def test_reset_forgets_earlier_attempts(rc, context):
    """A request that waits for its next attempt is dropped, and the next one goes out."""
    for qp in (rc.a, rc.b):
        qp.to_reset()
    rc.a.connect(rc.b.endpoint(), rnr_retry=1)
    # 655 ms.
    rc.b.connect(rc.a.endpoint(), min_rnr_timer=0)
    rc.a.post_send(rp.Send(rc.mine[:8]))
    rc.a.to_reset()
    rc.b.to_reset()
    rc.connect()
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=2))
    context.faults.not_ready(rc.b.qp_num, 1)
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=1))
    assert sorted(wc.wr_id for wc in rc.wait(2)) == [1, 2]


# ---- states -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "mask"),
    [(QPState.INIT, QPAttrMask.PORT | QPAttrMask.PKEY_INDEX), (QPState.RTS, QPAttrMask.SQ_PSN)],
    ids=["lacking", "no step"],
)
def test_invalid_state_transition_is_refused_by_the_device_too(pd, cq, state, mask):
    """The library says which attribute is missing before it asks the device."""
    with rp.QP(pd, QPType.RC, cq) as qp:
        with pytest.raises(rp.VerbsError) as caught:
            to_state(qp, state, mask)
        assert (caught.value.call, caught.value.errno) == ("ibv_modify_qp", errno.EINVAL)
        assert qp.query().qp_state is QPState.RESET


def test_first_message_in_rtr_raises_comm_est(connect, context):
    """The event is raised once, until the next reset."""
    pair = connect(to=QPState.RESET)
    for _ in range(2):
        pair.b.to_init()
        pair.b.to_rtr(pair.a.endpoint())
        pair.a.connect(pair.b.endpoint())
        assert events(context) == []
        pair.works()
        assert events(context) == [(EventType.COMM_EST, pair.b)]
        pair.works()
        pair.b.to_rts()
        pair.works()
        assert events(context) == []
        pair.a.to_reset()
        pair.b.to_reset()


def test_message_in_rts_raises_no_event(rc, context):
    rc.works()
    assert events(context) == []


@pytest.mark.parametrize("qp_type", [QPType.UC, QPType.UD])
def test_failed_send_flushes_the_sends_posted_after_it(connect, qp_type):
    """Also where the queue pair can still receive, and goes to SQE only."""
    pair = connect(qp_type)
    wrong = rp.SGE(pair.mine.addr, 8, pair.mine.lkey ^ 0xA5)
    pair.a.post_send([pair.send(wrong, wr_id=1), pair.send(pair.mine[:8], wr_id=2)])
    assert [(wc.wr_id, wc.status) for wc in pair.cq.wait(2)] == [
        (1, WCStatus.LOC_PROT_ERR),
        (2, WCStatus.WR_FLUSH_ERR),
    ]
    assert pair.a.query().qp_state is QPState.SQE


def test_error_state_of_a_queue_pair_with_an_srq_raises_last_wqe_reached(
    connect, stack, pd, context
):
    """The receives stay for the others; then the queue pair takes none (ibv_get_async_event(3))."""
    mr = stack.enter_context(rp.MR(pd, 64))
    srq = stack.enter_context(rp.SRQ(pd))
    pair = connect(b_options={"srq": srq})
    srq.post_srq_recv(rp.RecvWR(mr[:8]))
    pair.b.to_err()
    assert events(context) == [(EventType.QP_LAST_WQE_REACHED, pair.b)]
    assert srq.outstanding == 1
    pair.a.to_err()
    assert events(context) == []


def test_queue_pair_connected_to_itself_flushes_the_request_that_breaks_it(pd, cq, context, stack):
    """It is its own peer: its request flushes its queue, and the request with it."""
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    with rp.QP(pd, QPType.RC, cq) as qp:
        for _ in range(2):
            qp.connect(qp.endpoint())
            events(context)
            write = rp.RdmaWrite(mr[:8], remote_addr=mr.addr + 8, rkey=mr.rkey ^ 0xA5)
            qp.post_send([replace(write, wr_id=i) for i in (1, 2)])
            found = [(wc.wr_id, wc.status) for wc in cq.wait(2)]
            assert found == [(i, WCStatus.WR_FLUSH_ERR) for i in (1, 2)]
            assert cq.poll() == []
            assert events(context) == [(EventType.QP_ACCESS_ERR, qp)]
            qp.to_reset()
        qp.connect(qp.endpoint())
        qp.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr + 8, rkey=mr.rkey))
        cq.wait()[0].check()

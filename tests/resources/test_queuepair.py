"""Queue pairs: creation, the state machine, connecting, and their self-descriptions."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from support import ALL, Pair

import rdmapost as rp
from rdmapost import Access, QPState, QPType, WCStatus

# ---- creating ---------------------------------------------------------------------


def test_queue_pair_gets_at_least_what_was_asked(pd, cq):
    with rp.QP(
        pd,
        QPType.RC,
        cq,
        max_send_wr=10,
        max_recv_wr=20,
        max_send_sge=2,
        max_recv_sge=3,
        max_inline_data=20,
    ) as qp:
        assert qp.max_send_wr >= 10
        assert qp.max_recv_wr >= 20
        assert qp.max_send_sge >= 2
        assert qp.max_recv_sge >= 3
        assert qp.max_inline_data >= 20
        assert qp.state is QPState.RESET
        attr = qp.query()
        assert attr.max_send_wr >= 10
        assert 0 < qp.qp_num < 1 << 24
        assert 0 <= qp.psn < 1 << 24
        assert qp.outstanding == (0, 0)
        assert str(qp) == f"RC QP {qp.qp_num:#x}"


@pytest.mark.parametrize("name", ["max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge"])
def test_limit_that_was_exceeded_is_named(pd, cq, context, name):
    most = context.attr.max_qp_wr if name.endswith("wr") else context.attr.max_sge
    with pytest.raises(rp.VerbsError, match=f"{name}={most + 1}, but the device's .* is {most}"):
        rp.QP(pd, QPType.RC, cq, **{name: most + 1})


@pytest.mark.parametrize("value", [-1, 1 << 32])
@pytest.mark.parametrize("name", ["max_send_wr", "max_recv_sge", "max_inline_data"])
def test_number_that_does_not_fit_is_named(pd, cq, name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        rp.QP(pd, QPType.RC, cq, **{name: value})


def test_max_inline_data_beyond_the_device_is_named(pd, cq):
    with pytest.raises(rp.VerbsError, match="max_inline_data=1000000 may be more than"):
        rp.QP(pd, QPType.RC, cq, max_inline_data=1_000_000)


@pytest.mark.parametrize("port_num", [0, -1, 2, 255, 300])
def test_port_that_is_not_there_is_named(pd, cq, context, port_num):
    if port_num <= context.attr.phys_port_cnt and port_num > 0:
        pytest.skip(f"{context.name} has a port {port_num}")
    with pytest.raises(ValueError, match=f"{context.name} has no port {port_num}"):
        rp.QP(pd, QPType.RC, cq, port_num=port_num)


def test_cq_of_another_open_device_is_refused(pd, context):
    with (
        rp.open_device(context.name) as other,
        rp.CQ(other) as cq,
        pytest.raises(ValueError, match="another open device"),
    ):
        rp.QP(pd, QPType.RC, cq)


def test_closed_parents_are_refused(pd, cq, context):
    other = rp.PD(context)
    other.close()
    with pytest.raises(rp.ClosedError, match="PD is closed"):
        rp.QP(other, QPType.RC, cq)
    gone = rp.CQ(context)
    gone.close()
    with pytest.raises(rp.ClosedError, match=r"CQ .* is closed"):
        rp.QP(pd, QPType.RC, gone)


# ---- states -----------------------------------------------------------------------


def climb(qp: rp.QP, to: QPState, remote: rp.Endpoint) -> None:
    for state, step in (
        (QPState.INIT, qp.to_init),
        (QPState.RTR, lambda: qp.to_rtr(remote)),
        (QPState.RTS, qp.to_rts),
    ):
        if qp.state < to:
            step()
            assert qp.state is state


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


def test_receiver_needs_only_rtr(connect):
    pair = connect(to=QPState.RESET)
    climb(pair.b, QPState.RTR, pair.a.endpoint())
    pair.a.connect(pair.b.endpoint())
    pair.works()


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


def test_step_without_an_attribute_names_it(connect):
    pair = connect(to=QPState.RESET)
    qp = pair.a
    with pytest.raises(
        ValueError, match="RESET to INIT also needs qp_access_flags on RC queue pairs"
    ):
        qp.modify(qp_state=QPState.INIT, port_num=1, pkey_index=0)
    qp.to_init()
    with pytest.raises(ValueError, match=r"also needs ah_attr, path_mtu, .*dest_qp_num"):
        qp.modify(qp_state=QPState.RTR)
    with pytest.raises(ValueError, match="need the peer's endpoint"):
        qp.to_rtr()
    qp.to_rtr(pair.b.endpoint())
    with pytest.raises(ValueError, match=r"also needs .*sq_psn"):
        qp.modify(qp_state=QPState.RTS, timeout=14, retry_cnt=1, rnr_retry=1, max_rd_atomic=1)
    assert qp.state is QPState.RTR


def test_step_that_does_not_exist_is_refused(connect):
    qp = connect(to=QPState.RESET).a
    with pytest.raises(ValueError, match=r"cannot go from RESET to RTS; .* ERR, INIT, RESET"):
        qp.modify(qp_state=QPState.RTS)
    assert qp.state is QPState.RESET


@pytest.mark.parametrize(
    ("attrs", "error", "words"),
    [
        ({"qp_color": 1}, TypeError, "struct ibv_qp_attr has no field qp_color"),
        ({"qp_state": 99}, ValueError, "99"),
        ({"qp_state": "RTS"}, TypeError, "qp_state: expected QPState, got str"),
        ({"port_num": 1.0}, TypeError, "port_num: expected int, got float"),
        ({"timeout": 256}, ValueError, "timeout=256 does not fit"),
        ({"rq_psn": -1}, ValueError, "rq_psn=-1 does not fit"),
        ({"ah_attr": 5}, TypeError, "ah_attr: expected AHAttr, got int"),
        ({"port_num": rp.AHAttr()}, TypeError, "port_num: expected int, got AHAttr"),
        ({"ah_attr": rp.AHAttr(sl=256)}, ValueError, "sl=256 is not in 0..15"),
    ],
)
def test_attribute_that_is_none_is_named(rc, attrs, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        rc.a.modify(**attrs)
    rc.works()


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
        assert "take it back with to_reset() first" in str(caught.value)
    for qp in (pair.a, pair.b):
        qp.to_reset()
    pair.connect()
    pair.works()


@pytest.mark.parametrize("wrong", [Decimal("0.01"), Fraction(1, 100), 0.5], ids=repr)
def test_option_of_a_step_is_a_whole_number(connect, wrong):
    said = f": expected int, got {type(wrong).__name__}"
    for name in (
        "min_rnr_timer",
        "max_dest_rd_atomic",
        "sl",
        "traffic_class",
        "timeout",
        "retry_cnt",
        "rnr_retry",
        "max_rd_atomic",
        "access",
    ):
        pair = connect(to=QPState.RESET)
        with pytest.raises(TypeError, match=f"^{name}{said}"):
            pair.a.connect(pair.b.endpoint(), **{name: wrong})
    with pytest.raises(TypeError, match=f"^pkey_index{said}"):
        pair.a.to_init(pkey_index=wrong)


@pytest.mark.parametrize("access", [-1, 1 << 9, 1 << 31, 1 << 64])
def test_access_of_a_step_has_no_other_bits(connect, access):
    pair = connect(to=QPState.RESET)
    with pytest.raises(ValueError, match=f"^access={access:#x} is not made of Access flags"):
        pair.a.connect(pair.b.endpoint(), access=access)


def test_connect_takes_no_unknown_option(connect):
    pair = connect(to=QPState.RESET)
    with pytest.raises(TypeError, match="connect\\(\\) has no option colour"):
        pair.a.connect(pair.b.endpoint(), colour=1)
    assert pair.a.state is QPState.RESET


def test_connect_goes_on_from_where_it_is(connect):
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
    assert (attr.dest_qp_num, attr.rq_psn, attr.sq_psn) == (remote.qpn, remote.psn, pair.a.psn)
    assert attr.path_mtu == remote.mtu
    assert attr.port_num == 1


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


def test_unreachable_peer_ends_with_retry_exceeded(connect):
    """A queue pair that was closed does not answer."""
    pair = connect(to=QPState.RESET)
    remote = pair.b.endpoint()
    pair.b.close()
    pair.a.connect(remote, timeout=8, retry_cnt=1)
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:1]))
    assert pair.cq.wait()[0].status is WCStatus.RETRY_EXC_ERR


def test_gid_of_a_queue_pair_is_chosen_with_a_reason(connect, context):
    pair = connect()
    choice = pair.a.gid
    assert choice.reason
    assert choice == rp.choose_gid(context)
    assert pair.a.endpoint().gid == choice.gid
    assert rp.choose_gid(context, gid_index=choice.index).reason == "asked for"


def test_gid_index_that_is_not_there_is_named(pd, cq, context):
    with (
        rp.QP(pd, QPType.RC, cq, gid_index=200) as qp,
        pytest.raises(rp.RdmaError, match="no GID with index 200; the valid ones are: 0"),
    ):
        qp.endpoint()
    words = "ibv_create_ah: .*no GID with index 200; the valid ones are: 0"
    with pytest.raises(rp.VerbsError, match=words):
        rp.AH(pd, rp.AHAttr(dgid=rp.choose_gid(context).gid, sgid_index=200))


def test_queue_pairs_meet_over_every_gid(pd, cq, stack, context):
    for entry in context.query_gid_table():
        pair = Pair(stack, pd, cq, gid_index=entry.index)
        assert pair.a.endpoint().gid == entry.gid
        pair.works()


def test_methods_of_a_closed_queue_pair_raise_closed_error(rc):
    rc.a.close()
    rc.a.close()
    for call in (
        rc.a.query,
        rc.a.endpoint,
        rc.a.to_err,
        rc.a.to_reset,
        lambda: rc.a.state,
        lambda: rc.a.post_send(rp.Send()),
        lambda: rc.a.post_recv(rp.RecvWR()),
        lambda: rc.a.post_send([]),
    ):
        with pytest.raises(rp.ClosedError, match=r"RC QP 0x[0-9a-f]+ is closed"):
            call()
    assert rc.a.outstanding == (0, 0)


# ---- address handles --------------------------------------------------------------


def test_address_handle_needs_a_port_and_a_gid(pd, context):
    with pytest.raises(ValueError, match=f"{context.name} has no port 9"):
        rp.AH(pd, rp.AHAttr(port_num=9))
    if context.query_port(1).link_layer is rp.LinkLayer.ETHERNET:
        with pytest.raises(ValueError, match="is Ethernet: give the AH a dgid"):
            rp.AH(pd, rp.AHAttr())


@pytest.mark.parametrize(
    ("field", "error", "words"),
    [
        ({"port_num": 1.0}, TypeError, "port_num: expected int, got float"),
        ({"dgid": True}, TypeError, "dgid: expected bytes or str or .*, got bool"),
        ({"dgid": []}, TypeError, "dgid: expected bytes or str or .*, got list"),
        ({"dgid": b"x"}, ValueError, "dgid: a GID has 16 bytes, not 1"),
        ({"dgid": b"y" * 17}, ValueError, "dgid: a GID has 16 bytes, not 17"),
        ({"dgid": "fe80"}, ValueError, "dgid: .*'fe80'"),
        ({"sgid_index": "1"}, TypeError, "sgid_index: expected int, got str"),
        ({"sl": 16}, ValueError, "sl=16 is not in 0..15"),
        ({"flow_label": 1 << 20}, ValueError, r"flow_label=1048576 is not in 0\.\.2\^20-1"),
        ({"hop_limit": -1}, ValueError, "hop_limit=-1 is not in 0..255"),
        ({"traffic_class": 256}, ValueError, "traffic_class=256 is not in 0..255"),
        *(
            ({name: wrong}, TypeError, f"{name}: expected int, got {type(wrong).__name__}")
            for name in ("sl", "dlid", "src_path_bits", "static_rate", "hop_limit", "flow_label")
            for wrong in (Fraction(1, 100), Decimal("0.01"))
        ),
    ],
    ids=str,
)
def test_field_of_an_address_that_cannot_be_is_named(pd, context, field, error, words):
    with pytest.raises(error, match=words):
        rp.AH(pd, rp.AHAttr(**{"dgid": rp.choose_gid(context).gid, **field}))


def test_gid_of_an_address_is_16_bytes_or_text_too(connect, context):
    """The address handle leads where a GID's does."""
    pair = connect(QPType.UD)
    gid = pair.b.endpoint().gid
    for given in (bytes(gid), bytearray(gid), memoryview(gid), str(gid), gid):
        attr = rp.AHAttr(dgid=given, sgid_index=pair.a.gid.index)
        assert attr == rp.AHAttr(dgid=gid, sgid_index=pair.a.gid.index)
        assert type(attr.dgid) is rp.GID
        with rp.AH(pair.a.pd, attr) as ah:
            assert str(ah) == f"AH to {gid}"


def test_address_handle_names_its_peer(pd, context):
    gid = rp.choose_gid(context)
    with rp.AH(pd, rp.AHAttr(dgid=gid.gid, sgid_index=gid.index)) as ah:
        assert str(ah) == f"AH to {gid.gid}"


# ---- the device -------------------------------------------------------------------


def test_device_is_in_the_list(context):
    (info,) = [info for info in rp.list_devices() if info.name == context.name]
    assert (info.kind, info.guid) == (context.kind, context.guid)
    assert context.attr.node_guid == context.guid


def test_device_attributes_make_sense(context):
    attr = context.attr
    assert attr.max_qp > 0
    assert attr.max_sge > 0
    assert attr.max_cqe > 0
    assert attr.phys_port_cnt >= 1
    port = context.query_port(1)
    assert port.state is rp.PortState.ACTIVE
    assert port.active_mtu <= port.max_mtu
    assert port.max_msg_sz > 0
    # Full membership of the default partition.
    assert context.query_pkey(1, 0) == 0xFFFF


def test_gid_table_has_no_empty_entries(context):
    table = context.query_gid_table(1)
    assert table
    assert all(any(entry.gid) for entry in table)
    assert len({entry.index for entry in table}) == len(table)


def test_device_that_is_not_there_names_those_that_are(context):
    with pytest.raises(rp.NoDeviceError, match="there is no RDMA device nosuch0"):
        rp.open_device("nosuch0")


def test_device_can_be_opened_twice(context):
    with rp.open_device(context.name) as other:
        assert other.guid == context.guid
        with rp.PD(other):
            pass

"""ibv_modify_qp: the steps between states, and the attributes that each needs and takes."""

from __future__ import annotations

import errno
from decimal import Decimal
from fractions import Fraction

import pytest
from support import needs, null_device

import rdmapost as rp
from rdmapost import QPState, QPType


def test_modify_without_a_required_attribute_names_it(connect):
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


def test_unchecked_modify_leaves_only_the_transition_to_the_driver(connect):
    """docs/guides/drivers.md says how."""
    qp = connect(checked=False).a
    rts = {"qp_state": QPState.RTS, "cur_qp_state": QPState.RTR}
    timers = {"timeout": 14, "retry_cnt": 1, "rnr_retry": 1, "max_rd_atomic": 1}
    with pytest.raises(ValueError, match="RTR to RTS also needs sq_psn"):
        qp.modify(**rts, **timers)
    with pytest.raises(ValueError, match=r"retry_cnt=8 is not in 0\.\.7"):
        qp.modify(**rts, **{**timers, "sq_psn": 0, "retry_cnt": 8})
    with pytest.raises(ValueError, match="cannot go from RTS to RTR"):
        qp.modify(qp_state=QPState.RTR)


def test_state_transition_that_does_not_exist_is_refused(connect):
    qp = connect(to=QPState.RESET).a
    with pytest.raises(ValueError, match=r"cannot go from RESET to RTS; .* ERR, INIT, RESET"):
        qp.modify(qp_state=QPState.RTS)
    assert qp.state is QPState.RESET


@pytest.mark.parametrize(
    ("attrs", "error", "words"),
    [
        ({"qp_color": 1}, TypeError, "unexpected keyword argument .qp_color"),
        ({"qp_state": 99}, ValueError, "^qp_state=99 is not a valid QPState$"),
        ({"qp_state": -1}, ValueError, "^qp_state=-1 is not a valid QPState$"),
        ({"cur_qp_state": 1 << 40}, ValueError, "is not a valid QPState$"),
        ({"path_mig_state": -1}, ValueError, "^path_mig_state=-1 is not a valid MigState$"),
        ({"qp_state": "RTS"}, TypeError, "qp_state: expected QPState, got str"),
        ({"port_num": 1.0}, TypeError, "port_num: expected int, got float"),
        ({"timeout": 256}, ValueError, "timeout=256 is not in 0..31"),
        ({"qkey": -1}, ValueError, r"qkey=-1 is not in 0..2\^32-1$"),
        ({"pkey_index": 1 << 16}, ValueError, r"pkey_index=65536 is not in 0..2\^16-1$"),
        ({"rq_psn": -1}, ValueError, "rq_psn=-1 is not in 0..16777215"),
        ({"ah_attr": 5}, TypeError, "ah_attr: expected AHAttr, got int"),
        ({"port_num": rp.AHAttr()}, TypeError, "port_num: expected int, got AHAttr"),
        ({"ah_attr": rp.AHAttr(sl=256)}, ValueError, "sl=256 is not in 0..15"),
    ],
)
def test_modify_attribute_that_is_none_is_named(rc, attrs, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        rc.a.modify(**attrs)
    rc.works()


@pytest.mark.parametrize("wrong", [Decimal("0.01"), Fraction(1, 100), 0.5], ids=repr)
def test_option_of_a_state_transition_must_be_a_whole_number(connect, wrong):
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


@pytest.mark.parametrize("access", [-1, 1 << 10, 1 << 31, 1 << 64])
def test_access_flags_of_a_state_transition_may_have_no_unknown_bits(connect, access):
    pair = connect(to=QPState.RESET)
    with pytest.raises(ValueError, match=f"^access={access:#x} is not a combination of Access"):
        pair.a.connect(pair.b.endpoint(), access=access)


@pytest.mark.parametrize(
    ("name", "value"), [("min_rnr_timer", 32), ("timeout", 32), ("retry_cnt", 8), ("rnr_retry", 8)]
)
def test_modify_attribute_out_of_range_is_named(connect, name, value):
    pair = connect(QPType.RC, to=QPState.RESET)
    with pytest.raises(ValueError, match=rf"^{name}={value} is not in 0\.\.\d+ \(ibv_modify_qp"):
        pair.a.connect(pair.b.endpoint(), **{name: value})
    pair.connect()
    pair.works()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("path_mtu", 0),
        ("path_mtu", 6),
        ("dest_qp_num", 1 << 24),
        ("rq_psn", 1 << 24),
        ("alt_timeout", 32),
    ],
)
def test_modify_attribute_out_of_range_is_refused_before_the_device_sees_it(connect, name, value):
    pair = connect(QPType.RC, to=QPState.RESET)
    pair.a.to_init()
    attrs = {"path_mtu": 1, "dest_qp_num": 1, "rq_psn": 0, name: value}
    path = pair.a.path_to(pair.b.endpoint())
    with pytest.raises(ValueError, match=rf"^{name}={value} is not in "):
        pair.a.modify(
            qp_state=QPState.RTR, ah_attr=path, min_rnr_timer=1, max_dest_rd_atomic=1, **attrs
        )
    assert pair.a.state is QPState.INIT


@pytest.mark.parametrize("name", ["max_dest_rd_atomic", "max_rd_atomic"])
def test_modify_attribute_beyond_the_devices_limit_is_named(connect, context, name):
    """If the device just returns EINVAL."""
    looks = context.kind == "soft" or name == "max_rd_atomic"
    needs(looks, f"check of {name}", context)
    pair = connect(QPType.RC, to=QPState.RESET)
    with pytest.raises(
        rp.VerbsError, match=rf"EINVAL.*{name}=255 is not in 0\.\.\d+, the device's"
    ):
        pair.a.connect(pair.b.endpoint(), **{name: 255})
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
def test_attribute_that_a_state_transition_cannot_change_is_named(rc, context, attrs, words):
    looks = context.kind == "soft" or "qp_state" in attrs
    needs(looks, "check of attributes given without a state", context)
    with pytest.raises(rp.VerbsError, match=rf"EINVAL.*: {words} "):
        rc.a.modify(**attrs)
    rc.works()


null = null_device.null
on_null = null_device.on_null


def test_refused_state_change_says_which_and_why(on_null):
    code = """
    context, pd, cq = resources()
    qp = rp.QP(pd, rp.QPType.RC, cq)
    print(said(qp.to_init))
    """
    text = on_null(code, NULL_REFUSES="ibv_modify_qp=22")
    assert text.endswith("the QP stays in RESET and does not go to INIT")
    text = on_null(code, NULL_REFUSES="ibv_modify_qp=22", NULL_PORT_STATE="1")
    assert text.endswith("port 1 is DOWN; bring the link up")


def _to_rtr(qp, gid, **changed):
    path = rp.AHAttr(dgid=gid.gid, sgid_index=gid.gid_index)
    attrs = {"ah_attr": path, "dest_qp_num": qp.qp_num, "rq_psn": 0, "path_mtu": rp.MTU.MTU_256}
    attrs |= {"max_dest_rd_atomic": 1, "min_rnr_timer": 12}
    alternate = {"alt_port_num": 1, "alt_pkey_index": 0, "alt_timeout": 14, "alt_ah_attr": path}
    if any(name.startswith("alt_") for name in changed):
        attrs |= alternate
    qp.modify(qp_state=QPState.RTR, **attrs | changed)


def test_wrong_current_state_is_named(rc):
    # Soft-RoCE in Linux 6.12 takes its word for it.
    needs(rc.a.context.kind == "soft", "check of the current state", rc.a.context)
    with pytest.raises(rp.VerbsError, match="cur_qp_state=INIT, but the QP is in RTS") as caught:
        rc.a.modify(cur_qp_state=QPState.INIT)
    assert caught.value.errno == errno.EINVAL
    rc.works()


def test_path_migration_is_refused_where_there_are_no_alternate_paths(rc):
    needs(rc.a.context.kind == "soft", "refusal of a path migration", rc.a.context)
    with pytest.raises(rp.VerbsError, match="has no alternate paths"):
        rc.a.modify(path_mig_state=rp.MigState.ARMED)
    rc.works()


def test_en_sqd_async_notify_must_be_a_bool(connect):
    with pytest.raises(TypeError, match="en_sqd_async_notify: expected bool, got int"):
        connect().a.modify(qp_state=QPState.SQD, en_sqd_async_notify=1)


@pytest.mark.parametrize("path", ["ah_attr", "alt_ah_attr"])
def test_path_from_a_missing_gid_or_port_is_refused(connect, context, path):
    """It is refused before it does harm: another path can be set."""
    qp = connect(to=QPState.RESET).a
    qp.to_init()
    gid, length = context.choose_gid(), context.query_port(1).gid_tbl_len
    words = (
        f"^sgid_index=200 is not in 0..{length - 1}, the GID table of {context.name} port 1$"
        if length <= 200
        else f"^{context.name} port 1 has no GID with index 200; the valid ones are: .*0"
    )
    with pytest.raises(ValueError, match=words):
        _to_rtr(qp, gid, **{path: rp.AHAttr(dgid=gid.gid, sgid_index=200)})
    with pytest.raises(ValueError, match=f"^{context.name} has no port 9"):
        _to_rtr(qp, gid, **{path: rp.AHAttr(port_num=9, dgid=gid.gid)})
    assert qp.state is QPState.INIT
    _to_rtr(qp, gid)


def test_missing_pkey_or_port_is_refused(connect, context):
    """Also where the device would say no more than EINVAL."""
    qp = connect(to=QPState.RESET).a
    length, gid = context.query_port(1).pkey_tbl_len, context.choose_gid()
    words = f"={length} is not in 0..{length - 1}, the P_Key table of {context.name} port 1$"
    with pytest.raises(ValueError, match=f"^pkey_index{words}"):
        qp.to_init(pkey_index=length)
    with pytest.raises(ValueError, match=f"^{context.name} has no port 9"):
        qp.modify(qp_state=QPState.INIT, port_num=9, pkey_index=0, qp_access_flags=0)
    assert qp.state is QPState.RESET
    qp.to_init()
    with pytest.raises(ValueError, match=f"^alt_pkey_index{words}"):
        _to_rtr(qp, gid, alt_pkey_index=length)
    with pytest.raises(ValueError, match=f"^{context.name} has no port 9"):
        _to_rtr(qp, gid, alt_port_num=9)
    assert qp.state is QPState.INIT

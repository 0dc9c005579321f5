"""Queue pairs (QP): creating them, their limits, and using them when closed."""

from __future__ import annotations

import pytest
from support import null_device

import rdmapost as rp
from rdmapost import QPState, QPType


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
def test_queue_pair_limit_of_the_device_that_was_exceeded_is_named(pd, cq, context, name):
    limit = context.attr.max_qp_wr if name.endswith("wr") else context.attr.max_sge
    with pytest.raises(
        rp.VerbsError, match=f"{name}={limit + 1} is more than the device's max_.*={limit}$"
    ):
        rp.QP(pd, QPType.RC, cq, **{name: limit + 1})


@pytest.mark.parametrize("value", [-1, 1 << 32])
@pytest.mark.parametrize("name", ["max_send_wr", "max_recv_sge", "max_inline_data"])
def test_queue_pair_argument_that_does_not_fit_is_named(pd, cq, name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        rp.QP(pd, QPType.RC, cq, **{name: value})


def test_max_inline_data_beyond_the_device_is_named(pd, cq):
    with pytest.raises(rp.VerbsError, match="max_inline_data=1000000 may be more than"):
        rp.QP(pd, QPType.RC, cq, max_inline_data=1_000_000)


@pytest.mark.parametrize("port_num", [0, -1, 2, 255, 300])
def test_queue_pair_on_a_port_that_does_not_exist_names_the_port(pd, cq, context, port_num):
    if port_num <= context.attr.phys_port_cnt and port_num > 0:
        pytest.skip(f"{context.name} has a port {port_num}")
    with pytest.raises(ValueError, match=f"{context.name} has no port {port_num}"):
        rp.QP(pd, QPType.RC, cq, port_num=port_num)


def test_cq_of_another_open_device_is_refused(pd, context):
    with (
        rp.open_device(context.name) as other,
        rp.CQ(other) as cq,
        pytest.raises(ValueError, match="different open devices"),
    ):
        rp.QP(pd, QPType.RC, cq)


def test_queue_pair_on_closed_parents_is_refused(pd, cq, context):
    other = rp.PD(context)
    other.close()
    with pytest.raises(rp.ClosedError, match="PD is closed"):
        rp.QP(other, QPType.RC, cq)
    gone = rp.CQ(context)
    gone.close()
    with pytest.raises(rp.ClosedError, match=r"CQ .* is closed"):
        rp.QP(pd, QPType.RC, gone)


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


null = null_device.null
on_null = null_device.on_null


def test_queue_pair_that_cannot_be_created_says_which_sizes_may_be_too_large(on_null):
    text = on_null(
        """
        context, pd, cq = resources()
        print(said(lambda: rp.QP(pd, rp.QPType.RC, cq, max_send_sge=64)))
        print(said(lambda: rp.QP(pd, rp.QPType.RC, cq, max_inline_data=4096)))
        print(said(lambda: rp.QP(pd, rp.QPType.UD, cq, max_tso_header=64, checked=False)))
        print(said(lambda: rp.QP(pd, rp.QPType.RAW_PACKET, cq)))
        flush = rp.SendOps.FLUSH
        print(said(lambda: rp.QP(pd, rp.QPType.RC, cq, send_ops_flags=flush, checked=False)))
        """,
        NULL_REFUSES="ibv_create_qp=22",
    )
    sges, inline, tso, kind, flush = text.splitlines()
    assert flush.endswith("send_ops_flags=FLUSH: null0 has no FLUSH")
    assert sges.endswith("max_send_sge=64 is more than the device's max_sge=32")
    assert "max_inline_data=4096 may be more than null0 can take; " in inline
    assert inline.endswith("in Python, rdmapost.max_inline() finds the largest")
    assert tso.endswith("max_tso_header=64, but null0 may have no TSO")
    assert "null0 may not have RAW_PACKET queue pairs, or no more of them (max_qp=" in kind


def test_raw_packet_queue_pair_without_its_capability_names_cap_net_raw(on_null):
    """By the queue pair itself, by the loopback pair, and by the checks."""
    said = on_null(
        """
        from rdmapost.check import run_checks
        from rdmapost.loopback import Loopback
        context, pd, cq = resources()
        print(said(lambda: rp.QP(pd, rp.QPType.RAW_PACKET, cq, max_inline_data=64)))
        print(said(lambda: Loopback(context, rp.QPType.RAW_PACKET)))
        print(*{r.detail for r in run_checks(context) if r.qp_type == "RAW_PACKET"})
        """,
        NULL_REFUSES="ibv_create_qp=1",
    )
    why = "RAW_PACKET queue pairs need CAP_NET_RAW: run as root"
    alone, pair, checks = said.splitlines()
    assert alone == f"VerbsError: ibv_create_qp: EPERM (1, Operation not permitted): {why}"
    assert pair == alone
    assert checks == why


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_queue_pair_for_segmentation_that_the_device_lacks_is_refused(checked):
    """Unchecked, the driver decides: this one fails the work requests."""
    with rp.open_device("roce:127.0.0.79") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
        options = {"max_tso_header": 64, "checked": checked}
        if checked:
            words = (
                r"max_tso_header=64: .* has no TSO on UD \(see its attr.tso_caps\); checked=False"
            )
            with pytest.raises(rp.UnsupportedError, match=words):
                rp.QP(pd, rp.QPType.UD, cq, **options)
        else:
            rp.QP(pd, rp.QPType.UD, cq, **options).close()

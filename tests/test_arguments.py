"""An argument of the wrong type is refused by name, by every resource."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

import rdmapost as rp
from rdmapost import QPType, connect
from rdmapost.pingpong import Pingpong

Make = Callable[[rp.Context, rp.PD, rp.CQ], Any]

WRONG: dict[str, tuple[Make, str]] = {
    "PD(None)": (
        lambda context, pd, cq: rp.PD(None),
        "context: expected Context, got NoneType",
    ),
    "PD of a PD": (lambda context, pd, cq: rp.PD(pd), "context: expected Context, got PD"),
    "PD of a name": (lambda context, pd, cq: rp.PD("soft0"), "context: expected Context, got str"),
    "MR": (lambda context, pd, cq: rp.MR(context, 64), "pd: expected PD, got Context"),
    "MW": (lambda context, pd, cq: rp.MW(cq), "pd: expected PD, got CQ"),
    "AH without a PD": (lambda context, pd, cq: rp.AH(cq, rp.AHAttr()), "pd: expected PD, got CQ"),
    "AH of a GID": (
        lambda context, pd, cq: rp.AH(pd, rp.GID("::1")),
        "attr: expected AHAttr, got GID",
    ),
    "XRCD": (lambda context, pd, cq: rp.XRCD(pd), "context: expected Context, got PD"),
    "CompChannel": (
        lambda context, pd, cq: rp.CompChannel(cq),
        "context: expected Context, got CQ",
    ),
    "CQ": (lambda context, pd, cq: rp.CQ(pd), "context: expected Context, got PD"),
    "CQ with a CQ for a channel": (
        lambda context, pd, cq: rp.CQ(context, channel=cq),
        "channel: expected CompChannel or None, got CQ",
    ),
    "SRQ": (lambda context, pd, cq: rp.SRQ(context), "pd: expected PD, got Context"),
    "SRQ with a PD for an XRCD": (
        lambda context, pd, cq: rp.SRQ(pd, srq_type=rp.SRQType.XRC, xrcd=pd, cq=cq),
        "xrcd: expected XRCD or None, got PD",
    ),
    "SRQ with a number for a CQ": (
        lambda context, pd, cq: rp.SRQ(pd, srq_type=rp.SRQType.TM, cq=128),
        "cq: expected CQ or None, got int",
    ),
    "QP without a PD": (
        lambda context, pd, cq: rp.QP(None, QPType.RC, cq),
        "pd: expected PD, got NoneType",
    ),
    "QP without a CQ": (
        lambda context, pd, cq: rp.QP(pd, QPType.RC, None),
        "send_cq: expected CQ, got NoneType",
    ),
    "QP with a PD for a recv_cq": (
        lambda context, pd, cq: rp.QP(pd, QPType.RC, cq, pd),
        "recv_cq: expected CQ or None, got PD",
    ),
    "QP with a CQ for an SRQ": (
        lambda context, pd, cq: rp.QP(pd, QPType.RC, cq, srq=cq),
        "srq: expected SRQ or None, got CQ",
    ),
    "QP with a file for an XRCD": (
        lambda context, pd, cq: rp.QP(pd, QPType.XRC_RECV, cq, xrcd=3),
        "xrcd: expected XRCD or None, got int",
    ),
    "device by number": (
        lambda context, pd, cq: rp.open_device(0),
        "name: expected str or None, got int",
    ),
    "GID of a truth": (
        lambda context, pd, cq: rp.GID(True),
        "value: expected bytes or str or bytearray or memoryview, got bool",
    ),
    "P_Key by a float": (
        lambda context, pd, cq: context.query_pkey(1, 0.0),
        "index: expected int, got float",
    ),
    "serve on no host": (
        lambda context, pd, cq: connect.serve(context, None, 0),
        "host: expected str, got NoneType",
    ),
    "serve on a port in text": (
        lambda context, pd, cq: connect.serve(context, port="18600"),
        "port: expected int, got str",
    ),
    "serve with a number for a token": (
        lambda context, pd, cq: connect.serve(context, port=0, token=5),
        "token: expected str or None, got int",
    ),
    "serve a size in a float": (
        lambda context, pd, cq: connect.serve(context, port=0, size=4096.0),
        "size: expected int, got float",
    ),
    "dial no host": (
        lambda context, pd, cq: connect.dial(context, None),
        "host: expected str, got NoneType",
    ),
    "dial a port in text": (
        lambda context, pd, cq: connect.dial(context, port="18600"),
        "port: expected int, got str",
    ),
    "pingpong of a size in a float": (
        lambda context, pd, cq: Pingpong(context, size=64.0),
        "size: expected int, got float",
    ),
}


@pytest.mark.parametrize("make", WRONG)
def test_argument_of_the_wrong_type_is_named(make: str, context, pd, cq) -> None:
    call, words = WRONG[make]
    with pytest.raises(TypeError) as caught:
        call(context, pd, cq)
    assert str(caught.value) == words


def test_empty_name_is_no_device() -> None:
    """Nor is it the choice of one, as None is."""
    with pytest.raises(rp.NoDeviceError, match="there is no RDMA device ''"):
        rp.open_device("")


def test_server_needs_a_host_and_a_port(context) -> None:
    for call in (connect.serve, connect.dial):
        with pytest.raises(ValueError, match="host: expected a name or an address, got ''"):
            call(context, "")
        with pytest.raises(ValueError, match=r"port=65536 is not in [01]\.\.65535"):
            call(context, port=65536)
    with pytest.raises(ValueError, match=r"port=0 is not in 1\.\.65535"):
        connect.dial(context, port=0)


def test_class_of_a_resource_is_not_a_resource(context) -> None:
    with pytest.raises(TypeError, match="context: expected Context, got type"):
        rp.PD(type(context))


def test_object_that_claims_to_be_a_resource_is_none(context) -> None:
    """It says so by __class__, as proxies and mocks do."""

    class Pretender:
        __class__ = rp.PD  # type: ignore[assignment]

    with pytest.raises(TypeError, match="pd: expected PD, got Pretender"):
        rp.MR(Pretender(), 64)


def test_resource_of_a_derived_class_is_taken(context) -> None:
    class MyPD(rp.PD):
        pass

    with MyPD(context) as pd, rp.MR(pd, 64) as mr:
        assert mr.pd is pd


def test_timeout_of_a_connection_that_is_no_number_of_seconds_is_named(context) -> None:
    wrong = datetime.timedelta(seconds=1)
    for call in (
        lambda: connect.dial(context, "127.0.0.1", 1, timeout=wrong),
        lambda: connect.serve(context, timeout=wrong),
    ):
        with pytest.raises(TypeError, match="timeout: expected seconds or None, got timedelta"):
            call()
    with pytest.raises(TypeError, match="idle_timeout: expected seconds or None, got str"):
        connect.serve(context, idle_timeout="1")
    for out_of_range in (0, -1, float("inf")):
        with pytest.raises(ValueError, match="is not a time of more than 0 s"):
            connect.dial(context, "127.0.0.1", 1, timeout=out_of_range)

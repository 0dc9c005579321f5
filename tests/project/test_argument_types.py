"""An argument of the wrong type is refused by name, by every resource."""

from __future__ import annotations

import asyncio
import datetime
import mmap
from array import array
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from support import needs

import rdmapost as rp
from rdmapost import QPType, connect
from rdmapost.loopback import Loopback
from rdmapost.pingpong import Pingpong

Make = Callable[[rp.Context, rp.PD, rp.CQ], Any]

WRONG: dict[str, tuple[Make, str]] = {
    "PD(None)": (lambda context, pd, cq: rp.PD(None), "context: expected Context, got NoneType"),
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
    "SRQ that is checked or not": (
        lambda context, pd, cq: rp.SRQ(pd, checked=None),
        "checked: expected bool, got NoneType",
    ),
    "CQ that is notified or not": (
        lambda context, pd, cq: cq.req_notify(1),
        "solicited_only: expected bool, got int",
    ),
    "Pingpong that validates or not": (
        lambda context, pd, cq: Pingpong(context, validate="no"),
        "validate: expected bool, got str",
    ),
    "Pingpong that sleeps or not": (
        lambda context, pd, cq: Pingpong(context, events=1),
        "events: expected bool, got int",
    ),
    "faults of packets that are sent or not": (
        lambda context, pd, cq: rp.open_device("soft0").faults.packets(sent=1),
        "sent: expected bool, got int",
    ),
    "faults of packets that are received or not": (
        lambda context, pd, cq: rp.open_device("soft0").faults.packets(received=None),
        "received: expected bool, got NoneType",
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
        lambda context, pd, cq: rp.QP(None, QPType.XRC_RECV, xrcd=3),
        "xrcd: expected XRCD or None, got int",
    ),
    "device by number": (
        lambda context, pd, cq: rp.open_device(0),
        "name: expected str or None, got int",
    ),
    "GID of a truth": (
        lambda context, pd, cq: rp.GID(True),
        "value: expected GID or bytes or str or bytearray or memoryview, got bool",
    ),
    "device by bytes": (
        lambda context, pd, cq: rp.open_device(b"x"),
        "name: expected str or None, got bytes",
    ),
    "QP of a type in text": (
        lambda context, pd, cq: rp.QP(pd, "RC", cq),
        "qp_type: expected QPType, got str",
    ),
    "QP of a type in a float": (
        lambda context, pd, cq: rp.QP(pd, 2.0, cq),
        "qp_type: expected QPType, got float",
    ),
    "MW of a type in a float": (
        lambda context, pd, cq: rp.MW(pd, 1.0),
        "mw_type: expected MWType, got float",
    ),
    "SRQ of a type in text": (
        lambda context, pd, cq: rp.SRQ(pd, srq_type="TM"),
        "srq_type: expected SRQType, got str",
    ),
    "endpoint with an MTU in a float": (
        lambda context, pd, cq: rp.Endpoint(1, 2, rp.GID("::1"), 0, 3.0),
        "mtu: expected MTU, got float",
    ),
    "endpoint with a number for a GID": (
        lambda context, pd, cq: rp.Endpoint(1, 2, 3, 0, rp.MTU.MTU_1024),
        "gid: expected GID or bytes or str or bytearray or memoryview, got int",
    ),
    "wait for half a completion": (
        lambda context, pd, cq: cq.wait(0.5),
        "count: expected int, got float",
    ),
    "wait for an array of seconds": (
        lambda context, pd, cq: cq.wait(timeout=pytest.importorskip("numpy").arange(2.0)),
        "timeout: expected seconds or None, got ndarray",
    ),
    "poll into a number": (
        lambda context, pd, cq: cq.poll_into(5),
        "buffer: expected a writable buffer, got int",
    ),
    "wait into bytes": (
        lambda context, pd, cq: cq.wait_into(bytes(48)),
        "buffer: expected a writable buffer, got bytes, which is read-only",
    ),
    "poll half a completion": (
        lambda context, pd, cq: cq.poll(Fraction(1, 2)),
        "max_entries: expected int, got Fraction",
    ),
    "P_Key by a float": (
        lambda context, pd, cq: context.query_pkey(1, 0.0),
        "pkey_index: expected int, got float",
    ),
    "serve on a PD": (
        lambda context, pd, cq: connect.serve(pd, port=0),
        "context: expected Context, got PD",
    ),
    "dial from nothing": (
        lambda context, pd, cq: connect.dial(None),
        "context: expected Context, got NoneType",
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
    "pingpong on nothing": (
        lambda context, pd, cq: Pingpong(None),
        "context: expected Context, got NoneType",
    ),
    "pingpong of a type in text": (
        lambda context, pd, cq: Pingpong(context, "RC"),
        "qp_type: expected QPType, got str",
    ),
    "pingpong with an MTU in a float": (
        lambda context, pd, cq: Pingpong(context, mtu=3.0),
        "mtu: expected MTU, got float",
    ),
}


@pytest.mark.parametrize("make", WRONG)
def test_argument_of_the_wrong_type_is_named(make: str, context, pd, cq) -> None:
    call, words = WRONG[make]
    with pytest.raises(TypeError) as caught:
        call(context, pd, cq)
    assert str(caught.value) == words


U32, U64 = 1 << 32, 1 << 64
NOT_WHOLE: list[Any] = [0.5, 1.0, Decimal(1), Fraction(5, 2), "1", b"1", [1]]
SERVED: list[tuple[str, list[Any], str, list[Any]]] = [
    ("context", [None, "soft0", 5], "expected Context", []),
    ("host", [b"127.0.0.1", 5], "expected str", [""]),
    ("port", [*NOT_WHOLE, None], "expected int", [-1, 65536, U64]),
    ("timeout", ["1", None, [1]], "expected seconds", [0, -1, float("inf"), 1e300]),
    (
        "token",
        [b"x", range(3), ["a", "b"], ("a",), memoryview(b"ab"), 12],
        "expected str or None",
        ["", "x" * 257],
    ),
    ("port_num", [*NOT_WHOLE, None], "expected int", [0, 9, U64]),
    ("gid_index", NOT_WHOLE, "expected int", []),
    ("mr", ["x", 5, b"x"], "expected MR or None", []),
    ("srq", ["x", 5], "expected SRQ or None", []),
    ("cq", ["x", 5], "expected CQ or None", []),
    ("qp_options", ["x", 5, [("timeout", 1)]], "expected a dict", [{"no_such": 1}]),
    ("private_data", ["text", 5, None, [1]], "expected bytes", [bytes(257)]),
]
"""Of serve() and dial(): the argument, values of wrong types, and values out of range."""
SERVE = [
    *SERVED,
    ("size", NOT_WHOLE, "expected int", [0, -1, (1 << 40) + 1, U64]),
    ("count", NOT_WHOLE, "expected int", [-1, 16385, U64]),
    ("receive_size", NOT_WHOLE, "expected int", [-1, (1 << 31) + 1, U64]),
    (
        "access",
        NOT_WHOLE,
        "expected int",
        [-1, -2, -1 << 31, 1, 16, 1 << 31, U64, 1 << 200, -1 << 200],
    ),
    ("data", [[1, 2], {7}, range(3), "text", 5, None, [300], {}], "expected bytes", [bytes(4097)]),
    ("shared", [1, None, "no"], "expected bool", []),
    ("max_clients", [*NOT_WHOLE, None], "expected int", [0, 65537, U64]),
    ("idle_timeout", ["1", [1]], "expected seconds", [0, -1, float("inf")]),
    ("on_event", ["x", 5], "expected a callable or None", []),
    ("on_connect", ["x", 5], "expected a callable or None", []),
]
DIAL = [
    *SERVED,
    ("qp_type", ["RC", 2.0, None, Decimal(2)], "expected QPType", [0, 99, U64, QPType.XRC_SEND]),
    ("local_size", NOT_WHOLE, "expected int", [-1]),
    ("local_access", NOT_WHOLE, "expected int", [-1, 1 << 10, 1 << 31, U64, -1 << 200]),
    ("depth", [*NOT_WHOLE, None, Decimal("NaN")], "expected int", [0, -1, 1 << 31, U32, U64]),
    ("max_inline_data", [*NOT_WHOLE, None], "expected int", [-1, U32, U64]),
]


async def in_a_loop(call: Callable[..., Any], *args: Any, **options: Any) -> None:
    await call(*args, **options)


def started(call: Any, context: rp.Context, options: dict[str, Any]) -> None:
    """Call serve, dial or one of their asyncio versions."""
    options = {"context": context, **options}
    if call in (connect.aserve, connect.adial):
        asyncio.run(in_a_loop(call, **options))
    else:
        call(**options)


def refuses(
    call: Any, context: Any, port: int, name: str, others: list[Any], words: str, beyond: list[Any]
) -> None:
    """Check that it refuses values of other types, and those that are out of range, by name."""
    for wrong in others:
        with pytest.raises(TypeError, match=f"^{name}: {words}.*, got {type(wrong).__name__}$"):
            started(call, context, {"port": port, name: wrong})
    for wrong in beyond:
        said = "queue pairs are not supported" if wrong is QPType.XRC_SEND else name
        with pytest.raises(ValueError, match=said.replace("port_num", "port")):
            started(call, context, {"port": port, name: wrong})


@pytest.mark.parametrize("call", [connect.serve, connect.aserve], ids=lambda call: call.__name__)
@pytest.mark.parametrize(("name", "others", "words", "beyond"), SERVE, ids=[s[0] for s in SERVE])
def test_serve_checks_each_argument_at_the_call(
    context, call: Any, name: str, others: list[Any], words: str, beyond: list[Any]
) -> None:
    refuses(call, context, 0, name, others, words, beyond)


@pytest.mark.parametrize("call", [connect.dial, connect.adial], ids=lambda call: call.__name__)
@pytest.mark.parametrize(("name", "others", "words", "beyond"), DIAL, ids=[d[0] for d in DIAL])
def test_dial_checks_each_argument_at_the_call(
    context, call: Any, name: str, others: list[Any], words: str, beyond: list[Any]
) -> None:
    """Before it looks for a server."""
    refuses(call, context, 1, name, others, words, beyond)


def test_integer_is_accepted_as_a_queue_pair_type(context) -> None:
    with (
        connect.serve(context, port=0) as server,
        connect.dial(context, *server.address, qp_type=int(QPType.UD)) as peer,
    ):
        assert (peer.qp.qp_type, peer.headroom) == (QPType.UD, 40)
        peer.qp.post_send(rp.Send(peer.mr[:5], **peer.address))
        peer.wait()
        arrival = peer.report()
        assert arrival is not None
        assert arrival.byte_len == 5


def test_served_data_may_be_any_buffer(context) -> None:
    pages = mmap.mmap(-1, 4)
    pages[:] = b"\1\2\3\4"
    wide = memoryview(bytearray(b"\1\2\3\4")).cast("H")
    for data in (b"\1\2\3\4", bytearray(b"\1\2\3\4"), pages, wide):
        for shared in (False, True):
            with (
                connect.serve(context, port=0, data=data, shared=shared) as server,
                connect.dial(context, *server.address) as peer,
            ):
                assert peer.look(0, 5).data == b"\1\2\3\4\0"


def test_rkey_of_a_window_must_be_an_integer(context, pd) -> None:
    needs(context.attr.max_mw, "memory windows", context)
    with rp.MW(pd) as mw:
        before = mw.rkey
        for wrong in (Decimal("0.01"), Fraction(1, 100), 0.5, "1", None):
            with pytest.raises(TypeError, match=f"^rkey: expected int, got {type(wrong).__name__}"):
                mw.rkey = wrong
        for number in (-1, U32, U64):
            with pytest.raises(ValueError, match=rf"^rkey={number} is not in 0\.\.2\^32-1"):
                mw.rkey = number
        assert mw.rkey == before


@pytest.mark.parametrize("truth", [None, 0, 1, 1 << 200, Decimal("0.01"), "no", ""], ids=repr)
@pytest.mark.parametrize("flag", ["sq_sig_all", "checked"])
def test_boolean_option_of_another_type_is_refused(pd, cq, flag: str, truth: Any) -> None:
    """checked=None would turn the checks off."""
    with pytest.raises(TypeError, match=f"^{flag}: expected bool, got {type(truth).__name__}$"):
        rp.QP(pd, QPType.RC, cq, **{flag: truth})


def test_empty_device_name_is_refused() -> None:
    """Unlike None, it does not mean any device."""
    with pytest.raises(rp.NoDeviceError, match="there is no RDMA device ''"):
        rp.open_device("")


def test_address_of_a_server_needs_a_host_and_a_port(context) -> None:
    for call in (connect.serve, connect.dial):
        with pytest.raises(ValueError, match="host: expected a name or an address, got ''"):
            call(context, "")
        with pytest.raises(ValueError, match=r"port=65536 is not in [01]\.\.65535"):
            call(context, port=65536)
        with pytest.raises(ValueError, match="includes a port; pass it as port=18600"):
            call(context, "10.0.0.1:18600")
    with pytest.raises(ValueError, match=r"port=0 is not in 1\.\.65535"):
        connect.dial(context, port=0)


def test_class_passed_in_place_of_a_resource_is_refused(context) -> None:
    with pytest.raises(TypeError, match="context: expected Context, got type"):
        rp.PD(type(context))


def test_object_that_claims_to_be_a_resource_is_refused(context) -> None:
    """It claims to be, by __class__, as proxies and mocks do."""

    class Pretender:
        __class__ = rp.PD  # type: ignore[assignment]

    with pytest.raises(TypeError, match="pd: expected PD, got Pretender"):
        rp.MR(Pretender(), 64)


def test_resource_of_a_derived_class_is_accepted(context) -> None:
    class MyPD(rp.PD):
        pass

    with MyPD(context) as pd, rp.MR(pd, 64) as mr:
        assert mr.pd is pd


def test_timeout_that_is_not_a_number_of_seconds_is_named(context) -> None:
    wrong = datetime.timedelta(seconds=1)
    for call in (
        lambda: connect.dial(context, "127.0.0.1", 1, timeout=wrong),
        lambda: connect.serve(context, timeout=wrong),
    ):
        with pytest.raises(TypeError, match="timeout: expected seconds, got timedelta"):
            call()
    with pytest.raises(TypeError, match="idle_timeout: expected seconds or None, got str"):
        connect.serve(context, idle_timeout="1")
    for too_short in (0, -1, float("-inf")):
        with pytest.raises(ValueError, match="expected more than 0 s"):
            connect.dial(context, "127.0.0.1", 1, timeout=too_short)
    for too_long in (1e6 + 1, 1 << 31, float("inf")):
        with pytest.raises(ValueError, match="is more than 1,000,000 s"):
            connect.dial(context, "127.0.0.1", 1, timeout=too_long)


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("qp_state", "QPState"),
        ("cur_qp_state", "QPState"),
        ("path_mtu", "MTU"),
        ("qp_access_flags", "Access"),
        ("port_num", "int"),
    ],
)
def test_attribute_of_the_wrong_type_names_its_enumeration(context, attribute, expected) -> None:
    with rp.PD(context) as pd, rp.CQ(context) as cq, rp.QP(pd, QPType.RC, cq) as qp:
        with pytest.raises(TypeError, match=f"^{attribute}: expected {expected}, got str$"):
            qp.modify(**{attribute: "RTS"})
        assert qp.state is rp.QPState.RESET


@pytest.mark.parametrize("text", ["x", "", "10.0.0.300", "fe80:::1", "1:2:3:4:5:6:7:8:9"])
def test_text_that_is_not_a_gid_is_quoted(text) -> None:
    with pytest.raises(ValueError, match=f"^value: '{text}' is not an IPv6 address$"):
        rp.GID(text)


def test_repr_of_a_resource_names_its_type_once(context) -> None:
    class MyPD(rp.PD):
        pass

    with rp.PD(context) as pd, rp.CQ(context, 16) as cq, rp.QP(pd, QPType.RC, cq) as qp:
        assert repr(pd) == "<rdmapost.PD>"
        assert repr(cq).startswith("<rdmapost.CQ of ")
        assert repr(qp) == f"<rdmapost.QP RC {qp.qp_num:#x}>"
        with MyPD(context) as mine:
            assert repr(mine) == "<rdmapost.MyPD PD>"
    assert repr(pd) == "<rdmapost.PD (closed)>"
    with rp.CompChannel(context) as channel:
        assert repr(channel) == "<rdmapost.CompChannel>"
    assert repr(channel) == "<rdmapost.CompChannel (closed)>"


def test_repr_of_a_batch_says_how_long_it_is(context) -> None:
    with rp.PD(context) as pd, rp.CQ(context) as cq, rp.QP(pd, QPType.RC, cq) as qp:
        with qp.prepare_recv([rp.RecvWR(), rp.RecvWR()]) as batch:
            assert repr(batch) == "<rdmapost.Batch of 2 work requests>"
        assert repr(batch) == "<rdmapost.Batch of 2 work requests (closed)>"


def test_repr_of_a_fault_plan_names_its_device() -> None:
    with rp.open_device("soft0") as context:
        assert repr(context.faults) == "<rdmapost.FaultPlan of soft0>"


def test_repr_of_a_loopback_or_a_pingpong_names_its_queue_pairs(context) -> None:
    with Loopback(context) as pair:
        both = f"{pair.local.qp}, {pair.remote.qp}"
        assert repr(pair) == f"<rdmapost.loopback.Loopback of {both}>"
    assert repr(pair) == f"<rdmapost.loopback.Loopback of {both} (closed)>"
    with Pingpong(context) as one:
        of = f"<rdmapost.pingpong.Pingpong of RC QP {one.local.qp_num:#x}"
        assert repr(one) == f"{of}>"
    assert repr(one) == f"{of} (closed)>"
    assert repr(Pingpong.__new__(Pingpong)) == "<rdmapost.pingpong.Pingpong>"


def test_bool_of_numpy_is_told_from_pythons(context):
    numpy = pytest.importorskip("numpy", minversion="2.0", reason="numpy 2 calls its type bool")
    with (
        rp.CQ(context) as cq,
        pytest.raises(TypeError, match=r"^for_good: expected bool, got numpy\.bool$"),
    ):
        cq.cancel_waits(numpy.bool(True))


def test_integer_too_long_for_python_to_print_is_refused_like_any_other(rc):
    """Python prints no integer of more than 4300 digits."""
    huge = 10**5000
    assert huge.bit_length() == 16610
    with pytest.raises(rp.PostError, match=r"wr_id=\(16610 bits\) is not in 0\.\.2\^64-1"):
        rc.a.post_send(rp.RdmaWrite(rc.mine[:8], wr_id=huge))
    with pytest.raises(rp.PostError, match=r"rkey=\(16610 bits\) is not in"):
        rc.a.post_columns(rp.RdmaWrite, rc.mine.blocks(array("q", [0]), 8), rkey=huge)
    prepared = rc.a.prepare(rp.RdmaWrite(rc.mine[:8]))
    with pytest.raises(ValueError, match=r"wr_id=\(16610 bits\) is not in"):
        prepared[0].wr_id = huge
    with pytest.raises(ValueError, match=r"cqe=\(16610 bits\) is not in"):
        rp.CQ(rc.pd.context, huge)

"""The loopback pair: deadlines, and that everything is released whatever happens."""

from __future__ import annotations

import errno
import os
import traceback
import weakref
from array import array
from typing import Any

import pytest
from support.threads import posting
from support.windows import bind_wr

import rdmapost as rp
from rdmapost import Access, QPType
from rdmapost.explain import explain_lines
from rdmapost.frames import ethernet
from rdmapost.loopback import Loopback
from rdmapost.providers.soft0.provider import SoftProvider
from rdmapost.standard.wire import GRH_BYTES


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD])
def test_loopback_message_arrives_on_every_qp_type(context: rp.Context, qp_type: QPType) -> None:
    with Loopback(context, qp_type, remote_size=64) as pair:
        pair.local.mr.buffer[:3] = b"abc"
        pair.receive(16)
        pair.local.qp.post_send(rp.Send(sg_list=pair.local.mr[:3], **pair.address))
        pair.sent()[0].check()
        (wc,) = pair.arrived()
        assert wc.byte_len == pair.headroom + 3
        assert pair.received(3) == b"abc"
        assert pair.headroom == (GRH_BYTES if qp_type is QPType.UD else 0)


def test_waits_of_a_loopback_share_a_deadline(context: rp.Context) -> None:
    with Loopback(context, timeout=0.1) as pair:
        with pytest.raises(rp.WaitTimeout, match=r"did not complete within 0\.1 s") as caught:
            pair.sent()
        assert str(caught.value) == "the posted work requests did not complete within 0.1 s"
        assert caught.value.__notes__ == ["local.qp.diagnose(remote.qp) says what the two wait for"]
        with pytest.raises(rp.WaitTimeout, match=r"nothing arrived .* within 0\.1 s"):
            pair.arrived()
        assert not pair.settled(b"x")


@pytest.mark.parametrize("error", [False, True], ids=["quiet", "error"])
@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UD])
def test_loopback_closes_with_work_requests_outstanding(
    context: rp.Context, qp_type: QPType, error: bool
) -> None:
    def use() -> None:
        with Loopback(context, qp_type) as pair:
            pair.receive(16, 4)
            kept.append(pair)
            if error:
                raise KeyError("on purpose")

    kept: list[Loopback] = []
    if error:
        with pytest.raises(KeyError):
            use()
    else:
        use()
    (pair,) = kept
    for side in (pair.local, pair.remote):
        assert (side.qp.closed, side.cq.closed, side.mr.closed) == (True, True, True)
    pair.close()


def test_loopback_close_that_one_part_refuses_closes_the_rest_and_can_be_repeated(
    context: rp.Context,
) -> None:
    pair = Loopback(context)
    cq = pair.local.cq
    with rp.PD(context) as pd:
        with rp.QP(pd, QPType.RC, cq), pytest.raises(rp.InUseError, match="closed: RC QP"):
            pair.close()
        for side in (pair.local, pair.remote):
            assert (side.qp.closed, side.mr.closed, side.mr.pd.closed) == (True, True, True)
        assert (cq.closed, pair.remote.cq.closed) == (False, True)
        pair.close()
    assert cq.closed


def test_loopback_close_closes_what_other_code_created_on_its_pd(context: rp.Context) -> None:
    with Loopback(context) as pair:
        region = rp.MR(pair.local.mr.pd, 64)
        pair.local.qp.post_recv(rp.RecvWR(region[:]))
    assert region.closed
    assert region.pd.closed


@pytest.mark.parametrize("side", ["local", "remote"])
def test_thread_that_posts_while_the_loopback_is_closed_is_told_so(
    context: rp.Context, side: str
) -> None:
    for _ in range(20):
        pair = Loopback(context)
        with posting(getattr(pair, side).qp, getattr(pair, side).mr) as raised:
            pair.close()
        assert [type(error) for error in raised] == [rp.ClosedError]


def test_region_of_a_loopback_closed_early_frees_its_memory(context: rp.Context) -> None:
    with Loopback(context) as pair:
        seen = []
        for _ in range(20):
            region = pair.region(64, Access.LOCAL_WRITE)
            seen.append(weakref.ref(region))
            region.close()
        del region
        assert sum(ref() is not None for ref in seen) <= 2


def test_failed_close_of_a_loopback_is_a_note_on_the_error_of_its_block(
    context: rp.Context,
) -> None:
    left: list[rp.QP] = []

    def use(pd: rp.PD) -> None:
        with Loopback(context) as pair:
            left.append(rp.QP(pd, QPType.RC, pair.local.cq))
            raise KeyError("on purpose")

    with rp.PD(context) as pd:
        with pytest.raises(KeyError) as raised:
            use(pd)
        with left.pop() as qp:
            (note,) = raised.value.__notes__
            assert f" cannot be closed: {qp} still open" in note
        qp.send_cq.close()


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"local_size": -5}, ValueError, "local_size=-5"),
        ({"remote_size": "1"}, TypeError, "remote_size: expected int, got str"),
        ({"depth": 0}, ValueError, "depth=0"),
        ({"depth": None}, TypeError, "depth: expected int, got NoneType"),
        ({"qp_type": "RC"}, TypeError, "qp_type: expected"),
        (
            {"qp_type": QPType.XRC_RECV},
            ValueError,
            r"^qp_type: .* RC, .* XRC_SEND \(whose remote side is an XRC_RECV\), got XRC_RECV$",
        ),
        ({"qp_type": QPType.DRIVER}, ValueError, "^qp_type: expected one of RC, .*, got DRIVER$"),
        ({"timeout": float("nan")}, ValueError, "timeout"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": "1"}, TypeError, "timeout"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_wrong_argument_of_loopback_is_named(
    context: rp.Context, wrong: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Loopback(context, **wrong)


def test_loopback_of_an_object_that_is_not_a_context_is_refused() -> None:
    with pytest.raises(TypeError, match="context: expected Context, got NoneType"):
        Loopback(None)  # type: ignore[arg-type]


def test_failed_constructor_of_loopback_closes_everything(context: rp.Context) -> None:
    # Not in the port's GID table, or an entry that is empty.
    missing = "gid_index=99 is not in 0|no GID with index 99"
    with pytest.raises(ValueError, match=missing):
        Loopback(context, gid_index=99)
    with pytest.raises(ValueError, match="no port 99"):
        Loopback(context, port_num=99)
    with rp.open_device(context.name) as again:
        with pytest.raises(ValueError, match=missing):
            Loopback(again, gid_index=99)
        again.close()


@pytest.mark.parametrize("completes", [True, False])
def test_loopback_closes_a_window_before_a_region_that_was_created_later(
    context: rp.Context, completes: bool
) -> None:
    """Both after the bind's completion has been polled and while the bind is outstanding."""
    with Loopback(context) as pair:
        window = pair.window()
        region = pair.region(256, Access.LOCAL_WRITE | Access.MW_BIND)
        pair.remote.qp.post_send(
            rp.BindMW(mw=window, rkey=window.next_rkey(), mr=region, addr=region.addr, length=8)
        )
        if completes:
            pair.remote.cq.wait(1)
    assert window.closed
    assert region.closed


def test_loopback_closed_in_a_forked_child_does_nothing(context: rp.Context) -> None:
    with Loopback(context) as pair:
        pid = os.fork()
        if not pid:
            try:
                pair.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        pair.local.qp.post_send(rp.LocalInv())
        assert pair.local.cq.wait(1)


def test_bound_window_is_closed_with_the_loopback(context: rp.Context) -> None:
    access = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.MW_BIND
    with Loopback(context, access=access) as pair:
        window, region = pair.window(), pair.remote.mr
        pair.remote.qp.post_send(bind_wr(window, region))
        pair.arrived()[0].check()
    assert window.closed
    assert region.closed


# ---- shared receive queues, XRC, raw packets, segments ----------------------------


def make(context: rp.Context, *args: Any, **options: Any) -> Loopback:
    """Make a loopback, or skip if the device reports that it lacks something."""
    try:
        return Loopback(context, *args, **options)
    except rp.UnsupportedError as why:
        pytest.skip(str(why))
    except rp.VerbsError as why:
        if args[:1] != (QPType.RAW_PACKET,):
            raise
        pytest.skip(str(why))


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UD, QPType.XRC_SEND])
def test_message_arrives_through_a_shared_receive_queue(
    context: rp.Context, qp_type: QPType
) -> None:
    with make(context, qp_type, remote_size=128, srq_type=rp.SRQType.BASIC) as pair:
        assert pair.srq is not None
        pair.local.mr.buffer[:3] = b"abc"
        pair.receive(16, 2)
        assert pair.srq.outstanding == 2
        pair.local.qp.post_send(rp.Send(sg_list=pair.local.mr[:3], **pair.address))
        pair.sent()[0].check()
        assert pair.arrived()[0].check().byte_len == pair.headroom + 3
        assert pair.received(3, room=16) == b"abc"
        assert pair.srq.outstanding == 1
        kept = pair.srq
    assert kept.closed


def test_write_and_read_over_xrc_reach_the_remote_memory(context: rp.Context) -> None:
    with make(context, QPType.XRC_SEND) as pair:
        assert pair.remote.qp.qp_type is QPType.XRC_RECV
        pair.local.mr.buffer[:3] = b"abc"
        pair.local.qp.post_send(rp.RdmaWrite(sg_list=pair.local.mr[:3], **pair.target(5)))
        pair.sent()[0].check()
        assert bytes(pair.remote.mr.buffer[4:9]) == b"\0abc\0"


def test_target_on_xrc_includes_the_address(context: rp.Context) -> None:
    with make(context, QPType.XRC_SEND) as pair:
        assert pair.srq is not None
        assert pair.address == {"remote_srqn": pair.srq.srq_num}
        assert pair.target().items() >= pair.address.items()


@pytest.mark.parametrize("qp_type", [QPType.UD, QPType.RAW_PACKET])
def test_target_of_what_cannot_access_remote_memory_is_refused(
    context: rp.Context, qp_type: QPType
) -> None:
    says = rf"{qp_type.name} queue pairs cannot .*: send with \*\*address$"
    with make(context, qp_type) as pair, pytest.raises(ValueError, match=says):
        pair.target()


def test_frame_arrives_on_raw_packet(context: rp.Context) -> None:
    with make(context, QPType.RAW_PACKET, remote_size=128) as pair:
        pair.local.mr.buffer[:64] = frame = ethernet() + bytes(range(50))
        pair.receive(64)
        pair.local.qp.post_send(rp.Send(sg_list=pair.local.mr[:64]))
        pair.sent()[0].check()
        assert pair.arrived()[0].check().byte_len == 64
        assert pair.received(64) == frame


def test_region_is_closed_with_the_loopback(context: rp.Context) -> None:
    with Loopback(context) as pair:
        region = pair.region(64, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
        target = {**pair.target(rkey=region.rkey), "remote_addr": region.addr}
        pair.local.qp.post_send(rp.RdmaWrite(sg_list=pair.local.mr[:8], **target))
        pair.sent()[0].check()
    assert region.closed


@pytest.mark.parametrize(
    "options",
    [
        {"srq_type": rp.SRQType.TM},
        {"qp_type": QPType.XRC_SEND},
        {"qp_type": QPType.UD, "max_tso_header": 64},
    ],
    ids=["tags", "xrc", "tso"],
)
def test_loopback_is_made_or_says_what_the_device_lacks(
    context: rp.Context, options: dict[str, Any]
) -> None:
    why = None
    try:
        Loopback(context, **options).close()
    except rp.UnsupportedError as error:
        why = error
    assert why is None or context.kind != "soft"
    if why is not None:
        assert f" is not supported: {context.name} has no " in str(why)
        assert why.errno == errno.EOPNOTSUPP


def test_traceback_of_a_missing_feature_names_an_error_that_explain_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query = SoftProvider.query_device_ex

    def without_tags(provider: Any, context: Any, attr: Any) -> None:
        query(provider, context, attr)
        attr.tm_caps.max_num_tags = 0

    monkeypatch.setattr(SoftProvider, "query_device_ex", without_tags)
    with rp.open_device("soft0") as soft, pytest.raises(rp.UnsupportedError) as raised:
        Loopback(soft, srq_type=rp.SRQType.TM)
    (line,) = traceback.format_exception_only(raised.value)
    assert line.startswith(
        "rdmapost.UnsupportedError: ibv_create_srq_ex is not supported: soft0 has "
    )
    assert [one.explanation.name for one in explain_lines([line])] == ["UnsupportedError"]


@pytest.mark.parametrize(
    ("use", "error", "said"),
    [
        (lambda pair: pair.cut(pair.local, -4, 2), IndexError, "2 bytes at offset -4 are not wit"),
        (lambda pair: pair.cut(pair.local, -4, 0), IndexError, "offset -4"),
        (lambda pair: pair.cut(pair.local, 8, -2), IndexError, "-2 bytes at offset 8"),
        (lambda pair: pair.cut(pair.local, 5000, 0), IndexError, "offset 5000"),
        (lambda pair: pair.cut(pair.local, 4090, 7), IndexError, "not within MR"),
        (lambda pair: pair.cut(pair, 0, 1), TypeError, "side: expected Side, got Loopback"),
        (lambda pair: pair.received(8, 600), IndexError, "8 bytes at offset 4800"),
        (lambda pair: pair.received(8, 511, 9), IndexError, "8 bytes at offset 4599"),
        (lambda pair: pair.receive(4, -1), ValueError, "count=-1"),
        (lambda pair: pair.receive(4, 1.0), TypeError, "count: expected int, got float"),
        (lambda pair: pair.settled("z"), TypeError, "expected: expected bytes .*, got str"),
        (lambda pair: pair.settled(b"z", 4096), IndexError, "1 byte at offset 4096"),
        (lambda pair: pair.settled(b"z", -1), IndexError, "1 byte at offset -1"),
    ],
)
def test_loopback_range_outside_its_memory_is_refused(
    context: rp.Context, use: Any, error: type[Exception], said: str
) -> None:
    with Loopback(context) as pair, pytest.raises(error, match=said):
        use(pair)


def test_loopback_range_may_touch_both_ends_of_its_memory(context: rp.Context) -> None:
    with Loopback(context) as pair:
        assert pair.cut(pair.local, 4096, 0) == []
        assert pair.cut(pair.local, 4095, 1)[0].length == 1
        assert pair.received(8, 511) == bytes(8)
        assert pair.settled(b"", 4096)
        assert pair.settled(bytes(8), 4088)


def test_loopback_settled_compares_the_bytes_of_a_buffer_of_any_format(context: rp.Context) -> None:
    numbers = array("I", [1, 2, 3])
    with Loopback(context, timeout=0.1) as pair:
        pair.remote.mr.buffer[8:20] = numbers.tobytes()
        assert pair.settled(memoryview(numbers), 8)
        assert pair.settled(memoryview(numbers)[::2], 8) is False
        with pytest.raises(IndexError, match="12 bytes at offset 4088"):
            pair.settled(memoryview(numbers), 4088)


def test_numpy_integers_of_8_bits_do_not_overflow(context: rp.Context) -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    offset, length = numpy.uint8(200), numpy.uint8(100)
    with Loopback(context) as pair:
        pair.remote.mr.buffer[200:300] = bytes(range(100))
        assert pair.target(offset) == pair.target(200)
        assert pair.cut(pair.remote, offset, length) == pair.cut(pair.remote, 200, 100)
        assert pair.settled(bytes(range(100)), offset)
    with pytest.raises(TypeError, match="offset: expected int, got float"):
        pair.target(200.0)  # type: ignore[arg-type]

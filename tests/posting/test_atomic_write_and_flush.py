"""ATOMIC_WRITE and FLUSH, which only ibv_wr_post(3) carries, on QPs with send_ops_flags."""

from __future__ import annotations

import contextlib
import sys
from array import array
from typing import Any

import pytest
from support import ALL, SEND_OP_CAPS, Pair, needs_send_op
from support.posting_tap import NOWHERE, open_tap

import rdmapost as rp
from rdmapost import Access, DeviceCap, FlushLevel, FlushType, QPType, SendOps, WCOpcode, WCStatus
from rdmapost.loopback import Loopback

BOTH = SendOps.FLUSH | SendOps.ATOMIC_WRITE
FLUSHES = Access.FLUSH_GLOBAL | Access.FLUSH_PERSISTENT
VALUE = 0x1122334455667788


@pytest.fixture
def writes(connect: Any, context: rp.Context) -> Pair:
    """A pair that can post an ATOMIC_WRITE."""
    needs_send_op(context, SendOps.ATOMIC_WRITE)
    pair: Pair = connect(send_ops_flags=SendOps.ATOMIC_WRITE)
    return pair


class Flushed:
    """A pair that can post a FLUSH to a region that can be flushed."""

    def __init__(self, pair: Pair, mr: rp.MR) -> None:
        self.pair, self.mr = pair, mr

    def write(self, **fields: Any) -> rp.RdmaWrite:
        return rp.RdmaWrite(
            self.pair.mine[:64], remote_addr=self.mr.addr, rkey=self.mr.rkey, **fields
        )

    def flush(self, **fields: Any) -> rp.Flush:
        fields = {"remote_addr": self.mr.addr, "rkey": self.mr.rkey, "length": 64, **fields}
        return rp.Flush(**fields)

    def ends(self, *wrs: Any) -> WCStatus:
        """Post; return how the last one ends."""
        self.pair.a.post_send(wrs)
        return self.pair.cq.wait(len(wrs), 10)[-1].status


@pytest.fixture
def flushed(connect: Any, context: rp.Context, pd: rp.PD, stack: contextlib.ExitStack) -> Flushed:
    needs_send_op(context, SendOps.FLUSH)
    mr = stack.enter_context(rp.MR(pd, 4096, ALL | Access.FLUSH_GLOBAL))
    access = ALL & ~Access.LOCAL_WRITE | FLUSHES
    return Flushed(connect(send_ops_flags=SendOps.FLUSH, access=access), mr)


def at(mr: rp.MR, offset: int) -> int:
    return int.from_bytes(mr.buffer[offset : offset + 8], sys.byteorder)


def there(pair: Pair, offset: int = 0) -> dict[str, int]:
    return {"remote_addr": pair.theirs.addr + offset, "rkey": pair.theirs.rkey}


# ---- what the device lacks -----------------------------------------------------------


def refuses_what_it_lacks(context: rp.Context, op: SendOps) -> bool:
    """Whether the device lacks an operation, and a queue pair for it is refused."""
    lacking = [one for one in op if not context.attr.device_cap_flags_ex & SEND_OP_CAPS[one]]
    if not lacking:
        return False
    refused = pytest.raises(rp.UnsupportedError)
    with rp.PD(context) as pd, rp.CQ(context) as cq, refused as caught:
        rp.QP(pd, QPType.RC, cq, send_ops_flags=op)
    assert str(caught.value) == (
        f"ibv_create_qp_ex is not supported: send_ops_flags={lacking[0]}: {context.name} has no "
        f"{lacking[0]} (see its attr.device_cap_flags_ex); checked=False leaves it to the driver"
    )
    return True


@pytest.mark.parametrize("op", [SendOps.FLUSH, SendOps.ATOMIC_WRITE, BOTH])
def test_queue_pair_for_an_opcode_that_the_device_lacks_is_refused(context, pd, cq, op):
    """A driver may create it, and then fail every work request."""
    if not refuses_what_it_lacks(context, op):
        with contextlib.suppress(rp.UnsupportedError):
            # The installed libibverbs may lack it, too.
            rp.QP(pd, QPType.RC, cq, send_ops_flags=op).close()


@pytest.mark.parametrize("op", [SendOps.FLUSH, SendOps.ATOMIC_WRITE, BOTH])
def test_software_device_without_flush_and_atomic_write_refuses_a_queue_pair_for_them(
    monkeypatch, op
):
    from rdmapost.providers.soft0.provider import SoftProvider

    query = SoftProvider.query_device_ex

    def query_device_ex(provider: Any, context: Any, attr: Any) -> None:
        query(provider, context, attr)
        attr.device_cap_flags_ex = attr.orig_attr.device_cap_flags

    monkeypatch.setattr(SoftProvider, "query_device_ex", query_device_ex)
    with rp.open_device("soft0") as context:
        assert refuses_what_it_lacks(context, op)
        with rp.PD(context) as pd, rp.CQ(context) as cq:
            rp.QP(pd, QPType.RC, cq, send_ops_flags=op, checked=False).close()


def test_unchecked_queue_pair_for_an_opcode_that_the_device_lacks_is_left_to_the_driver(
    connect, context
):
    refused = None
    try:
        pair = connect(send_ops_flags=SendOps.ATOMIC_WRITE, checked=False)
    except rp.UnsupportedError as error:
        refused = str(error)
    if refused is not None:
        assert "ATOMIC_WRITE needs libibverbs 44 or later" in refused
        return
    pair.a.post_send(rp.AtomicWrite(atomic_wr=VALUE, **there(pair)))
    [done] = pair.cq.wait(1, 10)
    has_it = bool(context.attr.device_cap_flags_ex & DeviceCap.ATOMIC_WRITE)
    assert (done.status is WCStatus.SUCCESS) is has_it


# ---- ATOMIC_WRITE ------------------------------------------------------------------


@pytest.mark.parametrize("value", [VALUE, 0, (1 << 64) - 1, 1 << 63])
def test_atomic_write_writes_8_bytes(writes, value):
    writes.theirs.buffer[:32] = b"\xa5" * 32
    writes.a.post_send(rp.AtomicWrite(atomic_wr=value, wr_id=9, **there(writes, 8)))
    (done,) = writes.wait()
    assert (done.wr_id, done.opcode) == (9, WCOpcode.ATOMIC_WRITE)
    assert at(writes.theirs, 8) == value
    beside = bytes(writes.theirs.buffer[:8]) + bytes(writes.theirs.buffer[16:32])
    assert beside == b"\xa5" * 24
    assert writes.a.outstanding == (0, 0)


def test_list_may_mix_opcodes_of_ibv_post_send_and_of_ibv_wr_calls(writes):
    """In order, whatever it alternates with, and with every wr_id."""
    writes.mine.buffer[:8] = b"12345678"
    wrs: list[Any] = []
    for i in range(12):
        kind = i % 3
        if kind == 2:
            wrs.append(rp.RdmaWrite(writes.mine[:8], wr_id=i, **there(writes, 8 * i)))
        else:
            wrs.append(rp.AtomicWrite(atomic_wr=i, wr_id=i, **there(writes, 8 * i)))
    writes.a.post_send(wrs)
    assert [wc.wr_id for wc in writes.wait(12)] == list(range(12))
    text = int.from_bytes(b"12345678", sys.byteorder)
    found = [at(writes.theirs, 8 * i) for i in range(12)]
    assert found == [text if i % 3 == 2 else i for i in range(12)]


def test_unsignaled_atomic_write_retires_with_the_next_completion(writes):
    writes.a.post_send(rp.AtomicWrite(atomic_wr=1, send_flags=0, **there(writes)))
    assert writes.a.outstanding.send == 1
    writes.a.post_send(rp.AtomicWrite(atomic_wr=2, wr_id=2, **there(writes, 8)))
    assert [wc.wr_id for wc in writes.wait()] == [2]
    assert writes.a.outstanding.send == 0
    assert (at(writes.theirs, 0), at(writes.theirs, 8)) == (1, 2)


def test_atomic_writes_are_prepared_and_changed(writes):
    batch = writes.a.prepare(
        [rp.AtomicWrite(atomic_wr=i, wr_id=i, **there(writes, 8 * i)) for i in range(3)]
    )
    batch[1].atomic_wr = VALUE
    batch.post()
    assert [wc.wr_id for wc in writes.wait(3)] == [0, 1, 2]
    assert [at(writes.theirs, 8 * i) for i in range(3)] == [0, VALUE, 2]


def test_atomic_writes_can_be_posted_from_columns(writes):
    values, where = array("Q", [7, 1 << 63, 9]), array("Q", [16, 0, 8])
    addresses = array("Q", [writes.theirs.addr + offset for offset in where])
    posted = writes.a.post_columns(
        rp.AtomicWrite, remote_addr=addresses, rkey=writes.theirs.rkey, atomic_wr=values
    )
    assert posted == 3
    writes.wait(3)
    assert [at(writes.theirs, offset) for offset in where] == list(values)
    addresses[2] += 4
    with pytest.raises(rp.PostError, match="is not a multiple of 8") as caught:
        writes.a.post_columns(
            rp.AtomicWrite, remote_addr=addresses, rkey=writes.theirs.rkey, atomic_wr=1
        )
    assert (caught.value.call, caught.value.index) == ("ibv_wr_atomic_write", 2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"remote_addr": 4}, "remote_addr=0x4 is not a multiple of 8"),
        ({"atomic_wr": 1 << 64}, r"atomic_wr=18446744073709551616 is not in 0..2\^64-1"),
        ({"atomic_wr": -1}, r"atomic_wr=-1 is not in 0..2\^64-1"),
        ({"atomic_wr": b"12345678"}, "atomic_wr: expected int, got bytes"),
        ({"send_flags": rp.SendFlags.INLINE}, "INLINE has no meaning on ATOMIC_WRITE"),
    ],
)
def test_atomic_write_with_a_wrong_field_is_refused(writes, fields, says):
    with pytest.raises(rp.PostError, match=says) as caught:
        writes.a.post_send(rp.AtomicWrite(**fields))
    assert caught.value.call == "ibv_wr_atomic_write"
    writes.works()


def test_unchecked_misaligned_atomic_write_is_an_invalid_request(connect, context):
    needs_send_op(context, SendOps.ATOMIC_WRITE)
    pair = connect(send_ops_flags=SendOps.ATOMIC_WRITE, checked=False)
    pair.a.post_send(rp.AtomicWrite(atomic_wr=1, **there(pair, 4)))
    (done,) = pair.cq.wait(1, 10)
    assert done.status is WCStatus.REM_INV_REQ_ERR
    assert bytes(pair.theirs.buffer[:16]) == bytes(16)


def test_atomic_write_needs_the_regions_remote_write(writes, pd, stack):
    mr = stack.enter_context(rp.MR(pd, 64, Access.LOCAL_WRITE | Access.REMOTE_READ))
    writes.a.post_send(rp.AtomicWrite(atomic_wr=1, remote_addr=mr.addr, rkey=mr.rkey))
    assert writes.cq.wait(1, 10)[0].status is WCStatus.REM_ACCESS_ERR
    assert bytes(mr.buffer) == bytes(64)


def test_atomic_write_needs_the_queue_pairs_remote_write(connect, context):
    needs_send_op(context, SendOps.ATOMIC_WRITE)
    pair = connect(send_ops_flags=SendOps.ATOMIC_WRITE, access=Access.REMOTE_READ)
    pair.a.post_send(rp.AtomicWrite(atomic_wr=1, **there(pair)))
    assert pair.cq.wait(1, 10)[0].status is WCStatus.REM_INV_REQ_ERR
    assert bytes(pair.theirs.buffer[:8]) == bytes(8)


# ---- FLUSH -------------------------------------------------------------------------


@pytest.mark.parametrize("level", FlushLevel)
def test_flush_completes_after_what_was_written_before_it(flushed, level):
    flushed.pair.mine.buffer[:64] = bytes(range(64))
    flushed.pair.a.post_send([flushed.write(send_flags=0), flushed.flush(level=level, wr_id=9)])
    (done,) = flushed.pair.wait()
    assert (done.wr_id, done.opcode) == (9, WCOpcode.FLUSH)
    assert bytes(flushed.mr.buffer[:64]) == bytes(range(64))
    assert flushed.pair.a.outstanding == (0, 0)


def test_flush_of_a_whole_region_needs_no_range(flushed):
    wr = rp.Flush(rkey=flushed.mr.rkey, level=FlushLevel.MR)
    assert flushed.ends(flushed.write(), wr) is WCStatus.SUCCESS


@pytest.mark.parametrize(("start", "length"), [(0, 4097), (4096, 1), (-1, 2)])
def test_flush_of_a_range_outside_the_region_is_refused_there(flushed, start, length):
    wr = flushed.flush(remote_addr=flushed.mr.addr + start, length=length)
    assert flushed.ends(wr) is WCStatus.REM_ACCESS_ERR


@pytest.mark.parametrize("level", FlushLevel)
def test_flush_needs_the_regions_access(flushed, level):
    """A GLOBAL flush needs FLUSH_GLOBAL; writing there is not enough."""
    theirs = flushed.pair.theirs
    wr = flushed.flush(remote_addr=theirs.addr, rkey=theirs.rkey, level=level)
    assert flushed.ends(wr) is WCStatus.REM_ACCESS_ERR


def test_flush_to_persistence_needs_its_own_access(flushed):
    wr = flushed.flush(type=FlushType.PERSISTENT)
    assert flushed.ends(wr) is WCStatus.REM_ACCESS_ERR


def test_flush_with_an_unknown_key_is_refused_there(flushed):
    assert flushed.ends(flushed.flush(rkey=flushed.mr.rkey ^ 0xFF)) is WCStatus.REM_ACCESS_ERR


def test_flush_needs_the_queue_pairs_access(connect, context, pd, stack):
    needs_send_op(context, SendOps.FLUSH)
    mr = stack.enter_context(rp.MR(pd, 64, ALL | Access.FLUSH_GLOBAL))
    pair = connect(send_ops_flags=SendOps.FLUSH)
    wr = Flushed(pair, mr).flush()
    assert Flushed(pair, mr).ends(wr) is WCStatus.REM_INV_REQ_ERR


def test_default_access_of_a_queue_pair_allows_flushes(context, pd, cq, stack):
    needs_send_op(context, SendOps.FLUSH)
    a, b = (
        stack.enter_context(rp.QP(pd, QPType.RC, cq, send_ops_flags=SendOps.FLUSH))
        for _ in range(2)
    )
    a.connect(b.endpoint())
    b.connect(a.endpoint())
    mr = stack.enter_context(rp.MR(pd, 64, ALL | Access.FLUSH_GLOBAL))
    a.post_send(rp.Flush(remote_addr=mr.addr, rkey=mr.rkey, length=64))
    assert cq.wait(1, 10)[0].status is WCStatus.SUCCESS


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"length": 1 << 32}, r"length=4294967296 is not in 0..2\^32-1"),
        ({"type": 0}, "type=0 is not FlushType.GLOBAL, PERSISTENT or both"),
        ({"type": 4}, "type=4 is not FlushType.GLOBAL, PERSISTENT or both"),
        ({"level": 2}, "level=2 is not FlushLevel.RANGE or MR"),
    ],
)
def test_flush_with_a_wrong_field_is_refused(flushed, fields, says):
    with pytest.raises(rp.PostError, match=says) as caught:
        flushed.pair.a.post_send(flushed.flush(**fields))
    assert caught.value.call == "ibv_wr_flush"
    flushed.pair.works()


def test_flushes_from_columns_obey_the_rules_of_flushes(flushed):
    levels = array("I", [0, 1, 1, 0])
    where = {"remote_addr": flushed.mr.addr, "rkey": flushed.mr.rkey, "length": 64}
    assert flushed.pair.a.post_columns(rp.Flush, level=levels, **where) == 4
    flushed.pair.wait(4)
    levels[2] = 2
    with pytest.raises(rp.PostError, match="level=2 is not FlushLevel") as caught:
        flushed.pair.a.post_columns(rp.Flush, level=levels, **where)
    assert (caught.value.call, caught.value.index) == ("ibv_wr_flush", 2)
    assert flushed.pair.a.outstanding.send == 0


# ---- queue pairs -------------------------------------------------------------------


@pytest.mark.parametrize("wr", [rp.AtomicWrite(), rp.Flush()], ids=["ATOMIC_WRITE", "FLUSH"])
@pytest.mark.parametrize("checked", [True, False])
def test_post_without_send_ops_flags_is_refused(connect, wr, checked):
    """Without checks, too: a driver may use the opcode as an index."""
    pair = connect(checked=checked)
    name = wr.opcode.name
    says = f"{name} needs a QP that was created with send_ops_flags=SendOps.{name}"
    with pytest.raises(rp.PostError, match=says):
        pair.a.post_send(wr)
    pair.works()


def test_queue_pair_created_for_atomic_writes_refuses_a_flush(writes):
    with pytest.raises(rp.PostError, match=r"send_ops_flags=SendOps\.FLUSH"):
        writes.a.post_send(rp.Flush())
    assert writes.a.send_ops_flags is SendOps.ATOMIC_WRITE


@pytest.mark.parametrize("qp_type", [QPType.UC, QPType.UD])
def test_queue_pair_type_without_flush_cannot_be_created_for_it(pd, cq, qp_type):
    with pytest.raises(ValueError, match=f"{qp_type.name} queue pairs have no FLUSH"):
        rp.QP(pd, qp_type, cq, send_ops_flags=SendOps.FLUSH)


@pytest.mark.parametrize("flags", [1 << 13, -1, 1 << 64])
def test_unknown_send_ops_flags_are_refused(pd, cq, flags):
    with pytest.raises(ValueError, match="is not a combination of SendOps flags"):
        rp.QP(pd, QPType.RC, cq, send_ops_flags=flags)


def test_libibverbs_that_lacks_flush_says_so(context, pd, cq, stack):
    """A queue pair is created, or the error says what is missing."""
    said = ""
    try:
        stack.enter_context(rp.QP(pd, QPType.RC, cq, send_ops_flags=SendOps.FLUSH, checked=False))
    except rp.UnsupportedError as error:
        said = str(error)
    assert not said or "FLUSH needs libibverbs 45 or later" in said or "has no FLUSH" in said


def test_send_ops_flags_of_ordinary_opcodes_change_nothing(connect):
    connect(send_ops_flags=SendOps.SEND | SendOps.RDMA_WRITE).works()


# ---- soft0 alone ---------------------------------------------------------------------


@pytest.fixture
def soft_pair() -> Any:
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(rp.open_device("soft0"))
        pd, cq = stack.enter_context(rp.PD(context)), stack.enter_context(rp.CQ(context))
        yield Pair(stack, pd, cq, send_ops_flags=BOTH, max_send_wr=8)


def test_work_requests_of_ibv_wr_calls_are_accepted_all_or_none(soft_pair):
    """As ibv_wr_complete(3) says; those posted before them stand."""
    soft_pair.pd.context.faults.fail_post(5, after=3)
    atomics = [rp.AtomicWrite(wr_id=i, **there(soft_pair, 8 * i)) for i in range(3)]
    write = rp.RdmaWrite(soft_pair.mine[:8], wr_id=8, **there(soft_pair))
    with pytest.raises(rp.PostError) as caught:
        soft_pair.a.post_send([write, *atomics, write])
    error = caught.value
    assert (error.call, error.index, error.posted) == ("ibv_wr_complete", 1, 1)
    assert [wc.wr_id for wc in soft_pair.wait()] == [8]
    assert soft_pair.a.outstanding.send == 0
    soft_pair.a.post_send([*atomics, write])
    assert [wc.wr_id for wc in soft_pair.wait(4)] == [0, 1, 2, 8]
    # No slot is lost.
    soft_pair.a.post_send([write] * soft_pair.a.max_send_wr)
    soft_pair.wait(soft_pair.a.max_send_wr)


def test_work_requests_of_ibv_wr_calls_before_a_failed_ibv_post_send_are_posted(soft_pair):
    """If the driver does not say where it stopped, it is unknown what was posted."""
    context = soft_pair.pd.context
    context.faults.fail_post(5, after=2)
    atomics = [rp.AtomicWrite(wr_id=i, **there(soft_pair, 8 * i)) for i in range(2)]
    write = rp.RdmaWrite(soft_pair.mine[:8], wr_id=8, **there(soft_pair))
    with pytest.raises(rp.PostError) as caught:
        soft_pair.a.post_send([*atomics, write])
    assert (caught.value.index, caught.value.posted) == (2, 2)
    assert [wc.wr_id for wc in soft_pair.wait(2)] == [0, 1]
    assert soft_pair.a.outstanding.send == 0
    with contextlib.closing(open_tap(context)) as tap:
        tap.refuse(rc=5, bad=NOWHERE)
        with pytest.raises(rp.PostError) as caught:
            soft_pair.a.post_send([*atomics, write])
    assert (caught.value.index, caught.value.posted) == (None, None)
    assert soft_pair.a.outstanding.send == 3
    assert [wc.wr_id for wc in soft_pair.wait(2)] == [0, 1]
    assert soft_pair.a.outstanding.send == 1


def test_list_too_long_to_prepare_names_the_call_that_would_post(soft_pair):
    with pytest.raises(rp.PostError, match="max_send_wr") as caught:
        soft_pair.a.prepare([rp.Flush()] * 9)
    assert (caught.value.call, caught.value.index) == ("ibv_wr_flush", 8)


def test_flush_and_atomic_write_work_over_xrc():
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(rp.open_device("soft0"))
        access = ALL | FLUSHES
        pair = stack.enter_context(
            Loopback(context, QPType.XRC_SEND, send_ops_flags=BOTH, access=access)
        )
        where = pair.target(8)
        pair.local.qp.post_send(
            [
                rp.AtomicWrite(atomic_wr=VALUE, **where),
                rp.Flush(length=8, type=FlushType.PERSISTENT | FlushType.GLOBAL, **where),
            ]
        )
        statuses = [wc.status for wc in pair.local.cq.wait(2, 5)]
        assert statuses == [WCStatus.SUCCESS] * 2
        assert at(pair.remote.mr, 8) == VALUE
        pair.local.qp.post_send(rp.AtomicWrite(**{**where, "remote_srqn": 0xFFFFFF}))
        assert pair.local.cq.wait(1, 5)[0].status is not WCStatus.SUCCESS

"""Columns: many work requests in one call, exactly as if each were posted alone."""

from __future__ import annotations

import array
import ctypes
import errno
import mmap
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import ALL, Connect, Pair, needs, soft_queues
from support.posting_tap import NOWHERE, tap
from support.watching import closed_elsewhere

import rdmapost as rp
from rdmapost import SendFlags, WCStatus
from rdmapost.posting.columns import Ranges

soft = soft_queues.soft

__all__ = ["tap"]  # a fixture

WITH_IMM = (rp.RdmaWriteWithImm, rp.SendWithImm)
QUIET = (rp.RdmaWrite, rp.RdmaRead, rp.AtomicFetchAndAdd, rp.AtomicCmpAndSwp)
"""Those that use no receive."""
MAP_FIXED_NOREPLACE = 0x100000
"""linux/mman.h"""
REMOTE = (rp.RdmaWrite, rp.RdmaRead, rp.RdmaWriteWithImm, rp.AtomicFetchAndAdd, rp.AtomicCmpAndSwp)


@pytest.fixture
def deep(connect: Connect) -> Pair:
    """A pair whose queues hold more than one chunk of rows."""
    return connect(max_send_wr=400, max_recv_wr=400, max_inline_data=64)


@pytest.fixture
def across_4_gib() -> memoryview:
    """8 KiB of memory, with a multiple of 4 GiB in the middle."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    for high in range(0x1000, 0x2000):
        start = (high << 32) - 4096
        found = libc.mmap(start, 8192, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if found == start:
            return memoryview((ctypes.c_char * 8192).from_address(start)).cast("B")
    raise OSError(ctypes.get_errno(), "no hole in the address space")


def fill(pair: Pair, seed: int = 0) -> None:
    """Fill my memory with random bytes, and clear the other side's."""
    pair.mine.buffer[:] = random.Random(seed).randbytes(len(pair.mine))
    pair.theirs.buffer[:] = bytes(len(pair.theirs))


def write_blocks(pair: Pair, count: int, **more: Any) -> int:
    """Write blocks of 16 bytes to the same place of the peer's memory."""
    index = np.arange(count) % 512
    more.setdefault("remote_addr", rp.Blocks(pair.theirs.addr, index, 16))
    more.setdefault("sg_list", pair.mine.blocks(index, 16))
    return pair.a.post_columns(rp.RdmaWrite, rkey=pair.theirs.rkey, **more)


COLUMNS: dict[str, Callable[[list[int]], Any]] = {
    "numpy of 8 bytes": lambda numbers: np.array(numbers, "i8"),
    "numpy of 4 bytes": lambda numbers: np.array(numbers, "u4"),
    "every third of a larger one": lambda numbers: np.repeat(np.array(numbers), 3)[::3],
    "every second of 4 bytes": lambda numbers: np.repeat(np.array(numbers, "u4"), 2)[::2],
    "backwards": lambda numbers: np.array(numbers[::-1], "i4")[::-1],
    "one number repeated by a stride of 0": lambda numbers: np.broadcast_to(numbers[0], 6),
    "array": lambda numbers: array.array("Q", numbers),
    "memoryview": lambda numbers: memoryview(array.array("i", numbers)),
    "native, by its prefix": lambda numbers: (
        memoryview(array.array("q", numbers)).cast("B").cast("@q")
    ),
    "ssize_t": lambda numbers: memoryview(array.array("q", numbers)).cast("B").cast("n"),
    "ctypes": lambda numbers: (ctypes.c_uint64 * len(numbers))(*numbers),
    "read-only": lambda numbers: memoryview(bytes(array.array("q", numbers))).cast("q"),
    "unaligned": lambda numbers: np.frombuffer(
        b"x" + bytes(array.array("q", numbers)), dtype="i8", offset=1
    ),
}


@pytest.mark.parametrize("make", COLUMNS.values(), ids=COLUMNS)
def test_column_writes_go_from_local_to_remote_blocks_by_index(rc, make):
    fill(rc)
    source, target = [5, 0, 3, 1, 4, 2], [1, 7, 2, 0, 9, 4]
    got = rc.a.post_columns(
        rp.RdmaWrite,
        rc.mine.blocks(make(source), 64),
        remote_addr=rp.Blocks(rc.theirs.addr, make(target), 64),
        rkey=rc.theirs.rkey,
        wr_id=make([10, 11, 12, 13, 14, 15]),
    )
    assert got == 6
    assert [wc.check().wr_id for wc in rc.wait(6)] == list(make([10, 11, 12, 13, 14, 15]))
    expected = bytearray(len(rc.theirs))
    for src, dst in zip(make(source), make(target), strict=True):
        expected[dst * 64 : dst * 64 + 64] = rc.mine.buffer[src * 64 : src * 64 + 64]
    assert rc.theirs.buffer == expected


def test_columns_longer_than_a_chunk_are_posted_whole(deep):
    fill(deep)
    assert write_blocks(deep, 300, wr_id=np.arange(300), signal_every=100) == 300
    assert deep.a.outstanding.send == 300
    assert [wc.check().wr_id for wc in deep.wait(3)] == [99, 199, 299]
    assert deep.theirs.buffer[:4800] == deep.mine.buffer[:4800]
    assert deep.theirs.buffer[4800:] == bytes(len(deep.theirs) - 4800)
    assert deep.a.outstanding.send == 0
    deep.works()
    assert not deep.cq.poll()


@pytest.mark.parametrize(
    ("count", "every", "signaled"),
    [(5, 2, [1, 3, 4]), (4, 2, [1, 3]), (3, 1, [0, 1, 2]), (3, 100, [2]), (1, 2, [0])],
)
def test_signal_every_completes_each_nth_row_and_the_last(rc, count, every, signaled):
    write_blocks(rc, count, wr_id=np.arange(count), signal_every=every)
    assert [wc.check().wr_id for wc in rc.wait(len(signaled))] == signaled
    assert not rc.cq.poll()
    assert rc.a.outstanding.send == 0


@pytest.mark.parametrize("checked", [True, False])
def test_rows_beyond_the_queue_are_left_and_the_last_that_fits_completes(connect, checked):
    rc = connect(checked=checked)
    room = rc.a.max_send_wr
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8], wr_id=7, send_flags=SendFlags(0)))
    assert write_blocks(rc, 500, wr_id=np.arange(500), signal_every=1000) == room - 1
    assert write_blocks(rc, 500) == 0
    assert [wc.check().wr_id for wc in rc.wait(1)] == [room - 2]
    assert rc.a.outstanding.send == 0


def test_columns_of_no_rows_post_nothing(rc):
    assert write_blocks(rc, 0) == 0
    assert rc.a.outstanding.send == 0


def test_ranges_of_a_region_give_each_row_its_offset_and_length(rc):
    fill(rc)
    offsets, lengths = np.array([0, 100, 900]), np.array([1, 300, 77])
    where = np.cumsum(lengths) - lengths + rc.theirs.addr
    rc.a.post_columns(
        rp.RdmaWrite,
        rc.mine.ranges(offsets, lengths),
        remote_addr=where,
        rkey=np.full(3, rc.theirs.rkey, "u4"),
    )
    rc.wait(3)
    pieces = [
        bytes(rc.mine.buffer[at : at + size]) for at, size in zip(offsets, lengths, strict=True)
    ]
    assert bytes(rc.theirs.buffer[: lengths.sum()]) == b"".join(pieces)


def test_rows_of_columns_may_share_one_sge(rc):
    rc.mine.buffer[:8] = b"the same"
    rc.a.post_columns(
        rp.RdmaWrite,
        rc.mine[:8],
        remote_addr=rp.Blocks(rc.theirs.addr, np.arange(4), 8),
        rkey=rc.theirs.rkey,
    )
    assert [wc.check() for wc in rc.wait(4)]
    assert bytes(rc.theirs.buffer[:32]) == b"the same" * 4


def test_inline_rows_are_read_during_the_post_and_hold_no_memory(deep, pd):
    fill(deep)
    with rp.MR(pd, 256, ALL) as lent:
        lent.buffer[:] = bytes(range(256))
        deep.a.post_columns(
            rp.RdmaWrite,
            lent.blocks(np.arange(4), 64),
            remote_addr=rp.Blocks(deep.theirs.addr, np.arange(4), 64),
            rkey=deep.theirs.rkey,
            send_flags=SendFlags.INLINE,
            signal_every=4,
        )
    assert deep.wait(1)[0].check()
    assert bytes(deep.theirs.buffer[:256]) == bytes(range(256))


def test_immediate_data_of_columns_arrive_in_host_order(rc):
    rc.b.post_recv_columns(rc.theirs.blocks(np.arange(3), 16), wr_id=np.array([7, 8, 9]))
    assert rc.b.outstanding.recv == 3
    rc.a.post_columns(
        rp.SendWithImm,
        rc.mine.blocks(np.arange(3), 16),
        imm_data=np.array([1, 0x12345678, 2**32 - 1]),
        wr_id=100,
    )
    found = {wc.wr_id: wc.imm_data for wc in rc.wait(6) if wc.wr_id != 100}
    assert found == {7: 1, 8: 0x12345678, 9: 2**32 - 1}
    assert rc.b.outstanding.recv == 0


def test_atomics_can_be_posted_with_a_column_of_operands(rc):
    fill(rc)
    index = np.arange(4)
    rc.a.post_columns(
        rp.AtomicFetchAndAdd,
        rc.mine.blocks(index, 8),
        remote_addr=rp.Blocks(rc.theirs.addr, index, 8),
        rkey=rc.theirs.rkey,
        compare_add=np.array([1, 2**63, 3, 2**64 - 1], "u8"),
    )
    assert [wc.check() for wc in rc.wait(4)]
    assert list(rc.theirs.buffer[:32].cast("Q")) == [1, 2**63, 3, 2**64 - 1]


def test_wr_ids_of_a_column_may_have_all_64_bits(rc):
    ids = [(1 << 64) - 1, 0, 1 << 63, (1 << 32) - 1]
    assert write_blocks(rc, 4, wr_id=np.array(ids, "u8")) == 4
    assert [wc.check().wr_id for wc in rc.wait(4)] == ids


@pytest.mark.parametrize("kind", ["blocks", "ranges"])
def test_rows_of_a_region_across_a_boundary_of_4_gib_have_their_whole_addresses(
    rc, pd, stack, across_4_gib, kind
):
    region = stack.enter_context(rp.MR(pd, across_4_gib, ALL))
    region.buffer[:] = bytes(range(256)) * (len(region) // 256)
    region.buffer[4096:4104] = b"-behind-"
    if kind == "blocks":
        local = region.blocks(np.array([511, 512, 513]), 8)
    else:
        local = region.ranges(np.array([4088, 4096, 4104]), np.array([8, 8, 8]))
    target = rp.Blocks(rc.theirs.addr, np.arange(3), 8)
    rc.a.post_columns(rp.RdmaWrite, local, remote_addr=target, rkey=rc.theirs.rkey)
    assert all(wc.check() for wc in rc.wait(3))
    assert rc.theirs.buffer[:24] == bytes(range(248, 256)) + b"-behind-" + bytes(range(8, 16))


def test_soft_device_has_carried_out_an_atomic_of_one_row_when_the_post_returns(rc, context):
    """Before anybody polls."""
    needs(context.kind == "soft", "synchronous execution", context)
    rc.theirs.buffer[:8] = (5).to_bytes(8, sys.byteorder)
    rc.a.post_columns(
        rp.AtomicFetchAndAdd,
        rc.mine[:8],
        remote_addr=rc.theirs.addr,
        rkey=rc.theirs.rkey,
        compare_add=np.array([2]),
    )
    assert int.from_bytes(rc.theirs.buffer[:8], sys.byteorder) == 7


def test_datagrams_of_columns_share_an_address_handle(connect):
    ud = connect(rp.QPType.UD)
    ud.b.post_recv_columns(ud.theirs.blocks(np.arange(3), 128))
    fields = ud.wr(rp.Send)
    ud.a.post_columns(
        rp.Send,
        ud.mine.blocks(np.arange(3), 32),
        ah=fields.ah,
        remote_qpn=fields.remote_qpn,
        remote_qkey=fields.remote_qkey,
    )
    assert [wc.check().wr_id for wc in ud.wait(6)] == [0] * 6
    with pytest.raises(TypeError, match=r"^ah cannot be a column: all rows share one value$"):
        ud.a.post_columns(
            rp.Send,
            ud.mine.blocks(np.arange(3), 32),
            ah=[fields.ah] * 3,
            remote_qpn=fields.remote_qpn,
            remote_qkey=fields.remote_qkey,
        )
    assert ud.a.outstanding.send == 0


def test_srq_receives_posted_from_columns_may_complete_in_any_order(pd, cq, stack):
    memory = stack.enter_context(rp.MR(pd, 4096, ALL))
    srq = stack.enter_context(rp.SRQ(pd, 8))
    room = srq.max_wr
    count = srq.post_srq_recv_columns(
        memory.blocks(np.arange(room + 50) % 64, 16), wr_id=np.arange(room + 50)
    )
    assert count == srq.outstanding == room
    qps = [stack.enter_context(rp.QP(pd, rp.QPType.RC, cq, srq=srq)) for _ in range(2)]
    peers = [stack.enter_context(rp.QP(pd, rp.QPType.RC, cq)) for _ in range(2)]
    for mine, theirs in zip(qps, peers, strict=True):
        mine.connect(theirs.endpoint())
        theirs.connect(mine.endpoint())
    for turn in range(6):
        peers[turn % 2].post_send(rp.Send(memory[:4], wr_id=1000))
    received = [wc.check().wr_id for wc in cq.wait(12) if wc.wr_id != 1000]
    assert sorted(received) == list(range(6))
    assert srq.outstanding == room - 6
    with pytest.raises(rp.InUseError, match=r"wr_id"):
        memory.close()
    for qp in (*qps, *peers):
        qp.close()
    srq.close()


def test_receive_of_an_srq_that_is_the_only_row_has_its_wr_id(pd, cq, stack):
    srq = stack.enter_context(rp.SRQ(pd, 8))
    target = stack.enter_context(rp.QP(pd, rp.QPType.RC, cq, srq=srq))
    sender = stack.enter_context(rp.QP(pd, rp.QPType.RC, cq))
    target.connect(sender.endpoint())
    sender.connect(target.endpoint())
    assert srq.post_srq_recv_columns(wr_id=np.array([5])) == 1
    sender.post_send(rp.Send(wr_id=6))
    assert {wc.check().wr_id for wc in cq.wait(2)} == {5, 6}


def test_region_of_columns_stays_open_until_the_last_row_is_done(rc, pd, stack):
    lent = stack.enter_context(rp.MR(pd, 4096, ALL))
    rc.a.post_columns(
        rp.RdmaWrite,
        lent.blocks(np.arange(4), 16),
        remote_addr=rc.theirs.addr,
        rkey=rc.theirs.rkey,
        wr_id=np.arange(20, 24),
    )
    # Completions that have not been polled count as outstanding.
    with pytest.raises(
        rp.InUseError, match=r"4 outstanding work requests \(wr_id 20, 21, 22, 23\)"
    ):
        lent.close()
    assert [wc.wr_id for wc in rc.wait(4)] == [20, 21, 22, 23]
    lent.close()


def test_columns_may_change_after_the_call(rc):
    numbers = array.array("q", range(8))
    rc.a.post_columns(
        rp.RdmaWrite,
        rc.mine.blocks(numbers, 8),
        remote_addr=rc.theirs.addr,
        rkey=rc.theirs.rkey,
        wr_id=numbers,
    )
    numbers[:] = array.array("q", [77] * 8)
    numbers.extend([1, 2, 3])  # a BufferError if it were still exported
    assert [wc.check().wr_id for wc in rc.wait(8)] == list(range(8))


# ---- what is refused ----------------------------------------------------------------------------


def alone(pair: Pair, wr: Any) -> str:
    """Return why a work request is refused alone."""
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send(wr)
    assert isinstance(caught.value.reason, str)
    return caught.value.reason


BAD_ROWS: dict[str, tuple[type, dict[str, Any]]] = {
    "outside_region": (rp.RdmaWrite, {"index": 4096}),
    "before": (rp.RdmaWrite, {"index": -1}),
    "far outside": (rp.RdmaWrite, {"index": 2**60}),
    "length 0": (rp.RdmaWrite, {"length": 0}),
    "length of 33 bits": (rp.RdmaWrite, {"length": 2**32}),
    "negative length": (rp.RdmaWrite, {"length": -5}),
    "too long": (rp.RdmaWrite, {"length": 8193}),
    "rkey of 33 bits": (rp.RdmaWrite, {"rkey": 2**32}),
    "negative rkey": (rp.RdmaRead, {"rkey": -1}),
    "negative address": (rp.RdmaWrite, {"remote_addr": -8}),
    "negative wr_id": (rp.RdmaWrite, {"wr_id": -1}),
    "immediate data of 33 bits": (rp.RdmaWriteWithImm, {"imm_data": 2**32}),
    "misaligned": (rp.AtomicFetchAndAdd, {"remote_addr": 12}),
    "9 bytes of an atomic": (rp.AtomicCmpAndSwp, {"length": 9}),
    "7 bytes of an atomic": (rp.AtomicFetchAndAdd, {"length": 7}),
    "wrong flags": (rp.RdmaRead, {"send_flags": SendFlags.INLINE}),
    "flags that do not exist": (rp.RdmaRead, {"send_flags": 1 << 20}),
    "not a number": (rp.RdmaWrite, {"rkey": "x"}),
    "too large a number": (rp.RdmaWrite, {"rkey": 1 << 40}),
    "inline too long": (rp.RdmaWrite, {"send_flags": SendFlags.INLINE, "length": 65}),
}


@pytest.mark.parametrize("row", [0, 1, 130])
@pytest.mark.parametrize(("wr_type", "bad"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_first_bad_row_is_refused_with_the_error_of_its_work_request_alone(deep, wr_type, bad, row):
    """And no row is posted; what is the same for all rows is refused at the first."""
    numbers = {"index": 0, "length": 8, "rkey": deep.theirs.rkey, "wr_id": 3}
    numbers["remote_addr"] = deep.theirs.addr
    if wr_type is rp.RdmaWriteWithImm:
        numbers["imm_data"] = 5
    columns: dict[str, Any] = {name: np.full(200, number) for name, number in numbers.items()}
    flags = bad.get("send_flags", 0)
    for name, value in bad.items():
        if name == "send_flags" or value in ("x", 1 << 40):
            columns[name] = value
            row = 0
        elif "send_flags" in bad:
            columns[name] = np.full(200, value)
        else:
            columns[name][row] = value
            columns[name][row + 20] = -1
    one = {**numbers, **bad}
    index, length = one.pop("index"), one.pop("length")
    address = deep.mine.addr + 8 * index
    with pytest.raises(rp.PostError) as caught:
        deep.a.post_columns(
            wr_type,
            deep.mine.blocks(columns.pop("index"), 8)
            if "length" not in bad
            else deep.mine.ranges(np.zeros(200, "i4"), columns["length"]),
            **{name: column for name, column in columns.items() if name not in ("length", "index")},
        )
    error = caught.value
    assert (error.index, error.posted, error.count) == (row, 0, 200)
    assert error.errno == errno.EINVAL
    one["send_flags"] = flags | SendFlags.SIGNALED if isinstance(flags, int) else flags
    same = wr_type(rp.SGE(address, length, deep.mine.lkey, deep.mine), **one)
    if "flags that" not in error.reason:
        one["send_flags"] = flags or SendFlags.SIGNALED
        same.send_flags = one["send_flags"]
    assert error.reason == alone(deep, same)
    assert error.wr.sg_list == same.sg_list
    assert deep.a.outstanding.send == 0


def test_columns_in_a_wrong_state_are_refused_with_the_reason_of_a_single_post(connect):
    pair = connect(to=rp.QPState.RESET)
    with pytest.raises(rp.PostError) as caught:
        write_blocks(pair, 3)
    assert caught.value.reason == alone(pair, pair.wr(rp.RdmaWrite, pair.mine[:8]))
    assert (caught.value.index, caught.value.count) == (0, 3)


def test_first_row_that_cannot_be_read_is_refused_as_if_alone_in_any_state(connect):
    """A list reads its work requests before it looks at the queue's state, too."""
    pair = connect(to=rp.QPState.RESET)
    with pytest.raises(rp.PostError) as caught:
        write_blocks(pair, 3, wr_id=np.array([-1, 0, 1]))
    with pytest.raises(rp.PostError) as single:
        pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8], wr_id=-1))
    assert caught.value.reason == single.value.reason == "wr_id=-1 is not in 0..2^64-1"


def test_columns_on_a_closed_queue_pair_or_region_are_refused(rc, pd):
    lent = rp.MR(pd, 64, ALL)
    blocks = lent.blocks(np.arange(2), 8)
    lent.close()
    with pytest.raises(rp.PostError, match="closed"):
        rc.a.post_columns(rp.Send, blocks)
    rc.a.close()
    with pytest.raises(rp.ClosedError):
        write_blocks(rc, 2)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (TypeError, "4 or 8 bytes .* not one of format 'd'$", {"wr_id": np.zeros(3)}),
        (TypeError, "4 or 8 bytes .* not one of format 'h'$", {"wr_id": np.zeros(3, "i2")}),
        (
            TypeError,
            "native byte order, not one of format '[<>][lq]'$",
            {"wr_id": np.zeros(3, np.dtype("i8").newbyteorder())},
        ),
        (
            TypeError,
            "native byte order, not one of 2 dimensions$",
            {"wr_id": np.zeros((3, 1), "i8")},
        ),
        (TypeError, "not one of format 'd' and 2 dimensions$", {"wr_id": np.zeros((3, 1))}),
        (TypeError, "not one of format 'B'$", {"wr_id": b"123"}),
        (ValueError, "remote_addr has 3 rows, wr_id has 4$", {"wr_id": np.zeros(4, "i8")}),
        *(
            (ValueError, rf"^signal_every={every} is not in 1\.\.2\^64-1$", {"signal_every": every})
            for every in (0, -1, 1 << 64)
        ),
        (ValueError, r"^signal_every=0 is not in 1\.\.2", {"signal_every": np.int64(0)}),
        (TypeError, "signal_every: expected int, got str", {"signal_every": "2"}),
        (TypeError, "no field 'imm_data'", {"imm_data": 3}),
        (TypeError, "is for addresses", {"remote_srqn": rp.Blocks(0, np.zeros(3, "i8"), 4)}),
        (
            TypeError,
            "remote_addr: expected int, got str",
            {"remote_addr": rp.Blocks("0", np.zeros(3, "i8"), 4)},
        ),
        (
            TypeError,
            "size: expected int, got str",
            {"remote_addr": rp.Blocks(0, np.zeros(3, "i8"), "4")},
        ),
        *(
            (TypeError, f"^remote_addr: a column is .*, not {kind}; array", {"remote_addr": blocks})
            for kind, blocks in (
                ("int", rp.Blocks(4096, 5, 8)),
                ("int64", rp.Blocks(4096, np.int64(5), 8)),
                ("list", rp.Blocks(4096, [0, 1, 2], 8)),
                ("str", rp.Blocks(4096, "012", 8)),
            )
        ),
        (TypeError, r"^wr_id: a column is .*, not list; array.array", {"wr_id": [1, 2, 3]}),
        (TypeError, "^remote_addr: a column is .*, not tuple; array", {"remote_addr": (1, 2, 3)}),
        *(
            (
                TypeError,
                "^send_flags cannot be a column: all rows share one value$",
                {"send_flags": f},
            )
            for f in (np.zeros(3, "u4"), array.array("I", [0, 0, 0]), [0, 0, 0], (0, 0, 0))
        ),
    ],
)
def test_wrong_columns_are_refused_by_name(rc, error, match, options):
    with pytest.raises(error, match=match):
        write_blocks(rc, 3, **options)
    assert rc.a.outstanding.send == 0


def test_column_of_records_that_begin_with_an_integer_is_refused(rc):
    testbuffer = pytest.importorskip("_testbuffer", reason="this Python has no _testbuffer")
    records = testbuffer.ndarray([1, 2, 3], shape=[3], format="i4x")
    with pytest.raises(TypeError, match=r"not one of format 'i4x'$"):
        write_blocks(rc, 3, wr_id=records)
    assert rc.a.outstanding.send == 0


def test_sg_list_may_be_given_by_name_but_once(rc):
    blocks, wr_id = rc.mine.blocks(array.array("q", [0, 1, 2]), 8), array.array("q", [7, 8, 9])
    target = {"remote_addr": rc.theirs.addr, "rkey": rc.theirs.rkey}
    assert rc.a.post_columns(rp.RdmaWrite, sg_list=blocks, wr_id=wr_id, **target) == 3
    assert rc.b.post_recv_columns(sg_list=blocks, wr_id=wr_id) == 3
    assert [wc.wr_id for wc in rc.wait(3)] == [7, 8, 9]
    with pytest.raises(TypeError, match=r"^RdmaWrite: sg_list is given twice$"):
        rc.a.post_columns(rp.RdmaWrite, blocks, sg_list=blocks, **target)
    with pytest.raises(TypeError, match=r"^LocalInv has no field 'sg_list'$"):
        rc.a.post_columns(rp.LocalInv, sg_list=blocks, invalidate_rkey=wr_id)


def test_index_that_is_no_column_is_named_for_a_local_and_a_remote_address(rc):
    with pytest.raises(TypeError, match=r"^index: a column is .*, not list"):
        rc.a.post_columns(rp.RdmaWrite, rc.mine.blocks([0, 1], 8), wr_id=array.array("q", [1, 2]))


def test_sg_list_that_is_none_is_refused_as_in_a_work_request(rc):
    words = r"sg_list: expected SGEs, got NoneType; mr\[a:b\] makes an SGE"
    with pytest.raises(rp.PostError, match=words):
        rc.a.post_columns(rp.RdmaWrite, None, wr_id=array.array("Q", [1, 2]))
    assert rc.a.outstanding.send == 0


@pytest.mark.parametrize("size", ["8", 8.0, None, np.array([8, 8])])
def test_size_of_blocks_that_is_no_number_is_refused_by_name(rc, size):
    words = f"size: expected int, got {type(size).__name__}"
    with pytest.raises(TypeError, match=words):
        rc.a.post_columns(
            rp.RdmaWrite,
            rc.mine.blocks(np.arange(2), size),
            remote_addr=rc.theirs.addr,
            rkey=rc.theirs.rkey,
        )
    assert rc.a.outstanding.send == 0


@pytest.mark.parametrize("name", ["wr_id", "send_flags"])
def test_released_memoryview_is_refused_as_a_column_and_as_a_number(rc, name):
    released = memoryview(array.array("q", [1, 2]))
    released.release()
    with pytest.raises(ValueError, match="released memoryview"):
        write_blocks(rc, 2, **{name: released})
    assert rc.a.outstanding.send == 0


def test_help_of_post_columns_names_the_classes_without_columns():
    assert "wr_type: the class of the work requests: any but BindMW and TSO." in (
        rp.QP.post_columns.__doc__ or ""
    )


def test_class_without_columns_is_refused_by_its_public_name(rc):
    blocks = rc.mine.blocks(np.arange(2), 8)
    for wr_type, words in [
        (rp.BindMW, "BindMW cannot be posted by columns"),
        (rp.TSO, "TSO cannot be posted by columns"),
        (int, "int cannot be posted by columns"),
        (
            rp.RdmaWrite(rc.mine[:8], remote_addr=0, rkey=0),
            "wr_type: expected a work request class, such as RdmaWrite, not an instance of "
            "RdmaWrite",
        ),
        (3, "wr_type: expected a work request class, such as RdmaWrite, not an instance of int"),
    ]:
        with pytest.raises(TypeError, match=f"^{words}$"):
            rc.a.post_columns(wr_type, blocks)
    with pytest.raises(TypeError, match=r"^LocalInv has no sg_list$"):
        rc.a.post_columns(rp.LocalInv, blocks)
    assert rc.a.outstanding.send == 0


def test_blocks_of_a_region_are_refused_as_remote_addresses(rc):
    with pytest.raises(TypeError, match=r"^remote_addr: Blocks\(.*\) is for addresses"):
        write_blocks(rc, 2, remote_addr=rc.theirs.blocks(np.arange(2), 16))
    assert rc.a.outstanding.send == 0


@pytest.mark.parametrize("base", ["x", 4096, None])
def test_blocks_of_what_is_no_region_are_refused(rc, base):
    says = rf"^sg_list: {base!r} is not a registered region; use mr\.blocks\(index, size\)$"
    with pytest.raises(TypeError, match=says):
        rc.a.post_columns(rp.Send, rp.Blocks(base, np.arange(2), 8))
    assert rc.a.outstanding.send == 0


def test_list_as_a_column_is_refused_by_the_name_of_its_type(rc):
    with pytest.raises(TypeError, match=r"^wr_id: a column is a buffer .*, not list; array\.array"):
        rc.b.post_recv_columns(rc.theirs.blocks(np.arange(2), 8), wr_id=[1, 2])
    assert rc.b.outstanding.recv == 0


def test_columns_of_receives_take_no_signal_every(rc):
    with pytest.raises(TypeError, match=r"^RecvWR has no field 'signal_every'$"):
        rc.b.post_recv_columns(rc.theirs.blocks(np.arange(2), 8), signal_every=2)
    assert rc.b.outstanding.recv == 0


def test_column_named_by_a_string_that_is_not_interned_is_found(rc):
    name = "".join(["wr", "_", "id"])  # not interned, as the keywords in source code are
    assert write_blocks(rc, 2, **{name: np.array([8, 9])}) == 2
    assert [wc.check().wr_id for wc in rc.wait(2)] == [8, 9]


def test_first_of_several_bad_rows_is_the_one_refused(rc):
    """In either order of the columns."""
    early, late = np.array([1, -1, 1, 1]), np.array([1, 1, 1, 1 << 32])
    for fields in ({"wr_id": early, "rkey": late}, {"rkey": late, "wr_id": early}):
        with pytest.raises(rp.PostError, match="wr_id=-1") as caught:
            rc.a.post_columns(rp.RdmaWrite, rc.mine[:8], remote_addr=rc.theirs.addr, **fields)
        assert (caught.value.index, caught.value.posted) == (1, 0)


def test_inline_row_longer_than_the_queue_allows_is_refused(connect):
    pair = connect(max_inline_data=64)
    granted = pair.a.max_inline_data
    with pytest.raises(rp.PostError, match=f"{granted + 1} bytes") as caught:
        pair.a.post_columns(
            rp.RdmaWrite,
            pair.mine.ranges(np.zeros(3, "i8"), np.array([8, granted, granted + 1])),
            remote_addr=pair.theirs.addr,
            rkey=pair.theirs.rkey,
            send_flags=SendFlags.INLINE,
        )
    assert (caught.value.index, caught.value.posted) == (2, 0)


def test_inline_row_outside_its_region_is_refused_without_checks_too(connect):
    """The driver would read it in the post."""
    pair = connect(max_inline_data=64, checked=False)
    end = len(pair.mine)
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_columns(
            rp.RdmaWrite,
            pair.mine.ranges(np.array([0, end - 8, end - 7]), 8),
            remote_addr=pair.theirs.addr,
            rkey=pair.theirs.rkey,
            send_flags=SendFlags.INLINE,
        )
    assert (caught.value.index, caught.value.posted) == (2, 0)


def write_ranges(pair: Pair, mr: rp.MR, offsets: list[int], lengths: Any, **more: Any) -> int:
    """Write ranges of a region to the beginning of the peer's memory."""
    if isinstance(lengths, list):
        lengths = np.array(lengths)
    return pair.a.post_columns(
        rp.RdmaWrite,
        mr.ranges(np.array(offsets), lengths),
        remote_addr=pair.theirs.addr,
        rkey=pair.theirs.rkey,
        **more,
    )


def test_rows_may_reach_to_the_end_of_their_region_and_no_further(rc, pd, stack):
    lent = stack.enter_context(rp.MR(pd, bytearray(range(64)), ALL))
    assert write_ranges(rc, lent, [0, 0, 60], [64, 64, 4]) == 3
    assert write_ranges(rc, lent, [0, 0], 64) == 2
    assert write_ranges(rc, lent, [0, 32], 32) == 2
    assert all(wc.check() for wc in rc.wait(7))
    assert rc.theirs.buffer[:33] == bytes(range(32, 64)) + b"\x20"
    for offsets, lengths in (
        ([0, 0], [64, 65]),
        ([0, 60], [64, 5]),
        ([0, 64], [64, 1]),
        ([0, 65], [64, 1]),
        ([0, 0], [64, 0]),
        ([0, 33], 32),
        ([0, 64], 32),
        ([0, (1 << 63) - 1], 32),
    ):
        with pytest.raises(rp.PostError) as caught:
            write_ranges(rc, lent, offsets, lengths)
        assert (caught.value.index, caught.value.posted) == (1, 0)
    for length in (0, 65, 1 << 31, (1 << 32) - 1, 1 << 32):
        with pytest.raises(rp.PostError) as caught:
            write_ranges(rc, lent, [0, 0], length)
        assert (caught.value.index, caught.value.posted) == (0, 0)
    for size in (0, 65, 1 << 32):
        with pytest.raises(rp.PostError) as caught:
            write_blocks(rc, 2, sg_list=lent.blocks(np.zeros(2, "i8"), size))
        assert (caught.value.index, caught.value.posted) == (0, 0)
    assert rc.a.outstanding.send == 0
    rc.works()


def test_unchecked_rows_outside_their_region_are_left_to_the_device(connect, pd, stack):
    lent = stack.enter_context(rp.MR(pd, 64, ALL))
    for offsets, lengths in (([0, 0], [8, 65]), ([0, 64], 8), ([0, 0], 65)):
        pair = connect(checked=False)
        assert write_ranges(pair, lent, offsets, lengths) == 2
        assert pair.cq.wait(2)[-1].status is not WCStatus.SUCCESS


def test_unchecked_inline_rows_may_be_empty(connect, pd, stack):
    """Otherwise, a length of 0 is 2^31 bytes to the device."""
    lent = stack.enter_context(rp.MR(pd, bytearray(range(64)), ALL))
    pair = connect(checked=False, max_inline_data=64)
    inline = SendFlags.INLINE
    assert write_ranges(pair, lent, [0, 64, 56], [0, 0, 8], send_flags=inline) == 3
    assert write_ranges(pair, lent, [64, 0], 0, send_flags=inline) == 2
    assert all(wc.check() for wc in pair.wait(5))
    assert pair.theirs.buffer[:9] == bytes(range(56, 64)) + b"\0"


@pytest.mark.parametrize("code", ["q", "Q", "i", "I"])
@pytest.mark.parametrize("base", [0, 5, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_row_is_refused_if_its_address_would_not_fit_64_bits(tap, stack, base, code):
    """``base + size * index`` is posted exactly, up to both ends."""
    pd = stack.enter_context(rp.PD(tap.context))
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    cq = stack.enter_context(rp.CQ(tap.context))
    qp = stack.enter_context(rp.QP(pd, rp.QPType.RC, cq))
    qp.connect(qp.endpoint())
    bits = 8 * array.array(code).itemsize
    lowest, highest = 0, (1 << bits) - 1
    if code.islower():
        lowest, highest = -1 << bits - 1, (1 << bits - 1) - 1
    end = 1 << 64
    for size in (0, 1, 8, (1 << 32) - 1, 1 << 63, end - 1):
        ends = (-base // size, (end - 1 - base) // size) if size else ()
        bounds = (*ends, lowest, highest, 0, 1 << 31, 1 << 63)
        near = {n + more for n in bounds for more in (-1, 0, 1)}
        for index in sorted(n for n in near if lowest <= n <= highest):
            address = base + size * index
            there = rp.Blocks(base, array.array(code, [0, index]), size)
            tap.chains.clear()
            if 0 <= address < end:
                assert qp.post_columns(rp.RdmaWrite, mr[:8], remote_addr=there, rkey=1) == 2
                assert [record.wr.wr.rdma.remote_addr for record in tap.last()] == [base, address]
                cq.wait(2)
            else:
                with pytest.raises(rp.PostError, match="remote_addr=") as caught:
                    qp.post_columns(rp.RdmaWrite, mr[:8], remote_addr=there, rkey=1)
                assert (caught.value.index, tap.chains) == (1, [])


def test_queue_pair_number_of_25_bits_in_a_column_is_refused(connect):
    ud = connect(rp.QPType.UD)
    fields = ud.wr(rp.Send)
    to = {"ah": fields.ah, "remote_qkey": fields.remote_qkey}
    with pytest.raises(rp.PostError) as caught:
        ud.a.post_columns(rp.Send, ud.mine[:8], remote_qpn=np.array([7, 1 << 24, 7]), **to)
    assert (caught.value.index, caught.value.posted) == (1, 0)
    assert caught.value.reason == alone(ud, rp.Send(ud.mine[:8], remote_qpn=1 << 24, **to))


def test_srq_number_of_25_bits_in_a_column_is_refused(soft):
    qp, columns = soft.qp(rp.QPType.XRC_SEND), {"remote_srqn": np.array([7, 1 << 24, 7])}
    with pytest.raises(rp.PostError, match="remote_srqn=0x1000000 is not an SRQ number") as caught:
        qp.post_columns(rp.Send, soft.mr[:8], **columns)
    assert (caught.value.index, caught.value.posted) == (1, 0)


@pytest.mark.parametrize("name", ["wr_id", "remote_addr"])
def test_columns_longer_than_memory_are_refused(rc, name):
    """A column of stride 0 takes no extra memory."""
    endless = np.broadcast_to(np.zeros(1, "i4"), 2**61 - 1)
    with pytest.raises(MemoryError):
        rc.a.post_columns(rp.RdmaWrite, rc.mine[:8], **{name: endless})
    assert rc.a.outstanding.send == 0


def test_post_columns_with_wrong_arguments_is_a_type_error(rc):
    index = np.arange(2)
    for args, fields in (
        ((rp.BindMW,), {"wr_id": index}),
        ((rp.TSO, rc.mine[:8]), {"wr_id": index}),
        ((rp.RecvWR, rc.mine[:8]), {"wr_id": index}),
        ((3,), {"wr_id": index}),
        ((rp.Send, rc.mine[:8]), {"wr_id": 3}),
        ((rp.Send, rc.mine.blocks(3, 8)), {}),
        ((rp.LocalInv, rc.mine[:8]), {"wr_id": index}),
    ):
        with pytest.raises(TypeError):
            rc.a.post_columns(*args, **fields)
    for args in ((), (rp.Send, rc.mine[:8], 3)):
        with pytest.raises(TypeError, match=r"^post_columns\(wr_type, /, sg_list, "):
            rc.a.post_columns(*args, wr_id=index)
    with pytest.raises(TypeError, match=r"^post_recv_columns\(sg_list, "):
        rc.a.post_recv_columns(rc.mine[:8], 3, wr_id=index)
    for call in (rc.mine.blocks, rc.mine.ranges, rp.Blocks, rc.a.post_recv_columns):
        with pytest.raises(TypeError):
            call()
    assert rc.a.outstanding == (0, 0)


def test_columns_without_a_required_field_are_refused(rc):
    """A tuple's own constructor checks nothing."""
    one = array.array("Q", [1])
    for fields in ((), (rc.mine,), (rc.mine, one), (rc.mine, one, 8, 8)):
        for kind in (rp.Blocks, type(rc.mine.ranges(0, 1))):
            rows = tuple.__new__(kind, fields)
            with pytest.raises(TypeError, match=f"{kind.__name__} has 3 fields, but this one has"):
                rc.a.post_columns(rp.RdmaWrite, rows, wr_id=one)
        with pytest.raises(TypeError, match="Blocks has 3 fields, but this one has"):
            rc.a.post_columns(rp.RdmaWrite, remote_addr=tuple.__new__(rp.Blocks, fields), wr_id=one)
    rc.works()


def test_region_of_a_subclass_has_blocks_and_ranges(rc, pd):
    class Region(rp.MR):
        pass

    with Region(pd, 4096, ALL) as mr:
        mr.buffer[:16] = b"0123456789abcdef"
        there = {"remote_addr": rc.theirs.addr, "rkey": rc.theirs.rkey}
        starts = array.array("q", [8])
        for rows in (mr.blocks(array.array("q", [1]), 8), mr.ranges(starts, 8)):
            rc.theirs.buffer[:8] = bytes(8)
            assert rc.a.post_columns(rp.RdmaWrite, rows, **there) == 1
            rc.wait()
            assert bytes(rc.theirs.buffer[:8]) == b"89abcdef"


@pytest.mark.parametrize("base", [rp.Blocks, Ranges])
def test_rows_of_a_subclass_are_read_as_the_tuple_that_they_are(rc, base):
    class Mine(base):
        def __getitem__(self, index):
            raise AssertionError("an item is asked for")

    rc.mine.buffer[:16] = b"0123456789abcdef"
    rows = Mine(rc.mine, array.array("q", [1, 0]), 8)
    there = Mine(rc.theirs.addr, array.array("q", [0, 1]), 8) if base is rp.Blocks else None
    remote = there or array.array("q", [rc.theirs.addr, rc.theirs.addr + 8])
    assert rc.a.post_columns(rp.RdmaWrite, rows, remote_addr=remote, rkey=rc.theirs.rkey) == 2
    rc.wait(1)
    first = 8 if base is rp.Blocks else 1
    data = bytes(rc.mine.buffer[:16])
    assert bytes(rc.theirs.buffer[:16]) == data[first : first + 8] + data[:8]
    short: Any = tuple.__new__(Mine, (rc.mine, 1))
    with pytest.raises(TypeError, match=f"{base.__name__} has 3 fields, but this one has 2"):
        rc.a.post_columns(rp.RdmaWrite, short, rkey=0, remote_addr=0)


def test_columns_of_more_receives_than_an_srq_can_number_are_refused(pd, rc):
    """Nothing is posted, and the region can be closed."""
    with rp.SRQ(pd, 16, 1) as srq, rp.MR(pd, 64, ALL) as mr:
        srq._recv.resize(1 << 25)  # deeper than any device's today
        for posted, count in ((0, 1 << 24), (1, (1 << 24) - 1)):
            many = np.broadcast_to(np.uint64(7), count)
            with pytest.raises(MemoryError, match="at most 16777215 receives"):
                srq.post_srq_recv_columns(mr[:8], wr_id=many)
            assert srq.outstanding == posted
            srq.post_srq_recv(rp.RecvWR())


def test_send_flags_are_the_same_for_all_rows(rc):
    assert write_blocks(rc, 3, send_flags=np.uint32(SendFlags.SIGNALED)) == 3
    rc.wait(3)


def test_numpy_numbers_are_accepted_where_columns_take_a_number(rc):
    assert write_blocks(rc, 2, wr_id=np.int64(5), signal_every=np.uint8(1)) == 2
    assert [wc.wr_id for wc in rc.wait(2)] == [5, 5]


@pytest.mark.parametrize("after", [0, 1, 127, 128, 200])
def test_rows_before_one_that_the_device_refuses_are_posted(deep, context, after):
    if context.name != "soft0":
        pytest.skip("a planned fault")
    context.faults.fail_post(errno.EPERM, after=after)
    with pytest.raises(rp.PostError) as caught:
        write_blocks(deep, 300, wr_id=np.arange(300))
    assert (caught.value.index, caught.value.posted, caught.value.count) == (after, after, 300)
    assert caught.value.wr.wr_id == after
    assert deep.a.outstanding.send == after
    assert [wc.check().wr_id for wc in deep.wait(after)] == list(range(after))
    write_blocks(deep, 2, wr_id=np.array([5, 6]))
    assert [wc.check().wr_id for wc in deep.wait(2)] == [5, 6]


@pytest.mark.parametrize("after", [0, 1, 5])
def test_receives_of_an_srq_before_one_that_the_device_refuses_are_posted(tap, stack, after):
    pd = stack.enter_context(rp.PD(tap.context))
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    srq = stack.enter_context(rp.SRQ(pd, 8))
    tap.refuse(passed=after, rc=errno.EPERM)
    with pytest.raises(rp.PostError) as caught:
        srq.post_srq_recv_columns(mr[:8], wr_id=np.arange(8))
    assert (caught.value.index, caught.value.posted, caught.value.count) == (after, after, 8)
    assert srq.outstanding == after
    tap.answer = None
    assert srq.post_srq_recv_columns(mr[:8], wr_id=np.arange(50)) == srq.max_wr - after


def test_rows_that_a_device_refuses_without_saying_where_may_all_be_posted(tap, stack):
    """They stay outstanding until their completions, or those of later ones, come."""
    pd = stack.enter_context(rp.PD(tap.context))
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    srq = stack.enter_context(rp.SRQ(pd, 8))
    tap.refuse(passed=2, rc=5, bad=NOWHERE)
    with pytest.raises(rp.PostError) as caught:
        srq.post_srq_recv_columns(mr[:8], wr_id=np.arange(8))
    error = caught.value
    assert (error.errno, error.index, error.posted, error.count) == (5, None, None, 8)
    assert srq.outstanding == 8


# ---- hostile callers ----------------------------------------------------------------------------


class Acting:
    """A number that does something when it is first read."""

    def __init__(self, act: Callable[[], object], number: int = 1) -> None:
        self.acts, self.number = [act], number

    def __index__(self) -> int:
        while self.acts:
            self.acts.pop()()
        return self.number


def test_change_to_a_column_that_the_post_has_read_has_no_effect(rc):
    ids = array.array("q", [1, 2, 3])

    def change() -> None:
        ids[:] = array.array("q", [7, 8])
        ids.extend(range(100000))

    got = write_blocks(rc, 3, wr_id=ids, signal_every=Acting(change))
    assert got == 3
    assert [wc.check().wr_id for wc in rc.wait(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        (array.array("q", [8]), "different lengths: lengths has 1 row, offsets has 2$"),
        (array.array("q", [8] * 3), "different lengths: lengths has 3 rows, offsets has 2$"),
        (array.array("d", [8, 8]), "^lengths: a column is a buffer"),
    ],
)
def test_error_about_ranges_names_the_wrong_argument(connect, lengths, text):
    for checked in (True, False):
        pair = connect(checked=checked)
        ranges = pair.theirs.ranges(array.array("q", [0, 8]), lengths)
        with pytest.raises((TypeError, ValueError), match=text):
            pair.b.post_recv_columns(ranges)
        assert pair.b.outstanding.recv == 0


def test_column_that_shrinks_before_it_is_read_is_refused_for_its_length(rc):
    index = array.array("q", range(50))
    with pytest.raises(ValueError, match="different lengths"):
        rc.a.post_columns(
            rp.RdmaWrite,
            rc.mine.blocks(index, 8),
            remote_addr=np.full(50, rc.theirs.addr),
            rkey=Acting(lambda: index.__delitem__(slice(1, None)), rc.theirs.rkey),
        )
    assert rc.a.outstanding.send == 0


@pytest.mark.parametrize("what", ["region", "queue pair"])
def test_resource_closed_while_columns_are_read_is_refused(rc, pd, what):
    lent = rp.MR(pd, 4096, ALL)
    closed = lent if what == "region" else rc.a
    with pytest.raises(rp.PostError if what == "region" else rp.ClosedError, match="closed"):
        rc.a.post_columns(
            rp.RdmaWrite,
            lent.blocks(np.arange(3), Acting(closed.close, 8)),
            remote_addr=np.full(3, rc.theirs.addr),
            rkey=rc.theirs.rkey,
        )
    lent.close()


def test_region_registered_again_while_columns_are_read_refuses_rows_outside_it(context, rc, pd):
    """Rows are compared with the region as it is when they are posted."""
    needs(context.kind == "soft", "ibv_rereg_mr", context)
    small, large = memoryview(bytearray(64)), memoryview(bytearray(4096))
    with rp.MR(pd, large, ALL) as lent:
        with pytest.raises(rp.RdmaError):
            rc.a.post_columns(
                rp.RdmaWrite,
                lent.blocks(np.arange(64), Acting(lambda: lent.rereg(memory=small), 64)),
                remote_addr=np.full(64, rc.theirs.addr),
                rkey=rc.theirs.rkey,
            )
        assert rc.a.outstanding.send == 0


def test_refused_row_that_is_mended_before_its_error_is_made_is_not_posted(rc):
    """The error may say less then."""
    rkeys = np.full(3, rc.theirs.rkey, "u8")
    rkeys[1] = 2**40

    def mend() -> None:
        rkeys[1] = rc.theirs.rkey

    with pytest.raises(rp.RdmaError):
        write_blocks_with(rc, 3, rkey=rkeys, wr_id=Acting(mend))
    assert rc.a.outstanding.send == 0


def write_blocks_with(pair: Pair, count: int, **fields: Any) -> int:
    index = np.arange(count)
    there = rp.Blocks(pair.theirs.addr, index, 16)
    return pair.a.post_columns(
        rp.RdmaWrite, pair.mine.blocks(index, 16), remote_addr=there, **fields
    )


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 knows no __buffer__")
def test_column_whose_buffer_differs_at_each_export_is_refused_or_posted_safely(rc):
    exported = []

    class Hostile:
        def __buffer__(self, flags: int) -> memoryview:
            exported.append(memoryview(array.array("q", range(3 + 5 * len(exported)))))
            return exported[-1]

        def __release_buffer__(self, view: memoryview) -> None:
            view.release()
            rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8], wr_id=77))

    hostile = Hostile()
    assert write_blocks(rc, 3, wr_id=hostile) == 3
    with pytest.raises(ValueError, match="different lengths"):
        write_blocks(rc, 3, wr_id=hostile)
    assert [wc.check().wr_id for wc in rc.wait(5)] == [77, 0, 1, 2, 77]


class Key(str):
    """A name of an argument that is not equal to another with the same text."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


def test_keyword_of_columns_given_many_times_is_refused(rc):
    keys = np.full(2, rc.theirs.rkey)
    with pytest.raises(TypeError):
        rc.a.post_columns(rp.RdmaWrite, **{Key("rkey"): keys for _ in range(60)})
    assert write_blocks(rc, 1) == 1


def test_row_refused_for_a_number_that_then_changes_is_still_a_post_error(rc):
    values = [-1, 5, 5]

    class Changing:
        def __index__(self) -> int:
            return values.pop(0)

    with pytest.raises(rp.PostError, match="no longer applies") as caught:
        write_blocks(rc, 2, remote_addr=Changing())
    assert caught.value.errno == errno.EBUSY
    assert (caught.value.index, caught.value.posted) == (0, 0)
    assert rc.a.outstanding.send == 0


def test_queue_pair_can_be_closed_in_another_thread_while_a_refused_row_is_read_again(rc):
    ended: list[bool] = []

    class Closing:
        readings = 0

        def __index__(self) -> int:
            self.readings += 1
            if self.readings > 1:
                ended.append(closed_elsewhere(rc.a))
            return -1

    with pytest.raises(rp.RdmaError):
        write_blocks(rc, 2, remote_addr=Closing())
    assert ended
    assert all(ended)


def test_columns_that_post_columns_without_end_raise_recursion_error(rc):
    """Each column's number is read by posting again; the C stack must hold all of them."""

    class Nested:
        def __index__(self) -> int:
            return write_blocks(rc, 1, remote_addr=self)

    with pytest.raises(RecursionError):
        write_blocks(rc, 1, remote_addr=Nested())
    assert rc.a.outstanding.send == 0
    assert write_blocks(rc, 1) == 1


# ---- the same as one by one ---------------------------------------------------------------------


def one_by_one(pair: Pair, wr_type: type, rows: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Post rows alone, if all pass the checks; return what came of it."""
    wrs = [wr_type(**row) for row in rows]
    for index, wr in enumerate(wrs):
        try:
            pair.a.prepare([wr]).close()
        except rp.PostError as error:
            return "refused", index, error.reason, 0
    room = pair.a.max_send_wr - pair.a.outstanding.send
    posted = wrs[:room]
    if posted:
        posted[-1].send_flags |= SendFlags.SIGNALED
    for wr in posted:
        pair.a.post_send(wr)
    return "posted", len(posted)


def by_columns(pair: Pair, wr_type: type, *args: Any, **fields: Any) -> tuple[Any, ...]:
    try:
        return "posted", pair.a.post_columns(wr_type, *args, **fields)
    except rp.PostError as error:
        return "refused", error.index, error.reason, error.posted


def maybe_column(draw: random.Random, numbers: list[int]) -> Any:
    """Return numbers as a buffer of a type and stride that can hold them."""
    kinds = [
        kind
        for kind in ("i4", "u4", "i8", "u8")
        if all(np.iinfo(kind).min <= number <= np.iinfo(kind).max for number in numbers)
    ]
    stride = draw.choice([1, 1, 2, -1])
    column = np.zeros(len(numbers) * abs(stride), draw.choice(kinds))[::stride]
    column[:] = numbers
    return column


@pytest.mark.parametrize("seed", range(34))
def test_random_columns_do_what_the_same_work_requests_do_alone(connect, seed):
    """Bytes, completions, errors and indices are the same."""
    draw = random.Random(seed)
    options = {"max_send_wr": 40, "max_recv_wr": 64, "max_inline_data": 32, "size": 2048}
    pairs = [connect(**options) for _ in range(2)]
    for _ in range(60):
        wr_type = draw.choice((*REMOTE, rp.Send, rp.SendWithImm))
        receives, has_imm = wr_type not in QUIET, wr_type in WITH_IMM
        count = draw.choice([1, 2, 3, 17, 45])
        atomic = wr_type in QUIET[2:]
        size = 8 if atomic and draw.random() < 0.9 else draw.choice([1, 8, 24, 64])
        index = [draw.randrange(2048 // size) for _ in range(count)]
        target = [8 * draw.randrange(240) for _ in range(count)]
        lengths = [draw.randrange(1, 65) for _ in range(count)]
        ids = [draw.randrange(2**64) for _ in range(count)]
        operands = [draw.randrange(2**64) for _ in range(count)]
        imm_data = [draw.randrange(2**32) for _ in range(count)]
        if draw.random() < 0.3:
            spoiled, value = draw.choice([index, target, lengths]), draw.choice([-1, 2**31, 12345])
            spoiled[draw.randrange(count)] = value
        every, flags = draw.choice([1, 2, 16, 99]), draw.choice([0, 0, int(SendFlags.INLINE)])
        with_lengths = draw.random() < 0.3 and not atomic
        wide = maybe_column(draw, index), maybe_column(draw, lengths)
        outcomes = []
        for by, pair in enumerate(pairs):
            fill(pair, seed)
            pair.theirs.buffer[:] = random.Random(seed + 1).randbytes(2048)
            start, there = pair.mine.addr, pair.theirs
            common: dict[str, Any] = {"rkey": there.rkey} if wr_type in REMOTE else {}
            if receives and by:
                blocks = there.blocks(np.arange(count) % 32, 64)
                assert pair.b.post_recv_columns(blocks, wr_id=np.array(ids, "u8")) == count
            elif receives:
                slots = [there[i % 32 * 64 : i % 32 * 64 + 64] for i in range(count)]
                pair.b.post_recv(list(map(rp.RecvWR, slots, ids)))
            if by:
                local = (
                    pair.mine.ranges(wide[0], wide[1])
                    if with_lengths
                    else pair.mine.blocks(wide[0], size)
                )
                if atomic:
                    common["compare_add"] = np.array(operands, "u8")
                if has_imm:
                    common["imm_data"] = maybe_column(draw, imm_data)
                if wr_type in REMOTE:
                    common["remote_addr"] = rp.Blocks(there.addr, maybe_column(draw, target), 1)
                outcome = by_columns(
                    pair,
                    wr_type,
                    local,
                    wr_id=np.array(ids, "u8"),
                    signal_every=every,
                    send_flags=flags,
                    **common,
                )
            else:
                rows = []
                for i in range(count):
                    at = index[i] * (1 if with_lengths else size)
                    length = lengths[i] if with_lengths else size
                    signaled = int(SendFlags.SIGNALED) if (i + 1) % every == 0 else 0
                    row = {
                        "sg_list": rp.SGE(start + at, length, pair.mine.lkey, pair.mine),
                        "wr_id": ids[i],
                        "send_flags": flags | signaled,
                        **common,
                    }
                    if atomic:
                        row["compare_add"] = operands[i]
                    if has_imm:
                        row["imm_data"] = imm_data[i]
                    if wr_type in REMOTE:
                        row["remote_addr"] = there.addr + target[i]
                    rows.append(row)
                outcome = one_by_one(pair, wr_type, rows)
            wcs: list[rp.WC] = []
            if outcome[0] == "posted":
                while pair.a.outstanding.send:
                    wcs += pair.cq.wait(1)
            # The CQ may still get completions of the queue pairs that failed before.
            sent = [wc for wc in wcs if wc.qp_num == pair.a.qp_num]
            failed = any(wc.status is not WCStatus.SUCCESS for wc in sent)
            if outcome[0] == "posted" and receives and not failed:
                while pair.b.outstanding.recv > count - outcome[1]:
                    wcs += pair.cq.wait(1)
            if failed:
                # How much of the peer's has been polled by then is chance.
                wcs = sent
            done = sorted(
                (wc.qp_num == pair.b.qp_num, at, wc.wr_id, wc.status, wc.byte_len, wc.imm_data)
                for side in (pair.a, pair.b)
                for at, wc in enumerate(wc for wc in wcs if wc.qp_num == side.qp_num)
            )
            if outcome[0] == "refused":
                outcome = (*outcome[:2], normal(outcome[2]), outcome[3])
            outcomes.append((outcome, done, bytes(pair.mine.buffer), bytes(pair.theirs.buffer)))
            if failed or pair.b.outstanding.recv:
                # Not reset: on Linux 6.12 rxe may move a queue pair to ERR after its reset.
                pairs[by] = connect(**options)
        assert outcomes[0] == outcomes[1], (seed, wr_type, count)


def normal(text: str) -> str:
    """Leave out addresses and keys, which differ between pairs."""
    return re.sub(r"0x[0-9a-f]+|=-?\d{6,}", "?", text)


@pytest.mark.parametrize(
    "post",
    [
        lambda: rp.QP.__new__(rp.QP).post_columns(rp.LocalInv, invalidate_rkey=[1]),
        lambda: rp.QP.__new__(rp.QP).post_recv_columns(wr_id=[1]),
        lambda: rp.SRQ.__new__(rp.SRQ).post_srq_recv_columns(wr_id=[1]),
    ],
)
def test_columns_on_a_queue_that_was_never_initialised_raise_closed_error(post):
    with pytest.raises(rp.ClosedError, match="is closed"):
        post()


def test_receives_of_a_queue_pair_with_an_srq_are_refused_with_what_to_use(pd, cq, stack):
    srq = stack.enter_context(rp.SRQ(pd, 4))
    qp = stack.enter_context(rp.QP(pd, rp.QPType.RC, cq, srq=srq))
    with pytest.raises(rp.RdmaError, match=r"post_srq_recv_columns\(\)"):
        qp.post_recv_columns(wr_id=np.arange(2))


def test_post_refused_for_a_state_that_has_since_changed_names_both_states(rc):
    """The state is read after the refusal, and another thread may have changed it."""
    from rdmapost.resources import qp as module

    assert "was not ready to send; it is now in RTS" in module._why_not_sending(rc.a)
    assert "was in RESET; it is now in RTS" in module._why_not_receiving(rc.a)
    rc.a.to_reset()
    assert "the QP is in RESET; bring it to RTS" in module._why_not_sending(rc.a)
    assert "the QP is in RESET; receives" in module._why_not_receiving(rc.a)

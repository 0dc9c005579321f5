"""Completions as rows of a buffer: ``poll_into`` and ``wait_into``."""

from __future__ import annotations

import array
import ctypes
import pickle
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import cffi
import numpy as np
import pytest
from support import LOSES_MEMORY, ROOT, Pair, prints, until
from support.hidden_fields import structure_that_hides

import rdmapost as rp
from rdmapost import WCOpcode, WCStatus

TESTS = ROOT / "tests"


def rows(count: int) -> Any:
    """Return an array filled with values that no real completion has."""
    return np.frombuffer(bytearray(b"\xee" * 48 * count), rp.WC_DTYPE)


def write(pair: Pair, count: int, first: int = 0) -> None:
    """Write 8 bytes so many times, by columns; each completes."""
    pair.a.post_columns(
        rp.RdmaWrite,
        pair.mine.blocks(np.arange(count), 8),
        remote_addr=rp.Blocks(pair.theirs.addr, np.arange(count), 8),
        rkey=pair.theirs.rkey,
        wr_id=np.arange(count, dtype="u8") + np.uint64(first),
    )


def settle(pair: Pair, count: int) -> None:
    """Wait until so many completions can be polled."""
    pair.cq._poller.put_back(pair.cq.wait(count))


def test_completions_of_columns_and_objects_are_written_as_rows(rc):
    write(rc, 5, first=2**63)
    rc.a.post_send(rc.wr(rp.RdmaRead, rc.mine[:24], wr_id=2**64 - 1))
    got = rows(8)
    assert rc.cq.wait_into(got, 6) == 6
    assert got["wr_id"][:6].tolist() == [2**63 + i for i in range(5)] + [2**64 - 1]
    assert set(got["status"][:6]) == {WCStatus.SUCCESS}
    assert got["opcode"][:6].tolist() == [WCOpcode.RDMA_WRITE] * 5 + [WCOpcode.RDMA_READ]
    assert set(got["qp_num"][:6]) == {rc.a.qp_num}
    assert got["byte_len"][5] == 24
    assert bytes(got[6:]) == b"\xee" * 96
    assert rc.a.outstanding.send == 0
    assert rc.cq.poll_into(got) == 0


def test_rows_say_what_the_same_completions_say(rc):
    """Whether they are polled as rows at first, or have been WCs, or stay for later."""
    rc.b.post_recv_columns(rc.theirs.blocks(np.arange(6), 16), wr_id=np.arange(6))
    rc.a.post_columns(
        rp.SendWithImm, rc.mine.blocks(np.arange(6), 16), imm_data=np.arange(1, 7), wr_id=100
    )
    wcs = rc.cq.wait(12)
    rc.cq._poller.put_back(wcs)
    got = rows(12)
    assert rc.cq.poll_into(got[:5]) == 5
    assert rc.cq.poll_into(got[5:]) == 7
    for wc, row in zip(wcs, got, strict=True):
        for name in ("wr_id", "status", "opcode", "byte_len", "qp_num", "src_qp", "wc_flags"):
            assert row[name] == getattr(wc, name), name
        assert row["imm_data"] == (wc.imm_data or 0)
    rc.b.post_recv_columns(rc.theirs.blocks(np.arange(6), 16), wr_id=np.arange(6))
    rc.a.post_columns(
        rp.SendWithImm, rc.mine.blocks(np.arange(6), 16), imm_data=np.arange(1, 7), wr_id=100
    )
    direct, found = rows(12), 0
    deadline = time.monotonic() + 10
    while found < 12 and time.monotonic() < deadline:
        found += rc.cq.poll_into(direct[found:])
    assert sorted(direct.tolist()) == sorted(got.tolist())


@pytest.mark.parametrize("posts", [1, 2, 4, 8, 16, 32, 64])
def test_rows_of_several_posts_by_columns_have_their_own_wr_ids(connect, posts):
    pair = connect(max_send_wr=128)
    for i in range(posts):
        write(pair, 2, first=2 * i)
    got, found = rows(2 * posts), 0
    deadline = time.monotonic() + 10
    while found < 2 * posts and time.monotonic() < deadline:
        found += pair.cq.poll_into(got[found:])
    assert got["wr_id"].tolist() == [*range(2 * posts)]


def test_rows_of_queue_pairs_that_post_columns_in_turn_have_their_own_wr_ids(rc):
    for i in range(0, 16, 2):
        (rc.a, rc.b)[i // 2 % 2].post_columns(
            rp.RdmaWrite,
            rc.mine.blocks(np.arange(2), 8),
            remote_addr=rc.theirs.addr,
            rkey=rc.theirs.rkey,
            wr_id=np.arange(i, i + 2, dtype="u8"),
        )
    got, found = rows(16), 0
    deadline = time.monotonic() + 10
    while found < 16 and time.monotonic() < deadline:
        found += rc.cq.poll_into(got[found:])
    for first, qp in ((0, rc.a), (2, rc.b)):
        wr_ids = got["wr_id"][got["qp_num"] == qp.qp_num].tolist()
        assert wr_ids == [i + j for i in range(first, 16, 4) for j in (0, 1)]


def test_rows_are_in_the_order_of_the_completions_wherever_these_were_before(rc):
    """Some have been polled already, for a wait that wanted more."""
    write(rc, 6)
    until(lambda: rc.cq._poller.fill(rc.cq, 2) >= 2)
    got, found = rows(6), 0
    deadline = time.monotonic() + 10
    while found < 6 and time.monotonic() < deadline:
        found += rc.cq.poll_into(got[found:])
    assert got["wr_id"].tolist() == [*range(6)]


def test_failed_completion_has_what_is_valid_and_zeros(rc):
    rc.a.post_send(rp.RdmaWrite(rc.mine[:8], wr_id=9, remote_addr=rc.theirs.addr, rkey=1))
    got = rows(1)
    assert rc.cq.wait_into(got) == 1
    (row,) = got
    assert row["wr_id"] == 9
    assert row["status"] == WCStatus.REM_ACCESS_ERR
    assert row["qp_num"] == rc.a.qp_num
    assert [row[name] for name in ("opcode", "byte_len", "imm_data", "wc_flags")] == [0] * 4


def test_one_call_of_wait_into_fills_more_rows_than_are_polled_at_a_time(connect):
    pair = connect(max_send_wr=300)
    write(pair, 300)
    settle(pair, 100)
    got = rows(400)
    assert pair.cq.wait_into(got, 300) == 300
    assert got["wr_id"][:300].tolist() == list(range(300))


@pytest.mark.parametrize("by", ["poll_into", "wait_into"])
def test_buffer_of_more_rows_than_are_polled_at_a_time_is_filled_and_no_more(connect, context, by):
    """The device is polled for 64 at a time."""
    pair = connect(max_send_wr=300)
    write(pair, 200)
    got, found = rows(200), 0
    if by == "wait_into":
        found = pair.cq.wait_into(got[:100], 1)
    while not found:
        found = pair.cq.poll_into(got[:100])
    assert got["wr_id"][:found].tolist() == [*range(found)]
    assert bytes(got[found:]) == b"\xee" * 48 * (200 - found)
    # A real device may not have completed all of them.
    assert found == 100 if context.kind == "soft" else found <= 100
    assert [wc.wr_id for wc in pair.wait(200 - found)] == [*range(found, 200)]


def test_completions_that_the_buffer_of_wait_into_cannot_hold_stay_in_the_cq(rc):
    write(rc, 10)
    got = rows(4)
    seen = []
    for expected in (4, 4, 2):
        assert rc.cq.wait_into(got, 2) == expected
        seen += got["wr_id"][:expected].tolist()
    assert seen == list(range(10))


def test_poll_into_takes_any_writable_buffer_of_whole_rows(rc):
    for buffer in (bytearray(96), array.array("q", bytes(96)), memoryview(bytearray(96))):
        write(rc, 2, first=7)
        assert rc.cq.wait_into(buffer, 2) == 2
        assert memoryview(buffer).cast("B")[:8].cast("Q")[0] == 7
    assert rc.cq.poll_into(bytearray()) == 0


def released() -> memoryview:
    view = memoryview(bytearray(48))
    view.release()
    return view


@pytest.mark.parametrize(
    ("buffer", "error", "text"),
    [
        (
            bytes(48),
            TypeError,
            "^buffer: expected a writable buffer, got bytes, which is read-only$",
        ),
        (
            memoryview(bytearray(96))[::2],
            ValueError,
            "^buffer: expected a contiguous buffer, got memoryview, which is not contiguous$",
        ),
        (
            np.zeros(96, "u1")[::2],
            ValueError,
            "^buffer: expected a contiguous buffer, got ndarray, which is not contiguous$",
        ),
        (bytearray(50), ValueError, "whole rows of 48 bytes"),
        ([1], TypeError, "^buffer: expected a writable buffer, got list$"),
        (None, TypeError, "^buffer: expected a writable buffer, got NoneType$"),
        (released(), ValueError, "^buffer: operation forbidden on released memoryview object$"),
    ],
    ids=[
        "bytes",
        "memoryview with gaps",
        "array with gaps",
        "part of a row",
        "list",
        "None",
        "released memoryview",
    ],
)
def test_poll_into_refuses_unsuitable_buffers_and_loses_no_completion(rc, buffer, error, text):
    write(rc, 1)
    with pytest.raises(error, match=text):
        rc.cq.poll_into(buffer)
    for count in (1, 3):
        with pytest.raises(error, match=text):
            rc.cq.wait_into(buffer, count, timeout=0.1)
    assert [wc.wr_id for wc in rc.wait(1)] == [0]


def test_wait_into_that_times_out_or_cannot_fit_leaves_the_completions(rc):
    write(rc, 2)
    with pytest.raises(rp.WaitTimeout, match="2"):
        rc.cq.wait_into(rows(3), 3, timeout=0.05)
    with pytest.raises(ValueError, match="count=3"):
        rc.cq.wait_into(rows(2), 3)
    with pytest.raises(ValueError, match="count=-1 is negative"):
        rc.cq.wait_into(rows(2), -1)
    assert rc.cq.wait_into(rows(3), 2) == 2


class Exporter:
    """A class with __buffer__, which Python 3.12 knows."""

    def __init__(self, *memories) -> None:
        self.memories = list(memories)

    def __buffer__(self, flags):
        return memoryview(self.memories.pop(0))


def _completions_beside_objects() -> Any:
    """Make a view whose format is that of WC_DTYPE, although its rows are longer."""
    fields = np.dtype(rp.WC_DTYPE).fields
    records = np.dtype([*[(name, fields[name][0]) for name in fields], ("o", object)], align=True)
    view = np.zeros(6, records)[list(fields)]
    assert memoryview(view).format == memoryview(np.zeros(6, rp.WC_DTYPE)).format
    return view


POINTERS = {
    "objects in a packed structure hidden by its metaclass": structure_that_hides(
        [("objects", ctypes.py_object * 6)]
    ),
    "objects": lambda: np.zeros(6, object),
    "records with objects": lambda: np.zeros(6, [("a", "u8"), ("b", object)]),
    "some fields of records with objects": lambda: np.zeros(6, [("a", "u8"), ("b", object)])[["a"]],
    "all fields of WC_DTYPE, of records with objects": lambda: _completions_beside_objects(),
    "ctypes objects": lambda: (ctypes.py_object * 6)(),
    "ctypes strings": lambda: (ctypes.c_char_p * 6)(),
    "memoryview": lambda: memoryview(np.zeros(6, object)),
    "__buffer__": lambda: Exporter(*[np.zeros(6, object)] * 2),
}


@pytest.mark.parametrize("by", ["poll_into", "wait_into"])
@pytest.mark.parametrize("name", POINTERS)
def test_poll_into_and_wait_into_refuse_a_buffer_of_pointers(rc, by, name):
    if name == "__buffer__" and sys.version_info < (3, 12):
        pytest.skip("classes have no __buffer__ before Python 3.12")
    write(rc, 1)
    with pytest.raises(TypeError, match=r"would overwrite (references|pointers)"):
        getattr(rc.cq, by)(POINTERS[name]())
    assert [wc.wr_id for wc in rc.cq.wait()] == [0]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="classes have no __buffer__")
def test_buffer_of_poll_into_that_changes_between_calls_is_checked(rc):
    write(rc, 1)
    with pytest.raises(TypeError, match="references to Python objects"):
        rc.cq.poll_into(Exporter(bytearray(48), np.zeros(6, object)))
    assert [wc.wr_id for wc in rc.cq.wait()] == [0]


def test_buffer_of_poll_into_is_free_after_the_call(rc):
    buffer = bytearray(48)
    assert rc.cq.poll_into(buffer) == 0
    buffer.extend(b"x")  # a BufferError while it is exported


def test_waits_for_rows_and_wcs_share_a_queue(rc):
    """Each gets its own number, and together all."""
    seen: list[int] = []

    def take() -> None:
        got = rows(1)
        for _ in range(20):
            assert rc.cq.wait_into(got, 1, timeout=20) == 1
            seen.append(int(got["wr_id"][0]))

    thread = threading.Thread(target=take)
    thread.start()
    for i in range(40):
        write(rc, 1, first=i)
    for _ in range(20):
        seen += [wc.wr_id for wc in rc.cq.wait(1, timeout=20)]
    thread.join(30)
    assert sorted(seen) == list(range(40))


def test_rows_of_poll_into_may_start_at_any_address(rc):
    memory = bytearray(48 * 3)
    for by in (rc.cq.poll_into, rc.cq.wait_into):
        for at in (1, 2, 7):
            write(rc, 1, first=2**40)
            settle(rc, 1) if at == 2 else None
            while not by(memoryview(memory)[at : at + 48]):
                pass
            assert int.from_bytes(memory[at : at + 8], sys.byteorder) == 2**40


LACKS_MEMORY = """
import _testcapi, contextlib, sys
sys.path.insert(0, sys.argv[1])
import array, rdmapost as rp
from support import Pair

by, where, count, lost = sys.argv[2], sys.argv[3], 300, []
got = bytearray(48 * 400)
if sys.argv[4] == "array":
    import numpy
    got = numpy.zeros(2400, "u8")
with contextlib.ExitStack() as stack:
    context = stack.enter_context(rp.open_device("soft0"))
    pd, cq = stack.enter_context(rp.PD(context)), stack.enter_context(rp.CQ(context, 1024))
    pair = Pair(stack, pd, cq, rp.QPType.RC, max_send_wr=512)
    index, rest = array.array("q", range(count)), bytearray(48 * 400)
    call = (lambda: cq.poll_into(got)) if by == "poll_into" else lambda: cq.wait_into(got, count)
    def wr_ids(buffer, rows): return [*memoryview(buffer).cast("B")[:48 * rows].cast("Q")[::6]]
    for at in range(24):
        pair.a.post_columns(
            rp.RdmaWrite, pair.mine.blocks(index, 8), remote_addr=pair.theirs.addr,
            rkey=pair.theirs.rkey, wr_id=array.array("Q", range(count)),
        )
        if where == "backlog": assert cq._poller.fill(cq, count) == count
        if where == "WCs": cq._poller.put_back(cq.wait(count))
        _testcapi.set_nomemory(at, at + 1)
        try: found = call()
        except MemoryError: found = 0
        finally: _testcapi.remove_mem_hooks()
        more = cq.poll_into(rest)
        if wr_ids(got, found) + wr_ids(rest, more) != [*range(count)]: lost.append(at)
print(lost)
"""


@pytest.mark.parametrize("where", ["device", "backlog", "WCs"])
@pytest.mark.parametrize("by", ["poll_into", "wait_into"])
@pytest.mark.parametrize("buffer", ["bytearray", "array"])
def test_poll_into_that_runs_out_of_memory_says_so_and_loses_no_completion(by, where, buffer):
    """The number of rows is an object, too, and an array needs memory to show its own.

    An interrupt has left the completions undelivered: as they were polled, or as WCs.
    """
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    assert prints(LACKS_MEMORY, str(TESTS), by, where, buffer, **LOSES_MEMORY) == "[]"


def test_poll_into_is_refused_as_deep_within_other_calls_as_a_post(rc):
    """Then the stack may have no room for it."""
    refused = []

    def is_refused(call: Callable[[], object]) -> bool:
        try:
            call()
        except RecursionError:
            return True
        return False

    class Nested:
        def __index__(self) -> int:
            polled = is_refused(lambda: rc.cq.poll_into(array.array("q", bytes(48))))
            posted = is_refused(lambda: rc.b.post_recv(rp.RecvWR(wr_id=self)))
            refused.append((polled, posted))
            return 0

    rc.b.post_recv(rp.RecvWR(wr_id=Nested()))
    assert refused == [(True, True), *[(False, False)] * (len(refused) - 1)]


def test_poll_into_takes_an_empty_buffer_without_an_address(rc):
    ffi = cffi.FFI()
    nowhere = ffi.buffer(ffi.cast("char *", 0), 0)
    assert rc.cq.poll_into(nowhere) == 0
    assert rc.cq.wait_into(nowhere, 0) == 0
    write(rc, 1)
    assert rc.cq.wait_into(nowhere, 0) == 0
    assert len(rc.cq.wait(1, 10)) == 1


def test_poll_into_on_a_cq_that_was_never_initialised_raises_closed_error():
    with pytest.raises(rp.ClosedError, match="CQ is closed"):
        rp.CQ.__new__(rp.CQ).poll_into(bytearray(48))


def test_help_describes_the_fields_of_a_row():
    assert np.dtype(rp.WC_DTYPE).itemsize == 48
    text = rp.WC_DTYPE.__doc__
    assert text is not None
    for name in rp.WC_DTYPE["names"]:
        assert re.search(rf"\b{name}\b", text), name


def test_row_type_is_from_the_public_module_and_pickled_as_a_plain_dict():
    assert rp.WC_DTYPE.__module__ == "rdmapost"
    read = pickle.loads(pickle.dumps(rp.WC_DTYPE))
    assert type(read) is dict
    assert np.dtype(read) == np.dtype(rp.WC_DTYPE)


def test_poll_into_and_wait_into_on_a_closed_cq_raise_closed_error(context):
    cq = rp.CQ(context)
    cq.close()
    with pytest.raises(rp.ClosedError):
        cq.poll_into(rows(1))
    with pytest.raises(rp.ClosedError):
        cq.wait_into(rows(1))


def test_buffer_cannot_be_resized_while_a_wait_fills_it(rc):
    """And the wait ends as ever."""
    got, seen = bytearray(48 * 4), []
    thread = threading.Thread(target=lambda: seen.append(rc.cq.wait_into(got, 1, timeout=20)))
    thread.start()
    deadline = time.monotonic() + 20
    while not rc.cq._poller.waiting and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(BufferError):
        got.extend(b"x")
    write(rc, 1, first=9)
    thread.join(20)
    assert seen == [1]
    assert int.from_bytes(got[:8], sys.byteorder) == 9
    got.extend(b"x")


@pytest.mark.parametrize("make", [bytearray, lambda room: array.array("q", bytes(room))])
def test_buffer_cannot_be_resized_while_poll_into_drops_what_was_posted(rc, make):
    """The last reference to a region may run any code."""
    got, refused = make(48 * 4), []

    def resize(_: object) -> None:
        try:
            got.append(1)
        except BufferError:
            refused.append(True)

    region = rp.MR(rc.pd, 64)
    watch = weakref.ref(region, resize)
    rc.a.post_send(rc.wr(rp.RdmaWrite, region[:8]))
    del region
    until(lambda: rc.cq.poll_into(got))
    assert refused == [True]
    assert watch() is None


@pytest.mark.parametrize("offset", range(1, 8))
def test_rows_may_be_at_any_address(rc, offset):
    write(rc, 3, first=5)
    got = bytearray(b"\xee" * (48 * 3 + 8))
    with memoryview(got)[offset : offset + 144] as part:
        assert rc.cq.wait_into(part, 3) == 3
        assert np.frombuffer(part, rp.WC_DTYPE)["wr_id"].tolist() == [5, 6, 7]
    assert got[:offset] == b"\xee" * offset
    assert got[offset + 144 :] == b"\xee" * (8 - offset)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 knows no __buffer__")
def test_buffer_that_closes_the_cq_loses_nothing_but_the_call(context):
    cq = rp.CQ(context)

    class Closing:
        def __buffer__(self, flags: int) -> memoryview:
            cq.close()
            return memoryview(bytearray(48))

    with pytest.raises(rp.ClosedError):
        cq.poll_into(Closing())

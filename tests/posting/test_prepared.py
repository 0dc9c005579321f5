"""Prepared lists: posted repeatedly, changed in place, and never with memory that is gone."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import signal
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
from support import ALL, Connect, Pair, in_flight, needs, prints, watching
from support.in_flight import gone, why_open, write_from
from support.interrupts import Moment, interrupt_at_each_moment
from support.soft_queues import Soft

import rdmapost as rp
from rdmapost import QPState, QPType, SendFlags, WCStatus
from rdmapost.posting.fields import NUMBER_FIELDS

pair = in_flight.pair
watched = watching.watched


def write(pair: Pair, at: int = 0, wr_id: int = 0) -> rp.RdmaWrite:
    """Make a write of 8 bytes to the same place of the peer's memory."""
    return rp.RdmaWrite(
        pair.mine[at : at + 8],
        wr_id=wr_id,
        remote_addr=pair.theirs.addr + at,
        rkey=pair.theirs.rkey,
    )


def test_prepared_list_is_posted_many_times(rc):
    """Each post sends the memory's current contents, and completes with the caller's wr_ids."""
    batch = rc.a.prepare([write(rc, 8 * i, wr_id=100 + i) for i in range(4)])
    for turn in range(10):
        rc.mine.buffer[:32] = bytes([turn]) * 32
        batch.post()
        assert [wc.wr_id for wc in rc.wait(4)] == [100, 101, 102, 103]
        assert bytes(rc.theirs.buffer[:32]) == bytes([turn]) * 32
    assert rc.a.outstanding.send == 0


def test_post_of_a_prepared_list_takes_no_arguments(rc):
    batch = rc.a.prepare(write(rc))
    with pytest.raises(TypeError, match=r"^post\(\) takes no arguments"):
        batch.post(1)  # type: ignore[call-arg]
    assert rc.a.outstanding.send == 0


def test_prepared_and_ordinary_posts_complete_in_the_order_of_their_posts(rc):
    """Prepared lists and ordinary posts share a queue, and complete in the order of the posts."""
    batch = rc.a.prepare([write(rc, wr_id=1), write(rc, wr_id=2)])
    rc.a.post_send(write(rc, wr_id=3))
    batch.post()
    rc.a.post_send([write(rc, wr_id=4), write(rc, wr_id=5)])
    batch.post()
    assert rc.a.outstanding.send == 7
    assert [wc.wr_id for wc in rc.wait(7)] == [3, 1, 2, 4, 5, 1, 2]


def test_unsignaled_work_requests_are_done_with_the_next_completion(rc):
    silent, last = write(rc, wr_id=1), write(rc, wr_id=2)
    silent.send_flags = SendFlags(0)
    batch = rc.a.prepare([silent, silent, last])
    batch.post()
    batch.post()
    assert rc.a.outstanding.send == 6
    assert [wc.wr_id for wc in rc.wait(2)] == [2, 2]
    assert rc.a.outstanding.send == 0


def test_fields_of_a_prepared_list_are_changed_in_place(rc):
    """A change affects later posts, not outstanding ones."""
    batch = rc.a.prepare([write(rc, wr_id=1)])
    batch.post()
    batch[0].wr_id = 2
    batch[0].remote_addr = rc.theirs.addr + 64
    batch[0].sg_list = rc.mine[256:264]
    rc.mine.buffer[:8], rc.mine.buffer[256:264] = b"the old!", b"the new!"
    batch.post()
    assert [wc.wr_id for wc in rc.wait(2)] == [1, 2]
    assert bytes(rc.theirs.buffer[64:72]) == b"the new!"
    assert batch[0].wr_id == 2
    assert batch[0].remote_addr == rc.theirs.addr + 64
    assert batch[0].sg_list == (rc.mine[256:264],)


def test_immediate_data_of_a_prepared_list_is_changed_in_place(rc):
    """In host order, as in the work request."""
    batch = rc.a.prepare(rp.SendWithImm(rc.mine[:8], imm_data=0x01020304))
    for imm in (0x01020304, 0xFFFF_FFFF, 7):
        rc.b.post_recv(rp.RecvWR(rc.theirs[:64]))
        batch[0].imm_data = imm
        assert batch[0].imm_data == imm
        batch.post()
        assert {wc.imm_data for wc in rc.wait(2)} == {None, imm}


def test_operands_of_a_prepared_atomic_are_changed_in_place(rc):
    rc.theirs.buffer[:16] = struct.pack("=QQ", 5, 70)
    swap = rp.AtomicCmpAndSwp(
        rc.mine[:8], remote_addr=rc.theirs.addr, rkey=rc.theirs.rkey, compare_add=5, swap=6
    )
    batch = rc.a.prepare(swap)
    batch.post()
    batch[0].wr_id = 9
    batch[0].compare_add, batch[0].swap = 70, 71
    batch[0].remote_addr += 8
    batch[0].rkey = rc.theirs.rkey
    batch.post()
    assert [wc.wr_id for wc in rc.wait(2)] == [0, 9]
    assert struct.unpack("=QQ", rc.theirs.buffer[:16]) == (6, 71)
    with pytest.raises(ValueError, match="not a multiple of 8"):
        batch[0].remote_addr = rc.theirs.addr + 4


def test_receives_can_be_prepared(rc):
    receives = rc.b.prepare_recv([rp.RecvWR(rc.theirs[i * 8 : i * 8 + 8], wr_id=i) for i in (0, 1)])
    for turn in (b"first...", b"second.."):
        receives.post()
        assert rc.b.outstanding.recv == 2
        rc.mine.buffer[:8] = turn
        rc.a.post_send([rc.send(rc.mine[:8], wr_id=10), rc.send(rc.mine[:8], wr_id=11)])
        assert sorted(wc.wr_id for wc in rc.wait(4)) == [0, 1, 10, 11]
        assert bytes(rc.theirs.buffer[:16]) == turn * 2


def test_datagrams_can_be_prepared(connect: Connect):
    ud = connect(QPType.UD)
    batch = ud.a.prepare(ud.send(ud.mine[:8], wr_id=1))
    ud.b.post_recv(rp.RecvWR(ud.theirs[:128], wr_id=2))
    batch.post()
    assert {wc.wr_id for wc in ud.wait(2)} == {1, 2}
    assert ud.ah is not None
    with pytest.raises(rp.InUseError, match="prepared list of 1"):
        ud.ah.close()


def test_inline_data_of_a_prepared_list_is_read_at_each_post(connect: Connect):
    pair = connect(max_inline_data=64)
    data = bytearray(b"inline 1")
    batch = pair.a.prepare(
        pair.wr(rp.RdmaWrite, rp.SGE.from_buffer(data), send_flags=SendFlags(10))
    )
    batch.post()
    pair.wait()
    data[-1:] = b"2"
    batch.post()
    pair.wait()
    assert bytes(pair.theirs.buffer[:8]) == b"inline 2"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("wr_id", -1, "wr_id=-1 is not in"),
        ("wr_id", 1.5, "wr_id: expected int, got float"),
        ("rkey", 1 << 32, r"rkey=4294967296 is not in 0\.\.2\^32-1"),
        ("remote_addr", -1, "remote_addr=-1 is not in"),
        ("remote_addr", "there", "remote_addr: expected int, got str"),
        ("sg_list", (), "0 SGEs, but it was prepared with 1"),
        ("sg_list", rp.SGE(1, 0, 2), "length 0"),
        ("sg_list", 5, "sg_list: expected SGEs, got int"),
    ],
)
def test_wrong_value_for_a_prepared_field_is_refused_and_changes_nothing(rc, field, value, text):
    batch = rc.a.prepare(write(rc))
    before = getattr(batch[0], field)
    wrong_type = "expected" in text
    with pytest.raises(TypeError if wrong_type else ValueError, match=text):
        setattr(batch[0], field, value)
    assert getattr(batch[0], field) == before
    batch.post()
    rc.wait()


def test_prepared_work_request_has_no_fields_that_its_opcode_lacks(rc):
    batch = rc.a.prepare(write(rc))
    with pytest.raises(AttributeError, match="imm_data"):
        batch[0].imm_data = 1


def test_region_of_another_domain_cannot_be_set_on_a_prepared_list(rc, context, stack):
    other = stack.enter_context(rp.MR(stack.enter_context(rp.PD(context)), 64))
    batch = rc.a.prepare(write(rc))
    with pytest.raises(ValueError, match="does not belong to the queue's PD"):
        batch[0].sg_list = other[:8]
    batch.post()
    rc.wait()


@pytest.mark.parametrize("count", [0, 2])
def test_single_sge_cannot_be_set_where_none_or_several_were_prepared(rc, count):
    """Not even one of the same region, and the next work request keeps its own."""
    batch = rc.a.prepare([rp.RdmaWrite([rc.mine[:8]] * count, wr_id=1), write(rc, wr_id=2)])
    before = [item.sg_list for item in batch]
    with pytest.raises(ValueError, match=f"1 SGEs?, but it was prepared with {count}"):
        batch[0].sg_list = rc.mine[8:16]
    assert [item.sg_list for item in batch] == before


def test_sge_of_a_subclass_or_without_its_items_set_on_a_prepared_list(rc):
    """The first is read back in a tuple, as any other; the second is refused."""

    class Own(rp.SGE):
        pass

    batch = rc.a.prepare(write(rc))
    own = Own(*rc.mine[8:16])
    batch[0].sg_list = own
    assert batch[0].sg_list == (own,)
    for short in (tuple.__new__(rp.SGE, ()), tuple.__new__(rp.SGE, own[:3])):
        with pytest.raises(TypeError, match="sg_list holds SGE; "):
            batch[0].sg_list = short
    assert batch[0].sg_list == (own,)


def test_region_set_on_an_unchecked_prepared_list_replaces_the_old_one(connect: Connect, pd):
    """The list holds the new region, and no longer the old one."""
    pair = connect(checked=False)
    old, new = rp.MR(pd, 64, ALL), rp.MR(pd, 64, ALL)
    batch = pair.a.prepare(write_from(pair, old))
    batch[0].sg_list = new[:8]
    with pytest.raises(rp.InUseError):
        new.close()
    old.close()
    new.buffer[:8] = b"from new"
    batch.post()
    pair.wait()
    assert bytes(pair.theirs.buffer[:8]) == b"from new"
    batch.close()
    new.close()


def test_prepared_list_holds_a_region_that_is_set_again(pair, pd):
    """Each work request names its own, whatever it and the others have named before."""
    first, second = rp.MR(pd, 64), rp.MR(pd, 64)
    batch = pair.a.prepare([write_from(pair, first), write_from(pair, first)])
    for item, mr in ((1, second), (1, first), (0, second)):
        batch[item].sg_list = mr[:8]
    for mr in (first, second):
        assert why_open(mr.close)
    batch.close()
    for mr in (first, second):
        mr.close()


def test_region_that_is_being_closed_cannot_be_set_on_a_prepared_list(connect: Connect, pd):
    """By a signal handler, while the close is about to be refused; later it can."""
    said = []

    def make() -> tuple[rp.MR, rp.Batch]:
        mr = rp.MR(pd, 64)
        return mr, pair.a.prepare(write_from(pair, mr))

    def act(made: tuple[rp.MR, rp.Batch]) -> None:
        assert why_open(made[0].close)

    def change(made: tuple[rp.MR, rp.Batch]) -> None:
        mr, batch = made
        try:
            batch[0].sg_list = mr[8:16]
        except ValueError as error:
            said.append(str(error))

    def check(made: tuple[rp.MR, rp.Batch], _: Moment) -> None:
        mr, batch = made
        batch[0].sg_list = mr[16:24]
        batch.close()
        mr.close()

    pair = connect()
    interrupt_at_each_moment(make, act, check, handler=change)
    assert said
    assert all("being closed" in why for why in said)


def test_work_requests_that_cannot_be_posted_cannot_be_prepared(rc):
    """The error names the work request, as a post's does."""
    with pytest.raises(rp.PostError, match="9 SGEs") as caught:
        rc.a.prepare([write(rc), rp.Send([rc.mine[:8]] * 9)])
    assert (caught.value.index, caught.value.posted) == (1, 0)
    with pytest.raises(rp.PostError, match="BIND_MW changes"):
        rc.a.prepare(rp.BindMW())
    with pytest.raises(rp.PostError, match="expected SendWR"):
        rc.a.prepare([rp.RecvWR()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least one"):
        rc.a.prepare([])


def test_prepared_list_that_does_not_fit_the_queue_is_refused_whole(connect: Connect):
    pair = connect(max_send_wr=4)
    room = pair.a.max_send_wr
    batch = pair.a.prepare([write(pair)] * 3)
    for _ in range(room // 3):
        batch.post()
    with pytest.raises(rp.PostError, match="the queue is full") as caught:
        batch.post()
    assert caught.value.posted == 0
    assert caught.value.index == room % 3
    pair.wait(room // 3 * 3)
    batch.post()
    pair.wait(3)


def test_state_is_checked_at_each_post_of_a_prepared_list(connect: Connect):
    """A list can be prepared before the queue pair is connected, but not posted."""
    pair = connect(to=QPState.RESET)
    batch = pair.a.prepare(write(pair))
    with pytest.raises(rp.PostError, match="the QP is in RESET"):
        batch.post()
    pair.connect()
    batch.post()
    pair.wait()
    pair.a.to_err()
    batch.post()
    assert pair.cq.wait(1)[0].status is WCStatus.WR_FLUSH_ERR
    pair.a.to_reset()
    with pytest.raises(rp.PostError, match="the QP is in RESET"):
        batch.post()


def test_prepared_list_keeps_its_regions_open_until_it_is_closed_but_not_the_queue_pair(rc):
    """What a list names stays open until the list is closed, but not the queue pair."""
    with rc.a.prepare(write(rc)) as batch:
        post = batch.post
        post()
        with pytest.raises(rp.InUseError, match="prepared list of 1 still open"):
            rc.mine.close()
    assert batch.closed
    for call in (batch.post, post):
        with pytest.raises(rp.ClosedError, match="the prepared list of 1 is closed"):
            call()
    rc.wait()
    other = rc.a.prepare(write(rc))
    rc.a.close()
    assert other.closed
    with pytest.raises(rp.ClosedError, match="is closed"):
        other.post()
    rc.b.close()
    rc.mine.close()


def test_fields_of_a_closed_prepared_list_cannot_be_changed(rc):
    batch = rc.a.prepare([write(rc), write(rc, wr_id=5)])
    item = batch[1]
    batch.close()
    for name, value in (("wr_id", 6), ("remote_addr", 8), ("rkey", 1), ("sg_list", rc.mine[8:16])):
        with pytest.raises(rp.ClosedError, match="the prepared list of 2 is closed"):
            setattr(item, name, value)
    assert item.wr_id == 5
    assert item.remote_addr == rc.theirs.addr
    assert item.sg_list == ()


def test_setting_a_wr_id_that_closes_its_prepared_list_raises_closed_error(rc):
    batch = rc.a.prepare(write(rc, wr_id=3))

    class Closing:
        def __index__(self) -> int:
            batch.close()
            return 5

    with pytest.raises(rp.ClosedError, match="the prepared list of 1 is closed"):
        batch[0].wr_id = Closing()  # type: ignore[assignment]


@pytest.mark.parametrize("name", ["wr_id", "sg_list"])
def test_value_that_closes_the_queue_pair_of_its_prepared_list_raises_closed_error(rc, name):
    batch = rc.a.prepare(write(rc))

    class Closing:
        def __index__(self) -> int:
            rc.a.close()
            return 8

    number: Any = Closing()
    value = number if name == "wr_id" else [rp.SGE(number, 8, 0, rc.mine)]
    with pytest.raises(rp.ClosedError, match=r"^RC QP \S+ is closed"):
        setattr(batch[0], name, value)
    rc.mine.close()


def test_largest_wr_id_can_be_set_on_a_prepared_list(rc):
    batch = rc.a.prepare(write(rc, wr_id=3))
    batch[0].wr_id = (1 << 64) - 1
    batch.post()
    assert [wc.wr_id for wc in rc.wait()] == [(1 << 64) - 1]


def test_field_of_a_prepared_class_reads_and_writes_no_other_object(rc):
    """Whatever object its descriptor is given, nothing else is read or written."""
    [swap, send] = rc.a.prepare([rp.AtomicCmpAndSwp(rc.mine[:8], swap=7), rp.Send()])
    field = type(swap).__dict__["swap"]
    assert field.__get__(swap) == 7
    assert field.__get__(None, type(swap)) is field
    fresh = rp.PreparedWR.__new__(type(swap))
    others = [
        type(field)(rp.AtomicCmpAndSwp, index)
        for index in (*range(-100, 0), len(NUMBER_FIELDS[rp.AtomicCmpAndSwp]), 99, 1 << 30)
    ]
    for descriptor, wrong in (
        *((field, wrong) for wrong in (send, fresh, 5, rc.a, rp.AtomicCmpAndSwp())),
        *((other, swap) for other in others),
        (type(field)(rp.Send, 0), swap),
    ):
        with pytest.raises(TypeError, match="work request is of another class"):
            descriptor.__get__(wrong)
        with pytest.raises(TypeError, match="work request is of another class"):
            descriptor.__set__(wrong, 5)
    assert swap.swap == 7
    for wrong in ((), (5, 0), (rp.Send,), (rp.Send, "x")):
        with pytest.raises(TypeError):
            type(field)(*wrong)
    with pytest.raises(TypeError, match="it has already been initialised"):
        field.__init__(rp.Send, 0)


def test_inline_memory_of_a_closed_prepared_list_is_free_while_outstanding(connect: Connect, pd):
    """It has been copied, unlike that of receives, whatever their flags."""
    pair = connect(max_inline_data=64)
    inline, other = rp.MR(pd, 64, ALL), rp.MR(pd, 64, ALL)
    wr = pair.wr(rp.RdmaWrite, inline[:8], send_flags=SendFlags.INLINE)
    with pair.a.prepare([wr] * 2) as batch:
        batch.post()
    with pair.b.prepare_recv([rp.RecvWR(other[:8])] * 2) as batch:
        batch.post()
    assert (pair.a.outstanding.send, pair.b.outstanding.recv) == (2, 2)
    inline.close()
    with pytest.raises(rp.InUseError):
        other.close()
    pair.b.to_reset()
    pair.a.to_reset()
    other.close()


def test_region_that_cannot_be_closed_says_which_prepared_lists_name_it(rc, pd):
    first, second, third, unnamed = (rp.MR(pd, 64) for _ in range(4))
    send = rc.a.prepare
    batches = [
        send([rp.LocalInv()]),
        send([rp.LocalInv(), rp.Send(first[:8])]),
        send([rp.Send([second[:8], first[:8]])] * 3),
        send([rp.Send(third[:8]), *[rp.Send([first[:8], third[:8]])] * 3]),
    ]
    for mr, lists in ((first, {2, 3, 4}), (second, {3}), (third, {4})):
        with pytest.raises(rp.InUseError) as caught:
            mr.close()
        assert {int(n) for n in re.findall(r"prepared list of (\d+)", str(caught.value))} == lists
    unnamed.close()
    batches[2].close()
    second.close()
    with pytest.raises(rp.InUseError) as caught:
        first.close()
    assert re.findall(r"prepared list of (\d)", str(caught.value)) in (["2", "4"], ["4", "2"])
    for batch in batches:
        batch.close()
    first.close()
    third.close()


def test_index_of_a_prepared_work_request_must_lie_within_its_list(rc):
    batch = rc.a.prepare([write(rc, wr_id=i) for i in range(3)])
    assert [rp.PreparedWR(batch, i).wr_id for i in range(3)] == [0, 1, 2]
    for wrong in (-1, -3, 3, 4, 1 << 32, sys.maxsize, -sys.maxsize):
        with pytest.raises(IndexError):
            rp.PreparedWR(batch, wrong)
        with pytest.raises((IndexError, OverflowError)):
            batch._type_of(wrong)
    for too_large in (1 << 64, (1 << 64) - 1, -1):
        with pytest.raises((IndexError, OverflowError)):
            batch._type_of(too_large)
    with pytest.raises(TypeError):
        batch._type_of("0")
    assert [batch._type_of(i) for i in range(3)] == [rp.RdmaWrite] * 3
    for wrong in ((5, 1), (rc.a, 1), (batch, "1"), (batch, None)):
        with pytest.raises(TypeError):
            rp.PreparedWR(*wrong)
    item = rp.PreparedWR(batch, 1)
    with pytest.raises(TypeError, match="it has already been initialised"):
        item.__init__(batch, 2)  # type: ignore[misc]
    assert item.wr_id == 1


def test_prepared_list_of_wrong_internal_arguments_is_refused(rc):
    send = rc.a._send
    for wrong in ((), (send, rc.a), (rc.a, send, []), (send, 5, []), (5, rc.a, [])):
        with pytest.raises(TypeError):
            rp.Batch()._prepare(*wrong)
    with pytest.raises(TypeError, match="the queue has not been initialised"):
        rp.Batch()._prepare(type(send).__new__(type(send)), rc.a, [rp.LocalInv()])
    batch, refused = rc.a.prepare(write(rc, wr_id=1)), rp.Batch()
    with pytest.raises(rp.PostError):
        refused._prepare(send, rc.a, [5])
    for again in (batch, refused):
        with pytest.raises(TypeError, match="it has already been prepared"):
            again._prepare(send, rc.a, [write(rc, wr_id=2)])
    batch.post()
    assert [wc.wr_id for wc in rc.wait()] == [1]


def test_prepared_atomic_address_that_is_no_number_is_a_type_error(rc):
    """Not as misaligned, if it is not a number at all."""
    [item] = rc.a.prepare(rp.AtomicFetchAndAdd(rc.mine[:8], rkey=rc.theirs.rkey))

    class Odd:
        def __index__(self) -> int:
            raise KeyError("mine")

    with pytest.raises(TypeError, match="remote_addr: expected int, got str"):
        item.remote_addr = "x"
    for wrong, said in (
        (-8, r"remote_addr=-8 is not in 0..2\^64-1"),
        (1 << 64, r"remote_addr=\d+ is not in 0..2\^64-1"),
        (9, "remote_addr=0x9 is not a multiple"),
    ):
        with pytest.raises(ValueError, match=said):
            item.remote_addr = wrong
    with pytest.raises(KeyError, match="mine"):
        item.remote_addr = Odd()
    assert item.remote_addr == 0


def test_sges_that_close_their_prepared_list_while_they_are_read_raise_closed_error(rc):
    for sges in ((rc.mine[:8],), (rc.mine[:8], 5), (5,)):
        batch = rc.a.prepare(write(rc))

        def closing(batch: rp.Batch = batch, sges: tuple[object, ...] = sges) -> Iterator[object]:
            batch.close()
            yield from sges

        with pytest.raises(rp.ClosedError, match="the prepared list of 1 is closed"):
            batch[0].sg_list = closing()  # type: ignore[assignment]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the collector runs between calls only")
def test_sges_read_back_from_a_prepared_list_are_never_seen_incomplete(connect: Connect):
    """Reading a tuple with an empty slot crashes."""
    pair, seen = connect(max_send_sge=13), []
    wr = rp.Send([pair.mine[i : i + 1] for i in range(13)])

    def look(phase: str, _: object) -> None:
        if phase == "start":
            for found in gc.get_objects():
                if type(found) in (list, tuple) and found and type(found[0]) is rp.SGE:
                    seen.append({type(item) for item in found} == {rp.SGE})

    before = gc.get_threshold()
    gc.callbacks.append(look)
    try:
        # It runs at different moments each time.
        for threshold in (1, 2, 3, 4, 5, 6, 7) * 3:
            gc.set_threshold(threshold)
            batch = pair.a.prepare(wr)
            gc.set_threshold(*before)
            assert len(batch[0].sg_list) == 13
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(look)
    assert seen
    assert all(seen)


class Memory(bytearray):
    """Memory that can have attributes."""

    batch: object


def test_collector_takes_a_prepared_list_whose_memory_refers_to_it(connect: Connect):
    """Through each of its work requests."""
    pair = connect(max_inline_data=64)
    for count in (1, 2, 5):
        memory = [Memory(8) for _ in range(count)]
        batch = pair.a.prepare(
            [
                pair.wr(rp.RdmaWrite, rp.SGE.from_buffer(at), send_flags=SendFlags.INLINE)
                for at in memory
            ]
        )
        for item, at in zip(batch, memory, strict=True):
            at.batch = item
        refs = [weakref.ref(at) for at in memory]
        batch.post()
        del memory, batch, item, at
        gc.collect()
        assert [ref() for ref in refs] == [None] * count
        pair.a.to_reset()
        pair.a.connect(pair.b.endpoint())


def test_bound_post_method_alone_keeps_its_prepared_list_open(rc):
    """``post = qp.prepare(...).post`` is all that is needed; dropping it drops the list."""
    post = rc.a.prepare(write(rc, wr_id=9)).post
    gc.collect()
    post()
    assert [wc.wr_id for wc in rc.wait()] == [9]
    del post
    rc.b.close()
    rc.a.close()
    rc.mine.close()


def test_prepared_list_without_references_releases_its_memory_at_once(rc):
    """This needs no collector, even if its work requests have been accessed."""
    batch = rc.a.prepare(write(rc))
    batch[0].wr_id = 5
    del batch
    rc.mine.close()


def test_collector_may_take_a_prepared_list_and_its_region_in_one_cycle(rc, pd, monkeypatch):
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    data = bytearray(64)
    region = rp.MR(pd, data)
    garbage: list[object] = [rc.a.prepare(rp.Send(region[:8]))]
    garbage.append(garbage)
    del region, garbage
    gc.collect()
    assert raised == []
    data.extend(b"nobody holds it")


def test_collector_may_take_a_prepared_list_in_the_middle_of_a_post(context, rc, monkeypatch):
    """A list in a cycle is collected while its own queue is being posted to; nothing deadlocks."""
    needs(context.kind == "soft", "verbs written in Python", context)
    from rdmapost.providers.soft0 import responder

    copy = responder.copy

    def collect(*arguments: object) -> None:
        gc.collect()
        copy(*arguments)

    class Holder:
        """Refers to itself, by way of a list."""

    holder = Holder()
    holder.itself, holder.batch = holder, rc.a.prepare(write(rc))  # type: ignore[attr-defined]
    del holder
    monkeypatch.setattr(responder, "copy", collect)
    rc.a.post_send(write(rc, wr_id=3))
    assert [wc.wr_id for wc in rc.wait()] == [3]
    with rp.PD(context):
        # Resources whose close was deferred are closed with the next resource.
        rc.mine.close()


def test_posts_in_the_middle_of_a_post_follow_it(context, rc, monkeypatch):
    """Code that runs in the middle of a post, such as a finalizer, can post to the same queue."""
    needs(context.kind == "soft", "verbs written in Python", context)
    from rdmapost.providers.soft0 import responder

    copy, batch, posted = responder.copy, rc.a.prepare(write(rc, wr_id=5)), []

    def post(*arguments: object) -> None:
        if not posted:
            posted.append(True)
            batch.post()
            batch.close()
            rc.a.post_send(write(rc, wr_id=6))
            rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=4))
        copy(*arguments)

    monkeypatch.setattr(responder, "copy", post)
    rc.a.post_send(write(rc, wr_id=3))
    monkeypatch.undo()
    assert [wc.wr_id for wc in rc.wait(3)] == [3, 5, 6]
    rc.a.post_send(rp.Send(rc.mine[:8]))
    assert {wc.wr_id for wc in rc.wait(2)} == {0, 4}


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "ordinary"])
def test_ctrl_c_inside_the_device_comes_out_of_the_post(context, rc, monkeypatch, prepared):
    """What was posted is still carried out."""
    needs(context.kind == "soft", "verbs written in Python", context)
    from rdmapost.providers.soft0 import responder

    copy, struck = responder.copy, []

    def strike(*arguments: object) -> None:
        copy(*arguments)
        if not struck:
            struck.append(True)
            signal.raise_signal(signal.SIGINT)

    wr = write(rc, wr_id=3)
    batch = rc.a.prepare(wr)
    post = batch.post if prepared else lambda: rc.a.post_send(wr)
    monkeypatch.setattr(responder, "copy", strike)
    with pytest.raises(KeyboardInterrupt):
        post()
    monkeypatch.undo()
    assert [wc.check().wr_id for wc in rc.wait()] == [3]


@pytest.mark.parametrize("what", ["batch.post", "batch.close", "post_send", "post_recv", "close"])
def test_finalizer_that_posts_to_the_same_queue_in_the_middle_of_a_post_does_not_deadlock(
    context, rc, monkeypatch, what
):
    """What a finalizer does in the middle of a post to the same queue takes effect."""
    needs(context.kind == "soft", "verbs written in Python", context)
    from rdmapost.providers.soft0 import responder

    copy, batch, said = responder.copy, rc.a.prepare(write(rc, wr_id=5)), []
    call = {
        "batch.post": batch.post,
        "batch.close": batch.close,
        "close": rc.a.close,
        "post_send": lambda: rc.a.post_send(write(rc, wr_id=6)),
        "post_recv": lambda: rc.a.post_recv(rp.RecvWR(wr_id=7)),
    }[what]

    class Finalized:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            call()
            said.append(what)

    def collect(*arguments: object) -> None:
        gc.collect()
        copy(*arguments)

    Finalized()
    monkeypatch.setattr(responder, "copy", collect)
    rc.a.post_send(write(rc, wr_id=3))
    posted = {"batch.post": {3, 5}, "post_send": {3, 6}}.get(what, {3})
    assert {wc.wr_id for wc in rc.wait(len(posted))} == posted
    assert said == [what]


def test_each_work_request_of_a_list_holds_only_its_own_region(rc, pd, stack):
    """A region can be closed once the work request that names it is done, even if others are
    not."""
    regions = [stack.enter_context(rp.MR(pd, 64)) for _ in range(2)]
    wrs = [
        rp.RdmaWrite(mr[:8], wr_id=i, remote_addr=rc.theirs.addr, rkey=rc.theirs.rkey)
        for i, mr in enumerate(regions)
    ]
    rc.a.post_send(wrs)
    with pytest.raises(rp.InUseError, match=r"1 outstanding .* \(wr_id 1\)"):
        regions[1].close()
    assert [wc.wr_id for wc in rc.wait(1)] == [0]
    regions[0].close()
    with pytest.raises(rp.InUseError, match=r"1 outstanding .* \(wr_id 1\)"):
        regions[1].close()
    assert [wc.wr_id for wc in rc.wait(1)] == [1]


def test_refused_work_requests_of_a_prepared_list_are_named_and_not_outstanding(context, rc):
    """What the device did not accept is undone, and named."""
    needs(context.kind == "soft", "injected post failures", context)
    batch = rc.a.prepare([write(rc, wr_id=i) for i in range(4)])
    context.faults.fail_post(12, after=2)
    with pytest.raises(rp.PostError) as caught:
        batch.post()
    context.faults.clear()
    assert (caught.value.index, caught.value.posted) == (2, 2)
    assert rc.a.outstanding.send == 2
    assert [wc.wr_id for wc in rc.wait(2)] == [0, 1]
    batch.post()
    assert [wc.wr_id for wc in rc.wait(4)] == [0, 1, 2, 3]


def test_threads_may_post_to_one_queue_singly_in_lists_and_prepared(connect: Connect):
    """Single posts, lists and prepared lists from several threads: nothing is lost or mixed up."""
    pair = connect(max_send_wr=512)
    turns, failed = 200, []

    def run(number: int) -> None:
        try:
            wrs = [write(pair, wr_id=number * 10 + i) for i in range(3)]
            batch = pair.a.prepare(wrs)
            for turn in range(turns):
                while pair.a.outstanding.send > 400:
                    pass
                if turn % 2:
                    batch.post()
                else:
                    pair.a.post_send(wrs)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    found = [wc.check().wr_id for wc in pair.cq.wait(4 * 3 * turns, timeout=60)]
    for thread in threads:
        thread.join()
    assert not failed
    for number in range(4):
        mine = [wr_id for wr_id in found if wr_id // 10 == number]
        assert mine == [number * 10 + i for i in range(3)] * turns


def test_unchecked_prepared_list_reaches_the_device_unchanged(connect: Connect):
    pair = connect(checked=False)
    wr = write(pair)
    wr.rkey ^= 0xFF00
    pair.a.prepare(wr).post()
    assert pair.cq.wait(1)[0].status is WCStatus.REM_ACCESS_ERR


def test_index_of_a_prepared_list_counts_from_either_end(rc):
    batch = rc.a.prepare([write(rc, wr_id=n) for n in range(3)])
    assert [batch[n].wr_id for n in (0, 2, -1, -3, True)] == [0, 2, 2, 0, 1]
    for wrong in (3, -4, 1 << 80, -(1 << 80), 1 << 63, -(1 << 31)):
        with pytest.raises(
            IndexError, match=f"^index {wrong} is out of range for a prepared list of 3"
        ):
            batch[wrong]
    for wrong in (1.0, "1", None, Fraction(1)):
        with pytest.raises(TypeError, match=f"^index: expected int, got {type(wrong).__name__}"):
            batch[wrong]
    with pytest.raises(TypeError, match=r"^a prepared list cannot be sliced"):
        batch[0:2]


def test_refused_prepared_list_that_never_fits_holds_nothing(connect: Connect, pd):
    pair = connect()
    with rp.MR(pd, 64, ALL) as mr:
        wr = rp.RdmaWrite(mr[:8], remote_addr=pair.theirs.addr, rkey=pair.theirs.rkey)
        for prepare, wrs in (
            (pair.a.prepare, [wr] * (pair.a.max_send_wr + 1)),
            (pair.a.prepare_recv, [rp.RecvWR(mr[:8])] * (pair.a.max_recv_wr + 1)),
        ):
            with pytest.raises(rp.PostError, match="cannot fit a queue"):
                prepare(wrs)
            prepare(wrs[1:]).close()


def test_full_queue_says_how_many_more_a_prepared_list_has(connect: Connect):
    pair = connect(max_send_wr=8)
    room = pair.a.max_send_wr
    pair.a.post_send([write(pair)] * (room - 1))
    batch = pair.a.prepare([write(pair)] * 2)
    with pytest.raises(rp.PostError) as caught:
        batch.post()
    assert caught.value.reason.startswith(
        f"the queue is full: max_send_wr={room} and {room - 1} work requests are outstanding, "
        "and the list has 2 more; "
    )


def test_repr_and_len_describe_a_prepared_list(rc):
    batch = rc.a.prepare([write(rc)] * 2)
    assert len(batch) == len(list(batch)) == 2
    assert str(batch) == "prepared list of 2"
    assert "PreparedWR 1 of prepared list of 2" in repr(batch[1])


def test_change_made_by_a_finalizer_during_another_change_of_a_prepared_list_stays(rc, pd, stack):
    """Posts have the wr_ids and hold the regions of both changes, in either order."""
    changed = 0
    acts = False
    regions = [stack.enter_context(rp.MR(pd, 64, ALL)) for _ in range(40)]
    other = stack.enter_context(rp.MR(pd, 64, ALL))

    class Finalized:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            nonlocal changed, acts
            if acts and changed < len(regions):
                acts = False
                second.sg_list = regions[changed][:8]
                second.wr_id = 1000 + changed
                changed += 1
                Finalized()
                acts = True

    for turn in range(40):
        batch = rc.b.prepare_recv([rp.RecvWR(rc.theirs[:8]), rp.RecvWR(rc.theirs[8:16])])
        first, second = batch
        gc.collect()
        before = gc.get_threshold()
        Finalized()
        acts = True
        gc.set_threshold(1, 1, 1)
        try:
            if turn % 2:
                first.sg_list = other[:8]
            else:
                first.wr_id = turn
        finally:
            acts = False
            gc.set_threshold(*before)
        shown = second.sg_list[0].owner
        wanted = [first.wr_id, second.wr_id]
        batch.post()
        batch.close()
        with pytest.raises(rp.InUseError):
            shown.close()
        rc.a.post_send([rc.send(rc.mine[:8], wr_id=7), rc.send(rc.mine[:8], wr_id=7)])
        done = [wc.check() for wc in rc.wait(4)]
        assert [wc.wr_id for wc in done if wc.opcode is rp.WCOpcode.RECV] == wanted
    # From Python 3.12 on the collector runs between the interpreter's instructions only.
    assert changed or sys.version_info >= (3, 12)


class Finder:
    """A number that finds the list that is reading it, and calls a function with that list."""

    def __init__(self, act: Callable[[rp.Batch], object]) -> None:
        self.act = act
        self.said: list[str] = []
        self.found: list[rp.Batch] = []
        self.others = self.lists()

    @staticmethod
    def lists() -> list[rp.Batch]:
        return [found for found in gc.get_objects() if isinstance(found, rp.Batch)]

    def __index__(self) -> int:
        [found] = [batch for batch in self.lists() if batch not in self.others]
        self.found.append(found)
        assert found.closed
        try:
            self.act(found)
        except TypeError as error:
            self.said.append(str(error))
        return 5


PARTS: dict[str, Callable[[rp.Batch], object]] = {
    "post": lambda batch: batch.post(),
    "close": lambda batch: batch.close(),
    "len": len,
    "first": lambda batch: batch[0],
    "second": lambda batch: batch[1],
    "item": lambda batch: rp.PreparedWR(batch, 0),
    "all": list,
}


@pytest.mark.parametrize("part", PARTS)
def test_list_in_the_middle_of_its_preparation_refuses_use(rc, part):
    """The collector exposes it to anyone; it is completed all the same."""
    finder = Finder(PARTS[part])
    wrs = [write(rc, 0, 1), write(rc, 8, 2), write(rc, 16, 3)]
    wrs[1].remote_addr = finder  # type: ignore[assignment]
    batch = rc.a.prepare(wrs)
    # Closing it does nothing yet.
    assert finder.said == ([] if part == "close" else ["the list has not been prepared"])
    assert finder.found == [batch]
    assert not batch.closed
    assert len(batch) == 3
    batch[1].remote_addr = rc.theirs.addr
    batch.post()
    assert [wc.wr_id for wc in rc.wait(3)] == [1, 2, 3]


def test_list_whose_preparation_is_refused_stays_closed(rc):
    """Code that finds it under construction can do nothing with it, and it holds nothing."""
    finder = Finder(lambda batch: None)
    wrs = [write(rc, 0, 1), object()]
    wrs[0].remote_addr = finder  # type: ignore[union-attr,assignment]
    with pytest.raises(rp.PostError):
        rc.a.prepare(wrs)  # type: ignore[arg-type]
    [batch] = finder.found
    assert batch.closed
    batch.close()
    for part in ("post", "len", "first", "second", "item", "all"):
        with pytest.raises(TypeError, match="the list has not been prepared"):
            PARTS[part](batch)
    with pytest.raises(TypeError):
        rp.Batch.__init__(batch, rc.a._send, rc.a, [write(rc)])
    rc.mine.close()


def test_prepared_list_and_item_that_were_never_initialised_say_so():
    batch = rp.Batch.__new__(rp.Batch)
    assert batch.closed
    batch.close()
    for part in ("post", "len", "first", "item", "all"):
        with pytest.raises(TypeError, match="the list has not been prepared"):
            PARTS[part](batch)
    item = rp.PreparedWR.__new__(rp.PreparedWR)
    assert (item.wr_id, item.sg_list) == (None, ())
    for name in ("wr_id", "sg_list"):
        with pytest.raises(TypeError, match="it has not been initialised"):
            setattr(item, name, 1)


def test_fields_of_an_item_of_a_prepared_list_cannot_be_deleted(rc):
    [item] = rc.a.prepare(write(rc))
    for name in ("wr_id", "sg_list", "rkey"):
        with pytest.raises(AttributeError, match=f"{name} cannot be deleted"):
            delattr(item, name)


def test_threads_may_change_close_and_post_one_prepared_list(connect: Connect):
    """One thread posts lists, others change and close them: each post's regions are held."""
    pair = connect(max_send_wr=512)
    lists = [pair.a.prepare([write(pair, 0, 1), write(pair, 8, 2)])]
    rounds, posted = 300, 0
    failed: list[BaseException] = []
    over = threading.Event()

    def change() -> None:
        number = 0
        while not over.is_set():
            number += 1
            try:
                item = lists[-1][number % 2]
                item.sg_list = pair.mine[number % 8 : number % 8 + 8]
                item.wr_id = number
                assert len(item.sg_list) in (0, 1)
                assert item.wr_id >= 0
            except rp.ClosedError:
                pass
            except BaseException as error:
                failed.append(error)
                return

    def close() -> None:
        while not over.is_set():
            lists[-1].close()

    threads = [threading.Thread(target=run, daemon=True) for run in (change, change, close)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(rounds):
            batch = pair.a.prepare([write(pair, 0, 1), write(pair, 8, 2)])
            lists.append(batch)
            for _ in range(3):
                with contextlib.suppress(rp.ClosedError):
                    batch.post()
                    posted += 2
            del lists[:-1]
            while pair.a.outstanding.send > 400:
                pair.cq.poll()
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert failed == []
    lists[-1].close()
    deadline = time.monotonic() + 10
    while pair.a.outstanding.send and time.monotonic() < deadline:
        assert all(wc.status is WCStatus.SUCCESS for wc in pair.cq.poll(64))
    assert posted
    assert pair.a.outstanding.send == 0
    pair.mine.close()


@pytest.mark.parametrize("count", [1, 23])
def test_collection_during_prepare_may_prepare_on_the_same_queue_pair(connect: Connect, count):
    """Whenever the garbage collector runs in the last of `count` calls of prepare()."""
    thresholds, kept, collections = gc.get_threshold(), [], 0

    def prepare(phase: str, _: object) -> None:
        nonlocal collections
        collections += phase == "start"
        if phase == "start" and collections == moment:
            gc.set_threshold(0)
            kept.append(pair.a.prepare(write(pair)))

    for moment in itertools.count(1):
        pair = connect(max_send_wr=64)
        kept = [pair.a.prepare(write(pair)) for _ in range(count - 1)]
        collections = 0
        gc.callbacks.append(prepare)
        gc.set_threshold(1)
        try:
            kept.append(pair.a.prepare(write(pair)))
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(prepare)
        if collections < moment:
            break
        for batch in kept:
            batch.post()
        pair.wait(count + 1)
    assert moment > 1


def test_finalizer_called_in_the_middle_of_a_lists_preparation_does_nothing(connect):
    """Any code can find it through the collector."""
    pair = connect(max_inline_data=64)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:64]))
    found = []

    class Finder:
        def __index__(self) -> int:
            batches = [each for each in gc.get_objects() if type(each) is rp.Batch]
            found.extend(each.__del__() for each in batches if each.closed)
            first.sg_list = ()
            return 1

    inline = rp.SendFlags.INLINE | rp.SendFlags.SIGNALED
    first = rp.Send(rp.SGE.from_buffer(bytearray(b"x" * 40)), send_flags=inline)
    second = pair.wr(
        rp.RdmaWrite, pair.mine[:1], wr_id=Finder(), remote_addr=pair.theirs.addr + 100
    )
    with pair.a.prepare([first, second]) as batch:
        assert found
        batch.post()
        pair.wait(3)
    assert bytes(pair.theirs.buffer[:40]) == b"x" * 40


def test_closed_prepared_list_releases_its_memory_while_it_is_referenced(pair, pd):
    first, second = rp.MR(pd, 64), rp.MR(pd, 64)
    regions = weakref.ref(first), weakref.ref(second)
    batch = pair.a.prepare(write_from(pair, first))
    batch[0].sg_list = second[:8]
    batch[0].sg_list = second[8:16]
    batch[0].sg_list = second[16:24]
    del first, second
    assert not gone(regions[1])
    batch.close()
    assert gone(*regions)


def test_finalizer_that_changes_a_prepared_list_as_it_is_closed_keeps_no_region_open(connect, pd):
    """It is too late for the change, which leaves nothing behind."""
    pair = connect(max_inline_data=64)
    said = []

    class Last(bytearray):
        def __del__(self) -> None:
            with pytest.raises(rp.ClosedError, match="the prepared list of 2 is closed"):
                second.sg_list = pair.mine[:8]
            said.append("closed")

    mr = rp.MR(pd, 64)
    region = weakref.ref(mr)
    inline = pair.wr(rp.RdmaWrite, pair.mine[:8], send_flags=SendFlags.INLINE)
    batch = pair.a.prepare([inline, write_from(pair, mr)])
    first, second = batch
    first.sg_list = rp.SGE.from_buffer(Last(8))
    del mr
    batch.close()
    assert said == ["closed"]
    assert gone(region)


def test_value_refused_for_a_prepared_field_keeps_no_region_open(pair, pd):
    mr = rp.MR(pd, 64)
    region = weakref.ref(mr)
    batch = pair.a.prepare([write_from(pair, mr), write_from(pair, mr)])
    del mr
    for name, value in (("wr_id", -1), ("rkey", 1 << 32), ("sg_list", ()), ("sg_list", 5)):
        with pytest.raises((ValueError, TypeError), match=r"wr_id|rkey|SGE"):
            setattr(batch[1], name, value)
    batch.close()
    assert gone(region)


def test_setting_a_number_that_closes_its_prepared_list_raises_closed_error(pair, pd):
    """From its __index__, so that the list is gone by the time the number is found not to fit."""
    batch = pair.a.prepare(write_from(pair, pair.mine))
    item = batch[0]

    class Closing:
        def __index__(self) -> int:
            batch.close()
            return 1 << 64

    for name in ("wr_id", "rkey"):
        with pytest.raises(rp.ClosedError, match="the prepared list of 1 is closed"):
            setattr(item, name, Closing())


def test_each_region_of_a_closed_prepared_list_is_held_while_it_is_outstanding(pair, pd):
    first, second, third = (rp.MR(pd, 64) for _ in range(3))
    wrs = [write_from(pair, first, 1), write_from(pair, third, 2)]
    wrs[0].sg_list = [first[:8], second[:8]]
    for wr in wrs:
        wr.send_flags = SendFlags(0)
    batch = pair.a.prepare(wrs)
    batch.post()
    batch.close()
    for mr in (first, second, third):
        assert why_open(mr.close)
    pair.a.to_reset()
    for mr in (first, second, third):
        mr.close()


def test_prepared_invalidations_complete_with_their_own_wr_ids(connect: Connect):
    """Each needs its own record, and a new queue has room for fewer."""
    pair = connect(max_send_wr=128)
    pair.a.prepare([rp.LocalInv(wr_id=i) for i in range(100)]).post()
    assert [wc.wr_id for wc in pair.cq.wait(100)] == list(range(100))


@pytest.mark.parametrize("checked", [True, False])
def test_closed_prepared_list_raises_closed_error(checked):
    with contextlib.ExitStack() as stack:
        batch = Soft(stack, checked=checked).qp().prepare([rp.LocalInv()] * 3)
        batch.close()
        with pytest.raises(rp.ClosedError, match=r"^the prepared list of 3 is closed$"):
            batch.post()


def test_other_sges_of_a_prepared_work_request_leave_what_else_it_holds(watched):
    """The address handle and the header of every work request in the list."""
    mr, hdr = watched.mr, bytearray(b"header")
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(rp.MR(watched.pd, 64))
        ud = stack.enter_context(
            rp.QP(watched.pd, QPType.UD, watched.cq, checked=watched.checked, max_tso_header=32)
        )
        ud.connect()
        ah = stack.enter_context(ud.ah_to(ud.endpoint()))
        fields: Any = {"ah": ah, "remote_qpn": ud.qp_num, "remote_qkey": 5}
        tso = rp.TSO(mr[:8], hdr=hdr, mss=100, **fields)
        for wrs in ([rp.Send(mr[:8], **fields)], [tso], [rp.Send(mr[:8], **fields), tso, tso, tso]):
            batch = ud.prepare(wrs)
            for i, item in enumerate(batch):
                item.sg_list = other[8 * i : 8 * i + 4]
            with pytest.raises(rp.InUseError):
                ah.close()
            if wrs[-1] is tso:
                item.mss = 7
                assert item.mss == 7
                with pytest.raises(BufferError):
                    hdr.extend(b"more")
            batch.post()
            records = watched.tap.last()
            assert [record.sges for record in records] == [
                [(other.addr + 8 * i, 4, other.lkey)] for i in range(len(wrs))
            ]
            assert {record.wr.wr.ud.remote_qkey for record in records if not record.hdr} <= {5}
            assert {record.hdr for record in records} <= {None, b"header"}
            assert (records[-1].hdr and records[-1].wr.tso.mss) in (None, 7)
            watched.cq.wait(len(wrs))
            batch.close()
            hdr.extend(b"")


WITHOUT_MEMORY = """
import _testcapi
import rdmapost as rp

pd = rp.PD(rp.open_device("soft0"))
cq = rp.CQ(pd.context)
qp = rp.QP(pd, rp.QPType.RC, cq, max_send_wr=64)
qp.connect(qp.endpoint())
there = rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE)
# Python has an int for each small number, and keeps tuples of up to 20 items for reuse.
COUNT, LARGE = 30, 1 << 50

def without_memory(at, act):
    _testcapi.set_nomemory(at, at + 1)
    try: return act(), True
    except MemoryError: return None, False
    finally: _testcapi.remove_mem_hooks()

def writes(mr):
    return [
        rp.RdmaWrite(mr[:8], wr_id=LARGE + i, remote_addr=there.addr, rkey=there.rkey)
        for i in range(COUNT)
    ]

def posted(batch):
    batch.post()
    return [wc.check().wr_id for wc in cq.wait(len(batch), 5)]

def prepare(at):
    mr = rp.MR(pd, 64)
    wrs = writes(mr)
    batch, done = without_memory(at, lambda: qp.prepare(wrs))
    if done:
        assert posted(batch) == wr_ids
        batch.close()
    mr.close()
    return done

def change_wr_id(at):
    _, done = without_memory(at, lambda: setattr(batch[7], "wr_id", LARGE - 1))
    if done:
        wr_ids[7] = LARGE - 1
    assert [item.wr_id for item in batch] == posted(batch) == wr_ids
    return done

def change_sg_list(at):
    mr = rp.MR(pd, 64)
    sge = mr[8:16]
    _, done = without_memory(at, lambda: setattr(batch[7], "sg_list", sge))
    assert batch[7].sg_list == (sge if done else old[:8],)
    assert posted(batch) == wr_ids
    if done:
        batch.close()
    mr.close()
    return done

old = rp.MR(pd, 64)
batch = qp.prepare(writes(old))
wr_ids = [LARGE + i for i in range(COUNT)]
for act in (prepare, change_wr_id, change_sg_list):
    failed = 0
    while not act(failed):
        failed += 1
    print(act.__name__, failed > 3)
old.close()
"""


def test_list_prepared_or_changed_without_memory_is_whole_or_as_before_and_holds_no_more():
    """Whichever allocation fails."""
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    names = ("prepare", "change_wr_id", "change_sg_list")
    assert prints(WITHOUT_MEMORY).splitlines() == [f"{name} True" for name in names]


CLOSED_WITHOUT_MEMORY = """
import gc, itertools, sys
import _testcapi
import rdmapost as rp

pd = rp.PD(rp.open_device("soft0"))
qp = rp.QP(pd, rp.QPType.RC, rp.CQ(pd.context))
# The refusal to close a region of an open list is raised to nobody.
sys.unraisablehook = lambda _: None

def close_and_take_memory(phase, _):
    global seen
    seen += phase == "stop"
    if seen == moment and phase == "stop":
        gc.set_threshold(0)
        mr.close()
        _testcapi.set_nomemory(at, at + 1)

gc.freeze()
gc.callbacks.append(close_and_take_memory)
opened, kept = [], []
for moment in itertools.count(1):
    for at in range(6):
        mr, batch, seen = rp.MR(pd, 64), None, 0
        # Python reuses the memory of shorter tuples.
        wrs = [rp.Send(mr[:8])] * 21
        gc.set_threshold(1)
        try: batch = qp.prepare(wrs)
        except (MemoryError, rp.RdmaError): pass
        finally: _testcapi.remove_mem_hooks(), gc.set_threshold(0)
        opened.append(batch is not None)
        if batch:
            batch.close()
        elif not mr.closed:
            kept.append((moment, at))
        mr.close()
    if seen < moment: break
print(set(opened), kept)
"""


def test_region_closed_in_the_middle_of_a_preparation_that_lacks_memory_is_closed():
    """By the collector, at any moment: what fails holds nothing by the time the close happens."""
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    assert prints(CLOSED_WITHOUT_MEMORY) == "{False, True} []"

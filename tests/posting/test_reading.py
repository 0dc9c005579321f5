"""Work requests with unusual and hostile values: each is read once, and what was read is posted."""

from __future__ import annotations

import contextlib
import enum
import gc
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import ALL, prints, resident
from support.tap import Tap, open_tap

import rdmapost as rp
from rdmapost import QPType, SendFlags, SRQType
from rdmapost._binding import ffi, native

U64, U32 = (1 << 64) - 1, (1 << 32) - 1


class Watched:
    """Connected queue pairs on a watched device, and a matching list."""

    def __init__(self, stack: contextlib.ExitStack, *, checked: bool) -> None:
        context = stack.enter_context(rp.open_device("soft0"))
        self.checked = checked
        self.tap: Tap = open_tap(context)
        stack.callback(self.tap.close)
        self.pd = stack.enter_context(rp.PD(context))
        self.cq = stack.enter_context(rp.CQ(context, tm_info=True))
        self.mr = stack.enter_context(rp.MR(self.pd, 4096, ALL))
        self.qp = stack.enter_context(rp.QP(self.pd, QPType.RC, self.cq, checked=checked))
        self.qp.connect(self.qp.endpoint())
        self.srq = stack.enter_context(
            rp.SRQ(self.pd, srq_type=SRQType.TM, cq=self.cq, checked=checked)
        )

    def write(self, **fields: Any) -> Any:
        fields = {"remote_addr": self.mr.addr, "rkey": self.mr.rkey, **fields}
        return rp.RdmaWrite(fields.pop("sg_list", self.mr[:8]), **fields)

    def refused(self, wr: Any) -> str:
        """Post what is refused on its own; return why, with nothing posted."""
        with pytest.raises(rp.PostError) as caught:
            self.qp.post_send(wr)
        self.nothing_posted()
        return caught.value.reason

    def nothing_posted(self) -> None:
        assert self.tap.chains == []
        assert self.qp.outstanding == (0, 0)


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"])
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    with contextlib.ExitStack() as stack:
        yield Watched(stack, checked=request.param)


class Counted:
    """A number that counts how often it is read, and then does something."""

    def __init__(self, value: Any, then: Callable[[], Any] = lambda: None) -> None:
        self.value, self.then, self.asked = value, then, 0

    def __index__(self) -> Any:
        self.asked += 1
        self.then()
        return self.value


class Int(int):
    """A subclass of int that lies about itself in every method."""

    def __index__(self) -> int:
        return 99

    def __int__(self) -> int:
        return 99


class Enumerated(enum.IntEnum):
    SEVEN = 7


# ---- numbers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (True, 1),
        (False, 0),
        (Int(7), 7),
        (Enumerated.SEVEN, 7),
        (SendFlags.FENCE, 1),
        (Counted(7), 7),
        (Counted(U32), U32),
        (U32, U32),
        (0, 0),
    ],
)
def test_number_of_a_class_with_index_is_read_once(watched, given, read):
    """An object with __index__ is read once, whatever becomes of the list."""
    wr = watched.write(rkey=given, wr_id=given)
    if isinstance(given, Counted):
        given.asked = 0
    watched.qp.post_send(rp.SendWithImm(imm_data=given, send_flags=0))
    [record] = watched.tap.last()
    assert record.wr.imm_data == socket.htonl(read)
    if isinstance(given, Counted):
        assert given.asked == 1
    watched.qp.post_send(wr)
    [record] = watched.tap.last()
    assert record.wr.wr.rdma.rkey == read
    if isinstance(given, Counted):
        assert given.asked == 3


def test_wr_id_of_any_class_comes_back_as_an_int(watched):
    for given, read in ((Int(7), 7), (True, 1), (Counted(U64), U64), (Enumerated.SEVEN, 7)):
        watched.qp.post_send(watched.write(wr_id=given))
        [wc] = watched.cq.wait(1)
        assert wc.wr_id == read
        assert type(wc.wr_id) is int


@pytest.mark.parametrize(
    "name", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_numpy_numbers_are_exact_or_refused(watched, name):
    """Of every width and sign: exact to the last bit, and refused if they do not fit."""
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    kind = getattr(numpy, name)
    most, least = numpy.iinfo(kind).max, numpy.iinfo(kind).min
    for value in (0, 1, 100, most):
        watched.qp.post_send(watched.write(remote_addr=kind(value)))
        [record] = watched.tap.last()
        assert record.wr.wr.rdma.remote_addr == int(value)
        watched.cq.wait(1)
        watched.qp.to_reset()
        watched.qp.connect(watched.qp.endpoint())
    watched.tap.chains.clear()
    if least < 0:
        said = watched.refused(watched.write(remote_addr=kind(least)))
        assert said == f"remote_addr={least} is not in 0..2^64-1"
    sge = rp.SGE(kind(16), kind(8), kind(5))
    watched.qp.post_send(rp.Send(sge))
    assert watched.tap.last()[0].sges == [(16, 8, 5)]


@pytest.mark.parametrize(
    "value",
    [1.0, 1.5, float("nan"), float("inf"), 1j, None, "7", b"7", [7], (7,), {}, object(), int],
    ids=repr,
)
def test_number_field_of_another_type_is_refused_by_name(watched, value):
    kind = type(value).__name__
    for name in ("wr_id", "send_flags", "remote_addr", "rkey", "remote_srqn"):
        said = watched.refused(watched.write(**{name: value}))
        assert said == f"{name}: expected int, got {kind}"
    for name in ("addr", "length", "lkey"):
        wr = rp.Send(watched.mr[:8]._replace(**{name: value}))
        assert watched.refused(wr) == f"an SGE's {name}: expected int, got {kind}"


def test_arrays_of_numpy_are_no_numbers(watched):
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    for value in (numpy.zeros(3, "u4"), numpy.float64(1), numpy.ones(1, "f4")):
        assert "expected int" in watched.refused(watched.write(rkey=value))


@pytest.mark.parametrize("value", [-1, 1 << 64, 1 << 1000, -(1 << 1000), Int(-1), Counted(-1)])
def test_numbers_that_do_not_fit(watched, value):
    number = value.value if isinstance(value, Counted) else int.__add__(value, 0)
    for name in ("wr_id", "remote_addr"):
        assert watched.refused(watched.write(**{name: value})).startswith(f"{name}=")
    assert watched.refused(watched.write(remote_addr=number)) == (
        f"remote_addr={number} is not in 0..2^64-1"
    )


def test_number_whose_index_is_none(watched):
    for wrong in (None, 1.5, "1"):
        said = watched.refused(watched.write(rkey=Counted(wrong)))
        assert said == "rkey: expected int, got Counted"


# ---- the callers' own exceptions ------------------------------------------------------


class Mine(Exception):
    pass


def raises(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it


@pytest.mark.parametrize("error", [Mine("x"), KeyError("x"), MemoryError(), KeyboardInterrupt()])
@pytest.mark.parametrize("at", ["number", "sge", "property", "iterator", "sg_list"])
def test_exception_of_the_callers_code_comes_out_unchanged(watched, error, at):
    """And nothing was posted, whatever precedes it in the list."""

    class Odd(rp.RdmaWrite):
        rkey = property(lambda self: raises(error)(), lambda self, value: None)

    def generate(first: Any) -> Iterator[Any]:
        yield first
        raise error

    good = watched.write()
    wrs: Any = {
        "number": [good, watched.write(rkey=Counted(1, raises(error)))],
        "sge": [good, rp.Send(rp.SGE(1, 2, Counted(3, raises(error))))],  # type: ignore[arg-type]
        "property": [good, Odd(watched.mr[:8])],
        "iterator": generate(good),
        "sg_list": [good, rp.Send(generate(watched.mr[:8]))],  # type: ignore[arg-type]
    }[at]
    with pytest.raises(type(error)) as caught:
        watched.qp.post_send(wrs)
    assert caught.value is error
    watched.nothing_posted()
    if at not in ("iterator", "sg_list"):  # exhausted by now
        with pytest.raises(type(error)) as caught:
            watched.qp.prepare(wrs)
        assert caught.value is error
    watched.qp.post_send(good)
    assert watched.cq.wait(1)[0].status is rp.WCStatus.SUCCESS


class OddKey(rp.RdmaWrite):
    """Its rkey cannot be read."""

    error: Any

    @property
    def rkey(self) -> int:  # type: ignore[override]
        raise self.error

    @rkey.setter
    def rkey(self, value: int) -> None: ...


@pytest.mark.parametrize(
    "error", [ValueError, AttributeError, OverflowError, ZeroDivisionError, TypeError, BufferError]
)
def test_exception_that_a_wrong_value_raises_is_the_reason(watched, error):
    """Reading a field may raise it: a PostError says which work request it was."""
    odd = OddKey(watched.mr[:8])
    odd.error = error("no key")
    assert watched.refused(odd) == "no key"
    if error is not TypeError:
        wr = watched.write(rkey=Counted(1, raises(error("no key"))))
        assert watched.refused(wr) == "no key"


def test_exception_without_a_text_comes_out_as_what_asking_for_it_raises(watched):
    class Mute(ValueError):
        def __str__(self) -> str:
            raise Mine("no text")

    odd = OddKey(watched.mr[:8])
    odd.error = Mute()
    for wr in (odd, watched.write(rkey=Counted(1, raises(Mute())))):
        with pytest.raises(Mine, match="no text"):
            watched.qp.post_send(wr)
        watched.nothing_posted()


# ---- each is read once ------------------------------------------------------------------


def test_each_property_is_read_once(watched):
    """A subclass, whose results could differ."""
    read: list[str] = []

    def answering(name: str, *values: Any) -> Any:
        answers = iter(values)

        def get(self: Any) -> Any:
            read.append(name)
            return next(answers)

        return property(get, lambda self, value: None)

    mr = watched.mr
    names = {
        "wr_id": (5, 6),
        "send_flags": (SendFlags.SIGNALED, 1 << 20),
        "sg_list": (mr[:8], None),
        "remote_addr": (mr.addr, -1),
        "rkey": (mr.rkey, None),
        "remote_srqn": (0, "x"),
    }
    kind: Any = type(
        "Answering", (rp.RdmaWrite,), {name: answering(name, *v) for name, v in names.items()}
    )
    watched.qp.post_send([kind()])
    assert sorted(read) == sorted(names)
    [wc] = watched.cq.wait(1)
    assert (wc.wr_id, wc.status) == (5, rp.WCStatus.SUCCESS)


def test_property_of_a_subclass_counts_and_not_the_slot_that_it_hides(watched):
    class Doubled(rp.RdmaWrite):
        @property
        def wr_id(self) -> int:  # type: ignore[override]
            return 2 * rp.RdmaWrite.wr_id.__get__(self)  # type: ignore[attr-defined]

        @wr_id.setter
        def wr_id(self, value: int) -> None:
            rp.RdmaWrite.wr_id.__set__(self, value)  # type: ignore[attr-defined]

    wr = Doubled(watched.mr[:8], wr_id=21, remote_addr=watched.mr.addr, rkey=watched.mr.rkey)
    watched.qp.post_send(wr)
    assert watched.cq.wait(1)[0].check().wr_id == 42


def test_resources_of_subclasses_are_what_their_base_is(watched):
    """A region, an address handle and a window."""

    class Region(rp.MR): ...

    class Window(rp.MW): ...

    class Handle(rp.AH): ...

    with contextlib.ExitStack() as stack:
        mr = stack.enter_context(Region(watched.pd, 64, ALL | rp.Access.MW_BIND))
        mw = stack.enter_context(Window(watched.pd, rp.MWType.TYPE_2))
        ud = stack.enter_context(
            rp.QP(watched.pd, QPType.UD, watched.cq, checked=watched.checked, max_recv_sge=1)
        )
        ud.connect()
        ah = stack.enter_context(
            Handle(watched.pd, stack.enter_context(ud.ah_to(ud.endpoint())).attr)
        )
        watched.qp.post_send(watched.write(sg_list=mr[:8]))
        watched.qp.post_send(
            rp.BindMW(mw=mw, mr=mr, rkey=mw.next_rkey(), addr=mr.addr, length=64, wr_id=1)
        )
        ud.post_send(rp.Send(mr[:8], ah=ah, remote_qpn=ud.qp_num, wr_id=2))
        assert {wc.wr_id for wc in watched.cq.wait(3)} == {0, 1, 2}
        watched.qp.to_reset()


@pytest.mark.parametrize("order", ["ABA", "AABB", "ABAB", "ABCABC", "ABCDEFABCDEF"])
def test_sges_of_one_region_need_not_be_adjacent(watched, order):
    with contextlib.ExitStack() as stack:
        regions = {name: stack.enter_context(rp.MR(watched.pd, 64, ALL)) for name in set(order)}
        qp = stack.enter_context(
            rp.QP(watched.pd, QPType.RC, watched.cq, checked=watched.checked, max_recv_sge=12)
        )
        qp.to_init()
        qp.post_recv(rp.RecvWR([regions[name][i : i + 4] for i, name in enumerate(order)]))
        [record] = watched.tap.last()
        assert record.sges == [
            (regions[name].addr + i, 4, regions[name].lkey) for i, name in enumerate(order)
        ]
        qp.to_reset()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_every_region_of_a_work_request_is_in_use_until_it_is_done(watched, count):
    with contextlib.ExitStack() as stack:
        regions = [stack.enter_context(rp.MR(watched.pd, 64, ALL)) for _ in range(count)]
        qp = stack.enter_context(
            rp.QP(watched.pd, QPType.RC, watched.cq, checked=watched.checked, max_recv_sge=count)
        )
        qp.to_init()
        qp.post_recv(rp.RecvWR([mr[:4] for mr in regions]))
        for mr in regions:
            with pytest.raises(rp.InUseError, match="1 outstanding work request"):
                mr.close()
        qp.to_reset()


def test_work_requests_of_many_regions_leave_resident_memory_where_it_was(watched):
    with contextlib.ExitStack() as stack:
        regions = [stack.enter_context(rp.MR(watched.pd, 64, ALL)) for _ in range(12)]
        qp = stack.enter_context(
            rp.QP(watched.pd, QPType.RC, watched.cq, checked=watched.checked, max_recv_sge=12)
        )
        qp.to_init()
        receive = rp.RecvWR([mr[:4] for mr in regions])

        def post(times: int) -> None:
            for _ in range(times):
                qp.post_recv(receive)
                qp.to_reset()
                qp.to_init()
                watched.tap.chains.clear()

        post(200)
        before = resident()
        post(8_000)
        assert resident() - before < 1 << 20


def test_any_iterable_of_work_requests_is_read_once(watched):
    """Generators, and sequences that make their items on demand."""
    asked: list[int] = []

    class Lazy:
        def __len__(self) -> int:
            return 1  # a lie

        def __iter__(self) -> Iterator[Any]:
            for i in range(3):
                asked.append(i)
                yield watched.write(wr_id=i, sg_list=(sge for sge in [watched.mr[i : i + 8]]))

    class ByIndex:
        def __getitem__(self, index: int) -> Any:
            if index > 2:
                raise IndexError
            return watched.write(wr_id=10 + index)

        __iter__ = None  # type: ignore[assignment]

    watched.qp.post_send(Lazy())
    assert asked == [0, 1, 2]
    assert [wc.wr_id for wc in watched.cq.wait(3)] == [0, 1, 2]
    watched.qp.post_send(iter([watched.write(wr_id=4)]))
    watched.qp.post_send(set())
    watched.qp.post_send(watched.write(wr_id=i) for i in (5, 6))
    assert [wc.wr_id for wc in watched.cq.wait(3)] == [4, 5, 6]
    with pytest.raises(TypeError):
        watched.qp.post_send(ByIndex())


class Failing:
    """A sequence without __iter__, whose first item fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __getitem__(self, index: int) -> Any:
        raise self.error


class FailingAtOnce(Failing):
    def __iter__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("kind", [Failing, FailingAtOnce])
def test_error_of_an_iterator_propagates_unchanged(watched, kind):
    """Only for what is not a sequence does the error say what it should be."""
    for error in (Mine("mine"), ValueError("no item")):
        with pytest.raises(type(error)) as caught:
            watched.qp.post_send(kind(error))
        assert caught.value is error
    with pytest.raises(Mine):
        watched.qp.post_send(rp.Send(kind(Mine("mine"))))
    assert watched.refused(rp.Send(kind(ValueError("no item")))) == "no item"
    watched.nothing_posted()


def test_type_error_of_an_iterator_propagates(watched):
    with pytest.raises(TypeError, match="not today"):
        watched.qp.post_send(FailingAtOnce(TypeError("not today")))
    assert watched.refused(rp.Send(FailingAtOnce(TypeError("not today")))) == "not today"


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_list_that_is_changed_while_it_is_read_is_posted_as_it_was(watched, size):
    """The list of work requests, and one of SGEs: no number's __index__ changes what is posted."""
    mr = watched.mr
    sges: list[Any] = [mr[:8]]
    wrs: list[Any] = [watched.write(wr_id=i, send_flags=0) for i in range(size)]

    def change() -> None:
        wrs.clear()
        sges.clear()
        gc.collect()

    wrs[0] = watched.write(wr_id=Counted(70, change), sg_list=sges, send_flags=0)
    watched.qp.post_send(wrs)
    assert len(watched.tap.last()) == size
    assert watched.qp.outstanding.send == size
    watched.tap.chains.clear()
    # The SGEs are read after the numbers, and were gone by then.
    sges[:] = [mr[:8], rp.SGE(mr.addr, Counted(8, change), mr.lkey, mr), mr[8:16]]  # type: ignore[arg-type]
    watched.qp.post_send(watched.write(sg_list=sges))
    [record] = watched.tap.last()
    assert [sge[1] for sge in record.sges] == [8, 8, 8]


def test_fields_that_are_changed_after_they_were_read_have_no_effect(watched):
    mr = watched.mr
    first = watched.write(wr_id=1)
    second = watched.write(wr_id=2, rkey=Counted(mr.rkey, lambda: first.__setattr__("rkey", 0)))
    third = watched.write(wr_id=3)
    watched.qp.post_send([first, second, third])
    assert [r.wr.wr.rdma.rkey for r in watched.tap.last()] == [mr.rkey] * 3
    assert {wc.check().wr_id for wc in watched.cq.wait(3)} == {1, 2, 3}


# ---- what is closed meanwhile -----------------------------------------------------------


def test_region_that_is_closed_while_the_list_is_read_is_refused(watched):
    """It was open when its SGE was read; all are checked once nothing can run."""
    mr = rp.MR(watched.pd, 64, ALL)
    wrs = [
        rp.RdmaWrite(mr[:8], remote_addr=watched.mr.addr, rkey=watched.mr.rkey),
        watched.write(rkey=Counted(watched.mr.rkey, mr.close)),
    ]
    lkey = mr.lkey
    assert watched.refused(wrs) == f"MR of 64 bytes (lkey {lkey:#x}) is closed"


def test_queue_pair_closed_while_a_list_is_read_raises_closed_error(watched):
    with rp.QP(watched.pd, QPType.RC, watched.cq, checked=watched.qp.checked) as qp:
        qp.connect(qp.endpoint())
        with pytest.raises(rp.ClosedError):
            qp.post_send(watched.write(rkey=Counted(1, qp.close)))
    with (
        rp.QP(watched.pd, QPType.RC, watched.cq, checked=watched.qp.checked) as qp,
        pytest.raises(rp.ClosedError),
    ):
        qp.prepare(watched.write(rkey=Counted(1, qp.close)))
    assert watched.tap.chains == []


def test_queue_pair_that_is_reset_while_the_list_is_read(watched):
    """The state counts once no code can run any more."""
    wr = watched.write(rkey=Counted(1, watched.qp.to_reset))
    with pytest.raises(rp.PostError) as caught:
        watched.qp.post_send(wr)
    assert (caught.value.index, caught.value.posted) == (0, 0)
    assert watched.qp.outstanding == (0, 0)


def test_post_from_within_a_post_goes_first(watched):
    """A number's __index__ may post to the same queue: it is read before anything is posted."""
    inner = watched.write(wr_id=1)
    outer = watched.write(
        wr_id=2, rkey=Counted(watched.mr.rkey, lambda: watched.qp.post_send(inner))
    )
    watched.qp.post_send([outer, watched.write(wr_id=3)])
    assert [wc.check().wr_id for wc in watched.cq.wait(3)] == [1, 2, 3]


def in_another_thread(call: Callable[[], Any]) -> None:
    """Call, and fail if that does not end: an earlier call has kept a lock."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_queue_is_free_for_another_thread_after_each_call(watched):
    qp, batch = watched.qp, watched.qp.prepare(watched.write(wr_id=1))
    with contextlib.suppress(rp.PostError):
        qp.post_send([watched.write(wr_id=0), watched.write(rkey=None)])
    in_another_thread(batch.post)
    in_another_thread(lambda: qp.post_send(watched.write(wr_id=2)))
    batch.post()
    batch[0].wr_id = 4
    batch[0].sg_list = watched.mr[8:16]
    with pytest.raises(ValueError, match="SGEs"):
        batch[0].sg_list = ()
    in_another_thread(batch.post)
    batch.close()
    with pytest.raises(rp.ClosedError):
        batch.post()
    in_another_thread(lambda: qp.post_send(watched.write(wr_id=5)))
    assert [wc.check().wr_id for wc in watched.cq.wait(6)] == [0, 1, 2, 1, 4, 5]


def test_post_waits_for_that_of_another_thread(watched):
    entered, leave = threading.Event(), threading.Event()

    class Slow(list[Any]):
        """Keeps the device's call, and so the queue, busy."""

        def append(self, item: Any) -> None:
            super().append(item)
            entered.set()
            leave.wait(20)

    said: list[BaseException] = []

    def post(wr_id: int) -> None:
        try:
            watched.srq.post_srq_recv(rp.RecvWR(wr_id=wr_id))
        except BaseException as error:
            said.append(error)

    watched.tap.chains = Slow()
    threads = [threading.Thread(target=post, args=(wr_id,), daemon=True) for wr_id in (1, 2)]
    threads[0].start()
    assert entered.wait(20)
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    assert len(watched.tap.chains) == 1
    leave.set()
    for thread in threads:
        thread.join(20)
    assert said == []
    assert len(watched.tap.chains) == watched.srq.outstanding == 2


def test_device_that_calls_python_cannot_be_posted_to_from_there(watched):
    """It is refused, instead of waiting for its own thread's lock."""
    refused = []

    class Posting(list[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            if len(self) == 1:
                with pytest.raises(RuntimeError, match="in the middle of a post") as caught:
                    watched.srq.post_srq_recv(rp.RecvWR(watched.mr[:8], wr_id=2))
                refused.append(caught.value)

    watched.tap.chains = Posting()
    in_another_thread(lambda: watched.srq.post_srq_recv(rp.RecvWR(watched.mr[:8], wr_id=1)))
    assert (len(refused), watched.srq.outstanding) == (1, 1)
    in_another_thread(lambda: watched.srq.post_srq_recv(rp.RecvWR(watched.mr[:8], wr_id=3)))
    assert watched.srq.outstanding == 2


def test_post_of_another_thread_waits_for_its_turn(watched):
    """The device gets one post to a queue at a time, in order."""
    inside, other, found = threading.Event(), threading.Event(), []

    class Waiting(list[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            if len(self) == 1:
                inside.set()
                found.append(other.wait(0.3))
            else:
                other.set()

    def post(wr_id: int) -> None:
        watched.srq.post_srq_recv(rp.RecvWR(watched.mr[:8], wr_id=wr_id))
        found.append(wr_id)

    watched.tap.chains = Waiting()
    threads = [threading.Thread(target=post, args=(wr_id,), daemon=True) for wr_id in (1, 2)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert (found[0], sorted(found[1:]), watched.srq.outstanding) == (False, [1, 2], 2)


# ---- what only looks right --------------------------------------------------------------


class Posing:
    """Claims to be of another class, which isinstance() believes."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return self.kind

    _handle = 0x4141414141
    closed = False


def test_what_lies_about_its_class_is_not_believed(watched):
    assert "sg_list holds Posing" in watched.refused(rp.Send([Posing(rp.SGE)]))
    assert "ah: expected AH, got Posing" in watched.refused(rp.Send(ah=Posing(rp.AH)))
    sge = watched.mr[:8]._replace(owner=Posing(rp.MR))
    assert "owner: expected MR or a buffer, got Posing" in watched.refused(rp.Send(sge))
    for name, kind in (("mw", rp.MW), ("mr", rp.MR)):
        said = watched.refused(rp.BindMW(**{name: Posing(kind)}))
        assert said == f"{name}: expected {name.upper()}, got Posing"
    assert "expected SendWR" in watched.refused([Posing(rp.Send)])
    with pytest.raises(TypeError, match="expected SendWR or an iterable of them, got Posing"):
        watched.qp.post_send(Posing(rp.Send))


def test_sges_behind_a_wrong_one_do_not_make_it_right(watched):
    good = watched.mr[:8]
    for wrong, said in (
        (5, "sg_list holds int; mr[a:b] makes an SGE"),
        (good._replace(owner=watched), "an SGE's owner: expected MR or a buffer, got Watched"),
        (good._replace(length=-1), "an SGE's length=-1 is not in 0..2^32-1"),
        (good._replace(lkey="x"), "an SGE's lkey: expected int, got str"),
    ):
        for sges in ([wrong, good], [good, wrong, good], [wrong, good, good]):
            assert watched.refused(rp.Send(sges)) == said
        # The first counts.
        assert watched.refused(rp.Send([wrong, "another"])) == said  # type: ignore[list-item]
    wrong = good._replace(lkey=Counted(1, raises(Mine("x"))))
    with pytest.raises(Mine):
        watched.qp.post_send(rp.Send([wrong, good]))
    watched.nothing_posted()


def test_tuples_that_look_like_sges_are_none(watched):
    mr = watched.mr

    class Like(rp.SGE):
        """Of another class: its items may be anything."""

    for like in (tuple(mr[:8]), (1, 2), (mr.addr, 8, mr.lkey, mr), Like(*mr[:8]), mr, None):
        said = watched.refused(rp.Send([mr[:8], like]))
        hint = "use mr[:]" if like is mr else "mr[a:b] makes an SGE"
        assert said == f"sg_list holds {type(like).__name__}; {hint}"
    short: Any = tuple.__new__(rp.SGE, (1, 2))
    assert "sg_list holds SGE" in watched.refused(rp.Send([short]))


def test_work_request_with_a_deleted_attribute_is_refused(watched):
    for name in ("wr_id", "send_flags", "sg_list", "rkey", "remote_addr", "remote_srqn"):
        wr = watched.write()
        delattr(wr, name)
        assert name in watched.refused(wr)


def test_buffer_of_a_header_is_held_until_it_is_sent(watched):
    """A bytearray cannot be resized behind the device's back."""
    hdr = bytearray(b"header")
    wr = rp.TSO(rp.SGE(1, 2, 3), hdr=hdr, mss=Counted(5, lambda: hdr.__setitem__(0, 0x48)))
    watched.tap.refuse()
    with pytest.raises(rp.PostError):
        watched.qp.post_send(wr)
    if watched.tap.chains:
        [record] = watched.tap.last()
        assert record.hdr == b"Header"
    hdr.extend(b"more")

    def resize() -> None:
        with pytest.raises(BufferError):
            hdr.extend(b"more")

    wr = rp.TSO(rp.SGE(1, 2, 3), hdr=hdr, mss=Counted(5, resize))
    with pytest.raises(rp.PostError):
        watched.qp.post_send(wr)
    assert wr.mss.asked == 1


@pytest.mark.parametrize("watched", [False], ids=["unchecked"], indirect=True)
def test_longest_header_that_16_bits_can_count_is_read_whole(watched):
    hdr = bytes(range(256)) * 256
    watched.tap.refuse()
    with pytest.raises(rp.PostError):
        watched.qp.post_send(rp.TSO(rp.SGE(1, 2, 3), hdr=hdr[1:], mss=1))
    [record] = watched.tap.last()
    assert record.hdr == hdr[1:]
    with pytest.raises(rp.PostError, match="hdr has 65536 bytes; at most 65535 fit"):
        watched.qp.post_send(rp.TSO(rp.SGE(1, 2, 3), hdr=hdr, mss=1))
    assert len(watched.tap.chains) == 1


def test_header_that_is_released_or_none_is_refused(watched):
    view = memoryview(b"header")
    view.release()
    for hdr in (view, None):
        assert watched.refused(rp.TSO(rp.SGE(1, 2, 3), hdr=hdr, mss=1)) == "hdr is not bytes"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 knows no __buffer__")
def test_exception_of_a_headers_own_code_comes_out_unchanged(watched):
    class Odd:
        def __buffer__(self, flags: int) -> memoryview:
            raise Mine("x")

    with pytest.raises(Mine):
        watched.qp.post_send(rp.TSO(rp.SGE(1, 2, 3), hdr=Odd(), mss=1))
    watched.nothing_posted()


# ---- the other queues -------------------------------------------------------------------


def test_receives_and_operations_are_read_once_too(watched):
    mr, number = watched.mr, Counted(5)
    watched.tap.refuse()
    for post, wr in (
        (watched.qp.post_recv, rp.RecvWR(mr[:8], number)),
        (watched.srq.post_srq_recv, rp.RecvWR(mr[:8], number)),
        (watched.srq.post_srq_ops, rp.TagAdd(recv_wr_id=number)),
        (watched.srq.post_srq_ops, rp.TagAdd(tag=number)),
        (watched.srq.post_srq_ops, rp.TagSync(wr_id=number)),
    ):
        number.asked = 0
        with pytest.raises(rp.PostError):
            post(wr)
        assert number.asked == 1
    assert len(watched.tap.chains) == 5


def test_tag_handle_that_cannot_be_set_is_the_callers_error(watched):
    """By then the receive is on the list, and counted."""

    def refuse(self: Any, value: Any) -> None:
        if value is not None:
            raise Mine("no")

    class Stubborn(rp.TagAdd):
        handle = property(lambda self: None, refuse)

    with pytest.raises(Mine):
        watched.srq.post_srq_ops(Stubborn(tag=1))
    assert (watched.srq.outstanding_tags, watched.srq.outstanding_ops) == (1, 1)


def test_prepared_list_reads_once_and_keeps_what_it_read(watched):
    number, wrs = Counted(7), [watched.write(), watched.write()]
    wrs[0].wr_id = number
    batch = watched.qp.prepare(iter(wrs))
    wrs[1].rkey = None
    for _ in range(3):
        batch.post()
        assert [wc.check().wr_id for wc in watched.cq.wait(2)] == [7, 0]
    assert number.asked == 1
    [first, _] = batch
    number = Counted(9)
    first.wr_id = number
    assert (first.wr_id, number.asked) == (9, 1)
    with pytest.raises(Mine):
        first.rkey = Counted(1, raises(Mine("x")))
    assert first.rkey == watched.mr.rkey


def test_other_sges_of_a_prepared_work_request_leave_what_else_it_holds(watched):
    """The address handle and the header of every work request in the list."""
    mr, hdr = watched.mr, bytearray(b"header")
    with contextlib.ExitStack() as stack:
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
                item.sg_list = mr[8 * i : 8 * i + 4]
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
                [(mr.addr + 8 * i, 4, mr.lkey)] for i in range(len(wrs))
            ]
            assert {record.wr.wr.ud.remote_qkey for record in records if not record.hdr} <= {5}
            assert {record.hdr for record in records} <= {None, b"header"}
            assert (records[-1].hdr and records[-1].wr.tso.mss) in (None, 7)
            watched.cq.wait(len(wrs))
            batch.close()
            hdr.extend(b"")


def test_exception_in_other_sges_of_a_prepared_work_request_comes_out_unchanged(watched):
    [item] = watched.qp.prepare(watched.write())
    wrong = watched.mr[8:16]._replace(lkey=Counted(1, raises(Mine("x"))))  # type: ignore[arg-type]
    for sges in (wrong, [wrong], Failing(Mine("x"))):
        with pytest.raises(Mine):
            item.sg_list = sges
    assert item.sg_list == (watched.mr[:8],)


@pytest.mark.parametrize("watched", [False], ids=["unchecked"], indirect=True)
def test_every_bit_of_the_flags_goes_to_the_device_unchecked(watched):
    watched.tap.refuse()
    with pytest.raises(rp.PostError):
        watched.qp.post_send(rp.LocalInv(send_flags=U32))
    [record] = watched.tap.last()
    assert record.wr.send_flags == U32
    with pytest.raises(rp.PostError):
        watched.srq.post_srq_ops(rp.TagSync(flags=(1 << 31) - 1))
    [record] = watched.tap.last()
    assert record.wr.flags == (1 << 31) - 1


def test_many_sges_take_as_long_for_each_as_few(watched):
    """Each has its own memory, which is held: eight times as many do not take 64 times as long."""

    def seconds(count: int) -> float:
        wr = watched.write(
            sg_list=[rp.SGE.from_buffer(bytearray(1)) for _ in range(count)],
            send_flags=SendFlags.INLINE,
        )
        times = []
        for _ in range(3):
            start = time.thread_time()
            with pytest.raises(rp.PostError):
                watched.qp.post_send(wr)
            times.append(time.thread_time() - start)
        return min(times)

    watched.tap.refuse()
    assert seconds(16_000) < 24 * seconds(2_000)


def test_each_region_is_held_whatever_reading_a_number_does(watched):
    """What is held so far is a tuple, which the collector exposes to anyone; it is kept here."""
    kept: list[Any] = []

    class Address:
        def __init__(self, number: int) -> None:
            self.number = number

        def __index__(self) -> int:
            kept.append([found for found in gc.get_objects() if type(found) is tuple])
            return self.number

    with contextlib.ExitStack() as stack:
        regions = [stack.enter_context(rp.MR(watched.pd, 64, ALL)) for _ in range(7)]
        qp = stack.enter_context(
            rp.QP(watched.pd, QPType.RC, watched.cq, checked=watched.checked, max_recv_sge=7)
        )
        qp.to_init()
        qp.post_recv(
            rp.RecvWR([rp.SGE(Address(mr.addr), 8, mr.lkey, mr) for mr in regions], wr_id=3)  # type: ignore[arg-type]
        )
        assert len(kept) == 7
        for mr in regions:
            with pytest.raises(rp.InUseError, match="wr_id 3"):
                mr.close()
        qp.to_reset()


# ---- which classes there are ------------------------------------------------------------

OF_SEND = ffi.sizeof("struct ibv_send_wr")
NO_FIELD = ("nonsense", 0, 4, "N")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ((NO_FIELD,), AttributeError),
        ((("imm_data", -1, 4, "N"),), ValueError),
        ((("imm_data", 0, -1, "N"),), ValueError),
        ((("imm_data", 4, -1, "N"),), ValueError),
        ((("imm_data", -4, 4, "N"),), ValueError),
        ((("imm_data", OF_SEND - 3, 4, "N"),), ValueError),
        ((("imm_data", OF_SEND, 1, "N"),), ValueError),
        # What was read before the wrong one is correct.
        ((("imm_data", OF_SEND - 4, 4, "N"), NO_FIELD), AttributeError),
        ((("imm_data", 0, 0, "N"), NO_FIELD), AttributeError),
        ((*[("imm_data", 0, 4, "N")] * 7, NO_FIELD), AttributeError),
        ((*[("imm_data", 0, 4, "N")] * 8, NO_FIELD), ValueError),
        (((1, 2),), TypeError),
        ([NO_FIELD], TypeError),
    ],
)
def test_fields_of_a_class_are_within_its_struct(fields, error):
    with pytest.raises(error):
        native.describe_wr(rp.SendWithImm, 0, 0, False, False, fields)


def test_class_is_of_a_verb_and_has_the_slots_of_one():
    for wrong in (
        (rp.Send, -1, 0, False, False, (NO_FIELD,)),
        (rp.Send, 4, 0, False, False, (NO_FIELD,)),
    ):
        with pytest.raises(ValueError, match="too many"):
            native.describe_wr(*wrong)
    for kind, verb in ((rp.RecvWR, 0), (rp.Send, 3), (int, 1), (object, 0)):
        with pytest.raises(AttributeError):
            native.describe_wr(kind, verb, 0, False, False, ())
    for wrong in ((), (5, 0, 0, False, False, ()), (rp.Send, "0", 0, False, False, ())):
        with pytest.raises(TypeError):
            native.describe_wr(*wrong)
    with pytest.raises(RuntimeError, match="MR: already described"):
        native.describe_resource("MR", rp.MR)


def test_registering_too_many_classes_is_refused():
    assert prints(
        "import rdmapost as rp\n"
        "from rdmapost._binding import native\n"
        "last = -1\n"
        "try:\n"
        "    while last < 100: last = native.describe_wr(rp.LocalInv, 0, 6, False, False, ())\n"
        "except ValueError as error: print(last, error)\n"
        "with rp.open_device('soft0') as c, rp.PD(c) as pd, rp.CQ(c) as cq:\n"
        "    with rp.QP(pd, rp.QPType.RC, cq) as qp:\n"
        "        qp.connect(qp.endpoint())\n"
        "        qp.post_send(rp.Send(wr_id=5, send_flags=2))\n"
        "        qp.to_err()\n"
        "        print([wc.wr_id for wc in cq.wait(1)])\n"
    ).splitlines() == ["23 too many", "[5]"]

"""Work requests with unusual and hostile values: each is read once, and what was read is posted."""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from support import ALL, watching
from support.watching import Counted, Enumerated, Int, Mine, raises

import rdmapost as rp
from rdmapost import QPType, SendFlags

watched = watching.watched

U64, U32 = (1 << 64) - 1, (1 << 32) - 1


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
def test_number_given_as_an_object_with_index_is_read_once(watched, given, read):
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


@pytest.mark.parametrize(
    "name", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_numpy_numbers_are_exact_or_refused(watched, name):
    """Of every width and sign: exact to the last bit, and refused if they do not fit."""
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    kind = getattr(numpy, name)
    highest, lowest = numpy.iinfo(kind).max, numpy.iinfo(kind).min
    for value in (0, 1, 100, highest):
        watched.qp.post_send(watched.write(remote_addr=kind(value)))
        [record] = watched.tap.last()
        assert record.wr.wr.rdma.remote_addr == int(value)
        watched.cq.wait(1)
        watched.qp.to_reset()
        watched.qp.connect(watched.qp.endpoint())
    watched.tap.chains.clear()
    if lowest < 0:
        said = watched.refused(watched.write(remote_addr=kind(lowest)))
        assert said == f"remote_addr={lowest} is not in 0..2^64-1"
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


def test_numpy_arrays_are_refused_as_numbers(watched):
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    for value in (numpy.zeros(3, "u4"), numpy.float64(1), numpy.ones(1, "f4")):
        assert "expected int" in watched.refused(watched.write(rkey=value))


@pytest.mark.parametrize("value", [-1, 1 << 64, 1 << 1000, -(1 << 1000), Int(-1), Counted(-1)])
def test_work_request_numbers_that_do_not_fit_are_refused_by_name(watched, value):
    number = value.value if isinstance(value, Counted) else int.__add__(value, 0)
    for name in ("wr_id", "remote_addr"):
        assert watched.refused(watched.write(**{name: value})).startswith(f"{name}=")
    assert watched.refused(watched.write(remote_addr=number)) == (
        f"remote_addr={number} is not in 0..2^64-1"
    )


def test_number_whose_index_is_no_int_is_refused(watched):
    for wrong in (None, 1.5, "1"):
        said = watched.refused(watched.write(rkey=Counted(wrong)))
        assert said == "rkey: expected int, got Counted"


# ---- each is read once ------------------------------------------------------------------


def test_each_property_of_a_work_request_is_read_once(watched):
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


def test_resources_of_subclasses_are_posted_as_their_base(watched):
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


def test_post_to_a_queue_pair_reset_while_the_list_is_read_is_refused(watched):
    """The state counts once no code can run any more."""
    wr = watched.write(rkey=Counted(1, watched.qp.to_reset))
    with pytest.raises(rp.PostError) as caught:
        watched.qp.post_send(wr)
    assert (caught.value.index, caught.value.posted) == (0, 0)
    assert watched.qp.outstanding == (0, 0)


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


def test_object_with_a_false_class_is_refused_in_a_work_request(watched):
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


def test_wrong_sge_is_refused_whatever_sges_follow_it(watched):
    good = watched.mr[:8]
    for wrong, said in (
        (1.5, "sg_list holds float; mr[a:b] makes an SGE"),
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


def test_work_request_with_a_deleted_attribute_is_refused(watched):
    for name in ("wr_id", "send_flags", "sg_list", "rkey", "remote_addr", "remote_srqn"):
        wr = watched.write()
        delattr(wr, name)
        assert name in watched.refused(wr)


# ---- the other queues -------------------------------------------------------------------


def test_receives_and_tag_operations_are_read_once(watched):
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

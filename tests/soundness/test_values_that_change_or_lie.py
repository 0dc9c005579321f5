"""What is checked is what is posted: numbers of the caller's own types, and what cannot be set."""

from __future__ import annotations

import contextlib
import gc
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.connected_pair import Rig
from support.isolated import isolated

import rdmapost as rp
from rdmapost import QPType, SendFlags


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "gathered"])
@isolated(silent=True, warnings="ignore")
def test_sge_of_numpy_integers_cannot_reach_outside_its_region(inline, soft):
    """Before it, behind it, and around the end of the numbers."""
    import numpy

    rig = Rig(soft)
    flags = SendFlags.SIGNALED | (SendFlags.INLINE if inline else SendFlags(0))
    memory = bytearray(b"\xaa" * 64 + bytes(64) + b"\xbb" * 64)
    mr = rp.MR(rig.pd, memoryview(memory)[64:128])
    for number_type in (numpy.uint64, numpy.int64, numpy.uint32):
        for offset, length in ((-32, 32), (-32, 64), (-1, 2), (33, 32), (64, 1), (-64, 60)):
            addr = mr.addr + offset
            if number_type is numpy.uint32:
                sge = rp.SGE(addr, number_type(length), mr.lkey, mr)
            else:
                sge = rp.SGE(number_type(addr), number_type(length), number_type(mr.lkey), mr)
            wr = rp.RdmaWrite(
                sge, send_flags=flags, remote_addr=rig.mr.addr + 1024, rkey=rig.mr.rkey
            )
            with pytest.raises(rp.PostError, match="outside"):
                rig.a.post_send(wr)
            assert rig.a.outstanding.send == 0
            batch = None
            with pytest.raises((rp.PostError, ValueError), match="outside"):
                batch = rig.a.prepare(wr)
            assert batch is None
    # The same types are taken where they are right.
    mr.buffer[:8] = b"is right"
    sge = rp.SGE(numpy.uint64(mr.addr), numpy.uint32(8), numpy.uint32(mr.lkey), mr)
    rig.a.post_send(
        rp.RdmaWrite(
            sge,
            send_flags=flags,
            remote_addr=numpy.uint64(rig.mr.addr + 1024),
            rkey=numpy.uint32(rig.mr.rkey),
            wr_id=numpy.uint64(7),
        )
    )
    assert rig.cq.wait(1)[0].check().wr_id == 7
    assert bytes(rig.mr.buffer[1024:1032]) == b"is right"
    mr.close()
    rig.close()


class TwoFaced:
    """A number whose __index__ and __int__ differ."""

    def __init__(self, index: int, integer: int) -> None:
        self.index, self.integer = index, integer

    def __index__(self) -> int:
        return self.index

    def __int__(self) -> int:
        return self.integer

    def __and__(self, other: int) -> int:
        return self.integer & other

    __rand__ = __and__

    def __eq__(self, other: object) -> bool:
        return self.integer == other

    __hash__ = None  # type: ignore[assignment]


@isolated(silent=True)
def test_flags_whose_int_and_index_differ_are_checked_by_the_posted_value(device):
    """INLINE by one of them: more than max_inline_data is never handed to the device as inline."""
    rig = Rig(device)
    signaled, inline = int(SendFlags.SIGNALED), int(SendFlags.SIGNALED | SendFlags.INLINE)
    length = rig.a.max_inline_data + 512
    for flags in (TwoFaced(inline, signaled), TwoFaced(signaled, inline)):
        wr = rp.RdmaWrite(
            rig.mr[:length],
            send_flags=flags,  # type: ignore[arg-type]
            remote_addr=rig.mr.addr + 2048,
            rkey=rig.mr.rkey,
        )
        try:
            rig.a.post_send(wr)
        except (rp.PostError, TypeError) as error:
            assert isinstance(error, TypeError) or "max_inline_data" in error.reason, error  # noqa: PT017
            assert rig.a.outstanding.send == 0
        else:
            assert flags.index == signaled, "the flags by __index__ are what counts"
            rig.cq.wait(1)[0].check()
    rig.works()
    rig.close()


@isolated(silent=True)
def test_flags_that_change_when_read_are_read_once(soft):
    """The first reading counts: a write that is INLINE at the second is not."""
    rig = Rig(soft)
    flags = [int(SendFlags.SIGNALED)] + [int(SendFlags.SIGNALED | SendFlags.INLINE)] * 9

    class Changing:
        def __index__(self) -> int:
            return flags.pop(0)

        __int__ = __index__

        def __and__(self, other: int) -> int:
            return self.__index__() & other

        __rand__ = __and__

    wr = rp.RdmaWrite(
        rp.SGE(8, 16, rig.mr.lkey),
        send_flags=Changing(),  # type: ignore[arg-type]
        remote_addr=rig.mr.addr + 1024,
        rkey=rig.mr.rkey,
    )
    try:
        rig.a.post_send(wr)
    except (rp.PostError, TypeError):
        pass
    else:
        assert rig.cq.wait(1)[0].status is rp.WCStatus.LOC_PROT_ERR
        assert len(flags) == 9, "the flags have been read more than once"


HEADER = bytes(range(14)) + struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40, 7, 0, 64, 6, 0, b"a", b"b")


@pytest.mark.parametrize("layout", ["H-array", "I-view", "2-D"])
@isolated(silent=True)
def test_tso_header_is_measured_in_bytes(layout, soft):
    """A header of items that are wider is as long as its bytes, in the check and in the frames."""
    rig = Rig(soft)
    header = bytes(54)
    wide: dict[str, Any] = {
        "H-array": array("H", header),
        "I-view": memoryview(header + bytes(2)).cast("I"),
        "2-D": memoryview(header).cast("B", (9, 6)),
    }
    hdr = wide[layout]
    size = memoryview(hdr).nbytes
    for room, fits in ((64, True), (len(hdr), False)):
        qp = rp.QP(rig.pd, QPType.RAW_PACKET, rig.cq, max_tso_header=room)
        qp.connect()
        wr = rp.TSO(rig.mr[:1000], hdr=hdr, mss=300)
        if qp.max_tso_header >= size:
            assert fits, "the device has granted more than was asked for"
            try:
                qp.post_send(wr)
            except (rp.PostError, TypeError):
                # Only bytes may be taken: then by name.
                pass
            else:
                # What is in the header is the device's to judge, not that it has it all.
                assert rig.cq.wait(1)[0].opcode in (rp.WCOpcode.TSO, None)
        else:
            with pytest.raises((rp.PostError, TypeError), match=f"{size} bytes|hdr"):
                qp.post_send(wr)
            assert qp.outstanding.send == 0
        qp.to_reset()
        qp.close()
    rig.close()


@isolated(silent=True)
def test_tso_header_that_grows_after_the_check_is_not_read_beyond_its_end(soft):
    """The payload's number runs code that empties and refills the header."""
    rig = Rig(soft)
    qp = rp.QP(rig.pd, QPType.RAW_PACKET, rig.cq, max_tso_header=64)
    qp.connect()
    header = bytearray(54)

    class Mss:
        def __index__(self) -> int:
            with contextlib.suppress(BufferError):
                header[:] = b"x" * 4096
            return 300

        __int__ = __index__

        def __le__(self, other: int) -> bool:
            return self.__index__() <= other

        __lt__ = __ge__ = __gt__ = __le__

        def __rle__(self, other: int) -> bool:
            return True

    wr = rp.TSO(rig.mr[:1000], hdr=header, mss=Mss())  # type: ignore[arg-type]
    try:
        qp.post_send(wr)
    except (rp.PostError, TypeError):
        assert qp.outstanding.send == 0
    else:
        rig.cq.wait(1)
    qp.to_reset()
    qp.close()
    rig.works()
    rig.close()


@pytest.mark.parametrize("name", ["addr", "length", "end", "writable"])
@isolated(silent=True)
def test_bounds_of_a_region_cannot_be_set(name, soft):
    """They are what posts are checked against."""
    rig = Rig(soft)
    before = getattr(rig.mr, name)
    with pytest.raises(AttributeError):
        setattr(rig.mr, name, 0 if name == "writable" else before - 8)
    with pytest.raises(AttributeError):
        delattr(rig.mr, name)
    assert getattr(rig.mr, name) == before
    rig.works()
    rig.close()


@isolated(silent=True)
def test_changed_region_attributes_do_not_widen_its_bounds(soft):
    """Posts are checked against the registered bounds, whatever is written to its attributes."""
    rig = Rig(soft)
    memory = bytearray(b"\xaa" * 64 + bytes(64) + b"\xbb" * 64)
    mr = rp.MR(rig.pd, memoryview(memory)[64:128])
    start = mr.addr
    for name, value in (("addr", start - 32), ("length", 128), ("end", start + 96)):
        with contextlib.suppress(AttributeError):
            setattr(mr, name, value)
    for addr in (start - 32, start + 64):
        for flags in (SendFlags.SIGNALED, SendFlags.SIGNALED | SendFlags.INLINE):
            wr = rp.RdmaWrite(
                rp.SGE(addr, 32, mr.lkey, mr),
                send_flags=flags,
                remote_addr=rig.mr.addr + 1024,
                rkey=rig.mr.rkey,
            )
            with pytest.raises(rp.PostError, match="outside"):
                rig.a.post_send(wr)


@isolated()
def test_prepared_list_with_deleted_attributes_never_crashes(soft):
    """Each attribute of it that can be deleted is; what remains posts, or raises."""
    names = [
        name
        for cls in rp.Batch.__mro__
        for name in cls.__dict__.get("__slots__", ())
        if not name.startswith("__")
    ]
    members = [name for name in dir(rp.Batch) if not name.startswith("__")]
    for name in sorted({*names, *members}):
        rig = Rig(soft)
        batch = rig.a.prepare([rig.write(1), rig.write(2)])
        batch.post()
        with contextlib.suppress(AttributeError, TypeError):
            delattr(batch, name)
        for use in (batch.post, batch.post, lambda batch=batch: setattr(batch[0], "wr_id", 5)):
            # Anything else, a SystemError say, fails the test.
            with contextlib.suppress(AttributeError, TypeError, rp.RdmaError):
                use()
        rig.cq.poll()
        del batch
        gc.collect()


@isolated(silent=True)
def test_object_with_a_false_class_is_not_read_as_a_struct(soft):
    """``__class__`` can be anything; what a field reads and writes has to be it."""
    rig = Rig(soft)
    batch = rig.a.prepare(rig.write(1))
    item = batch[0]

    class Foreign:
        __slots__ = ("a", "b", "c", "d")
        claims: Any = None

        @property
        def __class__(self) -> Any:  # type: ignore[override]
            return self.claims

    fields = 0
    for cls in type(item).__mro__:
        for name, member in cls.__dict__.items():
            if name.startswith("_") or not hasattr(type(member), "__get__"):
                continue
            for access in (getattr(member, "fget", None), member):
                if access is None or not hasattr(type(access), "__set__"):
                    continue
                foreign = Foreign()
                # Its contents would be read and written as the struct, so make them long.
                foreign.a = foreign.b = foreign.c = foreign.d = bytes(4096)
                Foreign.claims = type(item)
                fields += 1
                with pytest.raises((TypeError, AttributeError)):
                    type(access).__get__(access, foreign, Foreign)
                with pytest.raises((TypeError, AttributeError)):
                    type(access).__set__(access, foreign, 4711)
    assert fields >= 3
    batch.close()
    rig.close()


@pytest.mark.parametrize("verb", ["poll", "wait"])
@isolated(silent=True)
def test_negative_number_of_completions_is_refused_by_name(verb, device):
    """And none wanted is none."""
    rig = Rig(device)
    rig.a.post_send([rig.write(1), rig.write(2)])
    name = {"poll": "max_entries", "wait": "count"}[verb]
    for wrong in (-1, -(1 << 70)):
        with pytest.raises(ValueError, match=name):
            getattr(rig.cq, verb)(wrong)
    assert getattr(rig.cq, verb)(0) == []
    # No completion has been lost.
    assert [wc.wr_id for wc in rig.cq.wait(2)] == [1, 2]
    rig.close()


@pytest.mark.parametrize("wanted", [True, False], ids=["on", "off"])
@isolated(silent=True)
def test_garbage_collector_stays_as_the_caller_set_it(wanted, soft):
    """Before a post or a poll, and also where it is set in the middle of one."""
    import weakref

    rig = Rig(soft, max_send_wr=256)
    calls: list[str] = []

    def put(value: bool) -> None:
        (gc.enable if value else gc.disable)()

    def in_the_middle(where: str) -> None:
        calls.append(where)
        put(wanted)

    class Number(int):
        def __index__(self) -> int:
            in_the_middle("number")
            return int(self)

    class Iterated(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            in_the_middle("list")
            return super().__iter__()

    class OnDemand(Sequence):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> rp.SGE:
            in_the_middle("sequence")
            return [rig.mr[:1]][index]

    def retire() -> None:
        """Drop a region whose last reference goes with its completion."""
        mr = rp.MR(rig.pd, 64)
        weakref.finalize(mr, in_the_middle, "finalizer")
        rig.a.post_send(
            rp.RdmaWrite(mr[:1], remote_addr=rig.mr.addr + 64, rkey=rig.mr.rkey, wr_id=1)
        )
        del mr
        rig.cq.poll()

    to = {"remote_addr": rig.mr.addr + 64, "rkey": rig.mr.rkey}
    wrs = [rig.write(number) for number in range(32)]
    verbs: list[Callable[[], object]] = [
        lambda: rig.a.post_send(wrs),
        lambda: rig.a.post_send(Iterated(wrs)),
        lambda: rig.a.post_send(rig.write(1, rkey=Number(rig.mr.rkey))),
        lambda: rig.a.post_send(rp.RdmaWrite(OnDemand(), **to)),
        lambda: rig.a.post_send([rp.RdmaWrite(OnDemand(), **to)] * 4),
        rig.cq.poll,
        retire,
    ]
    for before in (True, False):
        for verb in verbs:
            calls.clear()
            put(before)
            verb()
            assert gc.isenabled() is (wanted if calls else before), (before, calls)
            rig.drain()
    assert calls, "the finalizer has not run"
    rig.close()


@pytest.mark.parametrize("name", ["closed", "outstanding", "recv_cq", "send_cq", "srq"])
def test_attribute_of_a_subclass_that_raises_keeps_nothing_open(name):
    """Closing uses none of the subclass's attributes."""

    class Raised(Exception):
        pass

    def get(self: Any) -> Any:
        raise Raised

    cls: Any = type("Own", (rp.QP,), {name: property(get, lambda self, value: None)})
    with rp.open_device("soft0") as context:
        pd, cq = rp.PD(context), rp.CQ(context)
        srq = rp.SRQ(pd)
        try:
            qp = cls(pd, rp.QPType.RC, cq, srq=srq)
        except Raised:
            # The resource has been closed.
            pass
        else:
            with pytest.raises(rp.InUseError, match=r": RC QP 0x.* still open; close it first"):
                cq.close()
            rp.QP.close(qp)
        for parent in (srq, cq, pd):
            parent.close()
        context.close_all()

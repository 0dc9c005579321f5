"""Classes of work requests: dataclasses like any other, though their __init__ is C's."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
from support import prints, writes
from support.wr_classes import SEND_CLASSES

import rdmapost as rp
from rdmapost._binding import ffi, native

KINDS = [*SEND_CLASSES, rp.RecvWR]


def ordinary(kind: Any) -> Any:
    """Make the class that dataclasses would have made, under the same name."""
    made = dataclasses.make_dataclass(
        kind.__name__,
        [
            (f.name, f.type, dataclasses.field(default=f.default, kw_only=bool(f.kw_only)))
            for f in dataclasses.fields(kind)
        ],
        slots=True,
    )
    made.__init__.__qualname__ = f"{kind.__name__}.__init__"
    return made


def outcome(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make one; return its fields, or the error's text."""
    try:
        return [getattr(kind(*args, **kwargs), f.name) for f in dataclasses.fields(kind)]
    except TypeError as error:
        return str(error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_work_requests_take_arguments_as_dataclasses_do(kind):
    """By position, by name, too many, unknown, twice, and by names that are not interned."""
    other = ordinary(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((), {name: number for number, name in enumerate(names, 1000)}),
        ((), {"".join(name): object for name in names}),
        ((), {"wr_id": 1, "colour": 2}),
        ((), {"colour": 2}),
        *(((*range(count),), {"wr_id": -1}) for count in range(4)),
        ((1,), {"sg_list": 2}),
        ((1,), {names[-1]: None}),
    ]
    for args, kwargs in given:
        assert outcome(kind, args, kwargs) == outcome(other, args, kwargs)
    assert inspect.signature(kind) == inspect.signature(other)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_work_requests_compare_copy_and_pickle_like_dataclasses(kind):
    wr = kind(wr_id=5)
    assert wr == kind(wr_id=5) != kind(wr_id=6)
    assert copy.copy(wr) == pickle.loads(pickle.dumps(wr)) == wr
    assert dataclasses.replace(wr, wr_id=6) == kind(wr_id=6)
    assert dataclasses.asdict(wr)["wr_id"] == 5
    assert repr(wr).startswith(f"{kind.__name__}(")
    assert "wr_id=5" in repr(wr)
    with pytest.raises(AttributeError):
        wr.colour = 1
    wr.__init__(wr_id=7)
    assert wr == kind(wr_id=7)


def test_classes_derived_from_work_requests_are_initialised_and_posted_like_them():
    """With fields of their own or none, and with an __init__ of their own."""

    @dataclasses.dataclass(slots=True, kw_only=True)
    class More(rp.RdmaWrite):
        label: str = "none"

    class Same(rp.RdmaWrite):
        pass

    class Own(rp.Send):
        def __init__(self, text: str) -> None:
            super().__init__(rp.SGE(1, len(text)), wr_id=len(text))

    made = Same()
    assert (made.sg_list, made.wr_id, made.rkey) == ((), 0, 0)
    assert More(rkey=3, label="mine").label == "mine"
    assert More(rkey=3).rkey == Same(rkey=3).rkey == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'label'"):
        Same(label="mine")  # type: ignore[call-arg]
    assert Own("abc") == Own("abc")
    assert (Own("abc").wr_id, Own("abc").send_flags) == (3, rp.SendFlags.SIGNALED)


def test_base_class_of_work_requests_cannot_be_instantiated():
    with pytest.raises(TypeError, match=r"^WR is only a base class; create one of its subclasses$"):
        rp.posting.wr.native.WR(wr_id=1)


def test_work_request_that_refers_to_itself_is_collected():
    """A work request that refers to itself is collected, with what it refers to."""

    class Seen(list[Any]):
        pass

    wr, seen = rp.Send(), Seen()
    gone: list[bool] = []
    seen.append(wr)
    wr.sg_list = seen
    weakref.finalize(seen, gone.append, True)
    del wr, seen
    gc.collect()
    assert gone == [True]


def test_finalizer_of_a_replaced_field_may_clear_the_constructors_arguments():
    """Reinitialising drops a field's old value, which clears the dict of the new ones."""

    class Seen(list[Any]):
        pass

    class Old:
        def __del__(self) -> None:
            for found in gc.get_objects():
                if type(found) is dict and type(found.get("wr_id")) is int and found["wr_id"] == 77:
                    found.clear()
                    cleared.append(True)

    def arguments() -> dict[str, Any]:
        seen.append(weakref.ref(values := Seen([1, 2])))
        return {"sg_list": (), "wr_id": 77, "ah": values, "remote_qpn": 5}

    cleared: list[bool] = []
    seen: list[weakref.ref[Any]] = []
    wr = rp.Send(sg_list=Old())  # type: ignore[arg-type]
    wr.__init__(**arguments())
    assert cleared
    assert seen[0]() is not None, "the argument has gone"
    assert (wr.sg_list, wr.wr_id, wr.ah, wr.remote_qpn) == ((), 77, [1, 2], 5)
    del wr
    assert seen[0]() is None, "the argument stays forever"


COMMON = {"wr_id", "send_flags"}
MESSAGE = COMMON | {"sg_list", "ah", "remote_qpn", "remote_qkey", "remote_srqn"}
REMOTE = COMMON | {"sg_list", "remote_addr", "rkey", "remote_srqn"}

FIELD_NAMES = {
    rp.Send: MESSAGE,
    rp.SendWithImm: MESSAGE | {"imm_data"},
    rp.SendWithInv: COMMON | {"sg_list", "invalidate_rkey", "remote_srqn"},
    rp.RdmaWrite: REMOTE,
    rp.RdmaWriteWithImm: REMOTE | {"imm_data"},
    rp.RdmaRead: REMOTE,
    rp.AtomicCmpAndSwp: REMOTE | {"compare_add", "swap"},
    rp.AtomicFetchAndAdd: REMOTE | {"compare_add"},
    rp.LocalInv: COMMON | {"invalidate_rkey"},
    rp.BindMW: COMMON | {"mw", "rkey", "mr", "addr", "length", "mw_access_flags"},
    rp.TSO: COMMON | {"sg_list", "hdr", "mss", "ah", "remote_qpn", "remote_qkey"},
    rp.RecvWR: {"wr_id", "sg_list"},
    rp.TagAdd: {
        "wr_id",
        "flags",
        "unexpected_cnt",
        "recv_wr_id",
        "sg_list",
        "tag",
        "mask",
        "handle",
    },
    rp.TagDel: {"wr_id", "flags", "unexpected_cnt", "handle"},
    rp.TagSync: {"wr_id", "flags", "unexpected_cnt"},
}


@pytest.mark.parametrize("kind", FIELD_NAMES)
def test_work_request_has_the_fields_that_its_opcode_uses(kind):
    """A field that the opcode does not have can neither be given nor set."""
    fields = {field.name for field in dataclasses.fields(kind)}
    assert fields == FIELD_NAMES[kind]
    wr = kind()
    for name in set().union(*FIELD_NAMES.values()) - fields:
        with pytest.raises(TypeError, match=name):
            kind(**{name: 0})
        with pytest.raises(AttributeError):
            setattr(wr, name, 0)


TWO_TO_THE_64 = 1 << 64


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"wr_id": -1}, "wr_id=-1 is not in 0"),
        ({"wr_id": TWO_TO_THE_64}, "is not in 0..2^64-1"),
        ({"wr_id": "x"}, "wr_id: expected int, got str"),
        ({"wr_id": None}, "wr_id: expected int, got NoneType"),
        ({"imm_data": 1 << 32}, "imm_data=4294967296 is not in 0..2^32-1"),
        ({"imm_data": 1.5}, "imm_data: expected int, got float"),
        ({"send_flags": None}, "send_flags: expected int, got NoneType"),
        ({"remote_addr": -1}, "remote_addr=-1"),
        ({"remote_addr": "x"}, "remote_addr: expected int, got str"),
        ({"rkey": 1 << 32}, "rkey="),
        ({"sg_list": 5}, "int"),
        ({"sg_list": None}, "NoneType"),
        ({"sg_list": [5]}, "sg_list holds int"),
        ({"sg_list": rp.SGE(1, "x", 1)}, "an SGE's length: expected int, got str"),
        ({"sg_list": rp.SGE(None, 1, 1)}, "an SGE's addr: expected int, got NoneType"),
        ({"sg_list": rp.SGE(1, 1, 1 << 32)}, "an SGE's lkey=4294967296"),
    ],
)
def test_work_request_field_of_a_wrong_type_is_named(connect, checked, fields, words):
    """Whatever a field holds, the post raises a PostError and the list before it is posted."""
    pair = connect(checked=checked)
    good = writes(pair, 1)[0]
    bad = pair.wr(rp.RdmaWriteWithImm, pair.mine[:1])
    for name, value in fields.items():
        setattr(bad, name, value)
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send([good, bad])
    assert words in caught.value.reason
    assert (caught.value.index, caught.value.posted) == (1, 1)
    pair.wait(1)
    assert pair.a.outstanding.send == 0
    pair.works()


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_work_request_has_no_field_next(connect, checked):
    """A work request has no next: the chain is made from a Python list."""
    pair = connect(checked=checked)
    wr = pair.wr(rp.RdmaWrite, pair.mine[:1])
    with pytest.raises(TypeError, match="unexpected keyword argument 'next'"):
        rp.Send(next=wr)
    with pytest.raises(AttributeError):
        wr.next = wr
    # In C a work request that is its own next never ends.
    pair.a.post_send([wr, wr, wr])
    pair.wait(3)
    tail: list[object] = [wr]
    tail.append(tail)
    with pytest.raises(rp.PostError, match=r"2 of 2 .*expected SendWR, got list") as caught:
        pair.a.post_send(tail)
    assert caught.value.posted == 1
    pair.wait()
    for wrong in (None, 0x1000, object()):
        with pytest.raises(TypeError, match="expected SendWR or an iterable of them"):
            pair.a.post_send(wrong)
        with pytest.raises(rp.PostError, match=f"expected SendWR, got {type(wrong).__name__}"):
            pair.a.post_send([wrong])
    pair.works()


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
def test_describe_wr_refuses_a_field_outside_its_struct(fields, error):
    with pytest.raises(error):
        native.describe_wr(rp.SendWithImm, 0, 0, False, False, fields)


def test_describe_wr_refuses_a_class_of_no_verb_or_with_too_many_slots():
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


def test_registering_too_many_work_request_classes_is_refused():
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

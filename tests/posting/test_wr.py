"""Work requests are dataclasses like any other, though their __init__ is C's."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest

import rdmapost as rp

KINDS = [
    rp.Send,
    rp.SendWithImm,
    rp.SendWithInv,
    rp.RdmaWrite,
    rp.RdmaWriteWithImm,
    rp.RdmaRead,
    rp.AtomicCmpAndSwp,
    rp.AtomicFetchAndAdd,
    rp.LocalInv,
    rp.BindMW,
    rp.TSO,
    rp.RecvWR,
]


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
def test_arguments_are_taken_as_by_any_dataclass(kind):
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


def test_only_classes_for_an_opcode_can_be_made():
    with pytest.raises(TypeError, match=r"^make one of a class for an opcode$"):
        rp.posting.wr.native.WR(wr_id=1)


def test_cycles_are_collected():
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


def test_finalizer_of_an_old_value_may_empty_the_arguments():
    """Reinitialising drops a field's old value, which clears the dict of the new ones."""

    class Seen(list[Any]):
        pass

    class Old:
        def __del__(self) -> None:
            for found in gc.get_objects():
                if type(found) is dict and found.get("wr_id") == 77:
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
    assert seen[0]() is None, "the argument stays for ever"

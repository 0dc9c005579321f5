"""Memory with pointers that Python follows cannot be a memory region: a peer could write them."""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.hidden_fields import structure_that_hides

import rdmapost as rp
from rdmapost import Access


def numpy_zeros(shape: Any, dtype: Any, order: str = "C") -> Any:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    return numpy.zeros(shape, dtype, order=order)


class Holder(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int), ("value", ctypes.py_object)]


class Outer(ctypes.Structure):
    _fields_ = [("first", ctypes.c_int), ("inner", Holder * 2)]


class Numbers(ctypes.Structure):
    """Its field names look like refused formats."""

    _fields_ = [("O", ctypes.c_int), ("z", ctypes.c_int * 3), ("X{}", ctypes.c_double)]


class Packed(ctypes.Structure):
    """For a packed structure ctypes gives only the format of bytes."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [("count", ctypes.c_int), ("value", ctypes.py_object)]


class Either(ctypes.Union):
    """Of a union, neither."""

    _fields_ = [("count", ctypes.c_int), ("text", ctypes.c_char_p)]


class Around(Numbers):
    _fields_ = [("either", Either * 2)]


class Colon(ctypes.Structure):
    """Its first name ends like a format."""

    _fields_ = [("x:", ctypes.c_int), ("o", ctypes.py_object)]


def forgetful() -> Any:
    """A structure whose class has forgotten a field, behind a name that looks like formats."""
    fields: list[Any] = [("a:b", ctypes.c_long), ("c", ctypes.py_object)]
    made = type("Forgetful", (ctypes.Structure,), {"_fields_": fields})
    del fields[1]
    return made()


class PackedNumbers(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [("O", ctypes.c_int), ("z", ctypes.c_double)]


class EitherNumber(ctypes.Union):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]


class Lies(ctypes.py_object):
    """It claims to be made of one thing, and is made of another."""


Lies._type_ = "q"


class LyingArray(ctypes.py_object * 4):  # type: ignore[misc]
    pass


LyingArray._type_ = ctypes.c_longlong


class LyingStructure(ctypes.Structure):
    _fields_ = [("value", ctypes.py_object)]


LyingStructure._fields_[0] = ("value", ctypes.c_longlong)


class LyingClass(ctypes.py_object):
    @property
    def __class__(self) -> type:  # type: ignore[override]
        return ctypes.c_longlong

    _fields_ = ()


class Offers:
    """An object that exposes another's buffer (since Python 3.12)."""

    def __init__(self, other: Any) -> None:
        if sys.version_info < (3, 12):
            pytest.skip("Python before 3.12 has no __buffer__")
        self.other = other

    def __buffer__(self, flags: int) -> memoryview:
        view = memoryview(self.other)
        return view.cast("B") if view.nbytes else view


def on_the_instance() -> Any:
    it = Packed()
    it._fields_ = ()  # type: ignore[misc]
    return it


def f(*fields: tuple[str, Any]) -> list[tuple[str, Any]]:
    return list(fields)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "numpy objects": (lambda: numpy_zeros(8, object), "ndarray of format 'O'"),
    "numpy objects in two dimensions": (lambda: numpy_zeros((2, 4), object), "ndarray"),
    "numpy objects by columns": (lambda: numpy_zeros((2, 4), object, "F"), "ndarray"),
    "view of numpy objects": (lambda: memoryview(numpy_zeros(8, object)), "memoryview"),
    "bytes of numpy objects": (
        lambda: pickle.PickleBuffer(numpy_zeros(8, object)).raw(),
        "memoryview",
    ),
    "numpy records": (lambda: numpy_zeros(4, f(("n", "u8"), ("o", "O"))), "ndarray"),
    "numpy records in records": (
        lambda: numpy_zeros(4, f(("n", "u8"), ("r", f(("o", "O"), ("m", "i4"))))),
        "ndarray",
    ),
    "numpy records of arrays": (lambda: numpy_zeros(4, f(("o", "O", (2, 2)))), "ndarray"),
    "ctypes objects": (lambda: (ctypes.py_object * 4)(), r"py_object_Array_4 of format '[<>]O'"),
    "ctypes object": (ctypes.py_object, "py_object"),
    "ctypes structure": (Holder, "Holder"),
    "ctypes structures in structures": (lambda: (Outer * 2)(), "Outer_Array_2"),
    "ctypes strings": (lambda: (ctypes.c_char_p * 4)(), "c_char_p_Array_4"),
    "ctypes wide strings": (lambda: (ctypes.c_wchar_p * 4)(), "c_wchar_p_Array_4"),
    "ctypes pointers": (lambda: (ctypes.POINTER(ctypes.c_int) * 4)(), "_Array_4"),
    "ctypes packed structures": (lambda: (Packed * 2)(), "Packed_Array_2"),
    "ctypes union": (Either, "Either"),
    "ctypes unions in structures": (Around, "Around"),
    "ctypes bytes of a packed structure": (lambda: memoryview(Packed()).cast("B"), "memoryview"),
    "ctypes structure with a colon in a name": (Colon, "Colon"),
    "ctypes structure that has forgotten a field": (forgetful, "Forgetful"),
    "ctypes type that lies": (Lies, "Lies"),
    "ctypes array that lies": (LyingArray, "LyingArray"),
    "ctypes structure that lies": (LyingStructure, "LyingStructure"),
    "ctypes structure hidden by its metaclass": (
        lambda: structure_that_hides(f(("count", ctypes.c_int), ("value", ctypes.py_object)))(),
        "Hidden",
    ),
    "ctypes type that lies about its class": (LyingClass, "LyingClass"),
    "ctypes instance that lies": (on_the_instance, "Packed"),
    "bytes of a structure that another offers": (lambda: Offers(Packed()), "Offers"),
    "bytes that another offers of another": (lambda: Offers(Offers(Packed())), "Offers"),
    "view of what another offers": (lambda: memoryview(Offers(Packed())), "memoryview"),
    "ctypes functions": (lambda: (ctypes.CFUNCTYPE(None) * 4)(), "_Array_4"),
}

TAKEN: dict[str, Callable[[], Any]] = {
    "numpy complex": lambda: numpy_zeros(4, "c16"),
    "numpy long double": lambda: numpy_zeros(4, "g"),
    "numpy strings": lambda: numpy_zeros(4, "S8"),
    "numpy wide strings": lambda: numpy_zeros(4, "U8"),
    "numpy raw bytes": lambda: numpy_zeros(4, "V8"),
    "numpy bools": lambda: numpy_zeros(4, "?"),
    "numpy records named as formats": lambda: numpy_zeros(
        4, f(("O", "u8"), ("z&", "f4"), ("X{}", "f8"), ("Z", "i4", (2, 2)))
    ),
    "numpy by columns": lambda: numpy_zeros((2, 4), "c8", "F"),
    "bytes of numbers that another offers": lambda: Offers((ctypes.c_longlong * 4)()),
    "ctypes numbers": lambda: (ctypes.c_longlong * 4)(),
    "ctypes addresses that are numbers": lambda: (ctypes.c_void_p * 4)(),
    "ctypes structure named as formats": lambda: (Numbers * 2)(),
    "ctypes packed structures of numbers": lambda: (PackedNumbers * 8)(),
    "ctypes unions of numbers": lambda: (EitherNumber * 8)(),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_memory_with_pointers_that_python_follows_is_refused_by_name(kind: str, pd: rp.PD) -> None:
    make, name = REFUSED[kind]
    with pytest.raises(
        TypeError, match=f"^a memory region cannot be made from this .*{name}"
    ) as caught:
        rp.MR(pd, make(), Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    assert "the device would write over" in str(caught.value)


@pytest.mark.parametrize("kind", TAKEN)
def test_memory_of_numbers_is_taken_whatever_their_format(kind: str, pd: rp.PD) -> None:
    memory = TAKEN[kind]()
    with rp.MR(pd, memory, Access.LOCAL_WRITE | Access.REMOTE_WRITE) as mr:
        assert mr.length == memoryview(memory).nbytes
        mr.buffer[:] = bytes(range(1, mr.length + 1))
        assert memoryview(memory).tobytes("A")[:4] == bytes(range(1, 5))


def test_objects_stay_whole_when_their_array_is_refused(pd: rp.PD) -> None:
    array = numpy_zeros(2, object)
    array[:] = ["kept", {"as": "it is"}]
    with pytest.raises(TypeError, match="references to Python objects"):
        rp.MR(pd, array)
    assert list(array) == ["kept", {"as": "it is"}]


@pytest.mark.parametrize(("access", "what"), [(rp.Access.LOCAL_WRITE, "write over"), (0, "send")])
def test_strings_of_numpy_are_refused_because_they_are_pointers(pd, access, what):
    numpy = pytest.importorskip("numpy", minversion="2.0", reason="numpy 2 has StringDType")
    memory = numpy.array(["kept", "as it is"], numpy.dtypes.StringDType())
    with pytest.raises(TypeError, match=rf"StringDType\(\): the device would {what} pointers"):
        rp.MR(pd, memory, access)
    assert list(memory) == ["kept", "as it is"]


@pytest.mark.parametrize("dtype", ["M8[s]", "m8[ns]", [("when", "M8[us]"), ("what", "u4")]])
def test_times_of_numpy_are_refused_with_what_to_register_instead(pd, dtype):
    memory = numpy_zeros(4, dtype)
    with pytest.raises(TypeError, match=r"does not export as a buffer.*view\('u1'\)"):
        rp.MR(pd, memory)
    with rp.MR(pd, memory.view("u1")) as mr:
        assert mr.length == memory.nbytes

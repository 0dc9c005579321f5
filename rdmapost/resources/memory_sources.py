"""The memory that a region is made from.

It may be a buffer, a number of bytes to allocate, an address, a dma-buf, or an array with
``__cuda_array_interface__`` or ``__dlpack__``, such as one on a GPU.
"""

from __future__ import annotations

import contextlib
import mmap
import operator
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from operator import mul
from pickle import PickleBuffer
from typing import Any, NamedTuple

from .._arguments import index, shown, within
from .._binding import ffi, native, start_of
from ..enums import Access
from ..errors import is_from_system
from .buffers import pointers_in

_TOP = (1 << 64) - 1
_IN_THIS_PROCESS = frozenset({1, 3, 11})
"""The DLPack device types whose memory the CPU can read: kDLCPU, kDLCUDAHost, kDLROCMHost."""
_ALLOCATED = (bytes, bytearray, array)
_MAX_OWNERS = 16
_NUMBER_FORMATS = frozenset("cbBhHiIlLqQnNfd?")
_OPAQUE = 3
"""kDLOpaqueHandle: the DLPack type code of handles, which have no known layout."""


class Source(NamedTuple):
    """Memory to register.

    Attributes:
        start: address of the first byte.
        length: bytes.
        view: the memory as bytes; None unless this process can certainly read it.
        keeps: the object that keeps the memory alive; the region holds a reference to it.
        given: whether the view is of the caller's memory.
        mapped: whether the memory may be a mapped file, which can be truncated.
        read_only: whether the owner declares the memory read-only.
    """

    start: int
    length: int
    view: memoryview | None
    keeps: Any
    given: bool = True
    mapped: bool = False
    read_only: bool = False


class DMABuf(NamedTuple):
    """Part of a dma-buf, and the IOVA to register it at."""

    fd: int
    offset: int
    length: int
    iova: int


def at(address: Any, length: Any, owner: Any) -> Source:
    """Return the memory at an address; the caller guarantees that it is valid."""
    start = within("address", address, 1, _TOP)
    size = _length(length)
    return Source(_start("address", start, size), size, None, owner)


def dmabuf(fd: Any, offset: Any, length: Any, iova: Any) -> DMABuf:
    """Return a part of a dma-buf."""
    descriptor = within("fd", fd, 0, (1 << 31) - 1)
    size = _length(length)
    return DMABuf(
        descriptor,
        _start("offset", within("offset", offset, 0, _TOP), size),
        size,
        _start("iova", within("iova", iova, 0, _TOP), size),
    )


def _start(name: str, start: int, size: int) -> int:
    """Return the start of a range, which must not extend past 2^64."""
    if start + size - 1 > _TOP:
        raise ValueError(f"{name}={start:#x} and length={size} extend past 2^64")
    return start


def _length(length: Any) -> int:
    size = index("length", length)
    if size < 1:
        raise ValueError(f"a region needs at least 1 byte, got {size}")
    return within("length", size, 1, _TOP)


def _size_of(memory: Any) -> int | None:
    """Return the size as an int if `memory` is a number of bytes to allocate; None for a buffer."""
    if isinstance(memory, int):
        return memory
    if not hasattr(type(memory), "__index__"):
        return None
    if hasattr(type(memory), "__setitem__") or _has_interface(type(memory)):
        # An array of one number, perhaps read-only: not a size.
        return None
    with contextlib.suppress(TypeError):
        if not memoryview(memory).readonly:
            # An array of one number: a buffer, not a size.
            return None
    try:
        # numpy's scalars are read-only buffers, too.
        return operator.index(memory)
    except TypeError:
        return None


def allocate(size: int) -> mmap.mmap:
    """Return memory of whole pages."""
    if size < 1:
        raise ValueError(f"a region needs at least 1 byte, got {shown(size)}")
    try:
        # Private: a forked child gets a copy of it, as of all other memory.
        return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if not is_from_system(error):
            raise
        why = error.strerror
    except OverflowError:
        why = "no address space is that large"
    raise MemoryError(f"cannot allocate {shown(size)} bytes for a region: {why}")


def source_of(memory: Any, access: Access) -> Source:
    """Return the memory to register for the `memory` argument of MR or rereg()."""
    writable = bool(access & Access.LOCAL_WRITE)
    size = _size_of(memory)
    if size is not None:
        view = memoryview(allocate(size))
        return Source(start_of(view), len(view), view, None, given=False)
    or_else = ""
    try:
        exported = memoryview(memory)
        if writable and exported.readonly:
            or_else = ", or an access without LOCAL_WRITE"
            raise TypeError("it is read-only")
    except (TypeError, ValueError, BufferError) as error:
        if str(error).startswith("cannot include dtype"):
            if memory.dtype.hasobject:
                raise TypeError(
                    f"a memory region cannot be made from this {type(memory).__name__} of "
                    f"{memory.dtype}: the device would "
                    f"{'write over' if writable else 'send'} pointers"
                ) from None
            raise TypeError(
                f"a memory region cannot be made from this {type(memory).__name__} of "
                f"{memory.dtype}, which numpy does not export as a buffer: register the same "
                "memory as bytes, array.view('u1')"
            ) from None
        if not isinstance(memory, type) and _has_interface(memory) and not _exports(memory):
            return _of_interface(memory, writable)
        needed = "writable buffer" if writable else "buffer"
        raise TypeError(
            f"a memory region needs a {needed}, not {type(memory).__name__} ({error}){or_else}"
        ) from None
    view = _bytes_of(memory, exported, writable)
    return Source(start_of(view), len(view), view, None, mapped=_may_be_mapped(exported))


def _exports(memory: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError, BufferError):
        memoryview(memory)
        return True
    return False


def _bytes_of(memory: Any, view: memoryview, writable: bool) -> memoryview:
    """Return a buffer of any shape and format as a view of bytes."""
    if what := pointers_in(view):
        raise TypeError(
            f"a memory region cannot be made from this {type(memory).__name__} of format "
            f"{view.format!r}: the device would {'write over' if writable else 'send'} {what}"
        )
    if not view.nbytes:
        raise ValueError("a region needs at least 1 byte, got 0")
    if not view.contiguous:
        raise ValueError("a region must be contiguous memory, and this buffer has gaps")
    if view.format == "B" and view.itemsize == 1 and view.ndim == 1:
        return view
    is_numbers = view.format in _NUMBER_FORMATS and view.itemsize == struct.calcsize(view.format)
    if view.c_contiguous and is_numbers:
        return view.cast("B")
    # Unlike memoryview.cast, PickleBuffer accepts every format and dimension order.
    return PickleBuffer(view).raw()


def _may_be_mapped(view: memoryview) -> bool:
    """Whether a buffer may be a mapped file; False if its exporter is known to allocate memory."""
    # Trust only these types and their own attributes: what another object says about itself may
    # be false, and a subclass may export memory other than its base's (__buffer__).
    arrays: Any = getattr(sys.modules.get("numpy"), "ndarray", ())
    owner: Any = view.obj
    for _ in range(_MAX_OWNERS):
        if issubclass(type(owner), memoryview):
            owner = owner.obj
        elif type(owner) in _ALLOCATED:
            return False
        elif type(owner) is arrays:
            base = arrays.base.__get__(owner)
            if base is None:
                return not arrays.flags.__get__(owner).owndata
            owner = base
        else:
            return True
    return True


def _has_interface(memory: Any) -> bool:
    """Whether an object has an array interface."""
    return hasattr(memory, "__cuda_array_interface__") or hasattr(memory, "__dlpack__")


def _of_interface(memory: Any, writable: bool) -> Source:
    """Return the memory of an array that has no Python buffer.

    Raises:
        TypeError: the array cannot be registered; the message says why.
        ValueError: the array is empty, or has gaps.
    """
    if hasattr(memory, "__cuda_array_interface__"):
        return _of_cuda(memory, writable)
    return _of_dlpack(memory, writable)


def _no(memory: Any, why: object) -> TypeError:
    return TypeError(f"a memory region cannot be made from this {type(memory).__name__} ({why})")


def _of_cuda(memory: Any, writable: bool) -> Source:
    described = memory.__cuda_array_interface__
    try:
        start, read_only = described["data"]
        shape, typestr = tuple(map(operator.index, described["shape"])), str(described["typestr"])
        strides, fields = described.get("strides"), described.get("descr")
        size = int(typestr[2:])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no(memory, f"its __cuda_array_interface__ is malformed: {error!r}") from None
    if typestr[1:2] == "O" or _has_objects(fields):
        raise _no(memory, f"its typestr {typestr!r} declares references to Python objects")
    if any([extent < 0 for extent in shape]):
        raise _no(memory, f"its shape {shape} has a negative extent")
    if described.get("mask") is not None:
        raise _no(memory, "it has a mask")
    if read_only and writable:
        raise _no(memory, "it is read-only, but access includes LOCAL_WRITE")
    length = _extent(shape, strides, size)
    return at(start, length, memory)._replace(read_only=bool(read_only))


def _has_objects(fields: Any) -> bool:
    """Whether a structured type has fields that are Python objects."""
    if not isinstance(fields, list):
        return False
    types = [field[1] for field in fields if isinstance(field, tuple) and len(field) > 1]
    return any([_has_objects(t) if isinstance(t, list) else str(t)[1:2] == "O" for t in types])


def _of_dlpack(memory: Any, writable: bool) -> Source:
    try:
        try:
            capsule = memory.__dlpack__(max_version=(1, 0))
        except TypeError:
            # Before DLPack 1.0 there is no max_version.
            capsule = memory.__dlpack__()
        keeper, start, shape, strides, *tensor = native.read_dlpack(capsule)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise _no(memory, error) from None
    code, bits, lanes, device, read_only = tensor
    if code == _OPAQUE:
        raise _no(memory, "its elements are opaque handles")
    if read_only and writable:
        raise _no(memory, "it is read-only, but access includes LOCAL_WRITE")
    item = bits * lanes
    if item % 8:
        # Sub-byte elements; DLPack defines their packing only for arrays without gaps.
        if strides is not None and prod(shape) * item % 8:
            raise _no(memory, f"its elements have {item} bits")
        length = (prod(shape) * item + 7) // 8
    else:
        scale = item // 8
        length = _extent(shape, None if strides is None else [n * scale for n in strides], scale)
    source = at(start, length, keeper)._replace(read_only=bool(read_only), mapped=True)
    if device not in _IN_THIS_PROCESS:
        return source
    # Views of `held` keep the tensor alive.
    held = ffi.gc(ffi.cast("char *", start), {None: keeper}.get)
    view = memoryview(ffi.buffer(held, length))
    return source._replace(view=view.toreadonly() if read_only else view)


def _extent(shape: Sequence[int], strides: Iterable[int] | None, size: int) -> int:
    """Return the size in bytes of a contiguous array, in any dimension order.

    Raises:
        ValueError: the array is empty, or has gaps.
    """
    length = prod(shape) * size
    if length < 1:
        raise ValueError("a region needs at least 1 byte, got 0")
    if strides is None:
        return length
    steps = sorted([(step, n) for step, n in zip(strides, shape, strict=True) if n > 1])
    packed = accumulate([n for _, n in steps], mul, initial=size)
    if any([step != wanted for (step, _), wanted in zip(steps, packed, strict=False)]):
        raise ValueError("a region must be contiguous memory, and this array has gaps")
    return length

"""Protection domains, memory regions and memory windows."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import mmap
import operator
import re
import resource
import struct
import sys
from collections.abc import Iterator
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

from .._arguments import counted, expect, flags, index, member, within
from .._binding import ffi, start_of
from ..enums import Access, MWType
from ..errors import InUseError, VerbsError
from ..posting.wr import SGE
from .device import Context, provider_of
from .posted import Postable
from .resource import Resource, open_handles

_BOUND = frozenset({errno.EBUSY, errno.EINVAL})
"""What devices return for a region with a window."""
_RKEY = operator.attrgetter("rkey")
_NUMBER_FORMATS = frozenset("cbBhHiIlLqQnNfd?")
_FIELD_NAMES = re.compile(":[^:]*:")
"""The names in the format of a record: ``T{i:count:O:value:}``."""
_POINTERS = re.compile("[O&Xz]|Z(?![fdg])")
"""Objects; ctypes' POINTER, function, c_char_p and c_wchar_p (but ``Zd`` is a complex)."""


class PD(Resource, struct="ibv_pd"):
    """A protection domain: resources work together if they share one (ibv_alloc_pd(3)).

    Args:
        context: an open device.

    Raises:
        TypeError: an argument is of another type.
        ClosedError: the device is closed.
        VerbsError: the device has no more PDs.
    """

    __slots__ = ("context",)

    _type_name = "PD"
    _rank = 8

    def __init__(self, context: Context) -> None:
        expect("context", context, Context)
        self.context = context
        provider = provider_of(context)
        self._make(provider.alloc_pd, (context,), provider.dealloc_pd, (context,))


def _fixed(name: str, doc: str) -> Any:
    """Return a read-only property for an attribute."""
    return property(operator.attrgetter(name), doc=doc)


_ALL_ACCESS = functools.reduce(operator.or_, Access)


def access_flags(name: str, given: Any) -> Access:
    """Return an argument that is an Access, or its number."""
    return flags(name, given, _ALL_ACCESS, "Access flags")


class MR(Postable, struct="ibv_mr"):
    """A memory region: memory that the device may use (ibv_reg_mr(3)).

    ``mr[64:128]`` is an SGE over those bytes; negative bounds count from the
    end, and bounds outside the region are an IndexError.

    Args:
        pd: the protection domain.
        memory: any writable buffer of numbers or bytes (bytearray, mmap, array,
            memoryview, numpy array, ...), which is kept alive and cannot be resized until
            the region is closed (never call ctypes.resize or ndarray.resize(refcheck=False)
            on it: they ignore the export); or a number of bytes to allocate, zeroed and
            page-aligned.
        access: the permitted accesses, an Access.

    Attributes:
        addr: address of the first byte, in SGEs and as the remote_addr of a
            peer; 0 if access has ZERO_BASED.
        end: address just past the last byte.
        length: bytes.
        lkey, rkey: its keys.
        writable: whether the device may write there (Access.LOCAL_WRITE).
        buffer: the memory, as a memoryview of bytes; a view of the caller's
            memory is released when the region is closed.

    Raises:
        TypeError: it is not a writable buffer, or its type says that it holds Python
            objects or pointers that Python follows (memory that numpy.frombuffer or ctypes'
            from_buffer shows as numbers does not say so); or another argument is of the
            wrong type.
        ValueError: it is empty or not contiguous; or access has bits that are not
            in Access, or mutually exclusive flags.
        MemoryError: the bytes cannot be allocated.
        ClosedError: the PD is closed.
        VerbsError: the device refused; the text says what to try.
    """

    __slots__ = (
        "_access",
        "_addr",
        "_end",
        "_given",
        "_length",
        "_lkey",
        "_memory",
        "_rkey",
        "_writable",
        "buffer",
    )

    def __init__(self, pd: PD, memory: Any, access: int = Access.LOCAL_WRITE) -> None:
        expect("pd", pd, PD)
        self.pd = pd
        self._access = access_flags("access", access)
        needs_local = self._access & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC)
        if needs_local and not self._access & Access.LOCAL_WRITE:
            raise ValueError(f"{needs_local.name} needs LOCAL_WRITE too (ibv_reg_mr(3))")
        self._writable = bool(self._access & Access.LOCAL_WRITE)
        size = _size_of(memory)
        self._given = size is None
        buffer = _bytes_of(memory if size is None else _allocate(size))
        # Exports the buffer even if the other view is released: it cannot be freed or resized.
        held = memoryview(buffer)
        length, start = len(held), start_of(held)
        self.buffer, self._memory, self._length = buffer, held, length
        provider = provider_of(pd.context)
        try:
            handle = self._make(
                provider.reg_mr,
                (pd, ffi.cast("char *", start), length, self._access),
                provider.dereg_mr,
                (pd,),
                held,
                self._access,
            )
        except VerbsError as error:
            error.hint = error.hint or _why_not_registered(error.errno, length)
            raise
        zero_based = self._access & Access.ZERO_BASED
        self._addr = 0 if zero_based else start
        self._end = self._addr + self._length
        self._lkey: int = handle.lkey
        self._rkey: int = handle.rkey

    # Read-only: peers use them, and SGEs are made from them.
    access: Access = _fixed("_access", "What may be done with it.")
    addr: int = _fixed("_addr", "Address of the first byte; 0 if access has ZERO_BASED.")
    end: int = _fixed("_end", "Address just past the last byte.")
    length: int = _fixed("_length", "Bytes.")
    lkey: int = _fixed("_lkey", "Key for local use, in SGEs.")
    rkey: int = _fixed("_rkey", "Key that a peer names.")
    writable: bool = _fixed("_writable", "Whether the device may write there (Access.LOCAL_WRITE).")

    def __str__(self) -> str:
        return (
            f"MR of {counted(self._length, 'byte')} (lkey {self._lkey:#x})"
            if self._made()
            else self._type_name
        )

    _type_name = "MR"
    _undone = "deregistered"
    _left = "its memory stays allocated until the process ends"
    _rank = 4

    def _made(self) -> bool:
        return hasattr(self, "_lkey")

    def __len__(self) -> int:
        return self.length

    if TYPE_CHECKING:

        def __getitem__(self, bounds: slice) -> SGE: ...

    def _slice(self, bounds: slice) -> SGE:
        if not isinstance(bounds, slice) or bounds.step is not None:
            raise TypeError("an SGE is a slice of the region without a step: mr[start:stop]")
        length = self.length
        start = 0 if bounds.start is None else index("start of an SGE", bounds.start)
        stop = length if bounds.stop is None else index("end of an SGE", bounds.stop)
        if start < 0:
            start += length
        if stop < 0:
            stop += length
        if not 0 <= start <= stop <= length:
            raise IndexError(
                f"[{'' if bounds.start is None else bounds.start}:"
                f"{'' if bounds.stop is None else bounds.stop}] is not within {self}"
            )
        return SGE(self.addr + start, stop - start, self.lkey, self)

    def close(self) -> None:
        """Deregister the region; the memory is then the caller's again.

        Raises:
            InUseError: an outstanding or prepared work request names it, or a memory
                window is bound to it; the text says which.
            VerbsError: the device refused.

        See ibv_dereg_mr(3).
        """
        try:
            super().close()
        except VerbsError as error:
            if error.errno not in _BOUND:
                raise
            # A window refers to the regions that it may be bound to, until a completion says
            # otherwise. The device knows more, so it is asked first.
            bound = [
                str(window)
                for window in open_handles()
                if isinstance(window, MW) and any(r is self for r in gc.get_referents(window))
            ]
            if not bound:
                raise
            raise InUseError(
                f"{self} cannot be closed: {', '.join(bound)} bound to it; "
                f"unbind or close {'it' if len(bound) == 1 else 'them'} first"
            ) from error

    def _forget(self) -> None:
        if not hasattr(self, "_memory"):
            # The collector has cleared it.
            return
        self._memory.release()
        if self._given:
            # The owner gets it back, and may resize it.
            with contextlib.suppress(BufferError):
                self.buffer.release()


class MW(Postable, struct="ibv_mw"):
    """A memory window: a key to part of a region, bound and unbound by work requests.

    A type 1 window is bound with ``qp.bind_mw``, a type 2 window by posting a BindMW.
    Close it, or unbind it, before the region that it is bound to.

    Args:
        pd: the protection domain.
        mw_type: type 1 or type 2; see MWType.

    Raises:
        TypeError: an argument is of another type.
        ClosedError: the PD is closed.
        UnsupportedError: the device has no memory windows.
        VerbsError: the device has no more windows.

    See ibv_alloc_mw(3).
    """

    __slots__ = ("type",)

    _type_name = "MW"
    _rank = 0

    def __init__(self, pd: PD, mw_type: MWType = MWType.TYPE_2) -> None:
        expect("pd", pd, PD)
        self.pd = pd
        self.type = member("mw_type", mw_type, MWType)
        provider = provider_of(pd.context)
        self._make(provider.alloc_mw, (pd, self.type), provider.dealloc_mw, (pd,))

    def __str__(self) -> str:
        handle = self._handle
        return self._type_name if handle is None else f"MW (rkey {handle.rkey:#x})"

    @property
    def rkey(self) -> int:
        """Its key; posting a bind changes it at once.

        If that bind completes with an error, set it back to the previous key (ibv_bind_mw(3)): the
        driver reads the key that the next bind replaces from here.

        Raises:
            TypeError: the new key is not an integer.
            ValueError: it is not in 0..2^32-1.
            ClosedError: the window is closed.
        """
        rkey: int = self._verb(_RKEY)
        return rkey

    @rkey.setter
    def rkey(self, rkey: int) -> None:
        self._verb(setattr, "rkey", within("rkey", rkey, 0, (1 << 32) - 1))

    def next_rkey(self) -> int:
        """Return the rkey for the next bind: its low byte incremented (ibv_inc_rkey(3))."""
        rkey = self.rkey
        return rkey & ~0xFF | (rkey + 1) & 0xFF


def _size_of(memory: Any) -> int | None:
    """Return a number of bytes to allocate as an int, or None for a buffer."""
    if isinstance(memory, int):
        return memory
    if not hasattr(type(memory), "__index__"):
        return None
    with contextlib.suppress(TypeError):
        if not memoryview(memory).readonly:
            # An array of one number: a buffer.
            return None
    try:
        # numpy's numbers are read-only buffers as well.
        return operator.index(memory)
    except TypeError:
        return None


def _allocate(size: int) -> mmap.mmap:
    if size < 1:
        raise ValueError(f"a region has at least 1 byte, not {size}")
    try:
        return mmap.mmap(-1, size)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot allocate {size} bytes for a region: {error}") from None


def _bytes_of(memory: Any) -> memoryview:
    """Return a writable buffer of any shape and format as a view of bytes."""
    try:
        view = memoryview(memory)
        if view.readonly:
            raise TypeError("it is read-only")
    except TypeError as error:
        raise TypeError(
            f"a memory region needs a writable buffer, not {type(memory).__name__} ({error})"
        ) from None
    if what := _followed(view):
        raise TypeError(
            f"a memory region cannot be {type(memory).__name__} of format {view.format!r}: the "
            f"device would write over {what}"
        )
    if not view.nbytes:
        raise ValueError("a region has at least 1 byte, not 0")
    if not view.contiguous:
        raise ValueError("a region is one piece of memory, and this buffer has gaps")
    if view.format == "B" and view.itemsize == 1 and view.ndim == 1:
        return view
    is_numbers = view.format in _NUMBER_FORMATS and view.itemsize == struct.calcsize(view.format)
    if view.c_contiguous and is_numbers:
        return view.cast("B")
    # Unlike memoryview.cast, it knows every format and order of dimensions.
    return PickleBuffer(view).raw()


def _followed(view: memoryview) -> str | None:
    """Say which pointers that Python follows a buffer has, if any.

    Addresses that are mere numbers (``P``) are the caller's business. So are pointers in memory
    exposed as numbers (``numpy.frombuffer``, ctypes' ``from_buffer``), and packed ctypes structures
    and unions whose class has had its ``_fields_`` changed: nothing else describes their contents.
    """
    ctypes = sys.modules.get("_ctypes")
    for behind in _views_behind(view):
        codes = _FIELD_NAMES.sub("", behind.format or "B")
        if ctypes is not None and isinstance(behind.obj, ctypes.Structure.__base__):
            # The format is ctypes' own, and a class cannot change it; but it omits the contents of
            # packed structures and unions.
            codes = "".join((_own_codes(behind.obj), *_ctypes_codes(ctypes, type(behind.obj))))
        if found := _POINTERS.search(codes):
            objects = found[0] == "O"
            return "references to Python objects" if objects else "pointers that Python follows"
    return None


def _views_behind(view: memoryview) -> Iterator[memoryview]:
    """Return a view, and those behind it from a class with ``__buffer__``."""
    yield view
    if type(view.obj).__name__ == "_buffer_wrapper":
        for behind in gc.get_referents(view.obj):
            if isinstance(behind, memoryview):
                yield from _views_behind(behind)


def _own_codes(exporter: Any) -> str:
    """Return the format codes of a ctypes object, whatever the view of it says."""
    return _FIELD_NAMES.sub("", memoryview(exporter).format)


def _ctypes_codes(ctypes: Any, cls: Any) -> Iterator[str]:
    """Return the format codes of the numbers and pointers in a ctypes type."""
    if issubclass(cls, ctypes.Array):
        yield from _ctypes_codes(ctypes, cls._type_)
    elif issubclass(cls, (ctypes.Structure, ctypes.Union)):
        for base in cls.__mro__:
            for _, field, *_ in base.__dict__.get("_fields_", ()):
                yield from _ctypes_codes(ctypes, field)
    elif issubclass(cls, ctypes._SimpleCData):
        # A pointer to wide characters has the same code as numpy's complex numbers.
        yield "z" if cls._type_ == "Z" else cls._type_
    else:
        yield "&"


def _why_not_registered(code: int | None, length: int) -> str:
    if code in (errno.ENOMEM, errno.EAGAIN):
        soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != resource.RLIM_INFINITY:
            return (
                f"{length} bytes must be locked in memory and this process may lock "
                f"{soft >> 10} KiB in all (RLIMIT_MEMLOCK); raise it with 'ulimit -l unlimited', "
                "or in /etc/security/limits.conf"
            )
    if code == errno.EFAULT:
        return "the memory cannot be pinned (a device mapping, or not writable)"
    if code == errno.EINVAL:
        return "the device does not take this length or these access flags"
    return ""

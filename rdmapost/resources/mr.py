"""Memory regions."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import operator
import resource
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from .._arguments import counted, expect, index
from .._arguments import flags as flags_of
from .._binding import ffi
from ..enums import Access, ODPGeneralCap, ReregFlags
from ..errors import RAISE_MEMLOCK, InUseError, UnsupportedError, VerbsError
from ..posting.columns import Blocks, Column, Ranges, with_c_methods
from ..posting.wr import SGE
from ..providers.base import refused_of_dmabuf
from .device import Context, provider_of
from .device_attr import FLUSH_CAPS
from .memory_sources import DMABuf, Source, at, dmabuf, source_of
from .mw import MW
from .pd import PD
from .resource import open_handles
from .work_queues import UsedByWorkRequests

_BOUND = frozenset({errno.EBUSY, errno.EINVAL})
"""The errnos with which devices refuse to deregister a region to which a window is bound."""
_RETRIES = 4
"""How many times to retry a close that the device refuses although no window is bound."""


if TYPE_CHECKING:
    _fixed = property
else:

    def _fixed(getter):
        """Return a property that reads a slot as the getter does, but in C."""
        return property(operator.attrgetter(f"_{getter.__name__}"), doc=getter.__doc__)


_ALL_ACCESS = functools.reduce(operator.or_, Access)


def access_flags(name: str, given: Any) -> Access:
    """Check an access argument (an Access or its number), and return it as an Access."""
    return flags_of(name, given, _ALL_ACCESS, "Access flags")


class _Form:
    """What makes up a region: its memory, access and PD."""

    __slots__ = (
        "access",
        "addr",
        "buffer_addr",
        "given",
        "held",
        "keeps",
        "length",
        "pd",
        "read_only",
        "source",
        "taken",
        "unreadable",
        "view",
    )

    def __init__(
        self,
        pd: PD,
        access: Access,
        source: Source | None,
        buffer: DMABuf | None = None,
        same: _Form | None = None,
    ) -> None:
        # Share the memory that `same` holds rather than re-exporting it, because another thread may
        # be releasing it.
        self.pd, self.access, self.source = pd, access, source
        self.read_only = False
        self.taken = False
        """When a region is re-registered: whether the device has begun to use the memory."""
        self.view: memoryview | None = None
        self.held: memoryview | None = None
        self.buffer_addr: int | None = None
        self.keeps: Any = None
        self.given = False
        if source is None:
            assert buffer is not None
            self.addr, self.length = buffer.iova, buffer.length
        else:
            self.addr = 0 if access & Access.ZERO_BASED else source.start
            self.buffer_addr, self.length = source.start, source.length
            self.view, self.given = source.view, source.given
            self.read_only = source.read_only
            if same is not None:
                self.held, self.keeps, self.read_only = same.held, same.keeps, same.read_only
            elif source.view is not None:
                # Export the buffer once more, so that it cannot be freed or resized even if the
                # other view is released.
                self.held = memoryview(source.view)
                self.read_only = source.view.readonly
                self.keeps = self.held
            else:
                self.keeps = source.keeps
        self.unreadable = self.view is None
        """Whether this process may be unable to read the memory."""

    def one_of(self, usual: Any, at: Any, mapped: Any) -> Any:
        """Choose the verb that registers this kind of memory.

        Software devices access it in this process, so they must survive its loss: an address may
        be unmapped, and a mapped file truncated. To real devices all memory is the same.

        Args:
            usual: the verb for memory that stays while it is exported, such as a bytearray.
            at: the verb for an address, which this process may be unable to access.
            mapped: the verb for a buffer that may be a mapped file.
        """
        assert self.source is not None
        return at if self.unreadable else mapped if self.source.mapped else usual

    def changed(self, pd: PD | None, access: Access, source: Source | None) -> _Form:
        """Return the changed form; if the memory is the same, it shares this form's view."""
        same = self if source is None else None
        return _Form(pd or self.pd, access, source or self.source, same=same)

    def give_back(self) -> None:
        """Release the memory, so that its owner may resize it."""
        if self.held is not None:
            self.held.release()
        if self.given and self.view is not None:
            with contextlib.suppress(BufferError):
                self.view.release()


def _checked_access(given: Any) -> Access:
    access = access_flags("access", given)
    needs_local = access & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC)
    if needs_local and not access & Access.LOCAL_WRITE:
        raise ValueError(f"{needs_local.name} needs LOCAL_WRITE too (ibv_reg_mr(3))")
    return access


def _refuse_rereg(old: _Form, access: Access, memory: Any) -> None:
    """Refuse changes that ibv_rereg_mr(3) cannot make."""
    if old.source is None:
        raise UnsupportedError(
            "ibv_rereg_mr", errno.EOPNOTSUPP, "a dma-buf region cannot be registered again"
        )
    if (old.access ^ access) & Access.ZERO_BASED or (
        memory is not None and access & Access.ZERO_BASED
    ):
        raise ValueError(
            "ibv_rereg_mr(3) cannot add or remove ZERO_BASED, or move a ZERO_BASED region"
        )


class MR(UsedByWorkRequests, struct="ibv_mr"):
    """A memory region: memory that the device may use (ibv_reg_mr(3)).

    ``mr[64:128]`` is an SGE over those bytes; negative bounds count from the
    end, and bounds outside the region raise IndexError.

    Args:
        pd: the protection domain.
        memory: any buffer of numbers or bytes (bytearray, mmap, array, memoryview, numpy
            array, ...), which is kept alive and cannot be resized until the region is closed
            (never call ctypes.resize or ndarray.resize(refcheck=False) on it: they ignore buffer
            exports); or an array with ``__cuda_array_interface__`` or ``__dlpack__``, whether
            on a GPU or not, which is also kept alive; or a number of bytes to allocate, zeroed and
            page-aligned. Do not truncate a mapped file while its mapping is registered: any
            access past its new end, INLINE included, would kill the process (SIGBUS). On software
            devices the work request completes with an error instead, and INLINE is refused
            (PostError, EFAULT).
        access: the permitted accesses, an Access. Read-only memory, such as bytes or a mapping
            with PROT_READ, cannot have LOCAL_WRITE.

    Attributes:
        addr: address of the first byte, in SGEs and in a peer's remote_addr; 0 if access has
            ZERO_BASED.
        end: address just past the last byte.
        length: bytes.
        lkey, rkey: its keys.
        writable: whether the device may write to the region (Access.LOCAL_WRITE).
        buffer_addr: address of the first byte, even if access has ZERO_BASED; None for a dma-buf.
        buffer: the memory, as a memoryview of bytes: always the same one, so do not release it
            (``with mr.buffer`` would). A view of the caller's memory is released when the region
            is closed. A region made from an address, a dma-buf or an array on a GPU has no buffer:
            reading the attribute raises ValueError.

    Raises:
        TypeError: memory is not a buffer, or is read-only although access has LOCAL_WRITE; or
            its type declares Python objects, or pointers that Python follows (numpy.frombuffer
            and ctypes' from_buffer hide these by exposing them as numbers); or another argument
            has the wrong type.
        ValueError: memory is empty or not contiguous; or access has bits that are not
            in Access, or mutually exclusive flags.
        MemoryError: the bytes cannot be allocated.
        ClosedError: the PD is closed.
        UnsupportedError: the device does not support one of the access flags.
        VerbsError: the device refused; the message says what to try, or which flag the device
            does not support.

    No capability says whether a device supports ZERO_BASED. Most drivers, and Soft-RoCE in Linux
    6.1, accept the flag and ignore it: addresses are then this process's, starting at
    buffer_addr, and work requests that use addr fail with LOC_PROT_ERR or REM_ACCESS_ERR.
    Soft-RoCE in Linux 6.12 refuses the flag.
    """

    __slots__ = ("_access", "_addr", "_buffer", "_buffer_addr", "_end", "_length", "_writable")

    _access: Access
    _addr: int
    _buffer: memoryview | None
    _buffer_addr: int | None
    _end: int
    _length: int
    _writable: bool

    def __init__(self, pd: PD, memory: Any, access: int = Access.LOCAL_WRITE) -> None:
        expect("pd", pd, PD)
        self.pd = pd
        allowed = _checked_access(access)
        provider = provider_of(pd.context)
        if isinstance(memory, DMABuf):
            form = _Form(pd, allowed, None, memory)
            given: tuple[Any, ...] = (memory.offset, memory.length, memory.iova, memory.fd)
            create: Callable[..., Any] = provider.reg_dmabuf_mr
        else:
            source = memory if isinstance(memory, Source) else source_of(memory, allowed)
            form = _Form(pd, allowed, source)
            given = (ffi.cast("char *", source.start), source.length)
            create = form.one_of(provider.reg_mr, provider.reg_mr_at, provider.reg_mr_mmap)
        try:
            self._make(
                create,
                (pd, *given, allowed),
                provider.dereg_mr,
                (pd,),
                form.keeps,
                allowed,
                form.addr,
                form.unreadable,
                form,
            )
        except VerbsError as error:
            error.hint = error.hint or _why_not_registered(error, pd.context, form)
            raise
        for attribute, owner, value in self._attributes(form):
            attribute.__set__(owner, value)

    @classmethod
    def at(
        cls,
        pd: PD,
        address: int,
        length: int,
        access: int = Access.LOCAL_WRITE,
        owner: object = None,
    ) -> Self:
        """Register the memory at an address, in this process or on a device.

        The caller guarantees that the memory stays mapped and is not freed until the region is
        closed. On software devices, a work request that uses memory which is no longer mapped, or
        may no longer be read or written, completes with an error. (A write that is in progress when
        the memory becomes inaccessible may be lost instead. Before Linux 5.14, so may a write
        beyond the end of a truncated file.) Memory that was freed and reused is overwritten.

        Args:
            pd: the protection domain.
            address: the first byte's address.
            length: bytes.
            access: as for MR.
            owner: the object that keeps the memory alive; the region holds a reference to it
                until the region is closed.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: a number is out of range; or as for MR.
            ClosedError: the PD is closed.
            VerbsError: the device refused; EFAULT: it cannot access the memory.
        """
        return cls(pd, at(address, length, owner), access)

    @classmethod
    def from_dmabuf(
        cls, pd: PD, fd: int, offset: int, length: int, iova: int, access: int = Access.LOCAL_WRITE
    ) -> Self:
        """Register part of a dma-buf, such as a GPU's memory (ibv_reg_dmabuf_mr(3)).

        soft0 maps the descriptor, which may be a udmabuf, a memfd or a file. If that is truncated,
        work requests that use a missing page complete with an error. The last remaining page stays
        usable as a whole: beyond the new end, it reads as zeros, and what is written there is lost.

        Args:
            pd: the protection domain.
            fd: the dma-buf's descriptor, which may be closed afterwards.
            offset: the first byte's offset in the dma-buf.
            length: bytes.
            iova: the first byte's address in SGEs and in a peer's remote_addr; iova and offset
                must be at the same position within a page.
            access: as for MR, but only LOCAL_WRITE, the REMOTE flags and RELAXED_ORDERING.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: a number is out of range; or as for MR.
            ClosedError: the PD is closed.
            UnsupportedError: the device cannot register dma-bufs, or libibverbs is older than 34.
            VerbsError: the device refused; EBADF or EINVAL: fd is not a dma-buf (on soft0 also
                mmap's errnos, such as EACCES or ENODEV).
        """
        return cls(pd, dmabuf(fd, offset, length, iova), access)

    def _attributes(self, form: _Form) -> tuple[tuple[Any, Any, Any], ...]:
        """Return (slot, object, value) for each attribute to set when a form takes effect."""
        # Not a generator: if there is no memory to create one, Python 3.13 crashes.
        return (
            (_taken, form, True),
            (_pd, self, form.pd),
            (_slots["_access"], self, form.access),
            (_slots["_addr"], self, form.addr),
            (_slots["_buffer"], self, form.view),
            (_slots["_buffer_addr"], self, form.buffer_addr),
            (_slots["_end"], self, form.addr + form.length),
            (_slots["_length"], self, form.length),
            (_slots["_writable"], self, bool(form.access & Access.LOCAL_WRITE)),
        )

    # Read-only, because peers use these values and SGEs are made from them.
    @_fixed
    def access(self) -> Access:
        """The permitted accesses."""
        return self._access

    @_fixed
    def addr(self) -> int:
        """Address of the first byte; 0 if access has ZERO_BASED."""
        return self._addr

    @_fixed
    def end(self) -> int:
        """Address just past the last byte."""
        return self._end

    @_fixed
    def length(self) -> int:
        """Bytes."""
        return self._length

    @_fixed
    def lkey(self) -> int:
        """Key for local use, in SGEs."""
        return self._lkey

    @_fixed
    def rkey(self) -> int:
        """Key for remote use, by peers."""
        return self._rkey

    @_fixed
    def writable(self) -> bool:
        """Whether the device may write to the region (Access.LOCAL_WRITE)."""
        return self._writable

    @_fixed
    def buffer_addr(self) -> int | None:
        """Address of the first byte in this process or on its device, or None."""
        return self._buffer_addr

    @property
    def buffer(self) -> memoryview:
        """The memory, as a memoryview of bytes; do not release it, as ``with mr.buffer`` would.

        Raises:
            ValueError: the region has no buffer in Python.
        """
        if self._buffer is None:
            raise ValueError(
                f"{self} has no buffer in Python: it was registered by address, or is a device's "
                "memory or a dma-buf"
            )
        return self._buffer

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
        return hasattr(self, "_writable")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, bounds: slice, /) -> SGE:
        """Return an SGE over part of the region.

        Args:
            bounds: a slice of its bytes; negative bounds count from the end.

        Raises:
            TypeError: bounds is not a slice, or has a step.
            IndexError: bounds is not within the region.
        """
        raise NotImplementedError  # in C: _c/posting/sge.c

    def _slice(self, bounds: slice) -> SGE:
        if not isinstance(bounds, slice) or bounds.step is not None:
            raise TypeError("an SGE must be a slice of the region, with no step: mr[start:stop]")
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

    def blocks(self, index: Column, size: int, /) -> Blocks:
        """Return a column of SGEs for ``post_columns``: blocks of the region, by index.

        Row i is ``mr[index[i] * size : (index[i] + 1) * size]``.

        Args:
            index: a column of integers; ``post_columns`` refuses negative ones.
            size: bytes per block, checked by ``post_columns``.
        """
        raise NotImplementedError  # in C: _c/posting/columns.c

    def ranges(self, offsets: Column, lengths: Column, /) -> Ranges:
        """Return a column of SGEs for ``post_columns``: ranges of the region.

        Row i is ``mr[offsets[i] : offsets[i] + lengths[i]]``.

        Args:
            offsets: a column of integers; ``post_columns`` refuses negative ones.
            lengths: a column of integers, or a number for all rows.
        """
        raise NotImplementedError  # in C: _c/posting/columns.c

    def close(self) -> None:
        """Deregister the region and release its memory to the caller.

        Raises:
            InUseError: an outstanding or prepared work request names it, or a memory window is
                bound to it (see rereg); the message says which.
            VerbsError: the device refused.

        See ibv_dereg_mr(3).
        """
        for last in (*[False] * _RETRIES, True):
            try:
                super().close()
                return
            except VerbsError as error:
                if error.errno not in _BOUND:
                    raise
                # The device knows which windows are bound, so it was asked first. Until a
                # completion shows which region a window is bound to, its MW object refers to all
                # the regions that it may be bound to.
                self._unbind_windows()
                if reason := self._why_not("closed"):
                    raise InUseError(reason) from error
                # Another thread may have closed the last window since.
                if last:
                    raise

    def rereg(self, *, memory: Any = None, access: int | None = None, pd: PD | None = None) -> None:
        """Re-register the region, with new memory, new access or another PD.

        The arguments determine the flags of ibv_rereg_mr(3). Afterwards, read lkey, rkey and addr
        again and make new SGEs: the keys may have changed. The old memory is released.

        Keys that a LocalInv or a peer's SendWithInv has invalidated stay invalid. soft0 and roce
        devices refuse to re-register such a region unless memory is given; it then gets new keys.

        If the device refuses, the region is unchanged. If the device fails halfway, the region can
        only be closed: any other use raises an error that says so, and the old and the new memory
        are held until then. If a signal handler raises, or memory runs out, after the device has
        changed the region, the region has its new attributes, but the old memory may be held until
        the next rereg or close.

        Args:
            memory: as for MR; None for the same memory.
            access: as for MR; None for the same access.
            pd: a protection domain of the same open device; None for the same one.

        Raises:
            TypeError: as for MR.
            ValueError: as for MR; or no argument is given; or ZERO_BASED, or the memory of a
                ZERO_BASED region, would change.
            InUseError: an outstanding or prepared work request names the region, a memory
                window is bound to it (a window whose key was invalidated counts until you poll the
                completion that says so), or this thread is in the middle of a verb.
            ClosedError: the region or the PD is closed.
            UnsupportedError: the device does not support this verb or this change, or the region
                is part of a dma-buf.
            VerbsError: the device failed or refused.
        """
        expect("pd", pd, PD, None)
        if pd is not None and pd.context is not self.pd.context:
            raise ValueError("pd: expected a PD of the same open device")
        if memory is None and access is None and pd is None:
            raise ValueError("rereg() needs memory, access or pd")
        provider = provider_of(self.pd.context)
        given = None if access is None else _checked_access(access)
        changes = ReregFlags(0)
        changes |= ReregFlags.CHANGE_PD if pd is not None else 0
        changes |= ReregFlags.CHANGE_ACCESS if given is not None else 0
        changes |= ReregFlags.CHANGE_TRANSLATION if memory is not None else 0
        source: Source | None = None
        done = False
        while not done:
            # Another thread may be re-registering the region at the same time.
            before = self._parents
            old = self._form
            if old is None:
                self._open_struct()
                continue
            allowed = old.access if given is None else given
            _refuse_rereg(old, allowed, memory)
            if memory is not None and source is None:
                source = source_of(memory, allowed)
            if source is None and allowed & Access.LOCAL_WRITE and old.read_only:
                raise TypeError(f"{self} cannot have LOCAL_WRITE: its memory is read-only")
            form = old.changed(pd, allowed, source)
            try:
                done = self._remake(
                    form.one_of(provider.rereg_mr, provider.rereg_mr_at, provider.rereg_mr_mmap),
                    (
                        self,
                        int(changes),
                        ffi.NULL if pd is None else pd,
                        ffi.NULL if source is None else ffi.cast("char *", source.start),
                        0 if source is None else source.length,
                        0 if given is None else int(given),
                    ),
                    before,
                    (form.pd,),
                    form.keeps,
                    form.access,
                    form.addr,
                    form.unreadable,
                    form,
                    self._attributes(form),
                )
            except BaseException as error:
                if isinstance(error, VerbsError) and not error.hint:
                    error.hint = _why_not_registered(error, self.pd.context, form)
                if source is not None and not form.taken and not self._spoiled:
                    # A traceback may keep the form alive.
                    form.give_back()
                raise

    def _refuse_change(self) -> None:
        """Raise InUseError if the region is in use and cannot be re-registered.

        C calls this while the region is in use; if it returns without raising, that use has ended.
        """
        if self._unbind_windows():
            return
        if reason := self._why_not("registered again"):
            raise InUseError(reason)
        try:
            self._refuse_posted()
        except InUseError as error:
            raise InUseError(
                str(error).replace("cannot be closed", "cannot be registered again", 1)
            ) from None

    def _settle(self) -> None:
        """Release the memory of the form that was replaced; if interrupted, call this again."""
        if self._replaced is not None and self._replaced.held is not self._form.held:
            self._replaced.give_back()

    def _unbind_windows(self) -> bool:
        """Unbind the windows whose keys have been invalidated; return whether there were any."""
        return any([window._unbind_invalidated() for window in self._bound_windows()])

    def _why_not(self, change: str) -> str | None:
        """Say which windows bound to the region prevent a change, or return None."""
        bound = [str(window) for window in self._bound_windows()]
        if not bound:
            return None
        return (
            f"{self} cannot be {change}: {', '.join(bound)} bound to it; "
            f"unbind or close {'it' if len(bound) == 1 else 'them'} first"
        )

    def _bound_windows(self) -> list[MW]:
        """Return the windows that are, or may be, bound to the region."""
        return [
            window
            for window in open_handles()
            if isinstance(window, MW) and any([r is self for r in gc.get_referents(window)])
        ]

    def _forget(self) -> None:
        for form in (self._replaced, self._form):
            if form is not None:
                form.give_back()


with_c_methods(MR)


_slots: dict[str, Any] = dict(MR.__dict__)
_pd: Any = UsedByWorkRequests.__dict__["pd"]
_taken: Any = _Form.__dict__["taken"]
"""Slots that C sets at the moment when the device switches to another form."""


_EXPORTED = frozenset({"ibv_reg_dmabuf_mr", "ibv_rereg_mr"})
"""The calls that a library or a driver may lack; ibv_reg_mr is always available."""


def _refused_flags(code: int | None, context: Context, access: Access) -> str:
    """Say which access flag the device may have refused; return "" if none is a likely cause."""
    device, attr = context.name, context.attr
    if access & Access.ON_DEMAND and not attr.odp_caps.general_caps & ODPGeneralCap.SUPPORT:
        return f"{device} does not support Access.ON_DEMAND (see its attr.odp_caps)"
    for flag, cap in FLUSH_CAPS.items():
        if access & flag and not attr.device_cap_flags_ex & cap:
            return f"{device} does not support Access.{flag} (see its attr.device_cap_flags_ex)"
    if code == errno.EINVAL and access & Access.FLUSH_PERSISTENT:
        return f"{device} may require persistent memory for Access.FLUSH_PERSISTENT"
    # No attribute says whether a device supports these.
    if unsaid := access & (Access.ZERO_BASED | Access.HUGETLB):
        return f"{device} may not support Access.{unsaid}"
    return ""


def _why_not_registered(error: VerbsError, context: Context, form: _Form) -> str:
    code, length, unreadable = error.errno, form.length, form.unreadable
    unsupported = isinstance(error, UnsupportedError)
    if (
        code == errno.EINVAL
        and error.call == "ibv_reg_dmabuf_mr"
        and (refused := refused_of_dmabuf(form.access))
    ):
        return refused
    if (unsupported or code == errno.EINVAL) and (
        reason := _refused_flags(code, context, form.access)
    ):
        return reason
    if unsupported and error.call in _EXPORTED:
        if provider_of(context).lacks(error.call):
            return "the installed libibverbs does not have it"
        return f"the driver of {context.name} does not have it, at least not for these arguments"
    if code in (errno.ENOMEM, errno.EAGAIN):
        soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != resource.RLIM_INFINITY:
            return (
                f"{counted(length, 'byte')} must be locked in memory and this process may lock "
                f"{soft >> 10} KiB in all (RLIMIT_MEMLOCK); to raise it: {RAISE_MEMLOCK}"
            )
    if code == errno.EFAULT and unreadable:
        return (
            "the memory cannot be pinned: it is not mapped with this access, it is a read-only "
            "shared mapping (Linux before 6.2 refuses those), or it is a GPU's, which needs its "
            "driver's peer memory module (nvidia-peermem) or MR.from_dmabuf"
        )
    if code == errno.EFAULT:
        return (
            "the memory cannot be pinned: it is a device mapping, is not writable, or is a "
            "read-only shared mapping (Linux before 6.2 refuses those)"
        )
    if code == errno.EINVAL:
        return "the device does not accept this length or these access flags"
    return ""

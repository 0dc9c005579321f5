"""Memory regions, memory windows, and every check before a byte is touched.

An access names a key. The key's region or window must cover the range, belong to
the protection domain and grant the operation.
"""

from __future__ import annotations

from operator import setitem
from typing import Any

from ..._binding import native
from ...enums import Access, MWType, WCStatus
from .journaled_dict import JournaledDict
from .numbers import Numbers
from .transport_messages import Segments

_LOCAL_WRITE = int(Access.LOCAL_WRITE)
_ZERO_BASED = int(Access.ZERO_BASED)
_MW_BIND = int(Access.MW_BIND)
_REMOTE_WRITES = int(Access.REMOTE_WRITE | Access.REMOTE_ATOMIC)
_REMOTE = _REMOTE_WRITES | int(Access.REMOTE_READ | Access.FLUSH_GLOBAL | Access.FLUSH_PERSISTENT)

_ZERO_LENGTH_MEANS = 1 << 31
"""The length of an SGE whose length field is 0."""


class ErrorStatus(Exception):
    """A work request completes with this error status."""

    def __init__(self, status: WCStatus) -> None:
        self.status = status


class RemoteAccessError(Exception):
    """The responder refuses a request: NAK, remote access error."""


class ProtectionDomain:
    """Regions, windows and queue pairs work only with those of the same domain."""

    __slots__ = ()


class Region(native.Record):
    """Registered memory."""

    __slots__ = (
        "access",
        "addr",
        "length",
        "lkey",
        "memory",
        "pd",
        "rkey",
        "unsure",
        "valid",
        "windows",
    )

    def __init__(
        self,
        pd: ProtectionDomain,
        addr: int,
        memory: memoryview,
        access: int,
        lkey: int,
        rkey: int,
        unsure: int | None = None,
    ) -> None:
        self.pd = pd
        self.addr = addr
        self.memory = memory
        self.length = len(memory)
        self.access = int(access)
        self.lkey = lkey
        self.rkey = rkey
        self.unsure = unsure
        self.valid = True
        self.windows = 0

    def part(self, start: int, length: int, write: bool) -> Any:
        """Return part of the memory, or None if it is no longer mapped.

        If the memory may be unmapped at any time, return a copy for reading; for writing, return a
        Room, through which the kernel writes to the memory.
        """
        if self.unsure is None:
            return self.memory[start : start + length]
        room = native.Room(self.unsure + start, length, self.memory)
        if not write:
            return room.read()
        return room if native.reachable(self.unsure + start, length) else None


class Window(native.Record):
    """A memory window, unbound while it has no region."""

    __slots__ = ("access", "addr", "length", "pd", "qpn", "region", "rkey", "type", "valid")

    # These describe the bound range, and are unset without a region.
    addr: int
    length: int
    access: int
    qpn: int
    """The queue pair that bound it; a type 2 window works on no other."""

    def __init__(self, pd: ProtectionDomain, mw_type: MWType, rkey: int) -> None:
        self.pd = pd
        self.type = mw_type
        self.rkey = rkey
        self.valid = True
        self.region: Region | None = None

    def bind(self, region: Region, addr: int, length: int, access: int, qpn: int) -> None:
        """Point the window at a range of a region."""
        self.unbind()
        self.region, self.addr, self.length, self.access = region, addr, length, access
        self.qpn = qpn
        region.windows += 1

    def unbind(self) -> None:
        """Remove the region, after which the key grants nothing."""
        if self.region is not None:
            self.region.windows -= 1
            self.region = None


INDICES = 1, 0x7FFFFF
"""The first and the last key index, without the bit that distinguishes an rkey from an lkey."""
_RKEY = 0x8000_0000
_RKEY_INDEX = _RKEY >> 8
_STALE_STEP = 0x3F
"""The step between the low bytes of successive keys, so that a stale key is not the next one."""


class Memory(native.Record):
    """A device's memory keys, and the region or window that each one identifies."""

    def __init__(self) -> None:
        self.regions_by_lkey = JournaledDict()
        self.by_index = JournaledDict()
        """Regions and windows by the upper 24 bits of their rkeys, which do not change."""
        self.indices = Numbers(*INDICES, start=0x11)
        self._tag = 0

    def _new_key(self, call: str) -> int:
        """Return the lkey of a new region, or the rkey of a window.

        Raises:
            VerbsError: ENOMEM: all keys are in use.
        """
        # The upper 24 bits are the index, the low byte a tag.
        index = self.indices.choose(call, "memory keys", self._is_taken)
        return index << 8 | self._new_tag()

    def _is_taken(self, index: int) -> bool:
        """Whether an index is in use, by a window or by a region."""
        return index in self.by_index or index | _RKEY_INDEX in self.by_index

    def _new_tag(self) -> int:
        self._tag = (self._tag + _STALE_STEP) & 0xFF
        return self._tag

    def _find(self, rkey: int) -> Region | Window | None:
        found: Region | Window | None = self.by_index.get(rkey >> 8)
        # A region or window that this verb has removed stays listed until the verb ends.
        return found if found is not None and found.valid and found.rkey == rkey else None

    def find_region(self, lkey: int) -> Region | None:
        """Return the region with an lkey, or None."""
        found: Region | None = self.regions_by_lkey.get(lkey)
        return found if found is not None and found.valid and found.lkey == lkey else None

    # ---- registering --------------------------------------------------------

    def register(
        self,
        pd: ProtectionDomain,
        addr: int,
        memory: memoryview,
        access: int,
        unsure: int | None = None,
        *,
        call: str = "ibv_reg_mr",
    ) -> Region:
        """Register memory at an address, with new keys; the rkey and the lkey differ.

        Args:
            unsure: the address of the first byte in this process, if the memory may be unmapped, or
                its file truncated, while it is registered.
            call: the verb.

        Raises:
            VerbsError: ENOMEM: all keys are in use.
        """
        lkey = self._new_key(call)
        region = Region(pd, addr, memory, access, lkey, lkey | _RKEY, unsure)
        self._list(region)
        return region

    def _list(self, region: Region) -> None:
        self.regions_by_lkey[region.lkey] = region
        self.by_index[region.rkey >> 8] = region

    def move(self, region: Region, addr: int, memory: memoryview, unsure: int | None) -> None:
        """Re-register a region over new memory; its keys change, and the old ones become invalid.

        Raises:
            VerbsError: ENOMEM: all keys are in use.
        """
        lkey = self._new_key("ibv_rereg_mr")
        self.deregister(region)
        region.addr, region.memory, region.length = addr, memory, len(memory)
        region.lkey, region.rkey, region.unsure = lkey, lkey | _RKEY, unsure
        region.valid = True
        self._list(region)

    def deregister(self, region: Region) -> None:
        """Remove a region; its keys become invalid."""
        if not region.valid:
            # It was invalidated: another region may have its keys.
            return
        self.regions_by_lkey.discard(region.lkey)
        self.by_index.discard(region.rkey >> 8)
        region.valid = False

    def allocate_window(self, pd: ProtectionDomain, mw_type: MWType) -> Window:
        """Return a new unbound window.

        Raises:
            VerbsError: ENOMEM: all keys are in use.
        """
        window = Window(pd, mw_type, self._new_key("ibv_alloc_mw"))
        self.by_index[window.rkey >> 8] = window
        return window

    def deallocate_window(self, window: Window) -> None:
        """Remove a window."""
        self.by_index.discard(window.rkey >> 8)
        window.valid = False
        window.unbind()

    def rekey(self, window: Window, rkey: int) -> None:
        """Give a window a new key, whose low byte the caller chooses."""
        window.rkey = window.rkey & ~0xFF | rkey & 0xFF

    # ---- checking -----------------------------------------------------------

    def local(
        self, pd: ProtectionDomain, sges: Any, write: bool, size: int | None = None
    ) -> Segments:
        """Return the memory behind local SGEs.

        Args:
            pd: the queue's protection domain.
            sges: tuples (addr, length, lkey).
            write: whether the device will write to it.
            size: how many bytes are needed; SGEs after them are not checked. Default: all.

        Raises:
            ErrorStatus: LOC_PROT_ERR: a key, range, domain or permission is wrong; LOC_LEN_ERR:
                the SGEs are shorter than size.
        """
        segments: Segments = []
        for addr, length, lkey in sges:
            length = length or _ZERO_LENGTH_MEANS
            if size is not None:
                if not size:
                    break
                length = min(length, size)
                size -= length
            region = self.find_region(lkey)
            if region is None or region.pd is not pd:
                raise ErrorStatus(WCStatus.LOC_PROT_ERR)
            start = addr - region.addr
            if start < 0 or start + length > region.length:
                raise ErrorStatus(WCStatus.LOC_PROT_ERR)
            if write and not region.access & _LOCAL_WRITE:
                raise ErrorStatus(WCStatus.LOC_PROT_ERR)
            part = region.part(start, length, write)
            if part is None:
                raise ErrorStatus(WCStatus.LOC_PROT_ERR)
            segments.append(part)
        if size:
            raise ErrorStatus(WCStatus.LOC_LEN_ERR)
        return segments

    def check_remote(
        self, pd: ProtectionDomain, qpn: int, rkey: int, addr: int | None, length: int, need: int
    ) -> tuple[Region, int]:
        """Check a remote key without accessing the memory; return its region and the offset in it.

        Args:
            pd: the responder's protection domain.
            qpn: the responder's queue pair.
            rkey, addr, length: as in the request; if addr is None, check all that the rkey covers.
            need: the Access that the operation needs.

        Raises:
            RemoteAccessError: a key, range, domain or permission is wrong.
        """
        target = self._find(rkey)
        if isinstance(target, Window):
            region = target.region
            if region is None or not region.valid or target.pd is not pd:
                raise RemoteAccessError("the window is not bound, or not in this protection domain")
            if target.type is MWType.TYPE_2 and target.qpn != qpn:
                raise RemoteAccessError("the window was bound on another queue pair")
        else:
            region = target
            if region is None or region.pd is not pd:
                raise RemoteAccessError("the protection domain has no such rkey")
        assert target is not None
        zero_based = target.access & _ZERO_BASED
        if addr is None:
            addr, length = 0 if zero_based else target.addr, target.length
        start = addr if zero_based else addr - target.addr
        if start < 0 or start + length > target.length:
            raise RemoteAccessError("the range lies outside what the rkey covers")
        if need & ~target.access:
            raise RemoteAccessError("the rkey does not grant this access")
        return region, start + target.addr - region.addr

    def remote(
        self,
        pd: ProtectionDomain,
        qpn: int,
        rkey: int,
        addr: int,
        length: int,
        need: int,
        size: int | None = None,
    ) -> Any:
        """Return the memory behind a remote key.

        Args:
            pd, qpn, rkey, addr, length, need: as for check_remote().
            size: how many of the bytes to return. Whether the others are mapped is not checked: if
                the memory may be unmapped, a check would have the kernel copy or fault in each
                page. Default: all.

        Raises:
            RemoteAccessError: a key, range, domain or permission is wrong, or the memory to return
                is no longer mapped.
        """
        region, start = self.check_remote(pd, qpn, rkey, addr, length, need)
        part = region.part(start, length if size is None else size, bool(need & _REMOTE_WRITES))
        if part is None:
            raise RemoteAccessError("the memory is no longer mapped")
        return part

    # ---- memory management operations ---------------------------------------

    def bind(
        self,
        window: Window,
        region: Region | None,
        addr: int,
        length: int,
        access: int,
        *,
        pd: ProtectionDomain,
        qpn: int,
        rkey: int,
    ) -> None:
        """Bind a window, as a work request specifies.

        Raises:
            ErrorStatus: MW_BIND_ERR: the rules for binding are not met.
        """
        type_2 = window.type is MWType.TYPE_2
        if window.pd is not pd or (type_2 and window.region is not None):
            raise ErrorStatus(WCStatus.MW_BIND_ERR)
        if not length and not type_2:
            # A bind of length 0 unbinds a type 1 window.
            self.rekey(window, rkey)
            window.unbind()
            return
        if region is None or not region.valid or region.pd is not pd or not length:
            raise ErrorStatus(WCStatus.MW_BIND_ERR)
        if not region.access & _MW_BIND or region.access & _ZERO_BASED:
            raise ErrorStatus(WCStatus.MW_BIND_ERR)
        if access & _REMOTE_WRITES and not region.access & _LOCAL_WRITE:
            raise ErrorStatus(WCStatus.MW_BIND_ERR)
        if addr < region.addr or addr + length > region.addr + region.length:
            raise ErrorStatus(WCStatus.MW_BIND_ERR)
        self.rekey(window, rkey)
        window.bind(region, addr, length, access, qpn)

    def invalidate(self, pd: ProtectionDomain, qpn: int, key: int, is_remote: bool = False) -> bool:
        """Invalidate a region's or a type 2 window's key; return False if that is not allowed.

        Args:
            is_remote: whether a peer asks for this; a peer may revoke only what it may use.
        """
        target = self._find(key) or self.find_region(key)
        if target is None or target.pd is not pd:
            return False
        if isinstance(target, Window):
            if target.type is not MWType.TYPE_2 or target.region is None or target.qpn != qpn:
                return False
            target.unbind()
            return True
        if target.windows:
            return False
        if is_remote and (key != target.rkey or not target.access & _REMOTE):
            return False
        self.deregister(target)
        return True


_ALL = slice(None)


def contents(target: Any) -> Any:
    """Return the bytes in memory that a request will replace.

    Raises:
        RemoteAccessError: the memory is no longer mapped.
    """
    if not isinstance(target, native.Room):
        return target
    found = target.read()
    if found is None:
        raise RemoteAccessError("the memory is no longer mapped")
    return found


def gather(source: Segments) -> bytes:
    """Return the bytes behind segments."""
    return b"".join(source)


def total_length(sges: Any) -> int:
    """Return how many bytes SGEs cover."""
    return sum([length or _ZERO_LENGTH_MEANS for _, length, _ in sges])


def part(sges: Any, offset: int, size: int) -> list[tuple[int, int, int]]:
    """Return SGEs for a range of the bytes that the given SGEs cover.

    Raises:
        ErrorStatus: LOC_LEN_ERR: they cover fewer bytes.
    """
    found = []
    for addr, length, lkey in sges:
        if not size:
            break
        length = length or _ZERO_LENGTH_MEANS
        if offset >= length:
            offset -= length
            continue
        piece = min(size, length - offset)
        found.append((addr + offset, piece, lkey))
        offset = 0
        size -= piece
    if size:
        raise ErrorStatus(WCStatus.LOC_LEN_ERR)
    return found


def copy(source: Segments, target: Segments) -> None:
    """On commit, copy all of the source into the target, which is at least as long.

    Rooms are written first, because the kernel may refuse to write to them.
    """
    if len(source) == len(target) == 1:
        piece, room = source[0], target[0]
        if len(piece) != len(room):
            room = room[: len(piece)]
        _write(room, piece)
    else:
        _copy_pieces(source, target)


def _write(room: Any, piece: Any) -> None:
    if isinstance(room, native.Room):
        native.try_on_commit(room.fill, piece)
    else:
        native.on_commit(setitem, room, _ALL, piece)


def replace(number: bytes, target: Any) -> None:
    """On commit, replace a number with one computed from it.

    This happens only once, even if the verb is repeated.
    """
    if isinstance(target, native.Room):
        native.try_once_on_commit(target.fill, number)
    else:
        native.on_commit(setitem, target, _ALL, number)


def _copy_pieces(source: Segments, target: Segments) -> None:
    rooms = iter(target)
    room: Any = b""
    for each in source:
        piece = memoryview(each)
        while piece:
            if not room:
                room = next(rooms)
            size = min(len(piece), len(room))
            _write(room[:size], piece[:size])
            piece, room = piece[size:], room[size:]

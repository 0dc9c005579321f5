"""Work requests as packed records, for the shim's posting calls.

A record is the C struct followed by its SGEs (see ``_c/shim.h``); the shim
fills in the pointers between them.  The formats follow the struct's offsets,
which the shim asserts when it is compiled.  Pointers come only from live
resources, never from numbers that a caller typed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from struct import error as StructError
from typing import Any, TypeAlias

from ._binding import ffi, start_of
from ._resource import Resource
from .address import AH
from .memory import MR, MW
from .wr import (
    SGE,
    TSO,
    AtomicCmpAndSwp,
    AtomicFetchAndAdd,
    BindMW,
    LocalInv,
    RdmaRead,
    RdmaWrite,
    RdmaWriteWithImm,
    RecvWR,
    Send,
    SendWithImm,
    SendWithInv,
    TagAdd,
    TagDel,
    TagSync,
)

__all__ = [
    "RECV_SIZE",
    "SEND_SIZE",
    "SGE_SIZE",
    "Refused",
    "check_numbers",
    "fields_of",
    "gather",
    "pack_ops",
    "pack_recv",
    "pack_send",
    "record_size",
]


class Refused(Exception):
    """A work request that cannot be packed; the text says why."""


# struct ibv_send_wr: wr_id, next and sg_list (the shim's), num_sge, opcode,
# send_flags, imm_data or invalidate_rkey; then the unions.
_SEND_HEAD = "=Q16xiIII"
SEND_SIZE, RECV_SIZE, SGE_SIZE = 128, 32, 16
"""Bytes of struct ibv_send_wr, ibv_recv_wr and ibv_sge."""
_SEND_FORMATS = {
    "message": _SEND_HEAD + "QII16xI52x",  # ah, remote_qpn, remote_qkey; remote_srqn
    "invalidate": _SEND_HEAD + "32xI52x",  # remote_srqn
    "rdma": _SEND_HEAD + "QI20xI52x",  # remote_addr, rkey; remote_srqn
    "atomic": _SEND_HEAD + "QQQI4xI52x",  # remote_addr, compare_add, swap, rkey; remote_srqn
    "bind": _SEND_HEAD + "40xQI4xQQQI4x",  # mw, rkey, mr, addr, length, mw_access_flags
    "tso": _SEND_HEAD + "QII24xQHH36x",  # ah, remote_qpn, remote_qkey; hdr, hdr_sz, mss
}
_FIELDS = {
    "imm_data": (36, 4),
    "invalidate_rkey": (36, 4),
    "remote_addr": (40, 8),
    "rkey": (48, 4),
    "remote_qpn": (48, 4),
    "remote_qkey": (52, 4),
    "compare_add": (48, 8),
    "swap": (56, 8),
    "remote_srqn": (72, 4),
}
_RKEY_OF_ATOMIC = (64, 4)
_RECV_FORMAT = "=Q16xi4x"  # wr_id, num_sge
# wr_id, opcode, flags, unexpected_cnt, handle, recv_wr_id, num_sge, tag, mask
_OPS_FORMAT = "=Q8xIiIIQ8xi4xQQ"
_SGE_FORMAT = "QII"


class _Formats(dict[int, Struct]):
    """The Structs of one kind of record, by number of SGEs, made as they are needed."""

    def __init__(self, head: str) -> None:
        self._head = head

    def __missing__(self, sges: int) -> Struct:
        made = self[sges] = Struct(self._head + _SGE_FORMAT * sges)
        return made


_message, _invalidate, _rdma, _atomic, _bind, _tso = map(_Formats, _SEND_FORMATS.values())
_recv = _Formats(_RECV_FORMAT)
_ops = _Formats(_OPS_FORMAT)


def gather(sg_list: SGE | Sequence[SGE]) -> Sequence[SGE]:
    """Return an sg_list as a sequence of SGEs that later changes do not reach.

    Raises:
        Refused: it holds something that is no SGE, or one whose region is closed.
    """
    sges: tuple[Any, ...] = (sg_list,) if type(sg_list) is SGE else tuple(sg_list)
    for sge in sges:
        if type(sge) is not SGE:
            raise Refused(f"sg_list holds a {type(sge).__name__}; mr[a:b] makes an SGE")
        if getattr(sge.owner, "closed", False):
            raise Refused(f"{sge.owner} is closed")
    return sges


def record_size(sges: int) -> int:
    """Return the bytes that a record of any kind needs at most."""
    return SEND_SIZE + SGE_SIZE * sges


def fields_of(wr_type: Any) -> dict[str, tuple[int, int]]:
    """Return where ``struct ibv_send_wr`` has the numbers of a class: offset and bytes of each."""
    names = wr_type.__dataclass_fields__
    found = {name: place for name, place in _FIELDS.items() if name in names}
    if "compare_add" in names:
        found["rkey"] = _RKEY_OF_ATOMIC
    return found


def _numbers(sges: Sequence[SGE]) -> list[int]:
    numbers: list[int] = []
    for sge in sges:
        numbers += sge[:3]
    return numbers


_POINTERS: dict[str, tuple[type[Resource], str]] = {
    "ah": (AH, "an address handle"),
    "mw": (MW, "a memory window"),
    "mr": (MR, "a memory region"),
}


def _pointer(wr: Any, name: str) -> int:
    """Return the address of the struct of a live resource that a field names, or 0 for None."""
    resource = getattr(wr, name)
    if resource is None:
        return 0
    kind, what = _POINTERS[name]
    if not isinstance(resource, kind):
        # A driver would read one struct as another.
        raise Refused(f"{name} is a {type(resource).__name__}, not {what}")
    handle = resource._handle
    if handle is None:
        raise Refused(f"{resource} is closed")
    return int(ffi.cast("uintptr_t", handle))


Pack: TypeAlias = Callable[[bytearray, int, Any, int, Sequence[SGE]], tuple[int, tuple[Any, ...]]]
"""Write a record at an offset; return its end and what it refers to beside the SGEs."""


def _pack_message(
    out: bytearray, at: int, wr: Any, wr_id: int, sges: Sequence[SGE]
) -> tuple[int, tuple[Any, ...]]:
    record = _message[len(sges)]
    ah = wr.ah
    record.pack_into(
        out, at, wr_id, len(sges), wr.opcode, wr.send_flags, getattr(wr, "imm_data", 0),
        _pointer(wr, "ah"), wr.remote_qpn, wr.remote_qkey,
        wr.remote_srqn, *_numbers(sges),
    )  # fmt: skip
    return at + record.size, () if ah is None else (ah,)


def _pack_invalidate(
    out: bytearray, at: int, wr: Any, wr_id: int, sges: Sequence[SGE]
) -> tuple[int, tuple[Any, ...]]:
    record = _invalidate[len(sges)]
    record.pack_into(
        out, at, wr_id, len(sges), wr.opcode, wr.send_flags, wr.invalidate_rkey,
        getattr(wr, "remote_srqn", 0), *_numbers(sges),
    )  # fmt: skip
    return at + record.size, ()


def _pack_rdma(
    out: bytearray, at: int, wr: Any, wr_id: int, sges: Sequence[SGE]
) -> tuple[int, tuple[Any, ...]]:
    record = _rdma[len(sges)]
    record.pack_into(
        out, at, wr_id, len(sges), wr.opcode, wr.send_flags, getattr(wr, "imm_data", 0),
        wr.remote_addr, wr.rkey, wr.remote_srqn, *_numbers(sges),
    )  # fmt: skip
    return at + record.size, ()


def _pack_atomic(
    out: bytearray, at: int, wr: Any, wr_id: int, sges: Sequence[SGE]
) -> tuple[int, tuple[Any, ...]]:
    record = _atomic[len(sges)]
    record.pack_into(
        out, at, wr_id, len(sges), wr.opcode, wr.send_flags, 0,
        wr.remote_addr, wr.compare_add, getattr(wr, "swap", 0), wr.rkey, wr.remote_srqn,
        *_numbers(sges),
    )  # fmt: skip
    return at + record.size, ()


def _pack_bind(
    out: bytearray, at: int, wr: Any, wr_id: int, sges: Sequence[SGE]
) -> tuple[int, tuple[Any, ...]]:
    record = _bind[0]
    mw = _pointer(wr, "mw")
    mr = _pointer(wr, "mr")
    if not mw or not mr:
        # Drivers follow both pointers without looking.
        raise Refused("BIND_MW needs a memory window (mw=...) and a memory region (mr=...)")
    record.pack_into(
        out, at, wr_id, 0, wr.opcode, wr.send_flags, 0,
        mw, wr.rkey, mr, wr.addr, wr.length, wr.mw_access_flags,
    )  # fmt: skip
    return at + record.size, (wr.mw, wr.mr)


def _pack_tso(
    out: bytearray, at: int, wr: Any, wr_id: int, sges: Sequence[SGE]
) -> tuple[int, tuple[Any, ...]]:
    record = _tso[len(sges)]
    hdr = memoryview(wr.hdr)
    record.pack_into(
        out, at, wr_id, len(sges), wr.opcode, wr.send_flags, 0,
        _pointer(wr, "ah"), wr.remote_qpn, wr.remote_qkey,
        start_of(hdr), hdr.nbytes, wr.mss, *_numbers(sges),
    )  # fmt: skip
    return at + record.size, (hdr, wr.ah)


_SEND_PACKERS: dict[type, Pack] = {
    Send: _pack_message,
    SendWithImm: _pack_message,
    SendWithInv: _pack_invalidate,
    RdmaWrite: _pack_rdma,
    RdmaWriteWithImm: _pack_rdma,
    RdmaRead: _pack_rdma,
    AtomicCmpAndSwp: _pack_atomic,
    AtomicFetchAndAdd: _pack_atomic,
    LocalInv: _pack_invalidate,
    BindMW: _pack_bind,
    TSO: _pack_tso,
}


def _packer_of_base(wr: Any) -> Pack:
    for base in type(wr).__mro__:
        if base in _SEND_PACKERS:
            return _SEND_PACKERS[base]
    raise Refused(f"a {type(wr).__name__} is no send work request")


def pack_send(
    out: bytearray, at: int, wr: Any, wr_id: int, sges: Sequence[SGE]
) -> tuple[int, tuple[Any, ...]]:
    """Write a send work request at an offset; return its end and what it refers to.

    Raises:
        Refused: a field is out of range, or a pointer would be.
    """
    pack = _SEND_PACKERS.get(type(wr)) or _packer_of_base(wr)
    try:
        return pack(out, at, wr, wr_id, sges)
    except (StructError, TypeError, ValueError, BufferError) as error:
        raise _explain(wr, sges, error) from None


def pack_recv(
    out: bytearray, at: int, wr: RecvWR, wr_id: int, sges: Sequence[SGE]
) -> tuple[int, tuple[Any, ...]]:
    """Write a receive work request; the rest is as in pack_send."""
    record = _recv[len(sges)]
    try:
        record.pack_into(out, at, wr_id, len(sges), *_numbers(sges))
    except (StructError, TypeError) as error:
        raise _explain(wr, sges, error) from None
    return at + record.size, ()


def pack_ops(
    out: bytearray, at: int, wr: TagAdd | TagDel | TagSync, wr_id: int,
    recv_wr_id: int, sges: Sequence[SGE],
) -> tuple[int, tuple[Any, ...]]:  # fmt: skip
    """Write a tag-matching operation; the rest is as in pack_send."""
    record = _ops[len(sges)]
    handle = wr.handle._value if type(wr) is TagDel and wr.handle is not None else 0
    tag, mask = (wr.tag, wr.mask) if type(wr) is TagAdd else (0, 0)
    try:
        record.pack_into(
            out, at, wr_id, wr.opcode, wr.flags, wr.unexpected_cnt, handle,
            recv_wr_id, len(sges), tag, mask, *_numbers(sges),
        )  # fmt: skip
    except (StructError, TypeError) as error:
        raise _explain(wr, sges, error) from None
    return at + record.size, ()


_BITS = {
    "wr_id": 64,
    "recv_wr_id": 64,
    "send_flags": 32,
    "flags": 31,
    "imm_data": 32,
    "invalidate_rkey": 32,
    "remote_qpn": 32,
    "remote_qkey": 32,
    "remote_srqn": 32,
    "remote_addr": 64,
    "rkey": 32,
    "compare_add": 64,
    "swap": 64,
    "addr": 64,
    "length": 64,
    "mw_access_flags": 32,
    "mss": 16,
    "unexpected_cnt": 32,
    "tag": 64,
    "mask": 64,
}


def check_numbers(wr: Any, sges: Sequence[SGE] = ()) -> str | None:
    """Say which field of a work request is no number in its range, or of a wrong type, or None."""
    sg_list = getattr(wr, "sg_list", ())
    if not isinstance(sg_list, Iterable):
        return f"sg_list is a {type(sg_list).__name__}, not SGEs; mr[a:b] makes one"
    for name, (kind, what) in _POINTERS.items():
        resource = getattr(wr, name, None)
        if resource is not None and not isinstance(resource, kind):
            return f"{name} is a {type(resource).__name__}, not {what}"
    for name, bits in _BITS.items():
        value = getattr(wr, name, 0)
        if not isinstance(value, int):
            return f"{name} is a {type(value).__name__}, not an integer"
        if not 0 <= value < 1 << bits:
            return f"{name}={value} is not in 0..2^{bits}-1"
    for sge in sges:
        for name, value, bits in zip(SGE._fields, sge, (64, 32, 32), strict=False):
            if not isinstance(value, int):
                return f"an SGE's {name} is a {type(value).__name__}, not an integer"
            if not 0 <= value < 1 << bits:
                return f"an SGE's {name}={value} is not in 0..2^{bits}-1"
        if sge.owner is not None and not hasattr(sge.owner, "addr"):
            return f"an SGE's owner is a {type(sge.owner).__name__}, not a region or a buffer"
    return None


def _explain(wr: Any, sges: Sequence[SGE], error: Exception) -> Refused:
    if type(wr) is TSO:
        try:
            if len(wr.hdr) > 0xFFFF:
                return Refused(f"hdr has {len(wr.hdr)} bytes; at most 65535 fit")
        except TypeError:
            return Refused("hdr is not bytes")
    return Refused(check_numbers(wr, sges) or str(error))

"""How the fields of a work request map to the members of the structs that a device reads.

The structs are ``struct ibv_send_wr`` (ibv_post_send(3)), ``struct ibv_recv_wr``
(ibv_post_recv(3)), ``struct ibv_ops_wr`` (ibv_post_srq_ops(3)) and, for the opcodes that only
ibv_wr_post(3) has, ``struct rp_built_wr`` (``_c/posting/build_wr.c``). Each work request class
has a row here, and nowhere else; cffi supplies the offsets of the members.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from .._binding import ffi, native, once
from .wr import (
    TSO,
    AtomicCmpAndSwp,
    AtomicFetchAndAdd,
    AtomicWrite,
    BindMW,
    Flush,
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


class Verb(IntEnum):
    """The verbs that post, as ``_c/posting/wr_types.h`` numbers them."""

    ibv_post_send = 0
    ibv_post_recv = 1
    ibv_post_srq_recv = 2
    ibv_post_srq_ops = 3


class _WRRow(NamedTuple):
    """A work request class.

    Attributes:
        members: for each field, the struct member that holds it. The common head (wr_id, sg_list,
            opcode, flags) is not listed.
        writes: the device writes to the buffers.
        atomic: it takes an aligned remote address; its buffer, if any, is 8 bytes for the old
            value.
        struct: the struct that has the members, if not the verb's.
    """

    members: dict[str, str]
    writes: bool = False
    atomic: bool = False
    struct: str = ""


_IMM = {"imm_data": "imm_data"}
_INVALIDATE = {"invalidate_rkey": "invalidate_rkey"}
_XRC = {"remote_srqn": "qp_type.xrc.remote_srqn"}
_UD = {"ah": "wr.ud.ah", "remote_qpn": "wr.ud.remote_qpn", "remote_qkey": "wr.ud.remote_qkey"}
_RDMA = {"remote_addr": "wr.rdma.remote_addr", "rkey": "wr.rdma.rkey", **_XRC}
_ATOMIC = {
    "remote_addr": "wr.atomic.remote_addr",
    "compare_add": "wr.atomic.compare_add",
    "rkey": "wr.atomic.rkey",
    **_XRC,
}
_BUILT = {name: name for name in ("remote_addr", "rkey", "remote_srqn")}
_TAG_SYNC = {"unexpected_cnt": "tm.unexpected_cnt"}

_WR_ROWS: dict[Verb, dict[type, _WRRow]] = {
    Verb.ibv_post_send: {
        RdmaWrite: _WRRow(_RDMA),
        Send: _WRRow(_UD | _XRC),
        RdmaRead: _WRRow(_RDMA, writes=True),
        SendWithImm: _WRRow(_UD | _XRC | _IMM),
        RdmaWriteWithImm: _WRRow(_RDMA | _IMM),
        SendWithInv: _WRRow(_INVALIDATE | _XRC),
        AtomicCmpAndSwp: _WRRow(_ATOMIC | {"swap": "wr.atomic.swap"}, writes=True, atomic=True),
        AtomicFetchAndAdd: _WRRow(_ATOMIC, writes=True, atomic=True),
        LocalInv: _WRRow(_INVALIDATE),
        BindMW: _WRRow(
            {
                "mw": "bind_mw.mw",
                "rkey": "bind_mw.rkey",
                "mr": "bind_mw.bind_info.mr",
                "addr": "bind_mw.bind_info.addr",
                "length": "bind_mw.bind_info.length",
                "mw_access_flags": "bind_mw.bind_info.mw_access_flags",
            }
        ),
        TSO: _WRRow({"hdr": "tso.hdr", "mss": "tso.mss", **_UD}),
        AtomicWrite: _WRRow(
            _BUILT | {"atomic_wr": "atomic_wr"}, atomic=True, struct="struct rp_built_wr"
        ),
        Flush: _WRRow(
            _BUILT | {name: name for name in ("length", "type", "level")},
            struct="struct rp_built_wr",
        ),
    },
    Verb.ibv_post_recv: {RecvWR: _WRRow({}, writes=True)},
    Verb.ibv_post_srq_ops: {
        TagAdd: _WRRow(
            {
                **_TAG_SYNC,
                "recv_wr_id": "tm.add.recv_wr_id",
                "tag": "tm.add.tag",
                "mask": "tm.add.mask",
            },
            writes=True,
        ),
        TagDel: _WRRow({**_TAG_SYNC, "handle": "tm.handle"}),
        TagSync: _WRRow(_TAG_SYNC),
    },
}

_STRUCTS = {
    Verb.ibv_post_send: "struct ibv_send_wr",
    Verb.ibv_post_recv: "struct ibv_recv_wr",
    Verb.ibv_post_srq_ops: "struct ibv_ops_wr",
}

_NUMBER = "n"
_FIELD_TYPES = {
    "imm_data": "i",
    "ah": "a",
    "mw": "w",
    "mr": "r",
    "hdr": "h",
    "handle": "t",
    "recv_wr_id": "m",
}
"""The types of the fields that are not numbers in host order; see ``_c/posting/wr_types.h``."""


def _member(struct: str, path: str) -> tuple[int, int]:
    """Return the offset and size in bytes of the member at a path within a struct."""
    ctype = ffi.typeof(struct)
    for name in path.split("."):
        fields = dict(_flat(ctype))
        ctype = fields[name].type
    return ffi.offsetof(struct, *path.split(".")), ffi.sizeof(ctype)


def _flat(ctype: Any) -> Any:
    """Return the fields of a struct, and those of its anonymous unions."""
    found: list[Any] = []
    for name, field in ctype.fields:
        found += [(name, field)] if name else _flat(field.type)
    return found


def _describe(verb: Verb, wr_type: Any, row: _WRRow) -> int:
    struct = row.struct or _STRUCTS[verb]
    fields = tuple(
        [
            (name, *_member(struct, path), _FIELD_TYPES.get(name, _NUMBER))
            for name, path in row.members.items()
        ]
    )
    opcode = int(getattr(wr_type, "opcode", 0))
    args = wr_type, int(verb), opcode, row.writes, row.atomic, fields
    number: int = once(native.describe_wr, wr_type, *args)
    return number


TYPE_NUMBERS: dict[type, int] = {}
"""Each class's number in the C code."""


def describe_fields() -> None:
    """Describe the classes to the C code."""
    for verb, rows in _WR_ROWS.items():
        TYPE_NUMBERS.update(
            {wr_type: _describe(verb, wr_type, row) for wr_type, row in rows.items()}
        )


NUMBER_FIELDS: dict[type, dict[str, int]] = {
    wr_type: {
        name: index
        for index, name in enumerate(row.members)
        if _FIELD_TYPES.get(name, _NUMBER) in ("n", "i")
    }
    for rows in _WR_ROWS.values()
    for wr_type, row in rows.items()
}
"""For each class, the index of each numeric field in the class's row, by the field's name."""

"""The edges of the packing: every byte that goes out, and the first number that does not fit.

tests/test_packing.py reads what is packed; mutation testing (.ci/mutate) asked for these.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest
from test_packing import U64, Linked, made, sges_of

import rdmapost as rp
from rdmapost import SendFlags
from rdmapost._binding import ffi, lib
from rdmapost.packing import (
    RECV_SIZE,
    SEND_SIZE,
    SGE_SIZE,
    Refused,
    check_numbers,
    fields_of,
    gather,
    pack_ops,
    pack_recv,
    pack_send,
    record_size,
)
from rdmapost.wr import TagHandle

KINDS: list[Any] = [
    rp.Send, rp.SendWithImm, rp.SendWithInv, rp.RdmaWrite, rp.RdmaWriteWithImm, rp.RdmaRead,
    rp.AtomicCmpAndSwp, rp.AtomicFetchAndAdd, rp.LocalInv, rp.TSO,
]  # fmt: skip


def packed(pack: Any, wr: Any, *more: Any) -> bytes:
    """Pack a work request where another one was before."""
    out = bytearray(b"\xff" * 256)
    end, _ = pack(out, 0, wr, 0, *more, sges_of(wr))
    return bytes(out[:end])


@pytest.mark.parametrize("kind", [*KINDS, rp.BindMW])
def test_what_a_work_request_does_not_say_goes_out_as_0(kind):
    """A driver may look at any of it, and nothing of an earlier post is to be left."""
    wr, at = kind(), 128
    if kind is rp.BindMW:
        wr.mw, wr.mr = made(rp.MW, "struct ibv_mw"), made(rp.MR, "struct ibv_mr")
        at = 80  # from there on it is said
    elif kind is rp.TSO:
        at = 80
    expected = struct.pack("=Q16xiiI", 0, 0, kind.opcode, SendFlags.SIGNALED) + bytes(92)
    assert packed(pack_send, wr)[:at] == expected[:at]
    assert len(packed(pack_send, wr)) == 128


@pytest.mark.parametrize("kind", [rp.TagAdd, rp.TagDel, rp.TagSync])
def test_what_an_operation_does_not_say_goes_out_as_0(kind):
    c = Linked(lambda *args: pack_ops(*args[:4], 0, args[4]), lib.rp_link_ops,
               "struct ibv_ops_wr", [kind()], [0])[0]  # fmt: skip
    assert (c.opcode, c.flags, c.tm.unexpected_cnt) == (kind.opcode, kind().flags, 0)
    assert (c.tm.handle, c.tm.add.recv_wr_id, c.tm.add.num_sge) == (0, 0, 0)
    assert (c.tm.add.tag, c.tm.add.mask) == (0, U64 if kind is rp.TagAdd else 0)
    assert len(packed(pack_ops, kind(), 0)) == 72


def test_the_handle_of_an_operation_is_what_the_add_was_given():
    handle = TagHandle.__new__(TagHandle)
    handle._value = 0x12345678
    for op, sent in ((rp.TagDel(handle=handle), 0x12345678), (rp.TagAdd(handle=handle), 0)):
        c = ffi.cast("struct ibv_ops_wr *", ffi.from_buffer(bytearray(packed(pack_ops, op, 0))))
        assert c.tm.handle == sent


def test_records_are_as_long_as_the_structs_of_verbs():
    assert ffi.sizeof("struct ibv_send_wr") == SEND_SIZE
    assert ffi.sizeof("struct ibv_recv_wr") == RECV_SIZE
    assert ffi.sizeof("struct ibv_sge") == SGE_SIZE
    for count in (0, 1, 5):
        assert record_size(count) == len(packed(pack_send, rp.Send([rp.SGE(1, 2, 3)] * count)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_short_way_and_prepared_lists_write_where_the_packing_does(kind):
    """They are told the places of the fields instead of a format."""
    names = {field.name for field in dataclasses.fields(kind)}
    names -= {"wr_id", "send_flags", "sg_list", "ah", "hdr", "mss"}
    found = {}
    hdr: Any = {"hdr": b"h"} if kind is rp.TSO else {}
    for name, (_, size) in fields_of(kind).items():
        empty = packed(pack_send, kind(**hdr))
        full = packed(pack_send, kind(**hdr, **{name: (1 << 8 * size) - 1}))
        changed = [at for at in range(128) if empty[at] != full[at]]
        found[name] = changed[0], len(changed)
    assert fields_of(kind) == found
    assert found.keys() == names


# ---- what cannot be packed --------------------------------------------------------


def test_receives_and_operations_are_refused_with_the_name_too():
    wr: Any = rp.RecvWR(rp.SGE(0, 1 << 32, 0))
    with pytest.raises(Refused, match="an SGE's length=4294967296"):
        packed(pack_recv, wr)
    with pytest.raises(Refused, match="tag=-1 is not in 0"):
        packed(pack_ops, rp.TagAdd(tag=-1), 0)


POINTERS = {"sg_list", "ah", "mw", "mr", "hdr", "handle"}
BITS = {
    "wr_id": 64, "recv_wr_id": 64, "send_flags": 32, "flags": 31, "imm_data": 32,
    "invalidate_rkey": 32, "remote_qpn": 32, "remote_qkey": 32, "remote_srqn": 32,
    "remote_addr": 64, "rkey": 32, "compare_add": 64, "swap": 64, "addr": 64, "length": 64,
    "mw_access_flags": 32, "mss": 16, "unexpected_cnt": 32, "tag": 64, "mask": 64,
}  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, rp.BindMW, rp.RecvWR, rp.TagAdd, rp.TagDel, rp.TagSync])
def test_every_number_has_its_range(kind):
    """As wide as its field in the struct."""
    assert check_numbers(kind()) is None
    for name in {field.name for field in dataclasses.fields(kind)} - POINTERS:
        bits = BITS[name]
        wr = kind()
        for value, words in (
            (0, None),
            ((1 << bits) - 1, None),
            (1 << bits, f"{name}={1 << bits} is not in 0..2^{bits}-1"),
            (-1, f"{name}=-1 is not in 0..2^{bits}-1"),
            (1.0, f"{name} is a float, not an integer"),
        ):
            setattr(wr, name, value)
            assert check_numbers(wr) == words


def test_what_is_no_sge_is_told_by_its_field():
    wr = rp.Send()
    for name, bits in (("addr", 64), ("length", 32), ("lkey", 32)):
        good = rp.SGE(0, 0, 0)._replace(**{name: (1 << bits) - 1})
        assert check_numbers(wr, [rp.SGE(1, 1, 1), good]) is None
        for value, words in (
            (1 << bits, f"={1 << bits} is not in 0..2^{bits}-1"),
            (-1, f"=-1 is not in 0..2^{bits}-1"),
            ("x", " is a str, not an integer"),
        ):
            wrong = good._replace(**{name: value})
            assert check_numbers(wr, [good, wrong]) == f"an SGE's {name}{words}"
    data = rp.SGE.from_buffer(b"1234")
    assert check_numbers(wr, gather(data)) is None
    owner: Any = 5
    said = check_numbers(wr, [data._replace(owner=owner)])
    assert said == "an SGE's owner is a int, not a region or a buffer"


def test_what_is_of_a_wrong_type_is_told():
    wrong: Any = 5
    said = check_numbers(rp.Send(wrong))
    assert said == "sg_list is a int, not SGEs; mr[a:b] makes one"
    assert check_numbers(rp.Send(ah=wrong)) == "ah is a int, not an address handle"
    mw, mr = made(rp.MW, "struct ibv_mw"), made(rp.MR, "struct ibv_mr")
    assert check_numbers(rp.BindMW(mw=mr, mr=mr)) == "mw is a MR, not a memory window"
    assert check_numbers(rp.BindMW(mw=mw, mr=mw)) == "mr is a MW, not a memory region"
    assert check_numbers(rp.BindMW(mw=mw, mr=mr)) is None

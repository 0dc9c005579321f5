"""Checks of remote memory: writes, reads and atomics."""

from __future__ import annotations

import random
import sys
from array import array

from ...enums import Access, DeviceCap, FlushLevel, Opcode, QPType, SendOps, WCOpcode
from ...posting.columns import Blocks
from ...posting.wr import (
    AtomicCmpAndSwp,
    AtomicFetchAndAdd,
    AtomicWrite,
    Flush,
    RdmaRead,
    RdmaWrite,
    RdmaWriteWithImm,
)
from ..loopback import Loopback
from .assertions import at, completed, same, same_bytes, unharmed, write, written
from .registry import MARGIN, Failed, Row, Trial, Unsupported, check
from .sends import IMM

ROWS: list[Row] = []

_BLOCKS = 8


@check(ROWS, Opcode.RDMA_WRITE)
def _rdma_write(trial: Trial) -> str:
    with trial.loopback() as pair:
        # A receive that the write must not consume.
        pair.receive(trial.length)
        write(pair, offset=MARGIN)
        unharmed(pair, (MARGIN, trial.length))
        if pair.remote.cq.poll():
            raise Failed("the write completed a receive")
    return f"{trial.length} bytes written"


@check(ROWS, Opcode.RDMA_WRITE_WITH_IMM)
def _rdma_write_with_imm(trial: Trial) -> str:
    with trial.loopback() as pair:
        pair.receive(0)
        pair.local.qp.post_send(
            RdmaWriteWithImm(sg_list=pair.local.mr[:], wr_id=7, imm_data=IMM, **pair.target(MARGIN))
        )
        completed(pair.sent(), WCOpcode.RDMA_WRITE, wr_id=7)
        wc = completed(pair.arrived(), WCOpcode.RECV_RDMA_WITH_IMM, wr_id=1)
        same("byte_len", wc.byte_len, trial.length)
        same("imm_data", wc.imm_data, IMM)
        same_bytes("remote memory", at(pair, MARGIN, trial.length), pair.local.mr.buffer)
        unharmed(pair, (MARGIN, trial.length))
    return f"{trial.length} bytes written, with immediate data"


@check(ROWS, Opcode.RDMA_READ)
def _rdma_read(trial: Trial) -> str:
    with trial.loopback() as pair:
        wanted = random.randbytes(trial.length)
        pair.remote.mr.buffer[MARGIN : MARGIN + trial.length] = wanted
        pair.local.qp.post_send(RdmaRead(sg_list=pair.local.mr[:], wr_id=7, **pair.target(MARGIN)))
        wc = completed(pair.sent(), WCOpcode.RDMA_READ, wr_id=7)
        same("byte_len", wc.byte_len, trial.length)
        same_bytes("local memory", bytes(pair.local.mr.buffer), wanted)
        same_bytes("remote memory", at(pair, MARGIN, trial.length), wanted)
        unharmed(pair, (MARGIN, trial.length))
    return f"{trial.length} bytes read"


@check(ROWS, "POST_COLUMNS", QPType.RC, QPType.UC, QPType.XRC_SEND)
def _post_columns(trial: Trial) -> str:
    order = array("q", random.sample(range(_BLOCKS), _BLOCKS))
    size = _BLOCKS * 8
    with trial.loopback(local_size=size, remote_size=size + 2 * MARGIN) as pair:
        fields = pair.target(MARGIN)
        fields["remote_addr"] = Blocks(fields["remote_addr"], array("i", range(_BLOCKS)), 8)
        blocks = pair.local.mr.blocks(order, 8)
        posted = pair.local.qp.post_columns(
            RdmaWrite, blocks, wr_id=order, signal_every=_BLOCKS // 2, **fields
        )
        same("rows posted", posted, _BLOCKS)
        for row in (_BLOCKS // 2 - 1, _BLOCKS - 1):
            completed(pair.sent(), WCOpcode.RDMA_WRITE, wr_id=order[row])
        wanted = b"".join(bytes(pair.local.mr.buffer[8 * i : 8 * i + 8]) for i in order)
        written(pair, MARGIN, wanted)
        unharmed(pair, (MARGIN, size))
    return f"{_BLOCKS} blocks written in one call, every {_BLOCKS // 2}th signaled"


@check(ROWS, Opcode.ATOMIC_CMP_AND_SWP)
def _compare_and_swap(trial: Trial) -> str:
    _require_atomics(trial)
    first, second = 0x1122334455667788, 0x99AABBCCDDEEFF00
    with trial.loopback() as pair:
        pair.remote.mr.buffer[:8] = first.to_bytes(8, sys.byteorder)
        for compare, after in ((second, first), (first, second)):
            wr = AtomicCmpAndSwp(compare_add=compare, swap=second, **pair.target())
            _atomic(pair, wr, WCOpcode.COMP_SWAP, before=first, after=after)
    return "swapped when equal, left alone when not"


@check(ROWS, Opcode.ATOMIC_FETCH_AND_ADD)
def _fetch_and_add(trial: Trial) -> str:
    _require_atomics(trial)
    first = (1 << 64) - 3
    with trial.loopback() as pair:
        pair.remote.mr.buffer[:8] = first.to_bytes(8, sys.byteorder)
        for before, after in ((first, 2), (2, 7)):
            wr = AtomicFetchAndAdd(compare_add=5, **pair.target())
            _atomic(pair, wr, WCOpcode.FETCH_ADD, before=before, after=after)
    return "added twice, once past 2^64"


@check(ROWS, Opcode.ATOMIC_WRITE)
def _atomic_write(trial: Trial) -> str:
    _require_cap(trial, DeviceCap.ATOMIC_WRITE)
    first, second = 0x1122334455667788, 0x99AABBCCDDEEFF00
    with trial.loopback(send_ops_flags=SendOps.ATOMIC_WRITE) as pair:
        for value in (first, second):
            wr = AtomicWrite(atomic_wr=value, wr_id=7, **pair.target(MARGIN))
            pair.local.qp.post_send(wr)
            completed(pair.sent(), WCOpcode.ATOMIC_WRITE, wr_id=7)
            same("value", int.from_bytes(at(pair, MARGIN, 8), sys.byteorder), value)
            unharmed(pair, (MARGIN, 8))
    return "8 bytes written, twice"


@check(ROWS, Opcode.FLUSH)
def _flush(trial: Trial) -> str:
    _require_cap(trial, DeviceCap.FLUSH_GLOBAL)
    access = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.FLUSH_GLOBAL
    with trial.loopback(send_ops_flags=SendOps.FLUSH, access=access) as pair:
        for level in FlushLevel:
            wrs = (
                RdmaWrite(sg_list=pair.local.mr[:], send_flags=0, **pair.target(MARGIN)),
                Flush(length=trial.length, level=level, wr_id=7, **pair.target(MARGIN)),
            )
            pair.local.qp.post_send(wrs)
            completed(pair.sent(), WCOpcode.FLUSH, wr_id=7)
            same_bytes("remote memory", at(pair, MARGIN, trial.length), pair.local.mr.buffer)
            unharmed(pair, (MARGIN, trial.length))
            trial.make_up(pair)
    return f"{trial.length} bytes written and flushed, as a range and as a region"


def _require_cap(trial: Trial, cap: DeviceCap) -> None:
    if not trial.context.attr.device_cap_flags_ex & cap:
        raise Unsupported(f"{trial.context.name} has no {cap.name}")


def _require_atomics(trial: Trial) -> None:
    if not trial.context.attr.atomic_cap:
        raise Unsupported(f"{trial.context.name} has no atomics")


def _atomic(
    pair: Loopback,
    wr: AtomicCmpAndSwp | AtomicFetchAndAdd,
    opcode: WCOpcode,
    *,
    before: int,
    after: int,
) -> None:
    wr.sg_list, wr.wr_id = pair.local.mr[0:8], 7
    pair.local.qp.post_send(wr)
    completed(pair.sent(), opcode, wr_id=7)
    same("old value", int.from_bytes(pair.local.mr.buffer[:8], sys.byteorder), before)
    same("new value", int.from_bytes(at(pair, 0, 8), sys.byteorder), after)
    unharmed(pair, (0, 8))

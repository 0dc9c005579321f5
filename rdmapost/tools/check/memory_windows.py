"""Checks of memory windows: binding them, and invalidating keys.

A type 2 window is valid only on the queue pair that bound it.  On XRC the binding
side is never the target of writes, so it can only invalidate the window's key, and
its peer can only invalidate a region's key.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from ...enums import Access, DeviceCap, Opcode, QPState, QPType, WCFlags, WCOpcode, WCStatus
from ...posting.wr import LocalInv, RdmaWrite, SendWithInv
from ...resources.cq import WC
from ...resources.mw import MW
from ..loopback import Loopback
from ..window_binding import WINDOW_REGION, bind_wr, binder
from .assertions import completed, same, same_bytes, write
from .registry import MARGIN, Failed, Row, Trial, Unsupported, check

ROWS: list[Row] = []

_PROBE = 16
"""Bytes of a write that tries a key."""
_UNKNOWN_OPCODE = frozenset({WCStatus.LOC_QP_OP_ERR, WCStatus.WR_FLUSH_ERR})
"""The statuses with which a working queue pair rejects an unknown opcode; rxe 6.12 flushes it."""
_REFUSED = frozenset({WCStatus.REM_ACCESS_ERR, WCStatus.REM_INV_REQ_ERR, WCStatus.REM_OP_ERR})


@check(ROWS, Opcode.BIND_MW)
def _bind_mw(trial: Trial) -> str:
    _require_windows(trial)
    with trial.loopback(access=WINDOW_REGION) as pair:
        _refused(pair, pair.window().next_rkey())
    with trial.loopback(access=WINDOW_REGION) as pair:
        window = pair.window()
        rkey = _bind(pair, window)
        if trial.qp_type is QPType.XRC_SEND:
            _bound_already(pair, window)
            return "bound, and refused a second time: a bound window cannot be bound again"
        write(pair, offset=MARGIN, rkey=rkey)
        # Soft-RoCE checks the bounds of the region, not the window's.
        bounded = not admitted(pair, rkey, MARGIN - 1)
    return "the key is valid when bound, refused before" + (
        ", refused outside the window"
        if bounded
        else f"; {trial.context.name} does not enforce the window's bounds"
    )


@check(ROWS, Opcode.LOCAL_INV)
def _local_inv(trial: Trial) -> str:
    _require_invalidation(trial)
    with trial.loopback(access=WINDOW_REGION) as pair:
        window = pair.window()
        rkey = _bind(pair, window)
        if trial.qp_type is QPType.XRC_SEND:
            _invalidate(pair, rkey)
            _bind(pair, window)
            _bound_already(pair, window)
            return "the window can be bound again afterwards, but not while it is bound"
        write(pair, offset=MARGIN, rkey=rkey)
        _invalidate(pair, rkey)
        _refused(pair, rkey)
    return "the key is valid when bound, refused afterwards"


@check(ROWS, Opcode.SEND_WITH_INV)
def _send_with_inv(trial: Trial) -> str:
    _require_invalidation(trial)
    if trial.qp_type is QPType.XRC_SEND:
        return _send_with_inv_of_a_region(trial)
    with trial.loopback(access=WINDOW_REGION) as pair:
        rkey = _bind(pair, pair.window())
        write(pair, offset=MARGIN, rkey=rkey)
        seen = _invalidating_message(trial, pair, rkey)
        _refused(pair, rkey)
    return f"{trial.length} bytes arrived and the key is refused afterwards{seen}"


def _send_with_inv_of_a_region(trial: Trial) -> str:
    with trial.loopback() as pair:
        region = pair.region(trial.length, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
        target = {**pair.target(rkey=region.rkey), "remote_addr": region.addr}
        pair.local.qp.post_send(RdmaWrite(sg_list=pair.local.mr[:], wr_id=6, **target))
        completed(pair.sent(), WCOpcode.RDMA_WRITE, wr_id=6)
        same_bytes("region", bytes(region.buffer), pair.local.mr.buffer)
        before = bytes(region.buffer)
        seen = _invalidating_message(trial, pair, region.rkey)
        pair.local.qp.post_send(RdmaWrite(sg_list=pair.local.mr[:], wr_id=10, **target))
        (wc,) = pair.sent()
        if wc.status is not WCStatus.REM_ACCESS_ERR:
            raise Failed(f"a write with an invalid key ended with {wc.status.name}")
        same_bytes("region", bytes(region.buffer), before)
    return f"{trial.length} bytes arrived and the region's key is refused afterwards{seen}"


def _invalidating_message(trial: Trial, pair: Loopback, rkey: int) -> str:
    """Send a message that invalidates a key; return a note on its completion."""
    pair.receive(trial.length)
    trial.make_up(pair)
    pair.local.qp.post_send(
        SendWithInv(sg_list=pair.local.mr[:], invalidate_rkey=rkey, wr_id=7, **pair.address)
    )
    name = pair.local.cq.context.name
    wcs = pair.sent()
    if trial.qp_type is QPType.XRC_SEND and wcs[0].status in _REFUSED:
        raise Unsupported(f"{name} does not let a peer invalidate a region ({wcs[0].status.name})")
    _managed(wcs, pair, Opcode.SEND_WITH_INV, WCOpcode.SEND, wr_id=7)
    wc = completed(pair.arrived(), WCOpcode.RECV, wr_id=1)
    # Soft-RoCE sets a different bit in the completion.
    with_inv = bool(wc.wc_flags & WCFlags.WITH_INV)
    if with_inv:
        same("invalidated_rkey", wc.invalidated_rkey, rkey)
    same_bytes("message", pair.received(trial.length), pair.local.mr.buffer)
    return (
        ", and named in the receive's completion (WITH_INV)"
        if with_inv
        else f"; {name} does not name it in the receive's completion"
    )


# ---- windows ----------------------------------------------------------------


def _require_windows(trial: Trial) -> None:
    if not trial.caps & (DeviceCap.MEM_WINDOW_TYPE_2A | DeviceCap.MEM_WINDOW_TYPE_2B):
        raise Unsupported(f"{trial.context.name} has no type 2 memory windows")


def _require_invalidation(trial: Trial) -> None:
    _require_windows(trial)
    if not trial.caps & DeviceCap.MEM_MGT_EXTENSIONS:
        raise Unsupported(f"{trial.context.name} cannot invalidate keys")


def _bind(pair: Loopback, window: MW) -> int:
    """Bind a window to part of the remote memory; return the rkey."""
    wr = bind_wr(pair, window, MARGIN, pair.local.mr.length, wr_id=8)
    binder(pair).qp.post_send(wr)
    _managed(_done(pair), pair, Opcode.BIND_MW, WCOpcode.BIND_MW, wr_id=8)
    return wr.rkey


def _invalidate(pair: Loopback, rkey: int) -> None:
    binder(pair).qp.post_send(LocalInv(invalidate_rkey=rkey, wr_id=9))
    _managed(_done(pair), pair, Opcode.LOCAL_INV, WCOpcode.LOCAL_INV, wr_id=9)


def _done(pair: Loopback) -> list[WC]:
    return pair.sent() if binder(pair) is pair.local else pair.arrived()


def _bound_already(pair: Loopback, window: MW) -> None:
    """Check that a window is bound, by binding it again, which must fail.

    This puts the queue pair into an error state.
    """
    binder(pair).qp.post_send(bind_wr(pair, window, MARGIN, pair.local.mr.length, wr_id=8))
    (wc,) = _done(pair)
    if wc.status is WCStatus.SUCCESS:
        raise Failed("a type 2 window that was already bound could be bound again")


def _managed(
    wcs: Iterable[WC], pair: Loopback, opcode: Opcode, expected: WCOpcode, *, wr_id: int
) -> None:
    """Check the completion of an operation on keys."""
    (wc,) = wcs = list(wcs)
    if pair.local.qp.qp_type is QPType.UC and wc.status in _UNKNOWN_OPCODE:
        # ibv_post_send(3) allows these on UC; the InfiniBand specification makes them optional
        # there, and has no UC packet for SEND_WITH_INV.
        device = pair.local.cq.context.name
        raise Unsupported(f"{device} refuses {opcode.name} on UC ({wc.status.name})")
    completed(wcs, expected, wr_id=wr_id)


# ---- what a key permits -----------------------------------------------------


def _refused(pair: Loopback, rkey: int) -> None:
    """Check that a write with this key is refused."""
    if admitted(pair, rkey, MARGIN):
        raise Failed("a write with an invalid key succeeded")


def admitted(pair: Loopback, rkey: int, offset: int) -> bool:
    """Try a write with a key, and return whether it succeeded; a refusal puts an RC pair into ERR.

    Args:
        pair: the queue pairs, with 16 bytes of local memory or more.
        rkey: the key.
        offset: where in the remote memory to write 16 bytes; the memory's last byte must not be
            among them.

    Raises:
        Failed: the result is unknown or contradictory.
    """
    # Look only at these bytes, because the regions may be gigabytes long.
    written = pair.remote.mr.buffer[offset : offset + _PROBE]
    before = bytes(written)
    pair.local.mr.buffer[:_PROBE] = random.randbytes(_PROBE)
    pair.local.qp.post_send(
        RdmaWrite(sg_list=pair.local.mr[:_PROBE], wr_id=10, **pair.target(offset, rkey))
    )
    (wc,) = pair.sent()
    if pair.local.qp.qp_type is QPType.UC:
        _wait_behind(pair)
    elif wc.status not in (WCStatus.SUCCESS, WCStatus.REM_ACCESS_ERR):
        raise Failed(f"a write ended with {wc.status.name}, not SUCCESS or REM_ACCESS_ERR")
    changed = written != before
    if not changed and wc.status is WCStatus.SUCCESS and pair.local.qp.qp_type is not QPType.UC:
        raise Failed("a write succeeded but did not arrive")
    return changed


def _wait_behind(pair: Loopback) -> None:
    """Wait until the write under test on UC is done.

    UC acknowledges nothing, so post a permitted write after it: when the data of that write has
    arrived, the write under test is done.
    """
    if _broken(pair):
        return
    end = pair.remote.mr.length - 1
    last = bytes([pair.remote.mr.buffer[end] ^ 0xFF])
    pair.local.mr.buffer[-1:] = last
    pair.local.qp.post_send(RdmaWrite(sg_list=pair.local.mr[-1:], **pair.target(end)))
    completed(pair.sent(), WCOpcode.RDMA_WRITE, wr_id=0)
    if not pair.settled(last, end) and not _broken(pair):
        raise Failed("a permitted write, posted after one with the key under test, did not arrive")


def _broken(pair: Loopback) -> bool:
    # A device may put the queue pair into ERR on a violation that it cannot NAK.
    return pair.remote.qp.state is QPState.ERR

"""Loopback checks: post every opcode on every QP type and look at what it did.

A row passes only when the bytes arrived where they should and nowhere else, an
atomic's values are right, or a key works or is refused as it must be; a
completion alone proves nothing.  A row is unsupported only for what the device
(or this package, which then says so) cannot do; everything else that goes wrong
is a failure, a wait that ends without a result too.
"""

from __future__ import annotations

import errno
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from .completion import CQ, WC
from .device import Context
from .enums import (
    Access,
    DeviceCap,
    Opcode,
    QPState,
    QPType,
    WCFlags,
    WCOpcode,
    WCStatus,
)
from .errors import RdmaError, VerbsError
from .loopback import Loopback
from .memory import PD
from .queuepair import QP
from .rules import OPCODES_BY_QP_TYPE
from .wr import (
    AtomicCmpAndSwp,
    AtomicFetchAndAdd,
    BindMW,
    LocalInv,
    RdmaRead,
    RdmaWrite,
    RdmaWriteWithImm,
    Send,
    SendWithImm,
    SendWithInv,
    SendWR,
)

__all__ = ["ROWS", "Result", "Row", "Trial", "run_checks"]

_QP_TYPES = (QPType.RC, QPType.UC, QPType.UD, QPType.XRC_SEND, QPType.RAW_PACKET)
_NOT_THERE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
_NOT_CREATED = _NOT_THERE | {errno.EINVAL, errno.EPROTONOSUPPORT}

_IMM = 0x12345678
_MARGIN = 32
_UNTOUCHED = 0xA5


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one check.

    Attributes:
        opcode: the operation's name.
        qp_type: the QP type's name.
        status: how it went.
        detail: what was seen, or why it failed or is not supported.
    """

    opcode: str
    qp_type: str
    status: Literal["pass", "fail", "unsupported"]
    detail: str


@dataclass(frozen=True, slots=True)
class Row:
    """A check that can be run on some QP types.

    Attributes:
        opcode: the operation's name.
        qp_types: those that have it.
        run: carries it out and returns what was seen.
    """

    opcode: str
    qp_types: tuple[QPType, ...]
    run: Callable[[Trial], str]


ROWS: list[Row] = []
"""Every check, in the order in which they run."""


class _Failed(Exception):
    """The device did something else than it should."""


class _Unsupported(Exception):
    """The device cannot do this."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Where a check runs.

    Attributes:
        context: the device.
        qp_type: the type of queue pair.
        port_num, gid_index, timeout: as in Loopback.
        caps: device_cap_flags.
        length: bytes of a message: several packets where the type allows it.
    """

    context: Context
    qp_type: QPType
    port_num: int
    gid_index: int | None
    timeout: float
    caps: DeviceCap = field(init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        mtu = self.context.query_port(self.port_num).active_mtu.bytes
        length = mtu if self.qp_type is QPType.UD else 3 * mtu + 5
        object.__setattr__(self, "length", length)
        object.__setattr__(self, "caps", self.context.attr.device_cap_flags)

    def loopback(self, **options: Any) -> Loopback:
        """Make the pair of queue pairs, with random bytes here and known ones there."""
        pair = Loopback(
            self.context,
            self.qp_type,
            local_size=self.length,
            remote_size=self.length + 2 * _MARGIN,
            port_num=self.port_num,
            gid_index=self.gid_index,
            timeout=self.timeout,
            **options,
        )
        pair.local.mr.buffer[:] = random.randbytes(self.length)
        pair.remote.mr.buffer[:] = bytes([_UNTOUCHED]) * pair.remote.mr.length
        return pair


def run_checks(
    context: Context,
    *,
    port_num: int = 1,
    gid_index: int | None = None,
    timeout: float = 5.0,
) -> Iterator[Result]:
    """Run every check, and yield each result as it is known.

    Args:
        context: an open device.
        port_num: the port, from 1.
        gid_index: the GID; chosen by choose_gid unless given.
        timeout: seconds for each check.

    Raises:
        ValueError: the device has no such port.
        VerbsError: the device's port cannot be asked.
    """
    trials = {t: Trial(context, t, port_num, gid_index, timeout) for t in _QP_TYPES}
    missing = {t: _attempt(_require_type, trials[t]) for t in _QP_TYPES}
    for row in ROWS:
        for qp_type in row.qp_types:
            status, detail = missing[qp_type]
            if status == "pass":
                status, detail = _attempt(row.run, trials[qp_type])
            yield Result(row.opcode, qp_type.name, status, detail)


def _attempt(
    run: Callable[[Trial], str], trial: Trial
) -> tuple[Literal["pass", "fail", "unsupported"], str]:
    """Run one check; whatever goes wrong in it, the others still run."""
    try:
        return "pass", run(trial)
    except _Unsupported as why:
        return "unsupported", str(why)
    except _Failed as why:
        return "fail", str(why)
    except VerbsError as error:
        unsupported = error.errno in _NOT_THERE
        return "unsupported" if unsupported else "fail", str(error)
    except RdmaError as error:
        return "fail", str(error)
    except Exception as error:
        return "fail", f"{type(error).__name__}: {error}"


def _check(opcode: Opcode) -> Callable[[Callable[[Trial], str]], Callable[[Trial], str]]:
    """Register a check for the QP types that have the opcode."""
    qp_types = tuple(t for t in _QP_TYPES if opcode in OPCODES_BY_QP_TYPE[t])

    def register(run: Callable[[Trial], str]) -> Callable[[Trial], str]:
        ROWS.append(Row(opcode.name, qp_types, run))
        return run

    return register


# ---- what the device has ----------------------------------------------------


def _require_type(trial: Trial) -> str:
    """Raise _Unsupported where the device has no queue pairs of the type."""
    name, qp_type = trial.context.name, trial.qp_type
    if qp_type is QPType.XRC_SEND:
        if not trial.caps & DeviceCap.XRC:
            raise _Unsupported(f"{name} has no XRC queue pairs")
        raise _Unsupported("rdmapost cannot create XRC queue pairs yet")
    try:
        with PD(trial.context) as pd, CQ(trial.context, 2) as cq:
            QP(pd, qp_type, cq, max_send_wr=1, max_recv_wr=1, max_send_sge=1, max_recv_sge=1,
               port_num=trial.port_num).close()  # fmt: skip
    except VerbsError as error:
        code = error.errno or 0
        if qp_type is QPType.RAW_PACKET and code in (errno.EPERM, errno.EACCES):
            raise _Unsupported("RAW_PACKET queue pairs need CAP_NET_RAW: run as root") from None
        if error.call == "ibv_create_qp" and code in _NOT_CREATED:
            raise _Unsupported(
                f"{name} has no {qp_type.name} queue pairs "
                f"(ibv_create_qp: {errno.errorcode.get(code, code)})"
            ) from None
        raise
    if qp_type is QPType.RAW_PACKET:
        raise _Unsupported("rdmapost cannot check RAW_PACKET queue pairs yet")
    return f"{name} has {qp_type.name} queue pairs"


def _require_atomics(trial: Trial) -> None:
    if not trial.context.attr.atomic_cap:
        raise _Unsupported(f"{trial.context.name} has no atomics")


def _require_windows(trial: Trial) -> None:
    if not trial.caps & (DeviceCap.MEM_WINDOW_TYPE_2A | DeviceCap.MEM_WINDOW_TYPE_2B):
        raise _Unsupported(f"{trial.context.name} has no type 2 memory windows")


def _require_invalidation(trial: Trial) -> None:
    _require_windows(trial)
    if not trial.caps & DeviceCap.MEM_MGT_EXTENSIONS:
        raise _Unsupported(f"{trial.context.name} cannot invalidate keys")


# ---- messages ---------------------------------------------------------------


@_check(Opcode.SEND)
def _send(trial: Trial) -> str:
    return _message(trial, lambda **fields: Send(**fields))


@_check(Opcode.SEND_WITH_IMM)
def _send_with_imm(trial: Trial) -> str:
    return _message(trial, lambda **fields: SendWithImm(imm_data=_IMM, **fields), imm_data=_IMM)


def _message(trial: Trial, make: Callable[..., SendWR], imm_data: int | None = None) -> str:
    with trial.loopback() as pair:
        room = trial.length + _MARGIN
        pair.receive(room)
        pair.local.qp.post_send(make(sg_list=pair.local.mr[:], wr_id=7, **pair.address))
        _completed(pair.sent(), WCOpcode.SEND, wr_id=7)
        wc = _completed(pair.arrived(), WCOpcode.RECV, wr_id=1)
        _same("byte_len", wc.byte_len, pair.headroom + trial.length)
        _same("imm_data", wc.imm_data, imm_data)
        _same_bytes("message", pair.received(trial.length, room=room), pair.local.mr.buffer)
        _unharmed(pair, pair.headroom, trial.length)
    return f"{trial.length} bytes arrived" + ("" if imm_data is None else " with immediate data")


# ---- remote memory ----------------------------------------------------------


@_check(Opcode.RDMA_WRITE)
def _rdma_write(trial: Trial) -> str:
    with trial.loopback() as pair:
        # A receive that the write must not consume.
        pair.receive(trial.length)
        _write(pair, offset=_MARGIN, **pair.target(_MARGIN))
        _unharmed(pair, _MARGIN, trial.length)
        if pair.remote.cq.poll():
            raise _Failed("the write completed a receive")
    return f"{trial.length} bytes written"


@_check(Opcode.RDMA_WRITE_WITH_IMM)
def _rdma_write_with_imm(trial: Trial) -> str:
    with trial.loopback() as pair:
        pair.receive(0)
        pair.local.qp.post_send(
            RdmaWriteWithImm(
                sg_list=pair.local.mr[:], wr_id=7, imm_data=_IMM, **pair.target(_MARGIN)
            )
        )
        _completed(pair.sent(), WCOpcode.RDMA_WRITE, wr_id=7)
        wc = _completed(pair.arrived(), WCOpcode.RECV_RDMA_WITH_IMM, wr_id=1)
        _same("byte_len", wc.byte_len, trial.length)
        _same("imm_data", wc.imm_data, _IMM)
        _same_bytes("remote memory", _at(pair, _MARGIN, trial.length), pair.local.mr.buffer)
        _unharmed(pair, _MARGIN, trial.length)
    return f"{trial.length} bytes written, with immediate data"


@_check(Opcode.RDMA_READ)
def _rdma_read(trial: Trial) -> str:
    with trial.loopback() as pair:
        wanted = random.randbytes(trial.length)
        pair.remote.mr.buffer[_MARGIN : _MARGIN + trial.length] = wanted
        pair.local.qp.post_send(RdmaRead(sg_list=pair.local.mr[:], wr_id=7, **pair.target(_MARGIN)))
        wc = _completed(pair.sent(), WCOpcode.RDMA_READ, wr_id=7)
        _same("byte_len", wc.byte_len, trial.length)
        _same_bytes("local memory", bytes(pair.local.mr.buffer), wanted)
        _same_bytes("remote memory", _at(pair, _MARGIN, trial.length), wanted)
        _unharmed(pair, _MARGIN, trial.length)
    return f"{trial.length} bytes read"


@_check(Opcode.ATOMIC_CMP_AND_SWP)
def _compare_and_swap(trial: Trial) -> str:
    _require_atomics(trial)
    first, second = 0x1122334455667788, 0x99AABBCCDDEEFF00
    with trial.loopback() as pair:
        pair.remote.mr.buffer[:8] = first.to_bytes(8, sys.byteorder)
        for compare, after in ((second, first), (first, second)):
            wr = AtomicCmpAndSwp(compare_add=compare, swap=second, **pair.target())
            _atomic(pair, wr, WCOpcode.COMP_SWAP, before=first, after=after)
    return "swapped when equal, left alone when not"


@_check(Opcode.ATOMIC_FETCH_AND_ADD)
def _fetch_and_add(trial: Trial) -> str:
    _require_atomics(trial)
    first = (1 << 64) - 3
    with trial.loopback() as pair:
        pair.remote.mr.buffer[:8] = first.to_bytes(8, sys.byteorder)
        for before, after in ((first, 2), (2, 7)):
            wr = AtomicFetchAndAdd(compare_add=5, **pair.target())
            _atomic(pair, wr, WCOpcode.FETCH_ADD, before=before, after=after)
    return "added twice, once past 2^64"


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
    _completed(pair.sent(), opcode, wr_id=7)
    _same("old value", int.from_bytes(pair.local.mr.buffer[:8], sys.byteorder), before)
    _same("new value", int.from_bytes(_at(pair, 0, 8), sys.byteorder), after)
    _unharmed(pair, 0, 8)


# ---- keys -------------------------------------------------------------------


@_check(Opcode.BIND_MW)
def _bind_mw(trial: Trial) -> str:
    _require_windows(trial)
    with trial.loopback(access=_WINDOW_REGION) as pair:
        _refused(pair, _through(pair, pair.window().next_rkey()))
    with trial.loopback(access=_WINDOW_REGION) as pair:
        rkey = _bind(pair)
        _write(pair, offset=_MARGIN, **_through(pair, rkey))
        outside = {"remote_addr": pair.remote.mr.addr + _MARGIN - 1, "rkey": rkey}
        # Soft-RoCE looks at the bounds of the region and not at the window's.
        bounded = not _admitted(pair, outside)
    return "the key is good when bound, refused before" + (
        ", refused outside the window"
        if bounded
        else f"; {trial.context.name} does not keep to the window's bounds"
    )


@_check(Opcode.LOCAL_INV)
def _local_inv(trial: Trial) -> str:
    _require_invalidation(trial)
    with trial.loopback(access=_WINDOW_REGION) as pair:
        rkey = _bind(pair)
        _write(pair, offset=_MARGIN, **_through(pair, rkey))
        pair.remote.qp.post_send(LocalInv(invalidate_rkey=rkey, wr_id=9))
        _managed(pair.arrived(), pair, Opcode.LOCAL_INV, WCOpcode.LOCAL_INV, wr_id=9)
        _refused(pair, _through(pair, rkey))
    return "the key is good when bound, refused afterwards"


@_check(Opcode.SEND_WITH_INV)
def _send_with_inv(trial: Trial) -> str:
    _require_invalidation(trial)
    with trial.loopback(access=_WINDOW_REGION) as pair:
        rkey = _bind(pair)
        _write(pair, offset=_MARGIN, **_through(pair, rkey))
        pair.receive(trial.length)
        pair.local.mr.buffer[:] = random.randbytes(trial.length)
        pair.local.qp.post_send(
            SendWithInv(sg_list=pair.local.mr[:], invalidate_rkey=rkey, wr_id=7)
        )
        _managed(pair.sent(), pair, Opcode.SEND_WITH_INV, WCOpcode.SEND, wr_id=7)
        wc = _completed(pair.arrived(), WCOpcode.RECV, wr_id=1)
        # Soft-RoCE sets another bit than WITH_INV in the completion.
        told = bool(wc.wc_flags & WCFlags.WITH_INV)
        if told:
            _same("invalidated_rkey", wc.invalidated_rkey, rkey)
        _same_bytes("message", pair.received(trial.length), pair.local.mr.buffer)
        _refused(pair, _through(pair, rkey))
    return f"{trial.length} bytes arrived and the key is refused afterwards" + (
        "" if told else f"; {trial.context.name} does not name it in the receive's completion"
    )


@_check(Opcode.TSO)
def _tso(trial: Trial) -> str:
    # The device is asked by ibv_query_device_ex, and the queue pair needs
    # max_tso_header of ibv_create_qp_ex.
    raise _Unsupported("rdmapost cannot create queue pairs for TSO yet (max_tso_header)")


_NOT_KNOWN = frozenset({WCStatus.LOC_QP_OP_ERR, WCStatus.WR_FLUSH_ERR})
"""How a queue pair that works says that it does not know an opcode; rxe 6.12 flushes it."""

_WINDOW_REGION = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.MW_BIND


def _bind(pair: Loopback) -> int:
    """Bind a window of the remote side to part of its memory; return the rkey."""
    window, region = pair.window(), pair.remote.mr
    rkey = window.next_rkey()
    pair.remote.qp.post_send(
        BindMW(
            mw=window,
            rkey=rkey,
            mr=region,
            addr=region.addr + _MARGIN,
            length=pair.local.mr.length,
            mw_access_flags=Access.REMOTE_WRITE,
            wr_id=8,
        )
    )
    _managed(pair.arrived(), pair, Opcode.BIND_MW, WCOpcode.BIND_MW, wr_id=8)
    return rkey


def _through(pair: Loopback, rkey: int) -> dict[str, Any]:
    return {"remote_addr": pair.remote.mr.addr + _MARGIN, "rkey": rkey}


def _managed(
    wcs: Iterable[WC], pair: Loopback, opcode: Opcode, expected: WCOpcode, *, wr_id: int
) -> None:
    """Check the completion of an operation on keys."""
    (wc,) = wcs = list(wcs)
    if pair.local.qp.qp_type is QPType.UC and wc.status in _NOT_KNOWN:
        # The man page has it on UC; InfiniBand makes it optional there, and has
        # no packet at all for a send with invalidate.
        device = pair.local.cq.context.name
        raise _Unsupported(f"{device} refuses {opcode.name} on UC ({wc.status.name})")
    _completed(wcs, expected, wr_id=wr_id)


def _refused(pair: Loopback, target: dict[str, Any]) -> None:
    """Check that a write with this key does not go in."""
    if _admitted(pair, target):
        raise _Failed("a write with a key that is not valid went in")


def _admitted(pair: Loopback, target: dict[str, Any]) -> bool:
    """Try a write with a key, and say whether it went in; if not, an RC pair is broken."""
    before = bytes(pair.remote.mr.buffer)
    pair.local.mr.buffer[:] = random.randbytes(pair.local.mr.length)
    pair.local.qp.post_send(RdmaWrite(sg_list=pair.local.mr[0:16], wr_id=10, **target))
    (wc,) = pair.sent()
    if pair.local.qp.qp_type is QPType.UC:
        before = _wait_behind(pair, before)
    elif wc.status not in (WCStatus.SUCCESS, WCStatus.REM_ACCESS_ERR):
        raise _Failed(f"a write that may be refused access ended with {wc.status.name}")
    changed = bytes(pair.remote.mr.buffer) != before
    if not changed and wc.status is WCStatus.SUCCESS and pair.local.qp.qp_type is not QPType.UC:
        raise _Failed("a write succeeded and did not arrive")
    return changed


def _wait_behind(pair: Loopback, before: bytes) -> bytes:
    """Wait until what was posted on UC is over, and return what memory should hold else.

    Nothing is answered there; a write that may go in, sent behind, shows it.
    """
    if _broken(pair):
        return before
    end = pair.remote.mr.length - 1
    last = bytes([before[end] ^ 0xFF])
    pair.local.mr.buffer[-1:] = last
    pair.local.qp.post_send(RdmaWrite(sg_list=pair.local.mr[-1:], **pair.target(end)))
    _completed(pair.sent(), WCOpcode.RDMA_WRITE, wr_id=0)
    if pair.settled(last, end):
        return before[:end] + last
    if _broken(pair):
        return before
    raise _Failed("nothing arrives any more after a write that may be refused access")


def _broken(pair: Loopback) -> bool:
    # What a device may do on a violation that it cannot answer.
    return pair.remote.qp.state is QPState.ERR


# ---- looking ----------------------------------------------------------------


def _write(pair: Loopback, *, offset: int, remote_addr: int, rkey: int) -> None:
    """Write the local memory, and check that it stands at the offset of the remote."""
    pair.local.qp.post_send(
        RdmaWrite(sg_list=pair.local.mr[:], wr_id=7, remote_addr=remote_addr, rkey=rkey)
    )
    _completed(pair.sent(), WCOpcode.RDMA_WRITE, wr_id=7)
    length = pair.local.mr.length
    # Only an acknowledged write has arrived when it completes.
    if pair.local.qp.qp_type is not QPType.UC or not pair.settled(
        bytes(pair.local.mr.buffer), offset
    ):
        _same_bytes("remote memory", _at(pair, offset, length), pair.local.mr.buffer)


def _at(pair: Loopback, offset: int, length: int) -> bytes:
    return bytes(pair.remote.mr.buffer[offset : offset + length])


def _completed(wcs: Iterable[WC], opcode: WCOpcode, *, wr_id: int) -> WC:
    (wc,) = wcs
    if wc.status is not WCStatus.SUCCESS:
        vendor = f" (vendor_err {wc.vendor_err:#x})" if wc.vendor_err else ""
        raise _Failed(f"{opcode.name} ended with {wc.status.name}{vendor}")
    _same("wr_id", wc.wr_id, wr_id)
    if wc.opcode is not opcode:
        found = "an unknown opcode" if wc.opcode is None else wc.opcode.name
        raise _Failed(f"the completion says {found} and not {opcode.name}")
    return wc


def _same(what: str, found: int | None, expected: int | None) -> None:
    if found != expected:
        raise _Failed(f"{what} is {_number(found)} and not {_number(expected)}")


def _number(value: int | None) -> str:
    return "missing" if value is None else f"{value:#x}"


def _same_bytes(what: str, found: bytes, expected: bytes | memoryview) -> None:
    if found == expected:
        return
    wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    raise _Failed(
        f"{what}: {len(wrong)} of {len(expected)} bytes are wrong, the first at {wrong[0]}"
    )


def _unharmed(pair: Loopback, offset: int, length: int) -> None:
    """Check that the remote memory is untouched but for a range and the GRH."""
    memory = pair.remote.mr.buffer
    outside = bytes(memory[pair.headroom : offset]) + bytes(memory[offset + length :])
    if outside.strip(bytes([_UNTOUCHED])):
        raise _Failed("bytes outside the range were changed")

"""The queue pairs and windows of a program, and the keys that its work requests name."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, Self

from support.wr_classes import SEND_CLASSES

import rdmapost as rp
from rdmapost import Access, QPState, QPType, SendFlags

from .bench import Bench
from .model import WINDOWS, At, Post, Program, R, Sge, W

__all__ = ["MAX_INLINE", "MAX_SGE", "Stage"]

MAX_SGE = 4
MAX_INLINE = 16 * MAX_SGE
"""Soft-RoCE keeps inline data in the place of the SGEs, and grants the same space for both."""

QKEY = 0x1111_1111

_TIMEOUT = 15
"""134 ms. When a message has found no receive, Soft-RoCE counts the NAK of the next message as a
retry. If this timer also expires before it resends, the message ends with the wrong error."""
_SHORTEST = 1
"""The shortest value of both timers: the soft device loses nothing, and no receive is posted during
a wait."""

_LETTERS = {"R": Access.REMOTE_READ, "W": Access.REMOTE_WRITE, "A": Access.REMOTE_ATOMIC}
_WR = {cls.opcode.name: cls for cls in SEND_CLASSES}


def _access(letters: str) -> Access:
    access = Access(0)
    for letter in letters:
        access |= _LETTERS[letter]
    return access


class Stage:
    """A program's queue pairs and windows.

    Attributes:
        program: the program.
        bench: the device and its regions.
        qps: the queue pairs.
        receives: by queue pair, the receives that are posted and not completed.
        bound: by window, the queue pair that it is bound on, or None.
        range_of: by window, the offset and length that it was bound to.
        silent: by queue pair, unsignaled work requests that no later completion covers.
    """

    def __init__(self, program: Program, bench: Bench) -> None:
        self.program = program
        self.bench = bench
        self.qps: list[rp.QP] = []
        self.receives: list[deque[tuple[int, R]]] = []
        self.bound: dict[str, int | None] = dict.fromkeys(WINDOWS)
        self.range_of: dict[str, tuple[int, int]] = {}
        self.silent: list[int] = []
        self._srqs: list[rp.SRQ | None] = []
        self._windows: dict[str, rp.MW] = {}
        self._rkeys: dict[str, list[int]] = {}
        self._index_of: dict[int, int] = {}
        self._stack = contextlib.ExitStack()

    # ---- set up, and down ---------------------------------------------------

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._stack = stack
            for pair in self.program.pairs:
                for end in (pair.a, pair.b):
                    self._make(pair.type, end)
            self._connect()
            for name in self._windows_used():
                self._windows[name] = rp.MW(self.bench.pds[WINDOWS[name]])
                self._rkeys[name] = [self._windows[name].rkey]
            # Close windows first: rxe takes 50 s to destroy a queue pair that has one.
            stack.callback(self._close_windows)
            self._stack = stack.pop_all()
        self.bench.fill()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.bench.cq.poll(1024)

    def _make(self, qp_type: str, end: Any) -> None:
        bench, stack = self.bench, self._stack
        srq = None
        if end.srq:
            srq = stack.enter_context(rp.SRQ(bench.pds[0], end.depth, MAX_SGE, checked=end.checked))
        qp = stack.enter_context(
            rp.QP(
                bench.pds[0],
                QPType[qp_type],
                bench.cq,
                srq=srq,
                max_send_wr=end.depth,
                max_recv_wr=end.depth,
                max_send_sge=MAX_SGE,
                max_recv_sge=MAX_SGE,
                max_inline_data=MAX_INLINE,
                sq_sig_all=end.sq_sig_all,
                checked=end.checked,
            )
        )
        self._index_of[qp.qp_num] = len(self.qps)
        self.qps.append(qp)
        self._srqs.append(srq)
        self.receives.append(deque())
        self.silent.append(0)

    def _connect(self) -> None:
        # With modify(), because connect() would query the same GID each time.
        for index, qp in enumerate(self.qps):
            end, pair = self.program.end(index), self.program.pairs[index // 2]
            peer = self.qps[index ^ 1]
            init: dict[str, Any] = {"port_num": 1, "pkey_index": 0}
            rtr: dict[str, Any] = {}
            rts: dict[str, Any] = {"sq_psn": qp.psn}
            if pair.type == "UD":
                init["qkey"] = QKEY
            else:
                access = _access(end.access)
                init["qp_access_flags"] = (
                    access if pair.type == "RC" else access & Access.REMOTE_WRITE
                )
                rtr = {
                    "ah_attr": self.bench.path,
                    "path_mtu": self.bench.mtu,
                    "dest_qp_num": peer.qp_num,
                    "rq_psn": peer.psn,
                }
            if pair.type == "RC":
                rtr |= {"min_rnr_timer": _SHORTEST, "max_dest_rd_atomic": 16}
                rts |= {
                    "timeout": _SHORTEST if self.bench.soft else _TIMEOUT,
                    "retry_cnt": 1,
                    "rnr_retry": pair.rnr_retry,
                    "max_rd_atomic": 16,
                }
            qp.modify(qp_state=QPState.INIT, **init)
            if end.state != "INIT":
                qp.modify(qp_state=QPState.RTR, **rtr)
            if end.state == "RTS":
                qp.modify(qp_state=QPState.RTS, **rts)

    def _windows_used(self) -> list[str]:
        wrs = [wr for step in self.program.steps if isinstance(step, Post) for wr in step.wrs]
        named = {key.partition(":")[0] for wr in wrs for key in (wr.key, wr.mw)}
        named |= {wr.at.key.partition(":")[0] for wr in wrs if wr.at is not None}
        return [name for name in WINDOWS if name in named]

    def _close_windows(self) -> None:
        if not self._windows:
            return
        for qp in self.qps:
            # Outstanding work requests may refer to a window.
            qp.to_reset()
        for window in self._windows.values():
            window.close()

    # ---- work requests ------------------------------------------------------

    def key(self, name: str, *, local: bool = False) -> int:
        """Return the number of a key."""
        owner, _, how = name.partition(":")
        if owner == "none":
            return 0
        if owner == "gone":
            return self.bench.gone
        if owner in self._windows:
            rkeys = self._rkeys[owner]
            if how == "stale" and len(rkeys) > 1:
                return rkeys[-2]
            return rkeys[-1] ^ (0x55 if how else 0)
        region = self.bench.regions[owner]
        return (region.lkey if local else region.rkey) ^ (0x55 if how else 0)

    def _sges(self, sges: tuple[Sge, ...]) -> list[rp.SGE]:
        found = []
        for sge in sges:
            region = self.bench.regions[sge.region]
            end = sge.offset + sge.length
            if not sge.key and end <= region.length:
                found.append(region[sge.offset : end])
            else:
                key = self.key(sge.key or sge.region, local=True)
                found.append(rp.SGE(region.addr + sge.offset, sge.length, key))
        return found

    def _send_wr(self, wr_id: int, qp: int, wr: W) -> rp.SendWR:
        flags = SendFlags(0) if "UNSIGNALED" in wr.flags else SendFlags.SIGNALED
        for name in wr.flags:
            if name not in ("UNSIGNALED", "BAD_QKEY"):
                flags |= SendFlags[name]
        fields: dict[str, Any] = {"wr_id": wr_id, "send_flags": int(flags)}
        op = wr.op
        if op == "BIND_MW":
            return self._bind_wr(qp, wr, fields)
        if op != "LOCAL_INV":
            fields["sg_list"] = self._sges(wr.sges)
        if op in ("LOCAL_INV", "SEND_WITH_INV"):
            fields["invalidate_rkey"] = self.key(wr.key)
        if op.endswith("WITH_IMM"):
            fields["imm_data"] = wr.imm
        if op.startswith(("RDMA", "ATOMIC")):
            at = wr.at or At("b", 0)
            fields["remote_addr"] = self.bench.regions[at.region].addr + at.offset
            fields["rkey"] = self.key(at.key or at.region)
        if op.startswith("ATOMIC"):
            fields["compare_add"] = wr.compare
        if op == "ATOMIC_CMP_AND_SWP":
            fields["swap"] = wr.swap
        if self.program.type_of(qp) == "UD" and op in ("SEND", "SEND_WITH_IMM"):
            fields["ah"] = self.bench.ah
            fields["remote_qpn"] = self.qps[qp ^ 1].qp_num
            fields["remote_qkey"] = QKEY + ("BAD_QKEY" in wr.flags)
        return _WR[op](**fields)

    def _bind_wr(self, qp: int, wr: W, fields: dict[str, Any]) -> rp.SendWR:
        window, rkeys = self._windows[wr.mw], self._rkeys[wr.mw]
        region = self.bench.regions[(wr.at or At("b", 0)).region]
        rkey = rkeys[-1] & ~0xFF | (rkeys[-1] + 1) & 0xFF
        # Drivers read the window's current key from the struct.
        window._handle.rkey = rkeys[-1]
        rkeys.append(rkey)
        return rp.BindMW(
            mw=window,
            rkey=rkey,
            mr=region,
            length=wr.length,
            addr=region.addr + (wr.at.offset if wr.at else 0),
            mw_access_flags=int(_access(wr.access)),
            **fields,
        )

    def _unbind(self, wr: W) -> None:
        """Drop the key of a bind that failed."""
        self._rkeys[wr.mw].pop()

    # ---- windows ------------------------------------------------------------

    def _watch_windows(self, qp: int, wr: W, status: str) -> None:
        if wr.op == "BIND_MW":
            if status != "SUCCESS":
                self._unbind(wr)
            else:
                self.bound[wr.mw] = qp
                self.range_of[wr.mw] = (wr.at or At("b", 0)).offset, wr.length
        elif wr.op == "LOCAL_INV" and status == "SUCCESS" and wr.key in self._windows:
            self.bound[wr.key] = None

    def _invalidated(self, rkey: int) -> None:
        for name, rkeys in self._rkeys.items():
            if rkeys[-1] == rkey:
                self.bound[name] = None

    def _name_of(self, rkey: int) -> str:
        for name, rkeys in self._rkeys.items():
            if rkey in rkeys:
                return f"{name}#{rkeys.index(rkey)}"
        for name, region in self.bench.regions.items():
            if rkey == region.rkey:
                return name
        return "?"

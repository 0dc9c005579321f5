"""Carrying out a program on a device.

A run waits after every step until all that the step set off is over, so that
programs are free of races.  On the soft device it can see that; on another one
it waits for as much as the soft device did.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import rdmapost as rp
from rdmapost import Access, QPState, QPType, SendFlags

from .bench import Bench
from .model import WINDOWS, At, Post, Program, R, Recv, Sge, Step, W
from .races import without_races
from .transcript import Done, Transcript, wr_id_of

if TYPE_CHECKING:
    from .deviations import Deviation

__all__ = ["MAX_INLINE", "MAX_SGE", "PATIENCE_S", "Run", "run"]

MAX_SGE = 4
MAX_INLINE = 16 * MAX_SGE
"""Soft-RoCE keeps inline data where the SGEs would be, and grants as much of one as of both."""

GRH = 40
QKEY = 0x1111_1111

_TIMEOUT = 15
"""134 ms. Soft-RoCE counts the NAK of what follows a message that found no receive as a retry, so
a timer that also expires while it waits to send that again ends it with the wrong error."""
_SHORTEST = 1
"""Of either timer: for the soft device, which loses nothing; and no receive comes to the rescue."""

PATIENCE_S = 4.0
"""How long an expected completion may take."""

_SILENT_S = 0.5
_DROP_S = 0.02
_LOOK_AGAIN_S = 0.0003

_LETTERS = {
    "R": Access.REMOTE_READ,
    "W": Access.REMOTE_WRITE,
    "A": Access.REMOTE_ATOMIC,
}
_WR = {
    cls.opcode.name: cls
    for cls in (
        rp.Send, rp.SendWithImm, rp.SendWithInv, rp.RdmaWrite, rp.RdmaWriteWithImm, rp.RdmaRead,
        rp.AtomicCmpAndSwp, rp.AtomicFetchAndAdd, rp.LocalInv, rp.BindMW,
    )
}  # fmt: skip
# What a receive work request of the peer's answers.
_CONSUMING = frozenset({"SEND", "SEND_WITH_IMM", "SEND_WITH_INV", "RDMA_WRITE_WITH_IMM"})
_COUNTED = frozenset({rp.WCOpcode.RDMA_READ, rp.WCOpcode.COMP_SWAP, rp.WCOpcode.FETCH_ADD})


def _access(letters: str) -> Access:
    access = Access(0)
    for letter in letters:
        access |= _LETTERS[letter]
    return access


def run(
    program: Program,
    bench: Bench,
    *,
    deviations: Iterable[Deviation] | None = None,
    expected: Transcript | None = None,
    patience: float = PATIENCE_S,
) -> Transcript:
    """Carry out a program.

    Args:
        program: the program.
        bench: where.
        deviations: make the program fit for a device that deviates so, and answer as
            it does; without them the program runs as it is.  Either way the
            transcript holds the program that was run.
        expected: what the soft device did; needed on any other.
        patience: how many seconds an expected completion may take.
    """
    with Run(program, bench, deviations, expected, patience) as under_way:
        return under_way.carry_out()


class Run:
    """A program under way.

    Attributes:
        program: what is run.
        bench: where.
        transcript: what has happened.
        steps: the steps so far.
        qps: the queue pairs.
        receives: by queue pair, the receives that are posted and not completed.
        bound: by window, the queue pair that it is bound on, or None.
        range_of: by window, the offset and length that it was bound to.
        silent: by queue pair, unsignaled work requests that no later completion covers.
    """

    def __init__(
        self,
        program: Program,
        bench: Bench,
        deviations: Iterable[Deviation] | None,
        expected: Transcript | None,
        patience: float,
    ) -> None:
        self.program = program
        self.bench = bench
        self.transcript = Transcript(program)
        self.steps: list[Step] = []
        self.qps: list[rp.QP] = []
        self.receives: list[deque[tuple[int, R]]] = []
        self.bound: dict[str, int | None] = dict.fromkeys(WINDOWS)
        self.range_of: dict[str, tuple[int, int]] = {}
        self.silent: list[int] = []
        self._fitting = deviations is not None
        self._deviations = tuple(deviations or ())
        self._expected = expected
        self._patience = patience
        self._srqs: list[rp.SRQ | None] = []
        self._windows: dict[str, rp.MW] = {}
        self._rkeys: dict[str, list[int]] = {}
        self._wrs: dict[int, tuple[int, W | R]] = {}
        self._index_of: dict[int, int] = {}
        self._count = 0
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
            # The windows go first: rxe takes 25 s to destroy a queue pair that has one.
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
                bench.pds[0], QPType[qp_type], bench.cq, srq=srq,
                max_send_wr=end.depth, max_recv_wr=end.depth,
                max_send_sge=MAX_SGE, max_recv_sge=MAX_SGE, max_inline_data=MAX_INLINE,
                sq_sig_all=end.sq_sig_all, checked=end.checked,
            )
        )  # fmt: skip
        self._index_of[qp.qp_num] = len(self.qps)
        self.qps.append(qp)
        self._srqs.append(srq)
        self.receives.append(deque())
        self.silent.append(0)

    def _connect(self) -> None:
        # By hand and not with connect(), which asks the device for the same GID each time.
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
                    "ah_attr": self.bench.path, "path_mtu": self.bench.mtu,
                    "dest_qp_num": peer.qp_num, "rq_psn": peer.psn,
                }  # fmt: skip
            if pair.type == "RC":
                rtr |= {"min_rnr_timer": _SHORTEST, "max_dest_rd_atomic": 16}
                rts |= {
                    "timeout": _SHORTEST if self.bench.soft else _TIMEOUT, "retry_cnt": 1,
                    "rnr_retry": pair.rnr_retry, "max_rd_atomic": 16,
                }  # fmt: skip
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
            # What is outstanding may name one.
            qp.to_reset()
        for window in self._windows.values():
            window.close()

    # ---- steps --------------------------------------------------------------

    def carry_out(self) -> Transcript:
        """Carry out the steps; return what happened."""
        waiting = deque(self.program.steps)
        while waiting:
            step = waiting.popleft()
            if self._fitting:
                step, *rest = self._fit(step) or (None,)
                if step is None:
                    continue
                waiting.extendleft(reversed(rest))
            number = len(self.steps)
            self.steps.append(step)
            self._do(number, step)
            self._settle(number, step)
            self._watch_silent_windows(number, step)
            if self._fitting:
                for deviation in self._deviations:
                    deviation.after(self)
                self._settle_soft()
            self._note(number, step)
        transcript = self.transcript
        if self._expected is not None:
            if transcript.refused != self._expected.refused:
                # More was posted than there, and takes a while.
                time.sleep(_DROP_S)
            self._take(self.bench.cq.poll())
        transcript.program = Program(self.program.pairs, tuple(self.steps))
        transcript.memory = self.bench.memory()
        if not transcript.states:
            # On a device that is compared only the last states are asked for.
            transcript.states.append(self._states())
        return transcript

    def _fit(self, step: Step) -> list[Step]:
        """Return the step as one or more that are free of races, and fit for the device."""
        steps = [step]
        for deviation in self._deviations:
            steps = [piece for one in steps for piece in deviation.fit(self, one)]
        # Last, because what a device cannot do may have kept two work requests in order.
        return [piece for one in steps for piece in without_races(self, one)]

    def _do(self, number: int, step: Step) -> None:
        try:
            if isinstance(step, Post):
                self._post(number, step)
            elif isinstance(step, Recv):
                self._post_receives(number, step)
            else:
                self.qps[step.qp].modify(qp_state=QPState[step.state])
        except (rp.VerbsError, ValueError) as error:
            code = getattr(error, "errno", None) or errno.EINVAL
            index = getattr(error, "index", None)
            self.transcript.refused[number] = (errno.errorcode[code], index)
            if isinstance(step, Post | Recv):
                self._forget(number, step, 0 if index is None else index)

    def _post(self, number: int, step: Post) -> None:
        wrs: list[Any] = []
        refusal = None
        for index, wr in enumerate(step.wrs):
            refusal = next(
                (code for d in self._deviations if (code := d.refuses(self, step.qp, wr))), None
            )
            if refusal:
                break
            wrs.append(self._send_wr(wr_id_of(number, index), step.qp, wr))
        self.qps[step.qp].post_send(wrs)
        if refusal:
            raise rp.PostError(
                "ibv_post_send", getattr(errno, refusal), "", index=len(wrs),
                posted=len(wrs), count=len(step.wrs),
            )  # fmt: skip

    def _post_receives(self, number: int, step: Recv) -> None:
        wrs = []
        for index, wr in enumerate(step.wrs):
            wr_id = wr_id_of(number, index)
            self._wrs[wr_id] = step.qp, wr
            self.receives[step.qp].append((wr_id, wr))
            wrs.append(rp.RecvWR(self._sges(wr.sges), wr_id=wr_id))
        srq = self._srqs[step.qp]
        if srq is None:
            self.qps[step.qp].post_recv(wrs)
        else:
            srq.post_srq_recv(wrs)

    def _forget(self, number: int, step: Post | Recv, index: int) -> None:
        """Take back what was noted about work requests that were not posted."""
        for at in range(index, len(step.wrs)):
            wr_id = wr_id_of(number, at)
            if wr_id not in self._wrs:
                continue
            del self._wrs[wr_id]
            wr = step.wrs[at]
            if isinstance(wr, R):
                self.receives[step.qp].pop()
            elif wr.op == "BIND_MW":
                self._unbind(wr)

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
        self._wrs[wr_id] = qp, wr
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
        # The struct holds what the window's key is now, and drivers send that along.
        window._handle.rkey = rkeys[-1]
        rkeys.append(rkey)
        return rp.BindMW(
            mw=window, rkey=rkey, mr=region, length=wr.length,
            addr=region.addr + (wr.at.offset if wr.at else 0),
            mw_access_flags=int(_access(wr.access)), **fields,
        )  # fmt: skip

    def _unbind(self, wr: W) -> None:
        """Take back the key of a bind that failed."""
        self._rkeys[wr.mw].pop()

    # ---- waiting ------------------------------------------------------------

    def _settle(self, number: int, step: Step) -> None:
        if self._expected is None:
            self._settle_soft()
            return
        expected = self._expected
        # What was refused here, and not there, does not complete.
        refused = number in self.transcript.refused and number not in expected.refused
        wanted = 0 if refused else expected.counts[number]
        deadline = time.monotonic() + self._patience
        while self._count < wanted and time.monotonic() < deadline:
            with contextlib.suppress(rp.WaitTimeout):
                self._take(self.bench.cq.wait(1, deadline - time.monotonic()))
        self._take(self.bench.cq.poll())
        if number in expected.memories:
            self._await_memory(expected, number)
        before = expected.states[number - 1] if number else None
        if expected.states[number] != before:
            deadline = time.monotonic() + _SILENT_S
            while self._states() != expected.states[number] and time.monotonic() < deadline:
                time.sleep(_LOOK_AGAIN_S)
        if self._unacknowledged(step) and self._may_go_on(number, step):
            time.sleep(_DROP_S)
            self._take(self.bench.cq.poll())

    def _settle_soft(self) -> None:
        deadline = time.monotonic() + self._patience
        while True:
            self._take(self.bench.cq.poll())
            if not self.bench.soft or not self.bench.busy():
                return
            if time.monotonic() > deadline:
                raise AssertionError("the soft device does not come to an end")
            time.sleep(_LOOK_AGAIN_S)

    def _unacknowledged(self, step: Step) -> TypeGuard[Post]:
        """Whether a step's sends say nothing, or nothing about their arrival."""
        if not isinstance(step, Post):
            return False
        if self.program.type_of(step.qp) != "RC":
            return True
        return "UNSIGNALED" in step.wrs[-1].flags and not self.program.end(step.qp).sq_sig_all

    def _await_memory(self, expected: Transcript, number: int) -> None:
        deadline = time.monotonic() + _SILENT_S
        content, undefined = expected.memories[number], expected.undefined()
        while time.monotonic() < deadline:
            if all(
                bytes(self.bench.regions[name].buffer) == bytes_ or undefined[name]
                for name, bytes_ in content.items()
            ):
                return
            time.sleep(_LOOK_AGAIN_S)
            self._take(self.bench.cq.poll())

    def _may_go_on(self, number: int, step: Post) -> bool:
        """Whether nothing tells that the last of a step's sends is over, or was dropped."""
        if self.program.type_of(step.qp) == "RC":
            return True
        expected = self._expected
        assert expected is not None
        if any(wr.op not in _CONSUMING for wr in step.wrs):
            return True
        # Each send has a completion here, where it is signaled, and one there.
        before = expected.counts[number - 1] if number else 0
        silent = 0 if self.program.end(step.qp).sq_sig_all else sum(
            "UNSIGNALED" in wr.flags for wr in step.wrs
        )  # fmt: skip
        return expected.counts[number] - before < 2 * len(step.wrs) - silent

    # ---- what happened ------------------------------------------------------

    def _states(self) -> tuple[str, ...]:
        return tuple(self.bench.state_of(qp) for qp in self.qps)

    def _note(self, number: int, step: Step) -> None:
        if isinstance(step, Post):
            self._count_silent(step)
        self.transcript.counts.append(self._count)
        if self._expected is not None:
            return
        self.transcript.states.append(self._states())
        if self._unacknowledged(step):
            self.transcript.memories[number] = self.bench.memory()

    def _count_silent(self, step: Post) -> None:
        for wr in step.wrs:
            quiet = "UNSIGNALED" in wr.flags and not self.program.end(step.qp).sq_sig_all
            self.silent[step.qp] = self.silent[step.qp] + 1 if quiet else 0

    def _take(self, wcs: list[rp.WC]) -> None:
        for wc in wcs:
            self._count += 1
            qp = self._index_of[wc.qp_num]
            owner, wr = self._wrs.get(wc.wr_id, (qp, R()))
            side = "recv" if isinstance(wr, R) else "send"
            name = f"qp{owner}.{side}"
            done = self._done(wc, qp, wr)
            for deviation in self._deviations:
                done = deviation.completes(self, qp, wr, done)
            self.transcript.queues.setdefault(name, []).append(done)

    def _done(self, wc: rp.WC, qp: int, wr: W | R) -> Done:
        status = wc.status.name
        if isinstance(wr, R):
            if self.receives[qp] and self.receives[qp][0][0] == wc.wr_id:
                self.receives[qp].popleft()
        else:
            self._watch_windows(qp, wr, status)
        if status != "SUCCESS":
            return Done(wc.wr_id, status)
        opcode = wc.opcode.name if wc.opcode is not None else ""
        if not isinstance(wr, R):
            counted = wc.opcode in _COUNTED
            return Done(wc.wr_id, status, opcode, wc.byte_len if counted else None)
        datagram = self.program.type_of(qp) == "UD"
        if datagram:
            self._blank_grh(wr)
        if wc.invalidated_rkey is not None:
            self._invalidated(wc.invalidated_rkey)
        return Done(
            wc.wr_id, status, opcode, wc.byte_len, wc.imm_data,
            "" if wc.invalidated_rkey is None else self._name_of(wc.invalidated_rkey),
            self._index_of.get(wc.src_qp) if datagram else None,
            datagram and bool(wc.wc_flags & rp.WCFlags.GRH),
        )  # fmt: skip

    def _watch_windows(self, qp: int, wr: W, status: str) -> None:
        if wr.op == "BIND_MW":
            if status != "SUCCESS":
                self._unbind(wr)
            else:
                self.bound[wr.mw] = qp
                self.range_of[wr.mw] = (wr.at or At("b", 0)).offset, wr.length
        elif wr.op == "LOCAL_INV" and status == "SUCCESS" and wr.key in self._windows:
            self.bound[wr.key] = None

    def _watch_silent_windows(self, number: int, step: Step) -> None:
        """Note what unsignaled work requests did; of one that fails there is a completion."""
        if not isinstance(step, Post) or number in self.transcript.refused:
            return
        for index, wr in enumerate(step.wrs):
            silent = "UNSIGNALED" in wr.flags and wr.op in ("BIND_MW", "LOCAL_INV")
            if silent and not self.transcript.status_of(wr_id_of(number, index)):
                self._watch_windows(step.qp, wr, "SUCCESS")

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

    def _blank_grh(self, wr: R) -> None:
        """Blank the GRH: it holds the addresses, which are the device's own."""
        left = GRH
        for sge in wr.sges:
            size = min(left, sge.length)
            view = self.bench.regions[sge.region].buffer
            view[sge.offset : sge.offset + size] = bytes(size)
            left -= size

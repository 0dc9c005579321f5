"""Running a program on a device.

After every step the run waits until everything that the step has started is over,
so that programs are free of races.  The soft device shows when that is; on another
device the run waits for as many completions as the soft device had.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import rdmapost as rp
from rdmapost import QPState

from .bench import Bench
from .model import Post, Program, R, Recv, Step, W
from .races import header_of, without_races
from .stage import Stage
from .transcript import Done, Transcript, wr_id_of

if TYPE_CHECKING:
    from .deviations import Deviation

__all__ = ["PATIENCE_S", "Run", "run"]

PATIENCE_S = 4.0
"""How long an expected completion may take."""

_SILENT_S = 0.5
_DROP_S = 0.02
_POLL_INTERVAL_S = 0.0003

# Opcodes that consume a receive of the peer.
_CONSUMING = frozenset({"SEND", "SEND_WITH_IMM", "SEND_WITH_INV", "RDMA_WRITE_WITH_IMM"})
_COUNTED = frozenset({rp.WCOpcode.RDMA_READ, rp.WCOpcode.COMP_SWAP, rp.WCOpcode.FETCH_ADD})


def run(
    program: Program,
    bench: Bench,
    *,
    deviations: Iterable[Deviation] | None = None,
    expected: Transcript | None = None,
    patience: float = PATIENCE_S,
) -> Transcript:
    """Run a program.

    Args:
        program: the program.
        bench: the device and its regions.
        deviations: change the program and its completions to suit a device with these
            deviations; None runs the program as it is.  Either way the transcript
            holds the program that was run.
        expected: the soft device's transcript; needed on any other device.
        patience: how many seconds an expected completion may take.
    """
    with Run(program, bench, deviations, expected, patience) as under_way:
        return under_way.carry_out()


class Run(Stage):
    """A program under way.

    Attributes:
        transcript: what has happened.
        steps: the steps so far.
    """

    def __init__(
        self,
        program: Program,
        bench: Bench,
        deviations: Iterable[Deviation] | None,
        expected: Transcript | None,
        patience: float,
    ) -> None:
        super().__init__(program, bench)
        self.transcript = Transcript(program)
        self.steps: list[Step] = []
        self._fitting = deviations is not None
        self._deviations = tuple(deviations or ())
        self._expected = expected
        self._patience = patience
        self._wrs: dict[int, tuple[int, W | R]] = {}
        self._count = 0

    # ---- steps --------------------------------------------------------------

    def carry_out(self) -> Transcript:
        """Run the steps; return the transcript."""
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
                # This device has accepted more, which may take a while.
                time.sleep(_DROP_S)
            self._take(self.bench.cq.poll())
        transcript.program = Program(self.program.pairs, tuple(self.steps))
        transcript.memory = self.bench.memory()
        if not transcript.states:
            # Of the device under comparison, only the last states are recorded.
            transcript.states.append(self._states())
        return transcript

    def _fit(self, step: Step) -> list[Step]:
        """Return the step as steps that suit the device and are free of races."""
        steps = [step]
        for deviation in self._deviations:
            steps = [piece for one in steps for piece in deviation.fit(self, one)]
        # Last, because a work request that a deviation removes may have kept two others in order.
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
            wr_id = wr_id_of(number, index)
            self._wrs[wr_id] = step.qp, wr
            wrs.append(self._send_wr(wr_id, step.qp, wr))
        self.qps[step.qp].post_send(wrs)
        if refusal:
            raise rp.PostError(
                "ibv_post_send",
                getattr(errno, refusal),
                "",
                index=len(wrs),
                posted=len(wrs),
                count=len(step.wrs),
            )

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
        """Remove the records of work requests that were not posted."""
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

    # ---- waiting ------------------------------------------------------------

    def _settle(self, number: int, step: Step) -> None:
        if self._expected is None:
            self._settle_soft()
            return
        expected = self._expected
        # If only this device refused the post, nothing completes.
        refused = number in self.transcript.refused and number not in expected.refused
        wanted = 0 if refused else expected.counts[number]
        if number in expected.refused and number not in self.transcript.refused:
            # If only the soft device refused it, it completes here.
            wanted += 1
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
                time.sleep(_POLL_INTERVAL_S)
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
            time.sleep(_POLL_INTERVAL_S)

    def _unacknowledged(self, step: Step) -> TypeGuard[Post]:
        """Whether a step's sends have no completion, or one that does not prove their arrival."""
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
            time.sleep(_POLL_INTERVAL_S)
            self._take(self.bench.cq.poll())

    def _may_go_on(self, number: int, step: Post) -> bool:
        """Whether the completions do not show that all of a step's sends are over."""
        if self.program.type_of(step.qp) == "RC":
            return True
        expected = self._expected
        assert expected is not None
        if any(wr.op not in _CONSUMING for wr in step.wrs):
            return True
        # Each send has a completion at the receiver and, if it is signaled, one at the sender.
        before = expected.counts[number - 1] if number else 0
        silent = (
            0
            if self.program.end(step.qp).sq_sig_all
            else sum("UNSIGNALED" in wr.flags for wr in step.wrs)
        )
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
            wc.wr_id,
            status,
            opcode,
            wc.byte_len,
            wc.imm_data,
            "" if wc.invalidated_rkey is None else self._name_of(wc.invalidated_rkey),
            self._index_of.get(wc.src_qp) if datagram else None,
            datagram and bool(wc.wc_flags & rp.WCFlags.GRH),
        )

    def _watch_silent_windows(self, number: int, step: Step) -> None:
        """Note the effect of unsignaled work requests on windows; failed ones have a completion."""
        if not isinstance(step, Post) or number in self.transcript.refused:
            return
        for index, wr in enumerate(step.wrs):
            silent = "UNSIGNALED" in wr.flags and wr.op in ("BIND_MW", "LOCAL_INV")
            if silent and not self.transcript.status_of(wr_id_of(number, index)):
                self._watch_windows(step.qp, wr, "SUCCESS")

    def _blank_grh(self, wr: R) -> None:
        """Blank the GRH: its addresses differ from device to device."""
        for sge in header_of(wr.sges):
            view = self.bench.regions[sge.region].buffer
            view[sge.offset : sge.offset + sge.length] = bytes(sge.length)

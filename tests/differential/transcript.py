"""The record of a program's run on a device, and the differences between two records."""

from __future__ import annotations

from dataclasses import dataclass, field

from .model import REGIONS, Post, Program, Recv

__all__ = ["Done", "Transcript", "differences", "wr_id_of"]


def wr_id_of(step: int, index: int) -> int:
    """Return the wr_id of a work request: its step, and its place in the list."""
    return 100 * step + index


@dataclass(frozen=True)
class Done:
    """The parts of a completion that mean the same on every device.

    In an error completion, these are the wr_id and the status.  The length of a send
    has no meaning; of the flags, only those that describe a receive are kept.
    """

    wr_id: int
    status: str
    opcode: str = ""
    byte_len: int | None = None
    imm_data: int | None = None
    invalidated: str = ""
    source: int | None = None
    grh: bool = False

    def __str__(self) -> str:
        if self.status != "SUCCESS":
            return self.status
        shown = [self.opcode]
        if self.byte_len is not None:
            shown.append(f"{self.byte_len} bytes")
        if self.imm_data is not None:
            shown.append(f"imm {self.imm_data:#x}")
        if self.invalidated:
            shown.append(f"invalidated {self.invalidated}")
        if self.source is not None:
            shown.append(f"from qp{self.source}")
        return ", ".join(shown + ["GRH"] * self.grh)


@dataclass
class Transcript:
    """The record of a program's run on a device.

    Attributes:
        program: the program that was run.
        queues: completions in order, by queue: ``qp0.send``, ``qp0.recv``, ...
        refused: posts that were refused, by step: the errno's name and the index.
        states: the states of the queue pairs after each step.
        counts: how many completions there were after each step.
        memory: the regions at the end.
        memories: the regions after the steps that nothing acknowledges.
    """

    program: Program
    queues: dict[str, list[Done]] = field(default_factory=dict)
    refused: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    states: list[tuple[str, ...]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    memory: dict[str, bytes] = field(default_factory=dict)
    memories: dict[int, dict[str, bytes]] = field(default_factory=dict)

    def status_of(self, wr_id: int) -> str:
        """Return a work request's status, or "" if it has no completion."""
        for queue in self.queues.values():
            for done in queue:
                if done.wr_id == wr_id:
                    return done.status
        return ""

    def undefined(self) -> dict[str, set[int]]:
        """Return the bytes that a failed work request leaves undefined, by region.

        A receive, read or atomic that fails may have filled some of its buffers, and a
        write with immediate data that finds no receive some of its target.
        """
        found: dict[str, set[int]] = {name: set() for name in REGIONS}
        for number, step in enumerate(self.program.steps):
            if not isinstance(step, Post | Recv):
                continue
            for index, wr in enumerate(step.wrs):
                if self.status_of(wr_id_of(number, index)) in ("", "SUCCESS", "WR_FLUSH_ERR"):
                    continue
                op = getattr(wr, "op", "RECV")
                if op.startswith(("RECV", "RDMA_READ", "ATOMIC")):
                    for sge in wr.sges:
                        found[sge.region].update(range(sge.offset, sge.offset + sge.length))
                elif op == "RDMA_WRITE_WITH_IMM":
                    start = wr.at.offset
                    found[wr.at.region].update(range(start, start + wr.size))
        return found


def differences(expected: Transcript, found: Transcript) -> list[str]:
    """Return a line for each difference between two transcripts of a program."""
    lines = []
    for step in sorted(expected.refused.keys() | found.refused.keys()):
        one, other = expected.refused.get(step), found.refused.get(step)
        if one != other:
            lines.append(f"step {step}: {_refusal(one)} -> {_refusal(other)}")
    for name in sorted(expected.queues.keys() | found.queues.keys()):
        lines += _queue(name, expected.queues.get(name, []), found.queues.get(name, []))
    for qp, (one_state, other_state) in enumerate(
        zip(expected.states[-1], found.states[-1], strict=True)
    ):
        if one_state != other_state:
            lines.append(f"qp{qp} ends in {one_state} -> {other_state}")
    undefined = expected.undefined()
    for name, content in expected.memory.items():
        lines += _memory(name, content, found.memory[name], undefined[name])
    return lines


def _refusal(refused: tuple[str, int | None] | None) -> str:
    return "posted" if refused is None else f"{refused[0]} at index {refused[1]}"


def _queue(name: str, one: list[Done], other: list[Done]) -> list[str]:
    ones, others = ({done.wr_id: done for done in dones} for dones in (one, other))
    lines = []
    for wr_id in sorted(ones.keys() | others.keys()):
        here, there = ones.get(wr_id), others.get(wr_id)
        if here != there:
            lines.append(f"{name} {wr_id}: {here or 'nothing'} -> {there or 'nothing'}")
    order, other_order = ([done.wr_id for done in dones] for dones in (one, other))
    # Completions that only one of them has are already reported.
    if [i for i in order if i in others] != [i for i in other_order if i in ones]:
        lines.append(f"{name} completes in the order {order} -> {other_order}")
    elif len(order) != len(ones) or len(other_order) != len(others):
        lines.append(f"{name} completes twice: {order} -> {other_order}")
    return lines


def _memory(name: str, one: bytes, other: bytes, undefined: set[int]) -> list[str]:
    if one == other:
        return []
    lines = []
    start = None
    for at in range(len(one) + 1):
        differs = at < len(one) and one[at] != other[at] and at not in undefined
        if differs and start is None:
            start = at
        elif not differs and start is not None:
            lines.append(
                f"{name}[{start}:{at}]: {one[start:at][:16].hex()} -> {other[start:at][:16].hex()}"
            )
            start = None
    return lines

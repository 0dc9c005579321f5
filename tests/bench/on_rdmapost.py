"""rdmapost on the null device; null.py runs this with RDMAPOST_LIBIBVERBS set.

The arguments are the number of runs and the cases to time: all by default, or
"growth" for those that depend on how much is outstanding.
"""

from __future__ import annotations

import array
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import measuring
from measuring import COLUMNS, LENGTHS, SGES, Case, NullDevice

import rdmapost as rp
from rdmapost._binding import ffi

ALL = rp.Access(0)
for _access in (
    rp.Access.LOCAL_WRITE,
    rp.Access.REMOTE_WRITE,
    rp.Access.REMOTE_READ,
    rp.Access.REMOTE_ATOMIC,
    rp.Access.MW_BIND,
):
    ALL |= _access
DEEP = 1 << 22

REMOTE = "remote_addr=addr, rkey=rkey"
BUILD = {
    "RDMA_WRITE": "RdmaWrite({sges}, wr_id=7, " + REMOTE + ")",
    "RDMA_WRITE_WITH_IMM": "RdmaWriteWithImm({sges}, wr_id=7, imm_data=5, " + REMOTE + ")",
    "RDMA_READ": "RdmaRead({sges}, wr_id=7, " + REMOTE + ")",
    "SEND": "Send({sges}, wr_id=7)",
    "SEND_WITH_IMM": "SendWithImm({sges}, wr_id=7, imm_data=5)",
    "SEND_WITH_INV": "SendWithInv({sges}, wr_id=7, invalidate_rkey=rkey)",
    "ATOMIC_CMP_AND_SWP": "AtomicCmpAndSwp({sges}, wr_id=7, compare_add=1, swap=2, " + REMOTE + ")",
    "ATOMIC_FETCH_AND_ADD": "AtomicFetchAndAdd({sges}, wr_id=7, compare_add=1, " + REMOTE + ")",
    "LOCAL_INV": "LocalInv(wr_id=7, invalidate_rkey=rkey)",
    "BIND_MW": "BindMW(wr_id=7, mw=mw, rkey=mw.next_rkey(), mr=mr, addr=addr, length=64)",
    "SEND (UD)": "Send({sges}, wr_id=7, ah=ah, remote_qpn=3, remote_qkey=4)",
    "TSO (UD)": "TSO({sges}, wr_id=7, hdr=hdr, mss=64, ah=ah, remote_qpn=3, remote_qkey=4)",
    "RDMA_WRITE (INLINE)": "RdmaWrite({sges}, wr_id=7, send_flags=inline, " + REMOTE + ")",
    # The window's next key is computed in advance, like the key of a plain write.
    "BIND_MW (key kept)": "BindMW(wr_id=7, mw=mw, rkey=key, mr=mr, addr=addr, length=64)",
}
FORMS = ("RDMA_WRITE", "RDMA_WRITE (INLINE)", "BIND_MW (key kept)", "TSO (UD)")
"""Opcodes that are also timed when the same work request is posted repeatedly."""


def build(opcode: str, sges: int | str = 1) -> str:
    """Return the expression that makes a work request and its SGEs ("kept": reusing one SGE)."""
    if sges == "kept":
        return BUILD[opcode].format(sges="sge")
    made = [f"mr[{at}:{at + 8}]" for at in range(0, 8 * sges, 8)]
    return BUILD[opcode].format(sges=made[0] if sges == 1 else f"[{', '.join(made)}]")


class Bench:
    """Queue pairs on the null device, and the names that the statements use."""

    def __init__(self) -> None:
        # The device reads it.
        os.environ["NULL_TSO"] = "1"
        self.null = NullDevice(os.environ["RDMAPOST_LIBIBVERBS"])
        self.context = rp.open_device("null0")
        self.pd = rp.PD(self.context)
        self.cq = rp.CQ(self.context, DEEP)
        self.mr = rp.MR(self.pd, 4096, ALL)
        self.names: dict[str, Any] = {
            **{name: getattr(rp, name) for name in rp.__all__},
            "mr": self.mr,
            "sge": self.mr[0:8],
            "mw": rp.MW(self.pd),
            "ah": rp.AH(self.pd, rp.AHAttr(dlid=1)),
            "addr": self.mr.addr,
            "rkey": self.mr.rkey,
            "hdr": bytes(14),
            "inline": rp.SendFlags.SIGNALED | rp.SendFlags.INLINE,
        }
        self.names["key"] = self.names["mw"].next_rkey()

    def qp(self, qp_type: rp.QPType = rp.QPType.RC, **options: Any) -> rp.QP:
        made = rp.QP(self.pd, qp_type, self.cq, max_send_wr=DEEP, max_recv_wr=DEEP, **options)
        made.connect(made.endpoint())
        return made

    def drain(self, qp: rp.QP) -> None:
        """Complete one more on each queue, which retires all earlier ones."""
        self.null.remember(True)
        if qp.outstanding.send:
            qp.post_send(rp.LocalInv() if qp.qp_type is rp.QPType.RC else self.ud_send())
        if qp.outstanding.recv:
            qp.post_recv(rp.RecvWR())
        self.null.remember(False)
        while self.cq.poll():
            pass
        assert not sum(qp.outstanding), qp.outstanding

    def ud_send(self) -> rp.Send:
        sent: rp.Send = eval(build("SEND (UD)"), self.names)
        return sent

    def case(self, name: str, qp: rp.QP, statement: str, each: int, **names: Any) -> Case:
        names = {**self.names, "post": qp.post_send, **names}
        return Case(name, statement, each, names, after=lambda: self.drain(qp))

    def lists(self, qp: rp.QP, mode: str) -> Iterator[Case]:
        for length in LENGTHS:
            for sges in (*SGES, "kept"):
                one = build("RDMA_WRITE", sges)
                posted = one if length == 1 else f"[{one} for _ in range({length})]"
                name = f"build/RDMA_WRITE/{length}/{sges}/{mode}"
                yield self.case(name, qp, f"post({posted})", length)

    def opcodes(self, qp: rp.QP, ud: rp.QP, mode: str) -> Iterator[Case]:
        for opcode in BUILD:
            on = ud if "UD" in opcode else qp
            yield self.case(f"build/{opcode}/1/1/{mode}", on, f"post({build(opcode)})", 1)

    def kept(self, qp: rp.QP, ud: rp.QP, mode: str) -> Iterator[Case]:
        """A work request that is created once."""
        for opcode in FORMS:
            on, wr = ud if "UD" in opcode else qp, eval(build(opcode), self.names)
            yield self.case(f"kept/{opcode}/{mode}", on, "post(wr)", 1, wr=wr)
            # A BIND_MW cannot be prepared.
            if mode == "checked" and "BIND_MW" not in opcode:
                post = on.prepare([wr]).post
                yield self.case(f"prepared/{opcode}", on, "post()", 1, post=post)

    def prepared(self, qp: rp.QP) -> Iterator[Case]:
        if hasattr(qp, "prepare"):
            for length in (1, 32):
                wrs = [eval(build("RDMA_WRITE"), self.names) for _ in range(length)]
                post = qp.prepare(wrs).post
                yield self.case(f"prepared/{length}", qp, "post()", length, post=post)

    def pieces(self, qp: rp.QP) -> Iterator[Case]:
        """The steps of building and posting one."""
        wr = eval(build("RDMA_WRITE"), self.names)
        yield Case("piece/slice", "mr[0:8]", 0, self.names)
        yield Case("piece/wr", build("RDMA_WRITE", "kept"), 0, self.names)
        for length in (1, 32):
            posted = wr if length == 1 else [wr] * length
            yield self.case(f"piece/post/{length}", qp, "post(wrs)", length, wrs=posted)

    def patches(self, qp: rp.QP) -> Iterator[Case]:
        """Setting a prepared work request's fields, and a struct's field through cffi."""
        one = qp.prepare(eval(build("RDMA_WRITE"), self.names))[0]
        struct = ffi.new("struct ibv_send_wr *")
        other = rp.MR(self.pd, 64, ALL)[0:8]
        names = {**self.names, "one": one, "struct": struct, "other": other}
        for name, statement in (
            ("remote_addr", "one.remote_addr = addr"),
            ("wr_id", "one.wr_id = 7"),
            ("sg_list", "one.sg_list = sge"),
            ("sg_list/regions", "one.sg_list = other; one.sg_list = sge"),
            ("struct", "struct.wr.rdma.remote_addr = addr"),
        ):
            # Nothing is posted.
            yield Case(f"patch/{name}", statement, 0, names)

    def receives(self, qp: rp.QP, mode: str) -> Iterator[Case]:
        for length in (1, 32):
            one = "RecvWR(mr[0:8], wr_id=7)"
            posted = one if length == 1 else f"[{one} for _ in range({length})]"
            name = f"recv/{length}/{mode}"
            yield self.case(name, qp, f"post({posted})", length, post=qp.post_recv)

    def fill(self, qp: rp.QP, count: int) -> None:
        """Post this many writes, in lists."""
        wr = eval(build("RDMA_WRITE"), self.names)
        for at in range(0, count, 256):
            qp.post_send([wr] * min(256, count - at))

    def polls(self, qp: rp.QP) -> Iterator[Case]:
        def before(number: int) -> None:
            self.null.remember(True)
            self.fill(qp, 16 * number)
            self.null.remember(False)

        yield Case("poll/16", "poll(16)", 16, {"poll": self.cq.poll}, before)
        for length in (16, 256):

            def rows_before(number: int, length: int = length) -> None:
                self.null.remember(True)
                ids = array.array("q", range(length))
                for _ in range(number):
                    qp.post_columns(rp.RdmaWrite, wr_id=ids)
                self.null.remember(False)

            names = {"poll_into": self.cq.poll_into, "rows": bytearray(48 * length)}
            yield Case(f"poll_into/{length}", "poll_into(rows)", length, names, rows_before)

    def columns(self, qp: rp.QP) -> Iterator[Case]:
        """Lists posted with post_columns, from arrays of 8-byte integers, as in numpy."""
        posted = qp._send.in_flight
        for length in COLUMNS:
            names = {
                **self.names,
                "post": qp.post_columns,
                "blocks": self.names["mr"].blocks,
                "ranges": self.names["mr"].ranges,
                "index": array.array("q", (i % 512 for i in range(length))),
                "there": array.array("Q", range(0, 8 * length, 8)),
                "lengths": array.array("q", [8] * length),
                "ids": array.array("Q", range(length)),
            }
            fixed = "remote_addr=there, rkey=rkey, signal_every=64"
            for name, statement in (
                ("two", f"post(RdmaWrite, blocks(index, 8), {fixed})"),
                ("four", f"post(RdmaWrite, ranges(index, lengths), wr_id=ids, {fixed})"),
            ):
                yield Case(
                    f"columns/{name}/{length}",
                    statement,
                    length,
                    names,
                    after=lambda: posted.clear_until(posted.posted),
                )

    def lives(self, qp: rp.QP) -> Iterator[Case]:
        """Cases from creating a work request to polling its completion, including deferred work."""
        for name, one, post in (
            ("RDMA_WRITE", build("RDMA_WRITE"), qp.post_send),
            ("RECV", "RecvWR(mr[0:8], wr_id=7)", qp.post_recv),
        ):
            for length in (1, 32):
                posted = one if length == 1 else f"[{one} for _ in range({length})]"
                names = {**self.names, "post": post, "take": self.cq.poll}
                yield Case(
                    f"life/{name}/{length}",
                    f"post({posted}); take({length})",
                    length,
                    names,
                    lambda _: self.null.remember(True),
                    lambda: self.drain(qp),
                )

    def cases(self) -> Iterator[Case]:
        for mode in ("checked", "unchecked"):
            options = {"checked": mode == "checked", "max_inline_data": 64}
            qp = self.qp(**options)
            ud = self.qp(rp.QPType.UD, max_tso_header=64, **options)
            yield from self.lists(qp, mode)
            yield from self.opcodes(qp, ud, mode)
            yield from self.kept(qp, ud, mode)
            yield from self.receives(qp, mode)
            if mode == "checked":
                yield from self.prepared(qp)
                yield from self.patches(qp)
                yield from self.pieces(qp)
                yield from self.polls(qp)
                yield from self.columns(qp)
                yield from self.lives(qp)

    def growth(self, runs: int) -> dict[str, float]:
        """Time one more post, and a poll, with many outstanding or posted before."""
        found = {}
        post = f"post({build('RDMA_WRITE')})"
        for power in range(2, 7):
            for name, statement, each in (
                ("outstanding", post, 1),
                ("before", post, 1),
                ("poll", "poll(16)", 16),
            ):
                taken = [self.grown(10**power, name, statement, each) for _ in range(runs)]
                found[f"growth/{name}/{10**power}"] = min(taken)
        return found

    def grown(self, count: int, name: str, statement: str, each: int) -> float:
        qp = self.qp()
        self.null.remember(name == "poll")
        self.fill(qp, count)
        self.null.remember(False)
        if name == "before":
            self.drain(qp)
        names = {**self.names, "post": qp.post_send, "poll": self.cq.poll}
        # Several short runs, each with about the same number posted before.
        case = Case(name, statement, each, names)
        taken = measuring.best_ns(case, 6, self.null, min(count, 2048) // 6)
        self.drain(qp)
        qp.close()
        return taken


if __name__ == "__main__":
    bench = Bench()
    wanted = set(sys.argv[2:])
    if "growth" in wanted:
        measuring.pin()
        json.dump(bench.growth(int(sys.argv[1])), sys.stdout)
    else:
        cases = (case for case in bench.cases() if not wanted or case.name in wanted)
        measuring.work(cases, bench.null)

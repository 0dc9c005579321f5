"""pyverbs on the null device; null.py runs this with the device in LD_PRELOAD."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import measuring
import pyverbs.enums as e
from measuring import LENGTHS, SGES, Case, NullDevice
from pyverbs.addr import AH, AHAttr
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR, MW, MWBindInfo
from pyverbs.pd import PD
from pyverbs.qp import QP, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

# The calls that set the other fields, and additional constructor arguments.
RDMA = "wr.set_wr_rdma(rkey, addr)"
BUILD = {
    "RDMA_WRITE": (RDMA, ""),
    "RDMA_WRITE_WITH_IMM": (RDMA, ", imm_data=5"),
    "RDMA_READ": (RDMA, ""),
    "SEND": ("", ""),
    "SEND_WITH_IMM": ("", ", imm_data=5"),
    "SEND_WITH_INV": ("", ", imm_data=rkey"),
    "ATOMIC_CMP_AND_SWP": ("wr.set_wr_atomic(rkey, addr, 1, 2)", ""),
    "ATOMIC_FETCH_AND_ADD": ("wr.set_wr_atomic(rkey, addr, 1)", ""),
    "LOCAL_INV": ("", ", imm_data=rkey"),
    "BIND_MW": ("wr.set_bind_wr(mw, MWBindInfo(mr, addr, 64, 0))", ""),
    "SEND (UD)": ("wr.set_wr_ud(ah, 3, 4)", ""),
    "RDMA_WRITE (INLINE)": (RDMA, ", send_flags=inline"),
}


def build(opcode: str, sges: int | str, more: str = "") -> list[str]:
    """Return the statements that make ``wr`` and its SGEs ("kept": reusing one SGE)."""
    name = opcode.split()[0]
    rest, options = BUILD[opcode]
    if sges == "kept":
        options += ", num_sge=1, sg=[sge]"
    elif name not in ("LOCAL_INV", "BIND_MW"):
        made = ", ".join(f"SGE(addr + {at}, 8, lkey)" for at in range(0, 8 * sges, 8))
        options += f", num_sge={sges}, sg=[{made}]"
    return [f"wr = SendWR(wr_id=7, opcode={name}{options}{more})", *([rest] if rest else [])]


def build_list(one: list[str], length: int) -> str:
    """Return the statements that make a chain of work requests.

    pyverbs does not keep references to the work requests that it chains; the caller must.
    """
    lines = ["wr, wrs = None, []", f"for _ in range({length}):"]
    return "\n".join(lines + ["    " + line for line in (*one, "wrs.append(wr)")])


class Bench:
    """A queue pair on the null device, and the names that the statements use."""

    def __init__(self) -> None:
        self.null = NullDevice(os.environ["LD_PRELOAD"])
        self.context = Context(name="null0")
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 1 << 20)
        self.mr = MR(self.pd, 4096, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_MW_BIND)
        cap = QPCap(max_send_wr=1 << 20, max_recv_wr=1 << 20, max_send_sge=4, max_recv_sge=4)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap)
        self.qp = QP(self.pd, init)
        self.names: dict[str, Any] = {
            "SendWR": SendWR,
            "RecvWR": RecvWR,
            "SGE": SGE,
            "MWBindInfo": MWBindInfo,
            "mr": self.mr,
            "addr": self.mr.buf,
            "lkey": self.mr.lkey,
            "rkey": self.mr.rkey,
            "sge": SGE(self.mr.buf, 8, self.mr.lkey),
            "mw": MW(self.pd, e.IBV_MW_TYPE_2),
            "inline": e.IBV_SEND_SIGNALED | e.IBV_SEND_INLINE,
            "ah": AH(self.pd, attr=AHAttr(dlid=1, port_num=1)),
            "post": self.qp.post_send,
            "post_recv": self.qp.post_recv,
            "poll": self.cq.poll,
            **{name.split()[0]: getattr(e, "IBV_WR_" + name.split()[0]) for name in BUILD},
        }

    def case(self, name: str, statement: str, each: int, **names: Any) -> Case:
        return Case(name, statement, each, {**self.names, **names})

    def cases(self) -> Iterator[Case]:
        for length in LENGTHS:
            for sges in (*SGES, "kept"):
                one = build("RDMA_WRITE", sges)
                if length == 1:
                    made = "\n".join(one)
                else:
                    made = build_list(build("RDMA_WRITE", sges, ", next_wr=wr"), length)
                name = f"build/RDMA_WRITE/{length}/{sges}"
                yield self.case(name, made + "\npost(wr)", length)
        for opcode in BUILD:
            statement = "\n".join(build(opcode, 1)) + "\npost(wr)"
            yield self.case(f"build/{opcode}/1/1", statement, 1)
        for length in (1, 32):
            names = dict(self.names)
            exec(build_list(build("RDMA_WRITE", 1, ", next_wr=wr"), length), names)
            yield Case(f"prepared/{length}", "post(wr)", length, names)
        receive = "RecvWR(wr_id=7, num_sge=1, sg=[SGE(addr, 8, lkey)]{more})"
        yield self.case("recv/1", f"post_recv({receive.format(more='')})", 1)
        chained = [f"wr = {receive.format(more=', next_wr=wr')}"]
        yield self.case("recv/32", build_list(chained, 32) + "\npost_recv(wr)", 32)

        names = dict(self.names)
        exec("\n".join(build("RDMA_WRITE", 1)), names)

        def before(number: int) -> None:
            self.null.remember(True)
            for _ in range(16 * number):
                self.qp.post_send(names["wr"])
            self.null.remember(False)

        yield Case("poll/16", "poll(16)", 16, self.names, before)


if __name__ == "__main__":
    bench = Bench()
    measuring.work(bench.cases(), bench.null)

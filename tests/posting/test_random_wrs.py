"""Random work requests: ten thousand of them never crash the process or lose one.

Every work request is made from one number, so that a failing list shrinks to
the plainest that still fails: 0 is a SEND of nothing.
"""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ALL, Pair

import rdmapost as rp
from rdmapost import DeviceCap, QPType, SendFlags

KINDS = [
    rp.Send,
    rp.RdmaWrite,
    rp.SendWithImm,
    rp.RdmaWriteWithImm,
    rp.RdmaRead,
    rp.AtomicFetchAndAdd,
    rp.AtomicCmpAndSwp,
    rp.LocalInv,
    rp.SendWithInv,
    rp.BindMW,
    rp.TSO,
]
SENTINEL = 1 << 40


class Digits:
    """A number, taken apart from its low end."""

    def __init__(self, number: int) -> None:
        self.number = number

    def below(self, end: int) -> int:
        self.number, digit = divmod(self.number, end)
        return digit

    def among(self, *choices: Any) -> Any:
        return choices[self.below(len(choices))]


class Maker:
    """Makes work requests for one pair from numbers."""

    def __init__(self, pair: Pair, stack: contextlib.ExitStack) -> None:
        self.pair = pair
        self.foreign = stack.enter_context(rp.MR(pair.pd, 64, rp.Access.LOCAL_WRITE))
        self.bindable = stack.enter_context(rp.MR(pair.pd, 4096, ALL | rp.Access.MW_BIND))
        self.mw: rp.MW | None = None
        context = pair.pd.context
        cap = context.attr.device_cap_flags
        # Random binds harm the kernel of rxe (seen on 6.1: it loses count of the references to
        # the queue pair, and destroying that takes minutes); test_mr.py has the right ones.
        if context.kind == "soft" and cap & (
            DeviceCap.MEM_WINDOW_TYPE_2A | DeviceCap.MEM_WINDOW_TYPE_2B
        ):
            self.mw = stack.enter_context(rp.MW(pair.pd))
        self.inline = rp.SGE.from_buffer(bytes(range(64)))
        with rp.MR(pair.pd, 8) as closed:
            self.closed = closed[:]

    def sge(self, digits: Digits, inline: bool) -> rp.SGE:
        mine = self.pair.mine
        start, length = digits.below(4096), digits.below(300)
        whole = mine[start : start + length]
        kind = digits.below(12)
        if kind == 7:
            return self.closed
        if kind == 8:
            return self.inline
        if kind == 9:
            return self.foreign[: digits.below(65)]
        # An INLINE by number is read when posted: only our own addresses may be used.
        if kind == 10 and not inline:
            return rp.SGE(digits.below(1 << 40), length, digits.below(1 << 32))
        if kind == 11 and not inline:
            return whole._replace(lkey=digits.below(1 << 32), owner=None)
        return whole

    def make(self, number: int, index: int) -> rp.SendWR:
        digits = Digits(number)
        kind = KINDS[digits.below(len(KINDS))]
        flags = digits.among(2, 2, 2, 0, 3, 6, 10, 8, 18, digits.below(64))
        inline = bool(flags & SendFlags.INLINE)
        fields: dict[str, Any] = {"wr_id": index, "send_flags": flags}
        pair = self.pair
        if kind not in (rp.LocalInv, rp.BindMW):
            count = digits.among(0, 1, 1, 1, 2, 3, 5, 33)
            fields["sg_list"] = [self.sge(digits, inline) for _ in range(count)]
        if issubclass(kind, rp.AtomicCmpAndSwp | rp.AtomicFetchAndAdd):
            if digits.below(3):
                fields["sg_list"] = [pair.mine[:8]]
            fields["compare_add"] = digits.below(1 << 64)
        if "remote_addr" in kind.__dataclass_fields__:
            fields["remote_addr"] = pair.theirs.addr + digits.among(0, 8, 4, 8190, 1 << 30)
            fields["rkey"] = digits.among(
                pair.theirs.rkey, pair.theirs.rkey, self.foreign.rkey, digits.below(1 << 32)
            )
        if "imm_data" in kind.__dataclass_fields__:
            fields["imm_data"] = digits.below(1 << 32)
        if "invalidate_rkey" in kind.__dataclass_fields__:
            # Never that of a window: rxe's kernel follows a NULL to invalidate one that is not
            # bound (6.1, 6.12), and so it may be. The keys of its windows are above 2^24.
            fields["invalidate_rkey"] = digits.among(self.bindable.rkey, digits.below(1 << 24))
        if "remote_srqn" in kind.__dataclass_fields__:
            fields["remote_srqn"] = digits.among(0, digits.below(1 << 32))
        if "ah" in kind.__dataclass_fields__:
            fields["ah"] = digits.among(pair.ah, pair.ah, None)
            fields["remote_qpn"] = digits.among(pair.b.qp_num, digits.below(1 << 24))
            fields["remote_qkey"] = digits.among(
                rp.resources.qp.DEFAULT_QKEY, digits.below(1 << 32)
            )
        if kind is rp.TSO:
            fields |= {"hdr": bytes(digits.below(100)), "mss": digits.below(1 << 16)}
        if kind is rp.BindMW:
            fields |= {
                "mw": digits.among(self.mw, self.mw, None),
                "mr": digits.among(self.bindable, pair.theirs, None),
                "addr": self.bindable.addr + digits.among(0, 100, 5000),
                "length": digits.among(64, 0, 5000, 1 << 40),
                "mw_access_flags": digits.below(64),
            }
            if self.mw is not None:
                fields["rkey"] = digits.among(self.mw.next_rkey(), digits.below(1 << 32))
        return kind(**fields)


def post_all(pair: Pair, wrs: list[rp.SendWR]) -> int:
    """Post a list, continuing after each refusal; return how many were posted."""
    posted = 0
    while wrs:
        refused: rp.PostError | None = None
        try:
            pair.a.post_send(wrs)
        except rp.PostError as error:
            refused = error
        if refused is None:
            return posted + len(wrs)
        # The library knows the index, and every device here reports it.
        assert refused.index is not None
        assert refused.posted == refused.index
        assert refused.wr is wrs[refused.index]
        assert refused.reason
        posted += refused.index
        wrs = wrs[refused.index + 1 :]
    return posted


def run(pd: rp.PD, cq: rp.CQ, qp_type: QPType, numbers: list[int], *, checked: bool) -> None:
    with contextlib.ExitStack() as stack:
        pair = Pair(
            stack,
            pd,
            cq,
            qp_type,
            checked=checked,
            max_inline_data=64,
            max_send_wr=64,
            max_recv_wr=32,
            rnr_retry=0,
        )
        maker = Maker(pair, stack)
        pair.b.post_recv([rp.RecvWR(pair.theirs[4096:5000], wr_id=i) for i in range(len(numbers))])
        wrs = [maker.make(n, i) for i, n in enumerate(numbers)]
        posted = post_all(pair, wrs)
        hypothesis.note(f"{posted} posted of {wrs}")
        assert pair.a.outstanding.send == posted
        # One that is signaled, on a queue that may have gone into ERR: it always completes.
        pair.a.post_send(pair.send(wr_id=SENTINEL))
        seen: list[int] = []
        broken = False
        while pair.a.outstanding.send:
            try:
                done = pair.cq.wait(1, 20 if broken else 0.3)
            except rp.WaitTimeout:
                # A device may hold work requests back for good (rxe on 6.1 does, after some
                # errors); once the queue pair is broken it has to give them up.
                assert not broken, "work requests were neither carried out nor flushed"
                broken = True
                pair.a.to_err()
                continue
            for wc in done:
                if wc.qp_num == pair.a.qp_num:
                    assert wc.wr_id == SENTINEL or wc.wr_id < len(numbers)
                    seen.append(wc.wr_id)
        assert seen[-1] == SENTINEL
        # In the order in which they were posted, each at most once.
        assert seen == sorted(set(seen))
        pair.finish()
        assert pair.b.outstanding == (0, 0)


numbers = st.lists(st.integers(0, (1 << 160) - 1), min_size=20, max_size=20)


def run_all(pd: rp.PD, cq: rp.CQ, qp_type: QPType, examples: int, *, checked: bool) -> None:
    @settings(max_examples=examples)
    @given(numbers)
    def check(some: list[int]) -> None:
        run(pd, cq, qp_type, some, checked=checked)

    check()


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD])
def test_random_work_requests_end_in_an_error_or_a_completion(connect, pd, cq, qp_type):
    """Together with those below: 500 lists of 20."""
    examples = {QPType.RC: 200, QPType.UC: 75, QPType.UD: 75}[qp_type]
    run_all(pd, cq, qp_type, examples, checked=True)
    connect(qp_type).works()


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD])
def test_random_unchecked_work_requests_do_no_harm(connect, pd, cq, qp_type):
    """What the library does not check goes to the device unchanged, and does no harm."""
    examples = {QPType.RC: 100, QPType.UC: 25, QPType.UD: 25}[qp_type]
    run_all(pd, cq, qp_type, examples, checked=False)
    connect(qp_type).works()

"""The short way of a post and the long one: whatever is posted, both do the same."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import ALL, GRH, prints

import rdmapost as rp
from rdmapost import QPState, QPType, SendFlags

SIZE = 256


class Way:
    """Two queue pairs that are connected to each other, and how their posts go.

    Args:
        short: let what is plain go the short way.
    """

    def __init__(self, context: rp.Context, qp_type: QPType, checked: bool, short: bool) -> None:
        self.pd = rp.PD(context)
        self.other = rp.PD(context)
        self.cq = rp.CQ(context, 64)
        self.mr = rp.MR(self.pd, SIZE, ALL)
        self.read_only = rp.MR(self.pd, SIZE, rp.Access(0))
        self.foreign = rp.MR(self.other, SIZE, ALL)
        self.closed = rp.MR(self.pd, SIZE)
        self.gone = self.closed[:8]
        self.closed.close()
        options: Any = {"checked": checked, "max_send_wr": 4, "max_recv_wr": 4}
        self.near = rp.QP(self.pd, qp_type, self.cq, **options)
        self.far = rp.QP(self.pd, qp_type, self.cq, **options)
        if not short:
            for queue in (self.near._send, self.near._recv, self.far._recv):
                queue.post_plain = lambda wrs, owner: False
        self.start()
        self.ah = self.near.ah_to(self.far.endpoint()) if qp_type is QPType.UD else None

    def start(self) -> None:
        """Bring both queue pairs back to RTS, with a receive on each side."""
        for qp, peer in ((self.near, self.far), (self.far, self.near)):
            qp.to_reset()
            qp.connect(peer.endpoint(), rnr_retry=0, timeout=1, retry_cnt=0)
            qp.post_recv(rp.RecvWR(self.mr[128:224], wr_id=99))
        while self.cq.poll():
            pass

    def sge(self, kind: str, start: int, length: int) -> Any:
        """Make an SGE, or something in its place."""
        mr = {"read only": self.read_only, "foreign": self.foreign}.get(kind, self.mr)
        if kind == "closed":
            return self.gone
        if kind == "numbers":
            return rp.SGE(self.mr.addr + start, length, self.mr.lkey)
        if kind == "wrong key":
            return rp.SGE(mr.addr + start, length, mr.lkey ^ 0xFF00, mr)
        if kind == "wrong type":
            return rp.SGE("addr", length, 1.5, mr)  # type: ignore[arg-type]
        return rp.SGE(mr.addr + start, length, mr.lkey, mr)

    def make(self, drawn: dict[str, Any]) -> Any:
        """Make a work request of this side's resources."""
        kind: Any = drawn["kind"]
        sges = [self.sge(*one) for one in drawn["sges"]]
        names = kind.__dataclass_fields__
        fields: dict[str, Any] = {}
        if "sg_list" in names:
            fields["sg_list"] = sges[0] if drawn["bare"] and len(sges) == 1 else drawn["as"](sges)
        if "ah" in names and drawn["ah"]:
            fields |= {"ah": self.ah, "remote_qpn": self.far.qp_num, "remote_qkey": 0x11111111}
        if "remote_addr" in names:
            fields |= {"remote_addr": self.mr.addr, "rkey": self.mr.rkey}
        for name, value in drawn["fields"].items():
            if name in names:
                fields[name] = value
        return kind(**fields)

    def outcome(self, drawn: list[dict[str, Any]], send: bool) -> Any:
        """Post, and return what came of it: the error or none, the completions, the memory."""
        self.mr.buffer[:] = bytes(i % 251 for i in range(SIZE))
        wrs = [self.make(one) for one in drawn]
        post = self.near.post_send if send else self.near.post_recv
        error: Any = None
        try:
            post(wrs[0] if len(wrs) == 1 else wrs)
        except rp.PostError as raised:
            error = (raised.index, raised.posted, raised.errno, self.without_keys(str(raised)))
        except (TypeError, rp.RdmaError) as raised:
            error = (type(raised), self.without_keys(str(raised)))
        found = [(wc.wr_id, wc.status, wc.opcode, wc.byte_len) for wc in self.cq.poll()]
        left = self.near.outstanding
        state = self.near.query().qp_state
        memory = bytes(self.mr.buffer[:])
        if self.ah is not None:
            # The GRH in front of a datagram is of no interest.
            memory = memory[:128] + memory[128 + GRH :]
        if state is not QPState.RTS or any(found) or left != (0, 1):
            self.start()
        return error, found, left, state, memory

    def without_keys(self, text: str) -> str:
        """Return a text without what differs between the two sides."""
        named = {
            self.mr.lkey: "lkey", self.mr.lkey ^ 0xFF00: "wrong key",
            self.read_only.lkey: "read only",
            self.foreign.lkey: "foreign", self.closed.lkey: "closed",
        }  # fmt: skip

        def name(found: re.Match[str]) -> str:
            number = int(found[0], 16)
            for mr in (self.mr, self.read_only, self.foreign, self.closed):
                if -16 <= number - mr.addr < SIZE + 16:
                    return f"addr{number - mr.addr:+}"
            return named.get(number, found[0])

        return re.sub("0x[0-9a-f]+", name, text)

    def close(self) -> None:
        for resource in (
            self.near, self.far, self.ah, self.mr, self.read_only, self.foreign, self.cq, self.pd,
            self.other,
        ):  # fmt: skip
            if resource is not None:
                resource.close()


KINDS = ["good"] * 6 + ["read only", "foreign", "closed", "numbers", "wrong key", "wrong type"]
PLAIN = [
    rp.Send, rp.SendWithImm, rp.RdmaWrite, rp.RdmaWriteWithImm, rp.RdmaRead, rp.AtomicCmpAndSwp,
    rp.AtomicFetchAndAdd, rp.SendWithInv, rp.LocalInv,
]  # fmt: skip
SENDS = [*PLAIN, rp.RecvWR, rp.BindMW]
NUMBERS = st.sampled_from([0, 1, 7, -1, 1 << 32, 1 << 64, 1.5, None, "7", True])

sge = st.tuples(
    st.sampled_from(KINDS), st.integers(-8, 120), st.sampled_from([0, 1, 8, 8, 8, 64, 300, 1 << 32])
)
fields = st.dictionaries(
    st.sampled_from([
        "wr_id", "imm_data", "rkey", "remote_addr", "remote_qpn", "remote_srqn", "compare_add",
        "swap", "invalidate_rkey", "sg_list", "ah",
    ]),
    NUMBERS, max_size=2,
)  # fmt: skip
flags = st.sampled_from(
    [SendFlags.SIGNALED] * 4
    + [
        SendFlags(0),
        SendFlags.SOLICITED,
        SendFlags(6),
        SendFlags.FENCE,
        SendFlags.INLINE,
        2,
        64,
        -1,
    ]
)


@st.composite
def work_request(draw: st.DrawFn, kinds: list[Any]) -> dict[str, Any]:
    made = {
        "kind": draw(st.sampled_from(kinds)),
        "sges": draw(st.lists(sge, min_size=1, max_size=1) | st.lists(sge, max_size=5)),
        "bare": draw(st.booleans()),
        "as": draw(st.sampled_from([list, tuple])),
        "ah": draw(st.sampled_from([True, True, False])),
        "fields": draw(st.just({}) | fields),
    }
    made["fields"] = {"send_flags": draw(flags), **made["fields"]}
    if made["kind"] is rp.RecvWR:
        made["fields"].pop("send_flags")
    return made


@pytest.fixture(
    scope="module",
    params=[(t, c) for t in (QPType.RC, QPType.UC, QPType.UD) for c in (True, False)],
    ids=lambda param: f"{param[0].name}-{'checked' if param[1] else 'unchecked'}",
)
def ways(request: pytest.FixtureRequest) -> Iterator[tuple[Way, Way]]:
    with rp.open_device("soft0") as context:
        both = tuple(Way(context, *request.param, short) for short in (True, False))
        yield both  # type: ignore[misc]
        for way in both:
            way.close()


READ = {
    "kind": rp.RdmaRead, "sges": [("read only", 0, 8)], "bare": True, "ah": False, "fields": {}
}  # fmt: skip


def test_what_goes_the_short_way(ways):
    """All that is usual does: else the rest of this file would compare the long way to itself."""
    short, _ = ways
    kinds = PLAIN
    if short.near.qp_type is QPType.UD:
        kinds = [rp.Send, rp.SendWithImm]
    elif short.near.qp_type is QPType.UC and short.near.checked:
        kinds = [kind for kind in PLAIN if QPType.UC in rp.rules.QP_TYPES_BY_OPCODE[kind.opcode]]
    for kind in kinds:
        for sges in (short.mr[:8], [short.mr[:8]], (short.mr[:8],)):
            drawn = {"kind": kind, "sges": [], "bare": True, "as": tuple, "ah": True, "fields": {}}
            wr = short.make(drawn)
            if hasattr(wr, "sg_list"):
                wr.sg_list = sges
            assert short.near._send.post_plain([wr] if sges is short.mr[:8] else wr, short.near)
            short.start()
    assert short.near._recv.post_plain(rp.RecvWR([short.mr[:8]] * 2), short.near)
    assert not short.near._send.post_plain(rp.RecvWR(), short.near)
    short.start()


@settings(max_examples=200)
@example(drawn=[READ])
@given(drawn=st.lists(work_request(SENDS), min_size=1, max_size=1))
def test_one_send(ways, drawn):
    short, long = ways
    assert short.outcome(drawn, True) == long.outcome(drawn, True)


@settings(max_examples=100)
@given(drawn=st.lists(work_request(SENDS), min_size=1, max_size=7))
def test_list_of_sends(ways, drawn):
    short, long = ways
    assert short.outcome(drawn, True) == long.outcome(drawn, True)


@settings(max_examples=100)
@given(drawn=st.lists(work_request([rp.RecvWR] * 4 + [rp.Send]), min_size=1, max_size=7))
def test_receives(ways, drawn):
    short, long = ways
    assert short.outcome(drawn, False) == long.outcome(drawn, False)


def test_first_queue_pairs_of_several_threads():
    """What is found out about the classes with the first one is found out only once."""
    code = """
    import sys, threading
    import rdmapost as rp
    from rdmapost.plain import plain_sends

    sys.setswitchinterval(1e-6)
    with rp.open_device("soft0") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
        start, made = threading.Barrier(8), []

        def make():
            start.wait()
            with rp.QP(pd, rp.QPType.RC, cq) as qp:
                made.append(plain_sends(qp._limits, True).kinds)

        threads = [threading.Thread(target=make) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    print(len(made), len(set(made)))
    """
    assert prints(textwrap.dedent(code)) == "8 1"

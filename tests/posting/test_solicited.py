"""SOLICITED: which completions wake a waiter for solicited ones only."""

from __future__ import annotations

import pytest
from support import ALL, CONNECTED, TYPES, Pair, needs

import rdmapost as rp
from rdmapost import QPType, SendFlags, WCStatus

SOLICITED = SendFlags.SOLICITED | SendFlags.SIGNALED

WITH_IMM = [
    *((qp_type, rp.SendWithImm) for qp_type in TYPES),
    *((qp_type, rp.RdmaWriteWithImm) for qp_type in CONNECTED),
]


class Waiter:
    """b's receives complete on a CQ with a channel, which is asked for solicited events only."""

    def __init__(self, pair: Pair, stack, qp_type: QPType) -> None:
        context = pair.pd.context
        self.pair = pair
        self.channel = stack.enter_context(rp.CompChannel(context))
        self.cq = stack.enter_context(rp.CQ(context, 16, channel=self.channel))
        self.qp = rp.QP(pair.pd, qp_type, pair.cq, self.cq)
        stack.callback(self.qp.close)
        self.ah = None
        if qp_type is QPType.UD:
            self.qp.connect()
            self.ah = stack.enter_context(pair.a.ah_to(self.qp.endpoint()))
        else:
            pair.a.to_reset()
            pair.a.connect(self.qp.endpoint(), rnr_retry=1)
            self.qp.connect(pair.a.endpoint(), access=ALL & ~rp.Access.LOCAL_WRITE)
        self.qp.post_recv([rp.RecvWR(pair.theirs[:64], wr_id=i) for i in range(3)])
        self.cq.req_notify(solicited_only=True)

    def message(self, wr_type: type, send_flags: int) -> rp.SendWR:
        more = {"ah": self.ah, "remote_qpn": self.qp.qp_num} if self.ah is not None else {}
        return self.pair.wr(wr_type, self.pair.mine[:8], send_flags=send_flags, **more)


@pytest.mark.parametrize(
    ("qp_type", "wr_type"),
    [*((t, rp.Send) for t in TYPES), *WITH_IMM],
    ids=lambda x: x.__name__ if isinstance(x, type) else x.name,
)
def test_solicited_completion_wakes_a_waiter_for_solicited_only(connect, stack, qp_type, wr_type):
    """A message without it does not, whatever other flags it carries."""
    pair = connect(qp_type)
    waiter = Waiter(pair, stack, qp_type)
    pair.a.post_send(waiter.message(wr_type, SendFlags.SIGNALED))
    pair.wait()
    assert waiter.channel.get_cq_event(0.05) is None
    pair.a.post_send(waiter.message(wr_type, SOLICITED))
    assert waiter.channel.get_cq_event(5) is waiter.cq
    assert [wc.wr_id for wc in waiter.cq.poll()] == [0, 1]
    # One event for one request.
    pair.a.post_send(waiter.message(wr_type, SOLICITED))
    pair.wait(2)
    assert waiter.channel.get_cq_event(0.05) is None


def test_unsolicited_completion_wakes_a_waiter_for_any(connect, stack):
    pair = connect()
    waiter = Waiter(pair, stack, QPType.RC)
    waiter.cq.req_notify()
    pair.a.post_send(waiter.message(rp.Send, SendFlags.SIGNALED))
    assert waiter.channel.get_cq_event(5) is waiter.cq


def test_failure_wakes_a_waiter_for_solicited_completions_only(connect, stack, context):
    needs(context.kind == "soft", "solicited event for failures", context)
    pair = connect()
    waiter = Waiter(pair, stack, QPType.RC)
    waiter.qp.to_err()
    assert waiter.channel.get_cq_event(5) is waiter.cq
    assert [wc.status for wc in waiter.cq.poll()] == [WCStatus.WR_FLUSH_ERR] * 3


@pytest.mark.parametrize("wr_type", [rp.RdmaWrite, rp.RdmaRead])
def test_solicited_is_refused_on_opcodes_that_take_no_receive(rc, wr_type):
    with pytest.raises(rp.PostError, match=f"SOLICITED has no meaning on {wr_type.opcode.name}"):
        rc.a.post_send(rc.wr(wr_type, rc.mine[:8], send_flags=SOLICITED))

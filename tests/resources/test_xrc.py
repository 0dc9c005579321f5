"""Extended reliable connections: each message names its destination queue."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest
from support import ALL, needs

import rdmapost as rp
from rdmapost import Access, DeviceCap, QPState, QPType, SRQType, WCOpcode, WCStatus


class Xrc:
    """An initiator, a target, and shared receive queues of the target's domain."""

    def __init__(self, stack: contextlib.ExitStack, pd: rp.PD, queues: int = 2) -> None:
        context = pd.context
        self.pd = pd
        self.xrcd = stack.enter_context(rp.XRCD(context))
        self.cq = stack.enter_context(rp.CQ(context))
        self.mine = stack.enter_context(rp.MR(pd, 4096, ALL))
        self.theirs = stack.enter_context(rp.MR(pd, 4096, ALL))
        self.srqs = [self.queue(stack, pd) for _ in range(queues)]
        self.a = rp.QP(pd, QPType.XRC_SEND, self.cq, max_inline_data=16)
        self.b = rp.QP(None, QPType.XRC_RECV, xrcd=self.xrcd)
        stack.callback(self.b.close)
        stack.callback(self.a.close)
        self.connect()

    def queue(self, stack: contextlib.ExitStack, pd: rp.PD) -> rp.SRQ:
        cq = stack.enter_context(rp.CQ(pd.context))
        srq = rp.SRQ(pd, 16, 2, srq_type=SRQType.XRC, xrcd=self.xrcd, cq=cq)
        stack.callback(srq.close)
        return srq

    def connect(self) -> None:
        self.a.connect(self.b.endpoint(), rnr_retry=1)
        self.b.connect(self.a.endpoint())

    def post(self, wr: rp.SendWR) -> WCStatus:
        """Post a work request; return how it ended."""
        self.a.post_send(wr)
        [wc] = self.cq.wait(1)
        return wc.status


@pytest.fixture
def xrc(context, pd, stack) -> Xrc:
    needs(context.attr.device_cap_flags & DeviceCap.XRC, "XRC", context)
    return Xrc(stack, pd)


def test_each_xrc_message_names_the_srq_that_it_is_for(xrc):
    """The receive completes on that queue's CQ, with the target's number."""
    first, second = xrc.srqs
    assert first.srq_num != second.srq_num
    for number, srq in enumerate(xrc.srqs):
        srq.post_srq_recv(rp.RecvWR(xrc.theirs[number * 64 : number * 64 + 64], wr_id=number))
    for number, srq in ((1, second), (0, first)):
        xrc.mine.buffer[:4] = b"to %d" % number
        assert xrc.post(rp.Send(xrc.mine[:4], remote_srqn=srq.srq_num)) is WCStatus.SUCCESS
        [wc] = srq.cq.wait(1)
        assert (wc.check().wr_id, wc.opcode) == (number, WCOpcode.RECV)
        assert (wc.qp_num, wc.byte_len) == (xrc.b.qp_num, 4)
        assert bytes(xrc.theirs.buffer[number * 64 : number * 64 + 4]) == b"to %d" % number
        assert srq.outstanding == 0


def test_xrc_messages_carry_immediate_data_and_invalidate_keys(xrc, pd):
    srq = xrc.srqs[0]
    number = srq.srq_num
    srq.post_srq_recv([rp.RecvWR(xrc.theirs[:64], wr_id=i) for i in range(3)])
    assert xrc.post(rp.SendWithImm(xrc.mine[:1], imm_data=5, remote_srqn=number)) == 0
    write = rp.RdmaWriteWithImm(
        xrc.mine[:1],
        imm_data=6,
        remote_addr=xrc.theirs.addr,
        rkey=xrc.theirs.rkey,
        remote_srqn=number,
    )
    assert xrc.post(write) == 0
    with rp.MR(pd, 64, ALL) as mr:
        invalidate = rp.SendWithInv(xrc.mine[:1], invalidate_rkey=mr.rkey, remote_srqn=number)
        assert xrc.post(invalidate) == 0
        found = srq.cq.wait(3)
        assert [wc.imm_data for wc in found] == [5, 6, None]
        assert found[1].opcode is WCOpcode.RECV_RDMA_WITH_IMM
        assert found[2].invalidated_rkey == mr.rkey


def test_remote_memory_over_xrc_is_of_the_named_srqs_domain(xrc, context, stack):
    """The keys belong to the SRQ's PD, as the target has none."""
    number = xrc.srqs[0].srq_num
    xrc.mine.buffer[:8] = b"12345678"
    remote = {"remote_addr": xrc.theirs.addr, "rkey": xrc.theirs.rkey, "remote_srqn": number}
    assert xrc.post(rp.RdmaWrite(xrc.mine[:8], **remote)) is WCStatus.SUCCESS
    assert bytes(xrc.theirs.buffer[:8]) == b"12345678"
    assert xrc.post(rp.RdmaRead(xrc.mine[100:108], **remote)) is WCStatus.SUCCESS
    assert bytes(xrc.mine.buffer[100:108]) == b"12345678"
    xrc.theirs.buffer[:8] = (10).to_bytes(8, sys.byteorder)
    add = rp.AtomicFetchAndAdd(xrc.mine[200:208], compare_add=5, **remote)
    swap = rp.AtomicCmpAndSwp(xrc.mine[208:216], compare_add=15, swap=7, **remote)
    assert (xrc.post(add), xrc.post(swap)) == (WCStatus.SUCCESS, WCStatus.SUCCESS)
    values = [int.from_bytes(xrc.mine.buffer[i : i + 8], sys.byteorder) for i in (200, 208)]
    assert values == [10, 15]
    assert int.from_bytes(xrc.theirs.buffer[:8], sys.byteorder) == 7

    other = stack.enter_context(rp.PD(context))
    elsewhere = xrc.queue(stack, other)
    write = rp.RdmaWrite(xrc.mine[:8], **{**remote, "remote_srqn": elsewhere.srq_num})
    assert xrc.post(write) is WCStatus.REM_ACCESS_ERR


def test_inline_message_reaches_an_xrc_srq(xrc):
    srq = xrc.srqs[0]
    srq.post_srq_recv(rp.RecvWR(xrc.theirs[:64]))
    flags = rp.SendFlags.SIGNALED | rp.SendFlags.INLINE
    data = rp.SGE.from_buffer(b"inline")
    assert xrc.post(rp.Send(data, send_flags=flags, remote_srqn=srq.srq_num)) == 0
    assert srq.cq.wait(1)[0].byte_len == 6
    assert bytes(xrc.theirs.buffer[:6]) == b"inline"


def test_xrc_message_to_an_empty_srq_takes_no_receive_of_another(xrc):
    """Another queue's receives are not used."""
    xrc.srqs[1].post_srq_recv(rp.RecvWR(xrc.theirs[:64]))
    wr = rp.Send(xrc.mine[:4], remote_srqn=xrc.srqs[0].srq_num)
    assert xrc.post(wr) is WCStatus.RNR_RETRY_EXC_ERR


def test_xrc_receive_that_is_too_small_fails_on_both_sides(xrc):
    srq = xrc.srqs[0]
    srq.post_srq_recv(rp.RecvWR(xrc.theirs[:4], wr_id=3))
    wr = rp.Send(xrc.mine[:5], remote_srqn=srq.srq_num)
    assert xrc.post(wr) is WCStatus.REM_INV_REQ_ERR
    [wc] = srq.cq.wait(1)
    assert (wc.wr_id, wc.status) == (3, WCStatus.LOC_LEN_ERR)


def test_xrc_message_to_an_unknown_queue_or_one_of_another_domain_fails(xrc, stack, pd):
    other = Xrc(stack, pd, queues=1)
    other.srqs[0].post_srq_recv(rp.RecvWR(xrc.theirs[:64]))
    for number in (0xABCDEF, other.srqs[0].srq_num):
        wr = rp.Send(xrc.mine[:4], remote_srqn=number)
        assert xrc.post(wr) is WCStatus.REM_ACCESS_ERR
        assert xrc.b.state is QPState.ERR
        assert other.srqs[0].outstanding == 1
        xrc.a.to_reset()
        xrc.b.to_reset()
        xrc.connect()


def test_write_that_the_xrc_target_does_not_allow_fails(xrc):
    xrc.a.to_reset()
    xrc.b.to_reset()
    xrc.b.connect(xrc.a.endpoint(), access=Access.REMOTE_READ)
    xrc.a.connect(xrc.b.endpoint())
    write = rp.RdmaWrite(
        xrc.mine[:4],
        remote_addr=xrc.theirs.addr,
        rkey=xrc.theirs.rkey,
        remote_srqn=xrc.srqs[0].srq_num,
    )
    assert xrc.post(write) in (WCStatus.REM_INV_REQ_ERR, WCStatus.REM_ACCESS_ERR)


def test_xrc_queue_pairs_refuse_what_their_end_cannot_do(xrc):
    for state in (QPState.RTS, QPState.RESET):
        with pytest.raises(rp.PostError, match="SEND is not supported on XRC_RECV QPs"):
            xrc.b.post_send(rp.Send())
        assert xrc.b.state is state
        xrc.b.to_reset()
    for qp in (xrc.a, xrc.b):
        with pytest.raises(rp.RdmaError, match=r"has no receive queue.*srq\.post_srq_recv"):
            qp.post_recv(rp.RecvWR(xrc.theirs[:8]))


def test_xrc_target_has_no_pd_and_no_cqs_of_its_own(xrc):
    """It lives as long as its domain, and is diagnosed and reset like any other."""
    assert (xrc.b.pd, xrc.b.send_cq, xrc.b.recv_cq) == (None, None, None)
    assert xrc.b.context is xrc.pd.context
    assert xrc.b.query().init_attr.qp_type is QPType.XRC_RECV
    for qp in (xrc.a, xrc.b):
        assert {finding.severity for finding in qp.diagnose()} <= {"ok", "info"}
    assert "peer" in {finding.name for finding in xrc.a.diagnose()}
    with pytest.raises(ValueError, match="has no PD on which to create an address handle"):
        xrc.b.ah_to(xrc.a.endpoint())
    for qp in (xrc.a, xrc.b):
        qp.to_reset()
    xrc.connect()
    srq = xrc.srqs[0]
    srq.post_srq_recv(rp.RecvWR(xrc.theirs[:64]))
    assert xrc.post(rp.Send(xrc.mine[:4], remote_srqn=srq.srq_num)) == 0


def test_missing_xrc_argument_is_named(context, xrc, pd, cq):
    for make, words in (
        (lambda: rp.QP(pd, QPType.XRC_RECV, xrcd=xrc.xrcd), "XRC_RECV queue pairs have no PD"),
        (
            lambda: rp.QP(None, QPType.XRC_RECV, cq, xrcd=xrc.xrcd),
            "have no PD and no CQs, but use those of the SRQ",
        ),
        (lambda: rp.QP(None, QPType.XRC_RECV), "XRC_RECV queue pairs need an XRC domain"),
        (
            lambda: rp.QP(pd, QPType.RC, cq, xrcd=xrc.xrcd),
            "xrcd is only for XRC_RECV queue pairs, not RC",
        ),
        (lambda: rp.QP(pd, QPType.RC, cq, srq=xrc.srqs[0]), "belong to the SRQ that a message"),
        (lambda: rp.QP(pd, QPType.XRC_SEND, cq, srq=xrc.srqs[0]), "belong to the SRQ"),
        (lambda: rp.SRQ(pd, srq_type=SRQType.XRC, cq=cq), "type XRC needs an XRC domain"),
        (lambda: rp.SRQ(pd, srq_type=SRQType.XRC, xrcd=xrc.xrcd), "type XRC needs a CQ"),
        (lambda: rp.SRQ(pd, xrcd=xrc.xrcd), "type BASIC has no use for an XRC domain"),
        (lambda: rp.XRCD(context, fd=1 << 31), r"fd=2147483648 is not in -1..2\^31-1"),
        (lambda: rp.XRCD(context, fd=-2), r"fd=-2 is not in -1..2\^31-1"),
        (lambda: rp.XRCD(context, -1, -1), "-0x1 is not a combination of os.O_CREAT and os.O_EXCL"),
        (lambda: rp.XRCD(context, -1, os.O_RDWR), "oflags=0x2 is not a combination of"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_xrc_domain_cannot_be_closed_before_what_is_in_it(xrc):
    with pytest.raises(rp.InUseError, match=r"XRCD cannot be closed: XRC SRQ of .* XRC_RECV QP"):
        xrc.xrcd.close()
    xrc.b.close()
    xrc.a.close()
    for srq in xrc.srqs:
        srq.close()
    xrc.xrcd.close()


def test_srq_limit_event_over_xrc_counts_the_named_srq(xrc):
    srq = xrc.srqs[0]
    srq.post_srq_recv([rp.RecvWR(xrc.theirs[:64]) for _ in range(2)])
    srq.arm_limit(2)
    assert xrc.post(rp.Send(xrc.mine[:1], remote_srqn=srq.srq_num)) == 0
    assert srq.query().srq_limit == 0


def test_closing_an_xrc_srq_delivers_its_completions(xrc):
    srq = xrc.srqs[0]
    srq.post_srq_recv(rp.RecvWR(xrc.theirs[:64], wr_id=8))
    assert xrc.post(rp.Send(xrc.mine[:1], remote_srqn=srq.srq_num)) == 0
    srq.close()
    assert [wc.wr_id for wc in srq.cq.poll()] == [8]
    assert xrc.post(rp.Send(xrc.mine[:1], remote_srqn=0xFFFFFF)) is WCStatus.REM_ACCESS_ERR


# ---- domains that a file names ----------------------------------------------------


def test_opening_one_file_twice_gives_one_xrc_domain(context, pd, stack, tmp_path):
    """Opening one with the same file gives the same domain; the queues of both work together."""
    needs(context.attr.device_cap_flags & DeviceCap.XRC, "XRC", context)
    with open(tmp_path / "domain", "w") as file, open(tmp_path / "domain") as again:
        with pytest.raises(rp.VerbsError):
            rp.XRCD(context, file.fileno(), 0)
        first = rp.XRCD(context, file.fileno())
        second = rp.XRCD(context, again.fileno(), 0)
        with pytest.raises(rp.VerbsError):
            rp.XRCD(context, again.fileno(), os.O_CREAT | os.O_EXCL)
        one = Xrc(stack, pd, queues=0)
        cq = stack.enter_context(rp.CQ(context))
        with rp.SRQ(pd, srq_type=SRQType.XRC, xrcd=first, cq=cq) as srq:
            target = rp.QP(None, QPType.XRC_RECV, xrcd=second)
            one.a.to_reset()
            one.a.connect(target.endpoint())
            target.connect(one.a.endpoint())
            srq.post_srq_recv(rp.RecvWR(one.theirs[:64]))
            assert one.post(rp.Send(one.mine[:4], remote_srqn=srq.srq_num)) == 0
            cq.wait(1)[0].check()
            target.close()
        first.close()
        second.close()
        # The last user has closed it, and the file no longer names one.
        with pytest.raises(rp.VerbsError):
            rp.XRCD(context, file.fileno(), 0)


def test_xrc_domain_of_a_closed_descriptor_is_refused(context):
    needs(context.attr.device_cap_flags & DeviceCap.XRC, "XRC", context)
    with pytest.raises(rp.VerbsError):
        rp.XRCD(context, 999999)

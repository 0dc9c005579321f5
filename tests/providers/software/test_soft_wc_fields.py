"""Completions (WC) of soft0: exactly the fields that each has."""

from __future__ import annotations

from typing import Any

from support import ALL, GRH, soft_context

import rdmapost as rp
from rdmapost import QPType, SendFlags, WCFlags, WCOpcode, WCStatus

context = soft_context


def success(wr_id: int, opcode: WCOpcode, qp: rp.QP, **fields: Any) -> rp.WC:
    """Make a completion with only the given values."""
    nothing = dict.fromkeys(rp.WC._fields, 0) | {
        "imm_data": None,
        "invalidated_rkey": None,
        "wc_flags": WCFlags(0),
        "tm_tag": None,
        "tm_priv": None,
        "completion_ts": None,
        "completion_wallclock_ns": None,
        "cvlan": None,
        "flow_tag": None,
    }
    said = {"wr_id": wr_id, "status": WCStatus.SUCCESS, "opcode": opcode, "qp_num": qp.qp_num}
    return rp.WC(**nothing | said | fields)


def test_completion_of_a_send_has_no_fields_of_a_receive(rc, stack):
    """byte_len is the number of bytes that a read or an atomic has returned."""
    region = stack.enter_context(rp.MR(rc.pd, 64, ALL | rp.Access.MW_BIND))
    window = stack.enter_context(rp.MW(rc.pd, rp.MWType.TYPE_2))
    key = window.next_rkey()
    binding = {"mr": region, "addr": region.addr, "length": 64}
    rc.b.post_recv([rp.RecvWR(rc.theirs[1024:1088], wr_id=9)] * 4)
    posted = [
        (rc.send(rc.mine[:8]), WCOpcode.SEND, 0),
        (rc.wr(rp.SendWithImm, rc.mine[:8], imm_data=7), WCOpcode.SEND, 0),
        (rc.wr(rp.RdmaWrite, rc.mine[:8]), WCOpcode.RDMA_WRITE, 0),
        (rc.wr(rp.RdmaWriteWithImm, rc.mine[:8], imm_data=7), WCOpcode.RDMA_WRITE, 0),
        (rc.wr(rp.RdmaRead, rc.mine[:24]), WCOpcode.RDMA_READ, 24),
        (rc.wr(rp.AtomicFetchAndAdd, rc.mine[:8]), WCOpcode.FETCH_ADD, 8),
        (rc.wr(rp.AtomicCmpAndSwp, rc.mine[:8]), WCOpcode.COMP_SWAP, 8),
        (rp.BindMW(mw=window, rkey=key, **binding), WCOpcode.BIND_MW, 0),
        (rp.LocalInv(invalidate_rkey=key), WCOpcode.LOCAL_INV, 0),
        (rc.wr(rp.SendWithInv, rc.mine[:8], invalidate_rkey=region.rkey), WCOpcode.SEND, 0),
    ]
    for number, (wr, opcode, byte_len) in enumerate(posted):
        wr.wr_id = 100 + number
        rc.a.post_send(wr)
        [done] = [wc for wc in rc.cq.poll() if wc.qp_num == rc.a.qp_num]
        assert done == success(100 + number, opcode, rc.a, byte_len=byte_len)


def test_completion_of_a_receive_has_exactly_the_fields_of_its_message(rc, stack):
    key = stack.enter_context(rp.MR(rc.pd, 64, ALL))
    for wr, fields in (
        (rc.send(rc.mine[:5]), {}),
        (
            rc.wr(rp.SendWithImm, rc.mine[:5], imm_data=7),
            {"imm_data": 7, "wc_flags": WCFlags.WITH_IMM},
        ),
        (
            rc.wr(rp.SendWithInv, rc.mine[:5], invalidate_rkey=key.rkey),
            {"invalidated_rkey": key.rkey, "wc_flags": WCFlags.WITH_INV},
        ),
        (
            rc.wr(rp.RdmaWriteWithImm, rc.mine[:5], imm_data=7),
            {"imm_data": 7, "wc_flags": WCFlags.WITH_IMM, "opcode": WCOpcode.RECV_RDMA_WITH_IMM},
        ),
    ):
        rc.b.post_recv(rp.RecvWR(rc.theirs[1024:1088], wr_id=9))
        rc.a.post_send(wr)
        [done] = [wc for wc in rc.wait(2) if wc.qp_num == rc.b.qp_num]
        assert done == success(9, **{"opcode": WCOpcode.RECV, "qp": rc.b, "byte_len": 5, **fields})


def test_completion_of_a_datagram_names_its_sender(connect, stack):
    """It also has the service level of the sender's path."""
    pair = connect(QPType.UD)
    attr = pair.ah.attr
    ah = stack.enter_context(
        rp.AH(pair.pd, rp.AHAttr(dgid=attr.dgid, sgid_index=attr.sgid_index, sl=3))
    )
    pair.b.post_recv(rp.RecvWR(pair.theirs[:256], wr_id=9))
    pair.a.post_send(pair.send(pair.mine[:5], ah=ah, wr_id=8))
    came = {"byte_len": GRH + 5, "src_qp": pair.a.qp_num, "sl": 3, "wc_flags": WCFlags.GRH}
    assert sorted(pair.wait(2)) == [
        success(8, WCOpcode.SEND, pair.a),
        success(9, WCOpcode.RECV, pair.b, **came),
    ]


def test_flushed_work_request_has_no_vendor_error(rc):
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=1))
    rc.b.to_err()
    rc.b.post_send(rp.Send(rc.theirs[:8], wr_id=2))
    found = [(wc.wr_id, wc.status, wc.qp_num, wc.vendor_err) for wc in rc.cq.wait(2)]
    assert found == [(i, WCStatus.WR_FLUSH_ERR, rc.b.qp_num, 0) for i in (1, 2)]


def test_completion_of_a_send_is_not_solicited(context, pd, cq, stack):
    """Even with SOLICITED, which is for the receiver; but an error counts as solicited."""
    channel = stack.enter_context(rp.CompChannel(context))
    own = stack.enter_context(rp.CQ(context, 8, channel=channel))
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    near = stack.enter_context(rp.QP(pd, QPType.RC, own))
    far = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    far.connect(near.endpoint())
    near.connect(far.endpoint())
    far.post_recv(rp.RecvWR(mr[:8]))
    own.req_notify(solicited_only=True)
    near.post_send(rp.Send(mr[:8], send_flags=SendFlags.SIGNALED | SendFlags.SOLICITED))
    assert len(own.poll()) == 1
    assert channel.get_cq_event(0) is None
    near.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey ^ 0xA5))
    assert channel.get_cq_event(0) is own

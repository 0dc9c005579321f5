"""Mistakes: in each marked line, mypy and pyright report the codes in the comment."""

from __future__ import annotations

import rdmapost as rp


def attributes(qp: rp.QP, e: rp.Endpoint) -> None:
    qp.modify(nonsense=3)  # fails: call-arg, reportCallIssue
    qp.modify(qp_state="RTS")  # fails: arg-type, reportArgumentType
    qp.connect(e, timeuot=3)  # fails: call-arg, reportCallIssue
    qp.connect(3)  # fails: arg-type, reportArgumentType
    qp.to_rts(min_rnr_timer=3)  # fails: call-arg, reportCallIssue
    qp.qp_numb  # fails: attr-defined, reportAttributeAccessIssue


def sizes(pd: rp.PD, cq: rp.CQ) -> None:
    rp.max_inline(pd, rp.QPType.RC, cq, max_send_sgee=3)  # fails: call-arg, reportCallIssue
    rp.max_inline(pd, rp.QPType.RC, cq, max_inline_data=3)  # fails: call-arg, reportCallIssue


def work_requests(qp: rp.QP, mr: rp.MR) -> None:
    rp.Send(b"x")  # fails: arg-type, reportArgumentType
    rp.Send(mr)  # fails: arg-type, reportArgumentType
    rp.Send(mr[:5], 7)  # fails: call-arg, reportCallIssue
    rp.Send(mr[:5], rkey=7)  # fails: call-arg, reportCallIssue
    rp.RdmaWrite(mr[:5], remote_adr=7)  # fails: call-arg, reportCallIssue
    rp.RdmaWrite(mr[:5], rkey="7")  # fails: arg-type, reportArgumentType
    mr[5]  # fails: index, reportArgumentType
    qp.post_send(rp.RecvWR(mr[:5]))  # fails: arg-type, reportArgumentType
    qp.post_recv(rp.Send(mr[:5]))  # fails: arg-type, reportArgumentType
    qp.post_send(mr[:5])  # fails: arg-type, reportArgumentType
    qp.post_columns(rp.RecvWR, mr[:5])  # fails: arg-type, reportArgumentType
    qp.post_columns(rp.RdmaWrite, mr[:5], remote_adr=7)  # fails: call-arg, reportCallIssue


def prepared(batch: rp.Batch, mr: rp.MR) -> None:
    batch[0].remote_adr += 64  # fails: attr-defined, reportAttributeAccessIssue
    batch[0].rkey = "7"  # fails: assignment, reportAttributeAccessIssue
    batch[0].sg_list = b"x"  # fails: assignment, reportAttributeAccessIssue
    batch[0:1]  # fails: index, reportArgumentType
    batch.post(3)  # fails: call-arg, reportCallIssue


def resources(context: rp.Context, pd: rp.PD, cq: rp.CQ, mr: rp.MR) -> None:
    rp.PD(pd)  # fails: arg-type, reportArgumentType
    rp.QP(pd, "RC", cq)  # fails: arg-type, reportArgumentType
    rp.QP(pd, rp.QPType.RC, cq, max_sends=3)  # fails: call-arg, reportCallIssue
    mr.addr = 3  # fails: misc, reportAttributeAccessIssue
    cq.wait("5")  # fails: arg-type, reportArgumentType
    rp.WCStatus.SUCESS  # fails: attr-defined, reportAttributeAccessIssue
    rp.nonsense  # fails: attr-defined, reportAttributeAccessIssue

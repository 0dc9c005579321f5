"""Diagnosing a queue pair: deliberate faults are found by name, and nothing changes."""

from __future__ import annotations

import dataclasses

import pytest
from support import ALL, needs, needs_send_op, prints, until
from support.findings import named, problems, wrong

import rdmapost as rp
from rdmapost import Access, QPState, QPType, SendFlags, WCStatus
from rdmapost.diagnose import Finding, diagnose_machine

GRANTED = ALL & ~Access.LOCAL_WRITE


@pytest.fixture
def unconnected(connect):
    return connect(to=QPState.RESET)


def join(pair, near: dict | None = None, far: dict | None = None) -> None:
    """Connect both sides, each with its own options."""
    pair.a.connect(pair.b.endpoint(), **{"access": GRANTED, "rnr_retry": 1, **(near or {})})
    pair.b.connect(pair.a.endpoint(), **{"access": GRANTED, "rnr_retry": 1, **(far or {})})


# ---- nothing is wrong -------------------------------------------------------------


def test_healthy_pair_has_no_problem(rc):
    rc.b.post_recv([rp.RecvWR(rc.theirs[:64]) for _ in range(2)])
    rc.a.post_send(rp.Send(rc.mine[:8]))
    rc.wait(2)
    for qp, peer in ((rc.a, rc.b), (rc.b, rc.a)):
        findings = qp.diagnose(peer)
        assert [f for f in findings if f.severity in ("problem", "warning")] == []
        assert named(findings, "qp-state").evidence == "in RTS: it sends and receives"
        assert named(findings, "peer").severity == "ok"


@pytest.mark.parametrize("qp_type", [QPType.UC, QPType.UD])
def test_healthy_pair_of_another_type_has_no_problem(connect, qp_type):
    pair = connect(qp_type)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:64]))
    pair.a.post_send(pair.send(pair.mine[:8]))
    pair.wait(2)
    assert wrong(pair.a, pair.b) == wrong(pair.b, pair.a) == []


def test_healthy_xrc_pair_has_no_problem(context, stack):
    needs(context.attr.device_cap_flags & rp.DeviceCap.XRC, "XRC", context)
    from rdmapost.loopback import Loopback

    with Loopback(context, QPType.XRC_SEND) as pair:
        pair.receive(8)
        pair.local.qp.post_send(rp.Send(pair.local.mr[:8], **pair.address))
        pair.sent()
        here, there = pair.local.qp, pair.remote.qp
        assert wrong(here, there) == wrong(there, here) == []


def test_xrc_sides_do_not_claim_what_they_cannot_do(context, stack):
    needs(context.attr.device_cap_flags & rp.DeviceCap.XRC, "XRC", context)
    from rdmapost.loopback import Loopback

    def said(name, *sides):
        [finding] = [finding for finding in sides[0].diagnose(*sides[1:]) if finding.name == name]
        return finding.evidence

    with Loopback(context, QPType.XRC_SEND) as pair:
        here, there = pair.local.qp, pair.remote.qp
        assert said("qp-state", here) == "in RTS: it sends, and has no receives"
        assert said("qp-state", there) == "in RTS: it receives, and has no sends"
        there.to_err()
        assert said("peer-state", here, there).endswith("is in ERR: it does not receive")
    with Loopback(context, QPType.XRC_SEND) as pair:
        pair.local.qp.to_err()
        assert said("peer-state", pair.remote.qp, pair.local.qp).endswith("it does not send")


def test_xrc_target_in_err_is_diagnosed(context, stack):
    """It has no CQ of its own."""
    needs(context.attr.device_cap_flags & rp.DeviceCap.XRC, "XRC", context)
    from rdmapost.loopback import Loopback

    with Loopback(context, QPType.XRC_SEND) as pair:
        pair.remote.qp.to_err()
        assert "qp-state" in wrong(pair.remote.qp, pair.local.qp)


def test_reads_and_writes_leave_the_pair_healthy(rc):
    """Even though the PSNs have changed."""
    rc.a.post_send([rc.wr(rp.RdmaRead, rc.mine[:8000]), rc.wr(rp.RdmaWrite, rc.mine[:8000])])
    rc.wait(2)
    assert wrong(rc.a, rc.b) == wrong(rc.b, rc.a) == []


def test_times_until_a_send_fails_are_reported(rc):
    findings = rc.a.diagnose()
    evidence = named(findings, "timeout").evidence
    assert "timeout=14 (67.1 ms) x (retry_cnt=6 + 1) = 0.47 s until RETRY_EXC_ERR" in evidence
    evidence = named(findings, "rnr-retry").evidence
    assert "rnr_retry=1 x the peer's min_rnr_timer=12 (0.64 ms) = 0.64 ms" in evidence


def test_diagnose_finding_prints_as_one_line():
    problem = Finding("odd", "problem", "it is odd", "mend it", "QP 0x11")
    assert str(problem) == "problem: odd: it is odd; mend it"
    assert str(dataclasses.replace(problem, severity="ok", remedy="")) == "ok: odd: it is odd"


def test_finding_is_a_dataclass_with_named_fields(rc):
    finding = rc.a.diagnose()[0]
    assert list(dataclasses.asdict(finding)) == ["name", "severity", "evidence", "remedy", "about"]
    assert finding.about == f"{rc.a} on {rc.pd.context.name}"


# ---- states -----------------------------------------------------------------------


def test_queue_pair_in_reset_or_init_is_a_problem(unconnected):
    a, b = unconnected.a, unconnected.b
    assert wrong(a) == ["qp-state"]
    assert "in RESET" in named(a.diagnose(), "qp-state").evidence
    a.to_init(GRANTED)
    finding = named(a.diagnose(b), "qp-state")
    assert finding.severity == "problem"
    assert finding.evidence.startswith("in INIT: receives can be posted; nothing arrives")
    assert "qp.connect(remote)" in finding.remedy


def test_peer_left_in_init_is_found_by_diagnose(unconnected):
    unconnected.b.to_init(GRANTED)
    unconnected.a.connect(unconnected.b.endpoint())
    finding = named(unconnected.a.diagnose(), "peer-state")
    assert finding.severity == "problem"
    assert "is in INIT: it does not receive" in finding.evidence
    assert finding.remedy == "peer.connect(qp.endpoint())"
    unconnected.b.connect(unconnected.a.endpoint())
    unconnected.works()


@pytest.mark.parametrize("resets", ["a", "b"])
def test_remedy_for_a_side_that_was_reset_is_to_reset_both(rc, resets):
    """The side that was reset has a new PSN, which the other does not expect."""
    rc.works()
    side, other = (rc.a, rc.b) if resets == "a" else (rc.b, rc.a)
    side.to_reset()
    remedy = named(side.diagnose(), "qp-state").remedy
    assert "first reset a peer that was connected to it" in remedy
    remedy = named(other.diagnose(side), "peer-state").remedy
    assert remedy.startswith("to_reset() both, then qp.connect(peer.endpoint())")
    other.to_reset()
    rc.connect()
    rc.works()


@pytest.mark.parametrize("to", [QPState.RESET, QPState.ERR], ids=lambda state: state.name)
def test_ud_peer_without_a_qkey_is_a_peer_to_connect_and_no_qkey_mismatch(connect, to):
    """A queue pair has no Q_Key before INIT."""
    pair = connect(QPType.UD, to=QPState.RESET)
    pair.a.connect()
    if to is QPState.ERR:
        if pair.b.pd.context.kind != "soft":
            pytest.skip(f"{pair.b.pd.context.name} does not go from RESET to ERR")
        pair.b.to_err()
    findings = pair.a.diagnose(pair.b)
    assert "qkey-mismatch" not in [finding.name for finding in findings]
    remedy = {"RESET": "peer.connect()", "ERR": "peer.to_reset() and peer.connect()"}
    assert named(findings, "peer-state").remedy == remedy[to.name]
    # The peer has no Q_Key yet, and reports no mismatch either.
    assert "qkey-mismatch" not in [finding.name for finding in pair.b.diagnose(pair.a)]


def test_qkey_that_a_message_must_carry_is_found_by_diagnose(connect):
    pair = connect(QPType.UD, to=QPState.RESET)
    pair.a.connect()
    pair.b.connect(qkey=5)
    finding = named(pair.a.diagnose(pair.b), "qkey-mismatch")
    assert (finding.severity, finding.remedy) == ("warning", "Send(..., remote_qkey=0x5)")


def test_receiver_in_rtr_is_a_warning(unconnected):
    a, b = unconnected.a, unconnected.b
    a.to_init(GRANTED)
    a.to_rtr(b.endpoint())
    findings = a.diagnose()
    assert named(findings, "qp-state").severity == "warning"
    # The attributes that to_rts sets have no effect yet.
    assert "timeout-0" not in [finding.name for finding in findings]


def test_failed_receive_on_ud_is_not_called_flushed_and_its_peer_is_left_alone():
    from rdmapost.loopback import Loopback

    with rp.open_device("soft0") as soft, Loopback(soft, QPType.UD) as pair:
        pair.receive(0)
        pair.local.qp.post_send(rp.Send(pair.cut(pair.local, 0, 4), **pair.address))
        pair.sent()[0].check()
        findings = pair.remote.qp.diagnose()
        assert "they failed or were flushed" in named(findings, "not-polled").evidence
        # There is no connection, and the other side has not failed.
        remedy = named(findings, "qp-state").remedy
        assert remedy.endswith("then qp.to_reset() and qp.connect()")
        assert pair.arrived()[0].status is WCStatus.LOC_LEN_ERR


def test_failed_queue_pair_says_what_waits_in_the_cq(rc):
    rc.b.post_recv([rp.RecvWR(rc.theirs[:8]) for _ in range(3)])
    rc.b.to_err()
    findings = rc.b.diagnose()
    assert named(findings, "qp-state").severity == "problem"
    remedy = named(findings, "qp-state").remedy
    assert "says why ('rdmapost explain STATUS')" in remedy
    assert remedy.endswith("qp.connect(remote) on both sides")
    assert named(findings, "not-polled").evidence.startswith("receives posted: 3 of")
    rc.cq.wait(3)
    assert "not-polled" not in [finding.name for finding in rc.b.diagnose()]
    assert "is in ERR" in named(rc.a.diagnose(rc.b), "peer-state").evidence


@pytest.mark.parametrize("fill", [False, True], ids=["room", "full"])
def test_unsignaled_send_that_succeeded_is_not_said_to_have_failed(context, connect, fill):
    """It has no completion, and counts until a later send completes (recovery.md)."""
    needs(context.kind == "soft", "write that has succeeded once its data has come", context)
    pair = connect(max_send_wr=4)
    a, sends = pair.a, pair.a.max_send_wr if fill else 1
    pair.mine.buffer[:8] = b"has come"
    a.post_send([pair.wr(rp.RdmaWrite, pair.mine[:8], send_flags=SendFlags(0), wr_id=3)] * sends)
    until(lambda: not pair.cq.poll() and bytes(pair.theirs.buffer[:8]) == b"has come")
    a.to_err()
    assert pair.cq.poll() == []
    findings = a.diagnose(pair.b)
    assert "not-polled" not in [finding.name for finding in findings]
    finding = named(findings, "outstanding")
    assert "wr_id 3: not yet polled, or done without SIGNALED" in finding.evidence
    last = rp.Send(pair.mine[:8])
    if fill:
        assert "only qp.to_reset() clears a full queue" in finding.remedy
        with pytest.raises(rp.PostError, match="the queue is full"):
            a.post_send(last)
        a.to_reset()
    else:
        assert "post a SIGNALED send: its flush retires the others" in finding.remedy
        a.post_send(last)
        assert pair.cq.wait(1, 10)[0].status is WCStatus.WR_FLUSH_ERR
    assert a.outstanding.send == 0


def test_failed_sends_that_all_have_completions_are_said_to_wait(connect):
    pair = connect(sq_sig_all=True)
    pair.a.to_err()
    pair.a.post_send(rp.Send(pair.mine[:8]))
    assert named(pair.a.diagnose(), "not-polled").remedy == "poll send_cq"


def test_what_an_endpoint_does_not_tell_is_said(rc):
    endpoint = rc.b.endpoint()
    rc.b.to_reset()
    evidence = named(rc.a.diagnose(endpoint), "peer").evidence
    assert evidence.endswith("; its state, dest_qp_num and rq_psn were not checked")


def test_closed_queue_pair_is_a_finding(rc):
    endpoint = rc.b.endpoint()
    assert wrong(rc.a, endpoint) == []
    rc.b.close()
    assert wrong(rc.b) == ["qp-closed"]
    assert wrong(rc.a, rc.b) == ["peer-closed"]
    # No queue pair in this process has the peer's number now.
    if rc.a.context.kind in ("soft", "roce"):
        assert wrong(rc.a) == wrong(rc.a, endpoint) == ["peer-closed"]
    else:
        finding = named(rc.a.diagnose(), "peer-unknown")
        assert "is not open in this process" in finding.evidence
        assert "if it was in this process, it is closed" in finding.remedy


def test_peer_on_another_open_of_the_device_is_found_by_diagnose(context, connect):
    a = connect(to=QPState.RESET).a
    with (
        rp.open_device(context.name) as again,
        rp.PD(again) as pd,
        rp.CQ(again) as cq,
        rp.QP(pd, QPType.RC, cq) as b,
    ):
        a.connect(b.endpoint())
        b.connect(a.endpoint())
        assert str(b) in named(a.diagnose(), "peer").evidence
        a.to_reset()


def test_arguments_of_another_type_are_named():
    for name in ("port_num", "gid_index", "memory"):
        with pytest.raises(TypeError, match=f"^{name}: expected int, got str"):
            diagnose_machine("soft0", **{name: "1"})
        with pytest.raises(ValueError, match=f"^{name}=-1 is not in"):
            diagnose_machine("soft0", **{name: -1})
    with pytest.raises(TypeError, match=r"^device: expected str or None, got int"):
        diagnose_machine(5)


def test_object_that_is_not_a_peer_is_refused(rc):
    with pytest.raises(TypeError, match="peer: expected QP or Endpoint, got str"):
        rc.a.diagnose("b")


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD])
def test_diagnosing_changes_nothing_in_any_state(connect, qp_type):
    """Attributes, outstanding work and completions are as before, whatever the state."""
    pair = connect(qp_type, to=QPState.RESET)
    a, b = pair.a, pair.b
    steps = [
        lambda: None,
        lambda: a.to_init(GRANTED),
        lambda: a.to_rtr(b.endpoint() if qp_type is not QPType.UD else None),
        a.to_rts,
        a.to_err,
        a.to_reset,
    ]
    for step in steps:
        step()
        before = (a.query(), a.outstanding)
        assert a.diagnose()
        assert a.diagnose(b)
        assert a.diagnose(b.endpoint())
        assert (a.query(), a.outstanding) == before


def test_diagnosing_leaves_posted_work_requests_alone(rc):
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=1))
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=2))
    rc.a.diagnose(rc.b)
    rc.b.diagnose(rc.a)
    assert sorted(wc.wr_id for wc in rc.wait(2)) == [1, 2]


# ---- timers -----------------------------------------------------------------------


def test_timeout_0_is_found_by_diagnose(unconnected):
    join(unconnected, {"timeout": 0})
    finding = named(unconnected.a.diagnose(), "timeout-0")
    assert finding.severity == "problem"
    assert "never fails" in finding.evidence
    assert "timeout=14" in finding.remedy
    assert wrong(unconnected.b) == []


def test_timeout_of_hours_is_found_by_diagnose(unconnected):
    join(unconnected, {"timeout": 31, "retry_cnt": 6})
    finding = named(unconnected.a.diagnose(), "timeout-long")
    assert "17.1 hours until RETRY_EXC_ERR" in finding.evidence


def test_rnr_retry_7_without_a_receive_is_found_by_diagnose(context, unconnected):
    join(unconnected, {"rnr_retry": 7})
    a, b = unconnected.a, unconnected.b
    # Nothing is posted, so nothing waits forever yet.
    assert named(a.diagnose(b), "rnr-retry-forever").severity == "warning"
    a.post_send(rp.Send(unconnected.mine[:8]))
    for findings in (a.diagnose(), a.diagnose(b)):
        finding = named(findings, "rnr-retry-forever")
        assert "the peer has none posted" in finding.evidence
        if context.kind == "verbs":
            # The device does not say which opcodes are pending.
            waits = [finding for finding in findings if finding.name == "recv-none-posted"]
            assert "warning" in [finding.severity for finding in waits]
        else:
            assert finding.severity == "problem"
            assert "sends outstanding here: 1" in finding.evidence
            assert "recv-none-posted" in problems(findings)
    b.post_recv(rp.RecvWR(unconnected.theirs[:8]))
    unconnected.wait(2)
    assert wrong(a, b) == []


def test_unknown_opcodes_in_flight_are_a_warning(context, unconnected, monkeypatch):
    """libibverbs does not report the opcodes of outstanding work requests."""
    monkeypatch.setattr(context._provider, "sends_for_receive", lambda *_: None)
    join(unconnected, {"rnr_retry": 7})
    unconnected.a.post_send(rp.Send(unconnected.mine[:8]))
    warned = [f for f in unconnected.a.diagnose(unconnected.b) if f.severity == "warning"]
    finding = named(warned, "recv-none-posted")
    assert "outstanding here: 1; a SEND or RDMA_WRITE_WITH_IMM among them waits" in finding.evidence
    assert finding.remedy == "peer.post_recv(...)"


@pytest.mark.parametrize("flags", [SendFlags.SIGNALED, SendFlags(0)])
@pytest.mark.parametrize("opcode", [rp.RdmaWrite, rp.RdmaRead, rp.AtomicFetchAndAdd])
def test_one_sided_work_needs_no_receive(context, unconnected, opcode, flags):
    join(unconnected, {"rnr_retry": 7})
    a, b, mine = unconnected.a, unconnected.b, unconnected.mine
    a.post_send(unconnected.wr(opcode, mine[:8], send_flags=flags))
    findings = a.diagnose(b)
    assert problems(findings) == []
    if context.kind == "soft":
        assert named(findings, "recv-none-posted").severity == "info"


def test_only_opcodes_that_consume_a_receive_are_counted(context, unconnected):
    needs(context.kind == "soft", "list of pending opcodes", context)
    join(unconnected, {"rnr_retry": 7})
    a, b, mine = unconnected.a, unconnected.b, unconnected.mine
    wrs = [unconnected.wr(wr_type, mine[:8]) for wr_type in (rp.RdmaWriteWithImm, rp.RdmaWrite)]
    a.post_send(wrs)
    assert "sends outstanding here: 1" in named(a.diagnose(b), "rnr-retry-forever").evidence


def test_unusual_attributes_are_warnings(unconnected):
    join(unconnected, {"rnr_retry": 0, "retry_cnt": 0, "max_rd_atomic": 0}, {"min_rnr_timer": 0})
    findings = unconnected.a.diagnose()
    for name in ("rnr-retry-0", "retry-cnt-0", "max-rd-atomic-0"):
        assert named(findings, name).severity == "warning"
    finding = named(unconnected.b.diagnose(), "min-rnr-timer-0")
    assert "min_rnr_timer=0 (0.655 s): 0 is the longest wait" in finding.evidence


def test_max_rd_atomic_above_the_limit_of_the_peer_is_found_by_diagnose(unconnected):
    join(unconnected, {"max_rd_atomic": 8}, {"max_dest_rd_atomic": 2})
    finding = named(unconnected.a.diagnose(), "rd-atomic-mismatch")
    assert "max_rd_atomic=8, but the peer's max_dest_rd_atomic=2" in finding.evidence
    assert finding.remedy.startswith("connect here with max_rd_atomic=2, or there with")


def test_peer_that_takes_no_reads_is_what_to_change(unconnected):
    join(unconnected, {"max_rd_atomic": 8}, {"max_dest_rd_atomic": 0})
    finding = named(unconnected.a.diagnose(), "rd-atomic-mismatch")
    assert finding.remedy == "connect the peer with max_dest_rd_atomic=8"


# ---- the path ---------------------------------------------------------------------


def test_gid_that_is_not_the_peers_is_found_by_diagnose(context, unconnected):
    """Both GIDs are the port's, but of two types."""
    port = context.query_port(1)
    needs(port.link_layer is rp.LinkLayer.ETHERNET, "GIDs made of IP addresses", context)
    a, b = unconnected.a, unconnected.b
    others = [entry.gid for entry in context.query_gid_table() if entry.gid.is_link_local]
    needs(others and not b.gid.gid.is_link_local, "second GID of another type", context)
    wanted = dataclasses.replace(b.endpoint(), gid=others[0])
    try:
        a.connect(wanted)
    except rp.VerbsError as error:
        # A driver may look up the path itself.
        assert error.call == "ibv_modify_qp"  # noqa: PT017
        return
    found = [finding for finding in a.diagnose(b) if finding.name == "gid-wrong"]
    assert {finding.severity for finding in found} == {"problem"}
    assert "is link-local" in " ".join(finding.evidence for finding in found) or any(
        "is IPv4" in finding.evidence for finding in found
    )
    assert any(f"{b} has {b.gid.gid}" in finding.evidence for finding in found)


def test_gid_of_no_device_is_found_by_diagnose(context, unconnected):
    needs(context.kind == "soft", "network confined to this machine", context)
    a, b = unconnected.a, unconnected.b
    a.connect(dataclasses.replace(b.endpoint(), gid=rp.GID("::ffff:10.9.9.9")))
    finding = named(a.diagnose(), "gid-wrong")
    assert finding.severity == "problem"
    assert "reaches only itself" in finding.evidence
    assert "gid-wrong" in wrong(a, b.endpoint())


def test_link_local_gid_is_a_warning(context, stack, pd, cq):
    table = context.query_gid_table()
    index = next((entry.gid_index for entry in table if entry.gid.is_link_local), None)
    needs(index is not None, "link-local GID", context)
    qp = stack.enter_context(rp.QP(pd, QPType.UD, cq, gid_index=index))
    findings = qp.diagnose()
    warned = {finding.name for finding in findings if finding.severity == "warning"}
    assert warned & {"gid-link-local", "gid-roce-v1"}


def test_gid_index_that_the_port_lacks_is_found_by_diagnose(stack, pd, cq, monkeypatch):
    """The network device has lost its address since the queue pair was created."""
    qp = stack.enter_context(rp.QP(pd, QPType.UD, cq, gid_index=0))
    monkeypatch.setattr(rp.Context, "query_gid_table", lambda *_: [])
    finding = named(qp.diagnose(), "gid-wrong")
    assert finding.severity == "problem"
    assert "no GID with index 0" in finding.evidence


def test_different_path_mtus_are_found(unconnected):
    small = dataclasses.replace(unconnected.b.endpoint(), mtu=rp.MTU.MTU_256)
    unconnected.a.connect(small)
    unconnected.b.connect(unconnected.a.endpoint())
    finding = named(unconnected.a.diagnose(), "mtu-mismatch")
    assert finding.severity == "problem"
    assert finding.evidence.startswith("path_mtu 256, but the peer's is ")


def test_psn_mismatch_is_found_by_diagnose(unconnected):
    far = unconnected.b.endpoint()
    unconnected.a.connect(dataclasses.replace(far, psn=far.psn ^ 0x800000))
    unconnected.b.connect(unconnected.a.endpoint())
    for qp in (unconnected.a, unconnected.b):
        assert wrong(qp) == ["psn-mismatch"]


def test_queue_pairs_that_do_not_name_each_other_are_found(unconnected, connect):
    third = connect(to=QPState.RESET)
    a, b = unconnected.a, unconnected.b
    a.connect(b.endpoint())
    b.connect(third.a.endpoint())
    finding = named(a.diagnose(), "dest-qp-num")
    assert finding.severity == "problem"
    assert f"not {a.qp_num:#x}, the number of {a}" in finding.evidence
    # diagnose() is a method of qp, and peer is its argument.
    assert "qp.connect(peer.endpoint())" in finding.remedy
    assert wrong(a, third.b.endpoint()) == ["dest-qp-num"]


def test_peers_of_two_types_are_found(connect):
    rc, uc = connect(), connect(QPType.UC)
    assert wrong(rc.a, uc.b) == ["qp-type-mismatch"]


def test_peer_is_compared_with_its_endpoint(rc):
    finding = named(rc.a.diagnose(rc.b.endpoint()), "peer")
    assert str(rc.b.endpoint()) in finding.evidence


def test_smaller_path_mtu_is_reported_as_an_endpoint_does_not_contain_it(unconnected):
    unconnected.a.connect(dataclasses.replace(unconnected.b.endpoint(), mtu=rp.MTU.MTU_256))
    largest = unconnected.a.context.query_port().active_mtu.bytes
    findings = unconnected.a.diagnose(unconnected.b.endpoint())
    (finding,) = [one for one in findings if (one.name, one.severity) == ("path-mtu", "info")]
    assert f"path_mtu 256, although both ports have {largest}" in finding.evidence


def test_access_that_the_peer_denies_is_reported(unconnected):
    join(unconnected, far={"access": Access.REMOTE_READ})
    finding = named(unconnected.a.diagnose(), "peer-access")
    assert "does not allow REMOTE_WRITE, REMOTE_ATOMIC" in finding.evidence


def test_diagnose_reports_access_for_flush(connect, context):
    needs_send_op(context, rp.SendOps.FLUSH)
    pair = connect(to=QPState.RESET, send_ops_flags=rp.SendOps.FLUSH)
    access = Access.REMOTE_READ | Access.FLUSH_PERSISTENT
    join(pair, near={"access": access}, far={"access": access})
    findings = pair.a.diagnose(pair.b)
    assert "a peer may REMOTE_READ, FLUSH_PERSISTENT," in named(findings, "access").evidence
    lacking = "does not allow REMOTE_WRITE, REMOTE_ATOMIC, FLUSH_GLOBAL:"
    assert lacking in named(findings, "peer-access").evidence


def test_peer_on_another_pd_is_reported(context, stack, pd, cq):
    a = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    other = stack.enter_context(rp.PD(context))
    b = stack.enter_context(rp.QP(other, QPType.RC, cq))
    a.connect(b.endpoint())
    b.connect(a.endpoint())
    assert named(a.diagnose(), "other-pd").severity == "info"


# ---- queues -----------------------------------------------------------------------


def test_full_send_queue_is_found_by_diagnose(connect):
    """None of the sends is SIGNALED: the classic mistake."""
    pair = connect(max_send_wr=4)
    depth = pair.a.max_send_wr
    write = pair.wr(rp.RdmaWrite, pair.mine[:8], send_flags=SendFlags(0), wr_id=5)
    pair.a.post_send([write] * (depth - 1))
    finding = named(pair.a.diagnose(), "outstanding")
    assert finding.severity == "info"
    assert "count until a later SIGNALED send completes" in finding.evidence
    pair.a.post_send(write)
    finding = named(pair.a.diagnose(), "send-queue-full")
    assert finding.severity == "warning"
    assert f"sends outstanding: {depth} of max_send_wr={depth}" in finding.evidence
    assert "the oldest with wr_id 5" in finding.evidence
    assert "if none of them is SIGNALED, no slot is ever freed" in finding.evidence


def test_remedy_for_a_full_queue_of_signaled_sends_is_to_poll(connect):
    pair = connect(max_send_wr=4, sq_sig_all=True)
    write = pair.wr(rp.RdmaWrite, pair.mine[:8])
    pair.a.post_send([write] * pair.a.max_send_wr)
    finding = named(pair.a.diagnose(), "send-queue-full")
    assert "SIGNALED" not in finding.evidence
    assert finding.remedy.startswith("poll send_cq")
    pair.wait(pair.a.max_send_wr)
    assert named(pair.a.diagnose(), "outstanding").severity == "ok"


def test_cq_that_is_too_small_is_found_by_diagnose(context, pd, stack):
    cq = stack.enter_context(rp.CQ(context, 1))
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    qp = stack.enter_context(rp.QP(pd, QPType.UD, cq, max_recv_wr=2 * cq.cqe + 2))
    assert named(qp.diagnose(), "cq-too-small").severity == "info"
    qp.connect()
    qp.post_recv([rp.RecvWR(mr[:8])] * (cq.cqe + 1))
    finding = named(qp.diagnose(), "cq-too-small")
    assert finding.severity == "warning"
    assert f"outstanding: {cq.cqe + 1};" in finding.evidence
    assert finding.remedy.startswith(f"cq.resize({qp.max_send_wr + qp.max_recv_wr})")
    qp.to_reset()


def test_default_cq_holds_the_completions_of_two_default_queue_pairs(context, pd, stack):
    cq = stack.enter_context(rp.CQ(context))
    for _ in range(2):
        qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    if qp.max_send_wr + qp.max_recv_wr <= 128:
        assert named(qp.diagnose(), "cq").severity == "ok"


def test_receives_of_a_shared_queue_are_counted(pd, cq, stack):
    srq = stack.enter_context(rp.SRQ(pd, 8))
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    a = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    b = stack.enter_context(rp.QP(pd, QPType.RC, cq, srq=srq))
    a.connect(b.endpoint(), rnr_retry=7)
    b.connect(a.endpoint())
    assert named(b.diagnose(), "recv-none-posted").remedy.startswith("srq.post_srq_recv")
    a.post_send(rp.Send(mr[:8]))
    assert "the peer has none posted" in named(a.diagnose(), "rnr-retry-forever").evidence
    srq.post_srq_recv(rp.RecvWR(mr[8:16]))
    cq.wait(2)
    assert wrong(a) == []


def test_queue_pair_of_the_parent_process_is_a_problem(context):
    """After a fork, the child has copies of the queue pair's memory and queues."""
    needs(context.kind == "soft", "device state inside the process", context)
    said = prints(
        "import os, sys, rdmapost as rp\n"
        "context = rp.open_device(sys.argv[1])\n"
        "pd, cq = rp.PD(context), rp.CQ(context)\n"
        "qp = rp.QP(pd, rp.QPType.UD, cq)\n"
        "child = os.fork()\n"
        "names = [finding.name for finding in qp.diagnose()]\n"
        "if not child: os._exit(0 if 'other-process' in names else 9)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 'other-process' in names)\n",
        context.name,
    )
    assert said == "0 False"


# ---- a send that fails ------------------------------------------------------------


def test_send_that_nothing_answers_is_explained(context, unconnected):
    """End to end: the send fails, and the diagnosis says why."""
    far = unconnected.b.endpoint()
    unconnected.a.connect(far, timeout=8, retry_cnt=1)
    unconnected.a.post_send(rp.Send(unconnected.mine[:8]))
    assert unconnected.cq.wait(1, 10)[0].status is WCStatus.RETRY_EXC_ERR
    findings = unconnected.a.diagnose()
    assert problems(findings) == ["qp-state", "peer-state"]
    assert "RESET" in named(findings, "peer-state").evidence


@pytest.mark.parametrize(
    ("near", "far", "options", "cause"),
    [
        ({}, {"psn": 7}, {}, "psn-mismatch"),
        ({"qp_num": 0x999}, {}, {}, "dest-qp-num"),
        ({}, {"qp_num": 0x999}, {}, "dest-qp-num"),
        ({}, {}, {"max_dest_rd_atomic": 0}, "rd-atomic-mismatch"),
        ({}, {}, {"access": 0}, "peer-access"),
    ],
)
def test_cause_is_still_found_after_the_failure(unconnected, near, far, options, cause):
    a, b = unconnected.a, unconnected.b
    a.connect(dataclasses.replace(b.endpoint(), **near), timeout=8, retry_cnt=1)
    b.connect(dataclasses.replace(a.endpoint(), **far), **options)
    found = [named(a.diagnose(b), cause)]
    read = unconnected.wr(rp.RdmaRead, unconnected.mine[:8])
    a.post_send([read, read])
    failed, flushed = unconnected.cq.wait(2, 10)
    assert failed.status not in (WCStatus.SUCCESS, WCStatus.WR_FLUSH_ERR)
    # rxe delivers the failure before it moves the queue pair to ERR, and flushes afterwards.
    assert flushed.status is WCStatus.WR_FLUSH_ERR
    assert a.state is QPState.ERR
    found.append(named(a.diagnose(b), cause))
    assert found[0] == found[1]


def test_settings_of_a_failed_queue_pair_are_those_that_were_set(connect, monkeypatch):
    """In ERR a device may report other values (ibv_query_qp(3))."""
    pair = connect(to=QPState.RESET)
    join(pair, far={"access": 0, "max_dest_rd_atomic": 1})
    before = {finding.name: finding for finding in pair.a.diagnose(pair.b)}
    query = rp.QP.query

    def after_a_failure(qp):
        return dataclasses.replace(
            query(qp),
            qp_state=QPState.ERR,
            dest_qp_num=0,
            qp_access_flags=Access.REMOTE_WRITE,
            max_dest_rd_atomic=0,
            max_rd_atomic=0,
            rq_psn=0,
            sq_psn=0,
            timeout=0,
            path_mtu=None,
            ah_attr=rp.AHAttr(),
        )

    monkeypatch.setattr(rp.QP, "query", after_a_failure)
    after = {finding.name: finding for finding in pair.a.diagnose(pair.b)}
    for name in ("peer-access", "rd-atomic-mismatch", "timeout", "gid", "path-mtu", "access"):
        assert after[name] == before[name]
    assert not {"dest-qp-num", "psn-mismatch", "timeout-0"} & after.keys()


def test_queue_pair_that_failed_before_it_was_connected_has_no_peer(unconnected):
    unconnected.a.to_init()
    unconnected.a.to_err()
    assert wrong(unconnected.a, unconnected.b) == ["qp-state", "peer-state"]


def test_refused_access_ends_with_the_status_that_the_findings_name(unconnected):
    join(unconnected, far={"access": 0})
    unconnected.a.post_send(unconnected.wr(rp.RdmaWrite, unconnected.mine[:8]))
    status = unconnected.cq.wait(1, 10)[0].status
    there = named(unconnected.b.diagnose(), "access-none").evidence
    here = named(unconnected.a.diagnose(), "peer-access").evidence
    for evidence in (there, here):
        assert evidence.endswith(f"end with {status.name}")


def test_refused_write_on_uc_is_said_to_be_dropped(connect):
    pair = connect(QPType.UC, to=QPState.RESET)
    join(pair, far={"access": 0})
    assert named(pair.b.diagnose(), "access-none").evidence.endswith("but its writes are dropped")
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8]))
    assert pair.cq.wait(1, 10)[0].status is WCStatus.SUCCESS
    assert pair.b.state is QPState.RTS


def test_psn_that_the_endpoint_does_not_have_is_found_by_diagnose(unconnected):
    far = unconnected.b.endpoint()
    unconnected.a.connect(dataclasses.replace(far, psn=far.psn ^ 1))
    assert wrong(unconnected.a, far) == ["psn-mismatch"]

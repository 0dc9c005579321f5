"""What the software device refuses when resources are created and changed, and its events."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os

import pytest
from support import prints, soft_context
from support.findings import named

import rdmapost as rp
from rdmapost import EventType, QPState, QPType, WCStatus

context = soft_context


def refused(caught: pytest.ExceptionInfo[rp.VerbsError], call: str, words: str = "") -> None:
    """Check that a call was refused with EINVAL, and the reason in the text."""
    assert (caught.value.call, caught.value.errno) == (call, errno.EINVAL)
    assert words in str(caught.value)


# ---- creating ---------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(16385, 1), (1, 33), (0, 1), (1, 0)])
def test_srq_of_an_unsupported_size_is_refused(pd, sizes):
    with pytest.raises(rp.VerbsError) as caught:
        rp.SRQ(pd, *sizes)
    refused(caught, "ibv_create_srq", "max_wr is in 1..16384 and max_sge in 1..32")
    rp.SRQ(pd, 16384, 32).close()


@pytest.mark.parametrize("tm_info", [False, True])
def test_cq_of_an_unsupported_size_is_refused(context, tm_info):
    with pytest.raises(ValueError, match=r"cqe=1048577 is not in 1\.\.1048576"):
        rp.CQ(context, (1 << 20) + 1, tm_info=tm_info)
    with rp.CQ(context, 1 << 20, tm_info=tm_info) as cq:
        assert cq.cqe == 1 << 20


@pytest.mark.parametrize("attr", [{"sgid_index": 99}, {"port_num": 2}, {"dgid": None, "dlid": 7}])
def test_address_handle_without_a_usable_path_is_refused(pd, context, attr):
    gid = rp.choose_gid(context).gid
    with pytest.raises((rp.VerbsError, ValueError)) as caught:
        rp.AH(pd, rp.AHAttr(**{"dgid": gid, **attr}))
    if isinstance(caught.value, rp.VerbsError):
        refused(caught, "ibv_create_ah")


def test_pkey_table_has_exactly_one_entry(context):
    assert context.query_pkey(1, 0) == 0xFFFF
    with pytest.raises(rp.VerbsError) as caught:
        context.query_pkey(1, 1)
    refused(caught, "ibv_query_pkey")


def test_comp_channel_without_a_free_descriptor_raises_emfile():
    """Its descriptor counts against the process's limit."""
    said = prints(
        "import resource, rdmapost as rp\n"
        "with rp.open_device('soft0') as context:\n"
        "    rp.CompChannel(context).close()\n"
        "    import os; files = len(os.listdir('/proc/self/fd')) - 1\n"
        "    limits = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (files, limits[1]))\n"
        "    try: rp.CompChannel(context)\n"
        "    except rp.VerbsError as error: print(error)\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, limits)\n"
        "    rp.CompChannel(context).close()\n"
    )
    assert said.startswith("ibv_create_comp_channel: EMFILE (24, Too many open files)")


# ---- changing ---------------------------------------------------------------------


def test_srq_limit_above_max_wr_is_refused(pd):
    with rp.SRQ(pd, 8) as srq:
        with pytest.raises(rp.VerbsError) as caught:
            srq.arm_limit(9)
        refused(caught, "ibv_modify_srq", "srq_limit=9 is more than max_wr=8")
        assert srq.query().srq_limit == 0
        srq.arm_limit(8)
        assert srq.query().srq_limit == 8


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("path_mtu", 1, 5),
        ("timeout", 0, 31),
        ("retry_cnt", 0, 7),
        ("rnr_retry", 0, 7),
        ("min_rnr_timer", 0, 31),
        ("max_rd_atomic", 0, 16),
        ("max_dest_rd_atomic", 0, 16),
        ("dest_qp_num", 0, 0xFFFFFF),
        ("pkey_index", 0, 0),
        ("qp_access_flags", 0, 0x3FF003FF),
    ],
)
def test_qp_attribute_outside_its_range_is_refused(pd, cq, name, low, high):
    """Both ends are accepted; values beyond leave the queue pair unchanged."""
    with rp.QP(pd, QPType.RC, cq) as qp:
        transitions = {
            QPState.INIT: {"port_num": 1, "pkey_index": 0, "qp_access_flags": 0},
            QPState.RTR: {
                "ah_attr": qp.path_to(qp.endpoint()),
                "path_mtu": 3,
                "dest_qp_num": qp.qp_num,
                "rq_psn": 0,
                "min_rnr_timer": 12,
                "max_dest_rd_atomic": 1,
            },
            QPState.RTS: {
                "sq_psn": 0,
                "timeout": 14,
                "retry_cnt": 7,
                "rnr_retry": 7,
                "max_rd_atomic": 1,
            },
        }
        for value, fits in ((low - 1, False), (high + 1, False), (low, True), (high, True)):
            if value < 0:
                continue
            qp.to_reset()
            for state, attrs in transitions.items():
                if name not in attrs:
                    qp.modify(qp_state=state, **attrs)
                    continue
                before = qp.state
                changed = {**attrs, name: value}
                if fits:
                    qp.modify(qp_state=state, **changed)
                    assert qp.state is state
                else:
                    with pytest.raises(rp.VerbsError) as caught:
                        qp.modify(qp_state=state, **changed)
                    refused(caught, "ibv_modify_qp")
                    assert qp.state is before
                break


def test_attribute_that_a_transition_does_not_allow_is_refused(pd, cq):
    with rp.QP(pd, QPType.RC, cq) as qp:
        with pytest.raises(rp.VerbsError) as caught:
            qp.modify(qp_state=QPState.INIT, port_num=1, pkey_index=0, qp_access_flags=0, timeout=3)
        refused(caught, "ibv_modify_qp")
        assert qp.state is QPState.RESET


def test_wrong_cur_qp_state_is_refused(rc):
    with pytest.raises(rp.VerbsError) as caught:
        rc.a.modify(cur_qp_state=QPState.SQD, qp_state=QPState.RTS)
    refused(caught, "ibv_modify_qp")
    rc.a.modify(cur_qp_state=QPState.RTS, qp_state=QPState.RTS)
    rc.works()


# ---- events -----------------------------------------------------------------------


def event(context: rp.Context) -> rp.AsyncEvent:
    found = rp.get_async_event(context, 5)
    assert found is not None
    return found


def test_sq_drained_is_raised_only_on_request():
    with (
        rp.open_device("soft0") as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.QP(pd, QPType.RC, cq) as qp,
    ):
        qp.connect(qp.endpoint())
        while rp.get_async_event(context, 0) is not None:
            pass
        qp.to_sqd()
        assert rp.get_async_event(context, 0) is None
        qp.to_rts()
        qp.modify(qp_state=QPState.SQD, en_sqd_async_notify=1)
        found = event(context)
        assert (found.event_type, found.element) == (EventType.SQ_DRAINED, qp)
        # The request was for that transition only.
        qp.modify(qp_state=QPState.SQD, timeout=9)
        qp.to_rts()
        qp.to_sqd()
        assert rp.get_async_event(context, 0) is None


@contextlib.contextmanager
def small_cq(qp_type):
    """Open a device, and give a CQ for one completion, memory, and a queue pair."""
    with (
        rp.open_device("soft0") as context,
        rp.PD(context) as pd,
        rp.CQ(context, 1) as cq,
        rp.MR(pd, 64) as mr,
        rp.QP(pd, qp_type, cq) as qp,
    ):
        yield context, cq, mr, qp


def test_cq_overrun_breaks_its_queue_pair():
    """A completion without room is lost, and its queue pair breaks."""
    with small_cq(QPType.UD) as (context, cq, mr, qp):
        qp.connect()
        while rp.get_async_event(context, 0) is not None:
            pass
        ah = qp.ah_to(qp.endpoint())
        send = rp.Send(mr[:8], ah=ah, remote_qpn=1, remote_qkey=1)
        qp.post_send([send, send])
        types = [event(context).event_type for _ in range(2)]
        assert types == [EventType.CQ_ERR, EventType.QP_FATAL]
        assert qp.state is QPState.ERR
        # It breaks only once.
        qp.post_send(send)
        assert "the CQ has overrun" in named(qp.diagnose(), "cq-overrun").evidence
        assert rp.get_async_event(context, 0) is None
        assert [wc.status for wc in cq.poll()] == [WCStatus.SUCCESS]
        assert_points_at_the_overrun(qp)
        qp.close()
        ah.close()


def assert_points_at_the_overrun(qp):
    findings = qp.diagnose()
    assert not [finding for finding in findings if finding.name == "not-polled"]
    state = named(findings, "qp-state")
    assert "its CQ has overrun" in state.evidence
    assert "poll" not in state.remedy


def test_timeout_of_a_wait_for_lost_completions_names_the_overrun():
    """And the event stays for another waiter."""
    with small_cq(QPType.RC) as (context, cq, mr, qp):
        qp.to_init()
        qp.post_recv([rp.RecvWR(mr[:8]), rp.RecvWR(mr[:8]), rp.RecvWR(mr[:8])])
        with pytest.raises(rp.WaitTimeout, match=r"0 of 3 completions came within 0 s$"):
            cq.wait(3, timeout=0)
        qp.to_err()
        words = r"1 of 3 completions came within 0 s; the CQ has overrun"
        with pytest.raises(rp.WaitTimeout, match=words):
            cq.wait(3, timeout=0)
        with pytest.raises(rp.WaitTimeout, match=words):
            asyncio.run(cq.completions(3, timeout=0))
        assert_points_at_the_overrun(qp)
        found = event(context)
        assert (found.event_type, found.element) == (EventType.CQ_ERR, cq)


@pytest.mark.parametrize("returned", [False, True], ids=["taken", "returned"])
def test_overrun_reported_only_by_an_event_is_known_after_the_event(monkeypatch, returned):
    """As with libibverbs."""
    with small_cq(QPType.RC) as (context, cq, mr, qp):
        monkeypatch.setattr(context._provider, "has_overrun", lambda *_: False)
        qp.to_init()
        qp.post_recv([rp.RecvWR(mr[:8]), rp.RecvWR(mr[:8])])
        qp.to_err()
        with pytest.raises(rp.WaitTimeout, match=r"within 0 s$"):
            cq.wait(2, timeout=0)
        if returned:
            assert event(context).event_type == EventType.CQ_ERR
        else:
            # A signal handler has ended get_async_event().
            assert context._take_event()
        with pytest.raises(rp.WaitTimeout, match="the CQ has overrun"):
            cq.wait(2, timeout=0)


def test_cq_overrun_by_a_flush_is_reported():
    with small_cq(QPType.RC) as (context, cq, mr, qp):
        qp.to_init()
        qp.post_recv([rp.RecvWR(mr[:8]), rp.RecvWR(mr[:8]), rp.RecvWR(mr[:8])])
        qp.to_err()
        found = event(context)
        assert (found.event_type, found.element) == (EventType.CQ_ERR, cq)
        assert rp.get_async_event(context, 0) is None
        assert [wc.status for wc in cq.poll()] == [WCStatus.WR_FLUSH_ERR]


def test_overrun_of_an_xrc_srqs_cq_is_reported_to_the_device_that_has_the_cq(tmp_path):
    """The queue pair whose message overruns it is on another open device."""
    file = os.open(tmp_path / "domain", os.O_CREAT | os.O_RDWR)
    with (
        rp.open_device("soft0") as near,
        rp.open_device("soft0") as far,
        contextlib.ExitStack() as on,
    ):
        pd, far_pd = on.enter_context(rp.PD(near)), on.enter_context(rp.PD(far))
        xrcd = on.enter_context(rp.XRCD(near, file))
        far_xrcd = on.enter_context(rp.XRCD(far, file))
        cq, small = on.enter_context(rp.CQ(near, 64)), on.enter_context(rp.CQ(far, 2))
        mr, far_mr = on.enter_context(rp.MR(pd, 64)), on.enter_context(rp.MR(far_pd, 64))
        srq = on.enter_context(rp.SRQ(far_pd, srq_type=rp.SRQType.XRC, xrcd=far_xrcd, cq=small))
        sender = on.enter_context(rp.QP(pd, QPType.XRC_SEND, cq))
        target = on.enter_context(rp.QP(pd, QPType.XRC_RECV, cq, xrcd=xrcd))
        sender.connect(target.endpoint())
        target.connect(sender.endpoint())
        for _ in range(3):
            srq.post_srq_recv(rp.RecvWR(far_mr[:8]))
            sender.post_send(rp.Send(mr[:8], remote_srqn=srq.srq_num))
        found = event(far)
        assert (found.event_type, found.element) == (EventType.CQ_ERR, small)
        assert event(near).event_type is EventType.QP_FATAL
        assert rp.get_async_event(near, 0) is None
    os.close(file)

"""The errors when a device refuses, or lies: on the benchmarks' null device.

No library at hand refuses on demand, so the null device stands in for libibverbs here; it is told
which call must fail and how.
"""

from __future__ import annotations

import errno

import pytest
from support import needs, null_device

import rdmapost as rp

null = null_device.null
on_null = null_device.on_null


@pytest.mark.parametrize(
    ("call", "make"),
    [
        ("ibv_alloc_pd", "rp.PD(context)"),
        ("ibv_create_cq", "rp.CQ(context)"),
        ("ibv_create_comp_channel", "rp.CompChannel(context)"),
        ("ibv_create_srq", "rp.SRQ(pd)"),
        ("ibv_create_qp", "rp.QP(pd, rp.QPType.RC, cq)"),
        ("ibv_create_ah", "rp.AH(pd, rp.AHAttr(dlid=1))"),
    ],
)
def test_resource_that_cannot_be_made_names_the_call_and_the_errno(on_null, call, make):
    code = f"""
    with rp.open_device("null0") as context:
        pd, cq = {"None, None" if "(context)" in make else "rp.PD(context), rp.CQ(context)"}
        print(said(lambda: {make}))
        del pd, cq
    """
    text = on_null(code, NULL_REFUSES=f"{call}=12")
    assert text.startswith(f"VerbsError: {call}: ENOMEM (12, Cannot allocate memory)")
    assert on_null(code, NULL_REFUSES=f"{call}=95").startswith(f"UnsupportedError: {call} is not")


def test_refused_send_ops_flags_are_named(on_null):
    """Those that only later releases of libibverbs have, and those that all have."""
    code = """
    with rp.open_device("null0") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
        for flags in (rp.SendOps.SEND, rp.SendOps.SEND | rp.SendOps.FLUSH):
            print(said(lambda: rp.QP(pd, rp.QPType.RC, cq, send_ops_flags=flags, checked=False)))
    """
    first, second = on_null(code, NULL_REFUSES="ibv_create_qp=95").splitlines()
    assert "send_ops_flags=SEND: not null0, but the installed libibverbs" in first
    assert "send_ops_flags=SEND|FLUSH: null0 has no FLUSH" in second


def test_resource_that_the_device_does_not_give_back_stays_open(on_null):
    text = on_null(
        """
        context, pd, cq = resources()
        mr = rp.MR(pd, 64)
        print(said(mr.close), mr.closed)
        """,
        NULL_REFUSES="ibv_dereg_mr=16",
    )
    assert text.startswith("VerbsError: ibv_dereg_mr: EBUSY (16")
    assert text.endswith("False")


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EINVAL])
def test_region_that_the_device_keeps_for_a_window_is_in_use(on_null, code):
    """Devices disagree on the errno. The library knows which window is bound."""
    text = on_null(
        """
        import ctypes, os
        ctypes.CDLL(os.environ["RDMAPOST_LIBIBVERBS"]).null_remember(1)
        context, pd, cq = resources()
        qp = rp.QP(pd, rp.QPType.RC, cq)
        qp.connect(rp.Endpoint(1, 2, "::ffff:192.0.2.1", 0, rp.MTU.MTU_1024))
        mr = rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.MW_BIND)
        mw, unbound = rp.MW(pd), rp.MW(pd)
        qp.post_send(rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=mr, addr=mr.addr, length=64))
        cq.wait()
        print(said(mr.close) == f"InUseError: {mr} cannot be closed: {mw} bound to it; "
              "unbind or close it first", mr.closed)
        """,
        NULL_REFUSES=f"ibv_dereg_mr={int(code)}",
    )
    assert text == "True False"


def test_verb_that_the_library_lacks_is_an_unsupported_error(on_null):
    """The null device has neither the calls of multicast nor those of extended CQs."""
    text = on_null("""
    context, pd, cq = resources()
    qp = rp.QP(pd, rp.QPType.UD, cq)
    print(said(lambda: qp.attach_mcast("ff02::1")))
    print(said(lambda: rp.MW(pd, rp.MWType.TYPE_1).close()))
    extended = said(lambda: rp.CQ(context, wc_flags=rp.WCExFlags.WITH_TM_INFO))
    print(extended)
    """)
    multicast, window, extended = text.splitlines()
    assert multicast == (
        "UnsupportedError: ibv_attach_mcast is not supported: null0 has no multicast"
    )
    assert window == "None"
    assert extended.startswith("UnsupportedError: ibv_create_cq_ex is not supported")


def test_tag_matching_on_a_device_without_it_is_an_unsupported_error(verbs_context):
    """The message is more than errno 95."""
    needs(verbs_context.attr.max_srq, "shared receive queues", verbs_context)
    with rp.PD(verbs_context) as pd, rp.SRQ(pd) as srq:
        for wr in (rp.TagAdd(tag=1), rp.TagDel(), rp.TagSync()):
            with pytest.raises(
                rp.PostError, match=f"tag matching is not supported by {verbs_context.name}"
            ) as caught:
                srq.post_srq_ops(wr)
            assert (caught.value.index, caught.value.posted) == (0, 0)
        assert srq.outstanding == 0


def test_refusal_of_a_verb_names_the_device(on_null):
    """Whichever resource needs it."""
    text = on_null(
        """
        import os
        context, pd, cq = resources()
        qp = rp.QP(pd, rp.QPType.RC, cq)
        os.environ["NULL_REFUSES"] = "ibv_open_xrcd=95"
        print(said(lambda: rp.XRCD(context)))
        os.environ["NULL_REFUSES"] = "ibv_modify_qp=95"
        print(said(lambda: qp.modify(qp_state=rp.QPState.RESET, rate_limit=5)))
        """
    )
    assert text.splitlines() == [
        "UnsupportedError: ibv_open_xrcd is not supported: null0 has no XRC",
        "UnsupportedError: ibv_modify_qp is not supported: rate_limit cannot be changed from RESET "
        "to RESET (ibv_modify_qp(3))",
    ]


@pytest.mark.parametrize(("fails", "state"), [(1, "RESET"), (7, "RESET"), (8, "ERR")])
def test_queue_pair_that_the_device_moves_to_err_is_reset_again(on_null, fails, state):
    """A request that it was handling may fail during the reset; what was posted is dropped."""
    text = on_null(
        """
        context, pd, cq = resources()
        qp = rp.QP(pd, rp.QPType.RC, cq)
        qp.to_init()
        with rp.MR(pd, 64) as mr:
            qp.post_recv(rp.RecvWR(mr[:8]))
            print(said(qp.to_reset), qp.state.name, qp.query().qp_state.name, sep="; ")
        """,
        NULL_RESETS_FAIL=str(fails),
    )
    refused = (
        "VerbsError: ibv_modify_qp: EBUSY (16, Device or resource busy): the device moved the QP "
        "to ERR again after each of 8 resets"
    )
    assert text == f"{refused if state == 'ERR' else None}; {state}; {state}"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENETUNREACH, errno.EHOSTUNREACH])
def test_address_handle_that_cannot_reach_its_peer_names_both_addresses(on_null, code):
    """Where the source GID is IPv6 and the peer's IPv4, Linux says EINVAL."""
    text = on_null(
        """
        context, pd, cq = resources()
        print(said(lambda: rp.AH(pd, rp.AHAttr(dgid="::ffff:192.0.2.1"))))
        """,
        NULL_REFUSES=f"ibv_create_ah={int(code)}",
    )
    assert text.startswith(f"VerbsError: ibv_create_ah: {errno.errorcode[code]} ")
    assert "::ffff:192.0.2.1 cannot be reached from GID 0 (fe80::1)" in text
    assert text.endswith("('rdmapost devices -v' lists this machine's)")

"""Limits of soft0: sizes and attributes beyond them are refused."""

from __future__ import annotations

import contextlib
import errno
import time

import pytest
from support import prints, soft_context

import rdmapost as rp
from rdmapost import QPState, QPType
from rdmapost.providers.soft0 import device
from rdmapost.resources import qp_modify_arguments

context = soft_context


def refused(caught: pytest.ExceptionInfo[rp.VerbsError], call: str, words: str = "") -> None:
    """Check that a call was refused with EINVAL, and the reason in the text."""
    assert (caught.value.call, caught.value.errno) == (call, errno.EINVAL)
    assert words in str(caught.value)


# ---- creating ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((16385, 1), "max_wr=16385 is more than the device's max_srq_wr=16384"),
        ((1, 33), "max_sge=33 is more than the device's max_srq_sge=32"),
        ((0, 1), "max_wr=0 is not in 1..16384"),
        ((1, 0), "max_sge=0 is not in 1..32"),
    ],
)
def test_srq_of_an_unsupported_size_is_refused(pd, sizes, words):
    with pytest.raises(rp.VerbsError) as caught:
        rp.SRQ(pd, *sizes)
    refused(caught, "ibv_create_srq", words)
    rp.SRQ(pd, 16384, 32).close()


@pytest.mark.parametrize("wc_flags", [0, rp.WCExFlags.WITH_TM_INFO])
def test_cq_of_an_unsupported_size_is_refused(context, wc_flags):
    with pytest.raises(ValueError, match=r"cqe=1048577 is not in 1\.\.1048576"):
        rp.CQ(context, (1 << 20) + 1, wc_flags=wc_flags)
    with rp.CQ(context, 1 << 20, wc_flags=wc_flags) as cq:
        assert cq.cqe == 1 << 20


def test_queue_pair_of_a_type_that_only_drivers_know_is_refused_by_its_name(pd):
    with rp.CQ(pd.context) as cq, pytest.raises(rp.UnsupportedError) as caught:
        rp.QP(pd, QPType.DRIVER, cq)
    assert str(caught.value).endswith("soft0 has no DRIVER queue pairs")


@pytest.mark.parametrize("attr", [{"sgid_index": 99}, {"port_num": 2}, {"dgid": None, "dlid": 7}])
def test_address_handle_without_a_usable_path_is_refused(pd, context, attr):
    gid = context.choose_gid().gid
    with pytest.raises((rp.VerbsError, ValueError)) as caught:
        rp.AH(pd, rp.AHAttr(**{"dgid": gid, **attr}))
    if isinstance(caught.value, rp.VerbsError):
        refused(caught, "ibv_create_ah")


def test_vendor_and_part_are_not_those_of_any_hardware(context):
    """A vendor_id of 0 would be that of no device at all."""
    assert (context.attr.vendor_id, context.attr.vendor_part_id) == (0x50F700, 1)


def test_pkey_table_has_exactly_one_entry(context):
    assert context.query_pkey(1, 0) == 0xFFFF
    with pytest.raises(ValueError, match=r"^pkey_index=1 is not in 0\.\.0, "):
        context.query_pkey(1, 1)


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
        ("rq_psn", 0, 0xFFFFFF),
        ("sq_psn", 0, 0xFFFFFF),
        ("pkey_index", 0, 0),
        ("qp_access_flags", 0, 0x3FF003FF),
    ],
)
def test_qp_attribute_outside_its_range_is_refused(pd, cq, monkeypatch, name, low, high):
    """Both ends are accepted; values beyond leave the queue pair unchanged."""
    # The library would refuse most of them before the device sees them.
    monkeypatch.setattr(qp_modify_arguments, "RANGES", {})
    monkeypatch.setattr(qp_modify_arguments, "_PATHS", ())
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


@pytest.mark.parametrize("attr", ["port_num", "pkey_index"])
def test_unknown_port_or_pkey_index_is_refused(rc, monkeypatch, attr):
    # The library refuses them before the device sees them.
    monkeypatch.setattr(qp_modify_arguments, "_PATHS", ())
    rc.a.to_reset()
    attrs = {"port_num": 1, "pkey_index": 0, "qp_access_flags": 0}
    with pytest.raises(rp.VerbsError, match=r"EINVAL.*stays in RESET"):
        rc.a.modify(qp_state=QPState.INIT, **attrs | {attr: attrs[attr] + 1})
    if attr == "port_num":
        with pytest.raises(rp.VerbsError, match=r"EINVAL.*stays in RESET"):
            rc.a.modify(qp_state=QPState.INIT, **attrs | {"port_num": 0})
    rc.a.modify(qp_state=QPState.INIT, **attrs)


# ---- multicast --------------------------------------------------------------------


def test_groups_and_their_members_are_limited(context, pd, monkeypatch):
    assert (context.attr.max_mcast_grp, context.attr.max_mcast_qp_attach) == (8192, 256)
    monkeypatch.setattr(device, "MAX_MCAST_GRP", 2)
    monkeypatch.setattr(device, "MAX_MCAST_QP_ATTACH", 2)
    with rp.CQ(context) as cq, contextlib.ExitStack() as stack:
        a, b, c = [stack.enter_context(rp.QP(pd, QPType.UD, cq)) for _ in range(3)]
        for qp in (a, b, a):
            qp.attach_mcast("ff0e::1")
        a.attach_mcast("ff0e::2")
        for group in ("ff0e::1", "ff0e::3"):
            with pytest.raises(rp.VerbsError, match=r"ENOMEM.*at most 8192 groups .* with 256"):
                c.attach_mcast(group)
        a.detach_mcast("ff0e::2")
        c.attach_mcast("ff0e::3")


def test_many_groups_take_little_time(pd, cq):
    """The limit of the device, in a time that does not grow with the square."""
    with rp.QP(pd, QPType.UD, cq) as qp:
        start = time.process_time()
        for number in range(8192):
            qp.attach_mcast(b"\xff\x0e" + number.to_bytes(14))
        with pytest.raises(rp.VerbsError, match="ENOMEM"):
            qp.attach_mcast("ff0e::1:0:0:0")
        qp.close()
        assert time.process_time() - start < 4

"""Devices: listing, opening and querying them."""

from __future__ import annotations

import pytest
from support import null_device

import rdmapost as rp


def test_opened_device_is_in_the_device_list(context):
    (info,) = [info for info in rp.list_devices() if info.name == context.name]
    assert (info.kind, info.guid) == (context.kind, context.guid)
    assert context.attr.node_guid == context.guid


def test_device_and_port_attributes_are_plausible(context):
    attr = context.attr
    assert attr.max_qp > 0
    assert attr.max_sge > 0
    assert attr.max_cqe > 0
    assert attr.phys_port_cnt_ex >= attr.phys_port_cnt >= 1
    port = context.query_port(1)
    assert port.state is rp.PortState.ACTIVE
    assert port.active_mtu <= port.max_mtu
    assert port.max_msg_sz > 0
    # Full membership of the default partition.
    assert context.query_pkey(1, 0) == 0xFFFF


def test_gid_table_has_no_empty_entries(context):
    table = context.query_gid_table(1)
    assert table
    assert all(any(entry.gid) for entry in table)
    assert len({entry.gid_index for entry in table}) == len(table)


def test_missing_device_names_those_that_exist(context):
    with pytest.raises(rp.NoDeviceError, match="there is no RDMA device nosuch0"):
        rp.open_device("nosuch0")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("sotf0", "soft0"),
        ("soft", "soft0"),
        ("SOFT0", "soft0"),
        ("roce", "roce:lo"),
        ("lo", "roce:lo"),
    ],
)
def test_mistyped_software_device_is_suggested(typed, meant):
    with pytest.raises(rp.NoDeviceError) as caught:
        rp.open_device(typed)
    assert str(caught.value) == f"there is no RDMA device {typed}; did you mean {meant}?"


def test_device_can_be_opened_twice(context):
    with rp.open_device(context.name) as other:
        assert other.guid == context.guid
        with rp.PD(other):
            pass


null = null_device.null
on_null = null_device.on_null


def test_device_of_libibverbs_creates_uses_and_releases_everything_for_a_post(on_null):
    """Everything that posting needs is made, used and released."""
    said = on_null("""
    print([info.name for info in rp.list_devices()])
    with rp.open_device() as context, rp.PD(context) as pd, rp.CompChannel(context) as channel:
        with rp.CQ(context, channel=channel) as cq, rp.MR(pd, 64) as mr, rp.SRQ(pd) as srq:
            with rp.QP(pd, rp.QPType.RC, cq) as qp, rp.QP(pd, rp.QPType.RC, cq, srq=srq) as b:
                print(context.query_pkey(1, 0), [str(e.gid) for e in context.query_gid_table(1)])
                qp.connect(b.endpoint())
                b.connect(qp.endpoint())
                print(qp.state.name, qp.query().path_mtu.bytes)
                qp.post_send(rp.Send(mr[:8]))
                b.srq.post_srq_recv(rp.RecvWR(mr[:8]))
                print(qp.outstanding)
    """)
    lines = said.splitlines()
    assert lines[0] == "['null0', 'soft0']"
    assert lines[1] == "65535 ['fe80::1']"
    assert lines[2] == "RTS 4096"
    assert lines[3] == "Outstanding(send=1, recv=0)"


def test_open_device_without_a_name_needs_a_device_with_an_active_port(on_null):
    text = on_null("print(said(rp.open_device))", NULL_PORT_STATE="1")
    assert text == (
        "NoDeviceError: no RDMA device has an active port (null0 port 1 is DOWN); "
        "bring the link up, or name a device"
    )


@pytest.mark.parametrize(
    ("refuses", "words"),
    [
        # A missing device has no node.
        ("ibv_open_device=13", "null0: /dev/infiniband/uverbs-null is missing"),
        ("ibv_query_device=5", "ibv_query_device_ex: EIO"),
        ("ibv_get_device_list=5", "ibv_get_device_list: EIO"),
        ("ibv_get_device_list=38", "there is no RDMA device null0"),
    ],
)
def test_error_of_a_device_that_cannot_be_opened_says_what_is_missing(on_null, refuses, words):
    text = on_null('print(said(lambda: rp.open_device("null0")))', NULL_REFUSES=refuses)
    assert words in text

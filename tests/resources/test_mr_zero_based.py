"""Regions whose addresses count from their start: ZERO_BASED, in SGEs and at the peer."""

from __future__ import annotations

import pytest
from support import ALL, needs

import rdmapost as rp
from rdmapost import Access, SendFlags, WCStatus


def test_refused_zero_based_region_names_the_flag_and_the_device(verbs_context, stack):
    pd = stack.enter_context(rp.PD(verbs_context))
    refused = ""
    try:
        mr = stack.enter_context(rp.MR(pd, 4096, ALL | Access.ZERO_BASED))
    except rp.UnsupportedError as error:
        refused = str(error)
    if refused:
        assert refused == (
            f"ibv_reg_mr is not supported: {verbs_context.name} may not support Access.ZERO_BASED"
        )
    else:
        # Soft-RoCE in Linux 6.1 ignores the flag, and no capability says so.
        assert mr.addr == 0
        assert mr.buffer_addr > 0


@pytest.fixture
def region(context, rc, stack) -> rp.MR:
    needs(context.kind == "soft", "ZERO_BASED regions", context)
    mr = stack.enter_context(rp.MR(rc.pd, 256, ALL | Access.ZERO_BASED))
    # What is outstanding names the region.
    stack.callback(rc.b.close)
    stack.callback(rc.a.close)
    return mr


def test_address_of_an_sge_counts_from_the_start_of_a_zero_based_region(region):
    assert region.addr == 0
    assert region[64:72][:3] == (64, 8, region.lkey)


def test_data_is_gathered_from_and_scattered_into_a_zero_based_region(rc, region):
    region.buffer[:5] = b"hello"
    rc.b.post_recv(rp.RecvWR([region[200:203], region[100:110]], wr_id=7))
    rc.a.post_send(rp.Send(region[:5], wr_id=9))
    rc.wait(2)
    assert bytes(region.buffer[200:204]) == b"hel\0"
    assert bytes(region.buffer[100:103]) == b"lo\0"


def test_remote_address_counts_from_the_start_of_a_zero_based_region(rc, region):
    rc.mine.buffer[:5] = b"hello"
    rc.a.post_send(
        rp.RdmaWrite(rc.mine[:5], remote_addr=region.addr + 64, rkey=region.rkey, wr_id=1)
    )
    rc.a.post_send(rp.RdmaRead(rc.mine[100:105], remote_addr=64, rkey=region.rkey, wr_id=2))
    rc.wait(2)
    assert bytes(region.buffer[63:70]) == b"\0hello\0"
    assert bytes(rc.mine.buffer[100:105]) == b"hello"
    rc.a.post_send(rp.RdmaWrite(rc.mine[:5], remote_addr=252, rkey=region.rkey))
    assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR


def test_bounds_of_a_zero_based_region_are_checked_from_its_start(rc, region):
    with pytest.raises(IndexError):
        region[250:257]
    with pytest.raises(rp.PostError, match="lies outside MR of 256 bytes"):
        rc.a.post_send(rp.Send(region[:8]._replace(addr=249)))


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_inline_data_of_a_zero_based_region_is_refused(connect, region, checked):
    """The address is not in this process: a driver that copied from there would crash it."""
    pair = connect(max_inline_data=64, checked=checked)
    flags = SendFlags.INLINE | SendFlags.SIGNALED
    with pytest.raises(rp.PostError, match=r"ZERO_BASED .*SGE\.from_buffer\(mr\.buffer\[a:b\]\)"):
        pair.a.post_send(pair.wr(rp.RdmaWrite, region[:5], send_flags=flags))
    region.buffer[:5] = b"hello"
    pair.a.post_send(pair.wr(rp.RdmaWrite, rp.SGE.from_buffer(region.buffer[:5]), send_flags=flags))
    pair.wait()
    assert bytes(pair.theirs.buffer[:6]) == b"hello\0"

"""QP.query: what a queue pair is, whatever set it."""

from __future__ import annotations

import pytest
from support import Connect, Pair, needs

import rdmapost as rp
from rdmapost import QPType
from rdmapost._binding import ffi
from rdmapost.resources.ah import fill_ah_attr
from rdmapost.resources.qp_attr import read_qp_attr


@pytest.mark.parametrize("sq_sig_all", [False, True])
def test_query_returns_what_the_queue_pair_was_created_with(
    connect: Connect, sq_sig_all: bool
) -> None:
    qp = connect(QPType.RC, max_send_wr=20, max_inline_data=32, sq_sig_all=sq_sig_all).a
    init = qp.query().init_attr
    assert (init.qp_type, init.sq_sig_all) == (QPType.RC, sq_sig_all)
    for name in ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data"):
        # rxe of Linux 6.1 reports the sizes that its queues really have.
        assert getattr(init, name) >= getattr(qp, name), name


def test_alternate_path_on_ethernet_is_refused_by_name(rc: Pair) -> None:
    """The kernel, and soft0, have them on InfiniBand only."""
    qp, context = rc.a, rc.pd.context
    needs(context.query_port().link_layer is rp.LinkLayer.ETHERNET, "Ethernet", context)
    before = qp.query()
    path = rp.AHAttr(dgid=before.ah_attr.dgid, sgid_index=qp.gid.gid_index, traffic_class=8)
    with pytest.raises(
        rp.VerbsError, match=rf"{context.name} has no alternate paths|only on InfiniBand"
    ):
        qp.modify(alt_ah_attr=path, alt_pkey_index=0, alt_port_num=1, alt_timeout=9)
    now = qp.query()
    assert now == before
    assert (now.alt_port_num, now.alt_timeout) == (0, 0)
    assert now.alt_ah_attr.dgid is None
    rc.works()


def test_path_that_has_not_been_set_leads_nowhere(pd: rp.PD, cq: rp.CQ) -> None:
    """Soft-RoCE reports the GID ::, which is no address, and soft0 none."""
    with rp.QP(pd, QPType.RC, cq) as qp, rp.QP(pd, QPType.UD, cq) as ud:
        ud.connect()
        for attr in (qp.query(), ud.query()):
            assert (attr.ah_attr.dgid, attr.alt_ah_attr.dgid) == (None, None)
        qp.connect(qp.endpoint())
        attr = qp.query()
        assert (attr.ah_attr.dgid, attr.alt_ah_attr.dgid) == (qp.endpoint().gid, None)


def test_alternate_path_is_read_from_its_own_fields() -> None:
    """No device of the tests can have one."""
    raw, init = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
    path = rp.AHAttr(2, dlid=7, sl=3, dgid=rp.GID("fe80::7"), sgid_index=1)
    fill_ah_attr(path, raw.alt_ah_attr)
    raw.alt_port_num, raw.alt_timeout, raw.alt_pkey_index, raw.en_sqd_async_notify = 2, 9, 4, 1
    raw.ah_attr.is_global = 1
    attr = read_qp_attr(raw, init)
    assert attr.alt_ah_attr == path
    assert (attr.alt_port_num, attr.alt_timeout, attr.alt_pkey_index) == (2, 9, 4)
    assert (attr.en_sqd_async_notify, attr.ah_attr.dgid) == (True, None)
    assert attr.path_mtu is None


def test_rate_limit_is_shown_until_the_queue_pair_is_reset(soft: str) -> None:
    """Devices of libibverbs report none."""
    with (
        rp.open_device(soft) as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.QP(pd, QPType.RAW_PACKET, cq) as qp,
    ):
        qp.connect()
        assert qp.query().rate_limit == 0
        qp.modify(rate_limit=5000)
        assert qp.query().rate_limit == 5000
        qp.to_reset()
        assert qp.query().rate_limit == 0


def test_rate_limit_is_read_from_its_own_field() -> None:
    raw, init = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
    raw.rate_limit = 7
    assert read_qp_attr(raw, init).rate_limit == 7


@pytest.mark.parametrize("opcode", [rp.Opcode.RDMA_READ, rp.Opcode.RDMA_WRITE, rp.Opcode.SEND])
def test_device_without_ordered_data_promises_no_order(rc: Pair, opcode: rp.Opcode) -> None:
    nothing = rp.QueryQPDataInOrderCaps(0)
    assert rc.a.query_data_in_order(opcode) == nothing
    flags = rp.QueryQPDataInOrderFlags.RETURN_CAPS | rp.QueryQPDataInOrderFlags.DEVICE_ONLY
    assert rc.a.query_data_in_order(opcode, flags) == nothing


def test_order_of_data_is_asked_for_an_opcode_and_known_flags_only(rc: Pair) -> None:
    with pytest.raises(ValueError, match="opcode=77 is not a valid Opcode"):
        rc.a.query_data_in_order(77)
    with pytest.raises(ValueError, match="flags=0x8 is not a combination of QueryQPData"):
        rc.a.query_data_in_order(rp.Opcode.SEND, 8)
    with pytest.raises(TypeError, match="opcode: expected Opcode, got str"):
        rc.a.query_data_in_order("SEND")
    rc.a.close()
    with pytest.raises(rp.ClosedError):
        rc.a.query_data_in_order(rp.Opcode.SEND)

"""What is refused when posted, here or by the device, and what the peer refuses."""

from __future__ import annotations

import array

import pytest
from support import GRH, LOCAL_ERROR, needs

import rdmapost as rp
from rdmapost import Opcode, QPType, SendFlags, WCStatus

# ---- what does not go -------------------------------------------------------------


@pytest.mark.parametrize(
    ("qp_type", "opcode"),
    [
        (QPType.UC, Opcode.RDMA_READ),
        (QPType.UC, Opcode.ATOMIC_FETCH_AND_ADD),
        (QPType.UD, Opcode.RDMA_WRITE),
        (QPType.UD, Opcode.SEND_WITH_INV),
        (QPType.RC, Opcode.TSO),
    ],
)
def test_opcode_of_another_qp_type_is_refused(connect, qp_type, opcode):
    pair = connect(qp_type)
    kind = next(
        k for k in map(vars(rp).get, rp.posting.wr.__all__) if getattr(k, "opcode", None) is opcode
    )
    with pytest.raises(rp.PostError, match=f"{opcode.name} is not an opcode of {qp_type.name} QPs"):
        pair.a.post_send(pair.wr(kind, pair.mine[:8]))
    pair.works()


@pytest.mark.parametrize("opcode", [Opcode.RDMA_READ, Opcode.ATOMIC_FETCH_AND_ADD])
def test_opcode_of_another_qp_type_unchecked_is_the_devices_to_refuse(connect, opcode):
    """By the post, or by an error completion; it never succeeds."""
    pair = connect(QPType.UC, checked=False)
    kind = rp.RdmaRead if opcode is Opcode.RDMA_READ else rp.AtomicFetchAndAdd
    refused: list[rp.PostError] = []
    try:
        pair.a.post_send(pair.wr(kind, pair.mine[:8], wr_id=1))
    except rp.PostError as error:
        refused.append(error)
    if refused:
        assert refused[0].index in (0, None)
    else:
        (done,) = pair.cq.wait()
        assert done.wr_id == 1
        assert done.status in LOCAL_ERROR


@pytest.mark.parametrize(
    ("qp_type", "flag"), [(QPType.UC, SendFlags.FENCE), (QPType.UD, SendFlags.FENCE)]
)
def test_flag_of_another_qp_type_is_refused(connect, qp_type, flag):
    pair = connect(qp_type)
    with pytest.raises(rp.PostError, match=f"{flag.name} has no meaning on {qp_type.name} QPs"):
        pair.a.post_send(pair.send(pair.mine[:4], send_flags=flag))


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_ud_without_an_address_handle_is_refused(connect, checked):
    """Also unchecked: a driver would follow the NULL."""
    pair = connect(QPType.UD, checked=checked)
    with pytest.raises(rp.PostError, match="needs an address handle"):
        pair.a.post_send(rp.Send(pair.mine[:4]))
    pair.works()


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_closed_address_handle_is_refused(connect, checked):
    pair = connect(QPType.UD, checked=checked)
    pair.ah.close()
    with pytest.raises(rp.PostError, match="is closed"):
        pair.a.post_send(pair.send(pair.mine[:4]))


def test_ud_longer_than_the_mtu_is_refused(connect, context):
    pair = connect(QPType.UD)
    mtu = context.query_port(1).active_mtu.bytes
    pair.b.post_recv(rp.RecvWR(pair.theirs[: GRH + mtu]))
    pair.a.post_send(pair.send(pair.mine[:mtu]))
    pair.wait(2)
    with pytest.raises(rp.PostError, match=f"{mtu + 1} bytes, but a message on this UD QP"):
        pair.a.post_send(pair.send(pair.mine[: mtu + 1]))


def test_region_of_another_pd_is_refused(rc, context):
    with rp.PD(context) as other, rp.MR(other, 64) as mr:
        with pytest.raises(rp.PostError, match="belongs to another PD"):
            rc.a.post_send(rp.Send(mr[:8]))
        with pytest.raises(rp.PostError, match="belongs to another PD"):
            rc.b.post_recv(rp.RecvWR(mr[:8]))
    rc.works()


def test_region_of_another_pd_unchecked_is_the_devices_to_refuse(connect, context):
    pair = connect(checked=False)
    with rp.PD(context) as other, rp.MR(other, 64) as mr:
        pair.a.post_send(pair.wr(rp.RdmaWrite, mr[:8]))
        (done,) = pair.cq.wait()
        assert done.status in LOCAL_ERROR


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_closed_region_is_refused(connect, checked):
    pair = connect(checked=checked)
    with rp.MR(pair.pd, 64) as mr:
        sge = mr[:8]
    with pytest.raises(rp.PostError, match=r"MR of 64 bytes .* is closed"):
        pair.a.post_send(rp.Send(sge))
    with pytest.raises(rp.PostError, match="is closed"):
        pair.b.post_recv(rp.RecvWR(sge))
    pair.works()


def test_sge_of_length_0_is_refused(rc):
    with pytest.raises(rp.PostError, match=r"length 0 means 2\^31 bytes"):
        rc.a.post_send(rp.Send(rc.mine[5:5]))
    with pytest.raises(rp.PostError, match="empty sg_list"):
        rc.b.post_recv(rp.RecvWR(rc.theirs[5:5]))


def test_sge_of_numbers_goes_as_it_is(rc):
    """The right numbers work, with nothing else behind them."""
    rc.mine.buffer[:4] = b"raw!"
    rc.b.post_recv(rp.RecvWR(rp.SGE(rc.theirs.addr, 4, rc.theirs.lkey)))
    rc.a.post_send(rp.Send(rp.SGE(rc.mine.addr, 4, rc.mine.lkey)))
    rc.wait(2)
    assert bytes(rc.theirs.buffer[:4]) == b"raw!"


def test_unregistered_buffer_without_inline_is_refused(rc):
    with pytest.raises(rp.PostError, match=r"can only be sent with SendFlags\.INLINE"):
        rc.a.post_send(rp.Send(rp.SGE.from_buffer(array.array("B", b"abc"))))
    with pytest.raises(rp.PostError, match=r"SendFlags\.INLINE"):
        rc.b.post_recv(rp.RecvWR(rp.SGE.from_buffer(bytearray(8))))


def test_misaligned_atomic_is_refused(rc, context):
    needs(context.attr.atomic_cap, "atomics", context)
    with pytest.raises(rp.PostError, match="is not a multiple of 8"):
        rc.a.post_send(rc.wr(rp.AtomicFetchAndAdd, rc.mine[:8], remote_addr=rc.theirs.addr + 4))
    with pytest.raises(rp.PostError, match="one SGE of 8 bytes"):
        rc.a.post_send(rc.wr(rp.AtomicFetchAndAdd, rc.mine[:4]))


# ---- what the peer refuses --------------------------------------------------------


def test_no_receive_ends_with_rnr_retry_exceeded(rc):
    """rnr_retry is small here; 7 would be for ever."""
    rc.a.post_send([rp.Send(rc.mine[:4], wr_id=1), rc.wr(rp.RdmaWrite, rc.mine[:4], wr_id=2)])
    done = rc.cq.wait(2)
    assert [(wc.wr_id, wc.status) for wc in done] == [
        (1, WCStatus.RNR_RETRY_EXC_ERR),
        (2, WCStatus.WR_FLUSH_ERR),
    ]
    assert rc.a.state is rp.QPState.ERR
    assert rc.a.outstanding == (0, 0)
    with pytest.raises(rp.CompletionError, match="RNR_RETRY_EXC_ERR"):
        done[0].check()


@pytest.mark.parametrize("what", ["rkey", "range", "permission"])
@pytest.mark.parametrize("kind", [rp.RdmaWrite, rp.RdmaRead])
def test_access_that_the_peer_did_not_grant_ends_with_an_error_completion(connect, what, kind):
    pair = connect()
    with rp.MR(pair.pd, 64, rp.Access.LOCAL_WRITE) as closed_to_peers:
        fields = {
            "rkey": {"rkey": pair.theirs.rkey ^ 0xA5},
            "range": {"remote_addr": pair.theirs.addr + len(pair.theirs) - 7},
            "permission": {"remote_addr": closed_to_peers.addr, "rkey": closed_to_peers.rkey},
        }[what]
        pair.a.post_send(pair.wr(kind, pair.mine[:8], wr_id=1, **fields))
        (done,) = pair.cq.wait()
        assert (done.wr_id, done.status) == (1, WCStatus.REM_ACCESS_ERR)
        assert not any(closed_to_peers.buffer)
    assert not any(pair.theirs.buffer)


def test_access_that_the_queue_pair_did_not_grant(connect):
    """The region allows the write, but the peer's queue pair does not."""
    pair = connect(access=rp.Access.REMOTE_READ)
    pair.a.post_send(pair.wr(rp.RdmaRead, pair.mine[:8]))
    pair.wait()
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8]))
    (done,) = pair.cq.wait()
    # IBTA: REM_ACCESS_ERR; rxe calls a request that the QP does not take invalid.
    assert done.status in (WCStatus.REM_ACCESS_ERR, WCStatus.REM_INV_REQ_ERR)


@pytest.mark.parametrize("kind", [rp.Send, rp.RdmaWrite, rp.RdmaRead])
def test_wrong_lkey_is_a_local_error(connect, kind):
    """Numbers are passed on, and the device detects it."""
    pair = connect()
    pair.b.post_recv(rp.RecvWR(pair.theirs[:64]))
    pair.a.post_send(pair.wr(kind, rp.SGE(pair.mine.addr, 8, pair.mine.lkey ^ 0xA5), wr_id=1))
    (done,) = [wc for wc in pair.cq.wait() if wc.wr_id == 1]
    assert done.status in LOCAL_ERROR


def test_wrong_lkey_of_a_receive(rc):
    rc.b.post_recv(rp.RecvWR(rp.SGE(rc.theirs.addr, 8, rc.theirs.lkey ^ 0xA5), wr_id=7))
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=9))
    done = {wc.wr_id: wc.status for wc in rc.cq.wait(2)}
    assert done[9] is WCStatus.REM_OP_ERR
    # IBTA: LOC_PROT_ERR; rxe calls it LOC_QP_OP_ERR.
    assert done[7] in (WCStatus.LOC_PROT_ERR, WCStatus.LOC_QP_OP_ERR)


def test_receive_that_is_too_small(rc):
    rc.b.post_recv(rp.RecvWR(rc.theirs[:4], wr_id=7))
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=9))
    done = {wc.wr_id: wc.status for wc in rc.cq.wait(2)}
    # IBTA: REM_INV_REQ_ERR and LOC_LEN_ERR; rxe takes the receive for malformed, or, when the
    # message has several packets, reports the requester's status on both sides.
    assert (done[9], done[7]) in (
        (WCStatus.REM_INV_REQ_ERR, WCStatus.LOC_LEN_ERR),
        (WCStatus.REM_OP_ERR, WCStatus.LOC_QP_OP_ERR),
        (WCStatus.REM_INV_REQ_ERR, WCStatus.REM_INV_REQ_ERR),
    )
    assert not any(rc.theirs.buffer[4:])


def test_error_completion_has_only_what_is_valid(rc):
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8], rkey=rc.theirs.rkey ^ 0xA5, wr_id=3))
    (done,) = rc.cq.wait()
    assert (done.wr_id, done.qp_num) == (3, rc.a.qp_num)
    assert (done.opcode, done.byte_len, done.imm_data, done.invalidated_rkey) == (
        None,
        0,
        None,
        None,
    )

"""What the flags of a send do: INLINE, FENCE, SOLICITED, SIGNALED; and what the far side sees."""

from __future__ import annotations

import errno
import sys

import pytest
from support import ALL, GRH, Pair, needs

import rdmapost as rp
from rdmapost import QPType, SendFlags, WCOpcode, WCStatus

TYPES = [QPType.RC, QPType.UC, QPType.UD]
CONNECTED = [QPType.RC, QPType.UC]
INLINE = SendFlags.INLINE | SendFlags.SIGNALED
SOLICITED = SendFlags.SOLICITED | SendFlags.SIGNALED
FENCE = SendFlags.FENCE | SendFlags.SIGNALED
WITH_IMM = [
    *((qp_type, rp.SendWithImm) for qp_type in TYPES),
    *((qp_type, rp.RdmaWriteWithImm) for qp_type in CONNECTED),
]


def is_write(wr_type: type) -> bool:
    return issubclass(wr_type, rp.RdmaWrite | rp.RdmaWriteWithImm)


# ---- INLINE ---------------------------------------------------------------------------


@pytest.mark.parametrize("qp_type", TYPES)
def test_inline_of_every_length_may_be_overwritten_at_once(connect, qp_type):
    """Up to what the queue pair was granted, from memory that is not registered."""
    pair = connect(qp_type, max_inline_data=64)
    grh = GRH if qp_type is QPType.UD else 0
    most = pair.a.max_inline_data
    for size in sorted({0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, most - 1, most}):
        data = bytearray(i % 251 + 1 for i in range(size))
        sent = bytes(data)
        pair.theirs.buffer[:] = bytes(len(pair.theirs))
        pair.b.post_recv(rp.RecvWR(pair.theirs[: grh + most], wr_id=7))
        sges = rp.SGE.from_buffer(data) if size else ()
        pair.a.post_send(pair.send(sges, send_flags=INLINE, wr_id=9))
        data[:] = b"\xff" * size
        del sges
        data.clear()
        assert {wc.wr_id: wc.byte_len for wc in pair.wait(2)}[7] == grh + size
        assert bytes(pair.theirs.buffer[grh : grh + most]) == sent + bytes(most - size)


@pytest.mark.parametrize("wr_type", [rp.Send, rp.SendWithImm, rp.RdmaWrite, rp.RdmaWriteWithImm])
def test_inline_gathers_registered_and_unregistered_buffers(connect, wr_type):
    pair = connect(max_inline_data=64)
    pair.mine.buffer[:6] = b"region"
    loose = bytearray(b"loose ")
    pair.b.post_recv(rp.RecvWR(pair.theirs[:64], wr_id=7))
    sges = [rp.SGE.from_buffer(loose), pair.mine[:6], rp.SGE.from_buffer(b" bytes")]
    pair.a.post_send(pair.wr(wr_type, sges, send_flags=INLINE, wr_id=9))
    loose[:] = pair.mine.buffer[:6] = b"xxxxxx"
    if wr_type is rp.RdmaWrite:
        pair.a.post_send(rp.Send(wr_id=9))
    assert [wc.wr_id for wc in pair.wait(3 if wr_type is rp.RdmaWrite else 2)].count(7) == 1
    assert bytes(pair.theirs.buffer[:19]) == b"loose region bytes\0"


def test_inline_ignores_the_lkey(connect, context):
    """Nor the domain, nor whether the device could read the memory."""
    pair = connect(max_inline_data=64)
    with rp.PD(context) as other, rp.MR(other, bytearray(b"foreign!")) as mr:
        for sge in (mr[:], mr[:]._replace(lkey=mr.lkey ^ 0xA5)):
            pair.a.post_send(pair.wr(rp.RdmaWrite, sge, send_flags=INLINE))
            pair.wait()
            assert bytes(pair.theirs.buffer[:8]) == b"foreign!"
            pair.theirs.buffer[:8] = bytes(8)


@pytest.mark.parametrize("wr_type", [rp.Send, rp.RdmaWrite])
def test_inline_longer_than_granted_is_refused(connect, wr_type):
    """Counted over all SGEs; unchecked the device counts."""
    for checked, words in ((True, "bytes inline, but"), (False, "refused")):
        pair = connect(max_inline_data=32, checked=checked)
        most = pair.a.max_inline_data
        sges = [rp.SGE.from_buffer(bytes(most)), rp.SGE.from_buffer(b"1")]
        with pytest.raises(rp.PostError, match=words) as caught:
            pair.a.post_send(pair.wr(wr_type, sges, send_flags=INLINE))
        assert caught.value.errno in (errno.EINVAL, errno.ENOMEM)
        if checked:
            assert f"max_inline_data={most}" in str(caught.value)
        assert pair.cq.poll() == []


@pytest.mark.parametrize("wr_type", [rp.RdmaRead, rp.AtomicFetchAndAdd, rp.AtomicCmpAndSwp])
def test_inline_has_no_meaning_on_what_fetches(rc, wr_type):
    with pytest.raises(rp.PostError, match=f"INLINE has no meaning on {wr_type.opcode.name}"):
        rc.a.post_send(rc.wr(wr_type, rc.mine[:8], send_flags=INLINE))


# ---- FENCE ----------------------------------------------------------------------------


@pytest.fixture
def patient(connect) -> Pair:
    """A pair that sends nothing again within a test: rxe loses a fenced request that it does."""
    pair = connect(to=rp.QPState.RESET)
    pair.a.connect(pair.b.endpoint(), timeout=21)
    pair.b.connect(pair.a.endpoint())
    return pair


def test_fence_waits_for_the_reads_before_it(patient):
    """What was read is what the fenced message carries."""
    size, pair = 4096, patient
    for value in range(1, 9):
        pair.theirs.buffer[:size] = bytes([value]) * size
        pair.b.post_recv(rp.RecvWR(pair.theirs[size : 2 * size], wr_id=7))
        pair.a.post_send(
            [
                pair.wr(rp.RdmaRead, pair.mine[:size], wr_id=1),
                rp.Send(pair.mine[:size], wr_id=2, send_flags=FENCE),
            ]
        )
        done = [wc.wr_id for wc in pair.wait(3)]
        assert [wr_id for wr_id in done if wr_id < 7] == [1, 2]
        assert bytes(pair.theirs.buffer[size:]) == bytes([value]) * size


def test_fence_waits_for_the_atomics_before_it(patient, context):
    needs(context.attr.atomic_cap, "atomics", context)
    pair = patient
    old = pair.wr(rp.AtomicFetchAndAdd, pair.mine[:8], compare_add=1)
    tell = pair.wr(rp.RdmaWrite, pair.mine[:8], remote_addr=pair.theirs.addr + 64, send_flags=FENCE)
    for value in range(8):
        pair.a.post_send([old, tell])
        pair.wait(2)
        assert int.from_bytes(pair.theirs.buffer[64:72], sys.byteorder) == value


def test_fence_waits_for_a_read_that_is_answered_late(connect, context):
    """The peer is not ready yet: neither the read nor the request fenced after it goes out."""
    needs(context.kind == "soft", "fences over requests that are sent again", context)
    pair = connect(to=rp.QPState.RESET)
    pair.a.connect(pair.b.endpoint(), timeout=12, retry_cnt=7)
    pair.theirs.buffer[:4] = b"late"
    pair.a.post_send(
        [
            pair.wr(rp.RdmaRead, pair.mine[:4], wr_id=1),
            pair.wr(
                rp.RdmaWrite,
                pair.mine[:4],
                wr_id=2,
                remote_addr=pair.theirs.addr + 64,
                send_flags=FENCE,
            ),
        ]
    )
    assert pair.cq.poll() == []
    pair.b.connect(pair.a.endpoint())
    assert [wc.wr_id for wc in pair.wait(2)] == [1, 2]
    assert bytes(pair.theirs.buffer[64:68]) == b"late"


# ---- SOLICITED ------------------------------------------------------------------------


class Waiter:
    """b's receives complete on a CQ with a channel, which is asked for solicited events only."""

    def __init__(self, pair: Pair, stack, qp_type: QPType) -> None:
        context = pair.pd.context
        self.pair = pair
        self.channel = stack.enter_context(rp.CompChannel(context))
        self.cq = stack.enter_context(rp.CQ(context, 16, channel=self.channel))
        self.qp = rp.QP(pair.pd, qp_type, pair.cq, self.cq)
        stack.callback(self.qp.close)
        self.ah = None
        if qp_type is QPType.UD:
            self.qp.connect()
            self.ah = stack.enter_context(pair.a.ah_to(self.qp.endpoint()))
        else:
            pair.a.to_reset()
            pair.a.connect(self.qp.endpoint(), rnr_retry=1)
            self.qp.connect(pair.a.endpoint(), access=ALL & ~rp.Access.LOCAL_WRITE)
        self.qp.post_recv([rp.RecvWR(pair.theirs[:64], wr_id=i) for i in range(3)])
        self.cq.req_notify(solicited_only=True)

    def message(self, wr_type: type, send_flags: int) -> rp.SendWR:
        more = {"ah": self.ah, "remote_qpn": self.qp.qp_num} if self.ah is not None else {}
        return self.pair.wr(wr_type, self.pair.mine[:8], send_flags=send_flags, **more)


@pytest.mark.parametrize(
    ("qp_type", "wr_type"),
    [*((t, rp.Send) for t in TYPES), *WITH_IMM],
    ids=lambda x: x.__name__ if isinstance(x, type) else x.name,
)
def test_solicited_completion_wakes_a_waiter_for_solicited_only(connect, stack, qp_type, wr_type):
    """A message without it does not, whatever other flags it carries."""
    pair = connect(qp_type)
    waiter = Waiter(pair, stack, qp_type)
    pair.a.post_send(waiter.message(wr_type, SendFlags.SIGNALED))
    pair.wait()
    assert waiter.channel.get_cq_event(0.05) is None
    pair.a.post_send(waiter.message(wr_type, SOLICITED))
    assert waiter.channel.get_cq_event(5) is waiter.cq
    assert [wc.wr_id for wc in waiter.cq.poll()] == [0, 1]
    # One event for one request.
    pair.a.post_send(waiter.message(wr_type, SOLICITED))
    pair.wait(2)
    assert waiter.channel.get_cq_event(0.05) is None


def test_unsolicited_completion_wakes_a_waiter_for_any(connect, stack):
    pair = connect()
    waiter = Waiter(pair, stack, QPType.RC)
    waiter.cq.req_notify()
    pair.a.post_send(waiter.message(rp.Send, SendFlags.SIGNALED))
    assert waiter.channel.get_cq_event(5) is waiter.cq


def test_failure_wakes_a_waiter_for_solicited_completions_only(connect, stack, context):
    needs(context.kind == "soft", "an event for a failure where only solicited are wanted", context)
    pair = connect()
    waiter = Waiter(pair, stack, QPType.RC)
    waiter.qp.to_err()
    assert waiter.channel.get_cq_event(5) is waiter.cq
    assert [wc.status for wc in waiter.cq.poll()] == [WCStatus.WR_FLUSH_ERR] * 3


@pytest.mark.parametrize("wr_type", [rp.RdmaWrite, rp.RdmaRead])
def test_solicited_has_no_meaning_on_what_takes_no_receive(rc, wr_type):
    with pytest.raises(rp.PostError, match=f"SOLICITED has no meaning on {wr_type.opcode.name}"):
        rc.a.post_send(rc.wr(wr_type, rc.mine[:8], send_flags=SOLICITED))


# ---- SIGNALED -------------------------------------------------------------------------


def test_only_signaled_work_requests_complete(rc):
    """The completion of a signaled send covers the unsignaled ones before it."""
    flags = [0, SendFlags.SIGNALED, 0, 0, SendFlags.SIGNALED, 0]
    rc.a.post_send(
        [rc.wr(rp.RdmaWrite, rc.mine[:1], wr_id=i, send_flags=f) for i, f in enumerate(flags)]
    )
    assert [wc.wr_id for wc in rc.wait(2)] == [1, 4]
    assert rc.a.outstanding.send == 1
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:1], wr_id=6))
    assert [wc.wr_id for wc in rc.wait()] == [6]
    assert rc.a.outstanding.send == 0
    assert rc.cq.poll() == []


@pytest.mark.parametrize("qp_type", TYPES)
def test_sq_sig_all_completes_all_of_them(connect, qp_type):
    pair = connect(qp_type, sq_sig_all=True)
    pair.b.post_recv([rp.RecvWR(pair.theirs[:100], wr_id=100 + i) for i in range(3)])
    pair.a.post_send([pair.send(pair.mine[:8], wr_id=i, send_flags=0) for i in range(3)])
    assert [wc.wr_id for wc in pair.wait(6) if wc.wr_id < 100] == [0, 1, 2]
    assert pair.a.outstanding.send == 0


def test_a_failure_completes_though_it_is_not_signaled(rc):
    """And so do those after it, flushed."""
    wrong = rc.theirs.rkey ^ 0xA5
    rc.a.post_send(
        [
            rc.wr(rp.RdmaWrite, rc.mine[:8], rkey=wrong, send_flags=0, wr_id=1),
            rc.wr(rp.RdmaWrite, rc.mine[:8], send_flags=0, wr_id=2),
        ]
    )
    assert [(wc.wr_id, wc.status) for wc in rc.cq.wait(2)] == [
        (1, WCStatus.REM_ACCESS_ERR),
        (2, WCStatus.WR_FLUSH_ERR),
    ]


# ---- what the far side sees ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("qp_type", "wr_type"), WITH_IMM, ids=lambda x: x.__name__ if isinstance(x, type) else x.name
)
def test_immediate_data_is_a_number_of_the_host_at_both_ends(connect, qp_type, wr_type):
    """All bytes differ: only the right order gives the same number."""
    pair = connect(qp_type)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:100], wr_id=7))
    pair.a.post_send(pair.wr(wr_type, pair.mine[:4], imm_data=0x01020304, wr_id=9))
    done = {wc.wr_id: wc for wc in pair.wait(2)}
    assert done[7].imm_data == 0x01020304
    assert done[7].opcode is (WCOpcode.RECV_RDMA_WITH_IMM if is_write(wr_type) else WCOpcode.RECV)
    assert done[9].imm_data is None


@pytest.mark.parametrize("wr_type", [rp.Send, rp.RdmaWrite])
def test_completion_without_immediate_data_or_key_has_none(rc, wr_type):
    """None and not 0, which could have been sent."""
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=7))
    rc.a.post_send(rc.wr(wr_type, rc.mine[:8], wr_id=9))
    done = rc.wait(1 if is_write(wr_type) else 2)
    assert [wc.imm_data for wc in done] == [None] * len(done)
    assert [wc.invalidated_rkey for wc in done] == [None] * len(done)


@pytest.mark.parametrize("qp_type", CONNECTED)
def test_invalidated_rkey_is_in_the_completion(connect, stack, context, qp_type):
    needs(context.kind == "soft", "the flag of an invalidated key in a completion", context)
    pair = connect(qp_type)
    region = stack.enter_context(rp.MR(pair.pd, 64, ALL | rp.Access.MW_BIND))
    mw = stack.enter_context(rp.MW(pair.pd))
    pair.b.post_send(
        rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=region, addr=region.addr, length=64, wr_id=1)
    )
    pair.wait()
    pair.b.post_recv(rp.RecvWR(pair.theirs[:8], wr_id=7))
    pair.a.post_send(rp.SendWithInv(pair.mine[:8], invalidate_rkey=mw.rkey, wr_id=9))
    done = {wc.wr_id: wc for wc in pair.wait(2)}
    assert done[7].invalidated_rkey == mw.rkey
    assert done[7].wc_flags & rp.WCFlags.WITH_INV
    assert (done[7].imm_data, done[9].invalidated_rkey) == (None, None)


@pytest.mark.parametrize("wr_type", [rp.RdmaWrite, rp.RdmaRead])
def test_write_and_read_take_no_receive(rc, wr_type):
    """The far side does not see them, and needs nothing posted."""
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=7))
    rc.a.post_send(rc.wr(wr_type, rc.mine[:8], wr_id=9))
    assert [wc.wr_id for wc in rc.wait()] == [9]
    assert rc.cq.poll() == []
    assert rc.b.outstanding.recv == 1


@pytest.mark.parametrize(
    ("qp_type", "wr_type"), WITH_IMM, ids=lambda x: x.__name__ if isinstance(x, type) else x.name
)
def test_immediate_data_takes_a_receive(connect, qp_type, wr_type):
    pair = connect(qp_type)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:100], wr_id=7))
    pair.a.post_send(pair.wr(wr_type, pair.mine[:4], wr_id=9))
    pair.wait(2)
    assert pair.b.outstanding.recv == 0


def test_write_with_immediate_leaves_the_receives_buffers_alone(rc):
    """The data is at the remote address; only the receive's completion is used."""
    rc.mine.buffer[:4] = b"data"
    rc.b.post_recv(rp.RecvWR(rc.theirs[100:108], wr_id=7))
    rc.a.post_send(rc.wr(rp.RdmaWriteWithImm, rc.mine[:4], wr_id=9))
    rc.wait(2)
    assert bytes(rc.theirs.buffer[:5]) == b"data\0"
    assert not any(rc.theirs.buffer[100:108])

"""The packets that a send queue sends, and how it handles the answers."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from support.roce_network import PEER_QPN, SQ_PSN, WQE, Alone, Buffer, PairOf, connect, gid, polled

from rdmapost.enums import (
    MTU,
    Access,
    EventType,
    FlushLevel,
    FlushType,
    MWType,
    Opcode,
    QPAttrMask,
    QPState,
    QPType,
    SendFlags,
    WCStatus,
)
from rdmapost.providers.roce import packets, protocol_engine
from rdmapost.providers.roce.qp import HOLD_SECONDS
from rdmapost.providers.roce.requester import BURST_PACKETS, READ_PACKETS, WINDOW
from rdmapost.providers.software.device_queues import AddressHandle
from rdmapost.standard.timers import ack_timeout, rnr_timer

MTU_BYTES = 1024
TIMEOUT = 14
SOLICITED, FENCE = int(SendFlags.SOLICITED), int(SendFlags.FENCE)
SUCCESS, FLUSHED = WCStatus.SUCCESS, WCStatus.WR_FLUSH_ERR
REMOTE, RKEY = 0x1_0000_2000, 0x99


@pytest.fixture
def alone() -> Alone:
    return Alone()


def post(alone: Alone, *wqes: WQE) -> None:
    alone.network.post(alone.qp, *wqes)


def send(alone: Alone, n: int, size: int = 8, opcode: int = Opcode.SEND, **fields: Any) -> WQE:
    sges = (alone.memory.sge(0, size),) if size else ()
    return WQE(n, opcode=int(opcode), sges=sges, remote_addr=REMOTE, rkey=RKEY, **fields)


def names(got: list[packets.Packet]) -> list[str]:
    return [packet.row.name.removeprefix("RC_") for packet in got]


def psns(got: list[packets.Packet]) -> list[int]:
    return [packet.psn - SQ_PSN for packet in got]


def statuses(alone: Alone) -> list[tuple[int, WCStatus]]:
    return [(wc.wr_id, wc.status) for wc in alone.sends()]


# ---- encoding ------------------------------------------------------------------------


def test_message_is_cut_into_first_middle_and_last(alone):
    alone.memory.view[:3000] = bytes(i % 251 for i in range(3000))
    post(alone, send(alone, 1, 3000, Opcode.SEND_WITH_IMM, imm=0x01020304, flags=SOLICITED))
    got = alone.peer.take()
    assert names(got) == ["SEND_FIRST", "SEND_MIDDLE", "SEND_LAST_WITH_IMMEDIATE"]
    assert psns(got) == [0, 1, 2]
    assert {packet.qpn for packet in got} == {PEER_QPN}
    assert [packet.length for packet in got] == [1024, 1024, 952]
    assert b"".join(b"".join(packet.data) for packet in got) == alone.memory.view[:3000]
    assert [packet.solicited for packet in got] == [False, False, True]
    assert [packet.ack_req for packet in got] == [False, False, True]
    assert got[2].imm == 0x01020304
    assert got[2].immediate == (0x01020304).to_bytes(4, sys.byteorder)


def test_rdma_write_has_its_remote_address_in_its_first_packet_only(alone):
    post(alone, send(alone, 1, 2500, Opcode.RDMA_WRITE))
    got = alone.peer.take()
    assert names(got) == ["RDMA_WRITE_FIRST", "RDMA_WRITE_MIDDLE", "RDMA_WRITE_LAST"]
    assert (got[0].remote_addr, got[0].rkey, got[0].dma_length) == (REMOTE, RKEY, 2500)


def test_empty_messages_are_one_packet_each(alone):
    empty = [Opcode.SEND, Opcode.RDMA_WRITE, Opcode.SEND_WITH_INV, Opcode.RDMA_READ]
    post(alone, *[send(alone, n, 0, opcode, imm=7) for n, opcode in enumerate(empty)])
    got = alone.peer.take()
    assert names(got) == [
        "SEND_ONLY",
        "RDMA_WRITE_ONLY",
        "SEND_ONLY_WITH_INVALIDATE",
        "RDMA_READ_REQUEST",
    ]
    assert psns(got) == [0, 1, 2, 3]
    assert got[2].invalidate_rkey == 7


def test_small_messages_that_are_posted_together_share_an_acknowledgement(alone):
    post(alone, *[send(alone, n) for n in range(20)])
    got = alone.peer.take()
    assert psns(got) == list(range(20))
    assert [packet.ack_req for packet in got] == [False] * 19 + [True]
    alone.ack(SQ_PSN + 19)
    assert statuses(alone) == [(n, SUCCESS) for n in range(20)]


def test_atomics_are_encoded_as_the_specification_says(alone):
    fields = {"atomic_rkey": RKEY, "compare_add": 5, "swap": 6}
    post(
        alone,
        send(alone, 1, 8, Opcode.ATOMIC_FETCH_AND_ADD, **fields),
        send(alone, 2, 8, Opcode.ATOMIC_CMP_AND_SWP, **fields),
    )
    add, swap = alone.peer.take()
    assert names([add, swap]) == ["FETCH_ADD", "COMPARE_SWAP"]
    assert (add.remote_addr, add.rkey, add.swap_add) == (REMOTE, RKEY, 5)
    assert swap.row.fields[-2:] == ["swap_add", "compare"]
    assert (swap.swap_add, swap.compare) == (6, 5)


def test_flush_and_atomic_write_are_encoded_as_the_kernel_does(alone):
    flush = send(
        alone,
        1,
        0,
        Opcode.FLUSH,
        length=4096,
        type=int(FlushType.PERSISTENT),
        level=int(FlushLevel.MR),
    )
    post(alone, flush, send(alone, 2, 0, Opcode.ATOMIC_WRITE, atomic_wr=0x0102030405060708))
    got = alone.peer.take()
    assert [packet.bth_opcode for packet in got] == [0x1C, 0x1D]
    # The placement type is in bits 3-0, the selectivity level in bits 5-4.
    assert (got[0].feth, got[0].dma_length) == (0x12, 4096)
    assert bytes(got[1].data[0]) == (0x0102030405060708).to_bytes(8, sys.byteorder)
    assert got[1].dma_length == 8
    alone.inject("RC_RDMA_READ_RESPONSE_ONLY", SQ_PSN, packets.aeth(packets.ACK, 31, 1))
    alone.inject("RC_RDMA_READ_RESPONSE_ONLY", SQ_PSN + 1, packets.aeth(packets.ACK, 31, 2))
    assert statuses(alone) == [(1, SUCCESS), (2, SUCCESS)]


def test_address_beyond_the_last_one_wraps(alone):
    wqe = send(alone, 1, 40 * MTU_BYTES, Opcode.RDMA_READ)
    wqe.remote_addr = 2**64 - 1
    post(alone, wqe)
    got = alone.peer.take()
    assert [packet.remote_addr for packet in got] == [2**64 - 1, READ_PACKETS * MTU_BYTES - 1]


def test_datagram_goes_where_its_address_handle_points():
    ud = Alone(QPType.UD)
    path = AddressHandle(gid(1), gid(2), 0, 0, 64, 0)
    post(
        ud,
        send(ud, 1, 100, ah=path, remote_qpn=77, remote_qkey=0x55),
        send(
            ud, 2, 0, Opcode.SEND_WITH_IMM, ah=path, remote_qpn=78, remote_qkey=0x8000_0000, imm=9
        ),
    )
    first, second = ud.peer.take()
    assert (first.qpn, first.qkey, first.src_qpn, first.length) == (77, 0x55, ud.qp.number, 100)
    # A Q_Key with the top bit set means the sender's own.
    assert (second.qpn, second.qkey, second.imm) == (78, 0x1234, 9)
    assert statuses(ud) == [(1, SUCCESS), (2, SUCCESS)]


# ---- window and acknowledgements -----------------------------------------------------------


@pytest.mark.parametrize("opcode", [Opcode.SEND, Opcode.RDMA_READ])
def test_no_more_packets_than_the_send_window_are_unacknowledged(alone, opcode):
    post(alone, send(alone, 1, 300 * MTU_BYTES, opcode))
    sent = alone.peer.take()
    if opcode is Opcode.SEND:
        assert len(sent) == WINDOW
        # Not only at its end: the window opens while it is on its way.
        assert sum(packet.ack_req for packet in sent) > 1
    else:
        assert sum(packet.dma_length for packet in sent) == WINDOW * MTU_BYTES


def test_send_window_opens_as_packets_are_acknowledged(alone):
    post(alone, send(alone, 1, 100 * MTU_BYTES))
    assert psns(alone.peer.take()) == list(range(64))
    alone.ack(SQ_PSN + 31)
    assert psns(alone.peer.take()) == list(range(64, 96))
    alone.ack(SQ_PSN + 63)
    assert psns(alone.peer.take()) == list(range(96, 100))
    assert statuses(alone) == []
    alone.ack(SQ_PSN + 99)
    assert statuses(alone) == [(1, SUCCESS)]


def test_send_window_with_room_for_part_of_a_burst_waits_for_an_acknowledgement(alone):
    post(alone, send(alone, 1, 200 * MTU_BYTES, Opcode.RDMA_WRITE))
    # The first packet is longer than the others, so it is sent in a burst of its own.
    sent = alone.peer.take()
    assert psns(sent) == list(range(1 + BURST_PACKETS))
    assert sent[-1].ack_req
    alone.ack(SQ_PSN + 9)
    assert psns(alone.peer.take()) == list(range(33, 65))
    alone.ack(SQ_PSN + 31)
    assert psns(alone.peer.take()) == []
    alone.ack(SQ_PSN + 32)
    assert psns(alone.peer.take()) == list(range(65, 97))


def test_acknowledgement_of_what_was_never_sent_is_ignored(alone):
    post(alone, send(alone, 1))
    for psn in (SQ_PSN - 1, SQ_PSN + 1, SQ_PSN + 2**22, SQ_PSN - 2**22):
        alone.ack(psn)
        alone.nak(psn, packets.REMOTE_ACCESS_ERROR)
        alone.nak(psn, packets.PSN_SEQUENCE_ERROR)
    assert statuses(alone) == []
    alone.ack(SQ_PSN)
    assert statuses(alone) == [(1, SUCCESS)]


def test_acknowledgements_of_other_senders_are_ignored(alone):
    post(alone, send(alone, 1))
    alone.peer.gid = gid(3)
    alone.ack(SQ_PSN)
    assert statuses(alone) == []


# ---- attempts ---------------------------------------------------------------------------


@pytest.mark.parametrize("retry_cnt", [0, 1, 7])
def test_request_that_nothing_answers_ends_after_its_retries(retry_cnt):
    alone = Alone(timeout=TIMEOUT, retry_cnt=retry_cnt)
    post(alone, send(alone, 1), send(alone, 2))
    begin = alone.network.now
    alone.network.run()
    assert [packet.psn - SQ_PSN for packet in alone.peer.got] == [0, 1] * (retry_cnt + 1)
    assert statuses(alone) == [(1, WCStatus.RETRY_EXC_ERR), (2, FLUSHED)]
    assert alone.network.now - begin == pytest.approx((retry_cnt + 1) * ack_timeout(TIMEOUT))
    assert alone.qp.state is QPState.ERR


def test_acknowledgement_of_progress_restores_all_attempts():
    alone = Alone(timeout=TIMEOUT, retry_cnt=1)
    post(alone, *[send(alone, n) for n in range(5)])
    for n in range(5):
        alone.network.run(alone.network.now + 1.5 * ack_timeout(TIMEOUT))
        alone.ack(SQ_PSN + n)
    assert statuses(alone) == [(n, SUCCESS) for n in range(5)]


def test_shortest_timeouts_leave_the_network_some_milliseconds():
    alone = Alone(timeout=1, retry_cnt=0)
    post(alone, send(alone, 1))
    alone.network.run(alone.network.now + 0.003)
    assert statuses(alone) == []
    alone.network.run(alone.network.now + 0.002)
    assert statuses(alone) == [(1, WCStatus.RETRY_EXC_ERR)]


def test_later_posts_do_not_put_the_timeout_off():
    alone = Alone(timeout=TIMEOUT, retry_cnt=0)
    begin = alone.network.now
    for n in range(4):
        post(alone, send(alone, n))
        alone.network.run(alone.network.now + 0.3 * ack_timeout(TIMEOUT))
    alone.network.run(begin + 1.1 * ack_timeout(TIMEOUT))
    assert statuses(alone)[0] == (0, WCStatus.RETRY_EXC_ERR)


def test_peer_may_take_as_long_as_it_likes_without_a_timeout():
    alone = Alone(timeout=0, retry_cnt=0)
    alone.network.interrupts = False
    post(alone, send(alone, 1))
    alone.network.run(alone.network.now + 100)
    assert statuses(alone) == []
    alone.ack(SQ_PSN)
    assert statuses(alone) == [(1, SUCCESS)]


def test_missing_responses_cost_no_attempt_without_a_timeout():
    alone = Alone(timeout=0, retry_cnt=0)
    post(alone, send(alone, 1, 4, Opcode.RDMA_READ), send(alone, 2))
    alone.peer.take()
    alone.ack(SQ_PSN + 1)
    alone.network.run(alone.network.now + 10 * HOLD_SECONDS)
    assert set(psns(alone.peer.take())) == {0, 1}
    assert statuses(alone) == []
    alone.inject(
        "RC_RDMA_READ_RESPONSE_ONLY", SQ_PSN, packets.aeth(packets.ACK, 31, 1), payload=b"late"
    )
    alone.ack(SQ_PSN + 1)
    assert statuses(alone) == [(1, SUCCESS), (2, SUCCESS)]


def test_sequence_error_nak_acknowledges_and_has_the_rest_sent_again(alone):
    post(alone, *[send(alone, n) for n in range(5)])
    alone.peer.take()
    alone.nak(SQ_PSN + 2, packets.PSN_SEQUENCE_ERROR)
    assert statuses(alone) == [(0, SUCCESS), (1, SUCCESS)]
    assert psns(alone.peer.take()) == [2, 3, 4]
    assert alone.device.counters.retransmitted == 3
    # The network may repeat it.
    alone.nak(SQ_PSN + 2, packets.PSN_SEQUENCE_ERROR)
    assert alone.peer.take() == []


def test_request_acknowledged_while_it_is_sent_again_completes(alone):
    post(alone, send(alone, 1, 100 * MTU_BYTES))
    alone.peer.take()
    alone.nak(SQ_PSN, packets.PSN_SEQUENCE_ERROR)
    alone.ack(SQ_PSN + 63)
    alone.peer.take()
    alone.ack(SQ_PSN + 99)
    assert statuses(alone) == [(1, SUCCESS)]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (packets.INVALID_REQUEST, WCStatus.REM_INV_REQ_ERR),
        (packets.REMOTE_ACCESS_ERROR, WCStatus.REM_ACCESS_ERR),
        (packets.REMOTE_OPERATIONAL_ERROR, WCStatus.REM_OP_ERR),
    ],
)
def test_nak_fails_the_request_that_it_is_about(alone, code, status):
    post(alone, *[send(alone, n) for n in range(3)])
    alone.nak(SQ_PSN + 1, code)
    assert statuses(alone) == [(0, SUCCESS), (1, status), (2, FLUSHED)]
    assert alone.qp.state is QPState.ERR


def test_error_nak_that_comes_before_missing_responses_counts_after_them(alone):
    """A responder in ERR does not repeat it."""
    post(alone, send(alone, 1, 4, Opcode.RDMA_READ), send(alone, 2))
    alone.nak(SQ_PSN + 1, packets.REMOTE_ACCESS_ERROR)
    assert statuses(alone) == []
    alone.inject(
        "RC_RDMA_READ_RESPONSE_ONLY", SQ_PSN, packets.aeth(packets.ACK, 31, 1), payload=b"late"
    )
    assert statuses(alone) == [(1, SUCCESS), (2, WCStatus.REM_ACCESS_ERR)]


def test_error_nak_ends_a_request_that_waits_after_an_rnr_nak(alone):
    """A duplicate of the request may have met a receive that is too small."""
    post(alone, send(alone, 1), send(alone, 2))
    rnr_nak(alone, SQ_PSN, 20)
    alone.nak(SQ_PSN, packets.INVALID_REQUEST)
    assert statuses(alone) == [(1, WCStatus.REM_INV_REQ_ERR), (2, FLUSHED)]


@pytest.mark.parametrize("code", [4, 5, 31])
def test_nak_of_an_unknown_code_is_ignored(alone, code):
    post(alone, send(alone, 1))
    alone.nak(SQ_PSN, code)
    alone.inject("RC_ACKNOWLEDGE", SQ_PSN, 2 << 29)
    assert statuses(alone) == []


def rnr_nak(alone: Alone, psn: int, timer: int) -> None:
    alone.inject("RC_ACKNOWLEDGE", psn, packets.aeth(packets.RNR_NAK, timer, 0))


def test_rnr_nak_has_the_request_sent_again_after_its_timer():
    alone = Alone(rnr_retry=1)
    post(alone, send(alone, 1), send(alone, 2))
    alone.peer.take()
    rnr_nak(alone, SQ_PSN + 1, 20)
    rnr_nak(alone, SQ_PSN + 1, 20)
    begin = alone.network.now
    post(alone, send(alone, 3))
    alone.network.run(begin + 0.9 * rnr_timer(20))
    assert alone.peer.got == []
    alone.network.run(begin + 1.1 * rnr_timer(20))
    assert psns(alone.peer.take()) == [1, 2]
    alone.ack(SQ_PSN + 2)
    assert statuses(alone) == [(n, SUCCESS) for n in (1, 2, 3)]


def test_responses_that_are_missing_after_an_rnr_nak_are_missed_soon():
    alone = Alone(timeout=20)
    post(alone, send(alone, 1, 4, Opcode.RDMA_READ), send(alone, 2))
    alone.ack(SQ_PSN + 1)
    rnr_nak(alone, SQ_PSN, 25)
    alone.network.run(alone.network.now + rnr_timer(25) + 1e-3)
    alone.peer.got.clear()
    alone.ack(SQ_PSN + 1)
    assert alone.peer.take() == []
    alone.network.run(alone.network.now + HOLD_SECONDS)
    assert psns(alone.peer.take()) == [0, 1]


def test_slow_peer_has_the_whole_timeout_for_responses_that_are_missing():
    alone = Alone(timeout=18, retry_cnt=2)
    post(alone, send(alone, 1, 4, Opcode.RDMA_READ), send(alone, 2))
    assert psns(alone.peer.take()) == [0, 1]
    alone.ack(SQ_PSN + 1)
    alone.network.run(alone.network.now + HOLD_SECONDS)
    assert psns(alone.peer.take()) == [0, 1]
    begin = alone.network.now
    while alone.network.now < begin + ack_timeout(18) - 2 * HOLD_SECONDS:
        alone.ack(SQ_PSN + 1)
        alone.network.run(alone.network.now + HOLD_SECONDS)
    assert alone.peer.take() == []
    alone.network.run(begin + ack_timeout(18))
    assert psns(alone.peer.take()) == [0, 1]
    alone.inject(
        "RC_RDMA_READ_RESPONSE_ONLY", SQ_PSN, packets.aeth(packets.ACK, 31, 1), payload=b"late"
    )
    alone.ack(SQ_PSN + 1)
    assert statuses(alone) == [(1, SUCCESS), (2, SUCCESS)]


def test_acknowledgement_that_was_overtaken_by_an_rnr_nak_counts(alone):
    post(alone, *[send(alone, n) for n in range(4)])
    alone.peer.take()
    rnr_nak(alone, SQ_PSN, 20)
    alone.ack(SQ_PSN + 1)
    alone.network.run(alone.network.now + 2 * rnr_timer(20))
    assert psns(alone.peer.take()) == [2, 3]
    alone.ack(SQ_PSN + 3)
    assert statuses(alone) == [(n, SUCCESS) for n in range(4)]


def rnr_naks(alone: Alone, count: int) -> None:
    """Refuse the first request this often; each time it is sent again."""
    for _ in range(count):
        rnr_nak(alone, SQ_PSN, 1)
        alone.network.run(alone.network.now + 1e-3)


@pytest.mark.parametrize("rnr_retry", [0, 2])
def test_too_many_rnr_naks_end_the_request(rnr_retry):
    alone = Alone(rnr_retry=rnr_retry)
    post(alone, send(alone, 1))
    rnr_naks(alone, rnr_retry)
    assert statuses(alone) == []
    rnr_nak(alone, SQ_PSN, 1)
    assert statuses(alone) == [(1, WCStatus.RNR_RETRY_EXC_ERR)]


def test_rnr_retry_that_is_lowered_during_the_retries_ends_them():
    alone = Alone(rnr_retry=7)
    post(alone, send(alone, 1))
    rnr_naks(alone, 5)
    alone.qp.attr["rnr_retry"] = 2
    rnr_nak(alone, SQ_PSN, 1)
    assert statuses(alone) == [(1, WCStatus.RNR_RETRY_EXC_ERR)]


def test_rnr_retry_of_7_is_forever():
    alone = Alone(rnr_retry=7)
    post(alone, send(alone, 1))
    rnr_naks(alone, 50)
    alone.ack(SQ_PSN)
    assert statuses(alone) == [(1, SUCCESS)]


def test_rnr_nak_gives_the_attempts_back_because_the_peer_is_there():
    """Else an endless wait for a receive ends when enough packets have been lost."""
    alone = Alone(timeout=10, retry_cnt=1, rnr_retry=7)
    post(alone, send(alone, 1))
    for _ in range(5):
        rnr_nak(alone, SQ_PSN, 1)
        # The retransmission is lost.
        alone.network.run(alone.network.now + 1.5 * ack_timeout(10))
    assert statuses(alone) == []
    alone.ack(SQ_PSN)
    assert statuses(alone) == [(1, SUCCESS)]


# ---- READs and atomics -------------------------------------------------------------------


def respond(alone: Alone, psn: int, name: str, data: bytes) -> None:
    extensions = () if name == "MIDDLE" else (packets.aeth(packets.ACK, 31, 1),)
    alone.inject(f"RC_RDMA_READ_RESPONSE_{name}", psn, *extensions, payload=data)


def test_long_read_is_several_requests(alone):
    post(alone, send(alone, 1, 80 * MTU_BYTES + 1, Opcode.RDMA_READ))
    got = alone.peer.take()
    assert psns(got) == [0, 32]
    assert [(packet.remote_addr - REMOTE) // MTU_BYTES for packet in got] == [0, 32]
    assert [packet.dma_length for packet in got] == [32 * MTU_BYTES] * 2
    for n in range(32):
        name = "FIRST" if not n else "LAST" if n == 31 else "MIDDLE"
        respond(alone, SQ_PSN + n, name, bytes((n,)) * MTU_BYTES)
    [third] = alone.peer.take()
    assert (third.psn - SQ_PSN, third.dma_length) == (64, 16 * MTU_BYTES + 1)
    assert alone.memory.view[31 * MTU_BYTES] == 31


def test_read_goes_on_where_its_responses_stopped(alone):
    post(alone, send(alone, 1, 4 * MTU_BYTES + 10, Opcode.RDMA_READ))
    alone.peer.take()
    respond(alone, SQ_PSN, "FIRST", b"a" * MTU_BYTES)
    respond(alone, SQ_PSN + 1, "MIDDLE", b"b" * MTU_BYTES)
    # One is lost, which the next one shows.
    respond(alone, SQ_PSN + 3, "MIDDLE", b"d" * MTU_BYTES)
    assert alone.peer.take() == []
    alone.network.run(alone.network.now + 0.03)
    [again] = alone.peer.take()
    assert (again.psn - SQ_PSN, again.remote_addr - REMOTE) == (2, 2 * MTU_BYTES)
    assert again.dma_length == 2 * MTU_BYTES + 10
    respond(alone, SQ_PSN + 2, "FIRST", b"c" * MTU_BYTES)
    respond(alone, SQ_PSN + 4, "LAST", b"e" * 10)
    assert statuses(alone) == [(1, SUCCESS)]
    assert bytes(alone.memory.view[: 4 * MTU_BYTES + 10 : 512]) == b"aabbccdde"
    assert alone.device.counters.retransmitted == 1


def test_responses_that_overtook_each_other_cost_no_retransmission(alone):
    post(alone, send(alone, 1, 3 * MTU_BYTES, Opcode.RDMA_READ), send(alone, 2))
    alone.peer.take()
    alone.ack(SQ_PSN + 3)
    respond(alone, SQ_PSN + 2, "LAST", b"c" * MTU_BYTES)
    respond(alone, SQ_PSN + 1, "MIDDLE", b"b" * MTU_BYTES)
    respond(alone, SQ_PSN, "FIRST", b"a" * MTU_BYTES)
    assert statuses(alone) == [(1, SUCCESS), (2, SUCCESS)]
    alone.network.run()
    assert alone.peer.got == []
    assert alone.device.counters.retransmitted == 0


def test_early_response_that_answers_nothing_is_dropped(alone):
    post(alone, send(alone, 1, 2 * MTU_BYTES, Opcode.RDMA_READ))
    alone.peer.take()
    respond(alone, SQ_PSN + 1, "LAST", b"b" * 10)
    respond(alone, SQ_PSN, "FIRST", b"a" * MTU_BYTES)
    assert not alone.qp.early
    respond(alone, SQ_PSN + 1, "LAST", b"b" * MTU_BYTES)
    assert statuses(alone) == [(1, SUCCESS)]
    alone.network.run()
    assert alone.device.counters.retransmitted == 0
    assert alone.qp.state is QPState.RTS


def test_read_response_acknowledges_what_was_sent_before(alone):
    post(alone, send(alone, 1), send(alone, 2, 4, Opcode.RDMA_READ))
    respond(alone, SQ_PSN + 1, "ONLY", b"data")
    assert statuses(alone) == [(1, SUCCESS), (2, SUCCESS)]
    assert bytes(alone.memory.view[:4]) == b"data"


def test_acknowledgement_does_not_replace_a_response():
    alone = Alone(retry_cnt=1)
    post(alone, send(alone, 1, 4, Opcode.RDMA_READ), send(alone, 2))
    alone.peer.take()
    alone.ack(SQ_PSN + 1)
    assert statuses(alone) == []
    alone.network.run(alone.network.now + 0.03)
    assert names(alone.peer.take()) == ["RDMA_READ_REQUEST", "SEND_ONLY"]
    respond(alone, SQ_PSN, "ONLY", b"data")
    assert statuses(alone) == [(1, SUCCESS), (2, SUCCESS)]


@pytest.mark.parametrize("answer", ["ack", "response"])
def test_completion_queue_that_overruns_breaks_the_queue_pair(alone, answer):
    alone.qp.send_cq.depth = 1
    post(alone, *[send(alone, n) for n in range(3)], send(alone, 3, 4, Opcode.RDMA_READ))
    if answer == "ack":
        alone.ack(SQ_PSN + 2)
    else:
        respond(alone, SQ_PSN + 3, "ONLY", b"data")
    alone.network.run()
    assert statuses(alone) == [(0, SUCCESS)]
    assert alone.qp.state is QPState.ERR
    assert alone.events() == [EventType.CQ_ERR, EventType.QP_FATAL]
    assert not any(alone.memory.view[:4])


@pytest.mark.parametrize(
    ("psn", "name", "size"),
    [
        (0, "ONLY", 1024),
        (0, "LAST", 1024),
        (0, "FIRST", 1000),
        (0, "MIDDLE", 1028),
        (1, "FIRST", 1024),
        (1, "LAST", 12),
        (1, "LAST", 9),
        (1, "MIDDLE", 10),
        (2, "LAST", 10),
    ],
)
def test_response_of_the_wrong_length_or_place_is_ignored(alone, psn, name, size):
    post(alone, send(alone, 1, MTU_BYTES + 10, Opcode.RDMA_READ))
    if psn:
        respond(alone, SQ_PSN, "FIRST", bytes(MTU_BYTES))
    respond(alone, SQ_PSN + psn, name, b"x" * size)
    assert statuses(alone) == []
    assert not any(alone.memory.view[: 2 * MTU_BYTES])


def test_responses_to_another_kind_of_request_are_ignored(alone):
    post(alone, send(alone, 1), send(alone, 2, 8, Opcode.RDMA_READ))
    aeth = packets.aeth(packets.ACK, 31, 1)
    respond(alone, SQ_PSN, "ONLY", b"12345678")
    alone.inject("RC_ATOMIC_ACKNOWLEDGE", SQ_PSN, aeth, 1)
    alone.inject("RC_ATOMIC_ACKNOWLEDGE", SQ_PSN + 1, aeth, 1)
    assert [each for each in statuses(alone) if each[0] == 2] == []
    respond(alone, SQ_PSN + 1, "ONLY", b"12345678")
    assert alone.sends()[-1].wr_id == 2


def test_atomic_stores_what_the_peer_found(alone):
    post(alone, send(alone, 1, 8, Opcode.ATOMIC_FETCH_AND_ADD, atomic_rkey=RKEY))
    alone.inject(
        "RC_ATOMIC_ACKNOWLEDGE", SQ_PSN, packets.aeth(packets.ACK, 31, 1), 0x0102030405060708
    )
    [done] = alone.sends()
    assert (done.status, done.byte_len) == (SUCCESS, 8)
    assert int.from_bytes(alone.memory.view[:8], sys.byteorder) == 0x0102030405060708


def test_no_more_reads_and_atomics_are_sent_than_the_peer_takes():
    alone = Alone(max_rd_atomic=2)
    post(alone, *[send(alone, n, 4, Opcode.RDMA_READ) for n in range(4)])
    assert len(alone.peer.take()) == 2
    respond(alone, SQ_PSN, "ONLY", b"data")
    alone.network.run_ready()
    assert psns(alone.peer.take()) == [2]


@pytest.mark.parametrize("opcode", [Opcode.RDMA_READ, Opcode.ATOMIC_FETCH_AND_ADD])
def test_queue_pair_that_may_have_no_reads_refuses_them(opcode):
    alone = Alone(max_rd_atomic=0)
    post(alone, send(alone, 1, 8, opcode, atomic_rkey=RKEY))
    assert statuses(alone) == [(1, WCStatus.LOC_QP_OP_ERR)]


def test_fenced_request_waits_for_reads(alone):
    post(alone, send(alone, 1, 4, Opcode.RDMA_READ), send(alone, 2), send(alone, 3, flags=FENCE))
    assert names(alone.peer.take()) == ["RDMA_READ_REQUEST", "SEND_ONLY"]
    alone.memory.view[:8] = bytes(8)
    respond(alone, SQ_PSN, "ONLY", b"data")
    alone.network.run_ready()
    [fenced] = alone.peer.take()
    assert bytes(fenced.data[0]) == b"data" + bytes(4)


# ---- errors of its own ----------------------------------------------------------------


def test_local_error_completes_after_earlier_requests(alone):
    bad = send(alone, 3)
    bad.sges = ((alone.memory.addr, 8, 0x77),)
    post(alone, send(alone, 1), send(alone, 2), bad, send(alone, 4))
    assert len(alone.peer.take()) == 2
    assert statuses(alone) == []
    alone.ack(SQ_PSN + 1)
    assert statuses(alone) == [(1, SUCCESS), (2, SUCCESS), (3, WCStatus.LOC_PROT_ERR), (4, FLUSHED)]
    assert alone.peer.take() == []


def test_memory_that_goes_away_while_a_message_is_sent_ends_it(alone):
    post(alone, send(alone, 1, 100 * MTU_BYTES))
    alone.peer.take()
    alone.device.memory.deregister(alone.memory.mr)
    alone.ack(SQ_PSN + 31)
    assert statuses(alone) == [(1, WCStatus.LOC_PROT_ERR)]


def test_memory_of_a_read_is_checked_when_the_response_arrives(alone):
    readonly = Buffer(alone.device, 64, int(Access.REMOTE_READ))
    wqe = send(alone, 1, 4, Opcode.RDMA_READ)
    wqe.sges = (readonly.sge(0, 4),)
    post(alone, wqe)
    assert len(alone.peer.take()) == 1
    respond(alone, SQ_PSN, "ONLY", b"data")
    assert statuses(alone) == [(1, WCStatus.LOC_PROT_ERR)]
    assert bytes(readonly.view[:4]) == bytes(4)


@pytest.mark.parametrize(
    ("qp_type", "opcode", "size", "status"),
    [
        (QPType.UD, Opcode.SEND, 4097, WCStatus.LOC_LEN_ERR),
        (QPType.UD, Opcode.TSO, 10, WCStatus.LOC_QP_OP_ERR),
        (QPType.UD, Opcode.RDMA_WRITE, 10, WCStatus.LOC_QP_OP_ERR),
        (QPType.UC, Opcode.SEND_WITH_INV, 10, WCStatus.LOC_QP_OP_ERR),
        (QPType.UC, Opcode.RDMA_READ, 10, WCStatus.LOC_QP_OP_ERR),
        (QPType.RC, Opcode.TSO, 10, WCStatus.LOC_QP_OP_ERR),
        (QPType.RC, Opcode.ATOMIC_FETCH_AND_ADD, 7, WCStatus.LOC_LEN_ERR),
    ],
)
def test_request_that_cannot_be_sent_ends_with_a_local_status(qp_type, opcode, size, status):
    alone = Alone(qp_type)
    path = AddressHandle(gid(1), gid(2), 0, 0, 64, 0)
    post(alone, send(alone, 1, size, opcode, ah=path, remote_qkey=1), send(alone, 2, ah=path))
    assert statuses(alone) == [(1, status), (2, FLUSHED)]
    assert alone.peer.take() == []
    assert alone.qp.state is (QPState.ERR if qp_type is QPType.RC else QPState.SQE)


def test_planned_fault_ends_a_request(alone):
    alone.device.context.faults.statuses[2] = (WCStatus.GENERAL_ERR,)
    post(alone, send(alone, 1), send(alone, 2))
    alone.ack(SQ_PSN)
    assert statuses(alone) == [(1, SUCCESS), (2, WCStatus.GENERAL_ERR)]


def answer(alone: Alone, request: packets.Packet, byte: int) -> None:
    """Have the peer send the responses to a READ request."""
    left, psn = request.dma_length, request.psn
    while left:
        size = min(left, MTU_BYTES)
        is_first, is_last = psn == request.psn, size == left
        name = "ONLY" if is_first and is_last else "LAST" if is_last else "MIDDLE"
        respond(alone, psn, "FIRST" if is_first and not is_last else name, bytes((byte,)) * size)
        left, psn = left - size, psn + 1


def begin_long_read(alone: Alone) -> list[packets.Packet]:
    """Post a READ that is three requests, of which the last one cannot be sent yet."""
    post(alone, send(alone, 1, 80 * MTU_BYTES, Opcode.RDMA_READ))
    got = alone.peer.take()
    assert len(got) == 2
    return got


def end_long_read(alone: Alone, first: list[packets.Packet]) -> None:
    """Answer the requests of a READ, and the last one, which is sent then."""
    for request in first:
        answer(alone, request, 1)
    (last,) = alone.peer.take()
    assert last.remote_addr - REMOTE == 64 * MTU_BYTES
    answer(alone, last, 1)


@pytest.mark.parametrize("status", [SUCCESS, WCStatus.GENERAL_ERR])
def test_planned_status_waits_for_the_next_work_request_if_a_read_has_begun(alone, status):
    first = begin_long_read(alone)
    alone.device.context.faults.statuses[1] = (status,)
    end_long_read(alone, first)
    assert [(wc.wr_id, wc.status, wc.byte_len) for wc in alone.sends()] == [
        (1, SUCCESS, 80 * MTU_BYTES)
    ]
    assert bytes(alone.memory.view[: 80 * MTU_BYTES]) == b"\1" * (80 * MTU_BYTES)
    post(alone, send(alone, 1, 8, Opcode.RDMA_READ))
    assert statuses(alone) == [(1, status)]
    assert alone.peer.take() == []


def test_send_queue_has_drained_when_all_parts_of_a_read_have_arrived(alone):
    first = begin_long_read(alone)
    drain = QPAttrMask.STATE | QPAttrMask.EN_SQD_ASYNC_NOTIFY
    assert alone.qp.modify(drain, {"qp_state": QPState.SQD, "en_sqd_async_notify": 1})
    post(alone, send(alone, 2))
    end_long_read(alone, first)
    assert statuses(alone) == [(1, SUCCESS)]
    assert alone.events() == [EventType.SQ_DRAINED]
    # What was posted in SQD waits.
    assert alone.peer.take() == []


def test_request_that_the_engine_gives_up_ends_with_fatal_err(alone):
    post(alone, send(alone, 1), send(alone, 2))
    assert not protocol_engine.give_up(alone.qp, expired=False)
    assert statuses(alone) == [(1, WCStatus.FATAL_ERR), (2, FLUSHED)]
    alone.ack(SQ_PSN + 1)
    alone.network.run()
    assert not protocol_engine.give_up(alone.qp, expired=False)


def test_queue_pair_without_requests_whose_timer_the_engine_gives_up_is_broken(alone):
    """What waited for the timer, a request of its peer, could not be executed."""
    assert not protocol_engine.give_up(alone.qp, expired=False)
    assert alone.qp.state is QPState.RTS
    assert not protocol_engine.give_up(alone.qp, expired=True)
    assert alone.qp.state is QPState.ERR
    assert alone.events() == [EventType.QP_FATAL]


# ---- local operations -------------------------------------------------------------------


@pytest.mark.parametrize("mw_type", list(MWType))
def test_local_operations_run_when_earlier_requests_have_ended(alone, mw_type):
    region = Buffer(alone.device, 8).mr
    window = alone.device.memory.allocate_window(alone.device.pd, mw_type)
    post(
        alone,
        send(alone, 1),
        WQE(2, opcode=int(Opcode.LOCAL_INV), imm=region.lkey),
        WQE(
            3,
            opcode=int(Opcode.BIND_MW),
            window=window,
            region=alone.memory.mr,
            bind_addr=alone.memory.addr,
            bind_length=64,
            bind_access=int(Access.REMOTE_READ),
            bind_rkey=1,
        ),
        WQE(4, opcode=int(Opcode.LOCAL_INV), imm=region.lkey),
    )
    assert region.valid
    alone.ack(SQ_PSN)
    assert not region.valid
    assert window.region is alone.memory.mr
    assert statuses(alone) == [(1, SUCCESS), (2, SUCCESS), (3, SUCCESS), (4, WCStatus.MW_BIND_ERR)]


# ---- states ------------------------------------------------------------------------------


def test_path_mtu_is_no_more_than_the_port_has():
    alone = Alone()
    alone.device.port_mtu = MTU.MTU_1024
    assert alone.qp.modify(QPAttrMask.STATE, {"qp_state": QPState.RESET})
    with pytest.raises(AssertionError):
        connect(alone.qp, gid(2), PEER_QPN, path_mtu=MTU.MTU_2048)
    assert alone.qp.state is QPState.INIT
    connect(alone.qp, gid(2), PEER_QPN, path_mtu=MTU.MTU_1024)


def test_send_queue_has_drained_when_the_last_acknowledgement_is_there(alone):
    post(alone, send(alone, 1, 100 * MTU_BYTES))
    alone.peer.take()
    drain = QPAttrMask.STATE | QPAttrMask.EN_SQD_ASYNC_NOTIFY
    assert alone.qp.modify(drain, {"qp_state": QPState.SQD, "en_sqd_async_notify": 1})
    post(alone, send(alone, 2))
    alone.ack(SQ_PSN + 63)
    # The message that has begun goes on.
    assert psns(alone.peer.take()) == list(range(64, 100))
    assert alone.events() == []
    alone.ack(SQ_PSN + 99)
    assert alone.events() == [EventType.SQ_DRAINED]
    assert alone.peer.take() == []
    assert alone.qp.modify(QPAttrMask.STATE, {"qp_state": QPState.RTS})
    alone.network.ready.append(alone.qp)
    assert psns(alone.peer.take()) == [100]


def test_send_queue_already_drained_raises_sq_drained_at_once(alone):
    drain = QPAttrMask.STATE | QPAttrMask.EN_SQD_ASYNC_NOTIFY
    assert alone.qp.modify(drain, {"qp_state": QPState.SQD, "en_sqd_async_notify": 1})
    assert alone.events() == [EventType.SQ_DRAINED]


def test_posts_in_the_error_state_are_flushed(alone):
    alone.qp.fail()
    post(alone, send(alone, 1))
    assert statuses(alone) == [(1, FLUSHED)]
    assert alone.peer.take() == []


def test_reset_queue_pair_forgets_requests_and_psns(alone):
    post(alone, send(alone, 1))
    alone.peer.take()
    assert alone.qp.modify(QPAttrMask.STATE, {"qp_state": QPState.RESET})
    alone.network.run()
    assert statuses(alone) == []
    connect(alone.qp, gid(2), PEER_QPN, 5, 6)
    alone.ack(SQ_PSN)
    post(alone, send(alone, 2))
    assert [packet.psn for packet in alone.peer.take()] == [5]
    alone.ack(5)
    assert statuses(alone) == [(2, SUCCESS)]


def test_unreliable_messages_are_done_when_they_are_sent():
    alone = Alone(QPType.UC)
    post(alone, send(alone, 1, 200 * MTU_BYTES), send(alone, 2, 8, Opcode.RDMA_WRITE))
    assert statuses(alone) == [(1, SUCCESS), (2, SUCCESS)]
    got = alone.peer.take()
    assert len(got) == 201
    assert not any(packet.ack_req for packet in got)


@pytest.mark.parametrize("mtu", list(MTU))
def test_bursts_of_packets_fit_a_datagram_at_any_mtu(mtu):
    """The model of the device checks each burst."""
    pair = PairOf(path_mtu=mtu, size=1 << 20)
    size = 300_003
    pair.mine.view[:size] = bytes(n % 255 for n in range(size))
    pair.network.post(
        pair.a,
        WQE(
            1,
            opcode=int(Opcode.RDMA_WRITE),
            sges=(pair.mine.sge(0, 5), pair.mine.sge(5, size - 5)),
            remote_addr=pair.theirs.addr + 1,
            rkey=pair.theirs.mr.rkey,
        ),
        WQE(
            2,
            opcode=int(Opcode.RDMA_READ),
            sges=(pair.mine.sge(size, 7), pair.mine.sge(size + 7, size - 7)),
            remote_addr=pair.theirs.addr + 1,
            rkey=pair.theirs.mr.rkey,
        ),
    )
    pair.network.run()
    assert [wc.status for wc in polled(pair.a.send_cq)] == [SUCCESS, SUCCESS]
    assert pair.theirs.view[1 : size + 1] == pair.mine.view[:size]
    assert pair.mine.view[size : 2 * size] == pair.mine.view[:size]

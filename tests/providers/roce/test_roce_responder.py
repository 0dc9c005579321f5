"""How a queue pair answers its peer's requests, and how it treats strangers' packets."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import sys
import tracemalloc
from typing import Any

import pytest
from support.roce_network import (
    ALL_ACCESS,
    PEER_QPN,
    RQ_PSN,
    SQ_PSN,
    WQE,
    Alone,
    Buffer,
    PairOf,
    connect,
    gid,
    polled,
)

from rdmapost._binding import native
from rdmapost.enums import (
    Access,
    EventType,
    FlushType,
    MWType,
    Opcode,
    QPAttrMask,
    QPState,
    QPType,
    WCFlags,
    WCOpcode,
    WCStatus,
)
from rdmapost.providers.roce import packets, protocol_engine
from rdmapost.providers.roce.packets import PSN_MASK
from rdmapost.providers.roce.qp import HELD, HOLD_SECONDS
from rdmapost.providers.roce.random_keys import RandomKeys
from rdmapost.providers.software.memory import INDICES, ProtectionDomain, Region

MTU_BYTES = 1024
SUCCESS, FLUSHED = WCStatus.SUCCESS, WCStatus.WR_FLUSH_ERR
WITHOUT_WRITE = ALL_ACCESS & ~int(Access.REMOTE_WRITE)


@pytest.fixture
def alone() -> Alone:
    return Alone()


def reth(alone: Alone, offset: int, length: int) -> tuple[int, int, int]:
    return alone.memory.addr + offset, alone.memory.mr.rkey, length


def inject(alone: Alone, n: int, name: str, *extensions: Any, size: int = 0, **rest: Any) -> None:
    """Have the peer send the packet with the n-th PSN."""
    rest.setdefault("payload", bytes((n & 0xFF or 1,)) * size)
    rest.setdefault("ack_req", True)
    alone.inject(f"{alone.qp.type.name}_{name}", RQ_PSN + n, *extensions, **rest)


def post_recv(alone: Alone, wr_id: int, size: int, offset: int = 0) -> None:
    sges = (alone.memory.sge(offset, size),) if size else ()
    alone.network.post_recv(alone.srq or alone.qp, WQE(wr_id, sges=sges))


def answers(alone: Alone) -> list[tuple[str, int, int, int]]:
    """The packets that the peer has received: name, PSN, and type and value of the syndrome."""
    return [
        (
            packet.row.name.removeprefix("RC_"),
            (packet.psn - RQ_PSN + 2**23 & PSN_MASK) - 2**23,
            getattr(packet, "aeth", 0) >> 29,
            getattr(packet, "aeth", 0) >> 24 & 31,
        )
        for packet in alone.peer.take()
    ]


def ack(n: int) -> tuple[str, int, int, int]:
    return "ACKNOWLEDGE", n, packets.ACK, packets.UNLIMITED_CREDITS


def nak(n: int, code: int) -> tuple[str, int, int, int]:
    return "ACKNOWLEDGE", n, packets.NAK, code


def completions(alone: Alone) -> list[tuple[int, WCStatus, int]]:
    return [(wc.wr_id, wc.status, wc.byte_len) for wc in alone.receives()]


# ---- acknowledgements -----------------------------------------------------------------


def test_request_that_asks_for_an_acknowledgement_gets_one(alone):
    post_recv(alone, 1, 100)
    post_recv(alone, 2, 100)
    inject(alone, 0, "SEND_ONLY", size=8, ack_req=False)
    assert answers(alone) == []
    inject(alone, 1, "SEND_ONLY", size=8)
    assert answers(alone) == [ack(1)]
    assert completions(alone) == [(1, SUCCESS, 8), (2, SUCCESS, 8)]
    assert alone.peer.gid == alone.qp.path.dgid


def test_acknowledgements_count_messages(alone):
    post_recv(alone, 1, 4000)
    inject(alone, 0, "SEND_FIRST", size=MTU_BYTES)
    inject(alone, 1, "SEND_LAST", size=10)
    inject(alone, 2, "RDMA_WRITE_ONLY", *reth(alone, 0, 8), size=8)
    assert [packet.aeth & PSN_MASK for packet in alone.peer.take()] == [0, 1, 2]


def test_message_of_many_packets_arrives_whole(alone):
    post_recv(alone, 1, 3000)
    inject(alone, 0, "SEND_FIRST", size=MTU_BYTES, ack_req=False)
    inject(alone, 1, "SEND_MIDDLE", size=MTU_BYTES, ack_req=False)
    inject(alone, 2, "SEND_LAST_WITH_IMMEDIATE", b"\x01\x02\x03\x04", size=99, flags=0x80)
    [done] = alone.receives()
    assert (done.status, done.opcode, done.byte_len) == (SUCCESS, WCOpcode.RECV, 2 * MTU_BYTES + 99)
    assert done.flags == WCFlags.WITH_IMM
    assert done.imm == int.from_bytes(b"\x01\x02\x03\x04", sys.byteorder)
    assert bytes(alone.memory.view[: 2 * MTU_BYTES + 100]) == (
        b"\x01" * 2 * MTU_BYTES + b"\x02" * 99 + b"\0"
    )


def test_write_with_immediate_completes_a_receive_with_its_length(alone):
    post_recv(alone, 1, 0)
    length = MTU_BYTES + 4
    inject(alone, 0, "RDMA_WRITE_FIRST", *reth(alone, 100, length), size=MTU_BYTES)
    inject(alone, 1, "RDMA_WRITE_LAST_WITH_IMMEDIATE", b"abcd", size=4)
    [done] = alone.receives()
    assert (done.opcode, done.byte_len) == (WCOpcode.RECV_RDMA_WITH_IMM, length)
    assert bytes(alone.memory.view[100 : 100 + length]) == b"\x01" * length


def test_send_with_invalidate_invalidates(alone):
    region = Buffer(alone.device, 8).mr
    post_recv(alone, 1, 100)
    inject(alone, 0, "SEND_ONLY_WITH_INVALIDATE", region.rkey, size=4)
    [done] = alone.receives()
    assert (done.flags, done.imm) == (WCFlags.WITH_INV, region.rkey)
    assert not region.valid


def test_invalidation_of_an_unknown_key_breaks_only_the_receiver(alone):
    post_recv(alone, 1, 100)
    inject(alone, 0, "SEND_ONLY_WITH_INVALIDATE", 0x1234, size=4)
    assert answers(alone) == [ack(0)]
    assert completions(alone) == [(1, WCStatus.REM_INV_REQ_ERR, 4)]
    assert alone.qp.state is QPState.ERR


def test_receiver_that_breaks_acknowledges_what_it_has_executed(alone):
    post_recv(alone, 1, 100)
    inject(alone, 0, "SEND_ONLY_WITH_INVALIDATE", 0x1234, size=4, ack_req=False)
    inject(alone, 1, "RDMA_WRITE_ONLY", *reth(alone, 0, 0))
    assert answers(alone) == [ack(0)]


def test_first_message_before_the_queue_pair_can_send_is_reported():
    alone = Alone(to_rts=False)
    inject(alone, 0, "RDMA_WRITE_ONLY", *reth(alone, 0, 0))
    inject(alone, 1, "RDMA_WRITE_ONLY", *reth(alone, 0, 0))
    assert alone.events() == [EventType.COMM_EST]
    assert answers(alone) == [ack(0), ack(1)]


# ---- order ----------------------------------------------------------------------------------


def test_requests_that_overtook_each_other_are_executed_in_order(alone):
    for n in range(4):
        post_recv(alone, n, 100)
    for n in (3, 1, 2):
        inject(alone, n, "SEND_ONLY", size=n + 1)
    assert completions(alone) == []
    inject(alone, 0, "SEND_ONLY", size=1)
    alone.network.run()
    assert completions(alone) == [(n, SUCCESS, n + 1) for n in range(4)]
    assert [each[1:3] for each in answers(alone)] == [(n, packets.ACK) for n in range(4)]
    assert alone.device.counters.naks_sent == 0


def test_missing_request_is_asked_for_once_after_what_came_is_acknowledged(alone):
    inject(alone, 0, "RDMA_WRITE_ONLY", *reth(alone, 0, 4), size=4, ack_req=False)
    inject(alone, 2, "RDMA_WRITE_ONLY", *reth(alone, 8, 4), size=4)
    assert answers(alone) == []
    alone.network.run(alone.network.now + HOLD_SECONDS)
    assert answers(alone) == [ack(0), nak(1, packets.PSN_SEQUENCE_ERROR)]
    inject(alone, 3, "RDMA_WRITE_ONLY", *reth(alone, 12, 4), size=4)
    alone.network.ready.append(alone.qp)
    alone.network.run()
    assert answers(alone) == []
    inject(alone, 1, "RDMA_WRITE_ONLY", *reth(alone, 4, 4), size=4)
    assert answers(alone) == [ack(1), ack(2), ack(3)]
    assert bytes(alone.memory.view[:16]) == b"\1\1\1\1\1\1\1\1\2\2\2\2\3\3\3\3"


def test_second_gap_in_the_psns_is_asked_for(alone):
    for n in (1, 3):
        inject(alone, n, "RDMA_WRITE_ONLY", *reth(alone, 0, 0))
    alone.network.run(alone.network.now + HOLD_SECONDS)
    assert answers(alone) == [ack(-1), nak(0, packets.PSN_SEQUENCE_ERROR)]
    inject(alone, 0, "RDMA_WRITE_ONLY", *reth(alone, 0, 0))
    alone.network.run(alone.network.now + 2 * HOLD_SECONDS)
    assert answers(alone) == [ack(0), ack(1), ack(1), nak(2, packets.PSN_SEQUENCE_ERROR)]


def test_packets_held_out_of_order_are_bounded(alone):
    payload = bytes(MTU_BYTES)
    for n in range(1, 1000):
        inject(alone, n, "RDMA_WRITE_ONLY", *reth(alone, 0, MTU_BYTES), payload=payload)
    assert len(alone.qp.held) < HELD
    run = b"".join(
        alone.packet("RC_RDMA_WRITE_MIDDLE", RQ_PSN + n, payload=payload) for n in range(2, 50)
    )
    alone.device.receive(gid(2), run, len(run) // 48)
    assert sum(packet.count for packet in alone.qp.held.values()) <= HELD


def test_early_packet_longer_than_the_mtu_is_not_held(alone):
    inject(alone, 1, "RDMA_WRITE_ONLY", *reth(alone, 0, 4096), size=4096)
    assert not alone.qp.held


def test_run_of_packets_partly_executed_before_is_executed_from_the_first_new_one(alone):
    length = 6 * MTU_BYTES
    inject(alone, 0, "RDMA_WRITE_FIRST", *reth(alone, 0, length), size=MTU_BYTES)
    pieces = [
        alone.packet("RC_RDMA_WRITE_MIDDLE", RQ_PSN + n, payload=bytes((n,)) * MTU_BYTES)
        for n in range(5)
    ]
    for begin, end in ((1, 3), (2, 5), (1, 5)):
        alone.device.receive(gid(2), b"".join(pieces[begin:end]), len(pieces[0]))
    inject(alone, 5, "RDMA_WRITE_LAST", size=MTU_BYTES)
    assert answers(alone)[-1] == ack(5)
    assert bytes(alone.memory.view[:length:MTU_BYTES]) == b"\1\1\2\3\4\5"


# ---- duplicates -------------------------------------------------------------------------------


def test_duplicate_request_is_acknowledged_and_not_executed(alone):
    post_recv(alone, 1, 100)
    post_recv(alone, 2, 100)
    for _ in range(3):
        inject(alone, 0, "SEND_ONLY", size=8)
    assert answers(alone) == [ack(0)] * 3
    assert completions(alone) == [(1, SUCCESS, 8)]


def test_duplicate_request_that_asks_for_no_acknowledgement_is_acknowledged(alone):
    """The end of a burst, which asks, may be lost each time that the peer repeats the burst."""
    for expected in ([], [ack(0)]):
        reth_fields = reth(alone, 0, 2 * MTU_BYTES)
        inject(alone, 0, "RDMA_WRITE_FIRST", *reth_fields, size=MTU_BYTES, ack_req=False)
        assert answers(alone) == expected


def test_duplicate_atomic_gets_the_result_again(alone):
    alone.memory.view[:8] = (5).to_bytes(8, sys.byteorder)
    add = (alone.memory.addr, alone.memory.mr.rkey, 10, 0)
    inject(alone, 0, "FETCH_ADD", *add)
    inject(alone, 1, "FETCH_ADD", *add)
    inject(alone, 0, "FETCH_ADD", *add)
    got = alone.peer.take()
    assert [packet.row.name for packet in got] == ["RC_ATOMIC_ACKNOWLEDGE"] * 3
    assert [(packet.psn, packet.value) for packet in got] == [
        (RQ_PSN, 5),
        (RQ_PSN + 1, 15),
        (RQ_PSN, 5),
    ]
    assert int.from_bytes(alone.memory.view[:8], sys.byteorder) == 25


def test_only_as_many_atomics_are_remembered_as_may_be_outstanding():
    alone = Alone(max_dest_rd_atomic=2)
    for n in range(10):
        inject(alone, n, "FETCH_ADD", alone.memory.addr, alone.memory.mr.rkey, 1, 0)
    alone.peer.take()
    for n in (7, 8, 9):
        inject(alone, n, "FETCH_ADD", alone.memory.addr, alone.memory.mr.rkey, 1, 0)
    assert [packet.value for packet in alone.peer.take()] == [8, 9]
    assert len(alone.qp.atomics) == 2


def test_duplicate_read_is_executed_again(alone):
    alone.memory.view[:4] = b"old."
    inject(alone, 0, "RDMA_READ_REQUEST", *reth(alone, 0, 4))
    inject(alone, 1, "RDMA_WRITE_ONLY", *reth(alone, 0, 4), payload=b"new.")
    alone.peer.take()
    inject(alone, 0, "RDMA_READ_REQUEST", *reth(alone, 0, 4))
    [again] = alone.peer.take()
    assert (again.psn, bytes(again.data[0])) == (RQ_PSN, b"new.")
    # What was not read before is not a duplicate.
    for length in (2 * MTU_BYTES + 1, 1 << 31, (1 << 32) - 1):
        inject(alone, 0, "RDMA_READ_REQUEST", *reth(alone, 0, length))
    assert alone.peer.take() == []


def test_atomic_that_has_the_psn_of_an_older_one_gets_its_own_result(alone):
    """PSNs wrap: an old atomic may have the one of the newest."""
    alone.qp.atomics.extend([(RQ_PSN, 111), (RQ_PSN, 222)])
    alone.qp.epsn = RQ_PSN + 1
    inject(alone, 0, "FETCH_ADD", alone.memory.addr, alone.memory.mr.rkey, 1, 0)
    assert [packet.value for packet in alone.peer.take()] == [222]


def begin(alone: Alone, *requests: bytes) -> None:
    """Process requests, but leave for later what the engine does not do in the same step."""
    for request in requests:
        parsed = packets.parse(memoryview(request), 0, len(request), 1, gid(2))
        assert parsed is not None
        alone.network.step(protocol_engine.receive, alone.qp, parsed)


def test_duplicate_reads_displace_neither_each_other_nor_the_read_in_progress(alone):
    count = 100
    starts = 0, count, 2 * count
    requests = [
        alone.packet("RC_RDMA_READ_REQUEST", RQ_PSN + start, *reth(alone, 0, count * MTU_BYTES))
        for start in starts
    ]
    for request in requests[:2]:
        begin(alone, request)
        alone.network.run_ready()
        alone.peer.take()
    # Two copies of each of the earlier READs come before the last one has ended.
    begin(alone, requests[2], *requests[:2] * 2)
    alone.network.run_ready()
    sent = [psn for name, psn, *_ in answers(alone) if "RESPONSE" in name]
    assert sent == [*range(2 * count, 3 * count), *range(count), *range(count, 2 * count)]


def test_duplicate_read_is_not_answered_where_no_reads_are_allowed():
    alone = Alone(max_dest_rd_atomic=0)
    inject(alone, 0, "RDMA_WRITE_ONLY", *reth(alone, 0, 4), size=4)
    alone.peer.take()
    inject(alone, 0, "RDMA_READ_REQUEST", *reth(alone, 0, 4))
    assert alone.peer.take() == []


def test_requests_that_wait_for_a_duplicate_read_go_on_when_it_cannot_be_answered(alone):
    count = 100
    inject(alone, 0, "RDMA_READ_REQUEST", *reth(alone, 0, count * MTU_BYTES))
    alone.peer.take()
    again = alone.packet("RC_RDMA_READ_REQUEST", RQ_PSN, *reth(alone, 0, count * MTU_BYTES))
    write = alone.packet("RC_RDMA_WRITE_ONLY", RQ_PSN + count, *reth(alone, 0, 0), ack_req=True)
    begin(alone, again, write)
    assert alone.qp.reading is not None
    alone.device.memory.deregister(alone.memory.mr)
    alone.network.run()
    assert answers(alone)[-1] == ack(count)
    assert alone.qp.state is QPState.RTS


@pytest.mark.parametrize(
    ("remove", "code"),
    [
        (
            lambda alone: alone.device.memory.deregister(alone.memory.mr),
            packets.REMOTE_ACCESS_ERROR,
        ),
        (lambda alone: alone.qp.attr.update(qp_access_flags=0), packets.INVALID_REQUEST),
    ],
    ids=["its region is gone", "the queue pair grants no reads"],
)
def test_duplicate_read_that_is_no_longer_allowed_is_refused_and_breaks_nothing(
    alone, remove, code
):
    """The network may have kept a copy for long: then its requester ignores the NAK."""
    inject(alone, 0, "RDMA_READ_REQUEST", *reth(alone, 0, 4))
    alone.peer.take()
    remove(alone)
    inject(alone, 0, "RDMA_READ_REQUEST", *reth(alone, 0, 4))
    assert answers(alone) == [nak(0, code)]
    assert alone.qp.state is QPState.RTS
    assert alone.events() == []


def test_read_whose_response_is_lost_and_whose_region_goes_ends_with_rem_access_err():
    pair = PairOf()
    pair.network.drop = lambda packet: packet[0] == packets.READ_RESPONSE_ONLY.bth_opcode
    read = WQE(1, opcode=int(Opcode.RDMA_READ), sges=(pair.mine.sge(0, 8),))
    read.remote_addr, read.rkey = pair.theirs.addr, pair.theirs.mr.rkey
    pair.network.post(pair.a, read)
    pair.network.run(pair.network.now + 1e-3)
    pair.devices[1].memory.deregister(pair.theirs.mr)
    pair.network.run()
    assert [wc.status for wc in polled(pair.a.send_cq)] == [WCStatus.REM_ACCESS_ERR]


# ---- READ ------------------------------------------------------------------------------------


def test_read_of_part_of_a_message_begins_with_first_or_only(alone):
    alone.memory.view[:3000] = bytes(n % 249 for n in range(3000))
    inject(alone, 0, "RDMA_READ_REQUEST", *reth(alone, 0, 3000))
    got = alone.peer.take()
    assert [packet.row.name.split("_")[-1] for packet in got] == ["FIRST", "MIDDLE", "LAST"]
    assert b"".join(bytes(packet.data[0]) for packet in got) == bytes(alone.memory.view[:3000])
    inject(alone, 2, "RDMA_READ_REQUEST", *reth(alone, 2048, 952))
    [only] = alone.peer.take()
    assert only.row.name == "RC_RDMA_READ_RESPONSE_ONLY"
    inject(alone, 3, "RDMA_READ_REQUEST", *reth(alone, 0, 0))
    [empty] = alone.peer.take()
    assert (empty.psn, empty.length) == (RQ_PSN + 3 & PSN_MASK, 0)


def test_huge_read_is_answered_in_parts_and_in_order(alone):
    """What comes meanwhile waits: its acknowledgement would say that all of it was sent."""
    count = 200
    alone.memory.view[: count * MTU_BYTES] = random.Random(1).randbytes(count * MTU_BYTES)
    before = alone.packet("RC_RDMA_WRITE_ONLY", RQ_PSN, *reth(alone, 0, 0), ack_req=True)
    request = alone.packet("RC_RDMA_READ_REQUEST", RQ_PSN + 1, *reth(alone, 0, count * MTU_BYTES))
    write = alone.packet(
        "RC_RDMA_WRITE_ONLY", RQ_PSN + 1 + count, *reth(alone, 0, 4), payload=b"late", ack_req=True
    )
    # In one step, before the device goes on with anything.
    for packet in (before, request, write, before):
        parsed = packets.parse(memoryview(packet), 0, len(packet), 1, gid(2))
        assert parsed is not None
        protocol_engine.receive(alone.qp, parsed)
    assert alone.qp.reading is not None
    alone.network.run()
    got = alone.peer.got
    order = [0, *range(1, count + 1), count, count + 1]
    assert [packet.psn for packet in got] == [RQ_PSN + n & PSN_MASK for n in order]
    data = b"".join(bytes(packet.data[0]) for packet in got[1:-2])
    assert data == random.Random(1).randbytes(count * MTU_BYTES)
    assert [packet.row.name for packet in got[-2:]] == ["RC_ACKNOWLEDGE"] * 2
    assert bytes(alone.memory.view[:4]) == b"late"


# ---- refusals ----------------------------------------------------------------------------------

INVALID, ACCESS = packets.INVALID_REQUEST, packets.REMOTE_ACCESS_ERROR


@pytest.mark.parametrize(
    ("before", "name", "size"),
    [
        ([], "SEND_MIDDLE", MTU_BYTES),
        ([], "SEND_LAST", 4),
        ([], "RDMA_WRITE_MIDDLE", MTU_BYTES),
        ([], "RDMA_WRITE_LAST", 4),
        (["SEND_FIRST"], "SEND_FIRST", MTU_BYTES),
        (["SEND_FIRST"], "SEND_ONLY", 4),
        (["SEND_FIRST"], "RDMA_WRITE_LAST", 4),
        (["SEND_FIRST"], "RDMA_READ_REQUEST", 0),
        (["SEND_FIRST"], "SEND_MIDDLE", MTU_BYTES - 4),
        (["SEND_FIRST"], "SEND_MIDDLE", MTU_BYTES + 4),
        (["SEND_FIRST"], "SEND_LAST", 0),
        (["SEND_FIRST"], "SEND_LAST", MTU_BYTES + 4),
        ([], "SEND_FIRST", MTU_BYTES - 4),
        ([], "SEND_FIRST", MTU_BYTES + 4),
        ([], "SEND_ONLY", MTU_BYTES + 4),
    ],
)
def test_packet_out_of_place_or_of_the_wrong_length_is_refused(alone, before, name, size):
    post_recv(alone, 1, 5000)
    post_recv(alone, 2, 5000)
    for n, each in enumerate(before):
        inject(alone, n, each, size=MTU_BYTES, ack_req=False)
    row = packets.ROWS[{row.name: code for code, row in packets.ROWS.items()}[f"RC_{name}"]]
    extensions = reth(alone, 0, 64) if "RETH" in row.headers else ()
    inject(alone, len(before), name, *extensions, size=size)
    assert answers(alone) == [nak(len(before), INVALID)]
    assert alone.events() == [EventType.QP_REQ_ERR]
    # Also the one that the message had begun to fill.
    assert completions(alone) == [(1, FLUSHED, 0), (2, FLUSHED, 0)]


@pytest.mark.parametrize(
    ("name", "length", "size"),
    [
        ("RDMA_WRITE_ONLY", 8, 4),
        ("RDMA_WRITE_ONLY", 4, 8),
        ("RDMA_WRITE_ONLY", MTU_BYTES + 4, MTU_BYTES + 4),
        ("RDMA_WRITE_FIRST", MTU_BYTES, MTU_BYTES),
        ("RDMA_WRITE_FIRST", 10, MTU_BYTES),
        ("RDMA_WRITE_FIRST", 2**31 + 1, MTU_BYTES),
        ("RDMA_READ_REQUEST", 2**31 + 1, 0),
        ("ATOMIC_WRITE", 8, 4),
        ("ATOMIC_WRITE", 4, 8),
        ("ATOMIC_WRITE", 0, 0),
    ],
)
def test_request_whose_length_does_not_fit_its_payload_is_refused(alone, name, length, size):
    before = bytes(alone.memory.view)
    inject(alone, 0, name, *reth(alone, 0, length), size=size)
    assert answers(alone) == [nak(0, INVALID)]
    assert alone.memory.view == before


def test_write_that_brings_more_or_less_than_it_said_is_refused():
    for sizes in ([MTU_BYTES, 12], [MTU_BYTES, 4], [MTU_BYTES, MTU_BYTES]):
        alone = Alone()
        inject(alone, 0, "RDMA_WRITE_FIRST", *reth(alone, 0, MTU_BYTES + 8), size=sizes[0])
        inject(alone, 1, "RDMA_WRITE_LAST", size=sizes[1])
        assert answers(alone) == [ack(0), nak(1, INVALID)]
        assert bytes(alone.memory.view[MTU_BYTES : 2 * MTU_BYTES]) == bytes(MTU_BYTES)
    alone = Alone()
    inject(alone, 0, "RDMA_WRITE_FIRST", *reth(alone, 0, MTU_BYTES + 8), size=MTU_BYTES)
    inject(alone, 1, "RDMA_WRITE_MIDDLE", size=MTU_BYTES)
    assert answers(alone) == [ack(0), nak(1, INVALID)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("RDMA_WRITE_ONLY", {"qp_access_flags": WITHOUT_WRITE}),
        ("RDMA_WRITE_FIRST", {"qp_access_flags": WITHOUT_WRITE}),
        ("ATOMIC_WRITE", {"qp_access_flags": WITHOUT_WRITE}),
        ("ATOMIC_WRITE", {"max_dest_rd_atomic": 0}),
        ("RDMA_READ_REQUEST", {"qp_access_flags": int(Access.REMOTE_WRITE)}),
        ("RDMA_READ_REQUEST", {"max_dest_rd_atomic": 0}),
        ("FETCH_ADD", {"qp_access_flags": int(Access.REMOTE_WRITE)}),
        ("FETCH_ADD", {"max_dest_rd_atomic": 0}),
        ("COMPARE_SWAP", {"max_dest_rd_atomic": 0}),
        ("FLUSH", {"qp_access_flags": int(Access.REMOTE_WRITE)}),
        ("FLUSH", {"max_dest_rd_atomic": 0}),
    ],
)
def test_access_that_the_responders_queue_pair_does_not_allow_is_refused(name, options):
    alone = Alone(**options)
    size = {"RDMA_WRITE_FIRST": MTU_BYTES, "RDMA_WRITE_ONLY": 8, "ATOMIC_WRITE": 8}.get(name, 0)
    extensions: tuple[int, ...] = reth(alone, 0, 2 * size if name.endswith("FIRST") else 8)
    if name in ("FETCH_ADD", "COMPARE_SWAP"):
        extensions = (*extensions[:2], 1, 1)
    elif name == "FLUSH":
        extensions = (int(FlushType.GLOBAL), *extensions)
    inject(alone, 0, name, *extensions, size=size)
    assert answers(alone) == [nak(0, INVALID)]
    assert alone.events() == [EventType.QP_REQ_ERR]
    assert bytes(alone.memory.view[:16]) == bytes(16)


def far(alone: Alone) -> tuple[int, int]:
    return alone.memory.addr + len(alone.memory.view), alone.memory.mr.rkey


def unknown(alone: Alone) -> tuple[int, int]:
    return alone.memory.addr, alone.memory.mr.rkey ^ 0x100


def local_key(alone: Alone) -> tuple[int, int]:
    return alone.memory.addr, alone.memory.mr.lkey


def below(alone: Alone) -> tuple[int, int]:
    return alone.memory.addr - 8, alone.memory.mr.rkey


def without_access(alone: Alone) -> tuple[int, int]:
    made = Buffer(alone.device, 64, int(Access.LOCAL_WRITE))
    return made.addr, made.mr.rkey


def other_domain(alone: Alone) -> tuple[int, int]:
    alone.device.pd = ProtectionDomain()
    made = Buffer(alone.device, 64)
    return made.addr, made.mr.rkey


def other_window(alone: Alone) -> tuple[int, int]:
    window = alone.device.memory.allocate_window(alone.qp.pd, MWType.TYPE_2)
    region = alone.memory.mr
    window.bind(region, region.addr, 64, ALL_ACCESS, alone.qp.number + 1)
    return region.addr, window.rkey


@pytest.mark.parametrize(
    "place", [far, unknown, local_key, below, without_access, other_domain, other_window]
)
@pytest.mark.parametrize(
    "name", ["RDMA_WRITE_ONLY", "RDMA_WRITE_FIRST", "RDMA_READ_REQUEST", "FETCH_ADD"]
)
def test_memory_that_the_rkey_does_not_give_is_not_touched(alone, name, place):
    addr, rkey = place(alone)
    size = {"RDMA_WRITE_ONLY": 8, "RDMA_WRITE_FIRST": MTU_BYTES}.get(name, 0)
    extensions = (addr, rkey, size + (8 if name != "RDMA_WRITE_ONLY" else 0))
    if name == "FETCH_ADD":
        extensions = (addr, rkey, 1, 0)
    before = bytes(alone.memory.view)
    inject(alone, 0, name, *extensions, size=size)
    assert answers(alone) == [nak(0, ACCESS)]
    assert alone.events() == [EventType.QP_ACCESS_ERR]
    assert alone.memory.view == before


def test_key_that_goes_away_in_the_middle_of_a_write_ends_it(alone):
    inject(alone, 0, "RDMA_WRITE_FIRST", *reth(alone, 0, 3 * MTU_BYTES), size=MTU_BYTES)
    alone.device.memory.deregister(alone.memory.mr)
    inject(alone, 1, "RDMA_WRITE_MIDDLE", size=MTU_BYTES)
    assert answers(alone) == [ack(0), nak(1, ACCESS)]
    assert bytes(alone.memory.view[MTU_BYTES : 2 * MTU_BYTES]) == bytes(MTU_BYTES)


def test_misaligned_atomic_request_is_refused_by_the_responder(alone):
    inject(alone, 0, "FETCH_ADD", alone.memory.addr + 4, alone.memory.mr.rkey, 1, 0)
    assert answers(alone) == [nak(0, INVALID)]


@pytest.mark.parametrize("pieces", [["ONLY"], ["FIRST", "LAST"], ["FIRST", "MIDDLE", "LAST"]])
def test_message_longer_than_its_receive_is_refused(alone, pieces):
    post_recv(alone, 1, 10 if len(pieces) == 1 else (len(pieces) - 1) * MTU_BYTES + 10)
    post_recv(alone, 2, 100)
    for n, place in enumerate(pieces):
        size = 11 if place in ("ONLY", "LAST") else MTU_BYTES
        inject(alone, n, f"SEND_{place}", size=size, ack_req=False)
    total = (len(pieces) - 1) * MTU_BYTES + 11
    assert answers(alone) == [nak(len(pieces) - 1, INVALID)]
    assert completions(alone) == [(1, WCStatus.LOC_LEN_ERR, total), (2, FLUSHED, 0)]


def test_receive_into_memory_that_cannot_be_written_is_an_operational_error(alone):
    readonly = Buffer(alone.device, 64, 0)
    alone.network.post_recv(alone.qp, WQE(1, sges=(readonly.sge(0, 64),)))
    inject(alone, 0, "SEND_ONLY", size=8)
    assert answers(alone) == [nak(0, packets.REMOTE_OPERATIONAL_ERROR)]
    assert completions(alone) == [(1, WCStatus.LOC_PROT_ERR, 8)]


@pytest.mark.parametrize("name", ["SEND_ONLY", "SEND_FIRST", "RDMA_WRITE_ONLY_WITH_IMMEDIATE"])
def test_message_without_a_receive_is_answered_with_an_rnr_nak(name):
    alone = Alone(min_rnr_timer=17)
    size = MTU_BYTES if name == "SEND_FIRST" else 8
    extensions = (*reth(alone, 0, 8), b"abcd") if "WRITE" in name else ()
    inject(alone, 0, name, *extensions, size=size)
    assert answers(alone) == [("ACKNOWLEDGE", 0, packets.RNR_NAK, 17)]
    # Nothing was written, and what comes after it waits for it.
    assert bytes(alone.memory.view[:8]) == bytes(8)
    inject(alone, 1, "RDMA_WRITE_ONLY", *reth(alone, 64, 0))
    alone.network.run()
    assert answers(alone) == []
    post_recv(alone, 1, 2000)
    inject(alone, 0, name, *extensions, size=size)
    assert ack(0) in answers(alone)


def test_write_whose_last_packet_needs_a_receive_goes_on_there(alone):
    inject(alone, 0, "RDMA_WRITE_FIRST", *reth(alone, 0, MTU_BYTES + 4), size=MTU_BYTES)
    inject(alone, 1, "RDMA_WRITE_LAST_WITH_IMMEDIATE", b"abcd", size=4)
    assert answers(alone)[1][:3] == ("ACKNOWLEDGE", 1, packets.RNR_NAK)
    post_recv(alone, 1, 0)
    inject(alone, 1, "RDMA_WRITE_LAST_WITH_IMMEDIATE", b"abcd", size=4)
    assert completions(alone) == [(1, SUCCESS, MTU_BYTES + 4)]


# ---- memory that the kernel copies -------------------------------------------------------------


def file_region(alone: Alone, size: int, kept: int | None = None) -> Region:
    """Register a mapped file, of which only the first bytes are left."""
    # A state that is compared reads all memory, also what is gone.
    alone.network.interrupts = False
    fd = os.memfd_create("test")
    try:
        os.truncate(fd, size)
        view = memoryview(mmap.mmap(fd, size))
        os.truncate(fd, size if kept is None else kept)
    finally:
        os.close(fd)
    addr = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return alone.device.memory.register(alone.device.pd, addr, view, ALL_ACCESS, addr)


def test_read_of_memory_that_the_kernel_copies_holds_little_of_it_at_once(alone):
    size = 16 << 20
    mr = file_region(alone, size)
    sent = []
    alone.network.drop = lambda packet: sent.append(len(packet)) or True
    tracemalloc.start()
    try:
        inject(alone, 0, "RDMA_READ_REQUEST", mr.addr, mr.rkey, size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(sent) > size
    assert peak < 2 << 20


def test_read_of_memory_that_is_gone_further_on_is_refused_there(alone):
    mr = file_region(alone, 128 * MTU_BYTES, 64 * MTU_BYTES)
    inject(alone, 0, "RDMA_READ_REQUEST", mr.addr, mr.rkey, 128 * MTU_BYTES)
    got = answers(alone)
    assert len(got) == 65
    assert got[-1] == nak(64, ACCESS)
    assert alone.events() == [EventType.QP_ACCESS_ERR]


def test_read_of_memory_that_is_gone_is_refused_before_anything_is_sent(alone):
    mr = file_region(alone, 128 * MTU_BYTES, 0)
    inject(alone, 0, "RDMA_READ_REQUEST", mr.addr, mr.rkey, 128 * MTU_BYTES)
    assert answers(alone) == [nak(0, ACCESS)]
    assert alone.events() == [EventType.QP_ACCESS_ERR]


def test_write_to_memory_that_the_kernel_copies_looks_at_each_byte_once(alone, monkeypatch):
    count = 200
    mr = file_region(alone, count * MTU_BYTES)
    looked_at = []

    def reachable(addr: int, length: int) -> bool:
        looked_at.append(length)
        return found(addr, length)

    found = native.reachable
    monkeypatch.setattr(native, "reachable", reachable)
    inject(alone, 0, "RDMA_WRITE_FIRST", mr.addr, mr.rkey, count * MTU_BYTES, size=MTU_BYTES)
    for n in range(1, count - 1):
        inject(alone, n, "RDMA_WRITE_MIDDLE", size=MTU_BYTES)
    inject(alone, count - 1, "RDMA_WRITE_LAST", size=MTU_BYTES)
    assert answers(alone)[-1] == ack(count - 1)
    assert mr.memory == b"".join(bytes((n & 0xFF or 1,)) * MTU_BYTES for n in range(count))
    assert sum(looked_at) == count * MTU_BYTES


def test_write_to_memory_that_is_gone_further_on_is_refused_there(alone):
    page = mmap.PAGESIZE // MTU_BYTES
    mr = file_region(alone, 2 * mmap.PAGESIZE, mmap.PAGESIZE)
    inject(alone, 0, "RDMA_WRITE_FIRST", mr.addr, mr.rkey, 2 * mmap.PAGESIZE, size=MTU_BYTES)
    for n in range(1, page + 1):
        inject(alone, n, "RDMA_WRITE_MIDDLE", size=MTU_BYTES)
    assert answers(alone) == [*map(ack, range(page)), nak(page, ACCESS)]
    assert alone.events() == [EventType.QP_ACCESS_ERR]


def test_write_beyond_its_region_is_refused_before_anything_is_written(alone):
    mr = file_region(alone, 2 * mmap.PAGESIZE)
    inject(alone, 0, "RDMA_WRITE_FIRST", mr.addr, mr.rkey, 2 * mmap.PAGESIZE + 1, size=MTU_BYTES)
    assert answers(alone) == [nak(0, ACCESS)]
    assert mr.memory == bytes(2 * mmap.PAGESIZE)


# ---- whose packets -----------------------------------------------------------------------------


def test_packets_of_another_sender_service_or_state_are_ignored(alone):
    send_write = ("RC_RDMA_WRITE_ONLY", RQ_PSN, *reth(alone, 0, 4))
    alone.peer.gid = gid(3)
    alone.inject(*send_write, payload=b"evil")
    alone.peer.gid = gid(2)
    alone.inject("UC_RDMA_WRITE_ONLY", RQ_PSN, *reth(alone, 0, 4), payload=b"evil")
    alone.inject("UD_SEND_ONLY", RQ_PSN, 0, 1, payload=b"evil")
    alone.inject(*send_write, payload=b"evil", qpn=alone.qp.number + 1)
    alone.inject(*send_write, payload=b"evil", pkey=0x1234)
    alone.inject(*send_write, payload=b"evil", flags=1)
    assert bytes(alone.memory.view[:4]) == bytes(4)
    assert alone.peer.take() == []
    alone.inject(*send_write, payload=b"good", pkey=0x7FFF)
    assert bytes(alone.memory.view[:4]) == b"good"
    alone.qp.fail()
    alone.inject("RC_RDMA_WRITE_ONLY", RQ_PSN + 1, *reth(alone, 0, 4), payload=b"evil")
    assert bytes(alone.memory.view[:4]) == b"good"


def test_datagram_needs_the_right_qkey():
    ud = Alone(QPType.UD)
    post_recv(ud, 1, 100)
    ud.inject("UD_SEND_ONLY", 7, 0x1235, 77, payload=b"wrong")
    assert ud.receives() == []
    assert ud.qp.device.qkey_violations == 1
    ud.inject("UD_SEND_ONLY_WITH_IMMEDIATE", 99, 0x1234, 0xFF00_0055, b"abcd", payload=b"right")
    [done] = ud.receives()
    assert (done.byte_len, done.src_qp) == (45, 0x55)
    assert done.flags == WCFlags.GRH | WCFlags.WITH_IMM
    assert bytes(ud.memory.view[40:45]) == b"right"
    # Without a receive it is lost.
    ud.inject("UD_SEND_ONLY", 100, 0x1234, 77, payload=b"lost")
    assert ud.receives() == []


def test_datagram_longer_than_the_mtu_takes_no_receive():
    ud = Alone(QPType.UD)
    post_recv(ud, 1, 100)
    ud.inject("UD_SEND_ONLY", 7, 0x1234, 77, payload=bytes(4097))
    assert ud.receives() == []
    assert ud.qp.state is QPState.RTS
    ud.inject("UD_SEND_ONLY", 8, 0x1234, 77, payload=b"short")
    assert [wc.byte_len for wc in ud.receives()] == [45]


def test_datagram_longer_than_its_receive_is_dropped():
    """Anybody who knows the Q_Key may send it: the queue pair stays in use."""
    ud = Alone(QPType.UD)
    post_recv(ud, 1, 47)
    ud.inject("UD_SEND_ONLY", 7, 0x1234, 77, payload=b"too long")
    assert ud.receives() == []
    assert ud.qp.state is QPState.RTS
    ud.inject("UD_SEND_ONLY", 8, 0x1234, 77, payload=b"it fits")
    assert completions(ud) == [(1, SUCCESS, 47)]


def test_datagram_longer_than_its_shared_receive_ends_that_one_only():
    ud = Alone(QPType.UD, srq=True)
    post_recv(ud, 1, 47)
    post_recv(ud, 2, 48)
    for psn in (7, 8):
        ud.inject("UD_SEND_ONLY", psn, 0x1234, 77, payload=b"too long")
    assert completions(ud) == [(1, WCStatus.REM_INV_REQ_ERR, 0), (2, SUCCESS, 48)]
    assert ud.qp.state is QPState.RTS


# ---- shared receive queues ------------------------------------------------------------------


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC])
def test_reset_puts_a_shared_receive_that_was_begun_back_before_the_others(qp_type):
    alone = Alone(qp_type, srq=True)
    assert alone.srq is not None
    for wr_id in (1, 2):
        post_recv(alone, wr_id, 5000)
    inject(alone, 0, "SEND_FIRST", size=MTU_BYTES)
    if qp_type is QPType.UC:
        inject(alone, 5, "SEND_MIDDLE", size=MTU_BYTES)
        assert alone.qp.spare is not None
    native.verb(alone.qp.modify, QPAttrMask.STATE, {"qp_state": QPState.RESET})
    connect(alone.qp, gid(2), PEER_QPN, rq_psn=RQ_PSN)
    for n in (0, 1):
        inject(alone, n, "SEND_ONLY", size=8)
    assert completions(alone) == [(1, SUCCESS, 8), (2, SUCCESS, 8)]


def test_shared_receive_queue_reports_its_limit():
    alone = Alone(srq=True)
    assert alone.srq is not None
    alone.srq.limit = 1
    post_recv(alone, 1, 100)
    inject(alone, 0, "SEND_ONLY", size=8)
    assert alone.events() == [EventType.SRQ_LIMIT_REACHED]
    assert completions(alone) == [(1, SUCCESS, 8)]


def test_receive_that_a_message_had_begun_to_fill_is_flushed_with_the_queue_pair():
    alone = Alone(srq=True)
    post_recv(alone, 1, 5000)
    post_recv(alone, 2, 5000)
    inject(alone, 0, "SEND_FIRST", size=MTU_BYTES)
    alone.qp.fail()
    assert completions(alone) == [(1, FLUSHED, 0)]
    assert alone.events() == [EventType.QP_LAST_WQE_REACHED]


# ---- the unreliable service ------------------------------------------------------------------


def test_message_that_lost_a_packet_leaves_its_receive_to_the_next():
    uc = Alone(QPType.UC)
    post_recv(uc, 1, 5000)
    post_recv(uc, 2, 5000)
    inject(uc, 0, "SEND_FIRST", size=MTU_BYTES)
    inject(uc, 2, "SEND_LAST", size=4)
    inject(uc, 3, "SEND_MIDDLE", size=MTU_BYTES)
    inject(uc, 4, "SEND_ONLY", size=3)
    inject(uc, 9, "SEND_FIRST", size=MTU_BYTES)
    inject(uc, 10, "SEND_LAST", size=5)
    assert completions(uc) == [(1, SUCCESS, 3), (2, SUCCESS, MTU_BYTES + 5)]
    assert uc.peer.take() == []


def test_request_that_an_unreliable_service_cannot_execute_is_dropped():
    uc = Alone(QPType.UC)
    inject(uc, 0, "SEND_ONLY", size=8)
    addr, rkey, _ = reth(uc, 0, 0)
    inject(uc, 1, "RDMA_WRITE_ONLY", addr, rkey ^ 1, 8, size=8)
    inject(uc, 2, "RDMA_WRITE_ONLY", addr, rkey, 8, size=4)
    inject(uc, 3, "RDMA_WRITE_FIRST", addr, rkey, 1 << 30, size=MTU_BYTES)
    inject(uc, 4, "RDMA_WRITE_MIDDLE", size=MTU_BYTES)
    assert uc.qp.state is QPState.RTS
    assert uc.events() == []
    assert not any(uc.memory.view)
    inject(uc, 5, "RDMA_WRITE_ONLY", addr, rkey, 4, payload=b"good")
    assert bytes(uc.memory.view[:4]) == b"good"


# ---- garbage ------------------------------------------------------------------------------------


def garbage(alone: Alone, rng: random.Random) -> bytes:
    """Make a packet that a parser accepts, but whose fields are mostly wrong."""
    row = rng.choice(list(packets.ROWS.values()))
    values: dict[str, Any] = {
        "remote_addr": alone.memory.addr + rng.choice([0, 8, -8, 1 << 62]),
        "rkey": rng.choice([alone.memory.mr.rkey, rng.getrandbits(32)]),
        "dma_length": rng.choice([0, 4, 8, 1024, 1025, 3000, 1 << 31, (1 << 32) - 1]),
        "aeth": rng.getrandbits(32),
        "immediate": rng.randbytes(4),
        "qkey": rng.choice([0x1234, 0]),
    }
    wide = {"swap_add", "compare", "value"}
    extensions = [
        values.get(name, rng.getrandbits(64 if name in wide else 32)) for name in row.fields[5:]
    ]
    base = rng.choice([RQ_PSN, alone.qp.epsn, SQ_PSN, alone.qp.una])
    payload = (
        rng.randbytes(rng.choice([0, 4, 8, 1024, 1024, 1020, 4096])) if row.has_payload else b""
    )
    psn = base + rng.choice([0, 0, 0, 1, -1, 2, 60, 70, 1 << 20, 1 << 23])
    return alone.packet(
        row.name, psn, *extensions, payload=payload, flags=rng.choice([0, 0x80]), ack_req=True
    )


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD])
def test_garbage_packets_raise_nothing_and_cost_little_memory(qp_type):
    rng = random.Random(3)
    tracemalloc.start()
    try:
        for round_ in range(30):
            alone = Alone(qp_type)
            alone.network.interrupts = not round_
            for n in range(5):
                post_recv(alone, n, 5000, n * 5000)
            post = [Opcode.SEND, Opcode.RDMA_WRITE]
            if qp_type is QPType.RC:
                post += [Opcode.RDMA_READ, Opcode.ATOMIC_WRITE]
            if qp_type is not QPType.UD:
                sges = (alone.memory.sge(1 << 16, 5000),)
                alone.network.post(
                    alone.qp, *[WQE(n, opcode=int(each), sges=sges) for n, each in enumerate(post)]
                )
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(100):
                packet = garbage(alone, rng)
                for _ in range(rng.choice([1, 1, 3])):
                    alone.peer.inject(alone.qp, packet)
                    mutated = bytearray(packet)
                    mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
                    alone.peer.inject(alone.qp, bytes(mutated))
            alone.network.run(alone.network.now + 1)
            alone.peer.got.clear()
            after, _ = tracemalloc.get_traced_memory()
            assert after - before < 600_000
    finally:
        tracemalloc.stop()


def test_queue_pair_may_be_its_own_peer():
    """A queue pair that is its own peer."""
    pair = PairOf()
    device = pair.devices[0]
    qp = device.qp()
    connect(qp, gid(1), qp.number, 9, 9)
    pair.network.post_recv(qp, WQE(2, sges=(pair.mine.sge(100, 10),)))
    pair.mine.view[:5] = b"hello"
    pair.network.post(qp, WQE(1, opcode=int(Opcode.SEND), sges=(pair.mine.sge(0, 5),)))
    pair.network.run()
    assert [wc.status for wc in polled(qp.recv_cq)] == [SUCCESS]
    assert [wc.status for wc in polled(qp.send_cq)] == [SUCCESS]
    assert bytes(pair.mine.view[100:105]) == b"hello"
    assert qp.number != PEER_QPN


def test_keys_that_differ_only_in_their_low_bytes_are_never_both_in_use(monkeypatch):
    """A bind replaces the low byte of a window's key."""
    monkeypatch.setattr("secrets.randbelow", lambda below: 0x12 - INDICES[0])
    memory, pd = RandomKeys(), object()
    first = memory.register(pd, 0, memoryview(bytearray(8)), 0)
    window = memory.allocate_window(pd, MWType.TYPE_2)
    second = memory.register(pd, 0, memoryview(bytearray(8)), 0)
    keys = first.lkey, window.rkey, second.lkey
    assert [key >> 8 for key in keys] == [0x12, 0x13, 0x14]

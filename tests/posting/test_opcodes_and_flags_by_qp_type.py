"""Opcodes and flags by type of queue pair: the tables of ibv_post_send(3).

That an opcode works where the table has it is what ``rdmapost check`` shows (test_check).
"""

from __future__ import annotations

import pytest
from support import LOCAL_ERROR, needs, soft_queues, watching
from support.soft_queues import WRS, reason

import rdmapost as rp
from rdmapost import DeviceCap, Opcode, QPType, SendFlags
from rdmapost.posting.rules import FLAGS_BY_OPCODE, flags_allowed
from rdmapost.standard.opcodes import OPCODES_BY_QP_TYPE, QP_TYPES_BY_OPCODE

soft = soft_queues.soft
watched = watching.watched

KINDS = {
    kind.opcode: kind
    for kind in (getattr(rp, name) for name in rp.posting.wr.__all__)
    if isinstance(kind, type) and issubclass(kind, rp.SendWR) and kind is not rp.SendWR
}


def refused(qp: rp.QP, opcode: Opcode) -> None:
    with pytest.raises(rp.PostError) as caught:
        qp.post_send(KINDS[opcode]())
    text = str(caught.value)
    assert f"{opcode.name} is not supported on {qp.qp_type.name} QPs, only on " in text
    assert all(other.name in text for other in QP_TYPES_BY_OPCODE[opcode])
    assert qp.outstanding == (0, 0)


def without(*qp_types: QPType) -> list[tuple[QPType, Opcode]]:
    """Return the empty cells in columns of the table."""
    return [(t, op) for t in qp_types for op in KINDS if t not in QP_TYPES_BY_OPCODE[op]]


@pytest.mark.parametrize(("qp_type", "opcode"), without(QPType.RC, QPType.UC, QPType.UD))
def test_opcode_that_the_table_does_not_give_a_qp_type_is_refused(connect, qp_type, opcode):
    pair = connect(qp_type)
    refused(pair.a, opcode)
    pair.works()


@pytest.mark.parametrize(("qp_type", "opcode"), without(QPType.XRC_SEND, QPType.RAW_PACKET))
def test_opcode_is_refused_on_xrc_and_raw_packets_too(context, pd, cq, qp_type, opcode):
    needs(context.kind == "soft", "XRC or raw packets", context)
    with rp.QP(pd, qp_type, cq) as qp, rp.QP(pd, QPType.RC, cq) as other:
        qp.connect(other.endpoint())
        refused(qp, opcode)


def test_every_opcode_of_the_table_has_a_class():
    assert set(KINDS) == set(QP_TYPES_BY_OPCODE)


def test_checksum_offload_that_the_device_lacks_is_refused(rc):
    """Neither soft0 nor Soft-RoCE has it on RC."""
    flags = SendFlags.SIGNALED | SendFlags.IP_CSUM
    with pytest.raises(rp.PostError, match=r"IP_CSUM is not supported by the device on RC QPs"):
        rc.a.post_send(rp.Send(rc.mine[:8], send_flags=flags))
    rc.works()


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
    with pytest.raises(rp.PostError, match=f"{opcode.name} is not supported on {qp_type.name} QPs"):
        pair.a.post_send(pair.wr(kind, pair.mine[:8]))
    pair.works()


@pytest.mark.parametrize("opcode", [Opcode.RDMA_READ, Opcode.ATOMIC_FETCH_AND_ADD])
def test_unchecked_opcode_of_another_qp_type_is_left_to_the_device(connect, opcode):
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


F = SendFlags


# As printed in the man page; the last two are ibv_wr_post(3)'s.
TABLE = """
OPCODE                      | UD | UC | RC | XRC_SEND | RAW_PACKET
IBV_WR_SEND                 | X  | X  | X  |    X     |     X
IBV_WR_SEND_WITH_IMM        | X  | X  | X  |    X     |
IBV_WR_RDMA_WRITE           |    | X  | X  |    X     |
IBV_WR_RDMA_WRITE_WITH_IMM  |    | X  | X  |    X     |
IBV_WR_RDMA_READ            |    |    | X  |    X     |
IBV_WR_ATOMIC_CMP_AND_SWP   |    |    | X  |    X     |
IBV_WR_ATOMIC_FETCH_AND_ADD |    |    | X  |    X     |
IBV_WR_LOCAL_INV            |    | X  | X  |    X     |
IBV_WR_BIND_MW              |    | X  | X  |    X     |
IBV_WR_SEND_WITH_INV        |    | X  | X  |    X     |
IBV_WR_TSO                  | X  |    |    |          |     X
IBV_WR_FLUSH                |    |    | X  |    X     |
IBV_WR_ATOMIC_WRITE         |    |    | X  |    X     |
"""


def table() -> dict[tuple[Opcode, QPType], bool]:
    head, *rows = [[cell.strip() for cell in line.split("|")] for line in TABLE.split("\n") if line]
    return {
        (Opcode[row[0].removeprefix("IBV_WR_")], QPType[column]): cell == "X"
        for row in rows
        for column, cell in zip(head[1:], row[1:], strict=True)
    }


@pytest.mark.parametrize(("opcode", "qp_type"), table())
def test_opcodes_of_each_qp_type_are_those_of_the_man_page(soft, opcode, qp_type):
    post, wr = soft.qp(qp_type).post_send, soft.valid(opcode, qp_type)
    if table()[opcode, qp_type]:
        post(wr)
        assert soft.qp(qp_type).outstanding.send == 1
    else:
        refused = reason(post, wr)
        assert f"{opcode.name} is not supported on {qp_type.name} QPs" in refused
        for other in QPType:
            assert (
                other.name in refused.partition(", only on ")[2].split(" [")[0].split(", ")
            ) is (table().get((opcode, other), False))


def test_opcode_table_has_no_rows_or_columns_beyond_the_man_page():
    assert {op for ops in OPCODES_BY_QP_TYPE.values() for op in ops} == {op for op, _ in table()}
    rest = set(QPType) - {qp_type for _, qp_type in table()}
    assert all(not OPCODES_BY_QP_TYPE[qp_type] for qp_type in rest)


def test_opcode_driver1_has_no_work_request_class():
    assert Opcode.DRIVER1 not in WRS
    assert Opcode.DRIVER1 not in {
        getattr(getattr(rp, name), "opcode", None) for name in rp.posting.wr.__all__
    }


@pytest.mark.parametrize("opcode", [Opcode.FLUSH, Opcode.ATOMIC_WRITE, Opcode.DRIVER1])
def test_work_request_cannot_be_given_an_opcode(soft, opcode):
    """Its class determines what is posted."""
    odd = type("Odd", (rp.LocalInv,), {"opcode": opcode, "__slots__": ()})
    soft.qp().post_send(odd())
    assert [wc.opcode for wc in soft.cq.wait(1)] in ([rp.WCOpcode.LOCAL_INV], [None])
    assert "expected SendWR" in reason(
        soft.qp().post_send, [type("Odder", (rp.SendWR,), {"opcode": opcode})()]
    )


SENDS = {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.SEND_WITH_INV}
WRITES = {Opcode.RDMA_WRITE, Opcode.RDMA_WRITE_WITH_IMM}


def flag_is_valid(flag: SendFlags, opcode: Opcode, qp_type: QPType, offloads: DeviceCap) -> bool:
    """The flags of ibv_post_send(3)."""
    # Neither XRC nor UC has a checksum offload in device_cap_flags.
    cap = {
        QPType.RC: DeviceCap.RC_IP_CSUM,
        QPType.UD: DeviceCap.UD_IP_CSUM,
        QPType.RAW_PACKET: DeviceCap.RAW_IP_CSUM,
    }.get(qp_type, DeviceCap(0))
    return {
        F.FENCE: qp_type in (QPType.RC, QPType.XRC_SEND),
        F.SIGNALED: True,
        F.SOLICITED: opcode in SENDS | {Opcode.RDMA_WRITE_WITH_IMM},
        F.INLINE: opcode in SENDS | WRITES,
        F.IP_CSUM: opcode in {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO}
        and bool(offloads & cap),
    }[flag]


FLAGS = [(op, t, flag) for (op, t), ok in table().items() if ok for flag in SendFlags]


@pytest.mark.parametrize(("opcode", "qp_type", "flag"), FLAGS)
def test_flags_of_each_qp_type_are_those_of_the_man_page(soft, opcode, qp_type, flag):
    post, wr = soft.qp(qp_type).post_send, soft.valid(opcode, qp_type, send_flags=flag)
    offloads = DeviceCap(soft.context.attr.device_cap_flags)
    if flag_is_valid(flag, opcode, qp_type, offloads):
        post(wr)
    else:
        refused = reason(post, wr)
        assert flag.name in refused
        assert opcode.name in refused or qp_type.name in refused


@pytest.mark.parametrize(("opcode", "qp_type", "flag"), FLAGS)
def test_checksum_flags_are_allowed_according_to_the_devices_offloads(opcode, qp_type, flag):
    for offloads in (~DeviceCap(0), DeviceCap(0)):
        allowed = bool(flags_allowed(qp_type, opcode, offloads) & flag)
        assert allowed is flag_is_valid(flag, opcode, qp_type, offloads)


@pytest.mark.parametrize(
    ("qp_type", "cap"),
    [
        (QPType.UD, DeviceCap.UD_IP_CSUM),
        (QPType.RAW_PACKET, DeviceCap.RAW_IP_CSUM),
        (QPType.RC, DeviceCap.RC_IP_CSUM),
    ],
)
def test_checksum_offload_needs_the_capability_of_its_qp_type(soft, qp_type, cap):
    assert flags_allowed(qp_type, Opcode.SEND, cap) & F.IP_CSUM
    assert not flags_allowed(qp_type, Opcode.SEND, ~cap) & F.IP_CSUM
    post = soft.qp(qp_type).post_send
    wr = soft.valid(Opcode.SEND, qp_type, send_flags=F.IP_CSUM)
    if soft.context.attr.device_cap_flags & cap:
        post(wr)
    else:
        said = f"IP_CSUM is not supported by the device on {qp_type.name} QPs"
        assert reason(post, wr) == said


@pytest.mark.parametrize("flags", [1 << 5, 1 << 31, 33])
def test_send_flag_bits_without_a_meaning_are_refused(soft, flags):
    said = f"send_flags={flags:#x} has bits that are not send flags"
    assert reason(soft.qp().post_send, rp.Send(send_flags=flags)) == said


def test_send_flags_that_each_opcode_takes_are_known():
    assert FLAGS_BY_OPCODE.keys() == WRS.keys()


U64, U32 = (1 << 64) - 1, (1 << 32) - 1


@pytest.mark.parametrize("watched", [False], ids=["unchecked"], indirect=True)
def test_unchecked_send_flags_reach_the_device_with_every_bit(watched):
    watched.tap.refuse()
    with pytest.raises(rp.PostError):
        watched.qp.post_send(rp.LocalInv(send_flags=U32))
    [record] = watched.tap.last()
    assert record.wr.send_flags == U32
    with pytest.raises(rp.PostError):
        watched.srq.post_srq_ops(rp.TagSync(flags=(1 << 31) - 1))
    [record] = watched.tap.last()
    assert record.wr.flags == (1 << 31) - 1

"""The edges of what the rules take: the last that fits, the first that does not, and what is said.

tests/test_rules.py holds the tables and each rule; mutation testing (.ci/mutate) asked for these.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_rules import PD, limits, reason, region, sge, valid

import rdmapost as rp
from rdmapost import Access, MWType, Opcode, OpsFlags, QPState, QPType, SendFlags
from rdmapost.rules import (
    MULTICAST_QPN,
    check_bind_mw,
    check_op,
    check_recv,
    check_send,
    check_send_state,
    check_unsafe,
    check_unsafe_bind_mw,
)

F = SendFlags


# ---- sizes ------------------------------------------------------------------------


def test_as_many_sges_as_the_queue_was_created_with():
    mine = region()
    wr, _ = valid(Opcode.SEND)
    assert check_send(wr, (sge(mine),) * 4, limits()) is None
    assert reason(Opcode.SEND, limits(), *(sge(mine),) * 5).startswith("5 SGEs, but this queue")
    assert check_recv(rp.RecvWR(), (sge(mine),) * 2, limits()) is None
    said = check_recv(rp.RecvWR(), (sge(mine),) * 3, limits())
    assert said == "3 SGEs, but this queue was created with max_recv_sge=2"


@pytest.mark.parametrize(("start", "length"), [(0, 4096), (4095, 1), (0, 1)])
def test_an_sge_may_reach_to_the_end_of_its_region(start, length):
    mine = region()
    wr, _ = valid(Opcode.SEND)
    assert check_send(wr, (sge(mine, start, length),), limits()) is None
    assert check_recv(rp.RecvWR(), (sge(mine, start, length),), limits()) is None
    inline = valid(Opcode.SEND, send_flags=F.INLINE)[0]
    assert check_unsafe(inline, (sge(mine, start, length),), limits()) is None


def test_inline_data_and_messages_fill_their_bounds():
    """The sum of all SGEs counts."""
    mine = region()
    wr, _ = valid(Opcode.SEND, send_flags=F.INLINE)
    assert check_send(wr, (sge(mine, 0, 60), sge(mine, 0, 4)), limits()) is None
    assert "65 bytes inline" in str(check_send(wr, (sge(mine, 0, 60), sge(mine, 0, 5)), limits()))
    small = limits(max_msg_size=100)
    wr, _ = valid(Opcode.SEND)
    assert check_send(wr, (sge(mine, 0, 60), sge(mine, 0, 40)), small) is None
    said = check_send(wr, (sge(mine, 0, 60), sge(mine, 0, 41)), small)
    assert said == "101 bytes, but a message on this RC QP holds at most 100"


def test_segments_are_messages_and_not_the_whole():
    wr, _ = valid(Opcode.TSO)
    assert check_send(wr, (sge(region(), 0, 4096),), limits(QPType.UD, max_msg_size=100)) is None


def test_inline_data_is_counted_in_32_bits():
    whole = region(length=1 << 32)
    wr, _ = valid(Opcode.SEND, send_flags=F.INLINE)
    assert check_unsafe(wr, (sge(whole, 0, 0xFFFF_FFFF),), limits()) is None
    said = check_unsafe(wr, (sge(whole, 0, 0xFFFF_FFFF), sge(whole, 0, 1)), limits())
    assert said == "4294967296 bytes inline; drivers count only up to 2^32-1"
    # What is not read at the post does not matter.
    wr, _ = valid(Opcode.SEND)
    assert check_unsafe(wr, (sge(whole, 0, 0xFFFF_FFFF), sge(whole, 0, 1)), limits()) is None


def test_numbers_inline_are_the_callers_word_unchecked():
    wr, _ = valid(Opcode.SEND, send_flags=F.INLINE)
    assert check_unsafe(wr, (rp.SGE(16, 8),), limits()) is None
    assert "only numbers" in str(check_send(wr, (rp.SGE(16, 8),), limits()))


@pytest.mark.parametrize("mss", [1, 0xFFFF])
def test_segment_sizes_that_fit(mss):
    for qp_type in (QPType.UD, QPType.RAW_PACKET):
        wr, sges = valid(Opcode.TSO, mss=mss)
        assert check_send(wr, sges, limits(qp_type)) is None


def test_header_as_long_as_the_queue_pair_takes():
    here = limits(QPType.RAW_PACKET, max_tso_header=4)
    wr, sges = valid(Opcode.TSO, hdr=b"1234")
    assert check_send(wr, sges, here) is None
    said = reason(Opcode.TSO, here, hdr=b"12345")
    assert said == "hdr has 5 bytes, but this QP was created with max_tso_header=4"
    # As long as its field in the struct can say.
    here = limits(QPType.RAW_PACKET)
    wr, sges = valid(Opcode.TSO, hdr=bytes(0xFFFF))
    assert check_send(wr, sges, here) is None
    assert "hdr has 65536 bytes" in reason(Opcode.TSO, here, hdr=bytes(0x10000))


# ---- flags ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("qp_type", "opcode", "flags", "said"),
    [
        (QPType.UC, Opcode.SEND, F.FENCE, "FENCE has no meaning on a UC QP"),
        (QPType.RC, Opcode.RDMA_READ, F.INLINE, "INLINE has no meaning on RDMA_READ"),
        (
            QPType.RC, Opcode.RDMA_READ, F.INLINE | F.SOLICITED,
            "SOLICITED|INLINE has no meaning on RDMA_READ",
        ),
        (QPType.RC, Opcode.SEND, 32, "send_flags=0x20 has bits that are no send flag"),
        (QPType.RC, Opcode.SEND, 33, "send_flags=0x21 has bits that are no send flag"),
    ],
)  # fmt: skip
def test_wrong_flags_are_told_apart(qp_type, opcode, flags, said):
    assert reason(opcode, limits(qp_type), send_flags=flags) == said


def test_an_offload_that_the_device_lacks_is_told():
    said = reason(Opcode.SEND, limits(QPType.UD, 0), send_flags=F.IP_CSUM)
    assert said == "IP_CSUM: the device has no such offload on UD QPs"


def test_an_opcode_of_another_type_names_those_that_have_it():
    said = reason(Opcode.RDMA_READ, limits(QPType.UC))
    assert said == "RDMA_READ is not an opcode of UC QPs; RC, XRC_SEND have it"


def test_an_opcode_that_cannot_be_posted_so_is_told():
    wr = SimpleNamespace(opcode=Opcode.FLUSH, send_flags=0)
    said = check_send(wr, (), limits())  # type: ignore[arg-type]
    assert said == "FLUSH cannot be posted with ibv_post_send"


# ---- memory -----------------------------------------------------------------------


def test_a_zero_based_region_is_not_read_inline():
    zero = sge(region(Access.LOCAL_WRITE | Access.ZERO_BASED))
    said = reason(Opcode.SEND, limits(), zero, send_flags=F.INLINE)
    assert "count from its start" in said
    wr, _ = valid(Opcode.SEND, send_flags=F.INLINE)
    assert "count from its start" in str(check_unsafe(wr, (zero,), limits()))
    assert check_send(valid(Opcode.SEND)[0], (zero,), limits()) is None


def test_inline_of_no_bytes_is_refused():
    assert "length 0" in reason(Opcode.SEND, limits(), sge(region(), 0, 0), send_flags=F.INLINE)


def test_every_sge_is_looked_at():
    good, bad = sge(region()), sge(region(0))
    assert "registered without LOCAL_WRITE" in reason(Opcode.RDMA_READ, limits(), good, bad)
    assert "the result goes to" in reason(Opcode.RDMA_READ, limits(), bad)
    assert "the message goes to" in str(check_recv(rp.RecvWR(), (good, bad), limits()))
    far = sge(region(), 4096, 1)
    assert "lies outside" in reason(Opcode.SEND, limits(), good, far)
    assert "lies outside" in str(check_recv(rp.RecvWR(), (good, far), limits()))
    data = rp.SGE.from_buffer(b"1234")
    wr, _ = valid(Opcode.SEND, send_flags=F.INLINE)
    wrong = data._replace(length=5)
    assert "lies outside" in str(check_unsafe(wr, (data, wrong), limits()))


def test_what_is_sent_need_not_be_writable():
    wr, _ = valid(Opcode.SEND)
    assert check_send(wr, (sge(region(0)),), limits()) is None


# ---- datagrams --------------------------------------------------------------------


def test_groups_have_the_number_of_the_specification():
    """The highest of 24 bits; on soft0 alone, any other would do."""
    assert MULTICAST_QPN == rp.MULTICAST_QPN == 0xFFFFFF


# ---- windows ----------------------------------------------------------------------


def bind(mw_type: MWType, **fields: object) -> rp.BindMW:
    wr, _ = valid(Opcode.BIND_MW, **{"mw": SimpleNamespace(type=mw_type, pd=PD), **fields})
    assert isinstance(wr, rp.BindMW)
    return wr


def test_a_window_may_cover_its_whole_region():
    mr = region(Access.MW_BIND)
    wr = bind(MWType.TYPE_2, mr=mr, addr=mr.addr, length=4096)
    assert check_send(wr, (), limits()) is None
    wr = bind(MWType.TYPE_2, mr=mr, addr=mr.addr + 4095, length=1)
    assert check_send(wr, (), limits()) is None


def test_what_belongs_to_another_pd_is_named():
    other = SimpleNamespace(context=PD.context)
    mw = SimpleNamespace(type=MWType.TYPE_2, pd=other)
    said = reason(Opcode.BIND_MW, limits(), mw=mw)
    assert said == f"{mw} belongs to another PD than the queue pair"
    mr = region(Access.MW_BIND, pd=other)
    said = reason(Opcode.BIND_MW, limits(), mr=mr)
    assert said == f"{mr} belongs to another PD than the queue pair"


def test_a_window_of_type_1_has_its_own_call():
    here = limits()
    assert check_bind_mw(bind(MWType.TYPE_1), here) is None
    assert "is of type 2; post a BindMW" in str(check_bind_mw(bind(MWType.TYPE_2), here))
    said = check_send(bind(MWType.TYPE_1), (), here)
    assert "is of type 1" in str(said)
    assert "qp.bind_mw() binds this one" in str(said)
    assert "another PD" in str(
        check_bind_mw(bind(MWType.TYPE_1, mr=region(pd=SimpleNamespace())), here)
    )


def test_a_window_of_type_1_is_unbound_by_a_length_of_0():
    """The region only has to be there: it need not permit the binding."""
    here = limits()
    assert check_bind_mw(bind(MWType.TYPE_1, mr=region(0), addr=0, length=0), here) is None
    assert "without MW_BIND" in str(
        check_bind_mw(bind(MWType.TYPE_1, mr=region(0), length=1), here)
    )
    assert "without MW_BIND" in reason(Opcode.BIND_MW, here, mr=region(0), length=0)


def test_the_call_that_binds_has_the_rules_of_its_opcode():
    wr = bind(MWType.TYPE_1)
    assert "BIND_MW is not an opcode of UD QPs" in str(check_bind_mw(wr, limits(QPType.UD)))
    assert "BIND_MW is not an opcode of UD QPs" in str(check_unsafe_bind_mw(wr, limits(QPType.UD)))
    assert check_unsafe_bind_mw(wr, limits()) is None
    solicited = bind(MWType.TYPE_1, send_flags=F.SOLICITED)
    assert check_bind_mw(solicited, limits()) == "SOLICITED has no meaning on BIND_MW"
    for name in ("mw", "mr"):
        missing = bind(MWType.TYPE_1, **{name: None})
        assert "BIND_MW needs" in str(check_unsafe_bind_mw(missing, limits()))
        assert "BIND_MW needs" in str(check_bind_mw(missing, limits()))
    foreign = bind(MWType.TYPE_1)
    foreign.mr.pd = SimpleNamespace(context=object())  # type: ignore[union-attr]
    assert "another open device" in str(check_unsafe_bind_mw(foreign, limits()))


# ---- tag matching -----------------------------------------------------------------

SYNC = int(OpsFlags.TM_SYNC)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (rp.TagAdd(flags=4), "flags=0x4 has bits that are no flag"),
        (rp.TagAdd(flags=5), "flags=0x5 has bits that are no flag"),
        (rp.TagAdd(unexpected_cnt=1), "unexpected_cnt=1 is not looked at"),
        (rp.TagDel(unexpected_cnt=1), "unexpected_cnt=1 is not looked at"),
        (rp.TagSync(flags=OpsFlags.SIGNALED), "tells the device nothing"),
        (rp.TagAdd(tag=3, mask=1), "tag=0x3 has bits outside of mask=0x1"),
        (rp.TagAdd(tag=1 << 63, mask=1), "has bits outside of mask"),
        (rp.TagAdd(tag=1, mask=0), "tag=0x1 has bits outside of mask=0x0"),
    ],
)
def test_operation_that_cannot_mean_anything(op, words):
    assert words in str(check_op(op, (), limits()))


@pytest.mark.parametrize(
    "op",
    [
        rp.TagAdd(flags=0), rp.TagAdd(flags=OpsFlags.SIGNALED),
        rp.TagAdd(flags=SYNC, unexpected_cnt=1), rp.TagDel(flags=SYNC, unexpected_cnt=1),
        rp.TagDel(flags=0), rp.TagSync(), rp.TagSync(flags=SYNC, unexpected_cnt=3),
        rp.TagAdd(tag=1, mask=3), rp.TagAdd(tag=3, mask=3), rp.TagAdd(tag=0, mask=0),
        # That it does not fit is for the packing to say, which names the field.
        rp.TagAdd(tag=-1), rp.TagAdd(tag=-1, mask=0), rp.TagAdd(tag=1 << 64, mask=0),
    ],
)  # fmt: skip
def test_operation_that_means_something(op):
    assert check_op(op, (), limits()) is None


def test_tagged_buffers_are_those_of_a_receive():
    mine = region()
    assert check_op(rp.TagAdd(), (sge(mine), sge(mine)), limits()) is None
    assert "max_recv_sge=2" in str(check_op(rp.TagAdd(), (sge(mine),) * 3, limits()))
    assert "without LOCAL_WRITE" in str(check_op(rp.TagAdd(), (sge(region(0)),), limits()))
    # The other operations have none.
    assert check_op(rp.TagSync(), (sge(region(0)),), limits()) is None


# ---- states -----------------------------------------------------------------------


def test_the_way_on_is_told():
    assert "qp.connect" in str(check_send_state(QPState.RESET))
    assert "qp.connect" in str(check_send_state(QPState.INIT))
    assert "qp.to_rts" in str(check_send_state(QPState.RTR))
    for state in (QPState.RTS, QPState.SQD, QPState.SQE, QPState.ERR):
        assert check_send_state(state) is None

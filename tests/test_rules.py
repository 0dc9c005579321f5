"""The tables of ibv_post_send(3) and ibv_modify_qp(3), and the checks that follow from them."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

import rdmapost as rp
from rdmapost import Access, DeviceCap, Opcode, QPAttrMask, QPState, QPType, SendFlags
from rdmapost.rules import (
    FLAGS_BY_OPCODE,
    OPCODES_BY_QP_TYPE,
    Limits,
    check_recv,
    check_send,
    check_send_state,
    check_unsafe,
    flags_allowed,
)
from rdmapost.states import FIELDS, OPTIONAL, REQUIRED, missing_attributes

# As printed in the man page.
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
"""


def table() -> dict[tuple[Opcode, QPType], bool]:
    head, *rows = [[cell.strip() for cell in line.split("|")] for line in TABLE.split("\n") if line]
    return {
        (Opcode[row[0].removeprefix("IBV_WR_")], QPType[column]): cell == "X"
        for row in rows
        for column, cell in zip(head[1:], row[1:], strict=True)
    }


WRS: dict[Opcode, type] = {
    kind.opcode: kind
    for kind in (
        rp.Send, rp.SendWithImm, rp.SendWithInv, rp.RdmaWrite, rp.RdmaWriteWithImm, rp.RdmaRead,
        rp.AtomicCmpAndSwp, rp.AtomicFetchAndAdd, rp.LocalInv, rp.BindMW, rp.TSO,
    )
}  # fmt: skip

PD = SimpleNamespace(context=object())
ANYTHING = ~DeviceCap(0)


def region(access: int = Access.LOCAL_WRITE, length: int = 4096, **fields: Any) -> Any:
    """Make what the checks see of a memory region."""
    region = {"addr": 0x10000, "length": length, "lkey": 1, "access": access, "pd": PD}
    region["writable"] = bool(access & Access.LOCAL_WRITE)
    return SimpleNamespace(**{**region, **fields})


def sge(owner: Any, start: int = 0, length: int = 8) -> rp.SGE:
    return rp.SGE(owner.addr + start, length, 1, owner)


def limits(qp_type: QPType = QPType.RC, device_cap: int = ANYTHING, **fields: Any) -> Limits:
    flags = {op: int(flags_allowed(qp_type, op, device_cap)) for op in OPCODES_BY_QP_TYPE[qp_type]}
    made = Limits(qp_type, PD, 4, 2, 64, flags)
    return dataclasses.replace(made, **fields)


def valid(opcode: Opcode, **fields: Any) -> tuple[Any, tuple[rp.SGE, ...]]:
    """Make a work request that nothing is wrong with, and its SGEs."""
    mine = region()
    needs: dict[str, Any] = {}
    sges: tuple[rp.SGE, ...] = (sge(mine),)
    if opcode in (Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO):
        needs["ah"] = SimpleNamespace(pd=PD)
    if opcode is Opcode.TSO:
        needs |= {"mss": 100, "hdr": b"h"}
    if opcode is Opcode.BIND_MW:
        mr = region(Access.MW_BIND)
        needs |= {
            "mw": SimpleNamespace(type=rp.MWType.TYPE_2, pd=PD), "mr": mr,
            "addr": mr.addr, "length": 64,
        }  # fmt: skip
        sges = ()
    if opcode is Opcode.LOCAL_INV:
        sges = ()
    return WRS[opcode](**{**needs, **fields}), sges


def reason(opcode: Opcode, limits: Limits, *sges: rp.SGE, **fields: Any) -> str:
    wr, default = valid(opcode, **fields)
    refused = check_send(wr, sges or default, limits)
    assert refused is not None
    return refused


# ---- opcodes and flags ------------------------------------------------------------


@pytest.mark.parametrize(("opcode", "qp_type"), table())
def test_opcode_goes_where_the_man_page_says(opcode, qp_type):
    wr, sges = valid(opcode)
    refused = check_send(wr, sges, limits(qp_type))
    if table()[opcode, qp_type]:
        assert refused is None
    else:
        assert refused is not None
        assert f"{opcode.name} is not an opcode of {qp_type.name} QPs" in refused
        for other in QPType:
            assert (other.name in refused.split("; ")[1].split(" have")[0].split(", ")) is (
                table().get((opcode, other), False)
            )


def test_table_has_no_other_rows_or_columns():
    assert {op for ops in OPCODES_BY_QP_TYPE.values() for op in ops} == {op for op, _ in table()}
    rest = set(QPType) - {qp_type for _, qp_type in table()}
    assert all(not OPCODES_BY_QP_TYPE[qp_type] for qp_type in rest)


@pytest.mark.parametrize("opcode", [Opcode.FLUSH, Opcode.ATOMIC_WRITE, Opcode.DRIVER1])
def test_opcodes_that_ibv_post_send_cannot_carry_have_no_class(opcode):
    assert opcode not in WRS
    odd = type("Odd", (rp.Send,), {"opcode": opcode, "__slots__": ()})
    assert "cannot be posted with ibv_post_send" in str(check_send(odd(), (), limits()))


F = SendFlags
SENDS = {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.SEND_WITH_INV}
WRITES = {Opcode.RDMA_WRITE, Opcode.RDMA_WRITE_WITH_IMM}


def flag_is_valid(flag: SendFlags, opcode: Opcode, qp_type: QPType) -> bool:
    """The flags of ibv_post_send(3), on a device with every offload."""
    return {
        F.FENCE: qp_type in (QPType.RC, QPType.XRC_SEND),
        F.SIGNALED: True,
        F.SOLICITED: opcode in SENDS | {Opcode.RDMA_WRITE_WITH_IMM},
        F.INLINE: opcode in SENDS | WRITES,
        # XRC has no checksum offload in device_cap_flags, and UC neither.
        F.IP_CSUM: opcode in {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO}
        and qp_type in (QPType.RC, QPType.UD, QPType.RAW_PACKET),
    }[flag]


@pytest.mark.parametrize(
    ("opcode", "qp_type", "flag"),
    [(op, t, flag) for (op, t), ok in table().items() if ok for flag in SendFlags],
)
def test_flag_goes_where_the_man_page_says(opcode, qp_type, flag):
    wr, sges = valid(opcode, send_flags=flag)
    refused = check_send(wr, sges, limits(qp_type))
    if flag_is_valid(flag, opcode, qp_type):
        assert refused is None
    else:
        assert refused is not None
        assert flag.name in refused
        assert opcode.name in refused or qp_type.name in refused


@pytest.mark.parametrize(
    ("qp_type", "cap"),
    [
        (QPType.UD, DeviceCap.UD_IP_CSUM),
        (QPType.RAW_PACKET, DeviceCap.RAW_IP_CSUM),
        (QPType.RC, DeviceCap.RC_IP_CSUM),
    ],
)
def test_checksum_offload_needs_the_capability_of_its_qp_type(qp_type, cap):
    wr, sges = valid(Opcode.SEND, send_flags=F.IP_CSUM)
    assert check_send(wr, sges, limits(qp_type, cap)) is None
    refused = check_send(wr, sges, limits(qp_type, ANYTHING & ~cap))
    assert f"IP_CSUM: the device has no such offload on {qp_type.name}" in str(refused)


@pytest.mark.parametrize("flags", [1 << 5, 1 << 31, -1, 1 << 40])
def test_bits_that_are_no_flag_are_refused(flags):
    assert "bits that are no send flag" in reason(Opcode.SEND, limits(), send_flags=flags)


def test_flags_of_every_opcode_are_known():
    assert FLAGS_BY_OPCODE.keys() == WRS.keys()


# ---- SGEs -------------------------------------------------------------------------


def test_too_many_sges_are_counted():
    text = reason(Opcode.SEND, limits(), *[sge(region())] * 5)
    assert text == "5 SGEs, but this queue was created with max_send_sge=4"
    text = str(check_recv(rp.RecvWR(), (sge(region()),) * 3, limits()))
    assert text == "3 SGEs, but this queue was created with max_recv_sge=2"


@pytest.mark.parametrize("opcode", [Opcode.SEND, Opcode.RDMA_WRITE, Opcode.RDMA_READ])
def test_sge_of_length_0_is_refused_with_the_explanation(opcode):
    text = reason(opcode, limits(), sge(region(), 0, 0))
    assert "2^31 bytes" in text
    assert "empty sg_list" in text
    assert "2^31" in str(check_recv(rp.RecvWR(), (sge(region(), 0, 0),), limits()))
    assert "2^31" in reason(opcode, limits(), rp.SGE(1, 0, 1))


def test_message_without_sges_is_allowed():
    for opcode in (Opcode.SEND, Opcode.RDMA_WRITE, Opcode.RDMA_READ):
        assert check_send(valid(opcode)[0], (), limits()) is None
    assert check_recv(rp.RecvWR(), (), limits()) is None


@pytest.mark.parametrize(("start", "length"), [(-1, 8), (4089, 8), (4096, 1), (0, 4097)])
def test_sge_outside_its_region_is_refused(start, length):
    assert "lies outside" in reason(Opcode.SEND, limits(), sge(region(), start, length))
    assert "lies outside" in str(check_recv(rp.RecvWR(), (sge(region(), start, length),), limits()))


def test_region_of_another_pd_is_refused():
    other = region(pd=SimpleNamespace())
    assert "another PD" in reason(Opcode.SEND, limits(), sge(other))
    assert "another PD" in str(check_recv(rp.RecvWR(), (sge(other),), limits()))


@pytest.mark.parametrize(
    "opcode", [Opcode.RDMA_READ, Opcode.ATOMIC_CMP_AND_SWP, Opcode.ATOMIC_FETCH_AND_ADD]
)
def test_what_the_device_writes_to_needs_local_write(opcode):
    assert "without LOCAL_WRITE" in reason(opcode, limits(), sge(region(Access.REMOTE_READ)))


def test_receive_needs_local_write():
    reads = (sge(region(Access(0))),)
    assert "without LOCAL_WRITE" in str(check_recv(rp.RecvWR(), reads, limits()))
    assert check_send(valid(Opcode.SEND)[0], reads, limits()) is None


def test_numbers_are_passed_on_as_they_are():
    assert check_send(valid(Opcode.SEND)[0], (rp.SGE(5, 5, 5),), limits()) is None
    assert check_recv(rp.RecvWR(), (rp.SGE(5, 5, 5),), limits()) is None


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD])
def test_message_that_is_too_long_is_refused(qp_type):
    """2^31 bytes, or the path MTU on UD."""
    most = 1024 if qp_type is QPType.UD else 1 << 31
    here = limits(qp_type, max_msg_size=most) if qp_type is QPType.UD else limits(qp_type)
    big = region(length=1 << 32)
    half = sge(big, 0, most // 2)
    wr, _ = valid(Opcode.SEND)
    assert check_send(wr, (half, half), here) is None
    assert f"{most + 1} bytes, but a message" in str(
        check_send(wr, (half, half, sge(big, 0, 1)), here)
    )


# ---- inline -----------------------------------------------------------------------


def test_inline_needs_no_registration():
    data = rp.SGE.from_buffer(b"x" * 64)
    assert check_send(valid(Opcode.SEND, send_flags=F.INLINE)[0], (data,), limits()) is None
    assert "can only be sent with SendFlags.INLINE" in reason(Opcode.SEND, limits(), data)
    other = sge(region(pd=SimpleNamespace()))
    assert check_send(valid(Opcode.SEND, send_flags=F.INLINE)[0], (other,), limits()) is None


def test_inline_that_is_too_long_is_refused():
    data = rp.SGE.from_buffer(b"x" * 65)
    text = reason(Opcode.SEND, limits(), data, send_flags=F.INLINE)
    assert text == "65 bytes inline, but this QP was created with max_inline_data=64"


def test_inline_by_number_is_refused():
    """It would read memory of this process that nobody vouches for."""
    text = reason(Opcode.SEND, limits(), rp.SGE(5, 5, 5), send_flags=F.INLINE)
    assert "SGE.from_buffer" in text


def test_inline_outside_its_buffer_is_refused_even_unchecked():
    data = rp.SGE.from_buffer(b"x" * 8)
    for wrong in (data._replace(length=9), data._replace(addr=data.addr - 1)):
        wr, _ = valid(Opcode.SEND, send_flags=F.INLINE)
        assert "lies outside" in str(check_send(wr, (wrong,), limits()))
        assert "lies outside" in str(check_unsafe(wr, (wrong,), limits()))


def test_inline_whose_length_overflows_is_refused_even_unchecked():
    """Drivers add the lengths up in 32 bits and copy what the sum seems to allow."""
    half = sge(region(length=1 << 31), 0, 1 << 31)
    wr, _ = valid(Opcode.SEND, send_flags=F.INLINE)
    assert "2^32" in str(check_unsafe(wr, (half, half), limits()))
    assert check_unsafe(wr, (half,), limits()) is None


# ---- single opcodes ---------------------------------------------------------------


@pytest.mark.parametrize("opcode", [Opcode.ATOMIC_CMP_AND_SWP, Opcode.ATOMIC_FETCH_AND_ADD])
def test_atomic_takes_8_aligned_bytes(opcode):
    mine = region()
    assert check_send(valid(opcode, remote_addr=16)[0], (sge(mine),), limits()) is None
    for sges in ((sge(mine, 0, 4),), (sge(mine, 0, 16),), (sge(mine, 0, 4), sge(mine, 4, 4))):
        assert "one SGE of 8 bytes" in reason(opcode, limits(), *sges)
    assert "one SGE of 8 bytes" in str(check_send(valid(opcode)[0], (), limits()))
    for addr in (1, 4, 7, 12):
        assert "not a multiple of 8" in reason(opcode, limits(), remote_addr=addr)


@pytest.mark.parametrize("opcode", [Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO])
def test_datagram_needs_an_address_handle_even_unchecked(opcode):
    wr, sges = valid(opcode, ah=None)
    assert "needs an address handle" in str(check_send(wr, sges, limits(QPType.UD)))
    assert "needs an address handle" in str(check_unsafe(wr, sges, limits(QPType.UD)))
    assert check_unsafe(wr, sges, limits(QPType.RC)) is None


@pytest.mark.parametrize("opcode", sorted(WRS.keys() - {2, 3, 10}))
def test_datagram_that_cannot_have_an_address_handle_is_refused_even_unchecked(opcode):
    """Drivers read it from every work request of a UD queue pair, whatever the opcode."""
    wr, sges = valid(opcode)
    assert "address handle" in str(check_unsafe(wr, sges, limits(QPType.UD)))


def test_address_handle_of_another_pd_is_refused():
    ah = SimpleNamespace(pd=SimpleNamespace())
    assert "another PD" in reason(Opcode.SEND, limits(QPType.UD), ah=ah)


def test_pointers_of_another_open_device_are_refused_even_unchecked():
    """Another driver's struct has another shape."""
    foreign = SimpleNamespace(context=object())
    wr, sges = valid(Opcode.SEND, ah=SimpleNamespace(pd=foreign))
    assert "another open device" in str(check_unsafe(wr, sges, limits(QPType.UD)))
    for name in ("mw", "mr"):
        wr, _ = valid(Opcode.BIND_MW)
        getattr(wr, name).pd = foreign
        assert "another open device" in str(check_unsafe(wr, (), limits()))
    for opcode in (Opcode.SEND, Opcode.BIND_MW):
        wr, sges = valid(opcode)
        assert (
            check_unsafe(wr, sges, limits(QPType.UD if opcode is Opcode.SEND else QPType.RC))
            is None
        )


def test_bind_is_checked():
    mr = region(Access.MW_BIND)
    here = limits()
    assert "needs a memory window" in reason(Opcode.BIND_MW, here, mw=None)
    assert "needs a memory window" in reason(Opcode.BIND_MW, here, mr=None)
    type_1 = SimpleNamespace(type=rp.MWType.TYPE_1, pd=PD)
    assert "type 1" in reason(Opcode.BIND_MW, here, mw=type_1)
    foreign = SimpleNamespace(type=rp.MWType.TYPE_2, pd=SimpleNamespace())
    assert "another PD" in reason(Opcode.BIND_MW, here, mw=foreign)
    other = region(Access.MW_BIND, pd=SimpleNamespace())
    assert "another PD" in reason(Opcode.BIND_MW, here, mr=other)
    assert "without MW_BIND" in reason(Opcode.BIND_MW, here, mr=region())
    for addr, length in ((mr.addr - 1, 1), (mr.addr, 4097), (mr.addr + 4096, 1)):
        assert "lies outside" in reason(Opcode.BIND_MW, here, addr=addr, length=length)


@pytest.mark.parametrize("mss", [0, -1, 1 << 16])
def test_tso_needs_a_segment_size(mss):
    assert f"mss={mss} is not in 1..65535" in reason(Opcode.TSO, limits(QPType.RAW_PACKET), mss=mss)
    assert f"mss={mss}" in reason(Opcode.TSO, limits(QPType.UD), mss=mss)


# ---- fields -----------------------------------------------------------------------

COMMON = {"wr_id", "send_flags"}
MESSAGE = COMMON | {"sg_list", "ah", "remote_qpn", "remote_qkey", "remote_srqn"}
REMOTE = COMMON | {"sg_list", "remote_addr", "rkey", "remote_srqn"}
FIELD_NAMES = {
    rp.Send: MESSAGE,
    rp.SendWithImm: MESSAGE | {"imm_data"},
    rp.SendWithInv: COMMON | {"sg_list", "invalidate_rkey", "remote_srqn"},
    rp.RdmaWrite: REMOTE,
    rp.RdmaWriteWithImm: REMOTE | {"imm_data"},
    rp.RdmaRead: REMOTE,
    rp.AtomicCmpAndSwp: REMOTE | {"compare_add", "swap"},
    rp.AtomicFetchAndAdd: REMOTE | {"compare_add"},
    rp.LocalInv: COMMON | {"invalidate_rkey"},
    rp.BindMW: COMMON | {"mw", "rkey", "mr", "addr", "length", "mw_access_flags"},
    rp.TSO: COMMON | {"sg_list", "hdr", "mss", "ah", "remote_qpn", "remote_qkey"},
    rp.RecvWR: {"wr_id", "sg_list"},
    rp.TagAdd: {
        "wr_id",
        "flags",
        "unexpected_cnt",
        "recv_wr_id",
        "sg_list",
        "tag",
        "mask",
        "handle",
    },
    rp.TagDel: {"wr_id", "flags", "unexpected_cnt", "handle"},
    rp.TagSync: {"wr_id", "flags", "unexpected_cnt"},
}


@pytest.mark.parametrize("kind", FIELD_NAMES)
def test_work_request_has_the_fields_that_its_opcode_uses(kind):
    """A field that the opcode does not have can neither be given nor set."""
    fields = {field.name for field in dataclasses.fields(kind)}
    assert fields == FIELD_NAMES[kind]
    wr = kind()
    for name in set().union(*FIELD_NAMES.values()) - fields:
        with pytest.raises(TypeError, match=name):
            kind(**{name: 0})
        with pytest.raises(AttributeError):
            setattr(wr, name, 0)


@pytest.mark.parametrize("kind", WRS.values())
def test_send_work_request_is_signaled_unless_told_otherwise(kind):
    assert kind().send_flags == SendFlags.SIGNALED
    assert kind(send_flags=0).send_flags == 0
    assert isinstance(kind(), rp.SendWR)


# ---- states -----------------------------------------------------------------------


@pytest.mark.parametrize("state", QPState)
def test_sends_are_refused_before_rts(state):
    refused = check_send_state(state)
    if state in (QPState.RESET, QPState.INIT, QPState.RTR):
        assert f"the QP is in {state.name}" in str(refused)
        assert "RTS" in str(refused)
    else:
        assert refused is None


# The tables of ibv_modify_qp(3); every step also takes IBV_QP_STATE.
MODIFY = {
    QPType.UD: ("PKEY_INDEX PORT QKEY", "", "SQ_PSN"),
    QPType.UC: ("PKEY_INDEX PORT ACCESS_FLAGS", "AV PATH_MTU DEST_QPN RQ_PSN", "SQ_PSN"),
    QPType.RC: (
        "PKEY_INDEX PORT ACCESS_FLAGS",
        "AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER",
        "SQ_PSN MAX_QP_RD_ATOMIC RETRY_CNT RNR_RETRY TIMEOUT",
    ),
    QPType.RAW_PACKET: ("PORT", "", ""),
}
WAY_UP = [QPState.RESET, QPState.INIT, QPState.RTR, QPState.RTS]


@pytest.mark.parametrize("qp_type", MODIFY)
@pytest.mark.parametrize("step", range(3))
def test_step_needs_the_attributes_of_the_man_page(qp_type, step):
    start, end = itertools.pairwise(WAY_UP[step : step + 2]).__next__()
    names = MODIFY[qp_type][step].split()
    full = QPAttrMask(0)
    for name in names:
        full |= QPAttrMask[name]
    assert REQUIRED[qp_type][start, end] == full
    assert missing_attributes(qp_type, start, end, full) is None
    for name in names:
        refused = missing_attributes(qp_type, start, end, full & ~QPAttrMask[name])
        field = next(field for field, bit in FIELDS.items() if bit is QPAttrMask[name])
        assert f"{start.name} to {end.name}" in str(refused)
        assert f"also needs {field} " in str(refused)


@pytest.mark.parametrize("qp_type", REQUIRED)
def test_every_state_can_be_left_for_reset_and_err(qp_type):
    for state in QPState:
        for end in (QPState.RESET, QPState.ERR):
            assert missing_attributes(qp_type, state, end, QPAttrMask(0)) is None


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (QPState.RESET, QPState.RTR),
        (QPState.RESET, QPState.RTS),
        (QPState.INIT, QPState.RTS),
        (QPState.RTR, QPState.INIT),
        (QPState.RTS, QPState.RTR),
        (QPState.ERR, QPState.RTS),
        (QPState.SQE, QPState.RTR),
        (QPState.RTS, QPState.SQE),
    ],
)
def test_step_that_does_not_exist_names_those_that_do(start, end):
    refused = str(missing_attributes(QPType.RC, start, end, ~QPAttrMask(0)))
    assert f"cannot go from {start.name} to {end.name}" in refused
    assert "RESET" in refused.split("can go to")[1]


def test_optional_attributes_belong_to_steps_that_exist():
    for qp_type, steps in OPTIONAL.items():
        for step, mask in steps.items():
            assert step in REQUIRED[qp_type]
            assert not mask & REQUIRED[qp_type][step]


def test_fields_are_those_of_the_struct():
    """Every name that modify() takes is a field of struct ibv_qp_attr."""
    from rdmapost._binding import ffi

    struct = {name for name, _ in ffi.typeof("struct ibv_qp_attr").fields}
    assert FIELDS.keys() <= struct
    several = {bit for bit in FIELDS.values() if list(FIELDS.values()).count(bit) > 1}
    assert several <= {QPAttrMask.ALT_PATH}

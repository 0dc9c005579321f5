"""The tables of ibv_modify_qp(3): transitions between states, and the attributes of each."""

from __future__ import annotations

import itertools

import pytest

from rdmapost import QPAttrMask, QPState, QPType
from rdmapost.standard.qp_states import FIELDS, OPTIONAL, REQUIRED, missing_attributes

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

TO_RTS = [QPState.RESET, QPState.INIT, QPState.RTR, QPState.RTS]


@pytest.mark.parametrize("qp_type", MODIFY)
@pytest.mark.parametrize("step", range(3))
def test_state_transition_needs_the_attributes_of_the_man_page(qp_type, step):
    start, end = itertools.pairwise(TO_RTS[step : step + 2]).__next__()
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
def test_state_transition_that_does_not_exist_names_those_that_do(start, end):
    refused = str(missing_attributes(QPType.RC, start, end, ~QPAttrMask(0)))
    assert f"cannot go from {start.name} to {end.name}" in refused
    assert "RESET" in refused.split("can go to")[1]


def test_optional_attributes_belong_to_state_transitions_that_exist():
    for qp_type, steps in OPTIONAL.items():
        for step, mask in steps.items():
            assert step in REQUIRED[qp_type]
            assert not mask & REQUIRED[qp_type][step]


def test_attributes_of_modify_are_fields_of_struct_ibv_qp_attr():
    """Every name that modify() accepts is a field of struct ibv_qp_attr."""
    from rdmapost._binding import ffi

    struct = {name for name, _ in ffi.typeof("struct ibv_qp_attr").fields}
    assert FIELDS.keys() <= struct
    several = {bit for bit in FIELDS.values() if list(FIELDS.values()).count(bit) > 1}
    assert several <= {QPAttrMask.ALT_PATH}

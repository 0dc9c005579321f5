"""Values that only a newer libibverbs or driver knows: numbers that have a name."""

from __future__ import annotations

import copy
import pickle

import pytest
from support import null_device

import rdmapost as rp
from rdmapost import MTU, DeviceCap, PortState, WCStatus
from rdmapost.enums import reported

null = null_device.null
on_null = null_device.on_null


@pytest.mark.parametrize(
    "enum",
    [
        rp.AtomicCap,
        rp.EventType,
        rp.GIDType,
        rp.LinkLayer,
        rp.MTU,
        rp.MigState,
        rp.NodeType,
        rp.PortState,
        rp.QPState,
        rp.QPType,
        rp.TransportType,
        rp.WCOpcode,
        rp.WCStatus,
    ],
)
def test_unknown_value_is_a_number_with_a_name(enum) -> None:
    """A program that prints the name, as most do, goes on."""
    unknown = reported(enum, 77)
    assert unknown == 77
    assert [str(unknown), repr(unknown), unknown.name, f"{unknown:#x}"] == ["77"] * 3 + ["0x4d"]
    assert unknown not in list(enum)
    assert {unknown: 1}[77] == 1
    for same in (copy.copy(unknown), copy.deepcopy(unknown), pickle.loads(pickle.dumps(unknown))):
        assert (same, same.name) == (77, "77")
    known = next(iter(enum))
    assert reported(enum, known.value) is known
    assert pickle.loads(pickle.dumps(known)) is known
    with pytest.raises(ValueError, match="77"):
        enum(77)


def test_unknown_mtu_has_no_bytes() -> None:
    assert reported(MTU, 9).bytes == 0
    assert MTU.MTU_1024.bytes == 1024


def test_unknown_state_of_a_port_is_its_number(on_null) -> None:
    said = on_null(
        """
        port = rp.open_device("null0").query_port()
        print(port.state, port.state.name, port.state == 9, repr(port).split()[1])
        """,
        NULL_PORT_STATE="9",
    )
    assert said == "9 9 True state=9,"
    assert PortState.ACTIVE.name == "ACTIVE"


def test_unknown_status_fails_the_check_by_its_number() -> None:
    wc = rp.WC(1, reported(WCStatus, 99), None, 0, None, None, 2, 0, rp.WCFlags(0), *(0,) * 5)
    with pytest.raises(rp.CompletionError, match="ended with 99"):
        wc.check()


def test_unknown_capabilities_are_kept() -> None:
    assert DeviceCap(1 << 30 | DeviceCap.XRC) == 1 << 30 | 1 << 20

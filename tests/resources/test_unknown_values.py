"""Values that only a newer libibverbs or driver knows: numbers that have a name."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from support import null_device
from support.cli_runner import run

import rdmapost as rp
from rdmapost import MTU, DeviceCap, PortState, WCStatus
from rdmapost.enums import reported
from rdmapost.loopback import Loopback
from rdmapost.pingpong import Pingpong
from rdmapost.providers import soft_provider
from rdmapost.resources.events import timed_out

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
def test_unknown_enumeration_value_is_a_number_with_a_name(enum) -> None:
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
    with pytest.raises(rp.CompletionError, match="ended with 99") as caught:
        wc.check()
    # 'rdmapost explain 99' would fail.
    assert not hasattr(caught.value, "__notes__")


def test_unknown_status_in_a_timeout_has_no_explanation() -> None:
    wc = rp.WC(1, reported(WCStatus, 99), None, 0, None, None, 2, 0, rp.WCFlags(0), *(0,) * 5)
    poller = SimpleNamespace(first_failed=lambda: wc)
    error = timed_out(SimpleNamespace(_poller=poller, _overrun=True, context=None), 1, 2, 0)
    assert "ended with 99" in str(error)
    assert not hasattr(error, "__notes__")


@pytest.fixture
def misreport(monkeypatch):
    """Have soft0 report other port attributes, or other attributes of queue pairs."""

    def fake(verb: str, **values: int) -> None:
        real = getattr(soft_provider(), verb)

        def query(*args: Any) -> Any:
            answer = real(*args)
            attr = next(arg for arg in args if hasattr(arg, next(iter(values))))
            for name, value in values.items():
                setattr(attr, name, value)
            return answer

        monkeypatch.setattr(type(soft_provider()), verb, staticmethod(query))

    return fake


@pytest.mark.parametrize(("value", "usable"), [(9, MTU.MTU_4096), (0, MTU.MTU_256)])
def test_port_with_an_unknown_mtu_connects_with_the_nearest_known_one(
    misreport, value, usable
) -> None:
    misreport("query_port", active_mtu=value, max_mtu=value)
    with rp.open_device("soft0") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
        assert context.query_port().active_mtu == value
        a, b = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, cq)
        with a, b, rp.MR(pd, 64, rp.Access.LOCAL_WRITE) as mr:
            assert rp.Endpoint.parse(str(a.endpoint())) == a.endpoint()
            assert a.endpoint().mtu is usable
            a.connect(b.endpoint())
            b.connect(a.endpoint())
            assert a.query().path_mtu is usable
            b.post_recv(rp.RecvWR(mr[:8]))
            a.post_send(rp.Send(mr[8:16]))
            assert {wc.status for wc in cq.wait(2)} == {WCStatus.SUCCESS}


def test_datagram_on_a_port_with_an_unknown_mtu_holds_the_largest_known_one(misreport) -> None:
    misreport("query_port", active_mtu=9, max_mtu=9)
    with (
        rp.open_device("soft0") as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.QP(pd, rp.QPType.UD, cq) as qp,
        rp.MR(pd, 8192, rp.Access.LOCAL_WRITE) as mr,
    ):
        qp.connect()
        with qp.ah_to(qp.endpoint()) as ah:
            to = {"ah": ah, "remote_qpn": qp.qp_num, "remote_qkey": 1}
            qp.post_send(rp.Send(mr[:4096], **to))
            cq.wait()
            with pytest.raises(rp.PostError, match="holds at most 4096"):
                qp.post_send(rp.Send(mr[:4097], **to))


@pytest.mark.parametrize("qp_type", [rp.QPType.RC, rp.QPType.UD])
def test_tools_work_on_a_port_with_an_unknown_mtu(misreport, qp_type) -> None:
    misreport("query_port", active_mtu=9, max_mtu=9)
    with rp.open_device("soft0") as context:
        with Loopback(context, qp_type) as pair:
            pair.receive(8)
            pair.local.qp.post_send(rp.Send(pair.local.mr[:8], **pair.address))
            assert [wc.status for wc in pair.sent()] == [WCStatus.SUCCESS]
        Pingpong(context, qp_type)
    assert run("send", "-d", "soft0", "--data", "hi", "--qp-type", qp_type.name.lower()).code == 0


def test_queue_pair_in_an_unknown_state_can_be_diagnosed_and_reset(misreport) -> None:
    misreport("query_qp", qp_state=99)
    context = rp.open_device("soft0")
    with context, rp.PD(context) as pd, rp.CQ(context) as cq, rp.QP(pd, rp.QPType.RC, cq) as qp:
        assert (qp.state, qp.state.name) == (99, "99")
        [state] = [finding for finding in qp.diagnose() if finding.name == "qp-state"]
        assert state.severity == "warning"
        assert state.evidence == "in 99: this version of rdmapost does not know this state"
        qp.to_reset()


@pytest.mark.parametrize("json", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("command", [("send",), ("write",), ("atomic", "fetch-add")])
def test_command_reports_an_unknown_status(command, json, monkeypatch) -> None:
    wait = rp.CQ.wait

    def unknown(*args: Any, **options: Any) -> list[rp.WC]:
        status = reported(WCStatus, 99)
        return [wc._replace(status=status, opcode=None) for wc in wait(*args, **options)]

    monkeypatch.setattr(rp.CQ, "wait", unknown)
    ran = run(*command, "-d", "soft0", *(["--data", "hi"] if len(command) == 1 else []), *json)
    assert ran.code == 1
    first, second = ran.err.splitlines()
    assert first.endswith(" ended with 99")
    assert second == "this version of rdmapost does not know this status"
    assert not json or ran.doc["status"] == "99"


def test_unknown_capabilities_are_kept() -> None:
    assert DeviceCap(1 << 30 | DeviceCap.XRC) == 1 << 30 | 1 << 20

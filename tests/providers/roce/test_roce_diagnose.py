"""What diagnose() says of connections between roce devices."""

from __future__ import annotations

import contextlib
import dataclasses
import re

import pytest
from support.roce import open_roce

import rdmapost as rp


def test_healthy_connection_between_two_loopback_addresses_has_no_problem() -> None:
    """As between two processes, which get an address each."""
    with contextlib.ExitStack() as stack:
        qps = []
        for host in ("127.0.0.61", "127.0.0.62"):
            context = stack.enter_context(open_roce(f"roce:{host}"))
            pd = stack.enter_context(rp.PD(context))
            cq = stack.enter_context(rp.CQ(context))
            qps.append(stack.enter_context(rp.QP(pd, rp.QPType.RC, cq)))
        for qp, peer in (qps, qps[::-1]):
            qp.connect(peer.endpoint())
        assert [qp.query().timeout for qp in qps] == [17, 17]
        findings = qps[0].diagnose(qps[1].endpoint())
        assert [finding for finding in findings if finding.severity == "problem"] == []
        (route,) = (finding for finding in findings if finding.name == "route")
        assert route.evidence.endswith("to 127.0.0.62 over lo, directly")


@pytest.mark.parametrize(
    ("host", "name", "severity"),
    [("127.0.0.63", "peer-closed", "problem"), ("127.0.0.64", "peer-unknown", "info")],
)
def test_peer_that_is_not_open_is_closed_if_no_other_process_can_have_it(
    host: str, name: str, severity: str
) -> None:
    """That has another address."""
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(open_roce("roce:127.0.0.63"))
        pd, cq = stack.enter_context(rp.PD(context)), stack.enter_context(rp.CQ(context))
        qp = stack.enter_context(rp.QP(pd, rp.QPType.RC, cq))
        with rp.QP(pd, rp.QPType.RC, cq) as peer:
            there = dataclasses.replace(peer.endpoint(), gid=rp.GID(f"::ffff:{host}"))
        qp.connect(there)
        (finding,) = (one for one in qp.diagnose() if one.name.startswith("peer"))
        assert (finding.name, finding.severity) == (name, severity)
        assert f"QP {there.qp_num:#x}" in finding.evidence


def test_timeout_too_short_for_a_roce_peer_process_is_named() -> None:
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(open_roce("roce:lo"))
        pd, cq = stack.enter_context(rp.PD(context)), stack.enter_context(rp.CQ(context))
        qp = stack.enter_context(rp.QP(pd, rp.QPType.RC, cq))
        qp.connect(qp.endpoint(), timeout=14)
        (finding,) = (one for one in qp.diagnose() if one.name.startswith("timeout"))
        assert (finding.name, finding.severity) == ("timeout-short", "info")
        assert finding.evidence.startswith("timeout=14 (67.1 ms) x (retry_cnt=6 + 1) = 0.47 s")


@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"timeout": 0, "retry_cnt": 1},
        {"timeout": 31},
        {"timeout": 10},
        {"retry_cnt": 0},
        {"retry_cnt": 1},
        {"timeout": 31, "retry_cnt": 0},
        {"timeout": 10, "retry_cnt": 0},
    ],
    ids=str,
)
def test_remedy_for_a_timeout_leads_to_no_other_finding(
    device: str, options: dict[str, int]
) -> None:
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(open_roce(device))
        pd, cq = stack.enter_context(rp.PD(context)), stack.enter_context(rp.CQ(context))
        qp = stack.enter_context(rp.QP(pd, rp.QPType.RC, cq))

        def about_timeout(**options: int) -> rp.Finding:
            qp.to_reset()
            qp.connect(qp.endpoint(), **options)
            (finding,) = (f for f in qp.diagnose() if f.name.startswith(("timeout", "retry")))
            return finding

        remedy = about_timeout(**options).remedy
        said = {
            name: int(value) for name, value in re.findall(r"(timeout|retry_cnt)=(\d+)", remedy)
        }
        assert about_timeout(**{**options, **said}).severity == "ok", remedy

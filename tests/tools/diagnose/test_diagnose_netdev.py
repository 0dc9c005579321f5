"""Diagnosing after the network device has changed: down, another MTU, an address removed.

These change the network device under Soft-RoCE, only in the virtual machine of tests/guest.py, and
restore it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from support import needs
from support.cli_runner import run
from support.documents import shown
from support.findings import named, problems, wrong

import rdmapost as rp
from rdmapost import QPState
from rdmapost.diagnose import diagnose_machine
from rdmapost.tools.diagnose.sysfs import System

DOCTOR = shown("docs/troubleshooting.md", "sudo ip link set d0 down; rdmapost doctor -d rxe0")


@pytest.fixture(scope="session")
def context(verbs_context: rp.Context) -> rp.Context:
    """The device on which the fixtures of these tests are created."""
    return verbs_context


@pytest.fixture
def netdev(context: rp.Context) -> str:
    """The network device behind a Soft-RoCE device, which this test may take down."""
    needs(context.attr.vendor_id == 0xFFFFFF, "Soft-RoCE", context)
    needs(os.geteuid() == 0 and shutil.which("ip"), "network device that may be changed", context)
    name = System().netdev_of(context.name, 1)
    # d0 belongs to the guest, and nothing else depends on it.
    needs(name == "d0", "network device of the guest's own", context)
    return name


@contextlib.contextmanager
def undone(*commands: tuple[str, str]) -> Iterator[None]:
    """Run ip commands, and at the end the commands that undo them."""
    with contextlib.ExitStack() as stack:
        for command, back in commands:
            stack.callback(ip, back)
            ip(command)
        yield


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, timeout=30, capture_output=True)


def gids_settle(context: rp.Context, gid: str, there: bool) -> None:
    """Wait for the GID table change event."""
    for _ in range(20):
        if (rp.GID(gid) in [entry.gid for entry in context.query_gid_table()]) is there:
            return
        context.get_async_event(0.5)
    pytest.fail(f"{gid} is {'not ' if there else ''}in the table after 10 s")


def port_settles(context: rp.Context, state: rp.PortState) -> None:
    for _ in range(20):
        if context.query_port(1).state is state:
            return
        context.get_async_event(0.5)
    pytest.fail(f"the port is not {state.name} after 10 s")


def test_port_that_is_down_is_found_by_diagnose(context, netdev, rc):
    try:
        with undone((f"link set {netdev} down", f"link set {netdev} up")):
            port_settles(context, rp.PortState.DOWN)
            for findings in (rc.a.diagnose(), diagnose_machine(context.name)):
                finding = named(findings, "port-down")
                assert finding.severity == "problem"
                assert f"{context.name} port 1 is DOWN" in finding.evidence
                assert f"ip link set {netdev} up" in finding.remedy
                assert "netdev-down" in problems(findings)
            ran = run("doctor", "-d", context.name)
            assert ran.code == 1
            # As in the documentation, up to its ellipsis.
            begins, _, _ = DOCTOR.replace("rxe0", context.name).partition("...\n")
            assert ran.out.startswith(begins)
    finally:
        port_settles(context, rp.PortState.ACTIVE)
        gids_settle(context, "::ffff:10.0.0.1", True)
    assert "port-down" not in wrong(rc.a)


def test_mtu_that_has_shrunk_is_found_by_diagnose(context, netdev, rc):
    mtu = System().netdev_mtu(netdev)
    active = context.query_port(1).active_mtu
    needs(active > rp.MTU.MTU_256, "adjustable MTU", context)
    with undone((f"link set {netdev} mtu 600", f"link set {netdev} mtu {mtu}")):
        # A queue pair connected before still sends packets as large as before.
        assert "mtu-mismatch" in wrong(rc.a)
    assert "mtu-mismatch" not in wrong(rc.a)


def test_address_that_was_taken_away_is_found_by_diagnose(context, netdev, connect):
    """The queue pairs keep a GID that the port no longer has."""
    gid = "::ffff:192.168.77.1"
    add = (f"addr add 192.168.77.1/24 dev {netdev}", f"addr flush dev {netdev} to 192.168.77.1")
    with undone(add):
        gids_settle(context, gid, True)
        table = context.query_gid_table()
        index = next(
            entry.gid_index
            for entry in table
            if entry.gid == rp.GID(gid) and entry.gid_type is rp.GIDType.ROCE_V2
        )
        pair = connect(gid_index=index)
        assert wrong(pair.a) == []
        ip(f"addr del 192.168.77.1/24 dev {netdev}")
        gids_settle(context, gid, False)
        finding = named(pair.a.diagnose(), "gid-stale")
        assert finding.severity == "problem"
        assert gid in finding.evidence
        pair.a.close()
        pair.b.close()


def test_gid_of_another_network_is_found_by_diagnose(context, netdev, connect):
    gid = "::ffff:192.168.77.1"
    add = (f"addr add 192.168.77.1/24 dev {netdev}", f"addr flush dev {netdev} to 192.168.77.1")
    with undone(add):
        gids_settle(context, gid, True)
        table = context.query_gid_table()
        index = next(entry.gid_index for entry in table if entry.gid == rp.GID(gid))
        pair = connect(to=QPState.RESET, gid_index=index)
        usual = context.choose_gid().gid
        pair.a.connect(dataclasses.replace(pair.b.endpoint(), gid=usual))
        found = [finding for finding in pair.a.diagnose(pair.b) if finding.name == "gid-wrong"]
        evidence = " ".join(finding.evidence for finding in found)
        assert "is in 192.168.77.0/24, but the peer's 10.0.0.1" in evidence
        # Another problem: it is not the peer's GID.
        assert "problem" in [finding.severity for finding in found]
        pair.a.close()
        pair.b.close()
    gids_settle(context, gid, False)

"""Diagnosing a port, its GIDs and the path to a peer, with other machines' ports and tables."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.findings import named

import rdmapost as rp
from rdmapost import GIDType, LinkLayer, NodeType, PortState
from rdmapost.tools.diagnose.finding import Finding
from rdmapost.tools.diagnose.path import check_gid, check_port, check_route, uses_gids
from rdmapost.tools.diagnose.sysfs import System

ROCE = SimpleNamespace(name="roce7", kind="verbs", node_type=NodeType.CA)
V4, LINK_LOCAL = "::ffff:10.0.0.5", "fe80::5054:ff:fe12:3456"


@pytest.fixture(scope="module")
def port() -> Iterator[rp.PortAttr]:
    """A port that is up: soft0's."""
    with rp.open_device("soft0") as context:
        yield context.query_port(1)


@pytest.fixture
def system(tmp_path: pathlib.Path) -> System:
    """A machine whose roce7 is on eth7."""
    for name, text in {
        "sys/class/infiniband/roce7/ports/1/gid_attrs/ndevs/0": "eth7",
        "sys/class/net/eth7/flags": "0x1003",
        "sys/class/net/eth7/operstate": "up",
        "proc/net/if_inet6": "fd000000000000000000000000000005 02 40 00 80     eth7",
        "proc/net/fib_trie": "Main:\n  |-- 10.0.0.6\n     /32 host LOCAL",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return System(tmp_path)


def entry(
    gid: str, index: int = 0, gid_type: GIDType | None = GIDType.ROCE_V2, ndev: str = ""
) -> rp.GIDTableEntry:
    return rp.GIDTableEntry(index, rp.GID(gid), gid_type, ndev)


def about_gid(system: System, *table: rp.GIDTableEntry, **changed: Any) -> Finding:
    """Diagnose the first GID of a table; `changed` is how it differed when it was chosen."""
    first = table[0]
    chosen = rp.GIDChoice(first.gid_index, first.gid, first.gid_type, "the only one")
    return check_gid(dataclasses.replace(chosen, **changed), list(table), system)


# ---- ports ------------------------------------------------------------------------


def test_remedy_for_an_ethernet_port_that_is_down_is_its_network_device(system, port):
    down = dataclasses.replace(port, state=PortState.DOWN, phys_state=3)
    finding = named(check_port(ROCE, down, system), "port-down")
    assert finding.severity == "problem"
    assert finding.evidence == "roce7 port 1 is DOWN (Disabled): it carries no traffic"
    assert finding.remedy.startswith("ip link set eth7 up")
    finding = named(
        check_port(SimpleNamespace(name="other0", kind="verbs"), down, system), "port-down"
    )
    assert finding.remedy.startswith("ip link set NETDEV up")


def test_remedy_for_an_infiniband_port_that_is_down_is_a_subnet_manager(system, port):
    attr = dataclasses.replace(port, link_layer=LinkLayer.INFINIBAND, state=PortState.INIT)
    [finding] = check_port(ROCE, attr, system)
    assert finding.name == "port-down"
    assert "opensm" in finding.remedy


def test_unknown_mtu_is_not_compared(system, port):
    assert {f.name for f in check_port(ROCE, port, system)} == {"port-active"}


def test_gids_matter_only_on_roce(port):
    assert uses_gids(ROCE, port)
    assert not uses_gids(SimpleNamespace(node_type=NodeType.RNIC), port)
    assert not uses_gids(ROCE, dataclasses.replace(port, link_layer=LinkLayer.INFINIBAND))


# ---- GIDs -------------------------------------------------------------------------


def test_gid_that_has_left_the_table_is_stale(system):
    finding = about_gid(system, entry(V4, 3), gid_index=1)
    assert (finding.name, finding.severity) == ("gid-stale", "problem")
    assert finding.evidence.endswith("is no longer in the port's table; valid now: 3")


def test_gid_that_has_changed_is_stale(system):
    finding = about_gid(system, entry(V4), gid=rp.GID("::ffff:10.0.0.9"))
    assert finding.name == "gid-stale"
    assert finding.evidence == f"GID 0 was ::ffff:10.0.0.9 when chosen, but is now {V4}"


@pytest.mark.parametrize(
    ("gid", "name"),
    [(V4, "gid-stale"), ("::ffff:10.0.0.6", "gid"), ("fd00::6", "gid-stale"), ("fd00::5", "gid")],
)
def test_address_of_a_gid_is_looked_for_on_its_network_device(system, gid, name):
    finding = about_gid(system, entry(gid, ndev="eth7"))
    assert finding.name == name
    if name == "gid-stale":
        assert finding.evidence.startswith("eth7 does not have the address")
        assert finding.remedy.startswith(f"ip addr add {gid.removeprefix('::ffff:')}/24 dev eth7")


def test_roce_v1_reaches_its_own_segment_only(system):
    v1 = entry(V4, 0, GIDType.ROCE_V1)
    finding = about_gid(system, v1)
    assert (finding.name, finding.severity) == ("gid-roce-v1", "warning")
    assert finding.remedy == "let the peer use RoCE v1 too"
    finding = about_gid(system, v1, entry(V4, 1))
    assert finding.remedy == f"gid_index=1, GID 1 ({V4})"


def test_link_local_gid_reaches_its_own_segment_only(system):
    local = entry(LINK_LOCAL, 0, ndev="eth7")
    finding = about_gid(system, local)
    assert (finding.name, finding.severity) == ("gid-link-local", "warning")
    assert finding.remedy == "give eth7 an address: ip addr add 10.0.0.1/24 dev eth7"
    assert "dev" not in about_gid(system, entry(LINK_LOCAL)).remedy.split("10.0.0.1")[1]
    assert about_gid(system, local, entry(V4, 2)).remedy == f"gid_index=2, GID 2 ({V4})"


# ---- the route --------------------------------------------------------------------


def route_finding(source: str, dgid: str, system: System, *, on_soft0: bool = False) -> Finding:
    mine = entry(source, ndev="eth7")
    return check_route(mine, rp.GID(dgid), [mine], system, on_soft0=on_soft0)


def test_link_local_gid_on_one_side_only_is_a_problem(system):
    finding = route_finding(LINK_LOCAL, "fd00::9", system)
    assert finding.evidence == (
        f"GID 0 ({LINK_LOCAL}) is link-local, but the peer's fd00::9 is not"
    )
    finding = route_finding("fd00::5", LINK_LOCAL, system)
    assert finding.evidence == (
        f"the peer's {LINK_LOCAL} is link-local, but GID 0 (fd00::5) is not"
    )


def test_software_device_reaches_only_itself(system):
    finding = route_finding("fd00::5", "fd00::9", system, on_soft0=True)
    assert (finding.name, finding.severity) == ("gid-wrong", "problem")
    assert "soft0 reaches only itself" in finding.evidence


def test_route_over_ipv6_is_not_looked_up(system):
    finding = route_finding("fd00::5", "fd00::9", system)
    assert (finding.name, finding.severity) == ("route", "info")
    assert finding.evidence.endswith("not looked up")


def test_gid_of_this_device_in_another_network_is_a_warning(system):
    routes = "Iface Destination Gateway Flags RefCnt Use Metric Mask\neth7 0000000A 0 1 0 0 0 "
    system.path("proc/net/route").write_text(f"{routes}00FFFFFF\n")
    mine, other = entry(V4, 0, ndev="eth7"), entry("::ffff:10.9.0.5", 1, ndev="eth7")
    finding = check_route(mine, other.gid, [mine, other], system, on_soft0=False)
    assert (finding.name, finding.severity) == ("gid-wrong", "warning")
    assert "on the same device is not" in finding.evidence
    finding = check_route(mine, mine.gid, [mine, other], system, on_soft0=False)
    assert finding.evidence == f"from GID 0 ({V4}) to {V4}, on this device"

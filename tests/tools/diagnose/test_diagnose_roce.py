"""What doctor says of roce devices: the socket's buffer, the MTU, and NAT."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.roce import skip_unless_free

import rdmapost as rp
from rdmapost.diagnose import Finding, diagnose_machine


@pytest.fixture(scope="module", autouse=True)
def _port_is_free() -> None:
    skip_unless_free("roce:lo")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with a network device lo."""
    for name, text in {
        "proc/sys/net/core/rmem_max": "212992",
        "sys/class/net/lo/mtu": "65536",
        "sys/class/net/lo/flags": "0x9",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    return tmp_path


def named(root: Path, name: str) -> Finding:
    (finding,) = (one for one in diagnose_machine("roce:lo", root=root) if one.name == name)
    return finding


def test_small_receive_buffer_is_named_with_its_remedy(machine: Path) -> None:
    finding = named(machine, "rmem-max")
    assert finding.severity == "info"
    assert finding.evidence.startswith(
        "net.core.rmem_max=212992: without CAP_NET_ADMIN the socket holds about 52 packets of 4096"
    )
    assert finding.remedy.startswith("sysctl -w net.core.rmem_max=")
    (machine / "proc/sys/net/core/rmem_max").write_text("4194304\n")
    assert named(machine, "rmem-max").severity == "ok"


def test_mtu_of_the_network_device_is_compared(machine: Path) -> None:
    assert named(machine, "mtu").evidence == "active_mtu 4096 (at most 4096), MTU 65536 of lo"
    (machine / "sys/class/net/lo/mtu").write_text("1500\n")
    finding = named(machine, "mtu-mismatch")
    assert (finding.severity, finding.about) == ("problem", "roce:lo port 1")


def test_loopback_address_is_not_translated(machine: Path) -> None:
    assert [one for one in diagnose_machine("roce:lo", root=machine) if one.name == "nat"] == []


def test_private_address_of_a_network_may_be_translated() -> None:
    candidates = [
        one
        for one in rp.list_roce_interfaces()
        if one.name != "roce:lo" and one.obstacle is None and one.address.startswith("1")
    ]
    if not candidates:
        pytest.skip("no network device with an IPv4 address and UDP port 4791 free")
    found = diagnose_machine(candidates[0].name)
    (finding,) = (one for one in found if one.name == "nat")
    assert finding.evidence.startswith(f"{candidates[0].address} is a private address")

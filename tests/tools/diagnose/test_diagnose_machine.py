"""Diagnosing the machine: its limits, and file trees that represent other machines."""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest
from support import prints
from support.findings import named

import rdmapost as rp
from rdmapost.diagnose import diagnose_machine
from rdmapost.tools.diagnose.path import check_route
from rdmapost.tools.diagnose.sysfs import System

MODULES = f"lib/modules/{os.uname().release}"
IB_UVERBS = "kernel/drivers/infiniband/core/ib_uverbs.ko.xz: kernel/core/ib_core.ko.xz\n"
RDMA_RXE = "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.xz: kernel/core/ib_core.ko.xz\n"
LIMITED = """
import os, resource, sys
from rdmapost.diagnose import diagnose_machine
# All that it imports: another user may not read where Python is.
diagnose_machine("soft0")
limit, memory, device = (int(sys.argv[1]), int(sys.argv[2]) or None, sys.argv[3])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
# Root may lock as much as it likes.
if os.geteuid() == 0: os.setuid(65534)
for found in diagnose_machine(device or None, memory=memory):
    if found.name == "memlock": print(found.severity, "|", found.evidence, "|", found.remedy)
"""


def write(root: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def roce(tmp_path: pathlib.Path) -> pathlib.Path:
    """A machine with one RoCE device that is not this machine's, on eth7."""
    port = "sys/class/infiniband/roce7/ports/1"
    write(
        tmp_path,
        {
            f"{port}/state": "4: ACTIVE",
            f"{port}/phys_state": "5: LinkUp",
            f"{port}/link_layer": "Ethernet",
            f"{port}/gid_attrs/ndevs/0": "eth7",
            "sys/class/net/eth7/flags": "0x1003",
            "sys/class/net/eth7/operstate": "up",
            "sys/class/net/eth7/mtu": "1500",
            "sys/module/ib_uverbs/refcnt": "1",
            "sys/module/rdma_rxe/refcnt": "1",
            "dev/infiniband/uverbs0": "",
            "proc/net/route": "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
            "eth7\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\n"
            "eth7\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF",
        },
    )
    return tmp_path


# ---- limits -----------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 4096, 65536])
def test_memlock_limit_near_0_is_a_problem(limit):
    severity, evidence, remedy = prints(LIMITED, str(limit), "0", "").split(" | ")
    assert severity == "problem"
    assert evidence.startswith(f"RLIMIT_MEMLOCK is {limit // 1024} KiB (at most")
    assert "ENOMEM" in evidence
    assert remedy.startswith("ulimit -l unlimited")


def test_memlock_limit_is_compared_with_what_is_needed():
    limit = str(4 << 20)
    assert prints(LIMITED, limit, "0", "").startswith("info")
    assert prints(LIMITED, limit, str(1 << 20), "").startswith("ok")
    said = prints(LIMITED, limit, str(5 << 20), "")
    assert said.startswith("problem")
    assert "and 5120 KiB are to be registered" in said


def test_memlock_limit_does_not_matter_for_the_software_device():
    assert prints(LIMITED, "0", "0", "soft0").startswith("info")


def test_nearly_all_files_open_is_found_by_diagnose():
    said = prints(
        "import resource\n"
        "from rdmapost.diagnose import diagnose_machine\n"
        "diagnose_machine('soft0')\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n"
        "print([f.severity for f in diagnose_machine() if f.name == 'files-low'])\n"
    )
    assert said == "['problem']"


# ---- this machine -----------------------------------------------------------------


def test_machine_of_a_working_device_has_no_problem(context):
    findings = diagnose_machine(context.name)
    assert [f for f in findings if f.severity == "problem"] == []
    assert named(findings, "gid").about == f"{context.name} port 1"
    assert "port-active" in [f.name for f in findings]


def test_missing_device_is_a_finding():
    (finding,) = [f for f in diagnose_machine("soft0", port_num=9) if f.name == "no-such-port"]
    assert finding.evidence == "soft0 has no port 9; its only port is 1"
    assert "gid-wrong" in [f.name for f in diagnose_machine("soft0", gid_index=99)]
    assert diagnose_machine("nosuch0")


def test_device_that_the_environment_names_is_diagnosed(monkeypatch):
    monkeypatch.setenv("RDMAPOST_DEVICE", "soft0")
    assert "soft0 port 1" in [f.about for f in diagnose_machine()]


def test_machine_without_rdma_is_reported_with_a_remedy():
    if any(info.kind == "verbs" for info in rp.list_devices()):
        pytest.skip("this machine has an RDMA device")
    finding = named(diagnose_machine(), "no-rdma-device")
    assert finding.severity == "problem"
    assert "virtual machine" in finding.remedy
    assert 'open_device("soft0")' in finding.remedy
    assert 'open_device("roce:lo")' in finding.remedy


def test_library_that_cannot_be_loaded_is_found_by_diagnose():
    said = prints(
        "from rdmapost.diagnose import diagnose_machine\n"
        "found = [f for f in diagnose_machine() if f.name == 'libibverbs-missing']\n"
        "print(len(found), found[0].severity, found[0].evidence)\n",
        RDMAPOST_LIBIBVERBS="/nonexistent/libibverbs.so.1",
    )
    assert said.startswith("1 problem libibverbs cannot be loaded")


# ---- other machines ---------------------------------------------------------------


def test_empty_machine_has_neither_modules_nor_devices(tmp_path):
    names = [f.name for f in diagnose_machine("soft0", root=tmp_path)]
    assert "module-missing" in names
    assert "permission" not in names


def test_modules_and_device_nodes_are_found(roce):
    findings = diagnose_machine("roce7", root=roce)
    assert "ib_uverbs is loaded; drivers loaded: rdma_rxe" in named(findings, "modules").evidence
    assert named(findings, "permission").about.endswith("dev/infiniband/uverbs0")
    evidence = named(findings, "port-active").evidence
    assert evidence == "roce7 port 1 is ACTIVE (LinkUp), Ethernet, eth7"
    # libibverbs does not list it.
    assert named(findings, "provider-missing").severity == "problem"


def test_node_without_permission_is_found_by_diagnose(roce):
    node = roce / "dev/infiniband/uverbs0"
    node.chmod(0o600)
    for place in (roce, *roce.parents):
        if place.stat().st_uid == os.geteuid() and len(place.parts) > 2:
            place.chmod(0o755)
    said = prints(
        "import os, sys\n"
        "from rdmapost.diagnose import diagnose_machine\n"
        "diagnose_machine('soft0')\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "else: os.chmod(sys.argv[1] + '/dev/infiniband/uverbs0', 0)\n"
        "for f in diagnose_machine(root=sys.argv[1]):\n"
        "    if f.about.endswith('uverbs0'): print(f.name, f.severity, f.evidence)\n",
        str(roce),
    )
    assert said.startswith("no-permission problem -")
    assert "this process is uid" in said
    assert said.endswith("Permission denied")


def test_module_that_is_missing_under_a_device_is_a_problem(roce):
    (roce / "sys/module/ib_uverbs/refcnt").unlink()
    (roce / "sys/module/ib_uverbs").rmdir()
    (roce / "dev/infiniband/uverbs0").unlink()
    write(roce, {f"{MODULES}/modules.dep": IB_UVERBS})
    findings = diagnose_machine(root=roce)
    finding = named(findings, "module-missing")
    assert (finding.severity, finding.remedy) == ("problem", "modprobe ib_uverbs")
    assert named(findings, "node-missing").severity == "problem"


@pytest.mark.parametrize("module", ["ib_uverbs", "rdma_rxe"])
@pytest.mark.parametrize("listing", ["modules.dep", "modules.builtin"])
def test_module_is_to_be_loaded_only_where_the_kernel_has_it(
    tmp_path: pathlib.Path, module: str, listing: str
) -> None:
    """A module of another kernel, or one whose name only begins like it, does not count."""
    if module == "rdma_rxe":
        write(tmp_path, {"sys/module/ib_uverbs/refcnt": "1"})
    write(
        tmp_path,
        {
            f"lib/modules/another/{listing}": IB_UVERBS + RDMA_RXE,
            f"{MODULES}/{listing}": "kernel/ib_uverbs_2.ko:\nkernel/rdma_rxe_2.ko:\n",
        },
    )
    lacking = named(diagnose_machine(root=tmp_path), "module-missing").remedy
    assert f"kernel {os.uname().release} has no module {module} in /lib/modules" in lacking
    assert "install the distribution's full kernel package" in lacking
    assert "soft0 and roce:lo need none" in lacking
    if not rp.list_devices()[1:]:
        text = named(diagnose_machine(root=tmp_path), "no-rdma-device").remedy
        assert "has no such module in /lib/modules" in text
        assert "modprobe" not in text
    write(tmp_path, {f"{MODULES}/{listing}": IB_UVERBS + RDMA_RXE})
    remedy = named(diagnose_machine(root=tmp_path), "module-missing").remedy
    assert remedy.endswith(f"modprobe {module}")
    if not rp.list_devices()[1:]:
        text = named(diagnose_machine(root=tmp_path), "no-rdma-device").remedy
        assert text.startswith("modprobe rdma_rxe && rdma link add")


def test_port_that_is_down_is_named_with_its_network_device(roce):
    (roce / "sys/class/infiniband/roce7/ports/1/state").write_text("1: DOWN\n")
    finding = named(diagnose_machine(root=roce), "port-down")
    assert finding.evidence == "roce7 port 1 is DOWN (LinkUp), Ethernet, eth7"
    assert finding.remedy == "ip link set eth7 up"


def test_routes_and_network_devices_are_read(roce):
    system = System(roce)
    direct, default = system.ipv4_routes()
    assert (direct.netdev, str(direct.network), direct.gateway) == ("eth7", "10.0.0.0/24", None)
    assert (str(default.network), str(default.gateway)) == ("0.0.0.0/0", "10.0.0.1")
    assert system.netdev_is_up("eth7")
    assert system.netdev_mtu("eth7") == 1500
    (roce / "sys/class/net/eth7/flags").write_text("0x1002\n")
    assert not system.netdev_is_up("eth7")


def test_network_device_of_the_port_is_checked(roce):
    """The software device's port, as if it were on eth7."""
    write(roce, {"sys/class/infiniband/soft0/parent": "eth7"})
    finding = named(diagnose_machine("soft0", root=roce), "mtu-mismatch")
    assert finding.evidence.startswith("active_mtu 4096 (at most 4096), MTU 1500 of eth7")
    assert finding.remedy.startswith("ip link set eth7 mtu 4160")
    write(roce, {"sys/class/net/eth7/mtu": "9000", "sys/class/net/eth7/flags": "0x1002"})
    findings = diagnose_machine("soft0", root=roce)
    assert named(findings, "mtu").severity == "ok"
    assert named(findings, "netdev-down").remedy == "ip link set eth7 up"
    shutil.rmtree(roce / "sys/class/net/eth7")
    assert named(diagnose_machine("soft0", root=roce), "netdev-hidden").severity == "info"


@pytest.mark.parametrize(
    ("source", "dgid", "netdev", "name", "says"),
    [
        ("10.0.0.5", "::ffff:10.0.0.9", "eth7", "route", "over eth7, directly"),
        ("10.0.0.5", "::ffff:192.0.2.1", "eth7", "route", "through 10.0.0.1"),
        ("10.0.0.5", "::ffff:10.1.0.9", "eth7", "gid-wrong", "goes through eth8"),
        ("172.16.0.5", "::ffff:10.1.0.9", "eth8", "gid-wrong", "is in 10.1.0.0/16"),
        ("127.0.0.2", "::ffff:127.0.0.77", "lo", "route", "over lo, directly"),
        ("10.0.0.5", "fd00::1", "eth7", "gid-wrong", "is IPv4, but the peer's fd00::1 is IPv6"),
    ],
)
def test_route_to_a_peer_is_looked_up(roce, source, dgid, netdev, name, says):
    table = roce / "proc/net/route"
    table.write_text(
        table.read_text() + "eth8\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\n"
        "eth8\t000010AC\t00000000\t0001\t0\t0\t0\t0000FFFF\n"
    )
    write(roce, {"sys/class/net/eth8/mtu": "1500", "sys/class/net/lo/mtu": "65536"})
    entry = rp.GIDTableEntry(3, rp.GID(f"::ffff:{source}"), rp.GIDType.ROCE_V2, netdev)
    finding = check_route(entry, rp.GID(dgid), [entry], System(roce), on_soft0=False)
    assert (finding.name, finding.severity) == (name, "ok" if name == "route" else "problem")
    assert says in finding.evidence


def test_address_without_a_route_is_found_by_diagnose(roce):
    (roce / "proc/net/route").write_text("Iface\tDestination\n")
    entry = rp.GIDTableEntry(3, rp.GID("::ffff:10.0.0.5"), rp.GIDType.ROCE_V2, "eth7")
    peer = rp.GID("::ffff:192.0.2.1")
    finding = check_route(entry, peer, [entry], System(roce), on_soft0=False)
    assert finding.name == "gid-wrong"
    assert finding.evidence == "there is no route from GID 3 (::ffff:10.0.0.5) to 192.0.2.1"


def test_addresses_of_this_machine_are_read():
    if not pathlib.Path("/proc/net/fib_trie").exists():
        pytest.skip("this kernel shows no /proc/net/fib_trie")
    # All of 127.0.0.0/8 is this machine's.
    found = [System().has_ipv4_address(f"{first}.0.0.77") for first in (127, 0)]
    assert found == [True, False]

"""Checks of the machine: the requirements for creating a queue pair."""

from __future__ import annotations

import dataclasses
import errno
import grp
import os
import pwd
import resource
import stat
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from ..._arguments import expect, within
from ...errors import (
    ADD_SOFT_ROCE,
    RAISE_MEMLOCK,
    NoDeviceError,
    NoRdmaError,
    RdmaError,
    VerbsError,
)
from ...providers import ROCE, DeviceInfo, soft_provider, verbs_provider
from ...resources.device import Context, device_of_environment, open_device
from ...standard.wire import ROCE_V2_PORT
from . import roce_checks
from .finding import Finding, attribute, worst_first
from .path import check_gid, check_port, uses_gids
from .snapshot import FAILURES
from .sysfs import System

_MACHINE = "machine"
_CAP_IPC_LOCK, _SMALL_LOCK, _USUAL_LOCK = 14, 64 << 10, 8 << 20
_DRIVERS = (
    "rdma_rxe siw mlx4_ib mlx5_ib bnxt_re irdma i40iw iw_cxgb4 efa erdma hfi1 hns_roce "
    "hns_roce_hw_v2 ib_mthca ib_qib ionic_rdma mana_ib ocrdma qedr usnic_verbs vmw_pvrdma"
)
_GROUP_MAY = stat.S_IRGRP | stat.S_IWGRP
_EVERYONE = "0 0 4294967295"


def diagnose_machine(
    device: str | None = None,
    *,
    port_num: int | None = None,
    gid_index: int | None = None,
    memory: int | None = None,
    root: str | os.PathLike[str] = "/",
) -> list[Finding]:
    """Run the checklist for the machine, without changing anything.

    It covers libibverbs, the kernel's modules, /dev/infiniband, the devices and their
    ports, the network device and the GID, and the limits of this process.

    Args:
        device: the device that will be used; default: RDMAPOST_DEVICE, or the first
            active one.  For "soft0" and "roce:...", what only real devices need is not
            reported as a problem.
        port_num: its port; default: the first active one.
        gid_index: its GID; default: chosen by choose_gid.
        memory: bytes that will be registered, to compare with the limit.
        root: the directory that contains sys, proc, dev and lib.

    Returns:
        findings, problems first.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is negative, or port_num is 0.
    """
    expect("device", device, str, None)
    for name, number, lowest in (
        ("port_num", port_num, 1),
        ("gid_index", gid_index, 0),
        ("memory", memory, 0),
    ):
        if number is not None:
            within(name, number, lowest)
    system = System(root)
    device = device or device_of_environment()
    software = device is not None and (
        device.startswith(ROCE) or device in [info.name for info in soft_provider().list_devices()]
    )
    findings: list[Finding] = []
    infos: list[DeviceInfo] = []
    try:
        infos = verbs_provider().list_devices()
        findings.append(Finding("libibverbs", "ok", f"libibverbs is installed; {_listed(infos)}"))
    except NoRdmaError as error:
        what, _, remedy = str(error).partition("; ")
        findings.append(Finding("libibverbs-missing", "problem", what, remedy))
    except VerbsError as error:
        remedy = "see 'dmesg', and check that /sys is mounted"
        findings.append(Finding("devices-not-listed", "problem", str(error), remedy))
    chosen = _choose(system, device, infos)
    checks: tuple[Callable[[], Iterable[Finding]], ...] = (
        partial(_check_modules, system, infos),
        partial(_check_nodes, system),
        partial(_check_ports, system, chosen),
        partial(_check_memlock, system, memory),
        partial(_check_files, system),
    )
    for check in checks:
        try:
            findings += check()
        except FAILURES as error:
            # A kernel may lay out /sys or /proc differently.
            findings.append(Finding("not-checked", "info", str(error)))
    if chosen is not None:
        findings += _check_device(system, chosen, port_num, gid_index)
    elif device is not None and not software and system.devices():
        evidence = f"there is no device {device}; {_listed(infos)}"
        findings.append(Finding("no-such-device", "problem", evidence, "rdmapost devices"))
    if not infos and not system.devices():
        findings.append(_no_device(system))
    if software:
        # A software device works whatever they say.
        findings = [
            finding if finding.severity == "ok" else dataclasses.replace(finding, severity="info")
            for finding in findings
        ]
        findings += _check_device(system, str(device), port_num, gid_index)
    return worst_first(attribute(findings, _MACHINE))


def _listed(infos: list[DeviceInfo]) -> str:
    names = ", ".join(info.name for info in infos)
    return f"it lists {names}" if names else "it lists no device"


def _choose(system: System, device: str | None, infos: list[DeviceInfo]) -> str | None:
    names = [info.name for info in infos]
    if device is not None:
        return device if device in names else None
    active = [name for name in names if any(port.state == "ACTIVE" for port in system.ports(name))]
    return next(iter(active or names), None)


# ---- the kernel -------------------------------------------------------------


def _check_modules(system: System, infos: list[DeviceInfo]) -> Iterable[Finding]:
    drivers = [name for name in _DRIVERS.split() if system.module(name)]
    loaded = f"drivers loaded: {', '.join(drivers) or 'none'}"
    if not (system.module("ib_uverbs") or system.path("sys/class/infiniband_verbs").exists()):
        yield Finding(
            "module-missing",
            "problem" if system.devices() else "warning",
            f"the kernel module ib_uverbs is not loaded; {loaded}",
            _load(system, "ib_uverbs"),
        )
    elif not drivers and not system.devices():
        evidence = "ib_uverbs is loaded, but no RDMA device driver is"
        remedy = f"load the NIC's driver; for Soft-RoCE, {_load(system, 'rdma_rxe')}"
        yield Finding("module-missing", "warning", evidence, remedy)
    else:
        yield Finding("modules", "ok", f"ib_uverbs is loaded; {loaded}")
    hidden = [name for name in system.devices() if name not in [info.name for info in infos]]
    if hidden and system.module("ib_uverbs"):
        evidence = f"the kernel has {', '.join(hidden)}, but libibverbs does not list it"
        remedy = "apt install ibverbs-providers (dnf install libibverbs), for its user-space driver"
        yield Finding("provider-missing", "problem", evidence, remedy)


def _load(system: System, module: str) -> str:
    """Say how to load a kernel module, or what to do if the running kernel does not have it."""
    if system.kernel_has(module):
        return f"modprobe {module}"
    release = os.uname().release
    return (
        f"install the distribution's full kernel package: kernel {release} has no module {module} "
        f"in /lib/modules (in a container: modprobe {module} on the host); soft0 and roce:lo need "
        "none"
    )


def _check_nodes(system: System) -> Iterable[Finding]:
    place = system.path("dev/infiniband")
    names = [name for name in system.names("dev/infiniband") if name.startswith("uverbs")]
    if not names:
        if system.devices():
            yield Finding(
                "node-missing",
                "problem",
                f"the kernel has {', '.join(system.devices())}, but {place} has no uverbs node",
                "modprobe ib_uverbs; in a container, --device=/dev/infiniband",
                str(place),
            )
        return
    for name in names:
        yield _check_node(place / name)


def _check_node(node: Path) -> Finding:
    groups = ", ".join(map(str, sorted({os.getegid(), *os.getgroups()})))
    me = f"this process is uid {os.geteuid()}, groups {groups}"
    try:
        found = node.stat()
    except OSError as error:
        return Finding("node-broken", "problem", f"{error.strerror}; {me}", "", str(node))
    owner, group = _name(pwd.getpwuid, found.st_uid), _name(grp.getgrgid, found.st_gid)
    evidence = f"{stat.filemode(found.st_mode)} {owner}:{group}; {me}"
    try:
        # Open it to find out: a container may forbid what the mode allows.
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
    except PermissionError as error:
        if os.access(node, os.R_OK | os.W_OK, effective_ids=True):
            remedy = "allow the device in the container: --device=/dev/infiniband"
        elif found.st_gid and found.st_mode & _GROUP_MAY == _GROUP_MAY:
            remedy = f"usermod -aG {group} $USER, and log in again; or run as root"
        else:
            remedy = 'a udev rule: KERNEL=="uverbs*", MODE="0666"; or run as root'
        return Finding(
            "no-permission", "problem", f"{evidence}: {error.strerror}", remedy, str(node)
        )
    except OSError as error:
        remedy = "see 'dmesg'; reload the device's driver"
        return Finding(
            "node-broken", "problem", f"it cannot be opened: {error.strerror}", remedy, str(node)
        )
    return Finding("permission", "ok", evidence, about=str(node))


def _name(look_up: object, number: int) -> str:
    try:
        return str(look_up(number)[0])  # type: ignore[operator]
    except KeyError:
        return str(number)


def _check_ports(system: System, chosen: str | None) -> Iterable[Finding]:
    """Check the ports of the other devices without opening the devices."""
    for device in system.devices():
        if device == chosen:
            continue
        for port in system.ports(device):
            about = f"{device} port {port.port_num}"
            behind = f", {port.netdev}" if port.netdev else ""
            evidence = f"{about} is {port.state} ({port.phys_state}), {port.link_layer}{behind}"
            active = port.state == "ACTIVE"
            yield Finding(
                "port-active" if active else "port-down",
                "ok" if active else "info",
                evidence,
                "" if active else f"ip link set {port.netdev or 'NETDEV'} up",
                about,
            )


def _no_device(system: System) -> Finding:
    if system.kernel_has("rdma_rxe"):
        netdev = next(iter(system.netdevs()), "eth0")
        remedy = f"{ADD_SOFT_ROCE.format(netdev)}; or "
    else:
        release = os.uname().release
        remedy = (
            "load the NIC's driver; for Soft-RoCE, which needs the module rdma_rxe, install the "
            f"distribution's full kernel package, because kernel {release} has no such module in "
            "/lib/modules; or "
        )
    return Finding(
        "no-rdma-device",
        "problem",
        "there is no RDMA device on this machine",
        f"{remedy}use a virtual machine that has one (README, 'A real device in a virtual "
        'machine\'), or a software device: within one process -d soft0, open_device("soft0"); '
        'between processes -d roce:lo, open_device("roce:lo")',
    )


# ---- the limits of the process ----------------------------------------------


def _check_memlock(system: System, memory: int | None) -> Iterable[Finding]:
    limit, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        yield Finding("memlock", "ok", "no limit on locked memory")
        return
    status = dict(
        line.split(":", 1)
        for line in (system.read("proc/self/status") or "").splitlines()
        if ":" in line
    )
    pinned = status.get("VmPin", "").strip() or "unknown"
    evidence = f"RLIMIT_MEMLOCK is {_kib(limit)} (at most {_kib(hard)}), pinned now: {pinned}"
    capable = int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1
    # The kernel requires the capability in the initial user namespace.
    outermost = " ".join((system.read("proc/self/uid_map") or "").split()) == _EVERYONE
    if capable and outermost:
        yield Finding("memlock", "ok", f"{evidence}; CAP_IPC_LOCK lifts the limit")
        return
    if memory is not None and memory > limit:
        evidence += f", and {_kib(memory)} are to be registered"
    elif limit > _SMALL_LOCK:
        small = limit <= _USUAL_LOCK and memory is None
        yield Finding(
            "memlock",
            "info" if small else "ok",
            f"{evidence}; registering more than that in total fails with ENOMEM",
            RAISE_MEMLOCK if small else "",
        )
        return
    evidence += ": ibv_reg_mr fails with ENOMEM"
    yield Finding("memlock", "problem", evidence, RAISE_MEMLOCK)


def _kib(size: int) -> str:
    return "unlimited" if size == resource.RLIM_INFINITY else f"{-(-size // 1024)} KiB"


def _check_files(system: System) -> Iterable[Finding]:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(system.names("proc/self/fd"))
    if limit != resource.RLIM_INFINITY and used + 16 > limit:
        evidence = f"{used} of {limit} files are open; a device needs two, and a CQ one"
        remedy = "ulimit -n 65536"
        yield Finding("files-low", "problem", evidence, remedy)


# ---- the device that will be used -------------------------------------------


def _check_device(
    system: System, name: str, port_num: int | None, gid_index: int | None
) -> Iterable[Finding]:
    """Open a device, and check its port and GID."""
    try:
        with open_device(name) as context:
            yield from _check_open(system, context, port_num, gid_index)
    except NoDeviceError as error:
        yield Finding("no-such-device", "problem", str(error), "rdmapost devices")
    except FAILURES as error:
        evidence = str(error)
        remedy = "see the findings about /dev/infiniband, and 'dmesg'"
        if name.startswith(ROCE):
            remedy = "rdmapost devices shows what can be opened"
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                remedy = f"use another address, or end what uses UDP port {ROCE_V2_PORT}: ss -lunp"
        yield Finding("not-opened", "problem", evidence, remedy, name)


def _check_open(
    system: System, context: Context, port_num: int | None, gid_index: int | None
) -> Iterable[Finding]:
    if port_num is not None:
        try:
            context.query_port(port_num)
        except ValueError as error:
            remedy = "rdmapost devices"
            yield Finding("no-such-port", "problem", str(error), remedy, context.name)
            return
    count = context.attr.phys_port_cnt
    ports = [context.query_port(number) for number in range(1, count + 1)]
    active = [port for port in ports if port.state.name.startswith("ACTIVE")]
    port = (active or ports)[0] if port_num is None else ports[port_num - 1]
    about = f"{context.name} port {port.port_num}"
    yield from check_port(context, port, system)
    if context.kind == "roce":
        yield from attribute(roce_checks.check_network(context, port, system), about)
    if uses_gids(context, port):
        yield from attribute(_check_gid(system, context, port.port_num, gid_index), about)


def _check_gid(
    system: System, context: Context, port_num: int, gid_index: int | None
) -> Iterable[Finding]:
    try:
        chosen = context.choose_gid(port_num, gid_index)
    except (RdmaError, ValueError) as error:
        netdev = system.netdev_of(context.name, port_num) or "NETDEV"
        name, remedy = "gid-wrong", "rdmapost devices"
        if gid_index is None:
            name = "gid-none"
            remedy = f"ip addr add 10.0.0.1/24 dev {netdev}; ip link set {netdev} up"
        yield Finding(name, "problem", str(error), remedy)
        return
    yield check_gid(chosen, context.query_gid_table(port_num), system)
    if context.kind != "soft":
        yield _firewall(system)


def _firewall(system: System) -> Finding:
    loaded = [name for name in ("nf_tables", "ip_tables", "ip6_tables") if system.module(name)]
    return Finding(
        "firewall",
        "info",
        f"RoCE v2 uses UDP port {ROCE_V2_PORT}. "
        + (
            f"Rules of {', '.join(loaded)}, the network or a cloud security group may block it."
            if loaded
            else "No packet filter is loaded here, but the network or a cloud security group may "
            "still block it."
        ),
        f"nft list ruleset; allow UDP {ROCE_V2_PORT} on both sides" if loaded else "",
    )

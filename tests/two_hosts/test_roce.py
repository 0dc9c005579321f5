"""``roce`` devices between two machines: with Soft-RoCE on the other one, and with each other."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.cli_runner import run

import rdmapost as rp

from .near_side import exchange
from .remote import DEVICE, GID_INDEX, own_address, said
from .serving import Serving, servers

pytestmark = pytest.mark.two_hosts

COUNT = 2000
TYPES = pytest.mark.parametrize("qp_type", ["rc", "uc", "ud"])
DEVICES = [(DEVICE, "roce"), ("roce", "roce"), ("roce", DEVICE)]

# While rdma_rxe is loaded, the kernel has RoCE's port. Unloading it fails for a moment after a
# process has closed the device.
UNLOAD = f"""
[ -e /sys/class/infiniband/{DEVICE} ] && rdma link delete {DEVICE}
for _ in $(seq 100); do modprobe -r rdma_rxe && exit; sleep 0.1; done
exit 1
"""
LOAD = f"""
[ -e /sys/class/infiniband/{DEVICE} ] && exit
modprobe rdma_rxe && rdma link add {DEVICE} type rxe netdev $1 || exit
for _ in $(seq 100); do
    [ -e /dev/infiniband/uverbs0 ] &&
        grep -qs ffff:0a00:01 /sys/class/infiniband/{DEVICE}/ports/1/gids/{GID_INDEX} && exit
    sleep 0.1
done
exit 1
"""


def here(*argv: str) -> str:
    """Run a command on this machine that must succeed; return its output."""
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout


def use(command: Callable[..., str], address: str, kind: str) -> str:
    """Prepare a machine for one kind of device; return the device's name."""
    shown = command("ip", "-o", "-4", "address", "show", "to", address).split()
    command("sh", "-c", UNLOAD if kind == "roce" else LOAD, "sh", shown[1])
    return f"roce:{address}" if kind == "roce" else DEVICE


@pytest.fixture(scope="module", params=DEVICES, ids=" to ".join)
def devices(peer: str, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """The devices of this machine and of the other; afterwards both have Soft-RoCE again."""
    own = own_address(peer)
    near, far = request.param
    try:
        yield use(here, own, near), use(said, peer, far)
    finally:
        use(here, own, DEVICE)
        use(said, peer, DEVICE)


@pytest.fixture
def serving(peer: str, devices: tuple[str, str]) -> Iterator[Serving]:
    """A server for one test: only one process can have a roce device's address."""
    with servers(peer, devices[1]) as start:
        yield start("--size", "1M")


@pytest.fixture
def done(devices: tuple[str, str]) -> Callable[..., dict[str, Any]]:
    """Run a command that must succeed; return its document."""

    def command(*args: str) -> dict[str, Any]:
        ran = run(*args, "-d", devices[0], "--timeout", "20", "--json")
        assert (ran.code, ran.err) == (0, "")
        assert ran.doc["status"] == "SUCCESS"
        return ran.doc

    return command


@TYPES
def test_message_between_two_hosts_over_roce_arrives_whole(
    serving: Serving, done, qp_type: str
) -> None:
    doc = done("send", serving.where, "--data", "over there", "--imm", "0x12", "--qp-type", qp_type)
    assert (doc["received"], doc["imm_data"]) == ("over there", 18)
    arrived = serving.event("arrived")
    assert (arrived["opcode"], arrived["data"]) == ("RECV", "over there")


def test_memory_of_another_host_is_written_read_and_changed_atomically(
    serving: Serving, done
) -> None:
    assert done("write", serving.where, "--size", "1M")["byte_len"] == 1 << 20
    assert done("write", serving.where, "--data", "abc", "--offset", "16")["received"] == "abc"
    assert done("read", serving.where, "--size", "1M")["byte_len"] == 1 << 20
    doc = done("atomic", "fetch-add", serving.where, "--add", "5", "--count", "3", "--offset", "64")
    assert doc["new"] - doc["olds"][0] == 15


def test_operations_between_two_hosts_over_roce_arrive_once_in_order(
    devices: tuple[str, str],
) -> None:
    near, far = devices
    with rp.open_device(near) as device:
        exchange(device, far, COUNT)

"""A roce device and Soft-RoCE across a network that loses, repeats, reorders and damages packets.

netem does that to RoCE's packets only, in both directions; the commands to both sides arrive.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest
from support import LIMIT, cables
from support.cables import FAR, IN_NAMESPACE, NEAR, Cable, Ends, Side, noise
from support.verbs_side import COUNTED, MESSAGE, READ, SENT, WRITTEN

from rdmapost.standard.wire import ROCE_V2_PORT

pytestmark = pytest.mark.rdma

cable = cables.cable

Away = Callable[[Ends], AbstractContextManager[None]]

ROUNDS = 8
LOOPBACK = "lo"

NETWORKS = {
    "loses 1 %": "loss 1%",
    "loses 2 %": "loss 2%",
    "loses 5 %": "loss 5%",
    "repeats 5 %": "duplicate 5%",
    "reorders 25 %": "delay 5ms reorder 75%",
    "damages 3 %": "corrupt 3%",
    "is late by 10 to 30 ms": "delay 20ms 10ms",
}
ALL_OF_IT = "delay 10ms 5ms loss 2% duplicate 5% corrupt 3%"

on_ipv4 = pytest.mark.parametrize("cable", [(4, 1500)], indirect=True, ids=["IPv4-1024"])


@pytest.fixture(scope="module")
def two_roce(cable: Cable) -> Iterator[Ends]:
    """A roce device with another one."""
    with ExitStack() as stack:
        near, far = (
            Side(stack, cable.ours, f"roce:{address}", f"::ffff:{address}")
            for address in ("127.0.0.2", "127.0.0.3")
        )
        yield Ends(near, far, 4096, cable)


@pytest.fixture(params=["roce to Soft-RoCE", "Soft-RoCE to roce", "roce to roce"])
def ends(request: pytest.FixtureRequest, cable: Cable) -> Ends:
    """Each as the side that posts."""
    if request.param == "roce to roce":
        chosen: Ends = request.getfixturevalue("two_roce")
        return chosen
    if request.param == "roce to Soft-RoCE":
        return Ends(cable.roce, cable.rxe, cable.mtu, cable)
    return Ends(cable.rxe, cable.roce, cable.mtu, cable)


@contextmanager
def network(ends: Ends, netem: str) -> Iterator[None]:
    """Let netem treat the packets to RoCE's port."""
    alone = ends.cable.rxe not in (ends.near, ends.far)
    links = [(IN_NAMESPACE, LOOPBACK)] if alone else [((), NEAR), (IN_NAMESPACE, FAR)]
    with ExitStack() as stack:
        for where, link in links:
            command = [*where, "tc", "-batch", "-"]
            traffic_control(
                command,
                f"qdisc replace dev {link} root handle 1: prio bands 4 priomap" + 16 * " 0",
                f"qdisc add dev {link} parent 1:4 handle 40: netem {netem}",
                *(
                    f"filter add dev {link} parent 1: protocol {protocol} prio {prio} "
                    f"u32 match {match} dport {ROCE_V2_PORT} 0xffff flowid 1:4"
                    for prio, protocol, match in ((1, "ip", "ip"), (2, "ipv6", "ip6"))
                ),
            )
            stack.callback(traffic_control, command, f"qdisc del dev {link} root")
        yield


def traffic_control(command: list[str], *lines: str) -> None:
    """Run commands of tc in one process: starting one is slow on an emulated machine."""
    subprocess.run(command, input="\n".join(lines), text=True, check=True, timeout=LIMIT)


def begin(ends: Ends, responses: bool = True, **options: int) -> None:
    """Connect queue pairs, prepare the memory and the receives, and post the operations."""
    exposed = ends.connect("RC", **options)
    size = ROUNDS * MESSAGE
    ends.near.fill(WRITTEN, noise(size))
    ends.near.fill(SENT, noise(size + 1))
    ends.far.fill(READ, noise(size + 2))
    ends.far.fill(COUNTED, bytes(8).hex())
    for start in range(SENT, SENT + size, MESSAGE):
        ends.far.recv(start, MESSAGE)
    ends.near.post_mixed(ROUNDS, exposed["addr"], exposed["rkey"], responses)


def check_memory(ends: Ends, responses: bool = True) -> None:
    """Check what the operations have left in both memories."""
    size = ROUNDS * MESSAGE
    assert ends.far.peek(WRITTEN, size) == noise(size)
    assert ends.far.peek(SENT, size) == noise(size + 1)[: 2 * size]
    if not responses:
        return
    assert ends.near.peek(READ, size) == noise(size + 2)[: 2 * size]
    added = bytes.fromhex(ends.near.peek(COUNTED, 8 * ROUNDS))
    found = [int.from_bytes(added[i : i + 8], "little") for i in range(0, 8 * ROUNDS, 8)]
    assert found == [i * (i + 1) // 2 for i in range(ROUNDS)]


def received(ends: Ends) -> list[tuple[str, int]]:
    return [(wc["status"], wc["byte_len"]) for wc in ends.far.wait(ROUNDS, LIMIT)]


@on_ipv4
@pytest.mark.parametrize("netem", NETWORKS.values(), ids=NETWORKS)
def test_every_operation_is_carried_out_once_over_a_network_with_one_fault(ends: Ends, netem: str):
    check_operations(ends, netem)


def test_every_operation_is_carried_out_once_over_a_network_with_all_faults(ends: Ends):
    check_operations(ends, ALL_OF_IT)


def check_operations(ends: Ends, netem: str) -> None:
    # If a response is lost, or overtaken by another packet, Soft-RoCE may end a READ or an atomic
    # with SUCCESS and without the data (check_psn() and check_ack() of its rxe_comp.c).
    responses = ends.near is not ends.cable.rxe
    count = ROUNDS * (4 if responses else 2)
    with network(ends, netem):
        begin(ends, responses, timeout=16)
        assert ends.statuses(count) == ["SUCCESS"] * count
        assert received(ends) == [("SUCCESS", MESSAGE)] * ROUNDS
    check_memory(ends, responses)


@contextmanager
def everything_lost(ends: Ends) -> Iterator[None]:
    """Lose every packet for another second after the block."""
    with network(ends, "loss 100%"):
        yield
        time.sleep(1)


@contextmanager
def link_down(ends: Ends) -> Iterator[None]:
    """Lose every packet in the block, and take the link down for a second after it.

    The commands to one side need the link.
    """
    alone = ends.cable.rxe not in (ends.near, ends.far)
    command = (*IN_NAMESPACE, "ip", "link", "set", LOOPBACK if alone else FAR)
    with ExitStack() as stack:
        with network(ends, "loss 100%"):
            yield
            stack.callback(subprocess.run, (*command, "up"), check=True, timeout=LIMIT)
            subprocess.run((*command, "down"), check=True, timeout=LIMIT)
        time.sleep(1)


away = pytest.mark.parametrize("away", [everything_lost, link_down])


@on_ipv4
@away
def test_operations_survive_a_network_that_fails_for_a_second(ends: Ends, away: Away):
    with away(ends):
        # A busy emulated machine takes up to 8 seconds to change the link, so retry for 15.
        begin(ends, timeout=19)
    assert ends.statuses(4 * ROUNDS) == ["SUCCESS"] * (4 * ROUNDS)
    assert received(ends) == [("SUCCESS", MESSAGE)] * ROUNDS
    check_memory(ends)


@on_ipv4
@away
def test_network_that_fails_for_longer_than_the_retries_ends_with_retry_exc_err(
    ends: Ends, away: Away
):
    with away(ends):
        begin(ends, timeout=12, retry_cnt=2)
    statuses = ends.statuses(4 * ROUNDS)
    assert statuses == ["RETRY_EXC_ERR"] + ["WR_FLUSH_ERR"] * (4 * ROUNDS - 1)
    begin(ends)
    assert ends.statuses(4 * ROUNDS) == ["SUCCESS"] * (4 * ROUNDS)
    check_memory(ends)

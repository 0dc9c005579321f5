"""A roce device and the kernel's Soft-RoCE, each as the other's peer (support/cables.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import LIMIT, cables, verbs_side
from support.agents import Remote
from support.cables import RXE, Cable, Ends, noise
from support.pcapng import check_headers, read
from support.ports import wait_for_port

import rdmapost as rp

pytestmark = pytest.mark.rdma

cable = cables.cable
ends = cables.ends

# ---- what succeeds ------------------------------------------------------------------------


def test_roce_and_soft_roce_agree_on_the_mtu_of_the_cable(ends: Ends):
    near, far = ends.near.make("RC"), ends.far.make("RC")
    assert ends.far.connect(near["endpoint"]) == ends.mtu
    assert ends.near.connect(far["endpoint"]) == ends.mtu


@pytest.mark.parametrize("qp_type", ["RC", "UC"])
@pytest.mark.parametrize("name", ["Send", "SendWithImm", "RdmaWrite", "RdmaWriteWithImm"])
def test_messages_between_roce_and_soft_roce_of_every_opcode_and_size_arrive(
    ends: Ends, name: str, qp_type: str
):
    exposed = ends.connect(qp_type)
    fields: dict[str, int] = {}
    if "Imm" in name:
        fields["imm_data"] = 0x12345678
    if "Write" in name:
        fields |= {"remote_addr": exposed["addr"] + 7, "rkey": exposed["rkey"]}
    for size in (0, 1, 4097, 100_003):
        data = noise(size)
        ends.near.fill(0, data)
        ends.far.recv(7, size)
        ends.near.post(name, 0, size, **fields)
        expected = size, fields.get("imm_data")
        if name == "RdmaWrite":
            # Only a message after it takes the receive.
            ends.near.post("Send", 0, 0)
            assert ends.statuses(1) == ["SUCCESS"]
            expected = 0, None
        assert ends.statuses(1) == ["SUCCESS"]
        (wc,) = ends.far.wait(1, LIMIT)
        assert wc["status"] == "SUCCESS"
        assert (wc["byte_len"], wc["imm_data"]) == expected
        assert ends.far.peek(7, size) == data


def test_datagrams_between_roce_and_soft_roce_arrive(ends: Ends):
    exposed = ends.connect("UD")
    for size in (0, 1, ends.mtu):
        data = noise(size)
        ends.near.fill(0, data)
        ends.far.recv(0, 40 + ends.mtu)
        ends.near.post("SendWithImm", 0, size, remote_qpn=exposed["qp_num"], imm_data=5)
        assert ends.statuses(1) == ["SUCCESS"]
        (wc,) = ends.far.wait(1, LIMIT)
        assert (wc["status"], wc["byte_len"], wc["imm_data"]) == ("SUCCESS", 40 + size, 5)
        assert ends.far.peek(40, size) == data


@pytest.mark.parametrize("size", [1, 4097, 500_000])
def test_reads_between_roce_and_soft_roce_return_the_peers_memory(ends: Ends, size: int):
    exposed = ends.connect("RC")
    data = noise(size)
    ends.far.fill(3, data)
    ends.near.post("RdmaRead", 100, size, remote_addr=exposed["addr"] + 3, rkey=exposed["rkey"])
    assert ends.statuses(1) == ["SUCCESS"]
    assert ends.near.peek(100, size) == data


def test_atomics_between_roce_and_soft_roce_change_memory_and_return_the_old_value(ends: Ends):
    exposed = ends.connect("RC")
    there = {"remote_addr": exposed["addr"], "rkey": exposed["rkey"]}
    ends.far.fill(0, (40).to_bytes(8, "little").hex())
    ends.near.post("AtomicFetchAndAdd", 0, 8, compare_add=2, **there)
    ends.near.post("AtomicCmpAndSwp", 8, 8, compare_add=42, swap=7, **there)
    ends.near.post("AtomicCmpAndSwp", 16, 8, compare_add=42, swap=9, **there)
    assert ends.statuses(3) == ["SUCCESS"] * 3
    values = bytes.fromhex(ends.near.peek(0, 24))
    assert [int.from_bytes(values[i : i + 8], "little") for i in (0, 8, 16)] == [40, 42, 7]
    assert int.from_bytes(bytes.fromhex(ends.far.peek(0, 8)), "little") == 7


@pytest.mark.parametrize("mw_type", [rp.MWType.TYPE_1, rp.MWType.TYPE_2], ids=["type 1", "type 2"])
def test_soft_roce_peers_window_is_written_within_its_bounds_only(ends: Ends, mw_type: rp.MWType):
    exposed = ends.connect("RC")
    rkey = ends.far.window(int(mw_type), 4096, 64)
    ends.near.fill(0, noise(65))
    ends.near.post("RdmaWrite", 0, 64, remote_addr=exposed["addr"] + 4096, rkey=rkey)
    assert ends.statuses(1) == ["SUCCESS"]
    assert ends.far.peek(4096, 64) == noise(65)[:128]
    if ends.far is not ends.cable.rxe:
        # Soft-RoCE does not compare a write with the window's end.
        ends.near.post("RdmaWrite", 0, 65, remote_addr=exposed["addr"] + 4096, rkey=rkey)
        assert ends.statuses(1) == ["REM_ACCESS_ERR"]


def test_send_with_inv_invalidates_the_peers_window(ends: Ends):
    exposed = ends.connect("RC")
    rkey = ends.far.window(int(rp.MWType.TYPE_2), 0, 64)
    ends.far.recv(100, 8)
    ends.near.post("SendWithInv", 0, 8, invalidate_rkey=rkey)
    assert ends.statuses(1) == ["SUCCESS"]
    (wc,) = ends.far.wait(1, LIMIT)
    assert wc["status"] == "SUCCESS"
    if ends.far is not ends.cable.rxe:
        # Soft-RoCE does not name the key.
        assert wc["invalidated_rkey"] == rkey
    ends.near.post("RdmaWrite", 0, 8, remote_addr=exposed["addr"], rkey=rkey)
    assert ends.statuses(1) == ["REM_ACCESS_ERR"]


def test_messages_arrive_in_order_across_the_wrap_of_the_psn(ends: Ends):
    """Both sides' first PSN is 256 before it."""
    near, far = ends.near.make("RC"), ends.far.make("RC")
    ends.far.connect_at(near["endpoint"], psn=0xFFFF00)
    ends.near.connect_at(far["endpoint"], psn=0xFFFF00)
    ends.near.fill(0, noise(8 * 320))
    for start in range(0, 8 * 320, 8 * 32):
        ends.near.post_writes(32, start, far["addr"], far["rkey"])
        assert ends.statuses(32) == ["SUCCESS"] * 32
    assert ends.far.peek(0, 8 * 320) == noise(8 * 320)


def test_capture_has_the_headers_of_soft_roces_packets(ends: Ends, tmp_path: Path):
    """A UDP socket does not show their IPv4 identification, which the ICRC covers."""
    path, size = tmp_path / "packets.pcapng", 20_000
    exposed = ends.connect("RC")
    there = {"remote_addr": exposed["addr"], "rkey": exposed["rkey"]}
    ends.cable.roce.capture(str(path))
    ends.near.post("RdmaWrite", 0, size, **there)
    ends.near.post("RdmaRead", 0, size, **there)
    assert ends.statuses(2) == ["SUCCESS"] * 2
    ends.cable.roce.end_capture()
    seen = read(path)
    for each in seen:
        check_headers(each.frame)
    for is_sent in (False, True):
        there_are = [each for each in seen if each.is_sent is is_sent]
        assert len(there_are) >= size // ends.mtu
    if ends.near is ends.cable.roce:
        assert any(f" wr_id 0, {size} bytes" in each.comment for each in seen)
    if seen[0].frame[0] >> 4 == 4:
        assert any(int.from_bytes(each.frame[4:6]) for each in seen if not each.is_sent)


# ---- what fails: with the status that two Soft-RoCE devices give -----------------------------


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("RdmaWrite", {"rkey": 0x123}),
        ("RdmaRead", {"rkey": 0x123}),
        ("RdmaWrite", {"remote_addr": verbs_side.SIZE - 4}),
        ("RdmaRead", {"remote_addr": verbs_side.SIZE - 4}),
        ("AtomicFetchAndAdd", {"rkey": 0x123}),
    ],
    ids=str,
)
def test_wrong_key_or_bounds_at_a_soft_roce_peer_end_with_rem_access_err(
    ends: Ends, name: str, change: dict[str, int]
):
    exposed = ends.connect("RC")
    fields = {"remote_addr": 0, "rkey": exposed["rkey"]} | change
    fields["remote_addr"] += exposed["addr"]
    ends.near.post(name, 0, 8, **fields)
    ends.near.post("Send", 0, 8)
    assert ends.statuses(2) == ["REM_ACCESS_ERR", "WR_FLUSH_ERR"]


def test_unaligned_atomic_at_a_soft_roce_peer_ends_with_rem_inv_req_err(ends: Ends):
    if ends.near is ends.cable.rxe:
        pytest.skip("Soft-RoCE's library refuses to post it")
    exposed = ends.connect("RC", checked=False)
    ends.near.post("AtomicFetchAndAdd", 0, 8, remote_addr=exposed["addr"] + 4, rkey=exposed["rkey"])
    assert ends.statuses(1) == ["REM_INV_REQ_ERR"]


def test_send_without_a_receive_at_a_soft_roce_peer_ends_with_rnr_retry_exc_err(ends: Ends):
    ends.connect("RC", rnr_retry=2)
    ends.near.post("Send", 0, 8)
    assert ends.statuses(1) == ["RNR_RETRY_EXC_ERR"]


def test_send_to_a_soft_roce_peer_waits_for_a_receive(ends: Ends):
    ends.connect("RC", rnr_retry=7)
    ends.near.fill(0, noise(5))
    ends.near.post("Send", 0, 5)
    ends.far.recv(50, 5)
    assert ends.statuses(1) == ["SUCCESS"]
    assert ends.far.peek(50, 5) == noise(5)


def test_soft_roce_peer_that_is_gone_ends_with_retry_exc_err(ends: Ends):
    ends.connect("RC", timeout=12, retry_cnt=2)
    ends.far.reset()
    ends.near.post("Send", 0, 8)
    assert ends.statuses(1) == ["RETRY_EXC_ERR"]


def test_send_longer_than_the_receive_of_a_soft_roce_peer_fails_on_both_sides(ends: Ends):
    ends.connect("RC")
    ends.far.recv(0, 8)
    ends.near.post("Send", 0, 9)
    (status,) = ends.statuses(1)
    # Soft-RoCE answers with an error of its own.
    assert status in ("REM_INV_REQ_ERR", "REM_OP_ERR")
    (wc,) = ends.far.wait(1, LIMIT)
    assert wc["status"] == ("LOC_QP_OP_ERR" if ends.far is ends.cable.rxe else "LOC_LEN_ERR")


# ---- ping-pong, with the stock programs on Soft-RoCE ---------------------------------------------

ITERS = "50"
PINGPONG_PORT = 18515
QP_TYPES = pytest.mark.parametrize("qp_type", ["rc", "uc", "ud"])


def stock(cable: Cable, qp_type: str, *more: str) -> list[str]:
    command = [f"ibv_{qp_type}_pingpong", "-d", RXE, "-g", cable.gid_index, "-n", ITERS]
    return [*command, "-e", "-c", *more]


def ours(cable: Cable, qp_type: str, *more: str) -> list[str]:
    command = ["rdmapost", "pingpong", "-d", cable.device, "--qp-type", qp_type, "-n", ITERS]
    return [*command, "-c", "-e", "--timeout", "60", "--json", *more]


@QP_TYPES
def test_pingpong_client_on_roce_works_with_the_stock_server(cable: Cable, qp_type: str):
    with Remote(cable.theirs, *stock(cable, qp_type)) as server:
        wait_for_port(PINGPONG_PORT)
        with Remote(cable.ours, *ours(cable, qp_type, "10.9.0.1")) as client:
            ran = client.ended()
        assert ran.status == 0, ran
        ended = server.ended()
    doc = json.loads(ran.out)
    assert (doc["validated"], doc["round_trips"]) == (True, int(ITERS))
    assert ended.status == 0, ended
    assert f"{ITERS} iters in" in ended.out
    assert "invalid data" not in ended.out + ended.err


@QP_TYPES
def test_pingpong_server_on_roce_works_with_the_stock_client(cable: Cable, qp_type: str):
    with Remote(cable.ours, *ours(cable, qp_type, "--wait", "60")) as server:
        server.until("err", "waiting for a client")
        with Remote(cable.theirs, *stock(cable, qp_type, "10.9.0.2")) as client:
            ended = client.ended()
        assert ended.status == 0, ended
        ran = server.ended()
    assert f"{ITERS} iters in" in ended.out
    assert ran.status == 0, ran
    assert json.loads(ran.out)["validated"] is True

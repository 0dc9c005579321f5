"""``rdmapost explain`` of what programs print: lines as they appear, and whole logs."""

from __future__ import annotations

import ctypes
import errno
import json
import re
import subprocess
import sys
import time

import pytest
from support.cli_runner import run

import rdmapost as rp
from rdmapost import EventType, WCStatus
from rdmapost.explain import explain, explain_lines

LINES = [
    # the kernel's users of verbs
    ("nvme nvme0: RECV for CQE 0x00 failed with status WR flushed (5)", ["WR_FLUSH_ERR"]),
    ("ib_srp: failed RECV status WR flushed (5) for CQE 00", ["WR_FLUSH_ERR"]),
    (
        "nvme nvme0: SEND for CQE 0x00 failed with status invalid request error (9)",
        ["REM_INV_REQ_ERR"],
    ),
    ("isert: isert_qp_event_callback: event: QP access error (3)", ["QP_ACCESS_ERR"]),
    ("ibv_post_send failed: 12", ["post_send", "ENOMEM"]),
    ("ibv_post_send: 12", ["ENOMEM"]),
    ("ibv_post_send() = 12", ["ENOMEM"]),
    ("ibv_post_recv returned error code 22, giving up", ["EINVAL"]),
    ("ibv_modify_qp to RTR failed (22)", ["modify_qp_to_rtr", "EINVAL"]),
    ("ibv_modify_qp(RTS) failed with 22: giving up", ["modify_qp_to_rts", "EINVAL"]),
    ("ibv_modify_qp returned 22", ["EINVAL"]),
    # ibv_rc_pingpong and its relatives
    ("Failed status transport retry counter exceeded (12) for wr_id 2", ["RETRY_EXC_ERR"]),
    ("Failed status RNR retry counter exceeded (13) for wr_id 2", ["RNR_RETRY_EXC_ERR"]),
    # perftest
    ("Completion with error 12: wr_id 0 syndrom 0x81", ["RETRY_EXC_ERR"]),
    (" Failed status 4: wr_id 0 syndrom 0x51", ["LOC_PROT_ERR"]),
    ("Failed status 12: wr_id 0 syndrom 0x81 scnt=128, ccnt=0", ["RETRY_EXC_ERR"]),
    ("Completion with error at client", ["completion"]),
    (" Completion with error at server.", ["completion"]),
    (" Unable to Connect the HCA's through the link", ["modify_qp"]),
    (" Couldn't get device attributes", ["query_device_ex"]),
    ("Unable to open file descriptor for socket connection", ["exchange"]),
    ("mlx5: cqe with status: 0x0c", ["RETRY_EXC_ERR"]),
    # NCCL
    ("status=12 opcode=129 len=0 vendor err 129", ["RETRY_EXC_ERR"]),
    (
        "node1:3468:3905 [4] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<54862> with "
        "status=12 opcode=32616 len=0 vendor err 129 (Recv) localGid ::ffff:10.0.0.1",
        ["RETRY_EXC_ERR"],
    ),
    (
        "NET/IB: Got completion from peer 10.0.0.2<51> with status=IBV_WC_WR_FLUSH_ERR(5) "
        "opcode=IBV_WC_SEND(0) reqSize=0 vendor_err=249 req_type=Recv",
        ["WR_FLUSH_ERR"],
    ),
    (
        "NCCL WARN NET/IB : Got completion from peer fe80::966d:ae03%ib0<53249> with error 4, "
        "opcode 32564, len 32564, vendor err 81 (Send)",
        ["LOC_PROT_ERR"],
    ),
    ("NET/IB : Async fatal event on mlx5_0: local catastrophic error", ["DEVICE_FATAL"]),
    ("Call to ibv_modify_qp failed with error Connection timed out errno 110", ["ETIMEDOUT"]),
    # UCX
    (
        "[n1:19546:0:19546] ib_mlx5_log.c:139  Transport retry count exceeded on mlx5_0:1/IB "
        "(synd 0x15 vend 0x81 hw_synd 0/0)",
        ["RETRY_EXC_ERR"],
    ),
    ("ib_mlx5_log.c:177  Remote access on mlx5_0:1/RoCE (synd 0x13 vend 0x88)", ["REM_ACCESS_ERR"]),
    (
        "send completion with error: local protection error syndrome 0x53 vendor 0x4",
        ["LOC_PROT_ERR"],
    ),
    # Open MPI
    (
        "error polling LP CQ with status RETRY EXCEEDED ERROR status number 12 for wr_id 5e8a80 "
        "opcode 1  vendor error 129 qp_idx 0",
        ["RETRY_EXC_ERR"],
    ),
    # libfabric
    ("<warn> fi_cq_readerr: err: 5, prov_err: remote access error (10)", ["REM_ACCESS_ERR"]),
    ("Completion with error: Input/output error (err 5 prov_errno 12).", ["RETRY_EXC_ERR", "EIO"]),
    ("Completion with error: Operation canceled (err 125 prov_errno 5).", ["WR_FLUSH_ERR"]),
    ("err: 5 (Input/output error), prov_err: 12 (unknown)", ["RETRY_EXC_ERR", "EIO"]),
    # This library
    ("rdmapost.WaitTimeout: 0 of 1 completions came within 5 s", ["WaitTimeout"]),
    ("0 of 3 completions came within 0.1 s", ["WaitTimeout"]),
    ("rdmapost.InUseError: MR of 64 bytes is used by QP 0x11", ["InUseError"]),
    ("rdmapost.PostError: ibv_post_send: the queue is full [ENOMEM]", ["ENOMEM"]),
    # MVAPICH, SPDK
    ("Got completion with error IBV_WC_RETRY_EXC_ERR, vendor code=0x81", ["RETRY_EXC_ERR"]),
    ("CQ error on CQ 0x1, Request 0x2 (12): transport retry counter exceeded", ["RETRY_EXC_ERR"]),
    # The kernel, Python and C
    ("rdma_rxe: rxe_create_qp: failed with err = -22", ["EINVAL"]),
    ("[Errno 12] Cannot allocate memory", ["ENOMEM"]),
    ("OSError: [Errno 13] Permission denied: '/dev/infiniband/uverbs0'", ["EACCES"]),
    ("Couldn't register MR: Cannot allocate memory", ["reg_mr", "ENOMEM"]),
    ("Unable to register MR: Cannot allocate memory", ["reg_mr", "ENOMEM"]),
    ("libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes.", ["reg_mr", "ENOMEM"]),
    (
        "UCX ERROR ibv_reg_mr(address=0x7f0000000000, length=4096, access=0xf) failed: "
        "Cannot allocate memory",
        ["reg_mr", "ENOMEM"],
    ),
    ("UCX ERROR ibv_reg_mr(address=0x7f00, length=64, access=0xf) failed: Bad address", ["EFAULT"]),
    ("NCCL WARN Call to ibv_reg_mr_iova2 failed with error Bad address", ["EFAULT"]),
    ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", ["reg_mr", "ENOMEM"]),
    (
        "NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory",
        ["create_cq", "ENOMEM"],
    ),
    ("UCX ERROR ibv_create_cq(cqe=4096) failed: Cannot allocate memory", ["create_cq", "ENOMEM"]),
    ("ibv_reg_mr: Cannot allocate memory", ["reg_mr", "ENOMEM"]),
    ("rdmapost.VerbsError: ibv_reg_mr: ENOMEM (Cannot allocate memory)", ["reg_mr", "ENOMEM"]),
    (
        "libibverbs: Warning: no userspace device-specific driver found for "
        "/sys/class/infiniband_verbs/uverbs0",
        ["NoDeviceError"],
    ),
    ("libibverbs: Warning: couldn't read uverbs ABI version.", ["NoDeviceError"]),
    (" Failed to modify QP 0x11 to RTR", ["modify_qp_to_rtr"]),
    ("Failed to modify QP to INIT, ret=22", ["modify_qp_to_init", "EINVAL"]),
    ("No IB devices found", ["NoDeviceError"]),
    ("rdmapost: there is no RDMA device nope: this machine has none", ["NoDeviceError"]),
    ("no RDMA device: using soft0, the software device of this process", ["NoDeviceError"]),
    (
        "rdmapost.NoRdmaError: libibverbs cannot be loaded (/nope.so: cannot open shared object "
        "file: No such file or directory); install rdma-core",
        ["NoRdmaError"],
    ),
    (" Unable to find the Infiniband/RoCE device", ["NoDeviceError"]),
    ("ib_mlx5_log.c:177  Bad response on mlx5_0:1/RoCE (synd 0x10)", ["BAD_RESP_ERR"]),
    ("ib_mlx5_log.c:177  Local access on mlx5_0:1/RoCE (synd 0x11)", ["LOC_ACCESS_ERR"]),
    ("ib_mlx5_log.c:177  Remote QP on mlx5_0:1/RoCE (synd 0x14)", ["REM_OP_ERR"]),
    ("cma event RDMA_CM_EVENT_REJECTED, error 28", ["REJECTED"]),
    ("cma event RDMA_CM_EVENT_UNREACHABLE, error -110", ["UNREACHABLE", "ETIMEDOUT"]),
    ("ucp_ep.c:1 UCX ERROR no remote address: Destination is unreachable", ["ENETUNREACH"]),
    (
        'The InfiniBand retry count between two MPI processes has been exceeded. "Retry count"',
        ["RETRY_EXC_ERR"],
    ),
    ("NCCL INFO NET/IB : No device found.", ["NoDeviceError"]),
    ("IB WC error 4", ["LOC_PROT_ERR"]),
    ("mlx5_devx_create failed: Remote I/O error", ["EREMOTEIO"]),
    ("mlx5_0:dump_cqe:277:(pid 0): dump error cqe", ["vendor_err"]),
    ("work request failed, vendor err 129", ["vendor_err"]),
    ("rpcrdma: connection to 10.0.0.1:20049 closed (-103)", ["ECONNABORTED"]),
    ("rdmapost.connect.ConnectTimeout: 10.0.0.1:1 did not answer", ["ConnectTimeout"]),
    ("ConnectError: 127.0.0.1:1 refused the connection: start 'rdmapost serve'", ["ConnectError"]),
    ("ConnectTimeout: x did not answer within 3 s", ["ConnectTimeout"]),
    ("ConnectTimeout: x accepted the connection but did not answer within 3 s", ["ConnectTimeout"]),
    ("ConnectTimeout: x did not accept a request within 5 s, but may", ["ConnectTimeout"]),
    ("ConnectTimeout: host x: the name service did not answer within 5 s", ["ConnectTimeout"]),
    ("ConnectTimeout: other threads' requests to x took more than 6 s", ["ConnectTimeout"]),
    ("ConnectError: x refused: wrong token", ["ConnectError"]),
    ("ConnectError: host x cannot be found: no such name", ["ConnectError"]),
    # As the command and its server print them
    ("rdmapost: 127.0.0.1:1 refused: wrong token", ["ConnectError"]),
    ("127.0.0.1:1 refused: wrong token", ["ConnectError"]),
    ("refused: wrong token", ["ConnectError"]),
    ("refused 127.0.0.1:1: wrong token", ["ConnectError"]),
    ("refused ::1:1: the server requires a token, but the client sent none", ["ConnectError"]),
    ("rdmapost: 127.0.0.1:1 refused the connection: start 'rdmapost serve'", ["ConnectError"]),
    ("rdmapost: host x cannot be found: no such name", ["ConnectError"]),
    ("rdmapost: x:1 closed the connection and did not answer", ["ConnectError"]),
    ("rdmapost: x:1 cannot be reached: No route to host", ["EHOSTUNREACH"]),
    ("rdmapost: x:1 did not answer within 3 s", ["ConnectTimeout"]),
    ("rdmapost: host x: the name service did not answer within 5 s", ["ConnectTimeout"]),
    ("rdmapost: other threads' requests to x took more than 6 s", ["ConnectTimeout"]),
    ("ConnectError: x closed the connection and did not answer", ["ConnectError"]),
    ("RdmaError: the CQ uses a shared completion channel", ["RdmaError"]),
    ("PingpongError: the other side has ended", ["PingpongError"]),
    # A failed move is explained, not its target state
    ("Failed to modify QP to RTR", ["modify_qp_to_rtr"]),
    ("Failed to modify QP to RTS", ["modify_qp_to_rts"]),
    ("Failed to modify QP to INIT", ["modify_qp_to_init"]),
    (" Unable to modify QP 57 to RTR", ["modify_qp_to_rtr"]),
    (" Failed to modify RC QP to RTS", ["modify_qp_to_rts"]),
    ("ib0: failed to modify QP to RTR: -110", ["modify_qp_to_rtr", "ETIMEDOUT"]),
    ("ib0: failed to modify QP to RTR, ret = -22", ["modify_qp_to_rtr", "EINVAL"]),
    (
        "[Handshake] Failed to modify QP to RTR, check mtu, gid: Connection timed out [110]",
        ["modify_qp_to_rtr", "ETIMEDOUT"],
    ),
    ("failed to modify QP state to RTR", ["modify_qp_to_rtr"]),
    ("Could not modify QP to RTR: Invalid argument", ["modify_qp_to_rtr", "EINVAL"]),
    ("error modifying QP to RTS", ["modify_qp_to_rts"]),
    ("QP RESET->INIT failed", ["modify_qp_to_init"]),
    ("RTR failed", ["modify_qp_to_rtr"]),
    ("error: IBV_QPS_RTS", ["modify_qp_to_rts"]),
    ("failed to move to RTS", ["modify_qp_to_rts"]),
    ("isert: Failed to modify QP state to ERR", ["modify_qp"]),
    ("Unable to post SEND to RTS QP", ["post_send"]),
    ("failed to post RDMA_READ", ["post_send"]),
    ("ibv_post_send failed for QP 22", ["post_send"]),
    # ibv_*_pingpong, perftest
    ("IB device mlx5_9 not found", ["NoDeviceError"]),
    ("poll CQ failed -1", ["poll_cq"]),
    ("ibv_poll_cq failed with error 22", ["poll_cq"]),
    ("Couldn't get context for mlx5_0", ["open_device"]),
    ("Couldn't allocate PD", ["alloc_pd"]),
    ("Couldn't register MR", ["reg_mr"]),
    ("Couldn't create CQ", ["create_cq"]),
    ("Couldn't create QP", ["create_qp"]),
    (" Unable to create QP.", ["create_qp"]),
    ("Couldn't get local LID", ["get_lid"]),
    ("can't read sgid of index 3", ["query_gid"]),
    ("Couldn't post receive (0)", ["post_recv"]),
    ("Failed to create AH", ["create_ah"]),
    ("Couldn't connect to 10.0.0.1:18515", ["exchange"]),
    ("client read: Success", ["exchange"]),
    ("Couldn't read remote address", ["exchange"]),
    ("Failed to get IB devices list", ["get_device_list"]),
    ("IB device 'rxe0' wasn't found", ["NoDeviceError"]),
    ("Couldn't query device for its features", ["query_device_ex"]),
    ("Couldn't allocate work buf.", ["ENOMEM"]),
    ("Couldn't create completion channel", ["create_comp_channel"]),
    ("Couldn't prefetch MR(95). Continue anyway", ["advise_mr"]),
    ("Couldn't create SRQ", ["create_srq"]),
    ("Couldn't get SRQ num", ["get_srq_num"]),
    ("Couldn't Open the XRC Domain 3", ["open_xrcd"]),
    ("Couldn't Open the XRC Domain 95", ["open_xrcd", "EOPNOTSUPP"]),
    ("Couldn't create recv CQ", ["create_cq"]),
    ("Couldn't create recv QP[3] errno 3", ["create_qp"]),
    ("Couldn't create send QP[0] errno 22", ["EINVAL"]),
    ("Couldn't create QP[3]", ["create_qp"]),
    ("Failed to modify recv QP[3] to RTR", ["modify_qp_to_rtr"]),
    ("Couldn't connect to remote QP", ["modify_qp"]),
    ("Couldn't send local address", ["exchange"]),
    ("Couldn't send/recv local address", ["exchange"]),
    ("0/3: Couldn't read remote termination ack", ["exchange"]),
    ("accept() failed for client 2", ["exchange"]),
    ("Failed to get cq_event", ["get_cq_event"]),
    ("parse WC failed 1", ["parse_wc"]),
    ("Error polling cq -1", ["poll_cq"]),
    ("Work completion error 12", ["RETRY_EXC_ERR"]),
    ("Failed to post receive to SRQ", ["post_recv"]),
    ("Couldn't destroy INI QP[3]", ["destroy_qp"]),
    ("Couldn't destroy SRQ", ["destroy_srq"]),
    ("Couldn't destroy recv CQ", ["destroy_cq"]),
    ("Couldn't destroy completion channel", ["destroy_comp_channel"]),
    ("Couldn't destroy AH", ["destroy_ah"]),
    ("Couldn't deregister MR", ["dereg_mr"]),
    ("Couldn't deallocate PD", ["dealloc_pd"]),
    ("Couldn't close the XRC Domain", ["close_xrcd"]),
    ("Couldn't release context", ["close_device"]),
    # Others
    ("failed to attach QP to multicast group", ["attach_mcast"]),
    ("Failed to bind memory window", ["bind_mw"]),
    ("Unable to resize CQ", ["resize_cq"]),
    ("could not allocate MW", ["alloc_mw"]),
    ("ibv_alloc_mw(type=1) failed", ["alloc_mw"]),
    (" Port number 1 state is Down", ["port-down"]),
    # libibverbs, whose errno is misleading
    (
        "libibverbs: Warning: couldn't load driver 'librxe-rdmav34.so': librxe-rdmav34.so: cannot "
        "open shared object file: No such file or directory",
        ["load_driver"],
    ),
    # librdmacm and its programs
    ("cma event RDMA_CM_EVENT_ADDR_ERROR, error -19", ["ADDR_ERROR", "ENODEV"]),
    ("cma event RDMA_CM_EVENT_ROUTE_ERROR, error -110", ["ROUTE_ERROR", "ETIMEDOUT"]),
    ("cmatose: event: RDMA_CM_EVENT_CONNECT_ERROR, error: 0", ["CONNECT_ERROR"]),
    ("udaddy: event: RDMA_CM_EVENT_DISCONNECTED, error: 0", ["DISCONNECTED"]),
    ("RDMA_CM_EVENT_DEVICE_REMOVAL", ["DEVICE_REMOVAL"]),
    ("cma_event type RDMA_CM_EVENT_ADDR_RESOLVED cma_id 0x5 (parent)", ["ADDR_RESOLVED"]),
    ("Event: RDMA_CM_EVENT_REJECTED; error: -111.", ["REJECTED", "ECONNREFUSED"]),
    ("rdma_resolve_addr: No such device", ["ADDR_ERROR", "ENODEV"]),
    ("waiting for addr/route resolution state 2", ["ADDR_ERROR"]),
    ("wait for CONNECTED state 10", ["rdma_connect"]),
    ("librdmacm: Fatal: no RDMA devices found", ["NoDeviceError"]),
    ("CMA: unable to open /dev/infiniband/rdma_cm", ["rdma_cm"]),
    # mlx5, rxe
    (
        "mlx5_core 0000:3b:00.0: mlx5_cmd_out_err:808:(pid 12): CREATE_QP(0x500) op_mod(0x0) "
        "failed, status bad parameter(0x3), syndrome (0x4bb88f), err(-22)",
        ["EINVAL"],
    ),
    (
        "wait_func:1157:(pid 5): ENABLE_HCA(0x104) timeout. Will cause a leak of a command "
        "resource",
        ["ETIMEDOUT"],
    ),
    ("device's health compromised - reached miss count", ["DEVICE_FATAL"]),
    ("cq_err_event_notifier:517:(pid 0): CQ error on CQN 0x48a, syndrome 0x1", ["CQ_ERR"]),
    ("rdma_rxe: rxe_qp_chk_cap: invalid send wr = 128 > 64", ["create_qp"]),
    ("rdma_rxe: rxe_cq_chk_attr: cqe(100000) > max_cqe(32767)", ["create_cq"]),
    ("rdma_rxe: qp#17 non-flush error status = 10", ["REM_ACCESS_ERR"]),
    # docs/guides/packets.md
    ("b->a  PSN 8  ACKNOWLEDGE, syndrome 0x60", ["AETH syndrome 0x60"]),
    ("b->a  PSN 6  ACKNOWLEDGE, syndrome 0x2c", ["AETH syndrome 0x2c"]),
    ("b->a  PSN 0  RDMA_READ_RESPONSE_ONLY, syndrome 0x1f", ["AETH syndrome 0x1f"]),
    ("b->a  PSN 0  ACKNOWLEDGE, syndrome 0x81", ["vendor_err"]),
    ("mlx5: cqe at PSN: syndrome 0x13", ["vendor_err"]),
    # This library
    (
        "ValueError: RESET to INIT also needs pkey_index on RC queue pairs (ibv_modify_qp(3))",
        ["modify_qp"],
    ),
    ("ValueError: REMOTE_WRITE needs LOCAL_WRITE too (ibv_reg_mr(3))", ["reg_mr"]),
    # ibv_devinfo, rdma link
    ("\t\t\tstate:\t\t\tPORT_DOWN (1)", ["DOWN"]),
    ("\t\t\tstate:\t\t\tPORT_ACTIVE (4)", ["ACTIVE"]),
    # rdmapost doctor
    ("PROBLEM  port-down (rxe0 port 1)", ["port-down"]),
    ("port-down (rxe0 port 1)", ["port-down"]),
    ("warning  memlock (machine)", ["memlock"]),
    ("memlock (machine)", ["memlock"]),
    ("receives (RC QP 0x11 on soft0)", ["receives"]),
    ("ok       port-active (soft0 port 1)", ["port-active"]),
    ("the doctor found psn-mismatch.", ["psn-mismatch"]),
    ("WARNING: PSN-MISMATCH", ["psn-mismatch"]),
    ("link mlx5_0/1 state INIT physical_state LINK_UP netdev eth2", ["INIT"]),
]


@pytest.mark.parametrize(("line", "names"), LINES, ids=[line[:40] for line, _ in LINES])
def test_log_line_is_explained_by_the_names_in_it(line: str, names: list[str]) -> None:
    mentioned = [mention.explanation.name for mention in explain_lines([line])]
    found = set(mentioned)
    assert mentioned[0] == names[0]
    assert set(names) <= found
    assert found <= {*names, "EIO"}
    ran = run("explain", line)
    assert ran.code == 0
    assert f"{names[0]}: " in ran.out


@pytest.mark.parametrize(
    ("syndrome", "meaning"),
    [
        (0x1F, "ACK: "),
        (0x2C, "RNR NAK: .*min_rnr_timer=12, 0.64 ms"),
        (0x60, "NAK, PSN sequence error"),
        (0x61, "NAK, .*REM_INV_REQ_ERR"),
        (0x62, "NAK, .*REM_ACCESS_ERR"),
        (0x63, "NAK, .*REM_OP_ERR"),
        (0x64, "NAK, invalid RD request"),
    ],
)
def test_syndrome_of_an_acknowledgement_is_explained(syndrome: int, meaning: str) -> None:
    (mention,) = explain_lines([f"b->a  PSN 1  ACKNOWLEDGE, syndrome {syndrome:#x}"])
    assert re.match(meaning, mention.explanation.meaning)


def test_unquoted_line_is_explained_like_a_quoted_one() -> None:
    line = "Failed status transport retry counter exceeded (12) for wr_id 2"
    assert run("explain", *line.split()) == run("explain", line)


def test_state_named_beside_a_failure_is_not_explained() -> None:
    for args in (["RTR failed"], ["RTR", "failed"], ["Failed", "to", "modify", "QP", "to", "RTR"]):
        ran = run("explain", *args)
        assert ran.code == 0
        assert ran.out.startswith("modify_qp_to_rtr: failure")
        assert "GID index" in ran.out.split("1. ")[1].split("2. ")[0]


def test_events_of_every_connection_are_left_out_of_a_log() -> None:
    log = [
        "cma_event type RDMA_CM_EVENT_ADDR_RESOLVED",
        "RDMA_CM_EVENT_DISCONNECTED",
        "cma event RDMA_CM_EVENT_REJECTED, error 8",
    ]
    assert [one.explanation.name for one in explain_lines(log)] == ["REJECTED", "DISCONNECTED"]


def test_repeated_log_lines_are_counted_and_cost_little() -> None:
    line = "NCCL INFO Channel 00/02 : node 0[0] -> 1[0] via P2P/IPC status=12 wr_id 7 " * 20
    distinct = [f"{line}{number}" for number in range(1500)]
    started = time.process_time()
    assert explain_lines(distinct)[0].count == len(distinct)
    once = time.process_time() - started
    started = time.process_time()
    assert explain_lines([line] * len(distinct))[0].count == len(distinct)
    assert time.process_time() - started < once / 4


def test_line_with_letters_that_grow_in_lower_case_is_explained() -> None:
    line = "\u0130\u0130\u0130 Local Protection Error, then [Errno 12]"
    assert [one.explanation.name for one in explain_lines([line])] == ["LOC_PROT_ERR", "ENOMEM"]


def test_several_log_lines_and_names_are_explained_in_order() -> None:
    ran = run("explain", "--json", "[Errno 12] Cannot allocate memory", "RNR_RETRY_EXC_ERR")
    assert [one["name"] for one in ran.doc["explanations"]] == ["ENOMEM", "RNR_RETRY_EXC_ERR"]


def test_messages_of_this_library_are_explained(context: rp.Context) -> None:
    with rp.PD(context) as pd, rp.CQ(context) as cq, rp.QP(pd, rp.QPType.RC, cq) as qp:
        with pytest.raises(rp.PostError) as refused:
            qp.post_send(rp.Send([]))
        [mention] = explain_lines([str(refused.value)])
    assert mention.explanation.name == errno.errorcode[refused.value.errno]


@pytest.mark.parametrize("place", [1, 2, 12, 110])
def test_index_of_a_work_request_in_a_log_line_is_not_taken_for_an_errno(place: int) -> None:
    line = f"ibv_post_send: work request {place} of {place} (index {place - 1}): 9 SGEs [EINVAL]"
    assert [mention.explanation.name for mention in explain_lines([line])] == ["EINVAL"]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "INFO: status 200, 12 errors, retry 3",
        "Fatal error in MPI_Init: see above",
        "NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
        "# bytes  iterations  12 13 22",
        "HTTP/1.1 status=404, error 1204",
        "eth0: port active",
        "sda: port error",
        "the path migrated",
        "mpirun detected that one or more processes exited with non-zero status 1",
        "Child process exit status: 11",
        "systemd[1]: nfs.service: Main process exited, code=exited, status=12/n/a",
        "http status 12",
        "link status 4",
        "invalid request error",
        "poll_cq returned -1",
        "urllib3.exceptions.ProtocolError: no luck",
        "mlx5_core: CREATE_QP failed, syndrome (0x4bb88f)",
        "ibv_post_send: 5 work requests posted",
        "ibv_post_send ok, 2 in flight",
        "ibv_modify_qp: QP 22 to RTS",
        "ibv_query_port 1 says nothing",
        "modify QP to RTR",
        "modify QP 57 to RTS done, no retry",
        "QP 5: RTR -> RTS",
        "device rejected, disconnected, connect error",
        "httpx.ConnectError: [SSL] no luck",
        "httpx.ConnectError: 10.0.0.1:443 refused",
        "httpx.ConnectError: x refused: wrong token",
        "the proxy refused: wrong token",
        "127.0.0.1:1 refused the request",
        "ConnectError: no luck",
        "rdmapost: no luck",
        "ConnectError: All connection attempts failed",
        "ConnectTimeout: the host did not answer in time",
        "polled CQ 5 times without failures in 12 s",
        "port number 1 state is Active",
        "USB device not found",
        "nginx: accept() failed (24: Too many connections)",
        "accept() failed by policy",
        "ibv_create_srq: SRQ 5 created",
        "2026-11-27 error in line 22",
        "timeout (30 s)",
        "WARNING: timeout (30 s)",
        "peer (10.0.0.1) left",
        "--path-mtu=1024 rnr-retry=7 lib/port-down",
        "ok       machine: memlock",
    ],
)
def test_log_line_without_an_error_gets_no_explanation(line: str) -> None:
    assert explain_lines([line]) == ()


REPORT = """\
PROBLEM  port-down (rxe0 port 1)
         DOWN: the port carries no traffic
         -> ip link set eth0 up
info     no-rdma-device (machine)
         there is no RDMA device on this machine
ok       machine: libibverbs, memlock
ok       RC QP 0x11 on soft0: qp-state, gid, route, path-mtu, peer, timeout,
         rnr-retry, min-rnr-timer, max-rd-atomic, outstanding, receives, cq,
         access
ok       port-active (soft0 port 1)
         ACTIVE

1 problem, 0 warnings
"""


def test_what_an_ok_finding_says_is_not_a_failure() -> None:
    lines = [
        "ok: port-active: rxe0 port 1 is ACTIVE",
        "ok: timeout: timeout=17 x 7 = 3.76 s until RETRY_EXC_ERR",
        "ok       rnr-retry (RC QP 0x11 on soft0)",
        "         rnr_retry=6 = 3.84 ms until RNR_RETRY_EXC_ERR",
        "ok       rxe0 port 1: mtu, rmem-max, port-active,",
        "         path-mtu",
    ]
    problem = "problem: port-active: there is another port"
    names = [mention.explanation.name for mention in explain_lines(lines)]
    assert names == ["port-active", "RETRY_EXC_ERR", "rnr-retry", "RNR_RETRY_EXC_ERR", "path-mtu"]
    (found,) = explain_lines([*lines, problem])
    assert (found.explanation.name, found.line) == ("port-active", problem)
    assert (found.number, found.count) == (7, 1)
    lines += ["RETRY_EXC_ERR", "         RNR_RETRY_EXC_ERR"]
    names = [mention.explanation.name for mention in explain_lines(lines)]
    assert names == ["RETRY_EXC_ERR", "RNR_RETRY_EXC_ERR"]


def test_report_of_doctor_is_explained_by_its_findings() -> None:
    names = [mention.explanation.name for mention in explain_lines(REPORT.splitlines())]
    assert names == ["port-down", "no-rdma-device"]
    ran = piped(REPORT.encode())
    assert ran.returncode == 0
    assert "port-down: finding of a diagnosis" in ran.stdout


def test_mentions_are_counted_and_the_flushed_ones_come_last() -> None:
    flushed = "Failed status Work Request Flushed Error (5) for wr_id 1"
    failed = "Failed status 12: wr_id 0"
    mentions = explain_lines(["start", flushed, failed, flushed])
    assert [(m.explanation.name, m.number, m.count) for m in mentions] == [
        ("RETRY_EXC_ERR", 3, 1),
        ("WR_FLUSH_ERR", 2, 2),
    ]
    assert mentions[1].line == flushed


def piped(log: bytes, *args: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rdmapost.cli", "explain", *args],
        input=log,
        capture_output=True,
        timeout=60,
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


LOG = b"""\
NCCL INFO \xff\xfe bootstrap
NCCL WARN NET/IB : Got completion from peer with status=12 opcode=0 len=0 vendor err 129
NCCL WARN NET/IB : Got completion from peer with status=12 opcode=0 len=0 vendor err 129
NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory
"""


def test_status_after_perftests_completion_with_error_comes_first() -> None:
    log = (" Completion with error at client", " Failed status 12: wr_id 0 syndrom 0x81")
    names = [mention.explanation.name for mention in explain_lines(log)]
    assert names == ["RETRY_EXC_ERR", "completion"]


@pytest.mark.parametrize("args", [[], ["-"]], ids=["without arguments", "dash"])
def test_log_on_standard_input_is_explained(args: list[str]) -> None:
    ran = piped(LOG, *args)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("line 2, and 1 more: NCCL WARN NET/IB")
    assert "RETRY_EXC_ERR: completion status 12" in ran.stdout
    assert "line 4: NCCL WARN Call to ibv_reg_mr" in ran.stdout
    assert "ENOMEM: errno 12" in ran.stdout


def test_log_on_standard_input_is_explained_in_json() -> None:
    doc = json.loads(piped(LOG, "--json").stdout)
    assert [(one["name"], one["number"], one["count"]) for one in doc["mentions"]] == [
        ("RETRY_EXC_ERR", 2, 2),
        ("reg_mr", 4, 1),
        ("ENOMEM", 4, 1),
    ]
    assert [one["name"] for one in doc["explanations"]] == ["RETRY_EXC_ERR", "reg_mr", "ENOMEM"]


def test_memory_that_cannot_be_registered_is_first_about_the_limit_on_locked_memory() -> None:
    (first, _) = explain_lines(["Unable to register MR: Cannot allocate memory"])
    assert "RLIMIT_MEMLOCK" in first.explanation.causes[0]


def test_wrong_token_is_a_cause_of_connect_error() -> None:
    (found,) = explain_lines(["ConnectError: 127.0.0.1:18600 refused: wrong token"])
    assert any("token" in cause for cause in found.explanation.causes)


def test_log_without_an_error_fails_in_one_line() -> None:
    ran = piped(b"all is well\n")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == "rdmapost: standard input names no status, errno, event or finding\n"


def test_empty_standard_input_lists_the_names() -> None:
    assert "completion status:\n" in piped(b"").stdout


def test_every_text_of_libibverbs_is_known() -> None:
    """Alone, and within a line that a program prints."""
    library = ctypes.CDLL("libibverbs.so.1")
    for function, members, line in (
        ("ibv_wc_status_str", WCStatus, "Failed status {} for wr_id 3"),
        ("ibv_event_type_str", EventType, "got async event: {} on port 1"),
    ):
        text_of = getattr(library, function)
        text_of.restype = ctypes.c_char_p
        for member in members:
            text = text_of(member).decode()
            if text == "unknown" or member is WCStatus.SUCCESS:
                continue
            assert member.name in [one.name for one in explain(text)], text
            assert [one.explanation.name for one in explain_lines([line.format(text)])] == [
                member.name
            ]


def test_argument_of_several_lines_is_explained_line_by_line() -> None:
    lines = "first: Failed status transport retry counter exceeded\nthen: ret=-22"
    found = run("explain", "--json", lines).doc["explanations"]
    assert [one["name"] for one in found] == ["RETRY_EXC_ERR", "EINVAL"]

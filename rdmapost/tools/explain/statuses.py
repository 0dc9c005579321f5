"""Explanations of completion statuses (ibv_poll_cq(3))."""

from __future__ import annotations

from functools import partial

from ...enums import WCStatus
from .model import Explanation, explanation_of

_IBA = "IBA vol. 1, 11.6.2 (completion return status)"
_POLL = "ibv_poll_cq(3), DESCRIPTION"

_status = partial(explanation_of, see=(_POLL, _IBA))

STATUSES: tuple[Explanation, ...] = (
    _status(
        WCStatus.SUCCESS,
        "The work request is done and its buffers are yours again; so is every unsignaled one "
        "posted before it to the same send queue. What SUCCESS says about the peer depends on "
        "the QP type: on RC and XRC the peer's device has acknowledged the message, which does "
        "not mean that the peer's program has seen it; on UC, UD and RAW_PACKET it only means "
        "that the message has left.",
        causes=(
            "All is well. If the peer still saw nothing, on RC: an RDMA_WRITE without immediate "
            "data causes no completion there; the peer must poll the memory or be notified.",
            "On UD: a wrong Q_Key or no receive silently loses the message.",
            "On UC: a lost packet, a wrong rkey or a missing receive silently loses the whole "
            "message too.",
        ),
        look_at=(
            "byte_len and wc_flags of the receive completion: imm_data and invalidated_rkey "
            "are valid only with WITH_IMM and WITH_INV.",
            "qp.outstanding: the work requests that have not completed.",
        ),
        soft_roce="A datagram longer than the path MTU ends with SUCCESS, and nothing is sent.",
        see=("ibv_poll_cq(3), DESCRIPTION", "ibv_post_send(3), NOTES"),
    ),
    _status(
        WCStatus.LOC_LEN_ERR,
        "This side found an invalid length. On a receive: the message was longer than the SGEs of "
        "the receive that it consumed; the sender of an RC message gets REM_INV_REQ_ERR "
        "for it. On a send: the message is longer than the QP may send. An RC queue pair is in "
        "ERR afterwards, on both sides.",
        causes=(
            "On a receive: the buffers of this receive are too small. Receives are consumed in "
            "posting order, whatever their size: the message may have consumed a different receive "
            "than you expected.",
            "On a UD receive: the buffer is too small for the 40 bytes of GRH and the payload. "
            "soft0 reports this, and the QP is in ERR. A roce device keeps the QP in RTS: it "
            "drops the datagram and keeps the receive, or, if it is an SRQ's, ends it with "
            "REM_INV_REQ_ERR.",
            "On a UD send: more bytes than the path MTU; UD does not split messages.",
            "On any send: more than the port's max_msg_sz; or an SGE of length 0, which some "
            "hardware treats as 2^31 bytes.",
            "On an RDMA read or atomic: the response does not fit into the local SGEs; an atomic "
            "needs 8 bytes.",
        ),
        look_at=(
            "Whether wr_id belongs to a send or a receive: an error completion has no valid "
            "opcode.",
            "The sum of the SGE lengths of that receive, against what the peer sends.",
            "active_mtu and max_msg_sz of the port (context.query_port, ibv_devinfo -v).",
            "mlx5: resp_local_length_error in /sys/class/infiniband/DEV/ports/N/hw_counters.",
        ),
        soft_roce="A receive that is too small ends with LOC_QP_OP_ERR on RC, and the sender gets "
        "REM_OP_ERR. On UD it is LOC_QP_OP_ERR with Linux 6.1; with 6.12 it is as on a roce "
        "device. A datagram over the MTU is not an error.",
        see=("ibv_post_recv(3), NOTES", "ibv_query_port(3)", _IBA),
    ),
    _status(
        WCStatus.LOC_QP_OP_ERR,
        "This queue pair could not carry out the work request: it is inconsistent, or the QP does "
        "not support it. Nothing reached the peer.",
        causes=(
            "This QP type or the device does not support the opcode (rdmapost explain RDMA_READ, "
            "for example, lists the types); only an unchecked post gets this far.",
            "An RDMA read or atomic with max_rd_atomic=0 on this side: none may be outstanding.",
            "A broken address vector or address handle, or a P_Key index that has become invalid.",
            "A TSO header that the device cannot parse: it needs Ethernet, IP and TCP headers.",
            "The send queue entry was malformed when the device read it: a driver bug, or a "
            "program that writes to the queue directly.",
        ),
        look_at=(
            "The work request's opcode and the QP's type; on a QP with checked=True, the error "
            "names the mistake.",
            "qp.query(): max_rd_atomic, pkey_index, ah_attr.",
            "vendor_err of the completion, and dmesg: mlx5 dumps the error CQE there.",
        ),
        soft_roce="Its most common error status: for an unknown lkey on a SEND or WRITE (elsewhere "
        "LOC_PROT_ERR), a failed LOCAL_INV, LOCAL_INV or SEND_WITH_INV on UC, and at the receiver "
        "a receive that is too small or whose buffer cannot be used. Linux 6.12 may show "
        "WR_FLUSH_ERR instead. A read with max_rd_atomic=0 hangs.",
        see=("ibv_post_send(3), DESCRIPTION: the table of opcodes", _IBA),
    ),
    _status(
        WCStatus.LOC_EEC_OP_ERR,
        "An end-to-end context could not carry out the request. Such contexts belong to the "
        "reliable datagram (RD) service, which no current device implements.",
        causes=(
            "A status value that was never filled in, or a driver that maps an unknown hardware "
            "code to this status.",
        ),
        look_at=("vendor_err, with the device's manual; the versions of driver and firmware.",),
    ),
    _status(
        WCStatus.LOC_PROT_ERR,
        "The device refused to access local memory for this work request: one of its SGEs is not "
        "inside a registered region that this queue may use for it. The lkey, the range, the "
        "protection domain and the access flags are all checked. An RC queue pair goes to ERR; if "
        "a receive has this status, the sender gets REM_OP_ERR.",
        causes=(
            "The SGE reaches beyond its region: addr or length is slightly off.",
            "The region was deregistered while the work request was outstanding, or the lkey "
            "belongs to an older registration. (This library keeps an MR alive while an SGE refers "
            "to it, but cannot if the SGE was made from numbers.)",
            "The lkey and the rkey were mixed up; on some devices they are equal, and the program "
            "works there.",
            "The region's PD is not the queue pair's (or the SRQ's).",
            "A receive, an RDMA read or an atomic writes to a region without LOCAL_WRITE.",
            "A LOCAL_INV, or a peer's SEND_WITH_INV, has invalidated the region's keys, including "
            "the lkey, where the device allows that. mr.rereg(memory=...) gives the region new "
            "ones.",
            "The buffer is not registered, and the work request lacks SendFlags.INLINE.",
        ),
        look_at=(
            "addr, length and lkey of every SGE, against mr.addr, mr.length and mr.lkey.",
            "mr.pd, which must be qp.pd, and mr.access.",
            "SGEs from mr[a:b] cannot lie outside the region: use them instead of numbers.",
            "On-demand paging: dmesg, for a page fault that could not be served.",
        ),
        soft_roce="An unknown lkey on a SEND or WRITE gives LOC_QP_OP_ERR, and on Linux 6.12 any "
        "local failure may show as WR_FLUSH_ERR. A receive with a bad buffer gives LOC_QP_OP_ERR.",
        see=("ibv_reg_mr(3), DESCRIPTION", _IBA),
    ),
    _status(
        WCStatus.WR_FLUSH_ERR,
        "The queue pair went to ERR (or, for sends, SQE) before this work request was done. This "
        "status is a consequence, not a cause: the QP's first completion with another status says "
        "what happened. The peer may still have executed the work request, if it was sent before.",
        causes=(
            "An earlier work request of this QP failed, and everything behind it is flushed. If "
            "its completion is on the other CQ, it may be polled later than the flushes.",
            "A request from the peer broke the QP: a responder goes to ERR after a bad rkey or an "
            "invalid request, and its own work requests are flushed without any other status.",
            "You moved the QP to ERR, or rdma_disconnect did, or the connection manager got a "
            "disconnect from the peer: then flushes are the normal end of outstanding receives.",
            "The work request was posted to a QP that was already in ERR.",
            "The device was reset or unplugged.",
        ),
        look_at=(
            "The first completion that is not a flush, on the send and on the receive CQ.",
            "context.get_async_event(): QP_ACCESS_ERR, QP_REQ_ERR and QP_FATAL name the QP.",
            "qp.state; to use the QP again, move it to RESET and reconnect both ends.",
            "The peer's completions and log, at the same time.",
        ),
        soft_roce="Linux 6.12 also flushes the work request that failed locally, and no completion "
        "has the cause: check the buffers and keys of the first flushed one. An access error "
        "raises no asynchronous event.",
        see=("ibv_modify_qp(3)", "IBA vol. 1, 10.3.1 (states) and 11.6.2"),
    ),
    _status(
        WCStatus.MW_BIND_ERR,
        "A memory management operation failed: a BIND_MW, or a LOCAL_INV. The window is unchanged.",
        causes=(
            "The region was registered without MW_BIND.",
            "The range lies outside the region, or has length 0 (to unbind a type 2 window, use "
            "LOCAL_INV, not a bind of length 0).",
            "The window is bound already: invalidate a type 2 window before binding it again; if "
            "the queue pair that bound it is closed, close the window and create another.",
            "REMOTE_WRITE or REMOTE_ATOMIC is requested for the window, and the region lacks "
            "LOCAL_WRITE.",
            "Window, region and queue pair are not on the same PD, or the region is zero-based.",
            "LOCAL_INV: the key is unknown, or belongs to a type 1 window, a window bound on "
            "another QP, or a region with windows bound to it.",
        ),
        look_at=(
            "mr.access, mr.addr and mr.length against addr, length and mw_access_flags.",
            "device_cap_flags: MEM_WINDOW, MEM_WINDOW_TYPE_2A or _2B, MEM_MGT_EXTENSIONS.",
            "The sequence of binds and invalidations, including those by a peer's SEND_WITH_INV.",
        ),
        soft_roce="A failed LOCAL_INV gives LOC_QP_OP_ERR (6.12: WR_FLUSH_ERR). It cannot "
        "invalidate a user's MR or a type 1 window, nor anything on UC.",
        see=("ibv_bind_mw(3), NOTES", "ibv_alloc_mw(3)", _IBA),
    ),
    _status(
        WCStatus.BAD_RESP_ERR,
        "The response did not match the request: an unexpected opcode, or the wrong length for a "
        "read or an atomic.",
        causes=(
            "The two QPs do not agree on the connection: after one side was restarted, another QP "
            "with the same number answers.",
            "Packets on the path are rewritten or corrupted beyond what the ICRC detects.",
            "A bug in the peer's firmware or software transport, most often seen between devices "
            "of different vendors or versions.",
        ),
        look_at=(
            "dest_qp_num and the PSNs of both sides; tear both down and reconnect.",
            "A capture of the response: tcpdump -i IF -w FILE udp port 4791 (RoCE v2), or ibdump.",
            "Firmware versions of both ends (fw_ver in ibv_devinfo).",
        ),
    ),
    _status(
        WCStatus.LOC_ACCESS_ERR,
        "The responder's device could not write the data of an incoming RDMA_WRITE_WITH_IMM: a "
        "protection error on local memory, caused by the peer's request and reported on the "
        "receive that the message consumed.",
        causes=(
            "The target of a write with immediate data is no longer valid: the region was "
            "deregistered or the window invalidated while the message was arriving.",
            "The rkey does not grant REMOTE_WRITE, and this device reports that at the responder "
            "too. The writer then gets REM_ACCESS_ERR.",
        ),
        look_at=(
            "The rkey and remote_addr that the peer used, against the regions that are registered "
            "now.",
            "The peer's completion, and context.get_async_event(): QP_ACCESS_ERR.",
        ),
        see=("ibv_reg_mr(3), DESCRIPTION", _IBA),
    ),
    _status(
        WCStatus.REM_INV_REQ_ERR,
        "The responder found the request invalid and said so (NAK invalid request). The request "
        "reached the QP: addressing and path are fine. Both QPs are now in ERR.",
        causes=(
            "A SEND longer than the receive that it consumed; the receiver sees LOC_LEN_ERR.",
            "The operation is not enabled on the peer's QP: its qp_access_flags lack "
            "REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC, FLUSH_GLOBAL or FLUSH_PERSISTENT, whatever "
            "the rkey grants.",
            "More outstanding reads and atomics than the peer's max_dest_rd_atomic (your "
            "max_rd_atomic is larger), which may be 0.",
            "An atomic at an address that is not a multiple of 8, or a peer without atomics.",
            "A length that the peer does not accept: over 2^31, or over its port's max_msg_sz.",
            "A message of several packets between queue pairs with different path MTUs.",
            "Seen on the receive of a SEND_WITH_INV: its key could not be invalidated.",
            "Seen on a receive of an SRQ, on UD (roce devices, Soft-RoCE): a datagram did not fit. "
            "Nobody sent a NAK, and the QP is still in RTS.",
        ),
        look_at=(
            "The peer's receive completion: LOC_LEN_ERR settles it.",
            "The peer's qp.query(): qp_access_flags, max_dest_rd_atomic; yours: max_rd_atomic.",
            "remote_addr % 8 of an atomic; atomic_cap of the peer's device.",
            "mlx5: req_remote_invalid_request in hw_counters.",
        ),
        soft_roce="A receive that is too small gives REM_OP_ERR, not this. An unaligned atomic is "
        "refused with EINVAL when it is posted.",
        see=("ibv_modify_qp(3): qp_access_flags, max_dest_rd_atomic", _IBA),
    ),
    _status(
        WCStatus.REM_ACCESS_ERR,
        "The responder refused access to its memory (NAK remote access error). The rkey, the "
        "range, the permission, the protection domain or the window is wrong. Both QPs are in "
        "ERR; the peer gets the event QP_ACCESS_ERR and no completion.",
        causes=(
            "Your rkey or remote_addr is stale or wrong: the peer re-registered or restarted, or "
            "the handshake mixed up byte orders, or lkey and rkey.",
            "remote_addr + length reaches beyond the region or the window.",
            "The region or window lacks REMOTE_WRITE, REMOTE_READ or REMOTE_ATOMIC; for a FLUSH, "
            "the region lacks FLUSH_GLOBAL or FLUSH_PERSISTENT, or the rkey is a window's, which "
            "cannot grant them.",
            "A LOCAL_INV or a SEND_WITH_INV has invalidated the key (many devices refuse that for "
            "the key of a region).",
            "The region is on another PD than the peer's QP.",
            "On some devices: the operation is not enabled in the peer's qp_access_flags "
            "(elsewhere that is REM_INV_REQ_ERR).",
            "The window is not bound, was invalidated, or (type 2) was bound on another QP.",
            "The region is ZERO_BASED: remote_addr counts from 0.",
            "soft0 and roce devices: the memory is no longer mapped, or its file was truncated.",
            "XRC: remote_srqn is not the srq_num of an SRQ in the peer's XRC domain.",
        ),
        look_at=(
            "Print remote_addr, length and rkey here, and addr, length, rkey and access at the "
            "peer; compare digit by digit.",
            "On the peer: context.get_async_event(), and its QP's qp_access_flags.",
            "mlx5: req_remote_access_errors here, resp_remote_access_errors at the peer "
            "(hw_counters).",
        ),
        soft_roce="Access through a window is checked against the bounds of the region behind it, "
        "so an access outside the window succeeds; and the peer gets no event.",
        see=("ibv_reg_mr(3), DESCRIPTION", "ibv_bind_mw(3)", _IBA),
    ),
    _status(
        WCStatus.REM_OP_ERR,
        "The responder could not finish the request because of a fault on its side (NAK remote "
        "operational error). Your work request may be correct; look at the other side.",
        causes=(
            "The peer's device cannot write to the receive's memory: a bad lkey or range, or no "
            "LOCAL_WRITE. The peer gets LOC_PROT_ERR on that receive.",
            "The peer's device failed while it carried out the request: an internal error, or a "
            "page fault that could not be served.",
            "The peer's QP or SRQ failed for another reason at that moment.",
        ),
        look_at=(
            "The peer's completions and its dmesg; this side knows nothing more.",
            "The SGEs of the receives that the peer posts.",
        ),
        soft_roce="The sender also gets this status when the receive is too small; the receiver "
        "gets LOC_QP_OP_ERR in both cases.",
    ),
    _status(
        WCStatus.RETRY_EXC_ERR,
        "The peer did not answer. A request was sent retry_cnt + 1 times and no acknowledgement "
        "came. That takes at least 4.096 us * 2^timeout * (retry_cnt + 1): with timeout=14 and "
        "retry_cnt=6 half a second, with the timeout=17 of roce devices 3.8 s. Devices may wait up "
        "to four times as long for each attempt, and some raise a short timeout to their "
        "minimum. timeout=0 waits forever. Whether the request was carried out is not known. The "
        "QP is in ERR.",
        causes=(
            "The peer's QP is not in RTR or RTS, or is gone: not connected yet, in ERR after its "
            "own failure, destroyed, or its process ended.",
            "The address is wrong: dest_qp_num, the GID or its index, the LID; a peer restarted "
            "with a new QP number; RoCE v1 against v2; a link-local GID; another VLAN.",
            "The network drops the packets: a firewall that blocks UDP port 4791 (RoCE v2), a "
            "security group, a switch port, ARP or ND that does not resolve; a port that is down.",
            "The path MTU is larger than the network's: small messages pass, and multi-packet ones "
            "fail. The Ethernet MTU must be at least the path MTU plus 80 bytes of headers.",
            "The P_Keys do not match, or sq_psn is not the peer's rq_psn: packets are silently "
            "dropped.",
            "Packets are lost under load: no PFC or ECN for RoCE's traffic class, or a timeout "
            "that is too short for a busy peer or a long path.",
        ),
        look_at=(
            "The peer: its QP's state (qp.query(), rdma resource show qp), its completions, "
            "whether its process is running.",
            "qp.query() on both sides, crosswise: dest_qp_num is the other's qp_num, sq_psn the "
            "other's rq_psn; path_mtu is the same; ah_attr has the other's GID.",
            "timeout and retry_cnt: are they large enough? Use timeout=14..18 and retry_cnt=7 on a "
            "real network.",
            "rdmapost devices: port ACTIVE, the GID index and its type. ping between the two "
            "addresses, with full packets: ping -M do -s 4140 for a path MTU of 4096.",
            "iptables-save, nft list ruleset: UDP 4791. tcpdump -i IF udp port 4791 on both ends "
            "shows whether requests arrive and responses leave (not on NICs that bypass it).",
            "hw_counters before and after: local_ack_timeout_err, out_of_sequence, "
            "packet_seq_err (mlx5); retry_exceeded_err, completer_retry_err (rxe).",
            "On roce devices: context.counters() or -v on both sides, and the packets themselves: "
            "context.capture() or --pcap.",
            "InfiniBand: ibstat, and perfquery or ibqueryerrors for the links on the path.",
            "Not vendor_err (perftest's syndrom): only the driver knows what it means.",
        ),
        soft_roce="retry_cnt=7 never gives up: the work request hangs. On Linux 6.1 it also hangs "
        "if a later work request fails locally, or if it is fenced. The underlying network device "
        "must be up and have the GID's address. A peer that moves its QP to RESET after the last "
        "message may drop the acknowledgement: destroy the QP instead.",
        see=("ibv_modify_qp(3): timeout, retry_cnt", "IBA vol. 1, 9.7.6.1.3 (timeouts)"),
    ),
    _status(
        WCStatus.RNR_RETRY_EXC_ERR,
        "The peer answered every attempt with an RNR NAK: it had no receive for the message. "
        "rnr_retry attempts are used up, and between them the sender waited for the peer's "
        "min_rnr_timer. The connection works; receives are missing. The QP is in ERR.",
        causes=(
            "The peer posts no receive, or posts it after your first send: post receives before "
            "the QP goes to RTR, or at the latest before telling the peer that it may send.",
            "The peer posts them too slowly: more messages are in flight than it has receives for. "
            "Use credits, or a deeper receive queue.",
            "The wrong operation: RDMA_WRITE_WITH_IMM consumes a receive, RDMA_WRITE does not.",
            "The receives are on another queue: the SRQ ran empty, or the XRC message has a "
            "different remote_srqn; with tag matching, an unexpected message when no ordinary "
            "receive is posted.",
            "rnr_retry is 0: the first RNR NAK is final. Or min_rnr_timer is so short that all "
            "attempts are used up almost immediately.",
        ),
        look_at=(
            "The peer's qp.outstanding.recv (srq.outstanding) at the time, and its max_recv_wr.",
            "Your rnr_retry: 7 waits forever. It hides a peer that never posts, so use it in "
            "production and not in tests.",
            "The peer's min_rnr_timer, encoded: 12 is 0.64 ms, 1 is 10 us, 0 is 655 ms.",
            "hw_counters: rnr_nak_retry_err at the sender, out_of_buffer at the receiver (mlx5); "
            "rcvd_rnr_err, send_rnr_err (rxe).",
            "An SRQ's limit event: context.get_async_event(), SRQ_LIMIT_REACHED.",
        ),
        see=(
            "ibv_modify_qp(3): rnr_retry, min_rnr_timer",
            "ibv_post_recv(3)",
            "IBA vol. 1, 9.7.5.2.8 (RNR NAK)",
        ),
    ),
    _status(
        WCStatus.LOC_RDD_VIOL_ERR,
        "The reliable datagram domains of the QP and the end-to-end context differ. Part of the "
        "RD service, which current devices do not implement.",
        causes=("A corrupt completion, or a driver that uses the number for something else.",),
        look_at=("The raw completion in the driver's log; vendor_err.",),
    ),
    _status(
        WCStatus.REM_INV_RD_REQ_ERR,
        "The responder refused a reliable datagram: wrong Q_Key or RDD. Only the RD service, which "
        "no device offers, has this status; do not confuse it with REM_INV_REQ_ERR (9).",
        causes=(
            "The name was looked up from the wrong number: check which one the program printed.",
        ),
        look_at=("The numeric status: 15 is this one, 9 is the one for connected QPs.",),
    ),
    _status(
        WCStatus.REM_ABORT_ERR,
        "The operation was aborted by the other side: the responder stopped it before it was "
        "complete.",
        causes=(
            "The peer's QP was reset, destroyed or taken to ERR in the middle of the operation, "
            "on devices that report this.",
            "In the specification: an RD channel that was suspended.",
        ),
        look_at=(
            "What the peer did at that time: shutdown, failover, a reset of its device (dmesg).",
            "vendor_err with the device's manual.",
        ),
    ),
    _status(
        WCStatus.INV_EECN_ERR,
        "An end-to-end context number was not valid. Only RD queue pairs have such numbers, and "
        "they do not exist in practice.",
        causes=("Memory that is not a completion was read as one; a misdirected CQ buffer.",),
        look_at=("Whether the completion's wr_id and qp_num are yours.",),
    ),
    _status(
        WCStatus.INV_EEC_STATE_ERR,
        "An end-to-end context was in a state that does not allow the operation. A remnant of the "
        "RD service in the first specifications.",
        causes=("A driver or firmware bug: no current verb leads to this status.",),
        look_at=("Report it to the vendor, with vendor_err and the driver and firmware versions.",),
    ),
    _status(
        WCStatus.FATAL_ERR,
        "The device failed in a way that leaves the QP, and maybe the whole device, unusable.",
        causes=(
            "The device had an internal error, was reset, or has fallen off the bus.",
            "The driver gave up on the device: a firmware command timed out, a health check "
            "failed, the machine is resuming or the module is unloading.",
        ),
        look_at=(
            "dmesg: lines of the driver, PCIe AER messages, 'health', 'fatal', 'reset'.",
            "context.get_async_event(): DEVICE_FATAL or QP_FATAL. After DEVICE_FATAL everything "
            "must be closed and opened again.",
            "lspci -vv for the link of the card; temperature and power.",
        ),
    ),
    _status(
        WCStatus.RESP_TIMEOUT_ERR,
        "The responder began to respond and did not finish in time. Do not confuse this with "
        "RETRY_EXC_ERR, which an RC queue pair reports when nothing comes back.",
        causes=(
            "A device that distinguishes this case; most report RETRY_EXC_ERR.",
            "A read whose response stalls: the peer pages memory in, or the network is congested.",
        ),
        look_at=(
            "The QP's timeout, and whatever applies from 'rdmapost explain RETRY_EXC_ERR'.",
            "On-demand paging or very slow memory (GPU, persistent) at the peer.",
        ),
    ),
    _status(
        WCStatus.GENERAL_ERR,
        "The driver has no specific status for the error: 'other transport error'. vendor_err is "
        "the only detail. This library also reports unknown numbers as this status.",
        causes=(
            "A hardware syndrome that the driver does not translate (mlx5 maps all unknown ones to "
            "this status).",
            "A device or driver newer than the library.",
            "A driver bug.",
        ),
        look_at=(
            "vendor_err, with the vendor's manual or the driver's source (mlx5: the syndrome).",
            "dmesg at the time: mlx5 dumps the error CQE ('dump error cqe').",
            "Driver, firmware and rdma-core versions; ibv_devinfo shows fw_ver.",
        ),
    ),
    _status(
        WCStatus.TM_ERR,
        "A tag-matching operation was not carried out. The most common case is not a failure: a "
        "TAG_DEL came too late, because a message had already consumed the entry.",
        causes=(
            "TAG_DEL of an entry that a message has consumed: its TM_RECV completion comes, or "
            "has come, and carries the data.",
            "A second TAG_DEL of the same entry.",
            "The device lost track of the list and asks to be resynchronised.",
        ),
        look_at=(
            "The CQ for a completion with the recv_wr_id of that entry: then all is well.",
            "wc_flags: TM_SYNC_REQ asks for a TAG_SYNC with the count of unexpected messages.",
            "vendor_err, if neither explains it.",
        ),
        soft_roce="It has no tag matching; soft0 does.",
        see=("ibv_post_srq_ops(3), DESCRIPTION", "rdma-core: Documentation/tag_matching.md"),
    ),
    _status(
        WCStatus.TM_RNDV_INCOMPLETE,
        "A rendezvous message matched an entry, but the device did not fetch the data. Software "
        "must fetch it: the headers say where the data is (remote_addr, rkey, length). A FIN must "
        "follow, which lets the sender free the data.",
        causes=(
            "The buffer of the entry is smaller than the message: the headers are in the buffer "
            "instead.",
            "The device's own RDMA read failed: a bad rkey from the sender, or the QP went to ERR.",
            "The rendezvous header is larger than the device accepts (max_rndv_hdr_size).",
        ),
        look_at=(
            "The headers: TMH of 16 bytes, then RVH: address (8 bytes), rkey (4), length (4), all "
            "in network order.",
            "qp.state of the QP that received the message, and its events: QP_FATAL.",
            "The sizes of tagged buffers against what senders announce.",
        ),
        soft_roce="Never: rxe has no tag matching.",
        see=("ibv_create_srq_ex(3)", "rdma-core: tag_matching.md, TM completion processing"),
    ),
)

"""Explanations of work request opcodes, with the QP types that support each."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...enums import Opcode, OpsFlags, OpsOpcode, QPType, SendFlags
from ...posting import wr as work_requests
from ...posting.rules import flags_allowed
from ...standard.opcodes import QP_TYPES_BY_OPCODE
from .model import Explanation, explanation_of

COLUMNS = (QPType.UD, QPType.UC, QPType.RC, QPType.XRC_SEND, QPType.RAW_PACKET)
"""The columns of the table in ibv_post_send(3), from left to right."""

# By name: members of two enumerations are equal if their numbers are.
_CLASSES: dict[str, Any] = {
    opcode.name: member
    for member in vars(work_requests).values()
    if isinstance(opcode := getattr(member, "opcode", None), (Opcode, OpsOpcode))
}
_POST = "ibv_post_send(3), DESCRIPTION"


def _opcode(opcode: Opcode | OpsOpcode, meaning: str, far_side: str, **texts: Any) -> Explanation:
    has: frozenset[QPType] = frozenset()
    flags = tuple(flag.name or "" for flag in OpsFlags)
    if isinstance(opcode, Opcode):
        has = QP_TYPES_BY_OPCODE.get(opcode, has)
        # On a device that can do everything.
        meant = [flags_allowed(qp_type, opcode, -1) for qp_type in has]
        flags = tuple(flag.name or "" for flag in SendFlags if any(flag & one for one in meant))
    made = _CLASSES.get(opcode.name)
    return explanation_of(
        opcode,
        meaning,
        far_side=far_side,
        qp_types=tuple(column.name for column in COLUMNS if column in has),
        flags=flags,
        fields=() if made is None else tuple(field.name for field in dataclasses.fields(made)),
        **{"see": (_POST,), **texts},
    )


OPCODES: tuple[Explanation, ...] = (
    _opcode(
        Opcode.SEND,
        "Send the bytes of sg_list as one message. The receiver decides where they go: into the "
        "receive that it posted first. Up to 2^31 bytes on RC, UC and XRC, up to the path MTU on "
        "UD, one whole frame on RAW_PACKET. Without SGEs it is a message of 0 bytes.",
        "Consumes a receive; a RECV completion with byte_len (on UD also src_qp, and byte_len "
        "includes the 40 bytes of GRH at the start of the buffer). Without a receive: RNR NAK on "
        "RC; silently dropped elsewhere.",
        causes=(
            "Fails with RNR_RETRY_EXC_ERR: the peer has no receive.",
            "Fails with REM_INV_REQ_ERR: the peer's receive is smaller than the message.",
            "Fails with LOC_PROT_ERR: one of your SGEs is invalid.",
        ),
        look_at=("'rdmapost send --data hello' tries one in loopback.",),
    ),
    _opcode(
        Opcode.SEND_WITH_IMM,
        "A SEND that carries 32 bits in addition to the payload, at no cost. They arrive in the "
        "completion, not in the buffer; the payload may be empty.",
        "As for SEND, and the completion has WITH_IMM and imm_data. The C struct holds imm_data in "
        "network order; this library gives both sides an integer in host order.",
        causes=(
            "The peer sees another number: a C program on one side left out htonl or ntohl.",
            "The peer sees none: it does not check wc_flags, or polls with an extended CQ that "
            "was not created for immediate data.",
        ),
        look_at=("rdmapost send --imm 7 --data hello.",),
    ),
    _opcode(
        Opcode.RDMA_WRITE,
        "Put the bytes of sg_list at remote_addr in the peer's memory. The peer's program is not "
        "involved; its memory must be registered with REMOTE_WRITE and LOCAL_WRITE, and its QP "
        "must allow REMOTE_WRITE.",
        "The bytes in its memory, and no completion. A responder that refuses the write moves its "
        "QP to ERR and raises QP_ACCESS_ERR or QP_REQ_ERR.",
        causes=(
            "Fails with REM_ACCESS_ERR: rkey, remote_addr, length or the region's flags.",
            "Fails with REM_INV_REQ_ERR: the peer's qp_access_flags.",
            "On UC a refused or lost write vanishes, and the sender gets SUCCESS.",
        ),
        look_at=(
            "How the peer learns of the write: a SEND after it, or RDMA_WRITE_WITH_IMM. The "
            "specification does not guarantee that polling the last byte works.",
            "rdmapost write --data hello.",
        ),
    ),
    _opcode(
        Opcode.RDMA_WRITE_WITH_IMM,
        "An RDMA_WRITE that notifies the peer: a completion with 32 bits of immediate data, once "
        "all the bytes are in place.",
        "The bytes at remote_addr, and a RECV_RDMA_WITH_IMM completion with imm_data and the "
        "length in byte_len. It consumes a receive, whose buffers are not touched (a receive "
        "without SGEs will do).",
        causes=(
            "Fails with RNR_RETRY_EXC_ERR: unlike an RDMA_WRITE, it needs a receive at the peer.",
            "Fails with REM_ACCESS_ERR for the same reasons as RDMA_WRITE.",
        ),
        look_at=("rdmapost write --imm 7 --data hello.",),
    ),
    _opcode(
        Opcode.RDMA_READ,
        "Fetch as many bytes as sg_list holds from remote_addr in the peer's memory. The local "
        "region needs LOCAL_WRITE, the peer's REMOTE_READ. Up to max_rd_atomic reads and atomics "
        "are in flight at once; further ones wait, as do work requests with FENCE.",
        "Nothing: no completion, no change. Its device responds without the program, if its "
        "max_dest_rd_atomic is at least the reader's max_rd_atomic.",
        causes=(
            "Fails with REM_ACCESS_ERR: the region lacks REMOTE_READ, or the key or the range is "
            "wrong.",
            "Fails with REM_INV_REQ_ERR: qp_access_flags, or max_dest_rd_atomic is exceeded.",
            "Fails with LOC_PROT_ERR: the local buffer lacks LOCAL_WRITE.",
            "A later SEND that announces the data overtakes the read: post the SEND with FENCE.",
            "It returns what a later RDMA_WRITE or atomic of the same queue wrote: the peer "
            "executed the read again, because its response was lost. Post the later one with "
            "FENCE.",
            "Fails with REM_ACCESS_ERR for the same reason, if a later SEND_WITH_INV invalidates "
            "its key.",
        ),
        look_at=("qp.query(): max_rd_atomic here, max_dest_rd_atomic there.", "rdmapost read."),
        soft_roce="With max_rd_atomic=0 it hangs. A read with FENCE that must be retransmitted "
        "never completes.",
    ),
    _opcode(
        Opcode.ATOMIC_CMP_AND_SWP,
        "If the 64-bit value at remote_addr equals compare_add, replace it with swap. The previous "
        "value is written to the one SGE of 8 bytes, in host order; it equals compare_add if "
        "and only if the swap took place.",
        "The value, changed or not, and no completion. It is atomic with respect to other atomics "
        "of that device (atomic_cap HCA), and to its CPUs only with GLOB.",
        causes=(
            "Refused with EINVAL: remote_addr is not a multiple of 8, or sg_list is not one SGE of "
            "8 bytes.",
            "Fails with REM_ACCESS_ERR or REM_INV_REQ_ERR: REMOTE_ATOMIC is missing from the "
            "region's flags or from the QP's.",
            "It 'does not swap' though it ends with SUCCESS: compare the old value.",
        ),
        look_at=(
            "context.attr.atomic_cap, or atomic_cap in 'ibv_devinfo -v'.",
            "rdmapost atomic cas --initial 1 --compare 1 --swap 2.",
        ),
    ),
    _opcode(
        Opcode.ATOMIC_FETCH_AND_ADD,
        "Add compare_add to the 64-bit value at remote_addr, modulo 2^64; the value before the "
        "addition is written to the one SGE of 8 bytes. To subtract, add 2^64 - n; to read "
        "atomically, add 0.",
        "The sum in its memory, and no completion; as atomic as ATOMIC_CMP_AND_SWP.",
        causes=(
            "Refused with EINVAL, or REM_INV_REQ_ERR: an address that is not aligned to 8 bytes.",
            "Fails with REM_ACCESS_ERR: no REMOTE_ATOMIC on the region.",
            "Slow: atomics on one address run one after another, each taking a round trip.",
        ),
        look_at=("rdmapost atomic fetch-add --initial 10 --add 5.",),
    ),
    _opcode(
        Opcode.LOCAL_INV,
        "Invalidate a local key: it unbinds a type 2 memory window, or makes a region unreachable "
        "by that key. It is executed in order with the sends of its queue, by the local device; "
        "the peer is not involved.",
        "Nothing at first; later requests with that rkey end with REM_ACCESS_ERR at their sender.",
        causes=(
            "Fails with MW_BIND_ERR: the key is unknown or unbound, or belongs to a type 1 window, "
            "a window bound on another QP, or a region with windows on it; or the window was "
            "closed first.",
        ),
        look_at=("rdmapost invalidate: binds, invalidates, and tries the key again.",),
        soft_roce="Only on RC, only for type 2 windows; other keys give LOC_QP_OP_ERR. Never "
        "invalidate a window that is not bound: the kernel crashes.",
    ),
    _opcode(
        Opcode.BIND_MW,
        "Bind a type 2 memory window to a range of a region, under a new rkey whose low byte is "
        "the caller's choice (mw.next_rkey()). The next work request can already hand out the "
        "key: sends are executed in order.",
        "Nothing until it has the rkey; then it can do what mw_access_flags grant, within the "
        "range, on this QP only.",
        causes=(
            "Fails with MW_BIND_ERR: no MW_BIND on the region, a bad range, a window that is "
            "already bound, different PDs.",
            "Refused with EINVAL: a type 1 window; qp.bind_mw() binds those.",
            "Accesses outside the range fail with REM_ACCESS_ERR, as they should.",
        ),
        look_at=(
            "device_cap_flags: MEM_WINDOW_TYPE_2A or MEM_WINDOW_TYPE_2B.",
            "rdmapost bind-mw.",
        ),
        soft_roce="It checks accesses against the region's bounds, not the window's. A BIND_MW "
        "with a NULL region crashes the process, in rxe's library; this library refuses it.",
        see=(_POST, "ibv_alloc_mw(3)", "ibv_bind_mw(3), NOTES"),
    ),
    _opcode(
        Opcode.SEND_WITH_INV,
        "A SEND that also invalidates one of the peer's keys. Storage targets reply with it: one "
        "message announces the data and revokes the key.",
        "As for SEND; the completion has WITH_INV and invalidated_rkey. The key is invalid from "
        "then on: a type 2 window is unbound.",
        causes=(
            "The receive ends with REM_INV_REQ_ERR: the peer's key could not be invalidated, "
            "because it is unknown, a type 1 window's, or bound on another QP; or the peer closed "
            "the window first.",
            "Fails with RNR_RETRY_EXC_ERR: like every SEND it needs a receive.",
        ),
        look_at=("rdmapost send --invalidate --data hello.",),
        soft_roce="Not on UC. The completion does not name the key: the kernel's number for the "
        "flag is another flag's number in the library.",
    ),
    _opcode(
        Opcode.TSO,
        "TCP segmentation offload: one large payload and one header; the device cuts the "
        "payload into pieces of mss bytes and sends each with a copy of the header in which "
        "lengths, IP IDs, sequence numbers and checksums are right.",
        "Many frames (RAW_PACKET) or datagrams (UD), each of which consumes a receive.",
        causes=(
            "Refused with EOPNOTSUPP: the device has no TSO for this QP type (tso_caps).",
            "Refused with EINVAL: a header longer than the max_tso_header that the QP was created "
            "with; mss 0.",
            "Nothing arrives on UD: the other side has fewer receives than there are segments.",
        ),
        look_at=("context.attr.tso_caps: max_tso and supported_qpts.", "rdmapost tso."),
        soft_roce="rxe has no TSO; soft0 does.",
        see=(_POST, "ibv_query_device_ex(3): tso_caps", "ibv_create_qp_ex(3): max_tso_header"),
    ),
    _opcode(
        Opcode.DRIVER1,
        "Reserved for an operation that a driver defines (mlx5 uses it for its own ibv_wr "
        "builders). ibv_post_send cannot post it meaningfully, and this library has no work "
        "request for it.",
        "See the driver's manual.",
        see=("ibv_post_send(3), NOTES", "mlx5dv_wr_post(3)"),
    ),
    _opcode(
        Opcode.FLUSH,
        "Make what was written before it visible (FlushType.GLOBAL) or persistent (PERSISTENT) in "
        "the peer's memory: a range, or a whole region. ibv_post_send cannot post it, so it is "
        "posted by ibv_wr_flush, on a QP that is created with send_ops_flags=SendOps.FLUSH.",
        "The written data is made visible or persistent before the response is sent.",
        causes=(
            "The QP cannot be created (EOPNOTSUPP): libibverbs is older than 45, or the device has "
            "no FLUSH.",
            "Fails with REM_INV_REQ_ERR: the peer's QP lacks FLUSH_GLOBAL or FLUSH_PERSISTENT in "
            "its qp_access_flags, or its max_dest_rd_atomic is 0.",
            "Fails with REM_ACCESS_ERR: the peer's region lacks that access, or the range exceeds "
            "it.",
            "The peer's ibv_reg_mr fails with EINVAL: its kernel does not know FLUSH_GLOBAL, or "
            "FLUSH_PERSISTENT is given for memory that is not persistent.",
        ),
        look_at=("context.attr.device_cap_flags_ex: DeviceCap.FLUSH_GLOBAL and FLUSH_PERSISTENT.",),
        soft_roce="Linux 6.12 has FLUSH; on 6.1 it ends with LOC_QP_OP_ERR.",
        see=("ibv_wr_post(3)", "ibv_create_qp_ex(3): send_ops_flags"),
    ),
    _opcode(
        Opcode.ATOMIC_WRITE,
        "Write 8 bytes at an aligned address indivisibly. ibv_post_send cannot post it, so it is "
        "posted by ibv_wr_atomic_write, on a QP that is created with "
        "send_ops_flags=SendOps.ATOMIC_WRITE.",
        "A reader sees all 8 old bytes or all 8 new ones.",
        causes=(
            "The QP cannot be created (EOPNOTSUPP): libibverbs is older than 44, or the device has "
            "no ATOMIC_WRITE.",
            "Fails with REM_INV_REQ_ERR: remote_addr is not a multiple of 8, or REMOTE_WRITE is "
            "missing from the peer's qp_access_flags.",
            "Fails with REM_ACCESS_ERR: no REMOTE_WRITE on the region, or the wrong key.",
        ),
        look_at=(
            "context.attr.device_cap_flags_ex: DeviceCap.ATOMIC_WRITE.",
            "An RDMA_WRITE of 8 bytes guarantees less, but works on every device.",
        ),
        soft_roce="Linux 6.12 has it; on 6.1 it ends with LOC_QP_OP_ERR.",
        see=("ibv_wr_post(3): ibv_wr_atomic_write", "ibv_create_qp_ex(3)"),
    ),
    _opcode(
        OpsOpcode.TAG_ADD,
        "Put a tagged buffer on the matching list of a tag-matching SRQ. The first entry with "
        "TMH.tag & mask == tag receives a message. The post sets wr.handle, which a TAG_DEL names. "
        "Two completions may arrive: TM_ADD for the operation, and TM_RECV, with recv_wr_id, for "
        "the message.",
        "An eager message with that tag lands in this buffer, without its header.",
        causes=(
            "Refused with ENOMEM: max_num_tags entries are on the list, or max_ops are "
            "outstanding.",
            "Nothing matches: the tag has bits outside the mask; or unexpected messages have not "
            "been reported with TM_SYNC, and the entry is held until they are.",
        ),
        look_at=("unexpected_cnt and the TM_SYNC flag.", "rdmapost tag add -d soft0."),
        soft_roce="It has no tag matching.",
        see=("ibv_post_srq_ops(3), DESCRIPTION",),
    ),
    _opcode(
        OpsOpcode.TAG_DEL,
        "Remove an entry from the matching list, by the handle that its TAG_ADD set in the work "
        "request.",
        "A message with that tag is unexpected from now on.",
        causes=(
            "Completes with TM_ERR: a message arrived first; its completion reports the data.",
            "Refused with EINVAL: not a handle of this SRQ. (mlx5 would index an array with it.)",
        ),
        look_at=(
            "Both completions, TM_DEL and TM_RECV, before you reuse the buffer.",
            "rdmapost tag del -d soft0.",
        ),
        soft_roce="Not supported: rxe has no tag matching.",
        see=("ibv_post_srq_ops(3), DESCRIPTION: IBV_WR_TAG_DEL",),
    ),
    _opcode(
        OpsOpcode.TAG_SYNC,
        "Tell the device how many unexpected messages software has handled. When both counts "
        "agree, held entries may match. TAG_ADD and TAG_DEL can carry the count as well (TM_SYNC).",
        "Nothing; but it decides whether the next message can match.",
        causes=(
            "Entries never match although their tag is right: the count differs from the device's.",
            "Without the TM_SYNC flag it does nothing, and a checked SRQ refuses it.",
        ),
        look_at=(
            "unexpected_cnt: all TM_RECV completions without TM_MATCH and TM_DATA_VALID so far; "
            "devices keep its low 16 bits.",
            "A completion with TM_SYNC_REQ asks for a TAG_SYNC.",
            "rdmapost tag sync -d soft0.",
        ),
        soft_roce="It does not support tag matching.",
        see=("ibv_post_srq_ops(3): phase synchronization",),
    ),
)

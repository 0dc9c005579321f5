"""Explanations of completion opcodes (ibv_poll_cq(3))."""

from __future__ import annotations

from functools import partial

from ...enums import WCOpcode
from .model import Explanation, explanation_of

_completion = partial(explanation_of, see=("ibv_poll_cq(3), DESCRIPTION",))

_OPS = ("ibv_post_srq_ops(3)",)

WC_OPCODES: tuple[Explanation, ...] = (
    _completion(
        WCOpcode.SEND,
        "A SEND, SEND_WITH_IMM or SEND_WITH_INV posted by this side has completed.",
        "wr_id says which; byte_len is undefined.",
    ),
    _completion(
        WCOpcode.RDMA_WRITE,
        "An RDMA_WRITE or RDMA_WRITE_WITH_IMM posted by this side has completed: on RC the bytes "
        "are in the peer's memory.",
        "The peer gets a completion only if there was immediate data.",
    ),
    _completion(
        WCOpcode.RDMA_READ,
        "An RDMA_READ has completed, and its bytes are in the local buffers.",
        "byte_len: how many were read.",
    ),
    _completion(
        WCOpcode.COMP_SWAP,
        "An ATOMIC_CMP_AND_SWP has completed. Whether it swapped is not in the completion.",
        "The 8 bytes in the local buffer: equal to compare_add means that it swapped.",
    ),
    _completion(
        WCOpcode.FETCH_ADD,
        "An ATOMIC_FETCH_AND_ADD has completed; the old value is in the local buffer.",
        "byte_len is 8.",
    ),
    _completion(
        WCOpcode.BIND_MW,
        "A memory window is bound, and its new rkey is valid.",
        "mw.rkey is what the peer needs.",
        see=("ibv_bind_mw(3)",),
    ),
    _completion(
        WCOpcode.LOCAL_INV,
        "A local key has been invalidated, by a LOCAL_INV posted here.",
        "A peer's SEND_WITH_INV shows on a RECV completion instead (WITH_INV).",
    ),
    _completion(
        WCOpcode.TSO,
        "A TSO has completed: all of its segments are out.",
        "One completion for all of them; at the receiver each segment has one.",
    ),
    _completion(
        WCOpcode.FLUSH,
        "A FLUSH has completed: what was written before it is visible or persistent at the peer. "
        "(The error status of work requests that are flushed is WR_FLUSH_ERR.)",
        see=("ibv_wr_post(3)",),
    ),
    _completion(
        WCOpcode.ATOMIC_WRITE,
        "An atomic write of 8 bytes has completed; ibv_wr_atomic_write posted it.",
        see=("ibv_wr_post(3): ibv_wr_atomic_write",),
    ),
    _completion(
        WCOpcode.RECV,
        "A SEND from the peer filled a receive. All opcodes from 128 on are receives: test the "
        "bit, not the value.",
        "byte_len; imm_data if wc_flags has WITH_IMM, invalidated_rkey if it has WITH_INV.",
        "On UD: the payload starts at byte 40, and src_qp is the sender.",
        soft_roce="It does not set WITH_INV.",
        see=("ibv_poll_cq(3)", "ibv_post_recv(3), NOTES"),
    ),
    _completion(
        WCOpcode.RECV_RDMA_WITH_IMM,
        "A receive was consumed by an RDMA_WRITE_WITH_IMM. Its buffers are untouched; the data "
        "is where the writer put it.",
        "imm_data, and byte_len for the length of the write. The address is not reported.",
    ),
    _completion(
        WCOpcode.TM_ADD,
        "A TAG_ADD is done: the entry is on the list.",
        "wc_flags: TM_SYNC_REQ asks for a count.",
        see=_OPS,
    ),
    _completion(
        WCOpcode.TM_DEL,
        "A TAG_DEL is done: the entry is off the list and its buffer is free; with status TM_ERR "
        "it was no longer on the list.",
        see=_OPS,
    ),
    _completion(
        WCOpcode.TM_SYNC,
        "A TAG_SYNC is done: the device knows the count.",
        "TM_SYNC_REQ in this completion: more unexpected messages have arrived since.",
        see=_OPS,
    ),
    _completion(
        WCOpcode.TM_RECV,
        "A message of the tag-matching protocol has arrived. With TM_MATCH it matched an entry; "
        "with TM_DATA_VALID its data is complete. A long message has two completions, one for "
        "each. With neither flag the message is unexpected and is in an ordinary receive, "
        "including its header.",
        "tm_tag and tm_priv: the tag, and the sender's 32 bits; in TM_MATCH completions only.",
        "Count the unexpected messages: unexpected_cnt.",
        see=("ibv_create_cq_ex(3): tag matching information", "ibv_post_srq_ops(3)"),
    ),
    _completion(
        WCOpcode.TM_NO_TAG,
        "A message without a tag arrived at a tag-matching queue: its header says NO_TAG, or it is "
        "the FIN of a rendezvous. It is in an ordinary receive and does not count as unexpected.",
        "The first byte of the buffer: 0 NO_TAG, 2 FIN.",
        see=("rdma-core: Documentation/tag_matching.md",),
    ),
    _completion(
        WCOpcode.DRIVER1,
        "The completion of an IBV_WR_DRIVER1 work request, which a driver's own interface posts; "
        "on mlx5 the configuration of an mkey (UMR).",
        see=("ibv_poll_cq(3), NOTES", "mlx5dv_wr_mkey_configure(3)"),
    ),
    _completion(
        WCOpcode.DRIVER2,
        "The completion of a driver-specific operation, with the second of three numbers; on mlx5 "
        "a raw work queue entry.",
        see=("ibv_poll_cq(3), NOTES", "mlx5dv_wr_post(3)"),
    ),
    _completion(
        WCOpcode.DRIVER3,
        "Like DRIVER2, the third number; on mlx5 a copy of memory by the device.",
        see=("ibv_poll_cq(3), NOTES", "mlx5dv_wr_post(3)"),
    ),
)

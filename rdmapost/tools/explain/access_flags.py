"""Access flags of regions, windows and queue pairs, and the flags of tag-matching operations."""

from __future__ import annotations

from functools import partial

from ...enums import Access, OpsFlags
from .model import Explanation, explanation_of

_access = partial(explanation_of, see=("ibv_reg_mr(3): access", "ibv_modify_qp(3)"))

ACCESS_FLAGS: tuple[Explanation, ...] = (
    _access(
        Access.LOCAL_WRITE,
        "The device may write to the region for local work requests: receives, and the results of "
        "reads and atomics.",
        "mr.access. Read-only memory cannot have it.",
        causes=("LOC_PROT_ERR for a receive, read or atomic: the local region lacks it.",),
    ),
    _access(
        Access.REMOTE_WRITE,
        "A peer may write with RDMA. A region also needs LOCAL_WRITE.",
        "mr.access and qp.query().qp_access_flags: a write needs it in both.",
        causes=(
            "REM_ACCESS_ERR for a peer's write: the region or the window lacks it.",
            "REM_INV_REQ_ERR for a peer's write: qp_access_flags lack it.",
        ),
    ),
    _access(
        Access.REMOTE_READ,
        "A peer may read with RDMA. A region needs no other flag for this. Not on UC.",
        "mr.access and qp.query().qp_access_flags: a read needs it in both.",
        causes=(
            "REM_ACCESS_ERR for a peer's read: the region or the window lacks it.",
            "REM_INV_REQ_ERR for a peer's read: qp_access_flags lack it.",
        ),
    ),
    _access(
        Access.REMOTE_ATOMIC,
        "A peer may post atomics. A region also needs LOCAL_WRITE. Not on UC.",
        "mr.access and qp.query().qp_access_flags: an atomic needs it in both. "
        "context.attr.atomic_cap.",
        causes=(
            "REM_ACCESS_ERR for a peer's atomic: the region or the window lacks it.",
            "REM_INV_REQ_ERR for a peer's atomic: qp_access_flags lack it.",
        ),
    ),
    _access(
        Access.MW_BIND,
        "Memory windows may be bound to the region.",
        "mr.access, before qp.bind_mw or BindMW.",
        causes=("MW_BIND_ERR for a bind: the region lacks it.",),
    ),
    _access(
        Access.ZERO_BASED,
        "The addresses in SGEs and in remote_addr are offsets from the start of the region or "
        "window.",
        "mr.addr is 0; mr.buffer_addr is the address in this process.",
    ),
    _access(
        Access.ON_DEMAND,
        "Pages are brought in when the device accesses them, and are not locked.",
        "context.attr.odp_caps: the operations for which the device supports this.",
    ),
    _access(Access.HUGETLB, "The memory consists of huge pages. For ON_DEMAND regions."),
    _access(
        Access.FLUSH_GLOBAL,
        "The peer may FLUSH its writes here, which makes them visible to everyone who accesses "
        "this memory.",
        causes=("REM_ACCESS_ERR for a FLUSH with FlushType.GLOBAL: the region lacks it.",),
    ),
    _access(
        Access.FLUSH_PERSISTENT,
        "The peer may FLUSH its writes here to persistence. The memory must be persistent.",
        causes=("REM_ACCESS_ERR for a FLUSH with FlushType.PERSISTENT: the region lacks it.",),
    ),
    _access(
        Access.RELAXED_ORDERING,
        "The device may reorder its accesses on the bus. Only a completion means that data has "
        "arrived; polling the last byte of a buffer does not.",
    ),
)

_ops = partial(explanation_of, see=("ibv_post_srq_ops(3): flags",))

OPS_FLAGS: tuple[Explanation, ...] = (
    _ops(
        OpsFlags.SIGNALED,
        "Generate a completion when the tag-matching operation is done. Without the flag, only a "
        "failure generates one.",
    ),
    _ops(
        OpsFlags.TM_SYNC,
        "unexpected_cnt is valid: how many unexpected messages software has handled. The device "
        "matches again once its own count is the same.",
        "The completion's TM_SYNC_REQ: the counts still differ.",
    ),
)

"""The memory, access and receives that a server offers its clients."""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass, replace

from ..._arguments import content, counted, expect, flags, index, within
from ...enums import Access, QPType
from ...errors import RdmaError
from ...resources.cq import CQ
from ...resources.device import Context
from ...resources.memory_sources import allocate
from ...resources.mr import MR
from ...resources.pd import PD
from ...resources.qp import QP
from .protocol_messages import access_names
from .qp_options import Given, private_bytes

EXPOSABLE = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
"""The access that a client can have."""
DEFAULT_SIZE = 4096
_COUNT = 16
_MAX_COUNT = 1 << 14
_RECEIVE_SIZE = 1 << 16


@dataclass(frozen=True, slots=True)
class Exposure:
    """The memory, access and receives that every client gets.

    Attributes:
        size: bytes of the exposed memory.
        access: what a client may do with it: REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC.
        count: receives that are posted for each client.
        receive_size: message bytes that each receive can hold.
        data: the initial contents; the rest is zeros.
        memory: the memory that all clients share, or None if each has its own.
        port_num: the local port, from 1.
        gid_index: the local GID; None if choose_gid chooses it.
        mr: the owner's region that is exposed, or None.
        private_data: bytes for every client.
        has: the access flags of mr.
        given: whether serve() was called with access.
    """

    size: int
    access: Access
    count: int
    receive_size: int
    data: bytes
    memory: mmap.mmap | None
    port_num: int
    gid_index: int | None
    mr: MR | None
    private_data: bytes
    has: Access
    given: bool

    @property
    def shared(self) -> bool:
        """Whether all clients reach the same memory."""
        return self.memory is not None or self.mr is not None

    def now(self) -> Exposure:
        """Return a copy with the current size of `mr`, without access that `mr` no longer has."""
        if self.mr is None:
            return self
        has = self.mr.access
        return replace(self, size=self.mr.length, access=self.access & has, has=has)

    def refuse_unenforced(self, context: Context) -> None:
        """Refuse less access than the region's key grants, if serve or aserve was given that.

        The clients' queue pairs must permit whatever a window may grant. As a result, clients
        can do the same with the region's own key.

        Args:
            context: the server's device.

        Raises:
            ValueError: the region's key grants more than access.
        """
        if not self.given or not self.has & Access.MW_BIND:
            return
        if more := self.has & _exposable(context) & ~self.access:
            raise ValueError(
                f"access={self.access} cannot be enforced: mr has MW_BIND and {more}. The clients' "
                "queue pairs permit whatever your windows may grant, so mr's own rkey would give "
                f"clients {more}, too; give the windows a region with only LOCAL_WRITE | MW_BIND, "
                "or leave out access"
            )

    def __str__(self) -> str:
        allowed = ", ".join(access_names(self.access)) or "no"
        whose = "shared by all clients" if self.shared else "for each client"
        return f"{allowed} access to {counted(self.size, 'byte')} of memory {whose}"


def bytes_within(size: int, offset: int, length: int | None) -> tuple[int, int]:
    """Check a range of the exposed bytes; return its offset and length as ints.

    Args:
        size: how many bytes are exposed.
        offset: bytes from the start.
        length: how many bytes; None for all that follow.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: the bytes are not within those exposed.
    """
    offset, exposed = index("offset", offset), counted(size, "byte")
    if not 0 <= offset <= size:
        raise ValueError(f"offset={offset} is not within the {exposed} exposed")
    length = size - offset if length is None else within("length", length, 0)
    if offset + length > size:
        raise ValueError(f"[{offset}:{offset + length}] is not within the {exposed} exposed")
    return offset, length


def make_exposure(
    context: Context,
    given: Given,
    *,
    size: int | None,
    access: int | None,
    count: int | None,
    receive_size: int | None,
    data: bytes,
    shared: bool,
    private_data: bytes,
    port_num: int,
    gid_index: int | None,
) -> Exposure:
    """Return the exposure that the arguments of serve() describe, after checking them.

    Its access is what was requested, or all that the device supports, even if mr has less: rereg
    may change mr's access. Exposure.now() says what clients get.
    """
    mr = given.mr
    expect("shared", shared, bool)
    data = content("data", data)
    private_data = private_bytes(private_data)
    if mr is not None:
        if size is not None or data or shared:
            raise ValueError("size, data and shared cannot be given with mr")
        size = mr.length
    else:
        size = within("size", DEFAULT_SIZE if size is None else size, 1, 1 << 40)
    if given.srq is not None:
        if count or receive_size:
            raise ValueError("count and receive_size cannot be given with srq")
        if given.cq is None:
            raise ValueError("srq needs cq, the CQ on which its receives complete")
        count = receive_size = 0
    count = within("count", _COUNT if count is None else count, 0, _MAX_COUNT)
    if receive_size is None:
        receive_size = min(size, _RECEIVE_SIZE)
    receive_size = within("receive_size", receive_size, 0, 1 << 31)
    if len(data) > size:
        raise ValueError(f"data: {counted(len(data), 'byte')} do not fit into size={size}")
    given_access = access is not None
    access = _exposed_access(context, access, mr)
    # Report errors in these arguments now, not to the first client.
    context.choose_gid(port_num, gid_index)
    if count > context.attr.max_qp_wr:
        raise ValueError(f"count={count} is more than max_qp_wr={context.attr.max_qp_wr}")
    _try_options(context, given, port_num, gid_index)
    memory = None
    if shared and mr is None:
        memory = allocate(size)
        memory[: len(data)] = data
    exposure = Exposure(
        size,
        access,
        count,
        receive_size,
        data,
        memory,
        port_num,
        gid_index,
        mr,
        private_data,
        Access(0) if mr is None else mr.access,
        given_access,
    )
    exposure.refuse_unenforced(context)
    return exposure


def windows_access(access: Access) -> Access:
    """Return the access that a queue pair must permit for windows of a region with this access."""
    return EXPOSABLE if access & Access.MW_BIND else Access(0)


def _exposable(context: Context) -> Access:
    return EXPOSABLE if context.attr.atomic_cap else EXPOSABLE & ~Access.REMOTE_ATOMIC


def _exposed_access(context: Context, access: int | None, mr: MR | None) -> Access:
    if access is None:
        return _exposable(context)
    access = flags("access", access, EXPOSABLE, "REMOTE_READ, REMOTE_WRITE and REMOTE_ATOMIC")
    if access & ~_exposable(context):
        raise RdmaError(f"{context.name} has no atomics (atomic_cap is NONE)")
    if mr is not None and (missing := access & ~mr.access):
        raise ValueError(f"access: the MR lacks {missing.name}")
    return access


def _try_options(context: Context, given: Given, port_num: int, gid_index: int | None) -> None:
    if not given.create and not given.connect:
        return
    with (
        PD(context) if given.pd is None else contextlib.nullcontext(given.pd) as pd,
        CQ(context, 1) as cq,
        QP(pd, QPType.RC, cq, port_num=port_num, gid_index=gid_index, **given.create) as qp,
    ):
        qp.connect(qp.endpoint(), **given.connect)

"""A caller's arguments to serve and dial: resources, queue pair options, private data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from ..._arguments import content, expect, within
from ...resources.cq import CQ
from ...resources.device import Context
from ...resources.mr import MR
from ...resources.pd import PD
from ...resources.resource import struct_of
from ...resources.srq import SRQ
from .protocol_messages import MAX_PRIVATE_DATA


class CreateOptions(TypedDict, total=False):
    """Keyword arguments of QP."""

    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int
    send_ops_flags: int
    sq_sig_all: bool
    checked: bool


class ConnectOptions(TypedDict, total=False):
    """Keyword arguments of QP.connect."""

    min_rnr_timer: int
    max_dest_rd_atomic: int
    sl: int
    traffic_class: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    max_rd_atomic: int


class QPOptions(CreateOptions, ConnectOptions, total=False):
    """Keyword arguments of QP and QP.connect, for the queue pairs that serve and dial create."""


@dataclass(frozen=True, slots=True)
class Given:
    """The caller's options, and resources to use instead of those serve or dial would create.

    Attributes:
        mr: the region to expose, or to send from.
        srq: where the queue pairs take their receives from.
        cq: where their work requests complete.
        create, connect: options of QP and QP.connect.
    """

    mr: MR | None
    srq: SRQ | None
    cq: CQ | None
    create: Mapping[str, Any]
    connect: Mapping[str, Any]

    @property
    def pd(self) -> PD | None:
        """The protection domain of mr and srq, or None."""
        owner = self.srq if self.mr is None else self.mr
        return None if owner is None else owner.pd


def check_given(
    context: Context,
    mr: MR | None,
    srq: SRQ | None,
    cq: CQ | None,
    qp_options: QPOptions | None,
    not_these: Iterable[str] = (),
) -> Given:
    """Check the arguments of serve or dial; qp_options may not contain any of `not_these`."""
    expect("context", context, Context)
    expect("mr", mr, MR, None)
    expect("srq", srq, SRQ, None)
    expect("cq", cq, CQ, None)
    for name, resource in (("mr", mr), ("srq", srq)):
        if resource is not None and resource.pd.context is not context:
            raise ValueError(f"{name} belongs to another open device")
    if cq is not None and cq.context is not context:
        raise ValueError("cq belongs to another open device")
    if mr is not None and srq is not None and mr.pd is not srq.pd:
        raise ValueError("mr and srq belong to different PDs")
    for given in (mr, srq, cq):
        if given is not None:
            struct_of(given)
    if qp_options is not None and not isinstance(qp_options, Mapping):
        raise TypeError(f"qp_options: expected a dict, got {type(qp_options).__name__}")
    options: dict[str, Any] = dict(qp_options or {})
    known = QPOptions.__annotations__.keys() - set(not_these)
    for name in options:
        if name not in known:
            raise ValueError(f"qp_options: {name!r} is not one of {', '.join(sorted(known))}")
    create = {name: options[name] for name in CreateOptions.__annotations__ if name in options}
    for name in create:
        if name.startswith("max_"):
            create[name] = within(name, create[name], 0, (1 << 32) - 1)
    connect = {name: options[name] for name in ConnectOptions.__annotations__ if name in options}
    return Given(mr, srq, cq, create, connect)


def private_bytes(given: bytes) -> bytes:
    """Check the argument private_data, and return it as bytes.

    Raises:
        TypeError: it is not a buffer.
        ValueError: it is longer than a message can carry.
    """
    data = content("private_data", given)
    if len(data) > MAX_PRIVATE_DATA:
        raise ValueError(f"private_data: {len(data)} bytes; at most {MAX_PRIVATE_DATA} are allowed")
    return data

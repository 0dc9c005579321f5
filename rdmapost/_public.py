"""Every public name, from where it is defined; ``rdmapost`` re-exports them."""

from collections.abc import Sequence
from typing import Any, ClassVar

from .enums import (
    MTU,
    Access,
    AtomicCap,
    DeviceCap,
    EventType,
    GIDType,
    LinkLayer,
    MigState,
    MWType,
    NodeType,
    Opcode,
    OpsFlags,
    OpsOpcode,
    PortState,
    QPAttrMask,
    QPState,
    QPType,
    SendFlags,
    SRQAttrMask,
    SRQType,
    WCFlags,
    WCOpcode,
    WCStatus,
)
from .errors import (
    ClosedError,
    CompletionError,
    InUseError,
    NoDeviceError,
    NoRdmaError,
    PostError,
    RdmaError,
    UnsupportedError,
    VerbsError,
    WaitTimeout,
)
from .posting.prepared import Batch, PreparedWR
from .posting.rules import MULTICAST_QPN
from .posting.wr import (
    SGE,
    TSO,
    AtomicCmpAndSwp,
    AtomicFetchAndAdd,
    BindMW,
    LocalInv,
    OpsWR,
    RdmaRead,
    RdmaWrite,
    RdmaWriteWithImm,
    RecvWR,
    Send,
    SendWithImm,
    SendWithInv,
    SendWR,
    TagAdd,
    TagDel,
    TagHandle,
    TagSync,
)
from .providers import DeviceInfo
from .resources.address import AH, AHAttr, GIDChoice, choose_gid
from .resources.channel import CompChannel
from .resources.cq import CQ, WC
from .resources.device import (
    GID,
    Context,
    DeviceAttr,
    GIDTableEntry,
    PortAttr,
    list_devices,
    open_device,
)
from .resources.endpoint import Endpoint
from .resources.events import AsyncEvent, get_async_event
from .resources.grh import GRH, Datagram
from .resources.memory import MR, MW, PD
from .resources.qp import QP, Outstanding, set_checklist
from .resources.qp_attr import QPAttr
from .resources.resource import Resource
from .resources.srq import SRQ, SRQAttr
from .resources.xrcd import XRCD
from .tools import export
from .tools.max_inline import max_inline


def _diagnose(qp: QP, peer: QP | Endpoint | None) -> Any:
    from .tools.diagnose import diagnose  # asked for rarely

    return diagnose(qp, peer)


# The core knows nothing of the tools.
set_checklist(_diagnose)

__all__ = [
    "AH",
    "CQ",
    "GID",
    "GRH",
    "MR",
    "MTU",
    "MULTICAST_QPN",
    "MW",
    "PD",
    "QP",
    "SGE",
    "SRQ",
    "TSO",
    "WC",
    "XRCD",
    "AHAttr",
    "Access",
    "AsyncEvent",
    "AtomicCap",
    "AtomicCmpAndSwp",
    "AtomicFetchAndAdd",
    "Batch",
    "BindMW",
    "ClosedError",
    "CompChannel",
    "CompletionError",
    "Context",
    "Datagram",
    "DeviceAttr",
    "DeviceCap",
    "DeviceInfo",
    "Endpoint",
    "EventType",
    "GIDChoice",
    "GIDTableEntry",
    "GIDType",
    "InUseError",
    "LinkLayer",
    "LocalInv",
    "MWType",
    "MigState",
    "NoDeviceError",
    "NoRdmaError",
    "NodeType",
    "Opcode",
    "OpsFlags",
    "OpsOpcode",
    "OpsWR",
    "Outstanding",
    "PortAttr",
    "PortState",
    "PostError",
    "PreparedWR",
    "QPAttr",
    "QPAttrMask",
    "QPState",
    "QPType",
    "RdmaError",
    "RdmaRead",
    "RdmaWrite",
    "RdmaWriteWithImm",
    "RecvWR",
    "SRQAttr",
    "SRQAttrMask",
    "SRQType",
    "Send",
    "SendFlags",
    "SendWR",
    "SendWithImm",
    "SendWithInv",
    "TagAdd",
    "TagDel",
    "TagHandle",
    "TagSync",
    "UnsupportedError",
    "VerbsError",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
    "WaitTimeout",
    "choose_gid",
    "get_async_event",
    "list_devices",
    "max_inline",
    "open_device",
]

export(__package__, globals())

ANNOTATIONS = {"Any": Any, "ClassVar": ClassVar, "Resource": Resource, "Sequence": Sequence}
"""What annotations of the public classes name besides: ``typing.get_type_hints`` looks it up in the
module that a class gives as its own."""

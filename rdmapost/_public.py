"""Every public name, imported from the module that defines it; ``rdmapost`` re-exports them."""

from collections.abc import Sequence
from typing import Any, ClassVar

from .enums import (
    MTU,
    Access,
    AdviseMRAdvice,
    AdviseMRFlags,
    AtomicCap,
    DeviceCap,
    EventType,
    FlushLevel,
    FlushType,
    GIDType,
    LinkLayer,
    MigState,
    MWType,
    NodeType,
    ODPGeneralCap,
    ODPTransportCap,
    Opcode,
    OpsFlags,
    OpsOpcode,
    PortCap,
    PortState,
    QPAttrMask,
    QPState,
    QPType,
    QueryQPDataInOrderCaps,
    QueryQPDataInOrderFlags,
    RawPacketCap,
    SendFlags,
    SendOps,
    SRQAttrMask,
    SRQType,
    TMCap,
    TransportType,
    WCExFlags,
    WCFlags,
    WCOpcode,
    WCStatus,
)
from .errors import (
    ClosedError,
    CloseError,
    CompletionError,
    InUseError,
    NoDeviceError,
    NoRdmaError,
    PostError,
    RdmaError,
    UnsupportedError,
    VerbsError,
    WaitCancelled,
    WaitTimeout,
)
from .posting.columns import Blocks
from .posting.prepared import Batch, PreparedWR
from .posting.wr import (
    SGE,
    TSO,
    AtomicCmpAndSwp,
    AtomicFetchAndAdd,
    AtomicWrite,
    BindMW,
    Flush,
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
from .providers import Capture, Counters, DeviceInfo, FaultPlan, RoceInterface
from .resources.ah import AH, AHAttr
from .resources.channel import CompChannel
from .resources.cq import CQ, WC, WC_DTYPE
from .resources.device import Context, list_devices, list_roce_interfaces, open_device
from .resources.device_attr import DeviceAttr, ODPCaps, PortAttr, TMCaps, TSOCaps
from .resources.endpoint import Endpoint
from .resources.events import AsyncEvent
from .resources.gid import GID, GIDChoice, GIDTableEntry
from .resources.grh import GRH, Datagram
from .resources.mr import MR
from .resources.mw import MW
from .resources.pd import PD
from .resources.qp import QP, Outstanding, set_checklist
from .resources.qp_attr import QPAttr, QPInitAttr
from .resources.resource import Resource
from .resources.srq import SRQ, SRQAttr
from .resources.xrcd import XRCD
from .standard.opcodes import MULTICAST_QPN
from .tools import export
from .tools.max_inline import max_inline


def _diagnose(qp: QP, peer: QP | Endpoint | None) -> Any:
    from .tools.diagnose.checklist import run_checklist  # rarely needed

    return run_checklist(qp, peer)


# The core must not import the tools.
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
    "WC_DTYPE",
    "XRCD",
    "AHAttr",
    "Access",
    "AdviseMRAdvice",
    "AdviseMRFlags",
    "AsyncEvent",
    "AtomicCap",
    "AtomicCmpAndSwp",
    "AtomicFetchAndAdd",
    "AtomicWrite",
    "Batch",
    "BindMW",
    "Blocks",
    "Capture",
    "CloseError",
    "ClosedError",
    "CompChannel",
    "CompletionError",
    "Context",
    "Counters",
    "Datagram",
    "DeviceAttr",
    "DeviceCap",
    "DeviceInfo",
    "Endpoint",
    "EventType",
    "FaultPlan",
    "Flush",
    "FlushLevel",
    "FlushType",
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
    "ODPCaps",
    "ODPGeneralCap",
    "ODPTransportCap",
    "Opcode",
    "OpsFlags",
    "OpsOpcode",
    "OpsWR",
    "Outstanding",
    "PortAttr",
    "PortCap",
    "PortState",
    "PostError",
    "PreparedWR",
    "QPAttr",
    "QPAttrMask",
    "QPInitAttr",
    "QPState",
    "QPType",
    "QueryQPDataInOrderCaps",
    "QueryQPDataInOrderFlags",
    "RawPacketCap",
    "RdmaError",
    "RdmaRead",
    "RdmaWrite",
    "RdmaWriteWithImm",
    "RecvWR",
    "RoceInterface",
    "SRQAttr",
    "SRQAttrMask",
    "SRQType",
    "Send",
    "SendFlags",
    "SendOps",
    "SendWR",
    "SendWithImm",
    "SendWithInv",
    "TMCap",
    "TMCaps",
    "TSOCaps",
    "TagAdd",
    "TagDel",
    "TagHandle",
    "TagSync",
    "TransportType",
    "UnsupportedError",
    "VerbsError",
    "WCExFlags",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
    "WaitCancelled",
    "WaitTimeout",
    "list_devices",
    "list_roce_interfaces",
    "max_inline",
    "open_device",
]

export(__package__, globals())

ANNOTATIONS = {"Any": Any, "ClassVar": ClassVar, "Resource": Resource, "Sequence": Sequence}
"""Other names in the annotations of public classes: ``typing.get_type_hints`` looks them up in the
class's ``__module__``."""

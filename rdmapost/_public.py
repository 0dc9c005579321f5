"""Every public name, from where it is defined; ``rdmapost`` re-exports them."""

from .address import AH, AHAttr, GIDChoice, choose_gid
from .channel import CompChannel
from .completion import CQ, WC
from .device import (
    GID,
    Context,
    DeviceAttr,
    GIDTableEntry,
    PortAttr,
    list_devices,
    open_device,
)
from .endpoint import Endpoint
from .enums import *  # noqa: F403 - the enumerations, listed in enums.__all__
from .enums import __all__ as _enums
from .errors import *  # noqa: F403
from .errors import __all__ as _errors
from .events import AsyncEvent, get_async_event
from .grh import GRH, Datagram
from .inline import max_inline
from .memory import MR, MW, PD
from .prepared import Batch, PreparedWR
from .providers import DeviceInfo
from .qpattr import QPAttr
from .queuepair import QP, Outstanding
from .rules import MULTICAST_QPN
from .srq import SRQ, SRQAttr
from .wr import *  # noqa: F403
from .wr import __all__ as _wr
from .xrcd import XRCD

__all__ = [
    "AH", "CQ", "GID", "GRH", "MR", "MULTICAST_QPN", "MW", "PD", "QP", "SRQ", "WC", "XRCD",
    "AHAttr", "AsyncEvent", "Batch", "CompChannel", "Context", "Datagram", "DeviceAttr",
    "DeviceInfo", "Endpoint", "GIDChoice", "GIDTableEntry", "Outstanding", "PortAttr",
    "PreparedWR", "QPAttr", "SRQAttr", "choose_gid", "get_async_event", "list_devices",
    "max_inline", "open_device",
]  # fmt: skip
__all__ += [*_enums, *_errors, *_wr]

"""Every public name, from where it is defined; ``rdmapost`` re-exports them."""

from .enums import *  # noqa: F403 - the enumerations, listed in enums.__all__
from .enums import __all__ as _enums
from .errors import *  # noqa: F403
from .errors import __all__ as _errors
from .posting.prepared import Batch, PreparedWR
from .posting.rules import MULTICAST_QPN
from .posting.wr import *  # noqa: F403
from .posting.wr import __all__ as _wr
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
from .resources.qp import QP, Outstanding
from .resources.qp_attr import QPAttr
from .resources.srq import SRQ, SRQAttr
from .resources.xrcd import XRCD
from .tools.max_inline import max_inline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _diagnose(qp: QP, peer: "QP | Endpoint | None") -> "Any":
    from .tools.diagnose import diagnose  # asked for rarely

    return diagnose(qp, peer)


# The core knows nothing of the tools.
QP._checklist = staticmethod(_diagnose)

__all__ = [
    "AH",
    "CQ",
    "GID",
    "GRH",
    "MR",
    "MULTICAST_QPN",
    "MW",
    "PD",
    "QP",
    "SRQ",
    "WC",
    "XRCD",
    "AHAttr",
    "AsyncEvent",
    "Batch",
    "CompChannel",
    "Context",
    "Datagram",
    "DeviceAttr",
    "DeviceInfo",
    "Endpoint",
    "GIDChoice",
    "GIDTableEntry",
    "Outstanding",
    "PortAttr",
    "PreparedWR",
    "QPAttr",
    "SRQAttr",
    "choose_gid",
    "get_async_event",
    "list_devices",
    "max_inline",
    "open_device",
]
__all__ += [*_enums, *_errors, *_wr]

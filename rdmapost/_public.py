"""Every public name, imported from the module that defines it; ``rdmapost`` re-exports them."""

from collections.abc import Sequence
from typing import Any, ClassVar

# Not "from . import enums, errors", which would call the package's __getattr__().
import rdmapost.enums as enums
import rdmapost.errors as errors

from .enums import *  # noqa: F403
from .errors import *  # noqa: F403
from .posting import wr
from .posting.columns import Blocks
from .posting.prepared import Batch, PreparedWR
from .posting.wr import *  # noqa: F403
from .providers import Capture, Counters, DeviceInfo, RoceInterface
from .resources.ah import AH, AHAttr
from .resources.channel import CompChannel
from .resources.cq import CQ, WC, WC_DTYPE
from .resources.device import Context, list_devices, list_roce_interfaces, open_device
from .resources.device_attr import DeviceAttr, ODPCaps, PortAttr, TMCaps, TSOCaps
from .resources.endpoint import Endpoint
from .resources.events import AsyncEvent
from .resources.gid import GID, GIDChoice, GIDTableEntry
from .resources.grh import GRH, Datagram
from .resources.memory import MR, MW, PD
from .resources.qp import QP, Outstanding, set_checklist
from .resources.qp_query import QPAttr, QPInitAttr
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
    "MULTICAST_QPN",
    "MW",
    "PD",
    "QP",
    "SRQ",
    "WC",
    "WC_DTYPE",
    "XRCD",
    "AHAttr",
    "AsyncEvent",
    "Batch",
    "Blocks",
    "Capture",
    "CompChannel",
    "Context",
    "Counters",
    "Datagram",
    "DeviceAttr",
    "DeviceInfo",
    "Endpoint",
    "GIDChoice",
    "GIDTableEntry",
    "ODPCaps",
    "Outstanding",
    "PortAttr",
    "PreparedWR",
    "QPAttr",
    "QPInitAttr",
    "RoceInterface",
    "SRQAttr",
    "TMCaps",
    "TSOCaps",
    "list_devices",
    "list_roce_interfaces",
    "max_inline",
    "open_device",
]
__all__ += enums.__all__
__all__ += errors.__all__
__all__ += wr.__all__

export(__package__, globals())

ANNOTATIONS = {"Any": Any, "ClassVar": ClassVar, "Resource": Resource, "Sequence": Sequence}
"""Other names in the annotations of public classes: ``typing.get_type_hints`` looks them up in the
class's ``__module__``."""

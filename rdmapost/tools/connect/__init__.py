"""Connecting queue pairs of two processes over TCP.

One side serves and the other dials::

    with connect.serve(context) as server: ...
    with connect.dial(context, "10.0.0.1") as peer:
        peer.qp.post_send(rp.RdmaWrite(peer.mr[:5], **peer.target()))
        peer.wait()

``aserve`` and ``adial`` are the same for asyncio. If you already have an out-of-band channel,
use it to exchange each side's ``Endpoint``, which is one line of text.
"""

from typing import TYPE_CHECKING

from ..default_ports import CONNECT_PORT as DEFAULT_PORT
from .client import Connection, dial
from .errors import ConnectError, ConnectTimeout, ProtocolError
from .exposure import Exposure
from .host_port import parse_address
from .protocol_messages import Arrival, Offer, Seen
from .qp_options import QPOptions
from .served_client import ServedClient
from .server import Server, serve
from .server_events import Arrived, Changed, Event, Joined, Left, Refused

if TYPE_CHECKING:
    from .asyncio_client import AsyncConnection, adial
    from .asyncio_server import AsyncServer, aserve
else:

    def __getattr__(name):
        """Import asyncio only if it is used."""
        if name in ("AsyncConnection", "adial"):
            from . import asyncio_client as module
        elif name in ("AsyncServer", "aserve"):
            from . import asyncio_server as module
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(module, name)
        found.__module__ = "rdmapost.connect"
        return found

    def __dir__():
        return __all__


__all__ = [
    "DEFAULT_PORT",
    "Arrival",
    "Arrived",
    "AsyncConnection",
    "AsyncServer",
    "Changed",
    "ConnectError",
    "ConnectTimeout",
    "Connection",
    "Event",
    "Exposure",
    "Joined",
    "Left",
    "Offer",
    "ProtocolError",
    "QPOptions",
    "Refused",
    "Seen",
    "ServedClient",
    "Server",
    "adial",
    "aserve",
    "dial",
    "parse_address",
    "serve",
]

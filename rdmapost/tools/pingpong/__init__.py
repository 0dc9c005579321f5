"""Ping-pong with ibv_rc_pingpong, ibv_uc_pingpong, ibv_ud_pingpong or another rdmapost.

One message goes back and forth, and each round trip is timed.  Either side can be the
rdma-core program: the handshake, Q_Key, sizes and data are the same::

    with Pingpong(context, iters=10_000) as side:
        result = side.run_client("10.0.0.2")
    print(result.latency.p99)

On the other host, run ``side.run_server(listen(), timeout=None)``, or ``ibv_rc_pingpong``.
"""

from ..default_ports import PINGPONG_PORT as PORT
from ..tcp import name_of
from .handshake import Address, PingpongError, listen
from .result import Latency, Result
from .side import Pingpong

__all__ = ["PORT", "Address", "Latency", "Pingpong", "PingpongError", "Result", "listen", "name_of"]

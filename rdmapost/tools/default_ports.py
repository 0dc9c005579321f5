"""The TCP ports of servers if none is given; the command line's help shows them."""

CONNECT_PORT = 18600
"""That of ``connect``."""
PINGPONG_PORT = 18515
"""That of ``pingpong`` and of the stock programs, such as ibv_rc_pingpong."""

"""What a device can reach, as far as is known before anything is sent."""

from __future__ import annotations

import os
import secrets

from ...resources.device import Context

_VERBS = "verbs"
_RANDOM = secrets.token_hex(8)


def fabric_of(context: Context) -> str:
    """Name what a device can reach.

    Real devices may reach each other, as far as is known here. Any other device lives in its
    process, and reaches nothing outside it.

    Args:
        context: an open device.
    """
    if context.kind == _VERBS:
        return _VERBS
    # A child process has a copy of the device, and of the random number.
    return f"{context.kind}:{context.name}:{os.getpid()}-{_RANDOM}"


def why_unreachable(server: str, client: str) -> str | None:
    """Say why two devices cannot reach each other, or None if they may.

    Args:
        server, client: as fabric_of names them.
    """
    if server == client:
        return None
    inside = [
        (who, name.split(":")[1])
        for who, name in (("server", server), ("client", client))
        if name.count(":") == 2
    ]
    if not inside:
        return f"the devices cannot reach each other: {server} and {client}"
    who = " and ".join(f"the {who} uses {name}" for who, name in inside)
    lives = (
        "such a device lives in one process and reaches nothing outside it"
        if len(inside) > 1
        else "that device lives in one process and reaches nothing outside it"
    )
    return f"{who}: {lives}; use a real device, such as rxe0, on both sides"

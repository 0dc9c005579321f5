"""Which devices a device can reach, judged before anything is sent."""

from __future__ import annotations

import os
import secrets

from ..resources.device import Context

_VERBS = "verbs"
_ON_A_NETWORK = frozenset({_VERBS, "roce"})
_RANDOM = secrets.token_hex(8)


def fabric_of(context: Context) -> str:
    """Name what a device can reach.

    Devices on a network are assumed to reach each other. soft0 exists in its process, and reaches
    nothing outside it.
    """
    if context.kind in _ON_A_NETWORK:
        return _VERBS
    # A child process has a copy of the device, and of the random number.
    return f"{context.kind}:{context.name}:{os.getpid()}-{_RANDOM}"


def why_confined(context: Context) -> str | None:
    """Say why a device cannot reach other processes, or None if it may."""
    return None if context.kind in _ON_A_NETWORK else _confined(context.name)


def why_unreachable(server: str, client: str) -> str | None:
    """Say why devices, as fabric_of names them, cannot reach each other, or None if they may."""
    if server == client:
        return None
    for who, fabric in (("server", server), ("client", client)):
        if fabric.count(":") == 2:
            return f"the {who}'s {_confined(fabric.split(':')[1])}"
    return f"the devices cannot reach each other: {server} and {client}"


def _confined(device: str) -> str:
    return (
        f"{device} exists only in its own process and reaches no other; "
        "use roce:lo, or a real device such as rxe0, on both sides"
    )

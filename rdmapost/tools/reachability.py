"""Which devices a device can reach, determined before anything is sent."""

from __future__ import annotations

import os
import secrets

from ..resources.device import Context

_VERBS = "verbs"
_ON_A_NETWORK = frozenset({_VERBS, "roce"})
_RANDOM = secrets.token_hex(8)


def fabric_of(context: Context) -> str:
    """Return a name for the fabric that a device is on.

    Devices on the same fabric can reach each other. Devices on a network are assumed to share one;
    soft0 reaches nothing outside its process.
    """
    if context.kind in _ON_A_NETWORK:
        return _VERBS
    # The PID distinguishes a forked child, which has copies of the device and the random number.
    return f"{context.kind}:{context.name}:{os.getpid()}-{_RANDOM}"


def why_confined(context: Context) -> str | None:
    """Say why a device cannot reach other processes, or None if it may."""
    return None if context.kind in _ON_A_NETWORK else _confined(context.name)


def why_unreachable(server: str, client: str) -> str | None:
    """Say why devices, named by fabric_of, cannot reach each other, or None if they may."""
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

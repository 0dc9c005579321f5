"""``rdmapost serve`` on the other machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from .remote import DEVICE, Remote


class Serving:
    """``rdmapost serve`` on the other machine."""

    def __init__(self, remote: Remote, port: int, peer: str) -> None:
        self.remote, self.port = remote, port
        self.where = f"{peer}:{port}"

    def event(self, name: str) -> dict[str, Any]:
        """Wait for an event that the server reports, after the last one waited for."""
        document: dict[str, Any] = json.loads(self.remote.until("out", f'"event": "{name}"'))
        return document


Serve = Callable[..., Serving]


@contextmanager
def servers(peer: str, device: str = DEVICE) -> Iterator[Serve]:
    """Yield a function that starts servers on the other machine; kill them afterwards."""
    with ExitStack() as stack:

        def start(*args: str) -> Serving:
            remote = stack.enter_context(
                Remote(
                    "rdmapost",
                    "serve",
                    "--json",
                    "-d",
                    device,
                    "--bind",
                    peer,
                    "--tcp-port",
                    "0",
                    *args,
                )
            )
            serving = json.loads(remote.until("out", '"event": "serving"'))
            assert serving["host"] == peer
            return Serving(remote, serving["port"], peer)

        yield start

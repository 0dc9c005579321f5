"""Providers, which execute the control verbs.

Each is loaded on first use, so soft0 costs nothing unless it is opened.  A fork waits until no
thread is loading one: the child could never finish an import begun by a thread of its parent.
"""

from __future__ import annotations

import logging  # noqa: F401 - its at-fork handlers must be registered first
import os
from threading import RLock
from typing import TYPE_CHECKING, cast

from .base import ROCE, Capture, Counters, DeviceInfo, GIDEntry, Provider, RoceInterface
from .fault_plan import FaultPlan

if TYPE_CHECKING:
    from .roce.provider import RoceProvider

__all__ = [
    "ROCE",
    "Capture",
    "Counters",
    "DeviceInfo",
    "FaultPlan",
    "GIDEntry",
    "Provider",
    "RoceInterface",
    "roce_provider",
    "soft_provider",
    "verbs_provider",
]

_loading = RLock()
_loaded: dict[str, Provider] = {}

os.register_at_fork(
    before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_loading.release
)


def verbs_provider() -> Provider:
    """Return the provider of real devices."""
    return _once("verbs")


def soft_provider() -> Provider:
    """Return the provider of soft0."""
    return _once("soft")


def roce_provider() -> RoceProvider:
    """Return the provider of RoCE v2 over UDP sockets."""
    return cast("RoceProvider", _once("roce"))


def _load(name: str) -> Provider:
    if name == "verbs":
        from .verbs import VerbsProvider

        return VerbsProvider()
    if name == "soft":
        from .soft0.provider import SoftProvider

        return SoftProvider()
    from .roce.provider import RoceProvider

    return RoceProvider()


def _once(name: str) -> Provider:
    provider = _loaded.get(name)
    if provider is None:
        with _loading:
            provider = _loaded.get(name)
            if provider is None:
                provider = _loaded[name] = _load(name)
    return provider

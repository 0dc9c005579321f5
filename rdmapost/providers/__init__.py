"""Providers: what executes the control verbs.

Each is loaded on first use, so soft0 costs nothing unless it is opened.  A fork waits
until no thread is loading one: the child could never finish an import that a thread of its parent
had begun.
"""

from __future__ import annotations

import logging  # noqa: F401 - registers its own lock for forks, which must come first
import os
from collections.abc import Callable
from threading import RLock

from .base import DeviceInfo, GIDEntry, Provider

__all__ = ["DeviceInfo", "GIDEntry", "Provider", "soft_provider", "verbs_provider"]

_loading = RLock()
_loaded: dict[str, Provider] = {}

os.register_at_fork(
    before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_loading.release
)


def verbs_provider() -> Provider:
    """Return the provider of real devices."""

    def load() -> Provider:
        from .verbs import VerbsProvider

        return VerbsProvider()

    return _once("verbs", load)


def soft_provider() -> Provider:
    """Return the provider of soft0."""

    def load() -> Provider:
        from .soft0.provider import SoftProvider

        return SoftProvider()

    return _once("soft", load)


def _once(name: str, load: Callable[[], Provider]) -> Provider:
    provider = _loaded.get(name)
    if provider is None:
        with _loading:
            provider = _loaded.get(name)
            if provider is None:
                provider = _loaded[name] = load()
    return provider

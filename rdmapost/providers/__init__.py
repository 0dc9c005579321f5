"""Who carries out the control verbs."""

from .base import DeviceInfo, GIDEntry, Provider
from .verbs import VerbsProvider

__all__ = ["DeviceInfo", "GIDEntry", "Provider", "all_providers"]

_verbs = VerbsProvider()


def all_providers() -> list[Provider]:
    """Return the providers, in the order in which devices are looked for."""
    return [_verbs]

"""Who carries out the control verbs.

A provider is loaded when it is first asked for: the soft device costs nothing
to those who do not open it.
"""

from functools import cache

from .base import DeviceInfo, GIDEntry, Provider

__all__ = ["DeviceInfo", "GIDEntry", "Provider", "soft_provider", "verbs_provider"]


@cache
def verbs_provider() -> Provider:
    """Return the provider of real devices."""
    from .verbs import VerbsProvider

    return VerbsProvider()


@cache
def soft_provider() -> Provider:
    """Return the provider of the soft device."""
    from .soft import SoftProvider

    return SoftProvider()

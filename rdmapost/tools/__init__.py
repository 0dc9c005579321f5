"""Programs built on the library, which nothing below uses; and under which name users know them."""

from collections.abc import Mapping
from types import FunctionType
from typing import Any

__all__ = ["export"]


def export(module: str, namespace: Mapping[str, Any]) -> None:
    """Let the classes and functions of a public module name it as their ``__module__``.

    Args:
        module: the name by which users import it.
        namespace: its namespace; names in ``__all__`` that are not there yet are left out.
    """
    for name in namespace["__all__"]:
        thing = namespace.get(name)
        if isinstance(thing, (type, FunctionType)) and thing.__module__.startswith("rdmapost"):
            thing.__module__ = module

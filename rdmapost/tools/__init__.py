"""Programs built on the library, which nothing below uses; and under which name users know them."""

import inspect
import sys
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any


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


def alias(module: str, room: ModuleType) -> None:
    """Let a module be another one, under the name that its users know.

    Args:
        module: its ``__name__``.
        room: what it is from now on.
    """
    for thing in map(vars(room).get, room.__all__):
        if isinstance(thing, type) and thing.__module__.startswith(__name__):
            # typing.get_type_hints would look them up in the public module, which lacks them.
            thing.__annotations__ = inspect.get_annotations(thing, eval_str=True)
    export(module, vars(room))
    sys.modules[module] = room

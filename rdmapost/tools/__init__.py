"""Programs built on the library (which never imports them) and helpers for their public modules."""

import inspect
import sys
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any


def export(module: str, namespace: Mapping[str, Any]) -> None:
    """Make a public module the ``__module__`` of its classes and functions.

    Args:
        module: the name by which users import it.
        namespace: its namespace; names in ``__all__`` that the module loads later are left out.
    """
    for name in namespace["__all__"]:
        thing = namespace.get(name)
        if isinstance(thing, (type, FunctionType)) and thing.__module__.startswith("rdmapost"):
            thing.__module__ = module


def alias(module: str, implementation: ModuleType) -> None:
    """Replace a public module with the private one that implements it.

    Args:
        module: the name by which users import it.
        implementation: the private module.
    """
    for thing in map(vars(implementation).get, implementation.__all__):
        if isinstance(thing, type) and thing.__module__.startswith(__name__):
            # Evaluate annotations now: typing.get_type_hints would look in the public module
            # for the names that they use, and not find them.
            thing.__annotations__ = inspect.get_annotations(thing, eval_str=True)
    export(module, vars(implementation))
    sys.modules[module] = implementation

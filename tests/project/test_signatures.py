"""Everything public has a signature and a docstring that ``inspect`` and ``help()`` show."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pydoc
import typing
from collections.abc import Iterator
from typing import Any

import jedi
import pytest

import rdmapost as rp

MODULES = ["check", "connect", "diagnose", "explain", "frames", "loopback", "pingpong"]
OPEN = {"max_inline", "loopback", "AsyncConnection", "Connection"}
"""Their other arguments are the fields or the options of another class."""


def public() -> Iterator[tuple[str, Any]]:
    """Go through functions, classes and methods; special methods that are ours included."""
    places = [("rdmapost", rp)]
    places += [(f"rdmapost.{m}", importlib.import_module(f"rdmapost.{m}")) for m in MODULES]
    for place, module in places:
        for name in module.__all__:
            thing = getattr(module, name)
            if not inspect.isroutine(thing) and not inspect.isclass(thing):
                continue
            if typing.is_typeddict(thing):
                continue  # tests/typing has it
            yield f"{place}.{name}", thing
            if not inspect.isclass(thing) or issubclass(thing, (enum.Enum, BaseException)):
                continue
            for member in dir(thing):
                each = getattr(thing, member)
                builtin = each in [getattr(base, member, None) for base in (bytes, tuple)]
                if not member.startswith("_") and callable(each) and not builtin:
                    yield f"{place}.{name}.{member}", each


ALL = dict(public())
ALL |= {
    "rdmapost.MR.__getitem__": rp.MR.__getitem__,
    "rdmapost.Batch.__getitem__": rp.Batch.__getitem__,
}


@pytest.mark.parametrize("name", ALL)
def test_signature_names_the_arguments(name: str) -> None:
    thing = ALL[name]
    if inspect.isclass(thing) and issubclass(thing, (enum.Enum, BaseException)):
        return
    kinds = {each.kind for each in inspect.signature(thing).parameters.values()}
    if name.rpartition(".")[2] not in OPEN:
        assert inspect.Parameter.VAR_KEYWORD not in kinds
        assert inspect.Parameter.VAR_POSITIONAL not in kinds


@pytest.mark.parametrize("name", ALL)
def test_help_shows_a_docstring(name: str) -> None:
    doc = inspect.getdoc(ALL[name])
    assert doc
    assert doc.splitlines()[0] in pydoc.plain(pydoc.render_doc(ALL[name]))


@pytest.fixture(scope="module")
def completed() -> dict[str, set[str]]:
    """What jedi, and so most editors, show as the arguments of each name."""
    imports = "".join(f"import rdmapost.{module}\n" for module in MODULES)
    script = jedi.Script(imports + "".join(f"{name}()\n" for name in ALL), path=__file__)
    shown = {}
    for line, name in enumerate(ALL, len(MODULES) + 1):
        signatures = script.get_signatures(line, len(name) + 1)
        shown[name] = {each.name for signature in signatures for each in signature.params}
    return shown


@pytest.mark.parametrize("name", ALL)
def test_editors_show_the_arguments(name: str, completed: dict[str, set[str]]) -> None:
    thing = ALL[name]
    if inspect.isclass(thing) and issubclass(thing, (enum.Enum, BaseException, tuple)):
        return  # for named tuples jedi shows typing.NamedTuple's own arguments
    arguments = {*inspect.signature(thing).parameters} - {"self"}
    assert arguments - {"args", "options"} <= completed[name]


def test_columns_are_the_fields_of_all_work_requests_but_handles() -> None:
    named = {*inspect.signature(rp.QP.post_columns).parameters}
    fields = {
        field.name
        for each in vars(rp).values()
        if inspect.isclass(each) and issubclass(each, rp.SendWR)
        if each not in (rp.BindMW, rp.TSO)
        for field in dataclasses.fields(each)
    }
    assert named == fields | {"self", "wr_type", "signal_every"}


def test_subclass_of_a_work_request_shows_its_own_fields() -> None:
    @dataclasses.dataclass
    class Tagged(rp.RdmaWrite):
        tag: int = 0

    class Same(rp.RdmaWrite):
        pass

    class Own(rp.Send):
        def __init__(self, text: str) -> None:
            """Take something else."""

    assert "tag" in inspect.signature(Tagged).parameters
    assert inspect.signature(Same) == inspect.signature(rp.RdmaWrite)
    assert list(inspect.signature(Own).parameters) == ["text"]

"""The docstrings of everything public: they have a fixed form, and agree with the code.

A summary in one sentence, imperative where something is done; Args that are those of the
signature, what is returned, what is raised, and the man page of the verb behind it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import pytest

import rdmapost as rp

MODULES = ["check", "connect", "diagnose", "explain", "frames", "loopback", "pingpong"]
SECTIONS = ["Args", "Attributes", "Returns", "Raises"]
"""In this order."""


class Documented(NamedTuple):
    """Something public.

    Attributes:
        name: its dotted name.
        thing: the function or class.
        owner: the class that a method belongs to, or None.
    """

    name: str
    thing: Any
    owner: type | None


def is_function(thing: Any) -> bool:
    """Whether it is a function or a method, of Python or of C."""
    return inspect.isfunction(thing) or isinstance(thing, types.MethodDescriptorType)


def public() -> Iterator[Documented]:
    """Go through what is public: functions and classes, and their methods and properties."""
    seen: set[int] = set()
    places = [("rdmapost", rp)]
    places += [(f"rdmapost.{m}", importlib.import_module(f"rdmapost.{m}")) for m in MODULES]
    for module_name, module in places:
        for name in module.__all__:
            thing = getattr(module, name)
            if id(thing) in seen or not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            seen.add(id(thing))
            yield Documented(f"{module_name}.{name}", thing, None)
            if inspect.isclass(thing):
                yield from members(f"{module_name}.{name}", thing, seen)


def members(of: str, cls: type, seen: set[int]) -> Iterator[Documented]:
    for base in cls.__mro__:
        if not base.__module__.startswith("rdmapost"):
            continue
        for name, member in vars(base).items():
            if isinstance(member, (classmethod, staticmethod)):
                member = member.__func__
            if name.startswith("_") or id(member) in seen:
                continue
            if isinstance(member, property) or is_function(member):
                seen.add(id(member))
                yield Documented(f"{of}.{name}", member, base)


ALL = list(public())
FUNCTIONS = [one for one in ALL if is_function(one.thing)]
CLASSES = [one for one in ALL if inspect.isclass(one.thing)]
every = pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
every_function = pytest.mark.parametrize("one", FUNCTIONS, ids=lambda one: one.name)
every_class = pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.name)


def sections(thing: Any) -> dict[str, list[str]]:
    """Return the sections of a docstring, by name: the lines of each."""
    doc = inspect.cleandoc(thing.__doc__ or "")
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in doc.splitlines():
        head = re.fullmatch(r"([A-Z]\w+):", line)
        if head is not None:
            current = found.setdefault(head[1], [])
        elif line and not line.startswith(" "):
            current = []
        else:
            current.append(line)
    return found


def named(thing: Any, *names: str) -> list[str]:
    """Return the names in sections of a docstring, in order."""
    found: list[str] = []
    for section in names:
        for line in sections(thing).get(section, []):
            entry = re.match(r"    ([\w.]+(?:, [\w.]+)*): ", f"{line} ")
            if entry is not None:
                found += entry[1].split(", ")
    return found


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def source(function: Any) -> str:
    """Return a function's statements; nothing for one that a decorator has made."""
    if not inspect.isfunction(function) or not function.__module__.startswith("rdmapost"):
        return ""
    if function.__code__.co_filename == "<string>":
        return ""
    return textwrap.dedent(inspect.getsource(function))


def raised(function: Any) -> set[str]:
    """Return the public exceptions that a function's own statements raise."""
    tree = ast.parse(source(function))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            if re.fullmatch(r"[A-Z]\w*(Error|Timeout)", name):
                found.add(name)
    return found - {"AssertionError", "NotImplementedError", "AttributeError"}


def verbs(function: Any) -> set[str]:
    """Return the verbs that a function's own statements call."""
    called = re.findall(r"(?:provider_of\([\w.]+\)\.|lib\.ibv_|native\.)(\w+)\(", source(function))
    return set(called) - {"faults", "Lock"}


@every
def test_docstring_has_a_summary(one: Documented) -> None:
    """One sentence on the first line, and a blank line after it."""
    doc = one.thing.__doc__
    assert doc, "no docstring"
    summary, _, rest = inspect.cleandoc(doc).partition("\n")
    assert summary[0].isupper() or summary.startswith(("``", "ibv_"))
    assert re.search(r"[.?](\s|$)", summary), summary
    assert not rest or rest.startswith("\n"), summary


@every_function
def test_docstring_is_imperative(one: Documented) -> None:
    """It says what to do; what is true or false says whether."""
    first = one.thing.__doc__.split()[0].rstrip(",.")
    assert first == "Whether" or not re.search(r"[^s]s$|ed$|(?<!^Br)ing$", first), first


@every
def test_docstring_sections_have_an_order(one: Documented) -> None:
    found = [name for name in sections(one.thing) if name in SECTIONS]
    assert set(sections(one.thing)) <= set(SECTIONS)
    assert found == [name for name in SECTIONS if name in found]


@every_function
def test_documented_args_are_those_of_the_signature(one: Documented) -> None:
    assert named(one.thing, "Args") == parameters(one.thing)


@every_class
def test_class_documents_its_arguments(one: Documented) -> None:
    """Each argument is in Args, or for a record in Attributes; and nothing else is in Args."""
    cls = one.thing
    if issubclass(cls, (Enum, BaseException)) or not (
        dataclasses.is_dataclass(cls) or hasattr(cls, "_fields") or "__init__" in vars(cls)
    ):
        return
    if re.search(r"creates it\b|the names are the man page's", cls.__doc__):
        # Its creator documents its arguments; the man page documents the fields.
        return
    takes = parameters(cls)
    said = named(cls, "Args", "Attributes")
    assert [name for name in takes if name not in said] == []
    assert [name for name in named(cls, "Args") if name not in takes] == []


@every_function
def test_docstring_says_what_is_returned(one: Documented) -> None:
    annotation = inspect.signature(one.thing).return_annotation
    if annotation in ("None", "NoReturn", "Self", inspect.Signature.empty, None):
        return
    summary = one.thing.__doc__.partition("\n")[0]
    assert "Returns" in sections(one.thing) or re.search(
        r"^(Return|Whether|Say|Make|Create|List|Open|Wait|Yield|Find|Choose|Read)\b|\breturn",
        summary,
    ), summary


@every_function
def test_docstring_says_what_is_raised(one: Documented) -> None:
    missing = raised(one.thing) - set(named(one.thing, "Raises"))
    assert missing == set()


@every_class
def test_class_documents_what_its_constructor_raises(one: Documented) -> None:
    made = {name: vars(one.thing).get(name) for name in ("__init__", "__new__", "__post_init__")}
    missing = set().union(*map(raised, made.values())) - set(named(one.thing, "Raises"))
    assert missing == set()


@every
def test_docstring_names_the_man_page_of_its_verb(one: Documented) -> None:
    """What calls a verb, or its class, says where that is described."""
    thing, owner = one.thing, one.owner
    if inspect.isclass(thing):
        thing, owner = vars(thing).get("__init__"), thing
    elif isinstance(thing, property):
        thing = thing.fget
    if verbs(thing):
        docs = (thing.__doc__ or "") + (owner.__doc__ or "" if owner else "")
        assert re.search(r"\w\(3\)|struct ibv_", docs), verbs(thing)


def test_reference_has_every_public_name() -> None:
    """The pages of the reference list what the package has."""
    from support.documents import ROOT

    pages = "\n".join(path.read_text() for path in ROOT.glob("docs/reference/*.rst"))
    shown = re.findall(r"\.\. auto(?:class|exception|function|data):: (\w+)\n", pages)
    assert sorted(shown) == sorted(rp.__all__)
    modules = re.findall(r"\.\. automodule:: rdmapost\.([\w.]+)\n", pages)
    assert sorted(modules) == sorted(MODULES)

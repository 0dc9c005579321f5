"""What the code that verbs and their devices run may not do."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator
from enum import EnumMeta

import pytest

import rdmapost
from rdmapost import enums

PACKAGE = pathlib.Path(rdmapost.__file__).parent
SOURCES = [
    path
    for room in ("posting", "providers", "resources")
    for path in sorted((PACKAGE / room).rglob("*.py"))
]
AT_IMPORT = {"_once", "_fixed"}
"""Functions of resource.py that run when a class is made."""
NESTED = (ast.FunctionDef, ast.Lambda, ast.GeneratorExp)
ENUMS = {name for name, value in vars(enums).items() if isinstance(value, EnumMeta)}
GO_THROUGH = {"frozenset", "iter", "list", "map", "max", "min", "set", "sorted", "sum", "tuple"}


def goes_through_enum(node: ast.AST) -> bool:
    """Whether it iterates over the members, of which enum makes a generator."""
    gone: list[ast.expr] = []
    if isinstance(node, ast.For | ast.comprehension):
        gone = [node.iter]
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in GO_THROUGH:
        gone = node.args
    return any(isinstance(each, ast.Name) and each.id in ENUMS for each in gone)


def nested(node: ast.AST, in_function: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Yield | ast.YieldFrom) or (
            in_function and (isinstance(child, NESTED) or goes_through_enum(child))
        ):
            yield child.iter if isinstance(child, ast.comprehension) else child
        if not (isinstance(child, ast.FunctionDef) and child.name in AT_IMPORT):
            made = isinstance(child, (ast.FunctionDef, ast.Lambda))
            yield from nested(child, in_function or made)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_function_or_generator_is_made_at_run_time(path: pathlib.Path) -> None:
    """CPython 3.12 and 3.13 crash if there is no memory for one: use lists, and methods."""
    found = [
        f"{path.name}:{getattr(node, 'lineno', 0)}"
        for node in nested(ast.parse(path.read_text()), False)
    ]
    assert found == []

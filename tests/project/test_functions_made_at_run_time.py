"""Code that verbs and their devices run creates no functions, and in some folders no generators."""

from __future__ import annotations

import ast
import pathlib
from enum import EnumMeta

import pytest

import rdmapost
from rdmapost import enums

PACKAGE = pathlib.Path(rdmapost.__file__).parent
REPORTS = {"check", "diagnose", "explain", "pingpong"}
"""Tools whose results are reports: no verb and no connection runs their code."""
SOURCES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    # An installed package has the commands in it.
    if path.relative_to(PACKAGE).parts[0] != "cli"
    and (path.relative_to(PACKAGE).parts[0] != "tools" or path.parts[-2] not in REPORTS)
]
AT_IMPORT = {("resources/resource.py", "_once"), ("resources/resource.py", "_fixed")}
"""Functions that run only when a class is made."""
WITH_VERBS = {"posting", "providers", "resources"}
"""Folders without generators: an unfinished one, dropped out of memory, complains on stderr."""
NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp, ast.ClassDef)
OF_LIBRARY = {"ExitStack", "asdict", "contextlib.ExitStack", "dataclasses.asdict", "json.dumps"}
"""What makes functions in the standard library and can be avoided."""
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


class Finder(ast.NodeVisitor):
    """Finds code that creates a function, or a generator if these are forbidden too."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.with_verbs = name.split("/")[0] in WITH_VERBS
        self.in_function = False
        self.found: list[str] = []

    def is_forbidden(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return self.with_verbs
        if isinstance(node, ast.Call) and ast.unparse(node.func) in OF_LIBRARY:
            return True
        return self.in_function and (isinstance(node, NESTED) or goes_through_enum(node))

    def visit(self, node: ast.AST) -> None:
        if self.is_forbidden(node):
            place = node.iter if isinstance(node, ast.comprehension) else node
            self.found.append(f"{self.name}:{getattr(place, 'lineno', 0)}")
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            self.generic_visit(node)
            return
        if (self.name, getattr(node, "name", "")) in AT_IMPORT:
            return
        # Defaults and decorators are evaluated where the function is made.
        for each in (node.args, *getattr(node, "decorator_list", ())):
            self.visit(each)
        outside, self.in_function = self.in_function, True
        for each in node.body if isinstance(node.body, list) else (node.body,):
            self.visit(each)
        self.in_function = outside


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_function_is_made_at_run_time(path: pathlib.Path) -> None:
    """CPython 3.12 and 3.13 crash if there is no memory for one: use lists, and methods.

    Calling a generator or coroutine function creates none, and raises MemoryError.
    """
    finder = Finder(path.relative_to(PACKAGE).as_posix())
    finder.visit(ast.parse(path.read_text()))
    assert finder.found == []

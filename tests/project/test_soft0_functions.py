"""What the software device's Python code may not do."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

import rdmapost

SOFT0 = pathlib.Path(rdmapost.__file__).parent / "providers" / "soft0"
FUNCTIONS = (ast.FunctionDef, ast.Lambda, ast.GeneratorExp)


def nested(node: ast.AST, in_function: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if in_function and isinstance(child, FUNCTIONS):
            yield child
        yield from nested(child, in_function or isinstance(child, (ast.FunctionDef, ast.Lambda)))


@pytest.mark.parametrize("path", sorted(SOFT0.rglob("*.py")), ids=lambda path: path.stem)
def test_soft0_makes_no_function_while_it_runs(path: pathlib.Path) -> None:
    """CPython 3.13 crashes if there is no memory for one: use lists, and methods."""
    found = [f"{path.name}:{node.lineno}" for node in nested(ast.parse(path.read_text()), False)]
    assert found == []

"""What the software device, captures and the code that polling calls may not do."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

import rdmapost

PACKAGE = pathlib.Path(rdmapost.__file__).parent
SOURCES = [
    *sorted((PACKAGE / "providers" / "soft0").rglob("*.py")),
    PACKAGE / "resources" / "buffers.py",
    *[
        PACKAGE / "providers" / "roce" / f"{name}.py"
        for name in ("capture", "pcapng", "recording", "trace")
    ],
]
NESTED = (ast.FunctionDef, ast.Lambda, ast.GeneratorExp)


def nested(node: ast.AST, in_function: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Yield | ast.YieldFrom) or (
            in_function and isinstance(child, NESTED)
        ):
            yield child
        yield from nested(child, in_function or isinstance(child, (ast.FunctionDef, ast.Lambda)))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_function_or_generator_is_made_at_run_time(path: pathlib.Path) -> None:
    """CPython 3.12 and 3.13 crash if there is no memory for one: use lists, and methods."""
    found = [f"{path.name}:{node.lineno}" for node in nested(ast.parse(path.read_text()), False)]
    assert found == []

"""What importing the package and asking for help load, and what they leave for later."""

from __future__ import annotations

import ast
import importlib
import pathlib
import pickle
import subprocess
import sys

import click
import pytest
from support import prints

import rdmapost as rp
from rdmapost.cli.app import app
from rdmapost.cli.groups import LazyCommand


def modules_after(statements: str) -> set[str]:
    """Return the modules that a new interpreter has imported after some statements."""
    code = f"{statements}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.splitlines()[-1].split())


def test_importing_rdmapost_loads_none_of_its_modules() -> None:
    """Importing the package loads none of its modules, and of Python's only a built-in one."""
    before = modules_after("pass")
    assert modules_after("import rdmapost") - before == {"rdmapost", "atexit"}


def test_every_public_name_is_there_at_its_first_use() -> None:
    """Any name can be used first, in any way."""
    for use in (
        "import rdmapost as rp; rp.RdmaWrite",
        "import rdmapost as rp; rp.errors.PostError",
        "from rdmapost import QP",
        "from rdmapost import *; RdmaWrite, PostError, Opcode, QP",
        "import rdmapost as rp; assert 'QP' in dir(rp)",
        "from rdmapost import frames; frames.ethernet",
    ):
        assert "rdmapost.resources.qp" in modules_after(use), use


OUTDATED = """
import sys, types
from rdmapost import _verbs
older = types.ModuleType("rdmapost._verbs")
older.__dict__.update({name: each for name, each in vars(_verbs).items() if name != "Queue"})
sys.modules["rdmapost._verbs"] = sys.modules["rdmapost"]._verbs = older
try:
    from rdmapost import Access
except ImportError as error:
    print(error)
"""


def test_compiled_module_built_from_older_sources_is_reported() -> None:
    """And not the name that was asked for."""
    said = prints(OUTDATED)
    assert "'Queue'" in said
    assert "compiled module" in said
    assert "Access" not in said


def test_every_public_name_is_available_and_a_missing_one_is_named() -> None:
    """All of them are available from the package, and a missing name is named."""
    for name in rp.__all__:
        assert getattr(rp, name) is not None
    assert set(rp.__all__) <= set(dir(rp))
    with pytest.raises(AttributeError, match="'rdmapost' has no attribute 'nonsense'"):
        rp.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("RDMAWrite", "RdmaWrite"),
        ("RdmaWRITE", "RdmaWrite"),
        ("Opendevice", "open_device"),
        ("WC_STATUS", "WCStatus"),
        ("wcdtype", "WC_DTYPE"),
    ],
)
def test_public_name_misspelt_in_case_or_underscores_suggests_the_right_one(
    name: str, meant: str
) -> None:
    """Once: Python adds its own suggestion to some of them, and none to WC_STATUS."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import rdmapost as rp; rp.{name}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.splitlines()[-1] == (
        f"AttributeError: module 'rdmapost' has no attribute '{name}'; did you mean {meant}?"
    )
    assert not hasattr(rp, name)
    assert getattr(rp, name, None) is None
    with pytest.raises(ImportError, match=f"cannot import name '{name}'"):
        exec(f"from rdmapost import {name}")
    with pytest.raises(AttributeError) as caught:
        getattr(rp, name)
    assert caught.value.name == name
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_type_checkers_see_every_public_name() -> None:
    """What the package imports for type checkers is what it has at run time."""
    (source,) = (pathlib.Path(place) / "__init__.py" for place in rp.__path__)
    (block,) = (
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    names = {"__name__": "rdmapost", "__package__": "rdmapost"}
    exec(compile(ast.Module(block.body, []), str(source), "exec"), names)
    assert {name for name in names if not name.startswith("__")} == set(rp.__all__)


def test_help_imports_neither_the_library_nor_a_command() -> None:
    """The list of commands comes without them."""
    loaded = modules_after(
        "import contextlib\nfrom rdmapost.cli import main\n"
        "with contextlib.suppress(SystemExit):\n    import sys; sys.argv[1:] = ['--help']; main()"
    )
    assert {name for name in loaded if name.startswith("rdmapost")} == {
        "rdmapost",
        "rdmapost.cli",
        "rdmapost.cli.app",
        "rdmapost.cli.exit_codes",
        "rdmapost.cli.failure",
        "rdmapost.cli.groups",
        "rdmapost.cli.options",
        "rdmapost.cli.output",
    }


@pytest.mark.parametrize("name", list(app.commands))
def test_command_list_shows_the_summary_of_each_command(name: str) -> None:
    """A command's line in the list is its own, as if its module had been imported."""
    shown = app.commands[name]
    assert isinstance(shown, LazyCommand)
    command = shown.load()
    assert command.name == name
    assert shown.get_short_help_str() == command.get_short_help_str()
    assert (shown.hidden, shown.deprecated) == (command.hidden, command.deprecated)


def test_command_list_has_every_command() -> None:
    """Every top-level command that a module of the command line defines is listed."""
    (place,) = importlib.import_module("rdmapost.cli").__path__
    defined = {}
    for file in pathlib.Path(place).glob("[!_]*.py"):
        module = importlib.import_module(f"rdmapost.cli.{file.stem}")
        for value in vars(module).values():
            if isinstance(value, click.Command) and value.callback.__module__ == module.__name__:
                defined[value.name] = value
    nested = {
        name
        for group in defined.values()
        if isinstance(group, click.Group) and group is not app
        for name in group.commands
    }
    assert set(defined) - nested - {app.name} == set(app.commands)

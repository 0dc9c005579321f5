"""The layers of the package: who imports whom, by the contracts in pyproject.toml.

Imports under ``if TYPE_CHECKING`` never run, and may point upwards if they only name a type; those
are listed here.
"""

from __future__ import annotations

import ast
import graphlib
import json
import pathlib
import shutil
import tomllib

import pytest
from support import LOSES_MEMORY, ROOT, prints, run_python

import rdmapost
import rdmapost.cli

NAMED_ONLY = {
    # What an error is about.
    ("rdmapost.errors", "rdmapost.resources.cq"),
    # A work request names resources, whose methods take work requests.
    ("rdmapost.posting.wr", "rdmapost.resources.ah"),
    ("rdmapost.posting.wr", "rdmapost.resources.mr"),
    ("rdmapost.posting.wr", "rdmapost.resources.mw"),
    # What work requests use belongs to a PD.
    ("rdmapost.resources.work_queues", "rdmapost.resources.pd"),
    # An event leads to a CQ, which leads to its channel.
    ("rdmapost.resources.aio", "rdmapost.resources.channel"),
    ("rdmapost.resources.aio", "rdmapost.resources.cq"),
    ("rdmapost.resources.aio", "rdmapost.resources.device"),
    ("rdmapost.resources.events", "rdmapost.resources.channel"),
    ("rdmapost.resources.events", "rdmapost.resources.cq"),
    ("rdmapost.resources.events", "rdmapost.resources.device"),
    ("rdmapost.resources.channel", "rdmapost.resources.cq"),
    # A queue pair diagnoses itself.
    ("rdmapost.resources.qp", "rdmapost.tools.diagnose"),
    # The parts of the soft device are passed to one another.
    ("rdmapost.providers.software.completion", "rdmapost.providers.software.device"),
    ("rdmapost.providers.software.completion", "rdmapost.providers.software.device_queues"),
    ("rdmapost.providers.roce.qp", "rdmapost.providers.roce.device"),
    ("rdmapost.providers.roce.receiver", "rdmapost.providers.roce.device"),
    ("rdmapost.providers.roce.sender", "rdmapost.providers.roce.device"),
    ("rdmapost.providers.soft0.datagram", "rdmapost.providers.soft0.qp"),
    ("rdmapost.providers.software.qp", "rdmapost.providers.software.device"),
    ("rdmapost.providers.soft0.qp", "rdmapost.providers.soft0.device"),
    ("rdmapost.providers.soft0.raw", "rdmapost.providers.soft0.qp"),
}
"""Modules that name a type from a module above, without importing it."""

EDGES = """
import json, grimp
graphs = [
    grimp.build_graph("rdmapost", exclude_type_checking_imports=without, cache_dir=None)
    for without in (False, True)
]
print(json.dumps([
    {module: sorted(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    for graph in graphs
]))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The sources as they are installed, with a source for what is compiled."""
    root = tmp_path_factory.mktemp("tree")
    only_sources = shutil.ignore_patterns("_c", "__pycache__", "*.so", "cli")
    [package], [cli] = rdmapost.__path__, rdmapost.cli.__path__
    shutil.copytree(package, root / "rdmapost", ignore=only_sources)
    shutil.copytree(cli, root / "rdmapost/cli", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "rdmapost/_verbs.py").touch()
    return root


@pytest.fixture(scope="module")
def graphs(tree: pathlib.Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The import graph: with imports for types only, and without."""
    every, imported = json.loads(prints(EDGES, PYTHONPATH=str(tree), **LOSES_MEMORY))
    assert "rdmapost.cli.app" in imported
    return every, imported


# It puts the current directory before all others.
LINT = """
import os, sys
os.chdir(sys.argv.pop(1))
from importlinter.cli import lint_imports_command
lint_imports_command()
"""


def lint(tree: pathlib.Path) -> str:
    """Check the contracts; return import-linter's output."""
    pyproject = str(ROOT / "pyproject.toml")
    return run_python(LINT, str(tree), "--config", pyproject, "--no-cache", "--no-logo").stdout


def test_every_package_of_the_sources_is_installed():
    """A checkout imports one that pyproject.toml does not list; a wheel would lack it."""
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = configuration["tool"]["setuptools"]["packages"]
    found = [
        ".".join(each.parent.relative_to(ROOT).parts)
        for each in (ROOT / "rdmapost").rglob("__init__.py")
    ]
    assert sorted(listed) == sorted([*found, "rdmapost.cli"])


def test_import_contracts_are_kept(tree):
    """Each layer imports only those below it, and meets the other contracts in pyproject.toml."""
    said = lint(tree)
    assert "Contracts: 7 kept, 0 broken." in said, said


@pytest.mark.parametrize(
    ("module", "statement", "words"),
    [
        (
            "providers/software/qp.py",
            "from ...resources.mr import MR",
            "providers is not allowed to import rdmapost.resources",
        ),
        (
            "providers/roce/qp.py",
            "from ..soft0.tags import MatchingList",
            "providers.roce is not allowed to import rdmapost.providers.soft0",
        ),
        (
            "providers/software/qp.py",
            "from ..roce.qp import RoceQueuePair",
            "providers.software is not allowed to import rdmapost.providers.roce",
        ),
        (
            "resources/qp.py",
            "def later():\n    from ..tools.diagnose import diagnose",
            "resources is not allowed to import rdmapost.tools",
        ),
        (
            "posting/queue.py",
            "from ..tools.explain import explain",
            "posting is not allowed to import rdmapost.tools",
        ),
        (
            "posting/wr.py",
            "from ..cli import main",
            "posting is not allowed to import rdmapost.cli",
        ),
        ("resources/mr.py", "from .. import _verbs", "imported in one place BROKEN"),
        (
            "resources/device.py",
            "from ..providers.software.qp import QP",
            "Only software devices import what they share BROKEN",
        ),
        (
            "resources/qp.py",
            "def later():\n    from ..providers.soft0.provider import SoftProvider",
            "only where one is chosen BROKEN",
        ),
        ("resources/srq.py", "from ..providers import soft_provider", "all of them BROKEN"),
        ("posting/wr.py", "import rdmapost", "as its users do BROKEN"),
        (
            "standard/timers.py",
            "from ..resources.qp import QP",
            "not allowed to import rdmapost.resources",
        ),
        ("unlisted.py", "x = 1", "rdmapost.unlisted"),
    ],
)
def test_broken_import_contract_is_reported(tree, tmp_path, module, statement, words):
    """A layer that imports one above it is caught, wherever the import is."""
    shutil.copytree(tree / "rdmapost", tmp_path / "rdmapost")
    with (tmp_path / "rdmapost" / module).open("a") as file:
        file.write(f"\n\n{statement}\n")
    assert words in " ".join(lint(tmp_path).split())


def test_imports_at_run_time_form_no_cycle(graphs):
    """Not even for types only, except for those listed."""
    every, imported = graphs
    for module, names in NAMED_ONLY:
        assert names in every[module]
        assert names not in imported[module]
        every[module].remove(names)
    # Raises CycleError, which names the cycle.
    tuple(graphlib.TopologicalSorter(every).static_order())


def test_resources_do_not_ask_which_provider_they_run_on():
    """``context.kind`` is for users: only device.py reads it."""
    [package] = map(pathlib.Path, rdmapost.__path__)
    files = [
        file
        for layer in ("posting", "providers", "resources")
        for file in package.joinpath(layer).rglob("*.py")
    ]
    asking = {
        file.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr == "kind"
        and ast.unparse(node.value).endswith(("context", "provider"))
        and isinstance(node.ctx, ast.Load)
    }
    # The one place that copies it for users.
    assert asking == {"device.py"}

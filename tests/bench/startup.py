"""Time start-up: ``import rdmapost`` and ``rdmapost --help``.

Run it as ``python tests/bench/startup.py``.  Each runs in separate processes,
in an environment without other packages (editable installs' hooks slow down
every start); the figure is the lowest CPU time of many.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import venv

import _cffi_backend
import click

import rdmapost
import rdmapost.cli

BARE = "pass"
IMPORT = "import rdmapost"
USE = "import rdmapost; rdmapost.QP"
CLICK = "import click"
HELP = "import sys; sys.argv = ['rdmapost', '--help']; from rdmapost.cli import main; main()"
# The statement to time, the statement to compare it with, and the target ratio, if any.
GOALS: tuple[tuple[str, str, str, str, float | None], ...] = (
    ("import rdmapost", IMPORT, "bare interpreter", BARE, 2.5),
    ("rdmapost --help", HELP, "import click", CLICK, 1.3),
    ("first use of a name", USE, "bare interpreter", BARE, None),
)


def install(directory: pathlib.Path) -> str:
    """Create an environment with rdmapost, cffi's module and click; return its Python."""
    venv.create(directory, symlinks=True)
    (place,) = directory.glob("lib/python*/site-packages")
    package = pathlib.Path(rdmapost.__file__).parent
    (place / "rdmapost").mkdir()
    for entry in package.iterdir():
        if entry.name not in ("__pycache__", "cli"):
            (place / "rdmapost" / entry.name).symlink_to(entry)
    # In a checkout the command line is next to the package.
    (cli,) = rdmapost.cli.__path__
    (place / "rdmapost" / "cli").symlink_to(cli)
    (place / "click").symlink_to(pathlib.Path(click.__file__).parent)
    backend = pathlib.Path(_cffi_backend.__file__)
    (place / backend.name).symlink_to(backend)
    return str(directory / "bin" / "python")


def cpu_ms(python: str, statement: str, runs: int, env: dict[str, str]) -> float:
    """Return the lowest CPU time of a process that runs a statement, in ms."""
    elsewhere = pathlib.Path(python).parent  # not in a checkout, which would come first
    least = float("inf")
    for _ in range(runs):
        process = subprocess.Popen(
            [python, "-c", statement], stdout=subprocess.DEVNULL, env=env, cwd=elsewhere
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, statement)
        least = min(least, usage.ru_utime + usage.ru_stime)
    return least * 1e3


def main() -> None:
    """Print the table, or the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("--runs", type=int, default=30, help="processes of each (default 30)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        python = install(root / "venv")
        # Keep the .pyc files, as in an installed package.
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        env["PYTHONPYCACHEPREFIX"] = str(root / "compiled")
        times: dict[str, float] = {}
        for statement in (BARE, IMPORT, USE, CLICK, HELP):
            cpu_ms(python, statement, 1, env)
            times[statement] = cpu_ms(python, statement, options.runs, env)
    if options.json:
        json.dump(
            {name: times[statement] for name, statement, *_ in GOALS}
            | {name: times[statement] for _, _, name, statement, _ in GOALS},
            sys.stdout,
            indent=2,
        )
        print()
        return
    print("ms of CPU time")
    for name, statement, beside, other, goal in GOALS:
        ratio = times[statement] / times[other]
        line = f"{name:<22}{times[statement]:7.1f}   {beside:<18}{times[other]:7.1f}{ratio:9.2f}"
        print(line + ("" if goal is None else f"  {goal}  {'met' if ratio <= goal else 'missed'}"))


if __name__ == "__main__":
    main()

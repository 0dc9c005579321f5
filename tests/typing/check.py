"""Check the package's types with mypy and pyright, as its users do; .ci/lint runs this.

passes.py and the Python examples of the documents must have no errors in both checkers' strict
modes. fails.py must have exactly one error, with the code named, in each line marked
``# fails: MYPY, PYRIGHT``.  pyright is basedpyright, which brings its own Node.js from PyPI, in
pyright's own modes.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.documents import DOCUMENTS, TUTORIALS, Block, blocks  # noqa: E402

NAMES = {"context": "Context", "pd": "PD", "cq": "CQ", "mr": "MR", "a": "QP", "b": "QP"}
"""The names that the README's first example defines and the other examples use."""

Found = dict[tuple[str, int, str], str]
"""The message of each error, by its file, line and code."""


def example(block: Block) -> str:
    """Return a document's example as a module; its first line is 3."""
    if "import rdmapost as rp\n" in block.text:
        return "\n\n" + block.text
    return f"import rdmapost as rp\nfrom names import {', '.join(NAMES)}\n{block.text}"


def mypy(folder: pathlib.Path, files: list[str]) -> Found:
    """Return mypy's errors."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--output=json"]
    # mypy does not find an editable install, which takes effect at run time.
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    ran = subprocess.run(
        [*command, *files], cwd=folder, env=environment, capture_output=True, text=True
    )
    if ran.returncode not in (0, 1):
        raise SystemExit(ran.stdout + ran.stderr)
    errors = [json.loads(line) for line in ran.stdout.splitlines()]
    return {
        (e["file"], e["line"], e["code"]): e["message"] for e in errors if e["severity"] == "error"
    }


def pyright(folder: pathlib.Path, files: list[str]) -> Found:
    """Return pyright's errors."""
    config = {
        "typeCheckingMode": "strict",
        "include": files,
        "extraPaths": [str(ROOT)],
        "reportUnusedExpression": "none",
        "reportUnusedImport": "none",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if ran.returncode not in (0, 1):
        raise SystemExit(ran.stdout + ran.stderr)
    found: Found = {}
    for each in json.loads(ran.stdout)["generalDiagnostics"]:
        file, rule = pathlib.Path(each["file"]).name, each.get("rule", "")
        line = each["range"]["start"]["line"] + 1
        if file == "fails.py" and rule.startswith("reportUnknown"):
            continue  # follows from the error
        found[file, line, rule] = each["message"]
    return found


def marked() -> tuple[set[tuple[str, int, str]], set[tuple[str, int, str]]]:
    """Return what mypy and pyright should find in fails.py."""
    lines = (HERE / "fails.py").read_text().splitlines()
    marks = [
        (number, *match.groups())
        for number, line in enumerate(lines, 1)
        if (match := re.search(r"# fails: ([\w-]+), (\w+)$", line))
    ]
    if len(marks) < 20:
        raise SystemExit("fails.py: the marks are not understood")
    return {("fails.py", n, m) for n, m, _ in marks}, {("fails.py", n, p) for n, _, p in marks}


def main() -> int:
    """Run both checkers; return 1 if their errors are not exactly the marked ones."""
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        names = "".join(f"{name}: rp.{type}\n" for name, type in NAMES.items())
        (folder / "names.py").write_text(f"import rdmapost as rp\n{names}")
        files = ["passes.py", "fails.py"]
        for file in files:
            (folder / file).write_text((HERE / file).read_text())
        for document in DOCUMENTS:
            for block in [each for each in blocks(document) if each.language == "python"]:
                if document in TUTORIALS:
                    # Each block continues the one before.
                    file, text = document, block.text
                else:
                    file, text = str(block), example(block)
                file = re.sub(r"\W", "_", file) + ".py"
                if file not in files:
                    files.append(file)
                with (folder / file).open("a") as module:
                    module.write(text)
        for checker, wanted in zip((mypy, pyright), marked(), strict=True):
            found = checker(folder, files)
            for key in sorted(found.keys() ^ wanted):
                file, line, code = key
                what = found.get(key, "marked, but not reported")
                print(f"{checker.__name__}: {file}:{line}: {what} [{code}]")
            failed |= found.keys() != wanted
            print(f"{checker.__name__}: {len(files)} files, {len(found)} errors")
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""The documents: every command and every example in them is run, and every link leads somewhere.

Python examples run on soft0, and what they print is what the document shows. One that imports
rdmapost runs as a program; the others go on with the names of the README's first example. Blocks of
a tutorial or a guide go on with the names of its earlier blocks. Commands of rdmapost run on soft0.
What needs root, a network or another machine is listed here, with where it is run instead; anything
not listed fails.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from support import kernel, needs
from support.cli_runner import run
from support.documents import (
    DOCUMENTS,
    ROOT,
    TUTORIALS,
    Block,
    Command,
    blocks,
    commands_of,
    prose,
    shown,
)
from support.ports import free_port
from support.roce import skip_unless_free

import rdmapost as rp
from rdmapost.cli.app import app
from rdmapost.cli.groups import LazyCommand

TWO_PROCESSES = "two processes: test_documented_serve_prints_what_is_shown"
ELSEWHERE = {
    "$(command -v sudo) apt-get update": "needs root and a network: .ci/run runs it",
    "sudo apt-get install": "needs root and a network: .ci/run runs it",
    "python3 -m venv .venv": "needs a network: .ci/run runs the README's",
    ".venv/bin/pip install": "needs a network: .ci/run runs it",
    "sudo modprobe rdma_rxe": "needs root and Soft-RoCE: tests/guest.py does it in the guest",
    ".venv/bin/python tests/guest.py": "boots a machine: .ci/run runs it",
    "sudo ip link set d0 down; rdmapost doctor": "takes a link down: test_diagnose_netdev.py",
    "rdmapost check -d rxe0": "needs Soft-RoCE: test_documented_check_table_matches_soft_roce",
    "export RDMAPOST_TOKEN": TWO_PROCESSES,
    "rdmapost serve --bind 10.0.0.1": TWO_PROCESSES,
    "rdmapost serve -d roce:lo": "two processes: test_documented_two_terminals_print_what_is_shown",
    "rdmapost write -d roce:lo": "two processes: test_documented_two_terminals_print_what_is_shown",
    "rdmapost write --data hello 10.0.0.1": TWO_PROCESSES,
    "rdmapost pingpong 10.0.0.2": "needs two hosts: tests/two_hosts/test_pingpong.py",
    "ibv_rc_pingpong": "needs two hosts: tests/two_hosts/test_pingpong.py",
    "tshark -r write.pcapng": "needs tshark: tests/providers/roce/test_roce_capture.py",
    ".venv/bin/python examples/": "tests/examples runs it",
    ".venv/bin/python tests/bench/": "measures, for minutes",
    'eval "$(rdmapost completion': "changes the shell: tests/cli/test_cli_completion.py",
    "rdmapost completion fish >": "writes to the home directory: tests/cli/test_cli_completion.py",
}
"""How commands that are not run on soft0 begin, and why."""

CONFIGURATION = {"yourname  -  memlock  unlimited\n": "a line of /etc/security/limits.conf"}
"""Blocks that nothing runs or prints."""

DIRECTIVES = {"{include}", "{toctree}"}
"""Blocks that the documentation's build replaces."""

PICTURES = {"docs/architecture.md"}
"""Documents with a drawing in a text block."""

HOST = '"10.0.0.1"'
"""In examples, a host that serves; here it is this one, on a free port."""

VARIES = {r"from (10\.0\.0|127\.0\.0)\.\d+:\d+": "from CLIENT", r"0x[0-9a-f]+": "0xN"}
"""What differs in each run: the client's address, and memory addresses and keys."""

ALL = [block for document in DOCUMENTS for block in blocks(document)]
EXAMPLES = [
    block for block in ALL if block.language == "python" and block.document not in TUTORIALS
]
COMMANDS = [
    (block, command)
    for block in ALL
    if block.language in ("sh", "console")
    for command in commands_of(block)
]


def elsewhere(command: Command) -> list[str]:
    return [beginning for beginning in ELSEWHERE if command.text.startswith(beginning)]


HERE = [
    (block, command)
    for block, command in COMMANDS
    if not elsewhere(command) and command.text.startswith("rdmapost ")
]


def test_every_documented_block_of_code_is_run_or_listed_as_not_run() -> None:
    """A new block is of a kind that these tests run, or is listed with a reason."""
    others = [
        str(block)
        for block in ALL
        if block.language not in ("python", "sh", "console", "c", "py")
        and block.language.partition(" ")[0] not in DIRECTIVES
        and not block.is_output
        and block.text not in CONFIGURATION
        and not (block.language == "text" and block.document in PICTURES)
    ]
    assert others == []
    assert [
        f"{block}: {command.text}"
        for block, command in COMMANDS
        if (block, command) not in HERE and len(elsewhere(command)) != 1
    ] == []
    assert len(EXAMPLES) > 5
    assert len(HERE) > 5


def test_every_documented_block_listed_as_not_run_exists() -> None:
    found = {beginning for _, command in COMMANDS for beginning in elsewhere(command)}
    assert found == set(ELSEWHERE)
    assert {block.text for block in ALL} >= set(CONFIGURATION)


# ---- Python examples ---------------------------------------------------------


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """The names that the README's first example has made."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        context = enter(rp.open_device("soft0"))
        pd, cq = enter(rp.PD(context)), enter(rp.CQ(context))
        mr = enter(rp.MR(pd, 4096, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE))
        a, b = (enter(rp.QP(pd, rp.QPType.RC, cq)) for _ in range(2))
        a.connect(b.endpoint())
        b.connect(a.endpoint())
        mr.buffer[:5] = b"hello"
        yield {"rp": rp, "context": context, "pd": pd, "cq": cq, "mr": mr, "a": a, "b": b}


def skip_if_its_port_is_taken(text: str) -> None:
    """Skip a test whose example opens a roce device if Soft-RoCE has its port."""
    if '"roce:' in text:
        skip_unless_free("roce:lo")


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_documented_python_example_runs(
    example: Block, names: dict[str, Any], tmp_path: Path
) -> None:
    text = example.text.replace(HOST, f'"127.0.0.1", {free_port()}')
    skip_if_its_port_is_taken(text)
    if "import rdmapost as rp\n" in text:
        done = subprocess.run(
            [sys.executable, "-P", "-c", text],
            cwd=tmp_path,  # for the files that it makes
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, "")
        printed = done.stdout
    else:
        # Its lines keep their numbers in the document.
        code = compile("\n" * (example.line - 1) + text, str(ROOT / example.document), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        printed = out.getvalue()
    if example.output is not None:
        assert printed == example.output


@pytest.mark.parametrize("tutorial", sorted(TUTORIALS))
def test_tutorial_runs_from_its_first_block_to_its_last(
    tutorial: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One of them sets the variable, as a shell would.
    monkeypatch.setenv("RDMAPOST_DEVICE", "soft0")
    names: dict[str, Any] = {}
    steps = [block for block in blocks(tutorial) if block.language == "python"]
    assert steps
    skip_if_its_port_is_taken("".join(step.text for step in steps))
    for step in steps:
        code = compile("\n" * (step.line - 1) + step.text, str(ROOT / tutorial), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        assert out.getvalue() == (step.output or ""), step


def test_documented_examples_in_c_compile() -> None:
    compiler, header = shutil.which("cc"), Path("/usr/include/infiniband/verbs.h")
    if compiler is None or not header.exists():
        pytest.skip("no C compiler, or no headers of libibverbs")
    # The names that the examples take from their surroundings.
    head = (
        "#include <infiniband/verbs.h>\n#include <stdint.h>\nvoid die(const char *);\n"
        "void run(struct ibv_qp *qp, struct ibv_mr *mr, void *buf, uint64_t remote_addr, "
        "uint32_t rkey) {\n"
    )
    examples = [block for block in ALL if block.language == "c"]
    assert examples
    for example in examples:
        subprocess.run(
            [compiler, "-Wall", "-Werror", "-fsyntax-only", "-x", "c", "-"],
            input=f"{head}{example.text}}}\n",
            text=True,
            check=True,
            timeout=120,
        )


def test_documented_examples_for_pyverbs_are_valid_python() -> None:
    for example in ALL:
        if example.language == "py":
            compile(example.text, str(example), "exec")


def test_examples_of_the_readme_run_one_after_another(names: dict[str, Any]) -> None:
    """One leaves nothing behind that the next stumbles over."""
    for example in EXAMPLES:
        if example.document == "README.md" and "import rdmapost as rp\n" not in example.text:
            text = example.text.replace(HOST, f'"127.0.0.1", {free_port()}')
            code = compile("\n" * (example.line - 1) + text, str(ROOT / "README.md"), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, names)
            if example.output is not None:
                assert out.getvalue() == example.output


def test_later_examples_use_the_names_made_in_the_first_one(names: dict[str, Any]) -> None:
    """The names that the others use are made in the same way as in the first one."""
    first = EXAMPLES[0]
    assert first.document == "README.md"
    for name in names:
        assert re.search(rf"\b{name}\b", first.text), name
    for call in ("a.connect(b.endpoint())", "b.connect(a.endpoint())", 'buffer[:5] = b"hello"'):
        assert call in first.text


# ---- commands ----------------------------------------------------------------


@pytest.mark.parametrize(("block", "command"), HERE, ids=lambda it: getattr(it, "text", str(it)))
def test_documented_command_prints_what_is_shown(block: Block, command: Command) -> None:
    ran = run(*shlex.split(command.text)[1:])
    assert ran.code == 0
    assert ran.err == ""
    if block.language == "console":
        assert ran.out == command.output
    else:
        assert ran.out


def test_guest_script_accepts_the_documented_options() -> None:
    """The commands that boot a machine are accepted by tests/guest.py."""
    usage = subprocess.run(
        [sys.executable, str(ROOT / "tests/guest.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    booting = [command.text for _, command in COMMANDS if "tests/guest.py" in command.text]
    assert booting
    for text in booting:
        own, _, _ = text.partition(" -- ")
        for option in re.findall(r" (--[a-z-]+)", own):
            assert f"{option} " in usage, text


def test_both_installations_in_the_readme_install_the_same_packages() -> None:
    """The README's two installations differ only in what they install of Python's."""
    install, tests = (
        command.text
        for block in blocks("README.md")
        if block.language == "sh"
        for command in commands_of(block)
        if "apt-get update" in command.text
    )
    assert install.partition(".venv/bin/pip")[0] == tests.partition(".venv/bin/pip")[0]
    assert install.endswith("pip install -e . && .venv/bin/rdmapost check")
    assert tests.endswith("pip install -e '.[test]' && .venv/bin/pytest")
    assert "\n<!-- test command -->\n```sh\n" in (ROOT / "README.md").read_text()


# ---- on Soft-RoCE ------------------------------------------------------------


@pytest.fixture
def rxe(verbs_context: rp.Context) -> rp.Context:
    """The device that the documents call rxe0, on a network device with 10.0.0.1."""
    needs(verbs_context.attr.vendor_id == 0xFFFFFF, "Soft-RoCE", verbs_context)
    gid = verbs_context.choose_gid().gid
    needs(gid == rp.GID("::ffff:10.0.0.1"), "address 10.0.0.1, as in the guest", verbs_context)
    return verbs_context


def test_documented_check_table_matches_soft_roce(rxe: rp.Context) -> None:
    table = shown("docs/guest.md", "rdmapost check -d rxe0").replace("rxe0", rxe.name)
    ran = run("check", "-d", rxe.name)
    assert ran.code == 0
    if kernel().startswith("6.1."):
        assert ran.out == table
        return
    # What the sentences below the table say.
    changed = {
        line.split()[0]
        for line, old in zip(ran.out.splitlines(), table.splitlines(), strict=False)
        if line.count("pass") != old.count("pass") and line.split()[:1] == old.split()[:1]
    }
    assert changed in ({"ATOMIC_WRITE"}, {"ATOMIC_WRITE", "FLUSH"})
    assert ("(LOC_QP_OP_ERR)" in ran.out, "(WR_FLUSH_ERR)" in ran.out) == (False, True)


def settled(text: str) -> str:
    """Return an output without what differs in each run."""
    for varying, instead in VARIES.items():
        text = re.sub(varying, instead, text)
    return text


SESSIONS = [block for block in ALL if block.language == "console" and "server$ " in block.text]


def test_documented_serve_prints_what_is_shown(rxe: rp.Context) -> None:
    """serve in one process and a posting command in another, as shown side by side."""
    (session,) = (each for each in SESSIONS if "--bind 10.0.0.1" in each.text)
    token, serve, same_token, write = commands_of(session)
    assert token.text == same_token.text
    name, _, value = token.text.removeprefix("export ").partition("=")
    served(serve, write, {name: value, "RDMAPOST_DEVICE": rxe.name})


@pytest.mark.parametrize("document", ["README.md", "docs/two-hosts.md"])
def test_documented_two_terminals_print_what_is_shown(document: str) -> None:
    skip_unless_free("roce:lo")
    (session,) = (each for each in SESSIONS if each.document == document and "-d roce" in each.text)
    served(*commands_of(session), {})


def served(serve: Command, post: Command, variables: dict[str, str]) -> None:
    """Serve, post, and compare what both print with what their document shows."""
    environment = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
    program = [sys.executable, "-P", "-m", "rdmapost.cli"]
    with subprocess.Popen(
        [*program, *shlex.split(serve.text)[1:]],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as server:
        assert server.stdout is not None
        said = ""
        try:
            while "serving on" not in said:
                line = server.stdout.readline()
                assert line, said
                said += line
            done = subprocess.run(
                [*program, *shlex.split(post.text)[1:]],
                env=environment,
                text=True,
                capture_output=True,
                timeout=300,
            )
        finally:
            server.send_signal(signal.SIGINT)
        said += server.stdout.read()
    assert (done.returncode, done.stderr) == (0, "")
    assert settled(done.stdout) == settled(post.output)
    if serve.output:
        assert settled(said) == settled(serve.output)


# ---- prose -------------------------------------------------------------------


def spans(document: str) -> list[str]:
    """Return the inline code of a document, each piece on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(document))]


def options_of(command: click.Command) -> set[str]:
    return {name for option in command.params for name in option.opts}


def find_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that words lead to, and the words that are left."""
    command: click.Command = app
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, words
        found, words = command.commands[words[0]], words[1:]
        command = found.load() if isinstance(found, LazyCommand) else found
    return command, words


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_named_in_the_documents_exist(document: str) -> None:
    """A command that the text names exists, with each of its options."""
    for span in spans(document):
        if span.startswith("rdmapost "):
            command, words = find_command(shlex.split(span)[1:])
            known = options_of(command) | {"-h", "--help"}
            assert [word for word in words if word[0] == "-" and word not in known] == [], span


OBJECTS = {"rp": rp, "qp": rp.QP, "cq": rp.CQ, "mr": rp.MR, "context": rp.Context}
"""What the text calls by these names."""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names_of_the_library_in_the_documents_exist(document: str) -> None:
    """A dotted name in rdmapost, or an attribute of what the examples make, exists."""
    for span in spans(document):
        match = re.match(r"(rdmapost|connect|rp|qp|cq|mr|context)((?:\.\w+)+)", span)
        if match is None or match[2].endswith((".md", ".py")):
            continue
        first, *rest = match[0].split(".")
        if first == "connect":
            first, rest = "rdmapost", ["connect", *rest]
        where = rp if first == "rdmapost" else OBJECTS[first]
        for index, name in enumerate(rest):
            if not hasattr(where, name):
                assert first == "rdmapost", span
                importlib.import_module(".".join(["rdmapost", *rest[: index + 1]]))
            where = getattr(where, name)


def anchors(document: str) -> set[str]:
    """Return GitHub's link names for a document's headings."""
    heads = re.findall(r"(?m)^#+ (.*)$", prose(document))
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_links_in_the_documents_have_a_target(document: str) -> None:
    """Files and headings that a document links to exist."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / document).parent / file if file else ROOT / document
        assert path.is_file(), target
        if anchor:
            assert anchor in anchors(str(path.resolve().relative_to(ROOT))), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_named_in_the_documents_exist(document: str) -> None:
    for span in spans(document):
        if re.fullmatch(r"[\w/]+\.(py|md|c|h)", span):
            assert any((ROOT / place / span).is_file() for place in ("", "rdmapost")), span


def test_version_is_the_same_everywhere() -> None:
    """In the package and where it is built; the changelog has it once it is released."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == rp.__version__
    heads = re.findall(r"(?m)^## (.+)", (ROOT / "CHANGELOG.md").read_text())
    assert heads[0] in ("Unreleased", rp.__version__)


def test_readme_is_shorter_than_300_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 300

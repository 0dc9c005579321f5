"""The documents' code blocks, for the tests that run them."""

from __future__ import annotations

import functools
import pathlib
import re
from dataclasses import dataclass

__all__ = [
    "DOCUMENTS",
    "ROOT",
    "TUTORIALS",
    "Block",
    "Command",
    "blocks",
    "commands_of",
    "prose",
    "shown",
]

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md"))),
]
TUTORIALS = {name for name in DOCUMENTS if name.startswith(("docs/tutorial", "docs/guides/"))}
"""Documents whose Python blocks build on each other."""

_PROMPT = re.compile(r"(\w*)\$ (.*)")


@dataclass(frozen=True)
class Command:
    """A command in a code block.

    Attributes:
        text: the command, on one line.
        output: the output shown below it, or "".
        host: the host in its prompt, or "".
    """

    text: str
    output: str = ""
    host: str = ""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        document: its file.
        line: number of the first line of its text.
        language: the language after the fence, or "".
        text: its contents.
        output: for an example, the contents of the unlabelled block right after it, or None.
        is_output: whether it is the output of an example.
    """

    document: str
    line: int
    language: str
    text: str
    output: str | None = None
    is_output: bool = False

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


@functools.cache
def blocks(document: str) -> tuple[Block, ...]:
    """Return the fenced blocks of a document."""
    found: list[Block] = []
    lines = (ROOT / document).read_text().splitlines()
    number = 0
    after = False
    while number < len(lines):
        fence = re.fullmatch(r"```(.*)", lines[number])
        number += 1
        if fence is None:
            # Only blank lines separate an example from its output.
            after = after and not lines[number - 1]
            continue
        end = lines.index("```", number)
        text = "\n".join(lines[number:end]) + "\n"
        language = fence[1]
        is_output = after and not language and found[-1].language == "python"
        if is_output:
            last = found.pop()
            found.append(Block(document, last.line, last.language, last.text, text))
        found.append(Block(document, number + 1, language, text, is_output=is_output))
        number = end + 1
        after = not is_output
    return tuple(found)


def prose(document: str) -> str:
    """Return a document's text without its blocks."""
    return re.sub(r"(?ms)^```.*?^```$", "", (ROOT / document).read_text())


def commands_of(block: Block) -> list[Command]:
    """Return the commands in a block of shell, or in a session with prompts and output."""
    if block.language == "sh":
        text = re.sub(r"\\\n\s*", "", block.text)
        text = re.sub(r"&&\n\s*", "&& ", text)
        return [Command(line) for line in text.splitlines() if line]
    found: list[Command] = []
    for line in block.text.splitlines():
        if prompt := _PROMPT.fullmatch(line):
            found.append(Command(prompt[2], host=prompt[1]))
        else:
            last = found.pop()
            found.append(Command(last.text, f"{last.output}{line}\n", last.host))
    return [Command(one.text, re.sub(r"\n+\Z", "\n", one.output), one.host) for one in found]


def shown(document: str, command: str) -> str:
    """Return the output that a document shows for a command, which must occur once."""
    (found,) = (
        one.output
        for block in blocks(document)
        if block.language == "console"
        for one in commands_of(block)
        if one.text == command
    )
    return found

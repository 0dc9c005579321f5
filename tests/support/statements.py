"""Read statements.md, the list of statements about posting."""

from __future__ import annotations

import pathlib
import re
from dataclasses import dataclass, field

__all__ = ["STATEMENTS", "Statement"]

_LIST = pathlib.Path(__file__).with_name("statements.md")
_HOW = re.compile(
    r"(?P<how>Impossible|Checked|Shown)(?:, on (?P<devices>soft0 and a real device|soft0|"
    r"a real device))?(?: \(Soft-RoCE lacks (?P<lacks>.+)\))?\.(?: About (?P<names>.+)\.)?"
)
_DEVICES = {"soft0 and a real device": {"soft0", "verbs"}, "soft0": {"soft0"}, None: set()}
_DEVICES["a real device"] = {"verbs"}


@dataclass
class Statement:
    """A statement about posting.

    Attributes:
        source: the man page, or the tutorial.
        section: the section of it.
        text: the statement, paraphrased.
        how: "impossible", "checked" or "shown".
        devices: where its tests run: "soft0", "verbs", both, or empty for no device.
        lacks: what Soft-RoCE lacks to test it.
        names: the header's members, opcodes and flags that it is about.
        tests: ``file::name``, without the file's suffix.
    """

    source: str
    section: str
    text: str
    how: str = ""
    devices: set[str] = field(default_factory=set)
    lacks: str = ""
    names: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)


def read(text: str) -> list[Statement]:
    """Read a list.

    Raises:
        ValueError: a line cannot be parsed.
    """
    found: list[Statement] = []
    source = section = ""
    _, _, body = text.partition("\n## ")
    # A long list of names continues on the next line.
    for line in re.sub(",\n +`", ", `", f"## {body}").splitlines():
        if line.startswith("## "):
            source = line[3:]
        elif line.startswith("### "):
            section = line[4:]
        elif line.startswith("- "):
            found.append(Statement(source, section, line[2:]))
        elif line.startswith("  - `") and line.endswith("`"):
            found[-1].tests.append(line[5:-1])
        elif line.startswith("  ") and (match := _HOW.fullmatch(line[2:])):
            said = found[-1]
            said.how = match["how"].lower()
            said.devices = _DEVICES[match["devices"]]
            said.lacks = match["lacks"] or ""
            said.names = re.findall("`(.+?)`", match["names"] or "")
        elif line:
            raise ValueError(f"{_LIST.name}: {line!r}")
    return found


STATEMENTS = read(_LIST.read_text(encoding="utf-8"))
"""All of them, in page order."""

"""Text that is not ASCII, on a terminal or in a pipe of any encoding."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def send(encoding: str, *args: str) -> bytes:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rdmapost.cli", "send", "-d", "soft0", *args],
        env={"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == b""
    return done.stdout


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("utf-8", '"né"'), ("latin-1", '"né"'), ("ascii", r'"n\u00e9"'), ("koi8-r", r'"n\u00e9"')],
)
def test_data_is_shown_in_the_encoding_of_the_output(encoding: str, shown: str) -> None:
    lines = send(encoding, "--data", "né").decode(encoding).splitlines()
    assert lines[1:] == [f"  data      {shown}", f"  received  {shown}"]


def test_json_is_the_same_in_every_encoding() -> None:
    first = send("utf-8", "--data", "né", "--json")
    assert json.loads(first)["data"] == "né"
    assert send("ascii", "--data", "né", "--json") == first


def test_line_of_a_log_that_the_encoding_lacks_is_escaped() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rdmapost.cli", "explain"],
        env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"},
        input="nœud 3: Cannot allocate memory".encode(),
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith(b"line 1: n")
    assert b"Traceback" not in done.stderr

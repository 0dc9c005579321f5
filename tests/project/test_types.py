"""What a type checker says about calls."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

CALLS = """
import rdmapost as rp

gid: rp.GID | None = rp.AHAttr(dgid="::1").dgid
rp.AHAttr(1, dgid=bytes(16))
rp.GID(bytearray(16))
remote = rp.Endpoint(1, 2, "::ffff:10.0.0.1", 0, rp.MTU.MTU_1024)
there: rp.GID = remote.gid


def use(qp: rp.QP) -> None:
    for group in ("ff0e::1", bytes(16), bytearray(16), memoryview(bytes(16)), rp.GID("ff0e::1")):
        qp.attach_mcast(group)
        qp.detach_mcast(group)
    qp.connect(remote, access=rp.Access.REMOTE_READ, timeout=14)
"""


def test_type_hints_accept_all_that_the_documents_say(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    source = tmp_path / "calls.py"
    source.write_text(CALLS)
    # Not in this process: mypy raises the thresholds of its garbage collection for good.
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("Success: no issues found in 1 source file\n", "")

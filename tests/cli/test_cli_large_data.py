"""Large data: how much memory it takes, the progress bar, and Ctrl-C."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from support.terminal import terminal

from rdmapost.cli.payload import Payload

SEND = [sys.executable, "-P", "-m", "rdmapost.cli", "send", "-d", "soft0"]
PEAK = """
import resource, sys
from rdmapost.cli import main
try:
    main()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def peak_in_kilobytes(*args: str) -> int:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PEAK, *args, "-d", "soft0"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return int(done.stderr)


@pytest.mark.parametrize("command", ["send", "write", "read"])
def test_large_data_is_held_twice_at_most(command: str) -> None:
    """Once on each side."""
    small = peak_in_kilobytes(command, "--size", "1")
    large = peak_in_kilobytes(command, "--size", "128M")
    assert large - small <= 2.2 * (128 << 10)


def test_bind_mw_takes_a_window_larger_than_random_can_fill() -> None:
    """random.randbytes() makes less than 256 MiB at once."""
    peak_in_kilobytes("bind-mw", "--size", "256M")


@pytest.mark.parametrize("length", [0, 1, 255, 256, 4097, (1 << 20) - 1, (1 << 20) + 257])
def test_generated_data_repeats_the_pattern(length: int) -> None:
    payload = Payload(bytes(range(256)), length)
    whole = (bytes(range(256)) * (length // 256 + 1))[:length]
    assert (len(payload), bytes(payload)) == (length, whole)
    memory = memoryview(bytearray(length))
    payload.write_to(memory)
    assert memory.tobytes() == whole
    assert payload.is_in(memory)
    if length:
        memory[length - 1] ^= 1
        assert not payload.is_in(memory)
    assert not payload.is_in(memoryview(bytes(length + 1)))


def on_a_terminal(patience: float) -> str:
    """Send 8 MiB with standard error on a terminal."""
    program = (
        "import rdmapost.cli.payload as payload; from rdmapost.cli import main; "
        f"payload._PATIENCE_S = {patience}; main()"
    )
    with terminal() as (stderr, shown):
        subprocess.run(
            [sys.executable, "-P", "-c", program, "send", "-d", "soft0", "--size", "8M"],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            timeout=60,
            check=True,
        )
    return shown.decode()


def test_slow_command_shows_a_progress_bar_on_a_terminal() -> None:
    assert "100%" in on_a_terminal(0)


def test_fast_command_shows_no_progress_bar() -> None:
    assert on_a_terminal(60) == ""


def test_interrupt_ends_a_large_post_at_once() -> None:
    command = subprocess.Popen(
        [*SEND, "--size", "1G", "--count", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        statm = pathlib.Path(f"/proc/{command.pid}/statm")
        deadline = time.monotonic() + 60
        # While it fills the memory.
        while int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") < 100 << 20:
            assert time.monotonic() < deadline
            assert command.poll() is None
            time.sleep(0.01)
        start = time.monotonic()
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=60)
        assert time.monotonic() - start < 5
    finally:
        command.kill()
        command.wait()
    assert (command.returncode, out, err) == (130, "", "\n")

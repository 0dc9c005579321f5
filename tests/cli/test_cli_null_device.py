"""Commands on the null device, which fails on demand, or executes nothing."""

from __future__ import annotations

import pytest
from support import null_device
from support.null_device import COMMAND, LIES

null = null_device.null
on_null = null_device.on_null


def test_the_list_of_devices_shows_those_that_can_be_opened(on_null):
    """`rdmapost devices` says why the others cannot be opened."""
    code = """
    from rdmapost.cli import main
    import sys
    sys.argv[1:], sys.stderr = ["devices"], sys.stdout
    main()
    """
    text = on_null(code, NULL_REFUSES="ibv_open_device=13")
    assert "rdmapost devices: ibv_open_device: EACCES" in text
    assert "soft0" in text
    assert "INFINIBAND" in on_null(code)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("send", "the data that arrived is not the data that was sent"),
        ("send --count 3", "message 1 of 3: "),
        ("write", "the data that arrived is not the data that was sent"),
        ("read", "the data that arrived is not the data that was sent"),
        ("atomic fetch-add", "the value is now 0, not 1"),
        ("bind-mw", "the data that arrived is not the data that was sent"),
        ("doctor", "the data that arrived is not the"),
    ],
)
def test_command_on_a_device_that_lies_fails_with_its_reason(on_null, command, words):
    said = on_null(LIES + COMMAND, COMMAND=f"{command} -d null0 --timeout 0.5")
    assert words in " ".join(said.split())
    assert said.endswith("exit 1")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("send", "the posted work requests did not complete within 0.2 s"),
        ("check", "the posted work requests did not complete within 0.2 s"),
        ("doctor", "bytes to the same device: the posted work requests did not complete"),
    ],
)
def test_the_command_line_does_not_wait_forever(on_null, command, words):
    """The null device completes nothing unless a test asks for it."""
    said = on_null("import os, sys" + COMMAND, COMMAND=f"{command} -d null0 --timeout 0.2")
    assert words in " ".join(said.split())
    # The others are reports of their own.
    assert ("'rdmapost doctor' with the same -d may say why" in said) == (command == "send")
    assert said.endswith("exit 1")

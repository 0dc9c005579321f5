"""The command line without a device: usage errors, exit codes, JSON on failure."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import click
import pytest
from support.cli_runner import process, run

import rdmapost as rp
from rdmapost.cli.failure import report
from rdmapost.cli.options import size_in_bytes
from rdmapost.cli.output import Output

COMMANDS = [
    ["devices"],
    ["send"],
    ["write"],
    ["read"],
    ["atomic", "cas"],
    ["atomic", "fetch-add"],
    ["bind-mw"],
    ["invalidate"],
    ["tso"],
    ["tag", "add"],
    ["tag", "del"],
    ["tag", "sync"],
    ["check"],
    ["serve"],
]
GROUPS = [["atomic"], ["tag"]]
ONE_SHOTS = COMMANDS[1:-2]
EVERYWHERE = ["-d, --device", "-p, --port", "-g, --gid-index", "--json", "-v, --verbose"]


def test_module_runs_as_the_command() -> None:
    ended = process("--version")
    assert (ended.returncode, ended.stdout) == (0, f"rdmapost {rp.__version__}\n")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_the_common_options(command: list[str]) -> None:
    text = run(*command, "-h").out
    assert [option for option in EVERYWHERE if option not in text] == []


@pytest.mark.parametrize("command", [[], *GROUPS], ids=" ".join)
def test_no_command_shows_help_and_is_a_usage_error(command: list[str]) -> None:
    ran = run(*command)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("Usage: rdmapost")


def test_data_from_a_closed_standard_input_is_a_usage_error() -> None:
    command = f"{sys.executable} -P -m rdmapost.cli write -d soft0 --data-file - <&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "'--data-file': standard input is closed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["sned"], "No such command 'sned'"),
        (["send", "--nope"], "No such option"),
        (["send", "host", "more"], "unexpected extra argument"),
        (["send", "--data", "x", "--size", "3"], "mutually exclusive"),
        (["write", "--size", "3", "--data-file", os.devnull], "mutually exclusive"),
        (["send", "--data-file", "/no/such/file"], "No such file"),
        (["send", "--data-file", "/"], "directory"),
        (["send", "--size", "12Q"], "'12Q' is not a size"),
        (["send", "--size", "3G"], "more than a message can hold"),
        (["send", "--count", "0"], "0 is not at least 1"),
        (["send", "--count", "many"], "'many' is not an integer"),
        (["send", "--imm", "0x100000000"], "at most 4294967295"),
        (["send", "--imm", "-1"], "-1 is not at least 0"),
        (["send", "--timeout", "0"], "more than 0 s"),
        (["send", "--timeout", "nan"], "more than 0 s"),
        (["send", "--timeout", "inf"], "at most 86400 s"),
        (["send", "--timeout", "soon"], "more than 0 s"),
        (["send", "--qp-type", "rd"], "'rd' is not one of"),
        (["send", "--imm", "1", "--invalidate"], "mutually exclusive"),
        (["tso", "--qp-type", "rc"], "'rc' is not one of"),
        (["read", "--qp-type", "uc"], "'uc' is not one of 'rc', 'xrc'"),
        (["atomic", "cas", "--qp-type", "uc"], "'uc' is not one of 'rc', 'xrc'"),
        (["write", "--qp-type", "ud"], "'ud' is not one of 'rc', 'uc', 'xrc'"),
        (["tso", "--mss", "0"], "0 is not at least 1"),
        (["tso", "--header", "xyz"], "'xyz' is not bytes in hexadecimal"),
        (["invalidate", "--qp-type", "raw"], "'raw' is not one of"),
        (["bind-mw", "--data", ""], "at least 1 byte"),
        (["tag", "add", "--mask", "-1"], "-1 is not at least 0"),
        (["tag", "add", "--qp-type", "rc"], "No such option"),
        (["check", "--port", "0"], "0 is not at least 1"),
        (["check", "-p", "0x100"], "'-p' / '--port': 0x100 is not at least 1 and at most 255"),
        (["serve", "-p", "18701"], "(the port of the device); for the TCP port use --tcp-port"),
        (["pingpong", "-p", "18701"], "(the port of the device); for the TCP port use --tcp-port"),
        (["write", "-p", "18701", "h"], "(the port of the device); for the TCP port use HOST:PORT"),
        (["devices", "-g", "x"], "'x' is not an integer"),
        (["atomic", "cas", "--swap", "0x1ffffffffffffffff"], "at most 18446744073709551615"),
        (["atomic", "fetch-add", "--add"], "requires an argument"),
        (["send", "-d", ""], "'--device': it is empty"),
        (["send", "-d", "soft0", "-d", ""], "'--device': it is empty"),
        (["doctor", "-d", ""], "'--device': it is empty"),
        (["serve", "-d", "soft0", "--bind", ""], "'--bind': it is empty"),
        (
            ["serve", "-d", "soft0", "--bind", "127.0.0.1:4000"],
            "'127.0.0.1:4000' includes a port; use --tcp-port 4000",
        ),
        (
            ["pingpong", "-d", "soft0", "--bind", "127.0.0.1:4000"],
            "'127.0.0.1:4000' includes a port; use --tcp-port 4000",
        ),
        (
            ["serve", "--max-clients", "65537"],
            "'--max-clients': 65537 is not at least 1 and at most",
        ),
        (["pingpong", "-d", "soft0", "--wait", "1", "--bind", ""], "'--bind': it is empty"),
        (["pingpong", "-d", "soft0", ""], "'[HOST[:PORT]]': it is empty"),
    ],
)
def test_usage_error_exits_with_2_and_points_to_the_help(args: list[str], says: str) -> None:
    ran = run(*args)
    assert ran.code == 2
    assert ran.out == ""
    assert says in ran.err
    what, hint = ran.err.splitlines()
    assert what.startswith("rdmapost")
    assert hint.startswith("Try 'rdmapost")


@pytest.mark.parametrize(
    ("args", "command"),
    [
        (["-d"], "rdmapost"),
        (["send", "--size"], "rdmapost send"),
        (["atomic", "cas", "--compare"], "rdmapost atomic cas"),
        (["atomic", "--nope"], "rdmapost atomic"),
    ],
)
def test_error_in_the_arguments_points_to_the_help_of_that_command(
    args: list[str], command: str
) -> None:
    ran = run(*args)
    assert ran.code == 2
    what, hint = ran.err.splitlines()
    assert what.startswith(f"{command}: ")
    assert hint == f"Try '{command} --help'."


def test_usage_error_with_json_is_one_document() -> None:
    ran = run("send", "--count", "0", "--json")
    assert ran.code == 2
    assert "0 is not at least 1" in ran.doc["error"]
    assert "0 is not at least 1" in ran.err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("64", 64),
        ("0x40", 64),
        ("4K", 4096),
        ("4k", 4096),
        ("1KiB", 1024),
        ("1kb", 1024),
        ("3M", 3 << 20),
        ("2G", 1 << 31),
    ],
)
def test_size_takes_a_unit_or_hexadecimal(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5K", "0x", "1T", "1 K", "٣"])
def test_text_that_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size"):
        size_in_bytes(text)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_missing_device_exits_with_3_in_two_lines_at_most(command: list[str]) -> None:
    ran = run(*command, "-d", "nosuch0")
    assert ran.code == 3
    assert ran.out == ""
    assert "no RDMA device nosuch0" in ran.err
    assert len(ran.err.splitlines()) <= 2


@pytest.mark.parametrize("command", ONE_SHOTS, ids=" ".join)
def test_missing_device_with_json_has_the_keys_of_the_command(command: list[str]) -> None:
    ran = run(*command, "-d", "nosuch0", "--json")
    assert ran.code == 3
    assert "no RDMA device nosuch0" in ran.doc.pop("error")
    assert ran.doc["device"] is None
    assert ran.doc["status"] is None
    assert ran.doc["qp_type"] == ("RAW_PACKET" if command == ["tso"] else "RC")


def test_rdmapost_device_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMAPOST_DEVICE", "nosuch1")
    ran = run("send")
    assert ran.code == 3
    assert "nosuch1" in ran.err


def test_device_option_overrides_rdmapost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMAPOST_DEVICE", "nosuch1")
    assert "nosuch2" in run("send", "-d", "nosuch2").err


# ---- no device --------------------------------------------------------------

NOTHING = {
    "RDMAPOST_LIBIBVERBS": "/nonexistent",
    "RDMAPOST_DEVICE": "",
    "RDMAPOST_REQUIRE_DEVICE": "",
}
FALLBACK = "using soft0, the software device of this process"


@pytest.mark.parametrize("command", [["send"], ["tso"], ["tag", "add"], ["check"]], ids=" ".join)
def test_command_without_a_device_falls_back_to_soft0_and_says_so(command: list[str]) -> None:
    ended = process(*command, "--json", **NOTHING)
    assert ended.returncode == 0
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"{FALLBACK}: libibverbs cannot be loaded (/nonexistent")
    assert "RDMAPOST_LIBIBVERBS names it" in line
    assert "no RDMA device" not in line
    doc = json.loads(ended.stdout)
    assert (doc["device"], doc["kind"]) == ("soft0", "soft")


def test_verbose_says_why_soft0_was_chosen() -> None:
    ended = process("send", "-v", **NOTHING)
    assert ended.stderr.startswith(f"{FALLBACK}: libibverbs cannot be loaded")
    assert "device   soft0 (soft), because libibverbs cannot be loaded\n" in ended.stderr


def test_devices_lists_what_can_be_opened_over_udp_and_what_is_in_the_way() -> None:
    listed = run("devices", "--json").doc["roce_interfaces"]
    (loopback,) = (one for one in listed if one["name"] == "roce:lo")
    assert (loopback["address"][:4], loopback["path_mtu"]) == ("127.", 4096)
    ours = [one for one in listed if one["name"] != "roce:lo" and one["obstacle"] is None]
    if not ours:
        pytest.skip("no network device but lo whose UDP port 4791 is free")
    with rp.open_device(ours[0]["name"]) as context:
        ran, listed = run("devices"), run("devices", "--json").doc["roce_interfaces"]
        (taken,) = (one for one in listed if one["name"] == context.name)
    assert taken["obstacle"] == f"UDP port 4791 is taken by process {os.getpid()}"
    (line,) = (line for line in ran.out.splitlines() if line.startswith(context.name))
    assert line.split()[1] == taken["address"]
    assert line.endswith(taken["obstacle"])


def test_loopback_without_a_free_address_is_listed_with_the_one_that_opening_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rdmapost.providers.roce import interfaces

    taken = "UDP port 4791 is taken by process 1"
    monkeypatch.setattr(interfaces, "obstacle_on", lambda address: taken)
    (loopback,) = (one for one in rp.list_roce_interfaces() if one.name == "roce:lo")
    assert (loopback.address, loopback.obstacle) == ("127.0.0.1", taken)


def test_devices_lists_soft0_where_there_is_no_rdma_device() -> None:
    ended = process("devices", "--json", **NOTHING)
    assert ended.returncode == 0
    assert ended.stderr.startswith("rdmapost devices: libibverbs cannot be loaded (/nonexistent")
    assert [(d["name"], d["kind"]) for d in json.loads(ended.stdout)["devices"]] == [
        ("soft0", "soft")
    ]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_required_device_that_is_missing_exits_with_3(command: list[str]) -> None:
    ended = process(*command, "--json", **{**NOTHING, "RDMAPOST_REQUIRE_DEVICE": "1"})
    assert ended.returncode == 3
    assert "libibverbs cannot be loaded" in json.loads(ended.stdout)["error"]
    assert "using soft0" not in ended.stderr


def test_soft0_by_name_satisfies_a_required_device() -> None:
    for args, more in ((["-d", "soft0"], {}), ([], {"RDMAPOST_DEVICE": "soft0"})):
        ended = process("send", *args, **{**NOTHING, "RDMAPOST_REQUIRE_DEVICE": "1", **more})
        assert (ended.returncode, ended.stderr) == (0, "")


def test_fallback_says_that_no_port_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(name: str | None = None) -> rp.Context:
        if name is None:
            raise rp.NoDeviceError("mlx5_0 port 1 is DOWN")
        return rp.open_device(name)

    info = rp.DeviceInfo(name="mlx5_0", kind="verbs", guid=0, node_type=1, dev_path="")
    monkeypatch.delenv("RDMAPOST_DEVICE", raising=False)
    monkeypatch.delenv("RDMAPOST_REQUIRE_DEVICE", raising=False)
    monkeypatch.setattr("rdmapost.cli.target.open_device", choose)
    monkeypatch.setattr("rdmapost.cli.target.list_devices", lambda: [info])
    ran = run("send", "-v")
    assert ran.code == 0
    assert ran.err.startswith("no RDMA device with an active port: using soft0, ")
    assert "mlx5_0 port 1 is DOWN" in ran.err


def test_named_device_never_falls_back_to_soft0() -> None:
    for args, more in ((["-d", "rxe9"], {}), ([], {"RDMAPOST_DEVICE": "rxe9"})):
        ended = process("send", *args, **{**NOTHING, **more})
        assert (ended.returncode, ended.stdout) == (3, "")
        assert "using soft0" not in ended.stderr


def test_missing_libibverbs_exits_with_3_and_no_traceback() -> None:
    ended = process("send", "-d", "rxe0", RDMAPOST_LIBIBVERBS="/nonexistent")
    assert ended.returncode == 3
    assert ended.stdout == ""
    assert "libibverbs cannot be loaded" in ended.stderr
    assert "RDMAPOST_LIBIBVERBS names it" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_missing_libibverbs_says_what_to_install(tmp_path: pathlib.Path) -> None:
    # A file that is not a library, found first under the library's name.
    (tmp_path / "libibverbs.so.1").write_text("no library\n")
    ended = process(
        "send", "-d", "rxe0", "--json", LD_LIBRARY_PATH=str(tmp_path), RDMAPOST_LIBIBVERBS=""
    )
    assert ended.returncode == 3
    assert "apt install libibverbs1" in json.loads(ended.stdout)["error"]
    assert "apt install libibverbs1" in ended.stderr


INTERRUPTED_IMPORT = """
import signal, sys
import rdmapost.cli

class Interrupts:
    def find_spec(self, name, *_):
        if name == WHERE:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
rdmapost.cli.main()
"""


@pytest.mark.parametrize(
    "module", ["rdmapost.cli.app", "click", "rdmapost.cli.devices", "rdmapost._public"]
)
def test_ctrl_c_during_start_up_exits_with_130_silently(module: str) -> None:
    code = f"WHERE = {module!r}\n{INTERRUPTED_IMPORT}"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code, "devices"], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr.strip()) == (130, "", "")


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("command_name", ["send", "serve"])
def test_ctrl_c_in_a_command_exits_with_130(
    command_name: str, as_json: bool, tmp_path: pathlib.Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    args = [command_name, "--data-file", str(fifo), *(["--json"] if as_json else [])]
    command = subprocess.Popen(
        [sys.executable, "-P", "-m", "rdmapost.cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The fifo opens when the command has opened it, which then waits for data.
    with command, fifo.open("wb"):
        for _ in range(60):
            command.send_signal(signal.SIGINT)
            # A signal just before the read begins does not end it: a person presses again.
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = command.communicate(timeout=2)
                break
    assert command.returncode == 130
    assert err.strip() == ""
    assert (json.loads(out) if as_json else out) == ({"error": "interrupted"} if as_json else "")
    if as_json and command_name == "serve":
        # One object per line, to the end.
        assert len(out.splitlines()) == 1


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["send"], 1, "rdmapost: cannot write the output: No space left on device\n"),
        (["check"], 1, "rdmapost: cannot write the output: No space left on device\n"),
        (["devices"], 1, "rdmapost: cannot write the output: No space left on device\n"),
        (["send", "--size", "x"], 2, "'x' is not a size"),
        (["send", "-d", "nowhere0"], 3, "there is no RDMA device nowhere0"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_output_that_cannot_be_written_is_one_line_without_a_traceback(
    args: list[str], code: int, says: str, as_json: bool
) -> None:
    """One line says why, or what else was wrong, without a traceback."""
    with pathlib.Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-P", "-m", "rdmapost.cli", *args, *(["--json"] if as_json else [])],
            # The default: the interpreter writes when the buffer is full.
            env={**os.environ, "RDMAPOST_DEVICE": "soft0", "PYTHONUNBUFFERED": ""},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert ran.returncode == code
    assert says in ran.stderr
    assert len(ran.stderr.splitlines()) == (2 if code == 2 else 1)


@pytest.mark.parametrize("args", [["send"], ["devices", "--json"], ["--help"]], ids=" ".join)
def test_closed_standard_output_is_an_error(args: list[str]) -> None:
    ran = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-P", "-m", "rdmapost.cli", *args],
        env={**os.environ, "RDMAPOST_DEVICE": "soft0"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (
        1,
        "rdmapost: cannot write the output: Bad file descriptor\n",
    )


def test_empty_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an empty variable: it was meant to keep others out, and would let everyone in."""
    calls = [["send", "127.0.0.1:1"], ["read", "127.0.0.1:1"], ["serve", "-d", "soft0"]]
    ran = [run(*call, "--token", "") for call in calls]
    monkeypatch.setenv("RDMAPOST_TOKEN", "")
    ran += [run(*call) for call in calls]
    for one in ran:
        assert (one.code, one.out) == (2, "")
        assert (
            "a token has 1 to 256 characters, not 0 (--token, or the variable RDMAPOST_TOKEN)"
            in one.err
        )
    # Without a server to send it to, it does not matter.
    assert run("send", "-d", "soft0").code == 0


@pytest.mark.parametrize("command", [["send"], ["write"], ["serve"]], ids=lambda one: one[0])
def test_help_says_that_data_may_come_from_standard_input(command: list[str]) -> None:
    assert "- is standard input." in " ".join(run(*command, "--help").out.split())


def test_data_comes_from_standard_input() -> None:
    ran = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "rdmapost.cli",
            "send",
            "-d",
            "soft0",
            "--json",
            "--data-file",
            "-",
        ],
        input="from a pipe",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert json.loads(ran.stdout)["received"] == "from a pipe"


def failed(error: Exception, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any, list[str]]:
    """Report an error; return the exit code, the document and the text."""
    out = Output(json=True)
    code = report(error, out)
    printed = capsys.readouterr()
    return code, json.loads(printed.out), printed.err.splitlines()


def completion(status: rp.WCStatus) -> rp.WC:
    return rp.WC(7, status, None, 0, None, None, 0x11, 0, rp.WCFlags(0), 0, 0, 0, 0, 0)


@pytest.mark.parametrize("status", [s for s in rp.WCStatus if s], ids=lambda s: s.name)
def test_failed_completion_is_named_with_its_status(
    status: rp.WCStatus, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(rp.CompletionError) as error:
        completion(status).check()
    code, doc, lines = failed(error.value, capsys)
    assert code == 1
    assert status.name in doc["error"]
    assert status.name in lines[0]
    assert len(lines) <= 2


@pytest.mark.parametrize(
    ("error", "code", "errno"),
    [
        (rp.VerbsError("ibv_open_device", 5, "the driver refused"), 3, "EIO"),
        (rp.VerbsError("ibv_reg_mr", 13), 3, "EACCES"),
        (rp.VerbsError("ibv_reg_mr", 12, "raise it"), 1, "ENOMEM"),
        (rp.UnsupportedError("ibv_alloc_mw", 95), 1, "ENOTSUP"),
    ],
)
def test_refused_verb_reports_its_errno(
    error: rp.VerbsError, code: int, errno: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failed(error, capsys) == (
        code,
        {"error": str(error), "errno": errno},
        [f"rdmapost: {error}"],
    )


def test_out_of_memory_suggests_a_smaller_size(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, lines = failed(MemoryError(), capsys)
    assert code == 1
    assert "try a smaller --size" in lines[0]


def test_fault_in_the_program_shows_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    code, doc, lines = failed(ZeroDivisionError("why"), capsys)
    assert (code, doc) == (1, {"error": "why"})
    assert "ZeroDivisionError" in "\n".join(lines)

"""The programs in examples/, run as their users run them: on soft0, and on a real device."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support import LIMIT, ROOT
from support.ports import free_port, wait_for_port

import rdmapost as rp

EXAMPLES = ROOT / "examples"
PRINTED = {
    "kv_store.py": """\
bob reads b'blue'
alice reads b'red'
no such key: None
after 200 writes by two clients: intact
""",
    "rpc_srq_asyncio.py": """\
2 + 3 = 5
SHARED RECEIVE QUEUE
200 calls from 8 clients, total 4800
refused: KeyError: 'divide'
""",
    "ring_allreduce.py": "4 ranks, 262144 bytes each: equal\n",
    "kv_cache_blocks.py": "800 blocks of 4096 bytes: intact\nuntouched: 224 blocks\n",
    "ud_reply.py": """\
hello -> HELLO
from -> FROM
ann -> ANN
hello -> HELLO
from -> FROM
ben -> BEN
served 2 clients
""",
}
"""What each program prints that takes the device as its argument."""

BETWEEN_PROCESSES = {"two_processes.py", "rc_pingpong.py"}
OF_PYTEST = {"test_fault_injection.py": "7 passed", "test_driver.py": "21 passed"}
NEED_NUMPY = {"ring_allreduce.py", "kv_cache_blocks.py"}
RATE = re.compile(
    r"819200 bytes in [\d.]+ seconds = [\d.]+ Mbit/sec\n"
    r"100 iters in [\d.]+ seconds = [\d.]+ usec/iter\n"
)


def start(*command: str, device: str = "soft0", **options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "RDMAPOST_DEVICE": device, "PYTHONUNBUFFERED": "1", **options},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def output(process: subprocess.Popen[str]) -> str:
    """Return what a program printed; it must end without an error."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"still running after {LIMIT:g} s: {out}{err}")
    assert (process.returncode, err) == (0, ""), out + err
    return out


def run(name: str, *args: str) -> str:
    if name in NEED_NUMPY:
        pytest.importorskip("numpy")
    return output(start(sys.executable, "-P", f"examples/{name}", *args))


@contextmanager
def server(*command: str, port: int) -> Iterator[subprocess.Popen[str]]:
    """Start a program that listens on a port, and kill it if it has not ended by itself."""
    with start(*command) as process:
        try:
            wait_for_port(port)
            yield process
        finally:
            process.kill()


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        *PRINTED,
        *BETWEEN_PROCESSES,
        *OF_PYTEST,
    }


# ---- on soft0 ----------------------------------------------------------------


@pytest.mark.parametrize("name", PRINTED)
def test_example_runs_on_soft0(name: str) -> None:
    assert run(name) == PRINTED[name]


def test_two_processes_runs_as_two_threads_on_soft0() -> None:
    printed = run("two_processes.py", "-p", str(free_port()))
    assert sorted(printed.splitlines()) == ["client: SUCCESS", "server: memory holds b'hello'"]


def test_rc_pingpong_runs_as_two_threads_on_soft0() -> None:
    assert RATE.fullmatch(run("rc_pingpong.py", "-n", "100", "-p", str(free_port())))


@pytest.mark.parametrize("name", OF_PYTEST)
def test_example_of_tests_passes_on_soft0(name: str) -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"examples/{name}")
    assert OF_PYTEST[name] in output(start(sys.executable, *command))


# ---- on a real device --------------------------------------------------------


@pytest.mark.rdma
@pytest.mark.parametrize("name", PRINTED)
def test_example_runs_on_a_real_device(name: str, verbs_context: rp.Context) -> None:
    assert run(name, verbs_context.name) == PRINTED[name]


@pytest.mark.rdma
def test_two_processes_connect_on_a_real_device(verbs_context: rp.Context) -> None:
    port = free_port()
    program = ("two_processes.py", "-d", verbs_context.name, "-p", str(port))
    with server(sys.executable, f"examples/{program[0]}", *program[1:], port=port) as serving:
        assert run(*program, "127.0.0.1") == "client: SUCCESS\n"
        assert output(serving) == "server: memory holds b'hello'\n"


@pytest.mark.rdma
def test_rc_pingpong_works_with_itself(verbs_context: rp.Context) -> None:
    port = free_port()
    program = ("rc_pingpong.py", "-d", verbs_context.name, "-n", "100", "-p", str(port))
    with server(sys.executable, f"examples/{program[0]}", *program[1:], port=port) as serving:
        assert RATE.fullmatch(run(*program, "127.0.0.1"))
        assert output(serving) == ""


@pytest.mark.rdma
@pytest.mark.parametrize("c_is", ["the server", "the client"])
def test_rc_pingpong_works_with_the_c_program(c_is: str, verbs_context: rp.Context) -> None:
    stock = shutil.which("ibv_rc_pingpong")
    if stock is None:
        pytest.skip("ibv_rc_pingpong is not installed (ibverbs-utils)")
    port, gid = free_port(), str(verbs_context.choose_gid().index)
    options = ("-d", verbs_context.name, "-g", gid, "-n", "100", "-p", str(port))
    ours = (sys.executable, "-P", "examples/rc_pingpong.py", *options)
    first, second = ((stock, *options), ours) if c_is == "the server" else (ours, (stock, *options))
    with server(*first, port=port) as serving:
        answer = output(start(*second, "127.0.0.1"))
        assert "100 iters in" in answer
        output(serving)


@pytest.mark.rdma
def test_driver_example_passes_on_a_real_device(verbs_context: rp.Context) -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/test_driver.py")
    printed = output(start(sys.executable, *command, device=verbs_context.name))
    assert OF_PYTEST["test_driver.py"] in printed

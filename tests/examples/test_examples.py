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
from support.roce import skip_unless_free

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
    "kv_cache_blocks.py": """\
RdmaWrite: 800 blocks of 16384 bytes intact, 224 untouched
RdmaRead: 800 blocks of 16384 bytes intact, 224 untouched
""",
    "ud_reply.py": """\
hello -> HELLO
from -> FROM
ann -> ANN
hello -> HELLO
from -> FROM
ben -> BEN
served 2 clients
""",
    "multicast.py": """\
subscriber 0: rain sun snow
subscriber 1: rain sun snow
subscriber 2: rain sun snow
""",
    "file_cache.py": """\
first reading of 3 files: 45 blocks
second reading of 3 files: 0 blocks
writing: REM_ACCESS_ERR
""",
    "any_memory.py": """\
numpy array: 65536 bytes intact
DLPack tensor: 65536 bytes intact
ctypes structures: 65536 bytes intact
memfd as dma-buf: 65536 bytes intact
""",
    "growing_log.py": "2000 records, 6 moves: both followers have every byte\n",
    "adaptive_receiver.py": """\
1024 messages of 4 senders: intact and in order
grew under load: True
rejected: 1
failed: wr_id 9, REM_INV_REQ_ERR
""",
    "persistent_log.py": "200 records recovered, none of the uncommitted one\n",
    "xrc_workers.py": """\
worker 0: 100 messages intact
worker 1: 100 messages intact
connections: 1
""",
    "collector.py": """\
threads: 6 rows intact, version 1 rejected
asyncio: 6 rows intact, version 1 rejected
""",
}
"""What each program prints that takes the device as its argument."""

VARIES = {
    "latency_histogram.py": re.compile(
        r"(\d+ bytes: median [\d.]+ us, worst [\d.]+ us\n( +< +\d+ us +[\d.]+%( #+)?\n)+){3}"
        r"960 writes: intact\n"
    ),
    "choose_device.py": re.compile(
        r"(?s)(\w+: PCI \S+, NUMA node \S+\n"
        r"(  port \d+: \w+, \w+, MTU \d+\n    P_Keys: [^\n]+\n(   [ *]GID [^\n]+\n)*)+)+"
        r"chosen: \w+ port 1\n256 bytes sent: intact\n"
    ),
}
"""What each program prints that prints something else in each run."""

OF_THE_DEVICE = {
    "adaptive_receiver.py": re.compile(
        r"(?s)1024 messages of 4 senders: intact and in order\n.*failed: wr_id 9, REM_OP_ERR\n"
    ),
    "any_memory.py": re.compile(
        "numpy array: 65536 bytes intact\nDLPack tensor: 65536 bytes intact\n"
        "ctypes structures: 65536 bytes intact\n"
        r"memfd as dma-buf: refused: ibv_reg_dmabuf_mr.+\n"
    ),
    "growing_log.py": re.compile(
        r"new regions: ibv_rereg_mr is not supported.*\n"
        r"2000 records, 6 moves: both followers have every byte\n"
    ),
}
"""What each program may print instead: the device lacks a part of it, or has another status."""

REFUSED = {
    "latency_histogram.py": re.compile(
        r"ibv_create_cq_ex is not supported: \w+ has no completion timestamps.*\n"
    ),
    "persistent_log.py": re.compile(
        r"ibv_create_qp_ex is not supported: send_ops_flags=.*(libibverbs|\w+ has no FLUSH).*\n"
    ),
    "xrc_workers.py": re.compile(r"ibv_open_xrcd is not supported.*\n"),
}
"""What each program says in one line, and exits with 1, if the device has nothing of the kind."""

BETWEEN_PROCESSES = {"two_processes.py", "rc_pingpong.py"}
OF_PYTEST = {"test_fault_injection.py": "7 passed", "test_driver.py": "21 passed"}
NEED_NUMPY = {"ring_allreduce.py", "kv_cache_blocks.py", "any_memory.py"}
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
            wait_for_port(port, process)
            yield process
        finally:
            process.kill()


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        *PRINTED,
        *VARIES,
        *BETWEEN_PROCESSES,
        *OF_PYTEST,
    }


# ---- on soft0 ----------------------------------------------------------------


@pytest.mark.parametrize("name", PRINTED)
def test_example_runs_on_soft0(name: str) -> None:
    assert run(name) == PRINTED[name]


@pytest.mark.parametrize("name", VARIES)
def test_example_whose_output_varies_runs_on_soft0(name: str) -> None:
    printed = run(name, "soft0")
    assert VARIES[name].fullmatch(printed), printed


def test_two_processes_runs_as_two_threads_on_soft0() -> None:
    printed = run("two_processes.py", "-p", str(free_port()))
    assert sorted(printed.splitlines()) == ["client: SUCCESS", "server: memory holds b'hello'"]


def test_rc_pingpong_runs_as_two_threads_on_soft0() -> None:
    assert RATE.fullmatch(run("rc_pingpong.py", "-n", "100", "-p", str(free_port())))


@pytest.mark.parametrize("name", OF_PYTEST)
def test_example_of_tests_passes_on_soft0(name: str) -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"examples/{name}")
    assert OF_PYTEST[name] in output(start(sys.executable, *command))


DAMAGED = """
import runpy, sys
from rdmapost.providers.soft0 import requester, responder
from rdmapost.providers.software import memory
from rdmapost.providers.software import responder as shared

def copy(source, target):
    data = bytearray(b"".join(source))
    if len(data) > 64:
        data[-1] ^= 1
    memory.copy([data], target)

requester.copy = responder.copy = shared.copy = copy
sys.argv = [sys.argv[1]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program on a soft0 that damages the last byte of whatever is longer than 64 bytes."""

NOTICE_DAMAGE = {
    "adaptive_receiver.py",
    "any_memory.py",
    "choose_device.py",
    "collector.py",
    "file_cache.py",
    "growing_log.py",
    "kv_cache_blocks.py",
    "latency_histogram.py",
    "persistent_log.py",
    "ring_allreduce.py",
    "xrc_workers.py",
}


@pytest.mark.parametrize("name", sorted(NOTICE_DAMAGE))
def test_example_fails_if_the_device_damages_one_byte(name: str) -> None:
    if name in NEED_NUMPY:
        pytest.importorskip("numpy")
    program = start(sys.executable, "-P", "-c", DAMAGED, f"examples/{name}")
    _, err = program.communicate(timeout=LIMIT)
    assert program.returncode == 1
    assert re.search("damage|differ|missing|did not receive", err), err


# ---- between processes without a device ----------------------------------------


@pytest.fixture
def roce() -> str:
    """The device between processes."""
    skip_unless_free("roce:lo")
    return "roce:lo"


def test_two_processes_connect_on_roce_lo(roce: str) -> None:
    connects_two_processes(roce)


def test_rc_pingpong_connects_two_processes_on_roce_lo(roce: str) -> None:
    plays_with_itself(roce)


# ---- on a real device --------------------------------------------------------


@pytest.mark.rdma
@pytest.mark.parametrize("name", [*PRINTED, *VARIES])
def test_example_runs_on_a_real_device_or_names_what_it_lacks(
    name: str, verbs_context: rp.Context
) -> None:
    if name in NEED_NUMPY:
        pytest.importorskip("numpy")
    program = start(sys.executable, "-P", f"examples/{name}", verbs_context.name)
    out, err = program.communicate(timeout=LIMIT)
    if program.returncode == 0:
        expected = [PRINTED.get(name)] if name in PRINTED else []
        patterns = [each[name] for each in (VARIES, OF_THE_DEVICE) if name in each]
        assert out in expected or any(each.fullmatch(out) for each in patterns), out
        assert err == ""
    else:
        assert (program.returncode, out) == (1, ""), out + err
        assert name in REFUSED, err
        assert REFUSED[name].fullmatch(err), err


@pytest.mark.rdma
def test_two_processes_connect_on_a_real_device(verbs_context: rp.Context) -> None:
    connects_two_processes(verbs_context.name)


def connects_two_processes(device: str) -> None:
    port = free_port()
    program = ("two_processes.py", "-d", device, "-p", str(port))
    with server(sys.executable, f"examples/{program[0]}", *program[1:], port=port) as serving:
        assert run(*program, "127.0.0.1") == "client: SUCCESS\n"
        assert output(serving) == "server: memory holds b'hello'\n"


@pytest.mark.rdma
def test_rc_pingpong_works_with_itself(verbs_context: rp.Context) -> None:
    plays_with_itself(verbs_context.name)


def plays_with_itself(device: str) -> None:
    port = free_port()
    program = ("rc_pingpong.py", "-d", device, "-n", "100", "-p", str(port))
    with server(sys.executable, f"examples/{program[0]}", *program[1:], port=port) as serving:
        assert RATE.fullmatch(run(*program, "127.0.0.1"))
        assert output(serving) == ""


@pytest.mark.rdma
@pytest.mark.parametrize("c_is", ["the server", "the client"])
def test_rc_pingpong_works_with_the_c_program(c_is: str, verbs_context: rp.Context) -> None:
    stock = shutil.which("ibv_rc_pingpong")
    if stock is None:
        pytest.skip("ibv_rc_pingpong is not installed (ibverbs-utils)")
    port, gid = free_port(), str(verbs_context.choose_gid().gid_index)
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

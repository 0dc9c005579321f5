"""A capture of what a roce device sends and receives."""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support import LIMIT, Pair, interrupt_everywhere, prints, run_python, until
from support.file_limit import files_of_at_most
from support.pcapng import check_headers, payload_of, read
from support.roce import open_roce

import rdmapost as rp
from rdmapost import QPType
from rdmapost._binding import native
from rdmapost.providers.roce import capture as capture_module
from rdmapost.providers.roce import capture_thread

DEVICE = "roce:lo"


def none_is_left() -> bool:
    """Whether no capture's thread runs."""
    recordings = [each() for each in capture_thread._known.copy()]
    # An earlier test's error may still refer to one that was refused before it had a thread.
    threads = [each._thread for each in recordings if each is not None and each._thread is not None]
    return all(thread() is None for thread in threads)


def has_ipv6() -> bool:
    try:
        return "00000000000000000000000000000001" in pathlib.Path("/proc/net/if_inet6").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module", params=[DEVICE, "roce:::1"])
def context(request: pytest.FixtureRequest) -> Iterator[rp.Context]:
    if request.param != DEVICE and not has_ipv6():
        pytest.skip("this machine has no address ::1")
    with open_roce(request.param) as opened:
        yield opened


@pytest.fixture
def on_lo() -> Iterator[rp.Context]:
    with open_roce(DEVICE) as opened:
        yield opened


def dissect(path: pathlib.Path, *fields: str) -> list[list[str]]:
    """Have tshark dissect a file; return fields of each packet."""
    if shutil.which("tshark") is None:
        pytest.skip("this machine has no tshark")
    names = [part for name in fields for part in ("-e", name)]
    done = subprocess.run(
        ["tshark", "-r", str(path), "-o", "udp.check_checksum:TRUE", "-T", "fields", *names],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines()]


@pytest.fixture
def connect_on_lo(on_lo: rp.Context, stack: contextlib.ExitStack) -> Pair:
    pd = stack.enter_context(rp.PD(on_lo))
    return Pair(stack, pd, stack.enter_context(rp.CQ(on_lo)))


# ---- what is in them ---------------------------------------------------------------------------


def every_operation(pair) -> dict[int, str]:
    """Post every operation that a pair has; return how each one's comment begins, by wr_id."""
    mine, theirs = pair.mine, pair.theirs
    wrs = [pair.send(mine[:100], wr_id=1), pair.wr(rp.SendWithImm, mine[:4], wr_id=2, imm_data=5)]
    said = {1: "SEND wr_id 1, 100 bytes", 2: "SEND_WITH_IMM wr_id 2, 4 bytes"}
    if pair.type is not QPType.UD:
        wrs += [
            pair.wr(rp.RdmaWrite, mine[:8000], wr_id=3),
            pair.wr(rp.RdmaWriteWithImm, mine[:1], wr_id=4, imm_data=6),
        ]
        said |= {3: "RDMA_WRITE wr_id 3, 8000 bytes", 4: "RDMA_WRITE_WITH_IMM wr_id 4, 1 byte"}
    if pair.type is QPType.RC:
        wrs += [
            pair.wr(rp.RdmaRead, mine[:8000], wr_id=5),
            pair.wr(rp.AtomicFetchAndAdd, mine[:8], wr_id=6, compare_add=1),
            pair.wr(rp.AtomicCmpAndSwp, mine[:8], wr_id=1 << 63, compare_add=1, swap=2),
        ]
        said |= {
            5: "RDMA_READ wr_id 5, 8000 bytes",
            6: "ATOMIC_FETCH_AND_ADD wr_id 6, 8 bytes",
            1 << 63: f"ATOMIC_CMP_AND_SWP wr_id {1 << 63}, 8 bytes",
        }
    receives = 2 if pair.type is QPType.UD else 3
    pair.b.post_recv([rp.RecvWR(theirs[:], wr_id=100)] * receives)
    pair.a.post_send(wrs[:4])
    pair.wait(len(wrs[:4]) + receives)
    if len(wrs) > 4:
        pair.a.post_send(wrs[4:])
        pair.wait(len(wrs) - 4)
    return said


TYPES = [QPType.RC, QPType.UC, QPType.UD]
OPCODES = {
    QPType.RC: {0x04, 0x05, 0x06, 0x08, 0x0B, 0x0C, 0x0D, 0x0F, 0x11, 0x12, 0x13, 0x14},
    QPType.UC: {0x24, 0x25, 0x26, 0x28, 0x2B},
    QPType.UD: {0x64, 0x65},
}


@pytest.mark.parametrize("qp_type", TYPES, ids=lambda t: t.name)
def test_captured_packets_are_those_of_the_wire_with_their_work_requests(
    context, connect, qp_type, tmp_path
):
    pair, path = connect(qp_type), tmp_path / "packets.pcapng"
    with context.capture(path) as capture:
        said = every_operation(pair)
    seen = read(path)
    assert (capture.packets, capture.dropped, capture.error) == (len(seen), 0, None)
    for each in seen:
        check_headers(each.frame)
    assert {payload_of(each.frame)[0] for each in seen} == OPCODES[qp_type]
    times = [each.time_ns for each in seen]
    assert times == sorted(times)
    # Everything was sent and received here, once each, in the same packets.
    sent = [each for each in seen if each.is_sent]
    received = [each for each in seen if not each.is_sent]
    assert len(sent) == len(received)
    assert {each.frame for each in sent} == {each.frame for each in received}
    there = f"QP {pair.a.qp_num:#x} to {pair.b.qp_num:#x}"
    back = f"QP {pair.b.qp_num:#x} to {pair.a.qp_num:#x}"
    requests = [each.comment for each in sent if not each.comment.startswith("an answer")]
    assert dict.fromkeys(requests) == dict.fromkeys(f"{text}, {there}" for text in said.values())
    answers = {each.comment for each in received if each.comment.startswith("an answer")}
    if qp_type is QPType.RC:
        for wr_id in (5, 6, 1 << 63):
            assert f"an answer to {said[wr_id]}, {back}" in answers
    else:
        assert answers == set()
    assert f"SEND, {there}" in {each.comment for each in received}


@pytest.mark.parametrize("qp_type", TYPES, ids=lambda t: t.name)
def test_wireshark_dissects_every_captured_packet(context, connect, qp_type, tmp_path):
    pair, path = connect(qp_type), tmp_path / "packets.pcapng"
    with context.capture(path):
        every_operation(pair)
    fields = ["_ws.col.Protocol", "frame.protocols", "_ws.malformed", "_ws.expert.severity"]
    fields += ["infiniband.bth.opcode", "frame.comment", "udp.dstport", "frame.packet_flags"]
    found = dissect(path, *fields)
    seen = read(path)
    assert len(found) == len(seen)
    for (protocol, protocols, malformed, severity, *rest), each in zip(found, seen, strict=True):
        assert (protocol, malformed) == ("RRoCE", "")
        assert ":udp:infiniband" in protocols
        # The comment itself is an expert information, and nothing worse is there.
        assert severity == "1048576"
        opcode, comment, port, flags = rest
        assert (int(opcode), comment) == (payload_of(each.frame)[0], each.comment)
        assert port == "4791"
        assert int(flags, 16) & 3 == 2 if each.is_sent else 1


def test_segmented_batches_are_captured_as_the_packets_of_the_wire(on_lo, stack, tmp_path):
    """The kernel cuts and joins them; each keeps its identification and its ICRC."""
    path, size = tmp_path / "packets.pcapng", 200_000
    enter = stack.enter_context
    pd, cq = enter(rp.PD(on_lo)), enter(rp.CQ(on_lo))
    mr = enter(rp.MR(pd, 2 * size, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE))
    a, b = (enter(rp.QP(pd, QPType.RC, cq)) for _ in range(2))
    a.connect(b.endpoint())
    b.connect(a.endpoint())
    mr.buffer[:size] = os.urandom(size)
    with on_lo.capture(path):
        a.post_send(rp.RdmaWrite(mr[:size], wr_id=7, remote_addr=mr.addr + size, rkey=mr.rkey))
        cq.wait(1, LIMIT)[0].check()
    seen = read(path)
    data = b""
    for each in seen:
        check_headers(each.frame)
        packet = payload_of(each.frame)
        if each.is_sent and packet[0] in (0x06, 0x07, 0x08):
            assert len(packet) <= 4096 + 12 + 16 + 4
            header = 28 if packet[0] == 0x06 else 12
            data += packet[header : -4 - (packet[1] >> 4 & 3)]
    # Packets that were sent again come twice: with a large buffer of the socket none is.
    assert data == mr.buffer[:size]
    numbers = {int.from_bytes(each.frame[4:6]) for each in seen}
    assert len(numbers) > 1


def test_capture_names_damaged_packets_and_those_for_no_queue_pair(on_lo, tmp_path):
    path = tmp_path / "packets.pcapng"
    host = str(on_lo.choose_gid(1).gid).removeprefix("::ffff:")
    with on_lo.capture(path) as capture:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for size in (0, 1, 15, 100):
                stranger.sendto(b"\x04" * size, (host, 4791))
        until(lambda: capture.packets >= 3)
    seen = read(path)
    assert [payload_of(each.frame) for each in seen] == [b"\x04" * n for n in (1, 15, 100)]
    assert {each.comment for each in seen} == {"its ICRC is wrong"}


def test_captures_follow_each_other_and_overlap(context, connect, tmp_path):
    pair = connect()
    first, second, third = (tmp_path / name for name in "123")
    with context.capture(first):
        pair.works()
        with context.capture(str(second)):
            pair.works()
    pair.works()
    third.write_bytes(b"what was there before" * 1000)
    with context.capture(os.fsencode(third)):
        pair.works()
    counts = [len(read(path)) for path in (first, second, third)]
    assert counts[0] == 2 * counts[1] == 2 * counts[2]


# ---- how they end ----------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["soft0"])
def test_capture_on_soft0_is_refused_with_what_to_use(device, tmp_path):
    with (
        rp.open_device(device) as soft,
        pytest.raises(rp.UnsupportedError, match="soft0 has no packets; use a roce device"),
    ):
        soft.capture(tmp_path / "packets")
    assert not [*tmp_path.iterdir()]


@pytest.mark.rdma
def test_capture_on_a_real_device_is_refused_with_what_to_use(verbs_context, tmp_path):
    with pytest.raises(rp.UnsupportedError, match=r"tcpdump .* 'ibdump'"):
        verbs_context.capture(tmp_path / "packets")


def test_pcap_file_that_cannot_be_created_is_named(on_lo, tmp_path):
    missing = tmp_path / "missing" / "packets"
    with pytest.raises(FileNotFoundError, match=str(missing)):
        on_lo.capture(missing)
    with pytest.raises(TypeError):
        on_lo.capture(7)  # type: ignore[arg-type]
    until(none_is_left)


def test_file_of_another_capture_is_refused_for_a_capture_and_stays_whole(
    context, connect, tmp_path
):
    """By whatever name, and from another device of the process."""
    pair, path, link = connect(), tmp_path / "packets", tmp_path / "link"
    with context.capture(path):
        link.symlink_to(path)
        pair.works()
        with open_roce(DEVICE) as other:
            for name in (path, os.fsencode(link)):
                with pytest.raises(
                    OSError, match=f"another capture is writing .*{os.fsdecode(name)}"
                ):
                    other.capture(name)
        pair.works()
    assert len(read(path)) == 8
    with context.capture(path):
        pair.works()
    assert len(read(path)) == 4


def test_capture_that_was_dropped_does_not_refuse_the_next_to_its_file(context, connect, tmp_path):
    pair, path = connect(), tmp_path / "packets"
    for _ in range(10):
        capture = context.capture(path)
        pair.works()
        del capture
        with context.capture(path):
            pair.works()
        assert len(read(path)) == 4


def test_captures_may_share_a_device_file(context):
    with context.capture(os.devnull), context.capture(os.devnull):
        pass


UNREAD = """
import errno, os, sys, rdmapost as rp
os.mkfifo(sys.argv[1])
with rp.open_device("roce:lo") as context:
    try:
        context.capture(sys.argv[1])
    except OSError as error:
        assert error.errno == errno.ENXIO and error.filename == sys.argv[1]
        print(error.strerror)
"""


def test_capture_to_a_pipe_without_a_reader_is_refused(tmp_path):
    """In a process of its own: a capture must not wait for a reader, nor does the test."""
    assert prints(UNREAD, str(tmp_path / "pipe")) == "the FIFO has no reader"


def test_reader_of_a_pipe_gets_the_whole_capture(on_lo, connect_on_lo, tmp_path):
    """Also if it waits in its open(), as a program does."""
    pipe, path = tmp_path / "pipe", tmp_path / "packets"
    os.mkfifo(pipe)
    with subprocess.Popen(["/bin/sh", "-c", f"cat {pipe} > {path}"]) as reader:
        begun: list[rp.Capture] = []

        def begin() -> bool:
            with contextlib.suppress(OSError):
                begun.append(on_lo.capture(pipe))
            return bool(begun)

        until(begin)
        with begun[0] as capture:
            for _ in range(20):
                connect_on_lo.works()
        assert reader.wait(LIMIT) == 0
    assert len(read(path)) == capture.packets == 80


def test_closing_the_device_ends_its_capture(tmp_path):
    path = tmp_path / "packets"
    context = open_roce(DEVICE)
    capture = context.capture(path)
    context.close()
    capture.close()
    capture.close()
    assert read(path) == []
    with pytest.raises(rp.ClosedError):
        context.capture(path)


def test_dropped_capture_is_ended_and_its_file_is_complete(on_lo, connect_on_lo, tmp_path):
    pair, path = connect_on_lo, tmp_path / "packets"
    capture = on_lo.capture(path)
    pair.works()
    del capture
    until(none_is_left)
    assert len(read(path)) == 4


def test_interrupted_start_of_a_capture_leaves_no_thread_and_no_descriptor(on_lo, tmp_path):
    """Neither a thread nor a descriptor."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    assert interrupt_everywhere(lambda: on_lo.capture(tmp_path / "packets") and None) > 10
    until(none_is_left)
    # An earlier test's device may just have closed its own.
    assert descriptors() <= before


def test_write_error_of_a_capture_file_ends_the_capture_and_not_the_device(
    context, connect, tmp_path, caplog
):
    pair, path = connect(), tmp_path / "packets"
    with files_of_at_most(4096):
        capture = context.capture(path)
        until(lambda: path.stat().st_size)
        pair.works()
        until(lambda: capture.packets)
        for _ in range(2):
            pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8000]))
            pair.wait()
            until(lambda: capture.error is not None)
    pair.works()
    assert capture.error is not None
    assert capture.error.errno == errno.EFBIG
    with pytest.raises(rp.RdmaError, match=rf"{path} ended after \d+ packets?: File too large"):
        capture.close()
    capture.close()
    until(lambda: caplog.text.count("File too large") == 1)
    # What is there is whole.
    assert len(read(path, is_whole=False)) == capture.packets > 0


def test_write_error_of_a_capture_file_does_not_hide_the_error_of_the_block(
    context, connect, tmp_path
):
    pair = connect()

    def fail() -> None:
        with files_of_at_most(4096), context.capture(tmp_path / "packets"):
            pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8000]))
            pair.wait()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    assert ["File too large" in note for note in caught.value.__notes__] == [True]


def test_capture_to_a_stalled_file_costs_bounded_memory_and_no_time(
    context, connect, tmp_path, monkeypatch
):
    """A pipe that nobody reads: what does not fit is dropped, and counted."""
    monkeypatch.setattr(capture_module, "_MAX_QUEUED", 100_000)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    pair = connect()
    capture = context.capture(path)
    try:
        while not capture.dropped:
            pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8000]))
            pair.wait()
        pair.works()
        monkeypatch.setattr(capture_module, "_AT_CLOSE", 0.1)
        with pytest.raises(rp.RdmaError, match="its last packets were still unwritten"):
            capture.close()
    finally:
        os.close(reader)
    monkeypatch.setattr(capture_module, "_AT_CLOSE", LIMIT)
    with pytest.raises(rp.RdmaError, match="Broken pipe"):
        capture.close()


# ---- in the middle of something ----------------------------------------------------------------


class InStep:
    """Calls a function once, in the middle of a step of the device, as a signal handler does."""

    def __init__(self, function) -> None:
        self._function, self.calls = function, 0

    def __enter__(self) -> InStep:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: object, event: str, argument: object) -> None:
        if not self.calls and event == "call" and native.in_step():
            self.calls += 1
            self._function()


def test_capture_closed_in_the_middle_of_a_step_of_the_device_does_not_wait(
    on_lo, connect_on_lo, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(capture_module, "_AT_CLOSE", 2.0)
    pair, path = connect_on_lo, tmp_path / "packets"
    capture = on_lo.capture(path)
    pair.works()
    with InStep(capture.close) as step:
        pair.works()
    assert step.calls == 1
    pair.works()
    capture.close()
    assert len(read(path)) == capture.packets == 4
    assert caplog.text == ""


def test_closing_a_capture_to_a_slow_file_does_not_hold_up_the_step_it_interrupts(
    on_lo, connect_on_lo, tmp_path, monkeypatch, caplog
):
    """A pipe that nobody reads. The error that close() does not wait for is logged."""
    path, pair = tmp_path / "pipe", connect_on_lo
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        capture = on_lo.capture(path)
        for _ in range(20):
            pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8000]))
            pair.wait()
        monkeypatch.setattr(capture_module, "_AT_CLOSE", LIMIT)
        with InStep(capture.close) as step:
            pair.works()
        assert (step.calls, capture.error) == (1, None)
    finally:
        os.close(reader)
    until(lambda: capture.error is not None)
    until(lambda: caplog.text.count("Broken pipe") == 1)
    with pytest.raises(rp.RdmaError, match="Broken pipe"):
        capture.close()


def test_capture_is_refused_in_the_middle_of_a_step_of_the_device(on_lo, connect_on_lo, tmp_path):
    path, errors = tmp_path / "packets", []

    def begin() -> None:
        try:
            on_lo.capture(path)
        except rp.VerbsError as error:
            errors.append(str(error))

    with InStep(begin):
        connect_on_lo.works()
    assert len(errors) == 1
    assert errors[0].startswith("ibv_capture: EBUSY")
    assert not path.exists()


class ClosesWhenLogged(logging.Handler):
    """A handler of the log that closes a capture, in whatever thread it is called."""

    def __init__(self, capture: rp.Capture) -> None:
        super().__init__()
        self.capture, self.raised = capture, []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.capture.close()
        except rp.RdmaError as error:
            self.raised.append(str(error))


def test_logging_handler_may_close_the_capture_whose_failure_it_reports(
    on_lo, connect_on_lo, tmp_path
):
    pair, path = connect_on_lo, tmp_path / "packets"
    with files_of_at_most(4096):
        capture = on_lo.capture(path)
        handler = ClosesWhenLogged(capture)
        logging.getLogger("rdmapost.roce.capture").addHandler(handler)
        try:
            pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8000]))
            pair.wait()
            until(lambda: handler.raised)
        finally:
            logging.getLogger("rdmapost.roce.capture").removeHandler(handler)
    assert ["File too large" in text for text in handler.raised] == [True]


class DropsWhatIsLogged(logging.Handler):
    """A handler of the log with a lock, under which it does nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        pass


def test_closing_a_capture_does_not_wait_for_a_logging_handler(
    on_lo, connect_on_lo, tmp_path, monkeypatch
):
    """Its caller may be a signal handler that has interrupted a handler of the log."""
    monkeypatch.setattr(capture_module, "_AT_CLOSE", 2.0)
    pair, handler = connect_on_lo, DropsWhatIsLogged()
    logging.getLogger("rdmapost.roce.capture").addHandler(handler)
    try:
        with files_of_at_most(4096):
            capture = on_lo.capture(tmp_path / "packets")
            handler.acquire()
            try:
                pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8000]))
                pair.wait()
                with pytest.raises(rp.RdmaError, match="File too large"):
                    capture.close()
            finally:
                handler.release()
    finally:
        logging.getLogger("rdmapost.roce.capture").removeHandler(handler)


# ---- whatever fails ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/tmp/x\0y", "/tmp/\udfff", b"/tmp/x\0y"])
def test_capture_to_a_malformed_path_is_refused(on_lo, path):
    with pytest.raises(ValueError, match=r"null|surrogates"):
        on_lo.capture(path)
    until(none_is_left)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_capture_to_a_file_that_takes_no_first_bytes_is_refused(on_lo, caplog):
    """Every time, and not only if the thread is quick."""
    for _ in range(20):
        with pytest.raises(OSError, match="No space left on device"):
            on_lo.capture("/dev/full")
    until(none_is_left)
    assert caplog.text == ""


AUDITED = """
import sys, rdmapost as rp
def refuse(event, args):
    if event == "open" and args[0] == sys.argv[1]:
        raise LookupError("not this file")
with rp.open_device("roce:lo") as context:
    sys.addaudithook(refuse)
    try:
        context.capture(sys.argv[1])
    except LookupError as error:
        print(error)
"""


def test_exception_of_opening_the_capture_file_is_raised_unchanged(tmp_path):
    assert prints(AUDITED, str(tmp_path / "packets")) == "not this file"


def test_capture_whose_thread_ends_unexpectedly_has_failed(on_lo, tmp_path, monkeypatch):
    """As one does that lacks memory to say more: nobody waits for it."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    capture = on_lo.capture(tmp_path / "packets")
    monkeypatch.setattr(capture_thread.Recording, "_end", None)
    with pytest.raises(rp.RdmaError, match="Cannot allocate memory"):
        capture.close()
    monkeypatch.setattr(capture_thread.Recording, "_run", lambda recording: None)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        on_lo.capture(tmp_path / "packets")


NO_MEMORY = """
import _testcapi, faulthandler, gc, logging, os, sys, rdmapost as rp
faulthandler.dump_traceback_later(100, exit=True)
logging.disable()
path, burst = sys.argv[1], int(sys.argv[2])
sys.unraisablehook = len

def attempt(context, at):
    # Small functions: Python needs memory for where a handler is in a long one.
    _testcapi.set_nomemory(at, at + burst)
    try:
        return context.capture(path)
    except BaseException as raised:
        return raised

def remove_hooks():
    while True:
        try:
            return _testcapi.remove_mem_hooks()
        except MemoryError:
            pass

with rp.open_device("roce:lo") as context:
    gc.disable()
    at = quiet = 0
    while quiet < 20:
        made = attempt(context, at)
        remove_hooks()
        error, capture = (made, None) if isinstance(made, BaseException) else (None, made)
        made = None
        assert isinstance(error, (MemoryError, OSError, type(None))), error
        quiet = quiet + 1 if error is None else 0
        if capture is not None:
            try:
                capture.close()
            except rp.RdmaError as failed:
                assert "Cannot allocate memory" in str(failed), failed
            assert os.path.getsize(path) >= 20
        at += 1
print(at > 40)
"""


@pytest.mark.parametrize("burst", [1, 3])
def test_capture_that_runs_out_of_memory_reports_so(tmp_path, burst):
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    ran = run_python(NO_MEMORY, str(tmp_path / "packets"), str(burst))
    # What a thread lacks memory for may be on standard error.
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr


# ---- the end of the process, and forks ---------------------------------------------------------


FORKED = """
import os, signal, sys, threading, time, rdmapost as rp
path, moment = sys.argv[1:]
os.mkfifo(path)
context = rp.open_device("roce:lo")
parent, children = os.getpid(), []

def fork(*_):
    if child := os.fork():
        children.append(child)
    else:
        signal.alarm(20)

def wait():
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print(len(children))

signal.signal(signal.SIGUSR1, fork)
if moment == "begin":
    # The handler runs while capture() waits for a file that is slow to open.
    from rdmapost.providers.roce import capture_thread
    is_opening, may_open = threading.Event(), threading.Event()
    open_file = capture_thread._open_whole
    def open_slowly(*args):
        is_opening.set()
        may_open.wait()
        return open_file(*args)
    capture_thread._open_whole = open_slowly
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    def interrupt():
        is_opening.wait()
        os.kill(parent, signal.SIGUSR1)
        while not children:
            time.sleep(0.001)
        os.waitid(os.P_PID, children[0], os.WEXITED | os.WNOWAIT)
        may_open.set()
    threading.Thread(target=interrupt).start()
    try:
        capture = context.capture(path)
    except rp.ClosedError as error:
        assert os.getpid() != parent and "was started by process" in str(error)
        os._exit(0)
    capture.close()
else:
    # A thread waits for a pipe that is full, and then so does the handler's victim.
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    capture = context.capture(path)
    pd, cq = rp.PD(context), rp.CQ(context)
    mr = rp.MR(pd, 1 << 17, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE)
    a = rp.QP(pd, rp.QPType.RC, cq)
    a.connect(a.endpoint())
    a.post_send(rp.RdmaWrite(mr[:], remote_addr=mr.addr, rkey=mr.rkey))
    cq.wait(1)[0].check()
    def close():
        try:
            capture.close()
        except rp.RdmaError as error:
            assert "Broken pipe" in str(error)
    closer = threading.Thread(target=close)
    closer.start()
    def interrupt():
        for _ in range(10):
            os.kill(parent, signal.SIGUSR1)
            while len(children) < 1 + _:
                time.sleep(0.001)
        for child in children:
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        os.close(reader)
    threading.Timer(0.2, interrupt).start()
    close()
    if os.getpid() != parent:
        capture.close()
        os._exit(0)
    closer.join()
wait()
context.close_all()
"""


@pytest.mark.parametrize(("moment", "children"), [("begin", "1"), ("end", "10")])
def test_forked_child_of_a_capturing_process_waits_for_no_thread_of_its_parent(
    tmp_path, moment, children
):
    """Not even if a signal handler forks while its parent waits."""
    assert prints(FORKED, str(tmp_path / "pipe"), moment) == children


EXITED = """
import os, sys, rdmapost as rp
context = rp.open_device("roce:lo")
capture = context.capture(sys.argv[1])
pd, cq = rp.PD(context), rp.CQ(context)
a, b = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, cq)
a.connect(b.endpoint()), b.connect(a.endpoint())
mr = rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE)
def write():
    a.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey))
    cq.wait(1)[0].check()
if sys.argv[2] == "fork":
    if not (child := os.fork()):
        with rp.open_device("roce:lo") as own:
            pass
        with capture:
            sys.exit()
    assert os.waitpid(child, 0)[1] == 0
write()
"""


@pytest.mark.parametrize("end", ["exit", "fork"])
def test_capture_file_is_complete_after_the_process_has_ended(on_lo, tmp_path, end):
    """And the child of a fork writes nothing to it."""
    path = tmp_path / "packets"
    assert prints(EXITED, str(path), end) == ""
    seen = read(path)
    # A write and its acknowledgement, sent and received.
    assert len(seen) == 4
    assert seen[0].comment.startswith("RDMA_WRITE wr_id 0, 8 bytes, ")


def test_capture_cannot_be_copied(on_lo, tmp_path):
    with on_lo.capture(tmp_path / "packets") as made, pytest.raises(TypeError, match="'Capture'"):
        copy.copy(made)


def test_capture_is_an_instance_of_the_public_class(on_lo, tmp_path):
    """Which only a device can create."""
    with on_lo.capture(tmp_path / "packets") as made:
        assert isinstance(made, rp.Capture)
    assert rp.Capture.__module__ == "rdmapost"
    with pytest.raises(TypeError):
        rp.Capture()

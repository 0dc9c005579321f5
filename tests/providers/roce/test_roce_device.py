"""A roce device on real sockets: in one process, in two, and on its way out."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ALL, GRH, LIMIT, LOSES_MEMORY, Pair, prints, run_python, until
from support.cli_runner import run
from support.roce import open_roce
from support.roce_network import ROWS_BY_NAME

import rdmapost as rp
from rdmapost import QPType, WCStatus
from rdmapost._binding import native
from rdmapost.diagnose import diagnose_machine
from rdmapost.providers.roce import device_thread, protocol_engine
from rdmapost.providers.roce.addresses import flow
from rdmapost.providers.roce.packets import (
    ACK,
    ACK_REQ,
    DEFAULT_PKEY,
    MIG_REQ,
    UNLIMITED_CREDITS,
    aeth,
)
from rdmapost.providers.software.device import open_devices, ready
from rdmapost.standard.wire import ROCE_V2_PORT

DEVICE = "roce:lo"


@pytest.fixture(scope="module")
def context() -> Iterator[rp.Context]:
    with open_roce(DEVICE) as opened:
        yield opened


def counters(context: rp.Context) -> dict[str, int]:
    return context.counters()._asdict()


def address(context: rp.Context) -> str:
    return str(context.choose_gid(1).gid).removeprefix("::ffff:")


def test_delayed_packet_of_a_connection_before_a_reset_does_not_reach_the_next(context):
    """Nor is the next one's first packet taken for a duplicate of it."""
    with (
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 64, ALL) as mr,
        rp.QP(pd, QPType.RC, cq) as a,
        rp.QP(pd, QPType.RC, cq) as b,
    ):

        def connect() -> None:
            for qp in (a, b):
                qp.to_reset()
            a.connect(b.endpoint())
            b.connect(a.endpoint())

        connect()
        mr.buffer[:8], mr.buffer[32:40] = b"the last", bytes(8)
        context.faults.packets(delay=1.0, delay_by=0.1)
        a.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr + 32, rkey=mr.rkey))
        context.faults.packets()
        before = counters(context)["packets_received"]
        connect()
        until(lambda: cq.poll() or counters(context)["packets_received"] > before)
        assert bytes(mr.buffer[32:40]) == bytes(8)
        mr.buffer[:8] = b"the next"
        a.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr + 32, rkey=mr.rkey))
        cq.wait(1, timeout=LIMIT)[0].check()
        assert bytes(mr.buffer[32:40]) == b"the next"


# ---- in one process ------------------------------------------------------------------------


def test_roce_device_says_what_it_is(context):
    assert (context.name, context.kind) == (DEVICE, "roce")
    (entry,) = context.query_gid_table()
    assert entry.gid_type is rp.GIDType.ROCE_V2
    assert entry.ndev == "lo"
    assert address(context).startswith("127.0.0.")
    port = context.query_port(1)
    assert (port.state, port.link_layer) == (rp.PortState.ACTIVE, rp.LinkLayer.ETHERNET)


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD], ids=lambda t: t.name)
def test_messages_of_each_qp_type_arrive_over_roce(connect, qp_type):
    pair = connect(qp_type)
    grh = GRH if qp_type is QPType.UD else 0
    for size in (1, 3, 4, 1000, 4096 if grh else 7777):
        pair.mine.buffer[:size] = os.urandom(size)
        pair.b.post_recv(rp.RecvWR(pair.theirs[:], wr_id=2))
        pair.a.post_send(pair.send(pair.mine[:size], wr_id=1))
        done = {wc.wr_id: wc for wc in pair.wait(2)}
        assert done[2].byte_len == grh + size
        assert pair.theirs.buffer[grh : grh + size] == pair.mine.buffer[:size]


def test_large_write_and_read_arrive_whole_over_roce(pd, cq, stack, connect):
    """Each is many batches of packets, and more than the socket's buffer."""
    size = 3_000_001
    pair = connect()
    near, far = (stack.enter_context(rp.MR(pd, size, ALL)) for _ in range(2))
    near.buffer[:] = random.Random(1).randbytes(size)
    target = {"remote_addr": far.addr, "rkey": far.rkey}
    pair.a.post_send(rp.RdmaWrite(near[:], **target))
    pair.wait(1, LIMIT)
    assert far.buffer == near.buffer
    far.buffer[:] = random.Random(2).randbytes(size)
    pair.a.post_send(rp.RdmaRead(near[:], **target))
    pair.wait(1, LIMIT)
    assert near.buffer == far.buffer


def test_registering_a_region_in_a_loop_starves_no_verb_and_no_close_of_the_device(
    pd, stack, connect
):
    """Its verbs release the GIL only while they have the device."""
    pair, stop = connect(), threading.Event()
    mr = stack.enter_context(rp.MR(pd, 4096, ALL))

    def register() -> None:
        with contextlib.suppress(rp.ClosedError):
            while not stop.is_set():
                mr.rereg(memory=bytearray(4096))

    thread, limit = threading.Thread(target=register), threading.Timer(LIMIT, stop.set)
    thread.start()
    limit.start()
    try:
        for _ in range(10):
            pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8]))
            pair.wait(1, LIMIT)
        mr.close()
        assert not stop.is_set()
    finally:
        limit.cancel()
        stop.set()
        thread.join(LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("wr_type", [rp.RdmaWrite, rp.RdmaRead, rp.Send])
def test_message_of_1_gib_arrives_whole_over_roce(pd, stack, connect, wr_type):
    """Most of its source is never written, and so takes no memory of the machine's."""
    size = 1 << 30
    if available() < 2 * size:
        pytest.skip("needs 2 GiB of free memory")
    pair = connect()
    source, target = (stack.enter_context(rp.MR(pd, size, ALL)) for _ in range(2))
    marks = {at: os.urandom(64) for at in (0, 4090, size // 2 + 7, size - 64)}
    for at, data in marks.items():
        source.buffer[at : at + 64] = data
    if wr_type is rp.RdmaRead:
        pair.a.post_send(rp.RdmaRead(target[:], remote_addr=source.addr, rkey=source.rkey))
    elif wr_type is rp.RdmaWrite:
        pair.a.post_send(rp.RdmaWrite(source[:], remote_addr=target.addr, rkey=target.rkey))
    else:
        pair.b.post_recv(rp.RecvWR(target[:]))
        pair.a.post_send(rp.Send(source[:]))
    done = pair.wait(2 if wr_type is rp.Send else 1, 4 * LIMIT)
    assert {wc.byte_len for wc in done if wc.opcode is not rp.WCOpcode.SEND} <= {0, size}
    assert {at: bytes(target.buffer[at : at + 64]) for at in marks} == marks


def available() -> int:
    """Return the bytes of memory that are available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = [one for one in lines if one.startswith("MemAvailable")]
    return int(line.split()[1]) << 10


def test_read_that_arrives_together_with_a_write_returns_what_was_written(connect):
    """The kernel joins datagrams of one size; the read sees what was written."""
    pair = connect()
    for turn in range(50):
        pair.mine.buffer[:8] = turn.to_bytes(8)
        pair.a.post_send(
            [
                pair.wr(rp.RdmaWrite, pair.mine[:8]),
                pair.wr(rp.RdmaRead, pair.mine[8:16]),
                pair.wr(rp.AtomicFetchAndAdd, pair.mine[16:24], compare_add=1),
                pair.wr(rp.RdmaRead, pair.mine[24:32]),
            ]
        )
        pair.wait(4)
        old = int.from_bytes(pair.mine.buffer[16:24], sys.byteorder)
        new = int.from_bytes(pair.mine.buffer[24:32], sys.byteorder)
        assert pair.mine.buffer[8:16] == pair.mine.buffer[:8]
        assert (bytes(pair.mine.buffer[16:24]), new) == (turn.to_bytes(8), old + 1)


def test_wrong_rkey_on_roce_ends_with_rem_access_err(connect):
    pair = connect()
    pair.a.post_send(rp.RdmaWrite(pair.mine[:8], remote_addr=pair.theirs.addr, rkey=1))
    (wc,) = pair.cq.wait(1)
    assert wc.status is WCStatus.REM_ACCESS_ERR


def test_closed_roce_peer_ends_a_request_with_retry_exc_err_after_all_retries(pd, cq, stack):
    """After retry_cnt retransmissions, each after the timeout."""
    a, b = (stack.enter_context(rp.QP(pd, QPType.RC, cq)) for _ in range(2))
    mr = stack.enter_context(rp.MR(pd, 64))
    a.connect(b.endpoint(), timeout=10, retry_cnt=2)
    b.close()
    begin = time.monotonic()
    a.post_send(rp.Send(mr[:8]))
    (wc,) = cq.wait(1, LIMIT)
    assert wc.status is WCStatus.RETRY_EXC_ERR
    assert time.monotonic() - begin > 3 * 4.096e-6 * 2**10


def test_roce_qp_numbers_and_keys_cannot_be_guessed(pd, cq, stack):
    made = [stack.enter_context(rp.QP(pd, QPType.RC, cq)) for _ in range(32)]
    keys = [stack.enter_context(rp.MR(pd, 64)).rkey for _ in range(32)]
    for numbers in ([qp.qp_num for qp in made], keys):
        steps = {after - before for before, after in itertools.pairwise(numbers)}
        assert len(steps) > 16


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda c, pd, cq: rp.XRCD(c), "roce devices have no XRC"),
        (
            lambda c, pd, cq: rp.QP(pd, QPType.RAW_PACKET, cq),
            "roce devices have no RAW_PACKET queue pairs; soft0 has them$",
        ),
        (lambda c, pd, cq: rp.QP(pd, QPType.DRIVER, cq), "have no DRIVER queue pairs$"),
        (lambda c, pd, cq: rp.SRQ(pd, srq_type=rp.SRQType.TM, cq=cq), "has no tag matching"),
    ],
    ids=["XRC", "RAW_PACKET", "DRIVER", "tag matching"],
)
def test_feature_that_a_roce_device_lacks_is_refused_by_name(context, pd, stack, make, says):
    cq = stack.enter_context(rp.CQ(context, wc_flags=rp.WCExFlags.WITH_TM_INFO))
    with pytest.raises(rp.RdmaError, match=says):
        make(context, pd, cq)


@pytest.mark.parametrize("name", ["roce:", "roce:nosuch0", "roce:203.0.113.9", "roce:lo0"])
def test_unknown_network_device_or_address_is_named_with_those_of_this_machine(name):
    with pytest.raises(rp.NoDeviceError, match=r"no network device or address .* it has lo \(127"):
        rp.open_device(name)


def test_roce_address_already_in_use_is_refused_with_its_holder(context):
    with pytest.raises(
        rp.VerbsError,
        match=r"UDP port 4791 of .* is taken by roce:lo, which this process has opened",
    ):
        rp.open_device(f"roce:{address(context)}")
    ran = run_python(f"import rdmapost; rdmapost.open_device('roce:{address(context)}')")
    assert f"is taken by process {os.getpid()}" in ran.stderr
    found = {each.name: each for each in diagnose_machine(f"roce:{address(context)}")}
    assert "use another address" in found["not-opened"].remedy


def test_roce_address_may_be_given_as_a_gid():
    host = "127.0.4.9"
    with open_roce(f"roce:::ffff:{host}") as opened:
        assert address(opened) == host


# ---- a peer that stops in the middle ----------------------------------------------------------


class Peer:
    """A peer without an engine: a socket on an address of its own.

    Attributes:
        endpoint: its queue pair, which sends from PSN 0 on.
    """

    HOST, QPN = "127.0.1.1", 0x77

    def __init__(self, context: rp.Context) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        # As a device's: the ICRC covers the identification, which is 0 then.
        self._socket.setsockopt(socket.IPPROTO_IP, 10, 3)
        self._socket.bind((self.HOST, 0))
        self._socket.connect((address(context), ROCE_V2_PORT))
        source, target = (f"::ffff:{host}" for host in (self.HOST, address(context)))
        covered = flow(
            socket.inet_pton(socket.AF_INET6, source),
            socket.inet_pton(socket.AF_INET6, target),
            self._socket.getsockname()[1],
        )
        assert covered is not None
        self._covered = covered
        self.endpoint = rp.Endpoint(self.QPN, 0, source, 0, rp.MTU.MTU_4096)

    def send(self, qp: rp.QP, name: str, psn: int, *extensions: int, size: int = 0) -> None:
        """Send a packet to a queue pair."""
        row = ROWS_BY_NAME[name]
        header = row.pack(
            row.bth_opcode, MIG_REQ, DEFAULT_PKEY, qp.qp_num, psn | ACK_REQ, *extensions
        )
        data = bytearray(len(header) + size + 8)
        payload = (b"x" * size,) if size else ()
        length = native.roce_build(data, self._covered, [header], payload, size)
        self._socket.send(data[:length])

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def peer(context: rp.Context) -> Iterator[Peer]:
    with contextlib.closing(Peer(context)) as made:
        yield made


@pytest.mark.parametrize("end", [rp.QP.to_reset, rp.QP.close], ids=["reset", "close"])
def test_peer_that_ends_in_the_middle_of_a_message_costs_no_shared_receive(
    context, pd, cq, stack, peer, end
):
    """Else every such peer takes one of the receives that the others share, with its memory."""
    srq = stack.enter_context(rp.SRQ(pd, max_wr=1))
    mr = stack.enter_context(rp.MR(pd, 10_000, ALL))
    srq.post_srq_recv(rp.RecvWR(mr[:], wr_id=7))
    for _ in range(3):
        qp = rp.QP(pd, QPType.RC, cq, srq=srq)
        qp.connect(peer.endpoint)
        before = counters(context)["packets_received"]
        peer.send(qp, "RC_SEND_FIRST", 0, size=4096)
        until(lambda before=before: cq.poll() or counters(context)["packets_received"] > before)
        end(qp)
        qp.close()
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq, srq=srq))
    qp.connect(peer.endpoint)
    peer.send(qp, "RC_SEND_ONLY", 0, size=8)
    (wc,) = cq.wait(1, LIMIT)
    assert (wc.wr_id, wc.status, wc.byte_len) == (7, WCStatus.SUCCESS, 8)
    assert srq.outstanding == 0
    mr.close()


# ---- the device's thread -----------------------------------------------------------------------


def test_device_thread_goes_on_after_a_lack_of_memory(context, connect, peer, monkeypatch):
    """Nobody else looks for packets: this process does not poll."""
    pair, run, lacked = connect(), native.run_device, threading.Event()

    def run_device() -> None:
        if not lacked.is_set():
            lacked.set()
            raise MemoryError
        run()

    monkeypatch.setattr(native, "run_device", run_device)
    before = counters(context)["dropped"]
    peer.send(pair.b, "RC_SEND_ONLY", 0)
    assert lacked.wait(LIMIT)
    until(lambda: counters(context)["dropped"] > before)


def stop_thread(context: rp.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the device's work to verbs; return when its thread is not in the middle of any."""
    called = threading.Event()
    monkeypatch.setattr(native, "run_device", called.set)
    timer = open_devices[context.name].timer_fd
    native.set_timer(timer, 1)
    assert called.wait(LIMIT)
    native.set_timer(timer, 0)


WITHOUT_THREADS = """
import errno, os, rdmapost as rp
from rdmapost.providers.roce import device_thread

def fail(*_):
    raise RuntimeError("can't start new thread")

class Failing:
    start_new_thread = fail

rp.open_device("roce:lo").close()
while len(os.listdir("/proc/self/task")) > 1:
    pass
before = len(os.listdir("/proc/self/fd"))
real, device_thread._thread = device_thread._thread, Failing
try:
    rp.open_device("roce:lo")
except rp.VerbsError as error:
    print(errno.errorcode[error.errno])
device_thread._thread = real
print(len(os.listdir("/proc/self/fd")) - before)
rp.open_device("roce:lo").close()
"""


def test_device_whose_thread_cannot_start_is_not_opened(context):
    """Its peers would wait for this process's next verb."""
    assert prints(WITHOUT_THREADS).split() == ["EAGAIN", "0"]


FULL_TABLE = """
import errno, os, resource, rdmapost as rp

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def threads():
    return len(os.listdir("/proc/self/task"))

rp.open_device("roce:lo").close()
while threads() > 1:
    pass
before, refused = descriptors(), set()
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for room in range(12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + room, hard))
    try:
        rp.open_device("roce:lo").close()
        refused.add("opened")
    except rp.VerbsError as error:
        refused.add(errno.errorcode[error.errno])
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    while threads() > 1:
        pass
    if descriptors() != before:
        print(room, descriptors() - before)
print(*sorted(refused))
"""


def test_device_that_cannot_be_opened_for_lack_of_descriptors_leaves_no_thread(context):
    """The thread has started by the time that the last descriptors are made."""
    assert prints(FULL_TABLE) == "EMFILE opened"


def test_long_read_of_one_peer_does_not_delay_other_peers(
    context, pd, cq, stack, peer, monkeypatch
):
    """Each verb answers a part of it."""
    stop_thread(context, monkeypatch)
    size = 1 << 27
    mr = stack.enter_context(rp.MR(pd, mmap.mmap(-1, size), ALL))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(peer.endpoint)
    before = counters(context)["packets_sent"]
    longest = 0.0

    def poll() -> bool:
        nonlocal longest
        begin = time.thread_time()
        cq.poll()
        longest = max(longest, time.thread_time() - begin)
        return counters(context)["packets_sent"] - before >= size // 4096

    peer.send(qp, "RC_RDMA_READ_REQUEST", 0, mr.addr, mr.rkey, size)
    until(poll)
    assert longest < 0.1


def test_device_thread_goes_on_with_the_work_that_verbs_have_left(context, pd, cq, stack, peer):
    size = 1 << 25
    mr = stack.enter_context(rp.MR(pd, mmap.mmap(-1, size), ALL))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(peer.endpoint)
    before = counters(context)["packets_sent"]
    peer.send(qp, "RC_RDMA_READ_REQUEST", 0, mr.addr, mr.rkey, size)
    until(lambda: counters(context)["packets_sent"] - before >= size // 4096)


@pytest.mark.parametrize("before", [0, 200], ids=["nothing before it", "200 others before it"])
def test_answer_that_waits_in_the_socket_is_read_before_a_timeout_counts(
    context, pd, cq, stack, peer, monkeypatch, before
):
    """Even if the process is so busy that nothing has read the socket until then."""
    stop_thread(context, monkeypatch)
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(peer.endpoint, timeout=1, retry_cnt=0)
    qp.post_send(rp.Send(mr[:8]))
    for _ in range(before):
        peer.send(qp, "RC_SEND_ONLY", 100)
    peer.send(qp, "RC_ACKNOWLEDGE", qp.endpoint().psn, aeth(ACK, UNLIMITED_CREDITS, 1))
    begin = time.monotonic()
    until(lambda: time.monotonic() > begin + 0.05)
    assert [wc.status for wc in cq.wait(1, LIMIT)] == [WCStatus.SUCCESS]


@pytest.mark.parametrize("count", [63, 64, 65, 128])
def test_retransmission_timer_expires_whatever_packets_arrive_before_it(
    context, pd, cq, stack, peer, monkeypatch, count
):
    """Even if the device's thread, which takes turns of 64, empties the socket with its last."""
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(peer.endpoint, timeout=1)
    with monkeypatch.context() as stopped:
        stop_thread(context, stopped)
        qp.post_send(rp.Send(mr[:8]))
        begin = time.monotonic()
        for _ in range(count):
            peer.send(qp, "RC_SEND_ONLY", 100)
        until(lambda: time.monotonic() > begin + 0.05)
    # No verb: a verb would look, too.
    counted = open_devices[context.name].counters
    before = counted.retransmitted
    until(lambda: counted.retransmitted > before)


def test_device_thread_goes_on_with_work_left_for_lack_of_memory(
    context, pd, cq, stack, peer, monkeypatch
):
    """Memory is there again later, but no packet and no verb comes."""
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(peer.endpoint, timeout=14)
    device = open_devices[context.name]
    lacked = threading.Event()

    def lacks(*_: object) -> bool:
        lacked.set()
        raise MemoryError

    qp.post_send(rp.Send(mr[:8]))
    before = device.counters.retransmitted
    with monkeypatch.context() as starved:
        for name in ("execute_next", "give_up"):
            starved.setattr(type(device), name, lacks)
        assert lacked.wait(LIMIT)
    until(lambda: device.counters.retransmitted > before)


def test_packet_behind_one_that_there_was_no_memory_for_arrives_without_another_verb(
    context, pd, cq, stack, monkeypatch
):
    """The fault plan holds it, not the socket, so nothing wakes the device's thread."""
    channel = stack.enter_context(rp.CompChannel(context))
    arrivals = stack.enter_context(rp.CQ(context, channel=channel))
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    a, b = (stack.enter_context(rp.QP(pd, QPType.UC, cq, arrivals)) for _ in range(2))
    b.connect(a.endpoint())
    a.connect(b.endpoint())
    b.post_recv([rp.RecvWR(mr[:8])] * 2)
    receive, failures = protocol_engine.receive, iter([MemoryError, MemoryError])

    def lacks(*arguments: object) -> bool:
        # For the verb, and for its second try.
        for failure in failures:
            raise failure
        return receive(*arguments)

    monkeypatch.setattr(protocol_engine, "receive", lacks)
    arrivals.req_notify()
    context.faults.packets(duplicate=1.0, received=True, sent=False)
    stack.callback(context.faults.packets)
    a.post_send(rp.Send(mr[:8]))
    assert select.select([channel], [], [], LIMIT)[0]


def test_what_a_verb_posts_without_memory_is_sent_without_another_verb(
    context, pd, cq, stack, peer, monkeypatch
):
    """The device's thread is asleep then."""
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(peer.endpoint)
    device = open_devices[context.name]

    def lacks(*_: object) -> bool:
        raise MemoryError

    packets = device.counters.sent
    with monkeypatch.context() as starved:
        for name in ("execute_next", "give_up", "put_off"):
            starved.setattr(type(device), name, lacks)
        qp.post_send(rp.Send(mr[:8]))
    until(lambda: device.counters.sent > packets)


STARVED_TIMER = """
import select, time, _testcapi, rdmapost as rp
with (
    rp.open_device("roce:lo") as context,
    rp.PD(context) as pd,
    rp.CompChannel(context) as channel,
    rp.CQ(context, channel=channel) as cq,
    rp.QP(pd, rp.QPType.RC, cq) as qp,
    rp.QP(pd, rp.QPType.RC, cq) as silent,
):
    endpoint = silent.endpoint()
    for at in range(120):
        qp.to_reset()
        qp.connect(endpoint, timeout=10, retry_cnt=2)
        cq.req_notify()
        qp.post_send(rp.Send())
        # The thread's timer expires in 4 ms.
        _testcapi.set_nomemory(at, at + 1)
        time.sleep(0.01)
        _testcapi.remove_mem_hooks()
        if not select.select([channel], [], [], 20)[0]:
            print("nothing comes after allocation", at)
        channel.get_cq_event()
        cq.poll()
print("ended")
"""


def test_no_failed_allocation_stops_the_timers(context):
    pytest.importorskip("_testcapi")
    assert run_python(STARVED_TIMER, **LOSES_MEMORY).stdout == "ended\n"


def test_device_thread_sleeps_after_a_lack_of_memory_whatever_other_devices_do(
    context, pd, cq, stack, peer, monkeypatch
):
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    qp = stack.enter_context(rp.QP(pd, QPType.UC, cq))
    qp.connect(peer.endpoint)
    stack.enter_context(rp.open_device("soft0"))
    device = open_devices[context.name]

    def lacks(*_: object) -> bool:
        raise MemoryError

    with monkeypatch.context() as starved:
        for name in ("execute_next", "give_up", "put_off"):
            starved.setattr(type(device), name, lacks)
        qp.post_send(rp.Send(mr[:8]))
    # soft0 sets its timer.
    open_devices["soft0"].set_due(-1.0)
    begin = time.monotonic()
    until(lambda: time.monotonic() > begin + 0.02)
    until(lambda: not select.select([device.timer_fd], [], [], 0)[0])


def test_queue_pair_in_rtr_asks_for_a_packet_that_is_missing(context, pd, cq, stack, peer):
    """It has no timeout yet."""
    data = bytearray(8)
    mr = stack.enter_context(rp.MR(pd, data, ALL))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.to_init()
    qp.to_rtr(peer.endpoint)
    before = counters(context)["naks_sent"]
    peer.send(qp, "RC_RDMA_WRITE_ONLY", 1, mr.addr, mr.rkey, 8, size=8)
    until(lambda: counters(context)["naks_sent"] > before)
    assert qp.query().qp_state is rp.QPState.RTR
    peer.send(qp, "RC_RDMA_WRITE_ONLY", 0, mr.addr, mr.rkey, 8, size=8)
    until(lambda: data[0])


def test_flood_leaves_the_device_at_most_once_in_the_list_of_pending_work(
    context, pd, cq, stack, peer, monkeypatch
):
    """Otherwise work that is posted during the flood would wait behind all of its entries."""
    stop_thread(context, monkeypatch)
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(peer.endpoint, timeout=1)
    qp.post_send(rp.Send(mr[:8]))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        # UDP_SEGMENT: many datagrams in a call, which the device receives in one.
        stranger.setsockopt(socket.SOL_UDP, 103, 40)
        for _ in range(1000):
            stranger.sendto(b"\x0a" * 2400, (address(context), ROCE_V2_PORT))
    before = counters(context)["dropped"]
    listed = 0
    for _ in range(20):
        cq.poll()
        listed = max(listed, ready.count(open_devices[context.name]))
    assert counters(context)["dropped"] > before
    assert listed <= 1


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """How long devices' threads slept before they processed packets."""
    slept: list[float] = []

    class Recorded:
        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def sleep(seconds: float) -> None:
            slept.append(seconds)
            time.sleep(seconds)

    monkeypatch.setattr(device_thread, "time", Recorded)
    return slept


def test_device_thread_answers_at_once_while_no_other_thread_uses_the_device(
    context, pd, cq, stack, peer, pauses
):
    data = bytearray(8)
    mr = stack.enter_context(rp.MR(pd, data, ALL))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(peer.endpoint)
    for psn in range(20):
        data[0] = 0
        peer.send(qp, "RC_RDMA_WRITE_ONLY", psn, mr.addr, mr.rkey, 8, size=8)
        until(lambda: data[0])
        if psn == 0:
            # Before it, other tests may have used the device.
            pauses.clear()
    assert pauses == []


# ---- packets of strangers --------------------------------------------------------------------


def test_garbage_packets_are_counted_and_change_nothing(context, connect):
    pair = connect()
    before = counters(context)
    rng = random.Random(3)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for size in [0, 1, 11, 12, 15, 16, *(rng.randrange(2000) for _ in range(300))]:
            stranger.sendto(rng.randbytes(size), (address(context), ROCE_V2_PORT))
            pair.cq.poll()
    # The kernel delivers empty datagrams, too, and on a busy machine some of them late.
    until(lambda: counters(context)["icrc_errors"] - before["icrc_errors"] >= 305)
    pair.works()
    after = counters(context)
    damaged = after["icrc_errors"] - before["icrc_errors"]
    assert after["dropped"] - before["dropped"] == damaged


def test_flood_of_garbage_packets_does_not_delay_other_peers(context, connect):
    pair, stop = connect(), threading.Event()
    before = counters(context)["icrc_errors"]

    def damaged() -> int:
        return counters(context)["icrc_errors"] - before

    def flood() -> None:
        sent = 0
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            while not stop.is_set():
                # The socket always has some to read, and never so many that the kernel drops the
                # pair's packets.
                if sent - damaged() < 100:
                    for _ in range(50):
                        stranger.sendto(b"\x0a" * 100, (address(context), ROCE_V2_PORT))
                    sent += 50

    flooder = threading.Thread(target=flood)
    flooder.start()
    try:
        for number in range(1, 21):
            until(lambda wanted=100 * number: damaged() >= wanted)
            pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8]))
            pair.wait(1, LIMIT)
    finally:
        stop.set()
        flooder.join()


# ---- two processes ---------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[str]:
    """A server in another process; its address and port."""
    command = [sys.executable, "-P", "-m", "rdmapost.cli", "serve", "-d", DEVICE, "--tcp-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        try:
            yield line.split()[2]
        finally:
            server.send_signal(signal.SIGINT)
            server.stdout.read()
            assert server.wait(LIMIT) == 0


@pytest.mark.parametrize(
    ("command", "shows"),
    [
        (["write", "--data", "over the wire"], 'received  "over the wire"'),
        (["send", "--data", "hello"], 'received  "hello"'),
        (["send", "--data", "hello", "--qp-type", "uc"], 'received  "hello"'),
        (["send", "--data", "hello", "--qp-type", "ud"], 'received  "hello"'),
        (["read"], "received  hex 0000"),
        (["atomic", "fetch-add"], "new  1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands_on_roce_reach_a_server_in_another_process(context, served, command, shows):
    name, *options = command
    if name == "atomic":
        name, *options = command[:2], *options[1:]
        ran = run(*command, served, "-d", DEVICE)
    else:
        ran = run(name, served, *options, "-d", DEVICE)
    assert ran.code == 0, ran.err
    assert shows in ran.out


IDLE = """
import time, rdmapost as rp
context = rp.open_device("roce:lo")
pd, cq = rp.PD(context), rp.CQ(context)
a, b = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, cq)
a.connect(b.endpoint()), b.connect(a.endpoint())
mr = rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE)
a.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey))
cq.wait(1)
time.sleep(0.1)
before = time.process_time()
time.sleep(1)
print(time.process_time() - before < 0.01)
"""


def test_idle_roce_device_takes_no_cpu(context):
    assert prints(IDLE) == "True"


LEFT_OPEN = """
import rdmapost as rp
context = rp.open_device("roce:lo")
pd, cq = rp.PD(context), rp.CQ(context)
qp = rp.QP(pd, rp.QPType.RC, cq)
"""


def test_process_may_end_with_its_roce_device_open(context):
    assert run_python(LEFT_OPEN).returncode == 0


# Of the functions that are registered, the first one is called last.
ENDED = """
import atexit, os, socket, sys
atexit.register(lambda: print(len(sys._current_frames()), flush=True))
import rdmapost as rp
from rdmapost.providers.roce import device_thread
from rdmapost.providers.software.device import open_devices
device_thread._SHORTEST = device_thread._LONGEST = 0.3
context = rp.open_device("roce:lo")
if child := os.fork():
    os.waitpid(child, 0)
    print(len(sys._current_frames()), flush=True)
    opened = open_devices["roce:lo"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        # The thread looks at the first one, and pauses before it looks at the second one.
        stranger.sendto(b"x", (opened.address.host, 4791))
        while not opened.counters.dropped:
            pass
        stranger.sendto(b"x", (opened.address.host, 4791))
"""


def test_device_thread_ends_before_the_interpreter_does(context):
    """A thread that the end of the interpreter stops never releases its memory."""
    child, parent = ["1"], ["2", "1"]
    assert prints(ENDED).split() == child + parent


FORKED = """
import os, rdmapost as rp
context = rp.open_device("roce:lo")
here = str(context.choose_gid(1).gid)
child = os.fork()
if not child:
    try:
        rp.PD(context)
    except rp.ClosedError:
        with rp.open_device("roce:lo") as own:
            os._exit(0 if str(own.choose_gid(1).gid) != here else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
pd, cq = rp.PD(context), rp.CQ(context)
a, b = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, cq)
a.connect(b.endpoint()), b.connect(a.endpoint())
mr = rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE)
a.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey))
print(cq.wait(1)[0].status.name)
"""


FORKED_WITHOUT_MEMORY = """
import logging, os, rdmapost as rp
logging.disable()
from rdmapost.providers.roce.device import RoceDevice
from rdmapost.providers.software.device import open_devices
context = rp.open_device("roce:lo")
parents, start_over, lacked = open_devices["roce:lo"], RoceDevice.start_over, []
def lacks(self):
    if len(lacked) < 4:
        lacked.append(self)
        raise MemoryError
    start_over(self)
child = os.fork()
if not child:
    RoceDevice.start_over = lacks
    for _ in range(2):
        try:
            rp.open_device("roce:lo")
            os._exit(1)
        except MemoryError:
            pass
    RoceDevice.execute_next = lambda self, worker: os._exit(2) if self is parents else False
    with rp.open_device("roce:lo"):
        os._exit(0 if len(lacked) == 4 else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_child_of_a_fork_without_memory_leaves_its_parents_device_alone(context):
    assert prints(FORKED_WITHOUT_MEMORY) == "0"


def test_child_of_a_fork_opens_a_device_of_its_own(context):
    assert prints(FORKED).split() == ["0", "SUCCESS"]


FORKED_AND_FORGOTTEN = """
import os, sys, rdmapost as rp
host = sys.argv[1]
hold, forked = os.pipe(), os.pipe()
context = rp.open_device(f"roce:{host}")
child = os.fork()
if not child:
    os.close(hold[1])
    os.write(forked[1], b"x")
    os.read(hold[0], 1)
    os._exit(0)
os.read(forked[0], 1)
context.close()
with rp.open_device(f"roce:{host}") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
    print("opened again")
os.close(hold[1])
os.waitpid(child, 0)
"""


def test_forked_child_that_does_not_use_the_device_leaves_its_address_to_the_parent(context):
    assert prints(FORKED_AND_FORGOTTEN, "127.0.1.2") == "opened again"


OPENED_AND_CLOSED = """
import os, threading, rdmapost as rp
def state():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
rp.open_device("roce:lo").close()
import time
end = time.monotonic() + 10
before = state()
while before[0] > 1 and time.monotonic() < end:
    before = state()
for _ in range(20):
    with rp.open_device("roce:lo") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
        rp.QP(pd, rp.QPType.RC, cq).close()
while state() != before and time.monotonic() < end:
    pass
print(state() == before)
"""


def test_closed_roce_device_leaves_neither_descriptors_nor_threads(context):
    assert prints(OPENED_AND_CLOSED) == "True"


def test_completions_awaited_beside_a_posting_thread_arrive_once_each(connect):
    """One posts, the other waits."""
    pair: Pair = connect(max_send_wr=32)
    got: list[int] = []

    def collect() -> None:
        while len(got) < 500:
            got.extend(wc.check().wr_id for wc in pair.cq.wait(1, LIMIT, max_entries=32))

    collector = threading.Thread(target=collect)
    collector.start()
    for number in range(500):
        while pair.a.outstanding.send == 32:
            time.sleep(0)
        pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8], wr_id=number))
    collector.join(LIMIT)
    assert got == [*range(500)]


def test_refusals_that_all_software_devices_share_name_the_device(context):
    with rp.PD(context) as pd, rp.CQ(context) as cq, rp.QP(pd, QPType.RC, cq) as qp:
        qp.connect(qp.endpoint())
        path = rp.AHAttr(dgid=qp.gid.gid)
        with pytest.raises(rp.VerbsError, match=f"{context.name} has no alternate paths"):
            qp.modify(alt_ah_attr=path, alt_pkey_index=0, alt_port_num=1, alt_timeout=9)


@pytest.mark.parametrize("device", ["soft0", DEVICE])
def test_failure_inside_the_device_is_logged_with_its_name(device, monkeypatch, caplog):
    with (
        rp.open_device(device) as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 64, ALL) as mr,
        rp.QP(pd, QPType.RC, cq) as qp,
    ):
        qp.connect(qp.endpoint())

        def planted(*_: object) -> int:
            raise ZeroDivisionError("planted")

        monkeypatch.setattr(type(open_devices[context.name]), "execute_next", planted)
        qp.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey))
        assert cq.wait(1)[0].status is WCStatus.FATAL_ERR
    assert f"{context.name} failed to execute a work request" in caplog.text

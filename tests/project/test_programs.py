"""The differential test's own parts, on the soft device alone."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from differential import model
from differential.bench import Bench
from differential.deviations import DEVIATIONS, HARMFUL, KERNELS, for_kernel, kernel_of
from differential.generate import program_of
from differential.model import At, End, Move, Pair, Post, Program, R, Recv, Sge, W
from differential.run import run
from differential.shrink import shrink
from differential.transcript import Transcript, differences

import rdmapost as rp

SEEDS = range(120)
RC = (Pair("RC"),)
WRITE = W("RDMA_WRITE", (Sge("a", 0, 8),), At("b", 0))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with rp.open_device("soft0") as context, Bench(context, rp.MTU.MTU_1024) as bench:
        yield bench


def statuses(transcript: Transcript, queue: str) -> list[str]:
    return [done.status for done in transcript.queues.get(queue, [])]


# ---- programs as values -----------------------------------------------------------


def test_same_seed_generates_the_same_differential_program():
    assert [program_of(seed) for seed in SEEDS] == [program_of(seed) for seed in SEEDS]
    assert len({program_of(seed) for seed in SEEDS}) > 110


def test_repr_of_a_program_evaluates_to_an_equal_program():
    for seed in SEEDS:
        program = program_of(seed)
        names = {name: getattr(model, name) for name in model.__all__}
        assert eval(repr(program), names) == program
        ast.parse(repr(program))


def test_repr_of_a_program_leaves_out_defaults():
    assert repr(Pair("RC", b=End(depth=7))) == "Pair('RC', b=End(depth=7))"
    assert repr(Sge("a", 0, 8)) == "Sge('a', 0, 8)"


# ---- running ----------------------------------------------------------------------


def test_run_of_a_generated_program_is_deterministic(bench: Bench):
    for seed in SEEDS:
        first = run(program_of(seed), bench, deviations=())
        again = run(first.program, bench)
        assert differences(first, again) == [], first.program
        assert first.program == again.program


def test_generated_programs_reach_every_status(bench: Bench):
    seen: Counter[str] = Counter()
    for seed in range(400):
        transcript = run(program_of(seed), bench, deviations=())
        seen += Counter(done.status for queue in transcript.queues.values() for done in queue)
        seen += Counter(transcript.program.type_of(0) for _ in range(1))
        seen["refused"] += len(transcript.refused)
        for name, queue in transcript.queues.items():
            seen += Counter(done.opcode for done in queue if done.opcode)
            seen["recv"] += name.endswith("recv")
    wanted = """
        RC UC UD refused recv SUCCESS WR_FLUSH_ERR LOC_PROT_ERR LOC_LEN_ERR MW_BIND_ERR
        REM_ACCESS_ERR REM_INV_REQ_ERR REM_OP_ERR RETRY_EXC_ERR RNR_RETRY_EXC_ERR
        SEND RDMA_WRITE RDMA_READ COMP_SWAP FETCH_ADD BIND_MW LOCAL_INV RECV RECV_RDMA_WITH_IMM
    """
    assert not [name for name in wanted.split() if not seen[name]]
    assert seen["SUCCESS"] > seen["WR_FLUSH_ERR"]


def test_step_of_a_generated_program_waits_for_late_completions(bench: Bench):
    # A receive that is never posted: the send fails after its retry, and the next is flushed.
    program = Program((Pair("RC", rnr_retry=1),), (Post(0, (W("SEND"),)), Post(0, (W("SEND"),))))
    transcript = run(program, bench)
    assert statuses(transcript, "qp0.send") == ["RNR_RETRY_EXC_ERR", "WR_FLUSH_ERR"]
    assert transcript.counts == [1, 2]


def test_refused_post_is_recorded_by_errno_and_index(bench: Bench):
    five = W("SEND", (Sge("a", 0, 8),) * 5)
    transcript = run(Program(RC, (Post(0, (WRITE, five, WRITE)),)), bench)
    assert transcript.refused == {0: ("EINVAL", 1)}
    assert statuses(transcript, "qp0.send") == ["SUCCESS"]


def test_window_keys_are_recorded_by_how_often_they_were_bound(bench: Bench):
    bind = W("BIND_MW", at=At("b", 0), mw="w0", length=64, access="RWA")
    program = Program(
        RC,
        (
            Post(1, (bind,)),
            Recv(1, (R(),)),
            Post(0, (W("SEND_WITH_INV", key="w0"),)),
            Post(1, (bind,)),
            Post(0, (replace(WRITE, at=At("b", 8, "w0")),)),
            Post(0, (replace(WRITE, at=At("b", 8, "w0:stale")),)),
        ),
    )
    transcript = run(program, bench)
    [received] = transcript.queues["qp1.recv"]
    assert received.invalidated == "w0#1"
    assert statuses(transcript, "qp0.send") == ["SUCCESS", "SUCCESS", "REM_ACCESS_ERR"]
    assert transcript.memory["b"][8:16] == transcript.memory["a"][:8]


# ---- races ------------------------------------------------------------------------


def as_run(
    bench: Bench, *steps: model.Step, pairs: tuple[Pair, ...] = RC
) -> tuple[model.Step, ...]:
    return run(Program(pairs, steps), bench, deviations=()).program.steps


READ = W("RDMA_READ", (Sge("a", 0, 8),), At("b", 64))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (READ, WRITE),
        (READ, READ),
        (READ, replace(WRITE, sges=(), at=At("b", 60))),
        (WRITE, replace(READ, at=At("readable", 0))),
        (replace(READ, sges=(Sge("a", 0, 8, "gone"),)), replace(WRITE, sges=(Sge("a", 64, 1),))),
    ],
)
def test_racing_work_requests_are_posted_separately(bench: Bench, first: W, second: W):
    if first == READ and second.sges == ():
        second = replace(second, sges=(Sge("a", 64, 8),))
    assert as_run(bench, Post(0, (first, second))) == (Post(0, (first,)), Post(0, (second,)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (READ, replace(WRITE, flags=("FENCE",))),
        (WRITE, WRITE),
        (WRITE, W("RDMA_READ", (Sge("a", 64, 8),), At("b", 0))),
        (WRITE, W("ATOMIC_FETCH_AND_ADD", (Sge("a", 64, 8),), At("b", 0), compare=1)),
    ],
)
def test_ordered_work_requests_stay_in_one_post(bench: Bench, first: W, second: W):
    assert as_run(bench, Post(0, (first, second))) == (Post(0, (first, second)),)


@pytest.mark.parametrize(("second_at", "posts"), [(100, 1), (30, 2)])
def test_datagram_over_the_header_of_another_is_a_step_of_its_own(
    bench: Bench, second_at: int, posts: int
):
    """The header is blanked when it completes: it is the device's own."""
    receives = Recv(1, (R((Sge("inbox", 0, 48),)), R((Sge("inbox", second_at, 48),))))
    sends = (W("SEND", (Sge("a", 0, 8),)), W("SEND", (Sge("a", 8, 8),)))
    steps = as_run(bench, receives, Post(0, sends), pairs=(Pair("UD"),))
    assert len(steps) == 1 + posts


def test_window_that_is_not_bound_is_not_invalidated_on_a_device_that_dies_of_it(bench: Bench):
    step = Post(0, (W("LOCAL_INV", key="w0"), WRITE))
    fitted = run(Program(RC, (step,)), bench, deviations=HARMFUL).program
    assert fitted.steps == (Post(0, (WRITE,)),)
    assert run(Program(RC, (step,)), bench, deviations=()).program.steps == (step,)


# ---- comparing --------------------------------------------------------------------


def test_difference_of_two_runs_names_its_step_queue_and_completion(bench: Bench):
    one = run(Program(RC, (Post(0, (WRITE,)), Post(0, (READ,)))), bench)
    other = run(one.program, bench)
    done = other.queues["qp0.send"]
    done[1] = replace(done[1], byte_len=7)
    other.states[-1] = ("ERR", "RTS")
    other.memory["b"] = bytes(8) + other.memory["b"][8:]
    other.refused[1] = ("EINVAL", 0)
    assert [line.split(":")[0] for line in differences(one, other)] == [
        "step 1",
        "qp0.send 100",
        "qp0 ends in RTS -> ERR",
        "b[0",
    ]
    done.reverse()
    assert "qp0.send completes in the order [0, 100] -> [100, 0]" in differences(one, other)
    del done[0]
    assert "qp0.send 100: RDMA_READ, 8 bytes -> nothing" in differences(one, other)


def test_memory_that_a_failure_leaves_undefined_is_not_compared(bench: Bench):
    receive = R((Sge("inbox", 0, 8), Sge("inbox", 64, 8, "inbox:wrong")))
    send = W("SEND", (Sge("a", 0, 16),))
    one = run(Program(RC, (Recv(1, (receive,)), Post(0, (send,)))), bench)
    other = run(one.program, bench)
    other.memory["inbox"] = bytes(8) + other.memory["inbox"][8:]
    assert differences(one, other) == []
    other.memory["inbox"] = bytes(9) + other.memory["inbox"][9:]
    assert [line.split(":")[0] for line in differences(one, other)] == ["inbox[8"]


# ---- shrinking --------------------------------------------------------------------


def test_shrinking_keeps_only_what_reproduces_the_difference(bench: Bench):
    def fails(program: Program) -> bool:
        transcript = run(program, bench, deviations=())
        return any("REM_ACCESS_ERR" in statuses(transcript, name) for name in transcript.queues)

    seed = next(seed for seed in range(1000) if fails(program_of(seed)))
    small = shrink(program_of(seed), fails)
    assert fails(small)
    assert sum(isinstance(step, Post) for step in small.steps) == 1
    assert len(small.pairs) == 1
    assert small == shrink(small, fails)


# ---- the table --------------------------------------------------------------------


def test_every_deviation_has_a_reason_and_a_program_that_shows_it():
    for entry in DEVIATIONS:
        assert len(entry.why) > 40
        assert entry.program is not None
        assert set(entry.seen) <= set(KERNELS)
        assert all(entry.seen.values())
    assert len({entry.name for entry in DEVIATIONS}) == len(DEVIATIONS)


@pytest.mark.parametrize(
    ("release", "kernel"),
    [("6.1.0-56-amd64", "6.1"), ("6.12.117+deb12", "6.12"), ("6.8.0", "6.1"), ("7.0.1", "6.12")],
)
def test_deviations_of_an_unknown_kernel_are_those_of_the_nearest_known(release: str, kernel: str):
    assert kernel_of(release) == kernel


@pytest.mark.parametrize("release", ["6.1.0", "6.12.0"])
def test_programs_fitted_to_a_device_need_no_further_change(bench: Bench, release: str):
    table = for_kernel(release)
    for seed in SEEDS:
        fitted = run(program_of(seed), bench, deviations=table).program
        assert run(fitted, bench, deviations=table).program == fitted


def test_generated_move_brings_a_queue_pair_to_err(bench: Bench):
    transcript = run(Program(RC, (Recv(0, (R(),)), Move(0, "ERR"))), bench)
    assert statuses(transcript, "qp0.recv") == ["WR_FLUSH_ERR"]
    assert transcript.states[-1] == ("ERR", "RTS")

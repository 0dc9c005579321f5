"""Exceptions of signal handlers while soft0 carries out posts: each is raised exactly once.

A work request is carried out whatever a handler raises.  The exceptions are raised in the main
thread when the post is over, or in the thread for which they were set.
"""

from __future__ import annotations

import pytest
from support import prints
from test_soft_interrupts_at_every_bytecode import FORKED, STEP

STRUCK = (
    STEP
    + """
planned, chain = [], []
complete = qp.QueuePair.complete_send

def fail(*_):
    raise planned.pop(0)

def complete_send(self, *args):
    # Another thread repeats the step.
    if planned and threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGUSR1)
    return complete(self, *args)

def post(count):
    try:
        try:
            try:
                a.post_send([rp.Send(mr[:8], wr_id=i) for i in range(count)])
                for _ in range(99): pass
            finally:
                for _ in range(99): pass
        finally:
            for _ in range(99): pass
    except BaseException as error:
        while error is not None:
            chain.append(error)
            error = error.__context__

signal.signal(signal.SIGUSR1, fail)
qp.QueuePair.complete_send = complete_send
b.post_recv([rp.RecvWR(mr[:8])] * 8)
"""
)
"""A post during which a signal handler raises the planned exceptions, one per work request."""


def test_handlers_exceptions_of_different_types_are_all_raised_by_one_post_in_order():
    code = """
planned[:] = LookupError("1"), ArithmeticError("2"), OSError("3")
post(3)
print([repr(error) for error in reversed(chain)], [wc.wr_id for wc in cq.wait(3)])
"""
    assert prints(STRUCK + code) == (
        "[\"LookupError('1')\", \"ArithmeticError('2')\", \"OSError('3')\"] [0, 1, 2]"
    )


def test_post_error_that_a_handler_raises_keeps_what_it_says():
    """It is about another post, of which nothing was posted."""
    code = """
try:
    a.post_send(rp.Send(mr[:8], send_flags=1 << 20))
except rp.PostError as error:
    planned[:] = [error]
post(2)
print(repr(chain[0].posted), hasattr(chain[0], "__notes__"), [wc.wr_id for wc in cq.wait(2)])
"""
    assert prints(STRUCK + code) == "0 False [0, 1]"


def test_exception_of_a_handler_keeps_its_own_notes():
    code = """
planned[:] = [LookupError()]
planned[0].add_note("its own")
post(2)
print(chain[0].__notes__)
"""
    assert prints(STRUCK + code) == "['its own', '2 of 2 work requests were posted']"


def test_first_of_several_exceptions_of_one_type_is_raised():
    code = """
planned[:] = LookupError("1"), ArithmeticError("2"), ArithmeticError("3"), LookupError("4")
post(4)
print(*(error.args[0] for error in reversed(chain)), planned, len(cq.wait(4)))
chain.clear()
post(1)
print(chain)
"""
    assert prints(STRUCK + code).splitlines() == ["1 2 [] 4", "[]"]


def test_exception_set_from_another_thread_is_raised_in_the_posting_thread():
    """PyThreadState_SetAsyncExc is called while the step runs; the main thread is not affected."""
    code = """
import ctypes

def complete_send(self, *args):
    if not planned:
        planned.append(threading.get_ident())
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(planned[0]), ctypes.py_object(LookupError)
        )
    return complete(self, *args)

qp.QueuePair.complete_send = complete_send
thread = threading.Thread(target=post, args=(2,))
thread.start()
thread.join(20)
for _ in range(99): pass
print([type(error).__name__ for error in chain], planned == [thread.ident])
print([wc.wr_id for wc in cq.wait(2)])
"""
    assert prints(STRUCK + code).splitlines() == ["['LookupError'] True", "[0, 1]"]


SET_IN_QUICK_SUCCESSION = """
import ctypes, threading, time
import rdmapost as rp

context = rp.open_device("soft0")
pd = rp.PD(context)
cq = rp.CQ(context)
mr = rp.MR(pd, 4096, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_ATOMIC)
a, b = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, cq)
a.connect(b.endpoint())
b.connect(a.endpoint())
wr = rp.AtomicFetchAndAdd(mr[:8], remote_addr=mr.addr + 8, rkey=mr.rkey, compare_add=1)
statuses, over = set(), False

class Stop(Exception):
    pass

def work():
    while not over:
        try:
            while not over:
                a.post_send(wr)
                while a.outstanding.send:
                    statuses.update(wc.status.name for wc in cq.wait(1))
        except Stop:
            pass

def run():
    while not over:
        try:
            work()
        except Stop:
            pass

thread = threading.Thread(target=run)
thread.start()
stop = ctypes.pythonapi.PyThreadState_SetAsyncExc
for burst in range(200):
    time.sleep(burst % 10 * 0.0001)
    for _ in range(3):
        stop(ctypes.c_ulong(thread.ident), ctypes.py_object(Stop))
        time.sleep(0.00002)
over = True
thread.join(20)
print(*statuses, a.state.name)
"""


def test_exceptions_set_in_quick_succession_fail_no_work_request():
    """CPython 3.11 gives some of them to the thread that repeats the step."""
    assert prints(SET_IN_QUICK_SUCCESSION) == "SUCCESS RTS"


def test_handler_that_polls_while_an_exception_is_pending_gets_completions():
    """The first work request is complete, and the second is being carried out."""
    code = """
polled = []

def poll_too(*_):
    if len(planned) == 1:
        polled.extend(wc.wr_id for wc in cq.poll())
    raise planned.pop(0)

signal.signal(signal.SIGUSR1, poll_too)
planned[:] = LookupError("1"), ArithmeticError("2")
post(2)
print(polled, *(error.args[0] for error in reversed(chain)), [wc.wr_id for wc in cq.wait(1)])
"""
    assert prints(STRUCK + code) == "[0] 1 2 [1]"


def test_work_requests_run_on_the_thread_that_posts_them():
    code = """
here = []
carry_out = requester._carry_out

def carried_out(self, wqe):
    here.append(threading.get_ident())
    return carry_out(self, wqe)

requester._carry_out = carried_out
post(3)
print(chain, [ident == threading.get_ident() for ident in here], len(cq.wait(3)))
"""
    assert prints(STRUCK + code) == "[] [True, True, True] 3"


def test_interrupted_work_request_runs_even_if_no_thread_can_start():
    code = """
threading.stack_size(1 << 46)  # more than there is
planned[:] = [LookupError("1")]
post(2)
print([error.args[0] for error in chain], [wc.status.name for wc in cq.wait(2)])
"""
    assert prints(STRUCK + code) == "['1'] ['SUCCESS', 'SUCCESS']"


def test_finalizers_run_in_the_thread_that_posts_and_not_in_the_one_that_repeats_a_step():
    """In the other, a lock of the posting thread would block them, and the device with them."""
    code = """
import gc

class Garbage:
    def __init__(self):
        self.itself, self.qp = self, rp.QP(pd, rp.QPType.RC, cq)

    def __del__(self):
        ran.add(threading.current_thread())

ran = set()
# A collection is due at another moment each time.
for threshold in range(1, 400):
    gc.set_threshold(threshold)
    Garbage()
    planned[:] = [LookupError()]
    post(1)
    b.post_recv(rp.RecvWR(mr[:8]))
    assert cq.wait()[0].check() and announced.poll()[0].check()
print(ran == {threading.main_thread()})
"""
    assert prints(STRUCK + code) == "True"


def test_finalizers_at_the_recursion_limit_run_in_the_thread_that_posts():
    """There is no stack to repeat the step in that thread, nor for a collection that is due."""
    code = """
import gc

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        if threading.current_thread() is not main:
            print("in another thread", flush=True)

main, ignored = threading.current_thread(), []
sys.unraisablehook = ignored.append
wr = rp.Send(mr[:8])

def deep(frames, threshold):
    if frames:
        return deep(frames - 1, threshold)
    gc.set_threshold(threshold)
    a.post_send(wr)

limit = sys.getrecursionlimit()
for frames in range(limit - 10, limit):
    for more in range(10):
        gc.set_threshold(10**6)
        gc.collect()
        Garbage()
        b.post_recv(rp.RecvWR(mr[:8]))
        try:
            deep(frames, gc.get_count()[0] + more)
        except RecursionError:
            pass
        gc.set_threshold(10**6)
        if not a.outstanding.send:
            a.post_send(wr)
        assert cq.wait()[0].check()
        while not announced.poll():
            pass
print("ended")
"""
    assert prints(STEP + code) == "ended"


def test_child_forked_by_another_thread_raises_no_exception_of_the_parents_handler():
    """One waits for the end of the post, during which the other thread forks."""
    code = """
def fork():
    global pid
    assert go.wait(20)
    pid = os.fork()
    if not pid:
        try:
            rp.open_device("soft0").close()
            for _ in range(99): pass
        except BaseException as error:
            print("raised in the child:", repr(error), flush=True)
        os._exit(0)
    forked.set()

def complete_send(self, *args):
    here = threading.current_thread() is threading.main_thread()
    if here and planned:
        signal.raise_signal(signal.SIGUSR1)
    elif here:
        go.set()
        assert forked.wait(20)
    return complete(self, *args)

qp.QueuePair.complete_send = complete_send
go, forked, pid = threading.Event(), threading.Event(), None
thread = threading.Thread(target=fork)
thread.start()
planned[:] = [LookupError("1")]
post(2)
thread.join(20)
print(os.waitpid(pid, 0)[1], repr(chain[0]), len(cq.wait(2)))
"""
    assert prints(STRUCK + code) == "0 LookupError('1') 2"


@pytest.mark.parametrize("ends", ["raise LookupError", "return"])
def test_child_forked_by_a_handler_within_a_step_carries_out_nothing_more(ends):
    """It does not finish that step, or run the next one, or posts to other queue pairs."""
    code = """
def fork(*_):
    global pid
    b.post_send(rp.Send(mr[:8]))
    pid = os.fork()
    if not pid:
        ENDS

pid, pids = None, []
carry_out = requester._carry_out

def carried_out(self, wqe):
    pids.append(os.getpid())
    if len(pids) == 1:
        signal.raise_signal(signal.SIGUSR1)
    return carry_out(self, wqe)

signal.signal(signal.SIGUSR1, fork)
requester._carry_out = carried_out
a.post_recv(rp.RecvWR(mr[:8]))
post(2)
if pid:
    os.waitpid(pid, 0)
print(type(chain[0]).__name__ if chain else "nothing", len(pids), flush=True)
if not pid:
    os._exit(0)
print(len(cq.wait(3)), len(announced.poll()))
"""
    raised = "LookupError" if "raise" in ends else "nothing"
    said = prints(STRUCK + code.replace("ENDS", ends)).splitlines()
    assert said == [f"{raised} 1", "nothing 3", "3 3"]


@pytest.mark.parametrize("error", ["MemoryError", "ZeroDivisionError"])
def test_child_whose_reset_fails_retries_it_in_its_next_verb(error):
    code = """
import contextlib, logging
from rdmapost.providers.software import device
from rdmapost._binding import ffi
from rdmapost.providers import soft_provider
from rdmapost.providers.soft0.device import device as soft_device

def failing(self, name):
    tries.append(name)
    if len(tries) < 3:
        raise ERROR
    begin(self, name)

tries, begin = [], device.Device.__init__
device.Device.__init__ = failing
logging.getLogger("rdmapost.soft").disabled = True
pid = os.fork()
if not pid:
    with contextlib.suppress(MemoryError):
        soft_provider().alloc_pd(ffi.NULL)
    with rp.open_device("soft0") as mine, rp.CQ(mine) as own:
        print(len(tries), own.poll(), [*soft_device.qps], flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
    assert prints(STRUCK + code.replace("ERROR", error)) == "3 [] []"


def test_child_forked_during_another_threads_step_carries_out_only_its_own_work():
    code = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
inside, go, pids = threading.Event(), threading.Event(), []
carry_out = requester._carry_out

def carried_out(self, wqe):
    pids.append(os.getpid())
    if len(pids) == 1:
        b.post_send(rp.Send(mr[:8]))  # It is its turn after this step.
        inside.set()
    assert go.wait(20)
    return carry_out(self, wqe)

requester._carry_out = carried_out
a.post_recv(rp.RecvWR(mr[:8]))
thread = threading.Thread(target=post, args=(1,))
thread.start()
assert inside.wait(20)
pid = os.fork()
if not pid:
    go.set()
    with rp.open_device("soft0") as mine, rp.PD(mine) as own, rp.CQ(mine) as done:
        print(done.poll(), len(pids))
        with rp.QP(own, rp.QPType.RC, done) as pair:
            pair.connect(pair.endpoint())
            pair.post_recv(rp.RecvWR())
            pair.post_send(rp.Send())
            print(len(done.poll()), len(pids), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
go.set()
thread.join(20)
print(len(cq.wait(2)), len(pids))
"""
    assert prints(STRUCK + code).splitlines() == ["[] 1", "2 2", "2 2"]


def test_exception_from_logging_a_device_fault_is_raised_by_the_post():
    """A logging handler raises it, or a signal handler during logging; the work request ends."""
    code = """
import logging

class Raises(logging.Handler):
    def emit(self, record):
        raise LookupError(type(record.exc_info[1]).__name__)

logging.getLogger("rdmapost.soft").addHandler(Raises())
requester._carry_out = lambda *_: 1 // 0
post(1)
print([error.args[0] for error in chain], [wc.status.name for wc in cq.poll()])
"""
    assert prints(STRUCK + code) == "['ZeroDivisionError'] ['FATAL_ERR']"


def test_handlers_exception_is_raised_although_the_device_then_fails():
    code = """
def carry_out(*_):
    if threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGUSR1)
    1 // 0

requester._carry_out = carry_out
logging.getLogger("rdmapost.soft").setLevel(logging.CRITICAL)
planned[:] = [LookupError("1")]
post(1)
print([repr(error) for error in chain], [wc.status.name for wc in cq.poll()])
"""
    said = prints(STRUCK + "import logging" + code)
    assert said == "[\"LookupError('1')\"] ['FATAL_ERR']"


def test_lack_of_memory_while_logging_a_device_fault_is_not_raised():
    code = """
import logging

class Starves(logging.Handler):
    def emit(self, record):
        emitted.append(record)
        raise MemoryError

emitted = []
logging.getLogger("rdmapost.soft").addHandler(Starves())
requester._carry_out = lambda *_: 1 // 0
post(1)
print(chain, len(emitted), [wc.status.name for wc in cq.poll()])
"""
    assert prints(STRUCK + code) == "[] 1 ['FATAL_ERR']"


def test_exception_of_a_handler_that_forks_within_a_control_verb_is_raised_in_the_child():
    code = """
def alloc(self, context):
    global pid
    pid = os.fork()
    if not pid:
        raise LookupError

rp.PD  # Loads the module that gives ClosedError to C.
try:
    native.verb(alloc, provider, context)
except LookupError:
    child()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert prints(FORKED + code) == "7"


def test_handlers_exception_keeps_its_traceback_and_context():
    code = """
import traceback
planned[:] = [LookupError("1")]
try:
    1 // 0
except ZeroDivisionError:
    post(1)
said = traceback.extract_tb(chain[0].__traceback__)
print([frame.name for frame in said if frame.name in ("post", "fail")])
print([type(error).__name__ for error in chain])
"""
    assert prints(STRUCK + code).splitlines() == [
        "['post', 'fail']",
        "['LookupError', 'ZeroDivisionError']",
    ]

# The compiled module, made by build_ffi.py from rdmapost/_c/.  cffi's own stubs
# know nothing of C structs, so what comes out of it is Any.
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

ffi: Any
lib: Any

# _c/handles/handle.c: the base of the resources; resources/resource.py says what its methods are
# for.
class Handle:
    @property
    def closed(self) -> bool: ...
    # The struct, or None where it is closed.
    @property
    def _handle(self) -> Any: ...
    @property
    def _parents(self) -> tuple[Any, ...]: ...
    # Its last user closes it.
    _abandoned: bool
    @property
    def _pid(self) -> int: ...
    # Its constructor has begun, and not ended.
    @property
    def _unfinished(self) -> bool: ...
    # This thread is in the middle of it, or none has begun.
    @property
    def _making(self) -> bool: ...
    def _begin_making(self) -> None: ...
    def _end_making(self, well: bool, /) -> None: ...
    def close(self) -> None: ...
    def __del__(self) -> None: ...

    # Be what create(*args) returns, a child of each parent; return its struct.  `keeps` stays as
    # long, and `access` is for C.
    def _make(
        self, create: Callable[..., Any], args: tuple[Any, ...], destroy: Callable[..., Any],
        parents: tuple[Any, ...], keeps: Any = None, access: int = 0,
    ) -> Any: ...  # fmt: skip

    # Call a function with the struct and more; handles among `args` stand for theirs.
    def _verb(self, function: Callable[..., Any], /, *args: Any) -> Any: ...
    def _live(self) -> Any: ...
    def _wake(self) -> None: ...
    def _release(self) -> None: ...
    def _forget(self) -> None: ...

# _finalize() is called when it is dropped, again until no signal handler interrupts it; what the
# handler raises is raised in the main thread, where __del__ would lose it.
class Finalizer:
    def __del__(self) -> None: ...

# Raise ImportError in a second interpreter, or for a second copy of the package.
def importing() -> None: ...

# ClosedError, RdmaError, what raises for a failed function and its errno, ffi, what makes a number
# of a pointer, what is open, what tells a cdata's type, and that of each class (_resource.py).
def describe_handles(
    closed: type, error: type, in_use: type, failed: Callable[..., Any], ffi: Any,
    to_number: Callable[[Any], Any], open: dict[int, Any], type_of: Callable[[Any], Any],
    structs: dict[type, Any], /,
) -> None: ...  # fmt: skip

# The interpreter is about to close all handles: threads that this wakes end without a word.  Or it
# has closed them all: finalizers do nothing.
def exiting(closed_all: bool, /) -> None: ...

# Whether this thread is in the middle of a verb, where a close is put off.
def in_verb() -> bool: ...

# _c/posting/inflight.c: what is posted to a queue and not known to be done.
class InFlight:
    def __init__(self, in_order: bool = True, tagged: InFlight | None = None) -> None: ...
    @property
    def number(self) -> int: ...
    @property
    def outstanding(self) -> int: ...
    # The caller's wr_id of an outstanding work request, by its ticket.
    def peek(self, ticket: int, /) -> int | None: ...
    # Of the outstanding work requests the one so many after the oldest: its wr_id, and what it
    # holds: one resource, a tuple of them, or None.
    def entry(self, index: int, /) -> tuple[int, Any] | None: ...
    # The queue has been destroyed or reset.
    def clear(self) -> None: ...

# _c/polling/completions.c.
def make_completions_of(
    wc: type, statuses: dict[int, Any], other_status: Any, opcodes: dict[int, Any],
    flags: dict[int, Any], flag_type: Any, verbs_error: type, /,
) -> None: ...  # fmt: skip

# _c/polling/cq.c, which says what each does.  `handle` is the resource's, so that it stays open
# meanwhile; `into` is an empty list.
class Poller:
    waiting: int
    # What leads for an event loop (aio.py), or None.
    @property
    def tasks(self) -> Any: ...
    def __init__(
        self, queues: dict[int, Any], extended: bool, spin_ns: int, channel: int,
        drop_event: Callable[[], object] | None, /,
    ) -> None: ...  # fmt: skip
    def until(
        self, handle: Any, fd: int, function: Callable[[], Any], timeout: float | None,
        tasks: bool, /,
    ) -> Any: ...  # fmt: skip
    def claim(self, tell: Callable[[], object], /) -> bool: ...
    def unclaim(self, tell: Callable[[], object], /) -> None: ...
    def release(self) -> None: ...
    def poll(self, handle: Any, most: int, into: list[Any], /) -> None: ...
    def wait(
        self, handle: Any, count: int, promised: int, timeout: float | None, into: list[Any], /
    ) -> int | None: ...
    def fill(self, handle: Any, count: int, /) -> int: ...
    def notify(self, handle: Any, solicited_only: bool, /) -> None: ...
    def put_back(self, wcs: list[Any], /) -> None: ...

# ibv_get_cq_event(3) and ibv_ack_cq_events(3) in one.
def get_cq_event(channel: int, into: dict[int, None], /) -> bool | None: ...

# _c/posting/wr.c: the base of the work requests, whose __init__ is that of a dataclass but quicker.
class WR: ...

# A class and the __init__ that dataclasses made; how many fields are positional; of each field
# its name and default.
def quick_init(
    wr_type: type, init: Any, positional: int, fields: tuple[tuple[str, Any], ...], /
) -> None: ...  # fmt: skip

# _c/posting/region.c: give the class of regions its __getitem__.
def make_sges(mr: type, sge: type, /) -> None: ...

# _c/posting/buffer.c: memory that is not registered, held for inline data.
class Buffer:
    def __init__(self, of: Any, /) -> None: ...
    @property
    def addr(self) -> int: ...
    @property
    def length(self) -> int: ...

# _c/posting/tag.c.
class TagHandle:
    """Names an entry of one SRQ's matching list; a TagAdd's post makes it."""

# _c/posting/read.c: what work requests refer to, and a row of fields.py: of each field the name,
# its offset and bytes in the struct, and what it is.  Returns the number of the class.
def describe_resource(name: str, type: type, /) -> None: ...
def describe_wr(
    wr_type: type, verb: int, opcode: int, writes: bool, atomic: bool,
    fields: tuple[tuple[str, int, int, str], ...], /,
) -> int: ...  # fmt: skip

# _c/posting/post.c; posting/queue.py derives from it, and has what it calls to say why something is
# refused.
class Queue:
    def __init__(
        self, *, verb: int, in_flight: InFlight, checked: bool, pd: int, room: int,
        datagram: bool, binds: bool, max_sge: int, max_msg_size: int, max_inline_data: int,
        max_tso_header: int, max_num_tags: int, kinds: tuple[tuple[int, int], ...],
    ) -> None: ...  # fmt: skip
    def post(self, owner: Handle, wrs: Any, /) -> None: ...
    def bind_mw(self, owner: Handle, wr: Any, sure: bool, /) -> None: ...
    def set_ready(self, ready: bool, /) -> None: ...

# _c/posting/prepared.c.
class Prepared:
    # Once; its owner must know the list by then, to close it.
    def _prepare(self, queue: Queue, owner: Handle, wrs: Any, /) -> None: ...
    def post(self) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def __len__(self) -> int: ...
    # The class of one of its work requests.
    def _type_of(self, index: int, /) -> type: ...
    # Whether the list, open, names a resource.
    def _names(self, resource: Any, /) -> bool: ...

class PreparedItem:
    def __init__(self, batch: Prepared, index: int, /) -> None: ...
    wr_id: int
    sg_list: Any

# A field that is a number, by its index in the row of a class.
class Number:
    def __init__(self, wr_type: type, index: int, /) -> None: ...
    def __get__(self, wr: PreparedItem, kind: type | None = None, /) -> int: ...
    def __set__(self, wr: PreparedItem, value: int, /) -> None: ...

# _c/soft0/journal.c: changes to the soft device's state are taken back if the verb or step raises.
# What all of these call is to be in C, where no signal handler runs.

# Its attributes are journaled.
class Record: ...

# What takes back the change that comes next; it is to do no harm where that does not come.
def undo(function: Callable[..., Any], /, *args: Any) -> None: ...
def on_commit(function: Callable[..., Any], /, *args: Any) -> None: ...

# Later than all of those.
def at_the_end(function: Callable[..., Any], /, *args: Any) -> None: ...

# Return function(*args), which undo(result) takes back.
def made(undo: Callable[[Any], Any], function: Callable[..., _T], /, *args: Any) -> _T: ...

# deque.append and deque.popleft.
def put(queue: deque[_T], item: _T, /) -> None: ...
def take(queue: deque[_T], /) -> _T: ...

# Drop the entries of a completion queue that are a work queue's; for on_commit.
def forget(entries: deque[Any], queue: DeviceQueue, /) -> None: ...

# _c/soft0/context.c.
class WQE:
    wr_id: int
    opcode: int
    flags: int
    sges: Any
    inline: Any
    hdr: Any
    ah: Any
    window: Any
    region: Any
    owner: Any
    imm: int
    remote_addr: int
    rkey: int
    atomic_rkey: int
    compare_add: int
    swap: int
    remote_qpn: int
    remote_qkey: int
    remote_srqn: int
    mss: int
    bind_rkey: int
    bind_addr: int
    bind_length: int
    bind_access: int
    handle: int
    unexpected_cnt: int
    recv_wr_id: int
    tag: int
    mask: int

# A work queue or a completion queue.  C adds to `pending` and takes from it, changes `armed` and
# `used`, and does so also in the middle of a verb or step, from a signal handler.
class DeviceQueue:
    pending: deque[Any]
    armed: int
    depth: int
    max_sge: int
    max_inline: int
    max_tso_header: int
    used: int
    silent: int
    refuses: int
    prompt: bool
    faults: PostFaults
    slots: DeviceQueue

# _c/soft0/faults.c: sends that are to fail on purpose: each an errno (1..4095), and how many are
# let through before it (below 2^63).
class PostFaults:
    def add(self, after: int, errno: int, /) -> None: ...
    def clear(self) -> None: ...

# For on_commit: take slots, or free them (less than 0); and forget what is posted, and free all.
def use_slots(queue: DeviceQueue, slots: int, /) -> None: ...
def clear(queue: DeviceQueue, /) -> None: ...

# What is in its `pending`.
def posted(queue: DeviceQueue, /) -> tuple[Any, ...]: ...

# Set `depth`; whether that can be: no more slots are taken.
def resize(queue: DeviceQueue, depth: int, /) -> bool: ...

# Add an entry to a completion queue; polls take it once it is committed.
def add(cq: DeviceQueue, entry: tuple[bytes, DeviceQueue, int], /) -> None: ...

# For at_the_end: put an event for an entry of a completion queue, if that is armed for it.
def announce(cq: DeviceQueue, events: deque[Any], fd: int, solicited: bool, /) -> None: ...
def set_timer(fd: int, events: deque[Any], ns: int, /) -> None: ...

# Of the two in `faults`: have the send that comes after so many fail with an errno.
def plan_failure(posts: dict[int, int], posted: list[int], after: int, errno: int, /) -> None: ...

# _c/soft0/verb.c: call a function as one verb.  An exception that it returns is raised too, but
# takes nothing back.
def verb(function: Callable[..., Any], /, *args: Any) -> Any: ...

# Let the device carry out what it has to do, as posts and polls do.
def run_device() -> None: ...

# Let the child of a fork collect garbage, if a thread that it does not have had that put off.
def after_fork() -> None: ...

# For on_commit: look for what is due then (-1: nothing); and let an object do what it has to do.
def come_back(seconds: float, /) -> None: ...
def start(worker: Any, /) -> None: ...

# What C uses: the objects of the handles; those that have something to do; to carry out a part of
# that and say whether there is more; to end it, after an exception, and say the same (-1: it is to
# be tried again; so it is where this raises MemoryError); to log these;
# to begin anew after a fork; to refuse a verb within a verb; and functions of Python's.
def soft_device(
    objects: dict[int, Any], ready: list[Any], step: Callable[[Any], bool],
    give_up: Callable[[Any, BaseException], int], tell: Callable[[], None],
    reset: Callable[[], bool], refuse: Callable[..., None], setattr: Any, delattr: Any,
    pop: Any, /,
) -> None: ...  # fmt: skip

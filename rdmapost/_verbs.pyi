# The compiled module, made by build_ffi.py from rdmapost/_c/.  cffi's own stubs
# know nothing of C structs, so their type here is Any.
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .posting.wr import SGE

_T = TypeVar("_T")

ffi: Any
lib: Any

# _c/handles/: the base class of the resources; resources/resource.py documents its methods.
class Handle:
    @property
    def closed(self) -> bool: ...
    # The struct; None if the handle is closed.
    @property
    def _handle(self) -> Any: ...
    @property
    def _parents(self) -> tuple[Any, ...]: ...
    # Release the regions from which an invalidation of its key has unbound a window. Return whether
    # there were any.
    def _unbind_invalidated(self) -> bool: ...
    # Return an attribute of the struct; None if the handle is closed.
    def _peek(self, name: str, /) -> Any: ...
    # Whether the handle's last user closes it.
    _abandoned: bool
    @property
    def _pid(self) -> int: ...
    # The records of its work queues; AttributeError if it has none.
    @property
    def _in_flight(self) -> tuple[InFlight, ...]: ...
    # Whether its constructor is running.
    @property
    def _unfinished(self) -> bool: ...
    # Whether this thread is in the constructor, or no constructor has begun.
    @property
    def _making(self) -> bool: ...
    def _begin_making(self) -> int: ...
    def _construct(
        self, init: Callable[..., None], args: tuple[Any, ...], options: dict[str, Any], /
    ) -> None: ...
    def _undo_making(self, number: int, /) -> None: ...
    def close(self) -> None: ...
    def __del__(self) -> None: ...

    # Take ownership of the struct that create(*args) returns, as a child of each parent; return the
    # struct. `keeps` lives as long as the handle; `access` is for C.
    def _make(
        self,
        create: Callable[..., Any],
        args: tuple[Any, ...],
        destroy: Callable[..., Any],
        parents: tuple[Any, ...],
        keeps: Any = None,
        access: int = 0,
        start: int = 0,
        unreadable: bool = False,
        form: Any = None,
    ) -> Any: ...

    # Register a memory region again by function(struct, *args[1:]), as a child of the new parents.
    # At the moment when the device has changed it, set `form` and `attributes`, (slot, object,
    # value) each; then call _settle(). Raises while anything uses the region; returns False if its
    # parents are no longer the tuple `before`.
    def _remake(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        before: tuple[Any, ...],
        parents: tuple[Any, ...],
        keeps: Any,
        access: int,
        start: int,
        unreadable: bool,
        form: Any,
        attributes: tuple[tuple[Any, Any, Any], ...],
        /,
    ) -> bool: ...

    # A region's memory, access and PD; and its previous form, until that is released.
    @property
    def _form(self) -> Any: ...
    @property
    def _replaced(self) -> Any: ...
    # A region's keys.
    @property
    def _lkey(self) -> int: ...
    @property
    def _rkey(self) -> int: ...

    # Whether the handle can only be closed, because _make() or _remake() has failed.
    @property
    def _spoiled(self) -> bool: ...

    # Call a function with the struct and `args`, in which each handle is replaced by its struct.
    def _verb(self, function: Callable[..., Any], /, *args: Any) -> Any: ...
    def _open_struct(self) -> Any: ...
    def _wake(self) -> None: ...
    def _release(self) -> None: ...
    def _forget(self) -> None: ...

# C calls _finalize() when the object is dropped, and again if a signal handler interrupts it. The
# handler's exception, which __del__ would lose, is raised in the main thread.
class Finalizer:
    def __del__(self) -> None: ...

# A subclass's __del__: call its finalizer, then that of every resource, whatever the first raises.
class Finalizing:
    def __init__(self, finalizer: Any, bind: type, /) -> None: ...

# Raise ImportError in a second interpreter, or for a second copy of the package.
def importing() -> None: ...

# _c/memory/dlpack.c: the address, shape, strides (in elements) or None, dtype's code, bits and
# lanes, device type of a capsule's tensor, and whether it is read-only.
def read_dlpack(
    capsule: Any, /
) -> tuple[Any, int, tuple[int, ...], tuple[int, ...] | None, int, int, int, int, bool]: ...

# _c/software/mapped_memory.c: whether memory is mapped, and its pages can be written, or also only
# read; permitted() does not fault them in.
def reachable(addr: int, length: int, /) -> bool: ...
def permitted(addr: int, length: int, write: bool, /) -> bool: ...

# Memory at an address, which may not be mapped; `keeps` keeps it alive.
class Room:
    def __init__(self, addr: int, length: int, keeps: Any, /) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, bounds: slice, /) -> Room: ...
    # Write all of it; OSError if it is not mapped, or if a sandbox leaves no way to write.
    def fill(self, data: Any, /) -> None: ...
    # Its bytes, or None if they are not mapped.
    def read(self) -> bytes | None: ...

# ClosedError, RdmaError, InUseError; a function that raises for a failed call and its errno; ffi; a
# cast of a pointer to an integer; the open handles; ffi.typeof; the struct of each class
# (resources/resource.py).
def describe_handles(
    closed: type,
    error: type,
    in_use: type,
    verbs: type,
    wait_cancelled: type,
    failed: Callable[..., Any],
    ffi: Any,
    to_number: Callable[[Any], Any],
    open: dict[int, Any],
    type_of: Callable[[Any], Any],
    structs: dict[type, Any],
    /,
) -> None: ...

# With False: all handles are about to be closed at exit, so threads that the closes wake end
# silently. With True: all that can be closed are, so finalizers do nothing.
def exiting(closed_all: bool, /) -> None: ...

# Whether resources may be created on those in a list: not while all of them are being closed.
def admit_children(handles: list[Any], whether: bool, /) -> None: ...

# Whether this thread is in the middle of a verb or a constructor, where a close is deferred.
def in_verb() -> bool: ...

# In the middle of a close of this thread, have it close these afterwards; return whether it is.
def defer_closes(handles: list[Any], /) -> bool: ...

# _c/posting/inflight.c: the records of a queue's outstanding work requests.
class InFlight:
    def __init__(self, in_order: bool = True, tagged: InFlight | None = None) -> None: ...
    @property
    def outstanding(self) -> int: ...
    # The outstanding work request with this index, counted from the oldest: its wr_id, and what it
    # holds (one resource, a tuple of them, or None).
    def entry(self, index: int, /) -> tuple[int, Any] | None: ...
    # How many work requests have been posted.
    @property
    def posted(self) -> int: ...
    # Drop the records of the first `posted` work requests: the queue has been reset since.
    def clear_until(self, posted: int, /) -> None: ...
    # Let completions find the queue in `queues`, by its number, without keeping it alive.
    # LOCAL_INVs that succeed are counted in `invalidated`, which has each window's counts
    # (_c/handles/windows.c), by the index of its keys (all but the low byte).
    def enroll(self, queues: dict[int, Any], invalidated: dict[int, bytes], /) -> None: ...

# Make the records those of a handle's queues: its close drops them, even if Python code fails.
def own_queues(handle: Handle, queues: tuple[InFlight, ...], /) -> None: ...

# The caller's wr_id of an outstanding work request, by its cookie and the dict of enroll().
def peek_queues(queues: dict[int, Any], cookie: int, /) -> int | None: ...

# _c/polling/wc.c.
def describe_wc(
    wc: type,
    statuses: dict[int, Any],
    status_of: Callable[[int], Any],
    opcodes: dict[int, Any],
    opcode_of: Callable[[int], Any],
    flags: dict[int, Any],
    flag_type: Any,
    check_rows: Callable[[memoryview], None],
    /,
) -> None: ...

# _c/polling/cq.c and waiters.c, which document the methods.  `handle` is the resource, which stays
# open during the call; `into` is an empty list.
class Poller:
    waiting: int
    cancels: int
    claims: int
    # The wait list of an event loop's tasks (aio.py), or None.
    @property
    def tasks(self) -> Any: ...
    def __init__(
        self,
        cq: Any,
        queues: dict[int, Any],
        invalidated: dict[int, bytes],
        wc_flags: int,
        spin_ns: int,
        channel: int,
        drop_event: Callable[[], object] | None,
        /,
    ) -> None: ...
    def until(
        self,
        handle: Any,
        fd: int,
        function: Callable[[], Any],
        timeout: float | None,
        tasks: bool,
        /,
    ) -> Any: ...
    def claim(self, tasks: Callable[[], object], /) -> bool: ...
    def unclaim(self, tasks: Callable[[], object], claims: int, /) -> bool: ...
    def wake_all(self) -> None: ...
    def cancel(self, for_good: bool, /) -> None: ...
    def first_failed(self) -> Any: ...
    def poll(self, handle: Any, max_entries: int, wcs: list[Any], /) -> None: ...
    def wait(
        self, handle: Any, count: int, promised: int, timeout: float | None, wcs: Any, /
    ) -> int | None: ...
    def fill(self, handle: Any, count: int, arm: bool | None = None, /) -> int: ...
    def notify(self, handle: Any, solicited_only: bool, /) -> None: ...
    def put_back(self, wcs: list[Any], /) -> None: ...

# _c/polling/comp_channel.c: ibv_get_cq_event(3) and ibv_ack_cq_events(3) in one.
def get_cq_event(channel: int, cqs: dict[int, None], /) -> bool | None: ...

# _c/posting/wr_init.c: the base of the work requests, whose __init__ does the same as a
# dataclass's, but faster.
class WR: ...

# Register a class, the __init__ that dataclasses made, the number of positional fields, and the
# name and default of each field.
def quick_init(
    wr_type: type, init: Any, positional: int, fields: tuple[tuple[str, Any], ...], /
) -> None: ...

# _c/posting/inline_buffer.c: memory that is not registered, held for inline data.
class Buffer:
    def __init__(self, of: Any, /) -> None: ...
    @property
    def addr(self) -> int: ...
    @property
    def length(self) -> int: ...

# _c/posting/tag_handle.c.
class TagHandle:
    """Names an entry of one SRQ's matching list; posting a TagAdd creates it."""

# _c/posting/wr_types.c: register a class that work requests refer to; and a row of fields.py, with
# the name, offset, size and kind of each field. describe_wr() returns the number of the class.
def describe_resource(name: str, type: type, /) -> None: ...
def describe_wr(
    wr_type: type,
    verb: int,
    opcode: int,
    writes: bool,
    atomic: bool,
    fields: tuple[tuple[str, int, int, str], ...],
    /,
) -> int: ...

# _c/posting/post.c; posting/queue.py derives a class from it, with the methods that C calls to
# explain a refusal.
class Queue:
    def __init__(
        self,
        *,
        verb: int,
        in_flight: InFlight,
        checked: bool,
        pd: int,
        room: int,
        datagram: bool,
        xrc: bool,
        binds: bool,
        builds: bool,
        max_sge: int,
        max_msg_size: int,
        max_inline_data: int,
        max_tso_header: int,
        max_num_tags: int,
        wr_types: tuple[tuple[int, int], ...],
    ) -> None: ...
    def bind_mw(self, owner: Handle, wr: Any, sure: bool, /) -> None: ...
    def set_ready(self, ready: bool, resets: dict[Any, Any] = {}, /) -> None: ...
    # Set how many work requests may be outstanding.
    def set_room(self, room: int, /) -> None: ...

# _c/module.c: replace a class's method with the C method of that name, and give it this docstring.
def add_method(cls: type, name: str, doc: str, /) -> None: ...

# _c/posting/prepared.c.
class Prepared:
    # Call it once, after recording the list with its owner, so that closing the owner closes it.
    def _prepare(self, queue: Queue, owner: Handle, wrs: Any, /) -> None: ...
    def post(self) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def __len__(self) -> int: ...
    # The class of one of its work requests.
    def _type_of(self, index: int, /) -> type: ...
    # Whether the list is open and uses a resource.
    def _names(self, resource: Any, /) -> bool: ...

class PreparedItem:
    def __init__(self, batch: Prepared, index: int, /) -> None: ...
    wr_id: int
    @property
    def sg_list(self) -> tuple[SGE, ...]: ...
    @sg_list.setter
    def sg_list(self, sges: SGE | Sequence[SGE], /) -> None: ...

# A numeric field of a prepared work request, by its index in the class's row of fields.
class Number:
    def __init__(self, wr_type: type, index: int, /) -> None: ...
    def __get__(self, wr: PreparedItem, owner: type | None = None, /) -> int: ...
    def __set__(self, wr: PreparedItem, value: int, /) -> None: ...

# _c/software/journal.c: changes to soft0's state are rolled back if the verb raises.
# The functions passed to these must be in C, where no signal handler runs.

# Its attributes are journaled.
class Record: ...

# Record a call that undoes the next change. The call must be harmless if that change is not made.
def undo(function: Callable[..., Any], /, *args: Any) -> None: ...
def on_commit(function: Callable[..., Any], /, *args: Any) -> None: ...

# For Room.fill, which is called before all on_commit functions. If it raises, the verb is rolled
# back and repeated, and reachable() returns False for that memory.
def try_on_commit(function: Callable[..., Any], /, *args: Any) -> None: ...

# The same for a write that must not be made twice; it is made after all try_on_commit functions.
def try_once_on_commit(function: Callable[..., Any], /, *args: Any) -> None: ...

# Call the function after all on_commit functions.
def at_the_end(function: Callable[..., Any], /, *args: Any) -> None: ...

# Return function(*args), which undo(result) undoes.
def made(undo: Callable[[Any], Any], function: Callable[..., _T], /, *args: Any) -> _T: ...

# deque.append and deque.popleft.
def put(queue: deque[_T], item: _T, /) -> None: ...
def take(queue: deque[_T], /) -> _T: ...

# dict.__setitem__, for undo: it needs no memory for its arguments.
def set_item(dictionary: dict[Any, Any], key: Any, value: Any, /) -> None: ...

# Remove a key, if present; for on_commit.
def discard(dictionary: dict[Any, Any], key: Any, /) -> None: ...

# Drop a work queue's entries from a completion queue; for on_commit.
def forget(entries: deque[Any], queue: DeviceQueue, /) -> None: ...

# _c/software/queue_types.c.
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
    length: int
    atomic_wr: int
    type: int
    level: int
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

# A work queue or a completion queue. C adds to `pending` and takes from it, and changes `armed` and
# `used`, even in the middle of a verb or a transaction, when a signal handler posts or polls.
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
    fast_path: FastPath | None
    # Return what is in `pending`.
    def posted(self) -> tuple[Any, ...]: ...
    # For on_commit: free a slot; and drop the posted work requests and free all slots.
    def free_slot(self) -> None: ...
    def empty(self) -> None: ...
    # Set `depth`, unless more slots are taken; return whether it was set.
    def resize(self, depth: int, /) -> bool: ...
    # For at_the_end: add an event for an entry of a completion queue that is armed for it.
    def announce(self, events: deque[Any], fd: int, solicited: bool, /) -> None: ...

# Add an entry to a completion queue; polls see it once it is committed.
def add(cq: DeviceQueue, entry: tuple[bytes, DeviceQueue, int], /) -> None: ...

# _c/software/fast_path.c: how C executes a queue pair's common send work requests, until a Record
# or a JournaledDict changes; then C resets DeviceQueue.fast_path.
class FastPath:
    def __init__(
        self,
        qp: Any,
        statuses: dict[int, Any],
        refusals: dict[int, int],
        lkeys: dict[int, Any],
        rkeys: dict[int, Any],
        pd: Any,
        peer_pd: Any,
        rq: DeviceQueue | None,
        send_cq: tuple[DeviceQueue, deque[Any] | None, int],
        recv_cq: tuple[DeviceQueue, deque[Any] | None, int],
        qp_num: int,
        peer_num: int,
        access: int,
        reads: bool,
        all_signaled: bool,
        /,
    ) -> None: ...

# _c/software/faults.c: planned failures of sends: for each, the errno (1..4095), and the number of
# sends accepted before it (below 2^63).
class PostFaults:
    def add(self, after: int, errno: int, /) -> None: ...
    def clear(self) -> None: ...

# _c/software/transaction.c: call a function as one verb, which is undone if the function raises.
def verb(function: Callable[..., Any], /, *args: Any) -> Any: ...

# Let the device execute pending work requests, as posts and polls do.
def run_device() -> None: ...

# Return how many threads sleep in a wait for completions or events.
def sleeping() -> int: ...

# In the child of a fork: enable the garbage collector if a thread of the parent had paused it.
def after_fork() -> None: ...

# For on_commit: run the device at this time (-1: never); make a timer fire after this time (0:
# never); make an eventfd readable if there are events; and have an object's work requests executed.
def schedule_at(seconds: float, /) -> None: ...
def set_timer(fd: int, ns: int, /) -> None: ...
def signal(fd: int, events: deque[Any], /) -> None: ...
def start(worker: Any, /) -> None: ...

# _c/software/device.c: whether this thread is in the middle of a verb or of the device's work,
# where nothing may wait.
def in_step() -> bool: ...

# Give C the parts of the device that it uses (providers/software/state.py):
# - objects: the object behind each struct;
# - devices: the open devices;
# - ready: the objects with pending work;
# - wires: the devices that look for packets in every verb;
# - execute_next: do one part of an object's work (of None: the work that is due); return 1 to be
#   called again, 0 if nothing is left, or -2 if the rest waits for a later verb, as it may if this
#   one is late;
# - give_up: fail the work after an exception, and return the same, or -1 if a later verb must retry
#   the work, as it must if give_up raises MemoryError; called with None to report another one;
# - log_reports: log those exceptions, and lacks of memory;
# - reset: start over after a fork;
# - refuse: refuse a verb in the middle of another;
# - setattr, delattr, pop: Python's own.
def soft_device(
    objects: dict[int, Any],
    devices: dict[str, Any],
    ready: list[Any],
    wires: list[Any],
    execute_next: Callable[[Any, bool], int],
    give_up: Callable[[Any, BaseException], int],
    log_reports: Callable[[], None],
    reset: Callable[[], bool],
    refuse: Callable[..., None],
    setattr: Any,
    delattr: Any,
    pop: Any,
    /,
) -> None: ...

# _c/roce/packets.c.  `flow` is the IP header and the UDP header of the packets as the ICRC covers
# them: the fields that may change on the way are all ones, the lengths and the identification 0.

# Write packets back to back: for each, its headers, up to `mtu` bytes of the payload, padding and
# the ICRC.  Return the bytes written.
def roce_build(
    out: bytearray | memoryview,
    flow: bytes,
    headers: Sequence[bytes],
    payload: Sequence[Any],
    mtu: int,
    /,
) -> int: ...

# Send packets to a struct sockaddr, each of `segment` bytes except the last. Return 0 or an errno,
# which is also appended to `errors`, with `about`.
def roce_send(
    fd: int,
    address: bytes,
    data: bytes | bytearray,
    size: int,
    segment: int,
    tos: int,
    errors: list[tuple[int, Any]] = ...,
    about: Any = ...,
    /,
) -> int: ...

# Receive a datagram, or several that the kernel has joined. Return their total size, the size of
# each except the last, the sender's struct sockaddr, TOS and TTL; None if there is no datagram.
def roce_receive(file: Any, buffer: bytearray, /) -> tuple[int, int, bytes, int, int] | None: ...

# Set the opcode of each damaged packet to 0xFF. Return the number of damaged packets.
def roce_check(buffer: bytearray, size: int, segment: int, flow: bytes, /) -> int: ...

# Return a packet's identification, 0 for IPv6, -1 if it is damaged.
def roce_id(buffer: bytearray | bytes, at: int, size: int, flow: bytes, /) -> int: ...

# Return how many packets with the same opcode and destination and consecutive PSNs begin at `at`.
def roce_run(buffer: bytearray | bytes, size: int, segment: int, at: int, /) -> int: ...

# Copy the payloads of packets, without `skip` bytes of headers, into the target.
def roce_gather(
    target: bytearray | memoryview,
    buffer: bytearray | memoryview,
    at: int,
    segment: int,
    count: int,
    skip: int,
    /,
) -> int: ...

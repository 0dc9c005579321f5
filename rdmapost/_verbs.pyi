# The compiled module, made by build_ffi.py from rdmapost/_c/.  cffi's own stubs
# know nothing of C structs, so what comes out of it is Any.
from collections.abc import Sequence
from typing import Any

ffi: Any
lib: Any

# _c/door.c: they never block, and take addresses as numbers.  Writing a record
# with one SGE raises OverflowError or TypeError where a number does not fit, and
# returns whether the SGE is one of 1 to most bytes within start..end; an end of
# 2^64-1 asks for no more than that it fits.
def put_message(
    record: int, wr_id: int, opcode: int, send_flags: int, imm_data: int,
    ah: int, remote_qpn: int, remote_qkey: int, remote_srqn: int,
    addr: int, length: int, lkey: int, start: int, end: int, most: int, /,
) -> bool: ...  # fmt: skip
def put_rdma(
    record: int, wr_id: int, opcode: int, send_flags: int, imm_data: int,
    remote_addr: int, rkey: int, remote_srqn: int,
    addr: int, length: int, lkey: int, start: int, end: int, most: int, /,
) -> bool: ...  # fmt: skip
def put_recv(
    record: int, wr_id: int, addr: int, length: int, lkey: int, start: int, end: int, /
) -> bool: ...

# As rp_submit_send and so on (_c/shim.h).
def submit_send(qp: int, records: int, size: int, count: int, /) -> int: ...
def submit_recv(qp: int, records: int, size: int, count: int, /) -> int: ...
def submit_srq_recv(srq: int, records: int, size: int, count: int, /) -> int: ...
def submit_srq_ops(srq: int, records: int, size: int, count: int, /) -> int: ...

# ibv_poll_cq(3).
def poll(cq: int, wc: int, num_entries: int, /) -> int: ...

# ibv_req_notify_cq(3).
def req_notify(cq: int, solicited_only: bool, /) -> int: ...

# ibv_get_cq_event(3) and ibv_ack_cq_events(3) in one; returns 0 or an errno.
def drop_event(channel: int, /) -> int: ...

# _c/prepared.c.
class Lock:
    def acquire(self) -> None: ...
    def release(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

class Prepared:
    _entry: tuple[list[int], list[Sequence[Any]]]
    def __init__(
        self, lock: Lock, counts: list[int], keep: Any,
        entry: tuple[list[int], list[Sequence[Any]]],
        records: int, base: int, count: int, room: int, receives: bool, /,
    ) -> None: ...  # fmt: skip
    def post(self) -> None: ...
    def _drop(self) -> None: ...

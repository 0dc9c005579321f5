"""Completion queues and completions."""

from __future__ import annotations

import errno
import os
import select
import sys
import threading
import time
from collections import deque
from struct import Struct
from typing import Any, NamedTuple

from ._binding import ffi, lib
from ._resource import Resource
from .device import Context
from .enums import WCFlags, WCOpcode, WCStatus
from .errors import CompletionError, VerbsError, WaitTimeout

__all__ = ["CQ", "WC"]


class WC(NamedTuple):
    """A completion (``struct ibv_wc``, ibv_poll_cq(3)).

    In an error completion only wr_id, status, qp_num and vendor_err mean
    anything; the rest is None or 0.

    Attributes:
        wr_id: what the work request carried.
        status: how it ended.
        opcode: what completed, or None.
        byte_len: bytes received (with the 40 bytes of GRH on UD), read or exchanged.
        imm_data: immediate data in host order, or None.
        invalidated_rkey: the key that the peer invalidated, or None.
        qp_num: number of the local queue pair.
        src_qp: number of the sender's queue pair (UD).
        wc_flags: what the completion carries.
        vendor_err: the device's own error code.
        pkey_index, slid, sl, dlid_path_bits: of the packet (UD).
    """

    wr_id: int
    status: WCStatus
    opcode: WCOpcode | None
    byte_len: int
    imm_data: int | None
    invalidated_rkey: int | None
    qp_num: int
    src_qp: int
    wc_flags: WCFlags
    vendor_err: int
    pkey_index: int
    slid: int
    sl: int
    dlid_path_bits: int

    def check(self) -> WC:
        """Return the completion if it is a success.

        Raises:
            CompletionError: it is not.
        """
        if self.status:
            raise CompletionError(
                self,
                f"the work request with wr_id {self.wr_id} on QP {self.qp_num:#x} ended with "
                f"{self.status.name}"
                + (f" (vendor_err {self.vendor_err:#x})" if self.vendor_err else ""),
            )
        return self


# struct ibv_wc; the shim asserts its size.
_RAW = Struct("=QiIIIIIIIHHBB2x")
_STATUS = {int(status): status for status in WCStatus}
_OPCODE = {int(opcode): opcode for opcode in WCOpcode}
_FLAGS = {flags: WCFlags(flags) for flags in range(128)}
_NO_FLAGS = WCFlags(0)
_WITH_IMM, _WITH_INV, _RECV = int(WCFlags.WITH_IMM), int(WCFlags.WITH_INV), int(WCOpcode.RECV)

_BATCH = 64
_SPIN_NS = 20_000


class CQ(Resource):
    """A completion queue, with a completion channel of its own (ibv_create_cq(3)).

    Args:
        context: an open device.
        cqe: entries it must hold, 1..the device's max_cqe.
        comp_vector: which interrupt vector signals it.

    Attributes:
        cqe: entries it holds.

    Raises:
        ValueError: cqe is out of range.
        ClosedError: the device is closed.
        VerbsError: the device refused.
    """

    __slots__ = ("_backlog", "_channel", "_lock", "_raw", "_raw_bytes", "context", "cqe")

    _kind = "CQ"

    def __init__(self, context: Context, cqe: int = 128, *, comp_vector: int = 0) -> None:
        self.context = context
        context._live()
        most = context.attr.max_cqe
        if not 1 <= cqe <= most:
            raise ValueError(f"cqe={cqe} is not in 1..{most}, what {context.name} can hold")
        self._backlog: deque[WC] = deque()
        self._lock = threading.Lock()
        self._raw = ffi.new("struct ibv_wc[]", _BATCH)
        self._raw_bytes = memoryview(ffi.buffer(self._raw))
        provider = context._provider
        self._channel = provider.create_comp_channel(context._live())
        try:
            # An event that another thread took must not block this one.
            os.set_blocking(self._channel.fd, False)
            handle = provider.create_cq(context._live(), cqe, self._channel, comp_vector)
        except BaseException:
            provider.destroy_comp_channel(self._channel)
            raise
        self.cqe: int = handle.cqe
        super().__init__(handle, context)

    def __str__(self) -> str:
        return f"CQ of {self.cqe} entries" if hasattr(self, "cqe") else self._kind

    def _destroy(self) -> None:
        self.context._provider.destroy_cq(self._handle)
        self._handle = None
        self.context._provider.destroy_comp_channel(self._channel)

    def poll(self, max_entries: int = _BATCH) -> list[WC]:
        """Return the completions that are there now, without waiting.

        Args:
            max_entries: how many at most.

        Raises:
            ClosedError: the CQ is closed.
            VerbsError: the device failed.
        """
        handle = self._live()
        with self._lock:
            return self._poll(handle, max_entries, 0, 0)

    def wait(self, count: int = 1, timeout: float | None = 5.0) -> list[WC]:
        """Wait for completions and return exactly that many.

        The wait spins for a moment and then sleeps on the completion channel.

        Args:
            count: how many.
            timeout: seconds; None waits as long as it takes.

        Raises:
            WaitTimeout: fewer came; those stay for the next poll or wait.
            ClosedError: the CQ is closed.
            VerbsError: the device failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        got: list[WC] = []
        while True:
            handle = self._live()
            with self._lock:
                got += self._poll(handle, count - len(got), 1, _SPIN_NS)
                if len(got) >= count:
                    return got
                # Ask for an event, then look again: what came in between raises none.
                if error := lib.ibv_req_notify_cq(handle, 0):
                    raise VerbsError("ibv_req_notify_cq", abs(error))
                got += self._poll(handle, count - len(got), 0, 0)
                if len(got) >= count:
                    return got
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                with self._lock:
                    self._backlog.extendleft(reversed(got))
                raise WaitTimeout(f"{len(got)} of {count} completions came within {timeout:g} s")
            self._sleep(left)

    def _sleep(self, seconds: float | None) -> None:
        poller = select.poll()
        poller.register(self._channel.fd, select.POLLIN)
        # Rounded up, so that a short wait does not become a busy one.
        if poller.poll(None if seconds is None else seconds * 1000 + 1):
            provider = self.context._provider
            if (cq := provider.get_cq_event(self._channel)) is not None:
                provider.ack_cq_events(cq, 1)

    def _poll(self, handle: Any, most: int, least: int, spin_ns: int) -> list[WC]:
        """Poll with the lock held; spin until there are `least`."""
        found: list[WC] = []
        backlog = self._backlog
        while backlog and len(found) < most:
            found.append(backlog.popleft())
        while len(found) < most:
            room = min(most - len(found), _BATCH)
            wanted = 0 if found else min(least, room)
            count = lib.rp_poll_cq(handle, self._raw, room, wanted, spin_ns)
            if count < 0:
                if found:
                    break
                raise VerbsError("ibv_poll_cq", ffi.errno or errno.EIO)
            self._read(count, found)
            if count < room:
                break
        return found

    def _read(self, count: int, found: list[WC]) -> None:
        queues = self.context._queues
        raw = self._raw_bytes[: count * _RAW.size]
        for (
            ticket, status, opcode, vendor_err, byte_len, imm, qp_num, src_qp, flags,
            pkey_index, slid, sl, path_bits,
        ) in _RAW.iter_unpack(raw):  # fmt: skip
            queue = queues.get(ticket >> 32)
            wr_id = None if queue is None else queue.complete(ticket)
            if wr_id is None:
                # Of a queue that has been destroyed or reset: nobody waits for it.
                continue
            if status:
                found.append(
                    WC(
                        wr_id, _STATUS.get(status, WCStatus.GENERAL_ERR), None, 0, None, None,
                        qp_num, 0, _NO_FLAGS, vendor_err, 0, 0, 0, 0,
                    )
                )  # fmt: skip
                continue
            found.append(
                WC(
                    wr_id, WCStatus.SUCCESS, _OPCODE.get(opcode), byte_len,
                    # Some drivers set the flag at the sender too, and leave the data.
                    _from_network(imm) if flags & _WITH_IMM and opcode & _RECV else None,
                    imm if flags & _WITH_INV and opcode & _RECV else None,
                    qp_num, src_qp, _FLAGS.get(flags) or WCFlags(flags), vendor_err,
                    pkey_index, slid, sl, path_bits,
                )
            )  # fmt: skip

    def _keep(self) -> None:
        """Take what is in the queue now, before or after one of its QPs is destroyed.

        Devices differ in what they do to completions of a destroyed QP; taken
        here, they are delivered on all of them.
        """
        if self._handle is None:
            return
        with self._lock:
            # Not more than it holds: another QP may keep filling it.
            self._backlog.extend(self._poll(self._handle, len(self._backlog) + self.cqe, 0, 0))


def _from_network(value: int) -> int:
    return int.from_bytes(value.to_bytes(4, sys.byteorder), "big")

"""One side of a connection between two devices: it makes a queue pair and posts on request.

    python tests/support/verbs_side.py DEVICE GID

Each line of standard input is a JSON object whose "do" names a method of Side; the other fields are
its arguments. Each is answered with a line of JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from typing import Any

import rdmapost as rp
from rdmapost import Access

SIZE = 1 << 20
QKEY = 0x11111111
RECV = 1000
"""The wr_id of receives."""
MESSAGE = 5000
"""Bytes of each mixed operation."""
WRITTEN, READ, COUNTED, SENT = range(0, SIZE, SIZE // 4)
"""Where in both regions the mixed operations have their data."""
ALL = (
    Access.LOCAL_WRITE
    | Access.REMOTE_WRITE
    | Access.REMOTE_READ
    | Access.REMOTE_ATOMIC
    | Access.MW_BIND
)


class Side:
    """A device, and at any time one queue pair with its CQ, its region and its windows."""

    def __init__(self, device: str, gid: str) -> None:
        self._context = rp.open_device(device)
        (self._gid_index,) = (
            entry.gid_index
            for entry in self._context.query_gid_table()
            if entry.gid_type is rp.GIDType.ROCE_V2 and str(entry.gid) == gid
        )
        self._stack = contextlib.ExitStack()

    def gid_index(self) -> int:
        """Return the index of the device's GID."""
        return self._gid_index

    def make(self, qp_type: str, *, checked: bool = True) -> dict[str, Any]:
        """Replace the queue pair and its resources; return what the peer needs to connect."""
        self._stack.close()
        enter = self._stack.enter_context
        self._pd = enter(rp.PD(self._context))
        self._cq = enter(rp.CQ(self._context, 64))
        self._mr = enter(rp.MR(self._pd, SIZE, ALL))
        self._qp = enter(
            rp.QP(
                self._pd, rp.QPType[qp_type], self._cq, checked=checked, gid_index=self._gid_index
            )
        )
        return {
            "endpoint": str(self._qp.endpoint()),
            "qp_num": self._qp.qp_num,
            "addr": self._mr.addr,
            "rkey": self._mr.rkey,
        }

    def capture(self, path: str) -> None:
        """Begin to write the packets of a roce device to a file."""
        self._capture = self._context.capture(path)

    def end_capture(self) -> None:
        """Complete the file."""
        self._capture.close()

    def connect(self, endpoint: str, **options: int) -> int:
        """Connect the queue pair; return its path MTU in bytes."""
        peer = rp.Endpoint.parse(endpoint)
        if self._qp.qp_type is rp.QPType.UD:
            self._qp.connect(qkey=QKEY)
            self._ah = self._stack.enter_context(self._qp.ah_to(peer))
            return 0
        self._qp.connect(peer, **options)
        return self._qp.query().path_mtu.bytes

    def connect_at(self, endpoint: str, psn: int) -> None:
        """Connect an RC queue pair with the same first PSN on both sides."""
        peer = rp.Endpoint.parse(endpoint)
        self._qp.to_init()
        self._qp.to_rtr(dataclasses.replace(peer, psn=psn))
        self._qp.modify(
            qp_state=rp.QPState.RTS,
            sq_psn=psn,
            timeout=14,
            retry_cnt=7,
            rnr_retry=7,
            max_rd_atomic=1,
        )

    def fill(self, start: int, data: str) -> None:
        """Write to the region."""
        found = bytes.fromhex(data)
        self._mr.buffer[start : start + len(found)] = found

    def peek(self, start: int, length: int) -> str:
        """Return bytes of the region, in hex."""
        return bytes(self._mr.buffer[start : start + length]).hex()

    def recv(self, start: int, length: int) -> None:
        """Post a receive."""
        self._qp.post_recv(rp.RecvWR(self._sges(start, length), wr_id=RECV))

    def _sges(self, start: int, length: int) -> list[rp.SGE]:
        return [self._mr[start : start + length]] if length else []

    def post(self, name: str, start: int = 0, length: int = 0, **fields: int) -> None:
        """Post a work request to the send queue."""
        wr_type = getattr(rp, name)
        if name == "LocalInv":
            self._qp.post_send(wr_type(**fields))
            return
        if self._qp.qp_type is rp.QPType.UD:
            fields |= {"remote_qkey": QKEY}
            self._qp.post_send(wr_type(self._sges(start, length), ah=self._ah, **fields))
            return
        self._qp.post_send(wr_type(self._sges(start, length), **fields))

    def post_writes(self, count: int, start: int, remote_addr: int, rkey: int) -> None:
        """Post writes of 8 bytes each, side by side in both regions."""
        self._qp.post_send(
            [
                rp.RdmaWrite(
                    self._mr[at : at + 8], remote_addr=remote_addr + at, rkey=rkey, wr_id=at
                )
                for at in range(start, start + 8 * count, 8)
            ]
        )

    def post_mixed(self, rounds: int, addr: int, rkey: int, responses: bool) -> None:
        """Post a write, a send and perhaps what has responses, a read and an addition, each round.

        All are outstanding at once.
        """
        for i in range(rounds):
            near, far = i * MESSAGE, addr + i * MESSAGE
            wrs: list[rp.SendWR] = [
                rp.RdmaWrite(self._part(WRITTEN, near), remote_addr=far, rkey=rkey),
                rp.Send(self._part(SENT, near)),
            ]
            if responses:
                wrs += [
                    rp.RdmaRead(self._part(READ, near), remote_addr=far + READ, rkey=rkey),
                    rp.AtomicFetchAndAdd(
                        self._mr[COUNTED + 8 * i : COUNTED + 8 * i + 8],
                        remote_addr=addr + COUNTED,
                        rkey=rkey,
                        compare_add=1 + i,
                    ),
                ]
            self._qp.post_send(wrs)

    def _part(self, start: int, at: int) -> list[rp.SGE]:
        return [self._mr[start + at : start + at + MESSAGE]]

    def window(self, mw_type: int, start: int, length: int) -> int:
        """Bind a window to part of the region; return its key."""
        access = Access.REMOTE_WRITE | Access.REMOTE_READ
        mw = self._stack.enter_context(rp.MW(self._pd, rp.MWType(mw_type)))
        if mw_type == rp.MWType.TYPE_1:
            self._qp.bind_mw(mw, self._mr, self._mr.addr + start, length, access)
        else:
            self._qp.post_send(
                rp.BindMW(
                    mw=mw,
                    rkey=mw.rkey & ~0xFF | (mw.rkey + 1) & 0xFF,
                    mr=self._mr,
                    addr=self._mr.addr + start,
                    length=length,
                    mw_access_flags=access,
                )
            )
        self._cq.wait(1)[0].check()
        return mw.rkey

    def wait(self, count: int, timeout: float) -> list[dict[str, Any]]:
        """Wait for completions; return what they say."""
        wcs = self._cq.wait(count, timeout)
        return [
            {
                "status": wc.status.name,
                "recv": wc.wr_id == RECV,
                "byte_len": wc.byte_len if wc.status is rp.WCStatus.SUCCESS else None,
                "imm_data": wc.imm_data,
                "invalidated_rkey": wc.invalidated_rkey,
            }
            for wc in wcs
        ]

    def reset(self) -> None:
        """Make the queue pair deaf."""
        self._qp.to_reset()


def main(device: str, gid: str) -> None:
    side = Side(device, gid)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": getattr(side, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

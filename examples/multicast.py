"""A news service over multicast: one send reaches every subscriber.

Attaching a UD queue pair to a group informs only the device. On a network the host must also have
joined the group: otherwise it drops the packets, and the sender does not notice. Any UDP socket can
join, on the network device that carries the GID, and stays in the group until it is closed.

    python examples/multicast.py [DEVICE]     (default: soft0)
"""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import ExitStack
from ipaddress import IPv6Address

import rdmapost as rp

QKEY = 0x1234
NEWS = [b"rain", b"sun", b"snow"]


def group_for(gid: rp.GID) -> rp.GID:
    """Return a group that a sender with this GID can reach: IPv4 and IPv6 do not mix."""
    return rp.GID("::ffff:239.1.2.3" if gid.is_ipv4 else "ff0e::1:2:3")


def join(group: rp.GID, ndev: str) -> socket.socket:
    """Join a group on a network device; closing the socket leaves it."""
    address, device = IPv6Address(bytes(group)), socket.if_nametoindex(ndev)
    if address.ipv4_mapped:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        # struct ip_mreqn: the group, any local address, and the device.
        member = struct.pack("@4s4si", address.ipv4_mapped.packed, bytes(4), device)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    else:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        member = struct.pack("@16si", address.packed, device)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, member)
    return sock


class Subscriber:
    """A UD queue pair that is attached to a group."""

    def __init__(self, pd: rp.PD, stack: ExitStack, group: rp.GID) -> None:
        self.cq = stack.enter_context(rp.CQ(pd.context))
        self.mr = stack.enter_context(rp.MR(pd, 256 * len(NEWS)))
        self.qp = stack.enter_context(rp.QP(pd, rp.QPType.UD, self.cq))
        self.qp.connect(qkey=QKEY)
        self.receives = [
            rp.RecvWR(self.mr[256 * index : 256 * (index + 1)], wr_id=index)
            for index in range(len(NEWS))
        ]
        self.qp.post_recv(self.receives)
        self.qp.attach_mcast(group)

    def news(self) -> list[bytes]:
        wcs = self.cq.wait(len(NEWS))
        return [wc.datagram(self.receives[wc.wr_id]).payload for wc in wcs]


def main(device: str = "soft0") -> None:
    with ExitStack() as stack:
        context = stack.enter_context(rp.open_device(device))
        if not context.attr.max_mcast_grp:
            sys.exit(f"{device} has no multicast")
        pd, cq = stack.enter_context(rp.PD(context)), stack.enter_context(rp.CQ(context))
        mr = stack.enter_context(rp.MR(pd, 64))
        sender = stack.enter_context(rp.QP(pd, rp.QPType.UD, cq))
        sender.connect(qkey=QKEY)

        gid = sender.gid
        group = group_for(gid.gid)
        ndev = next(e.ndev for e in context.query_gid_table() if e.gid_index == gid.gid_index)
        # soft0 has no network device, and needs none.
        if ndev:
            stack.enter_context(join(group, ndev))
        subscribers = [Subscriber(pd, stack, group) for _ in range(3)]

        ah = stack.enter_context(rp.AH(pd, rp.AHAttr(dgid=group, sgid_index=gid.gid_index)))
        for item in NEWS:
            mr.buffer[: len(item)] = item
            sge = mr[: len(item)]
            sender.post_send(rp.Send(sge, ah=ah, remote_qpn=rp.MULTICAST_QPN, remote_qkey=QKEY))
            cq.wait(1)[0].check()
        for number, subscriber in enumerate(subscribers):
            print(f"subscriber {number}:", *(item.decode() for item in subscriber.news()))


if __name__ == "__main__":
    main(*sys.argv[1:])

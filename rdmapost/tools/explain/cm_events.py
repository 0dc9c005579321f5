"""Explanations of the RDMA CM's events (rdma_get_cm_event(3)), which librdmacm's programs print."""

from __future__ import annotations

import itertools
from typing import Any

from .model import Explanation, named

_numbers = itertools.count()


def _event(name: str, meaning: str, *look_at: str, **texts: Any) -> Explanation:
    """Explain the next event, in the order of enum rdma_cm_event_type."""
    texts = {"see": ("rdma_get_cm_event(3), EVENT TYPES",), **texts}
    texts |= {"number": next(_numbers), "constant": f"RDMA_CM_EVENT_{name}"}
    return named("cm_event", name, meaning, *look_at, **texts)


CM_EVENTS: tuple[Explanation, ...] = (
    _event(
        "ADDR_RESOLVED",
        "rdma_resolve_addr found the device and the source address for the destination. All is "
        "well: rdma_resolve_route comes next.",
    ),
    _event(
        "ADDR_ERROR",
        "rdma_resolve_addr failed: no RDMA device of this machine leads to the destination's IP "
        "address, or its link address does not resolve. Nothing has been sent over RDMA yet.",
        "The event's status, a negative errno: -19 (no RDMA device), -110 and -113 (neighbour), "
        "-101 (no route).",
        "ip route get ADDRESS: the interface; rdma link: whether a device has that netdev.",
        "ip neigh show ADDRESS, and ping it from the address of that interface.",
        causes=(
            "The route to the address uses an interface without an RDMA device, such as the "
            "management network: give the peer's address on the RDMA network.",
            "The peer does not answer ARP or ND: it is down, or on another VLAN.",
            "The address is 127.0.0.1, which no device serves, unless Soft-RoCE runs on lo.",
            "InfiniBand: the IPoIB interface is down or has no address.",
        ),
        see=("rdma_resolve_addr(3)",),
    ),
    _event(
        "ROUTE_RESOLVED",
        "rdma_resolve_route found the path to the destination. All is well: rdma_connect comes "
        "next.",
    ),
    _event(
        "ROUTE_ERROR",
        "rdma_resolve_route failed: the address is resolved, but there is no path record for it.",
        "The event's status: -110 if the subnet manager did not answer.",
        "InfiniBand: sminfo, and saquery for the path; RoCE: rdmapost devices, for the GIDs.",
        causes=(
            "InfiniBand: the subnet manager is gone or overloaded, or knows no path between the "
            "two ports (partition, port not active).",
            "RoCE: no GID of the device has the source address, or the interface's MTU is too "
            "small for any path MTU.",
            "The timeout passed to rdma_resolve_route is too short for a large or busy fabric.",
        ),
        see=("rdma_resolve_route(3)",),
    ),
    _event(
        "CONNECT_REQUEST",
        "A peer asks the passive side for a connection. All is well: answer with rdma_accept or "
        "rdma_reject.",
    ),
    _event(
        "CONNECT_RESPONSE",
        "The passive side accepted, and the identifier has no queue pair that the RDMA CM created: "
        "move your own to RTR and RTS, then call rdma_establish.",
    ),
    _event(
        "CONNECT_ERROR",
        "The connection failed after the request had been sent or accepted: this side gave up, "
        "not the peer's program.",
        "The event's status, a negative errno; dmesg, and the event on the other side.",
        causes=(
            "The queue pair could not be moved to RTR or RTS: an attribute of rdma_conn_param "
            "(initiator_depth, responder_resources) is over the device's limit, or the path is "
            "wrong ('rdmapost explain modify_qp_to_rtr').",
            "The passive side accepted, and the active side's last message (RTU) never came.",
            "iWARP: the underlying TCP connection was reset during the MPA exchange.",
        ),
        see=("rdma_connect(3)", "rdma_accept(3)"),
    ),
    _event(
        "UNREACHABLE",
        "The peer did not answer the connection request: its address resolves, but nothing came "
        "back from its connection manager.",
        "The event's status: -110, no answer within the CM's retries.",
        "On the peer: rdma link, lsmod for rdma_cm, and whether the program waits for events.",
        "On both sides, rdmapost doctor: firewall, GIDs and MTU.",
        causes=(
            "The host answers ARP, but has no RDMA on that interface, or rdma_cm is not loaded.",
            "A firewall drops UDP port 4791 (RoCE v2); ping does not show that.",
            "One side uses RoCE v1, the other v2: cma_roce_mode, or default_roce_mode of rdma_cm "
            "in configfs.",
            "The server is so busy that it does not take connection requests (rdma_get_cm_event) "
            "in time.",
        ),
        see=("rdma_connect(3)",),
    ),
    _event(
        "REJECTED",
        "The peer's connection manager or its program refused the connection request. RDMA "
        "packets do get there and back.",
        "The event's status. On InfiniBand and RoCE it is the reason in the reject message: 8, no "
        "listener; 28, the program refused; 10, stale connection; 3, no resources; 12, invalid "
        "GID. On iWARP -111: no listener.",
        "On the peer: rdma resource show cm_id state LISTEN. ss does not list these ports.",
        "The peer's own output, if its program refused; private_data may say why.",
        causes=(
            "Status 8 or -111: no program listens (rdma_listen) on that address and port there. "
            "It is a port of the RDMA CM, not of TCP; the ports of RDMA_PS_TCP and RDMA_PS_UDP "
            "are separate.",
            "Status 28: the program called rdma_reject, destroyed the identifier without "
            "accepting, or failed to set up its side (perftest: its options, such as -c or -q, or "
            "its version differ from this side's).",
            "Status 10: the peer still has a connection with the same queue pair number, from an "
            "earlier run: try again.",
            "The listener's backlog is full, or the peer is out of queue pairs.",
        ),
        see=("rdma_connect(3)", "rdma_reject(3)", "IBA vol. 1, 12.6.7.2 (rejection reason)"),
    ),
    _event(
        "ESTABLISHED",
        "The connection is established: the queue pair is in RTS on this side, and may send.",
    ),
    _event(
        "DISCONNECTED",
        "The connection has ended: one side called rdma_disconnect or ended. Call rdma_disconnect "
        "on this side too: it moves the queue pair to ERR, and posted work requests complete with "
        "WR_FLUSH_ERR.",
        "Which side ended first, and its output; the first completion other than WR_FLUSH_ERR.",
        causes=(
            "The peer is done: normal at the end of a run.",
            "The peer's program failed or was killed: its kernel disconnects for it.",
            "A work request failed, and one side called rdma_disconnect because of it.",
        ),
        see=("rdma_disconnect(3)",),
    ),
    _event(
        "DEVICE_REMOVAL",
        "The device of this identifier is being removed. The removal hangs until the identifier "
        "and everything on the device are destroyed.",
        "dmesg: why the device went away.",
        "Destroy the queue pair and the identifier; resolve the address again later.",
        causes=(
            "A reset of the device, a driver reload, rdma link delete, hot unplug.",
            "mlx5: a bond of its ports was created or removed.",
        ),
    ),
    _event("MULTICAST_JOIN", "rdma_join_multicast is done: the group can be used."),
    _event(
        "MULTICAST_ERROR",
        "A multicast group could not be joined, or a joined group is lost.",
        "The event's status; saquery -g for the groups of an InfiniBand subnet.",
        causes=(
            "InfiniBand: the subnet manager refused the join (partition, rate, MTU, no room).",
            "A port event (down, LID or subnet manager changed) ended the membership.",
        ),
        see=("rdma_join_multicast(3)",),
    ),
    _event(
        "ADDR_CHANGE",
        "The network device of this connection has a new hardware address, for instance because a "
        "bond failed over. The connection may be dead.",
        "Disconnect, and connect again.",
        causes=("A bond switched to another member.", "The MAC address was changed."),
    ),
    _event(
        "TIMEWAIT_EXIT",
        "The queue pair of an ended connection may be used again: no old packet can reach it. All "
        "is well.",
    ),
)

HARMLESS = frozenset(
    {
        "ADDR_RESOLVED",
        "ROUTE_RESOLVED",
        "CONNECT_REQUEST",
        "CONNECT_RESPONSE",
        "ESTABLISHED",
        "MULTICAST_JOIN",
        "TIMEWAIT_EXIT",
    }
)
"""Events that report progress, not failures."""

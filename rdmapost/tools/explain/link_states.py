"""Explanations of the states of ports, and of path migration."""

from __future__ import annotations

from functools import partial

from ...enums import MigState, PortState
from .model import explanation_of

_port = partial(explanation_of, see=("ibv_query_port(3)", "ibv_devinfo(1)", "rdma-link(8)"))

PORT_STATES = (
    _port(
        PortState.NOP,
        "The device does not report the state of the port.",
        "The link itself: ip link (RoCE), ibstat (InfiniBand).",
    ),
    _port(
        PortState.DOWN,
        "The port has no link, and carries no traffic. Posts are accepted, and fail with "
        "RETRY_EXC_ERR on RC.",
        "phys_state in ibv_devinfo: Polling means that there is no cable or no link partner.",
        "RoCE: ip link show of its network device; ip link set NAME up.",
        "A second port of the same device, which may have the link: rdmapost devices.",
        causes=(
            "The network device is down (RoCE).",
            "No cable, a broken one, or the switch port is disabled.",
            "The port and the switch have different link types: InfiniBand and Ethernet.",
        ),
        soft_roce="The state follows the network device that rxe runs on.",
    ),
    _port(
        PortState.INIT,
        "The link is up, and the port has no address (LID) yet. It carries management packets "
        "only.",
        "Whether a subnet manager runs on this fabric: sminfo; systemctl status opensm.",
        causes=("No subnet manager runs, or it has not reached this port yet.",),
    ),
    _port(
        PortState.ARMED,
        "The subnet manager has configured the port, and has yet to activate it.",
        "The log of the subnet manager, if this lasts for more than a moment.",
        causes=("The subnet manager is still at work, or was stopped halfway.",),
    ),
    _port(
        PortState.ACTIVE,
        "The port is up, and carries traffic. Connecting and posting need this state.",
        "phys_state is LinkUp too; the rate and width are those that you expect: rdmapost "
        "devices -v.",
    ),
    _port(
        PortState.ACTIVE_DEFER,
        "The port was active and lost its link a moment ago. It goes back to ACTIVE if the "
        "link returns in time, and to DOWN otherwise.",
        "The error counters of the link: perfquery, ethtool -S.",
        causes=("A bad cable or transceiver.",),
    ),
)

_migration = partial(
    explanation_of, see=("ibv_modify_qp(3): path_mig_state", "IBA vol. 1, 17.2.8 (path migration)")
)

MIGRATION_STATES = (
    _migration(
        MigState.MIGRATED,
        "The queue pair uses the only path it has, or has migrated to the alternate path. This is "
        "the initial state.",
        "To prepare the next migration: qp.modify() with alt_ah_attr and path_mig_state=REARM.",
        causes=("No alternate path is set.", "The path failed, or you set this state."),
        soft_roce="rxe has no path migration: this is always the state.",
    ),
    _migration(
        MigState.REARM,
        "An alternate path has been loaded; the queue pair waits until its peer is in REARM too, "
        "and then goes to ARMED by itself.",
        "path_mig_state at the peer: both sides must set REARM.",
        causes=("You set it with a new alternate path.",),
    ),
    _migration(
        MigState.ARMED,
        "Ready to migrate: if the path fails, the device moves to the alternate path.",
        "The events PATH_MIG and PATH_MIG_ERR: whether it has migrated.",
        causes=("Both sides have set REARM.",),
    ),
)

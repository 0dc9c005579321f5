"""Multicast groups that a queue pair is attached to."""

from __future__ import annotations

import contextlib
import errno

from ._arguments import within
from .device import GID
from .enums import QPType
from .errors import RdmaError, VerbsError
from .steps import Steps

__all__ = ["Multicast"]


class Multicast(Steps):
    """What a queue pair has for multicast."""

    __slots__ = ("_groups",)

    _groups: dict[tuple[GID, int], bool]
    """Every group that it was ever attached to, and whether it still is: for messages, and to leave
    them.

    Between a verb and this record of it, another thread may do the opposite. So only the device
    knows what it is attached to, and no group is ever removed.
    """

    def attach_mcast(self, gid: GID | bytes | str, lid: int = 0) -> None:
        """Also receive what is sent to a multicast group (UD).

        A message to the group has ``remote_qpn=MULTICAST_QPN``, the Q_Key of the
        receivers, and an AH with the group as dgid (and its LID as dlid).  Each
        queue pair that is attached gets one copy, however often it was attached.
        On a network the port must also have joined the group, on InfiniBand
        through the subnet administrator.  Closing the queue pair detaches it.

        Args:
            gid: the group: in ff00::/8, or an IPv4 one such as "::ffff:239.1.2.3".
            lid: its LID on InfiniBand; 0 on Ethernet.

        Raises:
            TypeError: gid is of another type, or lid is not an integer.
            ValueError: it is no multicast GID, or lid is not in 0..65535.
            RdmaError: the queue pair is not of type UD.
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_attach_mcast(3).
        """
        group = self._group(gid, lid)
        # Before the call, which an interrupt may cut short.
        self._groups.setdefault(group, False)
        try:
            self._verb(self.pd.context._provider.attach_mcast, *group)
        except VerbsError as error:
            error.hint = error.hint or self._why_not_attached(error.errno)
            raise
        self._groups[group] = True

    def detach_mcast(self, gid: GID | bytes | str, lid: int = 0) -> None:
        """Stop receiving what is sent to a multicast group.

        Args:
            gid, lid: as passed to attach_mcast.

        Raises:
            RdmaError: the queue pair is not attached to the group.
            TypeError: gid is of another type, or lid is not an integer.
            ValueError: it is no multicast GID, or lid is not in 0..65535.
            ClosedError: the QP is closed.
            VerbsError: the device refused.
        """
        group = self._group(gid, lid)
        try:
            self._detach(*group)
        except VerbsError:
            if self._groups.get(group):
                raise
            attached = ", ".join(
                sorted(f"{gid} (lid {lid})" for (gid, lid), on in self._groups.copy().items() if on)
            )
            raise RdmaError(
                f"{self} is not attached to {group[0]} (lid {lid}), but to "
                f"{attached or 'no multicast group'}"
            ) from None

    def _detach(self, gid: GID, lid: int) -> None:
        self._verb(self.pd.context._provider.detach_mcast, gid, lid)
        self._groups[gid, lid] = False

    def _leave_groups(self) -> None:
        """Detach from every group: a queue pair that is attached cannot be destroyed."""
        for group in self._groups.copy():
            # Either it is not attached, or destroying the queue pair will say why.
            with contextlib.suppress(VerbsError):
                self._detach(*group)

    def _group(self, gid: GID | bytes | str, lid: int) -> tuple[GID, int]:
        if self.qp_type is not QPType.UD:
            raise RdmaError(f"{self} has no multicast; UD queue pairs have it")
        group = GID._named("gid", gid)
        if not group.is_multicast:
            raise ValueError(
                f"gid: {group} is no multicast GID such as ff0e::1 (ff00::/8) or "
                "::ffff:239.1.2.3 (::ffff:224.0.0.0/100)"
            )
        return group, within("lid", lid, 0, 0xFFFF)

    def _why_not_attached(self, code: int | None) -> str:
        attr, name = self.pd.context.attr, self.pd.context.name
        if not attr.max_mcast_grp:
            return f"{name} has no multicast"
        if code == errno.ENOMEM:
            return (
                f"{name} has at most {attr.max_mcast_grp} groups (max_mcast_grp), with "
                f"{attr.max_mcast_qp_attach} queue pairs each (max_mcast_qp_attach)"
            )
        return f"{name} does not take this GID and LID; on InfiniBand a group has a LID"

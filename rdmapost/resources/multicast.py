"""Multicast groups that a queue pair is attached to."""

from __future__ import annotations

import contextlib
import errno
import itertools

from .._arguments import within
from ..enums import QPType
from ..errors import RdmaError, VerbsError
from .device import GID
from .qp_transitions import Steps

__all__ = ["Multicast"]

_numbers = itertools.count()


class Multicast(Steps):
    """What a queue pair has for multicast."""

    __slots__ = ("_groups",)

    _groups: dict[int, tuple[tuple[GID, int], bool | None]]
    """The groups that it is or may be attached to, by the number of the call that attached it.

    The second item is True once the call has returned, False where it was interrupted, and None
    while it runs.  Between a verb and the note of it another thread may do the opposite, so a call
    takes out only what had come to an end before its verb began: the verb came after those.
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
            ValueError: it is not a multicast GID, or lid is not in 0..65535.
            RdmaError: the queue pair is not of type UD.
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_attach_mcast(3).
        """
        group = self._group(gid, lid)
        before = self._noted(group)
        number = next(_numbers)
        # Before the call, which an interrupt may end.
        self._groups[number] = group, None
        try:
            self._verb(self.pd.context._provider.attach_mcast, *group)
        except RdmaError as error:
            self._groups.pop(number, None)
            if isinstance(error, VerbsError):
                error.hint = error.hint or self._why_not_attached(error.errno)
            raise
        except BaseException:
            self._groups[number] = group, False
            raise
        self._groups[number] = group, True
        self._take_out(before)

    def detach_mcast(self, gid: GID | bytes | str, lid: int = 0) -> None:
        """Stop receiving what is sent to a multicast group.

        Args:
            gid, lid: as passed to attach_mcast.

        Raises:
            RdmaError: the queue pair is not attached to the group.
            TypeError: gid is of another type, or lid is not an integer.
            ValueError: it is not a multicast GID, or lid is not in 0..65535.
            ClosedError: the QP is closed.
            VerbsError: the device refused.
        """
        group = self._group(gid, lid)
        try:
            self._detach(*group)
        except VerbsError:
            attached = {noted for noted, on in self._groups.copy().values() if on}
            if group in attached:
                raise
            named = ", ".join(sorted(f"{gid} (lid {lid})" for gid, lid in attached))
            raise RdmaError(
                f"{self} is not attached to {group[0]} (lid {lid})"
                + (f", but to {named}" if named else "")
            ) from None

    def _detach(self, gid: GID, lid: int) -> None:
        before = self._noted((gid, lid))
        self._verb(self.pd.context._provider.detach_mcast, gid, lid)
        self._take_out(before)

    def _noted(self, group: tuple[GID, int]) -> list[int]:
        """Return the numbers of the calls that have attached it to a group, and have ended."""
        notes = self._groups.copy().items()
        return [number for number, (noted, on) in notes if on is not None and noted == group]

    def _take_out(self, numbers: list[int]) -> None:
        for number in numbers:
            self._groups.pop(number, None)

    def _leave_groups(self) -> None:
        """Detach from every group: a queue pair that is attached cannot be destroyed."""
        for group in {noted for noted, _ in self._groups.copy().values()}:
            # Where it is not attached; else the destruction says why not.
            with contextlib.suppress(VerbsError):
                self._detach(*group)

    def _group(self, gid: GID | bytes | str, lid: int) -> tuple[GID, int]:
        if self.qp_type is not QPType.UD:
            raise RdmaError(f"{self} has no multicast; UD queue pairs have it")
        group = GID._named("gid", gid)
        if not group.is_multicast:
            raise ValueError(
                f"gid: {group} is not a multicast GID such as ff0e::1 (ff00::/8) or "
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

"""What a ping-pong measured."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from .handshake import Address


@dataclass(frozen=True, slots=True)
class Latency:
    """How long round trips took, in microseconds.

    Attributes:
        min, max: the shortest and the longest.
        p50, p90, p99, p99_9: percentiles of the round-trip time.
    """

    min: float
    p50: float
    p90: float
    p99: float
    p99_9: float
    max: float

    @classmethod
    def of(cls, nanoseconds: array[int]) -> Latency:
        """Return the percentiles (nearest rank) of times.

        Args:
            nanoseconds: the times; at least one.
        """
        ordered = sorted(nanoseconds)

        def rank(per_mille: int) -> float:
            return ordered[max(0, -(-len(ordered) * per_mille // 1000) - 1)] / 1000

        return cls(*map(rank, (0, 500, 900, 990, 999, 1000)))


@dataclass(frozen=True, slots=True)
class Result:
    """What a ping-pong measured.

    A round trip lasts from posting a message until the receive of the peer's next
    message completes.  The server has one round trip fewer than messages, because its
    last message is not answered.  Round trips in which progress was reported are left out.

    Attributes:
        role: "client" or "server".
        peer: the peer's TCP address.
        local, remote: the addresses of the queue pairs.
        size: bytes per message.
        iters: messages each way.
        round_trips: how many were measured.
        seconds: how long all of these took, including the time between messages.
        latency: how long each of these took; None if there are none.
        validated: whether the data was compared, and correct.
    """

    role: str
    peer: str
    local: Address
    remote: Address
    size: int
    iters: int
    round_trips: int
    seconds: float
    latency: Latency | None
    validated: bool

    @property
    def messages_per_second(self) -> float:
        """Messages per second, in both directions."""
        return 2 * self.round_trips / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Message bytes per second, the sum of both directions, as ibv_rc_pingpong counts them."""
        return self.messages_per_second * self.size

    @property
    def usec_per_iter(self) -> float:
        """Microseconds from one message to the next, as ibv_rc_pingpong counts them."""
        return self.seconds * 1e6 / self.round_trips if self.round_trips else 0.0

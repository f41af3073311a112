"""Network link between draft and target, used by predictions and by the relay that emulates it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from swiftspec.errors import UserError, truncated_repr

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
MAX_ROUND_TRIP_S = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class Link:
    """A link with equal delay and bandwidth in both directions."""

    round_trip: float  # seconds, for an empty message
    bandwidth: float = math.inf  # bytes per second

    @staticmethod
    def parse(text: str) -> Link:
        """Parses `40ms,1Gbit`: the round trip and, optionally, the bandwidth. Raises UserError."""
        trip, comma, rate = text.partition(",")
        delay = re.fullmatch(NUMBER + "(us|ms|s)", trip.strip())
        speed = re.fullmatch(NUMBER + "(kbit|Mbit|Gbit)", rate.strip()) if comma else None
        round_trip = float(delay[1]) * SECONDS[delay[2]] if delay else math.inf
        bandwidth = float(speed[1]) * BITS[speed[2].lower()] / 8 if speed else 0.0 if comma else math.inf
        if round_trip > MAX_ROUND_TRIP_S or bandwidth <= 0:
            raise UserError(
                f"--link {truncated_repr(text)}: write a round trip of at most {MAX_ROUND_TRIP_S:g} s and,"
                " if you like, a bandwidth,"
                " such as 40ms or 40ms,1Gbit"
            )
        return Link(round_trip, bandwidth)

    def one_way(self, size: int) -> float:
        """Returns the seconds until a message of `size` bytes has arrived."""
        return self.round_trip / 2 + size / self.bandwidth

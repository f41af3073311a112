"""Model of a network link, for predictions and for the relay that makes a local connection as slow as that link."""

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
    """Network link with the same delay and bandwidth in both directions."""

    round_trip: float  # seconds, for an empty message
    bandwidth: float = math.inf  # bytes per second

    @staticmethod
    def parse(text: str) -> Link:
        """Parses text such as `40ms,1Gbit`: the round trip and, optionally, the bandwidth (default: unlimited).

        Raises UserError if the text has another form or the round trip exceeds MAX_ROUND_TRIP_S.
        """
        trip, comma, rate = text.partition(",")
        delay = re.fullmatch(NUMBER + "(us|ms|s)", trip.strip())
        speed = re.fullmatch(NUMBER + "(kbit|Mbit|Gbit)", rate.strip()) if comma else None
        round_trip = float(delay[1]) * SECONDS[delay[2]] if delay else math.inf
        bandwidth = float(speed[1]) * BITS[speed[2].lower()] / 8 if speed else 0.0 if comma else math.inf
        if round_trip > MAX_ROUND_TRIP_S or bandwidth <= 0:
            raise UserError(
                f"--link {truncated_repr(text)}: expected a round trip of at most {MAX_ROUND_TRIP_S:g} s and,"
                " optionally, a bandwidth, such as 40ms or 40ms,1Gbit"
            )
        return Link(round_trip, bandwidth)

    def one_way(self, size: int) -> float:
        """Returns the seconds between sending a message of `size` bytes and its arrival."""
        return self.round_trip / 2 + size / self.bandwidth

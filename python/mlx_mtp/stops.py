"""Stop strings: text that ends a stream and is not shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a growing text in front of the first stop string.

    What may still become a stop string is held back until it is known.

    Args:
        stops: One string or more, none of them empty.

    Raises:
        ValueError: A string is empty.
        TypeError: One is not a string.
    """

    def __init__(self, stops: str | Sequence[str]):
        self.stops = [stops] if isinstance(stops, str) else list(stops)
        for stop in self.stops:
            if not isinstance(stop, str):
                raise TypeError(f"stop must hold strings but has {stop!r}.")
            if not stop:
                raise ValueError("stop must not hold an empty string.")
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes more text: what may be shown now, and whether a stop was met.

        Of stops that are met together the one that begins first counts.
        """
        self._held += text
        found = [i for stop in self.stops if (i := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        size = len(self._held)
        waits = max((self._overlap(stop) for stop in self.stops), default=0)
        shown, self._held = self._held[: size - waits], self._held[size - waits :]
        return shown, False

    def finish(self) -> str:
        """What was held back and will not become a stop string any more."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """How much of the end may be the beginning of ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next(
            (n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0
        )

"""What the adapters have in common: the protocol, positions and small helpers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

Leaves = Any  # a tree of arrays: a tuple, or a list with one entry a part of a cache


class UnsupportedCache(ValueError):
    """A prompt cache that cannot be rolled back. Raised before anything is written."""


@dataclass(frozen=True)
class Position:
    """Where a round writes: arrays ``(B,)`` when traced, ``offset`` an int when not.

    Args:
        offset (array or int): Tokens in the cache.
        steps (array): Rows of the previous round that were kept.
        attended (int): Static length of the cache prefix that attention reads.
    """

    offset: mx.array | int
    steps: mx.array
    attended: int
    _windows: dict[int, mx.array] = field(default_factory=dict, repr=False)

    def window(self, size: int) -> mx.array:
        """Which of the ``size`` rows in front of the previous round and its own are the
        newest ``size`` that were kept, ``(B, size, 1)``; one array for all layers."""
        if size not in self._windows:
            rows = self.steps[:, None] + mx.arange(size)
            self._windows[size] = rows[..., None]
        return self._windows[size]


class Adapter(Protocol):
    """Maps one class of cache to leaves and back. Equal ones do the same.

    Attributes:
        cache_class: The name of that class.
        versions: How many of its leaves, from different rounds, there are at once.
        joint (optional): Whether new prompts of unlike lengths can be read together, by
            ``set_lengths`` and ``take_row``.
    """

    cache_class: str
    versions: int

    def adopt(self, cache: Any, width: int, capacity: int) -> Leaves:
        """The arrays of ``cache``, which is to be cleared then.

        ``width`` is the rows of a round, ``capacity`` the tokens to make room for.
        """

    def clear(self, cache: Any) -> None:
        """Leaves ``cache`` empty while a stream has its arrays."""

    def view(self, leaves: Leaves, position: Position) -> Any:
        """What the model gets as its cache for one forward."""

    def collect(self, view: Any) -> Leaves:
        """The leaves after that forward."""

    def grow(self, leaves: Leaves, capacity: int) -> Leaves:
        """The same contents with room for ``capacity`` tokens."""

    def replayable(self, leaves: Leaves) -> Leaves | None:
        """What ``release`` needs of a round once the next one has been submitted.

        ``None`` if the newest leaves will do. To keep other leaves would make the
        next round copy them.
        """

    def release(self, cache: Any, leaves: Leaves, length: int, steps: mx.array) -> None:
        """Puts ``length`` tokens back into ``cache``, ``steps`` of the last round."""

    def arrays(self, cache: Any) -> Leaves:
        """The arrays of ``cache``."""

    def mark(self, cache: Any) -> Any:
        """What ``rewind`` needs to bring ``cache`` back to what it holds now."""

    def rewind(self, cache: Any, mark: Any) -> None:
        """Brings ``cache`` back to an earlier point of what it holds."""

    def mark_step(self, cache: Any) -> Any:
        """As ``mark``, but good for one token only, and it never costs a copy."""

    def rewind_step(self, cache: Any, mark: Any) -> None:
        """Brings ``cache`` back over at most one token."""

    def set_lengths(self, cache: Any, lengths: Sequence[int]) -> None:
        """Says how many tokens of each row are no padding, in front of the one forward
        through an empty ``cache``."""

    def take_row(self, cache: Any, row: int, length: int, into: Any) -> None:
        """Copies the first ``length`` tokens of a row of that ``cache``."""


def pad(x: mx.array, size: int, axis: int) -> mx.array:
    """``x`` with zeros behind it up to ``size`` along ``axis``."""
    if x.shape[axis] >= size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return mx.pad(x, widths)

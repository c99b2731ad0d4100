"""Where the next token is, if that is not where its cache slot is."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .recurrent import ArraysAdapter


@dataclass
class DeltaView:
    """The positions of a forward are its slots plus ``delta`` ``(B,)``."""

    delta: mx.array


@dataclass(frozen=True)
class DeltaAdapter(ArraysAdapter):
    """The distance from slots to positions, an ``ArraysCache`` of one entry.

    An image takes fewer positions than slots. Leaves: the distance, ``(B,)`` int32,
    which no round changes.
    """

    versions = 1

    def adopt(self, cache, width, capacity):
        return (cache[0],)

    def view(self, leaves, position):
        return DeltaView(*leaves)

    def collect(self, view):
        return (view.delta,)

    def replayable(self, leaves):
        return None

    def release(self, cache, leaves, length, steps):
        cache[0] = leaves[0]

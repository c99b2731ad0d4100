"""Caches made of caches."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Adapter


class ListView:
    """The views of the parts of a ``CacheList``."""

    def __init__(self, views):
        self.caches = views

    def __getitem__(self, i):
        return self.caches[i]


@dataclass(frozen=True)
class ListAdapter:
    """One adapter a part. Leaves: a list of theirs."""

    parts: tuple[Adapter, ...]
    cache_class = "CacheList"

    @property
    def versions(self):
        return max(part.versions for part in self.parts)

    def adopt(self, cache, width, capacity):
        return [a.adopt(c, width, capacity) for a, c in self._pairs(cache.caches)]

    def clear(self, cache):
        for adapter, part in self._pairs(cache.caches):
            adapter.clear(part)

    def view(self, leaves, position):
        return ListView([a.view(x, position) for a, x in self._pairs(leaves)])

    def collect(self, view):
        return [a.collect(v) for a, v in self._pairs(view.caches)]

    def grow(self, leaves, capacity):
        return [a.grow(x, capacity) for a, x in self._pairs(leaves)]

    def replayable(self, leaves):
        return [a.replayable(x) for a, x in self._pairs(leaves)]

    def release(self, cache, leaves, length, steps):
        for (adapter, part), x in zip(self._pairs(cache.caches), leaves, strict=True):
            adapter.release(part, x, length, steps)

    def arrays(self, cache):
        return [a.arrays(c) for a, c in self._pairs(cache.caches)]

    def mark(self, cache):
        return [a.mark(c) for a, c in self._pairs(cache.caches)]

    def rewind(self, cache, mark):
        for (adapter, part), m in zip(self._pairs(cache.caches), mark, strict=True):
            adapter.rewind(part, m)

    def mark_step(self, cache):
        return [a.mark_step(c) for a, c in self._pairs(cache.caches)]

    def rewind_step(self, cache, mark):
        for (adapter, part), m in zip(self._pairs(cache.caches), mark, strict=True):
            adapter.rewind_step(part, m)

    def _pairs(self, others):
        return zip(self.parts, others, strict=True)


def newest(behind, leaves):
    """What ``replayable`` kept of a round, and the newest leaves of the rest."""
    if behind is None:
        return leaves
    if isinstance(behind, list):
        return [newest(b, x) for b, x in zip(behind, leaves, strict=True)]
    return behind

"""Sliding and chunked windows: keys and values in a ring."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ..ops import commit_rows
from .base import pad
from .kv import KVAdapter, KVView


class RotatingView(KVView):
    """A ring of keys and values ``(B, H, ring + keep, D)``, as ``RotatingKVCache``.

    Position p is in slot ``p % ring``; the first ``keep`` positions, which stay in the
    window for ever, are also behind the ring.
    """

    def __init__(self, keys, values, offset, attended, window, keep):
        super().__init__(keys, values, offset, attended)
        self.window, self.keep = window, keep
        self.ring = keys.shape[2] - keep

    @property
    def wraps(self) -> bool:
        """Whether positions may have gone past the end of the ring."""
        return self.attended >= self.ring

    def update_and_fetch(self, keys, values):
        start, count = self._span(keys)
        self.keys = self._write(self.keys, keys, start, count)
        self.values = self._write(self.values, values, start, count)
        return self.fetch()

    def fetch(self):
        return self.prefix(self.keys.shape[2] if self.wraps else self.attended)

    def _write(self, x, rows, start, count):
        x = commit_rows(x, rows, start, count, ring=self.ring)
        if self.keep:
            x = commit_rows(
                x, rows, self.ring + start, mx.minimum(count, self.keep - start)
            )
        return x

    def make_mask(self, width, return_array=False, window_size=None):
        rows = self._rows(width)
        slots = mx.arange(self.ring if self.wraps else self.attended)
        window = self.window if window_size is None else min(window_size, self.window)
        if not self.wraps:
            return (slots <= rows) & ((rows < slots + window) | (slots < self.keep))
        last = rows[..., -1:, :]
        held = last - (last - slots) % self.ring
        seen = (held >= self.keep) & (held <= rows) & (rows < held + window)
        if self.keep:
            seen = mx.concatenate([seen, mx.arange(self.keep) <= rows], axis=-1)
        return seen


@dataclass(frozen=True)
class RotatingAdapter(KVAdapter):
    """Keys and values of a sliding window. Leaves: as in ``RotatingView``.

    The ring is longer than the window by what two rounds write, so that whatever the
    host decides to keep of them, no row that is still needed has been overwritten.

    Args:
        window: Positions that a row sees, itself included, beside those kept.
        keep: Positions at the front that every row sees.
        width: Rows of a round.
    """

    window: int
    keep: int
    width: int
    cache_class = "RotatingKVCache"
    versions = 2  # put in order, in a copy

    @classmethod
    def of(cls, cache, width):
        return cls(cache.max_size - cache.keep, cache.keep, width)

    @property
    def joint(self):
        return not self.keep  # or a prompt depends on how it is cut

    def adopt(self, cache, width, capacity):
        return tuple(
            self._spread(cache._temporal_order(x), cache.offset, capacity)
            for x in (cache.keys, cache.values)
        )

    def clear(self, cache):
        cache.keys, cache.values, cache.offset, cache._idx = None, None, 0, 0

    def _slots(self, capacity: int) -> int:
        return min(capacity, self.window + 2 * self.width - 1)

    def _spread(self, x, offset: int, capacity: int):
        """Rows in order of time, up to position ``offset``, to their slots."""
        ring, held = self._slots(capacity), x.shape[2]
        start = self.keep if held < offset else 0
        newest = x[:, :, max(start, held - ring) :]
        slots = mx.roll(pad(newest, ring, axis=2), offset - newest.shape[2], axis=2)
        return mx.concatenate([slots, pad(x[:, :, : self.keep], self.keep, 2)], axis=2)

    def view(self, leaves, position):
        return RotatingView(
            *leaves, position.offset, position.attended, self.window, self.keep
        )

    def grow(self, leaves, capacity):
        ring = leaves[0].shape[2] - self.keep
        if self._slots(capacity) <= ring:
            return leaves
        return tuple(
            mx.concatenate(
                [pad(x[:, :, :ring], self._slots(capacity), 2), x[:, :, ring:]], axis=2
            )
            for x in leaves
        )

    def release(self, cache, leaves, length, steps):
        ring = leaves[0].shape[2] - self.keep
        kept = mx.arange(ring, ring + min(self.keep, length))
        newest = mx.arange(max(length - self.window, self.keep), length) % ring
        places = mx.concatenate([kept, newest])
        cache.keys, cache.values = (mx.take(x, places, axis=2) for x in leaves)
        cache.offset, cache._idx = length, places.size

    def mark(self, cache):
        # A later write into these slots must not reach the mark.
        return tuple(x if not isinstance(x, mx.array) else x[:] for x in cache.state)

    def take_row(self, cache, row, length, into):
        super().take_row(cache, row, length, into)
        into._idx = length

    def mark_step(self, cache):
        return cache.offset

    def rewind_step(self, cache, mark):
        # What one more row has overwritten is out of the window of the row after.
        cache.trim(cache.offset - mark)

    def rewind(self, cache, mark):
        cache.state = [x if not isinstance(x, mx.array) else x[:] for x in mark]


class ChunkedView(RotatingView):
    """As ``ChunkedKVCache``: the model itself masks by positions, on the host."""

    @property
    def start_position(self) -> int:
        return max(self.offset - self.window, 0)

    def maybe_trim_front(self):
        """Nothing to do: older rows are left out of what is fetched."""

    def update_and_fetch(self, keys, values):
        if not isinstance(self.offset, int):
            raise ValueError("a chunked cache needs its offset on the host")
        positions = mx.arange(self.start_position, self.offset + keys.shape[2])
        super().update_and_fetch(keys, values)
        places = positions % self.ring
        return mx.take(self.keys, places, axis=2), mx.take(self.values, places, axis=2)


@dataclass(frozen=True)
class ChunkedAdapter(RotatingAdapter):
    """Keys and values of the newest chunk. Leaves: as in ``RotatingView``."""

    cache_class = "ChunkedKVCache"
    joint = False

    @classmethod
    def of(cls, cache, width):
        return cls(cache.chunk_size, 0, width)

    def adopt(self, cache, width, capacity):
        held = cache.offset - cache.start_position
        return tuple(
            self._spread(x[:, :, :held], cache.offset, capacity)
            for x in (cache.keys, cache.values)
        )

    def clear(self, cache):
        cache.keys, cache.values = None, None
        cache.offset, cache.start_position = 0, 0

    def view(self, leaves, position):
        return ChunkedView(*leaves, position.offset, position.attended, self.window, 0)

    def release(self, cache, leaves, length, steps):
        start = max(length - self.window, 0)
        places = mx.arange(start, length) % leaves[0].shape[2]
        cache.keys, cache.values = (mx.take(x, places, axis=2) for x in leaves)
        cache.offset, cache.start_position = length, start


@dataclass(frozen=True)
class BatchRotatingAdapter(RotatingAdapter):
    """As ``RotatingAdapter``, for a batch cache of one row, padded on the left."""

    cache_class = "BatchRotatingKVCache"
    joint = False

    @classmethod
    def of(cls, cache, width):
        return cls(cache.max_size, 0, width)

    def adopt(self, cache, width, capacity):
        return super().adopt(cache.extract(0), width, capacity)

    def clear(self, cache):
        cache.keys, cache.values, cache._idx, cache._offset = None, None, 0, 0

    def arrays(self, cache):
        return cache.keys, cache.values, cache.offset, cache.left_padding

    def mark_step(self, cache):
        return cache._offset

    def rewind_step(self, cache, mark):
        cache.trim(cache._offset - mark)

    def release(self, cache, leaves, length, steps):
        super().release(cache, leaves, length, steps)
        cache.offset, cache.left_padding = mx.array([length]), mx.array([0])
        cache._offset, cache.rotated = cache._idx, False

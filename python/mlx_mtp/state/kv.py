"""Append-only keys and values: plain, concatenated and quantised."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ..ops import commit_rows
from .base import pad


class KVView:
    """Keys and values ``(B, H, S, D)`` written at a device offset.

    Behaves like ``mlx_lm``'s KVCache towards a model. Rows at and behind
    ``offset + T`` are masked, so what they hold does not matter.
    """

    def __init__(self, keys, values, offset, attended):
        self.keys, self.values = keys, values
        self.offset, self.attended = offset, attended

    @property
    def batch(self) -> int:
        return self.keys.shape[0]

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        start, count = self._span(keys)
        self.keys = commit_rows(self.keys, keys, start, count)
        self.values = commit_rows(self.values, values, start, count)
        return self.fetch()

    def fetch(self):
        """The slots that attention reads."""
        return self.prefix(self.attended)

    def read(self, window_size=None):
        """What a row that writes nothing sees: keys, values and a mask of the rows up
        to ``offset``, the newest ``window_size`` of them."""
        return *self.fetch(), self.make_mask(1, window_size=window_size)

    def attend(self, q, k, v, scale: float) -> mx.array:
        """Writes T rows and attends to them and all before: ``(B, heads, T, D)``."""
        mask = self.make_mask(k.shape[2])
        k, v = self.update_and_fetch(k, v)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    def prefix(self, length: int):
        """The first ``length`` slots as views."""
        return self.keys[:, :, :length], self.values[:, :, :length]

    def make_mask(self, width: int, return_array=False, window_size=None):
        slots, rows = mx.arange(self.attended), self._rows(width)
        mask = slots <= rows
        if window_size is not None:
            mask = mask & (rows < slots + window_size)
        return mask

    def _span(self, rows: mx.array):
        """Where these rows begin and how many they are, ``(B,)`` both."""
        batch, _, width, _ = rows.shape
        start = self.offset
        if isinstance(start, int):
            start = mx.full((batch,), start, mx.int32)
        return start, mx.full((batch,), width, mx.int32)

    def _rows(self, width: int) -> mx.array:
        """The positions of the next rows, ``(T, 1)`` or ``(B, 1, T, 1)``."""
        rows = mx.arange(width)[:, None]
        if isinstance(self.offset, int):
            return rows + self.offset
        return rows + self.offset[:, None, None, None]


@dataclass(frozen=True)
class KVAdapter:
    """Leaves: keys, values ``(B, H, S, D)``."""

    cache_class = "KVCache"
    versions = 1  # written in place
    joint = True

    @classmethod
    def of(cls, cache, width):
        """The adapter of this cache, for rounds of ``width`` rows."""
        return cls()

    def adopt(self, cache, width, capacity):
        return self.grow((cache.keys, cache.values), capacity)

    def clear(self, cache):
        cache.keys, cache.values, cache.offset = None, None, 0

    def view(self, leaves, position):
        return KVView(*leaves, position.offset, position.attended)

    def collect(self, view):
        return view.keys, view.values

    def grow(self, leaves, capacity):
        return tuple(pad(x, capacity, axis=2) for x in leaves)

    def replayable(self, leaves):
        return None  # rows behind the length do not matter

    def release(self, cache, leaves, length, steps):
        cache.keys, cache.values = leaves
        cache.offset = length

    def arrays(self, cache):
        return cache.keys, cache.values

    def mark(self, cache):
        return cache.offset

    def rewind(self, cache, mark):
        cache.offset = mark

    def mark_step(self, cache):
        return self.mark(cache)

    def rewind_step(self, cache, mark):
        self.rewind(cache, mark)

    def set_lengths(self, cache, lengths):
        """Padding is behind a prompt, where no row of it attends to."""

    def take_row(self, cache, row, length, into):
        into.keys, into.values = (
            mx.contiguous(x[row : row + 1, :, :length])
            for x in (cache.keys, cache.values)
        )
        into.offset = length


@dataclass(frozen=True)
class ConcatenateAdapter(KVAdapter):
    """As ``KVAdapter``, for the cache that holds no spare slots."""

    cache_class = "ConcatenateKVCache"

    def release(self, cache, leaves, length, steps):
        super().release(cache, [x[:, :, :length] for x in leaves], length, steps)

    def mark(self, cache):
        return cache.keys, cache.values, cache.offset

    def rewind(self, cache, mark):
        cache.keys, cache.values, cache.offset = mark


class QuantizedView(KVView):
    """Keys and values as packed weights, scales and biases.

    ``bits`` and ``group_size`` make ``mlx_lm`` attend to them as such.
    """

    def __init__(self, keys, values, offset, attended, group_size, bits):
        super().__init__(keys, values, offset, attended)
        self.group_size, self.bits = group_size, bits

    @property
    def batch(self):
        return self.keys[0].shape[0]

    def update_and_fetch(self, keys, values):
        start, count = self._span(keys)
        self.keys = self._write(self.keys, keys, start, count)
        self.values = self._write(self.values, values, start, count)
        return self.fetch()

    def read(self, window_size=None):
        *packed, mask = super().read(window_size)
        keys, values = (
            mx.dequantize(*parts, group_size=self.group_size, bits=self.bits)
            for parts in packed
        )
        return keys, values, mask

    def prefix(self, length):
        return tuple(
            tuple(x[:, :, :length] for x in parts) for parts in (self.keys, self.values)
        )

    def _write(self, parts, rows, start, count):
        rows = mx.quantize(rows, group_size=self.group_size, bits=self.bits)
        return tuple(
            commit_rows(x, new, start, count)
            for x, new in zip(parts, rows, strict=True)
        )


@dataclass(frozen=True)
class QuantizedAdapter(KVAdapter):
    """Leaves: packed weights, scales and biases of the keys, then of the values."""

    group_size: int
    bits: int
    cache_class = "QuantizedKVCache"
    joint = False

    @classmethod
    def of(cls, cache, width):
        return cls(cache.group_size, cache.bits)

    def adopt(self, cache, width, capacity):
        return self.grow((*cache.keys, *cache.values), capacity)

    def view(self, leaves, position):
        return QuantizedView(
            leaves[:3],
            leaves[3:],
            position.offset,
            position.attended,
            self.group_size,
            self.bits,
        )

    def collect(self, view):
        return *view.keys, *view.values

    def release(self, cache, leaves, length, steps):
        cache.keys, cache.values, cache.offset = leaves[:3], leaves[3:], length


@dataclass(frozen=True)
class BatchAdapter(KVAdapter):
    """As ``KVAdapter``, for a batch cache of one row, padded on the left."""

    cache_class = "BatchKVCache"
    joint = False

    def adopt(self, cache, width, capacity):
        rows = slice(cache.left_padding.item(), cache._idx)
        leaves = (cache.keys[:, :, rows], cache.values[:, :, rows])
        return self.grow(leaves, capacity)

    def clear(self, cache):
        cache.keys, cache.values, cache._idx = None, None, 0

    def arrays(self, cache):
        return cache.keys, cache.values, cache.offset, cache.left_padding

    def release(self, cache, leaves, length, steps):
        cache.keys, cache.values = leaves
        cache._idx = length
        cache.offset, cache.left_padding = mx.array([length]), mx.array([0])

    def mark(self, cache):
        padding = cache.left_padding.item()
        return cache._idx - padding, padding

    def rewind(self, cache, mark):
        length, padding = mark
        if length < 0:  # some padding is still to come
            cache.left_padding = mx.array([padding])
        else:  # a stream moves the rows to where the padding was
            padding = cache.left_padding.item()
        cache._idx, cache.offset = padding + length, mx.array([length])

"""Device state of a stream: adopt a user's caches, give them back exact.

A round must not know on the host how many drafts were accepted. So every cache
becomes a tuple of arrays (its leaves) that a round maps to new leaves from device
offsets alone, and the model sees a view of them that behaves like its own cache.
One adapter a cache class; caches are recognised by class name, so that this module
does not import the package that defines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from .ops import commit_rows, gated_delta_replay

Leaves = tuple[mx.array, ...]


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


class Adapter(Protocol):
    """Maps one class of cache to leaves and back.

    Attributes:
        cache_class: The name of that class.
    """

    cache_class: str

    def adopt(self, cache: Any, width: int, capacity: int) -> Leaves:
        """Takes the arrays out of ``cache``, which is left empty."""

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
        batch, _, width, _ = keys.shape
        start = self.offset
        if isinstance(start, int):
            start = mx.full((batch,), start, mx.int32)
        count = mx.full((batch,), width, mx.int32)
        self.keys = commit_rows(self.keys, keys, start, count)
        self.values = commit_rows(self.values, values, start, count)
        return self.prefix(self.attended)

    def attend(self, q, k, v, scale: float) -> mx.array:
        """Writes T rows and attends to them and all before: ``(B, heads, T, D)``."""
        mask = self.make_mask(k.shape[2])
        k, v = self.update_and_fetch(k, v)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    def prefix(self, length: int):
        """The first ``length`` slots as views."""
        return self.keys[:, :, :length], self.values[:, :, :length]

    def make_mask(self, width: int, return_array=False, window_size=None):
        slots = mx.arange(self.attended)
        rows = mx.arange(width)[:, None]
        if isinstance(self.offset, int):
            rows = rows + self.offset
        else:
            rows = rows + self.offset[:, None, None, None]
        mask = slots <= rows
        if window_size is not None:
            mask = mask & (rows < slots + window_size)
        return mask


class KVAdapter:
    """Append-only keys and values. Leaves: keys, values ``(B, H, S, D)``."""

    cache_class = "KVCache"

    def adopt(self, cache, width, capacity):
        leaves = (cache.keys, cache.values)
        cache.keys, cache.values, cache.offset = None, None, 0
        return self.grow(leaves, capacity)

    def view(self, leaves, position):
        return KVView(*leaves, position.offset, position.attended)

    def collect(self, view):
        return view.keys, view.values

    def grow(self, leaves, capacity):
        return tuple(_pad(x, capacity, axis=2) for x in leaves)

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


class GatedDeltaView:
    """State ``(B, Hv, Dv, Dk)`` and convolution window ``(B, C - 1, D)`` at a row.

    The layer's forward leaves in ``inputs`` what a later replay needs.
    """

    def __init__(self, state, window):
        self.state, self.window = state, window
        self.inputs: Leaves = ()


class GatedDeltaAdapter:
    """Gated DeltaNet state, committed one round late.

    Leaves: state before the last round, its convolution input (window and rows),
    and its k, v, g, beta. The replay of the kept steps opens the next round, so a
    finished round can still be cut anywhere.
    """

    cache_class = "ArraysCache"

    def __init__(self, key_heads: int):
        self.key_heads = key_heads

    def adopt(self, cache, width, capacity):
        window, state = cache[0], cache[1]
        batch, value_heads, value_dim, key_dim = state.shape
        dtype = window.dtype
        cache[0], cache[1] = None, None
        return (
            state,
            _pad(window, window.shape[1] + width, axis=1),
            mx.zeros((batch, width, self.key_heads, key_dim), dtype),
            mx.zeros((batch, width, value_heads, value_dim), dtype),
            mx.zeros((batch, width, value_heads), mx.float32),
            mx.zeros((batch, width, value_heads), dtype),
        )

    def view(self, leaves, position):
        return GatedDeltaView(*self._replay(leaves, position.steps))

    def collect(self, view):
        return view.state, *view.inputs

    def grow(self, leaves, capacity):
        return leaves

    def replayable(self, leaves):
        return leaves

    def release(self, cache, leaves, length, steps):
        cache[1], cache[0] = self._replay(leaves, steps)

    def arrays(self, cache):
        return cache[0], cache[1]

    def mark(self, cache):
        return cache[0], cache[1]

    def rewind(self, cache, mark):
        cache[0], cache[1] = mark

    def _replay(self, leaves, steps):
        state, conv_input, k, v, g, beta = leaves
        window = conv_input.shape[1] - k.shape[1]
        rows = steps[:, None] + mx.arange(window)
        return (
            gated_delta_replay(state, k, v, g, beta, steps),
            mx.take_along_axis(conv_input, rows[..., None], axis=1),
        )


def classify(caches: Sequence[Any], expected: Sequence[Adapter]) -> list[Adapter]:
    """The adapter of every cache, decided before any of them is touched.

    Args:
        caches: One cache a layer, as the model made them.
        expected: The adapters of the target's layers.

    Raises:
        UnsupportedCache: A cache is not of the class that its layer's adapter takes.
    """
    if len(caches) != len(expected):
        raise UnsupportedCache(
            f"The prompt cache has {len(caches)} entries but the model has "
            f"{len(expected)} layers with state."
        )
    for i, (cache, adapter) in enumerate(zip(caches, expected, strict=True)):
        name = adapter.cache_class
        if type(cache).__name__ != name:
            raise UnsupportedCache(
                f"Prompt cache entry {i} is a {type(cache).__name__}, which cannot be "
                f"rolled back to the accepted drafts; {name} can."
            )
        if getattr(cache, "lengths", None) is not None or (
            getattr(cache, "left_padding", None) is not None
        ):
            raise UnsupportedCache(
                f"Prompt cache entry {i} holds padded batch rows; give each row a "
                "cache of its own."
            )
    return list(expected)


def _pad(x: mx.array, size: int, axis: int) -> mx.array:
    """``x`` with zeros behind it up to ``size`` along ``axis``."""
    if x.shape[axis] >= size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return mx.pad(x, widths)

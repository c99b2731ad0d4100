"""Recurrent states: Gated DeltaNet by replay, any other by a state a row."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ..ops import gated_delta_replay
from .base import Leaves, Position, UnsupportedCache, pad


class GatedDeltaView:
    """State ``(B, Hv, Dv, Dk)`` and convolution window ``(B, C - 1, D)`` at a row.

    The layer's forward leaves in ``inputs`` what a later replay needs, and in ``after``
    the state behind its rows.

    Args:
        lengths (array, optional): ``(B,)``, how many of the next rows are no padding.
    """

    def __init__(self, state, window, lengths: mx.array | None = None):
        self.state, self.window, self.lengths = state, window, lengths
        self.inputs: Leaves = ()
        self.after = None

    def steps(self, width: int) -> mx.array:
        """How many of the next ``width`` rows the state takes, ``(B,)``."""
        if self.lengths is None:
            return mx.full((self.state.shape[0],), width, mx.int32)
        return mx.clip(self.lengths, 0, width)

    def window_after(self) -> mx.array:
        """The window behind these rows."""
        rows, size = self.inputs[0], self.window.shape[1]
        if self.lengths is None:
            return mx.contiguous(rows[:, -size:])
        places = self.steps(rows.shape[1] - size)[:, None] + mx.arange(size)
        return mx.take_along_axis(rows, places[..., None], axis=1)


class ArraysAdapter:
    """What the adapters of ``ArraysCache`` have in common."""

    cache_class = "ArraysCache"
    versions = 2  # of the last round, and of this one

    def clear(self, cache):
        cache.cache = [None] * len(cache.cache)

    def grow(self, leaves, capacity):
        return leaves

    def replayable(self, leaves):
        return leaves

    def arrays(self, cache):
        return [x for x in cache.cache if x is not None]

    def mark(self, cache):
        return list(cache.cache)

    def rewind(self, cache, mark):
        cache.cache = list(mark)

    mark_step, rewind_step = mark, rewind


@dataclass(frozen=True)
class GatedDeltaAdapter(ArraysAdapter):
    """Gated DeltaNet state, committed one round late.

    Leaves: state before the last round, its convolution input (window and rows),
    and its k, v, g, beta. The replay of the kept steps opens the next round, so a
    finished round can still be cut anywhere.
    """

    key_heads: int
    versions = 3  # and the state behind this round, which is dropped
    joint = True

    def adopt(self, cache, width, capacity):
        window, state = cache[0], cache[1]
        batch, value_heads, value_dim, key_dim = state.shape
        dtype = window.dtype
        return (
            state,
            pad(window, window.shape[1] + width, axis=1),
            mx.zeros((batch, width, self.key_heads, key_dim), dtype),
            mx.zeros((batch, width, value_heads, value_dim), dtype),
            mx.zeros((batch, width, value_heads), mx.float32),
            mx.zeros((batch, width, value_heads), dtype),
        )

    def view(self, leaves, position):
        return GatedDeltaView(*self._replay(leaves, position))

    def collect(self, view):
        return view.state, *view.inputs

    def release(self, cache, leaves, length, steps):
        position = Position(length, steps, 0)
        cache[1], cache[0] = self._replay(leaves, position)

    def set_lengths(self, cache, lengths):
        cache.lengths = mx.array(lengths)  # the model counts it down

    def take_row(self, cache, row, length, into):
        into.cache = [mx.contiguous(x[row : row + 1]) for x in cache.cache]

    def _replay(self, leaves, position):
        state, conv_input, k, v, g, beta = leaves
        rows = position.window(conv_input.shape[1] - k.shape[1])
        return (
            gated_delta_replay(state, k, v, g, beta, position.steps),
            mx.take_along_axis(conv_input, rows, axis=1),
        )


class SteppedView:
    """The arrays of an ``ArraysCache``, and every value that each of them gets.

    A layer that is fed its rows one by one leaves here a state a row.
    """

    left_padding = lengths = None

    def __init__(self, arrays):
        self.history = [[x] for x in arrays]

    def __getitem__(self, i):
        return self.history[i][-1]

    def __setitem__(self, i, x):
        self.history[i].append(x)

    def advance(self, count):
        pass

    def make_mask(self, width):
        return None


@dataclass(frozen=True)
class SteppedAdapter(ArraysAdapter):
    """Any recurrent state, with one copy a row of a round.

    Leaves: for each array of the cache its values after 0 to T rows,
    ``(B, T + 1, ...)``.

    Args:
        view_class: A ``SteppedView`` that the model takes for its cache.
    """

    view_class: type = SteppedView

    def adopt(self, cache, width, capacity):
        return tuple(mx.repeat(x[:, None], width + 1, axis=1) for x in cache.cache)

    def view(self, leaves, position):
        return self.view_class(self._pick(leaves, position.steps))

    def collect(self, view):
        return tuple(mx.stack(values, axis=1) for values in view.history)

    def release(self, cache, leaves, length, steps):
        cache.cache = self._pick(leaves, steps)

    def _pick(self, leaves, steps):
        return [
            mx.take_along_axis(x, steps.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]
            for x in leaves
        ]


def check_stepped(view: SteppedView, width: int) -> None:
    """Raises UnsupportedCache unless each of ``width`` rows gave a state."""
    counts = [len(values) - 1 for values in view.history]
    if any(count != width for count in counts):
        raise UnsupportedCache(
            "The recurrent layers of this model cannot be fed row by row: "
            f"{width} rows gave {counts} states."
        )

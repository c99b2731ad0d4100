"""Rotation of rows whose positions are not their slots."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx


class Shift(NamedTuple):
    """How far the positions of rows are from their slots.

    Args:
        by (array): ``(B,)`` int32; or ``(3, B, T)``, along each axis of images.
        axes (array): ``(D / 2,)``, the axis that each frequency turns with.
    """

    by: mx.array
    axes: mx.array


def rotated(rope, x: mx.array, memory) -> mx.array:
    """Rows ``(B, heads, T, D)`` turned to the positions of the next slots of a memory,
    or to those that its ``shift`` says."""
    shift, offset = getattr(memory, "shift", None), memory.offset
    if shift is None:
        return rope(x, offset=offset)
    if shift.by.ndim == 1:
        return rope(x, offset=offset + shift.by)
    positions = offset[:, None] + mx.arange(x.shape[2]) + shift.by
    return _turned(rope, x, positions, shift.axes)


def _turned(rope, x: mx.array, positions: mx.array, axes: mx.array) -> mx.array:
    """Each row at a position of its own, ``(3, B, T)``, along each axis."""
    rows = x.swapaxes(1, 2)
    batch, width, heads, size = rows.shape
    rows = rows.reshape(-1, heads, 1, size)
    # A frequency turns two lanes, half of the rotated ones apart.
    lanes = mx.concatenate([axes, axes, mx.zeros(size - 2 * axes.size, axes.dtype)])
    out = rows
    for axis, at in enumerate(positions):
        out = mx.where(lanes == axis, rope(rows, offset=at.reshape(-1)), out)
    return out.reshape(batch, width, heads, size).swapaxes(1, 2)

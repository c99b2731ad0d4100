"""Drafts from a part of the vocabulary: the rest of the output head is not read.

A token outside has draft probability 0. It can still be emitted, as a correction or a
bonus, so the distribution stays the target's.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


def pick(ids: mx.array, columns: mx.array) -> mx.array:
    """The tokens ``(B,)`` of columns ``(B,)``; ``ids`` is ``(S,)`` or ``(B, S)``."""
    if ids.ndim == 1:
        return ids[columns]
    return mx.take_along_axis(ids, columns[:, None], axis=1)[:, 0]


def spread(logits: mx.array, ids: mx.array, size: int) -> mx.array:
    """Logits ``(..., S)`` of ``ids`` as rows ``(..., size)``, -inf elsewhere.

    ``ids`` is ``(S,)``, or one set a row.
    """
    rows = mx.full((*logits.shape[:-1], size), -mx.inf, logits.dtype)
    return mx.put_along_axis(rows, mx.broadcast_to(ids, logits.shape), logits, axis=-1)


def head_rows(head: nn.Module, ids: mx.array) -> mx.array:
    """Rows ``(..., S, H)`` of a linear layer or an embedding, dequantised."""
    if "scales" not in head:
        return head.weight[ids]
    biases = head["biases"][ids] if "biases" in head else None
    return mx.dequantize(
        head.weight[ids],
        head.scales[ids],
        biases,
        group_size=head.group_size,
        bits=head.bits,
        mode=head.mode,
    )

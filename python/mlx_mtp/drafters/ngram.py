"""Prompt lookup: propose what followed the last occurrence of the newest tokens."""

from __future__ import annotations

import mlx.core as mx

from ..ops import commit_rows
from ..state.base import pad
from .base import DraftContext, Drafts


class NGramDrafter:
    """Copies the continuation of the longest recent match (Saxena 2023, prompt lookup).

    The newest tokens are matched against the whole history, prompt included. The
    longest match of ``min_ngram`` to ``max_ngram`` tokens wins, the latest on ties;
    the tokens behind it are the proposals. Without a match nothing is proposed. It
    needs no weights and runs on the device.

    Args:
        max_ngram (int): Longest suffix that is compared.
        min_ngram (int): Shortest match that proposes anything.
    """

    name = "ngram"
    max_depth = 32
    needs_hidden = False
    needs_shared_kv = False
    greedy_only = True

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1):
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                "[NGramDrafter] min_ngram must be in [1, max_ngram] but is "
                f"{min_ngram} with max_ngram {max_ngram}."
            )
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def __eq__(self, other):
        return type(other) is NGramDrafter and self._settings == other._settings

    def __hash__(self):
        return hash(self._settings)

    def __repr__(self):
        return f"NGramDrafter(max_ngram={self.max_ngram}, min_ngram={self.min_ngram})"

    @property
    def _settings(self):
        return self.max_ngram, self.min_ngram

    def check(self, target):
        """Fits every target: it reads token ids only."""

    def begin(self, prompt, capacity):
        history = mx.zeros((prompt.shape[0], capacity), mx.int32)
        history[:, : prompt.shape[1]] = prompt
        return history, mx.full((prompt.shape[0],), prompt.shape[1], mx.int32)

    def weights(self):
        return ()

    def forwards(self, depth):
        return 0

    def prefill(self, state, following, hidden, attended):
        return state

    def grow(self, state, capacity):
        history, length = state
        return pad(history, capacity, 1), length

    def propose(self, state, context: DraftContext):
        history, length = state
        history = commit_rows(
            history[:, None, :, None],
            context.tokens[:, None, :, None],
            length,
            context.count,
        )[:, 0, :, 0]
        length = length + context.count
        tokens, lengths = self._lookup(
            history[:, : context.attended], length, context.depth
        )
        return Drafts(tokens, lengths=lengths), (history, length)

    def _lookup(self, history, length, depth):
        """Proposals ``(B, depth)`` and their number ``(B,)``."""
        size = history.shape[1]
        ends = mx.arange(size)
        matched = run = mx.zeros(history.shape, mx.int32)
        for back in range(self.max_ngram):
            newest = mx.take_along_axis(history, (length - 1 - back)[:, None], axis=1)
            equal = (mx.roll(history, back, axis=1) == newest) & (ends >= back)
            run = equal if back == 0 else run & equal
            matched = matched + run
        usable = (ends < length[:, None] - 1) & (matched >= self.min_ngram)
        score = mx.where(usable, matched * size + ends, -1)
        best = mx.argmax(score, axis=1).astype(mx.int32)
        found = mx.max(score, axis=1) >= 0
        rows = best[:, None] + 1 + mx.arange(depth)
        rows = mx.minimum(rows, length[:, None] - 1)  # no filler for the target
        tokens = mx.take_along_axis(history, rows, axis=1)
        lengths = mx.where(found, mx.minimum(depth, length - 1 - best), 0)
        return tokens, lengths.astype(mx.int32)

"""A smaller model of the same vocabulary drafts for a larger one."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..state import Position, classify, newest
from .base import DraftContext, DrafterMismatch, Drafts

CHUNK = 2048  # prompt tokens a forward


class DraftModelDrafter:
    """Drafts with a whole model of its own (Leviathan 2022, Chen 2023).

    Its state is that model's caches, of any class that a target may have. A round feeds
    it the tokens that the last one emitted, in one forward, and then its own drafts.

    The models must mean the same tokens by the same ids; ``mlx_mtp.load_drafter`` sees
    to that. Their logits may differ in width, by padding: ids that the target does not
    have are never proposed, and ids that only the target has neither.

    Args:
        model (Target): The draft model, as ``mlx_mtp.as_target`` gives it.
        target (Target): The model that it drafts for.
        vocab_size (int, optional): Ids from here on are padding, and never proposed.
            Default: the width of its logits.

    Raises:
        UnsupportedCache: Its caches cannot be rolled back.

    Example:
        >>> drafter = DraftModelDrafter(as_target(small), as_target(model))
        >>> stream_generate(model, tokenizer, prompt, mtp=drafter)
    """

    name = "draft_model"
    max_depth = 16
    needs_hidden = False
    needs_shared_kv = False
    greedy_only = False

    def __init__(self, model, target, vocab_size: int | None = None):
        self.model, self.width = model, target.vocab_size
        self.vocab_size = min(vocab_size or model.vocab_size, model.vocab_size)
        self._adapters = classify(
            model.make_cache(), model.adapters, self.max_depth + 1
        )

    def check(self, target):
        if target.vocab_size != self.width:
            raise DrafterMismatch(
                f"The draft model was set up for a vocabulary of {self.width} but the "
                f"target has {target.vocab_size}."
            )

    def weights(self):
        return self.model.weights()

    def forwards(self, depth):
        return depth

    def begin(self, prompt, capacity):
        return self._read(prompt, self.model.make_cache(), 0, capacity)

    def trim(self, state, length: int):
        leaves, offset, steps = state
        surplus = max(offset.item() - length, 0)
        if surplus > steps.item():  # further back than its last forward
            return None
        return leaves, offset - surplus, steps - surplus

    def resume(self, state, tokens, capacity):
        leaves, offset, steps = state
        caches, seen = self.model.make_cache(), offset.item()
        for adapter, cache, x in zip(self._adapters, caches, leaves, strict=True):
            adapter.release(cache, x, seen, steps)
        return self._read(tokens, caches, seen, capacity)

    def _read(self, prompt, caches, seen: int, capacity: int):
        """The state behind a prompt whose first tokens are in ``caches``."""
        for start in range(seen, prompt.shape[1], CHUNK):
            chunk = self._known(prompt[:, start : start + CHUNK])
            self.model.prefill(chunk, caches)
            mx.eval([a.arrays(c) for a, c in zip(self._adapters, caches, strict=True)])
        batch, length = prompt.shape
        leaves = [
            a.adopt(c, self.max_depth + 1, capacity)
            for a, c in zip(self._adapters, caches, strict=True)
        ]
        steps = mx.zeros((batch,), mx.int32)
        return leaves, mx.full((batch,), length, mx.int32), steps

    def prefill(self, state, following, hidden, attended):
        return state

    def grow(self, state, capacity):
        leaves, *rest = state
        leaves = [
            a.grow(x, capacity) for a, x in zip(self._adapters, leaves, strict=True)
        ]
        return leaves, *rest

    def propose(self, state, context: DraftContext):
        leaves, offset, steps = state
        count = context.count
        rows = self._known(context.tokens)
        logits, committed = self._forward(
            rows, leaves, Position(offset, steps, context.attended)
        )
        at = mx.maximum(count - 1, 0)[:, None, None]
        row = mx.take_along_axis(logits, at, axis=1)[:, 0]
        offset, taken, leaves = offset + count, count, committed
        tokens, rows, stats = [], [], []
        for i in range(context.depth):
            if i:
                logits, leaves = self._forward(
                    self._known(tokens[-1][:, None]),
                    leaves,
                    Position(offset + i - 1, taken, context.attended),
                )
                row, taken = logits[:, 0], mx.ones_like(count)
            row = self._fitted(row)
            token, stat = context.draw(row, i)
            tokens.append(token)
            rows.append(row)
            stats.append(stat)
        # What the drafts left in a recurrent state must go; slots are written anew.
        leaves = [
            newest(a.replayable(before), after)
            for a, before, after in zip(self._adapters, committed, leaves, strict=True)
        ]
        return Drafts.stack(tokens, rows, stats), (leaves, offset, count)

    def _forward(
        self, tokens, leaves, position: Position
    ) -> tuple[mx.array, list[Any]]:
        views = [
            a.view(x, position) for a, x in zip(self._adapters, leaves, strict=True)
        ]
        logits = self.model.forward(tokens, views).logits
        return logits, [
            a.collect(v) for a, v in zip(self._adapters, views, strict=True)
        ]

    def _known(self, tokens):
        """Tokens that only the target has are some other one here."""
        return mx.minimum(tokens, self.model.vocab_size - 1)

    def _fitted(self, row):
        """A row ``(B, V)`` of the target's width, with padding left out."""
        row = row[:, : min(self.vocab_size, self.width)]
        spare = self.width - row.shape[1]
        if not spare:
            return row
        return mx.pad(row, [(0, 0), (0, spare)], constant_values=mx.array(-mx.inf))

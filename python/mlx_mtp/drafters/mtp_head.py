"""Drafting with a checkpoint's own MTP head, chained to any depth.

A head's row i joins the target's hidden row i with the embedding of token i + 1 and
predicts token i + 2; chained steps feed the head's own output back in place of the
hidden row. In a chain of several heads, head j reads the output of head j - 1 for the
row before, so all of them read the same tokens and have the same number of slots; the
first j slots of head j belong to no row.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import mlx.core as mx

from ..heads import MTPHead
from ..state import KVView
from ..state.base import pad
from .base import DraftContext, DrafterMismatch, Drafts
from .vocabulary import VocabularyPart


class Rows(KVView):
    """Keys and values of one layer, of which the first ``start`` slots are no rows."""

    def __init__(self, keys, values, offset, attended, start=0, shift=None):
        super().__init__(keys, values, offset, attended)
        self.start, self.shift = start, shift

    def make_mask(self, width, return_array=False, window_size=None):
        mask = super().make_mask(width, return_array, window_size)
        if not self.start:
            return mask
        # Slots that are no rows see each other, so that what they give is finite.
        return mask & (
            (mx.arange(self.attended) >= self.start) | (self._rows(width) < self.start)
        )


class Parts(list):
    """The memory of a layer that keeps no cache, or several, taken by their number."""

    def __init__(self, batch: int, parts=()):
        super().__init__(parts)
        self.batch = batch

    def make_mask(self, width, return_array=False, window_size=None):
        if not self:
            return None
        return self[0].make_mask(width, return_array, window_size)


def _memory(batch: int, parts: list):
    return parts[0] if len(parts) == 1 else Parts(batch, parts)


def _parts(memory) -> list:
    return memory if isinstance(memory, Parts) else [memory]


class Tail:
    """Keys and values of the tentative rows of one layer, behind its committed ones.

    The committed slots are only read: a second write to them in one evaluation would
    copy the whole buffer.
    """

    def __init__(self, view: Rows, offset: mx.array, committed: mx.array):
        self.batch, self.offset, self.committed = view.batch, offset, committed
        self.shift = view.shift
        self.keys, self.values = view.prefix(view.attended)
        self.new_keys = self.new_values = None

    def attend(self, q, k, v, scale: float) -> mx.array:
        """Attention of one more row: ``q`` ``(B, heads, 1, D)``."""
        k, v = self._add(k, v)
        rows = q.reshape(*k.shape[:2], -1, q.shape[-1]) * scale
        old = mx.where(self.committed, rows @ self.keys.swapaxes(2, 3), -mx.inf)
        scores = mx.concatenate([old, rows @ k.swapaxes(2, 3)], axis=-1)
        weights = mx.softmax(scores, axis=-1, precise=True)
        old, new = mx.split(weights, [self.keys.shape[2]], axis=-1)
        return (old @ self.values + new @ v).reshape(q.shape)

    def update_and_fetch(self, keys, values):
        """One more row, for layers that attend to copies of all slots."""
        keys, values = self._add(keys, values)
        return (
            mx.concatenate([self.keys, keys], axis=2),
            mx.concatenate([self.values, values], axis=2),
        )

    def make_mask(self, width, return_array=False, window_size=None):
        """What the next row sees, ``(B, 1, 1, S)``."""
        rows = 0 if self.new_keys is None else self.new_keys.shape[2]
        slots, mask = mx.arange(self.committed.shape[-1]), self.committed
        offset = mx.reshape(self.offset, (-1, 1, 1, 1))
        if window_size is not None:
            mask = mask & (offset < slots + window_size)
        near = mx.arange(rows, -1, -1) < (window_size or rows + 1)
        near = mx.broadcast_to(near, (*mask.shape[:-1], rows + 1))
        return mx.concatenate([mask, near], axis=-1)

    def _add(self, k, v):
        self.offset = self.offset + 1
        if self.new_keys is not None:
            k = mx.concatenate([self.new_keys, k], axis=2)
            v = mx.concatenate([self.new_values, v], axis=2)
        self.new_keys, self.new_values = k, v
        return k, v


class MTPHeadDrafter:
    """Drafts with a checkpoint's own MTP head, depth K by chaining.

    Its state is the head's keys and values over rows made from the target's hidden
    rows only: what a chained step wrote from the head's own output is dropped.

    Args:
        head (MTPHead): The weights.
        target: The target whose embedding and output projection the head shares.
        vocabulary (optional): Ids of the tokens that it may propose, see
            ``draft_vocabulary``. Their rows of the output projection are copied, and a
            draft reads no other.
    """

    name = "mtp"
    max_depth = 32
    needs_hidden = True
    needs_shared_kv = False
    greedy_only = False
    reads_images = False

    def __init__(self, head: MTPHead, target, vocabulary: Iterable[int] | None = None):
        self.head, self.target, self._part = head, target, None
        self._chain = head.chain
        self._shapes = [module.kv_shapes() for module in self._chain]
        if vocabulary is None:
            return
        outputs = [module.output(target) for module in self._chain]
        if None in outputs:
            raise ValueError(
                "A draft vocabulary needs the output layer of the target, which a "
                f"{type(target).__name__} does not give."
            )
        self._part = VocabularyPart(vocabulary, target.vocab_size, outputs)

    def check(self, target):
        if hasattr(target, "axes") and not self.reads_images:
            raise DrafterMismatch(
                f"The positions of a {type(target).__name__} have three axes: use a "
                "VisionHeadDrafter."
            )
        config = self.head.config
        for what, ours, theirs in (
            ("hidden size", config.hidden_size, target.hidden_size),
            ("vocabulary", config.vocab_size, target.vocab_size),
        ):
            if ours != theirs:
                raise DrafterMismatch(
                    f"The MTP head has {what} {ours} but the target has {theirs}."
                )
        spec = getattr(target, "head_spec", None)
        if spec is not None and spec.family != self.head.spec.family:
            raise DrafterMismatch(
                f"The MTP head is one of {self.head.spec.family} but the target is a "
                f"model of {spec.family}."
            )

    def begin(self, prompt, capacity):
        batch, dtype = prompt.shape[0], self.head.dtype
        buffers = []
        for shape in (
            s for layers in self._shapes for shapes in layers for s in shapes
        ):
            sizes = (shape[:2], shape[2:])
            buffers.append(
                tuple(mx.zeros((batch, n, capacity, d), dtype) for n, d in sizes)
            )
        carried = (batch, 1, self.head.config.hidden_size)
        carry = [mx.zeros(carried, dtype) for _ in self._chain[1:]]
        return buffers, mx.zeros((batch,), mx.int32), *carry

    def weights(self):
        return self.head.parameters(), self._part.weights() if self._part else []

    def forwards(self, depth):
        chained = sum(len(self._at(step, depth)) for step in range(1, depth))
        return len(self._chain) + chained

    def prefill(self, state, following, hidden, attended, shift=None, embeds=None):
        _, offset, *carry = state
        views = self._views(state, attended, shift)
        outs = self._commit(following, hidden, views, carry, embeds)
        carry = [
            mx.concatenate(pair, axis=1)[:, -1:]  # there may be no rows
            for pair in zip(carry, outs, strict=False)
        ]
        return self._collect(views), offset + following.shape[1], *carry

    def grow(self, state, capacity):
        buffers, *rest = state
        return [tuple(pad(x, capacity, 2) for x in pair) for pair in buffers], *rest

    def rewind(self, state, count: int):
        """Later heads go on from rows of earlier ones, which are gone."""
        buffers, offset, *carry = state
        return None if carry else (buffers, offset - count)

    def propose(self, state, context: DraftContext, shift=None):
        _, offset, *carry = state
        views = self._views(state, context.attended, shift)
        outs = self._commit(context.tokens, context.hidden, views, carry)
        newest = mx.maximum(context.count - 1, 0)[:, None, None]
        rows = [mx.take_along_axis(out, newest, axis=1) for out in outs]
        state = (self._collect(views), offset + context.count, *rows[:-1])
        return self._draw(context, views, [row[:, 0] for row in rows], state)

    def _draw(self, context, views, rows, state):
        """The drafts behind ``rows``, the newest output ``(B, H)`` of each head."""
        tails, last = self._tails(views, state[1], context.attended), len(rows) - 1
        tokens, logits, stats = [], [], []
        for i in range(context.depth):
            if i:
                before, rows = rows, list(rows)
                for j in self._at(i, context.depth):
                    module = self._chain[j]
                    row = before[j - 1] if i <= last else before[j]
                    embedded = module.embed(tokens[-1], self.target)
                    rows[j] = module(embedded, row, tails[j])
            row = self._logits(min(i, last), rows)
            token, stat = context.draw(row, i)
            tokens.append(token)
            logits.append(row)
            stats.append(stat)
        return Drafts.stack(tokens, logits, stats), state

    def _logits(self, j: int, rows) -> mx.array:
        projection = self._part and partial(self._part.logits, head=j)
        return self._chain[j].logits(rows[j], self.target, projection)

    def _at(self, step: int, depth: int) -> range:
        """The heads that run at a chained step: those whose output is read later."""
        heads = len(self._chain)
        return range(min(step, heads - 1), max(min(heads, depth), 1))

    def _commit(self, tokens, hidden, views, carry, embeds=None):
        """Rows ``(B, T)`` with the target's hidden rows; the outputs of each head.

        ``embeds`` ``(B, T, H)`` stands for the embeddings of the tokens.
        """
        outs = []
        for j, (module, memories) in enumerate(zip(self._chain, views, strict=True)):
            if j:
                hidden = mx.concatenate([carry[j - 1], outs[-1][:, :-1]], axis=1)
            rows = hidden.reshape(-1, hidden.shape[-1])
            embedded = (
                module.embed(tokens.reshape(-1), self.target)
                if embeds is None
                else embeds.reshape(rows.shape)
            )
            outs.append(module(embedded, rows, memories).reshape(hidden.shape))
        return outs

    def _views(self, state, attended, shift):
        """One memory a layer, in a list for each head."""
        buffers, offset, *_ = state
        buffers, batch = iter(buffers), offset.shape[0]
        return [
            [
                _memory(
                    batch,
                    [Rows(*next(buffers), offset, attended, j, shift) for _ in shapes],
                )
                for shapes in layers
            ]
            for j, layers in enumerate(self._shapes)
        ]

    def _tails(self, views, offset, attended):
        slots, end = mx.arange(attended), offset[:, None, None, None]

        def tail(rows):
            return Tail(rows, offset, (slots >= rows.start) & (slots < end))

        return [
            [_memory(offset.shape[0], list(map(tail, _parts(m)))) for m in memories]
            for memories in views
        ]

    def _collect(self, views):
        return [
            (rows.keys, rows.values)
            for memories in views
            for memory in memories
            for rows in _parts(memory)
        ]

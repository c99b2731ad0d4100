"""Many streams of one prompt at once: by the compiled round, and by plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import mlx.core as mx
import numpy as np

from ..round import Round
from ..sampling import SamplingParams
from ..stream import UnusableLogits


class Restricted:
    """A target that can only emit the tokens ``ids``.

    With few of them the distribution of the next tokens can be enumerated.
    """

    def __init__(self, target, ids: Sequence[int]):
        self._target, self.ids = target, list(ids)
        mask = np.full(target.vocab_size, -np.inf, np.float32)
        mask[self.ids] = 0
        self._mask = mx.array(mask)

    def __getattr__(self, name):
        return getattr(self._target, name)

    def prefill(self, tokens, caches):
        out = self._target.prefill(tokens, caches)
        return out._replace(logits=self._masked(out.logits))

    step = prefill

    def forward(self, tokens, views):
        out = self._target.forward(tokens, views)
        return out._replace(logits=self._masked(out.logits))

    def logits(self, hidden):
        return self._masked(self._target.logits(hidden))

    def _masked(self, logits):
        return logits + self._mask.astype(logits.dtype)


def drafter_of(drafter, target):
    """The same drafter for a target that stands for its own."""
    if not hasattr(drafter, "target"):
        return drafter
    drafter = copy(drafter)
    drafter.target = target
    return drafter


class Streams:
    """Copies of one stream in the rows of one state, each with a key of its own.

    Args:
        round_: The round, of any target, drafter and depth.
        prompt: Token ids.
        params, draft_params: As in ``SpeculativeDecoder.stream``.
        size (int): B, how many.
        count (int): Tokens of each.
    """

    def __init__(
        self,
        round_: Round,
        prompt: Sequence[int],
        params: SamplingParams,
        draft_params: SamplingParams,
        size: int,
        count: int,
    ):
        self.round, self.size, self.count = round_, size, count
        self.params, self.draft_params = params, draft_params
        self.length = len(prompt)
        # At least one token a round, and every round writes all of its rows.
        self.attended = self.length + (count + 1) * round_.width
        target, drafter = round_.target, round_.drafter
        rows = mx.broadcast_to(mx.array(prompt, mx.int32), (size, self.length))
        caches = target.make_cache()
        out = target.prefill(rows, caches)
        self.draft_state, self.hidden = drafter.begin(rows, self.attended), None
        if drafter.needs_hidden:
            self.hidden = out.hidden[:, -1:]
            self.draft_state = drafter.prefill(
                self.draft_state, rows[:, 1:], out.hidden[:, :-1], self.attended
            )
        self.leaves = [
            adapter.adopt(cache, round_.width, self.attended)
            for adapter, cache in zip(round_.adapters, caches, strict=True)
        ]
        self.logits = out.logits[:, -1:]
        mx.eval(self.leaves, self.draft_state, self.hidden, self.logits)

    def start(self, seed: int, token: int | None = None):
        """The state behind the first token, and that token with its log-probability.

        Args:
            token (int, optional): The first token of all streams, in place of a drawn
                one.
        """
        state, proposal = self.round.begin(
            self.leaves,
            self.length,
            self.draft_state,
            self.hidden,
            mx.random.split(mx.random.key(seed), self.size),
            self.params.arrays(self.size),
            self.draft_params.arrays(self.size),
        )
        tokens, accepted, logprobs = self.round.accept(state, proposal, self.logits)
        if token is not None:
            tokens, accepted = mx.full(tokens.shape, token), mx.zeros_like(accepted)
        state, _ = self.round.commit(state, proposal, tokens, accepted)
        return state, tokens, logprobs

    def draw(self, seed: int, token: int | None = None):
        """The first ``count`` tokens of every stream, ``(B, count)``, their
        log-probabilities, and whether the first draft of all was accepted, ``(B,)``."""
        state, *first = self.start(seed, token)
        parts = [[np.array(x) for x in first]]
        drawn, accepted = np.ones(self.size, int), None
        while drawn.min() < self.count:
            state, result = self.round(state, self.attended)
            counts = np.array(result.counts)
            if (counts[:, 0] < 0).any():
                raise UnusableLogits("A row of logits has NaN, +inf or nothing in it.")
            drawn += counts[:, 0] + 1
            accepted = counts[:, 0] > 0 if accepted is None else accepted
            parts.append([counts[:, 2:], np.array(result.logprobs)])
        tokens, logprobs = (np.concatenate(x, axis=1) for x in zip(*parts, strict=True))
        order = np.argsort(tokens < 0, axis=1, kind="stable")[:, : self.count]
        return (
            np.take_along_axis(tokens, order, axis=1),
            np.take_along_axis(logprobs, order, axis=1),
            accepted,
        )


def own_logits(target, tokens: mx.array, caches) -> mx.array:
    """``(B, T, V)`` by the model's own forward, which ours must equal."""
    return target.model(tokens, cache=caches)


def draw_plain(
    target, prompt: Sequence[int], sampler: Callable, size: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The same of one token a forward, by the model's own cache and ``sampler``."""
    rows = mx.broadcast_to(mx.array(prompt, mx.int32), (size, len(prompt)))
    caches, tokens, logprobs = target.make_cache(), [], []
    for _ in range(count):
        row = own_logits(target, rows, caches)[:, -1].astype(mx.float32)
        row = row - mx.logsumexp(row, axis=-1, keepdims=True)
        rows = sampler(row).astype(mx.int32)[:, None]
        tokens.append(rows)
        logprobs.append(mx.take_along_axis(row, rows, axis=1))
        mx.eval(tokens[-1], logprobs[-1])
    return tuple(np.array(mx.concatenate(x, axis=1)) for x in (tokens, logprobs))

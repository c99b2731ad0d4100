"""The round of a batch whose rows may draw their tokens in unlike ways."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .drafters import Drafts
from .round import Proposal, Round


class BatchRound(Round):
    """A round with slots that may be empty and rows of their own depth.

    Its state has, beside that of a ``Round``, one entry a row:

    - ``active`` (bool): A row without it emits nothing and keeps its caches.
    - ``most`` (int32): How many drafts it may have.
    - ``way`` (int32): The part that draws its tokens; not there with one part.

    Args:
        parts: One ``Round`` for each way of drawing, all of one target, drafter and
            depth. None of several is greedy: temperature 0 is, in any of them.
    """

    def __init__(self, parts: Sequence[Round]):
        first = parts[0]
        super().__init__(
            first.target,
            first.drafter,
            first.depth,
            first.adapters,
            greedy=first.greedy,
        )
        self.parts = list(parts)

    def drawing(self, state):
        parts = [part.drawing(state) for part in self.parts]
        if len(parts) == 1:
            return parts[0]
        draws, coins, keys = zip(*parts, strict=True)

        def draw(logits, i):
            tokens, stats = zip(*(f(logits, i) for f in draws), strict=True)
            # Those of a part that has none do not matter.
            known = [x for x in stats if x is not None]
            stats = [known[0] if x is None else x for x in stats] if known else None
            return _choose(state, tokens), stats and _choose(state, stats)

        return draw, list(coins), _choose(state, keys)

    def draft(self, state, attended):
        proposal = super().draft(state, attended)
        if not self.depth:
            return proposal
        drafts = proposal.drafts
        lengths = self.depth if drafts.lengths is None else drafts.lengths
        lengths = mx.minimum(lengths, state["most"])
        return proposal._replace(drafts=drafts._replace(lengths=lengths))

    def accept(self, state, proposal, logits, allowed=None):
        found = [
            part.accept(
                state,
                proposal._replace(uniforms=self._coins(proposal, i)),
                logits,
                allowed,
            )
            for i, part in enumerate(self.parts)
        ]
        tokens, accepted, logprobs = (
            _choose(state, x) for x in zip(*found, strict=True)
        )
        active = state["active"]
        tokens = mx.where(active[:, None], tokens, -1)
        return tokens, mx.where(active, accepted, -1), logprobs

    def row(self, proposal: Proposal, slot: int, part: int) -> Proposal:
        """What one row, of this part, has of a proposal; without drafter state."""
        drafts, coins = Drafts(*proposal.drafts), self._coins(proposal, part)
        row = Drafts(*(None if x is None else x[slot : slot + 1] for x in drafts))
        coins = None if coins is None else coins[slot : slot + 1]
        return Proposal(row, None, coins, proposal.keys[slot : slot + 1])

    def _coins(self, proposal, part: int):
        coins = proposal.uniforms
        return coins if len(self.parts) == 1 else coins[part]


def _choose(state, options: Sequence[mx.array]) -> mx.array:
    """For each row the option ``(B, ...)`` of its way."""
    out = options[0]
    for i, x in enumerate(options[1:], 1):
        chosen = (state["way"] == i).reshape(-1, *[1] * (x.ndim - 1))
        out = mx.where(chosen, x, out)
    return out

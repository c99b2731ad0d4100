"""What the host decides of a stream's tokens: processors, samplers, controllers.

A processor is ``processor(tokens, logits) -> logits`` as in ``mlx_lm``: ``tokens`` is
the whole history ``(N,)`` and ``logits`` the next row ``(1, V)``. One that offers
``checkpoint()`` and ``restore(mark)`` is run over all rows of a block at once and
then taken back to the last accepted one. Any other is run row by row, only as far as
tokens are accepted, so it sees exactly the emitted tokens, each once and in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Protocol

import mlx.core as mx
import numpy as np

from .drafters import Drafts
from .ops import verify_coupled, verify_draft

Processor = Callable[[mx.array, mx.array], mx.array]
Sampler = Callable[[mx.array], mx.array]


class Controller(Protocol):
    """Steers one stream by token ids: it may force tokens, mask them and bias logits.

    A block stays exact when it is cut in front of the first forced token, so a
    controller costs nothing until it forces one. Masks are made for every position of
    a block, while the target's forward runs.

    Attributes:
        biases (bool, optional): Whether ``bias`` ever gives anything.
        masks (bool, optional): Whether ``mask`` is there and gives something now.
            Forced tokens are then the only ones that it allows.
    """

    def accept(self, token: int) -> None:
        """Reads one emitted token; every one of them, in order."""

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, in order; empty when any may."""

    def horizon(self) -> int:
        """How many of the next tokens are certainly neither forced nor biased, nor
        change ``masks``."""

    def bias(self) -> Mapping[int, float] | None:
        """What to add to the logits of the next token."""

    def mask(self) -> np.ndarray:
        """Which tokens may come next, optional: ``(W,)`` uint32, bit ``i % 32`` of word
        ``i // 32`` for token i. Ids behind the last word are not allowed."""

    def checkpoint(self) -> object:
        """The state, in O(1)."""

    def restore(self, mark: object) -> None:
        """Goes back to a state."""


class _Steering:
    """A controller's bias and mask as a processor that looks ahead over drafts."""

    def __init__(self, controller: Controller):
        self.controller = controller
        self.checkpoint, self.restore = controller.checkpoint, controller.restore
        self.ahead = False

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self.ahead:
            token = tokens[-1].item()
            if 0 <= token < logits.shape[-1]:  # or it is rejected
                self.controller.accept(token)
        self.ahead = True
        return steer(self.controller, logits)


def is_token(token: int, vocab_size: int) -> bool:
    """Whether the model has a token."""
    return hasattr(token, "__index__") and 0 <= index(token) < vocab_size


def check_forced(token: int, vocab_size: int) -> int:
    """A forced token, which the model must have."""
    token = index(token)
    if not is_token(token, vocab_size):
        raise ValueError(
            f"The controller forced token {token}, outside of the vocabulary of "
            f"{vocab_size}."
        )
    return token


def steer(controller: Controller, logits: mx.array) -> mx.array:
    """``logits`` ``(1, V)`` of the next token with the controller's bias and mask."""
    logits = add_bias(controller.bias(), logits)
    if not getattr(controller, "masks", False):
        return logits
    return apply_mask(mx.array(controller.mask()), logits)


def add_bias(bias: Mapping[int, float] | None, logits: mx.array) -> mx.array:
    """``logits`` ``(1, V)`` with ``bias`` added, by token id."""
    if not bias:
        return logits
    if not 0 <= min(bias) <= max(bias) < logits.shape[-1]:
        raise ValueError(
            f"A bias has tokens {min(bias)} to {max(bias)} but the model's are 0 to "
            f"{logits.shape[-1] - 1}."
        )
    at = mx.array([list(bias)], mx.int32)
    added = mx.array([list(bias.values())], logits.dtype)
    old = mx.take_along_axis(logits, at, axis=1)
    return mx.put_along_axis(logits, at, old + added, axis=1)


def apply_mask(words: mx.array, logits: mx.array) -> mx.array:
    """``logits`` ``(..., V)`` with -inf where a bit of ``words`` ``(W,)`` is 0."""
    size = logits.shape[-1]
    bits = (words[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    bits = bits.reshape(-1)[:size].astype(mx.bool_)
    return mx.where(mx.pad(bits, [(0, size - bits.size)]), logits, -mx.inf)


def block_masks(
    controller: Controller, drafts: Sequence[int], vocab_size: int
) -> np.ndarray:
    """What may come at each position of a block, ``(1, K + 1, ceil(V / 32))`` uint32.

    Nothing may behind a draft that is not allowed: it is rejected, so those positions
    do not count.
    """
    masks = np.zeros((1, len(drafts) + 1, (vocab_size + 31) // 32), np.uint32)
    mark = controller.checkpoint()
    try:
        for row, draft in zip(masks[0], [*drafts, -1], strict=True):
            mask = controller.mask()
            size = min(len(mask), len(row))
            row[:size] = mask[:size]
            known = 0 <= draft < vocab_size
            if not known or not row[draft // 32] >> (draft % 32) & 1:
                break
            controller.accept(draft)
    finally:
        controller.restore(mark)
    return masks


@dataclass
class Decision:
    """The outcome of one block: accepted -1 flags unusable logits."""

    accepted: int
    tokens: list[int]
    logits: list[mx.array] = field(default_factory=list)  # (1, V) each


class RowShaper:
    """Decides a block of one stream on the host.

    Args:
        processors: Logits processors, applied in order.
        sampler: Draws from log-probabilities ``(1, V)``, as in ``mlx_lm``. A draft is
            accepted when it equals the draw (exact for every sampler). ``None`` is
            ratio acceptance by ``ops.verify_draft``.
        params: Keyword arguments of ``ops.verify_draft``.
        controller: Its bias and mask are applied behind the processors.
        seed: ``(1, 2)`` of a coupled stream, which is accepted by
            ``ops.verify_coupled``; its coins are the position of the first row.

    ``always`` is whether every block needs it: a controller's bias only does near
    its horizon.
    """

    def __init__(
        self,
        processors: Sequence[Processor],
        sampler: Sampler | None,
        params: dict,
        controller: Controller | None = None,
        seed: mx.array | None = None,
    ):
        self.seed = seed
        self.always = bool(processors) or sampler is not None
        self.steering = None if controller is None else _Steering(controller)
        processors = [*processors, *([self.steering] if self.steering else [])]
        self.processors, self.sampler, self.params = processors, sampler, params
        self.looks_ahead = all(
            hasattr(p, "checkpoint") and hasattr(p, "restore") for p in processors
        )

    def decide(
        self,
        history: mx.array,
        logits: mx.array,
        drafts: Drafts | None,
        coins: mx.array | None,
        free: float,
    ) -> Decision:
        """The accepted drafts of a block and the token behind them.

        Args:
            history: ``(N,)``, every token so far.
            logits: ``(1, T, V)``, the target's rows.
            drafts: The block's proposals, ``None`` for a row without any.
            coins: ``(1, K + 2)``; ``None`` when every draw is an argmax.
            free: The controller's horizon: no processor may see a token behind a
                forced one.
        """
        args = history, logits, drafts, coins, free
        if self.steering is None:
            return self._checked(self._decide(*args), logits.shape[-1])
        mark, self.steering.ahead = self.steering.checkpoint(), False
        try:
            return self._checked(self._decide(*args), logits.shape[-1])
        finally:
            self.steering.restore(mark)

    @staticmethod
    def _checked(decision: Decision, vocab_size: int) -> Decision:
        if decision.tokens and max(decision.tokens) >= vocab_size:
            raise ValueError(
                f"The sampler returned token {max(decision.tokens)}, outside of the "
                f"vocabulary of {vocab_size}."
            )
        return decision

    def _decide(self, history, logits, drafts, coins, free) -> Decision:
        depth = 0 if drafts is None else drafts.tokens.shape[1]
        if depth and drafts.lengths is not None:
            depth = drafts.lengths.item()
        if self.always:
            depth = int(min(depth, max(free - 1, 0)))
        if self.looks_ahead:
            return self._decide_block(history, logits, drafts, coins, depth)
        rows: list[mx.array] = []
        tokens: list[int] = []
        for i in range(depth + 1):
            seen = self._seen(history, drafts, i)
            rows.append(self._process(seen, logits[:, i]))
            token = self._decide_row(rows[-1], drafts, coins, i, i < depth)
            if token is None:
                return Decision(-1, [])
            tokens.append(token)
            if i == depth or token != drafts.tokens[0, i].item():
                break
        return Decision(len(tokens) - 1, tokens, rows)

    def _decide_block(self, history, logits, drafts, coins, depth):
        rows, marks = [], []
        for i in range(depth + 1):
            seen = self._seen(history, drafts, i) if self.processors else history
            rows.append(self._process(seen, logits[:, i]))
            marks.append([p.checkpoint() for p in self.processors])
        if self.sampler is None:
            block = self._slice(drafts, 0, depth)
            tokens, accepted, _ = self._verify(
                mx.stack(rows, axis=1), block, self._coins(coins, 0, depth)
            )
            accepted, tokens = accepted.item(), tokens[0].tolist()
        else:
            drawn = mx.concatenate([self._draw(row) for row in rows]).tolist()
            wanted = drafts.tokens[0, :depth].tolist() if depth else []
            accepted = 0
            while accepted < depth and drawn[accepted] == wanted[accepted]:
                accepted += 1
            tokens = drawn
        if accepted < 0 or tokens[accepted] < 0:
            return Decision(-1, [])
        for processor, mark in zip(self.processors, marks[accepted], strict=True):
            processor.restore(mark)
        return Decision(accepted, tokens[: accepted + 1], rows)

    def _decide_row(self, row, drafts, coins, i, drafted) -> int | None:
        """The token of row i: the draft if it is accepted, else its correction."""
        if self.sampler is not None:
            token = self._draw(row).item()
            return None if token < 0 else token
        if not drafted:
            tokens, accepted, _ = self._verify(
                row[:, None], None, self._coins(coins, i, i)
            )
        else:
            # The second row is never emitted: an accepted draft ends the question.
            tokens, accepted, _ = self._verify(
                mx.stack([row, row], axis=1),
                self._slice(drafts, i, i + 1),
                self._coins(coins, i, i + 1),
            )
        return None if accepted.item() < 0 else tokens[0, 0].item()

    def _verify(self, logits, drafts, coins):
        if drafts is None:
            drafts = Drafts(mx.zeros((1, 0), mx.int32))
        if self.seed is not None:
            return verify_coupled(
                logits, drafts.tokens, seed=self.seed, position=coins, **self.params
            )
        return verify_draft(
            logits,
            drafts.tokens,
            drafts.logits,
            uniforms=coins,
            draft_stats=drafts.stats,
            **self.params,
            logprobs=False,
        )

    def _process(self, seen, row):
        for processor in self.processors:
            shaped = processor(seen, row)
            if getattr(shaped, "shape", None) != row.shape:
                raise ValueError(
                    f"A logits processor must return logits of shape {row.shape} but "
                    f"{processor!r} returned {getattr(shaped, 'shape', shaped)}."
                )
            row = shaped
        return row

    def _draw(self, row):
        """The sampler's token, -1 when the row has none to give."""
        total = mx.logsumexp(row, axis=-1, keepdims=True)
        token = self.sampler(row - total).reshape(1).astype(mx.int32)
        return mx.where(mx.isfinite(total[0]), token, -1)

    @staticmethod
    def _seen(history, drafts, i):
        if not i:
            return history
        return mx.concatenate([history, drafts.tokens[0, :i].astype(history.dtype)])

    @staticmethod
    def _slice(drafts, start, stop):
        if drafts is None:
            return None
        return Drafts(
            *(None if x is None else x[:, start:stop] for x in drafts[:3]),
        )

    def _coins(self, coins, start, stop):
        """Coins of the slots ``start`` to ``stop`` and the final draw."""
        if coins is None:
            return mx.zeros((1, stop - start + 2))
        if self.seed is not None:
            return coins + start
        return mx.concatenate([coins[:, start:stop], coins[:, -2:]], axis=1)


class HostSide:
    """The part of the host in the next tokens of a stream.

    A ``width`` is that of the next block, in tokens.

    Args:
        shaper (RowShaper, optional): Of its processors, its sampler or a bias.
        controller (Controller, optional): Forces or masks tokens.
        vocab_size (int): Of the model.

    ``always`` is whether every block needs the processors or the sampler, ``masked``
    whether the controller masked tokens at the last ``begin``, and ``places`` whether
    forced ones may then stand in place of drafts.
    """

    def __init__(
        self, shaper: RowShaper | None, controller: Controller | None, vocab_size: int
    ):
        self.shaper, self.controller = shaper, controller
        self.vocab_size = vocab_size
        self.always = shaper is not None and shaper.always
        self.masked = self.places = False

    def begin(self) -> None:
        """Rounds or plain steps begin."""
        self.masked = self.masks
        self.places = self.masked and not self.always

    @property
    def masks(self) -> bool:
        """Whether the controller masks the next token."""
        return getattr(self.controller, "masks", False)

    @property
    def free(self) -> float:
        """How many of the next tokens are certainly the model's own choice."""
        return math.inf if self.controller is None else self.controller.horizon()

    def decides(self, width: int) -> bool:
        """Whether the next block needs the host's processors, sampler or bias."""
        if self.shaper is None:
            return False
        return self.always or self.free < width

    def has_part(self, width: int) -> bool:
        """Whether it decides, or makes masks for the next block."""
        return self.masked or (self.shaper is not None and self.decides(width))

    def due(self, width: int) -> Sequence[int]:
        """The forced tokens that are worth a forward of their own."""
        if self.controller is None:
            return ()
        forced = self.controller.forced()
        if not self.masks:
            return forced
        # A short text is given to the rounds in place of drafts, which need not end;
        # where the host decides, masks alone force it: a processor sees every row.
        # But one that cannot be is an error behind its last good token.
        given = self.always or len(forced) <= 2 * width
        possible = all(is_token(token, self.vocab_size) for token in forced)
        return () if given and possible else forced

    def given(self, depth: int) -> list[int]:
        """The forced tokens that stand in place of drafts of the next round."""
        if not self.places:
            return []
        forced = self.controller.forced()[:depth]
        return [check_forced(token, self.vocab_size) for token in forced]

    def turned(self, width: int) -> bool:
        """Whether the controller forces a token, or begins or ends to mask them."""
        return self.masks != self.masked or bool(self.due(width))

    def block_masks(self, drafts: Sequence[int]) -> np.ndarray:
        """As the function of this name."""
        return block_masks(self.controller, drafts, self.vocab_size)

    def decide(
        self, history: mx.array, logits: mx.array, drafts: Drafts, coins
    ) -> tuple[Decision, int]:
        """What it chooses of a block, and how many tokens were drafted; as
        ``RowShaper.decide``."""
        decision = self.shaper.decide(history, logits, drafts, coins, self.free)
        drafted = drafts.tokens.shape[1]
        return decision, drafted if drafts.lengths is None else drafts.lengths.item()
